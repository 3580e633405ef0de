"""Sinks: where the rows of a parameter go.

A use of a weight hands its factor to one (`Recorder.sink`), which forms the rows in memory of its own
(`make`), and stores them, where they are all that the parameter gets (`put`); what autograd or a loop has
formed already is stored by it, too (`store`). `DenseRows` keeps them in `grad_sample`; `Streaming` hands them
on at once. A new destination is a further `Sink` here; a `with` block sets it as `Settings.sink`, as
`ps.streaming` does. For batches of one, whose row is what arrives at the parameter, there is `SingleSample`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import torch_api
from . import sharding
from .factors import Dense, Factor

if TYPE_CHECKING:
    from .recorder import Recorder


class Sink:
    """Rows in new memory, which nobody stores: of weights that are no recorded parameter's."""

    adds_up = True  # rows that come one after the other, as from several ops on one expanded tensor
    sums = True  # the plain gradients are wanted, too
    streams = False  # rows are handed on inside of a block
    keeps = False  # factors are read after the backward pass of their op
    names: Mapping[Tensor, str] = {}  # of the parameters of the model that the rows are wanted of
    # the same by where modules hold them, `(id(module._parameters), name)`: what is there may change
    places: Mapping[tuple[int, str], str] = {}

    def name_of(self, recorder: "Recorder") -> str:
        """What its parameter is called in the model that the rows are wanted of.

        Raises:
            RuntimeError: it is a parameter of another part of a converted model, all of whose gradients go to
                one place.
        """
        param = recorder.param()
        if param is not None and (name := self.names.get(param)) is not None:
            return name
        if (name := self.places.get(recorder.holder.place())) is None:  # type: ignore[arg-type]
            raise RuntimeError(
                f"`{recorder.name}` has got per-sample gradients inside of a block that was given a part of a"
                " converted model without it: the gradients of one converted model go to one place. Give the"
                " block the whole model, or convert its parts each by itself."
            )
        return name

    def at_call(self, inventory: Any) -> None:
        """Called before a call of the model, with what is known of its parameters: an error where what it
        computes could not be taken.
        """

    def fit(self, recorder: "Recorder", leaf: Tensor) -> None:
        """Note a new rows leaf, whose gradient will come."""

    def buffer(self, recorder: "Recorder | None", like: Tensor) -> Tensor:
        """Memory for rows like `like`, uninitialised."""
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def zeros(self, recorder: "Recorder | None", like: Tensor) -> Tensor:
        """The same, of zeros."""
        return self.buffer(recorder, like).zero_()

    def make(self, recorder: "Recorder | None", factor: Factor, like: Tensor, scale: float) -> Tensor | None:
        """The dense rows of a factor, times `scale`; None where it is kept as it is."""
        out = self.buffer(recorder, like) if factor.entries is None else self.zeros(recorder, like)
        factor.write(out, scale)
        return out

    def put(self, recorder: "Recorder", factor: Factor, like: Tensor, scale: float) -> Tensor | None:
        """The same, and stored; None where these are not to be had by themselves."""
        rows = self.make(recorder, factor, like, scale)
        if rows is not None:
            recorder.store(rows, factor.entries if recorder.uses <= 1 else None)
        return rows

    def store(
        self, recorder: "Recorder", holder: Tensor, rows: Tensor, first: bool, entries: Tensor | None
    ) -> None:
        """Take the rows (B, *S) of a parameter, which `holder` carries as `grad_sample`; `first` of this
        pass.

        `entries`: those of the samples' tables in which rows may not be zero; None: all.
        """
        raise NotImplementedError


UNRECORDED = Sink()


