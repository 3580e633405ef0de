"""`PerSample`: one tensor in the place of a parameter, which holds values of its own for each sample, so that
a forward runs once, for the whole batch, as it is written.

It has the parameter's shape S, and knows the B values (B, *S) that it stands for. A torch function that is
given one has a rule (in `rules`, or in `op_dispatch`: the ops of torch.nn, in their fast form); any other is
run for each sample by itself. An op on such tensors, and on what all samples share, gives another
`PerSample`. An op that also takes a tensor of the batch gives an ordinary one: each sample's rows were
combined with that sample's own values. Modules without a replacement are run so ("direct", in `general`).

Which rows of a batch's tensor are whose is never guessed from a multiple of B. Where rows are followed
(`attribution/gathered.py`), that tells. Else a `PerSample` meets only the module's own inputs and views of
them, and, in ops that go value by value, tensors of as many rows. All else is a `NoRuleError`.
"""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core import op_kinds
from ..core.context import UNSCALED, NoRuleError, in_ragged, local, transforming
from ..core.expansion import Expansion, Op, Weight
from ..core.trees import exchanged, map_tensors, tensors_of
from ..functional.collected import Token, each_of
from ..functional.computed import Computed, Leaf, Source, compute
from ..functional.each import for_each

Rule = Callable[..., Any]


# rules for torch's functions, (func, *args, **kwargs), NotImplemented where one has nothing to say; `rules`
# enters them
BY_FUNCTION: dict[Any, Rule] = {}
# ops whose weight may be a PerSample; `op_dispatch` enters them
OPS: dict[Any, Rule] = {}
# what is asked in a ragged batch; `row_ops` enters itself
RAGGED: list[Rule] = []


@dataclass(eq=False)
class Standing:
    """What is known of the forward that runs with a `PerSample` for each of its parameters."""

    includes_children: bool = False  # parameters of all modules below are stood for, too
    # by their names: (B, *S), or what is behind the samples' own of a parameter
    weights: Mapping[str, Weight] = field(default_factory=dict)
    follows: bool = False  # whose the rows of other tensors are is followed
    # for each tensor with as many rows as the batch, in order, whether the run that proved this took it for
    # the batch's; None during that run; and the ways in which parameters met the batch then (`meet`)
    choices: Sequence[bool] | None = None
    known: frozenset[Hashable] = frozenset()
    prefix: str = ""  # of the names by which errors call parameters
    path: str = ""  # of the module
    inputs: Sequence[Tensor] = ()  # those of the forward that hold the batch: in dim 0, k rows a sample
    # ids of parameters that reach no sample's output: layers that have no others compute as they are
    idle: frozenset[int] = frozenset()
    made: list["weakref.ref[PerSample]"] = field(default_factory=list)
    chosen: list[bool] = field(default_factory=list)
    met: set[Hashable] = field(default_factory=set)
    level: int = field(default_factory=torch_api.level)  # of transforms around the forward
    in_loss: bool = False  # after the forward: what is no batch's is known by its shape
    # parameters that some op used as truly different ones, in the run that proves this
    slow: set[str] = field(default_factory=set)
    again: bool = False  # its weights have been stood for, in a part of the forward that is run again

    @property
    def proving(self) -> bool:
        """Whether this run proves how the forward may run."""
        return self.choices is None

    def mark(self) -> Callable[[], "Standing"]:
        """What gives the same for a part of the forward that begins here, and is computed again."""
        chosen = len(self.chosen)

        def again() -> Standing:
            standing = copy.copy(self)
            standing.choices, standing.known = self.choices or self.chosen, self.known or frozenset(self.met)
            standing.chosen, standing.met, standing.slow = self.chosen[:chosen], set(), set()
            standing.level, standing.in_loss = torch_api.level(), False
            return standing

        return again

    def stand_ins(self) -> dict[str, "PerSample"]:
        """One for each of the weights."""
        token, found = Token(), {}
        expansions = [w for w in self.weights.values() if isinstance(w, Expansion)]
        collects = not all(is_vector(w.weight.shape) for w in expansions)
        for name, w in self.weights.items():
            names = frozenset((self.prefix + name,))
            if isinstance(w, Expansion) and collects:
                if self.again:  # not all that ops hand over comes together
                    w.share()
                found[name] = PerSample.computed(token.leaf(w, w.shape[0]), w.shape[0], names, token)
            else:
                each = _watched(w.tensor(w.shape[0]) if isinstance(w, Expansion) else w)
                found[name] = PerSample.of(each, len(each) < 2 or each.stride(0) == 0, names)
        self.again = True
        return found

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

    def meet(self, *how: Hashable) -> None:
        """Note a way in which a parameter meets the batch; NoRuleError where none did so when this was
        proved: a forward may take another path, in which what has as many rows is no batch.
        """
        if self.proving:
            self.met.add(how)
        elif how not in self.known:
            raise NoRuleError("it does what it did not when it was proved")

    def left(self) -> bool:
        """Whether there is still one that is not to be seen in a further call."""
        return any(one is not None and not one.is_kept for one in (ref() for ref in self.made))

    def check_level(self) -> None:
        """NoRuleError inside a transform of torch.func that the forward makes: what it has wrapped is not
        followed.
        """
        if torch_api.level() > self.level:
            raise NoRuleError("a parameter of each sample's own is used inside a transform of torch.func")


