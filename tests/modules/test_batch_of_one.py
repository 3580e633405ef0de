"""A batch of one runs as it is, and each gradient is its row."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pslayers as ps

from ..oracle import assert_rows_right, squares, true_rows


class Net(nn.Module):
    """Recurrent (whose weights are kept twice), tied, shared, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.rnn, self.out = (
            nn.Embedding(9, 4),
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 9, bias=False),
        )
        self.out.weight, self.scale, self.unused = (
            self.tok.weight,
            nn.Parameter(torch.randn(4)),
            nn.Linear(2, 2),
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.rnn(self.tok(ids))[0]
        return self.out(self.rnn(h * self.scale)[0])


def _pair() -> tuple[nn.Module, Any, Tensor]:
    model = Net().double()
    return model, ps.convert_model(copy.deepcopy(model)), torch.randint(0, 9, (1, 5))


def test_rows_are_the_gradients_and_the_layers_are_the_original_ones() -> None:
    model, ours, ids = _pair()
    grads = torch.autograd.grad(squares(model(ids)).mean(), list(model.parameters()), allow_unused=True)
    for _ in range(3):
        ours.zero_grad()
        output = ours(ids)
        assert not any(
            "pslayers" in type(node).__module__ and "Alone" not in type(node).__name__
            for node in _graph(output)
        )
        squares(output).mean().backward()
        for p, g in zip(ours.parameters(), grads, strict=True):
            if g is None:
                assert p.grad is None and p.grad_sample is None
            else:
                torch.testing.assert_close(p.grad, g)
                torch.testing.assert_close(p.grad_sample, g.unsqueeze(0))
                assert p.grad_sample.data_ptr() != p.grad.data_ptr()
    assert all(
        isinstance(p, nn.Parameter) for m in ours.modules() for p in m._parameters.values() if p is not None
    )
    assert all(a is b for a, b in zip(ours.rnn._flat_weights, ours.rnn.parameters(), strict=True))


def _graph(output: Tensor) -> list[Any]:
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions]
    return list(seen)


class Dropped(nn.Module):
    """Weight-dropped: a recurrent layer is given others in the forward, then its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(5) % 3 > 0
        given = torch.func.functional_call(self.rnn, {"weight_hh_l0": self.rnn.weight_hh_l0 * mask}, (x,))
        return self.out(given[0] + self.rnn(x)[0])


def test_a_recurrent_layer_that_is_given_other_weights() -> None:
    model = Dropped().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (1, 3, 1):
        assert_rows_right(model, torch.randn(n, 3, 4, dtype=torch.float64), converted=ours)
        ours.zero_grad()


def test_no_side_effects_of_autograd_grad() -> None:
    _, ours, ids = _pair()
    loss = squares(ours(ids)).mean()
    torch.autograd.grad(loss, list(ours.parameters()), retain_graph=True, allow_unused=True)
    assert all(p.grad_sample is None for p in ours.parameters())
    loss.backward()
    assert ours.scale.grad_sample is not None


@pytest.mark.parametrize("change", ["grad", "rows", "another pass", "another pass, which adds"])
def test_rows_and_gradients_share_memory_until_one_is_written_to(change: str) -> None:
    _, ours, ids = _pair()
    squares(ours(ids)).mean().backward()
    params = [p for p in ours.parameters() if p.grad is not None]
    before = [p.grad.clone() for p in params]
    assert all(torch._C._is_cow_tensor(t) for p in params for t in (p.grad, p.grad_sample))
    rows, grads = [p.grad_sample for p in params], [p.grad for p in params]
    if change == "grad":
        grads = [g.mul_(2) / 2 for g in grads]
    elif change == "rows":
        rows = [r.add_(1) - 1 for r in rows]
    else:
        adds = change != "another pass"
        if not adds:
            ours.zero_grad()
        squares(ours(torch.randint(0, 9, (1, 5)))).mean().backward()
        for p, old in zip(params, before, strict=True):
            whole = p.grad_sample[0] + (old if adds else 0)
            torch.testing.assert_close(p.grad, whole)
            assert not torch.equal(p.grad_sample[0], old)
        grads = before
    for row, grad, old in zip(rows, grads, before, strict=True):
        torch.testing.assert_close(row, old.unsqueeze(0))
        torch.testing.assert_close(grad, old)


class Given(torch.autograd.Function):
    """A factor whose gradient lies where torch has not allocated it, in an order of its own, or in a larger
    memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        found = (grads[0] * x).sum(0)
        if ctx.how == "numpy":
            found = torch.from_numpy(found.numpy().copy())
        elif ctx.how == "turned":
            found = found.t().contiguous().t()
        elif ctx.how == "part":
            found = torch.stack([found, found])[1]
        elif ctx.how == "expanded":
            found = found.mean().expand_as(found)
        return grads[0] * weight, found, None


