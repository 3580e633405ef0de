"""Sends torch's ops (F.linear, ...) to their fast forms in `functional` where a parameter is per sample.

In a forward that runs as it is, with a `PerSample` for each parameter, the op is called on the whole batch.

Under `torch.func.vmap` an op with expanded parameters would be a product with real per-sample weights. Here
an op whose weight is only an expansion goes to its form in `functional` instead: by the vmap rule of an
autograd.Function, which is handed the real tensors, every sample's part in dim 0.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .. import functional as PF
from .. import torch_api
from ..core import op_kinds
from ..core.context import NoRuleError, in_ragged, local
from ..functional.contraction import terms_of
from .letters import of_einsum, of_matmul, of_tensordot
from .per_sample import (
    OPS,
    PerSample,
    all_same,
    behind,
    expansion_of,
    followed,
    is_vector,
    names_of,
    of_the_input,
)

Op = Callable[..., Tensor]


class _Redirected(torch.autograd.Function):
    """Calls `op(*tensors)` with every sample's part in dim 0; what all samples share is expanded, but for
    weights.
    """

    @staticmethod
    def forward(op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        raise NotImplementedError("only called where something is batched")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved: the op that is called has a backward of its own."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        _, x_dim, weight_dim, bias_dim = in_dims
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        # not touched where it can be: the expansion that is behind a weight is known by the tensor
        each = (
            t if t is None or not d else t.movedim(d, 0) for t, d in ((weight, weight_dim), (bias, bias_dim))
        )
        return op(x, *each), 0


def _call(op: Op, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    """The op, by its vmap rule, or with the samples' own weights on the batch."""
    own = [t for t in (x, weight, bias) if isinstance(t, PerSample)]
    if not own:
        return _Redirected.apply(op, x, weight, bias)
    if in_ragged():
        rows = (expansion_of(t) if isinstance(t, PerSample) else t for t in (weight, bias))
        return NotImplemented if isinstance(x, PerSample) else op(x, *rows)
    given = [t.given if isinstance(t, PerSample) else t for t in (weight, bias)]
    if (standing := local.stand_ins) is not None and standing.proving:
        computed = (
            t for t in own if t is not x and t.samples > 1 and t.given.stride(0) and not is_vector(t.sizes)
        )
        standing.slow |= names_of(computed)  # for each sample

    def run(x: Tensor, of_the_batch: bool = False) -> Tensor:
        y = op(x, *given)
        if (batch := local.batch) is not None and batch.outputs is not None:
            if of_the_batch and len(y) % batch.size == 0:  # looked at as a layer's output
                batch.outputs.add([(y, 0, None)])
            else:
                for t in own:
                    t.watch()
        return y

    if isinstance(x, PerSample):
        return NotImplemented if all_same(own) else PerSample.of(run(x.each), False, names_of(own))
    if (picks := followed()) is None:
        return run(x, True) if of_the_input(x) else NotImplemented
    owners = picks.owners(x)
    if owners is None and picks.copied(x):
        return run(x, True)
    if owners is None and not all_same(own):  # what all samples share
        return PerSample.of(run(x.expand(own[0].samples, *x.shape)), False, names_of(own))
    if owners is None or owners.sample_ids is None:
        return NotImplemented
    if owners.picked:
        return picks.by_batch(run, x, owners)
    return run(x, True)


def _expanded(weight: Any) -> bool:
    """Whether a tensor is the samples' own: an expansion that vmap has batched, once, or a `PerSample`."""
    if isinstance(weight, PerSample):
        return True
    if not isinstance(weight, Tensor) or not torch_api.is_batched(weight):
        return False
    inner, dim = torch_api.unwrapped(weight), torch_api.batch_dim_of(weight)
    return not torch_api.is_batched(inner) and (inner.stride(dim) == 0 or inner.shape[dim] == 1)


class Redirect(TorchFunctionMode):
    """Inside of vmap: ops whose weight is an expansion run in their fast form; `weights` notes where these
    lie.

    With a batch `size`, tensors that are made anew are made for each sample: vmap refuses to write a sample's
    values into one that all share, as in ``out = torch.zeros(n); out[ids] = values``.
    """

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size
        self.weights: set[int] = set()

    def __enter__(self) -> "Redirect":
        self.level = torch_api.level()
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and torch_api.is_batched(args[0]):
            raise NoRuleError("its forward registers a hook, which torch.func.vmap leaves out")
        if func == _REQUIRES_GRAD:  # as the forward sees it where it is run as it is
            return _needs_gradient(args[0])
        rule = RULES.get(func)
        # not inside a further transform that the forward makes
        if rule is not None and torch_api.level() == self.level:
            result = rule(*args, **(kwargs or {}))
            if result is not NotImplemented:
                self.weights |= {
                    behind(t).data_ptr() for t in (*args, *(kwargs or {}).values()) if _expanded(t)
                }
                return result
        result = func(*args, **(kwargs or {}))
        if self.size is not None and func in _MAKERS and not torch_api.is_batched(result):
            level = torch_api.peek().level()
            result = torch_api.add_batch_dim(result.expand(self.size, *result.shape).clone(), 0, level)
        return result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not _expanded(weight) or input.ndim == 0:
        return NotImplemented
    return _call(PF.linear, input, weight, bias)


