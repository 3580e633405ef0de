"""Rows that a mask picks: each sample's own, however many it has; from the first batch on, and in all later
ones.
"""

import copy
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.attribution.gathered import GatheredRows
from pslayers.modules.first_call import ModelCall

from ..combinations import every
from ..oracle import assert_rows, loop, square, squares, true_rows

Forward = Callable[["Picking", Tensor, Tensor], Tensor]


class Scaled(nn.Module):
    """A module without a replacement."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x / x.square().mean(-1, keepdim=True).sqrt()).abs().sqrt() * self.scale


class HiddenStates(nn.Module):
    """One that returns what it has computed on its way, too: rows in dim 1 of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.shift = (
            nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
            nn.Parameter(torch.rand(4)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = [x + self.shift]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])))
        return states[-1], torch.stack(states)


class Picking(nn.Module):
    """Layers, some of which get rows (k, 4) that a mask (B, T) picks out of (B, T, 4)."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.before, self.norm, self.scaled, self.after = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            Scaled(),
            nn.Linear(4, 3),
        )
        self.recurrent, self.table, self.weight = (
            nn.LSTM(4, 4, batch_first=True),
            nn.Embedding(5, 4),
            nn.Parameter(torch.rand(4)),
        )
        self.hidden = HiddenStates()
        self.picks = forward

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.picks(self, self.before(x).tanh(), mask)


def _written_back(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    y = h.new_zeros(*h.shape[:2], 3)
    y[mask] = m.after(m.norm(h[mask]))
    return y


def _scattered_back(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    rows = mask.flatten().nonzero().squeeze(1)
    y = m.after(h.reshape(-1, 4)[rows])
    return torch.zeros(h.shape[0] * h.shape[1], 3, dtype=h.dtype).index_add(0, rows, y).view(*h.shape[:2], 3)


def _by_numbers(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    sample, time = mask.nonzero(as_tuple=True)
    y = m.after(h[sample, time] * torch.where(mask)[1].to(h.dtype).unsqueeze(-1))
    return h.new_zeros(*h.shape[:2], 3).index_put((sample, time), y)


def _numbers_in_one(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    numbers = torch.nonzero(mask)
    sample, time = numbers.unbind(1)
    return h.new_zeros(*h.shape[:2], 3).index_put((sample, numbers[:, 1]), m.after(h[sample, time]))


def _selected(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    rows = torch.masked_select(h, mask.unsqueeze(-1)).view(-1, 4)
    return h.new_zeros(*h.shape[:2], 3).masked_scatter(mask.unsqueeze(-1), m.after(rows))


def _of_each_sample(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    """What each sample has once, as rays have a direction, beside what it has in each place."""
    own = h.mean(1).unsqueeze(1)
    y, rows = h.new_zeros(*h.shape[:2], 3), own.expand_as(h)[mask] + torch.broadcast_to(own, h.shape)[mask]
    y[mask] = m.after(h[mask] * rows)
    return y


def _twice(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask]
    large = rows.sum(-1) > 0
    rows = rows.index_put((large,), m.norm(rows[large]))
    return m.after(rows)


def _together(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    return m.after(torch.cat([h[mask], torch.cat([h[~mask][:, :2], h[~mask][:, 2:]], 1)], dim=0))


def _samples(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    some = mask[:, 0]
    h = h.index_put((some,), m.recurrent(h[some])[0])
    return m.after(h)


def _experts(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    rows, y = h.reshape(-1, 4), h.new_zeros(h.shape[0] * h.shape[1], 4)
    chosen = F.one_hot(torch.stack([rows.argmax(-1), rows.argmin(-1)], 1), 4).permute(2, 1, 0)
    for expert, layer in enumerate((m.norm, m.scaled, m.norm, nn.Identity())):
        place, token = torch.where(chosen[expert])
        y.index_add_(0, token, layer(rows[token]) * (place + 1).unsqueeze(-1))
    return m.after(y.view(h.shape))


def _experts_behind_one(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    rows, y = h.reshape(-1, 4), h.new_zeros(h.shape[0] * h.shape[1], 4)
    chosen = F.one_hot(rows.topk(2).indices, 4).permute(2, 1, 0)
    for expert in chosen.sum((1, 2)).nonzero():
        place, token = torch.where(chosen[expert].squeeze(0))
        found = rows[None, token].reshape(-1, 4)
        y.index_add_(
            0,
            token,
            (m.norm, m.scaled, m.norm, nn.Identity())[expert[0]](found)
            * rows.softmax(-1)[token, place, None],
        )
    return m.after(y.view(h.shape))


def _flipped(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    y = h.new_zeros(*h.shape[:2], 3)
    y[mask] = m.after(h[mask].flip(0)).flip(0)
    return y


def _pooled(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    owner = mask.nonzero()[:, 0]
    return m.after(h.new_zeros(len(h), 4).index_add(0, owner, m.norm(h[mask])))


def _by_module(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    return (h[mask] * m.weight) @ torch.ones(4, 2, dtype=h.dtype) + m.after(h[mask])[:, :2]


def _looked_up(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    return m.after(m.table(h.argmax(-1)[mask]) + h[mask])


def _gathered(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    """Rows in the order of others, and back."""
    rows = h[mask]
    turned = torch.arange(len(rows)).flip(0)
    first = rows[:, 0].gather(0, turned).gather(0, turned)
    rows = rows.gather(0, turned.unsqueeze(1).expand(-1, 4))
    return m.after(rows.gather(0, turned.unsqueeze(1).expand(-1, 4)) * first.unsqueeze(1))


def _hidden_states(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    last, states = m.hidden(h[mask])
    return m.after(torch.cat([states, last[None]]).mean(0) + states.unbind()[1] + states[2])


def _mixed(m: Picking, h: Tensor, mask: Tensor) -> Tensor:
    """Of several layers, as much of each as a weight says."""
    states = torch.stack([h[mask], m.norm(h[mask]), m.scaled(h[mask])])
    return m.after((states * HALF[0, :3].to(h).view(3, 1, 1)).sum(0))


HALF = torch.full((4, 4), 0.5)
PICKS: dict[str, Forward] = {
    "of-each-sample": _of_each_sample,
    "layer": lambda m, h, mask: m.after(h[mask]),
    "written-back": _written_back,
    "scattered-back": _scattered_back,
    "by-numbers": _by_numbers,
    "numbers-in-one": _numbers_in_one,
    "masked-select": _selected,
    "of-what-was-picked": _twice,
    "put-together": _together,
    "samples": _samples,
    "experts": _experts,
    "experts-behind-one": _experts_behind_one,
    "flipped": _flipped,
    "pooled": _pooled,
    "by-the-module-itself": _by_module,
    "ids": _looked_up,
    "output": lambda m, h, mask: m.after(h)[mask],
    "between-layers": lambda m, h, mask: m.after(
        F.gelu(F.dropout(m.norm(h[mask]), 0.0).unsqueeze(1).squeeze(1)) * 2 + 1
    ),
    "without-replacement": lambda m, h, mask: m.after(m.scaled(h[mask])),
    "softmax": lambda m, h, mask: m.after(
        h[mask].softmax(-1) + h[mask].sum(1, keepdim=True) + h[mask].max(1).values[:, None]
    ),
    "views": lambda m, h, mask: m.after(h[mask].view(-1, 2, 2).flatten(1)),
    "pieces": lambda m, h, mask: m.after(torch.cat(h[mask].chunk(2, 1), 1).reshape(-1, 4).contiguous()),
    "sorted": lambda m, h, mask: m.after(h[mask].sort(1).values),
    "einsum": lambda m, h, mask: m.after(torch.einsum("ni,io->no", h[mask], HALF.to(h))),
    "einsum-of-all-dims": lambda m, h, mask: m.after(torch.einsum("...i,io->...o", h[mask], HALF.to(h))),
    "einsum-without-arrow": lambda m, h, mask: m.after(torch.einsum("ai,io", h[mask], HALF.to(h))),
    "outer": lambda m, h, mask: m.after(torch.outer(h[mask].sum(1), torch.ones(4).to(h))),
    "ger": lambda m, h, mask: m.after(torch.ger(h[mask].sum(1), vec2=torch.ones(4).to(h))),
    "outer-turned": lambda m, h, mask: m.after(torch.outer(torch.ones(4).to(h), h[mask].sum(1)).t()),
    "einsum-of-two": lambda m, h, mask: m.after(torch.einsum("ni,nj->nij", h[mask], h[mask]).sum(1)),
    "gathered": _gathered,
    "hidden-states": _hidden_states,
    "mixed": _mixed,
    "joined-alone": lambda m, h, mask: m.after(m.hidden(torch.cat([h.flatten(0, 1)]))[1].sum(0)),
}
FIRST = {"all": (4, 1.0), "some": (4, 0.6), "few": (5, 0.2), "one-step": (1, 1.0), "none": (3, 0.0)}


def _rows(model: nn.Module, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Each sample's gradient of the sum of squares of what it makes by itself."""
    return loop(model, lambda out, _: (out**2).sum(), (x, mask), zeros=True)


