"""Models whose samples interact: refused by name, or reported by check_model where autograd does not see
it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .draw import Config, Draw
from .models import Block, D, choose, sequence

SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda h: h - h.mean(0),
    "softmax": lambda h: h.softmax(0) * 3,
    "max": lambda h: h + h.amax(0),
    "sum": lambda h: h + h.sum(0, keepdim=True),
    "pairs": lambda h: h + torch.einsum("btd,ctd->bc", h, h).mean(1)[:, None, None],
    "attention over the batch": lambda h: (
        h + (torch.softmax(h.flatten(1) @ h.flatten(1).T, -1) @ h.flatten(1)).view_as(h)
    ),
    "rolled": lambda h: h.roll(1, 0),
    "shifted": lambda h: torch.cat([h[1:], h[:1]]),
    "flipped": lambda h: h.flip(0),
    "first": lambda h: h * h[:1],
    "sorted": lambda h: h.sort(0).values,
    "cumulated": lambda h: h.cumsum(0),
    "standardised": lambda h: h / (h.std(0, unbiased=False) + 1),
    "normalised": lambda h: F.normalize(h, dim=0),
    "norm of all": lambda h: h / h.norm(),
    "mean of all": lambda h: h * h.mean(),
    "norm over the batch": lambda h: F.layer_norm(h, h.shape),
    "pairs as rows": lambda h: h + (h[:, None] - h[None]).square().sum((1, 2, 3))[:, None, None],
    "batch norm": lambda h: F.batch_norm(h.flatten(0, 1), None, None, training=True).view_as(h),
}
UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "detached mean": lambda h: h - h.detach().mean(0),
    "a number": lambda h: h / (1 + h.abs().max().item()),
    "a choice": lambda h: h * (2 if (h.detach()[0] > h.detach()[-1]).float().mean() > 0.5 else 1),
    "a count": lambda h: h * (h.detach() > 0).sum() / 10,
    "under no_grad": lambda h: h + _ungraded(h),
}


def _ungraded(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h.sum(0)


class Leak(Block):
    """A module without or with parameters in which samples meet."""

    def __init__(self, way: str, inside: bool) -> None:
        super().__init__(way=way, inside=inside)
        self.fc = nn.Linear(D, D) if inside else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        return (SEEN | UNSEEN)[self.way](self.fc(h))


class Across(Block):
    """A layer of torch that is given the batch in the wrong dim, or that mixes samples by itself."""

    def __init__(self, way: str) -> None:
        super().__init__(way=way)
        layers: dict[str, Callable[[], nn.Module]] = {
            "attention": lambda: nn.MultiheadAttention(D, 2),
            "lstm": lambda: nn.LSTM(D, D),
            "gru": lambda: nn.GRU(D, D),
            "transformer": lambda: nn.TransformerEncoderLayer(D, 2, 3, dropout=0.0),
            "conv": lambda: nn.Conv1d(D, D, 3, padding=1),
            "batch norm": lambda: nn.BatchNorm1d(D),
        }
        self.net: nn.Module = layers[way]()

    def forward(self, h: Tensor) -> Tensor:
        if self.way == "attention":
            return self.net(h, h, h)[0]
        if self.way == "conv":
            return self.net(h.permute(1, 2, 0)).permute(2, 0, 1)
        if self.way == "batch norm":
            return self.net(h.transpose(1, 2)).transpose(1, 2)
        out = self.net(h)
        return out if isinstance(out, Tensor) else out[0]


def gradients_cross(net: nn.Module, inputs: tuple[Any, ...], config: Config) -> bool:
    """Whether a sample's loss has a gradient at what another's first layer returns: behind a dead unit or a
    saturated softmax none has.
    """
    given: list[Tensor] = []
    handle = net.get_submodule("embed").register_forward_hook(lambda m, args, output: given.append(output))
    torch.manual_seed(0)
    losses = config.losses(net(*inputs))
    handle.remove()
    own, cross = 0.0, 0.0
    for i, loss in enumerate(losses):
        (grad,) = torch.autograd.grad(loss, given[:1], retain_graph=True, materialize_grads=True)
        grad = grad if config.options.get("batch_first", True) else grad.movedim(1, 0)
        sizes = grad.abs().unflatten(0, (len(losses), -1)).flatten(1).amax(1).tolist()
        own, cross = max(own, sizes.pop(i)), max(cross, *sizes)
    return cross > 1e-9 * own


def build(draw: Draw) -> tuple[Config, bool]:
    """A model with a leak between its blocks, and whether autograd sees it."""
    seen = draw.maybe(0.75)
    way = draw.pick(*(SEEN if seen else UNSEEN))

    def blocks(draw: Draw) -> Iterator[nn.Module]:
        for _ in range(draw.randint(0, 2)):
            yield sequence(draw)
        across = seen and draw.maybe(0.3)
        yield (
            Across(draw.pick("attention", "lstm", "gru", "transformer", "conv", "batch norm"))
            if across
            else Leak(way, draw.maybe())
        )
        for _ in range(draw.randint(0, 1)):
            yield sequence(draw)

    made = choose(draw, blocks)
    made.kind = "leak"
    return made, seen
