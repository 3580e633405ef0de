"""One outermost call of a model, from its first run to rows that are proved.

A call of a kind that was proved before is run (`ModelCall.again`). The first one of a kind is run and
verified (`first`); where that leaves open which rows are whose, what the layers are given is tracked, how
each module is to be run is settled (how_modules_run.py), and the call is run and proved (`learn`). Each of
these returns the output; a single run (`_attempt`) may return UNDECIDED, and then `learn` follows.
"""

import functools
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import torch_api
from ..attribution.gathered import GatheredRows, gathering, without_gathered_rows
from ..attribution.graph import parameters_given, past_expansions
from ..attribution.proof import (
    GradientProbe,
    Outputs,
    Unprovable,
    batched_outputs,
    disagreement,
    quiet_hooks,
    rows_agree,
    without_zeros,
)
from ..attribution.snapshot import (
    Randomness,
    Snapshot,
    gradients_unchanged,
    trial,
    unchanged,
)
from ..attribution.tracking import (
    BATCH_MAJOR,
    MIXED,
    SHARED,
    TABLE,
    TIME_MAJOR,
    Layout,
    apart,
    run_plainly,
    track,
)
from ..core import contents, sharding
from ..core.context import Batch, Form, changed, local, transforming
from ..core.expansion import of_one
from ..core.trees import Call, cloned, tensors_in, tensors_of
from ..parameters.kept import Kept
from ..parameters.standing import held_by
from .batch_of_one import run_plain
from .call_ways import Ways
from .how_modules_run import choose_how_modules_run
from .inventory import states
from .original_classes import check_classes
from .other_samples import first_samples, in_reverse

if TYPE_CHECKING:
    from .converted import Converted

UNDECIDED: Any = object()

# of a call: training, its form, and of every input its dims, and whether it has as many rows as there are
# samples
Kind = tuple[bool, Form, tuple[tuple[int, bool], ...]]

# what is tried in turn: for which inputs that all samples share not the layer, but the module that calls it
# is run with per-sample parameters; and whether the whole model is
ATTEMPTS: tuple[tuple[set[Layout], bool], ...] = (
    (set(), False),
    ({TABLE}, False),
    ({TABLE, SHARED}, False),
    (set(), True),
)

# with how many samples it is found out whose rows are whose, and of how many that pays
FEW, WORTH_IT = 3, 8
TELL_EVERY = 5.0  # seconds
MANY = 1000  # things that data have told, after which they are forgotten
PATIENCE = 3  # first calls in which copies of what all share may have no gradients, until that is how it is
NOTHING, NONE_DRAWN = nullcontext(), Randomness(())
_log = logging.getLogger(__name__.partition(".")[0])


