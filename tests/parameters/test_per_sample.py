"""Modules whose parameters are replaced by tensors that stand for one of each sample: right, and only where
that is certain.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from pslayers.parameters.per_sample import NoRuleError, PerSample

from ..combinations import every
from ..oracle import assert_rows_right, members, squares
from .test_op_dispatch import Leaf

SEQUENCE, IMAGE = (5, 4), (4, 5, 6)


class Windows(nn.Module):
    """Several rows a sample, to which a table gives a bias, as Swin's windows have it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = Leaf(lambda x, table: x + table[torch.arange(3) % 2][:, 1:].unsqueeze(0), table=(2, 5))

    def forward(self, x: Tensor) -> Tensor:  # (B, 6, 4): two windows of 3 a sample
        return self.bias(x.unflatten(1, (2, 3)).flatten(0, 1)).unflatten(0, (len(x), 2)).flatten(1, 2)


class Tokens(nn.Module):
    """A token computed from a parameter, in front of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.transpose(0, 1).reshape(1, 1, 8).expand(len(x), -1, -1)
        return torch.cat([token[..., :4].sigmoid(), x], 1)


class Returned(nn.Module):
    """Positions from a table, returned as they are, without a batch dim or with one of 1."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.positions = Leaf(lambda x, table: table[..., : x.shape[1], :], table=(*dims, 7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.positions(x)