def _assert_right(
    model: nn.Module, ours: nn.Module, x: Tensor, mask: Tensor, output: Tensor | None = None
) -> None:
    ours.zero_grad()
    output = ours(x, mask) if output is None else output
    torch.testing.assert_close(output, model(x, mask))
    (output**2).sum().backward()
    for name, rows in _rows(model, x, mask).items():
        param = ours.get_parameter(name)
        if param.grad_sample is None:
            assert not rows.any(), name
            continue
        torch.testing.assert_close(
            param.grad_sample, rows, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )
        torch.testing.assert_close(param.grad, rows.sum(0), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize(("name", "first", "seed"), every(7, itertools.product(PICKS, FIRST, range(2))))
def test_rows_are_right_whatever_was_picked_first(name: str, first: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Picking(PICKS[name]).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    time, share = FIRST[first]
    for n, t, part in (
        (4, time, share),
        (4, 4, 0.5),
        (4, 3, 0.3),
        (2, 5, 0.5),
        (4, 4, 1.0),
        (3, 4, 0.5),
        (1, 4, 0.5),
        (4, 4, 0.0),
    ):
        mask = torch.rand(n, t) < part
        _assert_right(model, ours, torch.randn(n, t, 4, dtype=torch.float64), mask)


class Turned(nn.Module):
    """A model that is given (T, B, ...) in the place of (B, T, ...), or the other way round."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.model(x.transpose(0, 1), mask.T)


BY_SAMPLE = ("samples", "pooled")  # what they pick is told by dim 0
PUT_BACK = (
    *BY_SAMPLE, "written-back", "scattered-back", "numbers-in-one", "masked-select", "experts",
    "experts-behind-one",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize(
    ("name", "first", "turned"),
    every(5, itertools.product(PICKS, ("one-step", "some", "none"), (True, False))),
)
def test_rows_that_are_picked_of_a_batch_in_dim_1(name: str, first: str, turned: bool) -> None:
    torch.manual_seed(0)
    model = Picking(PICKS[name]).double()
    if turned or name in BY_SAMPLE:
        ours, plain, own = copy.deepcopy(Turned(model)), model, "model"
    else:
        ours, plain, own = copy.deepcopy(model), Turned(model), ""
    ours = ps.convert_model(ours, batch_first=False, loss_reduction="sum")
    time, share = FIRST[first]
    for n, t, part in ((2, time, share), (2, 4, 0.3), (2, 2, 0.5), (3, 2, 0.5)):
        x, mask = torch.randn(n, t, 4, dtype=torch.float64), torch.rand(n, t) < part
        ours.zero_grad()
        try:
            output = ours(x.transpose(0, 1), mask.T)
        except ValueError:  # rows that are returned as picked, or a mask (T, B), are no batch in dim 1
            assert not own or name not in PUT_BACK
            return
        torch.testing.assert_close(output, plain(x, mask))
        (output**2).sum().backward()
        for name_, rows in _rows(plain, x, mask).items():
            found = (
                ours.get_submodule(own).get_parameter(name_.removeprefix("" if own else "model.")).grad_sample
            )
            found = torch.zeros_like(rows) if found is None else found
            torch.testing.assert_close(found, rows, rtol=1e-8, atol=1e-10, msg=lambda m, n=name_: f"{n}: {m}")


SLOW = ("flipped", "by-the-module-itself", "gathered")
FAST = [name for name in PICKS if name not in SLOW]


@pytest.mark.parametrize("name", FAST)
def test_no_sample_is_run_by_itself(name: str) -> None:
    ours = ps.convert_model(Picking(PICKS[name]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in (0.6, 0.3, 1.0):
            ours(torch.randn(4, 5, 4), torch.rand(4, 5) < part).sum().backward()


def test_a_mask_that_the_data_make() -> None:
    class Unpadded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.encoder, self.head = (
                nn.Embedding(9, 4, padding_idx=0),
                nn.Linear(4, 4),
                nn.Linear(4, 3),
            )

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.encoder(self.table(ids))[ids != 0].relu())

    model = Unpadded().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for n, t in ((4, 4), (4, 3), (3, 5), (4, 4)):
        ids = torch.randint(1 if (n, t) == (4, 4) else 0, 9, (n, t))
        _assert_right(model, ours, ids, torch.empty(n, 0))


class Pooled(nn.Module):
    """A module of its own that is told whose rows it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, rows: Tensor, owner: Tensor, n: int) -> Tensor:
        return rows.new_zeros(n, 4).index_add(0, owner, rows * self.scale)


class Narrow(nn.Module):
    """Not defined but between -1 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (0.9 * x).atanh() * self.scale


class Hard(nn.Module):
    def __init__(self, forward: Callable[["Hard", Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.pooled, self.narrow = (
            nn.Linear(4, 4),
            nn.Linear(4, 3),
            Pooled(),
            Narrow(),
        )
        self.table, self.recurrent, self.picks = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True), forward

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.picks(self, self.before(x).tanh(), x, mask)


def _time_major(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    h, y = h.transpose(0, 1), h.new_zeros(h.shape[1], len(h), 3)
    y[mask.T] = m.after(h[mask.T])
    return y.transpose(0, 1)


def _time_major_inputs(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    rows = m.after(x.transpose(0, 1).reshape(-1, 4)[mask.T.reshape(-1)])
    return h.new_zeros(h.shape[1], len(h), 3).masked_scatter(mask.T[..., None], rows).transpose(0, 1)


def _one_by_one(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([m.after(h[i][mask[i]]).sum(0) for i in range(len(h))])


def _sorted_by_length(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    length = mask.sum(1)
    order = length.argsort(descending=True, stable=True)
    h, length, state = h[order], length[order], h.new_zeros(len(x), 4)
    for t in range(x.shape[1]):
        active = length > t
        state = state.index_put((active,), (h[active, t] + state[active]).tanh())
        state = state.index_put((active,), m.after(state[active]).sum(1, keepdim=True) + state[active])
    return state[order.argsort()]


def _turned(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    sample, time = mask.nonzero().t()
    return m.after(h[sample, time])


def _packed(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    own, rows = mask.nonzero()[:, 0], h[mask]
    own_only = (own[:, None] == own[None])[None]
    return m.after(F.scaled_dot_product_attention(rows[None], rows[None], rows[None], attn_mask=own_only)[0])


def _in_another_order(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask]
    rows[rows[:, 0].argsort()] = rows.clone()
    return m.after(rows)


def _put_together_anew(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    room, rows = h.new_zeros(h.shape[0] * h.shape[1], 4), h[mask]
    room[: len(rows)] = rows
    return m.after(room)[: len(rows)]


def _padded(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask]
    return m.after(F.pad(rows, (0, 0, 0, -len(rows) % 8)))[: len(rows)]


def _in_pieces(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([m.after(piece) for piece in h[mask].split(mask.sum(1).tolist())])


def _last_states(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return m.recurrent(h[mask[:, 0]])[1][-1]


def _table(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    keep = torch.arange(x.shape[1]) % 2 == 0
    return m.after(h[:, keep] + m.table(torch.arange(len(keep))[keep]))


def _pairs(m: Hard, h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    i, j = torch.ones(4, 4).tril(-1).nonzero(as_tuple=True)
    return m.after((h.mT @ h)[:, i, j][:, :4])


HARD: dict[str, Callable[[Hard, Tensor, Tensor, Tensor], Tensor]] = {
    "time-major": _time_major,
    "time-major-inputs": _time_major_inputs,
    "one-by-one": _one_by_one,
    "sorted-by-length": _sorted_by_length,
    "turned-numbers": _turned,
    "numbers-as-lists": lambda m, h, x, mask: m.after(
        h[tuple(i.tolist() for i in mask.nonzero(as_tuple=True))]
    ),
    "twice-each": lambda m, h, x, mask: m.after(h[mask].repeat_interleave(2, 0)),
    "twice-all": lambda m, h, x, mask: m.after(h[mask].repeat(2, 1)),
    "packed-attention": _packed,
    "in-another-order": _in_another_order,
    "put-together-anew": _put_together_anew,
    "padded": _padded,
    "in-pieces": _in_pieces,
    "last-states": _last_states,
    "table": _table,
    "pairs": _pairs,
    "pooled-by-a-module": lambda m, h, x, mask: m.pooled(h[mask], mask.nonzero()[:, 0], len(x)),
    "not-defined-everywhere": lambda m, h, x, mask: m.narrow(h[mask]),
    "like-what-was-picked": lambda m, h, x, mask: m.after(
        torch.where(h[mask] > 0, h[mask], torch.zeros_like(h[mask]))
    ),
    "a-slice-of-the-batch": lambda m, h, x, mask: torch.cat([m.after(h[:1]), m.after(h[1:])]),
    "turned-around": lambda m, h, x, mask: m.after(h.flip(0)).flip(0),
    "by-keywords": lambda m, h, x, mask: m.after(
        torch.softmax(dim=-1, input=torch.cat(dim=1, tensors=[h[mask][:, :2], h[mask][:, 2:]]))
    ),
}
# what no rule follows, and does not return one tensor of each sample, is refused by name
REFUSED = {
    "time-major",
    "time-major-inputs",
    "turned-numbers",
    "twice-each",
    "twice-all",
    "packed-attention",
    "in-another-order",
}
REFUSED |= {"put-together-anew", "padded", "in-pieces", "sorted-by-length", "pooled-by-a-module"}


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize(
    ("name", "first", "time"),  # the time is as long as the batch, or not
    every(5, itertools.product(HARD, ("none", "all", "alike", "uneven"), (4, 5))),
)
def test_rows_are_right_or_refused(name: str, first: str, time: int) -> None:
    """Never wrong in silence: neither rows nor outputs, in the first batch or later."""
    torch.manual_seed(time)
    model = Hard(HARD[name]).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    alike = torch.arange(time)[None] < torch.full((4, 1), 2)
    begin = {
        "none": torch.zeros(4, time).bool(),
        "all": torch.ones(4, time).bool(),
        "alike": alike,
        "uneven": torch.rand(4, time) < 0.5,
    }
    lengths = (
        torch.arange(time)[None] < torch.tensor(n)[:, None]
        for n in ([1, 3, 2, 2], [4, 1, 2, 1], [2, 2, 2, 2], [0, 3, 0, 1])
    )
    refused = 0
    for mask in (begin[first], *lengths, *(torch.rand(4, time) < 0.5 for _ in range(3))):
        if refused == 4:  # each is a first call again, of many runs
            break
        try:
            output = ours(x := torch.randn(len(mask), time, 4, dtype=torch.float64), mask)
        except ValueError as error:
            if name not in REFUSED or not re.search("samples|attributed|whose they are", str(error)):
                raise
            ours.zero_grad()
            refused += 1
            continue
        _assert_right(model, ours, x, mask, output)


CHECKPOINTED: dict[str, Forward] = {
    "with-what-picks": lambda m, h, mask: checkpoint(
        lambda h: m.after(m.norm(h[mask])), h, use_reentrant=False
    ),
    "without": lambda m, h, mask: checkpoint(
        lambda rows: m.after(m.scaled(rows)), h[mask], use_reentrant=False
    ),
    "two": lambda m, h, mask: torch.cat(
        [checkpoint(m.after, h[some], use_reentrant=False) for some in (mask, ~mask)]
    ),
    "a-module": lambda m, h, mask: checkpoint(
        nn.Sequential.forward, _Block(m.norm, m.scaled), h[mask], use_reentrant=False
    ),
}


class _Block(nn.Sequential):
    """Modules of another's, one after the other."""


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_rows_that_a_checkpoint_recomputes(name: str) -> None:
    torch.manual_seed(0)
    model = Picking(CHECKPOINTED[name]).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for part in (1.0, 0.5, 0.4, 0.8):
        _assert_right(model, ours, torch.randn(4, 4, 4, dtype=torch.float64), torch.rand(4, 4) < part)


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    model = Picking(PICKS["written-back"]).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    x, mask = torch.randn(4, 4, 4, dtype=torch.float64), torch.rand(4, 4) < 0.5
    (ours(x, mask) ** 2).sum().backward(create_graph=True)
    ours.after.weight.grad_sample.square().sum().backward()
    found = ours.before.weight.grad - torch.autograd.grad((model(x, mask) ** 2).sum(), model.before.weight)[0]
    rows = loop(model, lambda out, _: (out**2).sum(), (x, mask), create_graph=True)["after.weight"]
    torch.testing.assert_close(found, torch.autograd.grad(rows.square().sum(), model.before.weight)[0])


def test_what_a_call_returns_carries_nothing() -> None:
    ours = ps.convert_model(Picking(PICKS["layer"]))
    output = ours(torch.randn(4, 4, 4), torch.rand(4, 4) < 0.5)
    assert not output.__dict__


def test_the_mode_is_left_where_nothing_is_picked() -> None:
    ours = ps.convert_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    ours(torch.randn(3, 4)).sum().backward()
    assert not ours._ps_state().settings.has_gathered_rows


class Views(nn.Module):
    """Two inputs, one after the other in one batch."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body, self.how = body, how

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.how == "repeat":
            u, v = self.body(b.repeat(2, 1)).chunk(2)
            return (a.sum(1, keepdim=True) * u * v).sum(1)
        z = self.body(torch.cat([a, b]))
        u, v = z.chunk(2) if self.how == "chunk" else (z[: len(a)], z[len(a) :])
        return (u * v).sum(1)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


@pytest.mark.parametrize("how", ["chunk", "slices", "repeat"])
@pytest.mark.parametrize("body", [lambda: nn.Linear(5, 4), Own])
@pytest.mark.parametrize("sizes", [(3, 5, 3, 5), (5, 3, 5), (10, 5, 1, 10)])
def test_inputs_are_followed_in_batches_of_as_many_as_features(
    how: str, body: Callable[[], nn.Module], sizes: tuple[int, ...]
) -> None:
    """In all batches alike: also where a second input's features are as many as the samples."""
    torch.manual_seed(0)
    model = Views(body(), how).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for n in sizes:
        _assert_right(model, ours, *torch.randn(2, n, 5, dtype=torch.float64))


class PickedPositions(nn.Module):
    """Of a table that all samples share, some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.scale = nn.Linear(3, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return (x[:, 1:] * self.scale * self.position(table[1:])).sum((1, 2))


def test_a_shared_input_as_long_as_the_batch_is_not_followed() -> None:
    torch.manual_seed(0)
    model, table = PickedPositions().double(), torch.randn(4, 3, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for n in (4, 3, 4, 1, 4):
        x = torch.randn(n, 4, 3, dtype=torch.float64)
        ours.zero_grad()
        ours(x, table).sum().backward()
        for name, p in ours.named_parameters():
            rows = [
                torch.autograd.grad(model(one, table).sum(), model.get_parameter(name))[0]
                for one in x.split(1)
            ]
            torch.testing.assert_close(p.grad_sample, torch.stack(rows))


LOOK_UPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda z, h: torch.gather(z, 1, (h > 0).long()),
    "gather-by-name": lambda z, h: z.gather(index=(h > 0).long(), dim=-1),
    "take-along": lambda z, h: torch.take_along_dim(z, (h > 0).long(), 1),
    "take-along-by-name": lambda z, h: torch.take_along_dim(z, indices=(h > 0).long(), dim=1),
    "searched": lambda z, h: torch.searchsorted(h.sort(1).values, z.contiguous()).to(z),
    "in-buckets": lambda z, h: torch.bucketize(h, z[0].contiguous()).to(z),
}


class Chunked(nn.Module):
    """A coarse pass in pieces, and a fine one at depths where its results lie (NeRF)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.coarse, self.fine, self.look_up = nn.Linear(3, 4), nn.Linear(3, 2), LOOK_UPS[name]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cat([self.coarse(x[i : i + 3]) for i in range(0, len(x), 3)])
        depths = torch.linspace(0, 1, 4, dtype=x.dtype).expand(len(x), 4)
        points = x[:, None] * (1 + self.look_up(depths, h.detach()).unsqueeze(-1))
        return self.fine(points.reshape(-1, 3)).reshape(len(x), -1), h


@pytest.mark.parametrize("name", LOOK_UPS)
def test_what_is_looked_up_by_rows_that_were_cut(name: str) -> None:
    model = Chunked(name).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in (4, 3, 8, 1):
        x = torch.randn(size, 3).double()
        ours.zero_grad()
        sum(out.square().sum(1).mean() for out in ours(x)).backward()
        for key, rows in loop(model, lambda out, _: sum(t.square().sum() for t in out), (x,)).items():
            torch.testing.assert_close(ours.get_parameter(key).grad_sample, rows)


def _along_rows(order: Tensor, h: Tensor) -> Tensor:
    return order.unsqueeze(1).expand_as(h)


def _set_at_once(z: Tensor, order: Any, h: Tensor) -> Tensor:
    z[order] = h
    return z


def _set_in_turns(order: Tensor, h: Tensor) -> Tensor:
    z = torch.zeros(2, *h.shape).to(h)
    for step in range(2):
        z[step, order] = h * (1 + step)
    return z.sum(0)


def _written_through(z: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
    view = z[:]
    write(z)
    return view


def _in_parts(z: Tensor, h: Tensor) -> Tensor:
    for place in range(len(h)):
        z.narrow(0, place, 1).copy_(h[place : place + 1])
    return z


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # rows in an order
    "index": lambda h, order: h[order],
    "numbers": lambda h, order: torch.stack([h[i] for i in order]),
    "select": lambda h, order: torch.stack([torch.select(h, -2, i) for i in order]),
    "list": lambda h, order: h[order.tolist()],
    "tensor-of-numbers": lambda h, order: h[torch.tensor(order.tolist())],
    "unbind": lambda h, order: torch.stack([h.unbind()[i] for i in order]),
    "vmap": lambda h, order: torch.vmap(lambda i: h.index_select(0, i.view(1))[0])(order),
    "first-column": lambda h, order: _set_at_once(h.unsqueeze(1).repeat(1, 3, 1), (slice(None), 0), h[order])[
        :, 0
    ],
    "view-before": lambda h, order: _written_through(h.clone(), lambda z: z.copy_(h[order])),
    "by-parts": lambda h, order: _in_parts(h.clone(), h[order]),
}
PUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # into it
    "scatter": lambda h, order: torch.zeros_like(h).scatter(0, _along_rows(order, h), h),
    "scatter_add": lambda h, order: h.new_zeros(h.shape).scatter_add_(0, _along_rows(order, h), h),
    "index_copy": lambda h, order: torch.zeros_like(h).index_copy_(-2, order, h),
    "index_add": lambda h, order: torch.zeros(h.shape).to(h).index_add(source=h, index=order, dim=0),
    "index_put": lambda h, order: torch.zeros_like(h).index_put((order,), h),
    "index_put_add": lambda h, order: torch.zeros(h.shape).to(h).index_put_((order,), h, accumulate=True),
    "set": lambda h, order: _set_at_once(torch.zeros_like(h), order, h),
    "set-by-list": lambda h, order: _set_at_once(torch.zeros_like(h), order.tolist(), h),
    "set-by-numbers": lambda h, order: _set_at_once(torch.zeros_like(h), torch.tensor(order.tolist()), h),
    "set-columns": lambda h, order: _set_at_once(torch.zeros_like(h.T), (slice(None), order), h.T).T,
    "set-columns-by-numbers": lambda h, order: (
        _set_at_once(torch.zeros_like(h.T), (slice(None), order.tolist()), h.T).T
    ),
    "index_copy-columns": lambda h, order: torch.zeros_like(h.T).index_copy(1, order, h.T).T,
    "set-in-turns": lambda h, order: _set_in_turns(order, h),
}


