"""Rows whose owner the shape does not tell: attributed by tracking, or refused; never silently wrong."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet, Gamma
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import pslayers as ps

from ..oracle import assert_rows, assert_rows_right, loop, square, squares, true_rows


class Positions(nn.Module):
    """Positions (T,) or (1, T), as GPT-like models look them up."""

    def __init__(self, lead: bool) -> None:
        super().__init__()
        self.tok, self.pos, self.out, self.lead = (
            nn.Embedding(9, 4),
            nn.Embedding(12, 4),
            nn.Linear(4, 3),
            lead,
        )

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        return self.out(
            torch.tanh(self.tok(ids) + self.pos(positions.unsqueeze(0) if self.lead else positions))
        )


@pytest.mark.parametrize("lead", [False, True])
@pytest.mark.parametrize("time", [3, 4, 8, 5])
def test_position_ids(time: int, lead: bool) -> None:
    assert_rows_right(Positions(lead), torch.randint(0, 9, (4, time)))


@pytest.mark.parametrize("lead", [False, True])
def test_one_position(lead: bool) -> None:
    """(1, D) beside (B, 1, D): with a batch dim in dim 0 it would broadcast to (B, B, D)."""
    assert_rows_right(Positions(lead), torch.randint(0, 9, (4, 1)))


@pytest.mark.parametrize("sizes", [(4, 1), (4, 8), (3, 3), (3, 6), (2, 5), (1, 5), (6, 3)])
def test_position_ids_when_batch_and_time_change(sizes: tuple[int, int]) -> None:
    model = Positions(lead=False).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for batch, time in ((4, 4), sizes, (4, 8)):
        ours.zero_grad()
        assert_rows_right(model, torch.randint(0, 9, (batch, time)), converted=ours)


class Table(nn.Module):
    """A table of as many rows as the batch has samples, through a layer and then looked up."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(rows, 4, dtype=torch.float64))
        self.fc, self.x = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 5)
        return torch.tanh(self.x(x)).unsqueeze(1) + self.fc(self.table.unsqueeze(0))


@pytest.mark.parametrize("rows", [4, 8, 3])
def test_table(rows: int) -> None:
    assert_rows_right(Table(rows), torch.randn(4, 5, dtype=torch.float64))


class Flat(nn.Module):
    """(B, T, D) through a layer as rows (B * T, D), batch-major or time-major."""

    def __init__(self, time_major: bool) -> None:
        super().__init__()
        self.fc, self.norm, self.out, self.time_major = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 2),
            time_major,
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dims = x.shape
        rows = (x.transpose(0, 1) if self.time_major else x).reshape(-1, dims)
        rows = self.norm(torch.tanh(self.fc(rows)))
        x = (
            rows.reshape(time, batch, dims).transpose(0, 1)
            if self.time_major
            else rows.reshape(batch, time, dims)
        )
        return self.out(x)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("time", [1, 3, 4, 8])
def test_flattened_rows(time: int, time_major: bool) -> None:
    ours = assert_rows_right(Flat(time_major), torch.randn(4, time, 4, dtype=torch.float64))
    assert ps.report(ours).fast == 1  # attributed, and not merely run in a slower way


class Sequence(nn.Module):
    """Batch in dim 1 below a batch-first model."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.tanh(self.fc(x.transpose(0, 1))))).transpose(0, 1)


@pytest.mark.parametrize("time", [1, 3, 4, 8])
def test_batch_in_another_dim(time: int) -> None:
    ours = assert_rows_right(Sequence(), torch.randn(4, time, 4, dtype=torch.float64))
    assert ps.report(ours).fast == 1


@pytest.mark.parametrize("time", [1, 3, 4, 8])
def test_batch_second_model(time: int) -> None:
    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.fc, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:  # (T, B)
            x = torch.tanh(self.fc(self.emb(ids)))
            return self.out(x.reshape(-1, 4)).reshape(*ids.shape, 2) + self.out(x.mean(0))

    model, ids = Second().double(), torch.randint(0, 9, (time, 4))
    ours = ps.convert_model(copy.deepcopy(model), batch_first=False, loss_reduction="sum")
    direction = torch.linspace(-1, 2, time * 2, dtype=torch.float64).reshape(time, 1, 2)
    (ours(ids) ** 2 * direction).sum().backward()
    assert_rows(ours, true_rows(lambda i: (model(ids[:, i : i + 1]) ** 2 * direction).sum(), model, 4))


class Experts(nn.Module):
    """Rows are sent to experts by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        rows = x.reshape(-1, 4)
        first = rows[:, 0] > 0
        out = rows.new_zeros(len(rows), 2)
        out[first], out[~first] = self.a(rows[first]), self.b(rows[~first])
        return out.reshape(*x.shape[:2], 2)


