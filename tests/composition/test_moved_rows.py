"""Rows that a forward picks, moves and puts together again."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.modules.first_call import ModelCall
from tests.oracle import assert_rows, loop, square, squares, true_rows

from ..combinations import every
from .common import Own, Past, batch, both, right, right_by_backward


class Dropped(nn.Module):
    """Experts, chosen by the data, that drop."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        gates, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            out[chosen == e] = expert(flat[chosen == e]) * gates[chosen == e, None]
        return out.view(x.shape)


def test_dropout_on_rows_that_are_picked() -> None:
    model, ours = both(nn.Sequential(nn.Linear(4, 4), Dropped(), nn.LayerNorm(4)))
    for n in (5, 3, 4):
        x = batch(n, 4, 4)
        ours.zero_grad()
        torch.manual_seed(n)
        output = ours(x)
        squares(output).mean().backward()
        torch.manual_seed(n)
        plain = model(x)
        torch.testing.assert_close(output, plain)
        # dropped as in the batch
        assert_rows(ours, true_rows(lambda i, out=plain: square(out[i], 0), model, n))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(3, 4), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x.clone()
        y[x[..., 0] > 0] = self.fc(x[x[..., 0] > 0])
        return y


def test_the_functional_form_of_a_parametrised_layer_on_picked_rows() -> None:
    model, ours = both(Masked())
    x = batch(3, 5, 3)
    right(ours, model, x)
    weights = ps.expand_params(ours, 3)
    found = torch.autograd.grad(
        squares(torch.func.functional_call(ours, weights, (x,))).sum(), list(weights.values())
    )
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), loop(model, square, (x,)))


class Sliced(nn.Module):
    """Experts whose weights are slices of one parameter, as long as the rows are by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2 * 4, 4))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w.T)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.router = Sliced(), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 4)
        chosen, out = self.router(flat).argmax(-1), torch.zeros_like(flat)
        for e in range(2):
            (token,) = torch.where(chosen == e)
            out.index_add_(0, token, self.mlp(flat[token], self.mlp.w.view(2, 4, 4)[e]))
        return out.view(x.shape)


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_a_parameter_beside_as_many_rows(seed: int) -> None:
    torch.manual_seed(seed)
    model, ours = both(nn.Sequential(nn.Linear(4, 4), Routed(), nn.LayerNorm(4)))
    for n, t in ((4, 2), (2, 4), (3, 5), (4, 1)):
        right(ours, model, batch(n, t, 4))


class Prompted(nn.Module):
    """A layer for each sample by itself, a prompt, a weight past its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each, self.prompt = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.tanh(self.first(x)), self.first.weight)
        h = torch.cat([self.each(one[None]) for one in h])
        return torch.cat([self.prompt.expand(len(h), -1, -1), h], 1)


class Views(nn.Module):
    """Two views of each sample through the same layers, in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T, 4)
        h = x.flatten(0, 1)
        first, second = torch.tanh(self.fc(torch.cat([h, h.flip(1)]))).chunk(2)
        return (first * second * self.scale).unflatten(0, (-1, x.shape[1]))


class Positions(nn.Module):
    """A table of positions in a reentrant checkpoint, B * C rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w, self.scale = nn.Linear(4, 4), nn.Embedding(9, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T, 4)
        h = self.fc(x.flatten(0, 1))
        for _ in range(2):
            h = h + self.scale * checkpoint(
                lambda h: h + self.w(torch.arange(h.shape[1])), h, use_reentrant=True
            )
        return h.unflatten(0, (-1, x.shape[1]))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Prompted, (5, 4)), (Views, (2, 3, 4)), (Positions, (3, 4, 4)), (Positions, (3, 5, 4))],
)
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_rows_that_are_put_together_again(kind: Any, shape: tuple[int, ...]) -> None:
    model, ours = both(kind())
    for n in (3, 5, 2):
        right_by_backward(ours, model, batch(n, *shape))


class Sorted(nn.Module):
    """Rows in an order that the data give, after a recurrent layer over time; of two samples, it is the
    batch's own by chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.e, self.gru, self.router, self.inner = nn.Embedding(7, 4), nn.GRU(4, 4), nn.Linear(4, 2), Own()

    def forward(self, x: Tensor) -> Tensor:
        h = self.gru(self.e(x).transpose(0, 1))[0].transpose(0, 1).reshape(-1, 4)
        order = self.router(h)[:, 0].argsort()
        out = self.inner(h[order])
        return torch.empty_like(out).index_copy(0, order, out).view(*x.shape, 4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_rows_that_are_sorted_are_in_order_by_chance(seed: int) -> None:
    torch.manual_seed(seed)
    model, ours = both(Sorted())
    for n in (2, 3, 2):
        right(ours, model, torch.randint(7, (n, 1)))


class Sums(nn.Module):
    """Adds sums of its weights to what its layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.w.sum() + self.fc.weight.sum()


