"""PSLayer: the base of every layer whose forward computes with per-sample weights."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..expand import Batch, Expansion, Scale, Settings, local, recorder_of

# what each torch class is replaced by; classes enter themselves when they are defined
REGISTRY: dict[type[nn.Module], type["PSLayer"]] = {}


class State:
    """What conversion leaves on a module: the model's settings, the module's path in it, its parameters' own dims."""

    def __init__(self, settings: Settings, path: str, module: nn.Module) -> None:
        self.settings, self.path = settings, path
        self.ndims = {name: p.ndim for name, p in module._parameters.items() if p is not None}


def tensors_in(value: Any) -> Iterator[Tensor | PackedSequence]:
    """Every tensor in what a module is called with, containers opened in order."""
    if isinstance(value, (Tensor, PackedSequence)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors_in(getattr(value, f.name))


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(fn, v) for v in value)
    if type(value) is dict:
        return {k: map_tensors(fn, v) for k, v in value.items()}
    return value


class Converted:
    """What every module of a converted model shares: settings, the batch of the outermost call, clearing."""

    _ps: State | None = None

    def _ps_state(self) -> State:
        if self._ps is None:
            self._ps = State(Settings(), type(self).__name__, self)  # type: ignore[arg-type]
        return self._ps

    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """How many samples an outermost call holds: its first tensor's dim 0 (or 1); None where it has no tensor."""
        settings = self._ps_state().settings
        for value in tensors_in([args, kwargs]):
            if isinstance(value, PackedSequence):
                return int(value.batch_sizes[0]) if len(value.batch_sizes) else 0
            if value.ndim:
                return value.shape[0 if settings.batch_first or value.ndim == 1 else 1]
        return None

    @contextmanager
    def _ps_outermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        size = local.explicit if local.explicit is not None else self._ps_batch_size(args, kwargs)
        local.batch = None if size is None else Batch(size, self._ps_state().settings)
        try:
            yield
        finally:
            local.batch = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and `grad_sample` of every parameter below becomes None."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for param in self.parameters():  # type: ignore[attr-defined]
            if "grad_sample" in param.__dict__:
                param.grad_sample = None


