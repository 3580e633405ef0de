"""Sequences of what users do to a live model: each step is done to the converted model and to its plain
twin.
"""

import copy
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pslayers as ps

from .draw import Draw
from .live import InvalidError, Live, WrongError, assert_near, is_random, plainly, without_checkpoints
from .models import Checkpointed

Step = Callable[[Live, Draw], Any]
STEPS: dict[str, Step] = {}


def step(act: Step) -> Step:
    STEPS[act.__name__] = act
    return act


def size(draw: Draw) -> int:
    return draw.pick(0, 1, 2, 2, 3, 3, 4, 5)


def differentiable(live: Live) -> bool:
    """Whether torch.autograd.grad is allowed: reentrant checkpoints refuse it."""
    return not any(isinstance(m, Checkpointed) and m.how == "reentrant" for m in live.plain.modules())


@step
def batch(live: Live, draw: Draw) -> None:
    live.train(size(draw))


@step
def streamed(live: Live, draw: Draw) -> None:
    if differentiable(live):
        live.stream(size(draw))


@step
def factored(live: Live, draw: Draw) -> None:
    if differentiable(live):
        live.factored(size(draw))


@step
def one_call(live: Live, draw: Draw) -> None:
    if differentiable(live):
        live.one_call(size(draw))


@step
def functional(live: Live, draw: Draw) -> None:
    if differentiable(live):
        live.functional(size(draw))


@step
def mode(live: Live, draw: Draw) -> None:
    training = draw.maybe()
    for net in live.both:
        net.train(training)


@step
def no_grad(live: Live, draw: Draw) -> None:
    before = live.rows()
    with draw.pick(torch.no_grad, torch.inference_mode)():
        live.forward(live.inputs(size(draw)))
    if any(r is not before[k] for k, r in live.rows().items()):
        raise WrongError("a forward pass without gradients has changed `grad_sample`")


@step
def unrecorded(live: Live, draw: Draw) -> None:
    before = live.rows()
    with ps.recording(live.ours, False):
        plain, ours = map(live.config.reduced, live.forward(live.inputs(size(draw))))
        live.backward(plain, ours)
    live.compare()
    if any(r is not before[k] for k, r in live.rows().items()):
        raise WrongError("a pass without recording has changed `grad_sample`")


@step
def append(live: Live, draw: Draw) -> None:
    live.ours.zero_grad()
    live.plain.zero_grad()
    found = []
    with ps.accumulating(live.ours, "append"):
        for _ in range(2):
            plain, ours, expected = live.losses(draw.randint(1, 4))
            live.backward(plain, ours)
            found.append(expected)
    both = {k: torch.cat([f[k] for f in found]) for k in found[0]}
    # rows of a parameter that one loss does not reach are not defined
    if all(f[k].any() for f in found for k in both):
        live.assert_rows(live.rows(), both)
    live.compare()


@step
def add(live: Live, draw: Draw) -> None:
    live.ours.zero_grad()
    live.plain.zero_grad()
    plain, ours, expected = live.losses(size(draw))
    with ps.accumulating(live.ours, "add"):
        live.backward(plain, ours, retain_graph=True)
        live.backward(2 * plain, 2 * ours)
    live.assert_rows(live.rows(), {k: 3 * r for k, r in expected.items()})
    live.compare()


@step
def twice(live: Live, draw: Draw) -> None:
    """The second backward pass through a graph replaces the rows."""
    plain, ours, expected = live.losses(size(draw))
    live.backward(plain, ours, retain_graph=True)
    live.backward(3 * plain, 3 * ours)
    live.assert_rows(live.rows(), {k: 3 * r for k, r in expected.items()})
    live.compare()


@step
def waiting(live: Live, draw: Draw) -> None:
    """Two forwards, whose backward passes come in either order."""
    losses = [live.losses(size(draw)) for _ in range(2)]
    for plain, ours, expected in losses[:: draw.pick(1, -1)]:
        live.backward(plain, ours)
        live.assert_rows(live.rows(), expected)
    live.compare()


class PlantedError(Exception):
    """Raised in the middle of a pass."""


def planted(*_: Any) -> None:
    raise PlantedError


