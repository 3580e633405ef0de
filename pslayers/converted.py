"""What every module of a converted model shares: settings, the batch of the outermost call, what tracking has taught."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence

from . import compiled, sharding
from .expand import Batch, Settings, clear, local, transforming
from .inventory import Inventory
from .picks import picking, without_picks
from .proof import Unprovable, Watched, disagreement, judged, past_expansions, rows_agree
from .record import recorder_of
from .single import run_alone, run_plain
from .snapshot import Snapshot
from .tracking import MIXED, Ambiguous, Layout, Tracker, run_tracked, track
from .trees import ndims, own_parameters, tensors_in


class State:
    """What conversion leaves on a module: the model's settings, the module's path in it, its parameters' own dims."""

    conversions = 0  # of modules, so far

    def __init__(self, settings: Settings, path: str, module: nn.Module) -> None:
        State.conversions += 1
        self.settings, self.path = settings, path or type(module).__name__
        self.prefix = f"{path}." if path else ""  # of its parameters' names, as named_parameters gives them
        self.token = compiled.token_of(module)  # by which compiled code knows the module
        # kinds of calls (training, dims of the inputs) in which rows were proved to be the samples'
        self.proved: set[tuple[bool, tuple[int, ...]]] = set()
        self.general = self.whole = False  # run with per-sample parameters: its own, or all below it too
        self.tables = False  # callers of layers that take what all samples share are run whole
        self.plans: dict[tuple[int, bool, tuple[int, ...]], Any] = {}  # how: (number of the call, training, dims of the inputs)
        self.ndims = {name: p.ndim for name, p in own_parameters(module)}
        self.forward: MethodType | None = None  # that was set on the instance, where it was one of its own methods
        # tracked: (number of the call, place of the tensor, its dims): layout
        self.layouts: dict[tuple[int, tuple[str, int], int], Layout] = {}
        self.inventory: Inventory | None = None
        self.roomy = -1  # the batch size that there is memory for

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inventory": None, "roomy": -1}

    def layouts_of(self, call: int, slot: str, ndim: int) -> list[Layout]:
        """The layouts of what a call takes ("in") or returns ("out")."""
        return [lay for (c, (s, _), d), lay in self.layouts.items() if (c, s, d) == (call, slot, ndim)]

    def learned(self) -> tuple[Any, ...]:
        """What tracking has taught so far."""
        return dict(self.layouts), dict(self.plans), self.general, self.whole


# mixed in before a module's class: a module to its users, and to the type checker
if TYPE_CHECKING:
    _Mixin = nn.Module
else:
    _Mixin = object


