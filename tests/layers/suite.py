"""The suite that every replacement layer inherits: a subclass names its cases, and gets every check for each
of them.

The oracle is torch's own layer, called on each sample by itself, in float64.
"""

import copy
import gc
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import pslayers as ps
from pslayers.core.factors import Blocks, Factor
from pslayers.core.trees import tensors_in
from pslayers.functional.bags import Bagged
from pslayers.functional.embedding import Gather
from pslayers.functional.linear_factor import Outer

from ..oracle import assert_factored, assert_rows, flat, members, true_rows


@dataclass
class Case:
    """One way to build a layer, and inputs for n samples of it (batch first unless a suite says
    otherwise).
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    rows: bool = True  # whether k * B rows and one shared row make sense for its input
    # False where torch defines a gradient that is not the derivative (padding_idx)
    true_gradient: bool = True

    def __repr__(self) -> str:
        return self.name


def without_bias(layer: nn.Module) -> nn.Module:
    """As with ``bias=False``, which norms of the oldest torch do not know."""
    layer.bias = None
    return layer


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def if_torch_can(layer: nn.Module, *inputs: Any) -> Any:
    """The output of torch's own layer; not every processor has all its kernels in bfloat16."""
    try:
        return layer(*inputs)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"torch's own layer cannot: {str(error).splitlines()[0][:100]}")


