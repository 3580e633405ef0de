"""What is particular to PSLSTM, PSGRU and PSRNN; the oracle is torch's layer called on each sample by
itself.
"""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import pslayers as ps

from ..oracle import members, square, squares, true_rows
from .suite import Case, LayerSuite, floats, if_torch_can

I, H, T, B = 3, 4, 5, 4
KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": functools.partial(nn.RNN, nonlinearity="tanh"),
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def pair(kind: str = "lstm", **options: Any) -> tuple[nn.RNNBase, nn.RNNBase]:
    plain = KINDS[kind](I, H, **options).double()
    return plain, ps.convert_model(copy.deepcopy(plain))


def state(layer: nn.RNNBase, n: int) -> Any:
    """As the layer's user holds it: (h, c), or h."""
    count = layer.num_layers * (1 + layer.bidirectional)
    h, c = (
        torch.randn(count, n, width, dtype=torch.float64, requires_grad=True)
        for width in (layer.proj_size or H, H)
    )
    return (h, c) if isinstance(layer, nn.LSTM) else h


def parts(hx: Any) -> tuple[Tensor, ...]:
    return (hx,) if isinstance(hx, Tensor) else hx


def each(hx: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """`fn` of each part of a state."""
    return fn(hx) if isinstance(hx, Tensor) else tuple(fn(s) for s in hx)


def loss_of(output: Tensor, *states: Tensor) -> Tensor:
    """The loss of one sample: output (T, O), states (L * D, ...)."""
    time = torch.arange(1.0, len(output) + 1, dtype=output.dtype).unsqueeze(1)
    return (output * time).sin().sum() + (states[0] ** 2).sum() + sum(c.cos().sum() for c in states[1:])


def losses(layer: nn.RNNBase, result: Any) -> Tensor:
    """The losses (B,) of a batch."""
    output, hx = result
    if isinstance(output, PackedSequence):
        padded, lengths = pad_packed_sequence(output, batch_first=True)
        outputs = [o[:t] for o, t in zip(padded, lengths, strict=True)]
    else:
        outputs = list(output if layer.batch_first else output.transpose(0, 1))
    return torch.stack([loss_of(o, *(s[:, i] for s in parts(hx))) for i, o in enumerate(outputs)])


def loop(layer: nn.RNNBase, sequences: list[Tensor], hx: Any = None, **options: bool) -> dict[str, Tensor]:
    """{name: (B, *shape)}, from one call of torch's layer for each sequence (T, I)."""

    def loss(i: int) -> Tensor:
        output, final = layer(sequences[i], None if hx is None else each(hx, lambda s: s[:, i]))
        return loss_of(output, *parts(final))

    return true_rows(loss, layer, len(sequences), **options)


def assert_rows(layer: nn.Module, expected: dict[str, Tensor], reduction: str = "mean") -> None:
    for name, p in layer.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_sample, expected[name])
            torch.testing.assert_close(getattr(p.grad_sample, reduction)(0), p.grad)
        else:
            assert p.grad_sample is None and p.grad is None


@given(
    kind=st.sampled_from(list(KINDS)),
    num_layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    proj_size=st.sampled_from([0, 2]),
    given_state=st.booleans(),
    form=st.sampled_from(["batch", "sorted", "unsorted"]),
    reduction=st.sampled_from(["mean", "sum"]),
)
@settings(max_examples=150, deadline=None)
def test_rows(
    kind: str, given_state: bool, form: str, reduction: str, proj_size: int, **options: Any
) -> None:
    layer, _ = pair(kind, **options, **({"proj_size": proj_size} if kind == "lstm" else {}))
    ours = ps.convert_model(copy.deepcopy(layer), loss_reduction=reduction)
    lengths = {"batch": [T] * B, "sorted": [5, 3, 3, 1], "unsorted": [2, 5, 1, 5]}[form]
    sequences = [torch.randn(t, I, dtype=torch.float64) for t in lengths]
    x = (
        torch.stack(sequences, 0 if layer.batch_first else 1)
        if form == "batch"
        else pack_sequence(sequences, form == "sorted")
    )
    hx = state(layer, B) if given_state else None
    result, expected = ours(x, hx), layer(x, hx)
    torch.testing.assert_close(tuple(result[0]), tuple(expected[0]))
    torch.testing.assert_close(result[1], expected[1])
    assert type(result[0]) is type(expected[0])
    getattr(losses(ours, result), reduction)().backward()
    ours_hx = None if hx is None else [s.grad for s in parts(hx)]
    assert_rows(ours, loop(layer, sequences, hx), reduction)
    if hx is not None:
        theirs = torch.autograd.grad(getattr(losses(layer, expected), reduction)(), parts(hx))
        torch.testing.assert_close(ours_hx, list(theirs))


