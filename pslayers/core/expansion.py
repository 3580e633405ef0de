"""The expanded weight: one shared parameter seen as B per-sample weights, and where the gradient of each
goes.

Shapes: B samples, S the parameter's own shape, N = k * B rows (k rows a sample, B-major), P the number of
values in S.

A recorded parameter has two edges in the autograd graph: the parameter itself, whose gradient is the plain,
summed one, and a *rows* leaf, a stride-0 expansion ``(B, *S)`` on the same memory, whose gradient is the
per-sample one. An op with per-sample weights fills both. Kept apart, neither the sum nor the
factor of a mean needs a further pass over the B x P memory, and whoever asks for one of the two
(``torch.autograd.grad``) neither pays for nor disturbs the other.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import torch_api
from .context import UNSCALED, Scale, Settings, in_ragged, local, transforming
from .factors import Factor
from .products import number, summed
from .sinks import UNRECORDED

if TYPE_CHECKING:
    from .recorder import Recorder


def _anywhere(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that goes one by one through several gradients at once, and computes outside of
    autocast.
    """

    @functools.wraps(backward)
    def passed(ctx: Any, *grads: Tensor) -> Any:
        for grad in grads:
            if grad is not None and torch_api.is_several(grad):
                return torch_api.one_by_one(functools.partial(passed, ctx), grads)
        if not torch_api.any_autocast():
            return backward(ctx, *grads)
        with torch_api.without_autocast():
            return backward(ctx, *grads)

    return passed


class Op(torch.autograd.Function):
    """An autograd.Function whose call costs less: no transform of torch.func goes into it, so nothing is
    looked at for one.

    Its backward pass computes in the precision that the forward pass has left, inside of a user's autocast
    too, and goes through several gradients at once (`is_grads_batched=True`).
    """

    rows_dim: ClassVar[int | None] = 0  # in which the results hold the rows; None: each value is one

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.backward = staticmethod(_anywhere(cls.__dict__["backward"].__func__))  # type: ignore[assignment]

    @staticmethod
    def in_order(ctx: Any) -> bool:
        """Whether these rows are k a sample, in order, outside of a ragged batch."""
        return True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's."""
        if torch_api.functions_transformed():
            return super().apply(*args)  # torch's error
        result = super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
        if (batch := local.batch) is not None and batch.ragged is not None:
            given = [a for a in args if isinstance(a, Expansion)] or getattr(args[0], "expansions", [])
            if given:
                batch.ragged.watch(given, (result,) if isinstance(result, Tensor) else result, cls.rows_dim)
        return result

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Called where a tensor has a tangent of which the outermost call does not know."""
        raise NotImplementedError(
            "A tensor got a tangent of torch.autograd.forward_ad past what a converted model was called with,"
            " its inputs and parameters: use torch.func.jvp there, or ps.recording(model, False)."
        )


class _Rescaled(Op):
    """A value on its way into a call or out of it, times a factor; gradients inside the call carry
    ``scale.inside``.

    What goes in with factor f comes back, as a gradient, out with f / inside; what goes out with f comes back
    in with f * inside. The way back is itself such a crossing, which makes it right for gradients of
    gradients.
    """

    rows_dim = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Scale, into: bool, factor: float) -> Tensor:
        ctx.scale, ctx.into, ctx.factor = scale, into, factor
        return x.view_as(x) if factor == 1 else x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        inside: float = ctx.scale.inside
        back = ctx.factor / inside if ctx.into else ctx.factor * inside
        return rescale_grad(grads[0], ctx.scale, not ctx.into, back), None, None, None


def rescale_grad(x: Tensor, scale: Scale, into: bool, factor: float = 1.0) -> Tensor:
    """`x` times `factor`, into a call with this scale or out of it."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rescaled.apply(x, scale, into, factor)
    return x if factor == 1 else x * factor


Destination = Literal["sink", "leaf", "nowhere"]  # of rows


