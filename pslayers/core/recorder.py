"""The recorder of a parameter: the gradient of its expansion becomes `grad_sample`, without a copy, in memory
that is used again.

All per-sample gradients end in `Recorder.store`: they are kept in `grad_sample`, or handed on at once
(`Settings.stream`, what `ps.streaming` sets). Another destination for them begins there.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api
from . import sharding
from .context import Settings


class Recorder:
    """Per parameter: its rows leaf, where the rows go, and the memory they are written to. Lives on the
    parameter.

    It holds its parameter weakly, so that a model is freed as soon as its user lets it go.
    """

    def __init__(self, param: Tensor, name: str, settings: Settings) -> None:
        self.param = weakref.ref(param)
        self.name, self.settings = name, settings
        # the module that holds the parameter, and its name there
        self.slot: tuple[weakref.ref[nn.Module], str] | None = None
        # the tensor whose `grad_sample` is written: the shard, where the parameter is a gathered one
        self.home = self.param
        self.leaf: Tensor | None = None
        self.form: tuple[Any, ...] | None = None  # of the leaf
        self.node: Any = None  # of the graph, that takes what the leaf receives
        self.memory: Tensor | None = None  # of the last rows
        self.buffer_leaf: Tensor | None = None  # the leaf that they were the gradient of
        # what in that memory is not zero, and its version at that time
        self.written: tuple[Tensor, int] | None = None
        self.pass_id = self.outer_pass = self.notes_pass = -1
        self.offset = 0  # rows that earlier passes have appended
        self.uses, self.checked = 0, False  # expansions since the first forward after the last backward pass
        self.notes: list[tuple[int, int] | Tensor] = []
        self.compiled = False  # the notes come from compiled code
        self.single_pass = -1  # in which all that arrives is one sample's, and is yet to be taken
        self.single_grad: Tensor | None = None  # on its way, and taken already
        self.unexpanded = False  # a layer's last call did not expand this parameter
        with torch_api.without_torch_function():  # nobody wraps it
            self.hook = param.register_hook(_Arrival(self))
        if hooks := param._backward_hooks:  # before hooks of the user's, which may change what arrives
            *others, ours = hooks.items()
            hooks.clear()
            hooks.update([ours, *others])

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles of a parameter start without one
        return _no_recorder, ()

    def rows(self, size: int) -> Tensor:
        """The leaf (size, *S), for an expansion of the parameter."""
        self.use()
        return self.rows_leaf(size)

    def rows_leaf(self, size: int) -> Tensor:
        """The leaf (size, *S) on the parameter's memory; made anew when batch size or memory have changed."""
        param, leaf = self.param(), self.leaf
        assert param is not None
        form = size, param.data_ptr(), param.shape, param.stride(), param.dtype
        if leaf is None or form != self.form:
            self.release()
            leaf = param.detach().expand(size, *param.shape).requires_grad_()
            leaf._ps_rows = True  # type: ignore[attr-defined]
            self.leaf, self.form = leaf, form
            self._fit(leaf)
        return leaf

    def ready(self, param: Tensor, size: int) -> bool:
        """Whether `rows_leaf` would find its leaf (but for a change of shape or strides in the same
        memory).
        """
        form = self.form
        return (
            self.leaf is not None
            and form is not None
            and form[0] == size
            and form[1] == param.data_ptr()
            and form[4] is param.dtype
        )

    def _fit(self, leaf: Tensor) -> None:
        """Have memory for the rows of a new leaf: the old one's where it fits.

        On CPUs it is allocated now: in the backward pass it would lie where the next forward pass wants its
        activations again.
        """
        memory, settings = self.memory, self.settings
        if memory is not None and (memory.shape, memory.dtype, memory.device) == (
            leaf.shape,
            leaf.dtype,
            leaf.device,
        ):
            self.buffer_leaf = leaf
        elif leaf.device.type == "cpu" and settings.stream is None and settings.accumulation == "replace":
            self.memory, self.buffer_leaf, self.written = (
                torch.empty(leaf.shape, dtype=leaf.dtype),
                leaf,
                None,
            )

    def use(self) -> None:
        """Count an expansion of the parameter."""
        self.uses, self.checked = 1 if self.checked else self.uses + 1, False
        # a reentrant checkpoint recomputes inside a backward pass and back-propagates in a pass of its own:
        # count the outer one
        self.outer_pass = torch_api.outer_pass()

    def holder(self) -> Tensor | None:
        """The tensor whose `grad_sample` is written."""
        home = self.home()
        return self.param() if home is None else home

    def deliver(self) -> None:
        """After a backward pass: rows go to what the module holds now, the shard of a parameter that was
        gathered for the pass.
        """
        module, holder = self.slot[0]() if self.slot else None, self.holder()
        now = module._parameters.get(self.slot[1]) if module is not None and self.slot else None
        if now is None or holder is None or now is holder:
            return
        now.grad_sample, now._ps_recorder = holder.grad_sample, self  # type: ignore[attr-defined]
        holder.__dict__.pop("grad_sample", None)
        self.settings.recorded.pop(id(holder), None)
        self.home = self.settings.recorded[id(now)] = weakref.ref(now)

    def current_pass(self) -> int:
        """The id of the backward pass that is running."""
        return torch_api.running_pass(self.outer_pass)

    def buffer(self, rows: Tensor) -> Tensor:
        """Memory for a gradient like `rows`: the last one's again, unless somebody holds it."""
        settings, holder, memory = self.settings, self.holder(), self.memory
        if settings.stream is not None:
            return self._workspace(rows)
        if (
            memory is not None
            and holder is not None
            and rows is self.buffer_leaf
            and settings.accumulation == "replace"
            and self.pass_id != self.current_pass()
        ):
            holder.grad_sample = None  # type: ignore[attr-defined]  # about to be replaced: let it go, then see who else holds it
            if not torch_api.held_elsewhere(memory):
                return memory.detach()
        return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)

    def zeros(self, rows: Tensor) -> Tensor:
        """`buffer`, of zeros: cleared only where the last rows were written, if nobody has changed them
        since.
        """
        written, version = self.written or (None, -1)
        fresh = self.memory is None or self.memory._version != version
        out = self.buffer(rows)
        if written is None or fresh or self.memory is None or out.data_ptr() != self.memory.data_ptr():
            return out.zero_()
        out.view(-1, out.shape[-1]).index_fill_(0, written, 0)
        return out

    def _workspace(self, rows: Tensor) -> Tensor:
        """Memory that all parameters of the model share, one after the other."""
        size, held = rows.numel() * rows.element_size(), self.settings.workspace
        if held is None or held.nbytes() < size or held.device != rows.device:
            held = self.settings.workspace = torch.empty(
                size, dtype=torch.uint8, device=rows.device
            ).untyped_storage()
        elif torch_api.storage_used(held):  # by another parameter of the layer, or kept
            return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        return rows.new_empty(0).set_(held, 0, rows.shape)  # type: ignore[call-overload]

    def note(self, grad: Tensor, compiled: bool = False) -> None:
        """Remember a gradient on its way to the parameter: by identity, or by value where several will be
        added up.

        Compiled code may use its memory again before it arrives, and add several up in any order.
        """
        if (pass_id := torch_api.current_pass()) != self.notes_pass:  # an earlier pass may have broken off
            self.notes_pass, self.notes = pass_id, []
        self.compiled = compiled
        alone = self.uses <= 1 and not self.notes and not torch.is_grad_enabled() and not compiled
        self.notes.append((grad.data_ptr(), grad._version) if alone else grad.clone() if compiled else grad)

    def check(self, grad: Tensor) -> None:
        """Hook on the parameter: what arrives must be what the expansions passed on, else the rows would lack
        a part.

        Where the call was that of one sample, it is the row.
        """
        notes, self.notes, self.checked, pass_id = self.notes, [], True, torch_api.current_pass()
        noted = bool(notes) and self.notes_pass == pass_id
        if self.single_grad is not None and self.pass_id == pass_id:  # that part was taken on its way
            taken, self.single_grad, self.single_pass = self.single_grad, None, -1
            if noted:
                raise RuntimeError(
                    f"`{self.name}` was reached by a batch of one and by another one in the same backward"
                    " pass: use one batch size in a backward pass, or a pass for each batch, under"
                    " ps.accumulating(model, 'append')."
                )
            self.store((grad - taken).unsqueeze(0))
            return
        if self.single_pass == pass_id and not (noted and self.settings.rows == 1):
            row, self.single_pass = grad.unsqueeze(0), -1
            kept = self.buffer(self.leaf if self.leaf is not None and self.leaf.shape == row.shape else row)
            self.store(row if torch.is_grad_enabled() else kept.copy_(row))
            return
        if not noted:
            if not self.unexpanded:
                self.settings.arrived(self)
                return
            whole = False
        # a second note means that an older graph took part: its value is gone
        elif isinstance(notes[0], tuple):
            whole = len(notes) > 1 or notes[0] == (grad.data_ptr(), grad._version)
        else:  # several uses: the engine has added them up in this order
            total = notes[0].detach()
            for note in notes[1:]:
                assert isinstance(note, Tensor)
                total = total + note.detach()
            equal = _nearly_equal if self.compiled else torch.equal
            whole = torch.equal(total, grad) or equal(total.nan_to_num(), grad.nan_to_num())
        if not whole and grad.numel():
            raise RuntimeError(
                f"`{self.name}` received a gradient that did not come through its layer (it is also used on"
                " its own, as in F.linear(x, layer.weight) or in a penalty on the weights, or reaches only"
                " an output in which samples interact), so its per-sample rows would lack a part: in a layer"
                " of your own write self.expand(name); compute a penalty on weights in a backward pass of"
                " its own, without recording: ps.recording(model, False)."
            )

    def listen(self) -> None:
        """Let what the leaf receives be put on the parameter: rows of several uses, or with a graph."""
        if self.leaf is not None and not self.leaf._post_accumulate_grad_hooks:
            self.leaf.register_post_accumulate_grad_hook(_WeakHook(self, Recorder.receive))

    def release(self) -> None:
        """Let go of the leaf, to which graphs that are still there may lead."""
        self.listen()
        self.leaf = self.node = None

    def whole_pass(self) -> bool:
        """Whether the pass that is running goes everywhere, as that of ``loss.backward()``: to the leaf,
        which nobody names.
        """
        if self.node is None:
            if self.leaf is None:
                return False
            self.node = torch.autograd.graph.get_gradient_edge(self.leaf).node
        try:
            return torch_api.will_execute(self.node)
        except RuntimeError:  # ps.per_sample_grads does
            return False

    def receive(self, leaf: Tensor) -> None:
        """Hook on the rows leaf: take the gradient over, without a copy, and put it on the parameter."""
        rows, leaf.grad = leaf.grad, None
        if rows is not None:
            self.store(rows)

    def store(self, rows: Tensor) -> None:
        """Put the gradient of the expansion on the parameter, by the rules of accumulation."""
        param, settings = self.holder(), self.settings
        if param is None:
            return
        pass_id, size = self.current_pass(), rows.shape[0]
        if pass_id != settings.pass_id:
            settings.begin_pass(pass_id)
        first = self.pass_id != pass_id
        if settings.stream is not None:
            self._stream(rows, pass_id, first, settings.stream)
            return
        if size != settings.rows != -1:
            raise self._of_two_sizes(settings.rows, size)
        if settings.rows == -1 and settings.accumulation == "append":
            settings.line_up(size)
        settings.rows = size
        self._remember(rows)
        if first:
            self.pass_id, self.offset = pass_id, 0 if id(param) in settings.recorded else settings.appended
            settings.recorded[id(param)] = weakref.ref(param)
            if self.slot is not None and sharding.in_use():
                torch_api.after_pass(self.deliver)
        if not first or settings.accumulation != "replace":
            rows = self._accumulated(param, rows, first)
        param.grad_sample = rows  # type: ignore[attr-defined]

    def _stream(
        self, rows: Tensor, pass_id: int, first: bool, stream: Callable[[str, Tensor], object]
    ) -> None:
        """Hand the rows on, and keep none."""
        if not first:
            raise RuntimeError(
                f"`{self.name}` got its per-sample gradient in parts (a reentrant checkpoint), which cannot"
                " be streamed: use torch.utils.checkpoint with use_reentrant=False."
            )
        self.pass_id, self.memory, self.buffer_leaf, self.written = pass_id, None, None, None
        stream(self.name, rows)

    def _remember(self, rows: Tensor) -> None:
        """Keep the memory of these rows for the next ones."""
        memory, self.written = self.memory, None
        if (
            memory is not None
            and rows.data_ptr() == memory.data_ptr()
            and rows.shape == memory.shape
            and not rows.requires_grad
        ):
            return
        self.memory = self.buffer_leaf = None
        if (
            not rows.requires_grad
            and self.leaf is not None
            and rows.shape == self.leaf.shape
            and rows.is_contiguous()
        ):
            self.memory, self.buffer_leaf = rows.detach(), self.leaf

    def _accumulated(self, param: Tensor, rows: Tensor, first: bool) -> Tensor:
        """These rows with those that are there: of earlier passes, or of this one."""
        now: Tensor | None = getattr(param, "grad_sample", None)
        appending = self.settings.accumulation == "append"
        if now is None:  # no earlier pass has reached the parameter
            before = self.offset if first and appending else 0
            return torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows]) if before else rows
        if first and appending:  # in the place of zeros
            self.offset = len(now) - len(rows)
            return torch.cat([now[: self.offset], rows])
        if len(now) - self.offset != len(rows):
            raise self._of_two_sizes(len(now) - self.offset, len(rows))
        if self.offset:
            return torch.cat([now[: self.offset], now[self.offset :] + rows])
        return now + rows

    def _of_two_sizes(self, one: int, other: int) -> RuntimeError:
        return RuntimeError(
            f"`{self.name}` was reached by {other} samples where rows of {one} are: two calls of the model,"
            " of batches of different sizes, or layers that were called outside of the model's own forward."
            " Give each batch a backward pass of its own, and have the rows appended: ps.accumulating(model,"
            " 'append'); call the model itself, not its layers, or put the calls inside `with"
            " ps.batch_size(n):`."
        )