class ModelCall:
    """A call of a converted model for `size` samples, more than one."""

    silent = False  # copies of what all samples share had no gradients

    def __init__(self, model: "Converted", inputs: Call, size: int, kind: Kind) -> None:
        self.model, self.run, self.inputs, self.size, self.kind = model, model._ps_run, inputs, size, kind
        self.state = model._ps_state()
        self.settings = self.state.settings
        self.recorded = self.settings.recording and torch.is_grad_enabled()
        self.apart = sharding.apart(model)  # it cannot be run once more
        # with proved ones, for the way that it goes
        self.compared = self.recorded and not (self.apart or transforming())
        # what is drawn is to be drawn again by a further run
        draws = self.state.draws.get(kind, ("torch",))
        self.random = Randomness(draws) if draws else NONE_DRAWN
        self.forget: Callable[[], None] | None = None  # earlier runs of a first call, which are no uses
        self.told = 0  # by data, of which rows are whose: their digest
        self.ordered = False  # whether data may have said in which order samples go
        self.by_chance = False  # whether rows were right but in this order
        self.retained: list[Tensor] = []  # what of its graph keeps gradients
        self.strayed: int | None = None  # how many nodes it made, if it went another way than proved ones

    # ---------------------------------------------------------------------------------------------- the steps
    def again(self) -> Any:
        """The output of a call of a kind that was proved, or is not recorded."""
        keeps, writes, before = self.state.keeps, self.state.writes, None
        told = self._told_by_data_before()
        if keeps or writes or told is not None:
            before = Snapshot(self.model, self.inputs if writes or told is not None else ())
        if told != set() and (output := self._attempt(None, told)) is not UNDECIDED:
            return output
        self.forget = self.model._ps_count_from_here()
        if told is not None and (output := self._undone(before)._attempt(before)) is not UNDECIDED:
            return output
        known = self.model._ps_learned()
        output = self._undone(before).learn()
        if self.strayed is not None and self.model._ps_learned() == known:
            self._note_nodes(self.strayed)
        return output

    def first(self) -> Any:
        """The output of a call that is recorded, and of a kind that was not proved yet."""
        self.forget, self.random = self.model._ps_count_from_here(), Randomness()
        # what is found out and proved is not for torch.compile to trace
        with self._telling(), torch_api.uncompiled(self.model):
            output = self._first()
            self.state.silent += self.silent
            self._check_classes(output)
            return output

    def _first(self) -> Any:
        before = Snapshot(self.model, self.inputs)
        # a checkpoint around this call, say, counts what is saved: prove on a run beside
        if torch_api.saved_tensors_packed():
            with torch_api.without_saved_tensors_hooks():
                self._first()
            return self._undone(before).again()
        if self._known_in_the_other_mode():
            try:
                output = self._learned_from(None)
            except Exception:
                self._undone(before)
            else:
                self._note_what_changed(before)
                return output
        output = self._attempt(before)
        if output is UNDECIDED or self._fails_in_reverse():
            return self._undone(before).learn(before)
        return output

    def learn(self, before: Snapshot | None = None) -> Any:
        """The output, after it was found out how the inputs of layers hold the samples.

        Where the layers cannot be run each by itself, their callers are run with per-sample parameters, at
        last the whole model. An error leaves all as it was: what was learned is kept only if the outputs are
        those of the plain model.
        """
        if self.apart:
            raise self.model._ps_apart()
        before = before or Snapshot(self.model, self.inputs)
        try:
            return self._learn_from_parts(before)
        except Exception:
            with suppress(Exception):  # the first error tells
                if self.state.keeps and (begun := self._begun()) is not None:
                    return self._learn_from_parts(begun)
            self._undone(before)
            raise

    def _begun(self) -> Snapshot | None:
        """Of a forward that initialises what it holds by the first batch (ActNorm), and gives the same if it
        sees that again: what it holds then. None of others.
        """

        def run() -> list[Tensor]:
            self._rewind()
            with gradients_unchanged(self.model):
                output = run_plain(self.model, cloned(self.inputs))
            return [t.detach() for t in tensors_of(output)]

        first = run()
        begun = Snapshot(self.model, self.inputs)
        with begun.watching():
            again = run()
        return None if begun.differs() or disagreement(again, first) else begun

    def _learn_from_parts(self, before: Snapshot) -> Any:
        """By a few of the samples or by all, each layer by itself or its callers."""
        state, errors = self.state, list[Exception]()
        by_itself = state.per_sample_forward, state.includes_children
        turned = self._in_reverse() if self.ordered else None
        calls = [self._few(), self, turned]
        if turned is not None and self.by_chance:
            calls = [turned._few(), turned]
        for call in filter(None, calls):
            errors.clear()
            for shared, whole in ATTEMPTS:
                self._rewind()
                state.shared, state.includes_children = shared, whole or by_itself[1]
                state.per_sample_forward = by_itself[0] or whole
                try:
                    return self._learned_from(call, turned)
                # a shape that no longer broadcasts, rows that are no one's, outputs that differ
                except Exception as error:
                    errors.append(error)
                    before.restore()
            state.per_sample_forward, state.includes_children = by_itself
        # a refusal says more than what an attempt has met on its way, as a shape that did not broadcast
        ours = [error for error in errors if _is_ours(error)]
        if ours:
            raise next((error for error in ours if isinstance(error, ValueError)), ours[0])
        problem = errors[0]
        self._rewind()
        with trial(self.model), without_gathered_rows():
            run_plainly(self.model, *cloned(self.inputs))  # raises it, if it is of this call
        name = type(problem).__name__
        raise ValueError(
            f"{self.model._ps_name} cannot be called again, with other samples or parameters for each, to"
            f" find out which rows are whose ({name + f': {problem}' * bool(str(problem))}): have its forward"
            " go the same way for any number of samples and other values, or write a layer for the part that"
            " does not (ps.PSLayer)."
        ) from problem

    # -------------------------------------------------------------------------------------------------- parts
    def _telling(self) -> AbstractContextManager[None]:
        """Have it said that the block is running, and what for, where it takes long: by itself now and then,
        as a thread would have to be waited for, else it may end the process with an error at its exit.
        """
        begun = told = time.monotonic()

        def tell() -> None:
            nonlocal told
            if (now := time.monotonic()) > told + TELL_EVERY:
                told = now
                _log.warning(
                    "`%s` (%s): the first call of this kind finds out and proves which rows are whose, as"
                    " later ones need not; %.0f s so far.",
                    self.state.path,
                    type(self.model).__name__,
                    now - begun,
                )

        return changed(progress=tell)

    def _check_classes(self, output: Any) -> None:
        """An error where a forward goes by the classes of modules, if that can be seen by a further run."""
        state = self.state
        if not (state.keeps or state.writes or self.model._ps_given() or self.apart):
            try:
                check_classes(self.model, output, self.inputs, self._rewind)
            except ValueError:
                self._forget_proofs()
                raise

    def _rewind(self) -> None:
        torch_api.forget_parametrized()
        self.random.restore()

    def _undone(self, before: Snapshot | None) -> "ModelCall":
        """This call, with nothing left of what has been run of it."""
        self._rewind()
        if before is not None:
            before.restore()
        return self

    def _batch(self, proving: bool, trackable: bool) -> Batch:
        """The batch of a further run; layers' outputs are watched where it is to be proved."""
        if self.forget is not None:
            self.forget()
        batch = Batch(self.size, self.settings, trackable)
        batch.root, batch.began = self.model, torch_api.nodes_made()
        if self.recorded:
            self.settings.note_forward(batch)
        if proving:
            batch.outputs, batch.proving = GradientProbe(self.size, self.state.silent < PATIENCE), True
        return batch

    def _attempt(self, before: Snapshot | None, told: set[int] | None = None) -> Any:
        """The output of a run, which is verified if it is known what was `before`; UNDECIDED where a layer
        could not tell whose the rows of its input are, or where they are not, or where data have `told` of
        that what they have in no run that was verified.
        """
        model, proving, picks, (args, kwargs) = self.model, before is not None, None, self.inputs
        local.batch = batch = self._batch(proving, trackable=True)
        try:
            noting = proving or told is not None
            ways = None if noting else self._ways()
            watched = noting or self.settings.has_gathered_rows
            with self._watching(before, noting) if watched else NOTHING as picks:
                output = self._returned(batch, self.run(*args, **kwargs))
                self._note_order(picks)  # before a proof reads values
                if before is not None:
                    self._note_what_changed(before)
                if batch.undecided or (told is not None and self.told not in told):
                    return UNDECIDED
                if ways is not None and not ways.hold(batch) and self._strayed(batch, output, ways):
                    if local.again:
                        raise self._not_in_a_checkpoint()
                    self.strayed = batch.nodes
                    return UNDECIDED
                return output if before is None or self._verified(batch, output) else UNDECIDED
        except Exception:
            self._note_order(picks)
            # what follows a layer that could not tell is run anyhow; a weight that was given for each sample
            # may be used past its layer, where that is not known yet; what was learned may be of other
            # trained parameters, or of rows of which data have told otherwise
            learned_else = model._ps_given() or self.state.aside or self.kind in self.state.by_data
            if not batch.undecided and not (proving and learned_else):
                raise
            return UNDECIDED
        finally:
            local.batch, local.use_original_forward = None, False
            if batch.outputs is not None:
                self.silent = self.silent or batch.outputs.silent
                batch.outputs.close()

    @contextmanager
    def _watching(self, before: Snapshot | None, noting: bool) -> Iterator[GatheredRows | None]:
        """Follow the rows that masks pick inside the block, and note what is told by data; and what a first
        run changes of what was there `before`.
        """
        with gathering(self.size, self.model, *self.inputs, noting) as picks:
            if before is None:
                yield picks
            else:
                with self._quietly(), before.watching():
                    yield picks

    def _note_order(self, picks: GatheredRows | None) -> None:
        self.ordered = self.ordered or (picks is not None and picks.tells_order)

    def _ways(self) -> Ways | None:
        """What proved calls have gone through, where a call is to be compared with these: of layers that it
        meets beside theirs, shapes would tell whose the rows are.
        """
        if not self.compared:
            return None
        if local.again and torch_api.saved_tensors_packed():
            return None  # it is the same as the one before
        if local.again and not self.model._ps_proved(self.kind):  # a reentrant checkpoint had no graph then
            return Ways()
        return self.state.ways.get(self.kind)

    def _strayed(self, batch: Batch, output: Any, ways: Ways) -> bool:
        """Whether a call that went another way than those that were proved is not proved by its own graph, so
        that it is to be run again.
        """
        if torch_api.capturing():  # values cannot be looked at
            return False
        proved, packed = None, torch_api.saved_tensors_packed()
        # what packs tensors may be counting them, hooks are not to be called, and given weights no op of ours
        # has taken
        if not (packed or self._hooked() or self.model._ps_given()):
            with suppress(Unprovable, RuntimeError):  # as of an output whose batch is in another dim
                batch.outputs = GradientProbe.of_graph(self.size, output, batch.began)
                proved = self._verified(batch, output, strayed=True)
        if proved is None and self.settings.has_gathered_rows and not packed:  # followed in each call
            ways.nodes.add(batch.nodes)
            return False
        return not proved if proved is not None or local.again else self._taught_beside(batch.nodes)

    def _taught(self) -> bool:
        """Whether layers go by more than shapes, or samples are run by themselves: that was found out of
        another way.
        """
        return any(
            known.layouts or known.by_shape or any(plan.way != "direct" for plan in known.plans.values())
            for _, known in states(self.model)
        )

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Around a run that is to be proved: hooks are silent in proofs, and it is noted whether it puts
        some.
        """
        with quiet_hooks(self.model) as mode:
            assert mode is not None
            self.retained = mode.retained
            yield
        self.state.hooks = self.state.hooks or mode.met

    def _hooked(self) -> bool:
        """Whether somebody looks at the gradients that flow through a call."""
        modules = contents.modules(self.model)
        return self.state.hooks or any(m._backward_hooks or m._backward_pre_hooks for m in modules)

    def _taught_beside(self, nodes: int) -> bool:
        """Whether what a run beside this one has shown is not what the layers went by here; an error where it
        shows that samples interact.
        """
        known = self.model._ps_learned()
        call = ModelCall(self.model, cloned(self.inputs), self.size, self.kind)
        with self._beside(call), torch_api.without_saved_tensors_hooks(), torch_api.uncompiled(self.model):
            call.learn() if self._taught() else call.first()
        self._note_nodes(nodes)
        return self.model._ps_learned() != known

    def _note_nodes(self, nodes: int) -> None:
        """Note that a call with a graph of so many nodes is right: what another run of it has shown is what
        its layers went by.
        """
        self.state.ways.setdefault(self.kind, Ways()).nodes.add(nodes)

    @contextmanager
    def _beside(self, call: "ModelCall") -> Iterator[None]:
        """Around another call of the model, which is none of the user's."""
        call.forget = forget = self.model._ps_count_from_here()
        with changed(batch=None), trial(self.model):
            yield
        forget()

    def _not_in_a_checkpoint(self) -> ValueError:
        return ValueError(
            f"{self.model._ps_name} was called by a reentrant checkpoint around it alone, in whose backward"
            " pass it cannot be found out which rows are whose, and its samples may interact: take"
            " use_reentrant=False, or call it once without the checkpoint, or give an example batch,"
            " ps.convert_model(model, example=x)."
        )

    def _returned(self, batch: Batch, output: Any) -> Any:
        """The output, of which is noted whose its rows are, if something that a loss may use beside it was
        made of parameters alone; and what data have told so far.
        """
        watching = 0 if batch.outputs is None else batch.outputs.nodes
        batch.nodes = torch_api.nodes_made() - batch.began - watching - batch.uncounted
        if local.gathered_rows is not None:
            told = local.gathered_rows.assumed.close()
            self.told = self.told if told is None else hash(tuple(told))
        if batch.keeps:
            tensors = [t for t in tensors_of(output) if not isinstance(t, Kept) and t.requires_grad]
            owned = {
                id(t): (dim, ids) for t, dim, ids in batched_outputs(output, batch, self._layouts(output))
            }
            batch.returned = [(weakref.ref(t), *owned.get(id(t), (None, None))) for t in tensors]
        return output

    def _layouts(self, output: Any) -> list[Layout | None]:
        """How the tensors of an output hold the samples, as tracked; None of packed sequences."""
        return [
            self.model._ps_layout(0, ("out", i), t.ndim) if isinstance(t, Tensor) else None
            for i, t in enumerate(tensors_in(output))
        ]

    def _note_what_changed(self, before: Snapshot) -> None:
        state = self.state
        state.keeps, state.writes = state.keeps or before.differs(), state.writes or before.inputs_differ()

    def _verified(self, batch: Batch, output: Any, strayed: bool = False) -> bool | None:
        """Whether a first run, or one of a proved kind that has `strayed`, shows that samples depend on their
        own rows alone, and that all trainable parameters have rows; noted, but where a NaN leaves it open:
        then a later call is to show it. None where its graph cannot be walked, or where what another way has
        taught tells whose the rows are: they would seem to agree.
        """
        model, state = self.model, self.state
        again = self.kind in state.by_data
        if parameters_given(output) or (not again and self._past_layers(output)):
            return False
        try:
            # later on zeros are few, and other threads may go back through the model
            noise = without_zeros(model, not (strayed or batch.checkpointed))
            with gradients_unchanged(model, self.retained), unchanged(model), noise:
                known = self._told_layouts(output) if again or strayed else []
                # what was tracked and is not told is nobody's: there may be one output for each sample
                told = [layout or MIXED for layout in known] if any(known) else None
                agree = rows_agree(batch.outputs, batched_outputs(output, batch, told))
        except Unprovable:  # then the samples are changed, and what depends on them is seen
            return None
        if agree is False or (not again and batch.outputs.missed(output)):
            return False
        if strayed and self._taught():
            return None
        # where rows were picked, what shapes would not tell is looked at more closely, once
        if self.settings.has_gathered_rows and not (again or strayed):
            return agree is None
        if agree:
            self._note_proved(bool(model._ps_given()), batch, anew=False)
        return True

    def _past_layers(self, output: Any) -> bool:
        """Whether a parameter reaches the output, or what the forward has stored for the loss, by more than
        our ops: past its layer, or from a module that was not converted.
        """
        stored = [[*held.values()] if isinstance(held, dict) else held for held in held_by(self.model)]
        output = output, [t for values in stored for t in values if isinstance(t, Tensor)]
        layers = (m for m in contents.modules(self.model) if getattr(m, "_ps_layer", False))
        of_layers = (p for layer in layers for p in layer._parameters.values() if p is not None)
        return past_expansions(
            output, list(of_layers if self.settings.partial else contents.parameters(self.model))
        )

    def _few(self) -> "ModelCall | None":
        """This call for a few of its samples; None where these are not worth it."""
        size = self.size
        if size < WORTH_IT or local.explicit is not None or self.model._ps_given():
            return None
        if (found := first_samples(self.inputs, size, FEW, self.settings)) is None:
            return None
        if self.model._ps_kind(self.model._ps_sizes(found), FEW) != self.kind:
            return None
        few = ModelCall(self.model, found, FEW, self.kind)
        few.forget, few.random = self.forget, self.random
        return few

    def _in_reverse(self) -> "ModelCall | None":
        """This call for its samples in reverse order, every other one with other values, if the model takes
        these; None where it takes no batch in that order.
        """
        for varied in (True, False):
            with suppress(Exception):  # of the user's model: as of lengths that do not decrease
                turned = in_reverse(self.inputs, self.size, varied, self.settings)
                with trial(self.model):
                    run_plainly(self.model, *cloned(turned))
                call = ModelCall(self.model, turned, self.size, self.kind)
                call.forget, call.random = self.forget, self.random
                return call
        return None

    def _fails_in_reverse(self) -> bool:
        """Whether, where data may say in which order samples go, this call was right but by chance: of the
        same samples in reverse order, rows are not those that they were taken for.
        """
        if not self.ordered or (call := self._in_reverse()) is None:
            return False
        before = Snapshot(self.model, call.inputs)
        with self._beside(call):
            try:
                fails = call._attempt(before) is UNDECIDED
            except Exception:
                fails = True
        self.by_chance = fails
        if fails:
            self._forget_proofs()
        return fails

    def _known_in_the_other_mode(self) -> bool:
        """Whether a call that is like this one but for training or eval mode was proved, for which something
        had to be found out.
        """
        other = not self.kind[0], *self.kind[1:]
        if local.explicit is not None or not any(proved[:-1] == other for proved in self.state.proved):
            return False
        return any(state.layouts or state.plans for _, state in states(self.model))

    @contextmanager
    def _kept_if_proved(self) -> Iterator[None]:
        """After an error in the block, what was learned there is forgotten."""
        before = self.model._ps_learned()
        proved, ways, shared = set(self.state.proved), dict(self.state.ways), self.state.shared
        picked = self.settings.has_gathered_rows
        try:
            yield
        except BaseException:
            for state, learned in before:
                state.forget(learned)
            self.state.proved, self.state.ways, self.state.shared = proved, ways, shared
            self.settings.has_gathered_rows = picked
            raise

    def _learned_from(self, call: "ModelCall | None", turned: "ModelCall | None" = None) -> Any:
        """The output, after what `call`, this one or a part of its samples, has shown is found right of all,
        and of these in reverse order, perhaps; None: what is known in the other mode, training or eval.
        """
        with self._kept_if_proved():
            if call is None:
                for module, state in states(self.model):
                    state.take_over(module.training)
            else:
                with trial(self.model) if call is not self else nullcontext():
                    call._learn()
            if turned is not None and call is not turned:
                self._rewind()
                with trial(self.model), gathering(turned.size, self.model, *turned.inputs):
                    turned._proved()
            self._rewind()
            if self.forget is not None:
                self.forget()
            if self.recorded:
                self.model._ps_make_room(self.size)
            with gathering(self.size, self.model, *self.inputs):
                output = self._proved()
            if call is not self and not self.model._ps_proved(self.kind):
                raise ValueError("A NaN leaves open whose the rows are.")
            if call is None and self._past_layers(output):
                raise ValueError("What reaches the output past layers in one mode does not in the other.")
            return output

    def _learn(self) -> None:
        """Track the batch through the layers below, let each remember how its inputs hold the samples, and
        choose how each module is run.
        """
        model, batch = self.model, Batch(self.size, self.settings)
        model._ps_inventory().check_given(self.size)
        model._ps_leave_room()
        with gathering(self.size, self.model, *self.inputs):
            found, tracker = track(model, *self.inputs, batch)
            # of batches of other sizes there may be other outputs
            for key in [k for k in self.state.layouts if k[:2] == self.kind[:2] and k[3][0] == "out"]:
                del self.state.layouts[key]
            for (key, call, place, ndim), layout in found.items():
                module = tracker.modules[key]
                state, layout_key = module._ps_state(), (module.training, local.form, call, place, ndim)
                if state.layouts.get(layout_key, layout) != layout:  # by which others were proved
                    self._forget_proofs()
                state.layouts[layout_key] = layout
            choose_how_modules_run(model, self.inputs, tracker, batch)
        for shape in tracker.as_many:
            warnings.warn(
                f"{model._ps_name} takes {self.size} samples and, of shape {tuple(shape)}, a further input"
                " with as many rows, each of which changes the outputs of several samples: it is taken for"
                " what all share. If its rows are the samples' (as those of in-batch negatives), samples"
                " interact, and no per-sample gradient is of one sample alone.",
                stacklevel=2,
            )

    def _forget_proofs(self) -> None:
        """Of all calls that are like this one, but for the sizes of what they are given."""
        self.state.proved = {proved for proved in self.state.proved if proved[:2] != self.kind[:2]}
        self.state.ways = {kind: ways for kind, ways in self.state.ways.items() if kind[:2] != self.kind[:2]}

    def _proved(self) -> Any:
        """The output of a run that is compared with one by the original layers.

        Raises:
            ValueError: the outputs or the owners of rows differ.
        """
        model, plain = self.model, self._told_plainly()
        output, batch = self._watched(self.inputs)
        tensors, layouts, told = tensors_in(output), self._layouts(output), self._told_layouts(output)
        given = bool(model._ps_given())
        differ = (disagreement(self._told_of(i, output), theirs) for i, theirs in plain.items())
        problem = next(filter(None, differ), None)
        own = batched_outputs(output, batch, told)
        numbers = all(
            isinstance(t, Tensor) and t.numel() == 1
            for t, layout in zip(tensors, layouts, strict=True)
            if layout == MIXED
        )
        try:
            once = parameters_given(output)  # it may let go of what it holds in its backward
            # nothing is changed by what a checkpoint runs again
            around = trial(model) if once else unchanged(model)
            kept = gradients_unchanged(model, self.retained)
            with kept, around, without_zeros(model, not (once or batch.checkpointed)):
                agree = rows_agree(batch.outputs, own, functools.partial(self._anew, told) if once else None)
        except Unprovable:  # of a run on trial, in which reentrant checkpoints are of the other kind
            with trial(model), torch_api.reentrant_checkpoints("otherwise"):
                again, other = self._watched(cloned(self.inputs))
                agree = rows_agree(other.outputs, batched_outputs(again, other, told))
        self.silent = self.silent or batch.outputs.silent
        if problem is None and ((MIXED in layouts and not own and not numbers) or agree is False):
            problem = "outputs in which samples depend on rows that are not theirs"
        if problem is not None:
            where = f"{model._ps_name} returned {problem}"
            if given:
                where += " (weights were given; call it before with its own, or convert with example=)"
            if not tensors_in(self.inputs):
                raise ValueError(
                    f"{where}: it is given no tensor, and it is not followed whose it is what it makes of"
                    " lists, numbers and arrays. Make tensors of them before the call, with a row for each"
                    " sample (torch.nn.utils.rnn.pad_sequence); or, if its outputs have one, in order, have"
                    " it found out in the backward pass, `with ps.sample_ids(torch.arange(n), n):`."
                )
            raise ValueError(
                f"{where}: samples interact in it, or an input that all {self.size} samples share was given a"
                " batch dim and did not broadcast as without one. Give it one in the model, as in"
                " ids.unsqueeze(0), or write a layer for the module that does it (ps.PSLayer). If the outputs"
                " are in another order than the samples, have it return the order, too. Of rows in another"
                " order than sample by sample, or of a list with a tensor for each sample, say whose they"
                " are, `with ps.sample_ids(ids, n):`; ids is torch.arange(n) where outputs have a row for"
                " each sample, in order."
            )
        if agree:
            self._note_proved(given, batch, anew=True)
        return output

    def _told_plainly(self) -> dict[int | None, list[Tensor]]:
        """What outputs of the original layers tell (`_told_of`): by None, of all samples; of weights that
        were given for each sample, by the numbers of the first one and of the last one, with those of these.
        """
        slots, told = self.model._ps_inventory().given_slots(), dict[int | None, list[Tensor]]()
        for i in {0, max(self.size - 1, 0)} if slots else (None,):
            own = {slot.path: of_one(slot.held[slot.name].detach()[i:]) for slot in slots}
            with without_gathered_rows(), torch_api.reparametrized(self.model, own):
                told[i] = self._told_of(i, run_plainly(self.model, *self.inputs))
        return told

    def _told_of(self, i: int | None, output: Any) -> list[Tensor]:
        """The rows of a sample in an output, as tracked; all that there is of None."""
        if i is None or not self.size:
            return [t.detach() for t in tensors_of(output)]
        return [
            apart(t.detach(), at, self.size)[i]
            for t, at in zip(tensors_in(output), self._layouts(output), strict=True)
            if isinstance(t, Tensor) and at and (at[0] == "dim" or at in (BATCH_MAJOR, TIME_MAJOR))
        ]

    def _anew(self, told: Sequence[Layout | None]) -> tuple[GradientProbe, Outputs]:
        """What another run is watched by, and its outputs."""
        self._rewind()
        output, batch = self._watched(cloned(self.inputs))
        return batch.outputs, batched_outputs(output, batch, told)

    def _told_layouts(self, output: Any) -> list[Layout | None]:
        """Those of an output, as tracked, where values that stay the same may have the samples' gradients all
        the same.
        """

        def may_have(t: Any) -> bool:
            return isinstance(t, Tensor) and not isinstance(t, Kept) and t.shape[:1] == (self.size,)

        return [
            ("dim", 0) if layout == TABLE and may_have(t) else layout
            for t, layout in zip(tensors_in(output), self._layouts(output), strict=True)
        ]

    def _told_by_data_before(self) -> set[int] | None:
        """What data have told in calls of this kind that were proved; None if they do not tell which rows are
        whose.
        """
        return self.state.by_data.get(self.kind) if self.compared and not local.again else None

    def _note_proved(self, given: bool, batch: Batch, anew: bool) -> None:
        """Note that calls of this kind are right, by what was learned `anew` or is known."""
        frozen = self.model._ps_inventory().frozen()
        if self.state.proved and self.state.unproved != frozen:
            self.model._ps_put_aside()
        self.state.proved.add((*self.kind, given))
        uneven = [id(module) for module, state in states(self.model) if state.uneven()]
        self.state.ways.setdefault(self.kind, Ways()).add(batch, uneven)
        self.state.unproved = frozen
        self.state.draws.setdefault(self.kind, set()).update(self.random.drawn())
        if local.gathered_rows is None:
            return
        assumed, known = local.gathered_rows.assumed, self.state.by_data.get(self.kind)
        if known is not None or assumed.placed or assumed.unsure:
            # by more than masks and indices they may be told in ways that are not noted
            noted = assumed.placed and not assumed.unsure
            told = set() if anew or known is None or len(known) == MANY else known
            self.state.by_data[self.kind] = {*told, self.told} if noted else set()

    def _watched(self, inputs: Call) -> tuple[Any, Batch]:
        """The output of a run that is to be proved, and its batch, which has watched what layers returned."""
        local.batch = batch = self._batch(proving=True, trackable=False)
        args, kwargs = inputs
        try:
            with self._quietly():
                return self._returned(batch, self.run(*args, **kwargs)), batch
        except BaseException:
            batch.outputs.close()
            raise
        finally:
            local.batch = None


def _is_ours(error: Exception) -> bool:
    """Whether this package has raised it, and no forward."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].partition(".")[0] == __name__.partition(".")[0]
