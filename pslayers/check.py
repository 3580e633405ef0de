"""check_layer and check_model: prove on given inputs that every per-sample gradient is right, or name what is not."""

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .context import local
from .convert import ConversionError, convert_model, converted_parameters, settings_of
from .converted import Converted
from .gradients import recording
from .losses import LowestPrecision, RealCall, combination, floating, made_of, overlap, project, samples_dims, shapes_of, sketch
from .samples import Samples, each_leaf
from .snapshot import trial
from .trees import tensors_in


@dataclass
class Check:
    """The answer of a check: true where everything is right; printed, it says what is wrong, and what was not checked.

    ``problems`` name the parameter, the row and the error, or the samples that interact and the batch in which they do;
    ``notes`` say what could not be checked.
    """

    samples: int
    parameters: list[str]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        what = f"{len(self.parameters)} parameters x {self.samples} samples"
        text = f"right: {what} agree with a loop over samples, and no sample touches another's row"
        if self.problems:
            text = f"wrong ({what}):" + "".join(f"\n- {problem}" for problem in self.problems)
        return text + "".join(f"\n(note: {note})" for note in self.notes)

    __repr__ = __str__


def check_layer(layer: nn.Module, *inputs: Any, **options: Any) -> Check:
    """Check one layer, a PSLayer of your own for instance: see `check_model`, whose options it takes.

    Example:
        >>> import torch, pslayers as ps
        >>> ps.check_layer(ps.PSLinear(3, 2), torch.randn(4, 5, 3))
        right: 2 parameters x 4 samples agree with a loop over samples, and no sample touches another's row
    """
    return check_model(layer, *inputs, **options)


def check_model(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    targets: Any = None,
    closure: Callable[..., Tensor] | None = None,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    seed: int = 0,
    **keywords: Any,
) -> Check:
    """Prove on these inputs that every per-sample gradient of `model` is right, or name what is not: in it, or in your loss.

    Give the call as you train with it: the batch, the loss, the targets. On copies of the model (`model` itself, its ``.grad``
    and the random generators stay as they are) it is checked that

    1. outputs, loss and summed gradients are those of the original layers;
    2. each row is the gradient that the original layers give for that sample's loss (a loop over samples). Of losses (B,), each
       is back-propagated by itself, too: no other sample's row may be touched;
    3. samples do not interact, also where autograd does not see it: what a sample gives alone it must give in every batch, of
       other sizes, in another order, each sample twice, among samples whose values, ids or lengths are changed;
    4. a loss that is one number is the mean of its samples' losses (or their sum, with ``loss_reduction="sum"``), as the rows of
       a mean (a sum) are told from it. If it is not, the answer says what it is instead, and the way out.

    Random layers (dropout) see the same random numbers each time. What compares a sample alone with its batch is done without
    them, and the answer says so. Give three samples or more, that differ in length where your samples do.

    Args:
        model: any model, converted (then with its ``loss_reduction``) or not.
        inputs: what the model is called with (`keywords` too). Tensors that have a row for each sample in their batch dim are
            split; others are the same for all samples.
        loss_fn: ``loss_fn(output)``, or ``loss_fn(output, targets)``: the losses of the samples (B,), or the one loss that you
            train with. For a model that returns its own loss: ``lambda output: output.loss``. By default a fixed projection of
            everything floating in the output.
        targets: what `loss_fn` takes beside the output: a tensor, or a structure of tensors, with a row for each sample.
        closure: in the place of both, where a step is more than ``loss_fn(model(*inputs), targets)``: ``closure(model, *inputs,
            **keywords)`` returns the loss or the losses. Targets are then among the inputs.
        dtype: the copies', the inputs' and the targets' floating dtype; None leaves them as they are.
        tolerance: the error allowed, relative to the largest value of the parameter's gradients; by default by the lowest
            precision that the model computes in.
        seed: of random layers, and of the projection.

    Raises:
        ConversionError: the model cannot be converted.
        TypeError: `loss_fn` or `closure` cannot be called so, or does not return a tensor.
        ValueError: the batch size is unknown, an output has no batch dim, the loss has another shape than () or (B,), no target
            has a row for each sample, or options exclude one another.

    Example:
        >>> import torch, pslayers as ps
        >>> from torch.nn.functional import cross_entropy
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
        >>> ps.check_model(model, x, loss_fn=cross_entropy, targets=y)
        right: 2 parameters x 4 samples agree with a loop over samples, and no sample touches another's row
        >>> class Centred(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc = torch.nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return torch.tanh(self.fc(x)) - torch.tanh(self.fc(x)).mean(0)       # mixes samples
        >>> bool(ps.check_model(Centred(), torch.randn(3, 2)))
        False
    """
    call = RealCall(loss_fn, targets, closure)
    plain, twin = copy.deepcopy(model), copy.deepcopy(model)
    if not any(isinstance(m, Converted) for m in twin.modules()):
        convert_model(twin)
    if not isinstance(twin, Converted):
        raise ValueError(f"Only parts of {type(model).__name__} are converted: call ps.convert_model on the whole model.")
    if local.explicit is None and next(tensors_in((inputs, keywords)), None) is None:
        raise ValueError("check_model was given no tensor, so the batch size is unknown.")
    if dtype is not None:
        for copied in (plain, twin, call):
            copied.to(dtype)
    value = each_leaf(lambda leaf: _copied(leaf, dtype), ((inputs, keywords), targets))
    return _Checker(plain, twin, call, value, seed, tolerance).run()


