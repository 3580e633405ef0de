"""A further input has rows of which data say whose they are: as many of each sample in one batch, in another
not, though there may be as many in all.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import pslayers as ps

from ..combinations import every
from ..oracle import true_rows

Join = Callable[["Joined", Tensor, Tensor, Tensor], Tensor]
T, D = 6, 4


def _scattered(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    return h.masked_scatter(mask.unsqueeze(-1), rows)


def _written(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    h = h.clone()
    h[mask] = rows
    return h


def _by_number(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    place = mask.flatten().nonzero().squeeze(1)
    return h.flatten(0, 1).index_copy(0, place, rows).view_as(h)


def _pooled(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    owner = torch.arange(len(h)).repeat_interleave(mask.sum(1))
    return h + h.new_zeros(len(h), D).index_add(0, owner, rows)[:, None]


def _split(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    parts = rows.split(mask.sum(1).tolist())
    return h + torch.stack([part.square().sum(0) for part in parts])[:, None]


def _by_offsets(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    ends = mask.sum(1).cumsum(0)
    sums = torch.cat([rows.new_zeros(1, D), rows.cumsum(0)])
    return h + (sums[ends] - sums[ends - mask.sum(1)])[:, None]


def _product(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    owner = torch.arange(len(h)).repeat_interleave(mask.sum(1))
    return h + (nn.functional.one_hot(owner, len(h)).T.to(rows) @ rows)[:, None]


def _slices(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    ends = [0, *(int(n) for n in mask.to(rows).sum(1).cumsum(0))]
    return h + torch.stack([rows[a:b].sum(0) for a, b in itertools.pairwise(ends)])[:, None]


def _listed(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    return h.masked_scatter(mask.unsqueeze(-1), torch.cat([row[None] for row in rows]))


def _looked_up(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    place = mask.flatten().cumsum(0).view_as(mask) * mask
    return h + nn.functional.embedding(place, torch.cat([rows.new_zeros(1, D), rows]))


def _weighted(m: "Joined", h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    owner = torch.arange(len(h)).repeat_interleave(mask.sum(1))
    weights = rows.sum(1, keepdim=True).exp()
    sums = h.new_zeros(len(h), 1).index_add(0, owner, weights)
    return h + h.new_zeros(len(h), D).index_add(0, owner, weights / sums[owner] * rows)[:, None]


JOINS: dict[str, Join] = {
    "weighted": _weighted,
    "product": _product,
    "slices": _slices,
    "listed": _listed,
    "looked-up": _looked_up,
    "scattered": _scattered,
    "written": _written,
    "by-number": _by_number,
    "pooled": _pooled,
    "split": _split,
    "by-offsets": _by_offsets,
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.unflatten(1, (-1, 2)))[0][:, -1]


class Packed(nn.Module):
    """Sequences of one or two steps, as their first number says."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.gru, self.whole = nn.GRU(2, D, batch_first=True), whole

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):  # which cannot be packed
            return x
        lengths = (x[:, 0] > 0).long() + 1
        steps = pack_padded_sequence(x.unflatten(1, (-1, 2)), lengths, batch_first=True, enforce_sorted=False)
        y, h = self.gru(steps)
        return pad_packed_sequence(y, batch_first=True)[0].sum(1) if self.whole else h[-1]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, 2))
        return self.attention(parts, parts, parts, need_weights=False)[0].flatten(1)


VISION: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "own": nn.Identity,  # a parameter of the whole model's
    "packed": lambda: Packed(whole=True),
    "packed-state": lambda: Packed(whole=False),
    "recurrent": Recurrent,
    "cell": Cell,
    "attention": Attention,
}


class Joined(nn.Module):
    """Texts, with images (k, D) in the places of some tokens of theirs."""

    def __init__(self, join: Join, vision: str = "linear") -> None:
        super().__init__()
        self.vision = VISION[vision]()
        self.tokens, self.head = nn.Embedding(9, D), nn.Linear(D, 3)
        self.scale, self.join = nn.Parameter(torch.rand(D)), join
        self.own = nn.Parameter(torch.rand(D, D)) if vision == "own" else None

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        images = images if self.own is None else images @ self.own
        h = self.join(self, self.tokens(ids), self.vision(images).tanh(), ids == 0)
        return self.head(torch.tanh(h * self.scale))


