"""Jacobians of each sample's outputs by the parameters, and their Gram matrix, the empirical neural tangent
kernel: one forward pass, and a backward pass for each of a sample's outputs.

Shapes: B samples, C outputs a sample (all values of one sample's output), S a parameter's own shape.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_api
from .attribution.snapshot import gradients_unchanged
from .chunks import Chunks, bar
from .convert import one_of, settings_of
from .core.contents import trainable_parameters
from .core.factors import Factor, added
from .core.sinks import Streaming
from .core.trees import map_tensors, tensors_of
from .factored import FactoredGrads, computing, factored
from .gradients import converted, going_to, or_zeros, recording, without_rows
from .modules.converted import Converted

KERNELS = ("full", "trace", "diagonal")


def per_sample_jacobians(
    model: nn.Module,
    inputs: Any,
    *,
    output_fn: Callable[[Any], Tensor] | None = None,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """The derivatives of each sample's outputs by every trainable parameter: ``{name: (B, C, *S)}`` for
    outputs (B, C), and ``(B, *out, *S)`` for outputs ``(B, *out)``, as `torch.func.jacrev` lays them out.

    Plain derivatives, whatever ``loss_reduction`` the model was told. By one forward pass, and one backward
    pass for each of a sample's outputs, whose rows are written into place. Nothing is left behind: ``.grad``
    and ``.grad_sample`` stay as they are, and a model that is not converted is converted for the call alone.
    A parameter that the outputs do not depend on has zeros (stride 0, no memory).

    Args:
        model: any model that `convert_model` takes, in the mode that it is in: in training mode its dropout
            draws.
        inputs: what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments.
        output_fn: ``output_fn(model(inputs))`` returns the outputs ``(B, *out)``, where the model returns
            more than that, or a function of each sample's output is to be differentiated.
        chunk_size: samples a pass, which bounds the memory of activations; None takes all at once.
        memory_budget: bytes that a pass may take beside the result, instead of `chunk_size`.
        progress: show a bar over the backward passes (needs tqdm).

    Raises:
        ConversionError: the model cannot be converted.
        TypeError: the outputs are no tensor of floating-point numbers.
        ValueError: the outputs do not have the batch in dim 0, or depend on no parameter; `chunk_size` or
            `memory_budget` is not positive, or both are given.

    Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> model, x = torch.nn.Linear(3, 2), torch.randn(6, 3)
        >>> jacobians = ps.per_sample_jacobians(model, x)
        >>> jacobians["weight"].shape, jacobians["bias"].shape
        (torch.Size([6, 2, 2, 3]), torch.Size([6, 2, 2]))
    """
    with converted(model) as ours:
        chunks = Chunks(ours, inputs, (), chunk_size, memory_budget, output_fn)
        params = trainable_parameters(ours)
        if not params:
            return {}
        with ours._ps_state().settings.turns.writing():
            return _placed(params, chunks, progress)


def jacobian_gram(
    model: nn.Module,
    inputs: Any,
    other: Any = None,
    *,
    kernel: str = "full",
    output_fn: Callable[[Any], Tensor] | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Products of each output's derivatives by all parameters with each output's, of a batch with itself or
    with another: the empirical neural tangent kernel (NTK), without the Jacobians.

    ``kernel[i, c, j, d]`` is the sum over all trainable parameters of ``d out[i, c] * d out[j, d]``: of
    outputs (B, C) and (B', C'), (B, C, B', C'), and ``kernel.flatten(2).flatten(0, 1)`` is the matrix.
    Outputs of other shapes ``(B, *out)`` count as (B, C), flat.

    By one forward pass, and a backward pass for each of a sample's outputs, of which factors are kept (see
    `factored`): the inputs of layers once, the gradients of their outputs C times. With itself, each pair is
    computed once. Nothing is left behind, as by `per_sample_jacobians`.

    Args:
        model: any model that `convert_model` takes. Call .eval() on one with dropout.
        inputs: what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments.
        other: the same of another batch, or None.
        kernel: "full"; "trace", the sum over outputs, (B, B'), of an output with itself; "diagonal", the same
            for each output, (B, B', C). These two hold one output at a time.
        output_fn: ``output_fn(model(inputs))`` returns the outputs ``(B, *out)`` of what the model returns.
        chunk_size: samples that are differentiated at a time, of each batch; None takes all at once. What is
            held is bounded by it, and the passes of the other batch are run for each chunk of this one.

    Raises:
        ConversionError: the model cannot be converted.
        TypeError: the outputs are no tensor of floating-point numbers.
        ValueError: the outputs do not have the batch in dim 0, or depend on no parameter; `kernel` is none
            of these; the two batches have different numbers of outputs, for a trace or diagonal.

    Source: Jacot, Gabriel and Hongler (2018), "Neural Tangent Kernel"; the products of factors: direct
    derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), torch.randn(6, 3)
        >>> ps.jacobian_gram(model, x).shape
        torch.Size([6, 2, 6, 2])
        >>> ps.jacobian_gram(model, x, torch.randn(5, 3), kernel="trace").shape
        torch.Size([6, 5])
    """
    one_of("kernel", kernel, KERNELS)
    with converted(model) as ours:
        one = Chunks(ours, inputs, chunk_size=chunk_size, made=output_fn)
        two = one if other is None else Chunks(ours, other, chunk_size=chunk_size, made=output_fn)
        full, trace = kernel == "full", kernel == "trace"
        blocks: list[list[Tensor]] = []
        with ours._ps_state().settings.turns.writing(), leaving_nothing(ours):
            for n, span in enumerate(one.spans):
                blocks.append([])
                for m, rest in enumerate(two.spans):
                    if two is one and m < n:  # known by symmetry
                        blocks[n].append(blocks[m][n].permute(2, 3, 0, 1) if full else blocks[m][n].mT)
                        continue
                    left = Outputs(one, span)
                    right = None if two is one and m == n else Outputs(two, rest)
                    blocks[n].append(_of_all(left, right) if full else _of_each(left, right, trace))
            whole = torch.cat([torch.cat(row, 2 if full else -1) for row in blocks], 0 if full else -2)
        return whole if full else whole.sum(0) if trace else whole.permute(1, 2, 0)


