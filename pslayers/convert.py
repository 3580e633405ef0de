"""convert_model and restore_model: swapping the classes of a model's modules, all or nothing, and the report
of it.
"""

import functools
import inspect
from dataclasses import replace
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.nn.utils.parametrize import is_parametrized

from . import torch_api
from .attribution.ragged import of_jagged
from .attribution.snapshot import trial
from .core import contents, sharding
from .core.contents import callable_module, own_parameters, trainable_parameters
from .core.context import Settings, changed, clear, local
from .core.converted_module import is_entry
from .core.recorder import forget, let_go, recorder_of
from .core.trees import Call, cloned, is_parameter
from .layers.batch_norm import why_mixed
from .modules import converted
from .modules.base import REGISTRY, PSLayer
from .modules.container import PSContainer, container_class
from .modules.converted import Converted, State
from .modules.first_call import ModelCall
from .modules.inventory import Inventory, states
from .modules.ragged_call import call_ragged
from .reports import Row, original_class

M = TypeVar("M", bound=nn.Module)

REDUCTIONS = ("mean", "sum")
ON_UNSUPPORTED = ("general", "error", "skip", "freeze")


class ConversionError(ValueError):
    """A model that cannot be converted as it is; the message lists every module at fault. The model is
    untouched.
    """


def convert_model(
    model: M,
    *,
    loss_reduction: str = "mean",
    batch_first: bool = True,
    on_unsupported: str = "general",
    example: Any = None,
) -> M:
    """Give every parameter of `model` a per-sample gradient, ``p.grad_sample`` of shape ``(B, *p.shape)``,
    after a backward pass.

    The conversion is in place, by swapping the class of each module: parameters, their names, hooks,
    optimizers and state_dict stay what they are, and ``.grad`` is what plain training gives. It is
    idempotent, and `restore_model` undoes it.

    Args:
        model: any module, the root included.
        loss_reduction: how the loss reduces over the batch, "mean" (``grad_sample.mean(0) == grad``) or "sum"
            (``grad_sample.sum(0) == grad``). A mean that is not over samples (class weights, ignore_index) is
            neither: use "sum" with a sum of per-sample losses.
        batch_first: whether the batch is in dim 0 of the first tensor that the model is called with, else in
            dim 1.
        on_unsupported: what to do about trainable parameters in a module without a replacement: "general"
            runs the module with per-sample parameters, as it is, under vmap or in a loop over samples,
            whichever is proved right first, "error" lists them all, "skip" leaves them without per-sample
            gradients, "freeze" sets requires_grad to False.
        example: an example batch (a tensor, a tuple of positional or a dict of keyword arguments): the model
            runs on it a few times, to track which rows of each layer's input belong to which sample.
            Otherwise that is done at the first call whose shapes leave it open. Inside of `sample_ids` it is
            one of given rows, and verified: RuntimeError where its samples interact.

    Returns:
        `model` itself.

    Raises:
        ConversionError: something in the model cannot be converted; every such module is listed, and nothing
            has changed.
        RuntimeError: inside of a block that was told something of the model (`clipping`, `recording`, ...).
        TypeError: `model` is no module.
        ValueError: an option is not one of those above.

    Example:
        >>> import torch, pslayers as ps
        >>> from torch import nn
        >>> model = ps.convert_model(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        >>> nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 1, 0, 1])).backward()
        >>> model[0].weight.grad_sample.shape
        torch.Size([5, 3, 4])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_model takes a torch.nn.Module; got {type(model).__name__}.")
    _check_outside(model, "convert_model")
    _check_not_told(model)
    one_of("loss_reduction", loss_reduction, REDUCTIONS)
    one_of("on_unsupported", on_unsupported, ON_UNSUPPORTED)
    rows = _plan(model, on_unsupported)
    settings = Settings(loss_reduction, bool(batch_first), on_unsupported=on_unsupported)
    before = [
        (row.module, type(row.module), {k: row.module.__dict__.get(k) for k in ("_ps", "forward")})
        for row in rows
    ]
    fresh = [p for p in contents.parameters(model) if "grad_sample" not in p.__dict__]
    trained = [p for p in contents.parameters(model) if p.requires_grad]
    try:
        _carry_out(rows, settings)
        for param in contents.parameters(model):
            clear(param)
            if (recorder := param.__dict__.get("_ps_recorder")) is not None:  # a pass may wait for its rows
                recorder.go_by(settings)
        _clear_with_optimizers()
        for row in rows:
            if row.general and row.target is not None:
                _watch(row.module, settings)
        if example is not None:
            _try_example(model, arguments(model, example))
    except BaseException:
        for module, cls, held in before:
            module.__class__ = cls
            for name, value in held.items():
                module.__dict__.pop(name, None)
                if value is not None:
                    module.__dict__[name] = value
        for param in trained:  # perhaps frozen since
            param.requires_grad_(True)
        for param in fresh:
            forget(param)
        raise
    return model


def _carry_out(rows: list[Row], settings: Settings, prefix: str = "") -> None:
    """Do what was planned with modules, whose paths in the model begin with `prefix`."""
    for row in rows:
        if settings.on_unsupported == "freeze" and not row.recorded:
            for param in row.trainable:
                param.requires_grad_(False)
        if row.target is not None:
            _swap(replace(row, path=f"{prefix}{row.path}".rstrip(".")), settings)


def _swap(row: Row, settings: Settings) -> None:
    assert row.target is not None
    try:
        row.module.__class__ = row.target
    except TypeError as error:  # a class with an object layout of its own
        raise ConversionError(
            f"`{row.path or row.original.__name__}` ({row.original.__name__}) cannot change its class:"
            f" {error}."
        ) from error
    assert isinstance(row.module, Converted)
    earlier = row.module.__dict__.get("_ps")
    row.module._ps = state = State(settings, row.path, row.module)
    state.forward = earlier.forward if earlier is not None else None
    if (own := _own_method(row.module)) is not None:  # it would hide that of the class
        state.forward = own
        del row.module.__dict__["forward"]
    state.per_sample_forward = row.general
    state.includes_children = row.general and is_parametrized(row.module)


def _watch(module: Any, settings: Settings) -> None:
    """Have it seen if its parameters are used past its forward, before that has run: without a word they
    would have no rows.
    """
    for name, param in own_parameters(module):
        if is_parameter(param) and param.requires_grad and not is_lazy(param):
            holder = contents.submodule(module, name.rpartition(".")[0])
            recorder_of(param, f"{module._ps_state().prefix}{name}", settings, holder)


def _adopt(model: Any) -> None:
    """Convert what has been put into a converted model, and prove all of it anew; ConversionError where that
    cannot be.
    """
    state = model._ps_state()
    settings: Settings = state.settings
    _carry_out(_plan(model, settings.on_unsupported), settings, state.prefix)
    for param in contents.parameters(model):
        if "grad_sample" not in param.__dict__:
            clear(param)


converted.adopt = _adopt


def _try_example(model: Any, inputs: Call) -> None:
    if not isinstance(model, PSContainer):
        return
    inputs = cloned(inputs)  # a forward may write to them
    with trial(model), of_jagged(inputs):
        try:
            if local.ragged is not None:
                output, call = call_ragged(model, model._ps_run, inputs)
                if call is not None:
                    call.try_out(output)  # RuntimeError where its samples interact
            # one sample tells nothing
            elif (size := model._ps_batch_size(*inputs)) is not None and size > 1:
                with changed(form=model._ps_form(*inputs)):
                    ModelCall(model, inputs, size, model._ps_kind(model._ps_sizes(inputs), size)).learn()
        except ValueError as error:
            raise ConversionError(
                f"{type(model).__name__} cannot be converted, and has not been changed: {error}"
            ) from error


def arguments(model: nn.Module, inputs: Any) -> Call:
    """What a model is called with, from a tensor, a tuple of positional or a dict of keyword arguments.

    Raises:
        TypeError: the model's forward takes no such keyword arguments.
    """
    if isinstance(inputs, dict):
        try:
            if not model._forward_pre_hooks_with_kwargs:  # which may give it others
                inspect.signature(model.forward).bind(**inputs)
        except TypeError as error:
            raise TypeError(
                f"{type(model).__name__}.forward does not take the keyword arguments {list(inputs)}"
                f" ({error}): if it takes a dict as its first argument, give it in a tuple, (batch,)."
            ) from error
        return (), inputs
    return (inputs if type(inputs) is tuple else (inputs,)), {}


@functools.cache
def _clear_with_optimizers() -> None:
    """Let every optimizer's zero_grad clear `grad_sample` too. Torch has no hook for it, so its method is
    wrapped, once.
    """
    original = torch.optim.Optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                if "_ps_recorder" in param.__dict__:
                    clear(param)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def restore_model(model: M) -> M:
    """Undo `convert_model`: the original classes again, and nothing left on modules or parameters. Returns
    `model`.

    Layers that were built as PS layers (``ps.PSLinear(3, 2)``) become torch's own; a PS layer that replaces
    none stays.

    Raises:
        RuntimeError: inside of a block that takes the model's gradients.
    """
    _check_outside(model, "restore_model")
    for module in contents.modules(model):
        if isinstance(module, Converted):
            original = original_class(type(module))
            state = module.__dict__.pop("_ps", None)
            if state is not None and state.forward is not None:
                module.__dict__["forward"] = state.forward
            if original is not type(module):
                module.__class__ = original  # type: ignore[assignment]
    for param in contents.parameters(model):
        let_go(param)
    State.conversions += 1  # models that hold one of these modules look again at what they hold
    return model


def _check_outside(model: nn.Module, what: str) -> None:
    if any(state.settings.sink is not None for _, state in states(model)):
        raise RuntimeError(
            f"{what} was called inside of ps.factored, ps.clipping, ps.reweighting or ps.streaming of this"
            " model, which would see no more of its gradients: call it outside."
        )


def _check_not_told(model: nn.Module) -> None:
    every = (state.settings for _, state in states(model))
    if any(s.in_block or not s.recording for s in every):
        raise RuntimeError(
            "convert_model was called inside of ps.recording or ps.accumulating of this model, which would"
            " no longer hold of it: call it outside."
        )


WRAPPED = "module", "_orig_mod"  # what DistributedDataParallel and torch.compile call the model they wrap


def wholly_converted(model: nn.Module) -> Converted:
    """The model; ConversionError where but parts of it are converted."""
    if not isinstance(model, Converted):
        for name in WRAPPED:
            if isinstance(model._modules.get(name), Converted) and len(model._modules) == 1:
                raise ConversionError(
                    f"{type(model).__name__} wraps a converted model: give that one, `model.{name}`."
                )
        raise ConversionError(
            f"Only parts of {type(model).__name__} are converted: call ps.convert_model on the whole model."
        )
    return model


def settings_of(model: nn.Module) -> list[Settings]:
    """The settings that the converted modules of `model` go by (one, unless parts were converted apart)."""
    found = (model._ps_whole() if isinstance(model, Converted) else Inventory(model, "", 0)).settings
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no converted module: call ps.convert_model(model) first."
        )
    return list(found)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """ValueError where an option is none of these."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}.")


