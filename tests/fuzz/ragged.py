"""Ragged batches: rows that belong to random samples, in models of the other kinds and in such as only rows
of samples make sense for; and the same with a place where samples meet.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.core.trees import tensors_in

from . import layers, models, steps
from .draw import Config, Draw, losses_of
from .live import InvalidError, Live, WrongError, assert_near, is_random, plainly, without_checkpoints
from .models import Block, D, parameter


def pooled(rows: Tensor, ids: Tensor, size: int, how: str = "sum") -> Tensor:
    """(size, ...), of rows; zeros for a sample without any."""
    to = ids.view(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
    return rows.new_zeros(size, *rows.shape[1:]).scatter_reduce(0, to, rows, how, include_self=how == "sum")


def flat(t: Tensor, dim: int = 0) -> Tensor:
    """(rows, values), also of no rows."""
    t = t.movedim(dim, 0)
    return t.reshape(len(t), math.prod(t.shape[1:]))


MOVING = ("sorted", "masked", "each sample")  # what one batch tells of rows says nothing of the next
WAYS: dict[str, Callable[..., Tensor]] = {
    # m, rows h, ids, edges a -> b, and how many samples
    "sorted": lambda m, h, ids, a, b, n: m.fc(h[(o := h.detach()[:, 0].argsort())])[o.argsort()] + m.w,
    "masked": lambda m, h, ids, a, b, n: h.index_put((k := h.detach()[:, 0] > 0,), m.fc(h[k]) * m.w),
    "each sample": lambda m, h, ids, a, b, n: sum(
        (h.index_put((ids == i,), m.fc(h[ids == i])) for i in range(n)), start=h
    ),
    "turned": lambda m, h, ids, a, b, n: h * m.fc(h)[turned(ids)] * m.w,
    "edges": lambda m, h, ids, a, b, n: h.index_add(0, b, m.fc(h)[a]) * m.w,
    "pairs": lambda m, h, ids, a, b, n: h.index_add(0, b, m.two(torch.cat([h[a], h[b]], 1)).tanh()),
    "edge scale": lambda m, h, ids, a, b, n: m.fc(h).index_add(0, b, h[a] * m.w.tanh() + m.w[0]),
    "edge einsum": lambda m, h, ids, a, b, n: h.index_add(0, b, torch.einsum("ef,fg->eg", h[a], m.matrix)),
    "edge max": lambda m, h, ids, a, b, n: h + pooled(m.fc(h)[a], b, len(h), "amax") * m.w,
    "edge mean": lambda m, h, ids, a, b, n: h + pooled(m.fc(h)[a], b, len(h), "mean"),
    "tied": lambda m, h, ids, a, b, n: m.fc(m.fc(h).tanh()).index_add(0, b, m.fc(h[a])) + m.fc.weight.sum(0),
    "softmax": lambda m, h, ids, a, b, n: h * ((e := m.fc(h)[:, :1].exp()) / pooled(e, ids, n)[ids]) + m.w,
    "pool": lambda m, h, ids, a, b, n: m.two(torch.cat([h, (pooled(h, ids, n) * m.w)[ids]], 1)),
    "max": lambda m, h, ids, a, b, n: h + m.fc(pooled(h, ids, n, "amax"))[ids].tanh() * m.w,
    "norm": lambda m, h, ids, a, b, n: m.fc(
        (c := h - pooled(h, ids, n, "mean")[ids]) * (pooled(c * c, ids, n, "mean") + 0.1).rsqrt()[ids]
    ),
    "by hand": lambda m, h, ids, a, b, n: (
        h + ((m.fc(h) @ m.matrix @ h.T).masked_fill(apart(ids), -math.inf).softmax(1) @ h) * m.w
    ),
    "attention": lambda m, h, ids, a, b, n: m.net(x := h[None], x, x, attn_mask=apart(ids))[0][0] + h,
    "cross": lambda m, h, ids, a, b, n: m.net(h[None], x := m.fc(h)[None], x, attn_mask=apart(ids))[0][0] + h,
    "encoder": lambda m, h, ids, a, b, n: m.net(h[None], src_mask=apart(ids))[0],
    "padded": lambda m, h, ids, a, b, n: m.fc(padded(h, ids, n)).cumsum(1)[ids, place(ids)],
    "lstm": lambda m, h, ids, a, b, n: m.net(padded(h, ids, n))[0][ids, place(ids)],
}


def apart(ids: Tensor) -> Tensor:
    return ids[:, None] != ids


def place(ids: Tensor) -> Tensor:
    """Of each row in its sample."""
    return (~apart(ids)).tril().sum(1) - 1


def turned(ids: Tensor) -> Tensor:
    """Of each row, the one that is as far from the end of its sample as this one is from the beginning."""
    others = len(ids) - 1 - ids.flip(0).argsort(stable=True)
    return torch.empty_like(ids).index_copy(0, ids.argsort(stable=True), others)


def padded(h: Tensor, ids: Tensor, n: int) -> Tensor:
    return h.new_zeros(n, max(len(h), 1), h.shape[1]).index_put((ids, place(ids)), h)


class Within(Block):
    """Rows meet rows of their sample, go along edges, or change places."""

    def __init__(self, way: str, width: int) -> None:
        super().__init__(way=way, width=width)
        self.fc, self.two, self.w = nn.Linear(width, width), nn.Linear(2 * width, width), parameter(width)
        self.matrix = parameter(width, width)
        self.net: nn.Module = {
            "encoder": lambda: nn.TransformerEncoderLayer(width, 1, 3, 0.0, batch_first=True),
            "lstm": lambda: nn.LSTM(width, width, batch_first=True),
        }.get(way, lambda: nn.MultiheadAttention(width, 1, batch_first=True))()

    @classmethod
    def draw(cls, draw: Draw, width: int = D) -> nn.Module:
        return cls(draw.pick(*WAYS), width)

    def forward(self, h: Tensor, ids: Tensor, edges: Tensor, size: int) -> Tensor:
        return WAYS[self.way](self, h, ids, *edges, size)


class Crossing(Block):
    """A place where samples meet, if it is on."""

    WAYS = {
        "mean": lambda h, i, j: h - h.mean(0),
        "edge": lambda h, i, j: h.index_add(0, i, h[j]),
        "sum": lambda h, i, j: h * h.sum().tanh(),
        "attention": lambda h, i, j: h + (h @ h.T).softmax(1) @ h,
        "cumulated": lambda h, i, j: h.cumsum(0),
        "flipped": lambda h, i, j: h + h.flip(0),
        "norm": lambda h, i, j: h / (1 + h.norm()),
        "layer norm": lambda h, i, j: nn.functional.layer_norm(h, h.shape),
    }

    def __init__(self, way: str) -> None:
        super().__init__(way=way)
        self.fc, self.on = nn.Linear(D, D), False

    def forward(self, h: Tensor, ids: Tensor, *_: Any) -> Tensor:
        h = self.fc(h)
        if not self.on:
            return h
        return self.WAYS[self.way](h, ids.argmin()[None], ids.argmax()[None])


class Model(Block):
    """A module among rows that meet."""

    def __init__(
        self, base: Config, before: list[nn.Module], after: list[nn.Module], width: int, end: str
    ) -> None:
        super().__init__(dims=base.dims, outputs=base.outputs, end=end)
        self.base, self.before, self.after = base.model, nn.ModuleList(before), nn.ModuleList(after)
        self.into, self.head = nn.Linear(width, D), nn.Linear(D, 2)

    def forward(self, ids: Tensor, edges: Tensor, size: int, x: Any, *others: Any) -> dict[str, Tensor]:
        if self.before:
            rows = x.movedim(self.dims[0], 0)
            h = flat(rows)
            for m in self.before:
                h = m(h, ids, edges, size)
            x = h.view(rows.shape).movedim(0, self.dims[0])
        h = self.into(joined(self.base(x, *others), self.outputs))
        for m in self.after:
            h = m(h, ids, edges, size) if isinstance(m, Within | Crossing) else m(h)
        found = {} if self.end in ("sum", "amax") else {"rows": h}
        if self.end != "rows":
            found["samples"] = self.head(pooled(h, ids, size, "amax" if self.end == "amax" else "sum"))
        return found


def joined(output: Any, dims: Any) -> Tensor:
    """(rows, values): everything floating in an output."""
    found = [t for t in tensors_in([output]) if t.is_floating_point()]
    return torch.cat([flat(t, dims[min(k, len(dims) - 1)]) for k, t in enumerate(found)], 1)


@dataclass
class Ragged(Config):
    """With the ids and edges of the last batch drawn."""

    draw: Draw = field(default_factory=lambda: Draw(0))
    base: Config | None = None  # where its model is the whole
    tells: tuple[int, ...] = (0,)  # of rows in these dims
    of_edges: bool = False
    verify: bool = True
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    edges: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.long))
    size: int = 0
    says: str | None = None

    def begin(self, n: int) -> None:
        """Draw whose the rows of a batch of n samples are, and edges within samples."""
        draw = self.draw
        end = getattr(self.model, "end", "rows")
        rows = draw.pick(n, *(draw.randint(1, 7) for _ in range(5))) if n else 0
        while rows and ((end == "both" and rows == n) or (1 in self.tells and rows in (2, D))):
            rows += 1  # nothing could tell them from samples, or from another dim
        self.size, self.ids = n, draw.ids(max(n, 1), rows)
        if draw.maybe(0.4):
            self.ids = self.ids.sort().values
        others = [(self.ids == one).nonzero().flatten().tolist() for one in self.ids]
        starts = draw.choices(range(rows), k=draw.randint(0, 12)) if rows else []
        ends = [(a, draw.pick(*others[a])) for a in starts]
        self.edges = torch.tensor(ends, dtype=torch.long).view(-1, 2).T
        self.says = None
        if end != "both" and (rows == n or self.edges.shape[1] == n or draw.maybe(0.2)):
            self.says = "samples" if end in ("sum", "amax") else "rows"

    @contextmanager
    def told(self) -> Iterator[None]:
        known = [(self.ids, dim) for dim in self.tells]
        known += [(self.ids[self.edges[0]], 0)] if self.of_edges else []
        with ExitStack() as stack:
            for ids, dim in known:
                says = self.says if self.says == "samples" or ids is self.ids else None
                stack.enter_context(ps.sample_ids(ids, self.size, dim, outputs=says, verify=self.verify))
            yield

    def losses(self, output: Any) -> Tensor:
        if self.base is not None:
            return pooled(self.base.losses(output), self.ids, self.size)
        total = losses_of(output["samples"]) if "samples" in output else 0
        return total + (pooled(losses_of(output["rows"]), self.ids, self.size) if "rows" in output else 0)


class RaggedLive(Live):
    """Every batch has other ids."""

    config: Ragged

    def around(self) -> Any:
        return self.config.told()

    def inputs(self, n: int) -> tuple[Any, ...]:
        self.config.begin(n)
        return super().inputs(n)

    def loop(self, inputs: Any, n: int, dtype: torch.dtype, beside: bool = False) -> Any:
        return super().loop(inputs, n, dtype, beside=True)  # each sample's loss in the whole batch


def plain_base(draw: Draw) -> Config:
    """One of another kind, that takes and returns tensors with rows, and no loss."""
    while True:
        made = draw.pick(layers, models).build(draw)
        packed = any(hasattr(t, "batch_sizes") for t in made.inputs(2))
        if made.loss is None and not packed:
            break
    for m in made.model.modules():
        if isinstance(m, models.Checkpointed):
            m.how = "not reentrant"  # the others are refused
    return made


def build(draw: Draw) -> tuple[Ragged, bool]:
    """A model, and whether samples are to meet in it."""
    made, leaking = plain_base(draw), draw.maybe(0.2)
    dims = {d for d in (*made.dims, *made.outputs) if d is not None}
    options = made.options | ({"loss_reduction": "sum"} if draw.maybe(0.3) else {})
    config = Ragged(
        "ragged", made.model, made.inputs, made.dims, options=options, dtype=made.dtype, draw=draw,
        of_edges=draw.maybe(0.4), verify=draw.maybe(0.7), notes=made.notes, tells=tuple(sorted(dims)),
    )  # fmt: skip
    if not leaking and draw.maybe(0.3):
        config.base, config.inputs = made, lambda n: made.inputs(len(config.ids))
        config.of_edges = False
    else:
        x = made.inputs(2)[0]
        with plainly():
            width = joined(copy.deepcopy(made.model).double()(*made.inputs(2)), made.outputs).shape[1]
        own, before, after = x.numel() // 2, [], []
        if x.is_floating_point() and own <= 16 and draw.maybe(0.4):
            before = [Within.draw(draw, own)]
        for _ in range(draw.randint(0 if before or leaking else 1, 3)):
            after.append(Within.draw(draw) if draw.maybe(0.7) else models.rows(draw))
        if leaking:
            after.insert(draw.randint(0, len(after)), Crossing(draw.pick(*Crossing.WAYS)))
        config.model = Model(made, before, after, width, draw.pick("rows", "sum", "amax", "both"))
        config.options.pop("batch_first", None)
        config.inputs = lambda n: (config.ids, config.edges, config.size, *made.inputs(len(config.ids)))
        config.tells = tuple({0} | dims)
    for m in config.model.modules():
        if isinstance(m, models.Picked | models.Moved) or getattr(m, "way", "") in MOVING:
            config.verify = True
    if config.base is None:
        config.of_edges |= not config.verify
        config.dtype = torch.float64 if leaking else made.dtype
    config.notes.append(f"{config.verify=}, {config.of_edges=}, {config.tells=}")
    return config, leaking


def clipped(live: Live, draw: Draw) -> None:
    """Norms, and sums of clipped rows."""
    plain, ours, expected = live.losses(n := steps.size(draw) or 2)
    with plainly():
        plain.backward()
    if live.dtype != torch.float64:
        ours.backward()
        return
    live.ours.zero_grad()
    with ps.clipping(live.ours, bound := draw.pick(0.01, 0.5, 3.0)) as clip:
        ours.backward()
    norms = torch.cat([r.reshape(n, r[0].numel()) for r in expected.values()], 1).norm(dim=1)
    assert_near("the norms", clip.norms, norms)
    weights = (bound / norms).clamp(max=1) / (n if live.config.reduction == "mean" else 1)
    for name, rows in expected.items():
        total, found = torch.tensordot(weights, rows, 1), live.ours.get_parameter(name).grad
        assert_near(f"the clipped `{name}`", torch.zeros_like(total) if found is None else found, total)
    for net in live.both:
        net.zero_grad()


def checked(live: Live, draw: Draw) -> None:
    """`check_model` agrees, where a step is not refused."""
    live.train(2)
    inputs = live.possible(draw.randint(2, 3))
    if live.dtype == torch.float64 and live.config.verify and not is_random(live.plain):
        with live.around():
            answer = ps.check_model(live.ours, *inputs)
        if not answer and "samples interact (" not in str(answer):  # a refusal, as of positions in a table
            raise WrongError(f"check_model: {answer}")


NAMES = (
    "batch", "streamed", "factored", "one_call", "append", "add", "twice", "waiting", "no_grad", "unrecorded",
    "mode", "zero_grad", "freeze", "dropped", "copied", "loaded", "hooked", "in_a_thread",
    "to_chosen",
)  # fmt: skip
STEPS = {name: steps.STEPS[name] for name in NAMES} | {"clipped": clipped, "checked": checked}


def leak(live: Live, draw: Draw) -> None:
    """Must be refused, perhaps after a batch without."""
    if draw.maybe(0.5) and live.config.verify:
        live.train(3)
    for net in live.both:
        next(m for m in net.modules() if isinstance(m, Crossing)).on = True
    given: list[Tensor] = []
    for _ in range(9):
        inputs = live.inputs(draw.randint(2, 4))
        if len(live.config.ids.unique()) > 1:
            break
    with plainly():
        net = without_checkpoints(live.plain)
        crossing = next(m for m in net.modules() if isinstance(m, Crossing))
        crossing.fc.register_forward_hook(lambda m, args, output: given.append(output))
        losses = live.config.losses(live.seeded(net, inputs))
        found = [
            flat(torch.autograd.grad(loss, given, retain_graph=True, materialize_grads=True)[0]).abs()
            for loss in losses
        ]
    sizes = torch.stack([g.amax(1) for g in found])
    if not ((sizes > 1e-7 * sizes.max()).sum(0) > 1).any():
        raise InvalidError("no row is in two samples' losses")
    live.config.reduced(live.seeded(live.ours, inputs)).backward()
    raise WrongError("samples interact, and were let pass")
