"""The recorder of a parameter: what flows back to its expansions becomes rows, by a sink, and what arrives at
the parameter itself is checked to be their sum.

Per-sample gradients end in a sink: those of a parameter's only use by `Sink.put`, what autograd has formed by
`Recorder.store`; those of one sample are taken on their way (`store_single` of sinks.py).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api
from . import sharding
from .context import Batch, Scale, Settings
from .expansion import Expansion, will_execute
from .sinks import DenseRows, SingleSample, Sink, has_hooks

Counts = tuple[int, int, bool, bool]  # of uses: how many, made by checkpoints, met a pass, joined


# a gradient on its way to a parameter, by identity, as who held it would have autograd copy it: where it
# lies, its version, and itself
Arriving = tuple[int, int, weakref.ref[Tensor]]


def _has_arrived(note: Arriving, grad: Tensor) -> bool:
    """Whether it is this one, unchanged."""
    return note[0] == grad.data_ptr() and note[1] == grad._version


def _append(notes: list[Arriving | Tensor], note: Arriving | Tensor) -> None:
    """One more; the first is no longer alone, where an older graph takes part: its values are held, if
    autograd has added nothing to them so far, nor them to something else.
    """
    if notes and isinstance(first := notes[0], tuple):
        grad = first[2]()
        notes[0] = grad if grad is not None and _has_arrived(first, grad) else first
    notes.append(note)


class Recorder:
    """Of one parameter, on which it lives: its rows leaf, its sinks, and what has been passed on to it.

    It holds its parameter weakly, so that a model is freed as soon as its user lets it go.
    """

    def __init__(self, param: Tensor, name: str, settings: Settings) -> None:
        self.param: Callable[[], Tensor | None] = weakref.ref(param)
        self.name, self.settings = name, settings
        self.holder, self.dense, self.single = sharding.Holder(param), DenseRows(), SingleSample()
        self.leaf: Tensor | None = None
        self.form: tuple[Any, ...] | None = None  # of the leaf
        self.node: Any = None  # of the graph, that takes what the leaf receives
        self.pass_id = -1
        self.uses, self.checked = 0, False  # expansions since the first forward after the last backward pass
        self.repeats = 0  # of these, that were made while a backward pass ran, by checkpoints
        self.made_in = -1  # the last such pass
        self.around = -1, True  # the last outermost one, and whether it goes to `.grad`
        self.joined = False  # one of these stands for an ordinary tensor, which several ops may take
        self.counted = -1  # the last pass after which they were counted anew, of those without sums
        self.notes: dict[int, list[Arriving | Tensor]] = {}  # of each pass that runs, by its number
        self.compiled = False  # the notes come from compiled code
        self.unexpanded = False  # a layer's last call did not expand this parameter
        self.blank = False  # its `.grad` is zeros in the place of None
        with torch_api.without_torch_function():  # nobody wraps it
            self.hook = param.register_hook(_Arrival(self))
        if hooks := param._backward_hooks:  # before hooks of the user's, which may change what arrives
            *others, ours = hooks.items()
            hooks.clear()
            hooks.update([ours, *others])

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles of a parameter start without one
        return _no_recorder, ()

    def expansion(self, param: Tensor, batch: Batch, scale: Scale) -> Expansion:
        """The parameter, expanded to a batch. Where its plain gradient is not wanted, none can reach it."""
        shared, sink, scale.sums = param, self.settings.sink, self.settings.sums
        scale.streams = sink is not None and sink.streams
        # in a pass that runs, a torch.autograd.Function may ask for the parameter's gradient: it gets zeros
        if not scale.sums and batch.outer_pass == -1:
            shared = param.detach()
            if self.counted != self.pass_id:  # which nothing has checked
                self.counted, self.checked = self.pass_id, True
        if self.checked:
            self.recount()
        self.uses += 1
        if batch.outer_pass != -1:
            self.repeats += 1
            self.made_in = torch_api.current_pass()
            if self.made_in == batch.outer_pass != self.around[0]:
                began = torch_api.nodes_made()
                self.around = self.made_in, self._arrives(False)
                torch_api.thread().filled = self.around[1]
                batch.uncounted += torch_api.nodes_made() - began
        return Expansion(shared, self.rows_leaf(batch.size), scale, self)

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
            self.sink.fit(self, leaf)
        return leaf

    def take_leaf(self, leaf: Tensor | None, form: Any) -> None:
        """Go back to an earlier leaf."""
        if leaf is not None and self.leaf is not leaf:
            self.release()
            self.leaf, self.form = leaf, form

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

    @property
    def counts(self) -> Counts:
        """What is known of the uses."""
        return self.uses, self.repeats, self.checked, self.joined

    def recount(self, counts: Counts = (0, 0, False, False)) -> None:
        """Begin at these: what came after them is of no backward pass that is to come."""
        self.uses, self.repeats, self.checked, self.joined = counts

    @property
    def used_once(self) -> bool:
        """Whether one use alone gives the parameter rows, not counting what checkpoints make again."""
        return self.uses - self.repeats == 1 and not self.joined

    @property
    def sink(self) -> Sink:
        """Where the rows go now."""
        return self.settings.sink or self.dense

    def note(self, grad: Tensor, compiled: bool = False) -> None:
        """Remember a gradient on its way to the parameter: by identity, or by value where several will be
        added up.

        Compiled code may use its memory again before it arrives, and add several up in any order.
        """
        pass_id = torch_api.current_pass()
        if torch_api.thread().again not in (-1, pass_id):  # it goes to the node, which passes on the sum
            return
        if (notes := self.notes.get(pass_id)) is None:
            if self.notes:  # of the pass that this one is nested in, or of one that has broken off
                outermost = torch_api.running_pass()
                self.notes = {number: noted for number, noted in self.notes.items() if number >= outermost}
            notes = self.notes[pass_id] = []
        self.compiled = compiled
        alone = self.uses <= 1 and not notes and not torch.is_grad_enabled() and not compiled
        if alone:
            notes.append((grad.data_ptr(), grad._version, weakref.ref(grad)))
        else:
            _append(notes, grad.clone() if compiled else grad)

    def came_alone(self, grad: Tensor) -> bool:
        """Whether it is the only gradient that was passed on: most are, and `check` has no more to say."""
        notes = self.notes.get(pass_id := torch_api.current_pass())
        if notes is None or len(notes) != 1 or self.single.pass_id == pass_id:
            return False
        if not isinstance(note := notes[0], tuple) or not _has_arrived(note, grad):
            return False
        del self.notes[pass_id]
        self.checked = True
        return True

    def check(self, grad: Tensor) -> None:
        """Hook on the parameter: what arrives must be what the expansions passed on, else the rows would lack
        a part.

        Where the call was that of one sample, it is the row.
        """
        self.checked, pass_id = True, torch_api.current_pass()
        notes = self.notes.pop(pass_id, [])
        noted = bool(notes)
        if self.single.pass_id == pass_id and self.single.arrived(self, grad, noted):
            return
        if not noted:
            if not (self.unexpanded and self.settings.recording_in_pass):
                if self._arrives(False):
                    self.settings.arrived(self)
                return
            whole = False
        elif not self._gets_rows():
            return
        # they are of several passes at once
        elif torch_api.is_several(grad):
            whole = True
        elif isinstance(notes[0], tuple):
            whole = len(notes) == 1 and _has_arrived(notes[0], grad)
        elif torch_api.capturing():  # values cannot be looked at: the steps before it have been checked
            whole = True
        else:  # several uses: the engine has added them up in this order
            total = notes[0].detach()
            for note in notes[1:]:
                assert isinstance(note, Tensor)
                total = total + note.detach()
            equal = _nearly_equal if self.compiled else torch.equal
            whole = (
                _same_bits(total, grad)
                or torch.equal(total, grad)
                or equal(total.nan_to_num(), grad.nan_to_num())
            )
        if not whole and grad.numel():
            raise self.of_past_layer()

    @property
    def hooked(self) -> bool:
        """Whether the parameter has hooks of the user's."""
        param = self.param()
        return param is not None and has_hooks(param)

    def is_filled(self) -> bool:
        """Whether what arrives in the pass that runs goes to `.grad`, as by torch.autograd.grad it does not,
        but by that of a torch.autograd.Function which returns it.
        """
        return self._arrives(self.returned())

    def _arrives(self, asked: bool) -> bool:
        """Whether the pass that runs goes to the parameter; `asked` where torch.autograd.grad was asked for
        it.
        """
        param = self.param()
        return param is None or will_execute(torch_api.node_of(param), asked)

    def returned(self) -> bool:
        """Whether a pass inside of another one is that of a torch.autograd.Function, which runs layers again
        and returns what it has asked for by torch.autograd.grad, to `.grad` in the end; no proof of ours.
        """
        here, (task, filled) = torch_api.thread(), self.around
        if not torch_api.in_nested_pass() or here.quiet:
            return False
        return filled if task == here.task else here.filled

    def _gets_rows(self) -> bool:
        """Whether the pass that runs gives the parameter rows, as torch.autograd.grad does not."""
        here = self.pass_id == torch_api.running_pass()
        return here or self.settings.collecting_grads or self.whole_pass()

    def pass_on(self, grad: Tensor) -> None:
        """Note of what arrives in a pass inside of another one that it goes on in that: where a
        torch.autograd.Function has asked for it, by torch.autograd.grad, to return it as the parameter's
        gradient.
        """
        pass_id = torch_api.current_pass()
        if not self._arrives(False):
            around = self.made_in if -1 < self.made_in < pass_id else torch_api.running_pass()
            _append(self.notes.setdefault(around, []), grad)

    def of_past_layer(self) -> RuntimeError:
        """What is said of a gradient that no expansion has passed on."""
        return RuntimeError(
            f"`{self.name}` received a gradient that did not come through its layer (it is also used on"
            " its own, as in F.linear(x, layer.weight) or in a penalty on the weights, or reaches only"
            " an output in which samples interact), so its per-sample rows would lack a part: in a layer"
            " of your own write self.expand(name); compute a penalty on weights in a backward pass of"
            " its own, without recording: ps.recording(model, False). Calls by torch.func (jvp, vmap) record"
            " nothing: take torch.autograd.grad(..., create_graph=True) in their place."
        )

    def listen(self) -> None:
        """Let what the leaf receives be put on the parameter: rows of several uses, or with a graph."""
        if self.leaf is not None and not self.leaf._post_accumulate_grad_hooks:
            self.leaf.register_post_accumulate_grad_hook(_Receipt(self))

    def release(self) -> None:
        """Let go of the leaf, to which graphs that are still there may lead."""
        self.listen()
        self.leaf = self.node = None

    def whole_pass(self, leaf: Tensor | None = None) -> bool:
        """Whether the pass that is running goes everywhere, as that of ``loss.backward()``: to the leaf,
        which nobody names, or to that of an earlier call.
        """
        if leaf is not None and leaf is not self.leaf:
            node = torch_api.node_of(leaf)
        elif self.leaf is None:
            return False
        else:
            if self.node is None:
                self.node = torch_api.node_of(self.leaf)
            node = self.node
        try:
            return torch_api.will_execute(node)
        except RuntimeError:  # ps.per_sample_grads does
            return False

    def store(self, rows: Tensor, entries: Tensor | None = None) -> None:
        """Hand the gradient of the expansion to the sink; all rows but `entries` of the tables are zero."""
        before = self.pass_id
        if (holder := self.enter()) is not None:
            self.sink.store(self, holder, rows, before != self.pass_id, entries)

    def enter(self, pass_id: int | None = None) -> Tensor | None:
        """Note that the pass that runs gives the parameter rows; what carries them, None where the model is
        gone.
        """
        if (holder := self.holder.tensor()) is not None:
            pass_id = torch_api.running_pass() if pass_id is None else pass_id
            if pass_id != self.settings.pass_id:
                self.settings.begin_pass(pass_id)
            self.pass_id = pass_id
        return holder

    def count(self, size: int) -> None:
        """Note how many samples a pass has: an error where others were of another number."""
        settings = self.settings
        if size != settings.rows:
            if settings.rows != -1:
                raise self.of_two_sizes(settings.rows, size)
            if settings.accumulation == "append":
                settings.line_up(size)
            settings.rows = size

    def leave_blank(self, passed_on: bool = False) -> None:
        """Note that zeros will arrive in the place of a gradient that is not wanted, in the outermost pass if
        they are `passed_on` to it.
        """
        self.blank = (param := self.param()) is not None and param.grad is None
        if self.blank:
            (torch_api.after_outer_pass if passed_on else torch_api.after_pass)(self.drop_blank)

    def drop_blank(self) -> None:
        """Have no `.grad` again where there was none, and nothing was added to the zeros since."""
        param = self.param() if self.blank else None
        if param is not None and param.grad is not None and not param.grad.any():
            param.grad = None
        self.blank = False

    def go_by(self, settings: Settings) -> None:
        """Take those of another model that holds the parameter, which is the one to clear its rows then."""
        key = id(self.holder.tensor())
        if (held := self.settings.recorded.pop(key, None)) is not None:
            settings.recorded[key] = held
        self.settings = settings

    def of_another_block(self) -> RuntimeError:
        """What is raised where a backward pass is to fill `.grad`, and its forward pass was not; or where
        nobody is there any more who takes the rows.
        """
        return RuntimeError(
            f"`{self.name}` would get no `.grad`, or no rows be handed on: its forward pass ran inside of"
            " ps.clipping, ps.reweighting, ps.factored(grad=False), ps.recording(grad=False) or ps.streaming,"
            " its backward pass runs outside: call loss.backward() inside the block."
        )

    def of_another_model(self) -> RuntimeError:
        """What is raised where a use in a call of one model would go to a block of another one."""
        return RuntimeError(
            f"`{self.name}` is a part of two converted models, and has got per-sample gradients inside of a"
            " block of one of them (ps.factored, ps.clipping, ps.reweighting, ps.streaming) that are those of"
            " a call of the other: back-propagate these outside of the block."
        )

    def of_two_sizes(self, one: int, other: int) -> RuntimeError:
        """What is raised where rows of `other` samples meet rows of `one`."""
        return RuntimeError(
            f"`{self.name}` was reached by {other} samples where rows of {one} are: two calls of the model,"
            " of batches of different sizes, or layers that were called outside of the model's own forward."
            " Give each batch a backward pass of its own, and have the rows appended: ps.accumulating(model,"
            " 'append'); call the model itself, not its layers, or put the calls inside `with"
            " ps.batch_size(n):`."
        )