class Sorting(nn.Module):
    """Samples in the order that they give themselves, and back."""

    def __init__(self, taken: str, put: str) -> None:
        super().__init__()
        self.before, self.between = nn.Linear(3, 4), nn.Linear(4, 2)
        self.taken, self.put = TAKEN.get(taken), PUT.get(put)

    def forward(self, x: Tensor) -> Tensor:
        h, order = self.before(x), x[:, 0].argsort()
        back = order.argsort()
        h = self.put(h, back) if self.taken is None else self.taken(h, order)
        h = self.between(h.sin()).sin()
        return self.put(h, order) if self.taken is None else self.taken(h, back)


@pytest.mark.parametrize(("taken", "put"), [*((name, "") for name in TAKEN), *(("", name) for name in PUT)])
@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
def test_an_order_that_was_that_of_the_batch_in_the_first_call(taken: str, put: str) -> None:
    model = Sorting(taken, put).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for scores in ([0, 1, 2, 3], [2, 0, 3, 1], [4, 3, 2, 1, 0], [1, 0]):
        x = torch.randn(len(scores), 3).double()
        x[:, 0] = torch.tensor(scores)
        ours.zero_grad()
        ours(x).square().sum(1).mean().backward()
        for key, rows in loop(model, lambda out, _: out.square().sum(), (x,)).items():
            torch.testing.assert_close(ours.get_parameter(key).grad_sample, rows)