def _matmul(input: Tensor, other: Tensor) -> Any:
    if not (input.ndim and other.ndim):
        return NotImplemented
    if not _expanded(other) or other.ndim != 2:
        return _product(input, other, of_matmul(input.ndim, other.ndim))
    return _call(_turned, input, other, None)


def _einsum(equation: Any, *operands: Any) -> Any:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    letters = of_einsum(equation, *(t.ndim for t in given)) if isinstance(equation, str) else None
    if letters is None or len(given) < 2:
        return NotImplemented
    if len(given) == 2:
        return _product(given[0], given[1], letters)
    batch = [t for t in given if not isinstance(t, PerSample)]
    owners = None if (picks := followed()) is None or not batch else picks.owners(batch[0])
    if owners is None or not all((o := picks.owners(t)) is not None and o.same(owners) for t in batch):
        return NotImplemented
    *terms, result = letters
    sizes = {c: n for t, term in zip(given, terms, strict=True) for c, n in zip(term, t.shape, strict=True)}
    left = list(zip(given, terms, strict=True))
    while len(left) > 1:  # first what gives the least

        def made(pair: tuple[int, int]) -> str:
            wanted = result + "".join(term for i, (_, term) in enumerate(left) if i not in pair)
            return "".join(sorted({c for i in pair for c in left[i][1] if c in wanted}, key=wanted.index))

        pairs = itertools.combinations(range(len(left)), 2)
        i, j = min(pairs, key=lambda pair: math.prod(sizes[c] for c in made(pair)))
        term, (b, of_b), (a, of_a) = made((i, j)), left.pop(j), left.pop(i)
        found = torch.einsum(f"{of_a},{of_b}->{term}", a, b)
        if not isinstance(found, PerSample) and term[:1] == result[:1]:
            picks.tag(found, owners)
        left.append((found, term))
    return left[0][0]


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Any = None) -> Any:
    if isinstance(dims, Tensor) or out is not None:
        return NotImplemented
    return _product(a, b, of_tensordot(a.ndim, b.ndim, dims))


def _product(a: Tensor, b: Tensor, letters: tuple[str, ...]) -> Any:
    """Of the batch and a parameter, in whichever order, whose dims have these letters."""
    if isinstance(a, PerSample) == isinstance(b, PerSample):
        return NotImplemented
    of_x, of_w, result = letters
    x, w = a, b
    if isinstance(a, PerSample):
        x, w, of_x, of_w = b, a, of_w, of_x
    terms = terms_of(of_x, of_w, result)
    # an input's rows without a dim of positions are a ragged batch's
    if terms is None or not terms.fits(x, w.shape) or (in_ragged() and terms.positions):
        return NotImplemented
    matrix = (len(terms.free), len(terms.summed), len(of_w)) == (1, 1, 2)
    if matrix and result == of_x[:-1] + terms.free and not x.is_complex():
        return _call(PF.linear if of_w[1] == terms.summed else _turned, x, w, None)
    equation = f"{of_x},{of_w}->{result}"
    return _call(lambda x, w, _: PF.einsum(x, w, equation), x, w, None)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if not _expanded(mat2) or (beta, alpha) != (1, 1) or input.ndim != 1:
        return NotImplemented
    return _call(_turned, mat1, mat2, input)


def _turned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return PF.linear(x, weight, bias, transposed=True)


