"""PSEmbedding and PSEmbeddingBag."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as PF
from .. import torch_api
from ..attribution.tracking import BATCH_MAJOR, MIXED
from ..core.context import local
from ..core.expansion import Weight
from ..functional.embedding import renormalise
from ..modules.base import PSLayer

__all__ = ["PSEmbedding", "PSEmbeddingBag"]


class PSTable(PSLayer):
    """What layers that look entries up in a table have in common."""

    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    @classmethod
    def unsupported(cls, module: Any) -> str | None:
        """Gradients that are counted over the batch, or sparse."""
        if module.scale_grad_by_freq:
            return (
                "counts how often an id occurs in the whole batch (scale_grad_by_freq), which mixes samples:"
                " switch it off"
            )
        if module.sparse:
            return "has sparse=True, while per-sample gradients are dense: build it with sparse=False"
        return None

    def _ps_check_given(self, name: str, weight: Tensor, size: int) -> None:
        super()._ps_check_given(name, weight, size)
        if self.max_norm is not None:
            raise self._ps_one_table()

    def _ps_one_table(self) -> ValueError:
        return ValueError(
            f"{self._ps_name} has max_norm, by which each call writes to its one table, and was given"
            " per-sample weights: leave its weights out of what torch.func.functional_call gives, or use"
            " ps.per_sample_grads(model, ...)."
        )

    def table(self, ids: Tensor) -> Weight:
        """The weight, the entries of `ids` renormalised where the layer does that."""
        if self.scale_grad_by_freq or self.sparse:  # set since it was converted
            raise ValueError(f"`{self._ps_state().path}` ({type(self).__name__}) {self.unsupported(self)}.")
        weight = self._ps_weight()
        if self.max_norm is not None:
            if isinstance(weight, Tensor):
                raise self._ps_one_table()
            renormalise(weight.weight, ids, self.max_norm, self.norm_type)
        return weight


class PSEmbedding(PSTable, nn.Embedding, replaces=nn.Embedding, fused=True):
    """nn.Embedding with per-sample weights: ``y[n, ...] = weight[n, input[n, ...]]``.

    Shapes: input (B, ...) of integers, result (B, ..., D); `grad_sample` (B, V, D). Ids (1, ...) are shared
    by all samples: then the result has B rows. The entry `padding_idx` gets no gradient. Memory: B x V x D
    values. `max_norm` renormalises the one shared table, as torch does. Source: direct derivation (one-hot
    outer product).

    Raises:
        ValueError: `scale_grad_by_freq` (counting over the batch would mix samples) or `sparse`; a part of a
            model that is called by itself with the numbers of positions or classes.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSEmbedding(10, 3)
        >>> layer(torch.tensor([[1, 2], [2, 2]])).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample[:, 2, 0]
        tensor([1., 2.])
    """

    event_dims = 0

    def forward(self, input: Tensor) -> Tensor:
        """input (B, ...) -> (B, ..., D)."""
        if (batch := local.batch) is not None and batch.root is self and batch.size > 1:
            self._ps_check_numbers(input)
        return PF.embedding(input, self.table(input), self.padding_idx)

    def _ps_check_numbers(self, ids: Tensor) -> None:
        """Of a part of a model that is called by itself: an error where it is given positions or classes, as
        they are counted, not one of each sample's, though as many there may be.
        """
        state = self._ps_state()
        if not state.prefix or ids.ndim != 1 or torch_api.capturing():
            return
        if torch.equal(ids, torch.arange(len(ids), device=ids.device).to(ids.dtype)):
            raise ValueError(
                f"{self._ps_name} was called past the model's forward with the numbers 0 to {len(ids) - 1},"
                " each of which would be a sample's: positions or classes are all samples'. Call it in the"
                " forward, or give each sample all of them (ids.expand(B, -1))."
            )


class PSEmbeddingBag(PSTable, nn.EmbeddingBag, replaces=nn.EmbeddingBag, fused=True):
    """nn.EmbeddingBag with per-sample weights: ``y[n] = reduce(weight[n, id] for id in bag n)``. A bag is a
    sample.

    Shapes: input (B, L) of integers, or (M,) with offsets (B,), or (B + 1,) where `include_last_offset`;
    result (B, D); `grad_sample` (B, V, D). Also k * B bags, and one bag, which all samples share. Ids that
    equal `padding_idx` are left out. `per_sample_weights` are torch's: of each entry, with mode "sum"; they
    get their gradient. Memory: B x V x D values. `max_norm` renormalises the one shared table, as torch does.
    Source: direct derivation.

    Raises:
        ValueError: `scale_grad_by_freq` (counting over the batch would mix samples) or `sparse`; the shapes
            do not fit.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSEmbeddingBag(10, 3, mode="sum")
        >>> layer(torch.tensor([1, 2, 2, 4, 1]), torch.tensor([0, 3])).sum(1).mean().backward()
        >>> layer.weight.grad_sample[:, 2, 0]
        tensor([2., 0.])
    """

    event_dims = 1

    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        ids, offsets, _ = _bag_inputs(*args, **kwargs)
        return len(ids) if offsets is None else len(offsets) - int(self.include_last_offset)

    def _ps_tracked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """With offsets, a number for each bag that tells what it holds."""
        ids, offsets, factors = _bag_inputs(*args, **kwargs)
        if offsets is None:
            return ids
        table = torch.arange(self.num_embeddings, device=ids.device).double().cos().unsqueeze(1)
        factors = None if factors is None else factors.double()
        options: Any = {
            "mode": "sum",
            "include_last_offset": self.include_last_offset,
            "per_sample_weights": factors,
        }
        return nn.functional.embedding_bag(ids, table, offsets, **options)  # (N, 1)

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[Any, Any, int, Any]:
        """Bags as rows, k * size of them, batch-major."""
        ids, offsets, factors = _bag_inputs(*args, **kwargs)
        if offsets is None:
            ids, undo = self.to_rows(ids, size)
            factors = None if factors is None else self.to_rows(factors, size)[0]
            return (ids, None, factors), {}, len(ids), undo
        bags = len(offsets) - int(self.include_last_offset)
        if bags == 1:
            count = size + int(self.include_last_offset)
            offsets = torch.arange(count, device=ids.device, dtype=offsets.dtype) * len(ids)
            factors = None if factors is None else factors.repeat(size)
            return (ids.repeat(size), offsets, factors), {}, size, None
        like = self.weight.new_empty(bags, 1)
        if self.layout(like, size) not in (("dim", 0), BATCH_MAJOR):
            self._attributable(MIXED, like, 1, size)
        return (ids, offsets, factors), {}, bags, None

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """input (B, L), or (M,) with offsets -> (B, D)."""
        options = self.mode, per_sample_weights, self.include_last_offset, self.padding_idx
        return PF.embedding_bag(input, self.table(input), offsets, *options)


def _bag_inputs(
    input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if input.ndim == 1 and offsets is None:
        raise ValueError("offsets has to be a 1D Tensor but got None")  # as torch's own layer
    return input, offsets, per_sample_weights
