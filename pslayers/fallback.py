"""Modules without a replacement: how their forward is run so that each sample has parameters of its own.

Four ways, the fastest first; a way is taken only after it has been proved on the very inputs of the module's call:

- "direct": the module's own parameters are replaced by tensors that stand for one of each sample (`PerSample`), and know what to do
  in torch's ops. What lies below stays on its fast ops.
- "broadcast": the module's own parameters are replaced by per-sample ones, shaped so that the forward's broadcasting does the
  rest: a class token (1, 1, D) by (B, 1, D), a LayerScale (D,) by (B, 1, D). What lies below stays on its fast ops.
- "vmap": the forward runs under torch.func.vmap, everything trainable below it per sample.
- "loop": the forward runs sample by sample. Always right, and slow: it is said once, by name.

The proof: half of the samples get changed parameters. Their outputs must be those of the module with changed parameters, the
other samples' those of the module as it is.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from .expand import Expansion, Scale, by_original_layers, local, picked_by
from .owners import WEAK
from .per_sample import NoRuleError, PerSample, standing_in
from .picks import without_picks
from .proof import disagreement
from .record import recorder_of
from .redirect import Redirect
from .snapshot import trial, unchanged
from .tracking import BATCH_MAJOR, MIXED, PICKED, SHARED, TABLE, TIME_MAJOR, Layout, fits_layout, noise, samples_of_rows
from .trees import assign, map_tensors, own_parameters, tensors_in, written_to

Call = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]


class Layouts(NamedTuple):
    """How the tensors of a call hold the samples: of what it takes, returns, and writes into what it takes (a cache)."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    written: tuple[Layout, ...]


@dataclass(frozen=True)
class Plan:
    """How a module's call is run.

    `forms`: for "broadcast", how many dims are put between the batch and each parameter's own. `fresh`: for "vmap", whether
    tensors that the forward makes anew are made for each sample, to be written into. `fast`: the parameters that are used by
    fast ops (all that broadcast; under vmap those whose op is redirected).
    """

    way: str
    layouts: Layouts
    forms: tuple[tuple[str, int], ...] = ()
    fresh: bool = False
    fast: frozenset[str] = frozenset()


OWN = ("broadcast", "direct")  # ways in which a module's own parameters alone are replaced


class NoWayError(Exception):
    """No way of running the module was proved right."""


def parameters_of(module: nn.Module, own: bool) -> dict[str, nn.Parameter]:
    """The trainable parameters of the module alone, or of all that is below it too."""
    found = own_parameters(module) if own else module.named_parameters()
    return {name: p for name, p in found if p.requires_grad}


def run(module: Any, forward: Forward, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: set[str]) -> Any:
    """A call of a module by its plan."""
    batch = local.batch
    assert batch is not None
    if plan.way not in OWN:
        given = module._ps_given()  # below it too
    weights = _weights(module, given, own=plan.way in OWN)
    if plan.way in OWN:
        _watch(module, weights, plan.fast)
    if batch.outputs is None and local.picks is None:
        return _run(module, forward, plan, (args, kwargs), weights, batch.size)
    taken = {id(t) for t in tensors_in((args, kwargs))}
    compared = local.picks is not None and module._ps_state().settings.picks and plan.way not in OWN
    plain = _plainly(module, forward, (args, kwargs)) if compared else None
    output = _run(module, forward, plan, (args, kwargs), weights, batch.size, plain=plain)
    if local.picks is not None and plan.way not in OWN:
        if plain is not None:
            _check_plain(module, output, *plain)
        for t, layout in zip(tensors_in([output]), plan.layouts.outputs, strict=True):
            if layout in (BATCH_MAJOR, ("dim", 0)):
                local.picks.tag_batch(t)
            elif layout != PICKED:
                local.picks.tag(t, WEAK)
    if batch.outputs is None:
        return output
    if plan.way in OWN:  # the caller may index what now has a row for each sample
        batch.outputs.add([(w, 0, None) for w in weights.values()])
    if plan.way != "broadcast":  # inside, the way itself keeps samples apart
        made, layouts = list(tensors_in([output])), list(plan.layouts.outputs)
        if plan.way not in OWN:
            made += written_to((args, kwargs), taken)
            layouts += plan.layouts.written
        batch.outputs.add([_owned(t, lay, batch.size) for t, lay in zip(made, layouts, strict=True)])
    return output