def _guard(ps_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward: the original where nothing is recorded, else with the batch and the rows of this call known."""

    @functools.wraps(ps_forward)
    def forward(self: "PSLayer", *args: Any, **kwargs: Any) -> Any:
        if self._ps_call is not None:  # a subclass that calls super().forward: one call, one set of rows
            return ps_forward(self, *args, **kwargs)
        if self.replaces is not None and not self._ps_needed():
            return self.replaces.forward(self, *args, **kwargs)
        if local.batch is not None:
            return self._ps_run(ps_forward, args, kwargs)
        with self._ps_outermost(args, kwargs):
            return self._ps_run(ps_forward, args, kwargs)

    forward._ps_guarded = True  # type: ignore[attr-defined]
    return forward


class Call:
    """One call of a layer: its rows, the scale of its gradients, and the names of the parameters that it has expanded."""

    __slots__ = ("expanded", "rows", "scale")

    def __init__(self, rows: int, scale: Scale) -> None:
        self.rows, self.scale, self.expanded = rows, scale, set[str]()


class PSLayer(Converted):
    """A layer that computes with per-sample weights; mixed in before the torch layer that it replaces.

    A subclass writes ``forward`` with ``self.expand(name)`` in the place of ``self.name``; autograd does the rest:

    Example:
        >>> import torch, pslayers as ps
        >>> from torch import nn
        >>> class Scale(nn.Module):
        ...     def __init__(self, n):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.ones(n))
        ...     def forward(self, x):
        ...         return x * self.scale
        >>> class PSScale(ps.PSLayer, Scale, replaces=Scale):
        ...     def forward(self, x):                       # x (B, n)
        ...         return x * self.expand("scale")         # (B, n)
        >>> model = ps.convert_model(nn.Sequential(nn.Linear(3, 4), Scale(4)))
        >>> model(torch.randn(5, 3)).sum().backward()
        >>> model[1].scale.grad_sample.shape
        torch.Size([5, 4])

    ``replaces=`` enters the class in the converter's registry: modules of exactly that type become this one. Without it the
    class is used by constructing it. ``fused=True`` says that the forward hands its weights, as ``self.expansion(name)``, to ops of
    ``ps.functional`` alone, which then scale the rows of a mean loss themselves. ``event_dims`` tells how many dims one sample's first input has without a batch dim, where
    the layer wants inputs without one handled (they are then shared by all samples).
    """

    replaces: ClassVar[type[nn.Module] | None] = None
    event_dims: int | None = None
    _ps_fused: ClassVar[bool] = False
    _ps_call: Call | None = None

    def __init_subclass__(cls, replaces: type[nn.Module] | None = None, fused: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.__dict__.get("forward")
        if forward is not None:
            cls.forward = _guard(forward)  # type: ignore[attr-defined]
            cls._ps_fused, cls.replaces = fused, None
        if replaces is not None:
            if not (isinstance(replaces, type) and issubclass(cls, replaces)):
                raise TypeError(
                    f"`{cls.__name__}` says replaces={replaces!r}, but is no subclass of it: a replacement takes over the "
                    f"original's attributes and forward, so write class {cls.__name__}(ps.PSLayer, Original, replaces=Original)."
                )
            cls.replaces = replaces
            REGISTRY[replaces] = cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.replaces is not None and (problem := self.unsupported(self)):  # type: ignore[arg-type]
            raise ValueError(f"{type(self).__name__} {problem}.")
        self._ps = State(Settings(), type(self).__name__, self)  # type: ignore[arg-type]
        for param in self._parameters.values():  # type: ignore[attr-defined]
            if param is not None:
                param.grad_sample = None

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """What about this module's options rules per-sample gradients out, and the way out; None where nothing does."""
        return None

    # ------------------------------------------------------------------ one call
    def _ps_needed(self) -> bool:
        """Whether this call computes with per-sample weights: rows are recorded, or the weights given are per sample."""
        state = self._ps_state()
        recording = state.settings.recording and torch.is_grad_enabled()
        for name, p in self._parameters.items():  # type: ignore[attr-defined]
            if p is not None:
                if recording and p.requires_grad and isinstance(p, nn.Parameter):
                    return True
                if p.ndim != state.ndims.get(name, p.ndim):
                    return True
        return False

    def _ps_run(self, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = local.batch
        if batch is None:
            raise ValueError(
                f"`{self._ps_state().path}` ({type(self).__name__}) was called without a tensor, so its batch size is unknown: "
                f"call it inside `with ps.batch_size(n):`."
            )
        args, kwargs, rows, undo = self.arrange(args, kwargs, batch.size)
        call = Call(rows, batch.scale)
        if not self._ps_fused and batch.scale.total != 1:
            call.scale = scale = Scale(batch.scale.total, batch.scale.total)
            args, kwargs = map_tensors(lambda t: scale_grad(t, scale, False), (args, kwargs))
        attributes = self.__dict__  # nn.Module.__setattr__ is slow
        attributes["_ps_call"] = call
        try:
            output = ps_forward(self, *args, **kwargs)
        finally:
            del attributes["_ps_call"]
        if not self._ps_fused:
            if not self._ps_all_expanded(call):
                call.scale.inside = 1.0  # gradients of other things flow through here: scale the rows themselves
            if call.scale.total != 1:
                output = map_tensors(lambda t: scale_grad(t, call.scale, True), output)
        return output if undo is None else map_tensors(undo, output)

    def _ps_all_expanded(self, call: Call) -> bool:
        """Whether every parameter here was expanded; the others are marked, for they must not receive a gradient."""
        state, whole = self._ps_state(), not self._modules  # type: ignore[attr-defined]
        for name, param in self._parameters.items():  # type: ignore[attr-defined]
            if isinstance(param, nn.Parameter) and param.requires_grad and state.settings.recording:
                recorder = recorder_of(param, f"{state.path}.{name}", state.settings)
                recorder.unexpanded = name not in call.expanded
                whole = whole and not recorder.unexpanded
        return whole

    def arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], int, Callable[[Tensor], Tensor] | None]:
        """Bring the first tensor input to N = k * size rows in dim 0; returns what to do with the output to undo it.

        Raises:
            ValueError: the leading size is no multiple of the batch size, or rows and samples cannot be told apart.
        """
        args, kwargs = tuple(args), dict(kwargs)
        where: tuple[Any, Any] | None = next(
            ((i, a) for i, a in enumerate(args) if isinstance(a, Tensor)),
            next(((k, a) for k, a in kwargs.items() if isinstance(a, Tensor)), None),
        )
        if where is None:
            return args, kwargs, size, None
        key, x = where
        x, undo = self.to_rows(x, size)
        if isinstance(key, int):
            args = (*args[:key], x, *args[key + 1 :])
        else:
            kwargs[key] = x
        return args, kwargs, len(x) if x.ndim else size, undo

    def to_rows(self, x: Tensor, size: int) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """`x` with N = k * size rows in dim 0, by the rules of the batch dim, and how to bring an output back."""
        settings, dims = self._ps_state().settings, self.event_dims
        if x.ndim == (dims or 0):  # no batch dim: shared by all samples
            return x.expand(size, *x.shape), (_squeeze if size == 1 else None)
        if not settings.batch_first and dims is not None and x.ndim >= dims + 2:
            x, undo = self.to_rows_first(x.transpose(0, 1), size), _swap
            return x, undo
        if not settings.batch_first and x.shape[0] not in (1, size):
            raise ValueError(
                f"`{self._ps_state().path}` ({type(self).__name__}) got an input of shape {tuple(x.shape)} in a model with "
                f"batch_first=False and {size} samples: expected {size} rows, since rows of several time steps are time-major "
                f"there and cannot be told from batch-major ones. Keep time and batch as two dims, or convert a batch-first model."
            )
        return self.to_rows_first(x, size), None

    def to_rows_first(self, x: Tensor, size: int) -> Tensor:
        n = x.shape[0]
        if n == 1 and size != 1:
            return x.expand(size, *x.shape[1:])
        if n != size and (size == 0 or n == 0 or n % size):
            raise ValueError(
                f"`{self._ps_state().path}` ({type(self).__name__}) got an input of shape {tuple(x.shape)} in a batch of {size} "
                f"samples: expected {size} rows, a multiple of it (k rows a sample, batch-major) or 1 (shared by all). If the "
                f"batch is not in dim 0 of the model's first input, say so with convert_model(..., batch_first=False) or "
                f"`with ps.batch_size(n):`."
            )
        return x

    # ------------------------------------------------------------------ the weights
    def expansion(self, name: str) -> Expansion | Tensor | None:
        """The parameter `name` in the form that ``ps.functional`` takes, at its cheapest; B weights. None stays None."""
        weight: Tensor | None = getattr(self, name)
        if weight is None:
            return None
        state, batch = self._ps_state(), local.batch
        if weight.ndim != state.ndims.get(name, weight.ndim):  # per-sample weights were given in place of the parameter
            if batch is not None and len(weight) != batch.size:
                raise ValueError(
                    f"`{state.path}.{name}` was given as {len(weight)} per-sample weights for a batch of {batch.size} samples: "
                    f"expand the parameters to the batch size of the call, ps.expand_params(model, {batch.size})."
                )
            return weight
        call, settings = self._ps_call, state.settings
        if batch is None or call is None or not (
            settings.recording and weight.requires_grad and torch.is_grad_enabled() and isinstance(weight, nn.Parameter)
        ):
            return Expansion(weight, None)
        call.expanded.add(name)
        recorder = recorder_of(weight, f"{state.path}.{name}", settings)
        return Expansion(weight, recorder.rows(batch.size), call.scale, recorder)

    def expand(self, name: str) -> Tensor | None:
        """The parameter `name`, expanded to this call's rows: (N, *S), where N is B, or k * B for k rows a sample.

        None stays None (a layer without bias). Memory: the expansion is a view; its gradient takes N x P values.
        """
        if self._ps_call is None:
            raise RuntimeError(f"`{type(self).__name__}.expand({name!r})` was called outside of the layer's forward.")
        weight, rows = self.expansion(name), self._ps_call.rows
        if weight is None:
            return None
        if isinstance(weight, Expansion):
            return weight.tensor(rows)
        return weight if len(weight) == rows else weight.repeat_interleave(rows // len(weight), 0)


def _squeeze(t: Tensor) -> Tensor:
    return t.squeeze(0)


def _swap(t: Tensor) -> Tensor:
    return t.transpose(0, 1)


class _ScaleGrad(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the factor inside a call, or divided by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Scale, into: bool) -> Tensor:
        ctx.scale, ctx.into = scale, into
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        factor = ctx.scale.inside
        return grads[0] if factor == 1 else grads[0] * (factor if ctx.into else 1 / factor), None, None


def scale_grad(x: Tensor, scale: Scale, into: bool) -> Tensor:
    return _ScaleGrad.apply(x, scale, into) if x.requires_grad else x
