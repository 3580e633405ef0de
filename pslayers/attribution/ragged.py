"""Ragged batches: rows that belong to given samples (`ps.sample_ids`), as the nodes of graphs, or tokens that
are packed without padding.

Every layer runs on all rows at once, as the original does: its weight is expanded to the rows. Whose each of
these rows is, in every layer, is read off the backward pass itself. Before a pass goes through the model, one
goes through it beside, without weight gradients, in which the gradients of each sample's outputs are
multiplied by a number of its own, a power of two. A backward pass is linear, and powers of two are exact: a
row that one sample's outputs alone depend on gets its gradient times that number (direct derivation). So
nothing is guessed, in any batch: a row of which two samples' outputs make use has no such number, and that is
an error.

Shapes: B samples, R rows of what an op is given.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from .. import torch_api
from ..core import contents
from ..core.context import changed, local
from ..core.expansion import Expansion
from ..core.factors import Owners
from ..core.trees import map_tensors, tensors_of
from ..parameters.kept import Kept
from .proof import factors_of, last_edges, letters_for, quiet_pass

# by the names of parameters that were verified, the kinds of rows of their uses; none where one had others
Seen = dict[str, frozenset[int]]
# whether parameters, in a function, met nothing of the batch's when a call was proved: at times or always
Alone = dict[tuple[AbstractSet[str], str], set[bool]]


class RaggedBatch:
    """What `sample_ids` was told: the samples of rows, by how many rows there are."""

    def __init__(self, size: int, verify: bool) -> None:
        self.size, self.verify = size, verify
        self.pooled = False  # whether what is returned has a row of each sample, where that fits
        self.returned: list[Tensor] = []  # else the rows of one of these ids
        self.known: list[tuple[Tensor, int]] = []  # ids, and the dim that they are for

    def trusts(self, seen: Seen) -> bool:
        """Whether rows are taken for those that were told of, as they were in every use that was verified."""
        return not self.verify and bool(seen) and all(seen.values())

    @functools.cached_property
    def owned(self) -> list[Owners]:
        """Of all rows that were told of, and of a row for each sample."""
        each = [ids for ids, _ in self.known]
        return [Owners(ids, self.size) for ids in (*each, torch.arange(self.size, device=each[0].device))]

    @property
    def kinds(self) -> list[tuple[int, Owners]]:
        """Those by what they are called in any batch: a row for each sample is -1, whatever else is told
        of.
        """
        return list(zip([*range(len(self.known)), -1], self.owned, strict=True))

    def fitting(self, t: Tensor) -> list[tuple[Tensor, int]]:
        """Whose the rows of a tensor of this shape may be, and their dim."""
        found = [(ids, dim) for ids, dim in self.known if t.ndim > dim and t.shape[dim] == len(ids)]
        if t.ndim and len(t) == self.size:
            found.append((torch.arange(self.size, device="cpu"), 0))
        return found

    def owners(self, t: Tensor) -> tuple[Tensor, int] | None:
        """Whose the rows of an output are, and their dim; None where nothing tells.

        Raises:
            ValueError: its shape fits several that were given.
        """
        found = self.fitting(t)
        found = [one for one in found if any(one[0] is ids for ids in self.returned)] or found
        if self.pooled and found and len(t) == self.size:
            found = found[-1:]
        if not found:
            return None
        first, *others = found if self.size > 1 else found[:1]  # of one sample are all
        for other in others:
            if first[1] != other[1] or not torch.equal(first[0].to(t.device), other[0].to(t.device)):
                raise ValueError(
                    f"the model returns a tensor of shape {tuple(t.shape)}, whose rows may be those of the"
                    f" {self.size} samples, or those of which a ps.sample_ids was told, or another: say"
                    ' which, ps.sample_ids(..., outputs="samples"), or outputs="rows" to the one with these'
                    " rows."
                )
        return first


@contextmanager
def sample_ids(
    ids: Tensor,
    size: int | None = None,
    dim: int = 0,
    *,
    outputs: str | None = None,
    verify: bool = True,
) -> Iterator[None]:
    """Say whose the rows of a batch are, where these are not equally many for each sample: nodes of graphs,
    tokens of sequences that are packed one after the other, points of sets.

    Put around the model's call. `ids` (rows,) holds the sample, 0 to `size` - 1, of each entry in `dim` of
    the tensors that the model takes and returns with so many: ``dim=1`` for tokens (1, rows, ...). Tensors of
    `size` rows, as of a pooled output, hold a row of each sample; so does a list of one tensor for each, with
    ``ids=torch.arange(size)``. Blocks nest: one for the nodes, say, and one for the edges; the inner ones may
    leave `size` away. In any order; a sample may have no rows. Where there are as many rows as samples, or as
    edges, ``outputs="samples"`` or ``"rows"``, of this block, says which the model returns.

    Every batch is verified, which takes another backward pass, without weight gradients. With
    ``verify=False`` that is the first one alone, in each mode of the model, if all its layers were given rows
    that it was told of; then a layer's rows are taken for those of the same block as there.

    Example:
        >>> import torch, pslayers as ps
        >>> from torch import nn
        >>> model = ps.convert_model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        >>> with ps.sample_ids(torch.tensor([0, 0, 0, 1, 1]), size=2):
        ...     out = model(torch.randn(5, 3))          # 5 rows, of 2 samples
        >>> out.sum().backward()
        >>> model[0].weight.grad_sample.shape
        torch.Size([2, 4, 3])

    Raises:
        ValueError: `ids` is no tensor (rows,) of integers from 0 to `size` - 1, or `size` differs from that
            of the block around.
    """
    around: RaggedBatch | None = local.ragged
    size = around.size if size is None and around is not None else size
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:  # numpy's are integers, too
        raise ValueError(
            "`size` must be an integer of at least 0, the number of samples (inside of another block it may"
            f" be left away); got {size!r}."
        )
    if outputs not in (None, "samples", "rows"):
        raise ValueError(f'`outputs` must be "samples" or "rows", or None; got {outputs!r}.')
    if around is not None and around.size != size:
        raise ValueError(
            f"ps.sample_ids(..., size={size}) inside of one of size {around.size}: they are of one batch."
        )
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex())
    if not whole or ids.ndim != 1 or ids.dtype == torch.bool:
        got = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else repr(type(ids).__name__)
        raise ValueError(f"`ids` must be a tensor (rows,) of integers, the sample of each row; got {got}.")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ValueError(
            f"`ids` must be from 0 to {size - 1}, for {size} samples; got {int(ids.min())} to"
            f" {int(ids.max())}. Rows that are no sample's can be those of one more, which is in no loss."
        )
    if dim not in (0, 1):
        raise ValueError(f"`dim` must be 0 or 1; got {dim!r}.")
    ids = ids.detach().long()
    batch = RaggedBatch(int(size), bool(verify) and (around is None or around.verify))
    batch.known = [*(around.known if around is not None else ()), (ids, dim)]
    batch.returned = [*(around.returned if around is not None else ()), *([ids] if outputs == "rows" else [])]
    batch.pooled = outputs == "samples" or (outputs is None and around is not None and around.pooled)
    with changed(ragged=batch):
        yield


class Use:
    """One use of weights by an op: R rows, and whose they are, which the backward pass tells."""

    __slots__ = (
        *("__weakref__", "call", "dim", "elementwise", "entered", "found", "marks", "name", "names", "rows"),
    )

    def __init__(
        self, call: "RaggedCall", rows: int, dim: int | None, name: str, names: AbstractSet[str]
    ) -> None:
        self.call, self.rows, self.name = weakref.ref(call), rows, name
        self.dim, self.elementwise = dim or 0, dim is None  # elementwise: each value is a row
        self.names = names  # of the parameters
        self.entered = False  # it is what the model is called with
        self.marks: dict[int, list[Tensor]] = {}  # of each output, in each pass beside
        self.found: Owners | None = None

    def look(self, place: int, grad: Tensor) -> None:
        """At the gradient of an output, on its way to the op."""
        call = self.call()
        if call is not None and not call.beside and self.entered != call.entering:
            return
        if call is None or not (call.beside or call.entering or call.pass_id == torch_api.current_pass()):
            raise RuntimeError(
                f"`{self.name}` gets a gradient that did not come by the model's outputs: under ps.sample_ids"
                " take the loss of what the model returns, no second derivatives, and checkpoints with"
                " use_reentrant=False."
            )
        call.differentiated = call.differentiated or torch.is_grad_enabled()
        with torch.no_grad(), torch_api.without_torch_function():
            found = _signature(grad.movedim(self.dim, 0) if grad.ndim > self.dim else grad)
            call.norms[-1].append(found[:, 2])
            if call.beside:
                self.marks.setdefault(place, []).append(found)
            else:
                try:
                    self._tell(found, self.marks.pop(place, []), torch.finfo(grad.dtype).eps, call)
                except InteractionError:
                    if call.mixed is None:
                        raise
                    call.mixed |= self.names

    def _tell(self, plain: Tensor, marks: Sequence[Tensor], eps: float, call: "RaggedCall") -> None:
        """Whose the rows are, from the signature of the gradient and those of the marked ones."""
        if marks or bool(plain.any()):
            self.found = self._owners(plain, marks, eps, call)
            call.note(self, self._kinds(plain[:, 2], eps, call))

    def _kinds(self, norms: Tensor, eps: float, call: "RaggedCall") -> frozenset[int]:
        """Of the rows that were told of, which these may be: none where they are others."""
        owners = self.found
        if call.batch.size == 1 or self.elementwise or not any(owners is one for one in call.batch.owned):
            return frozenset()
        fitting = [(kind, one) for kind, one in call.batch.kinds if len(one.ids) == self.rows]
        if len(fitting) > 1:  # rows without a gradient may be anyone's
            assert owners is not None
            clear, ids = norms > _lost(eps) * call.largest(-1), owners.on(norms.device).ids
            fitting = [
                (kind, one) for kind, one in fitting if torch.equal(one.on(ids.device).ids[clear], ids[clear])
            ]
        return frozenset(kind for kind, _ in fitting)

    def _owners(self, plain: Tensor, marks: Sequence[Tensor], eps: float, call: "RaggedCall") -> Owners:
        if len(marks) != call.passes:
            raise self._mixed(call, "gets a gradient that is not the model's outputs'")
        likely = [self.found] if self.found is not None else call.told(len(plain))
        for owners in likely:
            factors = call.factors(owners, plain)
            if all(torch.equal(marked, _times(plain, f)) for marked, f in zip(marks, factors, strict=True)):
                return owners
        ids, broken = self._decoded(plain, marks, eps, call)
        for owners in likely:  # those without a number of their own may be anyone's
            told = owners.on(ids.device).ids
            if torch.equal(told[ids >= 0], ids[ids >= 0]):
                return owners
        if bool(broken.any()):
            raise RuntimeError(
                f"`{self.name}` gets gradients that are inf or NaN, for rows of which then cannot be told"
                " whose they are: under ps.sample_ids a gradient must be finite where rows are others than"
                " those given."
            )
        if self.found is not None:  # by another of the op's outputs
            before = self.found.on(ids.device).ids
            both = (ids >= 0) & (before >= 0)
            if not torch.equal(ids[both], before[both]):
                raise self._mixed(call, "has rows")
            ids = torch.maximum(ids, before)
        return call.learn(ids)

    def _decoded(
        self, plain: Tensor, marks: Sequence[Tensor], eps: float, call: "RaggedCall"
    ) -> tuple[Tensor, Tensor]:
        """(R,): the samples that the factors tell, -1 where there is none; and whether a row is no number."""
        ids, base = torch.zeros(len(plain), dtype=torch.long, device=plain.device), 1
        norms, letters = plain[:, 2], call.letters.to(plain)
        off = norms * min(1000 * eps, 0.03)  # where sums are formed in another order each time
        nothing, right = norms == 0, norms != 0
        lost = _lost(eps)
        rounding = norms <= lost * call.largest(-1)
        for number, marked in enumerate(marks):
            clearer = plain[:, :2].abs().argmax(1, keepdim=True)  # of the two sums
            ratio = (marked[:, 2] / norms).copysign(
                (marked.gather(1, clearer) * plain.gather(1, clearer)).squeeze(1)
            )
            letter = (ratio.unsqueeze(1) / letters - 1).abs().nan_to_num(torch.inf).argmin(1)
            factor = letters[letter].unsqueeze(1)
            apart = (marked - _times(plain, factor)).abs().amax(1)
            right &= apart <= factor.abs().squeeze(1) * off
            nothing &= marked[:, 2] == 0
            rounding &= marked[:, 2] <= lost * call.largest(number)
            ids += letter * base
            base *= len(letters)
        right &= ids < call.batch.size
        broken = ~plain[:, :2].isfinite().all(1)
        if not bool((torch.stack(list(marks)).isfinite().all(2).all(0) | broken).all()):
            raise RuntimeError(
                f"`{self.name}` gets gradients that are too large to be told apart under ps.sample_ids, where"
                f" they are multiplied by up to {float(letters.abs().max()):.0f}: scale the loss down."
            )
        wrong = ~(right | nothing | rounding | broken)
        if bool(wrong.any()):
            raise self._mixed(call, f"has {int(wrong.sum())} of {len(plain)} rows")
        ids[~right] = -1
        return ids, broken

    def _mixed(self, call: "RaggedCall", what: str) -> "InteractionError":
        few = self.rows == 1 and call.batch.size > 1
        if call.differentiated:
            return InteractionError(
                f"`{self.name}` {what} whose samples cannot be told in a second derivative (of forces, of a"
                " gradient penalty), of which ps.sample_ids gives no rows: pad samples to one size, or batch"
                " those of one size, inside of `with ps.batch_size(n):`, and leave ps.sample_ids away."
            )
        return InteractionError(
            f"`{self.name}` {what} on which the losses of more than one of the {call.batch.size} samples"
            " depend: samples interact (by a mean or a norm over all rows, an edge between two graphs,"
            " attention without a mask), several share a row of what it is given, or the ids given to"
            " ps.sample_ids are not those of the outputs' rows."
            + (" Give rows to layers in dim 0, or in dim 1 of what has a first dim of 1." if few else "")
        )

    def owners(self) -> Owners:
        """For the factor of the op."""
        if self.found is not None:
            return self.found
        call = self.call()
        assert call is not None
        return Owners(torch.full((self.rows,), -1, device="cpu"), call.batch.size)


class InteractionError(RuntimeError):
    """A row on which more than one sample's losses depend."""