@step
def broken(live: Live, draw: Draw) -> None:
    """An exception in the middle of a forward or backward pass."""
    module, backward = draw.pick(*live.ours.modules()), draw.maybe(0.3)
    handle = (
        module.register_full_backward_hook(planted) if backward else module.register_forward_hook(planted)
    )
    try:
        loss = live.config.reduced(live.ours(*live.inputs(size(draw) or 2)))
        loss.backward()
    except PlantedError:
        pass
    except RuntimeError as error:
        if "BackwardHookFunction" not in str(error):  # torch's own: hooks and in-place changes
            raise
    finally:
        handle.remove()
        for p, q in zip(live.ours.parameters(), live.plain.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()


@step
def dropped(live: Live, draw: Draw) -> None:
    live.forward(live.inputs(size(draw)))


@step
def copied(live: Live, draw: Draw) -> None:
    try:
        torch.save(live.plain, io.BytesIO())
        pickled = draw.maybe()
    except RuntimeError:  # parametrised weights
        pickled = False
    if pickled:
        file = io.BytesIO()
        torch.save(live.ours, file)
        file.seek(0)
        live.ours = torch.load(file, weights_only=False)
    else:
        live.ours = copy.deepcopy(live.ours)
    # `.grad` is neither copied nor saved
    for p, q in zip(live.ours.parameters(), live.plain.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()


@step
def dtype(live: Live, draw: Draw) -> None:
    for chosen in (torch.float32, torch.float64):
        live.dtype = chosen
        for net in live.both:
            net.to(chosen)
            net.zero_grad()
        live.train(draw.randint(1, 4))


@step
def freeze(live: Live, draw: Draw) -> None:
    names = [k for k, _ in live.plain.named_parameters()]
    name, trainable = draw.pick(*names), draw.maybe()
    if not trainable and sum(p.requires_grad for p in live.plain.parameters()) < 3:
        return
    for net in live.both:
        net.get_parameter(name).requires_grad_(trainable)
        net.zero_grad()


@step
def checkpoints(live: Live, draw: Draw) -> None:
    how = draw.pick("off", "reentrant", "not reentrant")
    for net in live.both:
        for m in net.modules():
            if isinstance(m, Checkpointed):
                m.how = how


@step
def zero_grad(live: Live, draw: Draw) -> None:
    none, optimizer = draw.maybe(), draw.maybe()
    for net in live.both:
        (torch.optim.SGD(net.parameters(), 0.1) if optimizer else net).zero_grad(set_to_none=none)
    if any(r is not None for r in live.rows().values()):
        raise WrongError("zero_grad has left a `grad_sample`")
    live.compare()


@step
def optimise(live: Live, draw: Draw) -> None:
    for net in live.both:
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    live.compare()


@step
def restored(live: Live, draw: Draw) -> None:
    ps.restore_model(live.ours)
    for ours, plain in zip(live.ours.modules(), live.plain.modules(), strict=True):
        if type(ours) is not type(plain) or set(ours.__dict__) != set(plain.__dict__):
            raise WrongError(f"restore_model left a {type(ours).__name__} for a {type(plain).__name__}")
    live.forward(live.inputs(2))
    options = live.config.options | ({"example": live.inputs(2)} if draw.maybe(0.3) else {})
    ps.convert_model(live.ours, **options)


@step
def loaded(live: Live, draw: Draw) -> None:
    state = {
        k: v + 0.1 * draw.floats(*v.shape).to(v) if v.is_floating_point() else v
        for k, v in live.plain.state_dict().items()
    }
    for net in live.both:
        net.load_state_dict(state)
    if list(live.ours.state_dict()) != list(state):
        raise WrongError("state_dict has other names")


@step
def added(live: Live, draw: Draw) -> None:
    """A new layer is put into the converted model."""
    width = 4
    new = draw.pick(
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.PReLU(),
        nn.Sequential(nn.Linear(width, width), nn.Tanh()),
    )
    for net in live.both:
        net.blocks.append(copy.deepcopy(new).to(live.dtype))


@step
def hooked(live: Live, draw: Draw) -> None:
    """A forward hook that changes an output."""
    names = [k for k, m in live.plain.named_modules() if k and not k.startswith("head")]
    if not names:
        return
    name = draw.pick(*names)
    for net in live.both:
        net.get_submodule(name).register_forward_hook(doubled)


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(output, torch.Tensor) else None


@step
def in_a_thread(live: Live, draw: Draw) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            live.train(draw.randint(1, 4))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@step
def to_chosen(live: Live, draw: Draw) -> None:
    """`backward(inputs=...)`: rows of the parameters that are named."""
    if not differentiable(live):
        return
    plain, ours, expected = live.losses(draw.randint(1, 4))
    reached = [k for k, r in expected.items() if r.any()]
    if not reached:
        raise InvalidError("no parameter is reached")
    chosen = draw.sample(reached, draw.randint(1, len(reached)))
    with plainly():
        plain.backward(inputs=[live.plain.get_parameter(k) for k in chosen])
    ours.backward(inputs=[live.ours.get_parameter(k) for k in chosen])
    live.assert_rows(live.rows(), {k: expected[k] for k in chosen})
    live.compare()


@step
def graph(live: Live, draw: Draw) -> None:
    """Rows that can be differentiated again: the gradient of their squares."""
    if not differentiable(live) or is_random(live.plain):
        return
    n, total = draw.randint(1, 3), torch.zeros(())
    inputs = live.inputs(n)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative in torch
        with plainly():
            net = without_checkpoints(live.plain)
            named = [p for p in net.parameters() if p.requires_grad]
            for i in range(n):
                loss = live.config.losses(live.seeded(net, live.config.alone(inputs, i))).sum()
                grads = torch.autograd.grad(loss, named, create_graph=True, materialize_grads=True)
                total = total + sum(g.square().sum() for g in grads)
            expected = torch.autograd.grad(total, named, materialize_grads=True)
        rows = ps.per_sample_grads(live.ours, live.config.losses, inputs, create_graph=True)
        penalty = torch.stack([r.square().sum() for r in rows.values()]).sum()
        found = torch.autograd.grad(
            penalty, [live.ours.get_parameter(k) for k in rows], materialize_grads=True
        )
    for name, a, b in zip(rows, found, expected, strict=True):
        assert_near(f"the second derivative in `{name}`", a, b)


def run(live: Live, draw: Draw, steps: Mapping[str, Step] = STEPS) -> list[str]:
    """3 to 8 random steps, and a usual one in the end; the names are in the config's notes as they are
    begun.
    """
    names = [draw.pick(*steps) for _ in range(draw.randint(3, 8))]
    done: list[str] = []
    live.config.notes.append(f"steps: {done}")
    for i, name in enumerate([*names, "batch"], 1):
        draw.begin(i)
        done.append(name)
        live.config.notes[-1] = f"steps: {', '.join(done)}"
        steps[name](live, draw)
    return done
