"""Do the engines agree? Nothing is timed that gives wrong rows, clipped sums or products."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .engines import Engine, Plain
from .peers import Loop
from .registry import Problem

SAMPLED = 8  # rows that are compared one by one; all others through their mean
MISSING = "does not give"
EXACT, ROUNDED = 1e-6, {torch.float64: 1e-6, torch.float32: 0.05, torch.bfloat16: 0.2}


class Reference:
    """What is right."""

    exact: ClassVar[float] = EXACT

    @classmethod
    def of(cls, problem: Problem, autocast: torch.dtype | None) -> "Reference":
        """By plain training and the loop over samples."""
        raise NotImplementedError

    def ask(self, engine: Engine) -> None:
        """Tell an engine what it shall compute."""

    def disagreement(self, engine: Engine, tolerance: float) -> str | None:
        """What is wrong with the engine's last step, in words; None where it agrees."""
        raise NotImplementedError


@dataclass
class Rows(Reference):
    """Plain training's summed gradients, and a few samples' rows by the loop."""

    grads: dict[str, Tensor]
    rows: dict[str, Tensor]
    samples: list[int]

    @classmethod
    def of(cls, problem: Problem, autocast: torch.dtype | None) -> "Rows":
        """Run the plain step, and the loop on samples from the whole batch."""
        size = len(problem.target)
        samples = sorted({i * (size - 1) // max(SAMPLED - 1, 1) for i in range(SAMPLED)})
        plain = Plain(copy.deepcopy(problem.model), problem.loss, autocast)
        plain.step(problem.inputs, problem.target)
        grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in plain.params().items()}
        loop = Loop(copy.deepcopy(problem.model), problem.loss, autocast)
        rows = [loop.row(problem.inputs, problem.target, i) for i in samples]
        return cls(
            grads, {k: torch.stack(g) for k, g in zip(grads, zip(*rows, strict=True), strict=True)}, samples
        )

    def disagreement(self, engine: Engine, tolerance: float) -> str | None:
        """The sums, and of engines that make them the rows."""
        if problem := _compare("the summed gradient", engine.grads(), self.grads, tolerance):
            return problem
        if not engine.makes_rows:
            return None
        rows = engine.rows()
        picked = {
            k: None if g is None else g[self.samples] if len(g) > self.samples[-1] else g
            for k, g in rows.items()
        }
        means = {k: None if g is None else g.mean(0) for k, g in rows.items()}
        return _compare("rows", picked, self.rows, tolerance) or _compare(
            "the rows' mean", means, self.grads, tolerance
        )


@dataclass
class Clipped(Reference):
    """The mean of the samples' gradients, each clipped to the median of their norms, by the loop."""

    grads: dict[str, Tensor]
    max_norm: float
    exact: ClassVar[float] = 1e-5  # Opacus divides by the norm and 1e-6

    @classmethod
    def of(cls, problem: Problem, autocast: torch.dtype | None) -> "Clipped":
        """Two runs of the loop: for the norms, and for the sum."""
        size = len(problem.target)
        loop = Loop(copy.deepcopy(problem.model), problem.loss, autocast)

        def row(i: int) -> tuple[Tensor, ...]:
            return loop.row(problem.inputs, problem.target, i)

        norms = torch.stack(
            [torch.stack([g.square().sum() for g in row(i)]).sum().sqrt() for i in range(size)]
        )
        max_norm = float(norms.median())
        grads = {k: torch.zeros_like(p) for k, p in loop.params().items()}
        for i, factor in enumerate((max_norm / norms).clamp(max=1) / size):
            for total, g in zip(grads.values(), row(i), strict=True):
                total += factor * g
        return cls(grads, max_norm)

    def ask(self, engine: Engine) -> None:
        """Clip at this norm."""
        engine.max_norm = self.max_norm

    def disagreement(self, engine: Engine, tolerance: float) -> str | None:
        """Plain training, which clips nothing, always agrees."""
        if isinstance(engine, Plain):
            return None
        return _compare("the clipped gradient", engine.grads(), self.grads, tolerance)


@dataclass
class Gram(Reference):
    """The products of the samples' gradients with each other, of the loop's rows."""

    gram: Tensor

    @classmethod
    def of(cls, problem: Problem, autocast: torch.dtype | None) -> "Gram":
        """Row by row."""
        loop = Loop(copy.deepcopy(problem.model), problem.loss, autocast)
        rows = [
            torch.cat([g.flatten() for g in loop.row(problem.inputs, problem.target, i)])
            for i in range(len(problem.target))
        ]
        return cls(torch.stack([torch.stack([one @ other for other in rows]) for one in rows]))

    def disagreement(self, engine: Engine, tolerance: float) -> str | None:
        """Plain training, which has none, always agrees."""
        if isinstance(engine, Plain):
            return None
        return _compare("the Gram matrix", {"all": engine.gram}, {"all": self.gram}, tolerance)


REFERENCES: dict[str, type[Reference]] = {"rows": Rows, "clipped": Clipped, "gram": Gram}


def _compare(
    what: str, found: dict[str, Tensor | None], expected: dict[str, Tensor], tolerance: float
) -> str | None:
    # a gradient that is zero but for rounding (a bias before a norm) is held against the largest parameter's
    floor = 1e-3 * max((float(g.norm()) for g in expected.values()), default=0.0)
    for name, right in expected.items():
        g = found.get(name)
        if g is None:
            if right.any():
                return f"{MISSING} {what} of {name}"
        elif g.shape != right.shape:
            return f"{what} of {name}: shape {tuple(g.shape)} for {tuple(right.shape)}"
        elif not (error := float((g - right).norm())) <= tolerance * max(float(right.norm()), floor):
            return f"{what} of {name}: off by {error / max(float(right.norm()), floor, 1e-30):.1e}"
    return None


def verdict(kind: type[Engine], problem: Problem, reference: Reference, dtype: torch.dtype) -> str:
    """Says "ok", or "no: reason" where the engine raises or leaves rows out, or "wrong: reason".

    Two steps in the precision and at the batch size that are timed, so that state left behind shows.
    """
    autocast = dtype if dtype == torch.bfloat16 else None
    try:
        engine = kind(copy.deepcopy(problem.model), problem.loss, autocast)
        reference.ask(engine)
        for _ in range(2):
            engine.step(problem.inputs, problem.target)
        found = reference.disagreement(engine, ROUNDED[dtype])
    except Exception as error:  # whatever a peer raises is its answer
        return f"no: {_in_a_line(error)}"
    if found is None:
        return "ok"
    return f"no: {found}" if found.startswith(MISSING) else f"wrong: {found}"


def exact_verdict(kind: type[Engine], problem: Problem, reference: Reference) -> str:
    """The same in float64 on a few samples, to many digits: in lower precision a ReLU that rounding switches
    moves a row by 1 %.
    """
    try:
        engine = kind(copy.deepcopy(problem.model), problem.loss)
        reference.ask(engine)
        engine.step(problem.inputs, problem.target)
        found = reference.disagreement(engine, reference.exact)
    except Exception as error:
        # some peers have no float64: the other check is theirs
        return "ok" if kind.peer else f"no: {_in_a_line(error)} (float64)"
    return f"wrong: {found} (float64)" if found else "ok"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:160]}"
