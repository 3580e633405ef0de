"""Which rows of a layer's input belong to which sample, where shapes alone cannot tell.

Time may be as long as the batch, rows may be flattened batch-major or time-major, a table may have as many
rows as the batch has samples. Then the model is run a few times more, by its original layers and without
gradients: as it was called, and with some samples changed. The rows that change are those samples'. What is
learned about a call of a layer is kept for later batches.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from .. import torch_api
from ..core import contents
from ..core.contents import own_parameters
from ..core.context import (
    Batch,
    NoRuleError,
    Settings,
    local,
    note_progress,
    picked_samples,
    transforming,
)
from ..core.converted_module import ConvertedModule
from ..core.trees import Call, cloned, is_parameter, map_tensors, tensors_in, tensors_of, written_to
from .graph import given_to_functions
from .snapshot import trial

# how a layer's input holds the samples: in dim d ("dim", d); as rows of dim 0, k a sample, each sample's
# together or each time step's together; as rows that masks have picked, see `gathered.py`; not at all, being
# the same for all, in one row or without a batch dim (a table); or in no such way
Layout = tuple[str, int]
# a tensor that a call takes or returns: the module's id, the number of the call, its place ("in", 0), its
# dims
Key = tuple[int, int, tuple[str, int], int]
BATCH_MAJOR, TIME_MAJOR, PICKED, SHARED, TABLE, MIXED = (
    (kind, 0) for kind in ("batch-major", "time-major", "picked", "shared", "table", "mixed")
)
FIRST = ("in", 0)
_NOWHERE = torch.empty(0, dtype=torch.bool, device="cpu")
_PREFERENCE = [*(("dim", d) for d in range(16)), BATCH_MAJOR, TIME_MAJOR]


class Ambiguous(BaseException):
    """Raised inside of a layer whose input cannot be attributed by its shape, and caught by the layer: the
    call is given up, tracked, and run again.
    """


def _unwatched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with torch's functions as they are: no mode looks at what it asks of tensors, of which there is
    much.
    """

    @functools.wraps(fn)
    def unwatched(*args: Any) -> Any:
        with torch_api.without_torch_function():
            return fn(*args)

    return unwatched


def _copy(t: Tensor) -> Tensor:
    """A copy without the graph, of which is known whose the rows are, too."""
    copied = t.detach().clone()
    if (picks := local.gathered_rows) is not None:
        picks.tag(copied, picks.owners(t))
    return copied


def _kept(t: Tensor) -> Tensor:
    """The same, that needs a gradient where the tensor does (transforms of torch.func do not let it)."""
    kept = _copy(t)
    return kept.requires_grad_() if t.requires_grad and not transforming() else kept


