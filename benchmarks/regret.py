"""How well ways are chosen: the time of the chosen one over that of the best, for shapes of public models.

    python -m benchmarks.regret --threads 2 --out regret.json

The shapes of ResNet, VGG, MobileNet, EfficientNet, DenseNet, ConvNeXt, Inception, U-Net, audio and video
networks, BERT, GPT-2, ViT and Swin stand below as their papers give them; others are drawn at random. Each is
measured with a fresh `ps.tuning`, as in first backward passes, and at length, all ways in turn; the medians
of that count. Beside it, what the rule without measuring takes.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pslayers.core import products
from pslayers.core.tuning import AGAIN, tuning
from pslayers.functional import conv_weight_grads
from pslayers.functional.conv_weight_grads import Geometry

from . import environment, machines, tables
from .timing import quiet_collector

BATCH_SIZES = (16, 64)
DRAWN = 200
MOST = 3e8  # values of rows and patches, more of which a shape does not get
MULTIPLICATIONS = 1e6, 1.5e10  # of a batch of a shape that is drawn: at least, at most
ROUNDS = 9
FAR = 3.0  # times as slow as the best: measured no more


class Conv(NamedTuple):
    """A convolution: channels in and out, kernel, stride, groups, the sides of its input."""

    model: str
    c: int
    o: int
    kernel: tuple[int, ...]
    stride: int
    groups: int
    space: tuple[int, ...]

    @property
    def name(self) -> str:
        """As in torch's own names."""
        sides = ["x".join(map(str, s)) for s in (self.kernel, self.space)]
        groups = f", groups {self.groups}" if self.groups > 1 else ""
        return f"{self.model}: {self.c}->{self.o}, {sides[0]}/{self.stride}{groups}, {sides[1]}"


def _square(model: str, *shapes: tuple[int, ...]) -> Iterator[Conv]:
    """Of (channels in, out, kernel, stride, groups, side)."""
    for c, o, k, stride, groups, side in shapes:
        yield Conv(model, c, o, (k, k), stride, groups, (side, side))