def _nearly_equal(t: Tensor, other: Tensor) -> bool:
    """Up to the rounding of sums in another order."""
    return not t.numel() or bool((t - other).abs().max() <= 16 * torch.finfo(t.dtype).eps * t.abs().max())


def _no_recorder() -> None:
    return None


def store_single(recorders: Sequence[Recorder], grads: Sequence[Tensor | None]) -> None:
    """Gradients on their way to parameters, as the rows of one sample; what cannot be taken so early is when
    it arrives.
    """
    settings, pass_id = recorders[0].settings, torch_api.current_pass()
    early = settings.stream is None and settings.accumulation == "replace" and not sharding.in_use()
    if early and pass_id != settings.pass_id:
        settings.begin_pass(pass_id)
    early = early and settings.rows in (-1, 1)
    rows: list[Tensor] = []
    taken: list[Tensor] = []
    held_elsewhere, recorded = torch_api.held_elsewhere, settings.recorded
    for recorder, grad in zip(recorders, grads, strict=True):
        if grad is None:
            continue
        memory, param, recorder.outer_pass = recorder.memory, recorder.param(), -1
        if (
            not early
            or recorder.pass_id == pass_id  # not the only one of this pass
            or memory is None
            or param is None
            or recorder.buffer_leaf is not recorder.leaf
            or len(memory) != 1
            or held_elsewhere(memory)
        ):
            recorder.single_pass = pass_id
            continue
        recorder.pass_id, recorder.offset, recorder.written, recorder.single_grad = pass_id, 0, None, grad
        recorded[id(param)] = recorder.param
        param.grad_sample = memory.detach()  # type: ignore[attr-defined]
        rows.append(memory)
        taken.append(grad)
    if rows:
        settings.rows = 1
        torch_api.copy_each(rows, taken)


