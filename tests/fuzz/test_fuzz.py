"""A slice of the fuzzer, and proof that it can fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.attribution.ragged import RaggedCall, Use
from pslayers.core.factors import Owners
from pslayers.core.recorder import Recorder

from .fuzzer import KINDS, run


@pytest.mark.fuzz
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("start", range(0, 300, 20))
def test_configurations(start: int) -> None:
    """Nothing is wrong, and no error is unclear."""
    results = [run(seed) for seed in range(start, start + 20)]
    assert not [str(r) for r in results if r.verdict in ("wrong", "unclear")]


def test_a_configuration_is_a_function_of_its_number() -> None:
    for seed in range(len(KINDS)):
        first, second = run(seed), run(seed)
        assert str(first) == str(second) and first.kind == KINDS[seed]


def finds(verdict: str, *kinds: str, first: int = 0) -> bool:
    """Whether one of some configurations of these kinds gets this verdict."""
    return any(run(seed, kind).verdict == verdict for seed in range(first, first + 40) for kind in kinds)


@pytest.mark.parametrize(
    "change",
    [lambda rows: rows.flip(0), lambda rows: 1.001 * rows, lambda rows: rows.cumsum(0), torch.zeros_like],
    ids=["other-order", "scale", "mixed", "zeros"],
)
def test_wrong_rows_are_found(change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    take = Recorder.store
    monkeypatch.setattr(Recorder, "store", lambda self, rows: take(self, change(rows)))
    assert finds("wrong", "layer") and finds("wrong", "calls")


@pytest.mark.parametrize("what", ["output", "gradient", "buffer", "random numbers"])
def test_other_things_than_rows_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(module: nn.Module, args: Any, output: Any) -> Any:
        match what:
            case "output":
                return output + 1e-3 if isinstance(output, Tensor) else None
            case "gradient":
                for p in module.parameters():
                    p.grad = torch.ones_like(p)
            case "buffer":
                for b in module.buffers():
                    b.add_(1)
            case _:
                torch.rand(())
        return None

    convert = ps.convert_model

    def converted(model: nn.Module, **options: Any) -> nn.Module:
        convert(model, **options).register_forward_hook(disturbed)
        return model

    monkeypatch.setattr(ps, "convert_model", converted)
    assert finds("wrong", "layer", "model", first=29)  # models with buffers are rare


def test_leaks_that_are_let_pass_and_unclear_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps, "convert_model", lambda model, **_: model)
    assert finds("wrong", "leak")

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the tensors have 3 dims")

    monkeypatch.setattr(ps, "convert_model", fails)
    assert finds("unclear", "layer")


@pytest.mark.parametrize("fault", ["two owners swapped", "not verified", "owners of an earlier batch"])
def test_faults_of_ragged_batches_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = Use.owners

    def swapped(use: Use) -> Owners:
        right = owners(use)
        return Owners(torch.cat([right.ids[1:2], right.ids[:1], right.ids[2:]]), right.size)

    def trusting(use: Use, plain: Tensor, marks: Any, eps: float, call: RaggedCall) -> None:
        use.found = next(iter(call.told(len(plain))), None)

    def remembered(use: Use) -> Owners:
        known.setdefault(use.rows, owners(use))
        return known[use.rows] if known[use.rows].size == owners(use).size else owners(use)

    known: dict[int, Owners] = {}
    if fault == "not verified":
        monkeypatch.setattr(Use, "_tell", trusting)
    else:
        monkeypatch.setattr(Use, "owners", swapped if fault == "two owners swapped" else remembered)
    assert finds("wrong", "ragged")