class Tracker:
    """Collects what the calls of layers and containers take and return, while the model runs by its original
    layers.
    """

    def __init__(self) -> None:
        self.seen: dict[Key, Tensor] = {}
        self.eps = 0.0  # of the coarsest precision that the run has computed in
        self.learned = False  # a run before this one has told how calls are given the samples
        self.calls: dict[int, int] = {}
        self.pickers: set[int] = set()  # modules whose forward picks rows by a mask
        self.level = torch_api.level()  # of transforms of torch.func around the run
        self.transformers: set[int] = set()  # modules whose forward calls others inside a further one
        self.modules: dict[int, Any] = {}  # those of the model, by their ids
        self.inner: list[int] = []  # the modules that are being called, the innermost last
        # (module, number of its call): the container that called it
        self.callers: dict[tuple[int, int], int | None] = {}
        # the shapes of inputs that look like the batch's, and each row of which changes several outputs
        self.as_many: list[tuple[int, ...]] = []
        # the calls of containers, whole: what they take, return, and write into what they take
        self.made: list[tuple[nn.Module, int, Any, Any, Any]] = []

    def note_shared(self, tensors: Sequence[Any], place: int, inputs: Iterable[int], size: int) -> None:
        """Note of an input that all samples share if it may as well be the batch's, by its shape."""
        t, others = tensors[place], [tensors[i] for i in inputs]
        for other in others if isinstance(t, Tensor) and t.shape[:1] == (size,) else ():
            if isinstance(other, Tensor) and (other.ndim, other.dtype, len(other)) == (t.ndim, t.dtype, size):
                self.as_many.append(tuple(t.shape))
                return

    def passes_by(self, module: nn.Module) -> bool:
        """Whether a call is not looked at: of a module that the forward has made itself (a copy), or inside a
        transform of torch.func; then the module that makes that is noted.
        """
        if id(module) not in self.modules:
            return True
        if torch_api.level() <= self.level:
            return False
        if self.inner:
            self.transformers.add(self.inner[-1])
        return True

    def see(self, module: nn.Module, x: Tensor) -> None:
        """Note the input of the layer that is being called."""
        self.note(module, self.calls[id(module)], "in", x)

    @_unwatched
    def note(self, module: nn.Module, call: int, slot: str, value: Any) -> Any:
        """Note what a call takes, returns or writes to, and give copies: it may be changed later on."""
        kept = map_tensors(_kept if slot == "in" else _copy, value)
        self.seen.update(_keyed(module, call, slot, kept))
        return kept

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[int]:
        """Around a call of `module`; gives the number of the call."""
        note_progress()
        call = self.calls[id(module)] = self.calls.get(id(module), -1) + 1
        self.callers[id(module), call] = self.inner[-1] if self.inner else None
        self.inner.append(id(module))
        try:
            yield call
        finally:
            self.inner.pop()

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of the container `module`, and note all of its inputs and outputs."""
        if self.passes_by(module):
            return forward(module, *args, **kwargs)
        if getattr(module, "_ps_original", None) is nn.TransformerEncoderLayer:
            _check_all_is_called(module, args)
        given = {id(t) for t in tensors_in((args, kwargs))}
        with self.inside(module) as call:
            taken = self.note(module, call, "in", (args, kwargs))
            output = forward(module, *args, **kwargs)
        returned = self.note(module, call, "out", output)
        written = self.note(module, call, "written", written_to((args, kwargs), given))
        self.made.append((module, call, taken, returned, written))
        return output


def _check_all_is_called(layer: Any, args: tuple[Any, ...]) -> None:
    """An error where a layer of torch's bypasses what is trained inside of it, as it does in eval mode where
    its own weights and its input take no gradient: with a mode of torch's functions around, as here, it would
    not.
    """
    if layer.training or not (layer.self_attn.batch_first and torch.backends.mha.get_fastpath_enabled()):
        return
    parts = layer.self_attn.out_proj, layer.linear1, layer.linear2, layer.norm1, layer.norm2
    own = [layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias]
    own += [getattr(part, name, None) for part in parts for name in ("weight", "bias")]
    trained = [name for name, p in contents.named_parameters(layer) if p.requires_grad]
    if trained and not any(t is not None and t.requires_grad for t in (*args[:1], *own)):
        raise ValueError(
            f"{layer._ps_name} takes torch's fast path in eval mode, as its own weights and its input need no"
            f" gradient: `{trained[0]}` is trained, and what holds it is never called. Call the model in"
            " training mode, or switch the path off, torch.backends.mha.set_fastpath_enabled(False)."
        )


class _Comparison(Tracker):
    """Collects where another run differs from the first one, and keeps no more of it: a run may fill most of
    the memory.
    """

    def __init__(self, first: dict[Key, Tensor], eps: float = 0.0) -> None:
        super().__init__()
        # where; of no values where nothing has changed, and None where it cannot be compared (rows that are
        # picked by data)
        self.first, self.eps, self.differs = first, eps, dict[Key, Tensor | None]()

    @_unwatched
    def note(self, module: nn.Module, call: int, slot: str, value: Any) -> None:
        for key, t in _keyed(module, call, slot, value):
            if (x := self.first.get(key)) is not None:
                before, now, where = picked_samples(x), picked_samples(t), None
                if before is not None and now is not None:
                    where = _changes_by_sample(x.detach(), before, t.detach(), now, self.eps)
                elif x.shape == t.shape:
                    where = _changes(x.detach(), t.detach(), self.eps)
                self.differs[key] = where if where is None or where.any() else _NOWHERE


def _keyed(module: nn.Module, call: int, slot: str, value: Any) -> Iterator[tuple[Key, Tensor]]:
    """The tensors of a value that a call takes, returns or writes to, by their keys."""
    for place, t in enumerate(tensors_in(value)):
        if isinstance(t, Tensor):
            yield (id(module), call, (slot, place), t.ndim), t


@_unwatched
def track(
    model: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
) -> tuple[dict[Key, Layout], Tracker]:
    """{a tensor of a call: layout} for every one that changing samples tells about, and the run as called.

    Parameters have some noise meanwhile: what a zero-initialised layer gives would depend on nothing.
    """
    with torch_api.reparametrized(model, _noisy(model)):
        tracking = _Tracking(model, (args, kwargs), batch)
        tracking.look()
        if (picks := local.gathered_rows) is not None and picks.refused and len(tracking.inputs) > 1:
            # masks and indices, with what is known now of further inputs
            picks.inputs = {place: ("dim", dim) for place, dim in tracking.inputs.items()}
            picks.refused.clear()
            tracking = _Tracking(model, (args, kwargs), batch)
            tracking.look()
    return tracking.layouts, tracking.tracker


class _Tracking:
    """The model run as it was called, and what runs with some samples changed have told since."""

    def __init__(self, model: ConvertedModule, given: Call, batch: Batch) -> None:
        self.model, self.given, self.batch = model, given, batch
        self.groups = _groups(batch.size)
        self.inputs = dict[int, int]()  # the dims of the inputs that hold the batch
        self.layouts: dict[Key, Layout] = {}
        self.mixed = set[Key]()  # picked rows that are not the samples' that their owners say
        self.blind = False  # some changed inputs could not be run
        self.fixed = set[int]()  # which of them never could
        with (coarsest := Coarsest(given, contents.parameters(model))):
            self.tracker = run_tracked(model, *given, dropout=False)[0]
        self.tracker.eps, self.plain = coarsest.eps, self.tracker.seen

    def look(self) -> None:
        """Find out how all that is seen is laid out."""
        for place, dims in _batched(self.given, self.batch).items():
            # the first input that reaches a call decides: a mask may be as large as the batch by chance
            for dim in dims:
                if self.explain_by(place, dim, last=dim == dims[-1]):
                    break
        self.look_for_interactions()
        self.look_at_the_rest()
        self.turn_unmoved()

    def rerun(self, dims: dict[int, int], samples: Sequence[int]) -> dict[Key, Tensor | None] | None:
        """Where what is seen differs with some samples changed, in these dims of the inputs."""
        for valid in range(3):
            changed = _changed(self.given, dims, samples, self.batch, valid)
            if (differs := self._rerun(changed, self.plain)) is not None:
                return differs
        return None

    def _rerun(self, changed: Call | None, expected: dict[Key, Tensor]) -> dict[Key, Tensor | None] | None:
        """Where what is seen differs from what is `expected`, in a run with changed inputs; None where they
        cannot be.

        Changed integers may be no ids, no lengths, no mask of as many ones: what the model says to that is no
        error of the user's.
        """
        comparison = _Comparison(expected, self.tracker.eps)
        try:
            if changed is not None:
                run_tracked(self.model, *changed, comparison, dropout=False)
            return None if changed is None else comparison.differs
        except Exception:
            return None

    def explain_by(self, place: int, dim: int, last: bool) -> bool:
        """Whether an input holds the batch in this dim, of which `last` is the last one that may; then what
        it reaches is laid out as its changes tell.
        """
        size, model = self.batch.size, id(self.model)
        found, others = self._change_each(place, dim)
        # another input that changes but other samples' outputs has its samples elsewhere, or all share it
        returned = [
            (self.layouts.get(k), fits) for k, fits in found.items() if k[0] == model and k[2][0] == "out"
        ]
        if all(known in (None, MIXED) and not fits for known, fits in returned):
            # numbers (a loss) tell nothing, but what layers are given may
            inside = ((self.layouts.get(k, MIXED), fits) for k, fits in found.items() if k[2][0] == "in")
            returned = [(known, fits) for known, fits in inside if known != MIXED] or returned
        if not any(known in fits or (known is None and fits) for known, fits in returned):
            usual = {("dim", 0), BATCH_MAJOR} if self.batch.settings.batch_first else {("dim", 1)}
            if _stands_back(self.layouts, found, usual, model):
                self.inputs, self.layouts, self.mixed = {}, {}, set()
            elif any(known not in (None, MIXED) for known, _ in returned):
                if last:
                    self.tracker.note_shared(tensors_in(self.given), place, self.inputs, size)
                return False
        self.inputs[place] = dim
        self.mixed |= others
        self.layouts = {**_decided(found, self.plain), **self.layouts}
        return True

    def _change_each(self, place: int, dim: int) -> tuple[dict[Key, set[Layout]], set[Key]]:
        """The layouts that explain all that changes with samples of one input, and the picked rows of which
        some of other samples' do.
        """
        found, others = dict[Key, set[Layout]](), set[Key]()
        self.fixed.add(place)
        for samples in self.groups:
            changed = self.rerun({place: dim}, samples)
            if changed is None:
                self.blind = True
            else:
                self.fixed.discard(place)
            for key, where in (changed or {}).items():
                if where is None or not where.numel():
                    continue
                x = self.plain[key]
                if (ids := picked_samples(x)) is not None:
                    mine = torch.isin(ids, torch.tensor(samples, device=x.device))
                    others |= {key} if where[~mine].any() else set()
                    continue
                fits = found.get(key, candidates(x, self.batch.size))
                found[key] = {lay for lay in fits if _explains(lay, where, samples, self.batch.size)}
        return found, others

    def _changeable(self) -> dict[int, int]:
        """The dims of the inputs that hold the batch, of those that can be changed."""
        return {place: dim for place, dim in self.inputs.items() if place not in self.fixed}

    def look_for_interactions(self) -> None:
        """Outputs in which one sample's part of one input meets another's of another input (all pairs) are in
        no one's rows.
        """
        for samples in self.groups if len(self.inputs) > 1 else ():
            for key, where in (self.rerun(self._changeable(), samples) or {}).items():
                tracked = key[2][0] == "out" and self.layouts.get(key, MIXED) != MIXED
                if where is None or not (tracked and where.numel()):
                    continue
                if not _explains(self.layouts[key], where, samples, self.batch.size):
                    self.layouts[key] = MIXED

    def look_at_the_rest(self) -> None:
        """What no input reaches, what masks have picked, and how many of which depends on the data."""
        changed = self.rerun(self._changeable(), range(self.batch.size))
        refused = set() if local.gathered_rows is None else local.gathered_rows.refused
        for key, x in self.plain.items():
            where = None if changed is None else changed.get(key)
            if picked_samples(x) is not None:
                self.layouts[key] = MIXED if key in self.mixed else PICKED
            elif changed is not None and where is None:
                self.layouts[key] = MIXED  # how many rows there are depends on the data
            elif key[0] in refused and key[2][0] == "in":
                self.layouts[key] = MIXED
            elif key not in self.layouts and where is not None and not where.numel():
                layout = _of_constant(x, self.batch.size, self.tracker.eps)
                if not self.blind or layout not in (TABLE, SHARED):
                    self.layouts[key] = layout

    def turn_unmoved(self) -> None:
        """What a quantizer returns may be the same for samples that are changed a little, or change with but
        those that were not changed alone: where samples change places, it does, too.
        """
        size, layouts = self.batch.size, self.layouts
        unmoved = {
            key: candidates(x, size) for key, x in self.plain.items() if layouts.get(key, TABLE) == TABLE
        }
        for layout in sorted({lay for fits in unmoved.values() for lay in fits}, key=_PREFERENCE.index):
            moved = {
                key: in_turn(self.plain[key], layout, size)
                for key, fits in unmoved.items()
                if layout in fits and layouts.get(key, TABLE) == TABLE
            }
            turned = _turned(self.given, self.inputs, self.batch)
            differs = self._rerun(turned, moved) or {}
            layouts |= {k: layout for k, where in differs.items() if where is not None and not where.numel()}


def _stands_back(
    layouts: dict[Key, Layout], found: dict[Key, set[Layout]], usual: set[Layout], model: int
) -> bool:
    """Whether what explains `layouts` is as long as the batch by chance, and another input, which changes
    what was `found`, is the batch: all outputs, and inputs of layers, that it reaches have it in the `usual`
    dim, of which some would be in another one.
    """
    inside = [k for k in found if k[0] != model and k[2][0] == "in"]
    reached = [*inside, *(k for k in found if k[0] == model and k[2][0] == "out")]
    told = [k for k in reached if found[k] or layouts.get(k, MIXED) != MIXED]  # a mean of all is no one's
    layers = inside or all(k[0] == model for k in layouts)
    others = any(layouts.get(k, MIXED) not in (MIXED, *usual) for k in told)
    return bool(layers) and others and all(found[k] & usual for k in told)


def _decided(found: dict[Key, set[Layout]], plain: dict[Key, Tensor]) -> dict[Key, Layout]:
    """The layout of each of those that explain a change: where a weak change (in a coarse precision) tells
    little, the one that most tensors of its shape have for sure.
    """
    sure = Counter((plain[key].shape, *fits) for key, fits in found.items() if len(fits) == 1)

    def rank(key: Key, layout: Layout) -> tuple[int, int]:
        return -sure[plain[key].shape, layout], _PREFERENCE.index(layout)

    return {key: min(fits, key=functools.partial(rank, key), default=MIXED) for key, fits in found.items()}


def _of_constant(x: Tensor, size: int, eps: float) -> Layout:
    """The layout of what no input reaches: copies for the samples are alike, the entries of a table are
    not.
    """
    for layout in candidates(x, size):
        rows = apart(x, layout, size)
        if not bool(_changes(rows, rows[:1].expand_as(rows), eps).any()):
            return layout
    return SHARED if x.ndim and x.shape[0] == 1 else TABLE


def _noisy(model: ConvertedModule) -> dict[str, Tensor]:
    """The parameters with some noise, but integers, one for all samples where they were given per sample."""
    noisy, given = {}, model._ps_given()
    for path, module in contents.named_modules(model):
        for name, p in module._parameters.items():
            if p is not None and (p.is_floating_point() or p.is_complex()):
                name = f"{path}.{name}" if path else name
                value = p.detach()[0] if name in given and len(p) else p.detach()
                some = 4 * (noise(value) - 0.5)
                noisy[name] = value = value + some * (0.1 * value.abs().mean() + 0.01)
                if is_parameter(p):  # by which a forward may know them
                    noisy[name] = nn.Parameter(value, p.requires_grad)
    return noisy


# what functions that draw more or fewer numbers, as their arguments are, give instead
_BY_VALUES: dict[str, Callable[..., Tensor]] = {
    "poisson": lambda rate, *_, **__: rate.detach().round(),
    "binomial": lambda count, prob, *_, **__: (count * prob).detach().round(),
    "_standard_gamma": lambda alpha, *_, **__: alpha.clone(),
    "_sample_dirichlet": lambda alpha, *_, **__: alpha / alpha.sum(-1, keepdim=True),
}


class WithoutDropout(TorchFunctionMode):
    """Nothing is dropped, nor are more or fewer random numbers drawn: where masks pick other rows of some
    samples, or these have other values, all that follow would see other numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        drops, leaks = "dropout" in name, name in ("rrelu", "rrelu_")
        if drops or leaks or name == "multi_head_attention_forward":
            if "training" in kwargs:
                kwargs["training"] = False
            elif len(args) == 3 + leaks:  # torch.dropout(x, p, train) and its like
                args = (*args[:-1], False)
        result = _BY_VALUES.get(name, func)(*args, **kwargs)
        # a module would hold what is dropped out of a weight as its parameter
        return result.view_as(result) if drops and is_parameter(result) else result


