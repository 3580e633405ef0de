"""Modules without a replacement: how their forward is run so that each sample has parameters of its own.

Three ways, the fastest first; a way is taken only after it has been proved on the very inputs of the module's call:

- "direct": the forward runs as it is, once, with tensors in the place of parameters that stand for one of each sample
  (`PerSample`), and know what to do in torch's functions. Where those must know whose the rows of other tensors are, these are
  followed through the forward. The module's own parameters are replaced, and what lies below stays on its fast ops; or all that is
  below it too.
- "vmap": the forward runs under torch.func.vmap, everything trainable below it per sample.
- "loop": the forward runs sample by sample. Always right, and slow: it is said once, by name.

The proof: the outputs are those of the plain module; the rows add up to the plain gradient; and when the gradient of each sample's
outputs is multiplied by a number of its own, so is that sample's row.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import torch_api
from .context import Batch, Scale, by_original_layers, in_place_of, local, places_of
from .expand import Expansion
from .owners import WEAK
from .per_sample import NoRuleError, PerSample, Standing, standing_in
from .picks import following, without_picks
from .proof import disagreement, quiet_hooks, quiet_pass, separating_groups
from .record import recorder_of
from .redirect import Redirect
from .single import of_one
from .snapshot import Snapshot, trial, unchanged
from .tracking import BATCH_MAJOR, MIXED, PICKED, SHARED, TABLE, TIME_MAJOR, Layout, fits_layout, noise, samples_of_rows
from .trees import assign, map_tensors, own_parameters, tensors_in, tensors_of, written_to

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

    `names`: the parameters of which each sample has its own; `whole`: of all modules below. For "direct", `follows`: rows of other
    tensors are followed, and `choices`: see `Standing`. For "vmap", `fresh`: tensors that the forward makes anew are made for each
    sample, to be written into. `idle`: parameters that reach but outputs in which samples interact. `others`: those that are left
    to a layer below. `fast`: those that are used by fast ops. `counts`: the forward changes what the module keeps, which vmap and
    the loop do not. `orders`: in which order the dims of what the plain module returns lie in memory.
    """

    way: str
    layouts: Layouts
    names: frozenset[str]
    whole: bool
    follows: bool = False
    choices: tuple[bool, ...] | None = None
    fresh: bool = False
    idle: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    fast: frozenset[str] = frozenset()
    counts: bool = False
    orders: tuple[tuple[int, ...] | None, ...] = ()


class NoWayError(Exception):
    """No way of running the module was proved right."""


def parameters_of(module: nn.Module, own: bool) -> dict[str, nn.Parameter]:
    """The trainable parameters of the module alone, or of all that is below it too."""
    found = own_parameters(module) if own else module.named_parameters()
    return {name: p for name, p in found if p.requires_grad}


# ---------------------------------------------------------------------------------------------------------------- a call
def run(module: Any, forward: Forward, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: set[str]) -> Any:
    """A call of a module by its plan."""
    batch, call = local.batch, (args, kwargs)
    assert batch is not None
    weights = _weights(module, module._ps_given() if plan.whole else given, own=not plan.whole, plan=plan)
    if weights.keys() - plan.names:  # not trained when this was proved
        raise NoRuleError("a parameter is trained that was not")
    taken = {id(t) for t in tensors_in(call)}
    compared = plan.way != "direct" and not given and (MIXED in plan.layouts.outputs or module._ps_state().settings.picks)
    plain = _plainly(module, forward, call) if compared else None
    output = _run(module, forward, plan, call, weights, batch.size)
    if module.training:
        output = _laid_out(output, plan, taken)
    if plain is not None:
        _check_plain(module, output, *plain, plan.layouts.outputs)
    if local.picks is not None and not plan.follows:
        for t, layout in zip(tensors_in([output]), plan.layouts.outputs, strict=True):
            if layout in (BATCH_MAJOR, ("dim", 0)):
                local.picks.tag_batch(t)
            elif layout != PICKED:
                local.picks.tag(t, WEAK)
    if plan.counts:
        first = {n: w[0] for n, w in weights.items() if n in given} if given else {}
        by_them = in_place_of(places_of(module, first, tied=True))
        with torch.no_grad(), torch.random.fork_rng(), by_original_layers(), without_picks(), by_them:
            forward(module, *_copy(call)[0], **_copy(call)[1])
    if batch.outputs is not None:
        if plan.way == "direct":  # the caller may index what now has a row for each sample
            batch.outputs.add([(w, 0, None) for w in weights.values()])
            _note(batch, tensors_in([output]), plan.layouts.outputs)
        else:  # inside, the way itself keeps samples apart
            _note(batch, [*tensors_in([output]), *written_to(call, taken)], (*plan.layouts.outputs, *plan.layouts.written))
    return output


