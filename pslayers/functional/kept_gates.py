"""The gates of an LSTM that torch's kernel for CPUs, oneDNN's, has kept for its own backward pass.

Nobody promises where they lie, so they are taken only from where an example has shown them, and the walk back
(cells.py) believes them only if they give the output; else it computes them again.

Indices as in cells.py; T time steps, N rows, I and H input and hidden features, D directions.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.products import has_onednn

Weights = Sequence[dict[str, Tensor]]  # of each direction, in torch's order

MODE = 2  # of oneDNN's recurrences, an LSTM
CHUNK_BYTES = 4 << 20  # of gates that one call of the kernel keeps, and four times that


def had_of(x: Tensor, states: Sequence[Tensor], weights: Weights) -> bool:
    """Whether `run` may take the place of torch's own call: x (T, N, I), states h, c (D, N, H), of shapes
    that fit.

    Types that torch refuses are left to it: the kernel behind it looks at none.
    """
    if "hr" in weights[0] or not (has_onednn(x) and x.numel()):
        return False
    if torch_api.watched() or not _found_in_an_example():
        return False
    given = [*states, *(t for w in weights for t in w.values())]
    return all((t.dtype, t.device) == (x.dtype, x.device) for t in given)


def run(
    x: Tensor, h: Tensor, c: Tensor, weights: dict[str, Tensor], reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One direction as torch runs it, from h and c (1, N, H): (y, h, c, gates (T, N, 4 H), if any).

    What the kernel keeps is four times as much: some steps at a time, it takes little.
    """
    (time, rows, _), features, biases = x.shape, h.shape[-1], "b_ih" in weights
    none = [] if biases else [x.new_zeros(4 * features)] * 2
    # of memory without gaps, as the kernel takes for granted
    x, h, c, *flat = (t.detach().contiguous() for t in (x, h, c, *weights.values(), *none))
    options = reverse, list[int](), MODE, features, 1, biases, False, False, True
    y, gates = x.new_empty(time, rows, features), x.new_empty(time, rows, 4 * features)
    steps = max(CHUNK_BYTES // (4 * rows * _stride(features)), 1)
    starts = range(0, time, steps)
    found = True
    for start in reversed(starts) if reverse else starts:
        some = slice(start, start + steps)
        with torch.enable_grad():  # else it keeps nothing
            y[some], h, c, workspace = torch_api.onednn_lstm(x[some], *flat, h, c, *options)
        kept = _in_workspace(workspace, len(y[some]), rows, features)
        if kept is not None:
            gates[some] = kept.flip(0) if reverse else kept
        found = found and kept is not None
        del workspace, kept  # before the next one's
    return y, h, c, gates if found else None


def _stride(features: int) -> int:
    """How far apart the gates of two rows lie, where oneDNN's releases so far put them: each row's begin at a
    multiple of 64 bytes, and not of 1024.
    """
    stride = -(-4 * features // 16) * 16
    return stride + 16 if stride % 256 == 0 else stride


def _in_workspace(workspace: Tensor | None, time: int, rows: int, features: int) -> Tensor | None:
    """The gates at its beginning, in the order in which the kernel walks."""
    size = 4 * time * rows * _stride(features)
    if workspace is None or workspace.dtype != torch.uint8 or workspace.numel() < size:
        return None
    values = workspace.view(-1)[:size].view(torch.float32)
    return values.view(time, rows, _stride(features))[..., : 4 * features]


@functools.cache
def _found_in_an_example() -> bool:
    """Whether they are where we look for them, in the order that we take them for."""
    if torch_api.onednn_lstm is None:
        return False
    like: Any = {"dtype": torch.float32, "device": "cpu"}
    shapes = (2, 4, 5), (12, 5), (12, 3)
    x, w_ih, w_hh = (torch.arange(1, math.prod(s) + 1, **like).sin_().view(s) for s in shapes)
    h = c = x[:1, :, :3] / 2
    try:
        y, *_, found = run(x, h, c, {"ih": w_ih, "hh": w_hh}, False)
    except (RuntimeError, TypeError):
        return False
    i, f, g, o = (x @ w_ih.t() + torch.cat([h, y[:-1]]) @ w_hh.t()).chunk(4, -1)
    gates = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], -1)
    return found is not None and close(found, gates)


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether these are equal but for rounding; false of nothing but zeros, too, which would tell nothing."""
    return bool((found - expected).abs_().max() < 1e-5 * expected.abs().max())