# --------------------------------------------------------------------------------------------------- the plan
def _plan(model: nn.Module, on_unsupported: str) -> list[Row]:
    """What to do with each module; raises before anything is changed."""
    rows: list[Row] = []
    refused: list[str] = []
    unsupported: list[str] = []
    whole = tuple(
        p for p, m in contents.named_modules(model) if on_unsupported == "general" and is_parametrized(m)
    )
    for path, module in contents.named_modules(model):
        cls, why = type(module), None
        if any(path.startswith(f"{p}.parametrizations" if p else "parametrizations") for p in whole):
            continue  # goes with the module whose weights it computes
        name = f"`{path or '(model)'}` ({cls.__name__})"
        if problem := _refusal(module):
            refused.append(f"{name} {problem}.")
        elif isinstance(module, PSLayer) and path not in whole:
            rows.append(Row(path, module, original_class(cls), cls))
        elif cls in REGISTRY and not (why := _unlike(module)):
            rows.append(Row(path, module, cls, REGISTRY[cls]))
        else:
            row = Row(path, module, original_class(cls), None)
            if not callable_module(module) and path:
                continue  # what it holds is its caller's
            general = (
                on_unsupported == "general"
                and callable_module(module)
                and (path in whole or bool(row.trainable))
            )
            if general or _calls_layers(module, on_unsupported == "general"):
                row = replace(row, target=container_class(row.original), general=general)
            if row.trainable:
                names = ", ".join(trainable_parameters(module, own=True))
                unsupported.append(
                    f"{name} {why or _no_replacement(cls)}; its trainable parameters: {names}."
                )
                if on_unsupported == "general" and not callable_module(module):
                    refused.append(
                        f"{name} holds parameters of its own ({names}) but has no forward: convert what uses"
                        " them."
                    )
            if row.trainable or row.target is not None:
                rows.append(row)
    problems = refused + (unsupported if on_unsupported == "error" else [])
    if problems:
        way_out = (
            "\nWrite a layer for it (class PSName(ps.PSLayer, Name, replaces=Name)), or choose"
            " on_unsupported='general' (run it with per-sample parameters, the default), 'skip' (no"
            " per-sample gradients there) or 'freeze' (no gradients there)."
        )
        raise ConversionError(
            f"{type(model).__name__} cannot be converted, and has not been changed:\n- "
            + "\n- ".join(problems)
            + (way_out if unsupported and on_unsupported == "error" else "")
        )
    if not any(row.recorded for row in rows):
        raise ConversionError(
            f"{type(model).__name__} holds no module that has a replacement, so there is nothing to convert."
            " These have one: " + ", ".join(sorted(c.__name__ for c in REGISTRY)) + "."
        )
    return rows


