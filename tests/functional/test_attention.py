"""in_projection and multi_head_attention against torch's own on the rows of each sample."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pslayers.functional import in_projection, multi_head_attention

from .ops import SIZES, Case, check, check_sizes, each_form, floats

E, H, L, S = 4, 2, 5, 3


def side_by_side(*parts: Tensor) -> Tensor:
    return torch.cat([t.flatten(1) for t in parts], 1)


def packed(name: str, inputs: Any, theirs: Any, bias: bool = True) -> Case:
    """A packed weight; `inputs` makes query, key and value of what is given."""
    return Case(
        name,
        lambda *args: side_by_side(*in_projection(*inputs(*args[: -1 - bias]), *args[-1 - bias :])),
        theirs,
        {
            "itself": lambda n: (floats(n, L, E),),
            "memory": lambda n: (floats(n, L, E), floats(n, S, E)),
        }.get(name.partition(",")[0], lambda n: (floats(n, L, E), floats(n, S, E), floats(n, S, E))),
        ((3 * E, E), (3 * E,))[: 1 + bias],
    )


def apart(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    biases = b.chunk(3) if b is not None else (None,) * 3
    return side_by_side(*map(F.linear, (q, k, v), w.chunk(3), biases))


CASES = [
    packed("itself", lambda x: (x, x, x), lambda x, w, b: apart(x, x, x, w, b)),
    packed("itself, no bias", lambda x: (x, x, x), lambda x, w: apart(x, x, x, w), bias=False),
    packed("memory", lambda q, m: (q, m, m), lambda q, m, w, b: apart(q, m, m, w, b)),
    packed("memory, no bias", lambda q, m: (q, m, m), lambda q, m, w: apart(q, m, m, w), bias=False),
    packed("apart", lambda *qkv: qkv, apart),
    Case(
        "three weights",
        lambda q, k, v, wq, wk, wv, b: side_by_side(*in_projection(q, k, v, (wq, wk, wv), b)),
        lambda q, k, v, wq, wk, wv, b: side_by_side(*map(F.linear, (q, k, v), (wq, wk, wv), b.chunk(3))),
        lambda n: (floats(n, L, E), floats(n, S, 3), floats(n, S, 2)),
        ((E, E), (E, 3), (E, 2), (3 * E,)),
    ),
]


@each_form(CASES)
def test_in_projection(case: Case, form: str) -> None:
    check_sizes(case, form)


def test_rows_that_are_no_multiple_of_the_samples() -> None:
    q, k = floats(3, L, E), floats(5, S, E)
    with pytest.raises(ValueError, match=r"ps\.functional\.in_projection got an input of shape \(5, 3, 4\)"):
        in_projection(q, k, k, floats(3 * E, E).expand(3, 3 * E, E).requires_grad_())


MASK = floats(L, S).masked_fill(torch.rand(L, S) < 0.3, -torch.inf)
MASK[:, 0] = 0
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"mask": MASK[None, None]},
    "weights": {"need_weights": True},
    "masked, weights": {"mask": MASK[None, None], "need_weights": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_multi_head_attention(name: str) -> None:
    options = OPTIONS[name]

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(*heads, options.get("mask"), 0.0, "is_causal" in options)
        return y.transpose(1, 2).flatten(2)

    case = Case(
        name,
        lambda *qkv: multi_head_attention(*qkv, H, **options)[0],
        theirs,
        lambda n: (floats(n, L, E), floats(n, S, E), floats(n, S, E)),
        (),
    )
    for size, k in SIZES[:4]:
        check(case, "different", size, k)
    check(case, "different", 3, 2, strided=True)


def test_masks_of_each_sample_and_the_weights_of_attention() -> None:
    """A mask for each row and head; the weights that are returned give the output."""
    q, k, v, mask = floats(3, L, E), floats(3, S, E), floats(3, S, E), floats(3, H, L, S)
    out, weights = multi_head_attention(q, k, v, H, mask, need_weights=True)
    assert weights is not None
    heads = [t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v)]
    torch.testing.assert_close(weights, (heads[0] @ heads[1].mT / (E / H) ** 0.5 + mask).softmax(-1))
    torch.testing.assert_close(out, (weights @ heads[2]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(multi_head_attention(q, k, v, H, mask), (out, None))
