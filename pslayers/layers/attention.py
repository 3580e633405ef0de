"""PSMultiheadAttention, and the linear layer inside it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import functional as PF
from .. import torch_api
from ..core import contents
from ..core.context import LayerCall, clear, local
from ..functional.common import for_rows
from ..modules.base import OwnBatchDim, PSLayer
from ..modules.converted import State
from .linear import PSLinear

__all__ = ["PSMultiheadAttention", "PSNonDynamicallyQuantizableLinear"]


class PSNonDynamicallyQuantizableLinear(
    PSLinear, NonDynamicallyQuantizableLinear, replaces=NonDynamicallyQuantizableLinear
):
    """`PSLinear` for the ``out_proj`` of nn.MultiheadAttention, which is a class of its own in torch.

    Shapes: x (B, ..., I), result (B, ..., O); `grad_sample` (B, O, I) and (B, O). Memory: B x O x (I + 1)
    values. Source: direct derivation, see `PSLinear`.

    Example:
        >>> import torch, pslayers as ps
        >>> attention = ps.convert_model(torch.nn.MultiheadAttention(4, 2))
        >>> type(attention.out_proj).__name__
        'PSNonDynamicallyQuantizableLinear'
    """


class PSMultiheadAttention(OwnBatchDim, nn.MultiheadAttention, replaces=nn.MultiheadAttention, fused=True):
    """nn.MultiheadAttention in full, with per-sample weights: ``out[n] = concat(head_1, ..., head_H) @
    out_proj[n].T + bias[n]``.

    A head is ``softmax(q @ k.T / sqrt(E / H) + mask) @ v`` of parts of ``q = query[n] @ w_q[n].T + b_q[n]``
    and so on, w_q[n] being a part of ``in_proj_weight[n]``. The batch dim of the inputs is the layer's own,
    by its ``batch_first``, whatever the rest of the model does.

    Shapes: query (L, B, E), key (S, B, K), value (S, B, V), or batch first; attn_mask (L, S) or (B * H, L,
    S), key_padding_mask (B, S); result (L, B, E), and attention weights (B, L, S) or (B, H, L, S);
    `grad_sample` (B, 3 E, E), or (B, E, E), (B, E, K), (B, E, V), (B, 3 E), (B, 1, 1, E). Also k * B rows, k
    a sample; one row, (L, 1, E) or (L, E), is shared by all samples, and the results then have B. Memory: B
    times that of the weights, and B x H x L x S values where torch takes no fused kernel (attention weights
    that are returned, second derivatives). It can be differentiated any number of times (but for dropout
    without `need_weights` on GPU, where the kernel draws the random numbers). Source: Vaswani et al. 2017
    (arXiv:1706.03762).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.convert_model(torch.nn.MultiheadAttention(4, 2, batch_first=True))
        >>> x = torch.randn(5, 7, 4)                               # 5 samples, 7 steps
        >>> output, weights = layer(x, x, x)
        >>> output.sum((1, 2)).mean().backward()
        >>> layer.in_proj_weight.grad_sample.shape
        torch.Size([5, 12, 4])

    Raises:
        ValueError: the number of rows is no multiple of the batch size; and what nn.MultiheadAttention
            raises.
    """

    event_dims = 2
    _ps_input = "query"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        out = self.out_proj
        out.__class__ = PSNonDynamicallyQuantizableLinear
        assert isinstance(out, PSLinear)
        out._ps = State(self._ps_state().settings, "out_proj", out)
        for param in contents.parameters(out):
            clear(param)

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """An ``out_proj`` that has been replaced: torch uses its weight without calling it."""
        out: Any = module.out_proj
        known = isinstance(out, PSLinear) or type(out) in (nn.Linear, NonDynamicallyQuantizableLinear)
        if (known and "weight" in out._parameters) or not any(
            p.requires_grad for p in contents.parameters(out)
        ):
            return None
        return (
            f"has an `out_proj` of type {type(out).__name__}, whose forward it does not call: put its weight"
            " into an nn.Linear, freeze it, or write a layer for the attention module (ps.PSLayer)"
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (L, B, E), key (S, B, K), value (S, B, V) -> (L, B, E), attention weights or None."""
        batch = local.batch
        assert batch is not None
        causal = is_causal and attn_mask is not None and key_padding_mask is None and not need_weights
        masks = None
        if self._fit(query, key, value):
            masks = self._masks(query, key, key_padding_mask, None if causal else attn_mask)
        if masks is None or (is_causal and attn_mask is None):
            return super().forward(  # torch's own error
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        given = self._each(self._rows_first, query, key, value)
        (q, undo), (k, _), (v, _) = self._each(lambda t: self._arranged(t, batch.size), *given)
        n = len(q)
        q, k, v = self._project(q, k, v)
        # the order of rows matters to the weights alone; masks and dropout's random numbers are the caller's
        if undo is not None:
            q, k, v = undo(q), undo(k), undo(v)
        mask = functools.reduce(torch.add, masks) if masks else None
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        if mask is not None:  # what was appended to the keys is never masked
            mask = F.pad(mask, (0, k.shape[1] - mask.shape[-1]))
        dropout = self.dropout if self.training else 0.0
        out, weights = PF.multi_head_attention(
            q, k, v, self.num_heads, mask, dropout=dropout, is_causal=causal, need_weights=need_weights
        )
        out = self._out_projection(out if undo is None else self._arranged(out, batch.size)[0], n)
        if len(out) != batch.size:
            self._watch_rows(0, out)
        out = out if undo is None else undo(out)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if query.ndim == 2 and batch.size == 1:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        if self.training:  # dropout fills its masks in the order of memory, which is that of torch's own
            out = out.transpose(0, 1).contiguous().transpose(0, 1)
        return out.movedim(0, self._batch_dim), weights

    def _project(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, L, E), (N, S, K), (N, S, V) -> (N, L, E), (N, S', E) twice: with a bias of both, S' = S + 1."""
        weight: Any
        if self._qkv_same_embed_dim:
            weight = self._ps_weight("in_proj_weight")
        else:
            weight = [self._ps_weight(name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        q, k, v = PF.in_projection(q, k, v, weight, self.expansion("in_proj_bias"))
        if self.bias_k is not None:
            k, v = (
                torch.cat([t, for_rows(self._ps_weight(name), 3, len(t)).squeeze(1)], 1)
                for t, name in ((k, "bias_k"), (v, "bias_v"))
            )
        return q, k, v

    def _out_projection(self, x: Tensor, rows: int) -> Tensor:
        """By the child's weights, without calling it, as torch does."""
        child = self.out_proj
        if not isinstance(child, PSLinear):
            return F.linear(x, child.weight, child.bias)
        with LayerCall(child, rows, local.call.scale):
            return PF.linear(x, child._ps_weight(), child.expansion("bias"))

    # ------------------------------------------------------------------ what is called with what
    def _fit(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the inputs' shapes are as they should be."""
        if any(t.is_nested or t.ndim != query.ndim or t.ndim not in (2, 3) for t in (query, key, value)):
            return False
        n = [t.shape[self._batch_dim] if t.ndim == 3 else 1 for t in (query, key, value)]
        widths = [t.shape[-1] for t in (query, key, value)]
        return (
            n[0] == n[1] == n[2]
            and key.shape[:-1] == value.shape[:-1]
            and widths == [self.embed_dim, self.kdim, self.vdim]
        )

    def _masks(
        self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> list[Tensor] | None:
        """The masks as floats to be added to (N, H, L, S); None where torch has an error to raise about
        them.
        """
        (n, length, _), (_, source, _) = self._rows_first(query).shape, self._rows_first(key).shape
        canonical, dtype = torch_api.canonical_mask, query.dtype
        padding = canonical(padding, "key_padding_mask", torch_api.none_or_dtype(mask), "attn_mask", dtype)
        mask = canonical(mask, "attn_mask", None, "", dtype, check_other=False)
        masks = []
        if mask is not None:
            if mask.shape not in ((length, source), (n * self.num_heads, length, source)):
                return None
            masks.append(mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (n, self.num_heads)))
        if padding is not None:
            if padding.shape != ((n, source) if query.ndim == 3 else (source,)):
                return None
            masks.append(padding.reshape(n, 1, 1, source))
        return masks

    def _ps_needed(self) -> bool:
        return super()._ps_needed() or (isinstance(self.out_proj, PSLayer) and self.out_proj._ps_needed())

    def _ps_tracked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Query, key and value, of which some may be the same for all samples, side by side."""
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
        inputs: dict[int, Any] = {id(x): x for x in (given.get(name) for name in ("query", "key", "value"))}
        if not all(isinstance(x, Tensor) and not x.is_nested and x.ndim in (2, 3) for x in inputs.values()):
            return None  # torch's own error is to come
        rows = [self._rows_first(x) for x in inputs.values()]
        if len({len(x) for x in rows}) > 1:
            return None
        return rows[0] if len(rows) == 1 else torch.cat([x.flatten(1) for x in rows], 1).unsqueeze(1)

    def _ps_owned(self, output: Any, rows: int) -> list[tuple[Tensor, int, Tensor | None]]:
        (out, weights), batch = output, local.batch
        if batch is None or out.ndim != 3 or out.shape[self._batch_dim] != batch.size:
            return []  # k rows a sample, in some order
        return [(out, self._batch_dim, None)] + ([] if weights is None else [(weights, 0, None)])

    # ------------------------------------------------------------------ rows
    @staticmethod
    def _each(fn: Callable[[Tensor], Any], *tensors: Tensor) -> list[Any]:
        """`fn` of each; those that are the same stay so."""
        done: list[Any] = []
        # not by id, for which torch.compile would make code for these very tensors alone
        for i, t in enumerate(tensors):
            first = next(j for j in range(i + 1) if tensors[j] is t)
            done.append(done[first] if first < i else fn(t))
        return done