class DenseRows(Sink):
    """Rows kept as `grad_sample`, in memory that is used again as soon as nobody else holds it."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None  # of the last rows
        self.leaf: Tensor | None = None  # that they were the gradient of
        # the entries in that memory that are not zero, and its version at that time
        self.written: tuple[Tensor, int] | None = None
        self.offset = 0  # rows that earlier passes have appended

    def fit(self, recorder: "Recorder", leaf: Tensor) -> None:
        """Have memory for the rows of a new leaf: the old one's where it fits.

        On CPUs it is allocated now, but for one sample's and for rows that are kept beside others: in the
        backward pass it would lie where the next forward pass wants its activations again.
        """
        memory, form = self.memory, (leaf.shape, leaf.dtype, leaf.device)
        if memory is not None and (memory.shape, memory.dtype, memory.device) == form:
            self.leaf = leaf
        elif recorder.settings.accumulation == "replace" and leaf.device.type == "cpu":
            alone = leaf.shape[0] == 1
            memory = None if alone else torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            self.memory, self.leaf, self.written = memory, leaf, None

    def release(self) -> None:
        """Let go of the memory."""
        self.memory = self.leaf = self.written = None

    def buffer(self, recorder: "Recorder | None", like: Tensor) -> Tensor:
        """The last rows' memory, unless somebody holds it, or rows are to be kept beside them, or in a graph
        that is captured, which writes to them whenever it is replayed.
        """
        memory = self.memory
        if memory is None or like is not self.leaf or recorder is None or torch_api.capturing():
            return super().buffer(recorder, like)
        if recorder.settings.accumulation == "replace" and recorder.pass_id != torch_api.running_pass():
            holder = None if recorder.settings.collecting_grads else recorder.holder.tensor()
            if holder is not None:  # about to be replaced: let it go, then see who else holds it
                holder.grad_sample = None  # type: ignore[attr-defined]
            if not torch_api.held_elsewhere(memory):
                return memory.detach()
        return super().buffer(recorder, like)

    def put(self, recorder: "Recorder", factor: Factor, like: Tensor, scale: float) -> Tensor | None:
        """Rows of a pass, which replace others', without a detour: most rows are."""
        settings, memory, pass_id = recorder.settings, self.memory, torch_api.current_pass()
        if pass_id != settings.pass_id:
            pass_id = torch_api.running_pass()
        first = recorder.pass_id != pass_id
        if (
            memory is None
            or like is not self.leaf
            or (first and factor.entries is not None)
            or settings.accumulation != "replace"
            or (holder := recorder.enter(pass_id)) is None
            or settings.captured
        ):
            return super().put(recorder, factor, like, scale)
        if not first:
            added = self._added(holder, factor, scale)
            return None if added else super().put(recorder, factor, like, scale)
        recorder.count(like.shape[0])
        holder.grad_sample = None  # type: ignore[attr-defined]
        if torch_api.held_elsewhere(memory):
            self.memory = memory = torch.empty_like(memory)
        rows = memory.detach()
        factor.write(rows, scale)
        self.offset, self.written = recorder.holder.enter(holder, recorder), None
        holder.grad_sample = rows  # type: ignore[attr-defined]
        return rows

    def _added(self, holder: Tensor, factor: Factor, scale: float) -> bool:
        """Whether the rows of a further use in a pass were added where the first ones are, which nobody else
        holds: a gradient that autograd has passed on may be another parameter's, too.
        """
        memory, now = self.memory, getattr(holder, "grad_sample", None)
        assert memory is not None
        if now is None or now.data_ptr() != memory.data_ptr() or now.shape != factor.shape:
            return False
        holder.grad_sample = now = None  # type: ignore[attr-defined]
        free = not torch_api.held_elsewhere(memory)
        holder.grad_sample = rows = memory.detach()  # type: ignore[attr-defined]
        if free:
            factor.add(rows, scale)
            self.written = None
        return free

    def zeros(self, recorder: "Recorder | None", like: Tensor) -> Tensor:
        """Cleared only where the last rows were written, if nobody has changed them since."""
        (written, version), memory = self.written or (None, -1), self.memory
        unchanged = memory is not None and memory._version == version
        out = self.buffer(recorder, like)
        if written is None or not unchanged or memory is None or out.data_ptr() != memory.data_ptr():
            return out.zero_()
        out.view(-1, out.shape[-1]).index_fill_(0, written, 0)
        return out

    def store(
        self, recorder: "Recorder", holder: Tensor, rows: Tensor, first: bool, entries: Tensor | None
    ) -> None:
        """Put them on the parameter, by the rules of accumulation."""
        settings = recorder.settings
        recorder.count(rows.shape[0])
        if not settings.captured:
            self._remember(rows, recorder.leaf)
        self.written = None
        if first:
            self.offset = recorder.holder.enter(holder, recorder)
        if not first or settings.accumulation != "replace":
            rows = self._accumulated(recorder, holder, rows, first)
        holder.grad_sample = rows  # type: ignore[attr-defined]
        if entries is not None and self.memory is not None and not settings.captured:
            self.written = entries, self.memory._version

    def _remember(self, rows: Tensor, leaf: Tensor | None) -> None:
        """Keep the memory of these rows for the next ones."""
        memory = self.memory
        if rows.requires_grad:
            self.release()
        elif memory is None or rows.data_ptr() != memory.data_ptr() or rows.shape != memory.shape:
            self.release()
            if leaf is not None and rows.shape == leaf.shape and rows.is_contiguous():
                self.memory, self.leaf = rows.detach(), leaf

    def _accumulated(self, recorder: "Recorder", holder: Tensor, rows: Tensor, first: bool) -> Tensor:
        """These rows with those that are there: of earlier passes, or of this one."""
        now: Tensor | None = getattr(holder, "grad_sample", None)
        appending = recorder.settings.accumulation == "append"
        if now is None:  # no earlier pass has reached the parameter
            before = self.offset if first and appending else 0
            return torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows]) if before else rows
        if first and appending:  # in the place of zeros
            self.offset = len(now) - len(rows)
            return torch.cat([now[: self.offset], rows])
        if len(now) - self.offset != len(rows):
            raise recorder.of_two_sizes(len(now) - self.offset, len(rows))
        if self.offset:
            return torch.cat([now[: self.offset], now[self.offset :] + rows])
        return now + rows