class Converted(_Mixin):
    """What every module of a converted model shares: settings, the batch of the outermost call, clearing."""

    _ps: State | None = None
    _ps_layer: ClassVar[bool] = False  # a layer, not a container of layers

    def _ps_state(self) -> State:
        if self._ps is None:
            self._ps = State(Settings(), "", self)
        return self._ps

    def __setstate__(self, state: dict[str, Any]) -> None:  # copies and pickles
        super().__setstate__(state)
        if self._ps is not None:
            self._ps.token = compiled.token_of(self)
        for param in self.__dict__["_parameters"].values():
            if param is not None:
                param.__dict__.pop("_ps_recorder", None)
                clear(param)

    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """How many samples an outermost call holds: its first tensor's dim 0 (or 1); None where it has no tensor."""
        settings = self._ps_state().settings
        for value in args[:1] if args and isinstance(args[0], Tensor) and args[0].ndim else tensors_in([args, kwargs]):
            if isinstance(value, PackedSequence):
                return int(value.batch_sizes[0]) if len(value.batch_sizes) else 0
            if value.ndim:
                return value.shape[0 if settings.batch_first or value.ndim == 1 else 1]
        return None

    def _ps_outermost(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an outermost call, its batch size known to every layer below."""
        settings, trackable = self._ps_state().settings, not self._ps_layer
        recorded = settings.recording and torch.is_grad_enabled()
        if trackable and not recorded and not transforming() and not self._ps_given():
            return run_plain(self, args, kwargs)
        recomputed = torch._C._current_graph_task_id() != -1 and bool(settings.sizes)
        if recomputed:  # a checkpoint computes a part of an earlier call again
            size, trackable = self._ps_recomputed_size(settings), False
        else:
            known = local.explicit if local.explicit is not None else self._ps_batch_size(args, kwargs)
            if known is None:
                return run(self, *args, **kwargs)
            size = known
        if recorded and not recomputed:
            settings.called(size)
        trackable, apart = trackable and size > 1, sharding.apart(self)
        if size == 1 and recorded and not apart and not transforming() and not (inventory := self._ps_inventory()).given():
            return run_alone(self, inventory, args, kwargs)
        state, kind = self._ps_state(), (self.training, ndims((args, kwargs)) if trackable else ())
        unproved = recorded and trackable and kind not in state.proved
        if apart and unproved:
            raise self._ps_apart()
        if recorded and size != state.roomy:
            self._ps_make_room(size)
        random, before = random_state() if trackable else None, Snapshot(self) if unproved else None
        if before is not None and _packed():  # a checkpoint around this call, say, counts what is saved: prove on a run beside
            with saved_tensors_hooks(_keep, _keep):
                self._ps_outermost(run, args, kwargs)
            set_random_state(random)
            before.restore()
            return self._ps_outermost(run, args, kwargs)
        local.batch = batch = Batch(size, settings, trackable)
        if unproved:
            batch.outputs = Watched(size)
        try:
            if not (unproved or settings.picks):
                return run(self, *args, **kwargs)
            with picking(size, settings, args, kwargs):
                if recomputed and local.picks is not None and (self._ps_layer or state.general):
                    output = local.picks.call(self, functools.partial(run, self), args, kwargs)
                else:
                    output = run(self, *args, **kwargs)
                # where rows were picked, what shapes would not tell is looked at more closely, once
                holds = self._ps_holds(batch, output) and not settings.picks if unproved else None
            if holds:
                state.proved.add(kind)
            if holds is not False:
                return output
        except Ambiguous:
            if apart:
                raise self._ps_apart() from None
        finally:
            local.batch = None
        output = batch = None  # type: ignore[assignment]  # what holds the graph makes room for what follows
        set_random_state(random)
        if before is not None:
            before.restore()
        with picking(size, settings, args, kwargs):
            return self._ps_learn(run, args, kwargs, size)

    def _ps_not_told(self, why: str) -> ValueError:
        return ValueError(
            f"`{self._ps_state().path}` ({type(self).__name__}) was given rows that were picked by data (as in h[mask]), and it "
            f"cannot be told whose they are: {why}. Pick rows where they are used, by a mask whose first dim is the batch's, or "
            f"write a layer for the module that does it (ps.PSLayer)."
        )

    def _ps_make_room(self, size: int) -> None:
        """Have memory for all rows before there are activations, between which it would leave holes."""
        if transforming() or sharding.in_use():
            return
        state, inventory = self._ps_state(), self._ps_inventory()
        for held, name, path, _, module in inventory.slots:
            if isinstance(param := held[name], nn.Parameter) and param.requires_grad:
                recorder_of(param, inventory.prefix + path, state.settings, module()).like(size)
        state.roomy = size

    def _ps_leave_room(self) -> None:
        """Let runs on trial have the memory for rows."""
        for held, name, *_ in self._ps_inventory().slots:
            if (recorder := getattr(held[name], "_ps_recorder", None)) is not None:
                recorder.release()
                recorder.memory = recorder.fits = None
        self._ps_state().roomy = -1

    def _ps_apart(self) -> ValueError:
        return ValueError(
            f"`{self._ps_state().path}` ({type(self).__name__}) has parts that are sharded by themselves, so it cannot be run on "
            f"trial, to find out and prove which rows are whose: each run gathers parameters, and other ranks may not take part. "
            f"Convert it before it is sharded, with an example batch and in the mode (training or not) that it is used in: "
            f"ps.convert_model(model, example=x)."
        )

    def _ps_holds(self, batch: Batch, output: Any) -> bool | None:
        """Whether a first call shows that samples depend on their own rows alone, and that all trainable parameters have rows.

        None where nothing speaks against it, but a NaN leaves it open: then a later call is to show it.
        """
        assert batch.outputs is not None
        try:
            agree = rows_agree(batch.outputs, judged(output, batch), batch)
        except Unprovable:  # then the samples are changed, and what depends on them is seen
            return False
        return False if self._ps_past_layers(output) else agree

    def _ps_past_layers(self, output: Any) -> bool:
        """Whether a parameter reaches the output by more than our ops: past its layer, or from a module that was not converted."""
        layers = (m for m in self.modules() if isinstance(m, Converted) and m._ps_layer)
        of_layers = (p for layer in layers for p in layer._parameters.values() if p is not None)
        return past_expansions(output, list(of_layers if self._ps_state().settings.partial else self.parameters()))

    def _ps_settle(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracker: Tracker, batch: Batch) -> None:
        """Choose, from what was tracked, how each module below is run."""

    def _ps_recomputed_size(self, settings: Settings) -> int:
        if len(settings.sizes) > 1:
            raise RuntimeError(
                f"`{self._ps_state().path}` ({type(self).__name__}) is recomputed in the backward pass (checkpointing), while "
                f"calls of batch sizes {sorted(settings.sizes)} wait for theirs: back-propagate each call before the next one."
            )
        return next(iter(settings.sizes))

    def _ps_learn(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Any:
        """Track the batch through the layers below, let each remember how its inputs hold the samples, and run.

        An error leaves them as they were: what was learned is kept only if the outputs are those of the plain model.
        """
        batch, bound = Batch(size, self._ps_state().settings), functools.partial(run, self)
        modules: dict[int, Any] = {id(m): m for m in self.modules()}
        states = [m._ps_state() for m in modules.values() if isinstance(m, Converted)]
        before = [(state, state.learned()) for state in states]
        self._ps_leave_room()
        try:
            found, tracker = track(bound, self, args, kwargs, batch)
            for (key, call, place, ndim), layout in found.items():
                modules[key]._ps_state().layouts[call, place, ndim] = layout
            self._ps_settle(bound, args, kwargs, tracker, batch)
            del found, tracker  # which hold what the layers were given
            if batch.settings.recording and torch.is_grad_enabled():
                self._ps_make_room(size)
            return self._ps_prove(run, args, kwargs, size)
        except BaseException:
            for state, learned in before:
                state.layouts, state.plans, state.general, state.whole = learned
            raise

    def _ps_given(self, own: bool = False) -> set[str]:
        """The names of the parameters in whose place per-sample weights were given, here or anywhere below."""
        if not own:
            return self._ps_inventory().given()
        ndims = self._ps_state().ndims
        return {name for name, p in own_parameters(self) if p.ndim != ndims.get(name, p.ndim)}

    def _ps_inventory(self) -> Inventory:
        """What lies below now."""
        state = self._ps_state()
        known = state.inventory
        if known is None or not known.holds(self, State.conversions):
            known = state.inventory = Inventory(self, state.prefix, State.conversions)
        return known

    def _ps_check_given(self, name: str, weight: Tensor, size: int) -> None:
        if len(weight) != size:
            raise ValueError(
                f"`{self._ps_state().path}.{name}` was given as {len(weight)} per-sample weights for a batch of {size} samples: "
                f"expand the parameters to the batch size of the call, ps.expand_params(model, {size})."
            )

    def _ps_prove(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Any:
        """Run, and compare with the original layers; raises where the outputs or the owners of rows differ."""
        given, kind = self._ps_given(), (self.training, ndims((args, kwargs)))
        plain = None
        if not given:  # per-sample weights have no plain counterpart
            with torch.no_grad(), without_picks():
                plain = run_tracked(functools.partial(run, self), self, args, kwargs)[1]
        local.batch = batch = Batch(size, self._ps_state().settings)
        batch.outputs = Watched(size)
        try:
            output = run(self, *args, **kwargs)
        finally:
            local.batch = None
        problem = None if given else disagreement(output, plain)
        layouts = [self._ps_state().layouts.get((0, ("out", i), t.ndim)) for i, t in enumerate(tensors_in([output]))]  # type: ignore[union-attr]
        own = judged(output, batch, layouts)
        try:
            agree = rows_agree(batch.outputs, own, batch)
        except Unprovable:  # tracking has seen it, by changed samples
            agree = True
        if problem is None and ((MIXED in layouts and not own) or agree is False):
            problem = "outputs in which samples depend on rows that are not theirs"
        if problem is not None:
            raise ValueError(
                f"`{self._ps_state().path}` ({type(self).__name__}) returned {problem}: samples interact in it, or an input that "
                f"all {size} samples share was given a batch dim and did not broadcast as without one. Give it one in the model, "
                f"as in ids.unsqueeze(0), or write a layer for the module that does it (ps.PSLayer)."
            )
        if agree:
            self._ps_state().proved.add(kind)
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and `grad_sample` of every parameter below becomes None."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        for param in self.parameters():
            if set_to_none:
                param.grad = None
            if "grad_sample" in param.__dict__:
                clear(param)


def random_state() -> list[Tensor]:
    """The state of torch's random generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def set_random_state(state: list[Tensor] | None) -> None:
    """Put torch's random generators back to a state."""
    if state is not None:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state_all(state[1:])


def _keep(t: Tensor) -> Tensor:
    return t


def _packed() -> bool:
    """Whether somebody packs the tensors that are saved for the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0] is not _keep
