"""Factored gradients: norms, weighted sums, kernels and products of per-sample gradients, which are not
formed, in one backward pass.

The per-sample gradient of a weight is a product of small things: of a linear map, the gradient of its output
times its input. The backward pass keeps these (`core.factors`), and what is asked for is computed from them.
"""

import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import torch_api
from .core import contents
from .core.context import Settings
from .core.factors import CHUNK_BYTES, WIDER, Dense, Factor, Spent, Sum, added, joined, sq_norms
from .core.products import of_dtype
from .core.ranks import OneProcess, Replicas, ranks_of
from .core.recorder import Recorder
from .core.sharding import any_sharded
from .core.sinks import Factored
from .gradients import WRAPPERS, going_to
from .modules.converted import Converted
from .modules.inventory import Inventory


class Use(NamedTuple):
    """A factor of one use of a parameter, what it is multiplied by, and what it holds, with the versions of
    that: changed in place, it would be another gradient's.
    """

    factor: Factor
    scale: float
    versions: list[tuple[Tensor, int]]

    @staticmethod
    def of(factor: Factor, scale: float, held: Sequence[Tensor] | None = None) -> "Use":
        """Of what it holds now, if that is known."""
        held = [t for *_, t in factor.tensors()] if held is None else held
        return Use(factor, scale, [(t, t._version) for t in held if not t.is_inference()])

    def __reduce__(self) -> Any:  # versions of a copy are its own
        return Use.of, (self.factor, self.scale)


