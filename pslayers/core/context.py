"""The state of the call that is running, one per thread (`local`): the model's settings, the batch, and the
tensors that stand in the place of parameters. (The batch size itself is decided in `modules/converted.py`.)

A checkpoint computes a part of the forward again in the backward pass: `situation` restores the state that
the part had in the forward, and `inputs_noted` what was known of its inputs.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import torch_api
from . import contents
from .converted_module import ConvertedLayer, ConvertedModule
from .switches import Switches
from .thread_turns import Turns
from .trees import exchanged, is_parameter, stand_in, structure, tensors_of

if TYPE_CHECKING:
    from .sinks import Sink


class NoRuleError(NotImplementedError):
    """A forward does what cannot be done with parameters of each sample's own."""


class Scale:
    """The factors of one call's gradients, read when they flow back.

    A row of a mean loss is ``total`` = B times what autograd sees. ``inside`` is the factor that has already
    been put on the gradients that flow through the call: then the weight gradients come out multiplied,
    without a pass over them. The graph of a call holds its scale, and nothing else does when the call is
    over.
    """

    __slots__ = ("__weakref__", "inside", "settings", "spent", "streams", "sums", "total")

    def __init__(self, total: float = 1.0, inside: float = 1.0, settings: "Settings | None" = None) -> None:
        self.total, self.inside = total, inside
        self.settings = settings  # of the model that was called
        self.spent: int | None = None  # the backward pass that has let go of its graph
        self.sums = True  # plain gradients go to the parameters
        self.streams = False  # rows go to whom a block hands them on

    @property
    def rows(self) -> float:
        """The factor that the gradient of rows is still owed."""
        return self.total / self.inside

    @property
    def weight(self) -> float:
        """The factor that undoes, on the summed gradient, what was put on inside."""
        return 1 / self.inside


UNSCALED = Scale()


_numbers = itertools.count()