class Outputs:
    """The outputs of a model on some samples, and the backward passes from them.

    Attributes:
        form: the shape of one sample's output, once the forward pass has run.
        like: a number of the outputs' kind.
    """

    form = torch.Size()
    like: Tensor

    def __init__(self, chunks: Chunks, span: tuple[int, int]) -> None:
        self.model, self.output_fn, self.told = chunks.model, chunks.made, chunks.told
        self.args, self.kwargs, _ = chunks.part(*span)
        self.size = span[1] - span[0]

    def passes(self) -> Iterator[Callable[[], None]]:
        """A backward pass for each output, over one forward pass."""
        args, kwargs, size = self.args, self.kwargs, self.size
        if any(t.requires_grad for t in tensors_of((args, kwargs))):  # they get no gradient here
            args, kwargs = map_tensors(Tensor.detach, (args, kwargs))
        with torch.enable_grad(), recording(self.model, True), self.told(size):
            given = self.model(*args, **kwargs)
            outputs = self.output_fn(given)
            self._check(outputs)
            flat = outputs.reshape(size, outputs.shape[1:].numel())
        if size > 1 and (size in outputs.shape[1:] or not any(outputs is t for t in tensors_of(given))):
            self._check_samples(flat)
        self.form, self.like = outputs.shape[1:], flat.detach().new_zeros(())
        count = flat.shape[1] if size else 0
        # rows are those of each sample's own output: a mean would divide them by the batch size
        mean = self.model._ps_state().settings.loss_reduction == "mean"

        def backward(c: int) -> None:
            with torch.enable_grad():
                loss = flat[:, c].sum() / (size if mean else 1)
            loss.backward(retain_graph=c + 1 < count)

        for c in range(count):
            yield functools.partial(backward, c)

    def _check(self, outputs: Any) -> None:
        path, size = self.model._ps_state().path, self.size
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"`{path}` returned {type(outputs).__name__}: expected a tensor of outputs, (B, *out). Take"
                " it out, as by output_fn=lambda out: out.logits."
            )
        if not outputs.ndim or len(outputs) != size:
            raise ValueError(
                f"The outputs of `{path}` have shape {tuple(outputs.shape)}: expected the batch of {size}"
                " samples in dim 0. Put it there, as by output_fn=lambda out: out.transpose(0, 1)."
            )
        if not outputs.is_floating_point():
            raise TypeError(
                f"The outputs of `{path}` are of {outputs.dtype}, and only floating-point numbers have"
                " derivatives here: choose others by output_fn."
            )
        if outputs.numel() and not outputs.requires_grad:
            raise ValueError(
                f"The outputs of `{path}` depend on no trainable parameter: all of them are frozen, or the"
                " outputs were detached."
            )

    def _check_samples(self, flat: Tensor) -> None:
        """An error where the outputs in the first row depend on more than the first sample: others, which
        are as many by chance, or are computed of several.
        """

        path = self.model._ps_state().path

        def take(name: str, rows: Tensor, first: bool) -> None:
            if bool(((rows[1:] != 0) & ~rows[1:].isnan()).any()):
                raise ValueError(
                    f"The outputs of `{path}` do not have the batch in dim 0: the first of {self.size} rows"
                    " depends on several samples. Put it there, as by output_fn=lambda out: out.transpose(0,"
                    " 1)."
                )

        with going_to(self.model, Streaming(take, sums=False), alone=False):
            flat[0].sum().backward(retain_graph=True)

    def factors(self) -> Iterator[FactoredGrads]:
        """The factors of each output's derivatives."""
        passes = self.passes()
        while True:
            with recording(self.model, True), factored(self.model, grad=False) as grads:
                if (backward := next(passes, None)) is None:
                    return
                backward()
            _check_rows(self.model, grads)
            yield grads


