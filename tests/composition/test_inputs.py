"""Kinds of inputs: ids, lengths, masks, packed sequences, states and positions, none at all."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

import pslayers as ps
from tests.oracle import assert_rows, loop, square, squares, true_rows

from .common import batch, both, right, right_or_refused


class PackedOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lstm = nn.Linear(3, 3), nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.lstm(pack_padded_sequence(self.fc(x), lengths, batch_first=True, enforce_sorted=False))[0]


def test_a_model_that_returns_a_packed_sequence() -> None:
    model, ours = both(PackedOut())
    for lengths in ([5, 2, 3], [1, 1, 4, 5], [2, 2]):
        x, n = batch(len(lengths), 5, 3), torch.tensor(lengths)
        ours.zero_grad()
        padded, _ = pad_packed_sequence(ours(x, n), batch_first=True)
        squares(padded).mean().backward()

        def loss(i: int, x: Tensor = x, n: Tensor = n, time: int = padded.shape[1]) -> Tensor:
            one = model(x[i : i + 1], n[i : i + 1])
            return square(pad_packed_sequence(one, batch_first=True, total_length=time)[0], 0)

        assert_rows(ours, true_rows(loss, model, len(x)))


class PackedBoth(nn.Module):
    """Packed sequences in and out, and the last states, which may be scaled by a parameter of its own."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.lstm, self.gru, self.own = nn.LSTM(3, 4, batch_first=True), nn.GRU(4, 2), own
        if own:
            self.scale = nn.Parameter(torch.ones(2) / 3)

    def forward(self, packed: PackedSequence) -> Any:
        packed, h = self.gru(self.lstm(packed)[0])
        if self.own == "of the sequences":
            packed = packed._replace(data=packed.data * self.scale)
        return packed, h[-1] * self.scale if self.own == "of the states" else h


@pytest.mark.parametrize("own", ["", "of none", "of the states", "of the sequences"])
def test_a_model_that_is_given_and_returns_packed_sequences(own: str) -> None:
    model, ours = both(PackedBoth(own))
    for lengths in ([5, 2, 3], [1, 1, 4, 5], [2, 2]):
        xs = [batch(1, length, 3)[0] for length in lengths]

        def squared(net: nn.Module, xs: list[Tensor]) -> Tensor:
            packed, h = net(pack_sequence(xs, enforce_sorted=False))
            return (packed.data**2).sum() + (h**2).sum()

        ours.zero_grad()
        if own == "of the sequences":
            with pytest.raises(ValueError, match="PackedSequence"):
                squared(ours, xs)
            return
        squared(ours, xs).div(len(xs)).backward()
        expected = true_rows(lambda i, xs=xs: squared(model, xs[i : i + 1]), model, len(xs), zeros=True)
        if own == "of none":
            assert ours.scale.grad_sample is None and not expected.pop("scale").any()
        assert_rows(ours, expected)


class MaskedBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        offsets = mask.sum(1).cumsum(0) - mask.sum(1)
        return self.fc(torch.tanh(self.bag(ids[mask], offsets)))


