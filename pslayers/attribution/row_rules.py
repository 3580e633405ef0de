"""What torch's functions do to rows that are followed: rule(picks, result, name, args, kwargs), `picks` being
the `GatheredRows` mode, notes of which sample each row of the result is.

It follows from what is known of the arguments; a function without a rule may do anything to rows.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import op_kinds
from ..core.trees import tensors_of
from ..parameters.letters import of_einsum
from ..parameters.per_sample import lies_in, of_parameter
from .indices import MASKS
from .provenance import UNKNOWN, WEAK, RowProvenance, each_once

if TYPE_CHECKING:
    from .gathered import GatheredRows

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _given(args: Args, kwargs: Kwargs, at: int, name: str, default: Any = None) -> Any:
    for alias in (name, "axis") if name == "dim" else (name,):
        if alias in kwargs:
            return kwargs[alias]
    return args[at] if len(args) > at else default


def _followed(
    picks: "GatheredRows", args: Any, kwargs: Kwargs
) -> tuple[list[tuple[RowProvenance, Tensor]], RowProvenance]:
    """The arguments whose rows are followed, and what is then known of a result of which nothing is."""
    found = [(o, t) for t in tensors_of((args, kwargs)) if (o := picks.owners(t)) is not None]
    return found, UNKNOWN if any(o.picked and o.by_data for o, _ in found) else WEAK


def mark_unknown(picks: "GatheredRows", results: Any, args: Args, kwargs: Kwargs) -> None:
    """What comes of rows by a function that may do anything to them."""
    found, lost = _followed(picks, args, kwargs)
    for t in tensors_of(results) if found else ():
        picks.tag(t, lost)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in MASKS and index.ndim > 0


def _numbers(index: Tensor) -> Tensor:
    """The number of a row for each row of an index that says the same of all its values; else the index."""
    rows = index.flatten(1) if index.ndim > 1 else index[:, None]
    return rows[:, 0] if bool((rows == rows[:, :1]).all()) else index


def _parts(index: Any) -> tuple[Any, ...]:
    """Of an index, one for each dim; arrays of numpy's as lists."""
    parts = index if isinstance(index, tuple) and index else (index,)
    return tuple(i.tolist() if type(i).__module__ == "numpy" else i for i in parts)