@pytest.mark.parametrize("name", ["vmap", "first-column"])
@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
def test_an_order_that_is_given_as_a_tensor_is_right_or_an_error(name: str) -> None:
    """None of the forward's functions puts anything in order."""

    class Moving(Sorting):
        def forward(self, x: Tensor, order: Tensor, back: Tensor) -> Tensor:  # type: ignore[override]
            return self.taken(self.between(self.taken(self.before(x), order).sin()).sin(), back)

    model = Moving(name, "").double()
    ours = ps.convert_model(copy.deepcopy(model))
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1]), torch.tensor([1, 0])):
        x, ids = torch.randn(len(order), 3).double(), torch.zeros(1, dtype=torch.long)
        ours.zero_grad()
        try:
            ours(x, order, order.argsort()).square().sum(1).mean().backward()
        except ValueError:
            continue
        each = [model(one.unsqueeze(0), ids, ids).square().sum() for one in x]
        assert_rows(ours, true_rows(each.__getitem__, model, len(x)))


GIVEN: dict[str, Callable[[Tensor, list[int]], Tensor]] = {  # rows in an order, (B, 4)
    "columns": lambda h, order: h.unsqueeze(1).transpose(0, 1)[:, order].squeeze(0),
    "gather": lambda h, order: h.gather(0, _along_rows(torch.tensor(order), h)),
    "look-up": lambda h, order: F.embedding(torch.as_tensor(order), h),
    "one-hot": lambda h, order: F.one_hot(torch.tensor(order), len(order)).to(h) @ h,
    "array": lambda h, order: h.T[:, numpy.array(order)].T,
    "set": lambda h, order: _set_at_once(torch.zeros_like(h), numpy.argsort(order), h),
}