_READINGS = ((False, False), (False, True), (True, False))  # `loose` and `ranges_shared` of Samples


@dataclass
class _Run:
    """What one run gives, without its graph."""

    outputs: list[Tensor]  # the floating ones
    losses: Tensor  # (B,), or the one loss, ()
    grads: dict[str, Tensor | None]  # of that loss, or of the sum of the losses
    rows: dict[str, Tensor | None]


@dataclass
class _Alone:
    """What one sample gives alone."""

    loss: Tensor
    sketches: dict[str, Tensor]  # of its gradient
    outputs: list[Tensor]
    shapes: list[torch.Size]  # of its outputs' rows


class _Checker:
    def __init__(self, plain: nn.Module, twin: Any, call: RealCall, value: Any, seed: int, tolerance: float | None) -> None:
        self.plain, self.twin, self.call, self.value, self.seed = plain, twin, call, value, seed
        self.params = dict(converted_parameters(twin))
        self.mean = settings_of(twin)[0].loss_reduction == "mean"
        self.dims: list[int | None] = []  # of the outputs: those that hold the samples
        self.readings: list[tuple[Samples, int]] = []  # the samples, and how many copies of one are called as "alone"
        self.projected = not call.given  # samples are compared with themselves alone by their outputs
        lowest = LowestPrecision(next((p.dtype for p in plain.parameters() if p.is_floating_point()), torch.float32))
        with self.alike(plain), lowest:
            self.outputs, loss = call(plain, value)
        self.refused = self.refusal()
        self.size = self.batch_size()
        self.scalar = loss is not None and loss.ndim == 0
        if loss is not None and loss.shape not in ((), (self.size,)):
            raise ValueError(
                f"{call.name} returned {tuple(loss.shape)}: expected the losses of {self.size} samples, (B,), or one loss, ()."
            )
        eps = torch.finfo(lowest.dtype).eps
        self.tolerance = eps**0.5 / (30 if lowest.dtype == torch.float64 else 1) if tolerance is None else tolerance
        self.rounding = min(1000 * eps, self.tolerance)  # relative to the largest of all gradients

    def refusal(self) -> str | None:
        """Why the converted model refuses this call."""
        try:
            with self.alike(self.twin, recorded=True):
                self.call(self.twin, self.value)
        except ConversionError:
            raise
        except (ValueError, RuntimeError) as refused:
            return str(refused)
        return None

    def batch_size(self) -> int:
        size = local.explicit if local.explicit is not None else self.twin._ps_batch_size(*self.value[0])
        if size is None:
            raise ValueError("check_model was given no tensor with dims, so the batch size is unknown: with ps.batch_size(n):")
        return size  # type: ignore[no-any-return]

    @contextmanager
    def alike(self, model: nn.Module, recorded: bool = False, seed: int | None = None) -> Iterator[None]:
        """Runs that leave no trace on modules or in random generators, which give them the same numbers each time."""
        numpy, number = sys.modules.get("numpy"), self.seed if seed is None else seed
        state = None if numpy is None else numpy.random.get_state()
        converted = any(isinstance(m, Converted) for m in model.modules())
        try:
            with trial(model), recording(model, recorded) if converted else nullcontext(), torch.enable_grad():
                torch.manual_seed(number)
                random.seed(number)
                if numpy is not None:
                    numpy.random.seed(number % 2**32)
                yield
        finally:
            if numpy is not None:
                numpy.random.set_state(state)

    def measure(
        self,
        model: nn.Module,
        value: Any,
        size: int,
        *,
        projected: bool,
        recorded: bool = False,
        only: int | None = None,
        shapes: Sequence[Sequence[torch.Size]] | None = None,
    ) -> _Run:
        """Run the call and one backward pass: each time anew, as reentrant checkpoints take no second pass."""
        with self.alike(model, recorded):
            outputs, loss = self.call(model, value, with_loss=not projected)
            tensors = floating(outputs)
            if loss is None:
                loss = project(tensors, self.dims, size, shapes, self.seed)
            if loss.shape not in ((), (size,)):
                raise ValueError(f"{self.call.name} returned {tuple(loss.shape)} for {size} samples.")
            total = loss if not loss.ndim else loss[only] if only is not None else loss.sum()
            if recorded and loss.ndim and only is None and self.mean:
                total = total / max(size, 1)
            if total.requires_grad:
                total.backward()
            params = dict(converted_parameters(model))
            rows = {name: getattr(p, "grad_sample", None) for name, p in params.items()}
            run = _Run([t.detach() for t in tensors], loss.detach(), {name: p.grad for name, p in params.items()}, rows)
            model.zero_grad()
        return run

    # ------------------------------------------------------------------------------------------------------------- all of it
    def run(self) -> Check:
        check = Check(self.size, list(self.params), [self.refused] if self.refused else [])
        self.look_at_parts(check)
        own = not self.call.given
        plain = self.measure(self.plain, self.value, self.size, projected=own)
        ours = None if self.refused else self.measure(self.twin, self.value, self.size, projected=own, recorded=True)
        if ours is not None:
            self.same_outputs(check, ours, plain)
        if not (self.size and self.params):
            return check
        if not plain.losses.isfinite().all():
            check.problems.append(f"the loss is not finite: {plain.losses.tolist()}")
            return check
        if ours is not None and self.scalar:
            self.adds_up(check, ours, plain)
        elif ours is not None:
            self.in_the_batch(check, ours, projected=own)
        self.apart(check, ours)
        return check

    def look_at_parts(self, check: Check) -> None:
        """Find how inputs hold the samples, so that one can be called alone; which dim of an output does is seen by that."""
        tensors, why = floating(self.outputs), None
        first = self.twin._ps_state().settings.batch_first
        seen: list[list[int | None]] = []
        layer = type(self.twin).__module__.startswith("pslayers.") and self.twin._ps_layer  # takes samples in ways of its own
        for loose, ranges_shared in () if not self.size or (layer and not self.scalar) else _READINGS:
            samples = Samples(self.value[0], self.value[1], self.size, first, loose, ranges_shared)
            if samples.dims in seen:
                continue
            seen.append(samples.dims)
            if self.value[1] is not None and samples.targets_shared():
                raise ValueError(f"`targets` hold no tensor with a row for each of the {self.size} samples.")
            for copies in (1, 2):  # some models and losses take no batch of one
                try:
                    with self.alike(self.plain):
                        part, loss = self.call(self.plain, samples.take([0] * copies), with_loss=self.scalar)
                    if self.scalar and (loss is None or loss.ndim):
                        raise ValueError(f"{self.call.name} returns one loss for {self.size} samples, and another shape for one.")
                except Exception as error:
                    why = why or error
                    continue
                self.readings.append((samples, copies))
                self.dims = self.dims or samples_dims(tensors, self.size, floating(part), copies)
                break
        if why is not None and not self.readings:
            reason = f"one sample alone cannot be called ({type(why).__name__}: {str(why).splitlines()[0]})"
            if self.scalar and not self.refused:
                raise ValueError(f"Rows cannot be compared with a loop over samples: {reason}.{self.held()}") from why
            check.notes.append(f"whether samples interact where autograd does not see it was not checked: {reason}")
        guess = getattr(self.twin, "batch_first", True) and first
        self.dims = self.dims or [
            next((d for d in ((0, 1) if guess else (1, 0)) if t.ndim > d and t.shape[d] == self.size), None) for t in tensors
        ]
        if not self.call.given:
            self.projectable(tensors)
        elif not self.scalar and self.call.loss_fn is not None and self.readings:
            self.losses_of_parts(check)

    def projectable(self, tensors: Sequence[Tensor]) -> None:
        for t, dim in zip(tensors, self.dims, strict=True):
            if t.requires_grad and dim is None:
                hint = "if it is the loss, pass loss_fn=lambda output: output" if not t.ndim else "pass loss_fn"
                raise ValueError(f"An output of shape {tuple(t.shape)} has no dim of the batch size {self.size}: {hint}.")
        if not self.projects(tensors):
            raise ValueError("The model's output holds no floating tensor that requires grad: pass loss_fn.")

    def projects(self, tensors: Sequence[Tensor]) -> bool:
        """Whether there are outputs to take projections of."""
        return any(t.requires_grad and dim is not None for t, dim in zip(tensors, self.dims, strict=True))

    def losses_of_parts(self, check: Check) -> None:
        """A loss_fn that holds targets of the whole batch cannot be called with a part of it: then outputs are compared."""
        samples, copies = self.readings[0]
        try:
            with self.alike(self.plain):
                fits = self.call(self.plain, samples.take([0] * copies))[1].shape == (copies,)  # type: ignore[union-attr]
        except Exception:
            fits = False
        if not fits:
            self.projected = True
            if not self.projects(floating(self.outputs)):
                self.readings = []
            what = "by the model's outputs alone" if self.readings else "not at all"
            check.notes.append(
                f"loss_fn cannot be called with one sample's output, so whether samples interact where autograd does not see it "
                f"was checked {what}.{self.held()}"
            )

    def held(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.call.holds(self.size))
        return f" {self.call.name} holds {names} with a row for each sample: give them as `targets`." if names else ""

    # ------------------------------------------------------------------------------------------------------------ in the batch
    def same_outputs(self, check: Check, ours: _Run, plain: _Run) -> None:
        for t, original in zip(ours.outputs, plain.outputs, strict=False):
            if t.shape != original.shape:
                check.problems.append(f"the output has shape {tuple(t.shape)} instead of {tuple(original.shape)}")
            elif (error := _error(t, original)) > self.tolerance:
                check.problems.append(f"the output is off by {error:.1e} of its largest value")

    def in_the_batch(self, check: Check, ours: _Run, projected: bool) -> None:
        """Of losses (B,): rows against the gradients of each, and whether each reaches its own row alone."""
        errors = _Rows(self, ours.rows)
        for i in range(self.size):
            errors.add(i, self.measure(self.plain, self.value, self.size, only=i, projected=projected).grads)
        check.problems += errors.problems()
        for i in range(self.size) if check else ():
            alone = self.measure(self.twin, self.value, self.size, only=i, projected=projected, recorded=True)
            for name, r in alone.rows.items():
                if r is None or not r[0].numel():
                    continue
                sizes = r.flatten(1).abs().amax(1)
                own, sizes[i] = sizes[i].item(), 0
                other = int(sizes.argmax())
                if sizes[other].item() > self.tolerance * own:
                    check.problems.append(
                        f"`{name}`: the loss of sample {i} alone reaches row {other} ({sizes[other].item():.1e} against {own:.1e} "
                        f"in its own row): samples are mixed, or rows belong to other samples than their place says"
                    )

    def adds_up(self, check: Check, ours: _Run, plain: _Run) -> None:
        """Of one loss: what rows add up to is its gradient."""
        largest = max((g.abs().max().item() for g in plain.grads.values() if g is not None and g.numel()), default=0.0)
        for name, grad in plain.grads.items():
            rows = ours.rows[name]
            if rows is None or grad is None:
                if grad is not None:
                    check.problems.append(f"`{name}` has a gradient but no per-sample gradient: nothing expanded it")
                continue
            total = rows.mean(0) if self.mean else rows.sum(0)
            for what, found in (("what its rows add up to", total), ("its summed gradient", ours.grads[name])):
                if found is None or not self.close(found, grad, largest):
                    check.problems.append(f"`{name}`: {what} is not the gradient that plain training gives")

    def close(self, a: Tensor, b: Tensor, largest: float) -> bool:
        scale = b.abs().max().item() if b.numel() else 0.0
        return not b.numel() or (a - b).abs().max().item() <= max(self.tolerance * scale, self.rounding * largest)

    # ------------------------------------------------------------------------------------------------------------ sample by sample
    def apart(self, check: Check, ours: _Run | None) -> None:
        """What a sample gives alone must be what it gives in every batch; of one loss, that gives the truth for its row, too."""
        if self.readings and self.random(self.plain):
            ours = self.without_randomness(check, ours)
        first: Check | None = None
        for samples, copies in self.readings:
            found = Check(self.size, [])
            self.experiments(found, samples, copies, ours)
            first = first or found
            if found:
                first = found
                break
        if first is not None:
            check.problems += first.problems
            check.notes += first.notes
            if self.size == 1:
                check.notes.append("one sample tells nothing of whether samples interact: give three or more")

    def random(self, model: nn.Module) -> bool:
        """Whether other random numbers give other values."""
        found = []
        for k in range(3):
            with self.alike(model, seed=self.seed + k):
                outputs, loss = self.call(model, self.value, with_loss=not self.projected)
            found.append([t.detach() for t in (floating(outputs) if loss is None else [loss])])
        return any(a.shape != b.shape or _error(b, a) > self.tolerance for f in found[1:] for a, b in zip(found[0], f, strict=True))

    def without_randomness(self, check: Check, ours: _Run | None) -> _Run | None:
        """Go on with a model that draws no random numbers: they depend on a sample's place in the batch."""
        if self.scalar and ours is not None:
            if self.projects(floating(self.outputs)):
                ours = self.measure(self.twin, self.value, self.size, projected=True, recorded=True)
                self.in_the_batch(check, ours, projected=True)
            else:
                check.notes.append("with its random numbers, of the model's rows only their sum was checked")
        for words, still in (("with dropout switched off", _switch_dropout_off), ("in eval mode", nn.Module.eval)):
            plain, twin = copy.deepcopy(self.plain), copy.deepcopy(self.twin)
            still(plain)
            still(twin)
            try:
                if self.random(plain):
                    continue
            except Exception:  # some models return something else in eval mode
                continue
            self.plain, self.twin = plain, twin
            check.notes.append(f"the model draws random numbers, so samples were compared with themselves alone {words}")
            if self.scalar and not self.refused:
                return self.measure(twin, self.value, self.size, projected=False, recorded=True)
            return None
        self.readings = []
        check.notes.append(
            "the model draws random numbers that cannot be switched off, so samples were not compared with themselves alone"
        )
        return None

    def experiments(self, check: Check, samples: Samples, copies: int, ours: _Run | None) -> None:
        errors = _Rows(self, ours.rows) if ours is not None and self.scalar else None
        alone: dict[int, _Alone] = {}
        for i in range(len(samples)):
            try:
                alone[i] = self.alone(samples, i, copies, errors if i < self.size else None)
            except Exception as error:  # a changed id that there is none of, say: that tells nothing
                if i < self.size:
                    text = f"sample {i} alone cannot be called ({type(error).__name__}: {str(error).splitlines()[0]})"
                    (check.problems if self.scalar else check.notes).append(f"{text}: it was not compared with its batch")
                    return
        for chosen, words in samples.batches():
            if not all(i in alone for i in chosen):
                continue
            try:
                shapes = [alone[i].shapes for i in chosen]
                run = self.measure(self.plain, samples.take(chosen), len(chosen), projected=self.projected, shapes=shapes)
            except Exception as error:
                if not check.notes:
                    check.notes.append(f"not tried: samples {words} ({type(error).__name__}: {str(error).splitlines()[0]})")
                continue
            if problem := self.differs(samples, chosen, words, run, alone):
                check.problems.append(problem)
                if self.scalar or len(check.problems) == 3:
                    return
        if errors is not None:
            check.problems += errors.problems()

    def alone(self, samples: Samples, i: int, copies: int, rows: "_Rows | None") -> _Alone:
        run = self.measure(self.plain, samples.take([i] * copies), copies, projected=self.projected)
        share = 1 if self.scalar and self.mean else copies
        grads = {name: g if g is None else g / share for name, g in run.grads.items()}
        if rows is not None:
            rows.add(i, grads)
        sketches = {n: sketch(torch.zeros_like(self.params[n]) if g is None else g) for n, g in grads.items()}
        loss = run.losses[0] if run.losses.ndim else run.losses / share
        dims = self.dims if len(self.dims) == len(run.outputs) else [None] * len(run.outputs)
        return _Alone(loss, sketches, run.outputs, shapes_of(run.outputs, dims))

    def differs(self, samples: Samples, chosen: list[int], words: str, run: _Run, alone: dict[int, _Alone]) -> str | None:
        """How these samples give in this batch something else than alone, in words; None where they do not."""
        losses = torch.stack([alone[i].loss for i in chosen]).double()
        reduce = torch.mean if self.scalar and self.mean else torch.sum
        grads = {name: sketch(torch.zeros_like(self.params[name]) if g is None else g) for name, g in run.grads.items()}
        found, expected = run.losses.double(), reduce(losses) if self.scalar else losses
        finite = torch.cat([found.view(-1), losses]).abs()
        scale = finite[finite.isfinite()].max().item() if finite.isfinite().any() else 0.0
        error = torch.where((found == expected) | (found.isnan() & expected.isnan()), 0, (found - expected).abs()).nan_to_num(
            torch.inf
        )
        worst, place = error.view(-1).max(0)
        if not worst.item() <= self.tolerance * scale:
            if self.scalar:
                return self.other_reduction(chosen, words, run, grads, alone)
            i, p = chosen[int(place)], int(place)
            if self.projected:
                return (
                    f"the output of {samples.name(i)} alone differs from its row {words}, by {worst.item() / scale:.1e} of the "
                    f"largest loss that is made of outputs: samples interact in the model"
                )
            return (
                f"the loss of {samples.name(i)} alone is {losses[p].item():.4g}, and {found[p].item():.4g} {words}: samples "
                f"interact in {self.where(chosen, run, alone)}"
            )
        if not expected.isfinite().all():
            return None
        largest = max((alone[i].sketches[n].abs().max().item() for i in chosen for n in grads if grads[n].numel()), default=0.0)
        for name, grad in grads.items():
            total = reduce(torch.stack([alone[i].sketches[name] for i in chosen]), dim=0)  # type: ignore[call-overload]
            if not self.close(grad, total, largest):
                if self.scalar:
                    return self.other_reduction(chosen, words, run, grads, alone)
                return (
                    f"`{name}`: the gradients of samples alone do not add up to that {words}, though their losses are the same "
                    f"(off by {_error(grad, total):.1e} of the largest): samples interact in the backward pass"
                )
        return None

    def other_reduction(self, chosen: list[int], words: str, run: _Run, grads: dict[str, Tensor], alone: dict[int, _Alone]) -> str:
        """What the loss of a batch is, where it is not the mean (sum) of its samples' losses, and the way out."""
        losses = torch.stack([alone[i].loss for i in chosen]).double()
        finite = losses.isfinite()
        kept = [i for i in chosen if alone[i].loss.isfinite()]
        factors = None
        if kept:
            parts = [[alone[i].loss.double().view(1), *alone[i].sketches.values()] for i in kept]
            whole = [run.losses.double().view(1), *grads.values()]
            sizes = [max(p[k].abs().max().item() if p[k].numel() else 0.0 for p in (*parts, whole)) for k in range(len(whole))]
            scales = [max(size, 1e-6 * max(sizes[1:], default=1.0), 1e-300) for size in sizes]
            columns = [torch.cat([v / s for v, s in zip(p, scales, strict=True)]) for p in (*parts, whole)]
            some = combination(columns[-1], torch.stack(columns[:-1], 1))
            factors = None if some is None else torch.zeros_like(losses).masked_scatter(finite, some.to(losses))
        text = f"the loss {words} is {made_of(run.losses.item(), losses, factors, 'mean' if self.mean else 'sum')}"
        where = self.where(chosen, run, alone)
        if factors is None:
            text += (
                f". Samples interact in {where}, as they do in a contrastive loss or in a statistic of the batch: there is no loss "
                f"of one sample that its row could be the gradient of"
            )
        elif where.startswith("the model ("):
            text += f". Samples interact in {where}"
        return text + "." + self.held()

    def where(self, chosen: list[int], run: _Run, alone: dict[int, _Alone]) -> str:
        """Whether the model's outputs differ already."""
        compared = False
        for k, dim in enumerate(self.dims if len(self.dims) == len(run.outputs) else ()):
            for p, i in enumerate(chosen):
                if dim is not None and k < len(alone[i].outputs):
                    own = alone[i].outputs[k].select(dim, 0)
                    row = overlap(run.outputs[k].select(dim, p), own.shape)
                    compared = True
                    if _error(overlap(own, row.shape), row) > self.tolerance:
                        return f"the model (its output for sample {i % self.size} differs, too)"
        return "the loss (the model's outputs are the same)" if compared else "the model or the loss"