def _owned(t: Any, layout: Layout, size: int) -> tuple[Tensor, int, Tensor | None]:
    """A tensor that was put together from the samples', the dim of its rows, and whose they are; None: k a sample, in order."""
    if layout == PICKED:
        return t, 0, _picked(t)
    return t, layout[1], samples_of_rows(layout, t, size) if layout == TIME_MAJOR else None


def _picked(t: Tensor) -> Tensor:
    """Whose the rows of a tensor are that is known to hold picked ones."""
    owners = picked_by(t)
    if owners is None or owners.ids is None:
        raise NoRuleError("it does not return rows that a mask has picked")
    ids: Tensor = owners.ids
    return ids


def _watch(module: Any, weights: dict[str, Tensor], formed: frozenset[str]) -> None:
    """Parameters that reach but outputs in which samples interact have no rows: an error by name, should they get a gradient."""
    state = module._ps_state()
    for name, param in own_parameters(module):
        if name in weights and isinstance(param, nn.Parameter):
            recorder_of(param, f"{state.prefix}{name}", state.settings).unexpanded = name not in formed


def run_single(module: Any, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], given: set[str]) -> Any:
    """A call for one sample with weights of its own, or for none: everything is that sample's."""
    batch, whole = local.batch, module._ps_state().whole
    assert batch is not None
    weights = _weights(module, given, own=not whole)
    alone = {n: w[0] if batch.size else w.new_zeros(w.shape[1:]) + w.sum(0) for n, w in weights.items()}
    with by_original_layers(whole), _reparametrize_module(module, alone, tie_weights=True):
        return forward(module, *args, **kwargs)


def _weights(module: Any, given: set[str], own: bool) -> dict[str, Tensor]:
    """Per-sample weights (B, *S): those that were given, and recorded expansions of trainable parameters."""
    batch, state = local.batch, module._ps_state()
    assert batch is not None
    weights: dict[str, Tensor] = {}
    for name, param in own_parameters(module) if own else module.named_parameters():
        if name in given:
            module._ps_check_given(name, param, batch.size)
            weights[name] = param
        elif param.requires_grad and isinstance(param, nn.Parameter) and state.settings.recording and torch.is_grad_enabled():
            holder = module.get_submodule(name.rpartition(".")[0])
            recorder = recorder_of(param, f"{state.prefix}{name}", state.settings, holder)
            rows = recorder.rows(batch.size)
            weights[name] = Expansion(param, rows, Scale(batch.scale.total), recorder).tensor(batch.size)
    return weights


def fits(plan: Plan, call: Call, size: int) -> bool:
    """Whether a plan that was made for other sizes can be right for these inputs."""
    return all(
        isinstance(t, Tensor) and fits_layout(layout, t, size)
        for t, layout in zip(tensors_in(call), plan.layouts.inputs, strict=True)
    )


def choose(module: Any, forward: Forward, call: Call, layouts: Layouts, size: int, whole: bool, picks: bool = False) -> Plan:
    """The fastest way that is proved right for this call; `whole` rules out those that leave what lies below to itself.

    `picks`: it picks rows by a mask, or returns such, to which what broadcasts may fit by chance.
    """
    if given := module._ps_given():  # per-sample weights: proved with those of the first sample
        first = {n: p[0].detach().requires_grad_() for n, p in module.named_parameters() if n in given}
        with _reparametrize_module(module, first, tie_weights=True):
            return choose(module, forward, call, layouts, size, whole, picks)
    if {MIXED, PICKED} & {*layouts.inputs, *layouts.written} or set(layouts.outputs) == {MIXED}:
        raise NoWayError("its inputs or outputs cannot be attributed to samples")
    try:
        proof = _Proof(module, forward, call, layouts.outputs, size)
    except Exception as error:  # what it needs was made by its own hooks (weight_norm), or by its caller
        raise NoWayError(f"it cannot be called by itself again ({type(error).__name__}: {error})") from error
    own = frozenset(parameters_of(module, own=True))
    if not whole and MIXED not in layouts.outputs and proof.holds(plan := Plan("direct", layouts, fast=own)):
        return plan
    if not whole and not picks and (forms := _forms(module, proof, layouts)) is not None:
        return Plan("broadcast", layouts, forms, fast=frozenset(name for name, _ in forms))
    if MIXED in layouts.outputs:
        raise NoWayError("samples interact in one of its outputs")
    for way, fresh in (("vmap", False), ("vmap", True), ("loop", False)):
        if proof.holds(plan := Plan(way, layouts, fresh=fresh)):
            if way == "loop":
                warnings.warn(f"`{module._ps_state().path}` ({type(module).__name__}) is run sample by sample.", stacklevel=2)
            return replace(plan, fast=frozenset(proof.redirected))
    inputs = tuple(_of_mask(t, layout, size) for t, layout in zip(tensors_in(call), layouts.inputs, strict=True))
    if inputs != layouts.inputs:
        return choose(module, forward, call, layouts._replace(inputs=inputs), size, whole, picks)
    raise NoWayError(proof.problem)


