"""The loss of the real call for `check_model`: how it is computed, and how a batch's loss is made of its
samples' losses.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .. import torch_api
from ..core.trees import tensors_in, tensors_of
from .samples import each_leaf, fresh

SKETCH = 4096


class RealCall:
    """The call and the loss as the user has them."""

    def __init__(self, loss_fn: Any, targets: Any, closure: Any) -> None:
        for name, fn in (("loss_fn", loss_fn), ("closure", closure)):
            if fn is not None and not callable(fn):
                raise TypeError(f"`{name}` must be a function that returns a loss; got {type(fn).__name__}.")
        if closure is not None and (loss_fn is not None or targets is not None):
            raise ValueError(
                "`closure` computes the loss by itself: give no `loss_fn`, and its targets among the inputs."
            )
        if targets is not None and loss_fn is None:
            raise ValueError(
                "`targets` are what loss_fn(output, targets) takes: give a loss_fn. For a model that takes"
                " targets itself, give them by position, or call it in a closure."
            )
        if loss_fn is not None:
            _check_signature(loss_fn, 1 if targets is None else 2)
        self.name = "loss_fn" if closure is None else "closure"
        self.loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self.closure = closure

    @property
    def given(self) -> bool:
        """Whether there is a loss: else outputs are projected."""
        return self.loss_fn is not None or self.closure is not None

    @property
    def module(self) -> nn.Module | None:
        """The loss, where it is a module: class weights that it holds go along with the outputs."""
        return self.loss_fn if isinstance(self.loss_fn, nn.Module) else None

    def __call__(
        self, model: nn.Module, value: Any, with_loss: bool = True
    ) -> tuple[list[Any], Tensor | None]:
        """What the model returns in the call, and the loss, if there is one and it is asked for."""
        (args, kwargs), targets = each_leaf(fresh, value)
        outputs: list[Any] = []
        if self.closure is None:
            outputs.append(model(*args, **kwargs))
            return outputs, self.loss(outputs[0], targets) if with_loss and self.loss_fn is not None else None
        hook = model.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            loss = self._tensor(self.closure(model, *args, **kwargs))
            return outputs, loss if with_loss else None
        finally:
            hook.remove()

    def loss(self, output: Any, targets: Any) -> Tensor:
        """The loss of an output."""
        try:
            return self._tensor(self.loss_fn(output) if targets is None else self.loss_fn(output, targets))
        except RuntimeError as error:
            if not any(word in str(error) for word in ("scalar type", "dtype")):
                raise
            raise ValueError(
                f"loss_fn cannot be called in the dtype of the check ({error}): let it take what it holds"
                " along, as in `weight.to(output)`, or call check_model(..., dtype=None)."
            ) from error

    def _tensor(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{self.name} returned {type(loss).__name__}: expected a tensor, the loss or the losses of"
                " the samples."
            )
        return loss

    def holds(self, size: int) -> list[str]:
        """The names of tensors with a row for each sample that the loss takes from around it: they cannot be
        split.
        """
        try:
            around = inspect.getclosurevars(self.loss_fn or self.closure)
        except TypeError:  # not a function of Python
            return []
        named = {**around.globals, **around.nonlocals}
        return [name for name, v in named.items() if isinstance(v, Tensor) and v.ndim and v.shape[0] == size]


def _check_signature(loss_fn: Callable[..., Any], count: int) -> None:
    try:
        inspect.signature(loss_fn).bind(*range(count))
    except ValueError:  # a builtin
        return
    except TypeError as error:
        given = "the output and the targets" if count == 2 else "the output alone (no `targets` were given)"
        raise TypeError(f"loss_fn cannot be called with {given}: {error}.") from None


class LowestPrecision(torch_api.dispatch_mode):
    """Notes the lowest floating precision that values are cast to: a model of float64 may compute in float32
    inside.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        finer = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
        for t in tensors_of(result):
            if t.is_floating_point() and t.numel():
                eps = torch.finfo(t.dtype).eps
                if eps > torch.finfo(self.dtype).eps and any(torch.finfo(f.dtype).eps < eps for f in finer):
                    self.dtype = t.dtype
        return result


# ------------------------------------------------------------------------ where there is no loss: projections
def floating(outputs: Any) -> list[Tensor]:
    """The floating tensors of outputs; packed sequences padded, (B, T, ...)."""
    padded = [
        pad_packed_sequence(t, batch_first=True)[0] if isinstance(t, PackedSequence) else t
        for t in tensors_in(outputs)
    ]
    return [t for t in padded if t.is_floating_point()]


def samples_dims(
    outputs: Sequence[Tensor], size: int, part: Sequence[Tensor], part_size: int
) -> list[int | None]:
    """For each output the dim that holds the samples: the one that is as long as the batch, in two
    batches.
    """
    if len(outputs) != len(part) or size == part_size:
        return []
    return [
        next(
            (d for d in range(t.ndim) if u.ndim == t.ndim and (t.shape[d], u.shape[d]) == (size, part_size)),
            None,
        )
        for t, u in zip(outputs, part, strict=True)
    ]


def shapes_of(outputs: Sequence[Tensor], dims: Sequence[int | None]) -> list[torch.Size]:
    """The shape of one sample's row of each output."""
    return [t.shape if d is None else t.select(d, 0).shape for t, d in zip(outputs, dims, strict=True)]


