"""`PerSample`: one tensor in the place of a parameter, which holds values of its own for each sample, so that
a forward runs once, for the whole batch, as it is written.

It has the parameter's shape S, and knows the B values (B, *S) that it stands for. A torch function that is
given one has a rule here, or in `op_dispatch` (the ops of torch.nn, in their fast form); any other is run for
each sample by itself. An op on such tensors, and on what all samples share, gives another `PerSample`. An op
that also takes a tensor of the batch gives an ordinary one: each sample's rows were combined with that
sample's own values. Modules without a replacement are run so ("direct", in `general`).

Which rows of a batch's tensor are whose is never guessed from a multiple of B. Where rows are followed
(`attribution/gathered.py`), that tells. Else a `PerSample` meets only the module's own inputs and views of
them, and, in ops that go value by value, tensors of as many rows. All else is a `NoRuleError`.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api
from ..core import op_kinds
from ..core.context import (
    UNSCALED,
    NoRuleError,
    Place,
    in_place_of,
    in_ragged,
    local,
    places_of,
    transforming,
)
from ..core.converted_module import ConvertedModule
from ..core.expansion import Expansion, Op, refuse_rows
from ..core.trees import map_tensors, tensors_of
from ..functional.each import for_each

Rule = Callable[..., Any]


# ops whose weight may be a PerSample; `op_dispatch` enters them
OPS: dict[Any, Rule] = {}
# what is asked in a ragged batch; `row_ops` enters itself
RAGGED: list[Rule] = []


class Standing:
    """What is known of the forward that runs with a `PerSample` for each of its parameters.

    Args:
        inputs: of that forward, those that hold the batch: its rows in dim 0, k a sample.
        includes_children: parameters of all modules below are stood for, too.
        weights: (B, *S) each, by their names.
        follows: whose the rows of other tensors are is followed.
        choices: for each tensor with as many rows as the batch, in order, whether the run that proved this
            took it for the batch's; None during that run.
        prefix: of the names by which errors call them.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        includes_children: bool,
        weights: dict[str, Tensor],
        follows: bool = False,
        choices: Sequence[bool] | None = None,
        prefix: str = "",
    ) -> None:
        self.inputs, self.includes_children, self.weights = inputs, includes_children, weights
        self.follows, self.choices = follows, choices
        self.prefix, self.path = prefix, ""  # of the module
        self.made: list[weakref.ref[PerSample]] = []
        self.chosen: list[bool] = []
        self.level = torch_api.level()  # of transforms of torch.func around the forward
        self.in_loss = False  # after the forward: what is no batch's is known by its shape
        self.slow: set[str] = set()  # names of parameters that some op used as truly different ones

    def mark(self) -> Callable[[], "Standing"]:
        """What gives the same for a part of the forward that begins here, and is computed again."""
        chosen = len(self.chosen)

        def again() -> Standing:
            standing = Standing(
                self.inputs,
                self.includes_children,
                self.weights,
                self.follows,
                self.choices or self.chosen,
                self.prefix,
            )
            standing.chosen, standing.path, standing.made = self.chosen[:chosen], self.path, self.made
            return standing

        return again

    def stand_ins(self) -> dict[str, "PerSample"]:
        """One for each of the weights."""
        return {
            name: PerSample.of(w, len(w) < 2 or w.stride(0) == 0, frozenset((self.prefix + name,)))
            for name, w in self.weights.items()
        }

    def choose(self, fits: bool, alike: Callable[[], bool] = lambda: True) -> bool:
        """Whether what has as many rows as the batch is the batch's: whatever it was when this was proved."""
        if self.choices is None:
            choice = fits and alike()
        elif len(self.chosen) < len(self.choices):
            choice = self.choices[len(self.chosen)]
        else:
            raise NoRuleError("it does more than it did when it was proved")
        if choice and not fits:
            raise NoRuleError("it has another number of rows than the batch")
        self.chosen.append(choice)
        return choice

    def left(self) -> bool:
        """Whether there is still one that is not to be seen in a further call."""
        return any(one is not None and not one.is_kept for one in (ref() for ref in self.made))

    def check_level(self) -> None:
        """NoRuleError inside a transform of torch.func that the forward makes: what it has wrapped is not
        followed.
        """
        if torch_api.level() > self.level:
            raise NoRuleError("a parameter of each sample's own is used inside a transform of torch.func")

    def rows(self, t: Tensor) -> bool:
        """Whether a tensor has as many rows as the batch."""
        return t.ndim > 0 and any(len(t) == len(x) for x in self.inputs)


@contextmanager
def standing_in(module: ConvertedModule, standing: Standing) -> Iterator[None]:
    """A `PerSample` in the place of each of the module's parameters that there are weights for, in the
    forward that runs inside.

    Raises:
        NoRuleError: the forward has kept one, or what it made of one (a cache): the next one's would be
            others.
    """
    before, local.stand_ins = local.stand_ins, standing
    state = module._ps_state()
    standing.path = state.path

    def places() -> list[Place]:
        return places_of(module, standing.stand_ins(), tied=standing.includes_children)

    try:
        prefix = "" if standing.prefix else state.prefix
        with in_place_of(places(), places, lambda value: _values_left(value, prefix, state.settings)):
            yield
        if standing.left():
            for held in held_by(module):
                for key in [*held] if isinstance(held, dict) else range(len(held)):
                    held[key] = kept(held[key])
        if standing.left():
            raise NoRuleError(
                f"a parameter of each sample's own was kept from one call to the next, or {UNFOLLOWED}"
            )
    finally:
        local.stand_ins = before


