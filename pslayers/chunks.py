"""What a model is called with, some samples at a time: how its inputs and targets hold the samples is found
out on three of them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .attribution.proof import disagreement
from .attribution.snapshot import trial
from .attribution.tracking import WithoutDropout
from .convert import arguments, settings_of
from .core import contents
from .core.contents import trainable_parameters
from .core.context import changed, local, recorded_or_not
from .core.sharding import is_shard
from .core.trees import map_tensors, tensors_in, tensors_of
from .modules.converted import Converted

MANY = 5  # ways besides the usual one in which tensors may hold the batch, of which any may go together


class Chunks:
    """What a model is called with, some samples at a time.

    Args:
        model: a converted one.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        targets: what else is split.
        chunk_size: samples a chunk, or None.
        memory_budget: bytes that one may take, by what `made` makes of the model's output, or None.
        made: ``made(output, *targets)``, whose graph counts; by default the output itself.

    Raises:
        ValueError: the model's parameters are sharded; `chunk_size` or `memory_budget` is not positive, both
            are given, or one of them under `ps.sample_ids`; the batch size is unknown.
    """

    def __init__(
        self,
        model: Converted,
        inputs: Any,
        targets: tuple[Any, ...] = (),
        chunk_size: int | None = None,
        memory_budget: int | None = None,
        made: Callable[..., Tensor] | None = None,
    ) -> None:
        for name, value in (("chunk_size", chunk_size), ("memory_budget", memory_budget)):
            if value is not None and not (isinstance(value, Real) and value >= 1 and value % 1 == 0):
                raise ValueError(f"`{name}` must be a whole number, at least 1, or None; got {value!r}.")
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "There are no gradients inside of torch.inference_mode(): leave it for this call (under"
                " torch.no_grad() it works)."
            )
        if chunk_size is not None and memory_budget is not None:
            raise ValueError(
                "`chunk_size` and `memory_budget` both say how many samples go into a pass: give one of them."
            )
        if any(is_shard(p) for p in trainable_parameters(model).values()):
            raise ValueError(
                "parameters are sharded (fully_shard): call loss.backward(), of several outputs for each, and"
                " read `grad_sample` after it."
            )
        given = arguments(model, inputs)
        ragged = local.ragged
        if ragged is not None and (chunk_size is not None or memory_budget is not None):
            raise ValueError(
                "Under ps.sample_ids a batch is not split: leave chunk_size and memory_budget away."
            )
        size = local.explicit if ragged is None else ragged.size
        if size is None:
            sizes = model._ps_sizes(given)
            with model._ps_state().settings.turns.writing():  # it may run the model, to find out
                size = model._ps_size(given, sizes, look=True)
        if size is None:
            raise ValueError("`inputs` holds no tensor, so the batch size is unknown.")
        self.model, self.made = model, made or (lambda output: output)
        self.values, self.size = (*given, targets), size
        self.dim = 0 if model._ps_state().settings.batch_first else 1
        self.dims: dict[int, int | None] = {}  # {id of a tensor: the dim in which it is split}
        step = int(chunk_size or max(size, 1))
        if size > 1 and (step < size or memory_budget is not None):
            if not all(isinstance(t, Tensor) for t in tensors_in(self.values)):
                raise ValueError(
                    "packed sequences cannot be split: leave `chunk_size` at None, or pack each chunk."
                )
            self._find_dims()
            if memory_budget is not None:
                with self.told(2):
                    step = max(int(memory_budget) // _bytes_of_a_sample(model, self.made, self.part(0, 2)), 1)
        self.spans = [(start, min(start + step, size)) for start in range(0, max(size, 1), step)]

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """The arguments, keyword arguments and targets of some samples."""
        if stop - start == self.size:
            return self.values
        return self._split(range(start, stop), self.dims)

    def told(self, count: int) -> AbstractContextManager[None]:
        """Around a call of so many of them, where `batch_size` tells how many there are."""
        return changed(explicit=count) if local.explicit == self.size else nullcontext()

    def _split(self, samples: Sequence[int], dims: Mapping[int, int | None]) -> Any:
        """Of tensors that hold the batch, and lists with an item for each sample, these samples' parts; of a
        range, views.
        """

        def part(t: Tensor) -> Tensor:
            if (dim := dims.get(id(t))) is None:
                return t
            k = t.shape[dim] // self.size
            if isinstance(samples, range):
                return t.narrow(dim, k * samples.start, k * len(samples))
            each = t if k == 1 else t.unflatten(dim, (self.size, k))
            chosen = each.index_select(dim, torch.tensor(samples, device=t.device))
            return chosen if k == 1 else chosen.flatten(dim, dim + 1)

        def parts(value: Any, target: bool) -> Any:
            # of inputs, as many as the samples, each may hold all of these
            if (isinstance(value, list) and len(value) == self.size) and (
                target or not all(self._ways(t)[0] is not None for t in tensors_of(value))
            ):
                return [value[i] for i in samples]
            if type(value) in (list, tuple):
                return type(value)([parts(v, target) for v in value])
            if type(value) is dict:
                return {name: parts(v, target) for name, v in value.items()}
            return map_tensors(part, value)

        return tuple(parts(value, n == 2) for n, value in enumerate(self.values))

    def _ways(self, t: Tensor) -> list[int | None]:
        """The dims in which a tensor may hold the batch, and None if all samples may need the whole: the
        likeliest first.
        """
        main = [dim for dim in ((1, 0) if self.dim else (0,)) if t.ndim > dim]
        found: list[int | None] = [dim for dim in main if t.shape[dim] == self.size]
        others: list[int | None] = [
            dim for dim in main if t.shape[dim] > self.size and t.shape[dim] % self.size == 0
        ]
        others += [1] if t.ndim > 2 and t.shape[1] == self.size else []  # states of recurrent layers
        if local.explicit is not None:  # of each sample may be several rows
            found, others = found + others, []
        return [*found, None, *others]

    def _find_dims(self) -> None:
        """Find how tensors hold the batch. Of one that is as long all samples may need the whole (a mask of T
        steps, T == B, weights of C classes, C == B), and others may have several rows for each: with the
        wrong part of one, a sample alone comes out otherwise than among others, in another order, or cannot
        be computed. Integers, one a sample, are labels.
        """
        ways = {id(t): found for t in tensors_of(self.values) if len(found := self._ways(t)) > 1}
        labels = {id(t) for t in tensors_of(self.values[2]) if t.ndim == 1 and not t.is_floating_point()}
        first = next((i for i, found in ways.items() if found[0] is not None), next(iter(ways), None))
        if first is None:
            raise ValueError(
                f"`inputs` hold no tensor with rows for each of the {self.size} samples, to be split: leave"
                " chunk_size and memory_budget away."
            )
        for i in {first, *labels} & ways.keys():
            ways[i] = [dim for dim in ways[i] if dim is not None]
        usual = {i: found[0] for i, found in ways.items()}
        unusual = [(i, dim) for i, found in ways.items() if i not in labels for dim in found[1:]]
        counts = range(len(unusual) + 1) if len(unusual) <= MANY else range(3)
        choices = [usual | dict(some) for n in counts for some in itertools.combinations(unusual, n)]
        choices.append(usual | dict.fromkeys(ways.keys() - {first, *labels}))
        for agree in (True, False) if unusual else ():  # losses that are no means of the samples' never do
            for dims in choices:
                with suppress(Exception):
                    if self._tried(dims) or not agree:
                        self.dims = dims
                        return
        self.dims = usual

    def _tried(self, dims: Mapping[int, int | None]) -> bool:
        """Whether some samples come out alone as they do together, in another order, in runs that leave no
        trace; an error where they cannot be computed so.
        """
        count = min(self.size, 3)
        order = [count - 1, *range(count - 1)]

        def run(samples: list[int]) -> list[Tensor]:
            args, kwargs, targets = self._split(samples, dims)
            with (
                trial(self.model),
                torch.no_grad(),
                recorded_or_not(settings_of(self.model), False),
                self.told(len(samples)),
            ):
                return tensors_of(self.made(self.model(*args, **kwargs), *targets))

        mean = self.model._ps_state().settings.loss_reduction == "mean"
        # one alone, and two together: what is constant may be as right for one as for all
        groups = [order[:1], order[1:]]
        with WithoutDropout():
            together, *apart = run(order), *map(run, groups)
        compared = False
        for t, *parts in zip(together, *apart, strict=True):
            pairs = list(zip(parts, map(len, groups), strict=True))
            if t.numel() == 1:
                total = torch.stack([part.reshape(()) * (k if mean else 1) for part, k in pairs]).sum()
                expected, found = (total / count if mean else total), t.reshape(())
            else:
                main = [d for d in (self.dim, 0) if t.ndim > d]
                main = [d for d in main if all(p.shape[d] * count == t.shape[d] * k > 0 for p, k in pairs)]
                if not main:
                    continue
                expected, found = torch.cat(parts, main[0]), t
            if disagreement(found, expected):
                return False
            compared = True
        return compared


def _bytes_of_a_sample(model: Converted, loss_fn: Callable[..., Tensor], two: Any) -> int:
    """What a pass takes for each sample: tensors saved for the backward pass, and rows; measured on two."""
    own = {p.untyped_storage().data_ptr() for p in contents.parameters(model)}
    saved: dict[int, int] = {}

    def see(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    args, kwargs, targets = two
    with (
        trial(model),
        torch.autograd.graph.saved_tensors_hooks(see, lambda t: t),
        torch.enable_grad(),
    ):
        graph = loss_fn(model(*args, **kwargs), *targets)
    rows = sum(p.numel() * p.element_size() for p in trainable_parameters(model).values())
    del graph
    return max(sum(saved.values()) // 2 + rows, 1)


def bar(steps: Sequence[Any], progress: bool) -> Any:
    """The steps, with a bar on request."""
    if not progress:
        return steps
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm.") from error
    return tqdm(steps, desc="per-sample gradients", unit="chunk")