def _refusal(module: nn.Module) -> str | None:
    """Why this module cannot be part of a converted model at all, and the way out."""
    if (
        sharding.is_sharded(type(module))
        and not isinstance(module, PSLayer)
        and (
            type(module).__bases__[1] in REGISTRY
            or any(p.requires_grad for p in module._parameters.values() if p is not None)
        )
    ):
        return (
            "is sharded already (fully_shard): convert the model before its layers are sharded by themselves"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "is compiled by TorchScript, so its layers cannot be replaced: convert the model before"
            " scripting it"
        )
    if torch_api.is_compiled(module):
        return (
            "is what torch.compile returned: convert the model first, then compile it,"
            " torch.compile(ps.convert_model(model)), or a part of it where it is, block.compile()"
        )
    if any(
        isinstance(t, (UninitializedParameter, UninitializedBuffer))
        for t in (*module._parameters.values(), *module._buffers.values())
    ):
        return (
            "is lazy and has not seen an input yet: run one batch through the model first, under"
            " torch.no_grad() where it was put into a converted one"
        )
    if (
        "forward" in module.__dict__
        and _own_method(module) is None
        and not _is_around_ours(module)
        and any(True for _ in contents.parameters(module))
    ):
        return (
            "has a forward of its own set on the instance, which would bypass the replacement: move it into"
            " the class (a method of that very module, self.forward = self.forward_other, is fine)"
        )
    if isinstance(module, torch_api.AnyBatchNorm) and (module.training or not module.track_running_stats):
        return why_mixed(eval_helps=module.track_running_stats)
    if type(module) in REGISTRY:
        return REGISTRY[type(module)].unsupported(module)
    return None