def _values_left(value: Any, prefix: str, settings: Any) -> Any:
    """A parameter that a forward has made of one of each sample's own, and put in its place, is one of its
    values.
    """
    if not isinstance(value, PerSample):
        return value
    refuse_rows(value.each, ", ".join(f"{prefix}{name}" for name in value.names), settings)
    return nn.Parameter(value.each.detach()[0].clone(), value.requires_grad)


# ----------------------------------------------------------------------------------------------- after a call
def held_by(module: nn.Module) -> list[Any]:
    """The dicts that hold the attributes of all modules below, and the lists and dicts among these."""
    held: list[Any] = [vars(m) for m in module.modules()]
    return held + [value for each in held for value in each.values() if isinstance(value, (list, dict))]


def kept(value: Any) -> Any:
    """What is left, after a call, of a value that stands for each sample's own: see `Kept`."""
    if not isinstance(value, PerSample):
        return value
    values: Kept = value.each.detach()[0].as_subclass(Kept)
    if value.each.requires_grad and not transforming():
        value.is_kept, values.one, values.batch = True, value, local.batch
        if local.batch is not None:
            local.batch.keeps = True
        with torch_api.without_torch_function():
            values.requires_grad_().register_hook(_Unfollowed(value.names))
    return values


class Kept(Tensor):
    """What a call has made of parameters alone, and returned or left in an attribute (a penalty of the
    weights, the weight that a hook makes), after it: an ordinary tensor's values, whose gradients are each
    sample's own.

    In a loss it may meet what is made of the model's outputs and has each sample's row in its place, which
    two passes through the loss so far prove; be added to a number, of which each sample has its share; and
    meet constants. It is not to be used in a further call.
    """

    one: "PerSample | None" = None
    batch: Any = None  # of the call
    of_all = False  # it is made of a number of all samples, too

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """By the rules of `PerSample`, where a gradient is taken."""
        kwargs = kwargs or {}
        if func in _READ:
            return plainly(func, *(map_tensors(_graph_of, args) if func in _OF_THE_GRAPH else args), **kwargs)
        graph = torch.is_grad_enabled() and func not in _TO_NUMBERS
        if graph and local.batch is not None:
            raise NoRuleError(
                "what was made of a parameter of each sample's own was kept from one call to the next"
            )
        given = [t for t in tensors_of((args, kwargs)) if isinstance(t, Kept) and t.one is not None]
        if not (graph and given):
            return plainly(func, *map_tensors(_ordinary, args), **map_tensors(_ordinary, kwargs))
        into = args[0] if args and op_kinds.writes(func.__name__) else None
        into_number = isinstance(into, Tensor) and not isinstance(into, Kept) and not into.ndim
        adds = into_number and op_kinds.apart(func.__name__) in _ADDS  # loss += penalty
        if adds or func in _BACKWARD:
            args, kwargs = map_tensors(_of_all, (args, kwargs))
            return func(*args, **kwargs)
        before = local.stand_ins
        try:
            of_all = _check_what_it_meets(func, given, tensors_of((args, kwargs)))
            size = len(given[0].one.each)  # type: ignore[union-attr]
            local.stand_ins = Standing([torch.empty(size)], False, {})
            local.stand_ins.in_loss = True
            found = by_rule(func, *map_tensors(_standing, (args, kwargs)))
            return map_tensors(functools.partial(_found, batch=given[0].batch, of_all=of_all), found)
        except NoRuleError as error:
            raise NoRuleError(
                f"{error}. It was returned by a model, or kept by it, and is made of parameters alone: in a"
                " loss it may be added to numbers, and meet value by value what has a row for each sample."
                " Use it in the forward, or expand it there to the batch, as in log_std.expand_as(mean)."
            ) from error
        finally:
            local.stand_ins = before

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Of the values."""
        return _ordinary(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of the values."""
        return _ordinary(self).__reduce_ex__(protocol)


_ADDS = {"add", "sub", "rsub", "__add__", "__radd__", "__sub__", "__rsub__", "stack", "cat", "concat"}


def _check_what_it_meets(func: Any, given: Sequence[Kept], tensors: Sequence[Tensor]) -> bool:
    """Whether the result is made of a number of all samples; NoRuleError where a sample's row would not be
    its own.
    """
    if transforming():
        raise NoRuleError("a transform of torch.func is made of the loss")
    others = [t for t in tensors if not isinstance(t, Kept)]
    totals = [t for t in others if t.requires_grad and not t.ndim]
    of_all = bool(totals) or any(t.of_all for t in given)
    if of_all and len(given) + len(totals) > 1 and getattr(func, "__name__", "") not in _ADDS:
        raise NoRuleError("it meets a number of all samples, to which it can only be added")
    size, batch = len(given[0].one.each), given[0].batch  # type: ignore[union-attr]
    for t in others:
        if t.ndim and len(t) == size and not (_goes_along(t, given) or _in_order(t, batch)):
            gone = batch is not None and batch.returned and all(ref() is None for ref, *_ in batch.returned)
            raise NoRuleError(
                "it meets a tensor with as many rows as there are samples, of which it is not known that they"
                " are the samples' in order"
                + (", as what the model returned is gone: hold it in a variable" if gone else "")
            )
    return of_all