@pytest.mark.filterwarnings("ignore:`Experts` .* is run sample by sample")
@pytest.mark.parametrize("sent", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("time", [2, 3])
def test_rows_picked_by_data(sent: int, time: int) -> None:
    """Also when an expert gets as many rows as the batch has samples, and a later batch is routed in another
    way.
    """
    model = Experts().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for count in (sent, 3, 4):
        x = torch.randn(4, time, 4, dtype=torch.float64)
        x[..., 0] = -1
        x.view(-1, 4)[torch.randperm(4 * time)[:count], 0] = 1
        ours.zero_grad()
        assert_rows_right(model, x, converted=ours)


class Permuted(nn.Module):
    """Samples in another order inside, as for packing by length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x.flatten(1).sum(1).argsort()
        return self.out(torch.tanh(self.inner(x[order]))[order.argsort()])


@pytest.mark.filterwarnings("ignore:`Permuted` .* is run sample by sample")
def test_samples_in_another_order() -> None:
    for _ in range(3):
        assert_rows_right(Permuted(), torch.randn(4, 3, 4, dtype=torch.float64))


class Rolled(nn.Module):
    """Sample i's output is made of sample i - 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)).roll(1, 0))


def test_samples_that_end_in_anothers_place_are_refused() -> None:
    with pytest.raises(ValueError, match="samples depend on rows that are not theirs"):
        ps.convert_model(Rolled().double())(torch.randn(4, 3, 4, dtype=torch.float64))


class Constants(nn.Module):
    """Floating tables, queries expanded to the batch, and a layer that starts at zero before rows are
    flattened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.query, self.zero, self.out = (nn.Linear(4, 4) for _ in range(4))
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)
        self.register_buffer("queries", torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        batch, time, _ = x.shape
        angles = torch.arange(time * 4, dtype=x.dtype).reshape(time, 4).sin()
        queries = self.query(self.queries.unsqueeze(1).repeat(1, batch, 1)).mean(0)  # (Q, B, 4)
        rows = self.out(self.zero(x.transpose(0, 1)).reshape(-1, 4)).reshape(time, batch, 4).transpose(0, 1)
        return x * self.table(angles) + queries.unsqueeze(1) * x + rows


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("time", [3, 4, 8])
def test_constants_and_dead_features(batch: int, time: int) -> None:
    model = Constants().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for t in (time, 4, 3):
        ours.zero_grad()
        assert_rows_right(model, torch.randn(batch, t, 4, dtype=torch.float64), converted=ours)


def test_batch_of_equal_ids_teaches_nothing_wrong() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1)).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for ids in (torch.zeros(4, dtype=torch.long), torch.tensor([1, 2, 3, 0]), torch.full((4,), 4)):
        ours.zero_grad()
        assert_rows_right(model, ids, converted=ours)


def test_shared_vector_that_changes_how_things_broadcast() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.gate = nn.Linear(4, 4), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.gate(torch.ones(3, dtype=x.dtype))

    for time in (3, 4):
        assert_rows_right(Gate(), torch.randn(4, time, 4, dtype=torch.float64))


def test_calls_that_are_not_recorded_do_not_shift_the_others() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.fc(x)
            return self.fc(x.transpose(0, 1)).transpose(0, 1) - target

    for time in (3, 4):
        assert_rows_right(Twice(), torch.randn(4, time, 4, dtype=torch.float64))


def test_random_stream_and_buffers_are_those_of_the_plain_model() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = Flat(time_major=True), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(self.drop(x))

    model = Noisy().double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(4, 8, 4, dtype=torch.float64)
    for _ in range(2):
        torch.manual_seed(5)
        expected = model(x), torch.rand(3)
        torch.manual_seed(5)
        torch.testing.assert_close((ours(x), torch.rand(3)), expected)
    assert ours.calls == 2  # what other runs have left, the first attempt among them, is taken back


# how many numbers they draw depends on the values
BY_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "torch.rrelu": lambda x: torch.rrelu(x, 0.1, 0.5, True),
    "rrelu_": lambda x: F.rrelu_(x.clone(), training=True),
    "poisson": lambda x: x + torch.poisson(x.exp().detach()),
    "binomial": lambda x: x + torch.binomial(torch.full_like(x, 3), x.sigmoid().detach()),
    "Gamma": lambda x: x + Gamma(x.exp(), 1.0).rsample(),
    "Beta": lambda x: x + Beta(x.exp(), 1.0).rsample(),
    "Dirichlet": lambda x: x + Dirichlet(x.exp()).rsample(),
}


@pytest.mark.parametrize("shape", [(4, 4, 4), (3, 4, 4), (4, 4)])
@pytest.mark.parametrize("name", BY_VALUES)
def test_more_or_fewer_random_numbers(name: str, shape: tuple[int, ...]) -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return BY_VALUES[name](x)

    model = nn.Sequential(nn.Linear(4, 4), Drawing(), nn.Linear(4, 3)).double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(*shape, dtype=torch.float64)
    for seed in (0, 1):
        torch.manual_seed(seed)
        losses = squares(model(x))
        torch.manual_seed(seed)
        ours.zero_grad()
        found = squares(ours(x))
        found.mean().backward()
        torch.testing.assert_close(found, losses)
        assert_rows(ours, true_rows(lambda i: losses[i], model, len(x)))  # noqa: B023


def test_example_at_conversion_tracks_before_training() -> None:
    model, x = Flat(time_major=True).double(), torch.randn(4, 8, 4, dtype=torch.float64)
    ours, calls = copy.deepcopy(model), []
    ours.fc.register_forward_hook(lambda *_: calls.append(1))
    ps.convert_model(ours, example=x)
    calls.clear()
    assert_rows_right(model, x, converted=ours)
    assert len(calls) == 1


def test_example_that_cannot_be_attributed_leaves_the_model_untouched() -> None:
    model = Rolled().double()
    before = dict(model.named_parameters())
    with pytest.raises(ps.ConversionError, match="cannot be converted, and has not been changed"):
        ps.convert_model(model, example=torch.randn(4, 3, 4, dtype=torch.float64))
    assert type(model) is Rolled and type(model.inner) is nn.Linear
    assert dict(model.named_parameters()) == before and not any(p.__dict__ for p in model.parameters())


class Packs(nn.Module):
    """Packs sequences, sorting them by length itself or leaving that to torch."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.lstm, self.out, self.own = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2), own

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[..., 0] != 0).sum(1).clamp(1)
        order = lengths.argsort(descending=True) if self.own else torch.arange(len(x))
        packed = pack_padded_sequence(x[order], lengths[order], batch_first=True, enforce_sorted=self.own)
        last = self.lstm(packed)[1][0][-1]
        return self.out(last[order.argsort()])