class Streaming(Sink):
    """Rows handed to a function, one parameter after the other, in memory that all of them share, and those
    of the next block (`Settings.workspace`): new memory would cost a CPU more than the rows do.

    Args:
        take: ``take(name, rows, first)``, where `first` is False for a further part of the same rows.
        sums: the plain gradients are wanted, too.
    """

    adds_up, streams = False, True

    def __init__(self, take: Callable[[str, Tensor, bool], object], sums: bool = True) -> None:
        self.take, self.sums = take, sums
        self.workspace: torch.UntypedStorage | None = None

    def buffer(self, recorder: "Recorder | None", like: Tensor) -> Tensor:
        """The shared memory, made larger where it is too small; memory of its own while it is in use."""
        if recorder is None:
            return super().buffer(recorder, like)
        size, settings = like.numel() * like.element_size(), recorder.settings
        held = self.workspace or settings.workspace
        if held is None or held.nbytes() < size or held.device != like.device:
            held = self.workspace = settings.workspace = None  # let go before the larger one is there
            held = torch.empty(size, dtype=torch.uint8, device=like.device).untyped_storage()
            self.workspace, settings.workspace = held, held if held.device.type == "cpu" else None
        elif torch_api.storage_used(held):  # by another parameter of the layer, or kept
            return super().buffer(recorder, like)
        return like.new_empty(0).set_(held, 0, like.shape)  # type: ignore[call-overload]

    def put(self, recorder: "Recorder", factor: Factor, like: Tensor, scale: float) -> Tensor | None:
        """The rows, unless they are changed by who was handed them: the plain sum is not theirs."""
        rows = self.make(recorder, factor, like, scale)
        assert rows is not None
        version = rows._version
        recorder.store(rows)
        return rows if rows._version == version else None

    def store(
        self, recorder: "Recorder", holder: Tensor, rows: Tensor, first: bool, entries: Tensor | None
    ) -> None:
        """Hand the rows on, and keep none."""
        recorder.dense.release()
        self.take(self.name_of(recorder), rows, first)


class Factored(Sink):
    """Factors as they are, from which no dense rows are made (`ps.factored`)."""

    def take(self, recorder: "Recorder", holder: Tensor, factor: Factor, scale: float) -> None:
        """Take a factor of a parameter, which `holder` carries."""
        raise NotImplementedError

    def make(self, recorder: "Recorder | None", factor: Factor, like: Tensor, scale: float) -> Tensor | None:
        """None: the factor is taken."""
        if recorder is None or recorder.settings.collecting_grads:
            return super().make(recorder, factor, like, scale)
        if (holder := recorder.enter()) is not None:
            self.take(recorder, holder, factor, scale)
        return None

    def store(
        self, recorder: "Recorder", holder: Tensor, rows: Tensor, first: bool, entries: Tensor | None
    ) -> None:
        """Take rows that somebody has formed."""
        self.take(recorder, holder, Dense(rows, rows.shape), 1.0)