WIDE = 1 << 14  # values of a row that have directions of their own


def _signature(grad: Tensor) -> Tensor:
    """(R, 3): of each row (R, ...) two sums, with random weights, and its norm: multiplied as it is."""
    flat = grad.reshape(len(grad), grad[0].numel() if len(grad) else 1)
    flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    if flat.shape[1] > WIDE:  # so that what is kept stays small
        parts = F.pad(flat, (0, -flat.shape[1] % WIDE)).unflatten(1, (-1, WIDE))
        flat = (_directions(parts.shape[1], flat.dtype, flat.device)[:, 0] @ parts).contiguous()
    return torch.cat([flat @ _directions(flat.shape[1], flat.dtype, flat.device), norms], 1)


def _lost(eps: float) -> float:
    """Of the largest row, what is left of sums of several samples' that cancel."""
    return min(32 * eps, 1e-3)


def _times(signature: Tensor, factors: Tensor) -> Tensor:
    """(R, 3): the signature of rows times factors (R, 1)."""
    return torch.cat([signature[:, :2] * factors, signature[:, 2:] * factors.abs()], 1)


@functools.lru_cache(maxsize=64)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(width, 2, generator=generator, dtype=dtype, device="cpu") + 0.5
    signs = torch.randint(2, weights.shape, generator=generator, device="cpu") * 2 - 1
    return (weights * signs).to(device)


