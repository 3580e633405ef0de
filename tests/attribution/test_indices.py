"""Indices that lie outside are an error before they are used, by what each function is given; against what
torch itself says of them on a CPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pslayers.attribution import indices

PICKING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index": lambda t, i: t[i],
    "index of a dim": lambda t, i: t[:, i[0]],
    "index of the last dim": lambda t, i: t[..., i],
    "new dims and numbers": lambda t, i: t[None, 0, i, None],
    "beside a mask": lambda t, i: t[torch.tensor([True, False, False]), i[:1, :1]],
    "after a mask": lambda t, i: t[torch.ones(3, 4, dtype=torch.bool)][i],
    "of two dims": lambda t, i: t[i, i],
    "assigned": lambda t, i: t.__setitem__((slice(None), i), 1.0),
    "put at": lambda t, i: t.index_put((i, i), torch.zeros(2, 2)),
    "put at in place": lambda t, i: t.index_put_((i,), torch.zeros(4)),
    "index_select": lambda t, i: t.index_select(1, i[0]),
    "by keywords": lambda t, i: torch.index_select(input=t, index=i[0], dim=-1),
    "index_add": lambda t, i: t.index_add(0, i[0], torch.ones(2, 4)),
    "index_copy in place": lambda t, i: t.index_copy_(1, i[0], torch.ones(3, 2)),
    "index_fill": lambda t, i: t.index_fill(0, i[0], 2.0),
    "gather": lambda t, i: t.gather(0, i),
    "gather of dim 1": lambda t, i: torch.gather(t, 1, i),
    "scatter": lambda t, i: t.scatter(1, i, torch.ones(2, 2)),
    "scatter_add": lambda t, i: t.scatter_add_(0, i, torch.ones(2, 2)),
    "scatter_reduce": lambda t, i: t.scatter_reduce(0, i, torch.ones(2, 2), "amax"),
    "take": lambda t, i: t.take(i),
    "take_along_dim": lambda t, i: t[:2].take_along_dim(i, 1),
    "table": lambda t, i: F.embedding(i, t),
    "table by keywords": lambda t, i: F.embedding(input=i, weight=t),
    "bags": lambda t, i: F.embedding_bag(i, t),
    "one of so many": lambda t, i: F.one_hot(i, 3),
}


class Looked(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices.check_indices(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 11, 12, -1, -3, -4, -5, -13])
@pytest.mark.parametrize("how", PICKING)
def test_what_torch_refuses(how: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        return PICKING[how](torch.randn(3, 4, device="cpu"), torch.tensor([[0, index], [1, 0]], device="cpu"))

    with torch.device("cpu"):
        try:
            run()
        except (IndexError, RuntimeError):
            refused = True
        else:
            refused = False
        monkeypatch.setattr(indices, "_is_fatal", lambda index: True)
        with Looked():
            if not refused:
                run()
                return
            with pytest.raises(IndexError, match="is given indices from"):
                run()


def test_inside_of_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "_is_fatal", lambda index: True)
    table, ids = torch.randn(3, 4), torch.tensor([[0, 2], [1, 0]])
    with Looked():
        found = torch.func.vmap(lambda i: table[i])(ids)
        assert torch.equal(found, table[ids])
        with pytest.raises(IndexError, match="from 1 to 3, of 3"):
            torch.func.vmap(lambda i: table[i])(ids + 1)