class SingleSample:
    """A batch of one: what arrives at the parameter in a backward pass is the row.

    It is taken on its way where that can be (`store_single`), else when it arrives.
    """

    def __init__(self) -> None:
        self.pass_id = -1  # in which all that arrives is one sample's, and is yet to be taken
        self.taken: Tensor | None = None  # on its way
        self.before_hooks: Tensor | None = None  # what last came to the user's hooks, for ps.per_sample_grads

    def arrived(self, recorder: "Recorder", grad: Tensor, noted: bool) -> bool:
        """Whether a gradient that arrives in that pass is that of one sample, and is stored.

        `noted`: expansions have passed on some of it.
        """
        if self.taken is not None and recorder.pass_id == self.pass_id:  # that part was taken on its way
            taken, self.taken, self.pass_id = self.taken, None, -1
            if noted:
                raise RuntimeError(
                    f"`{recorder.name}` was reached by a batch of one and by another one in the same backward"
                    " pass: use one batch size in a backward pass, or a pass for each batch, under"
                    " ps.accumulating(model, 'append')."
                )
            recorder.store((grad - taken).unsqueeze(0))
            return True
        if noted and recorder.settings.rows == 1:
            return False
        row, leaf, self.pass_id = grad.unsqueeze(0), recorder.leaf, -1
        if not torch.is_grad_enabled():
            like = leaf if leaf is not None and leaf.shape == row.shape else row
            row = recorder.sink.buffer(recorder, like).copy_(row)
        recorder.store(row)
        return True


def has_hooks(param: Tensor) -> bool:
    """Whether it has hooks of the user's, beside that of its recorder."""
    return len(param._backward_hooks or ()) > 1 or bool(param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def store_single(recorders: Sequence["Recorder"], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients on their way to parameters, as the rows of one sample; what cannot be taken so early is when
    it arrives. What goes on to the parameters.
    """
    settings, pass_id = recorders[0].settings, torch_api.current_pass()
    sink, sums = settings.sink, settings.sums
    if sink is not None and sink.adds_up and not sums:
        # nothing arrives, as of larger batches: FSDP2 reduces what does, and waits for other processes; but
        # for parameters with hooks of the user's
        left: list[Tensor | None] = []
        for recorder, grad in zip(recorders, grads, strict=True):
            left.append(grad if grad is not None and recorder.hooked else None)
            if left[-1] is not None:
                recorder.single.pass_id = pass_id
            elif grad is not None:
                recorder.store(grad.unsqueeze(0))
        return left
    early = sink is None and settings.accumulation == "replace" and not sharding.in_use()
    if early and pass_id != settings.pass_id:
        settings.begin_pass(pass_id)
    early = early and settings.rows in (-1, 1)
    rows: list[Tensor] = []
    taken: list[Tensor] = []
    held_elsewhere, recorded = torch_api.held_elsewhere, settings.recorded
    for recorder, grad in zip(recorders, grads, strict=True):
        if grad is None:
            continue
        dense, param = recorder.dense, recorder.param()
        recorder.single.pass_id = pass_id
        if (
            not early
            or recorder.pass_id == pass_id  # not the only one of this pass
            or param is None
            or (not sums and has_hooks(param))  # which are not to see None
        ):
            continue
        if (row := torch_api.copied_when_written(grad)) is None:
            memory = dense.memory
            if (
                memory is None
                or dense.leaf is not recorder.leaf
                or len(memory) != 1
                or held_elsewhere(memory)
            ):
                continue
            row = memory[0]
            rows.append(row)
            taken.append(grad)
        recorder.pass_id, dense.offset, dense.written = pass_id, 0, None
        recorder.single.taken, recorded[id(param)] = grad, recorder.param
        param.grad_sample = row.unsqueeze(0)  # type: ignore[attr-defined]
        settings.rows = 1
    if rows:
        torch_api.copy_each(rows, taken)
    if sums:
        return grads
    others: list[Tensor | None] = []
    for recorder, grad in zip(recorders, grads, strict=True):
        others.append(None if recorder.single.taken is grad else grad)
        recorder.single.taken = None
    return others