def convolutions() -> list[Conv]:
    """All shapes, each once."""
    found: list[Conv] = []
    for side, name in ((8, "ResNet-18, 32x32"), (56, "ResNet-18")):
        for i, width in enumerate((64, 128, 256, 512)):
            now, before = max(side >> i, 1), max(width // 2, 64)
            found += _square(
                name, (width, width, 3, 1, 1, now), (before, width, 3, 1 + (i > 0), 1, now << (i > 0))
            )
            found += _square(name, (before, width, 1, 1 + (i > 0), 1, now << (i > 0)))
    for i, width in enumerate((64, 128, 256, 512)):
        side = 56 >> i
        found += _square("ResNet-50", (width * 4, width, 1, 1, 1, side), (width, width * 4, 1, 1, 1, side))
        found += _square("ResNeXt-50", (width * 2, width * 2, 3, 1, 32, side))
    found += _square("ResNet stem", (3, 64, 7, 2, 1, 224), (3, 64, 3, 1, 1, 32))
    for i, (c, o) in enumerate(((64, 128), (128, 256), (256, 512), (512, 512))):
        found += _square("VGG", (c, o, 3, 1, 1, 112 >> i), (c, o, 3, 1, 1, 16 >> i))
    for c, side, k in (
        (32, 112, 3),
        (96, 56, 3),
        (144, 28, 5),
        (240, 28, 3),
        (480, 14, 5),
        (672, 14, 5),
        (1152, 7, 3),
    ):
        found += _square("EfficientNet, MobileNet", (c, c, k, 1, c, side), (c, c, k, 2, c, side))
        found += _square(
            "EfficientNet, MobileNet", (c, c // 4, 1, 1, 1, side), (c // 6 or 1, c, 1, 1, 1, side)
        )
    for c, side in ((96, 56), (192, 28), (384, 14), (768, 7)):
        found += _square("ConvNeXt", (c, c, 7, 1, c, side), (c, 2 * c, 2, 2, 1, side))
    found += _square(
        "ConvNeXt stem", (3, 96, 4, 4, 1, 224), (3, 768, 16, 16, 1, 224), (3, 192, 16, 16, 1, 224)
    )
    for c, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
        found += _square("DenseNet", (c, 128, 1, 1, 1, side), (128, 32, 3, 1, 1, side))
    for c, side in ((64, 35), (192, 17), (448, 8)):
        found += (
            Conv("Inception", c, c, (1, 7), 1, 1, (side, side)),
            Conv("Inception", c, c, (3, 1), 1, 1, (side, side)),
        )
        found += _square("Inception", (c, 96, 5, 1, 1, side))
    for c, side in ((16, 128), (32, 64), (64, 32), (128, 16), (256, 8)):
        found += _square("U-Net", (c, c, 3, 1, 1, side), (3 * c, c, 3, 1, 1, side))
    for c, o, k, stride, length in (
        (1, 64, 10, 5, 8000),
        (64, 64, 3, 2, 1600),
        (128, 128, 3, 1, 400),
        (512, 512, 3, 2, 200),
        (32, 32, 9, 1, 1000),
        (16, 16, 3, 1, 4000),
    ):
        found.append(Conv("audio", c, o, (k,), stride, 1, (length,)))
    found += (Conv("audio, depthwise", c, c, (31,), 1, c, (200,)) for c in (144, 256, 512))
    for c, o, side in ((3, 16, 32), (16, 32, 16), (64, 64, 8), (64, 64, 14)):
        found.append(Conv("video", c, o, (3, 3, 3), 1, 1, (8, side, side)))
    for c, o, k, side in (
        (1, 10, 5, 28),
        (10, 20, 5, 12),
        (1, 32, 3, 28),
        (32, 64, 3, 26),
        (1, 16, 8, 28),
        (16, 32, 4, 13),
    ):
        found += _square("digits", (c, o, k, 1, 1, side))
    return list(dict.fromkeys(found))


def drawn(count: int, seed: int = 0) -> Iterator[tuple[Conv, int]]:
    """Convolutions and batch sizes at random."""
    draw, (least, most) = random.Random(seed), MULTIPLICATIONS
    while count:
        n = draw.choice((1, 1, 2, 2, 2))
        c = draw.choice((1, 3, 4, 8, 12, 16, 20, 32, 40, 64, 96, 128, 256))
        o = draw.choice((4, 6, 8, 16, 20, 32, 48, 64, 100, 128, 256))
        kernel = draw.choice((1, 2, 3, 3, 3, 3, 4, 5, 7) if n == 2 else (1, 3, 3, 5, 7, 9, 15, 25))
        side = draw.choice(
            (7, 8, 10, 14, 16, 20, 28, 32, 48, 64) if n == 2 else (32, 64, 100, 256, 500, 2048)
        )
        stride, groups = draw.choice((1, 1, 1, 2)), draw.choice((1, 1, 1, 1, 1, 1, 4, c))
        o, size = c if groups == c > 1 else o, draw.choice((8, 16, 16, 32, 32, 64, 64, 128))
        work = size * o * (c // groups) * kernel**n * (side // stride) ** n
        if not (c % groups or o % groups) and least <= work <= most:
            count -= 1
            yield Conv("drawn", c, o, (kernel,) * n, stride, groups, (side,) * n), size


Product = tuple[str, int, int, int]  # model, positions, width in, width out


def linear_maps() -> list[Product]:
    """Linear layers of transformers, by positions a sample; and those of recurrent networks."""
    found: list[Product] = []
    for name, d, lengths in (
        ("BERT-tiny", 128, (64, 128)),
        ("GPT-like", 256, (64, 100, 256)),
        ("ViT-tiny", 192, (197,)),
        ("Swin", 96, (3136, 784)),
        ("BERT-small", 512, (128,)),
        ("BERT", 768, (128,)),
    ):
        found += [(name, t, *wide) for t in lengths for wide in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))]
    found += [("LSTM", 128, i, 4 * h) for i, h in ((64, 100), (100, 100), (256, 256), (512, 512))]
    found += [("head", 1, i, o) for i, o in ((512, 10), (2048, 1000), (5120, 2560), (784, 512))]
    return found


Ways = dict[str, Callable[[], object]]


def conv_ways(conv: Conv, size: int) -> tuple[Ways, Callable[[], str]] | None:
    """All methods for the rows of a batch, and what is chosen of them; None where it is too large."""
    padding = tuple(0 if s == conv.stride != 1 else s // 2 for s in conv.kernel)
    n = len(conv.kernel)
    lengths = tuple(
        (s + 2 * p - k) // conv.stride + 1 for s, p, k in zip(conv.space, padding, conv.kernel, strict=True)
    )
    weight = torch.Size((size, conv.o, conv.c // conv.groups, *conv.kernel))
    if min(lengths) < 1 or weight.numel() + size * conv.c * math.prod((*conv.kernel, *lengths)) > MOST:
        return None
    geometry = Geometry((conv.stride,) * n, padding, (1,) * n, conv.groups)
    x, gy, out = (
        torch.randn(size, conv.c, *conv.space),
        torch.randn(size, conv.o, *lengths),
        torch.empty(weight),
    )
    rule = conv_weight_grads._promising(x.shape, gy.shape, weight, geometry, products.has_onednn(out))
    others = [
        m for m in conv_weight_grads.ROWS if m not in rule and (m != "product" or products.has_onednn(out))
    ]

    def way(name: str) -> Callable[[], object]:
        return lambda: conv_weight_grads.ROWS[name](x, gy, float(size), out, geometry)

    return {m: way(m) for m in (*rule, *others)}, lambda: conv_weight_grads.fastest(x, gy, out, geometry)


def products_of(shape: Product, size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The products of a linear map: of the forward pass, of the weight's gradient, and of its rows."""
    name, t, i, o = shape
    x, gy, weight = torch.randn(size, t, i), torch.randn(size, t, o), torch.randn(o, i)
    if size * o * i > MOST or size * t * max(o, i) > MOST:
        return
    flat = x.flatten(0, 1), gy.flatten(0, 1)
    label = f"{name}: {t} x {i} -> {o}"
    kinds: list[tuple[str, Callable[[], object]]] = [
        ("forward", lambda: products.affine(x, weight)),
        ("gradient", lambda: products.outer(flat[1], flat[0])),
    ]
    if t > 1:
        out = torch.empty(size, o, i)
        kinds.append(("rows", lambda: products.outer_each(gy, x, float(size), out)))
    for kind, run in kinds:
        yield f"{label}, {kind}", run


def measured(ways: Ways) -> dict[str, float]:
    """The median time of each way, all in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(ROUNDS + 1):
        least = min((min(each) for each in times.values() if each), default=math.inf)
        for name, way in ways.items():
            if times[name] and min(times[name]) > FAR * least:
                continue  # a way that has lost
            start = time.perf_counter()
            way()
            if run:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


class Fixed:
    """In the place of what is measured: one way for all."""

    def __init__(self, way: str) -> None:
        self.way = way

    def fastest(self, key: object, ways: Iterable[str], rule: str) -> str:
        """The one, where there is such a way."""
        return self.way if self.way in ways else rule


def _by(library: str, run: Callable[[], object]) -> Callable[[], object]:
    """A product, by one library."""
    fixed = Fixed(library)

    def forced() -> object:
        before, products.tuning = products.tuning, fixed  # type: ignore[assignment]
        try:
            return run()
        finally:
            products.tuning = before

    return forced


def _conv_cell(kind: str, conv: Conv, size: int) -> Iterator[dict[str, Any]]:
    if (found := conv_ways(conv, size)) is not None:
        ways, choose = found
        chosen = _settled(choose)
        yield _cell(kind, conv.name, size, measured(ways), chosen, next(iter(ways)))


def cells(batch_sizes: Iterable[int], drawn_shapes: int) -> Iterator[dict[str, Any]]:
    """One for each shape: the times of all ways, what was chosen, and what is without measuring."""
    for conv, size in drawn(drawn_shapes):
        yield from _conv_cell("convolution, drawn", conv, size)
    for size in batch_sizes:
        for conv in convolutions():
            yield from _conv_cell("convolution", conv, size)
        for shape in linear_maps():
            for name, run in products_of(shape, size):
                _settled(run)
                if not tuning.chosen:
                    continue
                (chosen,) = tuning.chosen.values()
                ways = {library: _by(library, run) for library in ("torch", "onednn")}
                yield _cell("product", name, size, measured(ways), chosen, "torch")


def _settled(run: Callable[[], Any]) -> Any:
    """What it gives after as many uses as settle a choice."""
    tuning.forget()
    for _ in range(2 * AGAIN):
        run()
    return run()


def _cell(kind: str, name: str, size: int, times: dict[str, float], chosen: str, rule: str) -> dict[str, Any]:
    best = min(times.values())
    return {
        "kind": kind,
        "shape": f"{name}, B={size}",
        "times": {way: round(t * 1e6, 1) for way, t in times.items()},
        "chosen": chosen,
        "regret": times[chosen] / best,
        "rule": times[rule] / best,
    }


def main() -> None:
    """Measure, print a table, and keep the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--drawn", type=int, default=DRAWN, help="convolutions drawn at random")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: list[dict[str, Any]] = []
    with quiet_collector(), torch.no_grad():
        for cell in cells(options.batch_sizes, options.drawn):
            found.append(cell)
            print(f"{cell['regret']:.2f} {cell['rule']:.2f} {cell['chosen']:8s} {cell['shape']}", flush=True)
    document = {"environment": environment.environment(), "threads": options.threads, "cells": found}
    print(tables.regret([(machines.name_of(document["environment"]), document)]))
    for cell in sorted(found, key=lambda c: -c["regret"])[:5]:
        print(f"worst: {cell['shape']}: {cell['chosen']} of {cell['times']}")
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