class Expansion:
    """One weight behind B per-sample weights.

    Args:
        weight: the shared weight, shape S. Its gradient is the sum over samples, times ``scale.weight``.
        rows: the per-sample handle, shape (B, *S), stride 0 over the batch; None where nobody asks for rows.
            Its gradient is the per-sample gradient, times ``scale.rows``.
    """

    __slots__ = ("joined", "leaf", "names", "recorder", "rows", "scale", "use", "weight")
    compiled = False  # by compiled code, which uses its memory again

    def __init__(
        self, weight: Tensor, rows: Tensor | None, scale: Scale = UNSCALED, recorder: "Recorder | None" = None
    ) -> None:
        self.weight, self.rows, self.scale, self.recorder = weight, rows, scale, recorder
        self.leaf = rows  # that these rows were made of
        self.joined = False  # an ordinary tensor stands for it, which several ops may take
        self.use: Any = None  # by the rows of a ragged batch (`ragged.Use`)
        self.names: frozenset[str] | None = None  # of the parameters it was made of, where it is no one's

    def rebind(self, weight: Tensor, rows: Tensor | None) -> "Expansion":
        """The same expansion over the tensors that a backward with a graph has unpacked: a further use of the
        weight.
        """
        if self.recorder is not None:
            self.recorder.uses += 1
        return self.again(weight, rows)

    def again(self, weight: Tensor, rows: Tensor | None) -> "Expansion":
        """The same over these tensors."""
        other = Expansion(weight, rows, self.scale, self.recorder)
        other.use, other.joined, other.names, other.leaf = self.use, self.joined, self.names, self.leaf
        return other

    def share(self) -> None:
        """Note that several ops may hand over factors, one after the other."""
        self.joined = True
        if self.recorder is not None:
            self.recorder.joined = True

    def over(self, tensor: Tensor) -> "Expansion":
        """That behind an ordinary tensor, (B, *S), which says so."""
        return self

    def tensor(self, n: int) -> Tensor:
        """An ordinary tensor (N, *S) that any differentiable op may use."""
        if self.rows is None:
            return self.weight.expand(n, *self.weight.shape)
        self.share()
        joined: Tensor = _Join.apply(self.weight, self.rows, n, self)
        joined._ps_expansion = self  # type: ignore[attr-defined]
        return joined

    @property
    def shape(self) -> torch.Size:
        """(B, *S); B is 1 where nobody asks for rows, and in a ragged batch the number of rows of the op."""
        if self.use is not None:
            return torch.Size((self.use.rows, *self.weight.shape))
        return torch.Size((1, *self.weight.shape)) if self.rows is None else self.rows.shape

    def take(self, factor: Factor, need_weight: bool, need_rows: bool) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of (weight, rows) of a use of the weight, for autograd to pass on."""
        plain = factor
        if self.use is not None and need_rows:
            factor = factor.regrouped(self.use.owners().on(factor.like().device))
        if torch.is_grad_enabled():
            total = plain.total() if need_weight else None
            return self.finish_differentiable(total, factor.rows() if need_rows else None)
        total = rows = None
        recorder, scale = self.recorder, self.scale
        goes_to: Destination = "leaf"
        if scale.spent is None and recorder is not None and not torch_api.graph_is_retained():
            scale.spent = torch_api.running_pass()
        if need_rows:
            sink, owed = UNRECORDED, scale.rows
            if recorder is not None:
                sink, goes_to = recorder.sink, self.destination(recorder)
            if goes_to != "nowhere":
                form = sink.put if goes_to == "sink" else sink.make
                rows = form(recorder, factor, self.rows, owed)  # type: ignore[arg-type]
        if need_weight and recorder is not None and not recorder.settings.sums:
            total = self.nothing(recorder)
        elif need_weight:
            total = plain.total() if rows is None else plain.total_of(rows, owed)
            if total.dtype is not self.weight.dtype:
                total = total.to(self.weight.dtype)
            if scale.inside != 1:
                total = total * number(scale.weight, total)
            if recorder is not None:
                recorder.note(total, self.compiled)
        return total, rows if goes_to == "leaf" else None

    def finish_differentiable(
        self, weight_grad: Tensor | None, rows_grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of (weight, rows) as they leave the call, from those that autograd sees inside it."""
        recorder = self.recorder
        if weight_grad is not None and recorder is not None and not recorder.settings.sums:
            weight_grad = self.nothing(recorder)
        elif weight_grad is not None:
            weight_grad = rescale_grad(weight_grad, self.scale, False, self.scale.weight)
            if recorder is not None:
                recorder.note(weight_grad, self.compiled)
        if rows_grad is not None:
            rows_grad = rescale_grad(rows_grad, self.scale, False, self.scale.rows)
        if recorder is None:
            return weight_grad, rows_grad
        if rows_grad is None or (goes_to := self.destination(recorder)) == "leaf":
            return weight_grad, rows_grad
        if goes_to == "sink":
            recorder.store(rows_grad)
        return weight_grad, None

    def nothing(self, recorder: "Recorder") -> Tensor | None:
        """Zeros, for a torch.autograd.Function that asks for a gradient which is not wanted, by
        torch.autograd.grad, and returns it as the parameter's; None where nobody asks.
        """
        weight = self.weight
        if not weight.requires_grad or will_execute(torch_api.node_of(weight), False):
            return None
        return self._zeros(weight.new_zeros(()).expand_as(weight), recorder, passed_on=True)

    def unreached(self) -> Tensor | None:
        """The gradient of a weight that a pass does not reach, though it comes through its node: None, with
        which torch would call hooks of the user's; to these it is zeros.
        """
        recorder = self.recorder
        if recorder is None or not (recorder.hooked and recorder.is_filled()):
            return None
        return self._zeros(torch.zeros_like(self.weight), recorder)

    def _zeros(self, zeros: Tensor, recorder: "Recorder", passed_on: bool = False) -> Tensor:
        """Zeros as a gradient that leaves no `.grad` where there was none."""
        recorder.note(zeros, self.compiled)
        recorder.leave_blank(passed_on)
        return zeros

    def destination(self, recorder: "Recorder") -> Destination:
        """Where rows go in the pass that runs.

        To the sink go those of the parameter's only use, and those that ``loss.backward(inputs=...)`` lets
        not go anywhere else. Those with a graph, and those of several uses where they are wanted whole, are
        for autograd to pass on: they meet in the rows leaf. torch.autograd.grad fills nothing.
        """
        settings = recorder.settings
        # of a proof nothing is kept; it begins no pass
        if settings.collecting_grads or (
            settings.pass_id != torch_api.current_pass() and torch_api.thread().quiet
        ):
            return "leaf"
        if self.scale.settings not in (None, settings) and settings.sink is not None:
            raise recorder.of_another_model()
        if (not self.scale.sums and settings.sums) or (self.scale.streams and settings.sink is None):
            raise recorder.of_another_block()
        if not torch.is_grad_enabled():
            if not recorder.whole_pass(self.leaf):
                return "sink" if recorder.is_filled() else "nowhere"
            if (recorder.uses <= 1 and not self.joined) or recorder.sink.adds_up:
                return "sink"
        recorder.listen()
        return "leaf"