def _conv(dims: int) -> Callable[..., Any]:
    op = (PF.conv1d, PF.conv2d, PF.conv3d)[dims - 1]

    def rule(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not _expanded(weight):
            return NotImplemented
        return _call(
            _flat(lambda x, w, b: op(x, w, b, stride, padding, dilation, groups), dims + 1),
            input,
            weight,
            bias,
        )

    return rule


def _flat(op: Op, event_dims: int) -> Op:
    """`op` for inputs (B, ..., *event), whose dims between are more rows of each sample."""

    def flat(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        between = x.shape[: x.ndim - event_dims]
        y = op(x.flatten(0, len(between) - 1), weight, bias)
        return y.unflatten(0, between) if len(between) > 1 else y

    return flat


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not _affine_expanded(weight, bias):
        return NotImplemented
    return _call(lambda x, w, b: PF.layer_norm(x, normalized_shape, w, b, eps), input, weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if not _expanded(weight):
        return NotImplemented
    return _call(lambda x, w, b: PF.rms_norm(x, normalized_shape, w, eps), input, weight, None)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not _affine_expanded(weight, bias):
        return NotImplemented
    op = _flat(lambda x, w, b: PF.group_norm(x, num_groups, w, b, eps), input.ndim - 1)
    return _call(op, input, weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_mean is None or running_var is None or not _affine_expanded(weight, bias):
        return NotImplemented
    op = _flat(lambda x, w, b: PF.batch_norm(x, running_mean, running_var, w, b, eps), input.ndim - 1)
    return _call(op, input, weight, bias)


def _affine_expanded(weight: Tensor | None, bias: Tensor | None) -> bool:
    given = [t for t in (weight, bias) if t is not None]
    return bool(given) and all(_expanded(t) for t in given)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not _expanded(weight) or max_norm is not None or any(v is True for v in (*args, *kwargs.values())):
        return NotImplemented
    return _call(lambda ids, w, _: PF.embedding(ids, w, padding_idx), input, weight, None)


def looked_up(t: Any, *rest: Any, **kwargs: Any) -> Any:
    """``t[ids]`` and ``t.index_select(0, ids)``, where a batch's ids look up rows of a parameter."""
    (ids,) = rest[-1:] or (kwargs.get("index"),)
    plain = isinstance(ids, Tensor) and ids.dtype in (torch.long, torch.int)
    if not plain or not isinstance(t, PerSample) or not (sizes := t.sizes):
        return NotImplemented
    dim = kwargs.get("dim", rest[0] if len(rest) == 2 else 0)
    if len(rest) + len(kwargs) > 2 or dim not in (0, -len(sizes)):
        return NotImplemented

    def op(ids: Tensor, table: Tensor, _: None) -> Tensor:
        found = PF.embedding(torch.where(ids < 0, ids + sizes[0], ids), table)
        return found.reshape(*ids.shape, *sizes[1:])

    table: Any = t if len(sizes) == 2 else t.reshape(sizes[0], -1)
    return _call(op, ids, table, None)


def _prelu(input: Tensor, weight: Tensor) -> Any:
    if not _expanded(weight) or input.ndim < 2:
        return NotImplemented
    return _call(_flat(lambda x, w, _: PF.prelu(x, w), input.ndim - 1), input, weight, None)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    if attn_mask is None or not _needs_gradient(attn_mask):
        return NotImplemented
    # as torch chooses by itself, but not under vmap, where it does not see that need
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)


def _needs_gradient(t: Tensor) -> bool:
    while torch_api.is_batched(t):
        t = torch_api.unwrapped(t)
    return t.requires_grad


def _grouped_mm(func: Any) -> Callable[..., Any]:
    def rule(
        mat_a: Tensor, mat_b: Tensor, *args: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Any:
        offs = args[0] if args else offs
        if (
            not isinstance(mat_b, PerSample)
            or isinstance(mat_a, PerSample)
            or (mat_a.ndim, mat_b.ndim) != (2, 3)
        ):
            return NotImplemented
        if offs is None or bias is not None or out_dtype is not None:
            return NotImplemented

        def product(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
            return func(x, w, offs=offsets)  # type: ignore[no-any-return]

        if in_ragged():
            rows = torch.arange(len(mat_a), device=mat_a.device)
            return PF.grouped_mm(mat_a, expansion_of(mat_b), offs, rows, product)
        owners = None if (picks := followed()) is None else picks.owners(mat_a)
        if owners is None or owners.sample_ids is None:
            return NotImplemented
        if local.stand_ins is not None and not mat_b.same:
            local.stand_ins.slow |= mat_b.names
        return PF.grouped_mm(mat_a, mat_b.each, offs, owners.sample_ids, product)

    return rule


def _linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    options: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **more: Any,
) -> Any:
    """As its reference: each sample has its rows of the logits, whatever `options` say of chunks."""
    classes, out_features = linear_weight.shape[0], tuple(linear_weight.shape[1:-1])
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(input, linear_weight.reshape(-1, linear_weight.shape[-1]), bias)
    if isinstance(logits, PerSample):
        return NotImplemented
    logits = logits.reshape(*input.shape[:-1], classes, *out_features)
    ignore_index = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, reduction=reduction, ignore_index=ignore_index, **more)


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_MAKERS = set(op_kinds.functions(op_kinds.MADE))
RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys(op_kinds.functions(["matmul", "mm", "__matmul__"]), _matmul),
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    torch.addmm: _addmm,
    torch.conv1d: _conv(1),
    torch.conv2d: _conv(2),
    torch.conv3d: _conv(3),
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.embedding: _embedding,
    F.prelu: _prelu,
    F.scaled_dot_product_attention: _attention,
    **{f: _grouped_mm(f) for f in op_kinds.functions(["grouped_mm", "_grouped_mm"])},
}
OPS.update(RULES)
OPS.update(dict.fromkeys(op_kinds.functions(["index_select"]), looked_up))
if hasattr(F, "linear_cross_entropy"):
    OPS[F.linear_cross_entropy] = _linear_cross_entropy