class Given(nn.Module):
    """Samples in an order that the caller says, and back."""

    def __init__(self, taken: str) -> None:
        super().__init__()
        self.before, self.between = nn.Linear(3, 4), nn.Linear(4, 4)
        self.taken = GIVEN[taken]

    def forward(self, x: Tensor, order: Any) -> Tensor:
        h = self.between(self.taken(self.before(x), list(order)).sin()).sin()
        return self.taken(h, numpy.argsort(order).tolist())


@pytest.mark.parametrize("kind", [list, numpy.array])
@pytest.mark.parametrize("taken", GIVEN)
@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
def test_an_order_that_a_call_is_given_is_right_or_an_error(taken: str, kind: Callable[..., Any]) -> None:
    model = Given(taken).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [4, 3, 2, 1, 0], [1, 0], [1, 0, 3, 2]):
        x = torch.randn(len(order), 3).double()
        ours.zero_grad()
        try:
            ours(x, kind(order)).square().sum(1).mean().backward()
        except ValueError:
            continue
        for key, p in ours.named_parameters():
            rows = [
                torch.autograd.grad(model(one, [0]).square().sum(), model.get_parameter(key))[0]
                for one in x.split(1)
            ]
            torch.testing.assert_close(p.grad_sample, torch.stack(rows))