@kinds
@pytest.mark.parametrize("form", ["batch", "packed"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_is_that_of_torch(kind: str, form: str, bidirectional: bool) -> None:
    """The masks are torch's: one layer after the other, with the masks drawn from the same seed, gives
    torch's output.
    """
    layer, ours = pair(kind, num_layers=3, dropout=0.4, bidirectional=bidirectional)
    lengths = [T] * B if form == "batch" else [4, 3, 3, 1]
    sequences = [torch.randn(t, I, dtype=torch.float64) for t in lengths]
    x = torch.stack(sequences, 1) if form == "batch" else pack_sequence(sequences)
    width = 2 * H if bidirectional else H
    torch.manual_seed(5)
    expected = layer(x)
    torch.manual_seed(5)
    result = ours(x)
    torch.testing.assert_close(tuple(result[0]), tuple(expected[0]))
    torch.testing.assert_close(result[1], expected[1])
    losses(ours, result).mean().backward()

    torch.manual_seed(5)
    shape = (T, B, width) if form == "batch" else (len(x.data), width)
    masks = [F.dropout(torch.ones(shape, dtype=torch.float64), 0.4) for _ in range(2)]
    if form == "packed":
        masks = [pad_packed_sequence(PackedSequence(m, x.batch_sizes))[0] for m in masks]
    singles = []
    for number in range(3):
        single = KINDS[kind](width if number else I, H, bidirectional=bidirectional).double()
        suffix = f"_l{number}"
        own = {k.replace(suffix, "_l0"): p for k, p in layer.state_dict().items() if suffix in k}
        single.load_state_dict(own)
        singles.append(single)

    def loss(i: int) -> Tensor:
        y, finals = sequences[i], []
        for number, single in enumerate(singles):
            y, final = single(y)
            y = y * masks[number][: len(y), i] if number < 2 else y
            finals.append(parts(final))
        value = loss_of(y, *(torch.cat(states) for states in zip(*finals, strict=True)))
        torch.testing.assert_close(value, losses(layer, expected)[i])
        return value

    named = {
        k.replace("_l0", f"_l{number}"): p
        for number, m in enumerate(singles)
        for k, p in m.named_parameters()
    }
    assert_rows(ours, true_rows(loss, named, B))


def test_frozen_weights() -> None:
    for frozen in (
        ["weight_ih_l0"],
        ["weight_hh_l0", "bias_ih_l0"],
        ["bias_hh_l0", "weight_hr_l0", "weight_ih_l0"],
    ):
        layer, ours = pair(proj_size=2)
        for net in (layer, ours):
            for name in frozen:
                net.get_parameter(name).requires_grad_(False)
        x = torch.randn(T, B, I, dtype=torch.float64)
        losses(ours, ours(x)).mean().backward()
        assert_rows(ours, loop(layer, list(x.transpose(0, 1))))


@kinds
@pytest.mark.parametrize("batch_first", [False, True])
def test_unbatched(kind: str, batch_first: bool) -> None:
    layer, ours = pair(kind, batch_first=batch_first, bidirectional=True)
    x, hx = torch.randn(T, I, dtype=torch.float64), each(state(layer, 1), lambda s: s[:, 0])
    for given_hx in (None, hx):
        ours.zero_grad()
        result = ours(x, given_hx)
        torch.testing.assert_close(result, layer(x, given_hx))
        loss_of(result[0], *parts(result[1])).backward()
        assert_rows(
            ours, loop(layer, [x], None if given_hx is None else each(given_hx, lambda s: s.unsqueeze(1)))
        )


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("form", ["(T, I)", "(T, 1, I)", "packed"])
@kinds
def test_one_sequence_is_shared_by_all(kind: str, form: str, batch_first: bool) -> None:
    layer, ours = pair(kind, batch_first=batch_first)
    x = torch.randn(T, I, dtype=torch.float64)
    given: Any = {
        "(T, I)": x,
        "(T, 1, I)": x.unsqueeze(0 if batch_first else 1),
        "packed": pack_sequence([x]),
    }[form]
    with ps.batch_size(B):
        result = ours(given)
    factor = torch.arange(1.0, B + 1)
    (losses(ours, result) * factor).mean().backward()
    expected = loop(layer, [x] * B)
    assert_rows(ours, {k: g * factor.view(-1, *[1] * (g.ndim - 1)) for k, g in expected.items()})


@kinds
def test_one_state_is_shared_by_all(kind: str) -> None:
    layer, ours = pair(kind)
    x, hx = torch.randn(T, B, I, dtype=torch.float64), state(layer, 1)
    losses(ours, ours(x, hx)).mean().backward()
    assert_rows(ours, loop(layer, list(x.transpose(0, 1)), each(hx, lambda s: s.expand(-1, B, -1))))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("form", ["batch", "packed"])
@kinds
def test_several_sequences_a_sample(kind: str, form: str, batch_first: bool) -> None:
    layer, ours = pair(kind, batch_first=batch_first, bidirectional=True)
    lengths = [T] * 2 * B if form == "batch" else [1, 5, 2, 5, 3, 1, 4, 2]
    sequences = [torch.randn(t, I, dtype=torch.float64) for t in lengths]
    x = (
        torch.stack(sequences, 0 if batch_first else 1)
        if form == "batch"
        else pack_sequence(sequences, False)
    )
    with ps.batch_size(B):
        result = ours(x)
    losses(ours, result).view(B, 2).sum(1).mean().backward()
    assert_rows(ours, {k: g.unflatten(0, (B, 2)).sum(1) for k, g in loop(layer, sequences).items()})


class Tagger(nn.Module):
    """The batch is in dim 0 of the model and in dim 1 of its recurrent layer, where windows make k sequences
    a sample.
    """

    def __init__(self, kind: str, windows: int, batch_minor: bool) -> None:
        super().__init__()
        self.rnn, self.out, self.windows, self.batch_minor = (
            KINDS[kind](I, H),
            nn.Linear(H, 2),
            windows,
            batch_minor,
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, windows * T, I)
        windows = x.unflatten(1, (self.windows, -1))
        rows = windows.transpose(0, 1).flatten(0, 1) if self.batch_minor else windows.flatten(0, 1)
        y = parts(self.rnn(rows.transpose(0, 1))[1])[0][0]  # (windows * B, H)
        y = (
            y.unflatten(0, (self.windows, -1)).sum(0)
            if self.batch_minor
            else y.unflatten(0, (-1, self.windows)).sum(1)
        )
        return self.out(y)


@pytest.mark.parametrize(("windows", "batch_minor"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("time", [2, 3])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_inside_a_batch_first_model(kind: str, windows: int, batch_minor: bool, time: int) -> None:
    model = Tagger(kind, windows, batch_minor).double()
    x = torch.randn(3, windows * time, I, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    (ours(x) ** 2).sum(1).mean().backward()
    assert_rows(ours, true_rows(lambda i: (model(x[i : i + 1]) ** 2).sum(), model, 3))


@kinds
def test_wrong_inputs(kind: str) -> None:
    layer, ours = pair(kind)
    name = type(ours).__name__
    x = torch.randn(T, 7, I, dtype=torch.float64)
    with (
        ps.batch_size(B),
        pytest.raises(
            ValueError,
            match=rf"\({name}\).*shape \(7, 5, 3\).*batch of 4.*expected 4 rows.*batch_first=False",
        ),
    ):
        ours(x)
    for wrong in (
        (torch.randn(T, B, I + 1).double(),),
        (torch.randn(T, B, I),),
        (torch.randn(2, T, B, I).double(),),
        (torch.randn(0, B, I).double(),),
        (x, state(layer, 3)),
        (x, each(state(layer, 1), lambda s: s[:, 0])),
        (x[:, 0], state(layer, 1)),
    ):
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            layer(*wrong)
        with pytest.raises(theirs.type) as ours_too:
            ours(*wrong)
        assert str(ours_too.value) == str(theirs.value)


@kinds
@pytest.mark.parametrize("n", [0, 1])
def test_empty_batch_and_batch_of_one(kind: str, n: int) -> None:
    _, ours = pair(kind, num_layers=2, bidirectional=True)
    x = torch.randn(T, n, I, dtype=torch.float64)
    output, _ = ours(x)
    output.sum().backward()
    assert output.shape == (T, n, 2 * H)
    for p in ours.parameters():
        assert p.grad_sample.shape == (n, *p.shape)
        torch.testing.assert_close(p.grad, p.grad_sample.sum(0))


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(kind: str, dtype: torch.dtype) -> None:
    layer = KINDS[kind](I, H, bidirectional=True).to(dtype)
    ours = ps.convert_model(copy.deepcopy(layer))
    x = torch.randn(T, B, I).to(dtype)
    torch.testing.assert_close(ours(x)[0], layer(x)[0], rtol=0, atol=0)
    losses(ours, ours(x)).mean().backward()
    expected = loop(copy.deepcopy(layer).double(), list(x.double().transpose(0, 1)))
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for name, p in ours.named_parameters():
        assert p.grad_sample.dtype == p.grad.dtype == dtype
        torch.testing.assert_close(
            p.grad_sample.double(),
            expected[name],
            rtol=tolerance,
            atol=tolerance * expected[name].abs().max(),
        )


@kinds
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(kind: str, backward_inside: bool) -> None:
    layer = KINDS[kind](I, H)
    ours, x = ps.convert_model(copy.deepcopy(layer)), torch.randn(T, B, I)
    with torch.autocast("cpu", torch.bfloat16):
        expected = if_torch_can(layer, x)
        result = ours(x)
        loss = losses(ours, result).mean()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    torch.testing.assert_close(result, expected)
    rows = loop(layer.double(), list(x.double().transpose(0, 1)))
    for name, p in ours.named_parameters():
        assert p.grad_sample.dtype == torch.float32
        torch.testing.assert_close(
            p.grad_sample.double(), rows[name], rtol=0.1, atol=0.1 * rows[name].abs().max()
        )


@kinds
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_can_be_differentiated(kind: str, reduction: str) -> None:
    layer, _ = pair(kind, bidirectional=True, **({"proj_size": 2} if kind == "lstm" else {}))
    ours = ps.convert_model(copy.deepcopy(layer), loss_reduction=reduction)
    sequences = [torch.randn(t, I, dtype=torch.float64) for t in (2, 5, 1, 5)]
    getattr(losses(ours, ours(pack_sequence(sequences, False))), reduction)().backward(create_graph=True)
    rows = [p.grad_sample for p in ours.parameters()]
    found = torch.autograd.grad(sum((g**3).sum() for g in rows), list(ours.parameters()))
    expected = list(loop(layer, sequences, create_graph=True).values())
    torch.testing.assert_close(rows, expected)
    total = sum((g**3).sum() for g in expected)
    torch.testing.assert_close(found, torch.autograd.grad(total, list(layer.parameters())))
    for p in ours.parameters():  # break the cycles of create_graph
        p.grad = p.grad_sample = None


@kinds
def test_functional_form_and_back(kind: str) -> None:
    layer, ours = pair(kind, num_layers=2, bidirectional=True)
    x = torch.randn(T, B, I, dtype=torch.float64)
    different = {
        k: torch.randn(B, *p.shape, dtype=torch.float64, requires_grad=True)
        for k, p in layer.named_parameters()
    }
    output, _ = torch.func.functional_call(ours, different, (x,))
    found = torch.autograd.grad(output.sin().sum(), list(different.values()))

    def loss(own: dict[str, Tensor], i: int) -> Tensor:
        y, _ = torch.func.functional_call(layer, own, (x[:, i : i + 1],))
        torch.testing.assert_close(output[:, i : i + 1], y)
        return y.sin().sum()

    torch.testing.assert_close(dict(zip(different, found, strict=True)), members(loss, different)[1])
    with torch.no_grad():
        torch.testing.assert_close(ours(x), layer(x))


@kinds
def test_copies_and_flat_weights(kind: str) -> None:
    layer, ours = pair(kind, bidirectional=True)
    x = torch.randn(T, B, I, dtype=torch.float64)
    losses(ours, ours(x)).mean().backward()
    for other in (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        ps.restore_model(copy.deepcopy(ours)),
    ):
        assert [id(w) for w in other._flat_weights] == [id(p) for p in other.parameters()]
        other.flatten_parameters()
        torch.testing.assert_close(other(x), layer(x))
    ours.weight_ih_l0 = nn.Parameter(torch.zeros_like(ours.weight_ih_l0))
    layer.weight_ih_l0 = nn.Parameter(torch.zeros_like(layer.weight_ih_l0))
    torch.testing.assert_close(ours(x), layer(x))
    ours.zero_grad()
    losses(ours, ours(x)).mean().backward()
    assert_rows(ours, loop(layer, list(x.transpose(0, 1))))


def suite_losses(suite: LayerSuite, output: Any, n: int) -> Tensor:
    out, hx = output
    flat = (
        torch.cat([out.reshape(n, -1), *(t.transpose(0, 1).reshape(n, -1) for t in parts(hx))], 1)
        if n
        else out.flatten(1)
    )
    return LayerSuite.losses(suite, flat, n)


class TestPSLSTM(LayerSuite):
    losses = suite_losses
    cases = [
        Case("plain", lambda: nn.LSTM(4, 3, batch_first=True), lambda n: (floats(n, 5, 4),)),
        Case("no-bias", lambda: nn.LSTM(4, 3, bias=False, batch_first=True), lambda n: (floats(n, 5, 4),)),
        Case("layers", lambda: nn.LSTM(4, 3, 2, batch_first=True), lambda n: (floats(n, 5, 4),)),
        Case(
            "bidirectional",
            lambda: nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True),
            lambda n: (floats(n, 4, 4),),
        ),
        Case(
            "projected",
            lambda: nn.LSTM(4, 3, batch_first=True, proj_size=2, bidirectional=True),
            lambda n: (floats(n, 5, 4),),
        ),
        Case("one-step", lambda: nn.LSTM(4, 3, batch_first=True), lambda n: (floats(n, 1, 4),)),
    ]


class TestPSGRU(LayerSuite):
    losses = suite_losses
    cases = [
        Case("plain", lambda: nn.GRU(4, 3, batch_first=True), lambda n: (floats(n, 5, 4),)),
        Case("no-bias", lambda: nn.GRU(4, 3, bias=False, batch_first=True), lambda n: (floats(n, 5, 4),)),
        Case(
            "layers",
            lambda: nn.GRU(4, 3, 2, batch_first=True, bidirectional=True),
            lambda n: (floats(n, 4, 4),),
        ),
        Case("one-step", lambda: nn.GRU(4, 3, batch_first=True), lambda n: (floats(n, 1, 4),)),
    ]


class TestPSRNN(LayerSuite):
    losses = suite_losses
    cases = [
        Case("tanh", lambda: nn.RNN(4, 3, batch_first=True), lambda n: (floats(n, 5, 4),)),
        Case("relu", lambda: nn.RNN(4, 3, 2, "relu", batch_first=True), lambda n: (floats(n, 5, 4),)),
        Case("no-bias", lambda: nn.RNN(4, 3, bias=False, batch_first=True), lambda n: (floats(n, 1, 4),)),
        Case(
            "layers",
            lambda: nn.RNN(4, 3, 2, batch_first=True, bidirectional=True),
            lambda n: (floats(n, 4, 4),),
        ),
    ]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("sizes", [(4, 3, 5), (3, 4), (2, 4, 8)])
def test_states_of_an_input_that_all_samples_share(kind: Any, sizes: tuple[int, ...]) -> None:
    """Layers times directions are as many as samples, for once."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompts, self.out = nn.Embedding(3, 6), nn.Linear(6, 2)
            self.rnn = kind(6, 3, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            made = self.rnn(self.prompts(torch.arange(3)).unsqueeze(0))[0].mean(1)
            return self.out(torch.tanh(x * made))  # type: ignore[no-any-return]

    model = Prompted().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in sizes:
        x = torch.randn(n, 6, dtype=torch.float64)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, true_rows(lambda i, x=x: square(model(x[i : i + 1]), i), model, n))