def _same_bits(t: Tensor, other: Tensor) -> bool:
    """A third of what `torch.equal` takes."""
    if t.dtype is not other.dtype or not (t.is_contiguous() and other.is_contiguous()) or not t.numel():
        return False
    pair, single = t.view(-1), other.view(-1)
    if pair.numel() * pair.element_size() % 8:
        return False
    least, most = torch.aminmax(pair.view(torch.int64) ^ single.view(torch.int64))
    return not bool(least | most)


def _nearly_equal(t: Tensor, other: Tensor) -> bool:
    """Up to the rounding of sums in another order."""
    return not t.numel() or bool((t - other).abs().max() <= 16 * torch.finfo(t.dtype).eps * t.abs().max())


def _no_recorder() -> None:
    return None


class _WeakHook:
    """A hook that keeps its owner no longer alive, and says that it need not be saved with its tensor."""

    __torch_unserializable__ = True

    def __init__(self, owner: Recorder) -> None:
        self.owner = weakref.ref(owner)


class _Receipt(_WeakHook):
    """A hook on the rows leaf: the gradient is taken over, without a copy, and put on the parameter."""

    def __call__(self, leaf: Tensor) -> None:
        rows, leaf.grad = leaf.grad, None
        if rows is not None and (owner := self.owner()) is not None:
            owner.store(rows)