UNFOLLOWED = (
    "was used by a function that does not ask what stands for it: a torch.autograd.Function of one's own, or"
    " one of a jagged nested tensor (of which use the values())"
)


class PerSample(Tensor):
    """A tensor of shape S for each sample: `each` (B, *S), which of what was computed of parameters alone is
    made when it meets a batch.
    """

    samples: int  # B
    same: bool  # whether all samples' values are the same, though their gradients are not
    # of the parameters that it was made of
    names: frozenset[str] = frozenset()
    parts: tuple[Tensor, ...] = ()
    is_kept = False  # by what may be used after the call
    _each: Tensor | None = None
    _source: Source | None = None
    _token: Token | None = None  # for what ops hand over
    _unwatched = False  # by a call that is proved

    @staticmethod
    def of(each: Tensor, same: bool = False, names: frozenset[str] = frozenset()) -> "PerSample":
        """What stands for `each` (B, *S), B not 0."""
        one: PerSample = each.detach()[0].as_subclass(PerSample)
        one._each = each
        return one._standing(len(each), same, names)

    @staticmethod
    def computed(
        source: Source, samples: int, names: frozenset[str], token: Token | None = None
    ) -> "PerSample":
        """What stands for a recorded parameter, or for values that were computed of parameters alone."""
        one: PerSample = source.value.detach().as_subclass(PerSample)
        one._source, one._token = source, token
        return one._standing(samples, True, names)

    def _standing(self, samples: int, same: bool, names: frozenset[str]) -> "PerSample":
        self.samples, self.same, self.names = samples, same, names
        if self.graph.requires_grad and not transforming():
            refuse_gradients(self, names)
        if local.stand_ins is not None:
            local.stand_ins.made.append(weakref.ref(self))
        return self

    @property
    def each(self) -> Tensor:
        """(B, *S), of stride 0 over samples where these are the `same`, mostly."""
        self.watch()
        return self.given

    @each.setter
    def each(self, each: Tensor) -> None:
        self._each, self._source, self.parts = each, None, ()

    def watch(self) -> None:
        """Look at it where a call is proved, if that is not done yet."""
        given = self.given
        if self._unwatched:
            self._unwatched = False
            _watched(given)

    @property
    def given(self) -> Tensor:
        """The same, for an op whose result is looked at in its place, where a call is proved."""
        if self._each is None:
            assert self._source is not None
            with torch.enable_grad():  # it stays, wherever it is asked for first
                self._each = each_of(self._source, self._token)
            self._unwatched = True
        return self._each

    @property
    def is_computed(self) -> bool:
        """Whether more is computed of it before it meets a batch; of a vector, each sample's own cost
        nothing.
        """
        source = self._source
        return source is not None and (isinstance(source, Computed) or not is_vector(source.value.shape))

    @property
    def source(self) -> Source:
        """What computations take it for, where all samples' values are the same."""
        return self._source or Leaf(self.each, self.samples)

    @property
    def graph(self) -> Tensor:
        """The tensor whose gradient is that of each sample's, or leads there."""
        return self._source.value if self._each is None else self._each  # type: ignore[union-attr]

    @property
    def sizes(self) -> torch.Size:
        """Its shape, S: to ask itself costs as much as an op."""
        return self._each.shape[1:] if self._source is None else self._source.value.shape  # type: ignore[union-attr]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """How many dims it has; asked so, no function of torch's runs."""
        return len(self.sizes)

    def become(self, other: "PerSample") -> None:
        """Stand for what another one does."""
        self._each, self._source, self._token, self.parts = other._each, other._source, other._token, ()
        self._unwatched = other._unwatched
        self.samples, self.same, self.names = other.samples, other.same, other.names

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
            if isinstance(t, PerSample) and t.graph.grad_fn is None and _joined_by_others(t):
                raise NoRuleError(f"what was made of {named(t.names)} {UNFOLLOWED}, as module hooks are")
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
        if self._source is not None:
            if isinstance(self._source, Leaf):
                leaf = self._token.leaf(self._source.expansion, self.samples)  # type: ignore[union-attr, arg-type]
                self._each, self._source, self.parts = None, leaf, ()
            return
        before, tag = self.graph, getattr(self._each, "_ps_expansion", None)
        if tag is not None and local.stand_ins is not None:
            with torch.enable_grad():
                self.each = tag.tensor(len(before))
            weights: Any = local.stand_ins.weights
            weights.update({name: self.each for name, w in weights.items() if w is before})

    def replace(self, values: Tensor) -> None:
        """Stand for a parameter whose `.data` becomes these values; in a run that proves, which leaves the
        parameter as it is, too.
        """
        leaf = self._source if isinstance(self._source, Leaf) else None
        tag = leaf.expansion if leaf is not None else getattr(self.each, "_ps_expansion", None)
        if tag is None:
            with torch.enable_grad():
                self.each = over_other_values(self.each, values)
        else:
            for t in (tag.weight, *(() if tag.recorder is None else (tag.recorder.param(),))):
                t.data = values
            self.expand_again()

    def over(self, func: Any, x_ndim: int, rows: int, owners: Any = None) -> Tensor:
        """`each` as it broadcasts with a tensor of `x_ndim` dims in a function; NoRuleError.

        That holds as many rows as the module's input, or rows of which it is known whose they are
        (`provenance.RowProvenance`).
        """
        size, *own = self.each.shape
        shape = (*(1,) * (x_ndim - len(own)), *own)
        inputs = () if local.stand_ins is None else local.stand_ins.inputs
        told = owners is not None or any(rows == t.shape[0] for t in inputs)
        if owners is None and told and local.stand_ins is not None and not local.stand_ins.in_loss:
            local.stand_ins.meet(func, self.names, x_ndim, len(own))
        if len(own) > x_ndim or shape[0] != 1 or not told:
            raise NoRuleError(
                f"a parameter of shape {tuple(own)} has no place in {rows} rows of {size} samples"
            )
        each = self.each if shape[1:] == tuple(own) else self.each.reshape(size, *shape[1:])
        if owners is not None and owners.picked:
            return each.index_select(0, owners.sample_ids)
        return each if rows == size else each.repeat_interleave(rows // size, 0)


def _watched(each: Tensor) -> Tensor:
    """A parameter of each sample's own: the caller may index what now has a row for each."""
    if local.batch is not None and local.batch.outputs is not None:
        local.batch.outputs.add([(each, 0, None)])
    return each


class _Unfollowed:
    """The hook of what stands for a parameter: its gradient is to go another way."""

    __torch_unserializable__ = True

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def __call__(self, grad: Tensor) -> None:
        raise RuntimeError(f"{named(self.names)} {UNFOLLOWED}")


def refuse_gradients(t: Tensor, names: frozenset[str]) -> None:
    """Have gradients of what was made of these parameters be an error, as they are to go another way."""
    with torch_api.without_torch_function():
        t.requires_grad_().register_hook(_Unfollowed(names))


def named(names: Iterable[str]) -> str:
    """Parameters, as a message names them."""
    return ", ".join(f"`{name}`" for name in sorted(names)) or "a parameter"


def _joined_by_others(t: PerSample) -> bool:
    """Whether a function that does not ask has put it into a graph, of which `each` knows nothing."""
    with torch_api.without_torch_function():
        return t.requires_grad and not t.is_leaf


def _by_kind(t: Tensor, other: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``t.to(other)`` and ``t.type_as(other)`` by what they take of another tensor, which is no value."""
    if isinstance(other, Tensor):
        args = (other.device, other.dtype, *args)
    elif other is not None:
        args = (other, *args)
    return Tensor.to, (t, *args), kwargs


_OF_A_KIND = set(op_kinds.functions(["to", "type_as"]))


def by_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the rule for `func`, or for each sample.

    Raises:
        NoRuleError: the function has written to its first argument and does not say so in its name, as in
            ``F.relu(w, inplace=True)``: what is written has no gradient.
    """
    own = args[0] if args and isinstance(args[0], PerSample) else None
    graph = None if own is None else own.graph
    version = None if graph is None else _version(graph)
    result = NotImplemented
    if func in BY_FUNCTION:
        result = BY_FUNCTION[func](func, *args, **kwargs)
    elif func in OPS:
        result = OPS[func](*args, **kwargs)
    if result is NotImplemented:
        result = _for_each(func, args, kwargs)
    written = own is not None and own.graph is graph and _version(graph) != version
    if written and not op_kinds.writes(getattr(func, "__name__", "")):
        raise NoRuleError("a parameter of each sample's own was written to")
    return result


def _version(t: Tensor) -> int:
    """How often its memory has been written to; of inference tensors nobody counts."""
    t = behind(t)
    return 0 if t.is_inference() else t._version


class _Valued(Op):
    """`over_other_values`, which come in a tuple: autograd does not look into one."""

    rows_dim = None

    @staticmethod
    def forward(ctx: Any, each: Tensor, values: tuple[Tensor]) -> Tensor:
        return values[0].detach().expand_as(each)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def over_other_values(each: Tensor, values: Tensor) -> Tensor:
    """An expansion (B, *S) over other values (S), which have no gradient."""
    found: Tensor = _Valued.apply(each, (values,))
    return found


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
    return torch.is_grad_enabled() and any(t.graph.requires_grad for t in own)


def trained(others: Iterable[Tensor]) -> bool:
    """Whether what is made of one of these ordinary tensors, or written to it, has a gradient."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in others)


def all_same(own: Iterable[PerSample]) -> bool:
    """Whether all samples' values of each of these are the same."""
    return all(t.same for t in own)


def names_of(own: Iterable[PerSample]) -> frozenset[str]:
    """Of the parameters that all of these were made of."""
    names = [t.names for t in own]
    return names[0] if len(names) == 1 else frozenset[str]().union(*names)


def followed() -> Any:
    """What knows whose the rows of tensors are (`gathered.GatheredRows`), where that is followed."""
    return local.gathered_rows if local.stand_ins is None or local.stand_ins.follows else None


def of_the_input(x: Tensor) -> bool:
    """Whether the rows of `x` lie where those of an input of the module lie, one or several in each, so that
    they are its.
    """
    return local.stand_ins is not None and any(x is t or lies_in(x, t) for t in local.stand_ins.inputs)


def of_parameter(t: Tensor) -> bool:
    """Whether a tensor is a parameter or a part of one, whatever its length."""
    base = t._base if t._is_view() else t
    return isinstance(t, PerSample) or isinstance(base, (torch.nn.Parameter, PerSample))


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
    given = {id(t): t for t in tensors_of((args, kwargs))}.values()
    own = [t for t in given if isinstance(t, PerSample)]
    same, name = all_same(own), getattr(func, "__name__", str(func))
    writes = op_kinds.writes(name)
    if writes and not args:  # as torch.nn.init's are handed on
        raise NoRuleError(f"`{name}` has no rule for a parameter of each sample's own")
    others = [t for t in given if not isinstance(t, PerSample)]
    graph = recorded(own) or trained(others) if writes else torch.is_grad_enabled()
    # no gradient, so there is nothing of each sample's own
    if same and (name in op_kinds.TO_NUMBERS or not graph):
        result = plainly(func, *map_tensors(values_of, args), **map_tensors(values_of, kwargs))
        if not (writes and isinstance(args[0], PerSample)):
            return result
        each = args[0]._each
        if each is not None and each.stride(0) and len(each) > 1:  # of a vector: the others' values, too
            with torch.no_grad():
                each.copy_(each[:1].clone())
        for other in _of_the_memory(args[0]):
            other.expand_again()
        return args[0]
    # which of the others are the batch's?
    if followed() is None and any(t.requires_grad or _of_some_batch(t, own) for t in others):
        raise NoRuleError(f"`{name}` has no rule for a parameter of each sample's own")
    if kwargs.get("out") is not None:
        raise NoRuleError(f"`{name}` would write to a tensor that all samples share")
    if writes:
        if (function := getattr(Tensor, op_kinds.apart(name), None)) is None:
            raise NoRuleError(f"`{name}` writes to a parameter of each sample's own")
        return _written(args[0], _for_each(function, args, kwargs))
    rows = _Rows(own[0].samples, name)
    batch = [(t, held) for t in others if (held := rows.take(t)) is not None]
    of_batch = {id(t) for t, _ in batch}
    # what all samples share gets the sum of what each has to say
    shared = [t for t in others if t.requires_grad and id(t) not in of_batch]
    if (stand_ins := local.stand_ins if batch else None) is not None:
        stand_ins.meet(func, names_of(own), *(t.ndim for t in (*own, *shared)), *(t.ndim for t, _ in batch))
    try:
        with torch_api.without_torch_function():
            if same and not batch and not torch_api.functions_transformed():
                return once(func, args, kwargs, own, shared)
            one = function_of([*own, *shared, *(t for t, _ in batch)], func, args, kwargs)
            with torch_api.quiet_vmap():
                found = _run_for_each(one, rows, own, shared, batch)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise NoRuleError(f"`{name}` cannot be run for each sample ({error})".splitlines()[0]) from error
    if not batch:
        return map_tensors(lambda each: PerSample.of(each, same, names_of(own)), found)
    if stand_ins is not None:
        stand_ins.slow |= names_of(own)
    return map_tensors(rows.back, found)


def once(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: Sequence[PerSample],
    shared: Sequence[Tensor] = (),
) -> Any:
    """What a function gives of these, all samples' values of which are the same: computed once."""
    size, names, token = own[0].samples, names_of(own), own[0]._token
    sources: dict[int, Source] = {id(t): t.source for t in own}
    sources |= {id(t): Leaf(t.expand(size, *t.shape), size) for t in shared}
    found, computed = compute(_INSTEAD.get(func, func), sources, args, kwargs)
    return map_tensors(lambda _: PerSample.computed(next(computed), size, names, token), found)


def _run_for_each(
    one: Callable[..., Any],
    rows: "_Rows",
    own: Sequence[PerSample],
    shared: Sequence[Tensor],
    batch: Sequence[tuple[Tensor, Tensor]],
) -> Any:
    """What `one`, a function of all of these, gives with the values of each sample: stacked, or where there
    are rows of the `batch`, all rows.
    """
    size, together = rows.size, [held for _, held in batch]
    each, same = [t.each for t in own], all_same(own)
    if batch and rows.batch is None and rows.name in op_kinds.OF_SEVERAL:
        each = [own_rows(t, batch[0][0], size) for t in own]
        same = same and all(one is t.each for one, t in zip(each, own, strict=True))
    each += [t.expand(size, *t.shape) for t in shared]
    if same and not torch_api.functions_transformed():
        found = for_each(one, each, together)
    else:
        found = torch.func.vmap(one, randomness="same")(
            *(t.contiguous() for t in each), *(t.unflatten(0, (size, -1)) for t in together)
        )
        found = map_tensors(lambda t: t.flatten(0, 1), found) if batch else found
    if batch and local.stand_ins is not None:
        proving = local.batch is not None and local.batch.proving
        if proving or rows.name in PUTS:
            _check(one, each, together, found, range(size))
        elif local.stand_ins.proving:
            _check(one, each, together, found, range(min(size, 2)))
    return found


def own_rows(t: PerSample, rows: Tensor, size: int) -> Tensor:
    """Where values meet those of the batch's rows one by one, and each sample has as many as all rows: the
    part that meets its own, (B, k, ...); else all.
    """
    if len(t.sizes) != rows.ndim or len(rows) <= 1 or t.sizes[0] != len(rows):
        return t.each
    return t.each.unflatten(1, (size, -1)).diagonal(dim1=0, dim2=1).movedim(-1, 0)


def _of_some_batch(t: Tensor, own: Sequence[PerSample]) -> bool:
    """Whether a tensor may hold something of the samples: in a loss, where a dim is as long as they are many,
    or some times as long.
    """
    if local.stand_ins is None or not local.stand_ins.in_loss:
        return t.ndim > 0
    return any(n % own[0].samples == 0 for n in t.shape) and not goes_along(t, own)


def goes_along(t: Tensor, given: Iterable[Tensor]) -> bool:
    """Whether a constant has a value for each of one of these, or of its last dims: it is no batch's then,
    however long.
    """
    shapes = (tuple(one.shape[max(one.ndim - t.ndim, 0) :]) for one in given)
    return not t.requires_grad and tuple(t.shape) in shapes


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """What torch.cdist gives."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


_INSTEAD = {torch.cdist: _distances}  # of functions whose gradients torch's vmap rules get wrong
_MARKS: list[Tensor] = []  # which take the place of what is given


def function_of(
    given: Sequence[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """A call as a function of some of its tensors, which it does not keep."""
    if (missing := len(given) - len(_MARKS)) > 0:
        with torch_api.without_torch_function():
            _MARKS.extend(Tensor() for _ in range(missing))
    marks = dict(zip(map(id, given), _MARKS, strict=False))
    marked = exchanged((args, kwargs), marks)
    order, func = list(map(id, marks.values())), _INSTEAD.get(func, func)

    def run(*tensors: Tensor) -> Any:
        parts = dict(zip(order, tensors, strict=True))
        args, kwargs = exchanged(marked, parts)
        return func(*args, **kwargs)

    return run


def values_of(t: Tensor) -> Tensor:
    """The values of what stands for a parameter, an ordinary tensor."""
    if not isinstance(t, PerSample):
        return t
    return t.each.detach()[0] if t._source is None else t._source.value.detach()


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
        t.become(result)
        return t
    if isinstance(result, PerSample):
        raise NoRuleError("samples' own values would be written into what they share")
    return t.copy_(result)


def _of_the_memory(t: PerSample) -> list[PerSample]:
    """What stands for values in the same memory: the parameter, copies that are none, views."""
    made = () if local.stand_ins is None else (ref() for ref in local.stand_ins.made)
    return [o for o in made if o is not None and _memory(o.graph) == _memory(t.graph)]


def _shares_memory(t: PerSample) -> bool:
    """Whether it is a parameter, or others are views of it, or it is one: they would not see what is written
    to it.
    """
    weights = () if local.stand_ins is None else local.stand_ins.weights.values()
    return any(o is not t for o in _of_the_memory(t)) or any(
        _memory(w.weight if isinstance(w, Expansion) else w) == _memory(t.graph) for w in weights
    )


# by which masks and indices say which rows go where: in each batch otherwise
PUTS = set(op_kinds.with_in_place([*op_kinds.PUT, "index_put", "masked_scatter"]))


def _check(
    one: Callable[..., Any], each: list[Tensor], held: list[Tensor], found: Any, samples: Iterable[int]
) -> None:
    """An error where a function does not do to each sample's rows what it does to all."""
    size = len(each[0])
    with torch.no_grad():
        for i in samples:
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