def _of_mask(t: Any, layout: Layout, size: int) -> Layout:
    """Masks are not changed to see where they lead, so they seem to be shared: with as many rows, they may be the samples'."""
    batch = isinstance(t, Tensor) and t.dtype == torch.bool and t.ndim > 0 and len(t) == size
    return ("dim", 0) if batch and layout == TABLE else layout


def _forms(module: nn.Module, proof: "_Proof", layouts: Layouts) -> tuple[tuple[str, int], ...] | None:
    """Shapes by which every parameter broadcasts, found one parameter at a time; None where one has none."""
    forms: list[tuple[str, int]] = []
    for name, param in parameters_of(module, own=True).items():
        if MIXED in layouts.outputs and not proof.matters(name):
            continue
        for dims in (-1, 0, 1, 2, 3) if param.ndim and param.shape[0] == 1 else (0, 1, 2, 3):
            if proof.holds(Plan("broadcast", layouts, ((name, dims),))):
                forms.append((name, dims))
                break
        else:
            return None
    whole = Plan("broadcast", layouts, tuple(forms))
    return whole.forms if len(forms) < 2 or proof.holds(whole) else None


class _Proof:
    """Runs a way with per-sample parameters that are changed for every other sample, and compares."""

    def __init__(self, module: nn.Module, forward: Forward, call: Call, outputs: tuple[Layout, ...], size: int) -> None:
        self.module, self.forward, self.call, self.outputs, self.size = module, forward, call, outputs, size
        self.changed = torch.arange(size) % 2 == 0
        self.problem = ""
        self.redirected: set[str] = set()
        self.values = {name: p.detach() for name, p in parameters_of(module, own=False).items()}
        self.others = {name: p * 1.1 + 0.1 * (p.abs().mean() + 0.1) * noise(p) for name, p in self.values.items()}
        self.rounding = _rounding(call, self.values.values())
        self.plain = self._outputs({})

    def holds(self, plan: Plan) -> bool:
        names = [name for name, _ in plan.forms] or [name for name in plan.fast if name in self.values] or list(self.values)
        weights = {n: torch.stack([self.others[n] if c else self.values[n] for c in self.changed]) for n in names}
        expected = self._outputs({n: self.others[n] for n in names})
        with torch.no_grad(), trial(self.module):
            try:
                found = _run(self.module, self.forward, plan, _copy(self.call), weights, self.size)
            except Exception as error:  # whatever a forward raises under per-sample parameters
                self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
                return False
        tensors = [t for t in tensors_in([found]) if isinstance(t, Tensor)]
        right = len(tensors) == len(self.plain) and all(
            self._agrees(*each) for each in zip(tensors, self.plain, expected, self.outputs, strict=True)
        )
        if right and not self._differentiable(plan, names):
            return False
        self.problem = self.problem if right else f"samples that run by themselves ({plan.way}) give other outputs"
        return right

    def matters(self, name: str) -> bool:
        """Whether the parameter changes an output in which samples do not interact."""
        others = zip(self._outputs({name: self.others[name]}), self.plain, self.outputs, strict=True)
        return any(layout != MIXED and not torch.equal(other, plain) for other, plain, layout in others)

    def _differentiable(self, plan: Plan, names: list[str]) -> bool:
        """Whether the rows add up to the plain gradient: a custom backward may know of shared parameters only."""
        size, grads = self.size, list[tuple[Tensor | None, ...]]()
        shared = {n: self.values[n].clone().requires_grad_() for n in names}
        each = {n: self.values[n].expand(size, *self.values[n].shape).requires_grad_() for n in names}
        # asked for too where a real run needs them: torch's group_norm crashes on channels_last images that need none
        taken = [t for t in tensors_in(self.call) if isinstance(t, Tensor) and t.requires_grad]
        redirect = Redirect(size if plan.fresh else None)
        with torch.enable_grad(), by_original_layers():  # what lies below is not recorded
            try:
                with trial(self.module), _reparametrize_module(self.module, shared, tie_weights=True):
                    outputs = [self.forward(self.module, *args, **kwargs) for args, kwargs in [_copy(self.call)]]
                with trial(self.module):
                    outputs.append(_run(self.module, self.forward, plan, _copy(self.call), each, size, redirect))
                for output, inputs in zip(outputs, (shared, each), strict=True):
                    loss = sum(_summed(t, layout, size) for t, layout in zip(tensors_in([output]), self.outputs, strict=True))
                    if isinstance(loss, Tensor) and loss.requires_grad:
                        found = torch.autograd.grad(loss, [*inputs.values(), *taken], allow_unused=True)
                        grads.append(found[: len(inputs)])
                    elif not grads:  # nothing has a gradient
                        return True
                    else:
                        grads.append((None,) * len(inputs))
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
                return False
        # some gradients are nothing but rounding (a bias before a softmax): judge by the largest
        largest = max((g.nan_to_num(0, 0, 0).abs().max().item() for g in grads[0] if g is not None and g.numel()), default=0.0)
        close = max(1e-3, 16 * self.rounding), max(1e-4, 4 * self.rounding) * largest
        for plain, rows in zip(*grads, strict=True):
            if plain is not None and (rows is None or not torch.allclose(rows.sum(0), plain, *close, True)):
                self.problem = f"the rows do not add up to the gradient ({plan.way})"
                return False
        self.redirected = {name for name, w in each.items() if w.data_ptr() in redirect.weights and plan.way == "vmap"}
        return True

    def _agrees(self, found: Tensor, plain: Tensor, other: Tensor, layout: Layout) -> bool:
        if not plain.is_floating_point() or layout == MIXED:
            return True
        if layout == PICKED and picked_by(plain) is None:
            return False
        if layout in (SHARED, TABLE):
            plain, other = (t.expand(self.size, *t.shape[layout == SHARED :]) for t in (plain, other))
            layout = ("dim", 0)
        if found.shape != plain.shape or not plain.numel():
            return found.shape == plain.shape
        expected = torch.where(_mask(self.changed.to(plain.device), plain, layout), other, plain)
        scale = (other - plain).nan_to_num(0, 0, 0).abs().max()
        same = (found == expected) | (found.isnan() & expected.isnan())  # infinities, as in masks
        error = torch.where(same, 0, (found - expected).abs())
        close = max(1e-3, 16 * self.rounding), max(1e-5, 4 * self.rounding)
        return bool(error.max() <= close[0] * scale + close[1] * plain.abs().nan_to_num(0, 0, 0).max())

    def _outputs(self, weights: dict[str, Tensor]) -> list[Tensor]:
        args, kwargs = _copy(self.call)
        with torch.no_grad(), trial(self.module), _reparametrize_module(self.module, weights, tie_weights=True):
            return [t for t in tensors_in([self.forward(self.module, *args, **kwargs)]) if isinstance(t, Tensor)]


