import torch
from torch import Tensor, nn

from .suite import Case, LayerSuite


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 6, shape)


class TestPSEmbedding(LayerSuite):
    cases = [
        Case("tokens", lambda: nn.Embedding(6, 3), lambda n: (ids(n, 5),)),
        Case("labels", lambda: nn.Embedding(6, 3), lambda n: (ids(n),)),
        Case("grid", lambda: nn.Embedding(6, 3), lambda n: (ids(n, 2, 3),)),
        Case("padding", lambda: nn.Embedding(6, 3, padding_idx=2), lambda n: (ids(n, 8),), true_gradient=False),
        Case("padding-from-the-end", lambda: nn.Embedding(6, 3, padding_idx=-1), lambda n: (ids(n, 8),), true_gradient=False),
    ]
