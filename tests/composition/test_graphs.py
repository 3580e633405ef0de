"""PyTorch Geometric's models on batches of graphs, against the plain model on each graph by itself."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from ..oracle import true_rows

pyg = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
gnn = pytest.importorskip("torch_geometric.nn")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(jit|torch-scatter|typing).*"),
]

SIZES, WIDTH = [4, 3, 1, 5], 8


def graphs() -> list[Any]:
    found = []
    for n in SIZES:
        pairs = torch.combinations(torch.arange(n)).t()
        edges = torch.cat([pairs, pairs.flip(0)], 1)[:, : 2 * n]
        found.append(
            pyg.data.Data(
                x=torch.randn(n, 6),
                edge_index=edges,
                edge_attr=torch.randn(edges.shape[1], 3),
                edge_type=torch.randint(0, 3, (edges.shape[1],)),
            )
        )
    return found


class Network(nn.Module):
    """Two convolutions, a pooling and a linear layer."""

    def __init__(self, make: Any, uses: str | None, pool: Any, norm: nn.Module | None) -> None:
        super().__init__()
        self.one, self.two, self.out = make(6, WIDTH), make(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.uses, self.pool, self.norm = uses, pool, norm

    def forward(self, data: Any) -> Tensor:
        assert data.num_nodes == len(data.x)  # as a batch knows it
        more = () if self.uses is None else (data[self.uses],)
        h = self.one(data.x, data.edge_index, *more)
        if self.norm is not None:
            h = self.norm(h, data.batch)
        h = self.two(torch.relu(h), data.edge_index, *more)
        return self.out(self.pool(h, data.batch))


def mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, o), nn.Tanh(), nn.Linear(o, o))


CONVOLUTIONS: dict[str, tuple[Callable[[int, int], nn.Module], str | None]] = {
    "GCN": (lambda i, o: gnn.GCNConv(i, o), None),
    "SAGE": (lambda i, o: gnn.SAGEConv(i, o), None),
    "GAT": (lambda i, o: gnn.GATConv(i, o // 2, heads=2, edge_dim=3), "edge_attr"),
    "GATv2": (lambda i, o: gnn.GATv2Conv(i, o // 2, heads=2, edge_dim=3), "edge_attr"),
    "GIN": (lambda i, o: gnn.GINConv(mlp(i, o), train_eps=True), None),
    "GINE": (lambda i, o: gnn.GINEConv(mlp(i, o), edge_dim=3), "edge_attr"),
    "EdgeConv": (lambda i, o: gnn.EdgeConv(mlp(2 * i, o), aggr="max"), None),
    "NNConv": (lambda i, o: gnn.NNConv(i, o, nn.Linear(3, i * o)), "edge_attr"),
    "RGCN": (lambda i, o: gnn.RGCNConv(i, o, 3, num_bases=2), "edge_type"),
    "Transformer": (lambda i, o: gnn.TransformerConv(i, o // 2, heads=2, edge_dim=3, beta=True), "edge_attr"),
    "PNA": (
        lambda i, o: gnn.PNAConv(i, o, ["mean", "max"], ["identity"], torch.tensor([0, 2, 3, 3, 1])),
        None,
    ),
    "Chebyshev": (lambda i, o: gnn.ChebConv(i, o, 3), None),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "max": (lambda: gnn.global_max_pool, lambda: None),
    "attention": (lambda: gnn.AttentionalAggregation(nn.Linear(WIDTH, 1)), lambda: None),
    "GraphNorm": (lambda: gnn.global_add_pool, lambda: gnn.GraphNorm(WIDTH)),
    "LayerNorm": (lambda: gnn.global_add_pool, lambda: gnn.LayerNorm(WIDTH)),
}


def assert_graphs(model: nn.Module, with_edges: bool) -> None:
    data = [d.apply(lambda t: t.double() if t.is_floating_point() else t) for d in graphs()]
    plain, batch = copy.deepcopy(model), pyg.data.Batch.from_data_list(data)
    alone = [pyg.data.Batch.from_data_list([d]) for d in data]
    expected = true_rows(lambda i: plain(alone[i]).square().sum(), plain, len(data), zeros=True)
    ps.convert_model(model, loss_reduction="sum")
    for _ in range(2):
        with ExitStack() as stack:
            stack.enter_context(ps.sample_ids(batch.batch, len(data)))
            if with_edges:
                stack.enter_context(ps.sample_ids(batch.batch[batch.edge_index[0]]))
            out = model(batch)
        out.square().sum().backward()
        for name, p in model.named_parameters():
            rows = p.grad_sample  # type: ignore[attr-defined]
            rows = torch.zeros_like(expected[name]) if rows is None else rows
            torch.testing.assert_close(rows, expected[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("with_edges", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, with_edges: bool) -> None:
    make, uses = CONVOLUTIONS[name]
    assert_graphs(Network(make, uses, gnn.global_mean_pool, None).double(), with_edges)


@pytest.mark.parametrize("name", OTHERS)
def test_poolings_and_norms(name: str) -> None:
    pool, norm = OTHERS[name]
    assert_graphs(Network(CONVOLUTIONS["GCN"][0], None, pool(), norm()).double(), False)


def test_a_norm_of_all_nodes_is_an_error() -> None:
    class Pairs(gnn.PairNorm):  # type: ignore[misc]
        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            return super().forward(x)

    model = Network(CONVOLUTIONS["GCN"][0], None, gnn.global_mean_pool, Pairs()).double()
    with pytest.raises(RuntimeError, match="samples interact"):
        assert_graphs(model, False)
