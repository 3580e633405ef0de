"""pending"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import pslayers as ps

from .. import zoo
from ..oracle import loop, square, squares
from . import ranks
from .test_distributed import EACH, assert_own_rows, own, text, vectors


# ------------------------------------------------------------------------------------------------------------- FSDP2
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
    for n in (3, 2, 3):
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
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in net.parameters()]).norm(dim=0)
        for p in net.parameters():
            total = torch.einsum("n, n ... -> ...", (1 / norms).clamp(max=1), p.grad_sample)
            dist.all_reduce(total)
            p.grad = distribute_tensor(total, p.device_mesh, p.placements)
        optimizers[0].step()
        rows = loop(nets[1], square, (x,))
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
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
    """Layers that are sharded before conversion are refused by name; so is a first call that would have to be proved."""
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
    assert all("grad_sample" not in p.__dict__ and "_ps_recorder" not in p.__dict__ for p in net.parameters())
    torch.testing.assert_close(net(x), plain(x))


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    "fsdp-root": sharded(None),
    "fsdp-blocks": sharded(zoo.Block),
    "fsdp-root-converted-after": sharded(None, "after"),
    "fsdp-layers": sharded_layers,
    "fsdp-micro-batches": sharded_micro_batches,
    "fsdp-private-training": sharded_private_training,
    "fsdp-refusals": sharded_by_itself_first,
    "fsdp-restored": sharded_and_restored,
}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def problems(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.run(__name__, request.param, folder)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank(name: str, problems: dict[str, list[str]]) -> None:
    assert not problems[name], "\n".join(problems[name])