class Cached(nn.Module):
    """Position biases that may be kept from call to call, as LeViT keeps them."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.table, self.keep, self.kept = nn.Parameter(torch.randn(9)), keep, dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        bias = self.kept.get("bias")
        if bias is None:
            bias = self.table[torch.arange(5)[:, None] + torch.arange(4)]
        if self.keep:
            self.kept["bias"] = bias
        return x * bias


def _in_place(x: Tensor, w: Tensor) -> Tensor:
    x = x * 2
    x *= w.view(1, -1, 1, 1)
    x.add_(w.reshape(4, 1, 1))
    return x


def _kept(x: Tensor, w: Tensor) -> Tensor:
    assert w.shape == (4, 3) and w.size(0) == len(w) == 4 and w.ndim == w.dim() == 2 and w.numel() == 12
    assert (
        w.dtype == x.dtype
        and w.device == x.device
        and w.is_floating_point()
        and w.requires_grad >= torch.is_grad_enabled()
    )
    return x @ w


DIRECT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "scale-of-channels": (lambda: Leaf(lambda x, w: x.mul(w.reshape(1, -1, 1, 1)), w=(4,)), IMAGE),
    "scale-in-place": (lambda: Leaf(_in_place, w=(4,)), IMAGE),
    "numbers-and-parameters": (
        lambda: Leaf(lambda x, a, b: x + (2 * a.view(4, 1) + b / 3 - 1).exp().mT, a=(4,), b=(4, 5)),
        SEQUENCE,
    ),
    "functions": (
        lambda: Leaf(lambda x, w: x * F.softplus(w.view(4, 1, 1)).clamp(max=1.5).to(x), w=(4,)),
        IMAGE,
    ),
    "transposed-weight": (lambda: Leaf(lambda x, w, b: F.linear(x, w.t(), b), w=(4, 3), b=(3,)), SEQUENCE),
    "of-the-batch's-kind": (
        lambda: Leaf(lambda x, w, b: x.type_as(w) @ w.type_as(x) + b.to(x, copy=True), w=(4, 3), b=(3,)),
        SEQUENCE,
    ),
    "permuted-weight": (
        lambda: Leaf(lambda x, w: x * w.permute(2, 0, 1).contiguous(), w=(5, 4, 1)),
        SEQUENCE,
    ),
    "reads": (lambda: Leaf(_kept, w=(4, 3)), SEQUENCE),
    "beside-what-is-shared": (
        lambda: Leaf(
            lambda x, q, v, w: F.linear(x, w, torch.cat([q, torch.zeros_like(x[0, 0, :2]), v])),
            q=(2,),
            v=(2,),
            w=(6, 4),
        ),
        SEQUENCE,
    ),
    "stacked": (lambda: Leaf(lambda x, a, b: x @ torch.stack([a, b], -1), a=(4,), b=(4,)), SEQUENCE),
    "windows": (Windows, (6, 4)),
    "returned": (lambda: Returned(()), SEQUENCE),
    "returned-with-a-batch-dim": (lambda: Returned((1,)), SEQUENCE),
    "tokens": (Tokens, SEQUENCE),
}


@pytest.mark.parametrize("name", DIRECT)
def test_rows_are_right(name: str) -> None:
    build, shape = DIRECT[name]
    model = build().double()
    ours = assert_rows_right(model, torch.randn(3, *shape, dtype=torch.float64))
    assert "direct" in {row.way for row in ps.report(ours).rows}, str(ps.report(ours))
    assert ps.report(ours).fast == 1
    for n in (4, 2, 5, 6, 1):
        ours.zero_grad()
        assert_rows_right(model, torch.randn(n, *shape, dtype=torch.float64), converted=ours)


# forwards of which a look at shapes would hold some batch sizes right, and others wrong
CONST = torch.randn(4, 4, dtype=torch.float64)
OTHERS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]], tuple[int, ...]]] = {
    "times-what-is-shared": (lambda x, w: x @ (CONST * w), {"w": (4,)}, SEQUENCE),
    "expanded-to-what-is-shared": (lambda x, w: x + w.expand(4, 4).cumsum(0).sum(0), {"w": (1, 4)}, SEQUENCE),
    "time-major": (
        lambda x, w: (x.transpose(0, 1) * w.exp().view(1, 1, 4)).transpose(0, 1),
        {"w": (4,)},
        SEQUENCE,
    ),
    "time-major-by-rows": (
        lambda x, w: (x.transpose(0, 1).reshape(-1, 4) @ w).view(5, len(x), -1).transpose(0, 1),
        {"w": (4, 2)},
        SEQUENCE,
    ),
    "weight-on-the-left": (lambda x, w: torch.einsum("oi,nti->nto", w, x), {"w": (3, 4)}, SEQUENCE),
    "one-of-several": (
        lambda x, w: (
            F.linear(x, w[0]) + F.linear(x, w[torch.tensor(2)]) * F.linear(x, w[-2]) + F.linear(x, w[2])
        ),
        {"w": (4, 3, 4)},
        SEQUENCE,
    ),
    "written-by-index": (
        lambda x, w: x.index_add(1, torch.tensor([1]), w.expand(len(x), 1, 4)),
        {"w": (1, 1, 4)},
        SEQUENCE,
    ),
}


@pytest.mark.parametrize("first", [2, 3, 4, 8])
@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_are_right_too(name: str, first: int) -> None:
    forward, shapes, shape = OTHERS[name]
    model = Leaf(forward, **shapes)
    ours = assert_rows_right(model, torch.randn(first, *shape, dtype=torch.float64))
    for n in (4, 2, 8, 3, 5, 1):
        ours.zero_grad()
        assert_rows_right(model, torch.randn(n, *shape, dtype=torch.float64), converted=ours)


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def _times(x: Tensor, w: Tensor) -> Tensor:
    return x * w[0]


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), w[0], w[1])


def _time_major_rows(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    return op(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], x.shape[0], 4).transpose(0, 1)


def _one_after_the_other(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    parts = x.chunk(x.shape[1], 1)
    return torch.cat(op(torch.cat(parts, 0)).chunk(len(parts), 0), 1)


def _padded_batch(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    return op(F.pad(x, (0, 0, 0, 0, 0, -len(x) % 8)))[: len(x)]


def _padded_tokens(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    rows = x.reshape(-1, 4)
    return op(F.pad(rows, (0, 0, 0, -len(rows) % 8)))[: len(rows)].view(x.shape)


def _unpadded(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    mask, y = x[..., 0] > -3 + x.shape[1], torch.zeros_like(x)
    y[mask] = op(x[mask])
    return y


def _backwards(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    return op(x.flip(0)).flip(0)


def _rolled(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    return op(x.roll(2, 0)).roll(-2, 0)


def _large_state(x: Tensor, op: Callable[[Tensor], Tensor]) -> Tensor:
    return x + op(torch.ones(8, 1, 4, dtype=x.dtype))[: len(x)]


MOVED = (
    _time_major_rows,
    _one_after_the_other,
    _padded_batch,
    _padded_tokens,
    _unpadded,
    _backwards,
    _rolled,
    _large_state,
)


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize(("move", "op"), every(5, itertools.product(MOVED, (_linear, _times, _norm))))
def test_rows_that_lie_elsewhere_for_some_shapes_alone(
    move: Callable[..., Tensor], op: Callable[..., Tensor]
) -> None:
    """First where they lie as the batch's do, or seem to; then in batches of which they do not."""
    for first in ((4, 1), (8, 4), (2, 4), (3, 5)):
        if move is _rolled and first == (2, 4):
            # two samples stay where they are, and docs/semantics.md says that what was proved for a kind of
            # call is kept
            continue
        model = nn.Sequential(
            nn.Linear(4, 4), Leaf(lambda x, w: move(x, lambda t: op(t, w)), w=(4, 4)), nn.Linear(4, 2)
        ).double()
        ours = ps.convert_model(copy.deepcopy(model))
        for n, time in (first, (4, 3), (3, 2), (2, 4), (4, 4), (8, 2)):
            ours.zero_grad()
            x = torch.randn(n, time, 4, dtype=torch.float64)
            assert_rows_right(model, x, converted=ours)


