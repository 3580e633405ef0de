"""Layers whose rows have kernels of their own in compiled code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import torch_api
from ..core.context import local
from ..core.converted_module import state_of
from ..core.expansion import Expansion
from ..core.factors import Factor
from ..functional.bags import bag_of_each
from ..functional.common import bias_factor
from ..functional.conv import Patches, each, padded
from ..functional.conv_weight_grads import Geometry, convolution
from ..functional.embedding import Gather, renormalise
from ..functional.linear import weight_factor
from .registry import as_op, use_number
from .weights import expansion_of, is_recorded, of_one, plain


def _shared(layer: Any) -> tuple[Any, ...]:
    """Weight and bias without gradients, which `_tap` gives them; of one sample, with them."""
    if _alone(layer):
        return of_one(layer)
    bias = getattr(layer, "bias", None)
    return layer.weight.detach(), None if bias is None else bias.detach()


def _alone(layer: Any) -> bool:
    """Whether a call is of one sample, whose gradient is the plain one; but for tables that it writes to."""
    return local.batch.size == 1 and getattr(layer, "max_norm", None) is None  # type: ignore[union-attr]


def _tap(layer: nn.Module, kind: str, y: Tensor, x: Tensor, how: list[int]) -> Tensor:
    """`y`, computed from `x` by the shared weights without gradients; on the way back weight and bias get
    theirs.
    """
    if _alone(layer):
        return y
    bias = getattr(layer, "bias", None)
    wants = ("w" if is_recorded(layer, "weight") else "") + (
        "b" if bias is not None and is_recorded(layer, "bias") else ""
    )
    if not wants:
        return y
    size = local.batch.size  # type: ignore[union-attr]
    state = state_of(layer)
    shared, anchor = plain((layer.weight, bias), state.settings)
    tapped: Tensor = _Tap.apply(y, x, *shared, state.token, size, kind, wants, how, use_number(), anchor)
    return tapped


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        size: int,
        kind: str,
        wants: str,
        how: list[int],
        use: int,
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, token)
        ctx.size, ctx.kind, ctx.wants, ctx.how, ctx.use = size, kind, wants, how, use
        ctx.sums = anchor is None
        return torch_api.unsafe_view(y, y.shape)  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, token = ctx.saved_tensors
        (gy,), wants = grads, ctx.wants
        g_weight, g_bias = torch.ops.pslayers.weight_grads(
            gy, x, weight, token, ctx.size, ctx.kind, wants, ctx.how, ctx.use, ctx.sums
        )
        none = (None,) * 6
        if not ctx.sums:
            return gy, None, None, None, *none, g_weight
        return gy, None, g_weight if "w" in wants else None, g_bias if "b" in wants else None, *none, None


def _fake_weight_grads(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    token: Tensor,
    size: int,
    kind: str,
    wants: str,
    how: list[int],
    use: int,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    if not sums:
        return torch.empty((), device="cpu"), weight.new_empty(0)
    out = gy.shape[1] if kind == "conv" else gy.shape[-1]
    return (
        weight.new_empty(weight.shape if "w" in wants else (0,)),
        weight.new_empty((out,) if "b" in wants else (0,)),
    )


@as_op(_fake_weight_grads)
def _weight_grads(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    token: Tensor,
    size: int,
    kind: str,
    wants: str,
    how: list[int],
    use: int,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    found = [weight.new_empty(0) if sums else torch.zeros((), device="cpu"), weight.new_empty(0)]
    with torch.no_grad():
        made = ("w", "weight", _FACTORS[kind]), ("b", "bias", _bias_factor)
        for i, (letter, name, factor) in enumerate(made):
            if letter in wants:
                e = expansion_of(token, name, size)
                if (total := e.deliver(factor(gy, x, e, how), sums)) is not None:
                    found[i] = total
    return found[0], found[1]


def _bias_factor(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Factor:
    if how:  # a convolution's: positions after channels
        gy = gy.sum(tuple(range(2, gy.ndim)))
    return bias_factor(gy, e)


def _linear_factor(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Factor:
    return weight_factor(x, gy, e)


def _conv_factor(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Factor:
    n = len(how) // 3
    geometry = Geometry(tuple(how[:n]), tuple(how[n : 2 * n]), tuple(how[2 * n : 3 * n]), how[-1])
    return Patches(x, gy, e.weight, e.shape, geometry)


def _embedding_factor(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Factor:
    return Gather(x, gy.to(e.weight.dtype), e.shape, how[0] if how else None)


def _bags_factor(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Factor:
    ids, samples = x
    return Gather(ids, gy.to(e.weight.dtype), e.shape, samples=samples)


_FACTORS = {
    "linear": _linear_factor,
    "conv": _conv_factor,
    "embedding": _embedding_factor,
    "bags": _bags_factor,
}


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    return _tap(layer, "linear", F.linear(input, *_shared(layer)), input, [])


def _conv(layer: torch_api.AnyConv, input: Tensor) -> Tensor:
    (weight, bias), n = _shared(layer), len(layer.kernel_size)
    stride, dilation, kernel = each(layer.stride, n), each(layer.dilation, n), tuple(layer.kernel_size)
    x, geometry = padded(
        f"conv{n}d", input, kernel, stride, layer.padding, dilation, layer.groups, layer.padding_mode
    )
    how = [*geometry.stride, *geometry.padding, *geometry.dilation, geometry.groups]
    return _tap(layer, "conv", convolution(x, weight, bias, geometry), x, how)


def _embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    renormalise(layer.weight, input, layer.max_norm, layer.norm_type)
    padding = layer.padding_idx
    y = F.embedding(input, _shared(layer)[0], padding)
    return _tap(layer, "embedding", y, input, [] if padding is None else [padding])


def _bag(
    layer: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None = None, factors: Tensor | None = None
) -> Tensor:
    """Bags by their entries: (N, L), or (M,) with offsets."""
    renormalise(layer.weight, ids, layer.max_norm, layer.norm_type)
    starts = ids if offsets is None else offsets[:-1] if layer.include_last_offset else offsets
    count, bag = starts.shape[0], bag_of_each(ids, starts)
    ids = ids.reshape(-1).to(bag.dtype)
    size = local.batch.size  # type: ignore[union-attr]
    # no size in `how`: up to 2.11, torch.compile mistakes one for another
    samples = bag // max(count // size, 1) if size else bag
    # (M, D)
    found = _tap(layer, "bags", F.embedding(ids, _shared(layer)[0]), torch.stack([ids, samples]), [])
    keep = torch.ones_like(ids, dtype=torch.bool) if layer.padding_idx is None else ids != layer.padding_idx
    # (N, 1)
    sizes = ids.new_zeros(count).index_add(0, bag, keep.to(ids.dtype)).unsqueeze(1)
    if layer.mode == "max":
        least = found.detach().new_full((count, found.shape[1]), -torch.inf)
        found = found.masked_fill(~keep.unsqueeze(1), -torch.inf)
        return least.scatter_reduce(0, bag.unsqueeze(1).expand_as(found), found, "amax").masked_fill(
            sizes == 0, 0
        )
    found = (
        found * keep.unsqueeze(1) if factors is None else found * (keep * factors.reshape(-1)).unsqueeze(1)
    )
    total = found.new_zeros(count, found.shape[1]).index_add(0, bag, found)
    return total if layer.mode == "sum" else total / sizes.clamp(min=1)


FAST: dict[Any, Callable[..., Any]] = {
    nn.Linear: _linear,
    NonDynamicallyQuantizableLinear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _bag,
}