def _batch(*counts: int) -> tuple[Tensor, Tensor]:
    """Texts with so many images each."""
    ids = torch.randint(1, 9, (len(counts), T))
    for text, count in zip(ids, counts, strict=True):
        text[torch.randperm(T)[:count]] = 0
    return ids, torch.randn(sum(counts), D, dtype=torch.float64)


def _rows(model: nn.Module, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for text, own in zip(ids, images.split((ids == 0).sum(1).tolist()), strict=True):
        loss = model(text[None], own).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            rows[name].append(grad)
    return {name: torch.stack(each) for name, each in rows.items()}


def _assert_right(model: nn.Module, ours: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    ours.zero_grad()
    ours(*batch).square().sum().backward()
    for name, rows in _rows(model, *batch).items():
        torch.testing.assert_close(
            ours.get_parameter(name).grad_sample, rows, rtol=1e-8, atol=1e-10, msg=name
        )


PAIRS = [
    *((name, "linear") for name in JOINS),
    *itertools.product(["product", "scattered", "split", "looked-up"], list(VISION)[1:]),
]


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize(
    ("name", "vision", "first"),
    every(6, ((*pair, first) for first in ((2, 2, 2), (1, 1, 1)) for pair in PAIRS)),
)
def test_as_many_rows_in_all_but_not_of_each_sample(name: str, vision: str, first: tuple[int, ...]) -> None:
    """Right, or refused; and right again after it was refused."""
    torch.manual_seed(0)
    model = Joined(JOINS[name], vision).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    _assert_right(model, ours, _batch(*first))
    for counts in ((1, 3, 2), (2, 1, 0), first, (3, 1), (2, 0), first):
        batch = _batch(*counts)
        if 0 in counts and vision.startswith("packed"):  # torch packs no empty sequences
            continue
        try:
            _assert_right(model, ours, batch)
        except ValueError:
            assert len(set(counts)) > 1


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize(
    ("vision", "counts", "name"),
    every(
        11,
        itertools.product(
            VISION,
            [(0, 0, 1, 1, 1, 1, 2, 2), (0, 0, 4, 2, 2, 2, 2, 4), (5, 0, 0, 0, 4, 3, 2, 2)],
            ["scattered", "written", "by-number", "listed"],
        ),
    ),
)
def test_a_first_batch_whose_first_samples_have_no_rows(
    name: str, counts: tuple[int, ...], vision: str
) -> None:
    """What a few samples teach is true of those that have rows."""
    model = Joined(JOINS[name], vision).double()
    ours, batch = ps.convert_model(copy.deepcopy(model), loss_reduction="sum"), _batch(*counts)
    with contextlib.suppress(ValueError):
        _assert_right(model, ours, batch)


class Told(nn.Module):
    """Which rows are whose is told by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, text: Tensor, images: Tensor, counts: list[int]) -> Tensor:
        parts = self.vision(images).split(counts)
        return self.text(text).tanh() * torch.stack([part.square().sum(0) for part in parts])


def test_told_by_a_list() -> None:
    model = Told().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for counts in ([2, 2, 2], [1, 4, 1], [2, 2, 2]):
        text, images = (torch.randn(n, D, dtype=torch.float64) for n in (3, 6))
        ours.zero_grad()
        ours(text, images, counts).square().sum().backward()
        for i, own in enumerate(images.split(counts)):
            loss = model(text[i : i + 1], own, [len(own)]).square().sum()
            (row,) = torch.autograd.grad(loss, model.vision.weight)
            torch.testing.assert_close(ours.vision.weight.grad_sample[i], row)


def test_what_data_have_told_before_is_not_proved_again() -> None:
    ours, runs = ps.convert_model(Joined(_scattered)), []
    ours.join = lambda *args: runs.append(1) or _scattered(*args)
    for _ in range(3):
        runs.clear()
        ids = torch.randint(1, 9, (3, T))
        ids[:, torch.randperm(T)[:2]] = 0
        ours(ids, torch.randn(6, D)).sum().backward()
    assert len(runs) == 1


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize("first", [(1, 3, 2), (2, 2, 2)])
@pytest.mark.parametrize("vision", ["packed", "packed-state", "own", "recurrent"])
def test_a_first_batch_with_others_in_a_samples_place(vision: str, first: tuple[int, ...]) -> None:
    model = Joined(_split, vision).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for counts in (first, (2, 2, 2), (3, 2, 1)):
        batch = _batch(*counts)
        try:
            _assert_right(model, ours, batch)
        except ValueError:
            assert len(set(counts)) > 1


class Sequences(nn.Module):
    """Packed sequences, several a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.gru = nn.Linear(D, D), nn.GRU(2, D, batch_first=True)

    def forward(self, text: Tensor, sequences: PackedSequence, counts: Tensor) -> Tensor:
        parts = self.gru(sequences)[1][-1].split(counts.tolist())
        return self.text(text).tanh() * torch.stack([part.square().sum(0) for part in parts])


def test_packed_sequences_of_several_a_sample() -> None:
    model = Sequences().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")

    def packed(x: Tensor, lengths: Tensor) -> PackedSequence:
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)

    for counts in ((2, 2, 2), (1, 4, 1), (3, 3), (2, 2, 2)):
        x, lengths = torch.randn(sum(counts), 4, 2).double(), torch.randint(1, 5, (sum(counts),))
        text = torch.randn(len(counts), D, dtype=torch.float64)
        ours.zero_grad()
        try:
            ours(text, packed(x, lengths), torch.tensor(counts)).square().sum().backward()
        except ValueError:
            assert len(set(counts)) > 1
            continue
        assert len(set(counts)) == 1
        for i, (own, steps) in enumerate(zip(x.split(counts), lengths.split(counts), strict=True)):
            y = model(text[i : i + 1], packed(own, steps), torch.tensor([len(own)]))
            for p, row in zip(
                ours.parameters(), torch.autograd.grad(y.square().sum(), [*model.parameters()]), strict=True
            ):
                torch.testing.assert_close(p.grad_sample[i], row)


class Counted(torch.autograd.Function):
    """Counts the passes back."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Counted.passes += 1
        return grad


class Encoders(nn.Module):
    """Two texts and their lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.gru = nn.Embedding(9, D), nn.GRU(D, D, batch_first=True)
        self.scale = nn.Parameter(torch.rand(D))

    def _pooled(self, ids: Tensor, lengths: Tensor) -> Tensor:
        steps = pack_padded_sequence(self.tokens(ids), lengths, batch_first=True, enforce_sorted=False)
        return (pad_packed_sequence(self.gru(steps)[0], batch_first=True)[0] * self.scale).sum(1)

    def forward(self, one: Tensor, other: Tensor, lengths: Tensor, other_lengths: Tensor) -> Tensor:
        return Counted.apply(torch.cat([self._pooled(one, lengths), self._pooled(other, other_lengths)], -1))


class Masked(nn.Module):
    """A text and its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, D), nn.Parameter(torch.randn(T, D))
        self.head = nn.Linear(D, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.tokens(ids) + self.places
        return Counted.apply(self.head((h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)))


@pytest.mark.parametrize("kind", [Encoders, Masked])
def test_ordinary_further_inputs_are_not_proved_again(kind: type[nn.Module]) -> None:
    """With as many samples as features, so that shapes do not tell."""
    model = kind().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for _ in range(3):
        lengths = torch.randint(1, T, (2, D))
        inputs = [*torch.randint(0, 9, (2, D, T)), *lengths]
        if kind is Masked:
            inputs = [inputs[0], (torch.arange(T) < lengths[0][:, None]).double()]
        ours.zero_grad()
        Counted.passes = 0
        ours(*inputs).square().sum().backward()
        passes = Counted.passes
        for i in range(D):
            loss = model(*[t[i : i + 1] for t in inputs]).square().sum()
            for p, row in zip(
                ours.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                torch.testing.assert_close(p.grad_sample[i], row)
    assert passes == 1


class Positions(nn.Module):
    """Adds what a table of positions holds at the place of each patch, between its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(D, 3, 3))

    def forward(self, patches: Tensor, grid: Tensor, row: Tensor, column: Tensor) -> Tensor:
        owner = torch.arange(len(grid)).repeat_interleave(grid.prod(1))
        places = torch.stack([column / grid[owner, 1], row / grid[owner, 0]], -1).to(patches)[None, :, None]
        found = nn.functional.grid_sample(self.table[None], 2 * places - 1, align_corners=False)
        return patches + found[0, :, :, 0].T


