"""What samples give alone, against what they give in batches of other samples: see `samples`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .losses import combination, made_of, shapes_of, sketch
from .rows import Rows
from .samples import Samples
from .trials import Run, Trials, cannot, difference


@dataclass
class _Alone:
    """What one sample gives alone."""

    loss: Tensor
    sketches: dict[str, Tensor]  # of its gradient
    outputs: list[Tensor]
    shapes: list[torch.Size]  # of its outputs' rows


@dataclass
class _Batch:
    """What some samples give in a batch."""

    chosen: list[int]  # the samples
    words: str
    run: Run
    sketches: dict[str, Tensor]
    losses: Tensor  # of the samples alone


class Experiments:
    """Batches of samples that are held by inputs in one way; "alone" is a batch of `copies` of one sample."""

    def __init__(self, trials: Trials, samples: Samples, copies: int) -> None:
        self.trials, self.samples, self.copies = trials, samples, copies
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.alone: dict[int, _Alone] = {}

    def run(self, ours: Run | None) -> None:
        """Compare every sample with itself; of one loss, rows with the gradients of samples alone."""
        t = self.trials
        rows = Rows(t, ours.rows) if ours is not None and t.scalar else None
        for i in range(len(self.samples)):
            try:
                self.alone[i] = self.measure_alone(i, rows if i < t.size else None)
            except Exception as error:
                if i < t.size:
                    text = f"{cannot(f'sample {i}', error)}: it was not compared with its batch"
                    (self.problems if t.scalar else self.notes).append(text)
                    return
                # a changed one: an id that there is none of, say, which tells nothing
        for chosen, words in self.samples.batches():
            if not all(i in self.alone for i in chosen):
                continue
            try:
                shapes = [self.alone[i].shapes for i in chosen]
                run = t.measure(
                    t.plain, self.samples.take(chosen), len(chosen), projected=t.projected, shapes=shapes
                )
            except Exception as error:
                if not self.notes:
                    self.notes.append(
                        f"not tried: samples {words} ({type(error).__name__}: {str(error).splitlines()[0]})"
                    )
                continue
            losses = torch.stack([self.alone[i].loss for i in chosen])
            if problem := self.problem(_Batch(chosen, words, run, self.sketches(run.grads), losses)):
                self.problems.append(problem)
                if t.scalar or len(self.problems) == 2:
                    return
        if rows is not None:
            self.problems += rows.problems()

    def measure_alone(self, i: int, rows: Rows | None) -> _Alone:
        """What sample i of the pool gives; `rows`: whether its row is right."""
        t = self.trials
        run = t.measure(t.plain, self.samples.take([i] * self.copies), self.copies, projected=t.projected)
        share = 1 if t.scalar and t.mean else self.copies
        grads = {name: g if g is None else g / share for name, g in run.grads.items()}
        if rows is not None:
            rows.add(i, grads)
        loss = run.losses[0] if run.losses.ndim else run.losses / share
        dims = t.dims if len(t.dims) == len(run.outputs) else [None] * len(run.outputs)
        return _Alone(loss.double(), self.sketches(grads), run.outputs, shapes_of(run.outputs, dims))

    def sketches(self, grads: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Gradients in short; no gradient is one of zeros."""
        return {
            n: sketch(torch.zeros_like(self.trials.params[n]) if g is None else g) for n, g in grads.items()
        }

    def problem(self, batch: _Batch) -> str | None:
        """How samples give something else in a batch than alone, in words; None where they do not."""
        t, found, losses = self.trials, batch.run.losses.double(), batch.losses
        expected = losses if not t.scalar else losses.mean() if t.mean else losses.sum()
        scale = torch.cat([found.view(-1), losses]).nan_to_num(0, 0, 0).abs().max().item()
        same = (found == expected) | (found.isnan() & expected.isnan())
        worst, place = torch.where(same, 0, (found - expected).abs()).nan_to_num(torch.inf).view(-1).max(0)
        if worst.item() <= t.tolerance * scale:
            return self.other_gradient(batch) if expected.isfinite().all() else None
        if t.scalar:
            return self.other_loss(batch, self.factors(batch))
        name, where = self.samples.name(batch.chosen[int(place)]), self.where(batch, int(place))
        if t.projected:
            off = worst.item() / scale
            return (
                f"the output of {name} alone is not its row {batch.words} (off by {off:.1e} of the largest):"
                f" {where}"
            )
        return (
            f"the loss of {name} alone is {losses[place].item():.4g}, and {found[place].item():.4g}"
            f" {batch.words}: {where}"
        )

    def other_gradient(self, batch: _Batch) -> str | None:
        """Where the gradient of a batch is not that of its samples, though its loss is."""
        t, alone = self.trials, [self.alone[i].sketches for i in batch.chosen]
        largest = max(s.abs().max().item() for sketches in alone for s in sketches.values() if s.numel())
        for name, found in batch.sketches.items():
            total = torch.stack([sketches[name] for sketches in alone]).sum(0) / (
                len(alone) if t.scalar and t.mean else 1
            )
            if close(found, total, largest, t):
                continue
            if t.scalar and (factors := self.factors(batch)) is not None:
                return self.other_loss(batch, factors)
            return (
                f"`{name}`: the gradients of samples alone do not give that {batch.words} (off by"
                f" {difference(found, total):.1e} of the largest), though their losses do: samples interact"
                " in the backward pass"
            )
        return None

    def other_loss(self, batch: _Batch, factors: Tensor | None) -> str:
        """What the loss of a batch is, where it is not the mean (sum) of its samples' losses, and the way
        out.
        """
        t, losses = self.trials, batch.losses
        text = (
            f"the loss {batch.words} is"
            f" {made_of(batch.run.losses.item(), losses, factors, 'mean' if t.mean else 'sum')}."
        )
        if not losses.isfinite().all():
            place = int((~losses.isfinite()).nonzero()[0])
            name = self.samples.name(batch.chosen[place])
            text += f" The loss of {name} alone is {losses[place].item()}: perhaps nothing in it counts."
        if factors is None and (held := t.held()):
            return f"{text}{held} One sample alone was not given its own."
        where = self.where(batch, 0)
        if factors is None:
            text += f" {where[0].upper()}{where[1:]}."
            if "in the loss" in where:
                text += (
                    " Such a loss (contrastive, or with a statistic of the batch) is no sum of samples' own"
                    " losses."
                )
        elif "in the model," in where:
            text += f" And {where}."
        return text

    def factors(self, batch: _Batch) -> Tensor | None:
        """The factors with which losses and gradients of samples add up to those of their batch; None if none
        do.
        """
        finite = batch.losses.isfinite()  # a sample of which nothing counts has 0/0
        alone = [self.alone[i] for i in batch.chosen if self.alone[i].loss.isfinite()]
        columns = [[a.loss.view(1), *a.sketches.values()] for a in alone]
        columns.append([batch.run.losses.double().view(1), *batch.sketches.values()])
        sizes = [
            max(c[k].abs().max().item() if c[k].numel() else 0.0 for c in columns)
            for k in range(len(columns[-1]))
        ]
        least = max(1e-6 * max(sizes[1:], default=0.0), 1e-300)
        scaled = [torch.cat([v / max(s, least) for v, s in zip(c, sizes, strict=True)]) for c in columns]
        factors = combination(scaled[-1], torch.stack(scaled[:-1], 1)) if alone else None
        return (
            None
            if factors is None
            else torch.zeros_like(batch.losses).masked_scatter(finite, factors.to(batch.losses))
        )

    def where(self, batch: _Batch, place: int) -> str:
        """Where samples interact, in words: in the model, if its outputs differ already, and in which part of
        it.
        """
        t, outputs, compared = self.trials, batch.run.outputs, False
        for p in (place, *range(len(batch.chosen))):
            own = self.alone[batch.chosen[p]].outputs
            for k, dim in enumerate(t.dims if len(t.dims) == len(outputs) == len(own) else ()):
                if dim is not None:
                    compared = True
                    if t.rows_differ(outputs[k], own[k], dim, p):
                        first = t.first_difference(self.samples, batch.chosen, p, self.copies)
                        return f"samples interact in the model, {first or 'as its output tells'}"
        return "samples interact in the " + (
            "loss (the model's outputs are the same)" if compared else "model or the loss"
        )


def close(a: Tensor, b: Tensor, largest: float, trials: Trials) -> bool:
    """Whether a gradient is right, within its own size or the rounding of all."""
    if not b.numel():
        return True
    return (a - b).abs().max().item() <= trials.allowed(b.abs().max().item(), largest)