_PLAIN = (Tensor, int, float, bool, str, list, tuple, dict)  # what may hold tensors that are seen


class RaggedCall:
    """One outermost call of a model on a ragged batch."""

    def __init__(
        self, batch: RaggedBatch, model: nn.Module, seen: Seen, shared: AbstractSet[str], alone: Alone
    ) -> None:
        self.batch, self.seen, self.shared, self.alone = batch, seen, shared, alone
        # of parameters, what they met that has no gradient, and no rows that were told of
        self.without_rows: dict[str, list[Tensor]] = {}
        self.proving = False  # whether it is a first call
        self.mixed: set[str] | None = None  # uses of more than one sample's rows, where these are looked for
        self.trusted = batch.trusts(seen)
        self.buffers = list(contents.buffers(model))
        self.held = {id(t) for t in (*contents.parameters(model), *self.buffers)}
        self.edges: list[GradientEdge] = []  # of what ops return
        self.uses: list[Use] = []
        self.entered: list[GradientEdge] = []  # of what the model is called with
        self.proved: Callable[[], object] | None = None  # called when a pass has come by
        self.pass_id, self.beside, self.entering = -1, False, False
        self.half = False  # gradients of float16 are met
        self.differentiated = False  # a pass has made a graph of its own, of which a loss may be
        self.letters, self.passes = torch.ones(1, device="cpu"), 0  # factors, and how many passes beside
        self.learned: list[Owners] = []  # of other rows than those that were told, or likely
        self.marked: dict[int, list[Tensor]] = {}  # of owners, the factors of their rows in each pass
        self.norms: list[list[Tensor]] = [[]]  # of the rows of all gradients, in each pass

    def told(self, rows: int) -> list[Owners]:
        """Whose so many rows may be; where nothing was learned, several of each given row, in order, as
        positions are.
        """
        found = [owners for owners in (*self.batch.owned, *self.learned) if len(owners.ids) == rows]
        if not found:
            given = [one.ids for one in self.batch.owned if len(one.ids) and rows % len(one.ids) == 0]
            found = [Owners(ids.repeat_interleave(rows // len(ids)), self.batch.size) for ids in given]
            self.learned += found
        return found

    def largest(self, number: int) -> float:
        """Norm of a row of a gradient that a pass has met."""
        norms = [float(t.nan_to_num(0, 0, 0).max()) for t in self.norms[number] if len(t)]
        return max(norms, default=0.0)

    def _trusted(self, use: Use) -> Owners:
        known = [self.seen.get(name, frozenset()) for name in use.names]
        kinds = frozenset.intersection(*known)
        if not kinds or use.elementwise:
            raise RuntimeError(
                f"`{use.name}` was not reached by the losses of the batch that was verified, or not in this"
                " way: call the model once more without verify=False."
            )
        likely = [one for kind, one in self.batch.kinds if kind in kinds]
        found = [one for one in likely if len(one.ids) == use.rows]
        if not (found and all(torch.equal(found[0].ids, o.on(found[0].ids.device).ids) for o in found[1:])):
            expected = " or ".join(str(len(one.ids)) for one in likely)
            problem = "and they may be two kinds of rows" if found else f"expected {expected}"
            raise RuntimeError(
                f"`{use.name}` is given {use.rows} rows: {problem}, as the batch that was verified shows."
                " Tell of them by a further ps.sample_ids, or leave verify=False away."
            )
        return found[0]

    def note(self, use: Use, kinds: frozenset[int]) -> None:
        """Which rows a use had, for batches that are not verified."""
        for name in use.names or {use.name}:
            before = self.seen.get(name, kinds)
            self.seen[name] = before | kinds if before and kinds else frozenset()

    def learn(self, ids: Tensor) -> Owners:
        """Whose rows are, as a use has shown: others' may be, too."""
        owners = Owners(ids, self.batch.size)
        if bool((ids >= 0).all()):
            self.learned.append(owners)
        return owners

    def factors(self, owners: Owners, like: Tensor) -> list[Tensor]:
        """(R, 1), by which the gradients of these rows are multiplied in each pass beside."""
        if id(owners) not in self.marked:
            self.marked[id(owners)] = [factors_of(owners.ids, self.letters, n) for n in range(self.passes)]
        return [t.to(like.device, like.dtype).unsqueeze(1) for t in self.marked[id(owners)]]

    def watch(
        self,
        expansions: Sequence[Expansion],
        outputs: Sequence[Tensor],
        dim: int | None,
        name: str = "the model",
    ) -> None:
        """Look at the gradients of what an op gives with these weights, its rows in `dim` (None: each value
        is one).
        """
        outputs = [t for t in outputs if t.requires_grad]
        if not outputs:
            return
        given = ({e.recorder.name} if e.recorder is not None else e.names or set[str]() for e in expansions)
        names = set[str]().union(*given)
        name = "`, `".join(sorted(names)) or name
        rows = {t.shape[dim or 0] if t.ndim > (dim or 0) else 1 for t in outputs}
        if len(rows) > 1:
            raise ValueError(
                f"`{name}` is used for inputs of {sorted(rows)} rows at once, which is not followed under"
                " ps.sample_ids: use it once for each."
            )
        use = Use(self, rows.pop(), dim, name, names)
        for e in expansions:
            e.use = use
        if self.trusted:
            use.found = self._trusted(use) if names else None  # of frozen weights nobody asks for rows
            return
        self.half = self.half or any(t.dtype == torch.float16 for t in outputs)
        made_again = torch_api.current_pass() != -1  # by a checkpoint: what counts is what was made first
        for place, t in enumerate(outputs):
            if not made_again:
                self.edges.append(get_gradient_edge(t))
            with torch_api.without_torch_function():
                t.register_hook(_Look(use, place))
        if not made_again:
            self.uses.append(use)

    def enter(self, call: Any) -> Any:
        """What the model is called with, looked at like what ops return: so that samples which interact
        before the first weight are seen.
        """

        def seen(t: Tensor) -> Tensor:
            dims = set() if t.is_nested else {dim for _, dim in self.batch.fitting(t)}
            if t.requires_grad or not (t.is_floating_point() and t.numel() and len(dims) == 1):
                return t
            t = t.detach().clone().requires_grad_() * 1
            self.watch([], [t], dims.pop(), "the model's input")
            self.uses[-1].entered = True
            self.entered.append(self.edges[-1])
            return t

        self._check_lengths(call)
        return map_tensors(seen, call)

    def _check_lengths(self, call: Any) -> None:
        """ValueError where nothing that the model is called with is as long as any ids."""
        given = [t for t in tensors_of(call) if not t.is_nested]
        values = *call[0], *call[1].values()
        plain = all(v is None or isinstance(v, _PLAIN) for v in values)
        lengths = {n for t in given for n in t.shape} | {len(v) for v in values if isinstance(v, list)}
        if given and plain and not any(len(ids) in lengths for ids, _ in self.batch.known):
            told = " and ".join(str(len(ids)) for ids, _ in self.batch.known)
            raise ValueError(
                f"ps.sample_ids was told of {told} rows, and the model is called with tensors of shapes"
                f" {', '.join(str(tuple(t.shape)) for t in given)}: expected one with as many."
            )

    def leave(self, output: Any) -> Any:
        """The output, through which gradients come in.

        Raises:
            ValueError: it is not known of any whose its rows are.
        """
        tensors = _rows_of(output)
        if not tensors:
            return output
        if all(self.batch.owners(t) is None for t in tensors):
            turned = any(
                t.ndim > 1 and t.shape[1 - dim] == len(i) for t in tensors for i, dim in self.batch.known
            )
            raise ValueError(
                f"the model returns {', '.join(str(tuple(t.shape)) for t in tensors)}, of whose rows"
                f" ps.sample_ids was not told whose they are: expected {self._expected()} rows."
                f" {'Is `dim` that of the rows?' if turned else 'Is `size` the number of samples?'} Tell of"
                " other rows by a further ps.sample_ids around the call; take the loss outside of the model."
            )
        outside = iter(_Exit.apply(self, *tensors))

        def out(t: Any) -> Any:
            if not t.requires_grad or isinstance(t, Kept):
                return t
            rows = next(outside)
            return torch.nested.nested_tensor_from_jagged(rows, t.offsets()) if t.is_nested else rows

        return map_tensors(out, output)

    def try_out(self, output: Any) -> None:
        """Look at the rows of a backward pass from the outputs on, without weight gradients."""
        tensors = [t for t in _rows_of(output) if self.batch.owners(t) is not None]
        if tensors and (last := last_edges(self.edges)):
            generator = torch.Generator().manual_seed(0)  # the caller's random numbers stay where they are
            grads = [torch.randn(t.shape, generator=generator, device="cpu").to(t) for t in tensors]
            with quiet_pass():
                torch_api.gradients(tensors, last, grads)

    def meets_shared(self, names: AbstractSet[str], inputs: Sequence[Tensor]) -> bool:
        """Whether these parameters meet what is no sample's, but the same for all.

        What may be so is noted while that is to be found out.
        """
        if not (self.proving or self.shared) or any(t.requires_grad or self.has_rows(t) for t in inputs):
            return False
        if self.proving and torch_api.current_pass() == -1:  # what checkpoints compute again was met before
            for name in names:
                self.without_rows.setdefault(name, []).extend(inputs)
        return bool(names & self.shared)

    def as_proved(self, use: tuple[AbstractSet[str], str], alone: Callable[[], bool]) -> bool:
        """Whether parameters meet nothing of the batch's in a function: as when that was proved, if it was
        always so or never.
        """
        if not self.proving:
            known = self.alone.get(use, ())
            return next(iter(known)) if len(known) == 1 else alone()
        self.alone.setdefault(use, set()).add(now := alone())
        return now

    def has_rows(self, t: Tensor) -> bool:
        """Whether a tensor has as many rows as were told of."""
        return any(t.ndim > dim and t.shape[dim] == len(ids) for ids, dim in self.batch.known)

    def mixed_without_rows(self, output: Any) -> set[str]:
        """Parameters that met nothing with rows, and on whose use several samples' losses depend, as a
        backward pass without a loss shows.
        """
        self.mixed = set()
        try:
            if self.without_rows and not self.trusted:
                self.try_out(output)
        except RuntimeError:  # which the loss's own pass will raise
            pass
        found, self.mixed = self.mixed & self.without_rows.keys(), None
        return found

    def of_other_rows(self, call: Any) -> Any:
        """What the model is called with, with some of its rows in others' places."""

        def changed(t: Tensor) -> Tensor:
            for ids, dim in self.batch.known:
                if not t.is_nested and t.ndim > dim and t.shape[dim] == len(ids):
                    return t.index_select(dim, torch.arange(len(ids), device=t.device) // 2)
            return t

        return map_tensors(changed, call)

    def met_the_same(self, other: "RaggedCall", name: str) -> bool:
        """Whether a parameter met the same in another call."""
        ours, others = self.without_rows[name], other.without_rows.get(name, [])
        return len(ours) == len(others) and all(map(torch.equal, ours, others))

    def mark(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """The passes beside: each sample's outputs' gradients times a power of two of its own."""
        half = any(g is not None and g.dtype == torch.float16 for g in grads)
        self.letters, passes = letters_for(self.batch.size, half or self.half)
        self.passes = max(passes, 1)
        owned = []
        for t, grad in zip(outputs, grads, strict=True):
            if grad is None or not bool(grad.any()):
                continue
            found = self.batch.owners(t)
            if found is None:
                raise RuntimeError(
                    f"the loss uses an output of shape {tuple(t.shape)}, of whose rows ps.sample_ids was not"
                    f" told whose they are: expected {self._expected()} rows. Take the loss outside of the"
                    " model, or tell of these rows by a further ps.sample_ids around the call."
                )
            owned.append((t, grad.detach(), *found))
        self.learned, self.marked, self.norms = [], {}, [[]]
        for use in self.uses:
            use.marks, use.found = {}, None
        last = last_edges(self.edges)
        if not (owned and last):
            return
        with torch_api.changed(self, beside=True):
            for letter in range(self.passes):
                marked = []
                for t, grad, ids, dim in owned:
                    shape = [len(ids) if d == dim else 1 for d in range(t.ndim)]
                    marked.append(grad * factors_of(ids, self.letters, letter).to(grad).view(shape))
                with quiet_pass(), torch.enable_grad():
                    torch_api.gradients([t for t, *_ in owned], last, marked)
                self.norms.append([])
        if self.entered:  # where a pass that is asked for parameters' gradients alone does not come by
            with torch_api.changed(self, entering=True), quiet_pass(), torch.enable_grad():
                torch_api.gradients([t for t, *_ in owned], self.entered, [grad for _, grad, *_ in owned])
        if self.proved is not None and self.mixed is None:
            rows = [(g.movedim(dim, 0).reshape(g.shape[dim], -1), ids) for _, g, ids, dim in owned]
            reached = [ids.to(g.device)[(g != 0).any(1)].cpu() for g, ids in rows]
            if len(torch.cat(reached).unique()) > 1:  # of one sample alone interactions are not seen
                self.proved()

    def _expected(self) -> str:
        return ", ".join(str(len(ids)) for ids, _ in self.batch.known) + f" or {self.batch.size}"


def _rows_of(output: Any) -> list[Tensor]:
    """The tensors of an output by which gradients come in; of nested ones all rows."""
    found = [t for t in tensors_of(output) if t.requires_grad and not isinstance(t, Kept)]
    return [t.values() if t.is_nested else t for t in found]


class _Look:
    """The hook of one output of a use: the graph holds it, and it holds nothing of the graph."""

    __torch_unserializable__ = True

    def __init__(self, use: Use, place: int) -> None:
        self.use, self.place = use, place

    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None:
            self.use.look(self.place, grad)


class _Exit(torch.autograd.Function):
    """What a call returns, as it is; its gradients are marked before they go on."""

    @staticmethod
    def forward(ctx: Any, call: RaggedCall, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.inner = outputs
        return tuple([t.detach() for t in outputs])  # no views: these could not be written to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: RaggedCall = ctx.call
        call.mark(ctx.inner, grads)
        call.pass_id = torch_api.current_pass()
        return None, *grads


@contextmanager
def of_jagged(call: Any) -> Iterator[None]:
    """Around a call with jagged nested tensors, which tell whose their rows are, unless sample_ids does."""
    found: list[Any] = [] if local.ragged is not None else [t for t in tensors_of(call) if t.is_nested]
    if not found or found[0].layout != torch.jagged:
        yield
        return
    if found[0].lengths() is not None:
        raise ValueError("a jagged nested tensor has holes between its samples: give it .contiguous().")
    lengths = found[0].offsets().diff()
    samples = torch.arange(len(lengths), device=lengths.device)
    with sample_ids(samples.repeat_interleave(lengths), len(lengths)):
        yield
