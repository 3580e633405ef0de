"""How packed sequences lie in memory, against torch's own packing and padding."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pslayers.functional.sequences import Packed, Steps

from .ops import floats

# lengths, and whether torch is told that they are sorted
PACKED = {
    "sorted": ([4, 3, 3, 1], True),
    "not known to be sorted": ([4, 3, 3, 1], False),
    "unsorted": ([1, 4, 2, 4], False),
    "alike": ([3, 3], True),
    "one": ([2], True),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name: str) -> None:
    given, enforce_sorted = PACKED[name]
    lengths = torch.tensor(given)
    padded = floats(max(lengths), len(lengths), 3)  # (T, N, ...)
    pack = pack_padded_sequence(padded, lengths, enforce_sorted=enforce_sorted)
    steps = Packed(pack.batch_sizes, pack.sorted_indices, pack.unsorted_indices)
    assert (steps.time, steps.rows) == padded.shape[:2]
    expected, _ = pad_packed_sequence(pack)
    torch.testing.assert_close(steps.pad(pack.data), expected)
    torch.testing.assert_close(steps.pack(padded), pack.data)
    ended = torch.arange(steps.time).unsqueeze(1) >= lengths
    assert torch.equal(steps.padding, ended)
    state = floats(2, len(lengths), 3)  # (D, N, H)
    assert torch.equal(steps.unsort(steps.sort(state)), state)
    by_length = lengths if pack.sorted_indices is None else lengths[pack.sorted_indices]
    assert torch.equal(steps.sort(lengths.view(1, -1)), by_length.view(1, -1))
    each = zip(padded.unbind(1), lengths.tolist(), strict=True)
    torch.testing.assert_close(padded[steps.outermost(last=True)], torch.stack([t[n - 1] for t, n in each]))
    torch.testing.assert_close(padded[steps.outermost(last=False)], padded[0])


def test_sequences_of_one_length() -> None:
    t, steps = floats(4, 3, 2), Steps(4, 3)
    for same in (steps.pad, steps.pack, steps.sort, steps.unsort):
        assert same(t) is t
    assert steps.padding is None
    assert (steps.outermost(last=False), steps.outermost(last=True)) == (0, 3)
