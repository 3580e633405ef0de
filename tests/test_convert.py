"""Conversion: all or nothing, errors by name, the report, restoring."""

import abc
import copy
import functools
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Generic, TypeVar

import pytest
import torch
from einops import einsum
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import pslayers as ps

from .oracle import assert_rows, assert_rows_right, loop, square, squares


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class MyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Net(nn.Module):
    """Layers, a container, aliases, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)
        self.alias = self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(torch.tanh(self.encoder(x)))


def untouched(model: nn.Module) -> bool:
    return all(
        not type(m).__module__.startswith("pslayers") and "_ps" not in m.__dict__ for m in model.modules()
    ) and not any(p.__dict__ for p in model.parameters())


def with_forward() -> nn.Module:
    model = Net()
    model.encoder[0].forward = lambda x: x
    return model


REFUSED = {
    "custom": (
        lambda: nn.Sequential(nn.Linear(4, 4), Custom()),
        r"`1` \(Custom\) has no replacement; .*parameters: scale",
    ),
    "subclass": (
        lambda: nn.Sequential(MyLinear(4, 4)),
        r"`0` \(MyLinear\) has no replacement \(as a subclass of Linear",
    ),
    "batch-norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        (
            r"`1` \(BatchNorm1d\) mixes samples in training mode.*undefined: call \.eval\(\) on it, or"
            r" .*replace_batch_norm"
        ),
    ),
    "batch-norm-without-parameters": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)),
        r"`1` \(BatchNorm1d\) mixes samples",
    ),
    "batch-norm-without-statistics": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        r"`1` \(BatchNorm1d\) normalises over the batch",
    ),
    "frequencies": (
        lambda: nn.Embedding(4, 4, scale_grad_by_freq=True),
        r"`\(model\)` \(Embedding\) counts how often",
    ),
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), r"sparse=True"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"`0` \(LazyLinear\) is lazy.*run one batch"),
    "own-forward": (with_forward, r"`encoder\.0` \(Linear\) has a forward of its own set on the instance"),
    "script": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))),
        r"`0` \(RecursiveScriptModule\) is compiled",
    ),
    "old-weight-norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(4, 4))),
        r"computed from other parameters",
    ),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
        r"ParametrizedLinear.*has no",
    ),
    "nothing": (lambda: nn.Sequential(nn.ReLU()), r"nothing to convert. These have one: .*Linear"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_untouched(name: str) -> None:
    build, message = REFUSED[name]
    model = build()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ps.ConversionError, match=message):
        ps.convert_model(model, on_unsupported="error")
    assert [type(m) for m in model.modules()] == classes and untouched(model)


def test_all_problems_are_listed_at_once() -> None:
    model = nn.Sequential(Custom(), nn.Sequential(MyLinear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    with pytest.raises(ps.ConversionError) as error:
        ps.convert_model(model, on_unsupported="error")
    assert all(
        part in str(error.value)
        for part in ("`0` (Custom)", "`1.0` (MyLinear)", "`1.1` (BatchNorm1d)", "'skip'")
    )


def test_bad_options() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module; got list"):
        ps.convert_model([nn.Linear(2, 2)])  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"`loss_reduction` must be one of 'mean', 'sum'; got 'none'"):
        ps.convert_model(nn.Linear(2, 2), loss_reduction="none")
    with pytest.raises(
        ValueError,
        match=r"`on_unsupported` must be one of 'general', 'error', 'skip', 'freeze'; got 'ignore'",
    ):
        ps.convert_model(nn.Linear(2, 2), on_unsupported="ignore")


@pytest.mark.parametrize("how", ["skip", "freeze"])
def test_on_unsupported(how: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Custom(), nn.Linear(4, 2)), torch.randn(5, 4)
    ours = ps.convert_model(model, on_unsupported=how)
    squares(ours(x)).mean().backward()
    assert ours[1].scale.grad_sample is None and (ours[1].scale.grad is None) == (how == "freeze")
    assert ours[0].weight.grad_sample.shape == (5, 4, 4)
    assert "skipped" in str(ps.report(ours)) if how == "skip" else ours[1].scale.requires_grad is False


def test_same_parameters_names_hooks_optimizer_and_aliases() -> None:
    model = Net().double()
    params, names = list(model.parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    ours = ps.convert_model(model)
    assert ours is model and isinstance(ours, Net) and type(ours).__name__ == "Net" and not ours.training
    assert (
        all(p is q for p, q in zip(params, ours.parameters(), strict=True))
        and list(ours.state_dict()) == names
    )
    assert ours.alias is ours.head and type(ours.head) is ps.PSLinear
    x = torch.randn(3, 4, dtype=torch.float64)
    before = ours.head.weight.detach().clone()
    squares(ours(x)).mean().backward()
    optimizer.step()
    assert calls == [1] and not torch.equal(before, ours.head.weight)
    ps.restore_model(ours)
    assert type(ours) is Net and type(ours.head) is nn.Linear and untouched(ours)


def test_idempotent_and_reconfigurable() -> None:
    model = Net().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    twin = copy.deepcopy(model)
    for reduction in ("mean", "sum", "mean"):
        ps.convert_model(model, loss_reduction=reduction)
        assert type(model).__mro__.count(Net) == 1
        model.zero_grad()
        getattr(squares(model(x)), reduction)().backward()
        torch.testing.assert_close(
            getattr(model.head.weight.grad_sample, reduction)(0), model.head.weight.grad
        )
    assert_rows_right(twin, x)


def test_parts_converted_apart_then_whole() -> None:
    model = Net().double()
    ps.convert_model(model.encoder)
    assert_rows_right(
        copy.deepcopy(ps.restore_model(copy.deepcopy(model))), torch.randn(3, 4, dtype=torch.float64)
    )
    ours, x = ps.convert_model(model, loss_reduction="sum"), torch.randn(3, 4).double()
    squares(ours.encoder(x)).sum().backward()  # the part goes by the settings of the whole
    for p in ours.encoder.parameters():
        torch.testing.assert_close(p.grad_sample.sum(0), p.grad)


def test_calling_a_part_of_the_model() -> None:
    model = Net().double()
    ours = ps.convert_model(copy.deepcopy(model))
    assert_rows_right(model.encoder, torch.randn(3, 5, 4, dtype=torch.float64), converted=ours.encoder)


def test_keyword_only_and_nested_inputs() -> None:
    class Nested(Net):
        def forward(self, *, batch: dict, scale: float = 1.0) -> dict:
            return {"out": super().forward(batch["x"][0]) * scale}

    model, x = Nested().double(), torch.randn(3, 4, dtype=torch.float64)
    ours = ps.convert_model(model)
    squares(ours(batch={"x": [x], "none": None})["out"]).mean().backward()
    assert ours.head.weight.grad_sample.shape == (3, 2, 4)


def test_wrong_input_is_named() -> None:
    ours = ps.convert_model(Net())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # torch's own
        ours(torch.randn(3, 5))

    class Halves(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x, x.sort(0)[0][: len(x) // 2]]))

    with pytest.raises(
        ValueError, match=r"`encoder\.0` \(PSLinear\) got an input of shape \(6, 4\) in a batch of 4 samples"
    ):
        ps.convert_model(Halves())(torch.randn(4, 4))


def test_report() -> None:
    table = ps.report(ps.convert_model(nn.Sequential(Net(), Custom()), on_unsupported="skip"))
    assert table.parameters == 4 * 4 + 4 + 8 + 10 + 4 and table.bytes_per_sample == 4 * (4 * 4 + 4 + 8 + 10)
    lines = str(table).splitlines()
    assert lines[0].split() == ["module", "class", "replacement", "parameters", "bytes/sample"]
    found = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert found["0.encoder.0"] == ["Linear", "PSLinear", "20", "80"] and found["1"] == [
        "Custom",
        "skipped",
        "4",
        "0",
    ]
    assert found["0"] == ["Net", "container", "0", "0"]


def test_pickle_of_a_converted_model_needs_no_original_instance() -> None:
    ours = ps.convert_model(Net())
    twin = pickle.loads(pickle.dumps(ours))
    assert type(twin) is type(ours) and type(twin.head) is ps.PSLinear
    assert ps.restore_model(twin).state_dict().keys() == ours.state_dict().keys()
    assert type(twin) is Net


def test_user_layer_is_one_class() -> None:
    class PSBilinear(ps.PSLayer, nn.Bilinear, replaces=nn.Bilinear):
        def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
            w, b = self.expand("weight"), self.expand("bias")
            return einsum(x1, w, x2, "n i, n o i j, n j -> n o") + b

    try:

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.bi = nn.Linear(4, 4), nn.Bilinear(4, 4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.bi(torch.tanh(self.fc(x)), x)

        x = torch.randn(5, 4, dtype=torch.float64)
        for reduction in ("mean", "sum"):
            model = Model().double()
            assert ps.check_model(model, x)
            ours = ps.convert_model(copy.deepcopy(model), loss_reduction=reduction)
            getattr(squares(ours(x)), reduction)().backward()
            assert_rows(ours, loop(model, square, (x,)))
        assert_rows_right(Model(), x)
        with pytest.raises(TypeError, match="is no subclass of it"):
            type("Wrong", (ps.PSLayer, nn.Linear), {}, replaces=nn.Bilinear)
    finally:
        from pslayers.modules.base import REGISTRY

        REGISTRY[nn.Bilinear] = ps.PSBilinear


def test_user_layer_that_forgets_to_expand_is_an_error_by_name() -> None:
    class PSForgets(ps.PSLayer, nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ni,noi->no", x, self.expand("weight")) + self.bias

    layer = PSForgets(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"`bias` received a gradient.*self\.expand\(name\)"):
        squares(layer(x)).mean().backward()


def test_user_layer_with_children_keeps_their_gradients_right() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(x * self.scale))

    class PSBlock(ps.PSLayer, Block, replaces=Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(x * self.expand("scale")))

    try:
        assert_rows_right(nn.Sequential(Block(), Block()), torch.randn(5, 4, dtype=torch.float64))
    finally:
        from pslayers.modules.base import REGISTRY

        del REGISTRY[Block]


@pytest.mark.parametrize("how", ["freeze", "skip", "error"])
def test_a_failing_example_leaves_everything_as_it_was(how: str) -> None:
    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.custom = nn.Linear(4, 4), Custom() if how != "error" else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.custom(torch.tanh(self.fc(x)).roll(1, 0))

    model = Rolled()
    for converted in (False, True):
        if converted:
            ps.convert_model(model, on_unsupported=how if how != "freeze" else "skip")
        before = [(type(m), dict(m.__dict__)) for m in model.modules()]
        with pytest.raises(ps.ConversionError, match="has not been changed"):
            ps.convert_model(model, on_unsupported=how, example=torch.randn(4, 4))
        assert [(type(m), m.__dict__) for m in model.modules()] == before
        assert all(p.requires_grad for p in model.parameters())
        assert converted or untouched(model)


class Chooses(nn.Module):
    """Has no forward but the one of its methods that it was asked for, as FasterNet's partial convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(2, 2), nn.Parameter(torch.randn(2))
        self.forward = self.forward_split  # type: ignore[method-assign]

    def forward_split(self, x: Tensor) -> Tensor:
        first, rest = x.split([2, x.shape[1] - 2], 1)
        return torch.cat([self.fc(first) * self.scale, rest], 1)

    def extra_repr(self) -> str:
        """Asks for a class: then the model is run with the original classes, too."""
        return type(self).__name__


