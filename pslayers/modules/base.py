"""PSLayer: the base of every layer whose forward computes with per-sample weights."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import compiled, torch_api
from ..attribution.tracking import (
    BATCH_MAJOR,
    FIRST,
    MIXED,
    SHARED,
    TABLE,
    TIME_MAJOR,
    Ambiguous,
    Layout,
    Tracker,
    by_shape,
    fits_layout,
)
from ..core.context import (
    Batch,
    LayerCall,
    Place,
    Scale,
    Settings,
    by_samples,
    clear,
    in_place_of,
    in_ragged,
    local,
    transforming,
)
from ..core.converted_module import ConvertedLayer, entry
from ..core.expansion import Expansion, rescale_grad
from ..core.recorder import recorder_of
from ..core.trees import is_parameter, map_tensors, tensors_in, tensors_of
from ..parameters.per_sample import NoRuleError, PerSample, Standing, all_same, followed, names_of
from ..parameters.row_ops import as_rows
from .converted import Converted, State

# what each torch class is replaced by; classes enter themselves when they are defined
REGISTRY: dict[type[nn.Module], type["PSLayer"]] = {}


def _guard(ps_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward: the original where nothing is recorded, else with the batch and the rows of this
    call known.
    """

    @functools.wraps(ps_forward)
    def forward(self: "PSLayer", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PSLayer):  # restored: what was put around its forward holds this one
            return type(self).forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return compiled.call_layer(self, ps_forward, (args, kwargs))
        # a subclass that calls super().forward: one call, one set of rows
        if local.call is not None and local.call.layer is self:
            return ps_forward(self, *args, **kwargs)
        if (standing := local.stand_ins) is not None:
            if (stand_in := self._ps_standing(standing, args, kwargs)) is not None:
                return stand_in(functools.partial(forward, self))
            if standing.idle and standing.idle >= {id(p) for p in self._parameters.values() if p is not None}:
                return self._ps_plain(ps_forward, args, kwargs)
        if (picks := local.gathered_rows) is not None and not picks.enters(self):
            return picks.call(self, functools.partial(forward, self), args, kwargs)
        if local.tracker is not None:
            return self._ps_seen(ps_forward, args, kwargs)
        if local.use_original_forward:
            return self._ps_plain(ps_forward, args, kwargs)
        if (batch := local.batch) is not None:
            batch.count(self)
            if torch_api.level() > batch.level:  # an error where that is traced, and this is not
                self._ps_transformed(batch)
                if batch.undecided:
                    return self._ps_plain(ps_forward, args, kwargs)
        if self.replaces is not None and not self._ps_needed():
            return self.replaces.forward(self, *args, **kwargs)
        if batch is not None:
            try:
                return self._ps_run(ps_forward, args, kwargs)
            except Ambiguous:
                batch.give_up()
                return self._ps_plain(ps_forward, args, kwargs)
        return self._ps_outermost(lambda *a, **k: self._ps_run(ps_forward, a, k), (args, kwargs))

    return entry(forward)


if TYPE_CHECKING:

    class _Layer(Converted, ConvertedLayer):
        """A converted module that is what lower rooms know of a layer."""

else:
    _Layer = Converted


