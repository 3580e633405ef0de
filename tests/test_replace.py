"""BatchNorm into GroupNorm."""

import pytest
import torch
from torch import nn

import pslayers as ps

from .oracle import assert_rows_right


def test_weights_are_carried_over_and_samples_no_longer_mix() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6), nn.BatchNorm1d(6)
    )
    torch.nn.init.normal_(model[1].weight)
    weight, names, calls = model[1].weight, list(dict(model.named_parameters())), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ps.ConversionError, match=r"`1` \(BatchNorm2d\) mixes samples.*replace_batch_norm"):
        ps.convert_model(model)
    assert ps.replace_batch_norm(model) is model
    assert (
        model[1].weight is weight
        and list(dict(model.named_parameters())) == names
        and set(model.state_dict()) == set(names)
    )
    assert [type(m) for m in (model[1], model[5])] == [nn.GroupNorm] * 2 and (
        model[1].num_groups,
        model[5].num_groups,
    ) == (6, 3)
    model.double()
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    same = nn.GroupNorm(6, 12).double()
    same.load_state_dict(model[1].state_dict())
    torch.testing.assert_close(model[1](model[0](x)), same(model[0](x)))
    assert calls and "GroupNorm(6, 12" in repr(model)
    assert_rows_right(model.train(), x)


@pytest.mark.parametrize(
    ("channels", "groups", "expected"),
    [(64, 32, 32), (32, 32, 16), (12, 4, 4), (7, 32, 1), (1, 32, 1), (10, 3, 2)],
)
def test_groups(channels: int, groups: int, expected: int) -> None:
    assert ps.replace_batch_norm(nn.BatchNorm1d(channels), groups).num_groups == expected


def test_the_root_without_weights_and_a_synchronised_one() -> None:
    plain = ps.replace_batch_norm(nn.BatchNorm3d(4, affine=False, track_running_stats=False))
    assert (
        type(plain) is nn.GroupNorm
        and plain.weight is None
        and plain(torch.randn(2, 4, 2, 2, 2)).shape == (2, 4, 2, 2, 2)
    )
    shared = nn.SyncBatchNorm(4)
    both = ps.replace_batch_norm(nn.ModuleDict({"a": shared, "b": shared}))
    assert both["a"] is both["b"] and type(both["a"]) is nn.GroupNorm


def test_refused_by_name_and_unchanged() -> None:
    class Mine(nn.BatchNorm1d):
        pass

    model = nn.Sequential(nn.BatchNorm1d(4), Mine(4))
    with pytest.raises(TypeError, match=r"`1` \(Mine\) is a subclass of BatchNorm"):
        ps.replace_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="`groups` must be an integer of at least 1; got 0"):
        ps.replace_batch_norm(model, 0)
    with pytest.raises(
        ValueError, match=r"`0` \(PSBatchNorm1d\) is converted already: call ps.restore_model"
    ):
        ps.replace_batch_norm(ps.convert_model(nn.Sequential(nn.BatchNorm1d(4)).eval()))
