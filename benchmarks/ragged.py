"""Ragged batches (`ps.sample_ids`) beside plain training, a loop over samples, and padding.

    python -m benchmarks.ragged --threads 2

The ways take turns, and medians count; all must give the same rows before. "padded" gives pslayers the same
sequences as a batch, filled up to the longest. Each line is printed as soon as it is known, as Markdown.
"""

import argparse
import copy
import functools
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps

from .timing import quiet_collector

Step = Callable[[], list[Tensor] | None]


class Convolution(nn.Module):
    """GIN (Xu et al. 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.update = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.eps = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """x (nodes, width), edges (2, E)."""
        return self.update(((1 + self.eps) * x).index_add(0, edges[1], x[edges[0]]))


class Graphs(nn.Module):
    """Four convolutions, their sum over nodes, two classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(16, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(Convolution(width) for _ in range(4))

    def forward(self, x: Tensor, edges: Tensor, ids: Tensor, size: int) -> Tensor:
        """x (nodes, 16), edges (2, E), ids (nodes,) -> (size, 2)."""
        h = self.first(x)
        for layer in self.layers:
            h = torch.relu(layer(h, edges))
        return self.out(h.new_zeros(size, h.shape[1]).index_add(0, ids, h))


class Language(nn.Module):
    """Two blocks of a causal Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(1000, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(width, 1000),
        )

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """tokens and positions (B, T), mask (T, T) -> (B, T, 1000)."""
        return self.head(self.blocks(self.table(tokens) + self.positions(positions), mask=mask))


def of_graphs(size: int, least: int, most: int, width: int) -> dict[str, Step]:
    """The ways for so many graphs of `least` to `most` nodes, and four edges a node."""
    counts = torch.randint(least, most + 1, (size,))
    ids, starts = torch.arange(size).repeat_interleave(counts), counts.cumsum(0) - counts
    inner = [torch.randint(0, n, (2, 4 * n)) for n in counts.tolist()]
    x, edges = torch.randn(len(ids), 16), torch.cat([e + s for e, s in zip(inner, starts, strict=True)], 1)
    labels, plain = torch.randint(0, 2, (size,)), Graphs(width)
    ours, params = ps.convert_model(copy.deepcopy(plain)), list(plain.parameters())

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x, edges, ids, size), labels)

    def one(i: int) -> Tensor:
        nodes = x[ids == i]
        out = plain(nodes, inner[i], torch.zeros(len(nodes), dtype=torch.long), 1)
        return F.cross_entropy(out, labels[i : i + 1])

    return ways(plain, ours, loss, ids, 0, size, lambda: by_loop(one, params, size))


def of_sequences(size: int, least: int, most: int, width: int) -> dict[str, Step]:
    """The ways for so many sequences of `least` to `most` tokens."""
    lengths = torch.randint(least, most + 1, (size,)).tolist()
    ids = torch.arange(size).repeat_interleave(torch.tensor(lengths))
    tokens, steps = torch.randint(0, 1000, (1, len(ids))), torch.arange(len(ids))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    mask = (ids[:, None] != ids) | (steps[:, None] < steps)
    plain = Language(width)
    ours, params = ps.convert_model(copy.deepcopy(plain)), list(plain.parameters())
    most = max(lengths)
    filled = torch.zeros(size, most, dtype=torch.long)
    own = torch.arange(most) < torch.tensor(lengths).unsqueeze(1)
    filled[own] = tokens[0]
    causal, places = torch.ones(most, most).triu(1).bool(), torch.arange(most).unsqueeze(0)

    def loss(model: nn.Module) -> Tensor:
        logits = model(tokens, positions, mask)[0]
        return F.cross_entropy(logits, tokens[0], reduction="sum") / size

    def one(i: int) -> Tensor:
        n, mine = lengths[i], tokens[:, ids == i]
        return F.cross_entropy(plain(mine, places[:, :n], causal[:n, :n])[0], mine[0], reduction="sum")

    def padded() -> list[Tensor]:
        ours.zero_grad()
        logits = ours(filled, places, causal)
        (F.cross_entropy(logits[own], tokens[0], reduction="sum") / size).backward()
        return rows_of(ours)

    found = ways(plain, ours, loss, ids, 1, size, lambda: by_loop(one, params, size))
    return {**found, "padded": padded}


def by_loop(one: Callable[[int], Tensor], params: Sequence[Tensor], size: int) -> list[Tensor]:
    """Rows by a loop over samples."""
    each = [torch.autograd.grad(one(i), params) for i in range(size)]
    return [torch.stack(rows) for rows in zip(*each, strict=True)]


def rows_of(model: nn.Module) -> list[Tensor]:
    """What the last backward pass has left."""
    return [p.grad_sample for p in model.parameters()]  # type: ignore[attr-defined]


def ways(
    plain: nn.Module,
    ours: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    ids: Tensor,
    dim: int,
    size: int,
    loop: Step,
) -> dict[str, Step]:
    """Plain training, rows, a clipped step and the loop."""

    def train() -> None:
        plain.zero_grad()
        loss(plain).backward()

    def rows(verify: bool = True) -> list[Tensor]:
        ours.zero_grad()
        with ps.sample_ids(ids, size, dim=dim, verify=verify):
            loss(ours).backward()
        return rows_of(ours)

    def clipped() -> None:
        ours.zero_grad()
        with ps.sample_ids(ids, size, dim=dim), ps.clipping(ours, max_norm=1.0):
            loss(ours).backward()

    once = functools.partial(rows, verify=False)
    return {"plain": train, "rows": rows, "once": once, "clipped": clipped, "loop": loop}


CELLS: dict[str, Callable[[], dict[str, Step]]] = {
    "64 graphs of 10 to 30 nodes, width 64": lambda: of_graphs(64, 10, 30, 64),
    "64 graphs of 10 to 30 nodes, width 256": lambda: of_graphs(64, 10, 30, 256),
    "256 graphs of 10 to 30 nodes, width 64": lambda: of_graphs(256, 10, 30, 64),
    "32 graphs of 5 to 200 nodes, width 128": lambda: of_graphs(32, 5, 200, 128),
    "16 sequences of 8 to 64 tokens, width 128": lambda: of_sequences(16, 8, 64, 128),
}


def times(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """{way: median seconds}, after all that give rows have given the same."""
    expected = steps["loop"]() or []
    for way, step in steps.items():
        for _ in range(2):
            rows = step() or []
        for found, true in zip(rows, expected, strict=bool(rows)):
            if not torch.allclose(found, true, 1e-3, 1e-3 * float(true.abs().max())):
                raise ValueError(f"{way} gives other rows than a loop over samples.")
        del rows
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    with quiet_collector():
        for _ in range(rounds):
            for way, step in steps.items():
                start = time.perf_counter()
                step()
                seconds[way].append(time.perf_counter() - start)
    return {way: median(each) for way, each in seconds.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, nargs="+", default=list(range(len(CELLS))), help="by number")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print("| batch | plain: ms | rows / plain | verified once | clipped | loop / rows | padded / rows |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in [list(CELLS)[i] for i in args.cells]:
        t = times(CELLS[name](), args.rounds)
        padded = f"{t['padded'] / t['rows']:.2f}x" if "padded" in t else "-"
        ratios = [*(t[way] / t["plain"] for way in ("rows", "once", "clipped")), t["loop"] / t["rows"]]
        cells = " | ".join(f"{ratio:.2f}x" for ratio in ratios)
        print(f"| {name} | {t['plain'] * 1e3:.1f} | {cells} | {padded} |", flush=True)


if __name__ == "__main__":
    main()
