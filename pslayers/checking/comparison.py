"""What `check_model` compares in the batch itself: outputs, rows with a loop over samples, whether a loss
reaches other rows.
"""

from .experiments import Experiments, close
from .rows import Rows, unexpanded
from .trials import Run, Trials, difference


class Comparison:
    """Collects what is wrong, and what could not be checked."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self.problems: list[str] = []
        self.notes: list[str] = []

    def run(self) -> None:
        """Compare everything."""
        t = self.trials
        t.look_at_parts(self.notes)
        plain = t.measure(t.plain, t.value, t.size, projected=not t.call.given)
        ours = t.measure_twin(projected=not t.call.given)
        if ours is not None:
            self.same_outputs(ours, plain)
        if t.size and t.params and not plain.losses.isfinite().all():
            self.problems.append(f"the loss is not finite: {plain.losses.tolist()}")
        elif t.size and t.params:
            if ours is not None and t.scalar:
                self.adds_up(ours, plain)
                if t.owners and t.projects() and (rows := t.measure_twin(projected=True)) is not None:
                    self.in_the_batch(rows, projected=True)
            elif ours is not None:
                self.in_the_batch(ours, projected=not t.call.given)
            self.apart(ours)
        if t.refused is not None:
            self.problems.insert(0, t.refused)

    # ------------------------------------------------------------------------------------------- in the batch
    def same_outputs(self, ours: Run, plain: Run) -> None:
        """Outputs are those of the original layers."""
        for t, original in zip(ours.outputs, plain.outputs, strict=False):
            if t.shape != original.shape:
                self.problems.append(
                    f"the output has shape {tuple(t.shape)} instead of {tuple(original.shape)}"
                )
            elif (error := difference(t, original)) > self.trials.tolerance:
                self.problems.append(f"the output is off by {error:.1e} of its largest value")

    def in_the_batch(self, ours: Run, projected: bool) -> None:
        """Of losses (B,): rows are the gradients of each, and each reaches its own row alone."""
        t = self.trials
        rows = Rows(t, ours.rows)
        for i in range(t.size):
            rows.add(i, t.measure(t.plain, t.value, t.size, only=i, projected=projected).grads)
        self.problems += rows.problems()
        for i in () if self.problems else range(t.size):
            alone = t.measure(t.twin, t.value, t.size, only=i, projected=projected, recorded=True)
            for name, r in alone.rows.items():
                if r is None or not r[0].numel():
                    continue
                sizes = r.reshape(len(r), -1).abs().amax(1)
                own, sizes[i] = sizes[i].item(), 0
                other = int(sizes.argmax())
                if sizes[other].item() > t.tolerance * own:
                    self.problems.append(
                        f"`{name}`: the loss of sample {i} alone reaches row {other}"
                        f" ({sizes[other].item():.1e} against {own:.1e} in its own row): samples are mixed,"
                        " or rows belong to other samples than their place says"
                    )

    def adds_up(self, ours: Run, plain: Run) -> None:
        """Of one loss: what rows add up to is its gradient."""
        largest = max(
            (g.abs().max().item() for g in plain.grads.values() if g is not None and g.numel()), default=0.0
        )
        for name, grad in plain.grads.items():
            rows = ours.rows.get(name)  # none of a parameter that its forward has replaced
            if grad is None:
                continue
            if rows is None:
                self.problems.append(unexpanded(name))
                continue
            total = rows.mean(0) if self.trials.mean else rows.sum(0)
            for what, found in (
                ("what its rows add up to", total),
                ("its summed gradient", ours.grads[name]),
            ):
                if found is None or not close(found, grad, largest, self.trials):
                    self.problems.append(f"`{name}`: {what} is not the gradient that plain training gives")

    # --------------------------------------------------------------------------------------- sample by sample
    def apart(self, ours: Run | None) -> None:
        """What a sample gives alone it gives in every batch; of one loss, that is the truth for its row,
        too.
        """
        t = self.trials
        if t.readings and t.random():
            if t.scalar and t.projects() and (with_random := t.measure_twin(projected=True)) is not None:
                self.in_the_batch(with_random, projected=True)
            words = t.without_randomness()
            if words is None:
                self.notes.append(
                    "the model draws random numbers that cannot be switched off: samples were not compared"
                    " with themselves alone"
                    + (
                        ", so that of the rows only the sum was checked"
                        if t.scalar and not t.projects()
                        else ""
                    )
                )
                return
            self.notes.append(
                f"the model draws random numbers: samples were compared with themselves alone {words}"
            )
            ours = t.measure_twin(projected=False) if t.scalar else None
        found: list[Experiments] = []
        for samples, copies in t.readings:
            found.append(Experiments(t, samples, copies))
            found[-1].run(ours)
            if not found[-1].problems:
                break
        if found:
            best = found[-1] if not found[-1].problems else found[0]
            self.problems += best.problems
            if t.refused is not None and not best.problems:
                self.notes.append(
                    "by the original layers, samples give the same alone and in every batch that was tried"
                )
            self.notes += best.notes
        if found and t.size == 1:
            self.notes.append("one sample tells nothing of whether samples interact: give three or more")
