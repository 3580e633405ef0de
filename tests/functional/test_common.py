"""What all families of ops share: rows by sample, and their check."""

import pytest
import torch

from pslayers.functional.common import by_sample, check_rows, of_dtype, owned

from .ops import floats


@pytest.mark.parametrize(
    ("rows", "samples", "right"),
    [(3, 3, True), (6, 3, True), (0, 3, True), (0, 0, True), (5, 3, False), (2, 3, False), (3, 0, False)],
)
def test_rows_are_k_for_each_sample(rows: int, samples: int, right: bool) -> None:
    x, weight = torch.zeros(rows, 4), torch.zeros(samples, 2, 4)
    check_rows("op", x, None)
    if right:
        check_rows("op", x, weight)
        return
    message = rf"ps\.functional\.op got an input of shape \({rows}, 4\) .* expected {samples} rows in dim 0"
    with pytest.raises(ValueError, match=message):
        check_rows("op", x, weight)


@pytest.mark.parametrize("shape", [(3, 4), (6, 4), (6, 2, 5, 4), (0, 4), (3, 0, 4), (6, 2, 0)])
def test_by_sample(shape: tuple[int, ...]) -> None:
    """(N, ..., width) as (B, t, width), batch-major, and as nothing where something is empty."""
    t = floats(*shape)
    found = by_sample(t, 3, shape[-1])
    assert found.shape[::2] == (3, shape[-1])
    for one, part in zip(found, t.unflatten(0, (3, shape[0] // 3)), strict=True):
        assert torch.equal(one.flatten(), part.flatten())


def test_by_sample_of_no_samples() -> None:
    assert by_sample(torch.zeros(0, 5, 4), 0, 4).shape == (0, 0, 4)


def test_what_is_owned_is_no_view() -> None:
    t = floats(2, 3)
    view = owned(t.t())
    assert not view._is_view() and torch.equal(view, t.t())
    assert owned(t) is t


def test_of_dtype() -> None:
    t = floats(2)
    assert of_dtype(t, torch.float64) is t and of_dtype(t, torch.float32).dtype == torch.float32