@dataclass(eq=False, repr=False)
class Settings:
    """What one converted model agrees on; every module of the model holds the same object."""

    loss_reduction: str = "mean"
    batch_first: bool = True
    accumulation: str = "replace"
    sink: "Sink | None" = None  # takes rows, in the place of each parameter's own
    workspace: torch.UntypedStorage | None = None  # for rows that are handed on
    collecting_grads: bool = False  # rows go to the call that asks for them
    rows_alone: int = 0  # the thread whose call that is, if it asks for no sums
    grad: bool = True  # backward passes fill `.grad`, see `ps.recording`
    has_gathered_rows: bool = False  # modules are called with rows that masks have picked
    pass_id: int = -1
    captured: bool = False  # it goes into a CUDA graph
    rows: int = -1  # samples in the pass that is running
    appended: int = 0  # samples of the passes before it whose rows are kept
    unfinished: bool = False  # it appends rows, and has not come to its end
    recorded: dict[int, Callable[[], Tensor | None]] = field(default_factory=dict)
    # the scales of recorded calls, which live as long as these calls' graphs, and the calls' batch sizes
    graphs: list[tuple["weakref.ref[Scale]", int, "Form"]] = field(default_factory=list)
    in_ddp: bool = False  # the last recorded call ran in a DDP, which waits for plain gradients
    bare_pass: int = -1
    bare: list[Any] = field(default_factory=list)  # recorders of what arrived in that pass past expansions
    turns: Turns = field(default_factory=Turns)  # of threads that call the model
    switches: Switches = field(default_factory=Switches)  # that were set on its modules
    # of the model in the forms of its calls: modules that it shares with others have learned more than these
    name: str = field(default_factory=lambda: str(next(_numbers)))
    on_unsupported: str = "general"  # what convert_model was told about modules without a replacement
    lent: int = 0  # how often parts of the model have gone to another one that holds them, too

    # a copy agrees on the same things, and has recorded nothing yet
    def __getstate__(self) -> dict[str, Any]:
        kept = "loss_reduction", "batch_first", "has_gathered_rows", "on_unsupported", "switches", "name"
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def partial(self) -> bool:
        """Whether some trainable parameters are left without rows, as was asked for."""
        return self.on_unsupported == "skip"

    @property
    def in_block(self) -> bool:
        """Whether a block says something of the model's backward passes."""
        return not (self.sink is None and self.grad and self.accumulation == "replace")

    @property
    def sums(self) -> bool:
        """Whether plain gradients are wanted, too."""
        alone = self.rows_alone and self.rows_alone == torch_api.thread_id()
        return self.grad and not alone and (self.sink is None or self.sink.sums)

    @property
    def recording(self) -> bool:
        """Whether this thread records rows of the model."""
        for settings in local.unrecorded:  # noqa: SIM110  # torch.compile traces no generator here
            if settings is self:
                return False
        return True

    def records(self, param: Any) -> bool:
        """Whether rows of a parameter are recorded here and now."""
        wanted = is_parameter(param) and param.requires_grad
        return wanted and torch.is_grad_enabled() and self.recording

    @property
    def recording_in_pass(self) -> bool:
        """The same in a node of a backward pass, which may run in another thread."""
        return all(settings is not self for settings in torch_api.thread().unrecorded)

    def note_forward(self, batch: "Batch") -> None:
        """Note an outermost call, whose graph may compute a part of it again."""
        if len(self.graphs) > 8:
            self.graphs = [graph for graph in self.graphs if graph[0]() is not None]
        self.graphs.append((weakref.ref(batch.scale), batch.size, batch.form))

    def sizes(self) -> set[int]:
        """The batch sizes of the calls whose graphs are there, for the pass that runs or a later one."""
        now = None, torch_api.running_pass()
        scales = ((ref(), size) for ref, size, _ in self.graphs)
        return {size for scale, size in scales if scale is not None and scale.spent in now}

    def last_form(self) -> "Form":
        """The form of the last of these calls."""
        return next(form for ref, _, form in reversed(self.graphs) if ref() is not None)

    def begin_pass(self, pass_id: int) -> None:
        """At the first row of a backward pass, forget what the earlier one left (a pass may not reach every
        parameter).
        """
        self.pass_id, self.rows, self.captured = pass_id, -1, torch_api.capturing()
        if self.accumulation == "replace":
            self.clear()

    def line_up(self, size: int) -> None:
        """Append zeros to all rows that are kept: the samples of a pass that gives rows, but perhaps not of
        every parameter.
        """
        self.drop_unfinished()
        held = self._lined_up()
        if not held:
            self.recorded = {}
        self.appended = max((len(p.grad_sample) for p in held), default=0)
        for p in held:
            p.grad_sample = torch.cat(
                [p.grad_sample, p.grad_sample.new_zeros(size, *p.grad_sample.shape[1:])]
            )
        self.unfinished = True
        torch_api.after_outer_pass(self.finish)

    def _lined_up(self) -> list[Any]:
        """The trained parameters that the model holds, and that have rows."""
        recorded: list[Any] = [p for ref in self.recorded.values() if (p := ref()) is not None]
        trained = [p for p in recorded if p.requires_grad and getattr(p, "grad_sample", None) is not None]
        return [p for p in trained if p._ps_recorder.holder.is_held()]

    def finish(self) -> None:
        """Note that a pass whose rows are appended has come to its end."""
        self.unfinished = False

    def drop_unfinished(self) -> None:
        """Take the rows away that a pass has appended which broke off: of other parameters there are none."""
        for p in self._lined_up() if self.unfinished else ():
            p.grad_sample = p.grad_sample[: self.appended] if self.appended else None
        self.unfinished = False

    def arrived(self, recorder: Any) -> None:
        """Note a gradient that no expansion has passed on: an error after the pass, if that has given rows to
        other parameters.
        """
        pass_id = torch_api.current_pass()
        if self.bare_pass != pass_id:
            self.bare_pass, self.bare = pass_id, []
            torch_api.after_pass(self.check_bare)
        self.bare.append(recorder)

    def check_bare(self) -> None:
        """An error where the pass that ends has given a parameter a gradient, and no row of it, though it has
        given rows to others, or a block takes all that there are (`.grad` would be what was not clipped), or
        nobody has called the model so far (other passes may be of a penalty alone).
        """
        found, self.bare = self.bare, []
        gave = self.pass_id == self.bare_pass
        names = [
            f"`{r.name}`"
            for r in found
            # where no sums are wanted, nothing comes by way of expansions
            if (not self.sums if gave and r.pass_id == self.pass_id else not self.partial)
        ]
        taken = not (self.grad and self.sink is None)
        uncalled = self.pass_id == -1 and not self.graphs
        if names and (gave or (self.recording_in_pass and (taken or uncalled))):
            some = ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")
            where = "inside of a block that takes its rows" if taken else "of a model that was never called"
            if gave:
                where = "that gave rows to other parameters"
            raise RuntimeError(
                f"{some} received a gradient, and no row of it, in a backward pass {where}: rows are recorded"
                " of calls of the model itself, model(x). What another method does (log_prob) is to be done"
                " by its forward, or that of a module around it. What was computed under ps.recording(model,"
                " False), or of the parameter itself in the loss, takes a backward pass of its own, without"
                " recording: ps.recording(model, False). A"
                " torch.autograd.Function that is given parameters, as by odeint_adjoint, has no rows: call"
                " the module itself, as odeint does. Nor has a call by torch.func (jvp, vmap): take"
                " torch.autograd.grad(..., create_graph=True)."
            )

    def clear(self) -> None:
        """Set `grad_sample` of every parameter that holds one to None."""
        for ref in self.recorded.values():
            if (param := ref()) is not None:
                clear(param)
        self.recorded, self.appended = {}, 0


