import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from ..oracle import assert_rows, assert_rows_right, true_rows
from .suite import Case, LayerSuite, floats


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 6, shape)


class TestPSEmbedding(LayerSuite):
    cases = [
        Case("tokens", lambda: nn.Embedding(6, 3), lambda n: (ids(n, 5),)),
        Case("labels", lambda: nn.Embedding(6, 3), lambda n: (ids(n),)),
        Case("grid", lambda: nn.Embedding(6, 3), lambda n: (ids(n, 2, 3),)),
        Case(
            "padding", lambda: nn.Embedding(6, 3, padding_idx=2), lambda n: (ids(n, 8),), true_gradient=False
        ),
        Case(
            "padding-from-the-end",
            lambda: nn.Embedding(6, 3, padding_idx=-1),
            lambda n: (ids(n, 8),),
            true_gradient=False,
        ),
    ]


def bags(n: int, last: bool = False, factors: bool = False) -> tuple[Any, ...]:
    """n bags of 0 to 4 ids as one list, with offsets."""
    sizes = torch.arange(n) * 3 % 5
    ends = sizes.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends]) if last else ends - sizes
    values = ids(int(sizes.sum()))
    return (values, starts, floats(len(values))) if factors else (values, starts)


def composed(
    ids: Tensor, weight: Tensor, offsets: Any, max_norm: Any, norm_type: Any, freq: Any, mode: str, *more: Any
) -> Tensor:
    """torch's op by ops that can be differentiated twice (its own cannot)."""
    _, factors, last, padding = more
    starts = offsets.tolist() if offsets is not None else [i * ids.shape[1] for i in range(len(ids))]
    ids, factors = ids.reshape(-1), None if factors is None else factors.reshape(-1)
    ends, results = [*starts[1:], *([] if last else [len(ids)])], []
    for a, b in zip(starts, ends, strict=False):
        keep = torch.tensor([i for i in range(a, b) if ids[i] != padding], dtype=torch.long)
        found = weight[ids[keep]] if factors is None else weight[ids[keep]] * factors[keep].unsqueeze(1)
        results.append(
            weight[0] * 0 if not len(keep) else found.amax(0) if mode == "max" else getattr(found, mode)(0)
        )
    return torch.stack(results)


class TestPSEmbeddingBag(LayerSuite):
    cases = [
        *(
            Case(mode, lambda m=mode: nn.EmbeddingBag(6, 3, mode=m), lambda n: (ids(n, 4),))
            for mode in ("sum", "mean", "max")
        ),
        *(
            Case(
                f"{mode}-and-padding",
                lambda m=mode: nn.EmbeddingBag(6, 3, mode=m, padding_idx=-2),
                lambda n: (ids(n, 4),),
            )
            for mode in ("sum", "mean", "max")
        ),
        Case(
            "weighted", lambda: nn.EmbeddingBag(6, 3, mode="sum"), lambda n: (ids(n, 4), None, floats(n, 4))
        ),
    ]

    def test_rows_can_be_differentiated_again(self, case: Case) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "embedding_bag", composed)
            super().test_rows_can_be_differentiated_again(case)