def _placed(params: Mapping[str, nn.Parameter], chunks: Chunks, progress: bool) -> dict[str, Tensor]:
    model, result = chunks.model, dict[str, Tensor]()
    reached: set[str] = set()
    place: tuple[slice, int] = slice(0), 0
    form = torch.Size()

    def take(name: str, rows: Tensor, first: bool) -> None:
        if name not in result:  # what comes late has zeros before
            make = rows.new_zeros if place[0].start or place[1] else rows.new_empty
            result[name] = make(chunks.size, form.numel(), *rows.shape[1:])
        into = result[name][place]
        into.copy_(rows) if first else into.add_(rows)
        reached.add(name)

    with leaving_nothing(model), going_to(model, Streaming(take, sums=False), alone=False):
        for span in bar(chunks.spans, progress):
            outputs = Outputs(chunks, span)
            for c, backward in enumerate(outputs.passes()):
                place, form = (slice(*span), c), outputs.form
                reached.clear()
                backward()
                _check_rows(model, reached)
                for name in result.keys() - reached:
                    result[name][place] = 0
            form = outputs.form
    found = {name: rows.view(chunks.size, *form, *rows.shape[2:]) for name, rows in result.items()}
    return or_zeros(found, params, chunks.size, *form)


# --------------------------------------------------------------------------------------------- their products
def _of_all(one: Outputs, two: Outputs | None) -> Tensor:
    """Of all outputs of some samples with all of others, or of the same: (B, C, B', C')."""
    other, left = two or one, list(one.factors())
    right = left if two is None else list(two.factors())
    shape = one.size, one.form.numel(), other.size, other.form.numel()
    return _products(left, right).view(shape) if left and right else one.like.expand(shape)


def _of_each(one: Outputs, two: Outputs | None, trace: bool) -> Tensor:
    """Of each output with itself, (C, B, B'); or the sum of these, (1, B, B')."""
    found: list[Tensor] = []
    for first, second in ((g, g) for g in one.factors()) if two is None else _pairs(one, two):
        gram = first.gram(second)
        found = [found[0].add_(gram)] if trace and found else [*found, gram]
    if found:
        return torch.stack(found)
    return one.like.expand(1 if trace else one.form.numel(), one.size, (two or one).size)


def _pairs(one: Outputs, two: Outputs) -> Iterator[tuple[FactoredGrads, FactoredGrads]]:
    for first, second in zip_longest(one.factors(), two.factors()):
        if one.form.numel() != two.form.numel():
            raise ValueError(
                f"The samples of the two batches have {one.form.numel()} and {two.form.numel()} outputs, and"
                " each is multiplied by the same of the other: take kernel='full'."
            )
        if first is not None and second is not None:
            yield first, second


def _products(left: Sequence[FactoredGrads], right: Sequence[FactoredGrads]) -> Tensor:
    """Of all outputs of a batch with all of another, (B * C, B' * C'), one parameter after the other."""
    found: list[Tensor] = []
    for name in left[0]:
        if name in right[0]:
            with computing():
                ones = [grads[name].factor for grads in left]
                twos = ones if right is left else [grads[name].factor for grads in right]
                found.append(_stacked(ones, twos))
    if not found:
        raise ValueError("The outputs of the two batches depend on no parameter in common.")
    return added(found)


def _stacked(ones: Sequence[Factor], twos: Sequence[Factor]) -> Tensor:
    """Of one parameter; where its factors cannot be laid side by side, output by output."""
    one = ones[0].stack(ones)
    two = one if twos is ones else twos[0].stack(twos)
    if one is not None and two is not None:
        return one.gram(two)
    (b, *_), (b2, *_) = ones[0].shape, twos[0].shape
    out = ones[0].like().new_empty(b, len(ones), b2, len(twos))
    for c, first in enumerate(ones):
        for d, second in enumerate(ones[: c + 1] if twos is ones else twos):
            out[:, c, :, d] = found = first.gram(second)
            if twos is ones:
                out[:, d, :, c] = found.t()
    return out.view(b * len(ones), b2 * len(twos))


# ---------------------------------------------------------------------------------------- the model as it was
@contextmanager
def leaving_nothing(model: Converted) -> Iterator[None]:
    """Backward passes inside the block leave `.grad` and `.grad_sample` of the model as they were."""
    with ExitStack() as stack:
        for settings in settings_of(model):  # what is recorded there is not theirs to clear
            own = torch_api.changed(settings, accumulation="replace", recorded={}, appended=settings.appended)
            stack.enter_context(own)
        with gradients_unchanged(model):
            yield


def _check_rows(model: Converted, reached: Collection[str]) -> None:
    """An error where a parameter has got a gradient, and no row of it."""
    for name, p in trainable_parameters(model).items():
        if p.grad is not None and name not in reached:
            raise without_rows(name)