class _Rows:
    """Rows that were recorded, compared with the true ones as these come."""

    def __init__(self, checker: _Checker, rows: dict[str, Tensor | None]) -> None:
        self.checker, self.rows = checker, rows
        self.errors: dict[str, list[float]] = {name: [] for name in rows}
        self.largest = dict.fromkeys(rows, 0.0)
        self.missing = set[str]()

    def add(self, i: int, grads: dict[str, Tensor | None]) -> None:
        """Compare row i."""
        for name, rows in self.rows.items():
            grad = grads[name]
            if rows is None:
                self.missing |= {name} if grad is not None else set()
            elif len(rows) == self.checker.size and rows[i].numel():
                true = torch.zeros_like(rows[i]) if grad is None else grad
                self.errors[name].append((rows[i] - true).abs().max().nan_to_num(torch.inf).item())
                self.largest[name] = max(self.largest[name], true.abs().max().item())

    def problems(self) -> list[str]:
        """What is wrong, in words."""
        found, size = [], self.checker.size
        every = max(self.largest.values(), default=0.0)
        for name, rows in self.rows.items():
            errors, largest = self.errors[name], self.largest[name]
            allowed = max(self.checker.tolerance * largest, self.checker.rounding * every)
            if name in self.missing:
                found.append(f"`{name}` has a gradient but no per-sample gradient: nothing expanded it")
            elif rows is not None and len(rows) != size:
                found.append(f"`{name}` has {len(rows)} rows for {size} samples")
            elif errors and not max(errors) <= allowed:
                worst = max(range(size), key=errors.__getitem__)
                ratio = errors[worst] / largest if largest else float("inf")
                found.append(
                    f"`{name}`: row {worst} is off by {errors[worst]:.1e}, {ratio:.1e} of the largest true value"
                    f" ({sum(not e <= allowed for e in errors)} of {size} rows are wrong)"
                )
        return found


def _error(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value; what is NaN or infinite in both is the same."""
    a, b = a.double(), b.double()
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0, (a - b).abs()).nan_to_num(torch.inf).max().item()
    return difference / max(torch.where(b.isfinite(), b.abs(), 0).max().item(), 1e-30)


def _switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
        if isinstance(getattr(module, "dropout", None), float):  # of LSTM, MultiheadAttention, and many others
            module.__dict__["dropout"] = 0.0


def _copied(leaf: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of the user's without its graph, so that nothing is back-propagated to it, in another floating dtype."""
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=_copied(leaf.data, dtype))
    copied = leaf.detach().clone()
    copied = copied.to(dtype) if dtype is not None and leaf.is_floating_point() else copied
    return copied.requires_grad_(leaf.requires_grad)