class PSLayer(_Layer):
    """A layer that computes with per-sample weights; mixed in before the torch layer that it replaces.

    A subclass writes ``forward`` with ``self.expand(name)`` in the place of ``self.name``; autograd does the
    rest:

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

    ``replaces=`` enters the class in the converter's registry: modules of exactly that type become this one.
    Without it the class is used by constructing it. ``fused=True`` says that the forward hands its weights,
    as ``self.expansion(name)``, to ops of ``ps.functional`` alone, which then scale the rows of a mean loss
    themselves. ``event_dims`` tells how many dims the first input of one sample has by itself, where inputs
    without a batch dim, or with the batch in another dim, are to be handled.
    """

    replaces: ClassVar[type[nn.Module] | None] = None
    event_dims: int | None = None
    _ps_fused: ClassVar[bool] = False
    _ps_channels: ClassVar[bool] = False  # an input's dims are its rows, its channels, and others
    _ps_layer: ClassVar[bool] = True

    def __init_subclass__(
        cls, replaces: type[nn.Module] | None = None, fused: bool = False, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.__dict__.get("forward")
        if forward is not None:
            cls.forward = _guard(forward)
            cls._ps_fused, cls.replaces = fused, None
        if replaces is not None:
            if not (isinstance(replaces, type) and issubclass(cls, replaces)):
                raise TypeError(
                    f"`{cls.__name__}` says replaces={replaces!r}, but is no subclass of it: a replacement"
                    " takes over the original's attributes and forward, so write class"
                    f" {cls.__name__}(ps.PSLayer, Original, replaces=Original)."
                )
            cls.replaces = replaces
            REGISTRY[replaces] = cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.replaces is not None and (problem := self.unsupported(self)):
            raise ValueError(f"{type(self).__name__} {problem}.")
        self._ps = State(Settings(), "", self)
        for param in self._parameters.values():
            if param is not None:
                clear(param)

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """What about this module's options rules per-sample gradients out, and the way out; None where
        nothing does.
        """
        return None

    # ------------------------------------------------------------------ one call
    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        x = args[0] if args and isinstance(args[0], Tensor) else next(iter(tensors_in((args, kwargs))), None)
        if isinstance(x, Tensor) and self.event_dims is not None and 0 < x.ndim == self.event_dims:
            return 1  # no batch dim: one sample
        return super()._ps_batch_size(args, kwargs)

    def _ps_needed(self) -> bool:
        """Whether this call computes with per-sample weights: rows are recorded, or the weights given are per
        sample.
        """
        state = self._ps or self._ps_state()
        recording = (
            state.settings.recording
            and not transforming()
            and (torch.is_grad_enabled() or self._ps_foreseen())
        )
        for name, p in self._parameters.items():
            if p is not None:
                if recording and p.requires_grad and is_parameter(p):
                    return True
                if p.ndim != state.ndims.get(name, p.ndim):
                    return True
        return False

    def _ps_foreseen(self) -> bool:
        """Whether a reentrant checkpoint runs this at first, without gradients, in a call that is to be
        proved.

        When it comes again, nothing can be learned any more.
        """
        return (
            local.batch is not None and local.batch.outputs is not None and torch_api.in_reentrant_forward()
        )

    def _ps_run(self, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = local.batch
        if batch is None:
            raise ValueError(
                f"{self._ps_name} was called without a tensor, so its batch size is unknown: call it inside"
                " `with ps.batch_size(n):`."
            )
        if batch.ragged is None:
            args, kwargs, rows, undo = self.arrange(args, kwargs, batch.size)
        else:
            if batch.ragged.proving:
                names = {f"{self._ps_state().prefix}{name}" for name in self._parameters}
                batch.ragged.meets_shared(names, tensors_of((args, kwargs)))
            args, kwargs, rows, undo = self._ps_by_position(args, kwargs)
        call = LayerCall(self, rows, batch.scale)
        if not self._ps_fused and batch.scale.total != 1:
            call.scale = scale = Scale(batch.scale.total, batch.scale.total, batch.settings)
            args, kwargs = map_tensors(lambda t: rescale_grad(t, scale, True), (args, kwargs))
        with call:
            output = ps_forward(self, *args, **kwargs)
        if not self._ps_fused:
            if not self._ps_all_expanded(call):
                # gradients of other things flow through here: scale the rows themselves
                call.scale.inside = 1.0
            if call.scale.total != 1:
                output = map_tensors(lambda t: rescale_grad(t, call.scale, False), output)
        if batch.outputs is not None:
            x = next(iter(tensors_in((args, kwargs))), None)
            copies = isinstance(x, Tensor) and x.ndim > 0 and x.stride(0) == 0 and len(x) == rows
            batch.outputs.add(self._ps_owned(output, rows), copies)
        return output if undo is None else map_tensors(undo, output)

    def _ps_owned(self, output: Any, rows: int) -> list[tuple[Tensor, int, Tensor | None]]:
        """The tensors of an output, the dim of their rows, and whose these are; None: k a sample, in
        order.
        """
        return (
            [(output, 0, None)]
            if isinstance(output, Tensor) and output.ndim and output.shape[0] == rows
            else []
        )

    def _ps_all_expanded(self, call: LayerCall) -> bool:
        """Whether all that is trainable here was expanded and recorded; what was not is watched, for it must
        get no gradient.
        """
        state, whole = self._ps_state(), not self._modules
        for name, param in self._parameters.items():
            if param is not None and param.requires_grad:
                expanded = name in call.expanded
                whole = whole and expanded
                if state.settings.records(param):
                    recorder_of(param, f"{state.prefix}{name}", state.settings).unexpanded = not expanded
        return whole

    def _ps_transformed(self, batch: Batch) -> None:
        if any(map(batch.settings.records, self._parameters.values())):
            super()._ps_transformed(batch)

    def _ps_standing(
        self, standing: Standing, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Callable[..., Any]], Any] | None:
        """How to run a call whose weights or input are `PerSample`, tensors that stand for one of each
        sample; None for any other call.
        """
        own = [(held, name, t) for held, name, t in self._ps_used() if isinstance(t, PerSample)]
        x = next(iter(tensors_in((args, kwargs))), None)
        given = tensors_of((args, kwargs)) if in_ragged() else []
        of_parameters = [isinstance(t, PerSample) for t in given]
        beside_rows = any(of_parameters) and not all(of_parameters)
        if not own and not isinstance(x, PerSample) and not beside_rows:
            return None
        standing.check_level()
        if beside_rows:
            args, kwargs = map_tensors(as_rows, (args, kwargs))
            x = next(iter(tensors_in((args, kwargs))), None)
        shared: Tensor | None = None  # by all samples
        if isinstance(x, PerSample):
            shared = x.each
        elif own and in_ragged():
            names = names_of(t for *_, t in own)
            if isinstance(x, Tensor) and local.batch.ragged.meets_shared(names, given):  # type: ignore[union-attr]
                shared = x.expand(local.batch.size, *x.shape)  # type: ignore[union-attr]
        elif own and isinstance(x, Tensor):
            owners = None if (picks := followed()) is None else picks.owners(x)
            if picks is None or (owners is not None and owners.sample_ids is None):
                raise NoRuleError(
                    f"`{self._ps_state().path}` is given rows of which it is not known whose they are"
                )
            if owners is None and not picks.copied(x):
                shared = x.expand(local.batch.size, *x.shape)  # type: ignore[union-attr]

        def run(forward: Callable[..., Any]) -> Any:
            if own and local.batch is None:
                raise NoRuleError(f"`{self._ps_state().path}` is called without a batch")
            with in_place_of([(held, name, _marked(t.each)) for held, name, t in own]):
                if shared is None:
                    return forward(*args, **kwargs)
                same = all_same(t for t in (x, *(t for *_, t in own)) if isinstance(t, PerSample))
                return self._ps_of_shared(forward, args, kwargs, x, shared, same)

        return run

    def _ps_used(self) -> list[Place]:
        """The parameters that a call computes with, where they are held: its own, and those of layers that it
        holds, which it does not call; with what a forward has set in the place of one.
        """
        layers = [self, *(m for m in self._modules.values() if isinstance(m, PSLayer))]
        held = [layer._parameters for layer in layers]
        if local.batch is not None:  # else the original forward meets what was set
            held += [layer.__dict__ for layer in layers]
        return [(where, name, value) for where in held for name, value in where.items()]

    def _ps_of_shared(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, x: Any, each: Tensor, same: bool
    ) -> Any:
        """A call for what all samples share, or what stands for each sample's own, `each` (B, *S): what
        stands for the results, the `same` of all samples or not.
        """
        rows, k = each, each.shape[1] if each.ndim > 2 else 0
        if k and (self._ps_channels or (self.event_dims is not None and each.ndim - 2 == self.event_dims)):
            rows = each.flatten(0, 1)  # k rows for each sample
        args, kwargs = map_tensors(lambda t: rows if t is x else t, (args, kwargs))
        if local.gathered_rows is not None:
            local.gathered_rows.tag_batch(rows)
        with by_samples(rows):
            output = forward(*args, **kwargs)
            dims = {id(t): dim for t, dim, _ in self._ps_owned(output, len(rows))}  # of states another

        def apart(t: Tensor) -> Tensor:
            dim = dims.get(id(t), 0)
            t = t if rows is each else t.unflatten(dim, (len(each), k))
            return PerSample.of(t.movedim(dim, 0), same)

        return map_tensors(apart, output)

    def _ps_seen(self, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call while the batch is tracked: note the input, and compute as the original does."""
        tracker: Tracker = local.tracker
        if tracker.passes_by(self):
            return self._ps_plain(ps_forward, args, kwargs)
        x = self._ps_tracked(args, kwargs)
        with tracker.inside(self):
            if x is not None:
                tracker.see(self, x)
            return self._ps_plain(ps_forward, args, kwargs)

    def _ps_tracked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The input whose rows are to be attributed to samples."""
        return next(iter(tensors_of((args, kwargs))), None)

    def _ps_plain(self, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that computes as the original does."""
        if self.replaces is not None:
            return self.replaces.forward(self, *args, **kwargs)
        x = next(iter(tensors_of((args, kwargs))), None)
        with LayerCall(self, len(x) if x is not None and x.ndim else 1, Scale()):
            return ps_forward(self, *args, **kwargs)

    def arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], int, Callable[[Tensor], Tensor] | None]:
        """Bring the first tensor input to N = k * size rows in dim 0; also returns N, and what brings an
        output back.

        Raises:
            ValueError: the rows cannot be attributed to the samples.
        """
        if args and self._ps_plainly_batched(args[0], size):
            return args, kwargs, size, None
        inputs = [(k, v) for k, v in (*enumerate(args), *kwargs.items()) if isinstance(v, Tensor)]
        if not inputs:
            return args, kwargs, size, None
        (key, x), *_ = inputs
        x, undo = self.to_rows(x, size)
        if isinstance(key, int):
            args = (*args[:key], x, *args[key + 1 :])
        else:
            kwargs = {**kwargs, str(key): x}
        return args, kwargs, x.shape[0], undo

    def _ps_by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], int, Callable[[Tensor], Tensor] | None]:
        """As `arrange`, for rows that belong to given samples: dims before those of an event are rows."""
        inputs = [t for t in tensors_of((args, kwargs)) if t.ndim]
        if not inputs:
            return args, kwargs, 1, None
        x, n = inputs[0], 0 if self.event_dims is None else inputs[0].ndim - self.event_dims
        if n < 2 or any(t.is_nested for t in inputs) or any(t.shape[:n] != x.shape[:n] for t in inputs):
            return args, kwargs, len(x), None
        leading = x.shape[:n]
        args, kwargs = map_tensors(lambda t: t.flatten(0, n - 1) if t.ndim else t, (args, kwargs))
        return args, kwargs, leading.numel(), lambda y: y.unflatten(0, leading)

    def _ps_plainly_batched(self, x: Any, size: int) -> bool:
        """Whether `layout` would find the batch in dim 0, the most frequent case, in which it is not worth
        its time.
        """
        return (
            isinstance(x, Tensor)
            and (self.event_dims is None or x.ndim - 1 == self.event_dims)
            and x.ndim > 0
            and x.shape[0] == size > 1
            and x.is_floating_point()
            and not (self._ps or self._ps_state()).layouts
        )

    def to_rows(self, x: Tensor, size: int) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """`x` with N = k * size rows in dim 0, and how to bring an output back to the form of the input."""
        if in_ragged():
            return x, None
        kind, dim = layout = self.layout(x, size)
        if layout == SHARED:
            return x.expand(size, *x.shape[1:]), None
        if layout == TABLE:
            return x.expand(size, *x.shape), ((lambda y: y.squeeze(0)) if size == 1 else None)
        if kind == "dim" and dim:
            return x.movedim(dim, 0), lambda y: y.movedim(0, dim).contiguous()  # as torch's, for views of it
        if layout == TIME_MAJOR:
            return _swap_rows(x, size), lambda y: _swap_rows(y, y.shape[0] // size)
        return x, None

    def layout(self, x: Tensor, size: int) -> Layout:
        """How `x` holds the samples: by its shape where that is enough, else tracked."""
        if torch.compiler.is_compiling():
            return compiled.layout(self, x, size)
        free = 1 if self.event_dims is None else x.ndim - self.event_dims  # dims that could be the batch's
        n, batch, state = x.shape[0] if x.ndim else 0, local.batch, self._ps_state()
        assert batch is not None
        if x is batch.in_order or (local.gathered_rows is not None and local.gathered_rows.batches.get(x)):
            return BATCH_MAJOR
        if free <= 0 or x.ndim == 0:
            if self._ps_layout(batch.calls.get(id(self), 0), FIRST, x.ndim) is None:
                if batch.trackable:
                    raise Ambiguous  # what it returns gets a dim more: does it broadcast as it did?
                self._ps_note_layout(x, TABLE)
            return TABLE
        if size <= 1:
            return BATCH_MAJOR if size or not n else SHARED if n == 1 else TABLE
        known = self._ps_layout(batch.calls.get(id(self), 0), FIRST, x.ndim)
        if known is not None and fits_layout(known, x, size):
            return self._attributable(known, x, free, size)
        found, certain = by_shape(x, size, free, state.settings.batch_first)
        if certain:
            return found
        if batch.trackable:
            raise Ambiguous
        if found == MIXED or (found == BATCH_MAJOR and state.layouts):  # which a layer by itself may be given
            return self._attributable(MIXED, x, free, size)
        self._ps_note_layout(x, found)
        return found

    def _ps_note_layout(self, x: Tensor, layout: Layout) -> None:
        """What a run that is to be proved has taken an input for, of which tracking tells nothing."""
        if (batch := local.batch) is not None and batch.proving:
            key = self._ps_layout_key(batch.calls.get(id(self), 0), FIRST, x.ndim)
            self._ps_state().by_shape[key] = layout

    def _attributable(self, layout: Layout, x: Tensor, free: int, size: int) -> Layout:
        if layout == MIXED or (layout[0] == "dim" and layout[1] >= free):
            raise self._ps_not_attributable(x, size)
        return layout

    def _ps_not_attributable(self, x: Tensor, size: int) -> ValueError:
        before_event = x.shape[: x.ndim - (self.event_dims or 0)]
        if x.ndim and x.shape[0] == size and before_event.count(size) == 1:
            first = self._ps_state().settings.batch_first
            return ValueError(
                f"{self._ps_name} got an input of shape {tuple(x.shape)} whose rows depend on more than one"
                f" of the {size} samples each: samples interact before it (by a mean, a maximum or a softmax"
                " over the batch, by all pairs), or rows were moved by data in a way that is not followed."
                f" If dim {int(first)} holds the samples, say convert_model(..., batch_first={not first})."
                " If the model's first input is shared by all samples, and by chance as long as the batch,"
                " or some times as long, give it a batch dim of one, edges.unsqueeze(0). Else take such"
                " statistics over a sample's own dims; if samples do not interact, write a layer for the"
                " module that moves rows (ps.PSLayer)."
            )
        return ValueError(
            f"{self._ps_name} got an input of shape {tuple(x.shape)} in a batch of {size} samples, whose rows"
            f" cannot be attributed to samples: expected {size} rows, a multiple of it (k rows a sample) or 1"
            " (shared by all). If the batch is not in dim 0 of the model's first input, say so with"
            " convert_model(..., batch_first=False) or `with ps.batch_size(n):`; if shapes are ambiguous,"
            " give an example batch, convert_model(..., example=x). If samples have rows of their own numbers"
            " (graphs, packed tokens), say whose they are, `with ps.sample_ids(ids, n):`; else write a layer"
            " for this module (ps.PSLayer). Where samples interact (attention over the batch), no gradient is"
            " of one sample alone."
        )

    # ------------------------------------------------------------------ the weights
    def expansion(self, name: str) -> Expansion | Tensor | None:
        """The parameter `name` in the form that ``ps.functional`` takes, at its cheapest; B weights. None
        stays None.
        """
        batch = local.batch
        # of calls that are traced there is no other batch
        if (batch is None or batch.traced) and torch.compiler.is_compiling():
            return compiled.weights(self, name)
        weight: Tensor | None = self._parameters[name] if name in self._parameters else getattr(self, name)
        if weight is None:
            return None
        if name not in self._parameters and hasattr(weight, "_ps_each"):  # made of parameters
            return weight
        state = self._ps or self._ps_state()
        # per-sample weights were given in place of the parameter
        if weight.ndim != state.ndims.get(name, weight.ndim):
            if batch is not None:
                self._ps_check_given(name, weight, batch.size)
            return weight
        if "parametrizations" in self._modules:
            compiled.check_own_weights(self)
        call, settings = local.call, state.settings
        if (
            batch is None
            or call is None
            or call.layer is not self
            or not (
                settings.recording
                and weight.requires_grad
                and torch.is_grad_enabled()
                and is_parameter(weight)
            )
        ):
            return Expansion(weight, None)
        call.expanded.add(name)
        recorder = weight.__dict__.get("_ps_recorder")
        if (
            recorder is None
            or recorder.settings is not settings
            or recorder.holder.slot is None
            or recorder.param() is not weight
        ):
            recorder = recorder_of(weight, f"{state.prefix}{name}", settings, self)
        return recorder.expansion(weight, batch, call.scale)

    def _ps_weight(self, name: str = "weight") -> Expansion | Tensor:
        """The same of a parameter that there always is."""
        weight = self.expansion(name)
        assert weight is not None
        return weight

    def expand(self, name: str) -> Tensor | None:
        """The parameter `name`, expanded to this call's rows: ``(N, *S)``, where N is B, or k * B for k rows
        a sample.

        None stays None (a layer without bias). Memory: the expansion is a view; its gradient takes N x P
        values.
        """
        if local.call is None or local.call.layer is not self:
            raise RuntimeError(
                f"`{type(self).__name__}.expand({name!r})` was called outside of the layer's forward."
            )
        weight, rows = self.expansion(name), local.call.rows
        if weight is None:
            return None
        if isinstance(weight, Expansion):
            weight = weight.tensor(rows)
        elif len(weight) != rows:
            weight = weight.repeat_interleave(rows // len(weight), 0)
        if local.batch is not None and local.batch.outputs is not None:  # the forward may do anything with it
            local.batch.outputs.add([(weight, 0, None)])
        return weight


class OwnBatchDim(PSLayer):
    """A layer that brings its inputs to rows in its forward. Their batch dim is its own, by its
    ``batch_first``, whatever the rest of the model does; dim 0 where it has no such option.
    """

    batch_first: bool = True
    _ps_input: ClassVar[str] = "input"  # the name of the first one

    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        x = args[0] if args else kwargs.get(self._ps_input)
        if isinstance(x, Tensor):
            batched = x.ndim - 1 == self.event_dims
            return x.size(0 if x.is_nested else self._batch_dim) if batched else 1
        return super()._ps_batch_size(args, kwargs)

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[Any, Any, int, None]:
        """Leave the inputs as they are: `forward`, which knows what they are, brings them to rows."""
        return args, kwargs, size, None

    def _watch_rows(self, dim: int, *tensors: Tensor, owners: Tensor | None = None) -> None:
        """Have a call that is proved look at what is made of k rows a sample, here in the samples' order (or
        as `owners` tells); in the caller's, `_ps_owned` cannot tell whose they are.
        """
        batch = local.batch
        if batch is not None and batch.outputs is not None:
            each = [t for t in tensors if owners is not None or t.shape[dim] % batch.size == 0]
            batch.outputs.add([(t, dim, owners) for t in each])

    @property
    def _batch_dim(self) -> int:
        return 0 if self.batch_first else 1

    def _rows_first(self, x: Tensor) -> Tensor:
        """(N, T, I); one row for an input without a batch dim, (T, I)."""
        return x.unsqueeze(0) if x.ndim == 2 else x.movedim(self._batch_dim, 0)

    def _arranged(self, x: Tensor, size: int) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """(N, T, I) with N = k * size rows, batch-major, and how to bring outputs back to the caller's
        rows.
        """
        if x.shape[0] == 1 and not in_ragged():
            return x.expand(size, -1, -1), None
        try:
            return self.to_rows(x, size)
        except ValueError as error:
            raise ValueError(
                f"{error} The shape above is batch first; the batch dim of this layer's own inputs is dim"
                f" {self._batch_dim}, by its batch_first={self.batch_first}."
            ) from None


def _marked(each: Tensor) -> Tensor:
    """Told from a weight that all samples share, where no parameter of its name says how many dims it has."""
    each._ps_each = True  # type: ignore[attr-defined]
    return each


def _swap_rows(t: Tensor, outer: int) -> Tensor:
    """Rows (k * outer, ...), time-major, as batch-major ones, or the other way round."""
    return t.reshape(t.shape[0] // outer, outer, *t.shape[1:]).transpose(0, 1).reshape(t.shape)