class FactoredGrad:
    """The per-sample gradient of one parameter, ``(B, *S)``, not formed: what `p.grad_sample` is inside the
    blocks of this file, and what ``grads[name]`` is.

    ``grad[i]`` is the gradient of sample i, ``(*S)``, `dense` all of them.
    """

    def __init__(self, name: str, uses: list[Use]) -> None:
        self.name, self._uses = name, uses
        self._factor: Sum | None = None
        self._joined = 0  # uses that it is of

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, by `copy` or `pickle`: an error where it is gone."""
        return self.__dict__ if self.factor is not None else {}

    @property
    def factor(self) -> Sum:
        """Of all uses.

        Raises:
            RuntimeError: a tensor that the factors hold has been changed in place since.
        """
        for use in self._uses:
            for t, version in use.versions:
                if t._version != version:
                    raise RuntimeError(
                        f"The factored gradient of `{self.name}` is gone: a tensor of shape {tuple(t.shape)}"
                        " that it is made of was changed in place since. Read what you need before, or"
                        " change a copy."
                    )
        if self._factor is None or self._joined != len(self._uses):
            parts = [use.factor for use in self._uses]
            wide = (WIDER.get(p.like().dtype) for p in parts)
            parts = [p if dtype is None else p.to(dtype) for p, dtype in zip(parts, wide, strict=True)]
            self._factor, self._joined = joined(parts, [use.scale for use in self._uses]), len(parts)
        return self._factor

    @property
    def real(self) -> Factor:
        """The same; of complex numbers, dense, both parts in a further dim: products are those of these."""
        factor = self.factor
        if not factor.like().is_complex():
            return factor
        rows = torch.view_as_real(factor.dense())
        return Dense(rows, rows.shape)

    @property
    def shape(self) -> torch.Size:
        """``(B, *S)``, as the dense gradients' would be."""
        return self._uses[0].factor.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the factors hold, which the backward pass had anyway."""
        held = [t.untyped_storage() for use in self._uses for *_, t in use.factor.tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"FactoredGrad({self.name!r}, shape={tuple(self.shape)})"

    def __getitem__(self, sample: int) -> Tensor:
        """The gradient of one sample, ``(*S)``."""
        if not hasattr(sample, "__index__"):
            raise TypeError(
                f"One sample's gradient is asked for by its number; got {sample!r}. Of several take .dense()."
            )
        sample = operator.index(sample)
        if not -len(self) <= sample < len(self):
            raise IndexError(
                f"Sample {sample} of {len(self)}: `{self.name}` has no such per-sample gradient."
            )
        sample %= len(self)
        with computing():
            return self.factor.select(slice(sample, sample + 1)).dense()[0]

    def dense(self) -> Tensor:
        """The dense per-sample gradients, ``(B, *S)``; of 16-bit parameters in float32."""
        with computing():
            return self.factor.dense()

    def norms(self) -> Tensor:
        """The norm of each sample's gradient, (B,)."""
        with computing():
            return self.real.sq_norms().clamp(min=0).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over samples, each times its weight (B,): ``(*S)``. Those of weight 0 are left out."""
        with computing():
            factor = self.factor
            return _weighted_sum(factor, *_share(weights, len(self), 1.0, _wide(factor)))

    def dot(self, direction: Tensor) -> Tensor:
        """The product of each sample's gradient with a direction ``(*S)``: (B,)."""
        is_complex = self._uses[0].factor.like().is_complex()
        if (
            not isinstance(direction, Tensor)
            or direction.shape != self.shape[1:]
            or direction.is_complex() != is_complex
        ):
            raise ValueError(
                f"`direction` is {_what(direction)} for `{self.name}`: expected a"
                f" {'complex' if is_complex else 'real'} tensor of shape {tuple(self.shape[1:])}, the"
                " parameter's."
            )
        with computing():
            return self.real.dot(torch.view_as_real(direction.resolve_conj()) if is_complex else direction)

    def gram(self, other: "FactoredGrad | None" = None) -> Tensor:
        """The product of each sample's gradient with each sample's, (B, B), or of another batch, (B, B')."""
        if other is not None and (not isinstance(other, FactoredGrad) or other.shape[1:] != self.shape[1:]):
            raise ValueError(
                "`other` must be the factored gradient of another batch, of a parameter of shape"
                f" {tuple(self.shape[1:])} as `{self.name}`; got {_what(other)}."
            )
        with computing():
            ours, theirs = self.real, (self if other is None else other).real
            dtype = torch.promote_types(ours.like().dtype, theirs.like().dtype)  # models may have one each
            ours, theirs = (f if f.like().dtype is dtype else f.to(dtype) for f in (ours, theirs))
            return ours.gram(theirs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(
            f"torch.{getattr(func, '__name__', func)} was given a factored gradient, which is no tensor: take"
            " .dense() for one, (B, *S), or what it gives itself: .norms(), .weighted_sum(w), .dot(v),"
            " .gram()."
        )


class FactoredGrads(Mapping[str, FactoredGrad]):
    """The matrix (B, P) of all per-sample gradients of a model, not formed.

    A mapping of the parameters that the last backward pass has reached, in the order of the model's:
    ``grads["0.weight"]``.
    """

    def __init__(self) -> None:
        self._grads: dict[str, FactoredGrad] = {}
        self._names: list[str] = []  # of the model's parameters

    def __getitem__(self, name: str) -> FactoredGrad:
        return self._grads[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)

    def __repr__(self) -> str:
        return f"FactoredGrads({self.size} samples, {len(self)} parameters)"

    @property
    def size(self) -> int:
        """B, the number of samples; 0 before a backward pass."""
        return len(next(iter(self.values()))) if self._grads else 0

    @property
    def nbytes(self) -> int:
        """Bytes of what the factors hold; a tensor that several share counts for each."""
        return sum(grad.nbytes for grad in self.values())

    def _put_in_order(self, names: Iterable[str]) -> None:
        """As the model's own, and not as the backward pass has met them."""
        found, self._names = self._grads, list(names)
        ordered = {name: found[name] for name in self._names if name in found}
        self._grads = ordered if len(ordered) == len(found) else ordered | found

    def _all(self) -> list[FactoredGrad]:
        if not self._grads:
            raise RuntimeError(
                "There are no factored gradients yet: run a backward pass inside the block, of a loss that"
                " depends on the model's parameters."
            )
        return list(self.values())

    def norms(self) -> Tensor:
        """The norm of each sample's gradient, of all parameters together, (B,)."""
        with computing():
            return sq_norms([grad.real for grad in self._all()]).sqrt_()

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum over samples, each times its weight (B,): ``{name: (*S)}``."""
        self._all()
        return {name: grad.weighted_sum(weights) for name, grad in self.items()}

    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """The product of each sample's gradient with a direction ``{name: (*S)}``, (B,); a name that is left
        out counts as zeros, as does the gradient of a parameter that the backward pass has not reached.
        """
        if not isinstance(direction, Mapping):
            raise TypeError(f"`direction` must be {{name: (*S)}}; got {_what(direction)}.")
        if not direction:
            raise ValueError("`direction` is empty: expected {name: (*S)} of at least one parameter.")
        grads = self._all()
        if unknown := direction.keys() - {*self.keys(), *self._names}:
            raise KeyError(
                f"`direction` names {sorted(unknown)}, which are no parameters of the model, or further names"
                " of one that several layers share: expected those of model.named_parameters()."
            )
        found = [grad.dot(direction[name]) for name, grad in self.items() if name in direction]
        return added(found) if found else torch.zeros_like(grads[0].norms())

    def gram(self, other: "FactoredGrads | None" = None) -> Tensor:
        """The product of each sample's gradient with each sample's, (B, B), or of another batch, (B, B')."""
        if not isinstance(other, FactoredGrads | None):
            raise TypeError(f"`other` must be the factored gradients of another batch; got {other!r}.")
        theirs = {grad.name: grad for grad in (self if other is None else other)._all()}
        found = [grad.gram(theirs[grad.name]) for grad in self._all() if grad.name in theirs]
        if not found:
            raise ValueError("The two have no parameter in common: they are of different models.")
        return added(found)

    def project(self, dim: int, seed: int = 0) -> Tensor:
        """A random projection of each sample's gradient to `dim` numbers, (B, dim), which keeps products in
        the mean.

        By a matrix (P, dim) of independent normal numbers of variance 1 / dim, drawn anew each time from the
        seed and the parameters' names: batches that are projected with one seed can be compared.

        Source: Johnson and Lindenstrauss (1984).
        """
        if not hasattr(dim, "__index__") or dim < 1:
            raise ValueError(f"`dim` must be a whole number, at least 1; got {dim!r}.")
        if not hasattr(seed, "__index__"):
            raise ValueError(f"`seed` must be a whole number; got {seed!r}.")
        with computing():
            return added([_projected(grad.real, dim, grad.name, seed) for grad in self._all()])

    def dense(self) -> dict[str, Tensor]:
        """The dense per-sample gradients, ``{name: (B, *S)}``; of 16-bit parameters in float32."""
        self._all()
        return {name: grad.dense() for name, grad in self.items()}


class Clip:
    """What `clipping` has done in its last backward pass.

    Attributes:
        norms: of each sample's gradient before it was clipped, (B,); where each parameter is clipped by
            itself, {name: (B,)}. Samples whose norm is no number, or infinite, were left out.
    """

    norms: Any = None

    def __init__(self, backward: Callable[[Tensor], None]) -> None:
        self._backward = backward

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, and the second pass where one is needed (`passes` of `clipping`)."""
        self._backward(loss)


@contextmanager
def factored(model: nn.Module, grad: bool = True) -> Iterator[FactoredGrads]:
    """Keep the per-sample gradients of a backward pass as factors, of which norms, sums and products are
    computed without forming them, inside a ``with`` block.

    What is given holds the gradients of the last backward pass, and may be read after the block, until the
    tensors that it is made of (the inputs of layers, the gradients of their outputs) are changed in place.

    Args:
        model: a converted model.
        grad: whether `.grad` is filled as always; False saves the time that it takes.

    Raises:
        ValueError: the model is not converted.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
        >>> with ps.factored(model, grad=False) as grads:
        ...     model(torch.randn(5, 3)).square().sum(1).mean().backward()
        >>> grads.norms().shape, grads.gram().shape, grads["0.weight"].dense().shape
        (torch.Size([5]), torch.Size([5, 5]), torch.Size([5, 4, 3]))
    """
    grads = FactoredGrads()
    with _Block(model, grads, bool(grad)).inside():
        yield grads


@contextmanager
def reweighting(model: nn.Module, weigh: Callable[[FactoredGrads], Tensor]) -> Iterator[None]:
    """Weigh the samples by their gradients: each backward pass inside the block adds the weighted sum of
    the per-sample gradients to `.grad`, divided as the loss divides.

    Args:
        model: a converted model.
        weigh: ``weigh(grads)`` returns the weights (B,). Samples whose gradient is not finite are left out
            where their weight is 0.

    Raises:
        ValueError: the model is not converted; in the backward pass, the weights have another shape.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Linear(3, 2))
        >>> with ps.reweighting(model, lambda grads: 1 / grads.norms()):
        ...     model(torch.randn(5, 3)).square().sum(1).mean().backward()
        >>> model.weight.grad.shape
        torch.Size([2, 3])
    """
    if not callable(weigh):
        raise TypeError(f"`weigh` must be a function of the gradients; got {type(weigh).__name__}.")
    grads = FactoredGrads()

    def weights() -> dict[str, Tensor]:
        return dict.fromkeys(grads, _weights(weigh(grads), grads.size))

    with _Block(model, grads, False, weights).inside():
        yield


@contextmanager
def clipping(
    model: nn.Module, max_norm: float | Mapping[str, float], passes: int | str = 1
) -> Iterator[Clip]:
    """Clip each sample's gradient: each backward pass inside the block adds the sum of the clipped per-sample
    gradients to `.grad`, divided as the loss divides.

    A sample's gradient g becomes ``g * min(1, max_norm / norm(g))``. One whose norm is not finite is left
    out. What the block is given has `norms`, those of each sample's gradient before it was clipped, (B,), or
    where each parameter is clipped by itself {name: (B,)}; and `backward`, for more passes than one.

    Args:
        model: a converted model.
        max_norm: of each sample's gradient, of all parameters together; or {name: norm} of every trainable
            parameter by itself.
        passes: 1, for one backward pass, which holds the inputs of layers and the gradients of their outputs
            up to its end. 2, for one that gives the norms and another that gives the sums: they hold no more
            than a plain one does, and take the time of both. "auto": the second one for those layers alone
            that a checkpoint has computed again, whose inputs nobody else would hold. With more than one,
            call ``clip.backward(loss)`` in the place of ``loss.backward()``.

    Raises:
        ValueError: the model is not converted, a norm is not positive, or `passes` is something else.
        KeyError: a parameter has no norm, or a norm no parameter.

    Source: Abadi et al. (2016), "Deep Learning with Differential Privacy", algorithm 1.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Linear(3, 2))
        >>> with ps.clipping(model, max_norm=1.0) as clip:
        ...     model(torch.randn(5, 3)).square().sum(1).mean().backward()
        >>> clip.norms.shape, model.weight.grad.norm() <= 1
        (torch.Size([5]), tensor(True))
    """
    most = {n: _bound(v) for n, v in max_norm.items()} if isinstance(max_norm, Mapping) else _bound(max_norm)
    if passes not in (1, 2, "auto"):
        raise ValueError(f'`passes` must be 1, 2 or "auto"; got {passes!r}.')
    grads = FactoredGrads()
    if isinstance(most, dict):
        named = [name for name, _ in contents.named_parameters(model, shared=True)]
        known = {*named, *(re.sub(WRAPPERS, "", name) for name in named)}
        if unknown := most.keys() - known:
            raise KeyError(f"`max_norm` names {sorted(unknown)}, which are no parameters of the model.")
        most = {re.sub(WRAPPERS, "", name): norm for name, norm in most.items()} | most

    def weights() -> dict[str, Tensor]:
        if isinstance(most, dict):
            if missing := grads.keys() - most.keys():
                raise KeyError(f"`max_norm` has no norm for {sorted(missing)}: give one for each parameter.")
            clip.norms = {name: grad.norms() for name, grad in grads.items()}
            return {name: _clip_factors(norms, most[name]) for name, norms in clip.norms.items()}
        clip.norms = grads.norms()
        return dict.fromkeys(grads, _clip_factors(clip.norms, most))

    block = _Block(model, grads, False, weights, passes)
    clip = Clip(block.backward)
    with block.inside():
        yield clip


def _bound(norm: Any) -> float:
    """`max_norm`, or one of several."""
    is_number = isinstance(norm, Real) or (isinstance(norm, Tensor) and norm.numel() == 1)
    if not is_number:
        raise TypeError(f"`max_norm` must be a number, or {{name: number}}; got {_what(norm)}.")
    if not norm > 0:
        raise ValueError(f"`max_norm` must be positive; got {norm}.")
    return float(norm)


def _clip_factors(norms: Tensor, max_norm: float) -> Tensor:
    """What each sample's gradient is multiplied by; 0 where its norm is not finite."""
    return (max_norm / norms).clamp_(max=1).nan_to_num_(0.0)


