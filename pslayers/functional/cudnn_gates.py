"""The gradients of a recurrence's gates from cuDNN, torch's kernel for GPUs, which walks time in one call: a
walk of our own is some calls for each step, and each costs as much as the kernel takes for several.

It gives gradients of its inputs. So beside x it gets zeros, which a unit matrix among the weights adds to the
gates of each direction: their gradients are those of the gates (direct derivation).

Indices as in cells.py; N rows, I and H input and hidden features, D directions, G = `blocks` * H.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import torch_api
from .kept_gates import Weights
from .sequences import Steps

if TYPE_CHECKING:
    from .cells import Cell

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # torch's numbers


def had_of(x: Tensor, states: Sequence[Tensor], weights: Weights) -> bool:
    """Whether `run` may take the place of torch's own call. Types that torch refuses are left to it."""
    if not x.is_cuda or "hr" in weights[0] or not x.numel() or torch_api.watched():
        return False
    given = {t.dtype for t in (x, *states, *(t for w in weights for t in w.values()))}
    if len(given) > 1 and not torch.is_autocast_enabled(x.device.type):
        return False
    return torch.version.hip is None and bool(torch.backends.cudnn.is_acceptable(x))


def run(
    cell: "Cell", x: Tensor, steps: Steps, states: Sequence[Tensor], weights: Weights
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """All steps, from states (D, N, H): (y, *final state), and what `gradients` needs of them."""
    kind = x.device.type
    cast = x.dtype
    if torch.is_autocast_enabled(kind) and cast != torch.float64:  # as torch's own are cast
        cast = torch.get_autocast_dtype(kind)
    x, h, *c = (t.to(cast).contiguous() for t in (x, *states))
    width, given = cell.blocks * h.shape[-1], []
    for d, (w_ih, *others) in enumerate(list(w.values()) for w in weights):
        unit = w_ih.new_zeros(width, len(weights) * width)
        unit[:, d * width : (d + 1) * width].fill_diagonal_(1)
        given += [w.to(cast).contiguous() for w in (torch.cat([w_ih, unit], 1), *others)]
    x = torch.cat([x, x.new_zeros(*x.shape[:-1], len(weights) * width)], -1)
    with torch_api.without_autocast():
        y, *final, reserve, flat = torch_api.cudnn_rnn(
            *(x, given, len(weights[0]), None, h, c[0] if c else None), *_options(cell, steps, h)
        )
    return (y, *final[: cell.states]), [reserve, flat]


def gradients(
    cell: "Cell",
    steps: Steps,
    states: Sequence[Tensor],
    y: Tensor,
    kept: Sequence[Tensor],
    wide: int,
    grads: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of x (T, N, I), of the gates (T, N, D * G), as sequences lie, and of the initial states;
    `wide` is I, `grads` are those of what `run` has returned, or None.
    """
    (reserve, flat), (h, *c) = kept, [s.to(y.dtype).contiguous() for s in states]
    like = y.new_empty(*y.shape[:-1], wide + len(h) * cell.blocks * h.shape[-1])  # of x and zeros, not read
    if all(g is None for g in grads):
        grads = torch.zeros_like(y), *grads[1:]
    gy, gh, *gc = (None if g is None else g.to(y.dtype).contiguous() for g in grads)
    none = [] if c else [None]  # for what only an LSTM has
    gx, *g_first, _ = torch_api.cudnn_rnn_backward(
        *(like, [flat], 2, flat, h, *c, *none, y, gy, gh, *gc, *none),
        *(*_options(cell, steps, h), reserve, [True, True, bool(c), False]),
    )
    return gx[..., :wide], gx[..., wide:], g_first[: cell.states]


def _options(cell: "Cell", steps: Steps, h: Tensor) -> tuple[Any, ...]:
    sizes = [] if steps.batch_sizes is None else steps.batch_sizes.tolist()
    # no projection, one layer, time first, without dropout, for training
    return MODES[cell.name], h.shape[-1], 0, 1, False, 0.0, True, len(h) == 2, sizes, None