def test_a_forward_that_is_one_of_the_modules_own_methods() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Chooses(), nn.Linear(4, 3)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    ours = ps.convert_model(ps.convert_model(copy.deepcopy(model)))
    for twin in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert assert_rows_right(model, x, converted=twin) is twin
        assert ps.report(twin).fast == 1
        back = ps.restore_model(twin)[1]
        assert (
            type(back) is Chooses
            and back.forward.__self__ is back
            and back.forward.__func__ is Chooses.forward_split
        )
        torch.testing.assert_close(twin(x), model(x))


def test_a_forward_of_ones_own_comes_back_after_an_error() -> None:
    model = nn.Sequential(Chooses(), nn.Flatten())
    with pytest.raises(RuntimeError, match="split"):
        ps.convert_model(model, example=torch.randn(3, 1))
    assert untouched(model) and model[0].forward.__self__ is model[0]


def test_a_layer_with_another_of_its_methods_as_its_forward() -> None:
    class Doubles(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.forward = self.twice  # type: ignore[method-assign]

        def extra_repr(self) -> str:
            return type(self).__name__

        def twice(self, x: Tensor) -> Tensor:
            return 2 * nn.functional.linear(x, self.weight, self.bias)

    assert_rows_right(nn.Sequential(Doubles(), nn.Linear(4, 3)), torch.randn(3, 4, dtype=torch.float64))


T = TypeVar("T")


class Abstract(abc.ABC, nn.Module):
    """Its memory is laid out as that of abc.ABC, which has slots."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.rand(2))

    @abc.abstractmethod
    def encode(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(self.layer(x)) * self.scale


class Concrete(Abstract):
    def encode(self, x: Tensor) -> Tensor:
        return x.tanh()


class GenericModel(Generic[T], nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.shift = Concrete(), nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.shift


@pytest.mark.parametrize("make", [Concrete, GenericModel])
def test_a_class_with_a_base_that_has_slots(make: Callable[[], nn.Module]) -> None:
    model, x = make().double(), torch.randn(4, 3, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    assert isinstance(ours, make) and type(ours).__name__ == make.__name__
    assert_rows_right(model, x, converted=ours)
    assert_rows_right(model, x, converted=pickle.loads(pickle.dumps(ours)))
    assert_rows_right(model, x, converted=copy.deepcopy(ours))
    assert type(ps.restore_model(ours)) is make
    torch.testing.assert_close(ours(x), model(x))


def by_wraps(module: nn.Module) -> Callable[..., Tensor]:
    inside = module.forward
    return functools.wraps(inside)(lambda x: 2 * inside(x))


def by_a_method(module: nn.Module) -> Callable[..., Tensor]:
    """As accelerate's mixed precision does."""
    inside = module.forward.__func__  # type: ignore[attr-defined]
    return MethodType(functools.wraps(inside)(lambda self, x: 2 * inside(self, x)), module)


def by_hand(module: nn.Module) -> Callable[..., Tensor]:
    inside = module.forward
    return lambda x: 2 * inside(x)


@pytest.mark.parametrize("around", [by_wraps, by_a_method, by_hand])
@pytest.mark.parametrize("build", [Custom, lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, 3))])
def test_what_was_put_around_a_converted_forward_outlives_it(
    around: Callable[[nn.Module], Callable[..., Tensor]], build: Callable[[], nn.Module]
) -> None:
    model, x = build().double(), torch.randn(5, 4, dtype=torch.float64)
    expected = loop(model, lambda out, _: square(2 * out, 0), (x,))
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    ours.forward = around(ours)  # type: ignore[method-assign]
    squares(ours(x)).sum().backward()
    assert_rows(ours, expected)
    ps.restore_model(ours)
    torch.testing.assert_close(ours(x), 2 * model(x))
    assert not any(hasattr(p, "grad_sample") for p in ours.parameters())
    if around is by_hand:  # of which nobody can tell what it is around
        with pytest.raises(ps.ConversionError, match="forward of its own set on the instance"):
            ps.convert_model(ours)
    else:
        ps.convert_model(ours, loss_reduction="sum")
        squares(ours(x)).sum().backward()
        assert_rows(ours, expected)
    torch.testing.assert_close(ours(x), 2 * model(x))