@pytest.mark.parametrize("first", range(4))
def test_bags_whose_offsets_come_from_a_mask(first: int) -> None:
    masks = [
        torch.ones(4, 4, dtype=torch.bool),
        torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
        torch.eye(4, dtype=torch.bool),
        torch.tensor([[1, 1, 0, 0]] * 3, dtype=torch.bool),
    ]
    model, ours = both(MaskedBags())
    for mask in (masks[first], *masks):
        ids = torch.randint(9, mask.shape)
        right_or_refused(ours, model, ids, mask)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag, self.fc = (
            nn.Embedding(9, 4, padding_idx=0),
            nn.EmbeddingBag(9, 4),
            nn.Linear(4, 2),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.table(ids).mean(1) + self.bag(ids)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_kind(dtype: torch.dtype) -> None:
    model, ours = both(Words())
    for n in (4, 4, 3, 1, 4):
        right(ours, model, torch.randint(9, (n, 5)).to(dtype))


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        # lengths of at least 1
        packed = pack_padded_sequence(x * self.scale, lengths, batch_first=True, enforce_sorted=False)
        return self.fc(self.lstm(packed)[1][0][-1])


def test_lengths_stay_lengths_in_runs_on_trial() -> None:
    model, ours = both(Lengths())
    for lengths in ([1, 1, 2], [5, 1, 3, 2], [1, 1]):
        right(ours, model, batch(len(lengths), 5, 3), torch.tensor(lengths))


@pytest.mark.parametrize("train", [False, True])
def test_an_empty_batch(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    _, ours = both(nn.Sequential(nn.Linear(3, 8), encoder, nn.Linear(8, 2)))
    ours.train(train)
    for n in (0, 3, 0, 1):
        x = batch(n, 5, 3)
        ours.zero_grad()
        ours(x).sum().backward()
        for p in ours.parameters():
            assert p.grad_sample.shape == (n, *p.shape)
            assert p.grad is not None


@pytest.mark.parametrize("name", ["linear", "conv", "embedding", "lstm", "norm", "attention"])
def test_several_gradients_at_once_through_the_functional_form(name: str) -> None:
    model, x = {
        "linear": (nn.Linear(3, 2), batch(4, 3)),
        "conv": (nn.Conv1d(3, 2, 3), batch(4, 3, 6)),
        "embedding": (nn.Embedding(5, 2), torch.randint(5, (4, 3))),
        "lstm": (nn.LSTM(3, 2, batch_first=True), batch(4, 5, 3)),
        "norm": (nn.LayerNorm(3), batch(4, 3)),
        "attention": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), batch(4, 3, 4)),
    }[name]
    model, ours = both(model)
    first: Any = (lambda out: out[0]) if name == "lstm" else (lambda out: out)
    weights = ps.expand_params(ours, 4)
    y = first(torch.func.functional_call(ours, weights, (x,)))
    directions = torch.randn(3, *y.shape, dtype=torch.float64)
    found = torch.autograd.grad(y, list(weights.values()), directions, is_grads_batched=True)
    for k, d in enumerate(directions):
        expected = true_rows(lambda i, d=d: (first(model(x[i : i + 1])) * d[i : i + 1]).sum(), model, 4)
        torch.testing.assert_close({name: f[k] for name, f in zip(weights, found, strict=True)}, expected)


class Images(nn.Module):
    """Writes features to the places that an integer mask says: as many as there are features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.image, self.head = nn.Embedding(50, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, image: Tensor, where: Tensor) -> Tensor:
        h = self.embed(ids)
        h[where.bool()] = self.image(image).view(-1, 4)
        return self.head(h)


def test_an_integer_mask_keeps_its_sum_on_trial() -> None:
    model, ours = both(Images())
    for n in (3, 2, 4):
        where = torch.zeros(n, 8, dtype=torch.long)
        where[:, 1:4] = 1
        right(ours, model, torch.randint(50, (n, 8)), batch(n, 3, 6), where)


class Sentence(nn.Module):
    """Takes packed sequences, and gives what is known at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, packed: Any) -> Tensor:
        return self.out(self.lstm(packed)[1][0][-1])


@pytest.mark.parametrize("lengths", [(3, 6, 2), (3, 6, 3), (2, 2, 2), (1, 5, 4, 2)])
def test_packed_sequences_given_to_a_model(lengths: tuple[int, ...]) -> None:
    model, ours = both(Sentence())
    sequences = [batch(n, 3) for n in lengths]
    for _ in range(2):
        ours.zero_grad()
        squares(ours(pack_sequence(sequences, enforce_sorted=False))).mean().backward()
        rows = true_rows(lambda i: square(model(pack_sequence([sequences[i]])), 0), model, len(sequences))
        assert_rows(ours, rows)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(9, 4)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return torch.tanh(self.words(ids) + self.places(places))


class Stated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, 2, batch_first=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        out, (h, _) = self.lstm(x, (h, c))
        return out, h