class TestPSEmbeddingBagWithOffsets(TestPSEmbeddingBag):
    """The ids of all bags as one list."""

    cases = [
        *(
            Case(mode, lambda m=mode: nn.EmbeddingBag(6, 3, mode=m), lambda n: bags(n), rows=False)
            for mode in ("sum", "mean", "max")
        ),
        Case(
            "padding",
            lambda: nn.EmbeddingBag(6, 3, mode="mean", padding_idx=2),
            lambda n: bags(n),
            rows=False,
        ),
        Case(
            "weighted-with-last-offset",
            lambda: nn.EmbeddingBag(6, 3, mode="sum", include_last_offset=True, padding_idx=0),
            lambda n: bags(n, last=True, factors=True),
            rows=False,
        ),
    ]

    def sample(self, inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        values, offsets, *factors = inputs
        end = offsets[i + 1] if i + 1 < len(offsets) else len(values)
        own = slice(int(offsets[i]), int(end))
        last = [int(end) - int(offsets[i])] if factors else []
        return values[own], torch.tensor([0, *last]), *(f[own] for f in factors)

    def test_called_twice(self, case: Case) -> None:
        """The suite's turns the inputs around, which makes no offsets."""


def test_bags_of_rows_and_a_shared_bag() -> None:
    layer, values, offsets = nn.EmbeddingBag(6, 3).double(), ids(9), torch.tensor([0, 2, 2, 5])
    ours = ps.convert_model(copy.deepcopy(layer), loss_reduction="sum")
    for size, args in ((2, (values, offsets)), (3, (values, offsets[:1]))):
        with ps.batch_size(size):
            y = ours(*args)
        expected = layer(*args)
        torch.testing.assert_close(y, expected if len(expected) > 1 else expected.expand(3, 3))
        y.square().sum().backward()
        own = expected.split(2) if size == 2 else [expected] * 3
        assert_rows(ours, true_rows(lambda i, own=own: own[i].square().sum(), layer, size))
    with ps.batch_size(3), pytest.raises(ValueError, match=r"\(4, 1\) in a batch of 3 samples"):
        ours(values, offsets)


def test_bags_in_a_model() -> None:
    """Two bags a sample; whose are whose is tracked."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.out = nn.EmbeddingBag(6, 3), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:  # (B, 6): bags of 2 and of 4
            starts = torch.arange(len(x))[:, None] * 6 + torch.tensor([0, 2])
            return self.out(self.bags(x.reshape(-1), starts.reshape(-1)).reshape(len(x), 6))

    assert ps.check_model(Model(), torch.stack([torch.randperm(6) for _ in range(5)]))


def test_max_norm_and_wrong_inputs_of_bags() -> None:
    layer, values = nn.EmbeddingBag(6, 3, max_norm=0.5).double(), ids(4, 5)
    ours = ps.convert_model(copy.deepcopy(layer))
    torch.testing.assert_close(ours(values), layer(values))
    torch.testing.assert_close(ours.weight, layer.weight)
    weight = torch.randn(2, 6, 3)
    for args, options, message in (
        ((ids(4),), {}, "ids of shape"),
        ((ids(4, 2),), {"mode": "min"}, "mode='min'"),
        ((ids(4, 2),), {"padding_idx": 7}, "padding_idx=7"),
        ((ids(4, 2),), {"per_sample_weights": torch.ones(4, 2)}, "per_sample_weights of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            ps.functional.embedding_bag(args[0], weight, **options)
    with pytest.raises(IndexError, match="outside"):
        ps.functional.embedding_bag(ids(4, 2) + 5, weight)
    for option in ("sparse", "scale_grad_by_freq"):
        with pytest.raises(ps.ConversionError, match=option):
            ps.convert_model(nn.EmbeddingBag(6, 3, **{option: True}))
        for layer in (nn.Embedding(6, 3), nn.EmbeddingBag(6, 3)):
            ours = ps.convert_model(layer)
            setattr(ours, option, True)
            with pytest.raises(ValueError, match=f"{type(layer).__name__}.*{option}"):
                ours(ids(4, 2))


def tables() -> list[Any]:
    """Models whose rows are zero but for what was looked up."""
    return [
        nn.Sequential(nn.Embedding(40, 3), nn.Flatten(), nn.Linear(15, 2)),
        nn.Sequential(nn.Embedding(40, 3, padding_idx=1), nn.Flatten(), nn.Linear(15, 2)),
        nn.Sequential(nn.EmbeddingBag(40, 3), nn.Linear(3, 2)),
        nn.Sequential(nn.EmbeddingBag(40, 3, mode="max"), nn.Linear(3, 2)),
    ]


@pytest.mark.parametrize("which", range(4))
def test_memory_that_is_used_again_is_cleared_where_it_was_written(which: int) -> None:
    model = tables()[which].double()
    ours: Any = ps.convert_model(copy.deepcopy(model))
    kept, places = [], []
    for change in (None, None, "add", None, "keep", None, "size", None):
        x = torch.randint(0, 40, (4 if change == "size" else 3, 5))
        assert_rows_right(model, x, converted=ours)
        places.append(ours[0].weight.grad_sample.data_ptr())
        if change == "add":  # noise, say: what was zero is zero no more
            ours[0].weight.grad_sample.add_(1)
        if change == "keep":
            kept.append((ours[0].weight.grad_sample, ours[0].weight.grad_sample.clone()))
        ours.zero_grad()
    assert len(set(places[:5])) == 1 and places[5] != places[4]  # used again, unless somebody holds it
    assert all(torch.equal(rows, copied) for rows, copied in kept)


def test_memory_of_several_uses_is_cleared_as_a_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.out = nn.Embedding(40, 3), nn.Linear(3, 40, bias=False)
            self.out.weight, self.twice = self.tok.weight, True

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.tok(x)) if self.twice else self.tok(x)

    model: Any = Tied().double()
    ours: Any = ps.convert_model(copy.deepcopy(model))
    for twice in (False, True, True, False, False, True, False):
        model.twice = ours.twice = twice
        assert_rows_right(model, torch.randint(0, 40, (3, 5)), converted=ours)
        ours.zero_grad()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_are_renormalised_are_not_given_for_each_sample(kind: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = kind(5, 3, max_norm=0.7)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x) + self.table(x.flip(1))

    for model, name in ((Twice(), "table"), (nn.Sequential(kind(5, 3, max_norm=0.7)), "0")):
        ours = ps.convert_model(model)
        for called in (False, True):
            before = {n: p.detach().clone() for n, p in ours.named_parameters()}
            with pytest.raises(ValueError, match=rf"`{name}` .* has max_norm"):
                torch.func.functional_call(ours, ps.expand_params(ours, 2), (torch.randint(5, (2, 4)),))
            for n, p in ours.named_parameters():
                torch.testing.assert_close(p, before[n])
            if not called:
                ours(torch.randint(5, (3, 4))).sum().backward()
