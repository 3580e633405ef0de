"""Rows of which nothing but how many there are has told whose they are: data may say otherwise in the next
batch.

`model(texts, images)` with twice as many images as texts: two of each are taken for given, and proved. Where
shapes bear it out (a reshape to (B, 2, ...)), so it is in every batch. Where the forward goes by anything
else (counts, masks, offsets, a product with a matrix), each call is proved, see `ModelCall.again`; but where
rows are put by masks and indices alone, only calls in which these say what they have not said before.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import torch_api
from ..core import op_kinds
from ..core.converted_module import ConvertedModule
from ..core.trees import tensors_in, tensors_of
from ..parameters.per_sample import PUTS, of_parameter
from .indices import LOOK_UPS, MASKS
from .notes import Notes
from .provenance import each_once
from .row_rules import ROWWISE, dims_along, joins_rows
from .tracking import BATCH_MAJOR

if TYPE_CHECKING:
    from .gathered import GatheredRows

# by which masks and indices put rows; and by which they say which rows, or how many, are whose
_PUTS = {*PUTS, "__setitem__"}
_PLACED = {
    *(*_PUTS, *op_kinds.NONZERO, "masked_select", "index_select", "repeat_interleave", "segment_reduce"),
    "__getitem__",
}
# what each row becomes by itself: whatever is given; of the first argument; by its shape
_ROWWISE = {*ROWWISE, *op_kinds.CONVERTED, "scaled_dot_product_attention"}
_OF_FIRST = {
    *(*op_kinds.OF_FIRST, *op_kinds.TURNED, "embedding", "pad"),
    *("unsqueeze", "expand", "expand_as", "broadcast_to"),
}
_RESHAPED = {*op_kinds.RESHAPED, "unsqueeze"}
_OF_STATES = {
    *(*op_kinds.RESHAPED, *op_kinds.TURNED, *op_kinds.JOINED),
    *("__getitem__", "select", "unbind", "sum", "mean", "contiguous"),
}
_PACKS, _ORDERS = {"_pack_padded_sequence", "_pad_packed_sequence"}, {"index_select", "__getitem__"}
_MOVING = {
    *("split_with_sizes", "unbind", "unsqueeze", "gather", "take_along_dim", "index_select"),
    "segment_reduce",
}


def _moves(name: str, rows: list[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function takes rows apart, or combines them, as something else may say."""
    first_is_rows = bool(args) and args[0] is rows[0]
    if name == "einsum":
        return _sums_rows(rows, args)
    if name in LOOK_UPS:
        return not first_is_rows
    if name in op_kinds.PRODUCTS:  # with a matrix
        second = args[1] if len(args) > 1 else args[0]
        return any(t is second for t in rows) and args[0].ndim == second.ndim == 2 and name != "linear"
    if first_is_rows and name == "__getitem__":
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return not (first is Ellipsis or (isinstance(first, slice) and first == slice(None)))
    if first_is_rows and name in op_kinds.ALONG:
        return _along_rows(name, args, kwargs)
    dim = kwargs.get("dim", next((d for d in args[1:] if type(d) is int), 0))
    return name in _MOVING and first_is_rows and dim in (0, -rows[0].ndim)


def _sums_rows(rows: list[Tensor], args: Any) -> bool:
    """Whether an equation has another letter for rows in its result, or none."""
    operands = args[1:] if isinstance(args[1], Tensor) else args[1]
    given, arrow, made = str(args[0]).replace(" ", "").partition("->")
    terms = [term for term, t in zip(given.split(","), operands, strict=True) if any(t is r for r in rows)]
    return bool(arrow) and any(term[:1] != made[:1] for term in terms)