def _laid_out(output: Any, plan: Plan, taken: set[int]) -> Any:
    """An output that lies in memory as the plain module's does: dropout fills its masks in that order."""
    pairs = zip(tensors_of(output), plan.orders, strict=False)
    orders = {id(t): order for t, order in pairs if order is not None and id(t) not in taken and order != _order(t)}

    def lay(t: Tensor) -> Tensor:
        if (order := orders.get(id(t))) is None:
            return t
        return t.permute(order).contiguous().permute([order.index(d) for d in range(t.ndim)])

    return map_tensors(lay, output) if orders else output


def _order(t: Tensor) -> tuple[int, ...] | None:
    """In which order its dims lie in memory; None where it does not fill what it lies in."""
    if isinstance(t, PerSample):
        return None
    strides = t.stride()
    order = tuple(sorted(range(t.ndim), key=lambda d: -strides[d]))
    return order if t.permute(order).is_contiguous() else None


def _note(batch: Any, tensors: Iterable[Any], layouts: Iterable[Layout]) -> None:
    """Have what was made of the samples watched, while whose its rows are is to be proved."""
    pairs = zip(tensors, layouts, strict=True)
    batch.outputs.add([_owned(t, layout, batch.size) for t, layout in pairs if layout != MIXED and isinstance(t, Tensor)])


def _owned(t: Any, layout: Layout, size: int) -> tuple[Tensor, int, Tensor | None]:
    """A tensor that was put together from the samples', the dim of its rows, and whose they are; None: k a sample, in order."""
    if layout == PICKED:
        return t, 0, _picked(t)
    return t, layout[1], samples_of_rows(layout, t, size) if layout == TIME_MAJOR else None


def _picked(t: Tensor) -> Tensor:
    """Whose the rows of a tensor are that is known to hold picked ones."""
    owners = None if local.picks is None else local.picks.owners(t)
    if owners is None or owners.ids is None:
        raise NoRuleError("it does not return rows that a mask has picked")
    ids: Tensor = owners.ids
    return ids


def run_single(module: Any, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], given: set[str]) -> Any:
    """A call for one sample with weights of its own, or for none: everything is that sample's."""
    batch, whole = local.batch, module._ps_state().whole
    assert batch is not None
    weights = _weights(module, given, own=not whole)
    alone = {n: of_one(w) for n, w in weights.items()}
    with by_original_layers(whole), in_place_of(places_of(module, alone, tied=True)):
        return forward(module, *args, **kwargs)


def _weights(module: Any, given: set[str], own: bool, plan: Plan | None = None) -> dict[str, Tensor]:
    """Per-sample weights (B, *S): those that were given, and recorded expansions of trainable parameters, but those that are idle.

    These have no rows: an error by name, should they get a gradient.
    """
    batch, state = local.batch, module._ps_state()
    assert batch is not None
    idle, others = (frozenset[str](), frozenset[str]()) if plan is None else (plan.idle, plan.others)
    weights: dict[str, Tensor] = {}
    for name, param in own_parameters(module) if own else module.named_parameters():
        if name in others:
            continue
        if name in given:
            module._ps_check_given(name, param, batch.size)
            weights[name] = param
        elif param.requires_grad and isinstance(param, nn.Parameter) and state.settings.recording and torch.is_grad_enabled():
            holder = module.get_submodule(name.rpartition(".")[0])
            recorder = recorder_of(param, f"{state.prefix}{name}", state.settings, holder)
            recorder.unexpanded = name in idle
            if name not in idle:
                rows = recorder.rows(batch.size)
                weights[name] = Expansion(param, rows, Scale(batch.scale.total), recorder).tensor(batch.size)
    return weights


def fits(plan: Plan, call: Call, size: int) -> bool:
    """Whether a plan that was made for other sizes can be right for these inputs."""
    return all(
        isinstance(t, Tensor) and fits_layout(layout, t, size)
        for t, layout in zip(tensors_in(call), plan.layouts.inputs, strict=True)
    )