class Coarsest(TorchFunctionMode):
    """Watches a call for the coarsest precision that it computes in: parts of a model in double precision may
    compute in single.
    """

    def __init__(self, call: Any, params: Iterable[Tensor]) -> None:
        super().__init__()
        self.eps = 0.0  # the relative error of one number
        given = [*tensors_of(call), *params]
        self._look(given)
        for device in {t.device.type for t in given} - {"meta"}:  # on which nothing is computed
            if torch.is_autocast_enabled(device):
                self.eps = max(self.eps, torch.finfo(torch.get_autocast_dtype(device)).eps)

    def _look(self, values: Any) -> None:
        for t in tensors_of(values):
            if t.is_floating_point() or t.is_complex():
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look(result)
        return result


class _Given(Tracker):
    """Notes, too, which modules read parameters of modules that they call, and give them to the call: there
    they stand for what the caller has read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, set[int]] = {}  # by their callers

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = {id(t) for t in tensors_in((args, kwargs)) if is_parameter(t) and t.requires_grad}
        if given and self.inner and (own := given & {id(p) for p in contents.parameters(module)}):
            self.given.setdefault(self.inner[-1], set()).update(own)
        return super().call(module, forward, args, kwargs)


class _Uses(TorchFunctionMode):
    """Notes which parameters are used by a module whose own they are not: in a differentiable way, and in
    others, as the forward of a function that somebody has written does.
    """

    def __init__(self, tracker: Tracker, modules: dict[int, nn.Module]) -> None:
        super().__init__()
        self.tracker, self.modules = tracker, modules
        self.found, self.otherwise = dict[int, set[int]](), dict[int, set[int]]()
        # those of a layer that a forward makes are its own
        self.params = {id(p) for m in modules.values() for p in m._parameters.values() if p is not None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tensors_in((args, kwargs)) if is_parameter(t) and t.requires_grad]
        inner = self.tracker.inner[-1] if given and self.tracker.inner else None
        if inner is not None:
            own = {id(p) for _, p in own_parameters(self.modules[inner])}
            past = ({id(p) for p in given} & self.params) - own
            recorded = any(t.requires_grad for t in tensors_of(result))
            if past:
                (self.found if recorded else self.otherwise).setdefault(inner, set()).update(past)
        return result


def parameters_used(
    model: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[int, set[int]], Tracker]:
    """{id of a module: ids of the parameters that it uses though they are another's}, and the run, with
    gradients, that tells.
    """
    tracker = _Given()
    tracker.learned = True
    uses = _Uses(tracker, {id(m): m for m in contents.modules(model)})
    with torch.enable_grad(), uses:
        output = run_tracked(model, args, kwargs, tracker)[1]
    for caller, given in tracker.given.items():
        uses.found.setdefault(caller, set()).update(given)
    differentiated = given_to_functions(output) if uses.otherwise else set()
    for user, past in uses.otherwise.items():
        if past & differentiated:
            uses.found.setdefault(user, set()).update(past & differentiated)
    return uses.found, tracker


def run_tracked(
    model: ConvertedModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker | None = None,
    dropout: bool = True,
) -> tuple[Tracker, Any]:
    """Run by the original layers, noting what calls take and return; every run sees the random numbers of the
    real one, and records gradients if that one does, by which a forward may choose what it does.
    """
    with torch_api.without_torch_function():
        # a model may change its inputs in place
        args, kwargs = cloned((args, kwargs))
        if (picks := local.gathered_rows) is not None:
            picks.enter(model, args, kwargs)
    tracker = tracker or Tracker()
    tracker.modules = {id(module): module for module in contents.modules(model)}
    with (
        torch_api.changed(local, tracker=tracker),
        trial(model),
        torch_api.reentrant_checkpoints("straight"),
        torch_api.with_torch_function(),
        nullcontext() if dropout else WithoutDropout(),
    ):
        return tracker, model._ps_run(*args, **kwargs)


def run_plainly(model: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the original layers return, of which nothing else is noted."""
    return run_tracked(model, args, kwargs, _Comparison({}))[1]


def _batched(given: Call, batch: Batch) -> dict[int, list[int]]:
    """The inputs that may hold a row, or k rows, for each sample: by their places, in which dims; states hold
    them in dim 1.
    """
    places: dict[int, list[int]] = {}
    count, packed = itertools.count(), _packed(given)

    def look(t: Tensor) -> Tensor:
        place, dim = next(count), batch_dim(t, batch.settings)
        if id(t) in packed:
            places[place] = [0]
        elif t.ndim and t.dtype != torch.bool and t.shape[dim] and not torch_api.is_sparse(t):
            dims = [dim] if t.shape[dim] % batch.size == 0 else []
            dims += [1] if places and dim == 0 and t.ndim > 2 and t.shape[1] == batch.size else []
            if dims:
                places[place] = dims
        return t

    map_tensors(look, given)
    return places


def batch_dim(t: Tensor, settings: Settings) -> int:
    """The dim of an input or output that holds the batch."""
    return 0 if settings.batch_first or t.ndim < 2 else 1


def _changed(
    given: Call, dims: dict[int, int], samples: Sequence[int], batch: Batch, valid: int
) -> Call | None:
    """The inputs with those of some samples changed, to values that are as valid: ids become another
    sample's, or others where all samples have the same; whole numbers, too, where others were not `valid`.
    """
    count, packed, dim_of = itertools.count(), _packed(given), _of_aliases(given, dims)

    def change(t: Tensor) -> Tensor:
        if (dim := dim_of.get(next(count))) is None:
            return t
        numbers = t.is_floating_point() or t.is_complex()
        if (owners := packed.get(id(t))) is not None:
            mine = torch.isin(owners, torch.tensor(samples, device=t.device)).view(-1, *[1] * (t.ndim - 1))
            return torch.where(mine, moved(t) if numbers else t.roll(1, 0), t)
        k, new = t.shape[dim] // batch.size, t.clone()
        for sample in samples:
            own = t.narrow(dim, sample * k, k)
            if numbers and (not valid or t.is_complex()):
                value = moved(own)
            else:
                others = (t.narrow(dim, (sample + i) % batch.size * k, k) for i in range(1, batch.size))
                value = _other_ids(own, others, valid, longest=len(samples) == batch.size and not sample)
                value = torch.where(own == own.round(), value, moved(own)) if numbers else value
            new.narrow(dim, sample * k, k).copy_(value)
        return new

    return map_tensors(change, given) if dims else None


def _of_aliases(given: Call, dims: dict[int, int]) -> dict[int, int]:
    """The same for every place of a tensor that is given several times."""
    tensors = list(tensors_in(given))
    dim_of = {id(tensors[place]): dim for place, dim in dims.items()}
    return {place: dim_of[id(t)] for place, t in enumerate(tensors) if id(t) in dim_of}


def moved(t: Tensor) -> Tensor:
    """Other numbers: one factor and shift for all of a sample would be gone once it is standardised."""
    return t * (1 + (some := noise(t))) + some / 4


def _other_ids(own: Tensor, others: Iterable[Tensor], valid: int, longest: bool) -> Tensor:
    """The ids of another sample; where all have the same, as many of each, which a mask may have to have, or
    such as tables of their own have, or (the most `valid`) such as tables of one entry have. They may be
    lengths: one stays the `longest`, as it does among others' (a batch of shorter ones has other shapes).
    """
    less = () if longest else (torch.where(own > 0, own - 1, own + 1), torch.where(own > 0, own - 1, own))
    alike = own.roll(1, -1), *less
    return next((other for other in (*others, *alike[valid:]) if not torch.equal(other, own)), own)


def _turned(given: Call, dims: dict[int, int], batch: Batch) -> Call | None:
    """The inputs with each sample in the place of the one before it."""
    if _packed(given):
        return None
    count, dim_of = itertools.count(), _of_aliases(given, dims)

    def turn(t: Tensor) -> Tensor:
        dim = dim_of.get(next(count))
        return t if dim is None else t.roll(-(t.shape[dim] // batch.size), dim)

    return map_tensors(turn, given)


def in_turn(x: Tensor, layout: Layout, size: int) -> Tensor:
    """`x` with each sample's rows in the place of the one before it."""
    if layout == TIME_MAJOR:
        return x.unflatten(0, (-1, size)).roll(-1, 1).flatten(0, 1)
    return x.roll(-(x.shape[layout[1]] // size), layout[1])


def _packed(given: Call) -> dict[int, Tensor]:
    """The samples of the rows of packed sequences, by the ids of their data."""
    return {id(t.data): owners_of_packed(t) for t in tensors_in(given) if isinstance(t, PackedSequence)}


def owners_of_packed(packed: PackedSequence) -> Tensor:
    """The sample of each row."""
    first = packed.sorted_indices
    first = torch.arange(int(packed.batch_sizes[0]), device=packed.data.device) if first is None else first
    return torch.cat([first[:count] for count in packed.batch_sizes.tolist()])


PERIOD = 65521  # a prime number: no two rows of a matrix are alike


# made here, and not by whoever asks first: a transform of torch.func would have wrapped it
with torch.inference_mode(False):
    _RANDOM = torch.rand(PERIOD, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def noise(t: Tensor) -> Tensor:
    """Numbers from 0 to 1 in the shape of `t`, the same every time; after `PERIOD` of them they come again,
    as drawing as many as large models have takes long.
    """
    start, count = t.numel() % PERIOD, t.numel()
    numbers = _RANDOM.repeat(-(-(start + count) // PERIOD)) if start + count > PERIOD else _RANDOM
    return numbers[start : start + count].view(t.shape).to(t)


def _changes(x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Where two tensors differ by more than rounding; `eps`: that of what they were made of."""
    if not x.is_floating_point() or not x.numel():
        return x != y
    # sums in another order, or of other rows beside, round in another way: that is no change
    # (in narrow formats rounding is coarse, but of the same numbers the same each time)
    small = max(min(max(torch.finfo(x.dtype).eps, eps) ** 0.75, 1e-5), 1e-8)
    gap, largest = (x - y).abs_(), x.abs().max()
    if bool((gap.max() + largest).isfinite()):
        return gap > small * largest
    largest = x.abs().nan_to_num(0, 0, 0).max()
    return (gap > small * largest) | (x.isfinite() != y.isfinite())


def _changes_by_sample(x: Tensor, ids: Tensor, y: Tensor, other_ids: Tensor, eps: float) -> Tensor:
    """Where rows that were picked differ, which may be in another order: each sample's with its own."""
    where = torch.ones_like(x, dtype=torch.bool)
    for sample in ids.unique():
        rows, others = (ids == sample).nonzero()[:, 0], (other_ids == sample).nonzero()[:, 0]
        if len(rows) == len(others) and x.shape[1:] == y.shape[1:]:
            where[rows] = _changes(x[rows], y[others], eps)
    return where


def candidates(x: Tensor, size: int) -> list[Layout]:
    """How a tensor of this shape may hold the samples."""
    layouts: list[Layout] = [("dim", d) for d in range(x.ndim) if x.shape[d] == size]
    if x.ndim and x.shape[0] % size == 0 and x.shape[0] != size:
        layouts += [BATCH_MAJOR, TIME_MAJOR]
    return layouts


def apart(t: Tensor, layout: Layout, size: int) -> Tensor:
    """A tensor with the samples in dim 0, and the rows of each, one or k, in a dim of their own."""
    kind, dim = layout
    if kind == "dim":
        return t.unsqueeze(dim + 1).movedim(dim, 0)
    if layout == TIME_MAJOR:
        return t.unflatten(0, (-1, size)).transpose(0, 1)
    return t.unflatten(0, (size, -1))


def samples_of_rows(layout: Layout, t: Tensor, size: int) -> Tensor:
    """The sample of each row along the dim of the layout: in order, in turn (time-major), or as picked.

    Raises:
        NoRuleError: it is not known which ones were picked.
    """
    if layout == PICKED:
        owners = None if local.gathered_rows is None else local.gathered_rows.owners(t)
        if owners is None or owners.sample_ids is None:
            raise NoRuleError("it does not return rows that a mask has picked")
        ids: Tensor = owners.sample_ids
        return ids
    samples, k = torch.arange(size, device=t.device), t.shape[layout[1]] // size
    return samples.repeat(k) if layout == TIME_MAJOR else samples.repeat_interleave(k)


def _explains(layout: Layout, where: Tensor, samples: Sequence[int], size: int) -> bool:
    """Whether everything that changed lies in what the layout says is these samples'."""
    kind, dim = layout
    rows = where.movedim(dim, 0) if kind == "dim" else where
    owners = samples_of_rows(layout, where, size)
    return not bool(rows[~torch.isin(owners, torch.tensor(samples, device=where.device))].any())


def _groups(size: int) -> list[list[int]]:
    """Groups of samples that tell neighbours and ends apart, where it is also known what changes with all of
    them: the first, the last, and of more than three every other one or pair.
    """
    groups = [[0], [size - 1]]
    if size > 3:
        groups += [[i for i in range(size) if i & 1 == odd] for odd in (0, 1)]
        groups += [[i for i in range(size) if i & 2]]
    return groups


def fits_layout(layout: Layout, x: Tensor, size: int) -> bool:
    """Whether what was learned from another batch can be true of this input."""
    kind, dim = layout
    if kind == "dim":
        return x.ndim > dim and x.shape[dim] == size
    if layout == SHARED:
        return x.shape[0] == 1
    return layout in (TABLE, MIXED) or x.shape[0] % size == 0


def by_shape(x: Tensor, size: int, free: int, batch_first: bool) -> tuple[Layout, bool]:
    """How an input whose first `free` dims may be the batch's holds more than one sample, by its shape; and
    whether that is beyond doubt.
    """
    first = 0 if batch_first or free < 2 else 1
    if x.shape[first] == size:
        # ids of samples, or of positions?
        among_events = x.ndim == free == 1 and not x.is_floating_point()
        others = [d for d in range(free) if d != first and x.shape[d] == size]
        return ("dim", first), not (among_events or others)
    if x.shape[0] == 1:
        return SHARED, False
    return BATCH_MAJOR if x.shape[0] % size == 0 and batch_first else MIXED, False