class LayerSuite:
    cases: ClassVar[list[Case]]
    batch = 4

    # ----------------------------------------------------------------- what a layer of another form overrides
    def sample(self, inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        """The inputs of sample i alone, as a batch of one."""
        return tuple(t[i : i + 1] if isinstance(t, Tensor) else t for t in inputs)

    def losses(self, output: Any, n: int) -> Tensor:
        """The losses (n,) of the samples: a fixed projection of all that a sample's output holds, not linear
        in it.
        """
        out = output.reshape(n, output.numel() // max(n, 1))
        direction = torch.linspace(-1, 2, out.shape[1], dtype=out.dtype)
        return (out * direction).sum(1) + (out**2).sum(1) / 3

    # ------------------------------------------------------------------ helpers
    def build(self, case: Case) -> nn.Module:
        torch.manual_seed(0)
        layer = case.build().double()
        with torch.no_grad():  # affine weights start at one and zero: a wrong formula could hide there
            for p in layer.parameters():
                p.copy_(torch.randn_like(p) / 2)
        return layer

    def inputs(self, case: Case, n: int | None = None) -> tuple[Any, ...]:
        torch.manual_seed(1)
        return case.inputs(self.batch if n is None else n)

    def loop(self, layer: nn.Module, inputs: tuple[Any, ...], n: int, **options: bool) -> dict[str, Tensor]:
        """The oracle: {name: (n, *shape)} from one call of torch's own layer for each sample."""
        return true_rows(
            lambda i: self.losses(layer(*self.sample(inputs, i)), 1).sum(), layer, n, zeros=True, **options
        )

    def converted(self, layer: nn.Module, **options: Any) -> nn.Module:
        return ps.convert_model(copy.deepcopy(layer), **options)

    def assert_rows(self, layer: nn.Module, expected: dict[str, Tensor], **tolerance: float) -> None:
        for name, p in layer.named_parameters():
            if name in expected:
                assert p.grad_sample is not None, name
                torch.testing.assert_close(
                    p.grad_sample, expected[name], **(tolerance or {"rtol": 1e-9, "atol": 1e-10})
                )

    # ------------------------------------------------------------------ rows that belong to given samples
    def test_rows_of_given_samples(self, case: Case) -> None:
        layer, ids = self.build(case), torch.tensor([1, 0, 1, 1, 4, 0, 3])
        inputs, size = self.inputs(case, len(ids)), 5
        plain = self.loop(layer, inputs, len(ids))
        ours = self.converted(layer, loss_reduction="sum")
        with ps.sample_ids(ids, size), ps.sample_ids(ids, size, dim=1):
            if any(isinstance(t, PackedSequence) for t in inputs):
                with pytest.raises(ValueError, match="packed"):
                    ours(*inputs)
                return
            out = ours(*inputs)
        self.losses(out, len(ids)).sum().backward()
        self.assert_rows(
            ours, {name: p.new_zeros(size, *p.shape[1:]).index_add(0, ids, p) for name, p in plain.items()}
        )

    # ------------------------------------------------------------------ forward
    def test_forward_equals_torch(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)
        assert type(ours) is not type(layer) and isinstance(ours, type(layer))
        torch.testing.assert_close(ours(*inputs), layer(*inputs))
        with torch.no_grad():
            torch.testing.assert_close(ours(*inputs), layer(*inputs))

    def test_outputs_lie_in_memory_as_torchs(self, case: Case) -> None:
        """Dropout after a layer fills its masks in the order of memory, and `view` may be called on what it
        returns.
        """
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)
        forms = {
            "expanded": ps.expand_params(ours, self.batch),
            "different": self.different(layer, self.batch),
        }
        for given in (
            inputs,
            tuple(t.mT.contiguous().mT if isinstance(t, Tensor) and t.ndim > 1 else t for t in inputs),
        ):
            plain = [t.stride() for t in tensors_in([layer(*given)]) if isinstance(t, Tensor)]
            outputs = {"recorded": ours(*given)}
            outputs |= {
                form: torch.func.functional_call(ours, weights, given) for form, weights in forms.items()
            }
            for form, output in outputs.items():
                assert [t.stride() for t in tensors_in([output]) if isinstance(t, Tensor)] == plain, form

    def test_recording_off_is_the_original(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)
        with ps.recording(ours, False):
            self.losses(ours(*inputs), self.batch).mean().backward()
        self.losses(layer(*inputs), self.batch).mean().backward()
        for p, q in zip(ours.parameters(), layer.parameters(), strict=True):
            assert p.grad_sample is None
            torch.testing.assert_close(p.grad, q.grad)

    def test_output_may_be_changed_in_place(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        if not isinstance(layer(*inputs), Tensor):
            pytest.skip("it returns more than one tensor")
        ours = self.converted(layer, loss_reduction="sum")
        self.losses(ours(*inputs).mul_(2), self.batch).sum().backward()
        self.losses(layer(*inputs) * 2, self.batch).sum().backward()
        for p, q in zip(ours.parameters(), layer.parameters(), strict=True):
            torch.testing.assert_close(p.grad_sample.sum(0), q.grad)

    # ------------------------------------------------------------------ rows
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_rows_equal_loop_and_add_up(self, case: Case, reduction: str) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer, loss_reduction=reduction)
        for _ in range(2):  # the second pass writes into the first one's memory
            ours.zero_grad()
            getattr(self.losses(ours(*inputs), self.batch), reduction)().backward()
            self.assert_rows(ours, self.loop(layer, inputs, self.batch))
        for p in ours.parameters():
            torch.testing.assert_close(getattr(p.grad_sample, reduction)(0), p.grad)
        getattr(self.losses(layer(*inputs), self.batch), reduction)().backward()
        for p, q in zip(ours.parameters(), layer.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

    def test_a_pass_to_chosen_parameters(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours, expected = self.converted(layer), self.loop(layer, inputs, self.batch)
        for chosen in (list(expected), list(expected)[1:] or list(expected)):
            self.losses(ours(*inputs), self.batch).mean().backward(
                inputs=[ours.get_parameter(k) for k in chosen]
            )
            assert [k for k, p in ours.named_parameters() if p.grad_sample is not None] == chosen
            self.assert_rows(ours, {k: expected[k] for k in chosen})

    def test_input_gradient(self, case: Case) -> None:
        layer = self.build(case)
        grads = []
        for net in (layer, self.converted(layer)):
            inputs = self.inputs(case)
            wanted = [t.requires_grad_() for t in inputs if isinstance(t, Tensor) and t.is_floating_point()]
            if not wanted:
                pytest.skip("it takes no floating tensor")
            grads.append(torch.autograd.grad(self.losses(net(*inputs), self.batch).mean(), wanted))
        torch.testing.assert_close(*grads)

    @pytest.mark.parametrize("n", [0, 1])
    def test_empty_batch_and_batch_of_one(self, case: Case, n: int) -> None:
        layer, inputs = self.build(case), self.inputs(case, n)
        ours = self.converted(layer)
        self.losses(ours(*inputs), n).sum().backward()
        for p in ours.parameters():
            assert p.grad_sample.shape == (n, *p.shape)
        if n:
            self.assert_rows(ours, self.loop(layer, inputs, n))
        with ps.factored(ours) as grads:
            self.losses(ours(*inputs), n).sum().backward()
        if n:
            assert_factored(grads, self.loop(layer, inputs, n))
            return
        sums = grads.weighted_sum(torch.ones(0))
        assert all(not sums[name].any() for name, p in ours.named_parameters())
        assert all(grads[name].dense().shape == (0, *p.shape) for name, p in ours.named_parameters())
        assert grads.norms().shape == grads.dot(sums).shape == (0,) and grads.gram().shape == (0, 0)

    def test_batch_size_may_change(self, case: Case) -> None:
        layer = self.build(case)
        ours = self.converted(layer)
        for n in (3, 5, 2):
            inputs = self.inputs(case, n)
            self.losses(ours(*inputs), n).mean().backward()
            self.assert_rows(ours, self.loop(layer, inputs, n))

    def test_called_twice(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        other = tuple(t.flip(0) if isinstance(t, Tensor) else t for t in inputs)

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = copy.deepcopy(layer)

            def forward(self, *both: Any) -> tuple[Any, Any]:
                half = len(both) // 2
                return self.layer(*both[:half]), self.layer(*both[half:])

        ours = ps.convert_model(Twice())
        first, second = ours(*inputs, *other)
        (self.losses(first, self.batch) + 2 * self.losses(second, self.batch)).mean().backward()
        a, b = self.loop(layer, inputs, self.batch), self.loop(layer, other, self.batch)
        self.assert_rows(ours.layer, {k: a[k] + 2 * b[k] for k in a})

    def test_frozen_parameters(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        names = [name for name, _ in layer.named_parameters()]
        for frozen in names:
            part = copy.deepcopy(layer)
            part.get_parameter(frozen).requires_grad_(False)
            if len(names) == 1:
                ours = self.converted(part)
                assert not self.losses(ours(*inputs), self.batch).requires_grad
                continue
            ours = self.converted(part)
            self.losses(ours(*inputs), self.batch).mean().backward()
            assert ours.get_parameter(frozen).grad_sample is None and ours.get_parameter(frozen).grad is None
            self.assert_rows(ours, self.loop(part, inputs, self.batch))

    def test_rows_and_shared_input(self, case: Case) -> None:
        """k * B rows are B-major; one row is shared by all samples."""
        if not case.rows:
            pytest.skip("k rows a sample make no sense for its input")
        layer, n, k = self.build(case), 3, 2
        inputs = self.inputs(case, n * k)
        ours = self.converted(layer)
        with ps.batch_size(n):
            self.losses(ours(*inputs), n * k).reshape(n, k).sum(1).mean().backward()
        each = self.loop(layer, inputs, n * k)
        self.assert_rows(ours, {name: g.reshape(n, k, *g.shape[1:]).sum(1) for name, g in each.items()})
        shared = self.sample(inputs, 0)
        weights = torch.arange(1.0, n + 1, dtype=torch.float64)
        with ps.batch_size(n):
            (self.losses(ours(*shared), n) * weights).mean().backward()
        one = self.loop(layer, shared, 1)
        self.assert_rows(ours, {name: weights.reshape(n, *[1] * (g.ndim - 1)) * g for name, g in one.items()})

    def test_input_without_a_batch_dim(self, case: Case) -> None:
        """One sample, if the layer is called by itself, as torch takes it."""
        layer, inputs = self.build(case), self.inputs(case, 1)
        ours = self.converted(layer)
        dims = getattr(ours, "event_dims", None)
        usual = type(ours).arrange is ps.PSLayer.arrange  # others have tests of their own
        if not dims or len(inputs) != 1 or inputs[0].ndim != dims + 1 or not (case.rows and usual):
            pytest.skip("its input without a batch dim has tests of its own, or is none")
        if not isinstance(layer(*inputs), Tensor):
            pytest.skip("it returns more than one tensor")
        output = ours(inputs[0][0])
        torch.testing.assert_close(output, layer(inputs[0][0]))
        self.losses(output, 1).sum().backward()
        self.assert_rows(ours, self.loop(layer, inputs, 1))

    def test_non_contiguous_input(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        strided = tuple(
            t.transpose(0, -1).contiguous().transpose(0, -1) if isinstance(t, Tensor) else t for t in inputs
        )
        ours = self.converted(layer)
        self.losses(ours(*strided), self.batch).mean().backward()
        self.assert_rows(ours, self.loop(layer, inputs, self.batch))

    # ------------------------------------------------------------------ higher order
    def test_rows_can_be_differentiated_again(self, case: Case) -> None:
        """The gradient of sum_i |row_i|^2, with respect to the parameters (per sample) and to the input."""
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer, loss_reduction="sum")
        params = list(ours.parameters())
        self.losses(ours(*inputs), self.batch).sum().backward(create_graph=True)
        penalty = sum((p.grad_sample**2).flatten(1).sum(1) for p in params)
        for p in params:
            p.grad = None
        penalty.sum().backward()
        found = [(p.grad_sample, p.grad) for p in params]
        for p in params:  # break the cycles that create_graph makes
            p.grad = p.grad_sample = None

        def norm(i: int) -> Tensor:
            rows = self.loop(layer, self.sample(inputs, i), 1, create_graph=True)
            return sum((g**2).sum() for g in rows.values())

        second = true_rows(norm, layer, self.batch, zeros=True)
        for (row, total), expected in zip(found, second.values(), strict=True):
            if row is None:
                assert not expected.any()
                continue
            torch.testing.assert_close(row, expected, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(total, expected.sum(0), rtol=1e-8, atol=1e-8)

    def test_gradient_penalty(self, case: Case) -> None:
        """A loss that holds the derivative with respect to the input."""
        layer, inputs = self.build(case), self.inputs(case)
        if not all(isinstance(t, Tensor) and t.is_floating_point() for t in inputs):
            pytest.skip("it takes more than floating tensors")

        def penalty(net: nn.Module, inputs: tuple[Tensor, ...], n: int) -> Tensor:
            inputs = tuple(t.detach().requires_grad_() for t in inputs)
            losses = self.losses(net(*inputs), n)
            grads = torch.autograd.grad(losses.sum(), inputs, create_graph=True)
            return losses + sum((g**2).movedim(self.batch_dim(g), 0).flatten(1).sum(1) for g in grads)

        ours = self.converted(layer)
        penalty(ours, inputs, self.batch).mean().backward()
        expected = true_rows(lambda i: penalty(layer, self.sample(inputs, i), 1).sum(), layer, self.batch)
        assert_rows(ours, expected, rtol=1e-8, atol=1e-8)

    def batch_dim(self, t: Tensor) -> int:
        return 0

    # ------------------------------------------------------------------ weights that differ per sample
    def different(self, layer: nn.Module, n: int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        return {
            k: (p.detach() + torch.randn(n, *p.shape).to(p) / 3).requires_grad_()
            for k, p in layer.named_parameters()
        }

    def test_weights_that_differ_per_sample(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours, weights = self.converted(layer), self.different(layer, self.batch)
        losses = self.losses(torch.func.functional_call(ours, weights, inputs), self.batch)
        found = torch.autograd.grad(losses.sum(), list(weights.values()))
        with torch.no_grad():
            torch.testing.assert_close(
                self.losses(torch.func.functional_call(ours, weights, inputs), self.batch), losses.detach()
            )

        def loss(own: dict[str, Tensor], i: int) -> Tensor:
            return self.losses(torch.func.functional_call(layer, own, self.sample(inputs, i)), 1).sum()

        true, rows = members(loss, weights)
        torch.testing.assert_close(losses.detach(), true)
        torch.testing.assert_close(dict(zip(weights, found, strict=True)), rows, rtol=1e-9, atol=1e-10)

    def test_expanded_params_in_functional_form(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)
        params = ps.expand_params(ours, self.batch)
        out = torch.func.functional_call(ours, params, inputs)
        grads = torch.autograd.grad(self.losses(out, self.batch).sum(), list(params.values()))
        expected = self.loop(layer, inputs, self.batch)
        for name, g in zip(params, grads, strict=True):
            torch.testing.assert_close(g, expected[name], rtol=1e-9, atol=1e-10)
        assert all(p.grad_sample is None and p.grad is None for p in ours.parameters())

    @pytest.mark.parametrize("form", ["fast", "batched"])
    def test_gradcheck_and_gradgradcheck(self, case: Case, form: str) -> None:
        """Of each sample's loss: by one weight for all samples and by the inputs, or by weights that
        differ.
        """
        if not case.true_gradient:
            pytest.skip("torch defines a gradient that is not the derivative")
        layer, inputs = self.build(case), self.inputs(case, 2)
        ours, given = self.converted(layer), self.different(layer, 2)
        names, own = list(given), {}
        if form == "fast":
            given = {k: w[0].detach().requires_grad_() for k, w in given.items()}
            own = {
                id(t): t.clone().requires_grad_()
                for t in inputs
                if isinstance(t, Tensor) and t.is_floating_point()
            }

        def call(*values: Tensor) -> Tensor:
            params = dict(zip(names, values[: len(names)], strict=True))
            if form == "fast":
                params = {k: w.expand(2, *w.shape) for k, w in params.items()}
            # by identity: the three of self-attention are one
            replaced = dict(zip(own, values[len(names) :], strict=True))
            args = tuple(replaced.get(id(t), t) for t in inputs)
            return self.losses(torch.func.functional_call(ours, params, args), 2)

        with ps.tuning.holding():  # two passes are compared to the last bit
            assert torch.autograd.gradcheck(call, (*given.values(), *own.values()), fast_mode=True)
            assert torch.autograd.gradgradcheck(call, (*given.values(), *own.values()), fast_mode=True)

    # ------------------------------------------------------------------ passes
    def test_later_pass_replaces_and_retained_graph(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)
        loss = self.losses(ours(*inputs), self.batch).mean()
        loss.backward(retain_graph=True)
        kept = [p.grad_sample for p in ours.parameters()]
        before = [g.clone() for g in kept]
        (2 * loss).backward()
        for p, old, value in zip(ours.parameters(), kept, before, strict=True):
            torch.testing.assert_close(old, value)  # what the user keeps is never written to
            torch.testing.assert_close(p.grad_sample, 2 * value)

    def test_autograd_grad_has_no_side_effects(self, case: Case) -> None:
        """Of the first and of the second order: earlier rows stay, also where rows would add up."""
        layer, inputs = self.build(case), self.inputs(case)
        ours, expected = self.converted(layer), self.loop(layer, inputs, self.batch)
        params = list(ours.parameters())
        for mode in ("replace", "add"):
            ours.zero_grad()
            with ps.accumulating(ours, mode):
                self.losses(ours(*inputs), self.batch).mean().backward()
                before, given = [(p.grad.clone(), p.grad_sample) for p in params], self.inputs(case)
                wanted = [
                    t.requires_grad_() for t in given if isinstance(t, Tensor) and t.is_floating_point()
                ]
                loss = 3 * self.losses(ours(*given), self.batch).mean()
                found = torch.autograd.grad(loss, params, retain_graph=True)
                grads = torch.autograd.grad(loss, [*params, *wanted], create_graph=True)
                if (penalty := sum((g * g.detach()).sum() for g in grads)).requires_grad:
                    torch.autograd.grad(penalty, params, allow_unused=True)
            for p, g, (grad, rows) in zip(params, found, before, strict=True):
                torch.testing.assert_close(g, 3 * grad)
                torch.testing.assert_close(p.grad, grad)
                assert p.grad_sample is rows
            self.assert_rows(ours, expected)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    @pytest.mark.parametrize("create_graph", [False, True])
    def test_a_gradient_past_the_layer_is_refused(self, case: Case, create_graph: bool) -> None:
        ours, inputs = self.converted(self.build(case)), self.inputs(case)
        self.losses(ours(*inputs), self.batch).mean().backward(create_graph=create_graph)
        for p in ours.parameters():
            loss = self.losses(ours(*inputs), self.batch).mean() + p.square().sum()
            with pytest.raises(RuntimeError, match="did not come through its layer"):
                loss.backward(create_graph=create_graph)

    # ------------------------------------------------------------------ dtypes
    def test_float32_and_bfloat16(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        expected = self.loop(layer, inputs, self.batch)
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
            ours = self.converted(layer).to(dtype)
            self.losses(ours(*to(inputs, dtype)), self.batch).mean().backward()
            for name, p in ours.named_parameters():
                assert p.grad_sample.dtype == dtype
                scale = expected[name].abs().max().item() + 1e-3
                torch.testing.assert_close(
                    p.grad_sample.double() / scale, expected[name] / scale, rtol=0, atol=tolerance
                )

    def test_autocast(self, case: Case) -> None:
        layer, inputs = self.build(case).float(), to(self.inputs(case), torch.float32)
        ours = self.converted(layer)
        with torch.autocast("cpu", torch.bfloat16):
            plain = if_torch_can(layer, *inputs)
            out = ours(*inputs)
            loss = self.losses(out, self.batch).mean()
        for a, b in zip(leaves(out), leaves(plain), strict=True):
            assert a.dtype == b.dtype
        loss.backward()
        expected = self.loop(layer.double(), self.inputs(case), self.batch)
        for name, p in ours.named_parameters():
            assert p.grad_sample.dtype == torch.float32
            scale = expected[name].abs().max().item() + 1e-3
            torch.testing.assert_close(
                p.grad_sample.double() / scale, expected[name] / scale, rtol=0, atol=0.15
            )

    # ------------------------------------------------------------------ around the model
    def test_state_dict_both_ways(self, case: Case) -> None:
        layer = self.build(case)
        ours = self.converted(layer)
        assert list(ours.state_dict()) == list(layer.state_dict())
        with torch.no_grad():
            for p in ours.parameters():
                p.add_(1)
        layer.load_state_dict(ours.state_dict())
        ours.load_state_dict(layer.state_dict())
        torch.testing.assert_close(dict(ours.named_parameters()), dict(layer.named_parameters()))

    def test_deepcopy_and_pickle(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)
        self.losses(ours(*inputs), self.batch).mean().backward()
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        expected = self.loop(layer, inputs, self.batch)
        for twin in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
            assert type(twin) is type(ours)
            self.losses(twin(*inputs), self.batch).mean().backward()
            self.assert_rows(twin, expected)

    def test_restore_leaves_nothing(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = copy.deepcopy(layer)
        before, hooks = set(ours.__dict__), [p._backward_hooks for p in ours.parameters()]
        ps.convert_model(ours)
        self.losses(ours(*inputs), self.batch).mean().backward()
        ps.restore_model(ours)
        assert type(ours) is type(layer) and set(ours.__dict__) == before
        for p, h in zip(ours.parameters(), hooks, strict=True):
            assert not p.__dict__ and (p._backward_hooks or None) == h
        torch.testing.assert_close(ours(*inputs), layer(*inputs))

    def test_no_leak(self, case: Case) -> None:
        gc.collect()
        gc.freeze()  # what was there before is not counted, again and again
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)

        def step() -> None:
            self.losses(ours(*inputs), self.batch).mean().backward()
            ours.zero_grad()

        counts = []
        for _ in range(4):
            for _ in range(5):
                step()
            gc.collect()
            counts.append(sum(type(o) in (Tensor, nn.Parameter) for o in gc.get_objects()))
        assert counts[1] >= counts[2] >= counts[3]  # what earlier tests have left may still go

    @pytest.mark.parametrize("dense", [False, True], ids=["products", "dense"])
    def test_factored(self, case: Case, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Norms, sums and products by the form that the shapes suggest, and by dense rows of one sample at a
        time.
        """
        if not dense:  # however few the values of the rows are
            monkeypatch.setattr(Factor, "smaller", lambda self, held: self)
        else:
            monkeypatch.setattr("pslayers.core.factors.CHUNK_BYTES", 1)
            for form in ("meet", "meet_all"):
                for kind in (Outer, Gather, Bagged, Blocks):
                    monkeypatch.setattr(kind, form, getattr(Factor, form))
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)
        expected = self.loop(layer, inputs, self.batch)
        with ps.factored(ours, grad=False) as grads:
            self.losses(ours(*inputs), self.batch).mean().backward()
        assert_factored(grads, expected)
        assert all(p.grad is None and p.grad_sample is None for p in ours.parameters())
        assert not [name for name, rows in expected.items() if rows.any() and name not in grads]
        norm = flat(expected).square().sum(1).sqrt()
        bound = norm.median().item() or 1.0
        with ps.clipping(ours, bound) as clip:
            self.losses(ours(*inputs), self.batch).mean().backward()
        torch.testing.assert_close(clip.norms, norm, rtol=1e-8, atol=1e-9)
        factors = (bound / norm).clamp(max=1) / self.batch
        for name, p in ours.named_parameters():
            found = torch.zeros_like(p) if p.grad is None else p.grad
            clipped = torch.tensordot(factors, expected[name], 1)
            torch.testing.assert_close(found, clipped, rtol=1e-8, atol=1e-9)

    def test_check_layer_agrees(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        answer = ps.check_layer(layer, *inputs, loss_fn=lambda out: self.losses(out, self.batch))
        assert answer, str(answer)


def to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(to(v, dtype) for v in value)
    return value.to(dtype) if hasattr(value, "to") and leaves(value)[0].is_floating_point() else value


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value if v is not None for t in leaves(v)]