def _plainly(module: Any, forward: Forward, call: Call) -> tuple[Any, bool]:
    """What a call returns by the original layers, and whether it draws random numbers."""
    random, (args, kwargs) = torch.get_rng_state(), _copy(call)
    with torch.no_grad(), trial(module), by_original_layers():
        output = forward(module, *args, **kwargs)
        return output, not torch.equal(random, torch.get_rng_state())


def _check_plain(module: Any, output: Any, plain: Any, drawn: bool, layouts: Sequence[Layout]) -> None:
    """An error where samples by themselves do not return what they do together: what masks pick may be put in any order."""
    ours, theirs = tensors_of(output), tensors_of(plain)
    size = local.batch.size if local.batch is not None else 1
    pairs = zip(theirs, layouts, strict=True)
    theirs = [t.expand(size, *t.shape[layout == SHARED :]) if layout in (SHARED, TABLE) else t for t, layout in pairs]
    if [t.shape for t in ours] != [t.shape for t in theirs] or (not drawn and disagreement(ours, theirs) is not None):
        raise ValueError(
            f"`{module._ps_state().path}` ({type(module).__name__}) is run sample by sample, and its samples, each by itself, do "
            f"not return what they do together: they interact, rows that were picked by data (as in h[mask]) are moved in a way "
            f"that is not followed, or a loss in it is no {module._ps_state().settings.loss_reduction} over samples. Write a layer "
            f"for it (ps.PSLayer)."
        )


# ---------------------------------------------------------------------------------------------------------------- the choice
def choose(
    module: Any, forward: Forward, call: Call, layouts: Layouts, size: int, whole: bool, picks: bool, differ: bool = False
) -> Plan:
    """The fastest way that is proved right for this call; `whole` rules out those that leave what lies below to itself.

    `picks`: it picks rows by data, which may be in the batch's order by chance. `differ`: also for weights that truly differ from
    sample to sample.
    """
    if given := module._ps_given():  # proved with those of the first sample
        first = {n: p[0].detach().requires_grad_() for n, p in module.named_parameters() if n in given}
        with in_place_of(places_of(module, first, tied=True)):
            return choose(module, forward, call, layouts, size, whole, picks, differ=True)
    names = frozenset(parameters_of(module, own=not whole))
    try:
        proof = _Proof(module, forward, call, layouts, names, size, whole, differ)
    except Exception as error:  # what it needs was made by its own hooks (weight_norm), or by its caller
        raise NoWayError(f"it cannot be called by itself again ({type(error).__name__}: {error})") from error
    others = frozenset[str]() if whole else proof.of_layers()
    for idle in (frozenset[str](), *proof.idle()):
        for follows in (True,) if whole or picks else (False, True):
            plan = Plan("direct", layouts, names - idle - others, whole, follows, idle=idle, others=others)
            if proved := proof.of(plan):
                return proved
    if {MIXED, PICKED} & {*layouts.inputs, *layouts.written} or PICKED in layouts.outputs:
        raise NoWayError(f"its inputs or outputs cannot be attributed to samples; {proof.problem}")
    names = frozenset(parameters_of(module, own=False))
    proof = proof if whole else _Proof(module, forward, call, layouts, names, size, True, differ)
    for way, fresh in (("vmap", False), ("vmap", True), ("loop", False)):
        if proved := proof.of(Plan(way, layouts, names, True, fresh=fresh, counts=proof.counts)):
            if way == "loop":
                warnings.warn(f"`{module._ps_state().path}` ({type(module).__name__}) is run sample by sample.", stacklevel=2)
            return proved
    inputs = tuple(_of_mask(t, layout, size) for t, layout in zip(tensors_in(call), layouts.inputs, strict=True))
    if inputs != layouts.inputs:
        return choose(module, forward, call, layouts._replace(inputs=inputs), size, whole, picks, differ)
    raise NoWayError(proof.problem)


def _of_mask(t: Any, layout: Layout, size: int) -> Layout:
    """Masks are not changed to see where they lead, so they seem to be shared: with as many rows, they may be the samples'."""
    batch = isinstance(t, Tensor) and t.dtype == torch.bool and t.ndim > 0 and len(t) == size
    return ("dim", 0) if batch and layout == TABLE else layout