def test_a_caller_that_turns_the_batch_around() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf(_linear, w=(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.leaf(x.flip(0)).flip(0)

    for n in (2, 3, 5):
        assert_rows_right(
            nn.Sequential(nn.Linear(4, 4), Caller(), nn.Linear(4, 2)),
            torch.randn(n, *SEQUENCE, dtype=torch.float64),
        )


def test_what_is_trained_later() -> None:
    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x * a).transpose(0, 1).mul(b.view(1, 1, 4)).transpose(0, 1)

    model = nn.Sequential(nn.Linear(4, 4), Leaf(forward, a=(4,), b=(4,))).double()
    model[1].b.requires_grad_(False)
    ours = assert_rows_right(model, torch.randn(4, 8, 4, dtype=torch.float64))
    for net in (model, ours):
        net[1].b.requires_grad_(True)
    for n in (4, 2, 8):
        ours.zero_grad()
        assert_rows_right(model, torch.randn(n, 8, 4, dtype=torch.float64), converted=ours)


def test_a_parameter_of_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 4))
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.a) @ self.b

    model = nn.Sequential(nn.Linear(4, 4), Twice())
    assert_rows_right(model, torch.randn(3, *SEQUENCE, dtype=torch.float64))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("forward", [_linear, _times, _norm])
def test_low_precision(forward: Callable[..., Tensor], autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Leaf(forward, w=(4, 4)), nn.Linear(4, 2)).double()
    x = torch.randn(6, *SEQUENCE, dtype=torch.float64)
    true = assert_rows_right(model, x)
    own = torch.float32 if autocast else torch.bfloat16
    ours = ps.convert_model(copy.deepcopy(model).to(own))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        squares(ours(x.to(own))).mean().backward()
    for p, q in zip(ours.parameters(), true.parameters(), strict=True):
        assert p.grad_sample.dtype == own
        assert (p.grad_sample.double() - q.grad_sample).norm() < 0.05 * q.grad_sample.norm()


def test_nothing_is_kept_from_one_call_to_the_next() -> None:
    model, keeps = (nn.Sequential(nn.Linear(4, 4), Cached(keep)).double() for keep in (False, True))
    keeps.load_state_dict(model.state_dict())
    ours = ps.convert_model(keeps)
    for n in (3, 3, 4, 2, 3):
        with torch.no_grad():
            for p, q in zip(model.parameters(), ours.parameters(), strict=True):
                p.add_(0.1)
                q.copy_(p)
        ours.zero_grad()
        assert_rows_right(model, torch.randn(n, *SEQUENCE, dtype=torch.float64), converted=ours)
        assert not any(isinstance(t, PerSample) for t in ours[1].kept.values())
        ours[1].kept.clear()