class _WeakHook:
    """A method as a hook that keeps its owner no longer alive, and that says that it need not be saved with
    its tensor.
    """

    __torch_unserializable__ = True

    def __init__(self, owner: Recorder, method: Callable[[Recorder, Tensor], None]) -> None:
        self.owner, self.method = weakref.ref(owner), method

    def __call__(self, tensor: Tensor) -> None:
        if (owner := self.owner()) is not None:
            self.method(owner, tensor)


class _Arrival(_WeakHook):
    """`Recorder.check` as a hook, but for a gradient that was taken on its way."""

    def __init__(self, owner: Recorder) -> None:
        super().__init__(owner, Recorder.check)

    def __call__(self, tensor: Tensor) -> None:
        owner = self.owner()
        if owner is None:
            return
        if tensor is owner.single_grad:
            owner.single_grad = None
        else:
            owner.check(tensor)


def recorder_of(param: Tensor, name: str, settings: Settings, module: nn.Module | None = None) -> Recorder:
    """The parameter's recorder, made when it is first asked for; `module` holds the parameter by the last
    part of `name`.
    """
    recorder: Recorder | None = param.__dict__.get("_ps_recorder")
    if recorder is None or recorder.param() is not param:
        recorder = param._ps_recorder = Recorder(param, name, settings)  # type: ignore[attr-defined]
    elif recorder.settings is not settings:
        recorder.name, recorder.settings = name, settings
    if recorder.slot is None and module is not None:
        recorder.slot = (weakref.ref(module), name.rpartition(".")[2])
    return recorder


def forget(param: Tensor) -> None:
    """Leave nothing of ours on a parameter."""
    recorder: Recorder | None = param.__dict__.pop("_ps_recorder", None)
    if recorder is not None:
        recorder.hook.remove()
        if (gathered := recorder.param()) is not None:
            gathered.__dict__.pop("_ps_recorder", None)
    param.__dict__.pop("grad_sample", None)