def clear(param: Tensor) -> None:
    """The parameter has no per-sample gradient, like a `.grad` of None."""
    param.grad_sample = None  # type: ignore[attr-defined]


class Batch:
    """The batch of one outermost call: every layer below expands to its size.

    ``trackable`` says whether the outermost module can run again to find out which rows are whose.
    """

    traced = False  # by torch.compile

    def __init__(self, size: int, settings: Settings, trackable: bool = False) -> None:
        self.size, self.settings, self.trackable = size, settings, trackable
        self.undecided = False  # some layer could not tell whose the rows of its input are
        self.form = local.form
        self.level = torch_api.level()  # of transforms of torch.func around the call
        # the outermost backward pass that the call is part of: a reentrant checkpoint computes a part again
        # in one, and back-propagates in a pass of its own
        self.outer_pass = torch_api.outer_pass()
        self.root: ConvertedModule | None = None  # the outermost module
        self.given: Sequence[Place] | None = None  # see `given_places`
        self.keeps = False  # the call leaves something for a loss that is made of parameters alone
        # what it has returned, the dim of the samples' rows, and whose these are; None: of no one's
        self.returned: list[tuple[weakref.ref[Tensor], int | None, Tensor | None]] = []
        self.calls: dict[int, int] = {}  # how often each module has been called so far
        self.began, self.nodes = 0, 0  # nodes of graphs that were made before it; how many its own has
        self.uncounted = 0  # of samples run by themselves, with more of which there are more, and of asking
        self.checkpointed = False  # a part of it is computed again in each backward pass
        self.outputs: Any = None  # what layers return is watched while whose rows it holds is to be proved
        self.proving = False  # the same, and true of a part that is computed again
        self.ragged: Any = None  # follows whose the rows are, where they belong to given samples
        self.in_order: Tensor | None = None  # which is known to hold the samples' rows, k a sample
        total = float(max(size, 1)) if settings.loss_reduction == "mean" else 1.0
        self.scale = Scale(total, settings=settings)

    def again(self) -> "Batch":
        """The same batch for a part of the call that is computed again."""
        batch = Batch(self.size, self.settings)
        batch.calls, batch.scale, batch.proving = dict(self.calls), self.scale, self.proving
        batch.given, batch.ragged, batch.form = self.given, self.ragged, self.form
        return batch

    def give_up(self) -> bool:
        """Whether the call can be run again to find out which rows are whose: what is left of this run then
        goes by the original layers, and is not followed.
        """
        if self.trackable:
            self.undecided = local.use_original_forward = True
            local.gathered_rows = None
        return self.trackable

    def given_places(self) -> "Sequence[Place]":
        """Per-sample weights that were given in the place of parameters, and their places: looked for once a
        call.
        """
        if self.given is None:
            slots = () if self.root is None else self.root._ps_inventory().given_slots()
            self.given = [(slot.held, slot.name, slot.held[slot.name]) for slot in slots]
        return self.given

    def count(self, module: object) -> int:
        """The number of the call of `module` that begins."""
        self.calls[id(module)] = number = self.calls.get(id(module), -1) + 1
        return number


class LayerCall:
    """One call of a layer: its rows, the scale of its gradients, and the names of the parameters that it has
    expanded.
    """

    __slots__ = ("before", "expanded", "layer", "rows", "scale")

    def __init__(self, layer: ConvertedLayer, rows: int, scale: Scale) -> None:
        self.layer, self.rows, self.scale = layer, rows, scale
        self.expanded: set[str] = set()

    def __enter__(self) -> None:
        self.before, local.call = local.call, self

    def __exit__(self, *error: object) -> None:
        local.call = self.before


# what holds a parameter, a module's dict of these or another, its name there, and what stands in its place
Place = tuple[Any, Any, Any]