class Gated(nn.Module):
    """Rows of the batch go to one of two parts, by their first value."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.first, self.one, self.other, self.border, self.batch_first = (
            nn.Linear(4, 4),
            Past(),
            Sums(),
            0.0,
            batch_first,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        h = self.first(x).flatten(0, 1)
        out, high = torch.zeros_like(h), h[:, 0] > self.border
        out[high], out[~high] = self.one(h[high]), self.other(h[~high])
        return out.unflatten(0, x.shape[:2])


@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("border", [9.0, -9.0])
def test_a_part_that_no_row_goes_to_has_a_gradient_of_zeros(border: float, batch_first: bool) -> None:
    """As in plain torch: optimisers step with one, and skip None."""
    model, ours = both(Gated(batch_first), batch_first=batch_first)
    for model.border, n in ((border, 2), (0.0, 3), (border, 4)):  # type: ignore[assignment]
        ours.border = model.border
        x = batch(n, 3, 4) if batch_first else batch(3, n, 4)
        model.zero_grad()
        ours.zero_grad()
        for net in (model, ours):
            net(x).square().sum((0, 1, 2)).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name).grad, p.grad, msg=name)
            assert ours.get_parameter(name).grad_sample.shape == (n, *p.shape)


@pytest.mark.parametrize("border", [9.0, 0.0])
def test_an_example_in_which_rows_stay_in_order_by_chance(border: float) -> None:
    """An example is looked at as a first call is: whose the picked rows of later batches are is followed."""
    model = Gated().double()
    model.one, model.other, model.border = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), border
    ours = ps.convert_model(copy.deepcopy(model), example=batch(3, 3, 4))
    model.border = ours.border = 0.0
    for n in (2, 3, 5):
        right(ours, model, batch(n, 3, 4))
    assert ps.report(ours).fast == 1 and not any(row.way for row in ps.report(ours).rows)


class Halves(nn.Module):
    """Two batches in one call of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True), Past()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        one, other = self.part(torch.cat([h, h.flip(1)])).chunk(2)
        return one * other


def test_two_batches_in_one_through_a_weight_used_past_its_layer() -> None:
    model, ours = both(Halves())
    for n in (3, 2, 5, 1):
        right(ours, model, batch(n, 3, 4))


class Turned(nn.Module):
    """Two batches in one through a part, and what comes of them through another, in an order that the data
    give.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.inner, self.by_data = nn.Linear(4, 4), nn.Linear(4, 4), Inner(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        one, other = self.part(torch.cat([h, h.flip(1)])).chunk(2)
        return self.inner(one * other, self.by_data)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, by_data: float) -> Tensor:
        rows = x.flatten(0, 1)
        order = (rows[:, 0] * by_data).argsort(stable=True)
        return torch.empty_like(rows).index_copy(0, order, self.norm(rows[order])).view_as(x) * self.scale


def test_rows_that_are_moved_in_a_part_that_takes_picked_rows() -> None:
    model, ours = both(Turned())
    for model.by_data, n in ((0.0, 3), (1.0, 4), (1.0, 2), (-1.0, 3)):  # type: ignore[assignment]
        ours.by_data = model.by_data
        right(ours, model, batch(n, 2, 4))


class Order(nn.Module):
    """A recurrent layer and dropout on rows that were moved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net, self.drop, self.out = (
            nn.Linear(4, 4),
            nn.GRU(4, 4, batch_first=True),
            nn.Dropout(0.5),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.net(torch.cat([self.first(one[None]) for one in x]))[0]))


def test_moved_rows_lie_in_memory_as_the_plain_models() -> None:
    """Dropout fills its masks in the order of memory."""
    model, ours = both(Order())
    for n in (3, 2, 5):
        x = batch(n, 6, 4)
        outputs = []
        for net in (model, ours):
            torch.manual_seed(0)
            outputs.append(net(x))
        torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("n", [1, 0])
@pytest.mark.parametrize("kind", [Gated, Past, Own])
def test_a_first_call_for_one_sample_with_weights_given(kind: Callable[[], nn.Module], n: int) -> None:
    model, ours = both(kind())
    x = batch(n, 3, 4)
    weights = ps.expand_params(ours, n)
    found = torch.autograd.grad(
        torch.func.functional_call(ours, weights, (x,)).square().sum(), list(weights.values())
    )
    expected = loop(model, lambda out, i: out[i].square().sum(), (x,))
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), expected)
    right(ours, model, batch(3, 3, 4))


