"""PSContainer: modules with layers below them, and modules without a replacement, by a class made for
each.
"""

import functools
from typing import Any

import torch
from torch import nn

from .. import compiled, general, torch_api
from ..core.contents import trainable_parameters
from ..core.context import by_original_layers, local, transforming
from ..core.converted_module import entry
from ..parameters.per_sample import NoRuleError
from .converted import Converted


class PSContainer(Converted):
    """Mixed into the class of a module that has layers below it, or parameters that no replacement knows.

    Its outermost call tells the layers below the batch size. Where the module is general, its forward is run
    with per-sample parameters, see `general`.
    """

    _ps_original: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hide the new class from the original's own registries of subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class: the mixed one is made, not importable."""
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[1] and reduced[1][0] is type(self):
            return (_rebuild, (self._ps_original, reduced[0], reduced[1][1:]), *reduced[2:])
        return reduced

    def _ps_forward(self) -> Any:
        """The original's forward, as a function of the module and what it is called with."""
        own = self._ps.forward if self._ps is not None else None
        return self._ps_original.forward if own is None else own.__func__

    def _ps_run(self, *args: Any, **kwargs: Any) -> Any:
        """A call inside a batch."""
        state, batch, original = self._ps or self._ps_state(), local.batch, self._ps_forward()
        # whose parameters, too, are the samples' own
        if local.stand_ins is not None and local.stand_ins.includes_children:
            return original(self, *args, **kwargs)
        if (
            local.gathered_rows is not None
            and state.per_sample_forward
            and not local.gathered_rows.enters(self)
        ):
            return local.gathered_rows.call(self, self._ps_run, args, kwargs)
        if local.tracker is not None:
            return local.tracker.call(self, original, args, kwargs)
        if batch is not None and batch.ragged is not None:
            return general.run_ragged(self, args, kwargs)
        if batch is None or not state.per_sample_forward:
            return original(self, *args, **kwargs)
        call = batch.count(self)
        if torch_api.level() > batch.level and not self._ps_given():
            self._ps_transformed(batch)
            if batch.undecided:
                return original(self, *args, **kwargs)
        # what a reentrant checkpoint runs without gradients at first is to come again, when nothing can be
        # learned any more
        recording = torch.is_grad_enabled() or torch_api.in_reentrant_forward()
        recording = state.settings.recording and recording and not transforming()
        given = self._ps_given(own=not state.includes_children)
        if not given and not (recording and trainable_parameters(self, own=not state.includes_children)):
            return original(self, *args, **kwargs)
        if batch.size <= 1:
            return general.run_single(self, args, kwargs, given)
        how = batch.form, state.form_of(args, kwargs)
        plan = state.plans.get((call, self.training, bool(given), *how))
        if plan is None and torch_api.current_pass() != -1:  # eval() was called before the backward pass
            plan = state.plans.get((call, not self.training, bool(given), *how))
        if plan is None and given and transforming():  # where nothing can be proved
            plan = state.plans.get((call, self.training, False, *how))
        if plan is None or not general.fits(plan, (args, kwargs), batch.size):
            if batch.give_up():
                return original(self, *args, **kwargs)
            if torch_api.current_pass() != -1:
                raise ValueError(
                    f"{self._ps_name} is called in a backward pass, by a torch.autograd.Function of the"
                    " model's own (a reversible layer), as it was not when this kind of call was proved:"
                    " write a layer for it (ps.PSLayer), or have the forward run it with a graph."
                )
            raise ValueError(
                f"{self._ps_name} was called in a way that differs from run to run of the same batch, so its"
                " samples cannot be told apart: write a layer for it (ps.PSLayer)."
            )
        if not given and not torch.is_grad_enabled():
            with by_original_layers(local.use_original_forward or state.includes_children):
                return original(self, *args, **kwargs)
        try:
            return general.run(self, plan, args, kwargs, given)
        except NoRuleError as error:  # which it did not need when it was proved
            state.sized = state.sized or isinstance(error, general.OtherNumberError)
            if batch.give_up():
                return original(self, *args, **kwargs)
            raise ValueError(
                f"{self._ps_name} does what it did not when this kind of call was proved ({error}): convert"
                " the model anew, or write a layer for it (ps.PSLayer)."
            ) from error
        except (IndexError, RuntimeError):
            # a part of the batch may have been no sample's; else it comes again
            if plan.way == "direct" or not batch.give_up():
                raise
            return original(self, *args, **kwargs)


def _checkpoint_of(module: Any) -> Any:
    """What transformers runs a block by: its checkpoint, but for a reentrant one. By that, what a block gives
    to the next ones is computed without gradients first, where samples have no rows of their own.
    """
    try:
        found = vars(module)["_gradient_checkpointing_func"]
    except KeyError as error:
        raise AttributeError(*error.args) from None
    again = getattr(found, "keywords", {}).get("use_reentrant") is False
    return found if again else _straight


def _set_checkpoint(module: Any, value: Any) -> None:
    vars(module)["_gradient_checkpointing_func"] = value


def _straight(run: Any, *args: Any) -> Any:
    return run(*args)


def _rebuild(original: type[nn.Module], make: Any, args: tuple[Any, ...]) -> Any:
    return make(container_class(original), *args)


def _laid_out_as_module(original: type) -> bool:
    """Whether objects lie in memory as those of nn.Module: not so if a base that comes before it has slots,
    as in ``class Net(abc.ABC, nn.Module)``. Of the bases of a class, the first one's layout is taken.
    """
    return original is nn.Module or (original.__base__ is not None and _laid_out_as_module(original.__base__))


def _ours_first(meta: Any) -> Any:
    """A metaclass by which methods are looked up in PSContainer first, though it is the last base."""

    class OursFirst(meta):
        def mro(self) -> list[type]:
            own, *found = super().mro()
            ours = PSContainer.__mro__[:-1]
            return [own, *ours, *(base for base in found if base not in ours)]

    return OursFirst


_CONTAINERS: dict[type[nn.Module], type[PSContainer]] = {}


def container_class(original: Any) -> type[PSContainer]:
    """`original` with a forward that knows the batch; same name, an `isinstance` of the original."""
    if original in _CONTAINERS:
        return _CONTAINERS[original]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PSContainer):  # restored: what was put around its forward holds this one
            return type(self).forward(self, *args, **kwargs)
        if self._ps is None or local.use_original_forward:
            return self._ps_forward()(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if torch_api.is_exporting():
                return self._ps_forward()(self, *args, **kwargs)
            return compiled.call_container(self, self._ps_forward(), (args, kwargs))
        if local.batch is None and local.tracker is None:
            return self._ps_outermost(self._ps_run, (args, kwargs))
        return self._ps_run(*args, **kwargs)

    names = {
        "forward": entry(forward),
        "_ps_original": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    meta, bases = type(original), (PSContainer, original)
    if not _laid_out_as_module(original):
        meta, bases = _ours_first(meta), bases[::-1]
    cls: type[PSContainer] = meta(original.__name__, bases, names)
    cls.__qualname__ = original.__qualname__
    for base in original.__mro__:  # transformers wraps the forward of the class that it is called by
        if "gradient_checkpointing" in vars(base) and "__init_subclass__" in vars(base):
            vars(base)["__init_subclass__"].__func__(cls)
            cls._gradient_checkpointing_func = property(_checkpoint_of, _set_checkpoint)  # type: ignore[attr-defined]
    _CONTAINERS[original] = cls
    return cls