class _Block(Factored):
    """A ``with`` block, in which backward passes leave factors in `grads`: those of the last one.

    Args:
        model: a converted model.
        grads: where to.
        sums: `.grad` is filled as always.
        weigh: called after a pass, gives each parameter's weights (B,), by which sums are added to `.grad`.
        passes: as in `clipping`.
    """

    keeps = True

    def __init__(
        self,
        model: nn.Module,
        grads: FactoredGrads,
        sums: bool,
        weigh: Callable[[], Mapping[str, Tensor]] | None = None,
        passes: int | str = 1,
    ) -> None:
        self.model, self.grads, self.sums, self.weigh, self.passes = model, grads, sums, weigh, passes
        self.pass_id = -1
        self.uses: dict[Recorder, list[Use]] = {}
        self.every: list[Settings] = []
        self.sharded = any_sharded(model)
        self.ranks = OneProcess()
        self.reentrant = False  # the pass has come through reentrant checkpoints
        self.weighing = False  # `weigh` runs
        self.twice = False  # `backward` runs
        self.totals: dict[Recorder, Tensor] = {}  # of what is known before the second pass
        self.spent: dict[Recorder, Tensor] = {}  # weights of what the second pass gives

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The block."""
        try:
            with going_to(self.model, self) as self.every:
                if self.weigh is not None:
                    _check_whole(self.model, self.every)
                    self.ranks = ranks_of(self.model)
                yield
        finally:
            self.every = []
            self.ranks.close()
            self._clear()

    def at_call(self, inventory: Inventory) -> None:
        """Have no DistributedDataParallel wait for plain gradients that will not come, and nothing trained in
        the place of a parameter, whose gradient would not be weighed.
        """
        if self.weigh is not None and (replaced := inventory.replaced()):
            raise ValueError(
                f"`{replaced[0].path}` holds a tensor that is no parameter, as torch.func.functional_call"
                " puts one there: its gradient could not be weighed. Call the model with its own parameters,"
                " or with weights of each sample's own (ps.expand_params) outside of ps.clipping and"
                " ps.reweighting."
            )
        ddp = None if self.sums else torch_api.active_ddp()
        if ddp is not None and ddp.require_backward_grad_sync:
            self.ranks = Replicas(self.model, ddp)

    def take(self, recorder: Recorder, holder: Tensor, factor: Factor, scale: float) -> None:
        settings = recorder.settings
        if settings.accumulation != "replace":
            raise RuntimeError(
                "Factored gradients are those of one backward pass, and `.grad` adds up by itself: leave"
                f" ps.accumulating(model, {settings.accumulation!r}) away."
            )
        recorder.count(factor.shape[0])
        if self.weighing:
            raise RuntimeError(
                "A backward pass of the model ran while the samples of another one are weighed: run it before"
                " the block, or without per-sample gradients, inside of ps.recording(model, False)."
            )
        if settings.pass_id != self.pass_id:
            if settings.in_ddp and not self.sums:
                raise RuntimeError(
                    "DistributedDataParallel was called outside of the block (ps.clipping, ps.reweighting or"
                    " ps.factored(grad=False)) that its backward pass runs in, and waits for plain gradients"
                    " to average: call it inside the block."
                )
            self.pass_id, self.uses, self.grads._grads = settings.pass_id, {}, {}
            self.reentrant = False
            torch_api.after_outer_pass(self._end)
        if (uses := self.uses.get(recorder)) is None:
            name = self.name_of(recorder)
            self.grads._grads[name] = grad = FactoredGrad(name, uses := [])
            self.uses[recorder] = uses
            recorder.holder.enter(holder, recorder)
            holder.grad_sample = grad  # type: ignore[attr-defined]
        kept = self._kept(recorder, factor, held := factor.detach_())
        uses.append(Use.of(kept, scale, held if kept is factor else None))

    def _kept(self, recorder: Recorder, factor: Factor, held: Sequence[Tensor]) -> Factor:
        """What is kept of a factor, which has held these until now."""
        if self.passes == 1:
            return factor.smaller(held)
        if any(isinstance(use.factor, Spent) for use in self.uses[recorder]):
            raise RuntimeError(
                f"`{recorder.name}` has a further use in the graph of an earlier forward pass, after its"
                " factor was let go: take passes=1 in ps.clipping."
            )
        # below one, a second pass would go through it, too
        nested = self.reentrant = self.reentrant or torch_api.in_nested_pass()
        if nested and self.passes == 2:
            raise RuntimeError(
                "Through reentrant checkpoints no second pass goes to chosen parameters alone: take"
                ' use_reentrant=False, or ps.clipping(..., passes="auto"), which keeps their factors.'
            )
        # FSDP2 gathers the parameters of a part once in a backward pass, which then computes it again
        gathered = recorder.repeats > 0 and self.sharded
        if gathered and self.passes == 2:
            raise RuntimeError(
                f"`{recorder.name}` is sharded and in a checkpoint, through which FSDP2 takes no second pass:"
                ' take passes=1 in ps.clipping, or "auto".'
            )
        again = self.passes == 2 or (
            self.passes == "auto" and recorder.repeats > 0 and not (nested or gathered)
        )
        # a second pass would go to the leaf of now, which a later call may have made
        if not (again and recorder.used_once and recorder.whole_pass()) or isinstance(factor, Dense):
            return factor.smaller(held)
        with computing():
            grad = FactoredGrad(recorder.name, [Use(factor, 1.0, [])])
            return Spent(grad.real.sq_norms(), factor.shape)

    def _end(self) -> None:
        for settings in self.every:
            if settings.bare_pass == settings.pass_id:  # else of a pass that broke off
                settings.check_bare()
        recorders = list(self.uses)
        for recorder in recorders:
            recorder.checked = True
        self.grads._put_in_order(self.names.values())
        if self.weigh is not None:
            with computing():
                with torch_api.changed(self, weighing=True):
                    weights = self.weigh()
                self._fill(weights)
        for recorder in recorders:
            recorder.drop_blank()
        if self.weigh is not None:
            self._clear()

    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        """Add the weighted sums to `.grad`, or, where a second pass is needed, note what is known."""
        kept: dict[Recorder, Callable[[], Tensor]] = {}
        share = cache(_share)  # most parameters have the same weights
        for recorder, uses in self.uses.items():
            name = self.name_of(recorder)
            grad, own = self.grads[name], weights[name]
            size = len(grad)
            if self.passes != 1 and any(isinstance(use.factor, Spent) for use in uses):
                self.spent[recorder] = _weights(own, size)
            else:
                factor, scale = grad.factor.unscaled()
                times = scale * _divided(recorder, size)
                kept[recorder] = partial(_weighted_sum, factor, *share(own, size, times, _wide(factor)))
        if not self.spent:
            self._add_all(kept)
        elif self.twice:
            self.totals = {recorder: total() for recorder, total in kept.items()}
        else:
            self.spent = {}
            raise RuntimeError(
                "ps.clipping in more than one pass runs the second one itself: call clip.backward(loss) in"
                " the place of loss.backward()."
            )

    def _add_all(self, totals: dict[Recorder, Callable[[], Tensor]]) -> None:
        """Add to `.grad`, over all processes, and let go of what each was made of."""
        params = [(self.ranks.param_of(recorder), recorder) for recorder in totals]
        here = {param: recorder for param, recorder in params if param is not None}
        for param in self.ranks.reached(list(here)):
            if (recorder := here.get(param)) is None:
                total = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
            else:
                total = of_dtype(totals.pop(recorder)(), param.dtype)
                recorder.blank = False  # zeros are a gradient, too
                self._let_go(recorder)
            self.ranks.add(param, total)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, and a second one for what the first one has let go."""
        if not self.every:
            raise RuntimeError("clip.backward(loss) is called inside of its block, `with ps.clipping(...)`.")
        if self.passes == 1:
            loss.backward()
            return
        self.twice = True
        try:
            try:
                loss.backward(retain_graph=True)
            except RuntimeError as error:
                if "donated buffers" in str(error):
                    raise _once_only("it lets go of what it holds in the first one") from error
                raise
            if self.spent:
                leaves = [recorder.leaf for recorder in self.spent if recorder.leaf is not None]
                with going_to(self.model, _SecondPass(self.spent, self.totals), alone=False):
                    torch.autograd.backward(loss, inputs=leaves)
                if left := self.spent.keys() - self.totals.keys():
                    raise _once_only(f"`{min(recorder.name for recorder in left)}` was not reached by it")
                with computing():
                    self._add_all({recorder: partial(self.totals.pop, recorder) for recorder in self.totals})
        finally:
            self.twice, self.totals, self.spent = False, {}, {}

    def _clear(self) -> None:
        """Leave nothing on the parameters; what was weighed is gone."""
        for recorder in list(self.uses):
            self._let_go(recorder)

    def _let_go(self, recorder: Recorder) -> None:
        if (holder := recorder.holder.tensor()) is not None:
            holder.grad_sample = None  # type: ignore[attr-defined]
        if self.weigh is not None:
            self.uses.pop(recorder, None)
            self.grads._grads.pop(self.name_of(recorder), None)