class SortedByLength(nn.Module):
    """Sequences are sorted by their lengths, packed, and put back, as the recurrent layers once asked for."""

    def __init__(self, kind: str, time_first: bool, state: bool, again: bool) -> None:
        super().__init__()
        self.time_first, self.state, self.again = time_first, state, again
        self.before = nn.Linear(3, 4)
        self.rnn = getattr(nn, kind)(4, 3, bidirectional=True, batch_first=not time_first)
        self.after = nn.Linear(6, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=not self.again)
        h = self.before(x[order])
        packed = nn.utils.rnn.pack_padded_sequence(
            h.transpose(0, 1) if self.time_first else h,
            lengths,
            batch_first=not self.time_first,
            enforce_sorted=not self.again,
        )
        first = h[:, 0, :3].expand(2, -1, -1).contiguous() if self.state else None
        given = (first, first) if self.state and isinstance(self.rnn, nn.LSTM) else first
        out, state = self.rnn(packed, given)
        state = state[0] if isinstance(state, tuple) else state
        steps = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0].sum(1)
        back = order.argsort()
        return self.after(torch.cat([state[0], state[1]], 1)[back]) + self.after(steps[back])


LENGTHS = (4, 4, 4, 4), (4, 3, 2, 1), (1, 2, 3, 4), (2, 4, 1, 3)  # of the sequences of the first batch


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
@pytest.mark.parametrize(
    ("kind", "time_first", "state", "again", "first"),
    every(5, itertools.product(("GRU", "LSTM"), *((False, True),) * 3, LENGTHS)),
)
def test_sequences_sorted_by_length(
    kind: str, time_first: bool, state: bool, again: bool, first: tuple[int, ...]
) -> None:
    """In whatever order the first batch is: that of later ones is another."""
    model, ours = both(SortedByLength(kind, time_first, state, again))
    for lengths in (first, (2, 4, 1, 3), (3, 1, 4, 4, 2, 1), (4,)):
        right(ours, model, batch(len(lengths), 4, 3), torch.tensor(lengths))


def _numbers(rows: Tensor, how: str) -> list[int]:
    """Which rows, the largest value first."""
    if how == "tolist":
        return sorted(range(len(rows)), key=[-value for value in rows.tolist()].__getitem__)
    if how == "numpy":
        return (-rows).numpy().argsort(kind="stable").tolist()  # type: ignore[no-any-return]
    if how == "bool":
        return [i for large in (True, False) for i in range(len(rows)) if bool(rows[i] > 2) == large]
    return sorted(range(len(rows)), key=lambda i: -rows[i].item())


def _written(h: Tensor, order: list[int], copies: bool) -> Tensor:
    rows = torch.zeros_like(h)
    for place, i in enumerate(order):
        if copies:
            rows[place].copy_(h[i])
        else:
            rows[place] = h[i]
    return rows


ORDERED: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "list": lambda h, order: h[order],
    "tensor": lambda h, order: h[torch.tensor(order)],
    "stack": lambda h, order: torch.stack([h[i] for i in order]),
    "select": lambda h, order: torch.stack([h.select(0, i) for i in order]),
    "unbind": lambda h, order: torch.stack([h.unbind()[i] for i in order]),
    "split": lambda h, order: torch.cat([h.split(1)[i] for i in order]),
    "set": lambda h, order: _written(h, order, False),
    "copy": lambda h, order: _written(h, order, True),
}


class ByNumbers(nn.Module):
    """Rows are sorted by Python's numbers, and put back."""

    def __init__(self, numbers: str, ordered: str) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.numbers, self.ordered = numbers, ORDERED[ordered]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = _numbers(lengths, self.numbers)
        h = self.inner(self.ordered(self.before(x).tanh(), order)).tanh()
        return self.after(self.ordered(h, [order.index(i) for i in range(len(order))]))


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
@pytest.mark.parametrize("first", LENGTHS)
@pytest.mark.parametrize(
    ("numbers", "ordered"), every(5, itertools.product(("tolist", "numpy", "bool", "item"), ORDERED))
)
def test_rows_sorted_by_numbers(numbers: str, ordered: str, first: tuple[int, ...]) -> None:
    """In whatever order the first batch is."""
    model, ours = both(ByNumbers(numbers, ordered))
    for lengths in (first, (2, 4, 1, 3), (3, 1, 4, 4, 2, 1), (4,)):
        right(ours, model, batch(len(lengths), 3), torch.tensor(lengths))


