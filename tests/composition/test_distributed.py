"""DistributedDataParallel and fully_shard: every rank's rows are those of its samples in one process."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pslayers as ps

from .. import zoo
from ..oracle import assert_factored, flat, loop, square, squares
from . import ranks

EACH = 3  # samples a rank


def text(n: int) -> Tensor:
    return torch.randint(0, 11, (n, 5), generator=torch.Generator().manual_seed(1))


def vectors(n: int) -> Tensor:
    return torch.randn(n, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def own(rank: int, sizes: list[int]) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def assert_own_rows(model: nn.Module, expected: dict[str, Tensor | None], mine: slice) -> None:
    """This rank's rows are those of its samples, and the gradient is the mean over all ranks' samples."""
    for name, p in model.named_parameters():
        rows = expected[name]
        assert rows is not None and p.grad is not None, name
        torch.testing.assert_close(p.grad_sample, rows[mine], msg=lambda m, name=name: f"{name}: {m}")
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(grad, rows.mean(0), msg=lambda m, name=name: f"{name}.grad: {m}")


# -------------------------------------------------------------------------------------------------------- DDP
def ddp(order: str = "before", **options: bool) -> Callable[[int, int], None]:
    """A tied Transformer, converted before it is wrapped, after, or together with the wrapper."""

    def scenario(rank: int, world: int) -> None:
        model, ids, mine = zoo.Transformer().double(), text(EACH * world), own(rank, [EACH] * world)
        expected = loop(model, square, (ids,))
        if order == "before":
            ps.convert_model(model)
        net = DistributedDataParallel(model, **options)
        if order != "before":
            ps.convert_model(model if order == "after" else net)
        for _ in range(3):
            net.zero_grad()
            squares(net(ids[mine])).mean().backward()
            assert_own_rows(model, expected, mine)

    return scenario


def ddp_uneven(rank: int, world: int) -> None:
    """Batches of any size, as Poisson sampling draws them: the last rank has none."""
    sizes = [1 + r for r in range(world - 1)] + [0]
    model, x, mine = zoo.mlp().double(), vectors(sum(sizes)), own(rank, sizes)
    expected = loop(model, square, (x,))
    net = DistributedDataParallel(ps.convert_model(model, loss_reduction="sum"))
    output = net(x[mine])
    (squares(output).sum() if len(output) else output.sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name][mine])
        torch.testing.assert_close(p.grad * world, expected[name].sum(0))


def ddp_micro_batches(rank: int, world: int) -> None:
    model, x, mine = zoo.mlp().double(), vectors(4 * world), own(rank, [4] * world)
    expected = loop(model, square, (x,))
    net = DistributedDataParallel(ps.convert_model(model))
    first, second = x[mine].split(2)
    with ps.accumulating(net, "append"):
        with net.no_sync():
            squares(net(first)).mean().backward()
        squares(net(second)).mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name][mine])
        torch.testing.assert_close(p.grad, 2 * expected[name].mean(0))


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = zoo.mlp(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.body, x, use_reentrant=False))


def ddp_checkpoint(rank: int, world: int) -> None:
    model, x, mine = Checkpointed().double(), vectors(EACH * world), own(rank, [EACH] * world)
    expected = loop(model, square, (x,))
    net = DistributedDataParallel(ps.convert_model(model))
    for _ in range(2):
        net.zero_grad()
        squares(net(x[mine])).mean().backward()
        assert_own_rows(model, expected, mine)


class Scaled(nn.Module):
    """Parameters that no replacement knows, one of them frozen, and a layer that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(12, 4), nn.Linear(4, 4)
        self.scale, self.shift = (
            nn.Parameter(torch.randn(4)),
            nn.Parameter(torch.randn(4), requires_grad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.scale + self.shift


def ddp_bare_parameters(rank: int, world: int) -> None:
    model, x, mine = Scaled().double(), vectors(EACH * world), own(rank, [EACH] * world)
    expected = loop(model, square, (x,))
    net = DistributedDataParallel(
        ps.convert_model(model, on_unsupported="general"), find_unused_parameters=True
    )
    for _ in range(2):
        net.zero_grad()
        squares(net(x[mine])).mean().backward()
        for name in ("first.weight", "first.bias", "scale"):
            p = model.get_parameter(name)
            torch.testing.assert_close(p.grad_sample, expected[name][mine])
            torch.testing.assert_close(p.grad, expected[name].mean(0))
        assert model.unused.weight.grad_sample is None and model.shift.grad is None


def ddp_private_training(rank: int, world: int) -> None:
    """Gradients clipped per sample and summed over all ranks train as they do in one process."""
    x = vectors(EACH * world)
    nets = [zoo.mlp().double()]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    mine = own(rank, [EACH] * world)
    ours = DistributedDataParallel(ps.convert_model(nets[0]))
    for _ in range(3):
        optimizers[0].zero_grad()
        squares(ours(x[mine])).mean().backward()
        norms = sum(p.grad_sample.flatten(1).square().sum(1) for p in ours.parameters()).sqrt()
        for p in ours.parameters():
            p.grad = torch.einsum("n, n ... -> ...", (1 / norms).clamp(max=1), p.grad_sample)
            dist.all_reduce(p.grad)
        optimizers[0].step()
        rows = loop(nets[1], square, (x,))
        norms = sum(g.flatten(1).square().sum(1) for g in rows.values()).sqrt()
        for (_, p), g in zip(nets[1].named_parameters(), rows.values(), strict=True):
            p.grad = torch.einsum("n, n ... -> ...", (1 / norms).clamp(max=1), g)
        optimizers[1].step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ------------------------------------------------------------------------------------------------------ FSDP2
def factored(rank: int, world: int) -> None:
    """Factors under the wrapper; clipping of the model itself, reduced by hand."""
    model = zoo.mlp().double()
    ours = ps.convert_model(copy.deepcopy(model))
    wrapped = DistributedDataParallel(ours)
    x = vectors(4 * world)
    mine = x[4 * rank : 4 * rank + 4]
    expected = loop(model, square, (x,))
    with ps.factored(ours) as grads:
        squares(wrapped(mine)).mean().backward()
    assert_factored(grads, {name: r[4 * rank : 4 * rank + 4] for name, r in expected.items()})
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, expected[name].mean(0))
    ours.zero_grad()
    norms = flat(expected).square().sum(1).sqrt()
    bound = norms.median().item()
    with ps.clipping(ours, bound):
        squares(ours(mine)).mean().backward()
    for name, p in ours.named_parameters():
        dist.all_reduce(p.grad)
        clipped = torch.tensordot((bound / norms).clamp(max=1), expected[name], 1) / 4
        torch.testing.assert_close(p.grad, clipped)


def clipped_rows(model: nn.Module, batches: list[Tensor], bound: float) -> dict[str, Tensor]:
    """The mean over ranks of each one's mean of clipped gradients."""
    found = []
    for batch in batches:
        rows = loop(model, square, (batch,))
        factors = (bound / flat(rows).square().sum(1).sqrt()).clamp(max=1)
        found.append({name: torch.tensordot(factors, r, 1) / max(len(r), 1) for name, r in rows.items()})
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def assert_grads(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for p, grad in zip(model.parameters(), expected.values(), strict=True):
        found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(found, grad)


def clipped(wrap: Callable[[nn.Module, int], nn.Module]) -> Callable[[int, int], None]:
    """Each rank clips its own samples; what is averaged is what has been clipped. Batches of one, too,
    beside others.
    """

    def scenario(rank: int, world: int) -> None:
        model, bound = zoo.Transformer().double(), 0.05
        net = wrap(ps.convert_model(copy.deepcopy(model), example=text(EACH)), world)
        for n, others in ((EACH, EACH), (1, 1), (EACH, 1), (1, EACH), (EACH, EACH)):
            sizes = [n] + [others] * (world - 1)
            ids = text(sum(sizes))
            batches = list(ids.split(sizes))
            net.zero_grad()
            with ps.clipping(net, bound) as clip:
                squares(net(batches[rank])).mean().backward()
            rows = flat(loop(model, square, (batches[rank],)))
            torch.testing.assert_close(clip.norms, rows.square().sum(1).sqrt())
            assert_grads(net, clipped_rows(model, batches, bound))
            net.zero_grad()
            with ps.clipping(net, bound, passes=2) as clip:
                clip.backward(squares(net(batches[rank])).mean())
            assert_grads(net, clipped_rows(model, batches, bound))
            net.zero_grad()  # outside of the block all is as before
            squares(net(batches[rank])).mean().backward()
            assert_grads(net, clipped_rows(model, batches, torch.inf))
            bare = getattr(net, "module", net)
            if n == others:  # else a mean over ranks is none over samples
                assert_own_rows(bare, loop(model, square, (ids,)), own(rank, sizes))
        net.zero_grad()
        with ps.factored(net) as grads:
            squares(net(batches[rank])).mean().backward()
            assert all(p.grad_sample.name in name for name, p in net.named_parameters())
        assert all(p.grad_sample is None for p in net.parameters())
        assert_factored(grads, loop(model, square, (batches[rank],)))
        assert_grads(net, {name: rows.mean(0) for name, rows in loop(model, square, (ids,)).items()})
        net.zero_grad()
        with ps.factored(net, grad=False):
            squares(net(batches[rank])).mean().backward()
        assert all(p.grad is None for p in net.parameters())

    return scenario


def ragged(wrap: Callable[[nn.Module, int], nn.Module]) -> Callable[[int, int], None]:
    """Each rank has three samples, of rows of its own number."""

    def scenario(rank: int, world: int) -> None:
        model, sizes = zoo.mlp().double(), [4 + 2 * r for r in range(world)]
        x, mine, ids = vectors(sum(sizes)), own(rank, sizes), torch.arange(sizes[rank]) * 2 % 3
        each = loop(model, square, (x,))
        ours = copy.deepcopy(model)
        with ps.sample_ids(ids, 3):
            ps.convert_model(ours, loss_reduction="sum", example=x[mine])
        net = wrap(ours, world)
        rows = {name: g.new_zeros(3, *g.shape[1:]).index_add(0, ids, g[mine]) for name, g in each.items()}
        for _ in range(2):
            net.zero_grad()
            with ps.sample_ids(ids, 3, verify=False):
                out = net(x[mine])
            squares(out).sum().backward()
            for name, p in ours.named_parameters():
                torch.testing.assert_close(p.grad_sample, rows[name])
            assert_grads(ours, {name: g.sum(0) / world for name, g in each.items()})
            net.zero_grad()
            with ps.sample_ids(ids, 3, verify=False), ps.clipping(net, 0.5) as clip:
                squares(net(x[mine])).sum().backward()
            torch.testing.assert_close(clip.norms, flat(rows).norm(dim=1))
        net.zero_grad()
        ids = ids if rank else ids[:0]  # as Poisson sampling may draw it
        with ps.sample_ids(ids, 3 if rank else 0, verify=False):
            out = net(x[mine][: len(ids)])
        (squares(out).sum() if len(out) else out.sum()).backward()
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, rows[name] if rank else rows[name][:0])
        ids = torch.arange(sizes[rank]) * 2 % 3
        if net is ours:
            with pytest.raises(ValueError, match="an example before it is sharded"), ps.sample_ids(ids, 3):
                net(x[mine])
            return
        net.zero_grad()
        with ps.sample_ids(ids, 3):
            squares(net(x[mine])).sum().backward()
        assert_grads(ours, {name: g.sum(0) / world for name, g in each.items()})
        rows_alone, told = ps.recording(net, grad=False), ps.sample_ids(ids, 3)
        with pytest.raises(RuntimeError, match=r"inside of its no_sync\(\)"), rows_alone, told:
            net(x[mine])

    return scenario


def replicated(model: nn.Module, world: int) -> nn.Module:
    return DistributedDataParallel(model)


def sharded_by_blocks(model: nn.Module, world: int) -> nn.Module:
    return shard(model, world, zoo.Block)


def sharded_by_layers(model: nn.Module, world: int) -> nn.Module:
    return shard(model, world, nn.Linear)


def clipped_micro_batches(rank: int, world: int) -> None:
    """DDP: those under no_sync wait for one that is not; ranks on which nothing reaches a parameter, too."""
    model = zoo.mlp().double()
    net = DistributedDataParallel(ps.convert_model(copy.deepcopy(model)))
    first, second = vectors(4 * world).chunk(2)
    halves = [list(half.chunk(world)) for half in (first, second)]
    expected = [clipped_rows(model, half, 0.5) for half in halves]
    for _ in range(2):
        with ps.clipping(net, 0.5):
            with net.no_sync():
                squares(net(halves[0][rank])).mean().backward()
            squares(net(halves[1][rank])).mean().backward()
    assert_grads(net, {name: 2 * (g + expected[1][name]) for name, g in expected[0].items()})
    net.zero_grad()
    with ps.clipping(net, 0.5):
        losses = [squares(net(halves[0][rank])).mean(), squares(net(halves[1][rank])).mean()]
        for loss in losses:  # two graphs, two passes
            loss.backward()
    assert_grads(net, {name: g + expected[1][name] for name, g in expected[0].items()})
    net.zero_grad()
    squares(net(halves[0][rank])).mean().backward()  # it averages by itself again
    assert_grads(net, {name: r.mean(0) for name, r in loop(model, square, (first,)).items()})


class Branches(nn.Module):
    """One of two layers is called, and a third is not."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.left(x) if left else self.right(x)


def clipped_in_checkpoints(rank: int, world: int) -> None:
    """What is sharded by itself, and computed again in the backward pass."""
    model = nn.Sequential(nn.Linear(6, 12), Checkpointed(), nn.Linear(2, 3)).double()
    x = vectors(EACH * world)[:, :6]
    plain, batches = copy.deepcopy(model), list(x.chunk(world))
    net = shard(ps.convert_model(model, example=x[:EACH]), world, Checkpointed)
    expected = clipped_rows(plain, batches, 0.5)
    for _ in range(2):
        net.zero_grad()
        with ps.clipping(net, 0.5, passes="auto") as clip:
            clip.backward(squares(net(batches[rank])).mean())
        assert_grads(net, expected)
    with (
        pytest.raises(RuntimeError, match="FSDP2 takes no second pass"),
        ps.clipping(net, 0.5, passes=2) as clip,
    ):
        clip.backward(squares(net(batches[rank])).mean())


def clipped_branches(wrap: Callable[[nn.Module, int], nn.Module]) -> Callable[[int, int], None]:
    """A parameter that a gradient reaches on one rank alone, and one that none reaches."""

    def scenario(rank: int, world: int) -> None:
        model = Branches().double()
        net = wrap(ps.convert_model(copy.deepcopy(model)), world)
        batches = list(vectors(2 * world).chunk(world))
        with ps.clipping(net, 0.5):
            squares(net(batches[rank], rank == 0)).mean().backward()
        of_first = clipped_rows(nn.Sequential(model.left), [batches[0]], 0.5)
        of_others = clipped_rows(nn.Sequential(model.right), batches[1:], 0.5)
        expected = {
            "left.weight": of_first["0.weight"] / world,
            "left.bias": of_first["0.bias"] / world,
            "right.weight": of_others["0.weight"] * (world - 1) / world,
            "right.bias": of_others["0.bias"] * (world - 1) / world,
        }
        for name, p in net.named_parameters():
            name = name.removeprefix("module.")
            if name.startswith("never"):
                assert p.grad is None
            else:
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(grad, expected[name])

    return scenario


def refused_in_ddp(rank: int, world: int) -> None:
    """What would be averaged before it is weighed."""
    ours, x = ps.convert_model(zoo.mlp().double()), vectors(4)
    wrapped = DistributedDataParallel(ours)
    for batch in x, x[:1]:
        loss = squares(wrapped(batch)).mean()
        with pytest.raises(RuntimeError, match="outside of the block"), ps.clipping(ours, 1.0):
            loss.backward()
        wrapped = DistributedDataParallel(ours)
    static = DistributedDataParallel(ours, static_graph=True)
    with pytest.raises(RuntimeError, match="static_graph"), ps.clipping(static, 1.0):
        static(x)
    hooked = DistributedDataParallel(ours)
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match="comm_hook"), ps.clipping(hooked, 1.0):
        hooked(x)
    both = DistributedDataParallel(nn.Sequential(ours, nn.Linear(4, 2).double()))
    with pytest.raises(RuntimeError, match="whole model"), ps.clipping(ours, 1.0):
        both(x)


def rows_alone(rank: int, world: int) -> None:
    """Without plain gradients: under no_sync, by the model itself, and sharded; an error where DDP waits."""
    model, x = zoo.mlp().double(), vectors(EACH * world)
    mine = x[own(rank, [EACH] * world)]
    ours = ps.convert_model(copy.deepcopy(model), example=mine)
    net = DistributedDataParallel(ours)
    with ps.recording(net, grad=False):
        for n in (EACH, 1):
            with pytest.raises(RuntimeError, match=r"inside of its no_sync\(\)"):
                squares(net(mine[:n])).mean().backward()
            with net.no_sync():
                squares(net(mine[:n])).mean().backward()
            assert_rows_alone(ours, loop(model, square, (mine[:n],)))
            squares(ours(mine[:n])).mean().backward()
            assert_rows_alone(ours, loop(model, square, (mine[:n],)))
    squares(net(mine)).mean().backward()
    assert_own_rows(ours, loop(model, square, (x,)), own(rank, [EACH] * world))
    sharded = shard(ps.convert_model(copy.deepcopy(model), example=mine), world, nn.Linear)
    with ps.recording(sharded, grad=False):
        for n in (EACH, 1):
            squares(sharded(mine[:n])).mean().backward()
            assert_rows_alone(sharded, loop(model, square, (mine[:n],)))


def assert_rows_alone(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name], msg=lambda m, name=name: f"{name}: {m}")
        assert p.grad is None, name


def shard(model: nn.Module, world: int, parts: type[nn.Module] | None) -> nn.Module:
    """Each module of a class sharded by itself, then the rest with the root."""
    mesh = init_device_mesh("cpu", (world,))
    for module in list(model.modules()):
        if parts is not None and isinstance(module, parts) and module is not model:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded(parts: type[nn.Module] | None, order: str = "before") -> Callable[[int, int], None]:
    def scenario(rank: int, world: int) -> None:
        model, ids, mine = zoo.Transformer().double(), text(EACH * world), own(rank, [EACH] * world)
        expected = loop(model, square, (ids,))
        if order == "before":
            ps.convert_model(model, example=ids[mine])
        net = shard(model, world, parts)
        if order == "after":
            ps.convert_model(net)
        squares(net(ids[mine][:1])).mean().backward()  # a batch of one is a way of its own
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name][mine][:1])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            assert all(getattr(p, "grad_sample", None) is None for p in net.parameters())
            squares(net(ids[mine])).mean().backward()
            assert_own_rows(net, expected, mine)

    return scenario


def sharded_layers(rank: int, world: int) -> None:
    """Every layer a shard of its own; batches of a size that changes."""
    model = zoo.TutorialCNN(2).double()
    x = torch.randn(6 * world, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(model)
    net = shard(ps.convert_model(model, example=x[:3]), world, (nn.Conv2d, nn.Linear))
    for n in (3, 2, 1, 3):
        mine = own(rank, [n] * world)
        net.zero_grad()
        squares(net(x[mine])).mean().backward()
        assert_own_rows(net, loop(plain, square, (x[: n * world],)), mine)


def sharded_private_training(rank: int, world: int) -> None:
    x, mine = vectors(EACH * world), own(rank, [EACH] * world)
    nets = [zoo.mlp().double()]
    nets.append(copy.deepcopy(nets[0]))
    net = shard(ps.convert_model(nets[0]), world, None)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (net, nets[1])]
    for _ in range(3):
        optimizers[0].zero_grad()
        squares(net(x[mine])).mean().backward()
        norms = sum(p.grad_sample.flatten(1).square().sum(1) for p in net.parameters()).sqrt()
        for p in net.parameters():
            total = torch.einsum("n, n ... -> ...", (1 / norms).clamp(max=1), p.grad_sample)
            dist.all_reduce(total)
            p.grad = distribute_tensor(total, p.device_mesh, p.placements)
        optimizers[0].step()
        rows = loop(nets[1], square, (x,))
        norms = sum(g.flatten(1).square().sum(1) for g in rows.values()).sqrt()
        for (_, p), g in zip(nets[1].named_parameters(), rows.values(), strict=True):
            p.grad = torch.einsum("n, n ... -> ...", (1 / norms).clamp(max=1), g)
        optimizers[1].step()
    for p, q in zip(net.parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


def sharded_micro_batches(rank: int, world: int) -> None:
    model, x, mine = zoo.mlp().double(), vectors(4 * world), own(rank, [4] * world)
    expected = loop(model, square, (x,))
    net = shard(ps.convert_model(model, example=x[:2]), world, nn.Linear)
    with ps.accumulating(net, "append"):
        for part in x[mine].split(2):
            squares(net(part)).mean().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name][mine])


def sharded_by_itself_first(rank: int, world: int) -> None:
    """Layers that are sharded before conversion are refused by name; so is a first call that would have to be
    proved.
    """
    net = shard(zoo.mlp().double(), world, nn.Linear)
    with pytest.raises(ps.ConversionError, match=r"`1` \(FSDPLinear\) is sharded already"):
        ps.convert_model(net)
    net = shard(ps.convert_model(zoo.mlp().double()), world, nn.Linear)
    with pytest.raises(ValueError, match=r"convert_model\(model, example=x\)"):
        net(vectors(EACH))
    with pytest.raises(ValueError, match="parameters are sharded"):
        ps.per_sample_grads(net, squares, vectors(EACH))


def sharded_and_restored(rank: int, world: int) -> None:
    x, plain = vectors(EACH), zoo.mlp().double()
    net = shard(ps.convert_model(copy.deepcopy(plain), example=x), world, nn.Linear)
    squares(net(x)).mean().backward()
    ps.restore_model(net)
    assert not any(isinstance(m, ps.PSLayer) for m in net.modules())
    untouched = shard(copy.deepcopy(plain), world, nn.Linear)
    for p, q in zip(net.parameters(), untouched.parameters(), strict=True):
        assert p.__dict__.keys() == q.__dict__.keys()
    torch.testing.assert_close(net(x), plain(x))


def compiled(how: str) -> Callable[[int, int], None]:
    """torch.compile inside of a wrapper, around it, or around what is sharded."""

    def scenario(rank: int, world: int) -> None:
        model, x, mine = zoo.mlp().double(), vectors(EACH * world), own(rank, [EACH] * world)
        expected, plain = loop(model, square, (x,)), copy.deepcopy(model)
        ps.convert_model(model, example=x)
        net: Any
        if how == "inside":
            net = DistributedDataParallel(torch.compile(model, fullgraph=True, backend="aot_eager"))
        elif how == "around":
            net = torch.compile(DistributedDataParallel(model), backend="aot_eager")
        else:
            net = torch.compile(shard(model, world, None), backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile's own
            for _ in range(3):
                model.zero_grad()
                squares(net(x[mine])).mean().backward()
                assert_own_rows(model, expected, mine)
            if how == "sharded":
                model.zero_grad()
                with ps.clipping(net, 0.5):
                    squares(net(x[mine])).mean().backward()
                assert_grads(model, clipped_rows(plain, list(x.chunk(world)), 0.5))

    return scenario


def refused_compiled(rank: int, world: int) -> None:
    """Compiled code inside of DDP, which nobody could keep from averaging: also what was compiled before."""
    ours, x = ps.convert_model(zoo.mlp().double()), vectors(4)
    squares(ours(x)).mean().backward()
    # an older compiler does not look again whether DDP runs
    for how in range(2 if torch.__version__ >= (2, 13) else 1):
        torch._dynamo.reset()
        run = torch.compile(ours, backend="aot_eager", fullgraph=True)
        if how:
            with ps.clipping(ours, 1.0):
                squares(run(x)).mean().backward()
        wrapped = DistributedDataParallel(run)
        with pytest.raises(Exception, match="all_reduce every"), ps.clipping(ours, 1.0):
            wrapped(x)


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    "ddp-converted-before": ddp("before"),
    "ddp-converted-after": ddp("after"),
    "ddp-converted-with-its-wrapper": ddp("wrapper"),
    "ddp-gradients-in-buckets": ddp(gradient_as_bucket_view=True),
    "ddp-static-graph": ddp(static_graph=True),
    "ddp-uneven-and-empty-batches": ddp_uneven,
    "ddp-micro-batches": ddp_micro_batches,
    "ddp-checkpoint": ddp_checkpoint,
    "ddp-bare-parameters": ddp_bare_parameters,
    "ddp-private-training": ddp_private_training,
    "ddp-factored": factored,
    "ddp-clipped": clipped(replicated),
    "ddp-clipped-micro-batches": clipped_micro_batches,
    "ddp-clipped-branches": clipped_branches(replicated),
    "ddp-ragged": ragged(replicated),
    "ddp-refused": refused_in_ddp,
    "rows-alone": rows_alone,
    "ddp-refused-compiled": refused_compiled,
    "fsdp-clipped": clipped(sharded_by_blocks),
    "fsdp-clipped-branches": clipped_branches(sharded_by_blocks),
    "fsdp-clipped-checkpoints": clipped_in_checkpoints,
    "fsdp-ragged": ragged(sharded_by_layers),
    "fsdp-root": sharded(None),
    "fsdp-blocks": sharded(zoo.Block),
    "fsdp-root-converted-after": sharded(None, "after"),
    "fsdp-layers": sharded_layers,
    "fsdp-micro-batches": sharded_micro_batches,
    "fsdp-private-training": sharded_private_training,
    "fsdp-refusals": sharded_by_itself_first,
    "fsdp-restored": sharded_and_restored,
    "ddp-compiled-inside": compiled("inside"),
    "ddp-compiled-around": compiled("around"),
    "fsdp-compiled-around": compiled("sharded"),
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def problems(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.run(__name__, request.param, folder)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank(name: str, problems: dict[str, list[str]]) -> None:
    assert not problems[name], "\n".join(problems[name])