class InParts(nn.Module):
    """A layer that the batch goes through some samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(part) for part in x.split(4)])


def test_parts_of_a_batch_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what is tried on three samples first is one part."""
    torch.manual_seed(0)
    learn, calls = ModelCall.learn, []
    monkeypatch.setattr(ModelCall, "learn", lambda call, *args: (calls.append(1), learn(call, *args))[1])
    model = InParts().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (12, 12, 10, 12):
        x = torch.randn(n, 4, 3, dtype=torch.float64)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))
    assert len(calls) == 1


class PackedTimeFirst(nn.Module):
    """Sequences are sorted and packed with the batch in dim 1, and put back; `inside`: it is in dim 0
    before and behind.
    """

    def __init__(self, order: str, flat: bool, inside: bool) -> None:
        super().__init__()
        self.order, self.flat, self.inside = order, flat, inside
        self.tok, self.rnn, self.out = nn.Embedding(9, 4), nn.LSTM(4, 3, bidirectional=True), nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.tok(ids)) * (ids > 2).unsqueeze(2)
        h, lengths = (h.transpose(0, 1), (ids > 0).sum(1)) if self.inside else (h, (ids > 0).sum(0))
        if self.order == "torch":
            h = self.rnn(pack_padded_sequence(h, lengths, enforce_sorted=False))[0]
            h = pad_packed_sequence(h)[0]
        else:
            lengths, order = lengths.sort(descending=True)
            take = (lambda h, i: h[:, i]) if self.order == "index" else (lambda h, i: h.index_select(1, i))
            h = take(
                pad_packed_sequence(self.rnn(pack_padded_sequence(take(h, order), lengths))[0])[0],
                order.argsort(),
            )
        h = self.out(h.reshape(-1, 6)).view(*h.shape[:2], 2) if self.flat else self.out(h)
        return h.transpose(0, 1) if self.inside else h