@pytest.mark.filterwarnings("ignore:`Packs` .* is run sample by sample")
@pytest.mark.parametrize("own", [False, True])
def test_packed_sequences_inside_a_model(own: bool) -> None:
    model = Packs(own).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for lengths in ((2, 5, 1, 3), (3, 1, 5, 2), (4, 4, 5, 1)):
        x = torch.randn(4, 5, 4, dtype=torch.float64)
        for i, length in enumerate(lengths):
            x[i, length:] = 0
        ours.zero_grad()
        assert_rows_right(model, x, converted=ours)


class Asked(nn.Module):
    """A question (B, T) about an image, packed by its lengths (B,), as in visual question answering."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.look = nn.Embedding(11, 4), nn.Linear(3, 4)
        self.gru, self.each = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, *, image: Tensor, question: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(question), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        there = torch.arange(h.shape[1]) < lengths[:, None]
        return (self.each(h) * there[..., None]).sum(1) * self.look(image)


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (4, 1, 2, 3), (2, 4, 1, 4)])
@pytest.mark.parametrize("order", [*itertools.permutations(("image", "question", "lengths"))])
def test_packed_tokens_that_are_not_given_first(order: tuple[str, ...], lengths: tuple[int, ...]) -> None:
    """As many tokens as samples."""
    given = {
        "image": torch.randn(4, 3, dtype=torch.float64),
        "question": torch.randint(0, 11, (4, 4)),
        "lengths": torch.tensor(lengths),
    }
    model = Asked().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for _ in range(2):
        ours.zero_grad()
        squares(ours(**{name: given[name] for name in order})).mean().backward()
        one = {i: {name: t[i : i + 1] for name, t in given.items()} for i in range(4)}
        assert_rows(ours, true_rows(lambda i: squares(model(**one[i])).sum(), model, 4))  # noqa: B023


class TwoTowers(nn.Module):
    """Returns the similarities of all pairs, in which samples interact, beside what belongs to one sample
    each; as CLIP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.a(x) + self.shift, self.b(y)
        return self.scale.exp() * a @ b.T, a, b