@pytest.mark.parametrize("sizes", [(4, 4), (3, 4), (4, 3)])
def test_positions_that_all_samples_share(sizes: tuple[int, int]) -> None:
    model, ours = both(Placed())
    for n in sizes:
        ids, places = torch.randint(9, (n, 4)), torch.arange(4)
        ours.zero_grad()
        squares(ours(ids, places)).mean().backward()
        rows = true_rows(lambda i, ids=ids, at=places: square(model(ids[i : i + 1], at), 0), model, n)
        assert_rows(ours, rows)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2)])
def test_states_of_as_many_layers_as_samples(sizes: tuple[int, int]) -> None:
    model, ours = both(Stated())
    for n in sizes:
        x, h, c = batch(n, 6, 4), batch(2, n, 5), batch(2, n, 5)
        ours.zero_grad()
        out, last = ours(x, h, c)
        (squares(out) + squares(last.transpose(0, 1))).mean().backward()

        def loss(i: int, x: Tensor = x, h: Tensor = h, c: Tensor = c) -> Tensor:
            own, end = model(x[i : i + 1], h[:, i : i + 1], c[:, i : i + 1])
            return square(own, 0) + square(end.transpose(0, 1)[0], 0)

        assert_rows(ours, true_rows(loss, model, n))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_a_batch_as_long_as_time_in_bfloat16(norm_first: bool) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Transformer(4, 1, 1, 1, 3, 0.0, norm_first=norm_first).bfloat16().eval()
        for p in model.parameters():
            p.data = torch.randn_like(p) / 2
        source, target = torch.randn(3, 3, 4).bfloat16(), torch.randn(3, 3, 4).bfloat16()
        ours = ps.convert_model(copy.deepcopy(model), batch_first=False, loss_reduction="sum")
        ours(source, target).square().cumsum(2).sin().sum().backward()

        # of the batch by torch's own kernels, as ours: near a kink of relu any rounding shows
        def loss(i: int, own: Any = model, given: Any = (source, target)) -> Tensor:
            return own(*given)[:, i].square().cumsum(1).sin().sum()

        for name, rows in true_rows(loss, model, 3).items():
            for found, g in zip(ours.get_parameter(name).grad_sample, rows, strict=True):
                assert (found - g).abs().max() < 0.3 * (g.abs().max() + 0.1), name


class Operator(nn.Module):
    """DeepONet with the points, which all functions share, as its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = nn.Linear(6, 4), nn.Linear(2, 4)

    def forward(self, points: Tensor, functions: Tensor) -> Tensor:
        return self.branch(functions) @ self.trunk(points).T  # type: ignore[no-any-return]


def test_outputs_of_all_pairs_of_two_inputs_do_not_tell_the_batch() -> None:
    model, points, functions = Operator().double(), batch(4, 2), batch(7, 6)
    ours = ps.convert_model(copy.deepcopy(model))
    with pytest.raises(ValueError, match="do not tell which of these is the batch size"):
        ours(points, functions)
    with ps.batch_size(7):
        output = ours(points, functions)
    squares(output).mean().backward()
    assert_rows(ours, true_rows(lambda i: square(model(points, functions[i : i + 1]), i), model, 7))


class Graph(nn.Module):
    """A graph, which all samples share, given first, and the samples' nodes (B, N, 3)."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3)) if own else None
        self.before, self.after = nn.Identity() if own else nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        x = self.before(x) if self.weight is None else x @ self.weight
        return self.after((edges @ x).tanh())  # type: ignore[no-any-return]


class Located(Graph):
    """The same of a vector for each node, and none of its neighbours."""

    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        return super().forward(torch.eye(x.shape[1], dtype=x.dtype), x * places.unsqueeze(-1))