Form = tuple[Any, ...]


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int = 0) -> Form:
    """What a call is given that its forward may go by, but for sizes and numbers, which may be others in
    every call; `batch` is the dim of the samples.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # by far the most
        return (structure(args[0], batch),)
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return tuple([(n, v if isinstance(v, str) else structure(v, batch)) for n, v in named])


class _Local(threading.local):
    def __init__(self) -> None:  # attributes of the instance: torch.compile traces no others
        self.batch: Batch | None = None
        self.explicit: int | None = None
        self.form: Form = ()  # of the outermost call
        self.ragged: Any = None  # what ps.sample_ids was told
        self.tracker: Any = None  # collects what calls take and return while the batch is tracked
        self.call: Any = None  # the call of a layer that is running
        self.gathered_rows: Any = None  # knows whose the rows are that masks pick
        # inside a module whose parameters are per sample already, under vmap or in a loop
        self.use_original_forward = False
        self.unrecorded: tuple[Settings, ...] = ()  # of the models of which nothing is recorded
        # parts of models, of which blocks were given these that hold of the whole models
        self.parts: tuple[tuple[Settings, Any], ...] = ()
        self.places: tuple[Callable[[], Sequence[Place]], ...] = ()  # what stands in the place of parameters
        self.stand_ins: Any = None  # of the forward that runs with some, see `per_sample`
        self.again = False  # a checkpoint computes a part of a call again
        self.dual = False  # what the outermost call is given has tangents (torch.autograd.forward_ad)
        self.progress: Callable[[], None] | None = None  # says that a first call is running, if it takes long


local = _Local()


def note_progress() -> None:
    """Called at every module of a first call, and wherever its proof has come by."""
    if local.progress is not None:
        local.progress()


def changed(**values: Any) -> AbstractContextManager[None]:
    """This thread's state, changed inside the block."""
    return torch_api.changed(local, **values)


@contextmanager
def batch_size(size: int) -> Iterator[None]:
    """Say explicitly how many samples a batch holds, where the inputs do not (no tensor among them, batch in
    an odd dim).

    Applies to every outermost call of a converted module inside the ``with`` block, in this thread. Rows that
    a layer is given by itself are taken for sample by sample; for those in another order (step by step, real
    ones before made ones) take `sample_ids`.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSLinear(3, 2)
        >>> with ps.batch_size(4):                     # 8 rows: two a sample
        ...     layer(torch.randn(8, 3)).sum().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([4, 2, 3])

    Raises:
        ValueError: ``size`` is not an integer of at least 0.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"`size` must be an integer of at least 0, the number of samples; got {size!r}.")
    with changed(explicit=size):
        yield


def by_samples(rows: Tensor | None = None) -> AbstractContextManager[None]:
    """Inside the block the rows of ops are the samples', in order, in a ragged batch too; those of `rows`,
    whatever their shape is.
    """
    batch = local.batch
    return nullcontext() if batch is None else torch_api.changed(batch, ragged=None, in_order=rows)


def by_original_layers(applies: bool = True) -> AbstractContextManager[None]:
    """Inside the block converted modules run their original forwards, with whatever parameters they hold
    (unless not `applies`).
    """
    return changed(use_original_forward=applies)


@contextmanager
def recorded_or_not(settings: Sequence[Settings], recorded: bool) -> Iterator[None]:
    """Inside the block this thread records rows of these models, or none."""
    others = tuple(s for s in local.unrecorded if all(s is not known for known in settings))
    now, traced = others if recorded else (*others, *settings), torch.compiler.is_compiling()
    # where it is traced, no backward pass begins inside of the block
    in_passes = nullcontext() if traced else torch_api.changed(torch_api.thread(), unrecorded=now)
    with changed(unrecorded=now), in_passes:
        yield


def in_ragged() -> bool:
    """Whether rows belong to given samples: then an op's are as many as it is given."""
    return local.batch is not None and local.batch.ragged is not None


def picked_samples(t: Any) -> Tensor | None:
    """(N,), the sample of each row of a tensor, if these were picked; None where that is not known."""
    owners = None if local.gathered_rows is None else local.gathered_rows.picked(t)
    return None if owners is None else owners.sample_ids


def transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is running, or what is the same without it."""
    return (torch_api.peek() is not None or local.dual) and not torch.compiler.is_compiling()


# --------------------------------------------------------------------------------- in the place of parameters
@contextmanager
def in_place_of(
    places: Sequence[Place],
    anew: Callable[[], Sequence[Place]] | None = None,
    left: Callable[[Any], Any] = lambda value: value,
) -> Iterator[None]:
    """Tensors in the place of parameters inside the block, and in whatever a checkpoint computes of it again.

    `anew` makes them for that, where those of the first run cannot be used once more. What the block puts
    there itself stays, as what `left` makes of it.
    """
    before = [held[name] for held, name, _ in places]
    outer, local.places = local.places, (*local.places, anew or (lambda: places))
    try:
        for held, name, tensor in places:
            held[name] = stand_in(tensor) if isinstance(tensor, Tensor) else tensor
        yield
    finally:
        local.places = outer
        # by what they are: a forward may have put them into another order
        params = {id(tensor): param for (_, _, tensor), param in zip(places, before, strict=True)}
        for held, name, _ in places:
            if there(held, name):
                now = held[name]
                held[name] = params[id(now)] if id(now) in params else left(now)


def there(held: Any, name: Any) -> bool:
    """Whether a dict or list holds something at a place."""
    return name < len(held) if isinstance(held, list) else name in held


def places_of(module: nn.Module, tensors: dict[str, Any], tied: bool = False) -> list[Place]:
    """Where a module holds the parameters that are given tensors by their names, also in lists, tuples and
    dicts among its attributes; `tied`: also under other names, anywhere below.
    """
    found: list[Place] = []
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        found.append((contents.submodule(module, path)._parameters, last, tensor))
    known = {id(held[name]): tensor for held, name, tensor in found if held[name] is not None}
    return [*found, *other_places(contents.modules(module) if tied else (module,), known, found)]


NESTED = 3  # lists, tuples and dicts in which parameters are looked for, one in the other
# attributes of every module that hold no parameter of its own, and what recurrent layers renew
_OF_MODULES = frozenset(nn.Module().__dict__) - {"_parameters"} | {"_flat_weights"}


def other_places(
    modules: Iterable[nn.Module], known: Mapping[int, Any], places: Sequence[tuple[Any, ...]]
) -> Iterator[Place]:
    """Where else than at these places modules hold the `known` parameters, by their ids: among their
    attributes, and in the lists, tuples and dicts among these, of which one is that of their own parameters.
    """
    named = {(id(place[0]), place[1]) for place in places}
    for module in modules:
        attributes = vars(module)
        own = ((name, value) for name, value in attributes.items() if name not in _OF_MODULES)
        yield from _places_in(attributes, own, known, named, NESTED)


def _places_in(
    held: Any, items: Iterable[tuple[Any, Any]], known: Mapping[int, Any], named: set[Any], depth: int
) -> Iterator[Place]:
    for key, value in items:
        if id(value) in known:
            if (id(held), key) not in named:
                yield held, key, known[id(value)]
        elif depth and isinstance(value, (dict, list)):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            yield from _places_in(value, inner, known, named, depth - 1)
        elif depth and isinstance(value, tuple) and any(id(t) in known for t in tensors_of(value)):
            yield held, key, exchanged(value, known)


# ----------------------------------------------------------------------------------------- computed once more
def situation() -> Callable[[], AbstractContextManager[None]]:
    """What this thread runs its calls as now: a function that gives a context in which a part of them can be
    run again.
    """
    if (batch := local.batch) is not None:
        batch.checkpointed = True
    state = {**vars(local), "batch": None, "places": (), "stand_ins": None, "call": None, "tracker": None}
    state["again"] = True
    given, places = () if batch is None else batch.given_places(), local.places
    if given:  # torch.func.functional_call puts the parameters back before the backward pass
        places = (lambda: given, *places)
    first = batch and batch.again()
    stand_ins = None if local.stand_ins is None else local.stand_ins.mark()

    @contextmanager
    def again() -> Iterator[None]:
        before = dict(vars(local))
        try:
            vars(local).update(state)
            local.batch = first and first.again()
            local.stand_ins = None if stand_ins is None else stand_ins()
            with ExitStack() as stack:
                for anew in places:
                    with torch.enable_grad():  # also where the backward pass is not differentiated
                        made = anew()
                    stack.enter_context(in_place_of(made, anew))
                if local.gathered_rows is not None:
                    stack.enter_context(local.gathered_rows)
                yield
        except NoRuleError as error:
            path = "A part of the model" if stand_ins is None else f"`{local.stand_ins.path}`"
            raise RuntimeError(
                f"{path} does something else when a checkpoint computes it again than it did at first"
                f" ({error}): call it without the checkpoint, or write a layer for it (ps.PSLayer)."
            ) from error
        finally:
            vars(local).update(before)

    return again


def inputs_noted(values: Any) -> Callable[[Any], None]:
    """What is known of the inputs of a part that may be computed again: a function that notes it of what it
    gets in their place.
    """
    picks = local.gathered_rows
    notes = () if picks is None else [picks.notes_of(t) for t in tensors_of(values)]

    def tell(values: Any) -> None:
        for t, note in zip(tensors_of(values), notes, strict=False):
            picks.note(t, note)

    return tell


torch_api.on_checkpoint(situation, inputs_noted)
