"""Rows that a model picks out of its batch by a mask, as in ``h[mask]``: how many there are the data say, and whose they are.

While a `Picks` mode is active, what a mask picks is tagged with the sample of each row, and torch's functions that do the same to
every row hand the tag on; what others do to rows is not guessed. A layer, or a module without a replacement, is given picked rows
as a batch: as many for each sample, filled up where one has fewer; what it returns is picked rows again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .expand import Settings, local, transforming
from .per_sample import lies_in
from .tracking import Ambiguous
from .trees import map_tensors, tensors_in


class Owners:
    """Whose the rows of a tensor are.

    Args:
        ids: (k,), the sample of each row; None where an op is not known to leave rows where they are.
        limit: the most rows that one sample can have, whatever the data.
    """

    def __init__(self, ids: Tensor | None, limit: int) -> None:
        self.ids, self.limit = ids, limit
        self.batches: dict[tuple[int, int], _Batched] = {}

    def batch(self, size: int, least: int = 1) -> "_Batched":
        """The rows as a batch of so many samples, with at least so many of each."""
        key = size, least
        if key not in self.batches:
            assert self.ids is not None
            with torch._C.DisableTorchFunction():
                self.batches[key] = _Batched(self.ids, size, least)
        return self.batches[key]

    def at(self, rows: Any, times: int = 1) -> "Owners":
        """Those of some of the rows (a slice, or their numbers), of which there are at most `times` as many."""
        return Owners(None if self.ids is None else self.ids[rows], self.limit * times)

    def same(self, other: "Owners") -> bool:
        """Whether both tell the same of every row."""
        return self is other or (self.ids is not None and other.ids is not None and torch.equal(self.ids, other.ids))

    def viewed(self, rows: int) -> "Owners":
        """Those of a view with so many rows: each is a part of a row here, or several whole ones of one sample."""
        if self.ids is None or len(self.ids) == rows:
            return self
        if len(self.ids) and rows % len(self.ids) == 0:
            times = rows // len(self.ids)
            return Owners(self.ids.repeat_interleave(times), self.limit * times)
        if rows and len(self.ids) % rows == 0:
            parts = self.ids.view(rows, -1)
            if bool((parts == parts[:, :1]).all()):
                return Owners(parts[:, 0], self.limit)
        return UNKNOWN


UNKNOWN = Owners(None, 0)


class _Batched:
    """Picked rows (k, ...) as a batch (B * n, ...), each sample's together, and back."""

    def __init__(self, ids: Tensor, size: int, least: int) -> None:
        counts = ids.bincount(minlength=size)
        self.n = max(int(counts.max()), least)
        self.rows, order = size * self.n, ids.argsort(stable=True)
        self.places = torch.empty_like(ids)
        starts = counts.cumsum(0) - counts
        self.places[order] = torch.arange(len(ids), device=ids.device) - starts[ids[order]] + ids[order] * self.n
        self.alike = len(ids) == self.rows and torch.equal(order, torch.arange(len(ids), device=ids.device))

    def into(self, t: Tensor) -> Tensor:
        if self.alike:
            return t.view_as(t)
        # what no sample has gets no gradient, if what is computed of it is finite: so it is neither zero nor constant
        shape, dtype = t.shape[1:], t.dtype if t.is_floating_point() or t.is_complex() else torch.float32
        filler = torch.linspace(0.5, 1.5, shape.numel(), device=t.device, dtype=dtype)
        filler = filler if dtype == t.dtype else torch.zeros_like(filler, dtype=t.dtype)
        return filler.view(1, *shape).repeat(self.rows, *[1] * len(shape)).index_copy(0, self.places, t)

    def back(self, t: Tensor) -> Tensor:
        return t.view_as(t) if self.alike else t.index_select(0, self.places)


