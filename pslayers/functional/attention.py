"""Attention with per-sample weights. Indices: n sample, t every other dim of the input, i in, o out."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from .. import torch_api
from ..core.context import in_ragged, transforming
from ..core.expansion import Expansion, Op, Weight, as_expansion, composite_backward, needed_grads
from ..core.factors import Blocks
from ..core.products import affine, of_dtype
from .common import check_rows, for_rows, owned
from .linear import linear
from .linear_factor import Outer


def in_projection(
    query: Tensor, key: Tensor, value: Tensor, weight: Weight | Sequence[Weight], bias: Weight | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value projected, ``q[n] = query[n] @ weight_q[n].T + bias_q[n]`` and so on; inputs that
    are the same at once.

    Shapes: query (N, L, Eq), key (N, S, Ek), value (N, S, Ev) with N = k * B rows, k a sample; weight (B, 3 *
    E, E), packed in the order q, k, v, or three of (B, E, Eq), (B, E, Ek), (B, E, Ev); bias (B, 3 * E) or
    None; result (N, L, E), (N, S, E) twice. What lacks the B is one for all samples. Memory of the weights'
    gradients: B times their own.

    Raises:
        ValueError: the shapes do not fit.
    """
    if isinstance(weight, Sequence):
        q, k, v = (linear(x, w) for x, w in zip((query, key, value), weight, strict=True))
    elif query is key is value:
        q, k, v = linear(query, weight, bias).chunk(3, -1)
        return q, k, v
    elif in_ragged():  # one use of a weight is of as many rows everywhere
        q, k, v = (linear(x, weight, bias).chunk(3, -1)[i] for i, x in enumerate((query, key, value)))
        return q, k, v
    elif key is value:
        q, kv = _parts((query, key), weight, (1, 2))
        k, v = kv.chunk(2, -1)
    else:
        q, k, v = _parts((query, key, value), weight, (1, 1, 1))
    if bias is None:
        return q, k, v
    if in_ragged():
        each = (for_rows(bias, 1, t.shape[:-1].numel()).chunk(3, -1)[i] for i, t in enumerate((q, k, v)))
        q, k, v = (t + b.view(t.shape) for t, b in zip((q, k, v), each, strict=True))
        return q, k, v
    b_q, b_k, b_v = for_rows(bias, 1, len(q)).unsqueeze(1).chunk(3, -1)  # (N, 1, E) each
    return q + b_q, k + b_k, v + b_v


def multi_head_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention between in- and out-projection, a head on each E / H features: ``softmax(q @ k.T / sqrt(E /
    H) + mask) @ v``.

    It has no weights. By torch's fused kernels where torch would take them; in contrast to these it can be
    differentiated any number of times.

    Shapes: q (N, L, E), k and v (N, S, E), mask (N or 1, H or 1, L or 1, S), added; result (N, L, E), and the
    attention weights (N, H, L, S) if they are needed, else None. Memory: N x H x L x S values where no fused
    kernel is taken.
    """
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # (N, H, L or S, E / H)
    if mask is not None:
        mask = mask.to(q.dtype)
    weights = None
    if need_weights:
        out, weights = _explicit(q, k, v, mask, dropout)
    elif torch.compiler.is_compiling() or (dropout and not q.is_cpu):  # the random numbers are the kernel's
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    elif _fusible(q, k, v, mask, dropout, is_causal):
        out = _Fused.apply(q, k, v, mask, is_causal)
    else:
        out = _composite(q, k, v, mask, dropout, is_causal)
    return out.transpose(1, 2).flatten(2), weights


def _fusible(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool) -> bool:
    """Whether torch would take a fused kernel, and nothing else than q, k and v gets a gradient from it."""
    if transforming() or (mask is not None and mask.requires_grad):
        return False
    return bool(torch_api.attention_choice(q, k, v, mask, dropout, is_causal) != SDPBackend.MATH.value)


def _composite(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool
) -> Tensor:
    """torch's own, of differentiable ops."""
    out: Tensor = torch_api.attention_math(q, k, v, mask, dropout, is_causal)[0]
    return out


