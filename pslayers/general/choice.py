"""Chooses how a module without a replacement is run: the fastest way whose outputs and per-sample gradients
are proved right on the very inputs of the call.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import torch_api
from ..attribution.graph import given_to_functions, leaves_of
from ..attribution.proof import quiet_hooks, quiet_pass, separating_groups
from ..attribution.snapshot import Randomness, Snapshot, trial
from ..attribution.tracking import (
    BATCH_MAJOR,
    MIXED,
    PICKED,
    SHARED,
    TABLE,
    TIME_MAJOR,
    Coarsest,
    Layout,
    candidates,
    in_turn,
    moved,
    noise,
    samples_of_rows,
)
from ..core import contents
from ..core.contents import callable_module, own_parameters, trainable_parameters
from ..core.context import by_original_layers, in_place_of, places_of
from ..core.converted_module import ConvertedModule
from ..core.trees import cloned, map_tensors, tensors_in, tensors_of, written_to
from ..parameters.per_sample import Standing
from .plan import Call, Layouts, NoWayError, Plan, filled_order
from .ways import run_by

INPUT = "input "  # no parameter's name begins like that


def choose(
    module: ConvertedModule,
    call: Call,
    layouts: Layouts,
    size: int,
    includes_children: bool,
    picks: bool,
    differ: bool = False,
) -> Plan:
    """The fastest way that is proved right for this call; `includes_children` rules out those that leave what
    lies below to itself.

    `picks`: it picks rows by data, which may be in the batch's order by chance. `differ`: also for weights
    that truly differ from sample to sample.
    """
    if given := module._ps_given():  # proved with those of the first sample
        if torch_api.level():
            raise ValueError(
                f"{module._ps_name} has no replacement, and how it is run with weights of each sample's own"
                " cannot be found out inside of a transform of torch.func: call the model once before,"
                " outside of transforms and with gradients enabled, or give an example batch,"
                " convert_model(model, example=x)."
            )
        first = {
            n: p[0].detach().requires_grad_() for n, p in contents.named_parameters(module) if n in given
        }
        with in_place_of(places_of(module, first, tied=True)):
            return choose(module, call, layouts, size, includes_children, picks, differ=True)
    for t, layout in zip(tensors_in(call), layouts.inputs, strict=True):
        numbers = isinstance(t, Tensor) and not t.ndim and (t.is_floating_point() or t.is_complex())
        if numbers and layout == MIXED:  # what each sample's own meets in it is known to its caller
            raise NoWayError("it is given a number that is made of all samples, as by a mean over the batch")
    try:
        proof = _Proof(module, call, layouts, size, includes_children, differ)
    except Exception as error:  # what it needs was made by its own hooks (weight_norm), or by its caller
        raise NoWayError(f"it cannot be called by itself again ({type(error).__name__}: {error})") from error
    try:
        return _fastest(proof, layouts, picks)
    except NoWayError as error:
        problem = error
    for more in _other_layouts(call, proof.plain, layouts, size):
        try:
            return choose(module, call, more, size, includes_children, picks, differ)
        except NoWayError as error:
            problem = error
    raise problem


def _fastest(proof: "_Proof", layouts: Layouts, picks: bool) -> Plan:
    """The fastest way that is proved right for these layouts."""
    if proved := _directly(proof, layouts, picks, frozenset()):
        return proved
    problem: NoWayError | None = None
    if proof.has_a_loss():  # what reaches but that may have rows by another way
        try:
            return _one_by_one(proof, layouts)
        except NoWayError as error:
            problem = error
    for names in proof.idle():
        if proved := _directly(proof, layouts, picks, names):
            return proved
    if problem is not None:
        raise problem
    return _one_by_one(proof, layouts)


def _directly(proof: "_Proof", layouts: Layouts, picks: bool, idle: frozenset[str]) -> Plan | None:
    """A direct run without these parameters, if it is right."""
    whole = proof.includes_children
    others = frozenset[str]() if whole else proof.of_layers()
    names = proof.names - idle - others
    for follows in (True,) if whole or picks else (False, True):
        plan = Plan("direct", layouts, names, whole, follows, idle=idle, others=others)
        if proved := proof.of(plan):
            return proved
    return None


def _one_by_one(proof: "_Proof", layouts: Layouts) -> Plan:
    """By vmap, or a loop; NoWayError if neither is right."""
    module = proof.module
    if {MIXED, PICKED} & {*layouts.inputs, *layouts.written} or PICKED in layouts.outputs:
        listed = any(isinstance(v, list) for v in (*proof.call[0], *proof.call[1].values()))
        hint = ", or, of a list with a tensor for each, say `with ps.sample_ids(torch.arange(n), n):`"
        raise NoWayError(
            f"its inputs or outputs cannot be attributed to samples{hint * listed}; {proof.problem}"
        )
    if MIXED in layouts.outputs and {SHARED, TABLE} >= {*layouts.inputs}:
        # each run would be of the whole batch, and their mean the same, whoever's the rows were
        raise NoWayError("nothing that it is given holds a row for each sample: give it tensors that do")
    if not proof.includes_children:
        proof = _Proof(module, proof.call, layouts, proof.size, True, proof.differ)
    ndims = tuple(t.ndim for t in proof.plain)
    plan = Plan("vmap", layouts, proof.names, True, counts=proof.counts, ndims=ndims, draws=proof.draws)
    for way, fresh in (("vmap", False), ("vmap", True), ("loop", False)):
        if proved := proof.of(replace(plan, way=way, fresh=fresh)):
            if way == "loop":
                warnings.warn(f"{module._ps_name} is run sample by sample.", stacklevel=2)
            return proved
    hint = (
        "; it gives parameters to a torch.autograd.Function that is not torch's (as odeint_adjoint does, and"
        " reversible layers): take what autograd differentiates itself, as odeint"
    )
    raise NoWayError(f"{proof.problem}{hint * proof.to_functions}")


def _other_layouts(call: Call, returned: Sequence[Tensor], layouts: Layouts, size: int) -> Iterator[Layouts]:
    """Those with the batch in what seemed to be shared, and has room for it: in masks, which are not changed
    to see where they lead, as in another input or in another way; and in outputs whose values stay the same,
    as the log-probability of what was drawn, whatever their gradients are, or that were put together row by
    row.
    """
    pairs = list(zip(tensors_in(call), layouts.inputs, strict=True))

    def with_room(t: Any, known: Layout, layout: Layout, unsure: tuple[Layout, ...] = (TABLE,)) -> Layout:
        return layout if known in unsure and layout in candidates(t, size) else known

    for layout in dict.fromkeys((*layouts.inputs, ("dim", 0), ("dim", 1), BATCH_MAJOR, TIME_MAJOR)):
        is_mask = (isinstance(t, Tensor) and t.dtype == torch.bool for t, _ in pairs)
        inputs = [with_room(*p, layout) if mask else p[1] for p, mask in zip(pairs, is_mask, strict=True)]
        if (found := layouts._replace(inputs=tuple(inputs))) != layouts:
            yield found
    pairs = list(zip(returned, layouts.outputs, strict=False))
    found = layouts._replace(outputs=tuple(with_room(*p, ("dim", 0), (TABLE, PICKED)) for p in pairs))
    if found != layouts:
        yield found


class _Proof:
    """Runs a way with per-sample parameters, and compares outputs and gradients with those of the plain
    module.

    Parameters have some noise meanwhile: nothing depends on what a zero-initialised layer gives.
    """

    def __init__(
        self,
        module: ConvertedModule,
        call: Call,
        layouts: Layouts,
        size: int,
        includes_children: bool,
        differ: bool,
    ) -> None:
        self.module, self.call, self.size = module, call, size
        self.includes_children, self.differ = includes_children, differ
        self.layouts, self.problem = (*layouts.outputs, *layouts.written), ""
        self.inputs = layouts.inputs
        found = trainable_parameters(module, own=False)
        self.values = {
            n: p.detach() + 0.1 * (p.detach().abs().mean() + 0.1) * (noise(p) - 0.4) for n, p in found.items()
        }
        own = found if includes_children else trainable_parameters(module, own=True)
        self.values |= {n: p.detach() for n, p in own.items() if n not in self.values}
        self.names = frozenset(own)
        # one for each sample
        self.factors = 0.5 + noise(torch.empty(size, dtype=torch.float64, device="cpu"))
        coarsest = Coarsest(call, self.values.values())
        plain = {n: self.values[n].clone().requires_grad_() for n in sorted(self.names)}
        with self._run_by_itself(plain):
            before = Snapshot(module)
            args, kwargs = cloned(call)
            given = {id(t) for t in tensors_in((args, kwargs))}
            random = Randomness(["torch"])
            with coarsest:
                output = module._ps_forward()(module, *args, **kwargs)
            leaves = leaves_of(output)
            if past := [name for name, p in found.items() if id(p) in leaves]:
                raise ValueError(
                    f"its forward comes to {past} otherwise than by attributes of modules and the lists,"
                    " tuples and dicts among these, where what is each sample's own stands for them"
                )
            self.to_functions = bool(given_to_functions(output))
            self.draws = bool(random.drawn())
            self.plain = self._outputs(output, (args, kwargs), given)
            self.orders = tuple(map(filled_order, tensors_of(output)))
            self.counts = before.differs()
            self.sums = [self._gradients(self.plain, plain, mixed) for mixed in (False, True)]
        if self.sums[1] and any(isinstance(t, PackedSequence) for t in tensors_in(output)):
            raise ValueError(f"{sorted(self.sums[1])} reach a PackedSequence that it returns")
        self.plain = [t.detach() for t in self.plain]
        self.relative, self.absolute = 1e-7, 1e-8  # of numbers, and of the largest one
        if (eps := coarsest.eps) > 1e-12:  # not all in double precision
            self.relative, self.absolute = max(1e-3, 16 * eps), max(1e-4, 4 * eps)

    @contextmanager
    def _run_by_itself(self, own: dict[str, Tensor]) -> Iterator[None]:
        """Around a run of the module: nothing is left behind, and nothing recorded."""
        others = {n: v for n, v in self.values.items() if n not in self.names}
        proved = {n: own.get(n, self.values[n]) for n in self.names}
        with (
            torch.enable_grad(),
            trial(self.module),
            by_original_layers(),
            torch_api.reentrant_checkpoints("straight"),
            quiet_hooks(self.module),
            in_place_of(places_of(self.module, others, tied=True)),
            in_place_of(places_of(self.module, proved, tied=self.includes_children)),
        ):
            yield

    def _run(self, plan: Plan, call: Call, each: dict[str, Tensor], standing: Standing) -> list[Tensor]:
        """The outputs of a run by the plan, with these parameters of each sample's own."""
        given = {id(t) for t in tensors_in(call)}
        output = run_by(self.module, plan, call, each, self.size, standing)
        return self._outputs(output, call, given)

    def _outputs(self, output: Any, call: Call, given: set[int]) -> list[Tensor]:
        tensors = (t if isinstance(t, Tensor) else t.data for t in tensors_in(output))
        return [*tensors, *written_to(call, given)]

    def _parts(self, tensors: Sequence[Tensor], mixed: bool) -> Iterator[tuple[Tensor, Layout]]:
        """The outputs that count, with their layouts, and a row for each sample of what all share."""
        for t, plain, layout in zip(tensors, self.plain, self.layouts, strict=True):
            if (t.is_floating_point() or t.is_complex()) and (layout == MIXED) is mixed:
                alone = t.ndim == plain.ndim if layout == TABLE else layout == SHARED and len(t) != self.size
                each = t.expand(self.size, *t.shape[layout == SHARED :]) if alone else t
                yield each, ("dim", 0) if layout in (SHARED, TABLE) else layout

    def _gradients(
        self,
        tensors: Sequence[Tensor],
        of: dict[str, Tensor],
        mixed: bool = False,
        factors: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Of some numbers times the outputs, and times the factors of samples; of inputs by their numbers."""
        loss: Tensor | float = 0.0
        for t, layout in self._parts(tensors, mixed):
            each = None if factors is None else _factors(factors.to(t.device), t, layout)
            if t.is_complex():
                t, each = torch.view_as_real(t), None if each is None else each.unsqueeze(-1)
            weights = torch.where(t.isfinite(), noise(t) + 0.5, 0)
            weights = weights if each is None else weights * each.to(t.dtype)
            loss = loss + (torch.where(t.isfinite(), t, 0) * weights).sum()
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return {}
        # asked for too where a real run needs them: torch's group_norm crashes on channels_last images that
        # need none
        taken = [t for t in tensors_of(self.call) if t.requires_grad]
        with quiet_pass():
            found = torch.autograd.grad(loss, [*of.values(), *taken], allow_unused=True, retain_graph=True)
        names = [*of, *(f"{INPUT}{i}" for i in range(len(taken)))]
        return {name: g for name, g in zip(names, found, strict=True) if g is not None}

    def _mixes_but_numbers(self) -> bool:
        """Whether the outputs in which samples interact are numbers of the whole batch (losses)."""
        return all(t.numel() == 1 for t, _ in self._parts(self.plain, True))

    def has_a_loss(self) -> bool:
        """Whether some parameters reach but such numbers, beside outputs that are samples'."""
        by_sample, of_mixed = self.sums
        alone = any(n in of_mixed and n not in by_sample for n in self.names)
        return alone and self._mixes_but_numbers() and any(layout != MIXED for layout in self.layouts)

    def idle(self) -> list[frozenset[str]]:
        """The parameters that reach but outputs in which samples interact, if there are any beside others;
        with these, those that reach none at all, as codes that follow a moving average.
        """
        by_sample, of_mixed = self.sums
        rest = frozenset(n for n in self.names if n not in by_sample)
        none = rest - of_mixed.keys()
        idle = rest - none if any(layout != MIXED for layout in self.layouts) else frozenset[str]()
        return [names for names in dict.fromkeys((idle, idle | none)) if names]

    def of_layers(self) -> frozenset[str]:
        """The module's own parameters that are a layer's below, too (tied ones), which alone uses them."""
        below = {
            id(p)
            for m in contents.modules(self.module)
            if m is not self.module and callable_module(m)  # not its own ParameterList
            for _, p in own_parameters(m)
        }
        own = trainable_parameters(self.module, own=True)
        return frozenset(
            n for n, p in own.items() if id(p) in below and n not in self.sums[0] and n not in self.sums[1]
        )

    def of(self, plan: Plan) -> Plan | None:
        """The plan, with what its run has shown, where it is right."""
        standing = plan.standing()
        try:
            self.problem = self._wrong(plan, standing) or ""
        except Exception as error:  # whatever a forward raises under per-sample parameters
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if self.problem:
            return None
        return replace(
            plan,
            choices=tuple(standing.chosen),
            met=frozenset(standing.met),
            fast=plan.names - standing.slow,
            orders=self.orders,
        )

    def _wrong(self, plan: Plan, standing: Standing) -> str | None:
        each = self._each(plan)
        with self._run_by_itself({n: self.values[n] for n in plan.idle}):
            tensors = self._run(plan, cloned(self.call), each, standing)
            if problem := self._outputs_differ(tensors):
                return problem
            rows = self._gradients(tensors, each)
            inputs = [{n: g for n, g in of.items() if n.startswith(INPUT)} for of in (rows, self.sums[0])]
            if not self._close(*inputs):
                return f"its inputs have other gradients ({plan.way})"
            rows = {n: g for n, g in rows.items() if n not in inputs[0]}
            if problem := self._rows_differ(rows, self.sums[0], plan):
                return problem
            scaled = self._gradients(tensors, each, factors=self.factors)
            by_sample = {n: r * _factors(self.factors.to(r), r, ("dim", 0)) for n, r in rows.items()}
            if not self._close(scaled, by_sample):
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
        """Whether rows, of what reaches but numbers of the whole batch (a loss), change with the inputs of
        other samples.
        """
        for samples in separating_groups(self.size):
            changed, each = torch.zeros(self.size, dtype=torch.bool, device="cpu"), self._each(plan)
            changed[samples] = True
            with self._run_by_itself({n: self.values[n] for n in plan.idle}):
                tensors = self._run(plan, self._changed(changed), each, plan.standing())
                found = self._gradients(tensors, each, mixed=True)
            if not self._close(*({n: r[n][~changed] for n in names if n in found} for r in (found, rows))):
                return "samples interact in its only output"
        return None

    def _changed(self, samples: Tensor) -> Call:
        """The call with other numbers in the place of these samples', and the next one's ids and masks, if
        what comes of it has no rows, which might lie in another order then.
        """
        layouts, numbers = iter(self.inputs), self._mixes_but_numbers()

        def change(t: Tensor) -> Tensor:
            layout = next(layouts)
            if layout in (SHARED, TABLE, MIXED):
                return t.clone()
            if t.is_floating_point() or t.is_complex():
                new = moved(t)
            elif layout == PICKED or not numbers:
                return t.clone()
            else:
                new = in_turn(t, layout, self.size)
            return torch.where(_factors(samples.to(t.device), t, layout), new, t)

        return map_tensors(change, self.call)

    def _outputs_differ(self, tensors: list[Tensor]) -> str | None:
        if len(tensors) != len(self.plain):
            return "it returns another number of tensors"
        for t, plain, layout in zip(tensors, self.plain, self.layouts, strict=True):
            if layout in (SHARED, TABLE) and t.shape != plain.shape:
                plain = plain.expand(self.size, *plain.shape[layout == SHARED :])
            if t.shape != plain.shape:
                return f"a tensor of shape {tuple(t.shape)} instead of {tuple(plain.shape)}"
            if layout == PICKED:
                samples_of_rows(layout, t, self.size)
            if (t.is_floating_point() or t.is_complex()) and t.numel():
                same = (t == plain) | (t.isnan() & plain.isnan())  # infinities, as in masks
                error = torch.where(same, 0, (t - plain).abs()).max()
                if not error <= self.relative * plain.abs().nan_to_num(0, 0, 0).max():
                    return "its outputs are others"
        return None

    def _rows_differ(self, rows: dict[str, Tensor], sums: dict[str, Tensor], plan: Plan) -> str | None:
        plain = {n: g for n, g in sums.items() if n in plan.names}
        added = {n: rows[n].sum(0) if n in rows else torch.zeros_like(g) for n, g in plain.items()}
        return None if self._close(added, plain) else f"the rows do not add up to the gradient ({plan.way})"

    def _close(self, found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
        with torch_api.without_torch_function():
            # some gradients are nothing but rounding (a bias before a softmax): judge by the largest
            largest = max(
                (g.nan_to_num(0, 0, 0).abs().max().item() for g in expected.values() if g.numel()),
                default=0.0,
            )
            close = self.relative, self.absolute * largest
            return all(
                n in found and torch.allclose(found[n], g, *close, equal_nan=True)
                for n, g in expected.items()
            )


def _factors(each: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """`each` (B,), one for each sample, so that it broadcasts over a tensor of this layout."""
    owners, dim = samples_of_rows(layout, like, len(each)), layout[1]
    return each[owners].reshape(*[1] * dim, -1, *[1] * (like.ndim - dim - 1))
