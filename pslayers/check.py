"""check_layer and check_model: prove on given inputs that every per-sample gradient is right, or name what is not."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .context import Batch
from .convert import ConversionError, convert_model, converted_parameters, settings_of
from .converted import Converted
from .gradients import recording
from .tracking import with_samples_changed
from .trees import map_tensors, tensors_in


@dataclass
class Check:
    """The answer of a check: true where everything is right; printed, it names the parameter, the row and the error."""

    samples: int
    parameters: list[str]
    problems: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        what = f"{len(self.parameters)} parameters x {self.samples} samples"
        if self:
            return f"right: {what} agree with a loop over samples, and no sample touches another's row"
        return f"wrong ({what}):\n" + "\n".join(f"- {problem}" for problem in self.problems)

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
    loss_fn: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    seed: int = 0,
    **keywords: Any,
) -> Check:
    """Prove on these inputs that every per-sample gradient of `model` is right, or name what is not.

    Three things are compared on a copy of the model (converted if it is not; the model itself is not touched):

    1. the outputs with those of the original layers;
    2. each row with the gradient that the original layers give for that sample's loss alone (a loop over samples);
    3. for each sample, its loss alone is back-propagated: no other sample's row may be touched. This catches layers that mix
       samples, a wrong batch dim, time-major rows.

    Random layers (dropout) see the same random numbers each time.

    Args:
        model: any model, converted or not.
        inputs: what the model is called with (`keywords` too).
        loss_fn: from the model's output to the losses of the samples (B,); by default a fixed random projection of everything
            floating in the output.
        dtype: the copy's and its inputs' floating dtype; None leaves them as they are.
        tolerance: the error allowed, relative to the largest value of the parameter's gradients; by default by dtype.
        seed: of the random projection and of random layers.

    Raises:
        ConversionError: the model cannot be converted.
        ValueError: the batch size is unknown, or an output has no batch dim.

    Example:
        >>> import torch, pslayers as ps
        >>> class Centred(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc = torch.nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return torch.tanh(self.fc(x)) - torch.tanh(self.fc(x)).mean(0)       # mixes samples
        >>> bool(ps.check_model(Centred(), torch.randn(3, 2)))
        False
    """
    twin = copy.deepcopy(model)
    if not any(isinstance(m, Converted) for m in twin.modules()):
        convert_model(twin)
    if not isinstance(twin, Converted):
        raise ValueError(f"Only parts of {type(model).__name__} are converted: call ps.convert_model on the whole model.")
    if dtype is not None:
        twin.to(dtype)
        inputs, keywords = _to(dtype, (inputs, keywords))
        floating = dtype
    else:
        floating = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)
    size = twin._ps_batch_size(inputs, keywords)
    if size is None:
        raise ValueError("check_model was given no tensor, so the batch size is unknown.")
    return _Checker(twin, inputs, keywords, loss_fn or _Projection(twin, size, seed), seed, size).run(
        tolerance if tolerance is not None else torch.finfo(floating).eps ** 0.5 / (30 if floating == torch.float64 else 1)
    )


class _Checker:
    def __init__(self, model: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], loss_fn: Any, seed: int, size: int) -> None:
        self.model, self.inputs, self.keywords = model, inputs, keywords
        self.loss_fn, self.seed, self.size = loss_fn, seed, size
        self.params = dict(converted_parameters(model))

    def losses(self, record: bool) -> tuple[Any, Tensor]:
        with recording(self.model, record), torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(self.seed)
            output = self.model(*self.inputs, **self.keywords)
        losses = self.loss_fn(output)
        if losses.shape != (self.size,):
            raise ValueError(f"loss_fn returned {tuple(losses.shape)}: expected the losses of {self.size} samples, (B,).")
        return output, losses

    def rows(self, loss: Tensor) -> dict[str, Tensor | None]:
        """The rows that a backward pass of `loss` records, undoing the factor of a mean."""
        self.model.zero_grad()
        loss.backward(retain_graph=True)
        mean = settings_of(self.model)[0].loss_reduction == "mean"
        found = {name: getattr(p, "grad_sample", None) for name, p in self.params.items()}
        self.model.zero_grad()
        return {n: None if r is None else r.detach() / (self.size if mean else 1) for n, r in found.items()}

    def run(self, tolerance: float) -> Check:
        check = Check(self.size, list(self.params))
        plain_output, plain = self.losses(record=False)
        try:
            output, losses = self.losses(record=True)
        except ConversionError:
            raise
        except (ValueError, RuntimeError) as refused:
            check.problems.append(str(refused))
            return check
        for ours, original in zip(tensors_in([output]), tensors_in([plain_output]), strict=False):
            ours, original = (t.data if isinstance(t, PackedSequence) else t for t in (ours, original))
            if ours.shape != original.shape:
                check.problems.append(f"the output has shape {tuple(ours.shape)} instead of {tuple(original.shape)}")
            elif ours.is_floating_point() and (error := _error(ours, original)) > tolerance:
                check.problems.append(f"the output is off by {error:.1e} of its largest value")
        if not (self.size and self.params):
            return check
        true = [torch.autograd.grad(loss, list(self.params.values()), retain_graph=True, allow_unused=True) for loss in plain]
        together = self.rows(losses.sum())
        for k, name in enumerate(self.params):
            each = [grads[k] for grads in true]
            self.compare(check, name, together[name], each, tolerance)
        if check:
            for i, loss in enumerate(losses):
                self.alone(check, i, self.rows(loss), tolerance)
        if check and self.size > 1:
            self.untouched(check, plain, tolerance)
        return check

    def untouched(self, check: Check, plain: Tensor, tolerance: float) -> None:
        """Changed inputs of every other sample must leave the others' losses: a detached mean over the batch has no gradient."""
        given = list(tensors_in((self.inputs, self.keywords)))
        tensors = [t for t in given if isinstance(t, Tensor)]
        if self.model._ps_layer or len(tensors) < len(given) or self.size not in tensors[0].shape[:2]:
            return  # a layer's inputs may hold samples in ways of their own (offsets of bags)
        kept = self.inputs, self.keywords
        changed = with_samples_changed(*kept, range(0, self.size, 2), Batch(self.size, settings_of(self.model)[0]))
        if changed is None:
            return
        try:
            self.inputs, self.keywords = changed
            _, losses = self.losses(record=False)
        except IndexError:  # an id that there is none of
            return
        finally:
            self.inputs, self.keywords = kept
        others = slice(1, None, 2)
        if (error := _error(losses[others], plain[others])) > tolerance:
            check.problems.append(
                f"losses of samples change ({error:.1e} of the largest) with the inputs of others: samples interact in the model"
            )

    def compare(self, check: Check, name: str, rows: Tensor | None, true: Sequence[Tensor | None], tolerance: float) -> None:
        if rows is None:
            if any(g is not None for g in true):
                check.problems.append(f"`{name}` has a gradient but no per-sample gradient: nothing expanded it")
            return
        if len(rows) != self.size:
            check.problems.append(f"`{name}` has {len(rows)} rows for {self.size} samples")
            return
        expected = torch.stack([torch.zeros_like(rows[0]) if g is None else g for g in true])
        errors = (rows - expected).flatten(1).abs().amax(1) if expected[0].numel() else expected.new_zeros(self.size)
        worst = int(errors.nan_to_num(torch.inf).argmax())
        largest = expected.abs().max().item() if expected.numel() else 0.0
        if not errors[worst].item() <= tolerance * max(largest, torch.finfo(expected.dtype).tiny ** 0.5):
            ratio = errors[worst].item() / largest if largest else float("inf")
            check.problems.append(
                f"`{name}`: row {worst} is off by {errors[worst].item():.1e}, {ratio:.1e} of the largest true value"
                f" ({int((errors > tolerance * largest).sum())} of {self.size} rows are wrong)"
            )

    def alone(self, check: Check, i: int, rows: dict[str, Tensor | None], tolerance: float) -> None:
        for name, r in rows.items():
            if r is None or not r[0].numel():
                continue
            sizes = r.flatten(1).abs().amax(1)
            own, sizes[i] = sizes[i].item(), 0
            other = int(sizes.argmax())
            if sizes[other].item() > tolerance * own:
                check.problems.append(
                    f"`{name}`: the loss of sample {i} alone reaches row {other} ({sizes[other].item():.1e} against {own:.1e} in "
                    f"its own row): samples are mixed, or rows belong to other samples than their place says"
                )


class _Projection:
    """The losses (B,): everything floating in an output, projected on fixed random directions."""

    def __init__(self, model: Converted, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.batch_first = model._ps_state().settings.batch_first and getattr(model, "batch_first", True)

    def __call__(self, output: Any) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        total: Tensor | None = None
        for t in tensors_in([output]):
            if isinstance(t, PackedSequence):
                t = pad_packed_sequence(t, batch_first=self.batch_first)[0]
            if not (t.is_floating_point() and t.requires_grad):
                continue
            dims = [d for d in ((0, 1) if self.batch_first else (1, 0)) if t.ndim > d and t.shape[d] == self.size]
            if not dims:
                raise ValueError(f"An output of shape {tuple(t.shape)} has no dim of the batch size {self.size}: pass loss_fn.")
            direction = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
            part = (t * direction).movedim(dims[0], 0).flatten(1).sum(1) if t.ndim > 1 else t * direction
            total = part if total is None else total + part
        if total is None:
            raise ValueError("The model's output holds no floating tensor that requires grad: pass loss_fn.")
        return total


def _error(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


def _to(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return value.to(dtype) if value.data.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_to(dtype, v) for v in value)
    if isinstance(value, Mapping):
        return {k: _to(dtype, v) for k, v in value.items()}
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)