Weight = Tensor | Expansion  # as an op takes one: the samples' own, or one for all


class _Join(Op):
    """(weight, rows) as one expanded tensor whose gradient is split again: the sum to `weight`, the rows to
    `rows`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, n: int, expansion: Expansion) -> Tensor:
        ctx.expansion, ctx.rows_shape = expansion, rows.shape
        return weight.expand(n, *weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), shape = grads, ctx.rows_shape
        need_weight, need_rows, *_ = needed_grads(ctx, ctx.expansion)
        if (use := ctx.expansion.use) is not None:
            rows = use.owners().on(grad.device).summed(grad) if need_rows else None
        else:
            if len(grad) != shape[0]:  # k rows a sample
                grad = grad.reshape(shape[0], -1, *shape[1:]).sum(1)
            rows = grad if need_rows else None
        total = summed(grad) if need_weight else None
        return *ctx.expansion.finish_differentiable(total, rows), None, None


def of_one(weight: Tensor) -> Tensor:
    """A weight that was given for the one sample, (1, *S), or for none, as what the original layers take."""
    return weight[0] if len(weight) else weight.new_zeros(weight.shape[1:]) + weight.sum(0)


class _AsLeaf(Tensor):
    """What torch takes for a leaf, as parameters are, though it is in a graph: modules that a forward makes
    may hold it, and it may be copied.
    """

    __torch_function__ = torch_api.no_torch_function
    grad_fn = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return torch.nn.Parameter(self.detach().clone(), self.requires_grad)


def as_leaf(t: Tensor) -> Tensor:
    """A weight of one sample's that modules may hold as a parameter."""
    return t.as_subclass(_AsLeaf)


def take_data(param: Tensor, alias: Tensor) -> None:
    """What a forward may have set as the `.data` of an alias of the parameter becomes the parameter's."""
    if alias.data_ptr() != param.data_ptr():
        param.data = alias.data


def refuse_rows(param: Tensor, name: str, settings: Settings) -> None:
    """Of a parameter that a forward makes, what it is used for in this call is an error by name."""

    def refuse(grad: Tensor) -> None:
        if settings.recording_in_pass and "_ps_recorder" not in param.__dict__:
            raise RuntimeError(
                f"`{name}` was made by its forward just now, and got a gradient of which there are no rows:"
                " write to the one that there is, under torch.no_grad(), or make it before the call."
            )

    if param.requires_grad and param.is_leaf:
        param.register_hook(refuse)