class Tower(nn.Module):
    """Images (h, w) of each sample as patches of all: each image attends to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions, self.mixed = nn.Linear(2, D), Positions(), nn.Linear(D, D)
        self.tokens, self.head = nn.Embedding(9, D), nn.Linear(D, 2)

    def forward(self, ids: Tensor, patches: Tensor, grid: Tensor) -> Tensor:
        row = torch.cat([torch.arange(h).repeat_interleave(w) for h, w in grid.tolist()])
        column = torch.cat([torch.arange(w).repeat(h) for h, w in grid.tolist()])
        h = self.positions(self.patch(patches), grid, row, column)
        counts = grid.prod(1).tolist()
        each = [(part @ part.T).softmax(-1) @ part for part in self.mixed(h.tanh()).split(counts)]
        pooled = torch.stack([part.mean(0) for part in torch.cat(each).split(counts)])
        return self.head(torch.tanh(self.tokens(ids).sum(1) + pooled))


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
def test_positions_of_patches_that_data_tell() -> None:
    """No sample's size can be changed alone, so that nothing is seen of what is made of it."""
    model = Tower().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for n, (h, w) in ((3, (2, 3)), (4, (2, 3)), (2, (3, 4)), (3, (2, 3)), (1, (2, 2))):
        ids, grid = torch.randint(0, 9, (n, 5)), torch.tensor([[h, w]] * n)
        patches = torch.randn(n * h * w, 2, dtype=torch.float64)
        ours.zero_grad()
        ours(ids, patches, grid).square().sum().backward()
        for i, own in enumerate(patches.split(h * w)):
            loss = model(ids[i : i + 1], own, grid[i : i + 1]).square().sum()
            for (name, p), row in zip(
                ours.named_parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                torch.testing.assert_close(p.grad_sample[i], row, msg=lambda m, name=name: f"{name}: {m}")


class Cut(nn.Module):
    """A table that all samples share, flattened and cut to the length; outputs are multiplied by a mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.out = kind, nn.Linear(D, 2)
        self.table = nn.Embedding(9, D) if "embedding" in kind else nn.Linear(D, D)
        self.places: Tensor
        self.register_buffer("places", torch.randn(1, 9, D))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        given = torch.arange(9)[None] if "embedding" in self.kind else self.places
        table, time = self.table(given), x.shape[1]
        if "heads" in self.kind:
            table = table.view(1, -1, 2, D // 2).transpose(1, 2)[..., :time, :].transpose(1, 2).flatten(2)
        else:
            table = table.view(-1, D)[:time] if "flat" in self.kind else table.reshape(1, -1, D)[:, :time]
        return self.out((x + table).tanh()) * mask[:, None, None]


@pytest.mark.parametrize(
    "kind", [f"{what} {how}" for what in ("linear", "embedding") for how in ("flat", "one", "heads")]
)
@pytest.mark.parametrize("first", [(5, 0), (0, 5), (5, 0, 0), (5, 0, 0, 0), (5, 0, 1), (0, 0)])
def test_a_first_batch_that_tells_of_one_sample_alone(kind: str, first: tuple[int, ...]) -> None:
    """Of copies of what all samples share values do not tell whose they are, and zeros tell nothing."""
    torch.manual_seed(0)
    model = Cut(kind).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for mask in (first, (5, 3, 4, 2), (2, 0), (1, 2)):
        x, m = torch.randn(len(mask), 5, D, dtype=torch.float64), torch.tensor(mask)

        def loss(i: int, x: Tensor = x, m: Tensor = m) -> Tensor:
            return model(x[i : i + 1], m[i : i + 1]).square().sum()

        expected = true_rows(loss, model, len(x), zeros=True)
        ours.zero_grad()
        ours(x, m).square().sum().backward()
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name], msg=name)