class _SecondPass(Factored):
    """Factors of the second pass of `clipping`, whose weights are known.

    Args:
        weights: (B,), of each parameter whose factors are wanted.
        totals: where their weighted sums go.
    """

    sums = False

    def __init__(self, weights: Mapping[Recorder, Tensor], totals: dict[Recorder, Tensor]) -> None:
        self.weights, self.totals = weights, totals

    def take(self, recorder: Recorder, holder: Tensor, factor: Factor, scale: float) -> None:
        if (weights := self.weights.get(recorder)) is None:
            return
        with computing():
            factor = FactoredGrad(recorder.name, [Use(factor, scale, [])]).factor
            size = factor.shape[0]
            share = _share(weights, size, _divided(recorder, size), _wide(factor))
            self.totals[recorder] = _weighted_sum(factor, *share)


def _once_only(why: str) -> RuntimeError:
    return RuntimeError(
        "ps.clipping in more than one pass goes through a graph twice, which one of torch.compile"
        f" does not allow ({why}): take passes=1, or leave the model as it is."
    )


def _check_whole(model: nn.Module, every: list[Settings]) -> None:
    """An error where some parameters would not be weighed, or not by what the loss multiplies samples by."""
    if len({settings.loss_reduction for settings in every}) > 1:
        raise ValueError(
            "Parts of the model were converted with a loss_reduction of their own, so it cannot be told by"
            " what its loss multiplies each sample's: convert them with the one that the loss has,"
            " ps.convert_model(part, loss_reduction=...)."
        )
    # a converted model converts what was put into it since
    whole = isinstance(model, Converted) and not any(settings.partial for settings in every)
    if not whole and (left := Inventory(model, "", 0).unrecorded()):
        raise ValueError(
            f"`{left[0].path}` is trained, and has no per-sample gradients, so its gradient could not be"
            " weighed: freeze it, or convert all of the model, ps.convert_model(model), where it was left out"
            " with on_unsupported='general'."
        )