class _Fused(Op):
    """Attention by torch's fused kernels, whose backward pass cannot be differentiated: if it is to be, it is
    the composite's.

    Other devices' kernels differ in what they keep for their backward pass: there,
    `F.scaled_dot_product_attention` runs once more.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        if q.device.type in torch_api.ATTENTION:
            out, *kept = torch_api.ATTENTION[q.device.type][0](q, k, v, 0.0, is_causal, attn_mask=mask)
            kept = [out, *kept]
        else:
            out, kept = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal), []
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, mask, *kept)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, *kept = ctx.saved_tensors
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            found = composite_backward(
                lambda q, k, v: _composite(q, k, v, mask, 0.0, ctx.is_causal), (q, k, v), grads
            )
        elif kept:
            found = torch_api.ATTENTION[q.device.type][1](
                *grads, q, k, v, *kept, 0.0, ctx.is_causal, attn_mask=mask
            )
        else:
            with torch.enable_grad():
                q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
                out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, ctx.is_causal)
            found = torch_api.gradients([out], (q, k, v), grads)
        return *found, None, None


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Step by step as torch does where weights are needed; those returned are after dropout, as torch's."""
    heads = q.shape[:2]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))  # (N * H, ...)
    q = q * math.sqrt(1.0 / q.shape[-1])
    if mask is None:
        scores = torch.bmm(q, k.transpose(1, 2))
    else:
        mask = mask[0] if mask.shape[:2] == (1, 1) else mask.expand(*heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(mask, q, k.transpose(1, 2))
    weights = F.softmax(scores, -1)
    if dropout:
        weights = F.dropout(weights, dropout)
    return torch.bmm(weights, v).unflatten(0, heads), weights.unflatten(0, heads)


def _parts(xs: Sequence[Tensor], weight: Weight, thirds: Sequence[int]) -> tuple[Tensor, ...]:
    """Each input times its part of the packed weight, of so many thirds of it."""
    w = as_expansion(weight, 2)
    if w is None or xs[0].is_complex():
        assert isinstance(weight, Tensor)
        sizes = [weight.shape[-2] // 3 * t for t in thirds]
        return tuple(linear(x, part) for x, part in zip(xs, weight.split(sizes, -2), strict=True))
    for x in xs:
        check_rows("in_projection", x, w.rows)
    parts: tuple[Tensor, ...] = _Parts.apply(
        w.weight, w.rows, w, [w.weight.shape[0] // 3 * t for t in thirds], False, *xs
    )
    return parts


class _Parts(Op):
    """Several linear maps whose weights are packed in one: ``linear``'s op, for each part with an input of
    its own.

    The family closes on itself: the input gradients are the same op with ``turned`` flipped (``x @ weight``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        rows: Tensor | None,
        w: Expansion,
        sizes: list[int],
        turned: bool,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, rows, *(xs if any(ctx.needs_input_grad[:2]) else ()))
        ctx.w, ctx.sizes, ctx.turned, ctx.dtypes = w, sizes, turned, [x.dtype for x in xs]
        return tuple(
            owned(affine(x, p.t() if turned else p)) for x, p in zip(xs, weight.split(sizes), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, rows, *xs = ctx.saved_tensors
        need_weight, need_rows, _, _, _, *need_xs = needed_grads(ctx, ctx.w)
        w, sizes, turned = ctx.w, ctx.sizes, ctx.turned
        gxs: Sequence[Tensor | None] = [None] * len(grads)
        gys = [of_dtype(gy, weight.dtype) for gy in grads]
        if any(need_xs):
            if torch.is_grad_enabled():
                gxs = _Parts.apply(weight, rows, w.rebind(weight, rows), sizes, not turned, *gys)
            else:
                parts = zip(gys, weight.split(sizes), need_xs, strict=True)
                gxs = [(affine(gy, p if turned else p.t()) if need else None) for gy, p, need in parts]
            gxs = [
                None if gx is None else of_dtype(gx, dtype) for gx, dtype in zip(gxs, ctx.dtypes, strict=True)
            ]
        g_weight = g_rows = None
        if need_weight or need_rows:
            xs = [of_dtype(x, weight.dtype) for x in xs]
            # outputs' side, inputs' side
            pairs = zip(xs, gys, strict=True) if turned else zip(gys, xs, strict=True)
            shapes = [torch.Size((w.shape[0], n, w.shape[2])) for n in sizes]
            blocks = [Outer(*pair, shape) for pair, shape in zip(pairs, shapes, strict=True)]
            g_weight, g_rows = w.take(Blocks(blocks, w.shape), need_weight, need_rows)
        return g_weight, g_rows, None, None, None, *gxs