def project(
    outputs: Sequence[Tensor],
    dims: Sequence[int | None],
    size: int,
    shapes: Sequence[Sequence[torch.Size]] | None,
    seed: int,
    owners: Sequence[Tensor | None] = (),
) -> Tensor:
    """Losses (B,): each sample's rows, or of them what it has alone (`shapes`: the rest is padding), on fixed
    directions. `owners` tell whose the rows of each output are, where they are not one for each sample.
    """
    losses: list[Tensor] = [torch.zeros((), device=outputs[0].device if outputs else "cpu")] * size
    for k, (t, d) in enumerate(zip(outputs, dims, strict=True)):
        if d is None or not t.requires_grad:
            continue
        ids = owners[k] if owners else None
        each = enumerate(t.unbind(d)) if ids is None else zip(ids.tolist(), t.unbind(d), strict=True)
        for i, row in each:
            if shapes is not None:
                row = overlap(row, shapes[i][k])
            losses[i] = losses[i] + (row * _direction(row, seed + k)).sum()
    return torch.stack(losses) if losses else torch.zeros(0, device="cpu")


def overlap(row: Tensor, shape: Sequence[int]) -> Tensor:
    """The part of a row that there is also in a row of this shape."""
    return row[tuple(slice(n) for n in shape)] if row.ndim == len(shape) else row


def _direction(row: Tensor, seed: int) -> Tensor:
    """Factors that depend on a value's place alone, in a row of any length."""
    angle = torch.full(row.shape, 1.0 + seed, dtype=torch.float64, device=row.device)
    for d, n in enumerate(row.shape):
        place = torch.arange(n, dtype=torch.float64, device=row.device)
        angle = angle + (1.7 + 0.61 * d) * place.view(-1, *(1,) * (row.ndim - d - 1))
    return (1.5 + angle.sin()).to(row)


# ----------------------------------------------------------------------------- what a batch's loss is made of
def real(t: Tensor) -> Tensor:
    """Of complex numbers both parts, in a further dim."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def sketch(grad: Tensor) -> Tensor:
    """A gradient, or, of a large one, some thousand sums that are linear in it: of many gradients not all can
    be kept.
    """
    flat = real(grad.detach()).flatten().to(torch.float64)
    if len(flat) <= SKETCH:
        return flat
    flat = flat * (1.5 + torch.arange(len(flat), dtype=torch.float64, device=flat.device).sin())
    return F.pad(flat, (0, -len(flat) % SKETCH)).view(-1, SKETCH).sum(0)


def combination(batch: Tensor, samples: Tensor) -> Tensor | None:
    """The factors (B,), none negative, with which columns of `samples` (V, B) add up to `batch` (V,); None if
    none do.

    Where there are too few values to tell, NaN.
    """
    if not (bool(batch.isfinite().all()) and bool(samples.isfinite().all())):
        return None
    batch, samples = batch.cpu(), samples.cpu()
    if int(torch.linalg.matrix_rank(samples)) == len(batch):  # anything can be added up to
        return samples.new_full((samples.shape[1],), torch.nan)
    factors: Tensor = torch.linalg.lstsq(samples, batch[:, None], driver="gelsd").solution[:, 0]
    rest = (samples @ factors - batch).abs().max()
    positive = bool(factors.min() >= -1e-3 * factors.abs().max())
    return factors if positive and bool(rest <= 1e-4 * batch.abs().max()) else None


def made_of(batch: float, losses: Tensor, factors: Tensor | None, reduction: str) -> str:
    """How the loss of a batch is made of its samples' losses, in words, and the way out."""
    text = (
        f"{batch:.4g}, and the {reduction} of its samples' losses alone is"
        f" {getattr(losses, reduction)().item():.4g}: it is "
    )
    if factors is None:
        return text + "no weighted sum of them"
    if factors.isnan().any():
        return (
            text
            + "something else, and there are too few parameters to tell whether samples count differently or"
            " interact"
        )
    low, high, total = factors.min().item(), factors.max().item(), factors.sum().item()
    alike = high - low <= 1e-3 * abs(high)
    for made, factor, other in (("sum", high, "mean"), ("mean", total, "sum")):
        if alike and abs(factor - 1) < 1e-3:
            if made == reduction:  # what is left is too little to be another factor
                return f"{text}their {made} but for a small part, which is no weighted sum of them"
            return (
                f"{text}their {made}. Convert the model for a {made}, ps.convert_model(model,"
                f" loss_reduction='{made}'), or take the {other} over samples"
            )
    plain = 1 / len(losses) if reduction == "mean" else 1
    if alike:
        return (
            text
            + f"{high / plain:.4g} times that, a factor that changes with the batch, and rows are off by it."
            f" Take losses.{reduction}() of the samples' losses"
        )
    kind = "a weighted mean" if abs(total - 1) < 1e-3 else "a weighted sum"
    return (
        text + f"{kind} of them in which samples count differently, with factors from {low:.3g} to {high:.3g}"
        f" instead of {plain:.3g} (a mean over all tokens, of which samples have different numbers, or over"
        f" class weights). Reduce the losses of each sample to one first, and take their {reduction}; or"
        " take the sum over everything, reduction='sum', with ps.convert_model(model,"
        " loss_reduction='sum')"
    )