ORDERED_IN_DIM_1: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "list": lambda h, order: h[:, order],
    "tensor": lambda h, order: h[:, torch.tensor(order)],
    "stack": lambda h, order: torch.stack([h[:, i] for i in order], 1),
}


class ByNumbersInDim1(nn.Module):
    """The same where the batch is in dim 1."""

    def __init__(self, ordered: str) -> None:
        super().__init__()
        self.before, self.rnn, self.after = nn.Linear(3, 4), nn.GRU(4, 4), nn.Linear(4, 2)
        self.ordered = ORDERED_IN_DIM_1[ordered]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = _numbers(lengths, "tolist")
        h = self.rnn(self.ordered(self.before(x), order))[0]
        return self.after(self.ordered(h, [order.index(i) for i in range(len(order))]))


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
@pytest.mark.parametrize("ordered", ORDERED_IN_DIM_1)
def test_rows_in_dim_1_sorted_by_numbers(ordered: str) -> None:
    model, ours = both(ByNumbersInDim1(ordered), batch_first=False)
    for lengths in LENGTHS:
        x, n = batch(5, len(lengths), 3), torch.tensor(lengths)
        ours.zero_grad()
        ours(x, n).square().sum((0, 2)).mean().backward()

        def loss(i: int, x: Tensor = x, n: Tensor = n) -> Tensor:
            return model(x[:, i : i + 1], n[i : i + 1]).square().sum()

        assert_rows(ours, true_rows(loss, model, len(n)))


class Bags(nn.Module):
    """Texts of any length, one after the other, and where each begins; with `weigh`, each token counts as a
    layer says.
    """

    def __init__(self, weigh: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 2)
        self.weigh = nn.Sequential(nn.Embedding(9, 1), nn.Flatten(0)) if weigh else None

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        weights = None if self.weigh is None else self.weigh(ids)
        return self.head(self.table(ids, per_sample_weights=weights, offsets=offsets).tanh())


def _texts(*lengths: int) -> tuple[Tensor, Tensor]:
    n = torch.tensor(lengths)
    return torch.randint(0, 9, (sum(lengths),)), n.cumsum(0) - n


@pytest.mark.parametrize("weigh", [False, True])
def test_bags_of_any_length(weigh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose each bag is, its place says: it is not proved again in every batch. Where it sums up what a layer
    has made of its tokens, that is refused, or right.
    """
    model, ours = both(Bags(weigh))
    proofs: list[ModelCall] = []
    verified = ModelCall._verified
    monkeypatch.setattr(
        ModelCall, "_verified", lambda self, *a, **k: proofs.append(self) or verified(self, *a, **k)
    )
    for lengths in ((3, 5, 1), (2, 2, 2), (1, 2, 6), (4, 2), (3, 3), (1, 7, 2, 2)):
        ids, offsets = _texts(*lengths)
        ours.zero_grad()
        try:
            losses = squares(ours(ids, offsets))
        except ValueError:  # whose the tokens are that are weighed
            assert weigh
            continue
        losses.mean().backward()

        def loss(i: int, parts: tuple[Tensor, ...] = ids.split(lengths)) -> Tensor:
            return square(model(parts[i], torch.zeros(1, dtype=torch.long)), 0)

        assert_rows(ours, true_rows(loss, model, len(lengths)))
    assert weigh or len(proofs) == 1


class WeighedBags(nn.Module):
    """Tokens count as the samples' rows say, and offsets say where a bag begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weigh, self.head = (
            nn.EmbeddingBag(9, 4, mode="sum"),
            nn.Linear(3, 2),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        weights = self.weigh(x).flatten()
        return self.head(self.table(offsets=offsets, input=ids, per_sample_weights=weights))


def test_bags_of_whichever_samples_weights() -> None:
    """Two weights a sample: in a later batch a bag holds those of others."""
    model, ours = both(WeighedBags())
    for starts in ((0, 2, 4, 6), (0, 2, 4, 6), (0, 1, 4, 6), (0, 2, 4, 6)):
        x, ids, offsets = batch(4, 3), torch.randint(0, 9, (8,)), torch.tensor(starts)
        ours.zero_grad()
        if starts[1] != 2:
            with pytest.raises(ValueError, match="samples interact"):
                ours(x, ids, offsets)
            continue
        squares(ours(x, ids, offsets)).mean().backward()

        def loss(i: int, x: Tensor = x, ids: Tensor = ids) -> Tensor:
            return square(model(x[i : i + 1], ids[2 * i : 2 * i + 2], torch.zeros(1, dtype=torch.long)), 0)

        assert_rows(ours, true_rows(loss, model, 4))