@pytest.mark.parametrize("first", [(5, 2, 4), (3, 3, 3), (2, 5), (1, 2, 3, 4)])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("order", ["torch", "index", "index_select"])
def test_sequences_that_are_sorted_in_dim_1(
    order: str, flat: bool, inside: bool, first: tuple[int, ...]
) -> None:
    model = PackedTimeFirst(order, flat, inside).double()
    ours = ps.convert_model(copy.deepcopy(model), batch_first=inside)
    for lengths in (first, (5, 3, 1), (1, 4, 2, 5), (2, 2)):
        steps = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
        ids = torch.randint(1, 9, steps.shape) * steps

        def loss(model: nn.Module, ids: Tensor) -> Tensor:
            output = model(ids) if inside else model(ids.t().contiguous()).transpose(0, 1)
            return (output.sin() * (ids > 0)[:, : output.shape[1], None]).sum((1, 2))

        ours.zero_grad()
        loss(ours, ids).mean().backward()
        each = [loss(model, one.unsqueeze(0)).sum() for one in ids]
        assert_rows(ours, true_rows(each.__getitem__, model, len(ids)))


class WrittenInDim1(nn.Module):
    """Samples' columns are put into another order in place, and a step of them is taken."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.before, self.out = way, nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x).sin()
        order = x[0, :, 0].argsort()
        moved = h.clone()
        if self.way == "set":
            moved[:, order] = h
        elif self.way == "view":
            moved.view(moved.shape)[:, order] = h
        elif self.way == "copy":
            moved.index_copy_(1, order, h)
        else:
            moved = h.gather(1, order.view(1, -1, 1).expand_as(h))
        last = self.out(moved[-1] * self.scale)
        return (last[order] if self.way != "gather" else last[order.argsort()]).sin().unsqueeze(0)


@pytest.mark.parametrize("way", ["set", "view", "copy", "gather"])
@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
def test_columns_that_are_written_are_right_or_refused(way: str) -> None:
    """In the order of the batch at first: what was noted of them then is not true of another."""
    model = WrittenInDim1(way).double()
    ours = ps.convert_model(copy.deepcopy(model), batch_first=False)
    for order in ((0, 1, 2, 3), (2, 0, 3, 1), (1, 0)):
        x = torch.randn(5, len(order), 3).double()
        x[0, :, 0] = torch.tensor(order)
        ours.zero_grad()
        try:
            ours(x).square().sum((0, 2)).mean().backward()
        except (ValueError, RuntimeError):
            continue
        each = [model(x[:, i : i + 1]).square().sum() for i in range(len(order))]
        assert_rows(ours, true_rows(each.__getitem__, model, len(order)))


class Captions(nn.Module):
    """A decoder of texts of all lengths, the longest first: each step is of those that have not ended. It
    returns its outputs in that order, and which one that is.
    """

    def __init__(self, told: str) -> None:
        super().__init__()
        self.told, self.words = told, nn.Embedding(7, 3)
        self.begin, self.cell, self.out = nn.Linear(2, 4), nn.LSTMCell(5, 4), nn.Linear(4, 2)

    def forward(self, images: Tensor, texts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        lengths, order = lengths.sort(descending=True)
        images, words = images[order], self.words(texts[order])
        h, c = self.begin(images), self.begin(images).sin()
        made = images.new_zeros(*texts.shape, 2)
        for step in range(int(lengths[0])):
            n = sum(length > step for length in lengths.tolist())
            h, c = self.cell(torch.cat([words[:n, step], images[:n]], 1), (h[:n], c[:n]))
            made[:n, step] = self.out(h)
        told = {"order": order, "back": order.argsort().int(), "none": None, "other": order.roll(1)}
        return made, told[self.told]


def _captions(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(size, 2).double(), torch.randint(7, (size, 5)), torch.randint(1, 6, (size,))


@pytest.mark.parametrize("first", [6, 5])  # and with as many texts as words
@pytest.mark.parametrize("told", ["order", "back"])
def test_outputs_in_another_order_that_the_model_returns(told: str, first: int) -> None:
    model = Captions(told).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for size in (first, 6, 5, 2, 6):
        batch = _captions(size)
        ours.zero_grad()
        made, _ = ours(*batch)
        made.sin().sum().backward()
        rows = loop(model, lambda out, _: out[0].sin().sum(), batch)
        for key, row in rows.items():
            torch.testing.assert_close(ours.get_parameter(key).grad_sample, row)


@pytest.mark.parametrize("told", ["none", "other"])
def test_outputs_in_an_order_that_is_not_returned_are_refused(told: str) -> None:
    ours = ps.convert_model(Captions(told).double())
    images, texts, _ = _captions(4)
    with pytest.raises(ValueError, match="return the order"):
        ours(images, texts, torch.tensor([2, 4, 1, 3]))


def test_what_was_known_of_a_tensor_that_is_gone_is_not_of_another_at_its_place() -> None:
    """Else what runs again, by chance, does other things than at first: a selective checkpoint counts ops."""
    with GatheredRows(3) as picks:
        gone, other = torch.zeros(3, 2), torch.zeros(3, 2)
        picks.tag_batch(gone)
        picks.tags.of[id(other)] = picks.tags.of.pop(id(gone))
        del gone
        assert picks.owners(other) is None
        assert not picks._any([other, [other]])
        picks.tag_batch(other)
        assert picks._any([[other]])