def _wide(factor: Factor) -> torch.dtype:
    """What weights of its samples are computed in: no less precise than itself, and than float32."""
    return torch.promote_types(factor.like().dtype.to_real(), torch.float32)


def _divided(recorder: Recorder, size: int) -> float:
    """What the loss multiplies each sample's by."""
    return 1 / max(size, 1) if recorder.settings.loss_reduction == "mean" else 1.0


def _share(weights: Tensor, size: int, times: float, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """(which samples have one, None where all have, and in a capture; their weights times a number)."""
    weights, index = _weights(weights, size).to(dtype), None
    # what is left out may hold what is not finite
    if not torch_api.capturing() and not bool(weights.all()):
        index = weights.nonzero().squeeze(1)
        weights = weights[index]
    return index, weights if times == 1 else weights * times


def _weighted_sum(factor: Factor, index: Tensor | None, weights: Tensor) -> Tensor:
    """Of the samples at `index`, or of all."""
    factor = factor if index is None else factor.select(index)
    if not weights.numel():
        return factor.like().new_zeros(factor.shape[1:])
    if torch_api.capturing():
        return factor.masked(weights).weighted_sum(weights).where(weights.any(), 0)
    return factor.weighted_sum(weights)


def _weights(weights: Tensor, size: int) -> Tensor:
    if not isinstance(weights, Tensor) or weights.shape != (size,) or weights.is_complex():
        raise ValueError(
            f"Weights must be a tensor of real numbers, of shape ({size},), one for each sample; got"
            f" {_what(weights)}."
        )
    return weights.detach()


def _what(value: object) -> str:
    """As an error names it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    return reprlib.repr(value)


def _projected(factor: Factor, dim: int, name: str, seed: int) -> Tensor:
    """Rows (B, p) times random numbers (p, dim), many of these at a time: to draw one takes as long as some
    hundred multiplications, by which rows are formed again.
    """
    width, like = factor.shape[1:].numel(), factor.like()
    out = like.new_zeros(factor.shape[0], dim)
    step = max(1, 8 * CHUNK_BYTES // (dim * 4))
    draw = torch.Generator(device="cpu").manual_seed(_number(name, seed))
    for start in range(0, width, step):
        stop = min(start + step, width)
        numbers = torch.randn(stop - start, dim, generator=draw, device="cpu", dtype=torch.float32).to(like)
        factor.add_projected(out, numbers, start)
    return out * dim**-0.5


def _number(name: str, seed: int) -> int:
    """A number for a name and a seed, the same in every process."""
    number = seed & 0xFFFFFFFF
    for byte in name.encode():
        number = (number * 1099511628211 + byte) & 0x7FFFFFFFFFFFFFFF
    return number


@contextmanager
def computing() -> Iterator[None]:
    """No graph, and no autocast."""
    if not torch.is_grad_enabled() and not torch_api.any_autocast():  # inside of another
        yield
        return
    with torch.no_grad(), torch_api.without_autocast():
        yield