@pytest.mark.parametrize("kind", [Graph, Located])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sizes", [((4, 4), (3, 4), (3, 3)), ((3, 4), (4, 4))])
def test_a_first_input_that_is_as_long_as_the_batch(
    kind: type[Graph], own: bool, sizes: tuple[tuple[int, int], ...]
) -> None:
    model, ours = both(kind(own))
    for size, nodes in sizes:
        first = batch(nodes, nodes) if kind is Graph else batch(nodes)
        x = batch(size, nodes, 3)
        ours.zero_grad()
        with ps.batch_size(size) if size != nodes else nullcontext():
            output = ours(first, x)
        squares(output).mean().backward()

        def loss(i: int, x: Tensor = x, first: Tensor = first) -> Tensor:
            return square(model(first, x[i : i + 1]), i)

        assert_rows(ours, true_rows(loss, model, size))


class TimeFirst(nn.Module):
    """Outputs (N, B, 2) of samples (B, N, 3) and what all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.after(edges @ self.before(x)).transpose(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("sizes", [((4, 4), (3, 4)), ((3, 4), (4, 4))])
def test_outputs_that_lie_otherwise_than_the_samples(sizes: tuple[tuple[int, int], ...]) -> None:
    model, ours = both(TimeFirst())
    for size, nodes in sizes:
        x, edges = batch(size, nodes, 3), batch(nodes, nodes)
        ours.zero_grad()
        with ps.batch_size(size):
            output = ours(x, edges)
        squares(output.transpose(0, 1)).mean().backward()

        def loss(i: int, x: Tensor = x, edges: Tensor = edges) -> Tensor:
            return square(model(x[i : i + 1], edges), i)

        assert_rows(ours, true_rows(loss, model, size))


class Queries(nn.Module):
    """Queries (1, Q, 3), which all samples share, given first; samples (B, T, 3), and positions (T, 3)."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.keys, self.out, self.flat = nn.Linear(3, 3), nn.Linear(3, 2), flat

    def forward(self, queries: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        keys = self.keys(x + positions)
        found = self.out((queries @ keys.transpose(1, 2)).softmax(-1) @ keys)
        return found.flatten(0, 1) if self.flat else found


def test_what_one_sample_tells_of_inputs_is_asked_again() -> None:
    model, ours = both(Queries(flat=False))
    queries, positions = batch(1, 2, 3), batch(5, 3)
    for size in (1, 3, 2, 1):
        x = batch(size, 5, 3)
        ours.zero_grad()
        squares(ours(queries, x, positions)).mean().backward()

        def loss(i: int, x: Tensor = x) -> Tensor:
            return square(model(queries, x[i : i + 1], positions), i)

        assert_rows(ours, true_rows(loss, model, size))
    with pytest.raises(ValueError, match="do not tell which of these is the batch size"):
        ps.convert_model(Queries(flat=True).double())(queries, batch(3, 5, 3), positions)


class Boxes(nn.Module):
    """Classes of parts of images: of each image its own, or the same of all."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, classes)

    def forward(self, images: Tensor, boxes: Any) -> Tensor:
        each = boxes if isinstance(boxes, list) else [boxes] * len(images)
        maps = zip(self.conv(images), each, strict=True)
        return self.out(torch.stack([m[:, a:b].amax((1, 2)) for m, own in maps for a, b in own.tolist()]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "classes"), [(2, 2), (3, 3), (2, 4)])
@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
def test_a_dim_of_classes_is_no_batch(count: int, classes: int, shared: bool) -> None:
    """The outputs have some rows of each image."""
    model, ours = both(Boxes(classes))
    for size in (4, 6):
        images, boxes = batch(size, 3, 8, 8), torch.tensor([[0, 3], [2, 8], [1, 5]])[:count]
        own = boxes if shared else [boxes + i % 2 for i in range(size)]

        def loss(i: int, images: Tensor = images, own: Any = own) -> Tensor:
            return squares(model(images[i : i + 1], own if isinstance(own, Tensor) else own[i : i + 1])).sum()

        ours.zero_grad()
        (squares(ours(images, own)).sum() / size).backward()
        assert_rows(ours, true_rows(loss, model, size))


def test_rows_of_one_image_are_not_taken_for_samples() -> None:
    ours, boxes = ps.convert_model(Boxes(2).double()), torch.tensor([[0, 3], [2, 8], [1, 5]])
    for own in (boxes, [boxes]):
        with pytest.raises(ValueError, match="do not tell which of these is the batch size"):
            ours(batch(1, 3, 8, 8), own)
    with ps.batch_size(1):
        ours(batch(1, 3, 8, 8), boxes).sum().backward()
    assert len(ours.conv.weight.grad_sample) == 1


class StateFirst(nn.Module):
    """A recurrent layer's state (1, B, R), then the batch (B, T, F)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, state: Tensor, x: Tensor) -> Any:
        return self.rnn(x, state)


class Flattened(nn.Module):
    """Words (B, T, 3) and two layers' states, to all words' scores (B * T, 2) and states (2, B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> Any:
        found, last = self.rnn(x, state[0])
        return self.out(found.reshape(-1, 4)), last


def test_states_of_one_sample_do_not_tell_the_batch() -> None:
    model, ours = both(Flattened())
    for size in (1, 3, 1):
        x, state = batch(size, 5, 3), batch(2, size, 4)
        ours.zero_grad()
        (ours(x, (state,))[0].square().sum() / size).backward()
        each = [
            model(x[i : i + 1], (state[:, i : i + 1].contiguous(),))[0].square().sum() for i in range(size)
        ]
        assert_rows(ours, true_rows(each.__getitem__, model, size))


class ListOfImages(nn.Module):
    """Images of several heights, padded to the highest."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, images: list[Tensor]) -> Tensor:
        padded = images[0].new_zeros(len(images), 1, 8, 6)
        for place, image in zip(padded, images, strict=True):
            place[:, : image.shape[1]].copy_(image)
        return self.out(self.conv(padded).sin().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
def test_what_has_one_row_first_is_not_the_whole_batch() -> None:
    model, ours = both(StateFirst())
    for size in (6, 4):
        state, x = batch(1, size, 4), batch(size, 5, 3)
        ours.zero_grad()
        squares(ours(state, x)[0]).mean().backward()
        each = [square(model(state[:, i : i + 1], x[i : i + 1])[0], i) for i in range(size)]
        assert_rows(ours, true_rows(each.__getitem__, model, size))
    listed, ours = both(ListOfImages())
    for size in (6, 4):
        images = [batch(1, 8 - i % 3, 6) for i in range(size)]
        ours.zero_grad()
        squares(ours(images)).mean().backward()
        each = [square(listed([image]), i) for i, image in enumerate(images)]
        assert_rows(ours, true_rows(each.__getitem__, listed, size))


class OfLists(nn.Module):
    """Sentences as lists of numbers, of which it makes tensors itself."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.rand(4)) if own else 2.0

    def forward(self, sentences: list[list[int]]) -> Tensor:
        ids = pad_sequence([torch.tensor(sentence) for sentence in sentences], batch_first=True)
        return self.out(self.rnn(self.table(ids))[0][:, 0] * self.scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_that_is_given_lists(reduction: str) -> None:
    """Each layer is given tensors; rows of a parameter of its own cannot be told."""
    sentences = [[5, 7], [3], [7, 4, 4, 2]]
    model = OfLists(own=False).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction=reduction)
    with ps.batch_size(3):
        losses = squares(ours(sentences))
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    assert_rows(ours, true_rows(lambda i: square(model(sentences[i : i + 1]), i), model, 3))
    ours = ps.convert_model(OfLists(own=True).double(), loss_reduction=reduction)
    with ps.batch_size(3), pytest.raises(ValueError, match="it is given no tensor"):
        ours(sentences)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * self.scale * mask.unsqueeze(-1)


class Masks(nn.Module):
    """A part with a parameter of its own, given a mask that holds the batch in one way or another."""

    def __init__(self, how: str, time_first: bool) -> None:
        super().__init__()
        self.before, self.part, self.how, self.time_first = nn.Linear(3, 4), Masked(), how, time_first

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.before(x)
        if self.how == "turned":
            return self.part(h.transpose(0, 1), mask.t()).transpose(0, 1)  # type: ignore[no-any-return]
        if self.how == "flat":
            return self.part(h.flatten(0, 1), mask.flatten()).view_as(h)  # type: ignore[no-any-return]
        if self.how == "heads":
            dim = int(self.time_first)
            several = self.part(h.repeat_interleave(2, dim), mask.repeat_interleave(2, dim))
            return several.unflatten(dim, (-1, 2)).sum(dim + 1)  # type: ignore[no-any-return]
        return self.part(h, mask)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("error:.*is run sample by sample")
@pytest.mark.parametrize("how", ["as it is", "turned", "flat", "heads"])
@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("time", [4, 5, 8])
def test_masks_that_hold_the_batch(how: str, time_first: bool, time: int) -> None:
    model, ours = both(Masks(how, time_first), batch_first=not time_first)
    for n in (4, 3, 1, 5):
        x, mask, dim = batch(n, time, 3), torch.arange(time) < torch.randint(1, time, (n, 1)), 0
        if time_first:
            x, mask, dim = x.transpose(0, 1), mask.t(), 1
        ours.zero_grad()
        ours(x, mask).square().transpose(0, dim).flatten(1).sum(1).mean().backward()

        def loss(i: int, x: Tensor = x, mask: Tensor = mask, dim: int = dim) -> Tensor:
            return model(*(t.narrow(dim, i, 1) for t in (x, mask))).square().sum()  # type: ignore[no-any-return]

        assert_rows(ours, true_rows(loss, model, n))


class Padded(nn.Module):
    """Torch's own layout: ids (T, B), and a mask of padding (B, T)."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        self.place = nn.Parameter(torch.rand(4)) if own else 0.0

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.out(self.attention(self.table(ids) + self.place, src_key_padding_mask=mask))  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("time", [4, 5])
def test_a_mask_of_padding_beside_ids_with_the_batch_in_dim_1(own: bool, time: int) -> None:
    model, ours = both(Padded(own), batch_first=False)
    for n in (4, 3, 5, 1):
        ids, mask = torch.randint(9, (time, n)), torch.arange(time) >= torch.randint(1, time, (n, 1))
        ours.zero_grad()
        ours(ids, mask).square().sum((0, 2)).mean().backward()

        def loss(i: int, ids: Tensor = ids, mask: Tensor = mask) -> Tensor:
            return model(ids[:, i : i + 1], mask[i : i + 1]).square().sum()  # type: ignore[no-any-return]

        assert_rows(ours, true_rows(loss, model, n))


class Towers(nn.Module):
    """Similarities of what it is given, of all pairs."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)
        if deep:
            self.other = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))  # type: ignore[assignment]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.one(x) @ self.other(y).t()  # type: ignore[no-any-return]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("n", [3, 9])
def test_a_shared_input_that_looks_like_the_batch(deep: bool, n: int) -> None:
    """It may be other samples', which then interact: nobody but the user knows, who is told."""
    model, ours = both(Towers(deep))
    x, y = batch(n, 6), batch(n, 6)
    with pytest.warns(UserWarning, match="samples interact"):
        squares(ours(x, y)).mean().backward()
    assert_rows(ours, true_rows(lambda i: square(model(x[i : i + 1], y), 0), model, n))
    ours.zero_grad()
    squares(ours(x, y)).mean().backward()  # once is enough


class Image(Tensor):
    """As fastai has them: each op gives one again."""


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.GroupNorm(2, 4), lambda: nn.LayerNorm((4, 4))])
def test_inputs_of_a_class_of_ones_own_and_activations_in_place(norm: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))
    model, ours = both(nn.Sequential(*model, nn.ReLU(inplace=True)))
    for n in (5, 3):
        x = batch(n, 2, 6, 6)
        ours.zero_grad()
        output = ours(x.as_subclass(Image))
        assert type(output) is Image
        squares(output).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))
