"""A batch of one runs as it is, and each gradient is its row."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from .oracle import squares


class Net(nn.Module):
    """Recurrent (whose weights are kept twice), tied, shared, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.rnn, self.out = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9, bias=False)
        self.out.weight, self.scale, self.unused = self.tok.weight, nn.Parameter(torch.randn(4)), nn.Linear(2, 2)

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
        assert not any("pslayers" in type(node).__module__ and "Alone" not in type(node).__name__ for node in _graph(output))
        squares(output).mean().backward()
        for p, g in zip(ours.parameters(), grads, strict=True):
            if g is None:
                assert p.grad is None and p.grad_sample is None
            else:
                torch.testing.assert_close(p.grad, g)
                torch.testing.assert_close(p.grad_sample, g.unsqueeze(0))
                assert p.grad_sample.data_ptr() != p.grad.data_ptr()
    assert all(isinstance(p, nn.Parameter) for m in ours.modules() for p in m._parameters.values() if p is not None)
    assert all(a is b for a, b in zip(ours.rnn._flat_weights, ours.rnn.parameters(), strict=True))


def _graph(output: Tensor) -> list[Any]:
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions]
    return list(seen)


def test_no_side_effects_of_autograd_grad() -> None:
    _, ours, ids = _pair()
    loss = squares(ours(ids)).mean()
    torch.autograd.grad(loss, list(ours.parameters()), retain_graph=True, allow_unused=True)
    assert all(p.grad_sample is None for p in ours.parameters())
    loss.backward()
    assert ours.scale.grad_sample is not None


def test_memory_is_reused_unless_it_is_kept() -> None:
    _, ours, ids = _pair()
    places = []
    for keep in (False, False, True, False):
        ours.zero_grad()
        squares(ours(ids)).mean().backward()
        places.append(ours.scale.grad_sample.data_ptr())
        kept = ours.scale.grad_sample if keep else None
    assert places[0] == places[1] == places[2] and kept is None
    kept = ours.scale.grad_sample
    before = kept.clone()
    squares(ours(torch.randint(0, 9, (1, 5)))).mean().backward()
    assert ours.scale.grad_sample.data_ptr() != kept.data_ptr() and torch.equal(kept, before)


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
    assert all(isinstance(p, nn.Parameter) for m in ours.modules() for p in m._parameters.values() if p is not None)
    assert all(isinstance(p, nn.Parameter) for p in ours.rnn._flat_weights)


@pytest.mark.parametrize("how", ["append", "add"])
def test_accumulation(how: str) -> None:
    model, ours, ids = _pair()
    batches = [ids, torch.randint(0, 9, (1, 5))]
    with ps.accumulating(ours, how):
        for each in batches:
            squares(ours(each)).mean().backward()
    rows = torch.stack([torch.autograd.grad(squares(model(each)).mean(), model.scale)[0] for each in batches])
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
    with pytest.raises(RuntimeError, match=r"batches of|was reached by"):
        (squares(ours(three)).mean() + squares(ours(ids)).mean()).backward()