class _Arrival(_WeakHook):
    """`Recorder.check` as a hook, but for a gradient that was taken on its way."""

    def __call__(self, tensor: Tensor | None) -> Tensor | None:
        owner = self.owner()
        if owner is None or tensor is None:
            return None
        if owner.settings.collecting_grads:
            owner.single.before_hooks = tensor.clone() if owner.hooked else tensor
        # the pass that gives rows is no nested one
        if torch_api.current_pass() != owner.settings.pass_id and torch_api.in_nested_pass():
            owner.pass_on(tensor)
        if tensor is owner.single.taken:
            owner.single.taken, owner.single.pass_id = None, -1
            return None
        if owner.came_alone(tensor):
            return None
        # the one sample's, which is kept as its row, and not wanted as a plain gradient
        kept = not owner.settings.sums and owner.single.pass_id == torch_api.current_pass()
        owner.check(tensor)
        if not kept:
            return None
        owner.leave_blank()
        # to which a hook may write
        return torch.zeros_like(tensor) if owner.hooked else tensor.new_zeros(()).expand_as(tensor)


def recorder_of(param: Tensor, name: str, settings: Settings, module: nn.Module | None = None) -> Recorder:
    """The parameter's recorder, made when it is first asked for; `module` holds the parameter by the last
    part of `name`.
    """
    recorder: Recorder | None = param.__dict__.get("_ps_recorder")
    if recorder is None or recorder.param() is not param:
        recorder = param._ps_recorder = Recorder(param, name, settings)  # type: ignore[attr-defined]
    elif recorder.settings is not settings:
        recorder.name = name
        recorder.go_by(settings)
    if module is not None and (recorder.holder.slot is None or not recorder.holder.is_held()):
        recorder.holder.slot = (weakref.ref(module), name.rpartition(".")[2])
    return recorder


def forget(param: Tensor) -> None:
    """Leave nothing of ours on a parameter."""
    recorder: Recorder | None = param.__dict__.pop("_ps_recorder", None)
    if recorder is not None:
        recorder.hook.remove()
        if (gathered := recorder.param()) is not None:
            gathered.__dict__.pop("_ps_recorder", None)
    param.__dict__.pop("grad_sample", None)


def let_go(param: Tensor) -> None:
    """Leave no weak reference to a parameter, either: torch swaps no tensors that have some. Its rows are
    gone; the next call makes another recorder.
    """
    recorder: Recorder | None = param.__dict__.get("_ps_recorder")
    if recorder is not None:
        recorder.settings.recorded.pop(id(param), None)
    forget(param)
    if recorder is not None:
        recorder.param = recorder.holder.param = recorder.holder.home = _no_recorder