@pytest.mark.parametrize("size", [2, 3, 4, 1])
def test_an_output_in_which_samples_interact_beside_others(size: int) -> None:
    model = TwoTowers().double()
    ours = ps.convert_model(copy.deepcopy(model))
    x, y = torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 5, dtype=torch.float64)
    for _ in range(2):
        ours.zero_grad()
        _, a, b = ours(x, y)
        (a.square().sum(1) + b.square().sum(1)).mean().backward()
        assert_rows(ours, loop(model, lambda out, _: out[1].square().sum() + out[2].square().sum(), (x, y)))
    if size > 1:
        with pytest.raises(RuntimeError, match=r"`scale` received a gradient .* in which samples interact"):
            ours(x, y)[0].sum().backward()


def test_only_an_output_in_which_samples_interact() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.fc(x)
            return z @ z.T

    with pytest.raises(ValueError, match="samples interact in it"):
        ps.convert_model(Pairs())(torch.randn(3, 4))


@pytest.mark.parametrize(("size", "time"), [(3, 3), (3, 4), (2, 6)])
@pytest.mark.parametrize("time_major", [False, True])
def test_flattened_outputs(size: int, time: int, time_major: bool) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.fc = nn.Embedding(7, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            z = self.fc(torch.tanh(self.tok(ids)))
            return (z.transpose(0, 1) if time_major else z).reshape(-1, 3)

    model = Flat().double()
    ours, ids = ps.convert_model(copy.deepcopy(model)), torch.randint(0, 7, (size, time))
    out = ours(ids)
    out = out.view(time, size, 3).transpose(0, 1) if time_major else out.view(size, time, 3)
    out.square().sum((1, 2)).mean().backward()
    assert_rows(ours, loop(model, lambda out, _: out.square().sum(), (ids,)))


class Routed(nn.Module):
    """Experts that pick rows; with one sample an expert may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.key = nn.Linear(4, 4)  # used past its layer alone

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.linear(x, self.key.weight).reshape(-1, 4)
        chosen, out = self.router(rows).argmax(-1), torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(rows[chosen == i])
        return out.view(x.shape)


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (1, 1)])
def test_a_first_batch_of_one(sizes: tuple[int, int]) -> None:
    model = Routed().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in sizes:
        ours.zero_grad()
        x = torch.randn(size, 2, 4, dtype=torch.float64)
        ours(x).square().sum((1, 2)).mean().backward()
        assert_rows(ours, loop(model, lambda out, _: out.square().sum(), (x,)))


@pytest.mark.parametrize("channels", [2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_samples_that_are_standardised_first(size: int, channels: int) -> None:
    """Time series whose channels go into the batch, as PatchTST: what tracking changes in a sample must
    outlive that.
    """

    class Standardises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.fc, self.out, self.tok = (
                nn.Linear(4, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 2),
                nn.Parameter(torch.randn(6)),
            )

        def forward(self, x: Tensor) -> Tensor:  # (B, 8, C)
            x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
            h = self.emb(x.transpose(1, 2).unflatten(-1, (2, 4))) + self.tok
            return self.out(torch.tanh(self.fc(h.flatten(0, 1)))).unflatten(0, (len(x), -1))

    assert_rows_right(Standardises(), torch.randn(size, 8, channels, dtype=torch.float64))


class Masked(nn.Module):
    """Forbids values by -inf; a sample whose first input is positive has none left, so it is NaN (padding on
    the left).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        forbidden = x[:, :1] > 0
        h = torch.softmax(self.fc(x).masked_fill(forbidden, -torch.inf), -1)
        return self.scale * nn.functional.linear(h, self.out.weight)


@pytest.mark.parametrize("nans", [0, 1, 2, 3])
def test_a_sample_that_is_not_a_number_says_nothing_of_the_others(nans: int) -> None:
    model = Masked().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for count in (nans, 0):
        ours.zero_grad()
        x = -torch.rand(3, 4, dtype=torch.float64)
        x[:count, 0] = 1
        ours(x).square().sum(1).mean().backward()
        assert_rows(ours, loop(model, lambda out, _: out.square().sum(), (x,)), equal_nan=True)


def test_a_batch_that_is_not_a_number_proves_nothing() -> None:
    class Interacts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return h * h.mean(0)

    ours = ps.convert_model(Interacts())
    ours(torch.full((3, 4), torch.nan)).sum().backward()
    with pytest.raises(ValueError, match="samples interact in it"):
        ours(torch.randn(3, 4))


class Rounded(nn.Module):
    """In single precision within a model in double, as experts are that compute all their rows at once: how a
    row is rounded depends on the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, dtype=torch.float64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        all_rows = h.detach().abs().sum()
        return ((h + all_rows) - all_rows).to(x) * self.w


def test_rounding_that_depends_on_others_is_no_interaction() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Rounded(), nn.Linear(4, 4), Rounded()).double()
    x = torch.randn(3, 3, 4, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general")
    squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)), rtol=1e-5, atol=1e-5)


class OfStates(nn.Module):
    """A second input has the batch in dim 1: states, from which a recurrent layer begins, or steps."""

    def __init__(self, steps: bool) -> None:
        super().__init__()
        self.steps, self.layer, self.query = steps, nn.Linear(4, 4), nn.Linear(3, 4)
        self.rnn = nn.GRU(3, 4, 2, batch_first=True)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        h = self.layer(states)
        if not self.steps:
            return self.rnn(x, h)[0][:, -1]
        weights = (h * self.query(x[:, 0])).sum(-1).softmax(0)
        return (weights.unsqueeze(-1) * h).sum(0)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2, 1, 3), (2, 3, 4), (5, 3, 5)])
def test_a_second_input_with_the_batch_in_dim_1(steps: bool, sizes: tuple[int, ...]) -> None:
    """Whatever the first batch's size is: as many as layers, or not."""
    model = OfStates(steps).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in sizes:
        x, states = torch.randn(n, 5, 3).double(), torch.randn(5 if steps else 2, n, 4).double()
        ours.zero_grad()
        ours(x, states).square().sum(1).mean().backward()
        each = [model(x[i : i + 1], states[:, i : i + 1]).square().sum() for i in range(n)]
        assert_rows(ours, true_rows(each.__getitem__, model, n))


class Token(nn.Module):
    """A parameter for each sample, of which it is told how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, size: int) -> Tensor:
        return self.weight.expand(size, 1, -1)


class Categories(nn.Module):
    """Columns of categories, each looked up in a table of its own, beside numbers and a token."""

    def __init__(self, *entries: int) -> None:
        super().__init__()
        self.token, self.numbers, self.out = Token(), nn.Linear(1, 4), nn.Linear(4, 2)
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in entries)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        looked_up = torch.stack([table(categories[:, i]) for i, table in enumerate(self.tables)], 1)
        token = self.token(len(numbers))
        return self.out(
            torch.tanh(torch.cat([token, self.numbers(numbers[..., None]), looked_up], 1).mean(1))
        )


@pytest.mark.parametrize(("entries", "row"), [((3, 5), [2, 4]), ((5, 3), [4, 0]), ((1, 3), [0, 2])])
def test_a_first_batch_in_which_all_samples_have_the_same_categories(
    entries: tuple[int, ...], row: list[int]
) -> None:
    """Nobody else's can be looked up in their place, and those of the next column may have no entry."""
    model = Categories(*entries).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in (3, 8):
        numbers = torch.randn(size, 4, dtype=torch.float64)
        ours.zero_grad()
        assert_rows_right(model, numbers, torch.tensor([row] * size), converted=ours)


class Crossed(nn.Module):
    """A weight of its own, without a replacement."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class IdsAmongNumbers(nn.Module):
    """Ids and numbers in one tensor, as libraries for click-through rates have them."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.crossed = nn.Embedding(50, 4), nn.Embedding(40, 4), Crossed()

    def forward(self, x: Tensor) -> Tensor:
        user, item = self.user(x[:, 0].long()), self.item(x[:, 1].long())
        return self.crossed(torch.cat([user, item, x[:, 2:]], 1))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ids_among_numbers(size: int) -> None:
    """What is near to an id may be none: another sample's is one."""
    model = IdsAmongNumbers().double()
    for seed in range(4):
        torch.manual_seed(seed)
        ids = torch.stack([torch.randint(25, 50, (size,)), torch.randint(20, 40, (size,))], 1)
        x = torch.cat([ids.double(), torch.randn(size, 2, dtype=torch.float64)], 1)
        assert_rows_right(model, x, converted=ps.convert_model(copy.deepcopy(model)))


class OfLengths(nn.Module):
    """Lengths say how long the batch is, which step is the last, in which order samples are."""

    def __init__(self, way: str, own: bool) -> None:
        super().__init__()
        self.way, self.tok, self.rnn = way, nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.rand(4)) if own else 1.0

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        h = self.tok(ids).sin()
        if self.way == "parts":
            h = pad_sequence([h[i, : lengths[i]] for i in range(len(h))], batch_first=True)
        elif self.way == "last":
            h = self.rnn(h[:, : int(lengths.max())])[0][torch.arange(len(h)), lengths - 1].unsqueeze(1)
        else:
            order = torch.arange(len(h))
            if self.way == "sorted":
                lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(h[order], lengths, batch_first=True, enforce_sorted=False)
            h = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][order.argsort()]
        h = h * self.scale
        return self.out(h) if self.way == "parts" else self.out(h.reshape(-1, 4)).view(*h.shape[:2], 2)