def _index(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, parts = args[0], _parts(args[1])
    if isinstance(parts[0], Tensor) and not parts[0].ndim and parts[0].dtype not in MASKS:
        parts = (int(parts[0]), *parts[1:])
    of = picks.owners(x)
    if parts[0] is Ellipsis:
        default_rule(picks, result, name, args, kwargs)
    elif parts[0] is None:
        picks.tag_second(result, picks.pick(of if len(parts) == 1 else _indexed(picks, x, parts[1:])))
    elif (second := picks.second.get(x)) is not None:
        _index_second(picks, result, second, x, parts)
    elif isinstance(parts[0], int):  # all of it is that sample's
        if of is not None and result.ndim:
            picks.tag(result, picks.pick(of.of_row(parts[0], len(result))))
    else:
        picks.tag(result, picks.pick(_indexed(picks, x, parts)))


def _index_second(
    picks: "GatheredRows", result: Tensor, second: RowProvenance, x: Tensor, parts: tuple[Any, ...]
) -> None:
    """Of rows in dim 1, what is indexed in dim 0 and in those behind, or by the numbers of rows."""
    first, rest = parts[0], [i for i in parts[1:] if i is not Ellipsis]
    by_tensors = any(isinstance(i, (Tensor, list)) for i in rest)
    if (
        isinstance(first, (int, slice))
        and not by_tensors
        and (not rest or (parts[1] is not Ellipsis and rest[0] == slice(None)))
    ):
        (picks.tag if isinstance(first, int) else picks.tag_second)(result, second)
        return
    picks.tag(result, picks.pick(_indexed(picks, x, parts)))
    if isinstance(first, slice) and len(parts) == 2 and by_tensors:
        rows = torch.as_tensor(rest[0], device=x.device)
        if rows.ndim == 1 and not _is_mask(rows):
            picks.tag_second(result, picks.pick(second.at(rows if len(rows) else rows.long())))


def _indexed(picks: "GatheredRows", x: Tensor, parts: tuple[Any, ...]) -> RowProvenance | None:
    """Whose the rows are that an index picks: those of the rows it is for, else its own."""
    first, of = parts[0], picks.owners(x)
    if isinstance(first, slice):
        return of.at(first) if of is not None and of.sample_ids is not None else of
    if _is_mask(first):
        return _masked(of, picks.owners(first), first)
    others = [o for i in parts if (o := picks.owners(i)) is not None]
    if of is None:
        return picks.owners(first) or (others[0].lost() if others else None)
    if of.sample_ids is None:
        return UNKNOWN if any(o.picked for o in others) else of
    rows = torch.as_tensor(first, device=x.device)
    rows = rows if len(rows) else rows.long()
    # together with indices of more dims it does not tell of rows
    alone = rows.ndim == 1 and all(not isinstance(i, Tensor) or i.ndim < 2 for i in parts)
    return of.at(rows) if alone else of.lost()


def _masked(of: RowProvenance | None, by: RowProvenance | None, mask: Tensor) -> RowProvenance | None:
    """Whose the rows are that a mask, itself of rows `by`, picks out of rows `of`."""
    if of is not None and of.sample_ids is None:
        return of if by is None else UNKNOWN  # what all samples share picks as many of each
    told = of or by
    if told is None or told.sample_ids is None:
        return None if told is None else UNKNOWN
    return told.at(mask.nonzero()[:, 0], max(mask.numel() // max(len(mask), 1), 1))


def _set(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    y, index, value = args
    parts = _parts(index)
    picks.tag(y, _written(picks, y, parts[0], value))


def _written(
    picks: "GatheredRows", y: Tensor, index: Any, value: Any, adds: bool = False
) -> RowProvenance | None:
    """Whose the rows of `y` are with `value` written, or added, to some of them."""
    of, new = picks.owners(y), picks.owners(value)
    whole = index is Ellipsis or (isinstance(index, slice) and index.indices(len(y)) == (0, len(y), 1))
    if isinstance(index, slice):
        index = torch.arange(len(y), device=y.device)[index]
    elif isinstance(index, list) and index:
        index = torch.as_tensor(index, device=y.device)
    elif picks.owners(index) is not None and (new is None or not new.picked):
        _note_placed(picks, value)
    if new is None:
        return of
    if whole:
        told = _told(of)
        if told is None and new.sample_ids is not None and len(y) == len(new.sample_ids):
            told = new
        return told if told is not None and (new.same(told) or not new.picked) else (of or new).lost()
    if isinstance(index, Tensor) and index.ndim:
        return _written_to_rows(picks, y, index, new, adds)
    return UNKNOWN if new.picked or (of is not None and of.picked) else WEAK


def _note_placed(picks: "GatheredRows", value: Any) -> None:
    """Note that the data say to which samples rows go of which it is not followed whose they are: in another
    batch, to others.
    """
    rows = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0 and len(value) > 1
    if rows and not of_parameter(value):
        picks.assumed.placed = True


def _told(of: RowProvenance | None) -> RowProvenance | None:
    return of if of is not None and of.sample_ids is not None else None


def _written_to_rows(
    picks: "GatheredRows", y: Tensor, index: Tensor, new: RowProvenance, adds: bool
) -> RowProvenance | None:
    """Whose the rows of `y` are with rows of `new` written, or added, to those that an index or a mask
    names.
    """
    of, by = picks.owners(y), picks.owners(index)
    mask = _is_mask(index)
    by_data = not mask and by is not None
    rows = index.nonzero()[:, 0] if mask else index
    if rows.ndim == 1:
        same = (told := _told_by_rows(picks, y, rows, new, by if mask else None)) is not None
        if same and (new.picked or not by_data):  # put back
            return told
        whole = len(rows) == len(y) and new.sample_ids is not None
        if whole and (same or of is None or not adds) and each_once(rows):
            return picks.pick(new.at(rows.argsort()))
        if same:
            return told
    return UNKNOWN if by_data or (of is not None and of.picked) or (new.picked and new.by_data) else WEAK


def _told_by_rows(
    picks: "GatheredRows", y: Tensor, rows: Tensor, new: RowProvenance, mask: RowProvenance | None
) -> RowProvenance | None:
    """Whose the rows of `y` are, if each of `new` is put where its sample's are; else None."""
    of = picks.owners(y)
    told = _told(of)
    if told is None and (of is None or not of.picked):
        told = _told(mask)
    anew = of is None and mask is None and new.sample_ids is not None
    if told is None and anew and len(y) % picks.size == 0 < len(y):
        ids = torch.arange(picks.size, device=rows.device).repeat_interleave(len(y) // picks.size)
        told = RowProvenance(ids, len(y), picked=False)
    return told if told is not None and told.at(rows).same(new) else None


def _put(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """index_add(x, dim, index, source), scatter and the like."""
    index, source = _given(args, kwargs, 2, "index"), _given(args, kwargs, 3, "src", kwargs.get("source"))
    if _given(args, kwargs, 1, "dim") not in (0, -args[0].ndim):
        # each row of the indices says where that row's values go
        by_row = (index,) if name.startswith("scatter") else ()
        _rowwise(picks, result, name, (args[0], *by_row, source), {})
        return
    adds = not name.startswith("index_copy") and name.rstrip("_") != "scatter"
    picks.tag(numbers := _numbers(index), picks.owners(index))
    picks.tag(result, _written(picks, args[0], numbers, source, adds))


def _index_put(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    indices, value = _given(args, kwargs, 1, "indices"), _given(args, kwargs, 2, "values")
    adds = bool(_given(args, kwargs, 3, "accumulate", False))
    picks.tag(result, _written(picks, args[0], indices[0], value, adds))


def _masked_scatter(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    of, by = picks.owners(args[0]), picks.owners(_given(args, kwargs, 1, "mask"))
    if by is not None:
        _note_placed(picks, _given(args, kwargs, 2, "source"))
    known = by if of is None else of if of.sample_ids is not None else None
    picks.tag(result, known or WEAK)


def _index_select(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    index = _given(args, kwargs, 2, "index")
    of = picks.owners(args[0])
    if _given(args, kwargs, 1, "dim") in (0, -args[0].ndim):
        picks.tag(result, picks.pick(_indexed(picks, args[0], (index,))))
    elif (second := picks.second.get(args[0])) is not None and _given(args, kwargs, 1, "dim") == 1:
        picks.tag_second(result, picks.pick(second.at(index)))
    elif of is not None and of.sample_ids is None and picks.owners(index) is not None:
        picks.tag(result, UNKNOWN)  # the batch may be in that dim
    else:
        _of_first(picks, result, name, args, kwargs)


def _gather(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, along = args[0], name == "take_along_dim"
    index = _given(args, kwargs, 1, "indices") if along else _given(args, kwargs, 2, "index")
    dim = _given(args, kwargs, 2, "dim", None) if along else _given(args, kwargs, 1, "dim")
    if dim not in (None, 0, -x.ndim):  # those of each row
        _rowwise(picks, result, name, (x, index), {})
    elif dim is None or picks.owners(x) is None:
        default_rule(picks, result, name, args, kwargs)
    elif (numbers := _numbers(index)).ndim == 1:
        picks.tag(result, picks.pick(_indexed(picks, x, (numbers,))))
    elif picks.owners(index) is not None:
        picks.tag(result, UNKNOWN)
    else:
        default_rule(picks, result, name, args, kwargs)


def _nonzero(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    of = picks.owners(args[0])
    owners = picks.pick(of if of is None else _masked(None, of, args[0] != 0) if args[0].ndim else UNKNOWN)
    for t in result if isinstance(result, tuple) else [result]:
        picks.tag(t, owners)


def _where(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    (_rowwise if isinstance(result, Tensor) else _nonzero)(picks, result, name, args, kwargs)


def _masked_select(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, mask = args[0], _given(args, kwargs, 1, "mask")
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    of, by = (
        o if t.ndim == len(shape) and len(t) == shape[0] else o and o.lost()
        for t in (x, mask)
        for o in [picks.owners(t)]
    )
    picks.tag(result, picks.pick(_masked(of, by, mask.expand(shape))))


def joins_rows(result: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Whether `torch.cat` puts rows behind rows, and not beside each other what they hold."""
    return _given(args, kwargs, 1, "dim", 0) in (0, -result.ndim)


def _cat(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    found = [picks.owners(t) for t in args[0]]
    if not joins_rows(result, args, kwargs):
        _rowwise(picks, result, name, args, kwargs)
    elif len(found) == 1:
        picks.note(result, picks.notes_of(args[0][0]))
    elif (second := _second(picks, args[0])) is not None:
        picks.tag_second(result, second)
    elif any(o is None or o.sample_ids is None for o in found):
        default_rule(picks, result, name, args, kwargs)
    else:
        by_data = any(o.picked and o.by_data for o in found)  # type: ignore[union-attr]
        ids = torch.cat([o.sample_ids for o in found])  # type: ignore[union-attr, misc]
        picks.tag(result, RowProvenance(ids, sum(o.limit for o in found), by_data=by_data))  # type: ignore[union-attr, misc]


def _second(picks: "GatheredRows", tensors: Iterable[Any]) -> RowProvenance | None:
    """Whose the rows in dim 1 are, of tensors that are followed, if they are the same samples'."""
    followed = [t for t in tensors if picks.owners(t) is not None]
    found: list[RowProvenance] = [o for t in followed if (o := picks.second.get(t)) is not None]
    alike = len(followed) == len(found) > 0 and all(o.same(found[0]) for o in found)
    return found[0] if alike and len({(t.ndim, t.shape[1]) for t in followed}) == 1 else None


def _stack(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    found = [picks.owners(t) for t in args[0]]
    known = [o for o in found if o is not None]
    if name == "stack" and _given(args, kwargs, 1, "dim", 0) not in (0, -result.ndim):
        picks.tag(result, known[0] if all(o.same(known[0]) for o in known) else UNKNOWN)
        return
    ones = [None if o is None else o.of_one() for o in found]
    several = any(one is None for one in ones)
    if several and name == "stack" and len(known) == len(found) and all(o.same(known[0]) for o in known):
        picks.tag_second(result, known[0])
    elif several or (name == "pad_sequence" and not _given(args, kwargs, 1, "batch_first", False)):
        default_rule(picks, result, name, args, kwargs)
    else:
        owners = RowProvenance(torch.cat(ones), len(ones))  # type: ignore[arg-type]
        whole = owners.sample_ids is not None and torch.equal(
            owners.sample_ids, torch.arange(picks.size, device=owners.sample_ids.device)
        )
        rows = [o.rows[:1] for o in found if o is not None and o.rows is not None]
        if len(rows) == len(found) and all(len(o.rows.unique()) == 1 for o in found):  # type: ignore[union-attr]
            owners.rows = torch.cat(rows)
        elif whole and not rows:  # else the data say in which order
            owners = RowProvenance(owners.sample_ids, 1, picked=False)
        picks.tag(result, owners)


def _unbind(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    if _given(args, kwargs, 1, "dim", 0) % args[0].ndim:
        _of_first(picks, result, name, args, kwargs)
    elif (second := picks.second.get(args[0])) is not None:
        for t in result:
            picks.tag(t, second)
    elif (of := picks.owners(args[0])) is not None:
        for row, t in enumerate(result):
            picks.tag(t, picks.pick(of.of_row(row, len(t))) if t.ndim else None)


def _view(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    of = (picks.second.get(args[0]) if len(args[0]) == 1 else None) or picks.owners(args[0])
    if of is not None and result.ndim:
        picks.tag(result, of.viewed(len(result)))


def _rowwise(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """The same to every row. One that is put beside rows that are not followed (a constant, a table) stays
    whose it is.

    So it does beside numbers of which it is not known whose they are (the places of experts, the positions
    of patches), and what is not followed is not for them: no gradient goes to integers.
    """
    found, lost = _followed(picks, args, kwargs)
    if lost is UNKNOWN and picks.numbers_alone(result, args, kwargs) is False:
        return
    second = _second(picks, [t for _, t in found]) if RULES[name] in _BY_VALUE else None
    if second is not None and (result.ndim, result.shape[1]) == (found[0][1].ndim, found[0][1].shape[1]):
        picks.tag_second(result, second)
        return
    if any(o.sample_ids is not None and not picks.only_numbers(s) for o, s in found):
        found = [(o, s) for o, s in found if o.sample_ids is not None or not picks.only_numbers(s)]
    for t in tensors_of(result) if found else ():
        known = [o for o, s in found if o.sample_ids is not None and s.ndim == t.ndim and len(s) == len(t)]
        unsure = [
            o
            for o, s in found
            if (o.sample_ids is None and o.picked) or (o.sample_ids is not None and o not in known)
        ]
        picks.tag(t, known[0] if known and not unsure and all(o.same(known[0]) for o in known) else lost)


def at_once(picks: "GatheredRows", result: Tensor, name: str, args: Args) -> bool:
    """Tag what does the same to every value of tensors whose rows are all the same ones, or to every row of
    its first argument, as most functions of a network do: what `_rowwise` and `_of_first` come to, in a tenth
    of the time. Whether it is that.
    """
    rule = RULES.get(name)
    if name[-1:] == "_" or not args or (rule is not _rowwise and rule is not _of_first):
        return False
    of, trained = None, False
    for given in args:
        if isinstance(given, Tensor):
            known = picks.tags.get(given)
            if known is None:  # a parameter, or a constant
                continue
            if (of is not None and known is not of) or picks.second.get(given) is not None:
                return False
            of, trained = known, trained or not picks.only_numbers(given)
            if rule is _of_first:
                if given is not args[0] or given.ndim <= (name in op_kinds.OF_VECTORS):
                    return False
            elif given.ndim != result.ndim:
                return False
        elif type(given) not in (int, float):
            return False
    if of is None or of.sample_ids is None or not trained or result.shape[0] != of.sample_ids.shape[0]:
        return False
    picks.second.of.pop(id(result), None)
    picks.tags[result] = of
    return True


def _of_first(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """The first argument's rows, each by itself; or with the rows of a second one, where these go one by one
    with them.
    """
    of = picks.owners(args[0])
    if of is None or args[0].ndim <= (name in op_kinds.OF_VECTORS):
        default_rule(picks, result, name, args, kwargs)
        return
    if name in op_kinds.PRODUCTS and isinstance(args[1], Tensor) and picks.owners(args[1]) is not None:
        (_rowwise if result.ndim > 2 else default_rule)(picks, result, name, args, kwargs)
        return
    for t in tensors_of(result):
        picks.tag(t, of)


def dims_along(name: str, args: Args, kwargs: Kwargs) -> Any:
    """Along which dims a function goes that may go along some, in the form in which it is told."""
    at, default = op_kinds.ALONG[name]
    return _given(args, kwargs, at, "dims" if "dims" in kwargs else "dim", default)


def sorted_along(name: str, args: Args, kwargs: Kwargs) -> int:
    """The size of the dim along which a function puts values in order."""
    x, dim = args[0], dims_along(name, args, kwargs)
    return x.shape[dim] if isinstance(dim, int) and x.ndim else 1


def _along(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    dims = dims_along(name, args, kwargs)
    if isinstance(dims, Tensor):  # max(x, y)
        _rowwise(picks, result, name, args, kwargs)
        return
    dims = dims or (0,) if dims is None or isinstance(dims, tuple | list) else (int(dims),)
    n, made = max(args[0].ndim, 1), tensors_of(result)
    if all(d % n for d in dims):
        _of_first(picks, result, name, args, kwargs)
    elif name in op_kinds.REDUCED and (second := picks.second.get(args[0])) is not None and len(dims) == 1:
        for t in made:
            (picks.tag_second if t.ndim == args[0].ndim else picks.tag)(t, second)
    elif name == "select":
        _index(picks, result, name, (args[0], _given(args, kwargs, 2, "index")), {})
    elif (of := picks.owners(args[0])) is not None and of.sample_ids is not None and name in op_kinds.PARTS:
        start = int(_given(args, kwargs, 2, "start")) % max(len(args[0]), 1) if name == "narrow" else 0
        for t in made:
            picks.tag(t, picks.pick(of.at(slice(start, start := start + len(t)))))
    elif of is not None and of.sample_ids is not None and name in op_kinds.SORTED and args[0].ndim == 1:
        for t in made:  # each number is some row's
            picks.tag(t, picks.pick(of.at(made[-1])))
    elif of is not None and of.sample_ids is None and name in op_kinds.SORTED:
        for t in made:  # in an order that the data give
            picks.tag(t, UNKNOWN)
    elif of is not None and (one := of.of_one()) is not None and name in op_kinds.REDUCED:
        for t in made:  # of rows that are all one sample's
            picks.tag(t, RowProvenance(one.expand(len(t)), of.limit * len(t), one=one) if t.ndim else None)
    else:
        default_rule(picks, result, name, args, kwargs)


def _unsqueeze(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    dim = _given(args, kwargs, 1, "dim") % result.ndim
    if dim == 0:
        picks.tag_second(result, picks.owners(args[0]))
    else:
        picks.tag(result, picks.owners(args[0]))
        picks.tag_second(result, picks.second.get(args[0]) if dim > 1 else None)


def _turned(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Dims in another order: rows may go to dim 1, and from there to dim 0."""
    x, of = args[0], picks.owners(args[0])
    marks = torch.empty(*range(1, x.ndim + 1), device="meta")  # which dims they are, by how long they are
    first, *others = getattr(Tensor, name)(marks, *args[1:], **kwargs).shape
    if first == 2 and (second := picks.second.get(x)) is not None:
        picks.tag(result, second)
    elif others[:1] == [1] and of is not None and of.sample_ids is not None:
        picks.tag_second(result, of)
    else:
        default_rule(picks, result, name, args, kwargs)
        if first == 1 and others[:1] == [2]:
            picks.tag_second(result, picks.second.get(x))


def _repeat(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    alike = result.ndim == args[0].ndim and len(result) == len(args[0])
    (_of_first if alike else default_rule)(picks, result, name, args, kwargs)


def _outer(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """A row for each number of the first vector, or one in dim 1 of the second, where that alone is rows."""
    of, other = picks.owners(args[0]), picks.owners(_given(args, kwargs, 1, "vec2"))
    if of is None:
        picks.tag_second(result, other)
    elif other is None:
        picks.tag(result, of)
    else:
        default_rule(picks, result, name, args, kwargs)


def _broadcast(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Several tensors, each repeated by itself."""
    for t, x in zip(result, args, strict=True):
        _repeat(picks, t, name, (x,), {})


def _packed(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Sequences, the longest first, packed: a row for each step of each."""
    data, counts = result
    of = (picks.owners if _given(args, kwargs, 2, "batch_first", False) else picks.second.get)(args[0])
    if of is None or of.sample_ids is None or len(of.sample_ids) != int(counts[0]):
        default_rule(picks, result, name, args, kwargs)
        return
    rows = torch.cat([of.sample_ids[:count] for count in counts.tolist()])
    numbers = rows if of.picked else None
    picks.tag(data, RowProvenance(rows, len(counts), rows=numbers, by_data=False, moves=of.moves))


def _padded(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Back to a sequence in each row."""
    of, counts = picks.owners(args[0]), args[1]
    first = None if of is None else of.first(int(counts[0]), picks.size)
    if first is None:
        default_rule(picks, result, name, args, kwargs)
    else:
        (picks.tag if _given(args, kwargs, 2, "batch_first", False) else picks.tag_second)(result[0], first)


def _moved(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Rows that are moved, left out or repeated, whatever they hold: so are the numbers of their samples."""
    of, x = picks.owners(args[0]), args[0]
    if of is None or of.sample_ids is None:
        default_rule(picks, result, name, args, kwargs)
        return
    function = getattr(Tensor, name)  # which takes dims in more forms than torch.flip
    ids = function(of.sample_ids.view(-1, *(1,) * (x.ndim - 1)).expand_as(x), *args[1:], **kwargs)
    if result.ndim == x.ndim and (numbers := _numbers(ids)).ndim == 1:
        by_data = of.picked and of.by_data
        moved = RowProvenance(numbers, of.limit * max(len(ids) // max(len(x), 1), 1), by_data=by_data)
        picks.tag(result, of if of.same(moved) else picks.pick(moved) if by_data else moved)
    else:
        default_rule(picks, result, name, args, kwargs)


def _einsum(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Rows of the first letter of what is followed, which the result begins with, too."""
    equation, operands = args[0], args[1:] if isinstance(args[1], Tensor) else args[1]
    letters = of_einsum(str(equation), *(t.ndim for t in operands))
    assert letters is not None  # torch has taken them
    *terms, made = letters
    named = list(zip(terms, operands, strict=True))
    rows = {term[:1] for term, t in named if picks.owners(t) is not None}
    alone = all(
        letter not in (term if picks.owners(t) is None else term[1:]) for letter in rows for term, t in named
    )
    owners = [o for _, t in named if (o := picks.owners(t)) is not None]
    known = all(o.sample_ids is not None and o.same(owners[0]) for o in owners)
    if rows == {made[:1]} and made[:1].isalpha() and alone and known:
        picks.tag(result, owners[0])
    else:
        default_rule(picks, result, name, args, kwargs)


def _pad(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    behind = len(_given(args, kwargs, 1, "pad")) < 2 * result.ndim
    (_of_first if behind else default_rule)(picks, result, name, args, kwargs)


def _attention(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    (_rowwise if result.ndim > 2 else default_rule)(picks, result, name, args[:3], {})


def _converted(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """To the kind of another tensor, perhaps, whose rows these are not."""
    _rowwise(picks, result, name, args[:1], {})


def _recurrent(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    if len(args) == 9 and args[8] is True and isinstance(args[3], bool):  # batch_first, not packed
        picks.tag(result[0], picks.owners(args[0]))
        for t in result[1:]:
            picks.tag_second(t, picks.owners(args[0]))
    else:
        default_rule(picks, result, name, args, kwargs)


def _made(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Made like a tensor, of nobody's values: it may as well hold the same samples' rows."""
    of = picks.owners(args[0])
    if of is not None and of.sample_ids is not None and not of.picked and result.ndim:
        picks.tag(result, of if len(result) == len(of.sample_ids) else None)


def default_rule(picks: "GatheredRows", result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Views of what each row holds; anything else that comes of rows may be anybody's."""
    found, lost = _followed(picks, args, kwargs)
    for t in tensors_of(result) if found else ():
        if t.ndim and all(t is not s for _, s in found):
            kept = [
                o
                for o, s in found
                if o.sample_ids is not None and s.ndim and len(t) == len(s) and (len(t) == 1 or lies_in(t, s))
            ]
            picks.tag(t, kept[0] if kept and len(found) == 1 else lost)
        else:  # in place
            picks.second.of.pop(id(t), None)


# what does the same to every row of whatever is given
ROWWISE = [
    *op_kinds.with_in_place([*op_kinds.OF_ONE, *op_kinds.BY_ROW]),
    *(*op_kinds.OF_SEVERAL, *op_kinds.INTO_FIRST, *op_kinds.COPIED),
]
_KINDS: dict[Callable[..., None], Iterable[str]] = {
    _rowwise: [*ROWWISE, "searchsorted", "bucketize"],
    _converted: op_kinds.CONVERTED,
    _of_first: op_kinds.OF_FIRST,
    _along: op_kinds.ALONG,
    _put: op_kinds.with_in_place(op_kinds.PUT),
    _index_put: op_kinds.with_in_place(["index_put"]),
    _masked_scatter: op_kinds.with_in_place(["masked_scatter"]),
    _made: [*op_kinds.MADE_LIKE, *op_kinds.DRAWN_LIKE],
    _view: op_kinds.RESHAPED,
    _cat: op_kinds.JOINED,
    _stack: ["stack", "pad_sequence"],
    _nonzero: op_kinds.NONZERO,
    _moved: op_kinds.MOVED,
    _gather: op_kinds.GATHERED,
    _recurrent: op_kinds.RECURRENT,
    _repeat: ["expand", "expand_as", "broadcast_to"],
    _broadcast: ["broadcast_tensors"],
    _outer: ["outer", "ger"],
    _turned: op_kinds.TURNED,
    _einsum: ["einsum"],
    _packed: ["_pack_padded_sequence"],
    _padded: ["_pad_packed_sequence"],
    _where: ["where"],
    _masked_select: ["masked_select"],
    _index_select: ["index_select"],
    _attention: ["scaled_dot_product_attention"],
    _unbind: ["unbind"],
    _unsqueeze: ["unsqueeze"],
    _pad: ["pad"],
    _index: ["__getitem__"],
    _set: ["__setitem__"],
}
RULES = {name: rule for rule, names in _KINDS.items() for name in names}
# some go by another name in torch: F.logsigmoid is `log_sigmoid`, Tensor.__rtruediv__ is `__rdiv__`
RULES |= {f.__name__: rule for name, rule in RULES.items() for f in op_kinds.functions([name])}
_BY_VALUE = {_rowwise, _converted, _cat, _where}  # which leave rows in dim 1 where they are
