"""Runs on trial for `check_model`: of the original layers and of the converted ones, on any batch, leaving no
trace.
"""

import copy
import functools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import torch_api
from ..attribution.snapshot import trial
from ..convert import ConversionError, settings_of
from ..core import contents
from ..core.contents import trainable_parameters
from ..core.context import local
from ..gradients import recording
from ..modules.converted import Converted
from .losses import LowestPrecision, RealCall, floating, overlap, project, real, samples_dims
from .samples import Samples

M = TypeVar("M")


@dataclass
class Run:
    """What one run gives, without its graph."""

    outputs: list[Tensor]  # the floating ones
    losses: Tensor  # (B,), or the one loss, ()
    grads: dict[str, Tensor | None]  # of that loss, or of the sum of the losses
    rows: dict[str, Tensor | None]


class _OfGraphs(TorchFunctionMode):
    """Tensors of a graph, of which torch makes no copies, are copied without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        t, memo = args
        return memo.setdefault(id(t), t.detach().clone())


def copied(models: M) -> M:
    """Copies of models, which may keep what an earlier call has computed."""
    with _OfGraphs():
        return copy.deepcopy(models)


class Trials:
    """A model by its original layers (`plain`) and a converted one (`twin`), the real call, and what it is
    called with.
    """

    def __init__(
        self, plain: nn.Module, twin: Any, call: RealCall, value: Any, seed: int, tolerance: float | None
    ) -> None:
        self.plain, self.twin, self.call, self.value, self.seed = plain, twin, call, value, seed
        self.params = trainable_parameters(twin)
        self.mean = settings_of(twin)[0].loss_reduction == "mean"
        lowest = LowestPrecision(
            next((p.dtype for p in contents.parameters(plain) if p.is_floating_point()), torch.float32)
        )
        with self.alike(plain), lowest:
            outputs, loss = call(plain, value)
        self.refused: str | None = None
        self.recorded(self._call_twin)
        self.size = self._batch_size()
        self.scalar = loss is not None and loss.ndim == 0
        if loss is not None and loss.shape not in ((), (self.size,)):
            raise ValueError(
                f"{call.name} returned {tuple(loss.shape)}: expected the losses of {self.size} samples, (B,),"
                " or one loss, ()."
            )
        self.outputs = [t.detach().requires_grad_(t.requires_grad) for t in floating(outputs)]
        eps = torch.finfo(lowest.dtype).eps
        self.tolerance = (
            eps**0.5 / (30 if lowest.dtype == torch.float64 else 1) if tolerance is None else tolerance
        )
        self.rounding = min(1000 * eps, self.tolerance)  # relative to the largest of all gradients
        self.projected = not call.given  # samples are compared by projections of their outputs, not by a loss
        # how inputs hold samples, and how many copies of one are called as "alone"
        self.readings: list[tuple[Samples, int]] = []
        self.dims: list[int | None] = []  # of the outputs: those that hold the samples
        self.owners: list[Tensor | None] = []  # and whose their rows are, under ps.sample_ids

    # --------------------------------------------------------------------------------------------------- runs
    @contextmanager
    def alike(self, model: nn.Module, recorded: bool = False, seed: int | None = None) -> Iterator[None]:
        """Runs that leave no trace on modules or in random generators, which give them the same numbers each
        time.
        """
        number = self.seed if seed is None else seed
        # numpy loads it when it is first asked for: before `trial` notes where the generators are
        numpy_random = getattr(sys.modules.get("numpy"), "random", None)
        converted = any(isinstance(m, Converted) for m in contents.modules(model))
        with trial(model), recording(model, recorded) if converted else nullcontext(), torch.enable_grad():
            torch.manual_seed(number)
            random.seed(number)
            if numpy_random is not None:
                numpy_random.seed(number % 2**32)
            yield

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
    ) -> Run:
        """Run the call and one backward pass: each time anew, as reentrant checkpoints take no second
        pass.
        """
        with self.alike(model, recorded):
            outputs, loss = self.call(model, value, with_loss=not projected)
            tensors = floating(outputs)
            if loss is None:
                loss = project(tensors, self.dims, size, shapes, self.seed, self.owners)
            if loss.shape not in ((), (size,)):
                raise ValueError(f"{self.call.name} returned {tuple(loss.shape)} for {size} samples.")
            total = loss if not loss.ndim else loss[only] if only is not None else loss.sum()
            if recorded and loss.ndim and only is None and self.mean:
                total = total / max(size, 1)
            if total.requires_grad:
                total.backward()
            params = trainable_parameters(model)
            rows = {name: getattr(p, "grad_sample", None) for name, p in params.items()}
            run = Run(
                [t.detach() for t in tensors],
                loss.detach(),
                {name: p.grad for name, p in params.items()},
                rows,
            )
            model.zero_grad()
        return run

    def measure_twin(self, **options: Any) -> Run | None:
        """The same of the converted model in the whole batch; None where it refuses."""
        return self.recorded(
            functools.partial(self.measure, self.twin, self.value, self.size, recorded=True, **options)
        )

    def recorded(self, run: Any) -> Any:
        """What a run of the converted model gives; None where it refuses, which is noted."""
        if self.refused is None:
            try:
                return run()
            except ConversionError:
                raise
            except (ValueError, RuntimeError) as refused:
                self.refused = str(refused)
        return None

    def _call_twin(self) -> None:
        with self.alike(self.twin, recorded=True):
            self.call(self.twin, self.value)

    def _batch_size(self) -> int:
        if local.ragged is not None:
            return local.ragged.size
        size = local.explicit if local.explicit is not None else self.twin._ps_batch_size(*self.value[0])
        if size is None:
            raise ValueError("check_model was given no tensor, so the batch size is unknown.")
        return size

    # ---------------------------------------------------------------------------------- samples by themselves
    def look_at_parts(self, notes: list[str]) -> None:
        """Find how inputs hold the samples, so that one can be called alone, and in which dims outputs do."""
        if local.ragged is not None:
            self._look_at_given_ids(notes)
            return
        first = self.twin._ps_state().settings.batch_first
        why = self._read_inputs(first) if self.size else None
        if why is not None and not self.readings:
            if self.scalar and self.refused is None:
                raise ValueError(
                    "Rows cannot be compared with a loop over samples:"
                    f" {cannot('one sample', why)}.{self.held()}"
                ) from why
            notes.append(
                "whether samples interact where autograd does not see it was not checked:"
                f" {cannot('one sample', why)}"
            )
        order = (0, 1) if getattr(self.twin, "batch_first", True) and first else (1, 0)
        self.dims = self.dims or [
            next((d for d in order if t.ndim > d and t.shape[d] == self.size), None) for t in self.outputs
        ]
        if not self.call.given:
            self._check_outputs()
        elif not self.scalar and self.call.loss_fn is not None and self.readings:
            self._call_loss_of_one(notes)

    def _look_at_given_ids(self, notes: list[str]) -> None:
        found = [local.ragged.owners(t) for t in self.outputs]
        self.dims = [None if of is None else of[1] for of in found]
        self.owners = [None if of is None else of[0] for of in found]
        notes.append(
            "under ps.sample_ids the rows of one sample are not taken out of the batch: whether samples"
            " interact where autograd does not see it was not checked"
        )
        if not self.call.given:
            self._check_outputs()

    def _read_inputs(self, first: bool) -> Exception | None:
        """Try the ways in which inputs may hold the samples; what was said of the first that failed."""
        if type(self.twin).__module__.startswith("pslayers.") and self.twin._ps_layer and not self.scalar:
            return None  # a layer takes samples in ways of its own
        seen: list[list[int | None]] = []
        why: Exception | None = None
        for loose, ranges in ((False, False), (False, True), (True, False)):
            samples = Samples(self.value[0], self.value[1], self.size, first, loose, ranges)
            if samples.dims in seen:
                continue
            seen.append(samples.dims)
            if not samples.held():
                why = why or ValueError(
                    f"no tensor among the inputs has a row for each of the {self.size} samples"
                )
                continue
            if self.value[1] is not None and samples.targets_shared():
                raise ValueError(
                    f"`targets` hold no tensor with a row for each of the {self.size} samples: what is a list"
                    " with an item for each goes into a closure."
                )
            for copies in (1, 2):  # some models and losses take no batch of one
                try:
                    part = self._first_sample(samples, copies)
                except Exception as error:  # of the user's model: whatever it raises
                    why = why or error
                    continue
                self.readings.append((samples, copies))
                self.dims = self.dims or samples_dims(self.outputs, self.size, floating(part), copies)
                break
        return why

    def _first_sample(self, samples: Samples, copies: int) -> Any:
        """The outputs of so many copies of the first sample alone."""
        with self.alike(self.plain):
            part, loss = self.call(self.plain, samples.take([0] * copies), with_loss=self.scalar)
        if self.scalar and (loss is None or loss.ndim):
            raise ValueError(
                f"{self.call.name} returns one loss for {self.size} samples, and another shape for one"
            )
        return part

    def projects(self) -> bool:
        """Whether there are outputs to take projections of."""
        return any(
            t.requires_grad and dim is not None for t, dim in zip(self.outputs, self.dims, strict=True)
        )

    def _check_outputs(self) -> None:
        for t, dim in zip(self.outputs, self.dims, strict=True):
            if t.requires_grad and dim is None:
                hint = (
                    "if it is the loss, pass loss_fn=lambda output: output" if not t.ndim else "pass loss_fn"
                )
                raise ValueError(
                    f"An output of shape {tuple(t.shape)} has no dim of the batch size {self.size}: {hint}."
                )
        if not self.projects():
            raise ValueError("The model's output holds no floating tensor that requires grad: pass loss_fn.")

    def _call_loss_of_one(self, notes: list[str]) -> None:
        """A loss_fn that holds targets of the whole batch cannot be called with a part of it: then outputs
        are compared.
        """
        samples, copies = self.readings[0]
        try:
            with self.alike(self.plain):
                _, loss = self.call(self.plain, samples.take([0] * copies))
            fits = loss is not None and loss.shape == (copies,)
        except Exception:
            fits = False
        if not fits:
            self.projected = True
            self.readings = self.readings if self.projects() else []
            notes.append(
                "loss_fn cannot be called with one sample's output, so whether samples interact where"
                " autograd does not see it was"
                f" {'checked by the outputs alone' if self.readings else 'not checked'}.{self.held()}"
            )

    def held(self) -> str:
        """A hint at targets that are not given as such."""
        names = ", ".join(f"`{name}`" for name in self.call.holds(self.size))
        where = (
            "as `targets`"
            if self.call.closure is None
            else "to check_model as inputs, which the closure takes"
        )
        return (
            f" {self.call.name} holds {names} with a row for each sample: give them {where}." if names else ""
        )

    # --------------------------------------------------------------------------------------------- randomness
    def random(self) -> bool:
        """Whether other random numbers give other values."""
        found = []
        for k in range(3):
            with self.alike(self.plain, seed=self.seed + k):
                outputs, loss = self.call(self.plain, self.value, with_loss=not self.projected)
            found.append([t.detach() for t in (floating(outputs) if loss is None else [loss])])
        return any(
            a.shape != b.shape or difference(b, a) > self.tolerance
            for f in found[1:]
            for a, b in zip(found[0], f, strict=True)
        )

    def without_randomness(self) -> str | None:
        """Go on with copies that draw no random numbers; how they were made, or None where nothing helps."""
        before = self.plain, self.twin
        for words, still in (
            ("with dropout switched off", _switch_dropout_off),
            ("in eval mode", nn.Module.eval),
        ):
            self.plain, self.twin = copied(before)
            still(self.plain)
            still(self.twin)
            try:
                if not self.random():
                    return words
            except Exception:  # some models return something else in eval mode
                continue
        self.plain, self.twin = before
        return None

    # -------------------------------------------------------------------------------------------------- where
    def first_difference(self, samples: Samples, chosen: Sequence[int], place: int, copies: int) -> str:
        """The first module whose output, or what it is given, is not the same for a sample alone and in a
        batch; in words.
        """
        if len(chosen) == copies:
            return ""
        batch, alone = (self._calls(samples.take(some)) for some in (chosen, [chosen[place]] * copies))
        for (path, number), (name, *values) in batch.items():
            if (path, number) not in alone:
                continue
            for what, whole, own in zip(
                ("what {} is given", "what {} returns"), values, alone[path, number][1:], strict=True
            ):
                for t, u, dim in zip(whole, own, samples_dims(whole, len(chosen), own, copies), strict=False):
                    if dim is not None and self.rows_differ(t, u, dim, place):
                        return "first seen in " + what.format(f"`{path or 'the model'}` ({name})")
        return ""

    def rows_differ(self, whole: Tensor, own: Tensor, dim: int, place: int) -> bool:
        """Whether a sample's row in a batch is not what it has alone, as far as both are long."""
        row, mine = whole.select(dim, place), own.select(dim, 0)
        return difference(overlap(mine, row.shape), overlap(row, mine.shape)) > self.tolerance

    def allowed(self, size: float, largest: float) -> float:
        """The error allowed of a gradient whose largest value is `size`, and `largest` that of all."""
        return max(self.tolerance * size, self.rounding * largest)

    def _calls(self, value: Any) -> dict[tuple[str, int], tuple[str, list[Tensor], list[Tensor]]]:
        """{(path, number of the call): (class, what it was given, what it returned)} of every module, as they
        end.
        """
        calls: dict[tuple[str, int], tuple[str, list[Tensor], list[Tensor]]] = {}

        def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            number = sum(p == path for p, _ in calls)
            given, returned = ([t.detach().clone() for t in floating([v])] for v in ((args, kwargs), output))
            calls[path, number] = type(module).__name__, given, returned

        with ExitStack() as stack, self.alike(self.plain):
            for path, module in contents.named_modules(self.plain):
                handle = module.register_forward_hook(functools.partial(note, path), with_kwargs=True)
                stack.callback(handle.remove)
            self.call(self.plain, value, with_loss=False)
        return calls


def cannot(what: str, error: BaseException) -> str:
    """That samples cannot be called, and why."""
    return f"{what} alone cannot be called ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value; what is NaN or infinite in both is the same."""
    a, b = real(a).double(), real(b).double()
    if not a.numel() or a.shape != b.shape:
        return 0.0 if a.shape == b.shape else torch.inf
    same = (a == b) | (a.isnan() & b.isnan())
    off = torch.where(same, 0, (a - b).abs()).nan_to_num(torch.inf).max().item()
    return off / max(torch.where(b.isfinite(), b.abs(), 0).max().item(), 1e-30)


def _switch_dropout_off(model: nn.Module) -> None:
    for module in contents.modules(model):
        if isinstance(module, torch_api.Dropouts):
            module.eval()
        # of LSTM, MultiheadAttention, and many others
        if isinstance(getattr(module, "dropout", None), float):
            module.__dict__["dropout"] = 0.0