@pytest.mark.parametrize("first", [(5, 5, 5), (3, 3, 3), (4, 4, 4), (2, 2), (1, 1, 1)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("way", ["flat", "last", "sorted", "parts"])
def test_a_first_batch_of_one_length(way: str, own: bool, first: tuple[int, ...]) -> None:
    """Runs on trial leave one of that length: in a batch of shorter ones all would be of other shapes."""
    model = OfLengths(way, own).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for each in (first, (4, 4, 4, 4), (2, 5, 3)):
        ids, lengths = torch.randint(0, 9, (len(each), 5)), torch.tensor(each)

        def loss(output: Tensor, lengths: Tensor) -> Tensor:
            steps = torch.arange(output.shape[1]) < lengths.unsqueeze(1)
            return (output.sin() * steps.unsqueeze(2)).sum((1, 2))

        ours.zero_grad()
        loss(ours(ids, lengths), lengths).mean().backward()

        def of(i: int, ids: Tensor = ids, lengths: Tensor = lengths) -> Tensor:
            return loss(model(ids[i : i + 1], lengths[i : i + 1]), lengths[i : i + 1]).sum()

        assert_rows(ours, true_rows(of, model, len(each)))


class Counted(nn.Module):
    """As many rows of each sample as is said, in a way that is not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        h, places = self.before(x), torch.arange(x.shape[1]).numpy()
        mine = (places[None] < counts.numpy()[:, None]).reshape(-1).nonzero()[0]
        rows = self.out(h.reshape(-1, 4)[mine]).sin()
        ids = torch.arange(len(x)).repeat_interleave(counts)
        return torch.zeros(len(x), 2, dtype=x.dtype).index_add(0, ids, rows)


@pytest.mark.parametrize("first", [(3, 3, 3), (2, 2), (1, 1, 1, 1)])
def test_equal_counts_of_the_first_batch_teach_nothing_wrong(first: tuple[int, ...]) -> None:
    model = Counted().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for each in (first, (1, 5, 3), (4, 1), (5, 1, 2, 4)):
        x, counts = torch.randn(len(each), 5, 3).double(), torch.tensor(each)
        ours.zero_grad()
        try:
            squares(ours(x, counts)).mean().backward()
        except (ValueError, RuntimeError):
            continue
        assert_rows(ours, loop(model, square, (x, counts)))