@pytest.mark.parametrize("how", ["numpy", "turned", "part", "expanded"])
def test_gradients_of_which_torch_makes_no_copy_when_written(how: str) -> None:
    """Rows lie in memory that is used again, unless they are kept."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return Given.apply(x, self.weight.t().t(), how).flatten(1)

    model = Net()
    ours = ps.convert_model(copy.deepcopy(model))
    kept: list[tuple[Tensor, Tensor]] = []
    places = []
    for keep in (False, False, True, False):
        x = torch.randn(1, 3, 3, dtype=torch.float64)
        (grad,) = torch.autograd.grad(squares(model(x)).mean(), model.parameters())
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        torch.testing.assert_close(ours.weight.grad, grad)
        torch.testing.assert_close(ours.weight.grad_sample, grad.unsqueeze(0))
        ours.weight.grad.zero_()
        torch.testing.assert_close(ours.weight.grad_sample, grad.unsqueeze(0))
        assert ours.weight.grad_sample.is_contiguous()
        places.append(ours.weight.grad_sample.data_ptr())
        kept += [(ours.weight.grad_sample, grad)] if keep else []
    assert places[0] == places[1] == places[2] != places[3]
    torch.testing.assert_close(kept[0][0], kept[0][1].unsqueeze(0))


def test_rows_of_rows() -> None:
    model, ours, ids = _pair()
    for net in (model, ours):
        grads = torch.autograd.grad(squares(net(ids)).mean(), net.scale, create_graph=True)
        torch.autograd.backward(grads[0].square().sum(), inputs=[net.scale])
    torch.testing.assert_close(ours.scale.grad, model.scale.grad)
    ours.zero_grad()
    squares(ours(ids)).mean().backward(create_graph=True)
    second = torch.autograd.grad(ours.scale.grad_sample.square().sum(), ours.scale)[0]
    torch.testing.assert_close(second, model.scale.grad)
    ours.scale.grad = ours.scale.grad_sample = None


def test_an_error_in_the_forward_leaves_the_parameters_in_place() -> None:
    _, ours, _ = _pair()
    with pytest.raises(IndexError):
        ours(torch.full((1, 5), 99))
    assert all(
        isinstance(p, nn.Parameter) for m in ours.modules() for p in m._parameters.values() if p is not None
    )
    assert all(isinstance(p, nn.Parameter) for p in ours.rnn._flat_weights)


@pytest.mark.parametrize("how", ["append", "add"])
def test_accumulation(how: str) -> None:
    model, ours, ids = _pair()
    batches = [ids, torch.randint(0, 9, (1, 5))]
    with ps.accumulating(ours, how):
        for each in batches:
            squares(ours(each)).mean().backward()
    rows = true_rows(lambda i: squares(model(batches[i])).mean(), model, 2)["scale"]
    torch.testing.assert_close(ours.scale.grad_sample, rows if how == "append" else rows.sum(0, keepdim=True))


def test_one_after_three_and_both_in_one_pass() -> None:
    model, ours, ids = _pair()
    three = torch.randint(0, 9, (3, 5))
    for batch in (three, ids, three):
        ours.zero_grad()
        squares(ours(batch)).mean().backward()
        assert ours.scale.grad_sample.shape[0] == len(batch)
        expected = torch.autograd.grad(squares(model(batch)).mean(), model.scale)[0]
        torch.testing.assert_close(ours.scale.grad_sample.mean(0), expected)
    one, others = squares(ours(ids)).mean(), squares(ours(three)).mean()
    for loss, batch in ((others, three), (one, ids)):  # called before the others, and back after them
        ours.zero_grad()
        loss.backward()
        expected = torch.autograd.grad(squares(model(batch)).mean(), model.scale)[0]
        assert ours.scale.grad_sample.shape[0] == len(batch)
        torch.testing.assert_close(ours.scale.grad_sample.mean(0), expected)
    with pytest.raises(RuntimeError, match="was reached by"):
        (squares(ours(three)).mean() + squares(ours(ids)).mean()).backward()


def test_a_penalty_on_the_weights_is_the_one_samples_own() -> None:
    model, ours, ids = _pair()
    losses = [
        squares(net(ids)).mean() + net.scale.square().sum() + net.rnn.weight_hh_l0.sum()
        for net in (model, ours)
    ]
    losses[1].backward()
    for name in ("scale", "rnn.weight_hh_l0"):
        expected = torch.autograd.grad(losses[0], model.get_parameter(name), retain_graph=True)[0]
        torch.testing.assert_close(ours.get_parameter(name).grad_sample[0], expected)


def test_a_pass_that_breaks_off_leaves_no_rows_to_later_ones() -> None:
    model, ours, ids = _pair()
    first = next(m for m in ours.modules() if isinstance(m, nn.Embedding)).weight

    def broken(_: Tensor) -> None:
        raise KeyError("broken")

    for _ in range(2):  # in the second, memory is there already
        hook = first.register_hook(broken)
        with pytest.raises(KeyError):
            squares(ours(ids)).mean().backward()
        hook.remove()
        ours.zero_grad()
        (ours.scale * 3).sum().backward()  # no call of the model's: no rows
        assert all(p.grad_sample is None for p in ours.parameters())
        ours.zero_grad()
        squares(ours(ids)).mean().backward()
        expected = torch.autograd.grad(squares(model(ids)).mean(), [model.tok.weight, model.scale])
        torch.testing.assert_close(
            [ours.tok.weight.grad_sample[0], ours.scale.grad_sample[0]], list(expected)
        )
        torch.testing.assert_close([ours.tok.weight.grad, ours.scale.grad], list(expected))


@pytest.mark.parametrize("first", [True, False])
def test_one_by_itself_and_in_a_reentrant_checkpoint(first: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    ours, x = (
        ps.convert_model(copy.deepcopy(model)),
        torch.randn(1, 3, dtype=torch.float64, requires_grad=True),
    )
    for _ in range(2):
        ours.zero_grad()
        outputs = [
            ours(2 * x) if plain else checkpoint(ours, x, use_reentrant=True) for plain in (first, not first)
        ]
        sum(squares(y).mean() for y in outputs).backward()
        expected = torch.autograd.grad(
            squares(model(x)).mean() + squares(model(2 * x)).mean(), list(model.parameters())
        )
        torch.testing.assert_close([p.grad_sample[0] for p in ours.parameters()], list(expected))


def test_two_calls_of_one_in_one_pass_add_up() -> None:
    model, ours, ids = _pair()
    losses = [squares(net(ids)).mean() + squares(net(ids.flip(1))).sum() for net in (model, ours)]
    losses[1].backward()
    expected = torch.autograd.grad(losses[0], model.scale)[0]
    torch.testing.assert_close(ours.scale.grad_sample, expected.unsqueeze(0))


def test_a_model_that_changes_between_calls() -> None:
    ours = ps.convert_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())
    x = torch.randn(1, 3, dtype=torch.float64)
    change: Any
    for change in (
        lambda: None,
        lambda: ours.__setitem__(1, nn.Linear(4, 5).double()),
        lambda: ours.append(nn.Linear(5, 2).double()),
        lambda: ours[0].register_parameter("weight", nn.Parameter(torch.randn(4, 3, dtype=torch.float64))),
        lambda: ours[0].register_parameter("bias", None),
        lambda: ours.__delitem__(2),
    ):
        change()
        ours.zero_grad()
        plain = [p.detach().clone().requires_grad_() for p in ours.parameters()]
        named = dict(zip((name for name, _ in ours.named_parameters()), plain, strict=True))
        with ps.recording(ours, False):
            loss = squares(torch.func.functional_call(ours, named, (x,))).sum()
        squares(ours(x)).sum().backward()
        for p, g in zip(ours.parameters(), torch.autograd.grad(loss, plain), strict=True):
            torch.testing.assert_close(p.grad_sample, g.unsqueeze(0))
    ps.convert_model(ours[1])  # which came later
    given = {"1.weight": torch.randn(1, 5, 4, dtype=torch.float64)}
    out = torch.func.functional_call(ours, given, (x,))
    torch.testing.assert_close(out, ours[0](x) @ given["1.weight"][0].t() + ours[1].bias)


class Factors(nn.Module):
    """As many parameters as it happens to hold."""

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parameters():
            x = x * p
        return x


def test_a_parameter_that_comes_and_goes() -> None:
    ours = Factors()
    ours.first = nn.Parameter(torch.tensor(2.0))
    ps.convert_model(ours)
    for number in (1, 2):
        if number == 2:
            ours.second = nn.Parameter(torch.tensor(3.0))
        ours(torch.tensor([5.0])).sum().backward()
        assert [p.grad_sample.tolist() for p in ours.parameters()] == [[[5.0]], [[15.0], [10.0]]][number - 1]
    del ours.first
    ours(torch.tensor([5.0])).sum().backward()
    assert ours.second.grad_sample.tolist() == [5.0]


def test_a_replica_has_places_of_its_own() -> None:
    layer = ps.convert_model(nn.Linear(3, 2).double())
    x = torch.randn(1, 3, dtype=torch.float64)
    layer(x).sum().backward()
    replica = copy.copy(layer)  # shares all but these
    replica._parameters = {name: nn.Parameter(torch.randn_like(p)) for name, p in layer._parameters.items()}
    replica(x).sum().backward()
    torch.testing.assert_close(replica.weight.grad_sample, x.expand(1, 2, 3))
    torch.testing.assert_close(layer.weight.grad, x.expand(2, 3))


def test_a_list_of_parameters_that_goes() -> None:
    ours = Factors()
    ours.some, ours.first = nn.ParameterList([torch.tensor(2.0)]), nn.Parameter(torch.tensor(3.0))
    ps.convert_model(ours)
    ours(torch.tensor([5.0])).sum().backward()
    assert [p.grad_sample.tolist() for p in ours.parameters()] == [[10.0], [15.0]]
    del ours.some
    ours(torch.tensor([5.0])).sum().backward()
    assert ours.first.grad_sample.tolist() == [5.0]