def _own_method(module: nn.Module) -> MethodType | None:
    """What was set as `forward` on a module, where it is a method of that very module."""
    own = module.__dict__.get("forward")
    mine = isinstance(own, MethodType) and own.__self__ is module and not isinstance(module, PSLayer)
    return own if mine and not _is_around_ours(module) else None


def _is_around_ours(module: nn.Module) -> bool:
    """Whether what was set as `forward` on a module says (by `__wrapped__`) that it is around that which the
    module had when it was converted before.
    """
    own = module.__dict__.get("forward")
    inner = None if own is None else inspect.unwrap(own, stop=is_entry)
    return is_entry(inner) and getattr(inner, "__self__", module) is module


def _unlike(module: nn.Module) -> str | None:
    """Why a module of a known class is not like that class; None where it is."""
    if "forward" in module.__dict__ and not _is_around_ours(module):
        return "has a forward of its own set on the instance"
    if any(isinstance(value, torch.Tensor) for value in module.__dict__.values()):
        return "holds a weight that is computed from other parameters (weight_norm, spectral_norm, pruning)"
    return None


def _no_replacement(cls: type[nn.Module]) -> str:
    base = next((c for c in cls.__mro__[1:] if c in REGISTRY), None)
    if base is None:
        return "has no replacement"
    return f"has no replacement (as a subclass of {base.__name__} it may compute something else)"


def _calls_layers(module: nn.Module, general: bool) -> bool:
    """Whether the module has a forward, and below it layers, or with `general` whatever has parameters."""
    below = (m for m in contents.modules(module) if m is not module)
    return callable_module(module) and any(
        isinstance(m, PSLayer) or type(m) in REGISTRY or (general and trainable_parameters(m, own=True))
        for m in below
    )