class Picks(TorchFunctionMode):
    """Knows whose the rows are that masks have picked since it was entered."""

    def __init__(self, size: int, batch_first: bool) -> None:
        super().__init__()
        self.size, self.batch_first = size, batch_first
        self.tags: Any = WeakTensorKeyDictionary()
        self.known: set[int] = set()  # their ids: some are others' by now
        self.behind_one: Any = WeakTensorKeyDictionary()  # whose the rows in dim 1 are, dim 0 being one: h[None, rows]
        self.numbers: Any = WeakTensorKeyDictionary()  # of what masks have picked along a later dim: how long that is
        self.batches: Any = WeakTensorKeyDictionary()  # what modules were given for picked rows
        self.refused: set[int] = set()  # modules that were given rows of which it is not known whose they are

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        rule = _RULES.get(name, _other)
        told = isinstance(result, (Tensor, tuple, list)) and local.picks is self and not transforming()
        if told and (rule in _PICKING or self._any(args) or self._any(kwargs.values())):
            with torch._C.DisableTorchFunction(), torch.no_grad():
                rule(self, result, name, args or tuple(kwargs.values()), kwargs)
        return result

    def _any(self, values: Iterable[Any]) -> bool:
        """Whether one of them, or in one of them, may be known; never wrong where none is."""
        return any(id(v) in self.known if isinstance(v, Tensor) else isinstance(v, (tuple, list)) and self._any(v) for v in values)

    def owners(self, t: Any) -> Owners | None:
        """Whose the rows of a tensor are, if they were picked."""
        return self.tags.get(t) if isinstance(t, Tensor) and self.tags else None

    def tag(self, t: Any, owners: Owners | None) -> None:
        """Note whose the rows of a tensor are, where it can hold as many."""
        if owners is not None and isinstance(t, Tensor) and t.ndim and (owners.ids is None or len(t) == len(owners.ids)):
            self.note(self.tags, t, owners)

    def note(self, where: Any, t: Any, owners: Owners) -> None:
        """As `tag`, without a look, or in another place."""
        where[t] = owners
        self.known.add(id(t))

    def by_mask(self, mask: Tensor, of: Owners | None = None) -> Owners | None:
        """Whose rows a mask picks, of rows that are the batch's, or `of` these owners; None where its dims do not tell."""
        dim = 0 if self.batch_first or mask.ndim < 2 or of is not None else 1
        rows, n = mask.nonzero()[:, dim], mask.shape[dim]
        if local.tracker is not None and local.tracker.inner:
            local.tracker.pickers.add(local.tracker.inner[-1])
        if (of := of or self.owners(mask)) is not None:
            return of.at(rows, max(mask.numel() // max(n, 1), 1))
        if not n or n % self.size:
            return None
        ids = rows // (n // self.size) if self.batch_first or dim else rows % self.size
        return Owners(ids, mask.numel() // self.size)

    def by_numbers(self, numbers: Tensor, n: int) -> Owners | None:
        """Whose these are of `n` rows, where that can be the batch's, k a sample."""
        return Owners(numbers // (n // self.size), n) if n and n % self.size == 0 else None

    def joined(self, parts: Sequence[Tensor], ids: Tensor) -> Tensor:
        """The rows of all samples, one tensor of each, in the order that `ids` tells."""
        with torch._C.DisableTorchFunction():
            # what sorts a permutation is its inverse
            rows = torch.cat(list(parts)).index_select(0, ids.argsort(stable=True).argsort())
        self.note(self.tags, rows, Owners(ids, len(ids)))
        return rows

    def _recalled(self, picked: list[tuple[Owners, int]], tensors: list[Tensor]) -> list[Owners]:
        """Whose rows a module is given in the backward pass, by a checkpoint, perhaps without what has picked them.

        Those that it was given in the forward pass, in the same memory, or of the same number.
        """
        t = next((t for t in tensors if t.ndim and t not in self.batches), None)
        alike = [] if t is None else [(o, at) for o, at in picked if o.ids is not None and len(o.ids) == len(t)]
        found = [o for o, at in alike if t is not None and at == t.data_ptr()][-1:] or [o for o, _ in alike]
        if found:
            self.note(self.tags, t, found[0])
        return found

    def by_batch(self, op: Callable[[Tensor], Tensor], t: Tensor, owners: Owners) -> Tensor:
        """What an op on a batch, k rows a sample, gives for picked rows."""
        batch = owners.batch(self.size)
        with torch._C.DisableTorchFunction():
            return batch.back(op(batch.into(t)))

    def batched(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """((args, kwargs) with a batch in the place of picked rows, what brings an output back); None where there are none."""
        tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, Tensor)]
        found = [o for t in tensors if (o := self.owners(t)) is not None]
        settings: Settings = module._ps_state().settings
        if not found and torch._C._current_graph_task_id() != -1:
            found = self._recalled(settings.picked.get(id(module), []), tensors)
        if not found:
            return None
        settings.picks = True
        if not all(o.ids is not None and o.same(found[0]) for o in found):
            self.refused.add(id(module))
            if local.tracker is None:
                if local.batch is not None and local.batch.trackable:
                    raise Ambiguous
                raise module._ps_not_told("its rows are picked by data, and moved since")
            return None
        owners = found[0]
        picked = next(t for t in tensors if self.owners(t) is not None)
        settings.picked.setdefault(id(module), []).append((owners, picked.data_ptr()))
        # while samples are tracked, as many as there can be: a number that depends on no data
        batch = owners.batch(self.size, 1 if local.tracker is None else max(owners.limit, 1))

        def into(t: Tensor) -> Tensor:
            if self.owners(t) is None:
                return t
            with torch._C.DisableTorchFunction():
                taken = batch.into(t)
            self.batches[taken] = True
            return taken

        def back(t: Tensor) -> Tensor:
            if not t.ndim or len(t) != batch.rows:
                return t
            with torch._C.DisableTorchFunction():
                picked = batch.back(t)
            self.note(self.tags, picked, owners)
            return picked

        return map_tensors(into, (args, kwargs)), lambda output: map_tensors(back, output)


@contextmanager
def sample_by_sample() -> Iterator[None]:
    """Around what is run for one sample, which holds nobody else's rows."""
    before, local.picks = local.picks, None
    try:
        yield
    finally:
        local.picks = before


@contextmanager
def picking(size: int, settings: Settings, applies: bool = True) -> Iterator[None]:
    """A `Picks` mode around an outermost call."""
    if not applies:
        yield
        return
    before, local.picks = local.picks, Picks(size, settings.batch_first)
    try:
        with local.picks:
            yield
    finally:
        local.picks = before


# ------------------------------------------------- what functions do to rows: rule(picks, result, name, args, kwargs)
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _given(args: Args, kwargs: Kwargs, at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at and name not in kwargs else kwargs.get(name, default)


def _index(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, index = args[0], args[-1]
    parts = index if isinstance(index, tuple) and index else (index,)
    if len(parts) == 2 and parts[0] is None:
        if (owners := _indexed(picks, x, parts[1:])) is not None and owners.ids is not None and result.shape[1] == len(owners.ids):
            picks.note(picks.behind_one, result, owners)
    elif parts[0] is Ellipsis:
        _other(picks, result, name, args, kwargs)
    else:
        picks.tag(result, _indexed(picks, x, parts))


def _indexed(picks: Picks, x: Tensor, parts: tuple[Any, ...]) -> Owners | None:
    """Whose the rows are that an index picks."""
    first, of = parts[0], picks.owners(x)
    if isinstance(first, Tensor) and first.dtype in (torch.bool, torch.uint8) and first.ndim:
        return picks.by_mask(first, of)
    if of is not None and (isinstance(first, slice) or (isinstance(first, Tensor) and first.ndim == 1)):
        return of.at(first)
    if of is None and isinstance(first, Tensor) and len(x) == picks.numbers.get(first):
        return picks.by_numbers(first, len(x))  # tokens that a mask (experts, tokens) has found
    return next((o for i in parts if (o := picks.owners(i)) is not None), None)


def _index_select(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    index = _given(args, kwargs, 2, "index")
    if _given(args, kwargs, 1, "dim") in (0, -args[0].ndim):
        _index(picks, result, name, (args[0], index), {})
    else:
        _of_first(picks, result, name, args, kwargs)


def _nonzero(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    mask = args[0]
    owners = picks.by_mask(mask != 0) if mask.ndim else None
    for dim, t in enumerate(result if isinstance(result, tuple) else [result]):
        if dim and picks.batch_first:
            picks.numbers[t] = mask.shape[dim]
        picks.tag(t, owners or (picks.by_numbers(t, mask.shape[dim]) if mask.ndim and picks.batch_first else None))


def _where(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    (_rowwise if isinstance(result, Tensor) else _nonzero)(picks, result, name, args, kwargs)


def _masked_select(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, mask = torch.broadcast_tensors(args[0], _given(args, kwargs, 1, "mask"))
    picks.tag(result, picks.by_mask(mask, picks.owners(args[0]) if x.shape == args[0].shape else None))


def _cat(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    found = [picks.owners(t) for t in args[0]]
    if _given(args, kwargs, 1, "dim", 0) not in (0, -result.ndim):
        _rowwise(picks, result, name, args, kwargs)
    elif any(o is None or o.ids is None for o in found):
        picks.tag(result, UNKNOWN if any(o is not None for o in found) else None)
    else:
        picks.tag(result, Owners(torch.cat([o.ids for o in found]), sum(o.limit for o in found)))  # type: ignore[union-attr, misc]


def _view(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    if (of := picks.owners(args[0]) or picks.behind_one.get(args[0])) is not None and result.ndim:
        picks.tag(result, of.viewed(len(result)))


def _rowwise(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    found = [o for t in tensors_in((args, kwargs)) if (o := picks.owners(t)) is not None]
    if found:
        owners = found[0] if all(o.same(found[0]) for o in found) else UNKNOWN
        for t in tensors_in([result]):
            picks.tag(t, owners)


def _of_first(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    _rowwise(picks, result, name, args[:1], {})


def _along(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    at, default = _ALONG[name]
    dims = _given(args, kwargs, at, "dim", default)
    if isinstance(dims, Tensor):  # max(x, y)
        _rowwise(picks, result, name, args, kwargs)
        return
    dims, n = (dims,) if isinstance(dims, int) else dims or (0,), max(args[0].ndim, 1)
    (_of_first if all(d % n for d in dims) else _other)(picks, result, name, args, kwargs)


def _other(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Views of what each row holds; as many rows from anything else may be anybody's."""
    for source in tensors_in((args, kwargs)):
        if (of := picks.owners(source)) is None or not isinstance(source, Tensor):
            continue
        for t in tensors_in([result]):
            if isinstance(t, Tensor) and t.ndim and len(t) == len(source) and t is not source:
                picks.tag(t, of if len(t) < 2 or lies_in(t, source) else UNKNOWN)


_ROWWISE = (
    *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "maximum", "minimum", "lerp"),
    *("addcmul", "addcdiv", "atan2", "multiply", "subtract", "divide", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1"),
    *("sqrt", "rsqrt", "square", "reciprocal", "abs", "neg", "negative", "sign", "erf", "erfc", "sin", "cos", "tan", "tanh"),
    *("sigmoid", "relu", "relu6", "gelu", "silu", "elu", "celu", "selu", "leaky_relu", "prelu", "rrelu", "softplus", "softsign"),
    *("hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "threshold", "mish", "logsigmoid"),
    *("clamp", "clamp_min", "clamp_max", "clip", "masked_fill", "nan_to_num", "round", "floor", "ceil", "trunc", "one_hot"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan", "isinf", "isfinite"),
    *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "float", "double", "half", "bfloat16", "to", "type_as", "type"),
    *("long", "int", "bool", "contiguous", "clone", "detach", "requires_grad_", "cuda", "cpu", "bernoulli", "zero_", "fill_"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
)
_OPERATORS = (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "floordiv", "mod"),
    *("pow", "rpow", "neg", "abs", "invert", "and", "or", "xor", "rand", "ror", "rxor", "eq", "ne", "lt", "le", "gt", "ge"),
)
# of the first argument's rows, each by itself; or written into its rows, which stay whose they are
_OF_FIRST = (
    *("linear", "matmul", "mm", "bmm", "__matmul__", "layer_norm", "rms_norm", "group_norm", "instance_norm", "embedding"),
    *(f"{kind}{d}d" for kind in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_max_pool") for d in (1, 2, 3)),
    *(f"adaptive_avg_pool{d}d" for d in (1, 2, 3)),
    *("index_copy", "index_add", "index_fill", "index_put", "scatter", "scatter_add", "scatter_reduce", "masked_scatter"),
)
# along a dim, or some: the number of that argument, and what it is by default (None: all)
_REDUCING = ("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "max", "min", "std", "var", "all", "any", "logsumexp")
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys((*_REDUCING, "cumsum", "cumprod", "flip", "unsqueeze", "softmax", "log_softmax"), (1, None)),
    **dict.fromkeys(("glu", "sort", "argsort"), (1, -1)),
    **dict.fromkeys(("select", "narrow"), (1, None)),
    **dict.fromkeys(("chunk", "split", "tensor_split"), (2, 0)),
    "unbind": (1, 0),
    "topk": (2, -1),
    "normalize": (2, 1),
}
_RULES: dict[str, Callable[..., None]] = {
    **dict.fromkeys((*_ROWWISE, *(f"{name}_" for name in _ROWWISE), *(f"__{name}__" for name in _OPERATORS)), _rowwise),
    **dict.fromkeys((*_OF_FIRST, *(f"{name}_" for name in _OF_FIRST)), _of_first),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "squeeze"), _view),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("nonzero", "argwhere"), _nonzero),
    "where": _where,
    "masked_select": _masked_select,
    "index_select": _index_select,
    "__getitem__": _index,
}
_PICKING = (_index, _nonzero, _where, _masked_select)