def test_a_forward_that_does_something_new_later_is_proved_anew() -> None:
    long = Leaf(lambda x, w: x * (w if x.shape[1] < 6 else w.cumsum(0)), w=(4,))
    model = nn.Sequential(nn.Linear(4, 4), long, nn.Linear(4, 2)).double()
    ours = assert_rows_right(model, torch.randn(3, *SEQUENCE, dtype=torch.float64))
    ways = []
    for time in (5, 7, 5, 8):
        ours.zero_grad()
        assert_rows_right(model, torch.randn(3, time, 4, dtype=torch.float64), converted=ours)
        ways.append(next(row.way for row in ps.report(ours).rows if row.path == "1"))
    assert ways == ["direct"] * 4


def _clamped(w: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    copy = w * 1
    view(copy).clamp_(max=9.0)
    return copy


def _clamped_behind_a_view(w: Tensor) -> Tensor:
    copy = w * 1
    view = copy.t()
    copy.clamp_(max=9.0)
    return view.t()


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda w: _clamped(w, lambda t: t.view(-1)),
    "transposed": lambda w: _clamped(w, Tensor.t),
    "part": lambda w: _clamped(w, lambda t: t[1]),
    "slice": lambda w: _clamped(w, lambda t: t[:, 1:]),
    "itself": lambda w: _clamped(w, Tensor.contiguous),
    "detached": lambda w: _clamped(w, Tensor.detach),
    "data": lambda w: _clamped(w, lambda t: t.data),
    "behind-a-view": _clamped_behind_a_view,
    "inplace-by-name": lambda w: (copy := w * 1, F.hardtanh(copy, -9, 9, inplace=True))[0],
    "inplace-by-position": lambda w: (copy := w.clone(), F.threshold(copy, -9, 1.0, True))[0],
}


@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_to_a_view_is_written_to_what_it_is_of(name: str) -> None:
    """Nothing is clamped when this is proved."""
    model = nn.Sequential(Leaf(lambda x, w: F.linear(x, WRITTEN[name](w)), w=(3, 4))).double()
    ours = assert_rows_right(model, torch.randn(3, *SEQUENCE, dtype=torch.float64))
    with torch.no_grad():
        for p, q in zip(model.parameters(), ours.parameters(), strict=True):
            p.copy_(torch.linspace(-20, 20, 12).view(3, 4))
            q.copy_(p)
    ours.zero_grad()
    assert_rows_right(model, torch.randn(3, *SEQUENCE, dtype=torch.float64), converted=ours)