def _along_rows(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function goes along dim 0 of what it is given, as far as it says."""
    dims = dims_along(name, args, kwargs)
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return not all(isinstance(d, int) and d % max(args[0].ndim, 1) for d in dims)


def _alone_in_first(name: str, args: Any, kwargs: dict[str, Any], rows: list[Tensor]) -> bool:
    """Whether rows are the first argument's alone, and each stays by itself there."""
    return (
        rows[0] is args[0]
        and len(rows) == 1
        and (
            name in _OF_FIRST
            or (name in op_kinds.ALONG and not _along_rows(name, args, kwargs))
            or (name == "__getitem__" and not _moves(name, rows, args, kwargs))
        )
    )


class AssumedRows:
    """Those of a call that is followed.

    Attributes:
        rows: the tensors: False of a further input, and what comes of it; True of what layers or parameters
            have made of such.
        states: those of recurrent layers, with rows in dim 1: how many.
        ordered: those that were put into another order, as before they are packed; packed ones; and such as
            were just padded again: how many there are.
        inside: whether a layer runs, whose own functions are not looked at.
        unsure: whether data may have said more of them.
        placed: whether rows were put by masks and indices into the samples', of which it is not followed
            whose they are.
        told: what masks, indices and whole numbers have said, if it is to be noted.
    """

    def __init__(self, picks: "GatheredRows", noting: bool) -> None:
        self.picks, self.rows, self.states, self.ordered = picks, Notes(), Notes(), Notes()
        self.inside = self.unsure = self.placed = False
        self.told: list[Any] | None = [] if noting else None

    def close(self) -> list[Any] | None:
        """Look no more, as the forward has ended; what it was told."""
        self.inside = True
        return self.told

    def see(self, name: str, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Look at a function that the forward has called."""
        if self.told is not None and name in _PLACED:
            for t in tensors_of((args[1:], kwargs)):
                self.note_told(t)
        if (self.rows.of or self.states.of or self.ordered.of) and not (self.unsure or self.inside):
            if name in _PACKS:
                self._follow_packing(name, result, args)
            elif name in op_kinds.RECURRENT and (count := self.ordered.get(args[0])) is not None:
                self._note_sequences(result, count)
            elif name not in _ORDERS or not self._follow_order(result, args, kwargs):
                self._follow(name, result, args, kwargs)

    def _follow_packing(self, name: str, result: Any, args: Any) -> None:
        """Follow rows that lie in dim 0 where they are packed, and padded again."""
        given, batch_first = args[0], args[2] is True
        if name == "_pack_padded_sequence":
            if batch_first and (self.rows.get(given) is not None or self.ordered.get(given) is not None):
                self.ordered[result[0]] = len(given)
        elif (count := self.ordered.get(given)) is not None:
            self._note_made(result[0], count, batch_first)
            self.ordered[result[0]] = count

    def _follow_order(self, result: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
        """Follow rows into another order, of which it is not asked whose they are there, and back; whether
        they are.
        """
        given, index = args[0], tensors_of((args[1:], kwargs))
        count = len(given) if self.rows.get(given) else self.ordered.get(given) or self.states.get(given)
        if count is None or len(index) != 1 or index[0].dtype in MASKS or index[0].shape != (count,):
            return False
        with torch_api.without_torch_function():
            moved = each_once(index[0])
        if moved and self.rows.get(given) and self.ordered.get(given) is None:
            self.ordered[result] = count
        elif moved:
            self._note_made(result, count, len(result) == count)
        return moved

    def _note_sequences(self, made: Any, count: int) -> None:
        """Note packed sequences, and the states behind them."""
        self.ordered[made[0]] = count
        self._note_states(made[1:], count)

    def _note_states(self, made: Any, count: int) -> None:
        for t in made:
            self.states[t] = count

    def _note_made(self, t: Tensor, count: int, rows_first: bool) -> None:
        if rows_first:
            self.rows[t] = True
        else:
            self.states[t] = count

    def _follow(self, name: str, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Follow rows that are taken to be as many of each sample, as long as every row stays by itself, and
        until shapes, or rows of the samples beside them, say that each sample has its own.
        """
        tensors = tensors_of((args, kwargs))
        given = [t for t in tensors if self.rows.get(t) is not None]
        for t in tensors:
            if (count := self.states.get(t)) is not None:
                self._follow_states(name, count, result)
            elif self.ordered.get(t) is not None and self.rows.get(t) is None:
                self.unsure = True
        if not given:
            return
        several = [t for t in given if len(t) != self.picks.size]
        with torch_api.without_torch_function():
            made = any(map(self.rows.get, given)) or any(map(of_parameter, tensors))
        if made and name in _PUTS and all(t is not args[0] for t in several or given):
            self.placed = True  # where masks and indices say, which are noted
        elif several:
            self._follow_several(name, result, args, kwargs, several, made)
        elif made and _moves(name, given, args, kwargs):
            self.unsure = True
        elif not any(map(self._of_samples, tensors)):
            for t in tensors_of(result):
                if t.shape[:1] == (self.picks.size,):
                    self.rows[t] = made
                elif name in op_kinds.JOINED:  # with rows that are no samples'
                    self.unsure = self.unsure or made

    def _follow_states(self, name: str, count: int, result: Any) -> None:
        for t in tensors_of(result):
            if name in _OF_STATES and t.shape[:1] == (count,):
                self.rows[t] = True
            elif name in _OF_STATES and t.ndim == 3 and t.shape[1] == count:
                self.states[t] = count
            else:
                self.unsure = True

    def _follow_several(
        self, name: str, result: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], made: bool
    ) -> None:
        if name in op_kinds.JOINED:
            alone = not joins_rows(result, args, kwargs)
        else:
            alone = name in _ROWWISE or _alone_in_first(name, args, kwargs, given)
        for t in tensors_of(result):
            if name in _RESHAPED and t.ndim and len(t) % self.picks.size == 0:
                if len(t) != self.picks.size:
                    self.rows[t] = made
            elif alone and t.shape[:1] == given[0].shape[:1]:
                self.rows[t] = made
            else:
                self.unsure = self.unsure or made

    def _of_samples(self, t: Tensor) -> bool:
        """Whether a tensor that gradients may go to has rows of which it is known, not assumed, whose they
        are.
        """
        known = t.is_floating_point() and self.rows.get(t) is None
        owners = self.picks.owners(t) if known else None
        return owners is not None and owners.sample_ids is not None

    def note_call(self, module: ConvertedModule, call: int, given: Any, output: Any) -> None:
        """Note what a module makes of several rows a sample, if they are taken for such because of how many
        there are; and of a further input with a row for each.
        """
        if isinstance(module, nn.RNNBase):
            self._note_recurrent(tensors_in(given)[0], tensors_in(output), module.batch_first)
            return
        tensors = tensors_of(given)
        x = next((t for t in tensors if t.ndim), None)
        if x is None or self.unsure:
            return
        if isinstance(module, nn.EmbeddingBag) and x.ndim == 1:  # a row is a bag, which offsets begin
            args, kwargs = given
            x = kwargs.get("offsets", args[1] if len(args) > 1 else None)
            self.unsure = any(t.requires_grad for t in tensors)  # weights of a layer's, of whichever texts
        size = self.picks.size
        before = any(self.rows.get(t) or (self.rows.get(t) is not None and len(t) == size) for t in tensors)
        by_count = len(x) != size and len(x) % size == 0 and not self._of_samples(x)
        if not before and not (
            by_count and module._ps_layout(call, ("in", 0), x.ndim) in (None, BATCH_MAJOR)
        ):
            return
        if len(x) == size and any(map(self._of_samples, tensors)):
            return
        for t in tensors_of(output):
            if t.shape[:1] == x.shape[:1]:
                self.rows[t] = True
            elif before and len(x) != size:
                self.unsure = True

    def _note_recurrent(self, x: Any, made: list[Any], batch_first: bool) -> None:
        size = self.picks.size
        if isinstance(x, PackedSequence):
            data, rows, followed = x.data, int(x.batch_sizes[0]), self.ordered
        else:
            data, followed = x, self.rows
            rows = x.shape[0 if batch_first else 1] if x.ndim == 3 else size
        several = rows != size and rows % size == 0 and not self._of_samples(data)
        if not several and (rows != size or followed.get(data) is None):
            return
        if isinstance(x, PackedSequence):
            self._note_sequences([made[0].data, *made[1:]], rows)
        elif batch_first:
            self.rows[made[0]] = True
            self._note_states(made[1:], rows)
        else:
            self.unsure = self.unsure or several

    def note_told(self, t: Tensor, value: Any = None) -> None:
        """Note what integers say, as numbers of Python's or as an index: of masks of the samples' rows, how
        many there are of each.
        """
        numbers = t.is_floating_point() or t.is_complex()
        if self.told is None or numbers or torch_api.level() != self.picks.level:
            return
        if value is None:
            with torch_api.without_torch_function():
                of_rows = t.dtype in MASKS and t.ndim > 1
                value = (t.flatten(1).sum(1) if of_rows else t.detach()).cpu().numpy()
        self.told.append(value.tobytes() if hasattr(value, "tobytes") else str(value))