class _Proof:
    """Runs a way with per-sample parameters, and compares outputs and gradients with those of the plain module.

    Parameters have some noise meanwhile: nothing depends on what a zero-initialised layer gives.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        call: Call,
        layouts: Layouts,
        names: frozenset[str],
        size: int,
        whole: bool,
        differ: bool,
    ) -> None:
        self.module, self.forward, self.call, self.size = module, forward, call, size
        self.whole, self.differ = whole, differ
        self.layouts, self.problem = (*layouts.outputs, *layouts.written), ""
        self.inputs = layouts.inputs
        found = parameters_of(module, own=False)
        self.values = {n: p.detach() + 0.1 * (p.detach().abs().mean() + 0.1) * (noise(p) - 0.4) for n, p in found.items()}
        self.values |= {n: p.detach() for n, p in own_parameters(module) if n in names and n not in self.values}
        self.names = sorted(names)
        self.factors = 0.5 + noise(torch.empty(size, dtype=torch.float64))  # one for each sample
        self.rounding = _rounding(call, self.values.values())
        before, plain = Snapshot(module), {n: self.values[n].clone().requires_grad_() for n in self.names}
        with self._run_by_itself(plain):
            args, kwargs = _copy(call)
            given = {id(t) for t in tensors_in((args, kwargs))}
            output = forward(module, *args, **kwargs)
            self.plain, self.orders = self._outputs(output, (args, kwargs), given), tuple(map(_order, tensors_of(output)))
            self.counts = before.differs()
            self.sums = [self._gradients(self.plain, plain, mixed) for mixed in (False, True)]
        self.plain = [t.detach() for t in self.plain]

    def _run_by_itself(self, own: dict[str, Tensor]) -> Any:
        """Around a run of the module: nothing is left behind, and nothing recorded."""
        stack = ExitStack()
        straight = torch_api.reentrant_checkpoints_straight()
        for context in (torch.enable_grad(), trial(self.module), by_original_layers(), straight, quiet_hooks(self.module)):
            stack.enter_context(context)
        others = {n: v for n, v in self.values.items() if n not in self.names}
        stack.enter_context(in_place_of(places_of(self.module, others, tied=True)))
        proved = {n: own.get(n, self.values[n]) for n in self.names}
        stack.enter_context(in_place_of(places_of(self.module, proved, tied=self.whole)))
        return stack

    def _outputs(self, output: Any, call: Call, given: set[int]) -> list[Tensor]:
        return [*tensors_of(output), *written_to(call, given)]

    def _parts(self, tensors: Sequence[Tensor], mixed: bool) -> Iterator[tuple[Tensor, Layout]]:
        """The outputs that count, with their layouts, and a row for each sample of what all share."""
        for t, layout in zip(tensors, self.layouts, strict=True):
            if t.is_floating_point() and (layout == MIXED) is mixed:
                alone = layout in (SHARED, TABLE) and not (t.ndim and len(t) == self.size)
                each = t.expand(self.size, *t.shape[layout == SHARED :]) if alone else t
                yield each, ("dim", 0) if layout in (SHARED, TABLE) else layout

    def _gradients(
        self, tensors: Sequence[Tensor], of: dict[str, Tensor], mixed: bool = False, factors: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Of some numbers times the outputs, and times the factor of each sample."""
        loss: Tensor | float = 0.0
        for t, layout in self._parts(tensors, mixed):
            weights = torch.where(t.isfinite(), noise(t) + 0.5, 0)
            weights = weights if factors is None else weights * _factors(factors.to(t), t, layout)
            loss = loss + (torch.where(t.isfinite(), t, 0) * weights).sum()
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return {}
        # asked for too where a real run needs them: torch's group_norm crashes on channels_last images that need none
        taken = [t for t in tensors_in(self.call) if isinstance(t, Tensor) and t.requires_grad]
        with quiet_pass():
            found = torch.autograd.grad(loss, [*of.values(), *taken], allow_unused=True, retain_graph=True)
        return {name: g for name, g in zip(of, found, strict=False) if g is not None}

    def idle(self) -> list[frozenset[str]]:
        """The parameters that reach but outputs in which samples interact, if there are any beside others."""
        idle = frozenset(n for n in self.names if n not in self.sums[0] and n in self.sums[1])
        return [idle] if idle and any(layout != MIXED for layout in self.layouts) else []

    def of_layers(self) -> frozenset[str]:
        """The module's own parameters that are a layer's below, too (tied ones), which alone uses them."""
        below = {id(p) for m in self.module.modules() if m is not self.module for p in m._parameters.values() if p is not None}
        own = parameters_of(self.module, own=True)
        return frozenset(n for n, p in own.items() if id(p) in below and n not in self.sums[0] and n not in self.sums[1])

    def of(self, plan: Plan) -> Plan | None:
        """The plan, with what its run has shown, where it is right."""
        standing = Standing((), plan.whole, {}, plan.follows)
        try:
            self.problem = self._wrong(plan, standing) or ""
        except Exception as error:  # whatever a forward raises under per-sample parameters
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if self.problem:
            return None
        return replace(plan, choices=tuple(standing.chosen), fast=plan.names - standing.slow, orders=self.orders)

    def _wrong(self, plan: Plan, standing: Standing) -> str | None:
        each = self._each(plan)
        with self._run_by_itself({n: self.values[n] for n in plan.idle}):
            call = _copy(self.call)
            given = {id(t) for t in tensors_in(call)}
            output = _run(self.module, self.forward, plan, call, each, self.size, standing)
            tensors = self._outputs(output, call, given)
            if problem := self._outputs_differ(tensors):
                return problem
            rows = self._gradients(tensors, each)
            if problem := self._rows_differ(rows, self.sums[0], plan):
                return problem
            scaled = self._gradients(tensors, each, factors=self.factors)
            if not self._close(scaled, {n: _by_sample(self.factors, r) for n, r in rows.items()}):
                return f"rows depend on other samples' outputs ({plan.way})"
            alone = [n for n in plan.names if n not in self.sums[0] and n in self.sums[1]]
            of_mixed = self._gradients(tensors, each, mixed=True) if alone else {}
        if not alone:
            return None
        return self._rows_differ(of_mixed, self.sums[1], plan) or self._interact(plan, of_mixed, alone)

    def _each(self, plan: Plan) -> dict[str, Tensor]:
        each = {n: self.values[n].expand(self.size, *self.values[n].shape) for n in sorted(plan.names)}
        return {n: (w.clone() if self.differ else w).requires_grad_() for n, w in each.items()}

    def _interact(self, plan: Plan, rows: dict[str, Tensor], names: list[str]) -> str | None:
        """Whether rows, of what reaches but numbers of the whole batch (a loss), change with the inputs of other samples."""
        for samples in separating_groups(self.size):
            changed, each = torch.isin(torch.arange(self.size), torch.tensor(samples)), self._each(plan)
            with self._run_by_itself({n: self.values[n] for n in plan.idle}):
                call = self._changed(changed)
                given = {id(t) for t in tensors_in(call)}
                standing = Standing((), plan.whole, {}, plan.follows)
                output = _run(self.module, self.forward, plan, call, each, self.size, standing)
                found = self._gradients(self._outputs(output, call, given), each, mixed=True)
            if not self._close(*({n: r[n][~changed] for n in names if n in found} for r in (found, rows))):
                return "samples interact in its only output"
        return None

    def _changed(self, samples: Tensor) -> Call:
        """The call with other numbers in the place of these samples'."""
        layouts = iter(self.inputs)

        def change(t: Tensor) -> Tensor:
            layout = next(layouts)
            if not t.is_floating_point() or layout in (SHARED, TABLE, MIXED):
                return t.clone()
            return torch.where(_factors(samples.to(t.device), t, layout), t * (0.5 + noise(t)) + 0.1 * noise(t), t)

        changed: Call = map_tensors(change, self.call)
        return changed

    def _outputs_differ(self, tensors: list[Tensor]) -> str | None:
        if len(tensors) != len(self.plain):
            return "it returns another number of tensors"
        for t, plain, layout in zip(tensors, self.plain, self.layouts, strict=True):
            if layout in (SHARED, TABLE) and t.shape != plain.shape:
                plain = plain.expand(self.size, *plain.shape[layout == SHARED :])
            if t.shape != plain.shape:
                return f"a tensor of shape {tuple(t.shape)} instead of {tuple(plain.shape)}"
            if layout == PICKED:
                _picked(t)
            if t.is_floating_point() and t.numel():
                same = (t == plain) | (t.isnan() & plain.isnan())  # infinities, as in masks
                error = torch.where(same, 0, (t - plain).abs()).max()
                if not error <= max(1e-3, 16 * self.rounding) * plain.abs().nan_to_num(0, 0, 0).max():
                    return "its outputs are others"
        return None

    def _rows_differ(self, rows: dict[str, Tensor], sums: dict[str, Tensor], plan: Plan) -> str | None:
        plain = {n: g for n, g in sums.items() if n in plan.names}
        added = {n: rows[n].sum(0) if n in rows else torch.zeros_like(g) for n, g in plain.items()}
        return None if self._close(added, plain) else f"the rows do not add up to the gradient ({plan.way})"

    def _close(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
        with torch_api.without_torch_function():
            # some gradients are nothing but rounding (a bias before a softmax): judge by the largest
            largest = max((g.nan_to_num(0, 0, 0).abs().max().item() for g in expected.values() if g.numel()), default=0.0)
            close = max(1e-3, 16 * self.rounding), max(1e-4, 4 * self.rounding) * largest
            return all(n in found and torch.allclose(found[n], g, *close, equal_nan=True) for n, g in expected.items())


def _rounding(call: Call, params: Iterable[Tensor]) -> float:
    """The relative error of one number in the coarsest precision that a call computes in."""
    tensors = [t for t in (*tensors_in(call), *params) if isinstance(t, Tensor) and t.is_floating_point()]
    cast = {t.device.type for t in tensors if torch.is_autocast_enabled(t.device.type)}
    return max((torch.finfo(d).eps for d in (*(t.dtype for t in tensors), *map(torch.get_autocast_dtype, cast))), default=0.0)


def _copy(call: Call) -> Call:
    copied: Call = map_tensors(lambda t: t.clone(), call)
    return copied


def _factors(each: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """`each` (B,), one for each sample, so that it broadcasts over a tensor of this layout."""
    owners, dim = _picked(like) if layout == PICKED else samples_of_rows(layout, like, len(each)), layout[1]
    return each[owners].reshape(*[1] * dim, -1, *[1] * (like.ndim - dim - 1))


def _by_sample(factors: Tensor, rows: Tensor) -> Tensor:
    return rows * factors.to(rows).view(-1, *[1] * (rows.ndim - 1))


# ---------------------------------------------------------------------------------------------------------------- the ways
def _run(
    module: nn.Module,
    forward: Forward,
    plan: Plan,
    call: Call,
    weights: dict[str, Tensor],
    size: int,
    standing: Standing | None = None,
) -> Any:
    """The call with per-sample `weights` (B, *S); `standing` is told what is seen of it."""
    if plan.way == "direct":
        return _directly(module, forward, plan, call, weights, size, standing)
    if any(isinstance(t, PerSample) for t in tensors_in(call)):
        raise NoRuleError("it is given a parameter of each sample's own")
    redirect = Redirect(size if plan.fresh else None)
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
            unchanged(module, hooks=False),
            in_place_of(places_of(module, own, tied=True)),
            redirect,
        ):
            output = forward(module, *args, **kwargs)
        written = written_to(taken, {id(t) for t in tensors})
        skeleton[:] = [output, taken, dict(zip(map(id, tensors), itertools.count())), {id(t): i for i, t in enumerate(written)}]
        return (*(t for t in tensors_in([output]) if isinstance(t, Tensor)), *written)

    both = (*plan.layouts.outputs, *plan.layouts.written)
    if plan.way == "vmap":
        with torch_api.quiet_vmap(), torch_api.reentrant_checkpoints_straight():  # which transforms do not go into
            outputs = torch.func.vmap(one, in_dims=(0, *where), randomness="different")(weights, *flat)
    else:
        own = [dict(zip(weights, each, strict=True)) for each in zip(*(w.unbind() for w in weights.values()), strict=True)]
        each = [one(own[i], *(t if d is None else t[i] for t, d in zip(flat, where, strict=True))) for i in range(size)]
        outputs = tuple(zip(*each, strict=True))  # type: ignore[arg-type]
    if standing is not None:
        standing.slow |= {name for name, w in weights.items() if plan.way == "loop" or w.data_ptr() not in redirect.weights}
    mean = module._ps_state().settings.loss_reduction == "mean"  # type: ignore[operator, union-attr]
    together = [_together(parts, layout, mean) for parts, layout in zip(outputs, both, strict=True)]
    output, taken, given, written = skeleton
    originals, count = list(tensors_in(call)), len(plan.layouts.outputs)

    def real(t: Tensor) -> Tensor:
        return originals[given[id(t)]] if id(t) in given else together[count + written[id(t)]]  # type: ignore[return-value]

    assign(call, taken, real)
    whole = iter(together)
    return map_tensors(lambda _: next(whole), output)


def _directly(
    module: nn.Module, forward: Forward, plan: Plan, call: Call, weights: dict[str, Tensor], size: int, standing: Standing | None
) -> Any:
    """The forward as it is, with tensors that stand for the parameters of each sample."""
    layouts = list(zip(tensors_in(call), plan.layouts.inputs, strict=True))
    standing = Standing((), plan.whole, {}, plan.follows, plan.choices) if standing is None else standing
    standing.weights = weights
    standing.inputs = [t for t, layout in layouts if isinstance(t, Tensor) and layout in (BATCH_MAJOR, ("dim", 0))]
    with following(size, layouts) if plan.follows else nullcontext():
        with _below(module, size) if plan.whole else nullcontext(), standing_in(module, standing):
            output = forward(module, *call[0], **call[1])
            if not any(isinstance(t, PerSample) for t, _ in layouts):  # then what it returns may stand for each sample's, too
                output = _of_the_batch(output, plan.layouts.outputs)
            if plan.follows:
                _check_owners(tensors_in([output]), plan.layouts.outputs)
        return output


@contextmanager
def _below(module: Any, size: int) -> Iterator[None]:
    """Around a forward in which layers, too, are given the samples' own weights: they run as such, in a batch."""
    before = local.batch
    local.batch = before or Batch(size, module._ps_state().settings)
    try:
        with by_original_layers(False):
            yield
    finally:
        local.batch = before


def _check_owners(tensors: Iterable[Any], layouts: Sequence[Layout]) -> None:
    """NoRuleError where rows that were moved are no longer where they were when this was proved."""
    for t, layout in zip(tensors, layouts, strict=True):
        if layout in (BATCH_MAJOR, ("dim", 0)) and (owners := local.picks.owners(t)) is not None and owners.picked:
            raise NoRuleError("rows that were picked are no longer in the order of the batch")


def _of_the_batch(output: Any, layouts: tuple[Layout, ...]) -> Any:
    """An output in which no parameter stands for each sample's own: what all samples share in the plain one has a batch dim."""
    tensors = list(tensors_in([output]))
    if not any(isinstance(t, PerSample) for t in tensors):
        return output
    rest = iter(layouts)

    def real(t: Tensor) -> Tensor:
        if (layout := next(rest, None)) is None:
            raise NoRuleError("it returns more than it did")
        if not isinstance(t, PerSample):
            return t
        if layout == SHARED:
            return t.each.squeeze(1)
        return t.each if layout == TABLE else t.each.mean(0)  # a share of it is each sample's

    return map_tensors(real, output)


def _apart(t: Tensor, layout: Layout, size: int) -> Tensor:
    kind, dim = layout
    if kind == "dim":
        return t.unsqueeze(dim + 1).movedim(dim, 0)
    if layout == TIME_MAJOR:
        return t.unflatten(0, (-1, size)).transpose(0, 1)
    return t.unflatten(0, (size, -1))


def _together(t: Tensor | tuple[Tensor, ...], layout: Layout, mean: bool) -> Tensor:
    """The samples' outputs (B, ...), or one of each, in the layout that the plain output has."""
    kind, dim = layout
    if not isinstance(t, Tensor) and any(one.shape != t[0].shape for one in t):
        raise ValueError(f"samples return tensors of shapes {sorted({tuple(one.shape) for one in t})}, which are no batch.")
    t = t if isinstance(t, Tensor) else torch.stack(t)
    if kind == "dim":
        return t.movedim(0, dim).flatten(dim, dim + 1)
    if layout == TABLE:
        return t
    if layout == MIXED:  # a loss, reduced as the model was told
        return t.mean(0) if mean else t.sum(0)
    return (t.transpose(0, 1) if layout == TIME_MAJOR else t).flatten(0, 1)


def places(state: Any, call: int, slot: str, values: Any) -> tuple[Layout, ...]:
    """The layout of every tensor that a call takes ("in"), returns ("out") or writes ("written"), as tracked."""
    return tuple(_places(state, call, slot, values))


def _places(state: Any, call: int, slot: str, values: Any) -> Iterator[Layout]:
    for place, t in enumerate(tensors_in(values)):
        found = state.layouts.get((call, (slot, place), t.ndim)) if isinstance(t, Tensor) else MIXED
        yield MIXED if found is None else found
