"""What stands in for cuDNN's recurrences on a CPU: it takes and gives what they do."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pslayers import torch_api
from pslayers.functional import cudnn_gates

KERNELS = [torch_api.rnn_relu, torch_api.rnn_tanh, torch_api.lstm, torch_api.gru]


class StandIn:
    """cuDNN's recurrences by torch's of the device at hand; its memory of a call is only a number."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[list[Tensor], tuple[Tensor, ...]]] = {}
        self.numbers = itertools.count()

    def run(self, x: Tensor, weights: Any, stride: int, flat: Any, h: Tensor, c: Any, *options: Any) -> Any:
        mode, _, _, layers, _, dropout, train, two, sizes, _ = options
        assert stride in (2, 4) and flat is None and all(t.is_contiguous() for t in (x, h, *weights))
        given = [t.detach().requires_grad_() for t in (x, h, c) if t is not None]
        hx = given[1] if c is None else given[1:]
        where = [torch.tensor(sizes, device="cpu")] if sizes else []
        with torch.enable_grad():
            made = KERNELS[mode](
                given[0], *where, hx, list(weights), stride == 4, layers, dropout, train, two,
                *([] if sizes else [False]),
            )  # fmt: skip
        number = next(self.numbers)
        self.calls[number] = given, made
        kept = torch.tensor([number]), torch.zeros(1, dtype=x.dtype)
        return *(t.detach() for t in made), *([] if c is not None else [x.new_empty(0)]), *kept

    def backward(self, like: Tensor, weights: Any, stride: int, *args: Any) -> Any:
        _, _, _, _, *grads = args[:7]
        reserve, mask = args[-2:]
        given, made = self.calls[int(reserve)]
        assert like.shape == given[0].shape and mask == [True, True, len(given) == 3, False]
        pairs = [(t, g) for t, g in zip(made, grads, strict=False) if g is not None]
        outputs, arrived = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, given, arrived, retain_graph=True)
        return *found, *([] if len(given) == 3 else [torch.zeros(0)]), []


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Have recurrences run by it; on a GPU by the kernel itself."""
    if not torch.empty(0).is_cuda:
        kernel = StandIn()
        patch.setattr(torch_api, "cudnn_rnn", kernel.run)
        patch.setattr(torch_api, "cudnn_rnn_backward", kernel.backward)
        patch.setattr(
            cudnn_gates, "had_of", lambda x, states, weights: "hr" not in weights[0] and x.numel() > 0
        )