def as_expansion(weight: Weight, ndim: int) -> Expansion | None:
    """The one weight behind `weight`, or None where the samples truly have different weights.

    `ndim` is the weight's own number of dims: a tensor of that many is shared as it is; one more, and it is
    per sample.
    """
    if isinstance(weight, Expansion):
        # each op's rows are its own
        return weight if weight.use is None else weight.rebind(weight.weight, weight.rows)
    if torch.compiler.is_compiling():  # plain ops alone, which the compiler can fuse
        return None
    if weight.ndim == ndim:
        return Expansion(weight, None)
    if transforming():  # torch.func goes into plain ops only
        return None
    tag: Expansion | None = getattr(weight, "_ps_expansion", None)
    if tag is not None:
        return tag.again(tag.weight, tag.rows) if in_ragged() else tag.over(weight)
    if len(weight) and (weight.stride(0) == 0 or len(weight) == 1):
        return Expansion(weight.detach()[0], weight if weight.requires_grad else None)
    return None


def per_sample(weight: Weight, ndim: int, size: int) -> Tensor:
    """`weight` as a tensor of per-sample weights (B, *S), whatever it came as; in a ragged batch one of each
    row's.
    """
    if in_ragged() and (rows := as_expansion(weight, ndim)) is not None:
        return rows.tensor(size)
    if isinstance(weight, Expansion):
        return weight.tensor(size)
    return weight.expand(size, *weight.shape) if weight.ndim == ndim else weight


def needed_grads(ctx: Any, *expansions: Expansion | None) -> Sequence[bool]:
    """Which gradients this backward, of an op with these expansions, is really asked for.

    `ctx.needs_input_grad` only says which inputs require grad; ``torch.autograd.grad(loss, x)`` would then
    pay for all rows.
    """
    asked = False
    for e in expansions:
        if e is not None and e.recorder is not None:
            if e.recorder.whole_pass():
                return ctx.needs_input_grad  # type: ignore[no-any-return]
            asked = e.recorder.returned()
            break
    # one for each input that requires grad
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    found: list[bool] = []
    weight_goes = False  # of the input before: a weight's rows come after it
    for need in ctx.needs_input_grad:
        node = next(nodes) if need else None
        # nobody names the leaf of rows in ``loss.backward(inputs=...)``, nor in a pass inside of another one
        # (of a torch.autograd.Function that runs layers again): rows are made wherever the parameter gets its
        # gradient
        found.append(need and (will_execute(node, True) or (weight_goes and leads_to_rows(node))))
        weight_goes = need and will_execute(node, asked)
    return found


def leads_to_rows(node: Any) -> bool:
    """Whether what goes to this node is put down as rows: it is that of a rows leaf."""
    return hasattr(getattr(node, "variable", None), "_ps_rows")


def will_execute(node: Any, asked: bool) -> bool:
    """Whether the pass that is running goes to this node; `asked` for a leaf that torch.autograd.grad has
    been asked for.
    """
    try:
        return torch_api.will_execute(node)
    except RuntimeError:  # such a leaf: torch does not say
        return asked


class _Aliases(Op):
    """The same tensors, each of which counts its own part of a gradient only, where one was made from
    another, as by tied weights.
    """

    rows_dim = None

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        needed = list(zip(inputs, ctx.needs_input_grad, strict=True))
        ctx.mark_non_differentiable(*(t for t, need in needed if t is not None and not need))
        return tuple(None if t is None else t.view_as(t) if need else t for t, need in needed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def composite_backward(
    fn: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """A backward with a graph: differentiate a composite form of the op, so that the result can be
    differentiated again.
    """
    weights = inputs
    with torch.enable_grad():
        if any(t is not None and t.requires_grad for t in inputs):
            inputs = _Aliases.apply(*inputs)
        outputs = fn(*inputs)
    pairs = [
        (out, grad)
        for out, grad in zip((outputs,) if isinstance(outputs, Tensor) else outputs, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    into = [t for t in inputs if t is not None and t.requires_grad]
    if not pairs or not into:
        return [None for _ in inputs]
    with torch_api.changed(torch_api.thread(), again=torch_api.current_pass()):
        found = iter(
            torch_api.gradients([o for o, _ in pairs], into, [g for _, g in pairs], create_graph=True)
        )
    each = [next(found) if t is not None and t.requires_grad else None for t in inputs]
    for weight, g in zip(weights, each, strict=True):
        if g is not None and weight is not None and weight.is_leaf:
            # hooks on saved tensors, as of checkpoints, give another tensor
            param = getattr(torch_api.node_of(weight), "variable", weight)
            recorder: Recorder | None = getattr(param, "_ps_recorder", None)
            if recorder is not None:
                recorder.note(g)
    return each
