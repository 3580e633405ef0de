"""The empirical neural tangent kernel of 64 samples with 10 outputs each, against torch.func.

    python -m benchmarks.ntk --threads 1

The peers are the form of torch's tutorial "Neural Tangent Kernels" that contracts the Jacobians of
`vmap(jacrev)`, and the same with `chunk_size=1` (one output at a time). Ours run on a converted copy. Time:
the ways take turns, and the median counts; memory: each in a process of its own (`memory.py`). Each line is
printed as soon as it is known, as Markdown.
"""

import argparse
import copy
import functools
import time
from collections.abc import Callable
from multiprocessing import get_context
from statistics import median

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import pslayers as ps

from . import memory, networks
from .timing import quiet_collector

CPU = torch.device("cpu")
Way = Callable[[nn.Module, Tensor, str], Tensor]


def contraction(jacobians: list[Tensor], kernel: str) -> Tensor:
    """The sum over parameters of the products of Jacobians (B, C, *S)."""
    form = {"full": "bcp,idp->bcid", "trace": "bcp,icp->bi"}[kernel]
    each = [torch.einsum(form, j.flatten(2), j.flatten(2)) for j in jacobians]
    return sum(each[1:], start=each[0])


@functools.cache
def converted(model: nn.Module) -> nn.Module:
    """A converted copy, which learns and proves once."""
    return ps.convert_model(copy.deepcopy(model))


def ours(model: nn.Module, x: Tensor, kernel: str) -> Tensor:
    """From factors."""
    return ps.jacobian_gram(converted(model), x, kernel=kernel)


def ours_dense(model: nn.Module, x: Tensor, kernel: str) -> Tensor:
    """From Jacobians."""
    return contraction(list(ps.per_sample_jacobians(converted(model), x).values()), kernel)


def torch_func(model: nn.Module, x: Tensor, kernel: str, chunk_size: int | None = None) -> Tensor:
    """Jacobians by torch.func, and their contraction."""

    def one(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(model, params, (x.unsqueeze(0),))
        return out.squeeze(0)

    params = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = vmap(jacrev(one, chunk_size=chunk_size), (None, 0))(params, x)
    return contraction(list(jacobians.values()), kernel)


WAYS: dict[str, Way] = {
    "jacobian_gram": ours,
    "per_sample_jacobians, contracted": ours_dense,
    "torch.func, contracted": torch_func,
    "torch.func, by chunks of outputs": functools.partial(torch_func, chunk_size=1),
}


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: networks.mlp(512), (784,)),
    "cnn": (networks.mnist_cnn, (1, 28, 28)),
    "resnet": (lambda: small_resnet(), (3, 16, 16)),
}


def small_resnet() -> nn.Sequential:
    """Four blocks of widths 32 and 64, with GroupNorm, for images of 16x16."""
    widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(32, 32), nn.ReLU())
    blocks = [networks.BasicBlock(*width) for width in widths]
    return nn.Sequential(stem, *blocks, networks.MeanOver(2, 3), nn.Linear(64, 10))


def model_and_batch(name: str) -> tuple[nn.Module, Tensor]:
    """A model and 64 samples for it."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build(), torch.randn(64, *shape)


def times(name: str, kernel: str, rounds: int) -> dict[str, float]:
    """{way: median seconds}, after all have given the same kernel."""
    model, x = model_and_batch(name)
    found = {way: run(model, x, kernel) for way, run in WAYS.items()}
    expected = found["torch.func, contracted"]
    for way, result in found.items():  # rounding may put a ReLU's input on its other side
        if not (result - expected).norm() <= 1e-3 * expected.norm():
            raise ValueError(f"{way} gives another kernel of {name}.")
    del found, expected, result
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with quiet_collector():
        for _ in range(rounds):
            for way, run in WAYS.items():
                start = time.perf_counter()
                run(model, x, kernel)
                seconds[way].append(time.perf_counter() - start)
    return {way: median(each) for way, each in seconds.items()}


def peak(way: str, name: str, kernel: str, threads: int) -> int:
    """Bytes above model and batch, in this process, which is new."""
    torch.set_num_threads(threads)
    model, x = model_and_batch(name)
    WAYS[way](model, x[:2], kernel)  # what is loaded at the first call is no matter of the kernel's
    memory.hand_back()
    before = memory.in_use(CPU)
    memory.reset_peak(CPU)
    WAYS[way](model, x, kernel)
    return memory.peak(CPU) - before


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kernels", nargs="+", choices=["full", "trace"], default=["full", "trace"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| model | kernel | way | seconds | peak MB |\n|---|---|---|---|---|")
    for name in args.models:
        for kernel in args.kernels:
            for way, seconds in times(name, kernel, args.rounds).items():
                with get_context("spawn").Pool(1) as pool:
                    taken = pool.apply(peak, (way, name, kernel, args.threads))
                print(f"| {name} | {kernel} | {way} | {seconds:.3f} | {taken / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