def _without_gradient(change: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
    def changed(w: Tensor) -> None:
        with torch.no_grad():
            change(w)

    return changed


CONSTRAINTS: dict[str, Callable[[Tensor], object]] = {
    "no_grad": _without_gradient(lambda w: w.clamp_(0.1, 0.5)),
    "no_grad-data": _without_gradient(lambda w: w.data.clamp_(0.1, 0.5)),
    "no_grad-view": _without_gradient(lambda w: w.view(-1).clamp_(0.1, 0.5)),
    "no_grad-part": _without_gradient(lambda w: w[0].clamp_(0.1, 0.5)),
    "no_grad-copy": _without_gradient(lambda w: w.copy_(w.clamp(0.1, 0.5))),
    "data": lambda w: w.data.clamp_(0.1, 0.5),
    "laid-out-data": lambda w: w.data.contiguous().to(w.dtype).clamp_(0.1, 0.5),
}


@pytest.mark.parametrize("shape", [(1,), (4,), (3, 4)])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_parameter_that_its_forward_keeps_in_a_range(name: str, shape: tuple[int, ...]) -> None:
    """As BLIP keeps its temperature: in the plain model and in ours it is the same after each call."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        CONSTRAINTS[name](w)
        return x / w if len(shape) == 1 else F.linear(x, w)

    model = nn.Sequential(Leaf(forward, w=shape)).double()
    nn.init.constant_(model[0].w, 0.3)
    ours = ps.convert_model(copy.deepcopy(model))
    for factor in (1, 7, 0.1, 2):
        x = torch.randn(3, *SEQUENCE, dtype=torch.float64)
        for m in (model, ours):
            with torch.no_grad():
                m[0].w.mul_(factor)
        each = [torch.autograd.grad(squares(model(x[i : i + 1])).sum(), model[0].w)[0] for i in range(3)]
        squares(ours(x)).mean().backward()
        torch.testing.assert_close(ours[0].w.grad_sample, torch.stack(each))
        assert torch.equal(ours[0].w, model[0].w)
    assert ps.report(ours).fast == 1


def test_a_value_with_a_gradient_written_to_data_is_refused() -> None:
    def forward(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
        w.data[0] = other[0]
        return F.linear(x, w)

    ours = ps.convert_model(nn.Sequential(nn.Linear(4, 4), Leaf(forward, w=(4, 4), other=(4, 4))))
    with pytest.raises(ValueError, match="is written to"), ps.sample_ids(torch.arange(3), 3):
        ours(torch.randn(3, 4))


def test_weights_of_inference_mode() -> None:
    """Of which no version is counted."""
    ours = ps.convert_model(Leaf(lambda x, w, m: F.linear(x * w, m.t().contiguous()), w=(4,), m=(4, 5)))
    x = torch.randn(3, 4)
    with torch.no_grad():
        ours(x)
    given = {name: torch.randn(3, *p.shape) for name, p in ours.named_parameters()}
    expected = torch.func.functional_call(ours, given, (x,))
    with torch.inference_mode():
        inside = {name: w.clone() for name, w in given.items()}
        torch.testing.assert_close(torch.func.functional_call(ours, inside, (x,)), expected)


def test_what_meets_tensors_that_are_not_followed_is_refused() -> None:
    one = PerSample.of(torch.randn(3, 4))
    x = torch.randn(3, 5, 4)
    refused: list[Callable[[], Any]] = [
        lambda: x[0] + one,  # 5 rows of 3 samples
        lambda: torch.randn(4) + one,
        lambda: torch.randn(3) + PerSample.of(torch.randn(3, 3)),
        lambda: torch.addcmul(torch.randn(6, 1), torch.randn(3, 4), one),  # which of them is the batch?
        lambda: F.linear(x, torch.randn(4, 4), one),
        lambda: F.scaled_dot_product_attention(one, x, x),
        lambda: x.index_copy_(0, torch.tensor([1]), one),
        lambda: torch.add(x, 1, out=one),
        lambda: torch.add(one, other=x),
        lambda: torch.exp(one, out=torch.zeros(4)),
        lambda: one.__eq__("text"),
        lambda: one.tolist(),  # samples' numbers differ
        lambda: bool(one.sum() > 0),
    ]
    for use in refused:
        with pytest.raises(NoRuleError, match=r"has no rule|cannot be run for each sample|would write to"):
            use()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumulative": lambda w: w.cumsum(0),
    "sum": lambda w: w.sum(),
    "two-of-them": lambda w: torch.cat([w, w.flip(0)]).softmax(0),
    "matrix": lambda w: torch.outer(w, w).tril().T,
    "expanded": lambda w: w.expand(5, 4).cumsum(0),
    "in-place": lambda w: (w * 2).mul_(3).add_(w),
    "by-their-names": lambda w: torch.mul(input=w, other=torch.exp(input=w)),
    "by-mask": lambda w: w[torch.tensor([True, False, True, True])],
    "linear": lambda w: F.linear(torch.outer(w, w), torch.diag(w), w),
    "laid-out": lambda w: torch.outer(w, w.exp()).t().contiguous().view(2, 8),
    "as-it-is": lambda w: torch.outer(w, w).contiguous().to(w).double(),
    "converted": lambda w: torch.outer(w, w.exp()).t().to(torch.float32, copy=True).to(w.dtype),
    "in-place-in-a-copy": lambda w: torch.outer(w, w.exp()).t().contiguous().mul_(2),
    "detached": lambda w: torch.outer(w, w.exp()).detach() * w,
}


def test_what_a_conversion_leaves_alone() -> None:
    each = torch.randn(4, 5).expand(3, 4, 5).requires_grad_()
    one = PerSample.of(each, same=True)
    for same in (one.contiguous(), one.to(one.dtype), one.float(), one.cpu(), one.type_as(each)):
        assert same is one
    turned = one.t().contiguous()
    assert isinstance(turned, PerSample) and turned.is_contiguous() and turned.each.stride(0) == 0
    assert type(turned.each.grad_fn).__name__ == "_ValuedBackward"  # no run for each sample


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_parameters_alone_are_each_samples_own(name: str, same: bool) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    each = (
        torch.randn(4, dtype=torch.float64).expand(3, 4) if same else torch.randn(3, 4, dtype=torch.float64)
    )
    each = each.clone().requires_grad_() if not same else each.requires_grad_()
    found = function(PerSample.of(each, same))
    assert isinstance(found, PerSample) and found.same is same
    weights = torch.randn(found.each.shape, dtype=torch.float64)
    (rows,) = torch.autograd.grad(found.each, each, weights)

    def alone(own: dict[str, Tensor], i: int) -> Tensor:
        result = function(own["w"])
        torch.testing.assert_close(found.each[i], result)
        assert found.shape == result.shape
        return (result * weights[i]).sum()

    torch.testing.assert_close(rows, members(alone, {"w": each})[1]["w"])
    if same and found.ndim > 1:
        assert found.each.stride(0) == 0  # computed once


SHARED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, s: F.linear(x, w + s),
    "scaled": lambda x, w, s: F.linear(x, w / s[:1, :1]),
    "product": lambda x, w, s: x @ (w @ s),
    "convolution": lambda x, w, s: F.conv1d(x.unsqueeze(1), (w * s).unsqueeze(1)).mean(2),
    "where": lambda x, w, s: F.linear(x, torch.where(s > 0.5, w, s)),
    "lerp": lambda x, w, s: F.linear(x, torch.lerp(w, s, 0.3)),
    "norm": lambda x, w, s: F.layer_norm(x, (4,), w[0] * s[0], s[1]),
}


class Given(nn.Module):
    """A parameter of its own meets what all samples share, and which needs a gradient: of another model."""

    def __init__(self, op: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.first, self.w = op, nn.Linear(4, 4), nn.Parameter(torch.rand(4, 4))
        self.shared: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.first(x), self.w, self.shared)


@pytest.mark.parametrize("op", SHARED)
def test_what_all_samples_share_gets_its_gradient(op: str) -> None:
    model = Given(SHARED[op]).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (3, 2, 4, 1):
        shared, found = torch.rand(4, 4, dtype=torch.float64), []
        x = torch.randn(n, 4, dtype=torch.float64)
        for net in (model, ours):
            net.shared = shared.clone().requires_grad_()
            squares(net(x)).mean().backward()
            found.append(net.shared.grad)
        torch.testing.assert_close(*found)
        ours.zero_grad()
        assert_rows_right(model, x, converted=ours)
        ours.zero_grad()


STATES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expand": lambda h, n: h.expand(-1, n, -1),
    "expand-all": lambda h, n: h.expand(len(h), n, h.shape[2]).contiguous(),
    "repeat": lambda h, n: h.repeat(1, n, 1),
    "unsqueeze": lambda h, n: h.squeeze(1).unsqueeze(1).expand(-1, n, -1),
}


class LearntState(nn.Module):
    def __init__(self, layers: int, way: str, dropout: float) -> None:
        super().__init__()
        self.way, self.state = STATES[way], nn.Parameter(torch.rand(layers, 1, 4))
        self.gru = nn.GRU(3, 4, layers, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x, self.way(self.state, len(x)))[0]


@pytest.mark.parametrize("way", STATES)
@pytest.mark.parametrize(("layers", "dropout"), [(1, 0.0), (2, 0.0), (2, 0.5)])
def test_states_that_are_learnt(way: str, layers: int, dropout: float) -> None:
    model = LearntState(layers, way, dropout).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (4, 2, 5, 1):  # once as long as they are many
        x = torch.randn(n, 4, 3, dtype=torch.float64)
        for net in (model, ours):
            net.zero_grad()
            torch.manual_seed(n)
            squares(net(x)).mean().backward()
        for p, q in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
            torch.testing.assert_close(q.grad_sample.mean(0), p.grad)
        if not dropout:
            ours.zero_grad()
            assert_rows_right(model, x, converted=ours)


class MiddleDim(nn.Module):
    """What is no batch, though it is in the dim where states have it, and may be as long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w = nn.Linear(3, 3), nn.Parameter(torch.rand(1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.w.expand(-1, x.shape[1], -1)


def test_a_middle_dim_that_is_as_long_as_the_batch() -> None:
    for first in ((4, 4), (4, 2)):
        model = MiddleDim().double()
        ours = ps.convert_model(copy.deepcopy(model))
        for n, time in (first, (3, 3), (3, 5), (2, 4), (1, 3)):
            ours.zero_grad()
            assert_rows_right(model, torch.randn(n, time, 3, dtype=torch.float64), converted=ours)


class Paths(nn.Module):
    """Later calls of a kind take another path, in which what is as long as the batch is none."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.first, self.fc = path, nn.Linear(3, 3), nn.Linear(3, 2)
        self.scale, self.slope = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        if x.shape[1] > 2:
            steps = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
            if self.path == "sum":
                x = x + steps * self.slope
            elif self.path == "where":
                x = torch.where(x > 0, x, steps * self.slope)
            else:
                x = x + (torch.ones(len(x), 1, 1, dtype=x.dtype) * self.slope).sin()
        return self.fc(x).mean(1)


@pytest.mark.parametrize("path", ["sum", "where", "rows"])
def test_another_path_in_a_later_call(path: str) -> None:
    for first in (1, 2):
        model = Paths(path).double()
        ours = ps.convert_model(copy.deepcopy(model))
        for n, time in ((4, first), (4, 4), (3, 1), (5, 3), (3, 3), (4, 4)):
            ours.zero_grad()
            assert_rows_right(model, torch.randn(n, time, 3, dtype=torch.float64), converted=ours)


def test_paths_that_alternate_are_proved_once_each() -> None:
    model = Paths("sum").double()
    ours, calls = ps.convert_model(copy.deepcopy(model)), list[int]()
    ours.first.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        for time in (1, 5):
            ours(torch.randn(4, time, 3, dtype=torch.float64)).square().sum(1).mean().backward()
    calls.clear()
    for time in (1, 5, 1, 5):
        ours(torch.randn(4, time, 3, dtype=torch.float64)).square().sum(1).mean().backward()
    assert len(calls) == 4


class _Doubled(torch.autograd.Function):
    """Runs for one sample at a time, as it has no rule for vmap."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return torch.from_numpy(2 * t.numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Longest(nn.Module):
    """Goes where the values of all samples lead."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(3, 3), nn.Parameter(torch.rand(6, 3))

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        k = int(n.max())
        return (self.first(x[:, :k]) + _Doubled.apply(self.places[:k])).sum(1)


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
def test_a_loop_that_goes_elsewhere_than_all_samples_together_is_refused() -> None:
    model = Longest().double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(3, 6, 3, dtype=torch.float64)
    assert_rows_right(model, x, torch.full((3,), 4), converted=ours)
    ours.zero_grad()
    with pytest.raises(ValueError, match="do not return what they do together"):
        ours(x, torch.tensor([2, 5, 3]))


def test_autocast_is_that_of_the_forward() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.w = nn.Linear(4, 4), nn.Parameter(torch.rand(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.w.softmax(-1) @ self.fc(x)

    model, x = Weighted(), torch.randn(3, 5, 4)
    ours = ps.convert_model(copy.deepcopy(model), example=x)  # proved outside of autocast
    for _ in range(2):
        ours.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ours(x).float().square().sum((1, 2)).mean()
        loss.backward()
        for i in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                alone = model(x[i : i + 1]).float().square().sum()
            alone.backward()
            for p, q in zip(model.parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(
                    q.grad_sample[i], p.grad, rtol=3e-2, atol=3e-2 * p.grad.abs().max()
                )


class Candidates(nn.Module):
    """Several candidates of each sample, to which parameters are added one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.score = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.repeat_interleave(3, 0) + self.own.repeat(len(x), 1)
        return self.score(rows.tanh()).view(len(x), -1)


def test_rows_of_a_parameter_that_are_repeated_for_each_sample() -> None:
    model = Candidates().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in (5, 3, 1, 2):  # also as many samples as rows
        ours.zero_grad()
        assert_rows_right(model, torch.randn(size, 4).double(), converted=ours)
    assert ours.own.grad_sample.shape == (2, 3, 4)
