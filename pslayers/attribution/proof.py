"""Proof that samples do not interact: `rows_agree` goes through the graph of a first call, and looks whether
each sample's outputs depend on that sample's rows alone, in what every layer returned.

`disagreement` compares outputs with those of the plain model. `modules/first_call.py` calls both,
`general/calls.py` the second.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import torch_api
from ..core import contents
from ..core.context import Batch, note_progress, picked_samples, transforming
from ..core.expansion import Op
from ..core.factors import at_once
from ..core.trees import tensors_in, tensors_of
from ..core.tuning import tuning
from .graph import edges_of, function_of
from .snapshot import has_memory
from .tracking import (
    BATCH_MAJOR,
    MIXED,
    PICKED,
    SHARED,
    TABLE,
    Layout,
    batch_dim,
    noise,
    samples_of_rows,
)

Outputs = Sequence[tuple[Tensor, int, Tensor]]  # tensors, the dim of their rows, and whose these are
Back = Callable[[Sequence[Tensor]], None]  # a pass with these gradients of the outputs


class Unprovable(Exception):  # noqa: N818
    """The graph of a call cannot be walked: it holds a reentrant checkpoint, which torch.autograd.grad does
    not go through.
    """


def separating_groups(size: int) -> list[list[int]]:
    """Groups of samples such that, of any two samples, one group holds the first without the second: by each
    binary digit.
    """
    bits = range(max(size - 1, 1).bit_length())
    groups = [[i for i in range(size) if (i >> bit) & 1 == value] for bit in bits for value in (0, 1)]
    return [group for group in groups if group]


def disagreement(ours: Any, plain: Any) -> str | None:
    """How an output differs from the plain one; None where it does not."""
    # models may compute in less than they return
    tolerances = {torch.float64: 1e-4} | ({} if torch_api.any_autocast() else {torch.float32: 1e-3})
    with torch_api.without_torch_function():
        pairs = [tensors_of(ours), tensors_of(plain)]
        shapes = [[tuple(t.shape) for t in tensors] for tensors in pairs]
        if shapes[0] != shapes[1]:
            return f"tensors of shape {shapes[0]} instead of {shapes[1]}"
        for a, b in zip(*pairs, strict=True):
            if a.is_complex() and b.is_complex():
                a, b = torch.view_as_real(a.detach()), torch.view_as_real(b.detach())
            if b.is_floating_point() and b.numel():
                tolerance = tolerances.get(b.dtype, 3e-2)
                finite = b.isfinite()
                if not torch.equal(a.isfinite(), finite):
                    return "other values than the original layers"
                a, b = (torch.where(finite, t.detach().double(), 0) for t in (a, b))
                if (a - b).abs().max() > tolerance * (b.abs().max() + 1e-4):
                    return "other values than the original layers"
        return None


def batched_outputs(
    output: Any, batch: Batch, layouts: Sequence[Layout | None] | None = None
) -> list[tuple[Tensor, int, Tensor]]:
    """The tensors of a model's output that hold the samples, the dim of their rows, and whose these are: as
    tracked, or by shape.

    One in which samples interact in the original model (the similarities of all pairs) says nothing about
    whose rows are whose.
    """
    found: list[tuple[Tensor, int, Tensor]] = []
    tensors = tensors_in(output)
    for place, t in enumerate(tensors):
        if not isinstance(t, Tensor) or not t.requires_grad or t.numel() < 2 or t.is_complex():
            continue
        ids = picked_samples(t)
        # one row of each sample in another's place is that one's to whoever takes the loss, unless the order
        # is returned beside it
        if ids is not None and (
            not len(t) == len(ids.unique()) == batch.size or any(_tells(other, ids) for other in tensors)
        ):
            found.append((t, 0, ids))
            continue
        layout, dim = None if layouts is None else layouts[place], batch_dim(t, batch.settings)
        layout = ("dim", 0) if layout == PICKED else layout
        if layout is None and t.shape[dim] == batch.size:
            layout = "dim", dim
        elif layout is None and t.shape[0] % batch.size == 0 and batch.settings.batch_first:
            layout = BATCH_MAJOR
        if layout not in (None, SHARED, TABLE, MIXED):
            found.append((t, layout[1], samples_of_rows(layout, t, batch.size)))
    return found


def _tells(t: Any, ids: Tensor) -> bool:
    """Whether a tensor is this order of the samples, or that of the way back."""
    if not isinstance(t, Tensor) or t.shape != ids.shape or t.is_floating_point() or t.is_complex():
        return False
    return any(torch.equal(t.to(order), order) for order in (ids, ids.argsort()))


def quiet_pass() -> AbstractContextManager[None]:
    """Around passes that only prove something: hooks that the user put on modules and tensors are not
    called.
    """
    return torch_api.changed(torch_api.thread(), quiet=True)


@contextmanager
def without_zeros(model: nn.Module, applies: bool = True) -> Iterator[None]:
    """Inside the block trained weights that hold nothing but zeros hold some noise, of which no version
    counter tells (unless not `applies`): through a layer that is initialised so (an adapter, a gate, the last
    one of a branch) no gradient flows, and of what is before it nothing would be proved.
    """
    zeros = []
    for name, p in contents.named_parameters(model) if applies else ():
        data = p.data
        # others may read shared memory meanwhile
        own = type(p) is nn.Parameter and has_memory(data) and data.numel() and not data.is_shared()
        wide = data.is_floating_point() and data.element_size() > 1  # a float8 takes part in no sums
        if own and wide and p.requires_grad and not name.endswith("bias"):
            # most are told by their first number
            known = data.is_meta or 0 in data.stride() or data[(0,) * data.ndim] or data.any()
            zeros += [] if known else [data]
    try:
        for data in zeros:
            data.copy_(noise(data) - 0.5)
        yield
    finally:
        for data in zeros:
            data.zero_()


class _QuietTensorHooks(TorchFunctionMode):
    """Hooks that a forward puts on its tensors are silent in passes that only prove."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False  # some
        self.retained: list[Tensor] = []  # which keep what comes to them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.met = self.met or func in (Tensor.register_hook, Tensor.retain_grad)
        self.retained += args[:1] if func is Tensor.retain_grad else ()
        if func is Tensor.register_hook:
            args = (args[0], _unless_quiet(args[1])) if len(args) > 1 else args
            kwargs = {name: _unless_quiet(hook) for name, hook in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet_hooks(model: nn.Module, in_forward: bool = True) -> Iterator[_QuietTensorHooks | None]:
    """Have the backward hooks that modules and forwards put into the graph of this call be silent in passes
    that only prove; those of forwards where they may put some (`in_forward`), and whether they do is noted.
    """
    held = [
        m.__dict__[name]
        for m in contents.modules(model)
        for name in ("_backward_hooks", "_backward_pre_hooks")
        if m.__dict__[name]
    ]
    before = [(hooks, dict(hooks)) for hooks in held]
    for hooks, each in before:
        hooks.update({key: _unless_quiet(hook) for key, hook in each.items()})
    try:
        with _QuietTensorHooks() if in_forward else nullcontext() as mode:
            yield mode
    finally:
        for hooks, each in before:
            hooks.update({key: each[key] for key in hooks if key in each})


def _unless_quiet(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(*args: Any) -> Any:
        return None if torch_api.thread().quiet else hook(*args)

    return called


class GradientProbe:
    """What the layers of a call return, watched for the gradients that flow by; its values are not kept."""

    silent = False  # some copies have got none

    def __init__(self, size: int, patient: bool = True) -> None:
        self.size, self.patient = size, patient
        self.edges: list[GradientEdge] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.look: Callable[[int, Tensor, Tensor], None] | None = None  # at an edge's gradient by rows
        self.met: set[int] = set()  # which of the edges gradients flowed by
        # of edges whose rows are copies of what all samples share: to which of these a gradient has come
        self.reached: dict[int, Tensor] = {}
        self.nodes = 0  # that it has put into the graph
        self.dims: list[int] = []  # of the rows, where what the edges are of is gone

    @classmethod
    def of_graph(cls, size: int, output: Any, began: int) -> "GradientProbe":
        """Of a call that is over, which began with so many nodes made: what our ops have returned, in which
        the rows are k a sample, in order.

        Raises:
            Unprovable: those of an op may be otherwise.
        """
        probe, numbers = cls(size), dict[Any, list[tuple[int, int]]]()
        for node, number in edges_of(output):
            op: Any = function_of(node)
            if issubclass(op, Op) and op.rows_dim is not None and torch_api.made_since(node, began):
                if not op.in_order(node):
                    raise Unprovable
                numbers.setdefault(node, []).append((len(probe.edges), number))
                probe.edges.append(GradientEdge(node, number))
                probe.dims.append(op.rows_dim)
        for node, own in numbers.items():

            def look(grads: Sequence[Tensor | None], own: list[tuple[int, int]] = own) -> None:
                for edge, number in own:
                    probe.arrived(edge, grads[number])

            probe.hooks.append(node.register_prehook(look))
        return probe

    def arrived(self, edge: int, grad: Tensor | None) -> None:
        """Look at what has come to an edge of a call that is over."""
        dim = self.dims[edge]
        if grad is not None and grad.shape[dim] % self.size:
            raise Unprovable
        self._look(edge, grad, dim, None)

    def add(self, owned: Sequence[tuple[Tensor, int, Tensor | None]], copies: bool = False) -> None:
        """Tensors, the dim of their rows, and whose these are; None: k a sample, in order. In `copies` of
        what all samples share values do not tell if a forward takes one sample's for all.
        """
        note_progress()
        before = torch_api.nodes_made()
        with torch_api.without_torch_function():  # no hook of the user's
            for t, dim, owners in owned:
                if t.requires_grad and t.numel():
                    self.edges.append(torch.autograd.graph.get_gradient_edge(t))
                    if copies:
                        self.reached[len(self.edges) - 1] = torch.zeros(
                            self.size, dtype=torch.bool, device="cpu"
                        )
                    look = functools.partial(self._look, len(self.edges) - 1, dim=dim, owners=owners)
                    self.hooks.append(t.register_hook(look))
        self.nodes += torch_api.nodes_made() - before

    def _look(self, edge: int, grad: Tensor | None, dim: int, owners: Tensor | None) -> None:
        if grad is None or self.look is None:  # of one of several outputs; or the user's own pass
            return
        note_progress()
        self.met.add(edge)
        with torch_api.without_torch_function():
            grad = grad.detach().movedim(dim, 0)
            if owners is None:
                owners = torch.arange(self.size, device=grad.device)
                owners = owners.repeat_interleave(grad.shape[0] // self.size)
            if edge in self.reached:
                self.reached[edge][owners[grad.reshape(len(grad), -1).any(1)].cpu()] = True
            self.look(edge, grad, owners)

    @contextmanager
    def looking(self, look: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
        """Inside the block `look` is called with each edge, and the gradient and its rows' owners."""
        with torch_api.changed(self, look=look), quiet_pass():
            yield

    def missed(self, output: Any) -> bool:
        """Whether something that an output depends on was met by no pass: it goes but into numbers of the
        whole batch (a loss).
        """
        missed = {(edge.node, edge.output_nr) for i, edge in enumerate(self.edges) if i not in self.met}
        return bool(missed & edges_of(output)) if missed else False

    def untold(self) -> bool:
        """Whether of some copies gradients have come to one sample's alone, or to none (those of outputs that
        are multiplied by zero are zeros): it may be taken for all. None for ever is what a branch that is
        off has.
        """
        counts = [int(some.sum()) for edge, some in self.reached.items() if edge in self.met]
        self.silent = 0 in counts
        return self.size > 1 and (1 in counts or (self.silent and self.patient))

    def close(self) -> None:
        """Look no more: hooks that hold what they look at would keep the graph."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def last_edges(edges: Sequence[GradientEdge]) -> list[GradientEdge]:
    """Those from which the graph leads to no other of them: a pass that is asked for these meets all that it
    can reach.
    """
    nodes, last = {edge.node for edge in edges}, []
    for edge in edges:
        todo, seen = [edge.node], {edge.node}
        while todo:
            before = {node for node, _ in todo.pop().next_functions if node is not None} - seen
            if before & nodes:
                break
            seen |= before
            todo += before
        else:
            last.append(edge)
    return last


def rows_agree(
    layers: GradientProbe, outputs: Outputs, anew: Callable[[], tuple[GradientProbe, Outputs]] | None = None
) -> bool | None:
    """Whether groups of samples' outputs depend, in what every layer returned, on the rows taken for theirs
    alone.

    None where they seem to, but a NaN leaves it open: no gradient at all times NaN is NaN; or what they have
    of copies is `untold`.

    A proof for the first call of a kind, after the fact: shapes may fit by chance (rows picked by data, a
    table as long as the batch). Costs two or three passes of the graph without weight gradients, where the
    gradients of the samples' outputs can be told apart by factors, else 2 log2(B) of them; and their memory:
    gradients are looked at as they flow by. Where a graph may be walked but once, `anew` runs the call again
    for each pass.
    """
    try:
        if not outputs or not layers.edges:
            return True  # nothing to be told here
        last = [] if anew is not None else last_edges(layers.edges)

        def back(grads: Sequence[Tensor]) -> None:
            if anew is None:
                walk(outputs, grads, last)
                return
            probe, others = anew()
            probe.look, probe.met, probe.reached = layers.look, layers.met, layers.reached
            try:
                walk(others, grads, last_edges(probe.edges))
            finally:
                probe.close()

        def walk(outputs: Outputs, grads: Sequence[Tensor], last: Sequence[GradientEdge]) -> None:
            found = torch_api.gradients([t for t, *_ in outputs], last, grads)
            if layers.dims:  # hooks of nodes that a pass ends at are not called
                for edge, grad in zip(last, found, strict=True):
                    layers.arrived(layers.edges.index(edge), grad)

        with tuning.holding():
            agree = not transforming() and _proportional(layers, outputs, back)
        apart = agree or _apart(layers, outputs, back)
        return None if apart and layers.untold() else apart
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise Unprovable from error
        raise
    finally:
        layers.close()


def _apart(layers: GradientProbe, outputs: Outputs, back: Back) -> bool | None:
    """By groups of samples: whether the outputs of some have no gradient in others' rows."""
    agree: bool | None = True
    for samples in separating_groups(layers.size):
        chosen = torch.tensor(samples, device=outputs[0][0].device)

        def look(_: int, grad: Tensor, owners: Tensor, chosen: Tensor = chosen) -> None:
            nonlocal agree
            others = ~torch.isin(owners, chosen.to(owners.device))
            touched = grad[others & grad.reshape(len(grad), -1).any(1)]  # mostly none
            if touched.numel() and bool(((touched != 0) & ~touched.isnan()).any()):
                agree = False
            elif touched.numel() and agree:
                agree = None

        with layers.looking(look):
            back(
                [
                    _of_sums(t, dim, torch.isin(owners, chosen.to(t.device)).to(t))
                    for t, dim, owners in outputs
                ]
            )
        if agree is False:
            break
    return agree


HIGHEST = 31  # factors: 1, 2, .. 2^31, and the same below zero
HIGHEST_OF_HALF = 7  # a float16 has room for no more
NOTHING_OF_HALF = 2.0**-12  # below which a number of it, times a factor, may have lost bits
TOGETHER = 64  # numbers of a row that make one mark


def letters_for(size: int, half: bool) -> tuple[Tensor, int]:
    """Factors, and with how many of them, each in a pass of its own, so many samples are told apart.

    Powers of two as far apart as there is room for: the wider, the more of another sample's part is seen in a
    row; of two signs where there are more of them than powers.
    """
    highest, passes = HIGHEST_OF_HALF if half else HIGHEST, 0
    while (2 * highest + 2) ** passes < size:
        passes += 1
    count = next(n for n in range(1, 2 * highest + 3) if n**passes >= size)
    letters = torch.arange(count, device="cpu")
    if count > highest + 1:
        return 2.0 ** (letters // 2) * (1 - letters % 2 * 2), passes
    return 2.0 ** (letters * (highest // max(count - 1, 1))), passes


def factors_of(samples: Tensor, letters: Tensor, place: int) -> Tensor:
    """The samples' factors in a pass: by that digit of their numbers."""
    return letters.to(samples.device)[samples // len(letters) ** place % len(letters)]


def _proportional(layers: GradientProbe, outputs: Outputs, back: Back) -> bool:
    """By factors: whether a sample's rows get that sample's factor times their gradient, to the last bit,
    when each sample's outputs get one of their own. False says nothing (direct derivation).

    A backward pass is linear, and powers of two are exact: what comes from one sample's outputs alone is the
    same number times the factor, however often it is rounded on its way. A part from another sample's
    outputs, with another factor, leaves other bits, unless it is lost in the rounding of the sample's own.
    """
    if any(bool((owners < 0).any()) for *_, owners in outputs):
        return False
    marks: dict[int, Tensor] = {}  # of each edge
    half = any(t.dtype == torch.float16 for t, *_ in outputs)
    agree, (letters, passes) = True, letters_for(layers.size, half)
    numbers = torch.arange(layers.size, device="cpu")
    # the first pass is without factors
    none = torch.ones(layers.size, device="cpu")
    for factors in (none, *(factors_of(numbers, letters, n) for n in range(passes))):

        def look(edge: int, grad: Tensor, owners: Tensor, factors: Tensor = factors) -> None:
            nonlocal agree
            if not agree or bool((owners < 0).any()):
                agree = False
                return
            found = _marked(grad, factors[owners.cpu()].reciprocal().to(grad.device))
            agree = bool(found.sum().isfinite()) and torch.equal(marks.setdefault(edge, found), found)

        with layers.looking(look):
            back([_of_sums(t, dim, factors[owners.cpu()].to(t)) for t, dim, owners in outputs])
        if not agree:
            return False
    return True


def _marked(grad: Tensor, inverse: Tensor) -> Tensor:
    """(N, some) sums over parts of each row of the gradient (N, ...) without its factors, times some numbers:
    to the last bit the same if all of a row's numbers are, and in all likelihood only then.

    Sums, too, are the same times a power of two, however often they are rounded.
    """
    flat, inverse = grad.reshape(len(grad), -1), inverse.unsqueeze(1)
    flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
    wide, half = torch.promote_types(flat.dtype, torch.float32), flat.dtype == torch.float16
    draw = torch.Generator().manual_seed(0)
    weights = torch.rand(TOGETHER, generator=draw, dtype=wide, device="cpu").to(flat.device)
    weights += 0.5
    found = []
    # of all at once, a copy would take as much memory as anything in the step
    for some in flat.split(at_once(TOGETHER * len(flat), weights) * TOGETHER, 1):
        if half:
            some = F.hardshrink(some.to(wide) * inverse, NOTHING_OF_HALF)
        if more := -some.shape[1] % TOGETHER:
            some = F.pad(some, (0, more))
        # not by torch.mv, in which the order of a sum may depend on where in memory its numbers lie
        found.append((some.to(wide).reshape(-1, TOGETHER) * weights).sum(1).view(len(flat), -1))
    sums = torch.cat(found, 1)
    # a number that has lost bits, below the smallest normal one, is none
    return F.hardshrink(sums if half else sums * inverse.to(wide), 1e-30)


def _of_sums(t: Tensor, dim: int, factors: Tensor) -> Tensor:
    """The gradient with respect to t of the sum of all rows' values and their squares, times factors.

    It is zero for a factor of zero, whatever the values are.
    """
    grad = t.detach().mul(2).add_(1)
    rows = grad.movedim(dim, 0)
    rows.mul_(factors.view(-1, *[1] * (t.ndim - 1)))[factors == 0] = 0
    return grad
