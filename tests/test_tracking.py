"""Rows whose owner the shape does not tell: attributed by tracking, or refused; never silently wrong."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from .oracle import assert_rows_right


class Positions(nn.Module):
    """Positions (T,) or (1, T), as GPT-like models look them up."""

    def __init__(self, lead: bool) -> None:
        super().__init__()
        self.tok, self.pos, self.out, self.lead = nn.Embedding(9, 4), nn.Embedding(12, 4), nn.Linear(4, 3), lead

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        return self.out(torch.tanh(self.tok(ids) + self.pos(positions.unsqueeze(0) if self.lead else positions)))


@pytest.mark.parametrize("lead", [False, True])
@pytest.mark.parametrize("time", [3, 4, 8, 5])
def test_position_ids(time: int, lead: bool) -> None:
    assert_rows_right(Positions(lead), torch.randint(0, 9, (4, time)))


def test_one_shared_row_that_no_longer_broadcasts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`Positions`.*\(4, 4, 3\)\] instead of \[\(4, 1, 3\)\].*unsqueeze"):
        ps.convert_model(Positions(lead=False))(torch.randint(0, 9, (4, 1)))
    assert_rows_right(Positions(lead=True), torch.randint(0, 9, (4, 1)))


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
        self.fc, self.norm, self.out, self.time_major = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2), time_major

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dims = x.shape
        rows = (x.transpose(0, 1) if self.time_major else x).reshape(-1, dims)
        rows = self.norm(torch.tanh(self.fc(rows)))
        x = rows.reshape(time, batch, dims).transpose(0, 1) if self.time_major else rows.reshape(batch, time, dims)
        return self.out(x)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("time", [1, 3, 4, 8])
def test_flattened_rows(time: int, time_major: bool) -> None:
    assert_rows_right(Flat(time_major), torch.randn(4, time, 4, dtype=torch.float64))


class Sequence(nn.Module):
    """Batch in dim 1 below a batch-first model."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.tanh(self.fc(x.transpose(0, 1))))).transpose(0, 1)


@pytest.mark.parametrize("time", [1, 3, 4, 8])
def test_batch_in_another_dim(time: int) -> None:
    assert_rows_right(Sequence(), torch.randn(4, time, 4, dtype=torch.float64))


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
    for i in range(4):
        loss = (model(ids[:, i : i + 1]) ** 2 * direction).sum()
        for p, g in zip(ours.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            torch.testing.assert_close(p.grad_sample[i], g)


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


@pytest.mark.parametrize("sent", [1, 2, 3, 4, 5, 8])
def test_rows_picked_by_data_are_refused(sent: int) -> None:
    ours = ps.convert_model(Experts().double())
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    x[..., 0] = -1
    x.view(12, 4)[torch.randperm(12)[:sent], 0] = 1
    if sent in (4, 8):  # as many rows as samples: only tracking can tell
        x[..., 0] = -1
        x.view(12, 4)[:sent, 0] = 1
    with pytest.raises(ValueError, match=r"cannot be attributed to samples.*batch_first.*example"):
        ours(x)


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
    assert ours.calls == 3  # the attempt, and two real calls: the tracking ones are taken back


def test_example_at_conversion_tracks_before_training() -> None:
    model, x = Flat(time_major=True).double(), torch.randn(4, 8, 4, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model), example=x)
    calls = []
    ours.fc.register_forward_hook(lambda *_: calls.append(1))
    assert_rows_right(model, x, converted=ours)
    assert len(calls) == 1


def test_example_that_cannot_be_attributed_leaves_the_model_untouched() -> None:
    model = Experts().double()
    before = dict(model.named_parameters())
    with pytest.raises(ps.ConversionError, match="cannot be attributed"):
        ps.convert_model(model, example=torch.randn(4, 3, 4, dtype=torch.float64))
    assert type(model) is Experts and type(model.a) is nn.Linear
    assert dict(model.named_parameters()) == before and not any(p.__dict__ for p in model.parameters())