def _rounding(call: Call, params: Iterable[Tensor]) -> float:
    """The relative error of one number in the coarsest precision that a call computes in."""
    tensors = [t for t in (*tensors_in(call), *params) if isinstance(t, Tensor) and t.is_floating_point()]
    cast = {t.device.type for t in tensors if torch.is_autocast_enabled(t.device.type)}
    return max((torch.finfo(d).eps for d in (*(t.dtype for t in tensors), *map(torch.get_autocast_dtype, cast))), default=0.0)


def _summed(t: Any, layout: Layout, size: int) -> Tensor | float:
    """The sum of an output over all samples, to which one that they share counts for each."""
    if not isinstance(t, Tensor) or not t.is_floating_point() or layout == MIXED:
        return 0.0
    alone = layout in (SHARED, TABLE) and not (t.ndim and t.shape[0] == size)
    return torch.where(t.isfinite(), t, 0).sum() * (size if alone else 1)


def _copy(call: Call) -> Call:
    copied: Call = map_tensors(lambda t: t.clone(), call)
    return copied


def _mask(changed: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """`changed` (B,) so that it broadcasts over a tensor of this layout."""
    owners, dim = _picked(like) if layout == PICKED else samples_of_rows(layout, like, len(changed)), layout[1]
    return changed[owners].reshape(*[1] * dim, -1, *[1] * (like.ndim - dim - 1))


# ---------------------------------------------------------------------------------------------------------------- the ways
def _run(
    module: nn.Module,
    forward: Forward,
    plan: Plan,
    call: Call,
    weights: dict[str, Tensor],
    size: int,
    redirect: Redirect | None = None,
    plain: tuple[Any, bool] | None = None,
) -> Any:
    """The call with per-sample `weights` (B, *S); `plain`: what `_plainly` gives for it, if that is known."""
    if plan.way == "broadcast":
        forms = {name: _form(weights[name], dims) for name, dims in plan.forms}
        with _in_place_of(module, forms):
            return forward(module, *call[0], **call[1])
    if plan.way == "direct":
        if weights.keys() - plan.fast:  # not trained when this was proved
            raise NoRuleError("a parameter is trained that was not")
        batch = zip(tensors_in(call), plan.layouts.inputs, strict=True)
        with standing_in(
            weights, [t for t, lay in batch if isinstance(t, Tensor) and lay in (BATCH_MAJOR, ("dim", 0))]
        ) as stand_ins:
            with _in_place_of(module, stand_ins):
                output = forward(module, *call[0], **call[1])
            stand_ins.clear()
            output = _of_the_batch(output, plan.layouts.outputs)
        return output  # noqa: RET504  # what it was must not live when it is asked whether something was kept
    redirect = redirect or Redirect(size if plan.fresh else None)
    layouts = iter(plan.layouts.inputs)
    flat: list[Tensor] = []  # every sample's part in dim 0, a batch of one behind it; or as it is
    where: list[int | None] = []

    def take(t: Tensor) -> Tensor:
        layout = next(layouts)
        flat.append(t if layout in (SHARED, TABLE) else _apart(t, layout, size))
        where.append(None if layout in (SHARED, TABLE) else 0)
        return t

    map_tensors(take, call)
    skeleton: list[Any] = []

    def one(own: dict[str, Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = iter(tensors)
        args, kwargs = taken = map_tensors(lambda _: next(parts), call)
        with (
            without_picks(),
            by_original_layers(),
            unchanged(module, numbers=False),
            _reparametrize_module(module, own, tie_weights=True),
            redirect,
        ):
            output = forward(module, *args, **kwargs)
        written = written_to(taken, {id(t) for t in tensors})
        skeleton[:] = [output, taken, dict(zip(map(id, tensors), itertools.count())), {id(t): i for i, t in enumerate(written)}]
        return (*(t for t in tensors_in([output]) if isinstance(t, Tensor)), *written)

    both = (*plan.layouts.outputs, *plan.layouts.written)
    if plan.way == "vmap":
        with warnings.catch_warnings():  # torch's, of ops that vmap runs sample by sample, of which the user knows nothing
            warnings.filterwarnings("ignore", "There is a performance drop")
            outputs = torch.func.vmap(one, in_dims=(0, *where), randomness="different")(weights, *flat)
    else:
        own = [dict(zip(weights, each, strict=True)) for each in zip(*(w.unbind() for w in weights.values()), strict=True)]
        each = [one(own[i], *(t if d is None else t[i] for t, d in zip(flat, where, strict=True))) for i in range(size)]
        outputs = tuple(zip(*each, strict=True))  # type: ignore[arg-type]
    # rows that were picked need not be in the order of the samples
    ordered = tensors_in([(plain or _plainly(module, forward, call))[0]]) if PICKED in both else ()
    ids = {i: _picked(t) for i, (t, layout) in enumerate(zip(ordered, both, strict=False)) if layout == PICKED}  # type: ignore[arg-type]
    together = [
        local.picks.joined(parts, ids[i]) if layout == PICKED else _together(parts, layout)
        for i, (parts, layout) in enumerate(zip(outputs, both, strict=True))
    ]
    output, taken, given, written = skeleton
    originals, count = list(tensors_in(call)), len(plan.layouts.outputs)

    def real(t: Tensor) -> Tensor:
        return originals[given[id(t)]] if id(t) in given else together[count + written[id(t)]]  # type: ignore[return-value]

    assign(call, taken, real)
    whole = iter(together)
    return map_tensors(lambda _: next(whole), output)


def _plainly(module: Any, forward: Forward, call: Call) -> tuple[Any, bool]:
    """What a call returns by the original layers, and whether it draws random numbers."""
    random, (args, kwargs) = torch.get_rng_state(), _copy(call)
    with torch.no_grad(), trial(module), by_original_layers():
        output = forward(module, *args, **kwargs)
        return output, not torch.equal(random, torch.get_rng_state())


def _check_plain(module: Any, output: Any, plain: Any, drawn: bool) -> None:
    """An error where samples by themselves do not return what they do together: what masks pick may be put in any order."""
    shapes = [[t.shape for t in tensors_in([o]) if isinstance(t, Tensor)] for o in (output, plain)]
    if shapes[0] != shapes[1] or (not drawn and disagreement(output, plain) is not None):
        raise ValueError(
            f"`{module._ps_state().path}` ({type(module).__name__}) picks rows by its data (as in h[mask]), and its samples, each "
            f"by itself, do not return what they do together: they interact, or rows are moved in a way that is not followed. "
            f"Write a layer for it (ps.PSLayer)."
        )


@contextmanager
def _in_place_of(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Tensors in the place of the module's own parameters."""
    places = []
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        places.append((module.get_submodule(path)._parameters, last, tensor))
    before = [(held, name, held[name]) for held, name, _ in places]
    try:
        for held, name, tensor in places:
            held[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for held, name, param in before:
            held[name] = param


def _of_the_batch(output: Any, layouts: tuple[Layout, ...]) -> Any:
    """An output in which no parameter stands for each sample's own: what all samples share in the plain one has a batch dim."""
    if isinstance(output, Tensor) and not isinstance(output, PerSample):
        return output
    tensors = list(tensors_in([output]))
    if not any(isinstance(t, PerSample) for t in tensors):
        return output
    rest = iter(layouts)

    def real(t: Tensor) -> Tensor:
        if (layout := next(rest, None)) is None:
            raise NoRuleError("it returns more than it did")
        return t if not isinstance(t, PerSample) else t.over(t.ndim, len(t.each)) if layout == SHARED else t.each

    return map_tensors(real, output)


def _form(weight: Tensor, dims: int) -> Tensor:
    """(B, *S) with dims between, or, for -1, in the place of a leading dim of one."""
    if dims < 0:
        return weight.squeeze(1)
    return weight.reshape(len(weight), *[1] * dims, *weight.shape[1:])


def _apart(t: Tensor, layout: Layout, size: int) -> Tensor:
    kind, dim = layout
    if kind == "dim":
        return t.unsqueeze(dim + 1).movedim(dim, 0)
    if layout == TIME_MAJOR:
        return t.unflatten(0, (-1, size)).transpose(0, 1)
    return t.unflatten(0, (size, -1))


def _together(t: Tensor | tuple[Tensor, ...], layout: Layout) -> Tensor:
    """The samples' outputs (B, ...), or one of each, in the layout that the plain output has."""
    kind, dim = layout
    if not isinstance(t, Tensor) and any(one.shape != t[0].shape for one in t):
        raise ValueError(f"samples return tensors of shapes {sorted({tuple(one.shape) for one in t})}, which are no batch.")
    t = t if isinstance(t, Tensor) else torch.stack(t)
    if kind == "dim":
        return t.movedim(0, dim).flatten(dim, dim + 1)
    if layout == TABLE:
        return t
    return (t.transpose(0, 1) if layout == TIME_MAJOR else t).flatten(0, 1)


def places(state: Any, call: int, slot: str, values: Any) -> tuple[Layout, ...]:
    """The layout of every tensor that a call takes ("in"), returns ("out") or writes ("written"), as tracked."""
    return tuple(_places(state, call, slot, values))


def _places(state: Any, call: int, slot: str, values: Any) -> Iterator[Layout]:
    for place, t in enumerate(tensors_in(values)):
        found = state.layouts.get((call, (slot, place), t.ndim)) if isinstance(t, Tensor) else MIXED
        yield MIXED if found is None else found