def _goes_along(t: Tensor, given: Iterable[Tensor]) -> bool:
    """Whether a constant has a value for each of one of these, or of its last dims: it is no batch's then,
    however long.
    """
    shapes = (tuple(one.shape[max(one.ndim - t.ndim, 0) :]) for one in given)
    return not t.requires_grad and tuple(t.shape) in shapes


def _in_order(t: Tensor, batch: Any) -> bool:
    """Whether each row of a tensor depends on that sample's rows of what its call has returned alone: then
    gradients of rows that are multiplied by numbers are multiplied by these.
    """
    returned = [] if batch is None or not t.requires_grad else batch.returned
    outputs = [(out, dim, ids) for ref, dim, ids in returned if (out := ref()) is not None]
    if not outputs:
        return False
    draw = torch.Generator().manual_seed(0)  # the user's random numbers stay where they are
    with torch_api.without_torch_function(), torch.no_grad():
        weights = torch.rand(t.shape, generator=draw).to(t) + 0.5
        factors = torch.rand(len(t), generator=draw).to(t) + 0.5
        marked = weights * factors.view(-1, *[1] * (t.ndim - 1))
    tensors = [out for out, *_ in outputs]
    plain, times = (
        torch.autograd.grad(t, tensors, g, retain_graph=True, allow_unused=True) for g in (weights, marked)
    )
    with torch_api.without_torch_function(), torch.no_grad():
        for (_, dim, ids), one, other in zip(outputs, plain, times, strict=True):
            if one is None:
                continue
            if dim is None:
                return False
            own = torch.arange(len(t), device=t.device).repeat_interleave(one.shape[dim] // len(t))
            each = factors[own if ids is None else ids]
            expected = one * each.view(*[1] * dim, -1, *[1] * (one.ndim - dim - 1)).to(one)
            close = 64 * torch.finfo(t.dtype).eps ** 0.75
            if not torch.allclose(other, expected, close, close * float(one.abs().max()), True):
                return False
    return any(one is not None for one in plain)


def _found(t: Tensor, batch: Any, of_all: bool) -> Tensor:
    """What comes of a `Kept` in a loss."""
    values = kept(t)
    if isinstance(values, Kept):
        if values.one is None:
            return _ordinary(values)
        values.batch, values.of_all = batch, of_all
    return values  # type: ignore[no-any-return]


def _graph_of(t: Tensor) -> Tensor:
    """What the gradients of a `Kept` go into."""
    return t.one.each if isinstance(t, Kept) and t.one is not None else t


def _ordinary(t: Tensor) -> Tensor:
    """The values of a `Kept`, without its gradients."""
    with torch_api.without_subclasses():
        return t.detach().as_subclass(Tensor) if isinstance(t, Kept) else t


def _standing(t: Tensor) -> Tensor:
    """What stands for each sample's own, of which `Kept` holds the values."""
    return t.one if isinstance(t, Kept) and t.one is not None else _ordinary(t)


def _of_all(t: Tensor) -> Tensor:
    """Of a loss for each sample the one of all: each has its share."""
    return t.one.each.mean(0) if isinstance(t, Kept) and t.one is not None else t


# ----------------------------------------------------------------------------------------- what stands for it
UNFOLLOWED = (
    "was used by a function that does not ask what stands for it: a torch.autograd.Function of one's own, or"
    " one of a jagged nested tensor (of which use the values())"
)


class PerSample(Tensor):
    """A tensor of shape S for each sample: `each` (B, *S)."""

    each: Tensor
    same: bool  # whether all samples' values are the same, though their gradients are not
    # of the parameters that it was made of
    names: frozenset[str] = frozenset()
    parts: tuple[Tensor, ...] = ()
    is_kept = False  # by what may be used after the call

    @staticmethod
    def of(each: Tensor, same: bool = False, names: frozenset[str] = frozenset()) -> "PerSample":
        """What stands for `each` (B, *S), B not 0."""
        one: PerSample = each.detach()[0].as_subclass(PerSample)
        one.each, one.same, one.names = each, same, names
        if each.requires_grad and not transforming():
            with torch_api.without_torch_function():
                one.requires_grad_().register_hook(_Unfollowed(names))
        if local.stand_ins is not None:
            local.stand_ins.made.append(weakref.ref(one))
        return one

    def like(self, each: Tensor) -> "PerSample":
        """What stands for values that were made of these."""
        return PerSample.of(each, self.same, self.names)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """By the rule for `func`, or sample by sample under vmap; NoRuleError where neither can be."""
        kwargs = kwargs or {}
        if local.stand_ins is not None:
            local.stand_ins.check_level()
        for t in args:
            if isinstance(t, PerSample) and t.each.grad_fn is None and _joined_by_others(t):
                raise NoRuleError(f"what was made of {_named(t.names)} {UNFOLLOWED}, as module hooks are")
        if func in _OF_A_KIND:
            func, args, kwargs = _by_kind(*args, **kwargs)
            if not isinstance(args[0], PerSample):
                return func(*args, **kwargs)
        if in_ragged():
            return RAGGED[0](func, args, kwargs, functools.partial(by_rule, func, args, kwargs))
        return by_rule(func, args, kwargs)

    def part(self, index: int) -> "PerSample":
        """One of those in dim 0: of all together, whose gradients are written once, not for each among
        zeros.
        """
        self.parts = self.parts or self.each.unbind(1)
        return self.like(self.parts[index])

    def expand_again(self) -> None:
        """Stand for a parameter's values anew, which have been changed in place: autograd refuses what was
        expanded before.
        """
        before, tag = self.each, getattr(self.each, "_ps_expansion", None)
        if tag is not None and local.stand_ins is not None:
            with torch.enable_grad():
                self.each, self.parts = tag.tensor(len(before)), ()
            weights = local.stand_ins.weights
            weights.update({name: self.each for name, w in weights.items() if w is before})

    def replace(self, values: Tensor) -> None:
        """Stand for a parameter whose `.data` becomes these values; in a run that proves, which leaves the
        parameter as it is, too.
        """
        if (tag := getattr(self.each, "_ps_expansion", None)) is None:
            with torch.enable_grad():
                self.each, self.parts = _Valued.apply(self.each, (values,)), ()
        else:
            for t in (tag.weight, *(() if tag.recorder is None else (tag.recorder.param(),))):
                t.data = values
            self.expand_again()

    def over(self, x_ndim: int, rows: int, owners: Any = None) -> Tensor:
        """`each` as it broadcasts with a tensor of `x_ndim` dims; NoRuleError.

        That holds as many rows as the module's input, or rows of which it is known whose they are
        (`provenance.RowProvenance`).
        """
        size, *own = self.each.shape  # asking a tensor like this one for its shape costs as much as an op
        shape = (*(1,) * (x_ndim - len(own)), *own)
        inputs = () if local.stand_ins is None else local.stand_ins.inputs
        told = owners is not None or any(rows == t.shape[0] for t in inputs)
        if len(own) > x_ndim or shape[0] != 1 or not told:
            raise NoRuleError(
                f"a parameter of shape {tuple(own)} has no place in {rows} rows of {size} samples"
            )
        each = self.each if shape[1:] == tuple(own) else self.each.reshape(size, *shape[1:])
        if owners is not None and owners.picked:
            return each.index_select(0, owners.sample_ids)
        return each if rows == size else each.repeat_interleave(rows // size, 0)


class _Unfollowed:
    """The hook of what stands for a parameter: its gradient is to go another way."""

    __torch_unserializable__ = True

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def __call__(self, grad: Tensor) -> None:
        raise RuntimeError(f"{_named(self.names)} {UNFOLLOWED}")


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "a parameter"


def _joined_by_others(t: PerSample) -> bool:
    """Whether a function that does not ask has put it into a graph, of which `each` knows nothing."""
    with torch_api.without_torch_function():
        return t.requires_grad and not t.is_leaf


def by_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the rule for `func`, or for each sample.

    Raises:
        NoRuleError: the function has written to its first argument and does not say so in its name, as in
            ``F.relu(w, inplace=True)``: what is written has no gradient.
    """
    own = args[0] if args and isinstance(args[0], PerSample) else None
    each = None if own is None else own.each
    version = None if each is None else _version(each)
    result = NotImplemented
    if func in _RULES:
        result = _RULES[func](func, *args, **kwargs)
    elif func in OPS:
        result = OPS[func](*args, **kwargs)
    if result is NotImplemented:
        result = _for_each(func, args, kwargs)
    written = own is not None and own.each is each and _version(each) != version
    if written and not op_kinds.writes(getattr(func, "__name__", "")):
        raise NoRuleError("a parameter of each sample's own was written to")
    return result


def _version(t: Tensor) -> int:
    """How often its memory has been written to; of inference tensors nobody counts."""
    t = behind(t)
    return 0 if t.is_inference() else t._version


def expansion_of(t: PerSample) -> Expansion:
    """What is behind one of which all samples' values are the same: for an op on a ragged batch's rows."""
    tag: Expansion | None = getattr(t.each, "_ps_expansion", None)
    if tag is not None:
        return tag.again(tag.weight, tag.rows)
    made = Expansion(t.each.detach()[0], t.each, UNSCALED)
    made.names = t.names
    return made


def recorded(own: Iterable[PerSample]) -> bool:
    """Whether what is made of one of these, or written to it, has a gradient of each sample's own."""
    return torch.is_grad_enabled() and any(t.each.requires_grad for t in own)


def names_of(own: Iterable[PerSample]) -> frozenset[str]:
    """Of the parameters that all of these were made of."""
    return frozenset[str]().union(*(t.names for t in own))


def followed() -> Any:
    """What knows whose the rows of tensors are (`gathered.GatheredRows`), where that is followed."""
    return local.gathered_rows if local.stand_ins is None or local.stand_ins.follows else None


def of_the_input(x: Tensor) -> bool:
    """Whether the rows of `x` lie where those of an input of the module lie, one or several in each, so that
    they are its.
    """
    return local.stand_ins is not None and any(x is t or lies_in(x, t) for t in local.stand_ins.inputs)


def lies_in(x: Tensor, t: Tensor) -> bool:
    """Whether the rows of `x` lie in those of `t`, one or several in each, in order."""
    x, t = behind(x), behind(t)
    if not x.ndim or _memory(x) != _memory(t) or not x.numel() or len(x) % len(t):
        return False
    block, k, offset = t.stride(0), len(x) // len(t), x.storage_offset() - t.storage_offset()
    apart = _extent(t) < block and x.stride(0) * k == block  # rows that are blocks of memory
    return apart and offset >= 0 and offset + (k - 1) * x.stride(0) + _extent(x) < block


def _memory(t: Tensor) -> int:
    """Where in memory lies what it is a view of."""
    return behind(t).untyped_storage().data_ptr()


def behind(t: Tensor) -> Tensor:
    """What the transforms of torch.func that run have wrapped."""
    while torch_api.is_wrapped(t):
        t = torch_api.unwrapped(t)
    return t


def _extent(t: Tensor) -> int:
    """How far from its first value a row's last one lies."""
    return sum((n - 1) * stride for n, stride in zip(t.shape[1:], t.stride()[1:], strict=True))


def plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What `func` gives for the shape S alone."""
    with torch_api.without_subclasses():
        return func(*args, **kwargs)


# ----------------------------------------------------------------------------------------------- any function
def _for_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function without a rule gives, run for each sample; of parameters that are all the same, run
    once.
    """
    given = list({id(t): t for t in tensors_of((args, kwargs))}.values())
    own = [t for t in given if isinstance(t, PerSample)]
    same, name = all(t.same for t in own), getattr(func, "__name__", str(func))
    writes = op_kinds.writes(name)
    if writes and not args:  # as torch.nn.init's are handed on
        raise NoRuleError(f"`{name}` has no rule for a parameter of each sample's own")
    graph = recorded(own) if writes else torch.is_grad_enabled()
    # no gradient, so there is nothing of each sample's own
    if same and (name in op_kinds.TO_NUMBERS or not graph):
        result = plainly(func, *map_tensors(values_of, args), **map_tensors(values_of, kwargs))
        if not (writes and isinstance(args[0], PerSample)):
            return result
        for other in _of_the_memory(args[0]):
            other.expand_again()
        return args[0]
    # which of the others are the batch's?
    others = [t for t in given if not isinstance(t, PerSample)]
    if followed() is None and any(t.requires_grad or _of_some_batch(t, own) for t in others):
        raise NoRuleError(f"`{name}` has no rule for a parameter of each sample's own")
    if kwargs.get("out") is not None:
        raise NoRuleError(f"`{name}` would write to a tensor that all samples share")
    if writes:
        return _written(args[0], _for_each(getattr(Tensor, op_kinds.apart(name)), args, kwargs))
    size, names = len(own[0].each), names_of(own)
    rows = _Rows(size, name)
    batch = [(t, held) for t in given if not isinstance(t, PerSample) and (held := rows.take(t)) is not None]
    one = function_of([*own, *(t for t, _ in batch)], func, args, kwargs)
    try:
        with torch_api.without_torch_function(), torch_api.quiet_vmap():
            each, together = [t.each for t in own], [rows for _, rows in batch]
            if same and not torch_api.functions_transformed():
                found = for_each(one, each, together)
            else:
                found = torch.func.vmap(one, randomness="same")(
                    *(t.contiguous() for t in each), *(t.unflatten(0, (size, -1)) for t in together)
                )
                found = map_tensors(lambda t: t.flatten(0, 1), found) if batch else found
            if batch and local.stand_ins is not None and local.stand_ins.choices is None:
                _check(one, each, together, found, size)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise NoRuleError(f"`{name}` cannot be run for each sample ({error})".splitlines()[0]) from error
    if not batch:
        return map_tensors(lambda each: PerSample.of(each, same, names), found)
    if local.stand_ins is not None:
        local.stand_ins.slow |= names
    return map_tensors(rows.back, found)


def _of_some_batch(t: Tensor, own: Sequence[PerSample]) -> bool:
    """Whether a tensor may hold something of the samples: in a loss, where a dim is as long as they are many,
    or some times as long.
    """
    if local.stand_ins is None or not local.stand_ins.in_loss:
        return t.ndim > 0
    return any(n % len(own[0].each) == 0 for n in t.shape) and not _goes_along(t, own)


def function_of(
    given: Sequence[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """A call as a function of some of its tensors, which it does not keep."""
    marks = {id(t): torch.empty(()) for t in given}
    marked = map_tensors(lambda t: marks.get(id(t), t), (args, kwargs))
    order = list(map(id, marks.values()))

    def run(*tensors: Tensor) -> Any:
        parts = dict(zip(order, tensors, strict=True))
        args, kwargs = map_tensors(lambda t: parts.get(id(t), t), marked)
        return func(*args, **kwargs)

    return run


def values_of(t: Tensor) -> Tensor:
    """The values of what stands for a parameter, an ordinary tensor."""
    return t.each.detach()[0] if isinstance(t, PerSample) else t


def is_vector(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is small beside the batch's: of it, the samples' own values cost
    nothing.
    """
    return math.prod(shape) == max(shape, default=1)


def _written(t: Any, result: Any) -> Any:
    """What a function that works in place leaves: `t`, with the result in it."""
    if isinstance(t, PerSample):
        if not isinstance(result, PerSample) or _shares_memory(t):
            raise NoRuleError("a parameter of each sample's own, or a view of one, would be written to")
        t.each, t.same, t.names, t.parts = result.each, result.same, result.names, ()
        return t
    if isinstance(result, PerSample):
        raise NoRuleError("samples' own values would be written into what they share")
    return t.copy_(result)


def _of_the_memory(t: PerSample) -> list[PerSample]:
    """What stands for values in the same memory: the parameter, copies that are none, views."""
    made = () if local.stand_ins is None else (ref() for ref in local.stand_ins.made)
    return [o for o in made if o is not None and _memory(o.each) == _memory(t.each)]


def _shares_memory(t: PerSample) -> bool:
    """Whether it is a parameter, or others are views of it, or it is one: they would not see what is written
    to it.
    """
    weights = () if local.stand_ins is None else local.stand_ins.weights.values()
    return any(o is not t for o in _of_the_memory(t)) or any(_memory(w) == _memory(t.each) for w in weights)


def _check(one: Callable[..., Any], each: list[Tensor], held: list[Tensor], found: Any, size: int) -> None:
    """An error where a function does not do to each sample's rows what it does to all."""
    with torch.no_grad():
        for i in range(min(size, 2)):
            alone = one(*(w[i] for w in each), *(t.unflatten(0, (size, -1))[i] for t in held))
            for t, rows in zip(tensors_of(alone), tensors_of(found), strict=True):
                own = rows.unflatten(0, (size, -1))[i]
                if own.shape != t.shape or not torch.allclose(
                    own, t, 1e-3, 1e-4 * float(t.abs().max()) if t.numel() else 0, True
                ):
                    raise ValueError("it does not do to each sample's rows what it does to all")


class _Rows:
    """The batch's tensors in a call of a function, batch-major, and its result in the order that they had."""

    def __init__(self, size: int, name: str) -> None:
        self.size, self.name = size, name
        self.batch: Any = None  # of the rows that were picked, if they were
        self.owners: Any = None

    def take(self, t: Tensor) -> Tensor | None:
        """(k * B, ...), each sample's rows together; None for what all samples share."""
        owners = None if followed() is None else followed().owners(t)
        if owners is None:
            return None
        if owners.sample_ids is None or (
            self.owners is not None and owners.picked and not owners.same(self.owners)
        ):
            raise NoRuleError(f"`{self.name}` takes rows of which it is not known whose they are")
        if self.owners is not None and owners.picked != self.owners.picked:
            raise NoRuleError(f"`{self.name}` takes rows that were picked beside others")
        self.owners = owners
        if not owners.picked:
            return t
        self.batch = owners.batch(self.size)
        with torch_api.without_torch_function():
            return self.batch.pack(t)  # type: ignore[no-any-return]

    def back(self, rows: Tensor) -> Tensor:
        """The result's rows."""
        if self.batch is None:
            followed().tag_batch(rows)
            return rows
        with torch_api.without_torch_function():
            rows = self.batch.unpack(rows)
        followed().tag(rows, self.owners)
        return rows


# -------------------------------------------------------------------------------------------------- the rules
def _reshaped(func: Any, t: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(t, PerSample) or (like := plainly(func, t, *args, **kwargs)).dtype != t.dtype:
        return NotImplemented  # view(dtype)
    return t.like(t.each.reshape(len(t.each), *like.shape))


def _transposed(func: Any, t: Any, dim0: int = 0, dim1: int = 1) -> Any:
    return t.like(t.each.transpose(dim0 % t.ndim + 1, dim1 % t.ndim + 1)) if t.ndim >= 2 else t


def _turned(func: Any, t: Any) -> Any:
    return t.like(t.each.mT) if t.ndim == 2 else NotImplemented


def _permuted(func: Any, t: Any, *dims: Any) -> Any:
    order = dims[0] if isinstance(dims[0], tuple | list) else dims
    return t.like(t.each.permute(0, *(d % t.ndim + 1 for d in order)))


def _indexed(func: Any, t: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(t, PerSample) or any(isinstance(i, PerSample) or _of_the_batch(i) for i in parts):
        return NotImplemented  # looked up by the batch's ids
    if len(parts) == 1 and (
        isinstance(index, int) or (isinstance(index, Tensor) and not index.ndim and index.dtype == torch.long)
    ):
        return t.part(int(index))
    like, each = plainly(func, t, index), t.each[(slice(None), *parts)]
    return t.like(each) if each.shape[1:] == like.shape else NotImplemented


def _of_the_batch(index: Any) -> bool:
    """Whether an index has its values from the samples."""
    if not isinstance(index, Tensor) or not index.ndim:
        return False
    return of_the_input(index) if followed() is None else followed().owners(index) is not None


def _expanded(func: Any, t: Any, *sizes: Any) -> Any:
    """To the batch: a leading dim of one becomes the samples'."""
    shape = tuple(sizes[0]) if isinstance(sizes[0], tuple | list) else sizes
    standing = local.stand_ins
    if not isinstance(t, PerSample) or standing is None or standing.in_loss:
        return NotImplemented
    fits = any(shape[0] == len(x) for x in standing.inputs) and (t.ndim < len(shape) or t.shape[0] == 1)
    if shape[0] in (-1, 1) or not standing.choose(fits):
        return NotImplemented
    batch = t.over(len(shape), shape[0])
    batch = batch.expand(*shape) if func is Tensor.expand else batch.repeat(1, *shape[1:])
    if followed() is not None:
        followed().tag_batch(batch)
    return batch


def _of_each(func: Any, t: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What does the same to every value."""
    given = (*args, *kwargs.values())
    if any(isinstance(a, PerSample) for a in given) or kwargs.get("out") is not None:
        return NotImplemented
    if not isinstance(t, PerSample) or (t.same and not is_vector(t.shape)):
        return NotImplemented
    return t.like(func(t.each, *args, **kwargs))


def _by_kind(t: Tensor, other: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``t.to(other)`` and ``t.type_as(other)`` by what they take of another tensor, which is no value."""
    if isinstance(other, Tensor):
        args = (other.device, other.dtype, *args)
    elif other is not None:
        args = (other, *args)
    return Tensor.to, (t, *args), kwargs


def _converted(func: Any, t: Any = None, *args: Any, **kwargs: Any) -> Any:
    """To another dtype, or order in memory; what is as wanted stays itself, as in torch."""
    if not isinstance(t, PerSample):
        return NotImplemented
    if (like := plainly(func, t, *args, **kwargs)) is t:
        return t
    if not t.same or is_vector(t.each.shape[1:]):
        return _of_each(func, t, *args, **kwargs)
    if (like.dtype, like.device) != (t.dtype, t.device) or torch_api.functions_transformed():
        return NotImplemented
    one = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return t.like(_Valued.apply(t.each, (one.copy_(values_of(t)),)))


class _Valued(Op):
    """An expansion (B, *S) over other values (S), the only ones in a tuple: they have no gradient."""

    @staticmethod
    def forward(ctx: Any, each: Tensor, values: tuple[Tensor]) -> Tensor:
        return values[0].detach().expand_as(each)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """With numbers and other such parameters another one; with the batch, in whose rows each sample's meets
    its own, a tensor.
    """
    if any(isinstance(a, Tensor) for a in kwargs.values()):
        return NotImplemented
    own = [a for a in args if isinstance(a, PerSample)]
    others = [a for a in args if isinstance(a, Tensor) and not isinstance(a, PerSample)]
    ndim = max(*(t.each.ndim - 1 for t in own), *(t.ndim for t in others), 0)
    batch = [t for t in others if t.ndim]
    if not batch:
        shapes = (t.shape for t in (*own, *others))
        if all(t.same for t in own) and not is_vector(torch.broadcast_shapes(*shapes)):
            return NotImplemented
        aligned = [
            a.each.reshape(len(a.each), *(1,) * (ndim - a.ndim), *a.shape) if isinstance(a, PerSample) else a
            for a in args
        ]
        each = func(*aligned, **kwargs)
        return _of_own(own, each) if isinstance(each, Tensor) else NotImplemented  # `w == None`
    if any(t.ndim != ndim or t.shape[0] != batch[0].shape[0] for t in batch):  # is it the batch's, or shared?
        return NotImplemented
    if (owners := _owners(batch)) is NotImplemented:
        return NotImplemented
    try:
        return func(
            *(a.over(ndim, batch[0].shape[0], owners) if isinstance(a, PerSample) else a for a in args),
            **kwargs,
        )
    except NoRuleError:
        return NotImplemented


def _owners(batch: Sequence[Tensor]) -> Any:
    """Whose the rows of all of these tensors are; None where they are not followed, NotImplemented where that
    is not known.
    """
    if followed() is None:
        return None
    first, *others = (followed().owners(t) for t in batch)
    known = (
        first is not None
        and first.sample_ids is not None
        and all(o is not None and o.same(first) for o in others)
    )
    return first if known else NotImplemented


def _of_own(own: Sequence[PerSample], each: Tensor) -> PerSample:
    return PerSample.of(each, all(t.same for t in own), names_of(own))


def _joined(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """With tensors that all samples share: what such a parameter is put beside is no batch."""
    own = [t for t in tensors if isinstance(t, PerSample)]
    if kwargs or (followed() is not None and any(followed().owners(t) is not None for t in tensors)):
        return NotImplemented
    trained = any(t.requires_grad for t in tensors if not isinstance(t, PerSample))  # a loss of all samples
    once = all(t.same for t in own) and (func is torch.stack or not all(is_vector(t.shape) for t in tensors))
    if once and not trained:
        return NotImplemented
    size, ndim = len(own[0].each), tensors[0].ndim + (func is torch.stack)
    return _of_own(
        own,
        func(
            [t.each if isinstance(t, PerSample) else t.expand(size, *t.shape) for t in tensors],
            dim % ndim + 1,
        ),
    )


def _in_place(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Written to the batch; a parameter is not written to."""
    return NotImplemented if isinstance(t, PerSample) else _pointwise(func, t, *args, **kwargs)


def _replaced(func: Any, t: Any, values: Any) -> None:
    """``t.data = values``: those of the parameter, too."""
    values = values_of(values).detach()
    own = isinstance(t, PerSample) and t.same
    if not own or (values.shape, values.dtype, values.device) != (t.shape, t.dtype, t.device):
        raise NoRuleError("the `.data` of a parameter of each sample's own would be replaced")
    t.replace(values)


def _hooked(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NoRuleError("a hook is registered on a parameter of each sample's own, or on what was made of it")


def _made_like(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Of nobody's values (noise): the same for all samples, and without a gradient."""
    if not isinstance(t, PerSample) or kwargs.get("requires_grad"):
        return NotImplemented
    found = plainly(func, values_of(t), *args, **kwargs)
    return PerSample.of(found.expand(len(t.each), *found.shape), True)


def _trained(func: Any, t: Any, requires_grad: bool = True) -> Any:
    """What is cut off from the parameter's graph, to be differentiated by itself."""
    if not isinstance(t, PerSample):
        return NotImplemented
    if t.each.requires_grad != requires_grad:
        if not t.each.is_leaf:
            raise NoRuleError("a parameter of each sample's own would have no gradient")
        t.each.requires_grad_(requires_grad)
    return t


def _set(func: Any, t: Any, index: Any, value: Any) -> Any:
    """A sample's own values written to rows of the batch that a mask or an index picks."""
    own = [p for p in tensors_of((t, index, value)) if isinstance(p, PerSample)]
    if isinstance(t, PerSample) and all(p.same for p in own) and not recorded(own):
        return NotImplemented  # nothing of each sample's own
    owners = NotImplemented if followed() is None or isinstance(t, PerSample) else _owners([t])
    if not isinstance(value, PerSample) or owners is NotImplemented:
        raise NoRuleError(
            "a parameter of each sample's own is written to, or to what is not known to be the batch's"
        )
    parts = index if isinstance(index, tuple) else (index,)
    with torch_api.without_torch_function():
        # whose each of the values is that are written
        ids = owners.sample_ids.view(-1, *(1,) * (t.ndim - 1)).expand_as(t)[parts]
        if ids.ndim < value.ndim:
            raise NoRuleError("a parameter of each sample's own is written to values of less dims")
        each = value.each.reshape(len(value.each), *(1,) * (ids.ndim - value.ndim), *value.shape).expand(
            -1, *ids.shape
        )
        t[parts] = each.gather(0, ids.unsqueeze(0)).squeeze(0)
    return None


def _attention(
    func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if any(isinstance(t, PerSample) for t in (query, key, value)) or len(query) != len(key) != len(value):
        return NotImplemented
    if (owners := _owners([query, key, value])) is NotImplemented:
        return NotImplemented
    return func(query, key, value, attn_mask.over(query.ndim, len(query), owners), *args, **kwargs)


_KINDS: dict[Rule, Iterable[str]] = {
    plainly: op_kinds.READ,
    _reshaped: [*op_kinds.RESHAPED, "unsqueeze"],
    _transposed: ["transpose", "t"],
    _permuted: ["permute"],
    _joined: [*op_kinds.JOINED, "stack"],
    _expanded: ["expand", "repeat"],
    _indexed: ["__getitem__"],
    _set: ["__setitem__"],
    _converted: op_kinds.CONVERTED,
    _of_each: [*op_kinds.OF_ONE, *op_kinds.COPIED],
    _pointwise: [*op_kinds.OF_SEVERAL, "broadcast_tensors"],
    _in_place: op_kinds.INTO_FIRST,
    _trained: ["requires_grad_"],
    _hooked: ["register_hook", "retain_grad"],
    _made_like: [*op_kinds.DRAWN_LIKE, "empty_like"],
    _attention: ["scaled_dot_product_attention"],
}
_RULES: dict[Any, Rule] = {f: rule for rule, names in _KINDS.items() for f in op_kinds.functions(names)}
_OF_A_KIND = set(op_kinds.functions(["to", "type_as"]))
_RULES |= {getattr(Tensor, name).__get__: plainly for name in op_kinds.PROPERTIES}
_RULES |= dict.fromkeys((Tensor.mT.__get__, Tensor.T.__get__), _turned)  # type: ignore[attr-defined]
_RULES[Tensor.requires_grad.__get__] = lambda func, t: t.each.requires_grad  # type: ignore[attr-defined]
_RULES[Tensor.data.__set__] = _replaced  # type: ignore[attr-defined]
_RULES[Tensor.data.__get__] = lambda func, t: t.like(t.each.detach())  # type: ignore[attr-defined]
_READ = {getattr(Tensor, name).__get__ for name in (*op_kinds.PROPERTIES, "requires_grad")}
_READ |= set(op_kinds.functions(op_kinds.READ))
_BACKWARD = {Tensor.backward, torch.autograd.grad, torch.autograd.backward}
_OF_THE_GRAPH = {getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf")}
_TO_NUMBERS = set(op_kinds.functions(op_kinds.TO_NUMBERS))
