"""The example runs, clips each scan's gradient, proves what it may, and attacks as its formulas say."""

import dataclasses
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pslayers as ps

from ..oracle import flat, loop


@pytest.mark.long
def test_quick_run(
    example: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(example, "PLAIN", (0.1, 20, 0.2, 0.9))  # half the epochs
    monkeypatch.setattr(example, "PRIVATE", (0.25, 15, 1.0, 0.0))
    path = tmp_path / "membership.png"
    found = example.main(["--quick", "--epsilon", "3", "--output", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    printed = capsys.readouterr().out
    assert all(name in printed for name in found) and str(path) in printed
    plain, clipped, private = found["plain"], found["only clipped"], found["epsilon 3"]
    assert plain.accuracy.mean() > 0.95 and min(each.accuracy.mean() for each in found.values()) > 0.9
    assert plain.area[0] > private.area[0] + 0.03 and private.area[0] < 0.55
    assert (
        plain.curve[0, example.ONE] > 2 * private.curve[0, example.ONE] and plain.curve[1, example.ONE] > 0.02
    )
    assert plain.curve[0, example.ONE] > clipped.curve[0, example.ONE]
    assert plain.named.topk(50).values.mean() > 0.9 > 3 * private.named[plain.named.topk(50).indices].mean()
    proved = example.limit(private.proved, example.RATES)
    assert 2.9 < private.proved[example.DELTAS.index(example.DELTA)] <= 3
    assert (private.curve[1] <= proved).all()
    assert "what may be guessing" in printed or "more than guessing" in printed

    failed = dataclasses.replace(plain, proved=private.proved)  # what is said where private training fails
    said = example.statement({**found, "epsilon 3": failed})
    assert "more than guessing" in said and said.count(f"{plain.curve[0, example.ONE]:.1%}") == 2
    guessed = dataclasses.replace(private, curve=np.stack([example.RATES, example.RATES / 2, example.RATES]))
    assert "names 1.0%, what may be guessing" in example.statement({**found, "epsilon 3": guessed})


@pytest.mark.parametrize("batch", [0, 1, 9])
def test_gradient_against_a_loop_over_samples(example: ModuleType, batch: int) -> None:
    model = example.network().double()
    x, y = 5 * torch.randn(batch, 64).double(), torch.randint(0, 10, (batch,))
    x[1:3] *= 1e-3  # of different norms
    each = loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1], reduction="sum"), (x,))
    rows = flat(each) if batch else torch.zeros(0, 4810).double()
    factors = (example.CLIP / rows.norm(dim=1)).clamp(max=1)
    ps.convert_model(model, loss_reduction="sum")
    example.private_gradient(model, x, y, noise=0.0, expected=7.0)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, factors @ rows / 7)
    assert found.norm() <= batch * example.CLIP / 7 + 1e-9

    torch.manual_seed(1)
    example.private_gradient(model, x, y, noise=3.0, expected=7.0)
    noise = torch.cat([p.grad.flatten() for p in model.parameters()]) - found
    assert noise.std().item() == pytest.approx(3 * example.CLIP / 7, rel=0.05)


def test_no_scan_moves_a_step_by_more_than_the_norm(example: ModuleType) -> None:
    model = ps.convert_model(example.network(), loss_reduction="sum")
    x, y = torch.randn(20, 64), torch.randint(0, 10, (20,))
    x[0] *= 1e4
    steps = []
    for first in (0, 1):  # with it, and without it
        example.private_gradient(model, x[first:], y[first:], noise=0.0, expected=1.0)
        steps.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 0.99 * example.CLIP < (steps[0] - steps[1]).norm() < 1.001 * example.CLIP


def normal(z: Tensor) -> Tensor:
    return torch.special.ndtr(z)


@pytest.mark.filterwarnings("ignore:Optimal order is:UserWarning")
def test_accountant_of_whole_batches_is_the_gaussian_mechanism(example: ModuleType) -> None:
    """25 steps with noise 10 are one with noise 2, of which delta and trade-off are known in closed form
    (Balle & Wang 2018, arXiv:1805.06530; Dong et al. 2019, arXiv:1905.02383).
    """
    found = torch.tensor(example.epsilons(10.0, 1 - 1e-6, 25)).double()
    delta = normal(0.25 - 2 * found) - found.exp() * normal(-0.25 - 2 * found)
    assert (delta <= torch.tensor(example.DELTAS)).all()  # an upper bound
    less = found - 0.05  # and hardly more
    delta = normal(0.25 - 2 * less) - less.exp() * normal(-0.25 - 2 * less)
    assert (delta >= torch.tensor(example.DELTAS)).all()

    rates = torch.tensor(example.RATES)
    best = normal(torch.special.ndtri(rates) + 0.5).numpy()
    limit = example.limit(found.tolist(), example.RATES)
    assert (limit >= best - 1e-9).all() and (limit[40:] <= 2 * best[40:]).all()


@pytest.mark.filterwarnings("ignore:Optimal order is:UserWarning")
def test_accountant_of_drawn_batches_against_renyi_divergences(example: ModuleType) -> None:
    """Those of the subsampled Gaussian at whole orders (Mironov et al. 2019, arXiv:1908.10530), which bound
    epsilon from above.
    """
    q, noise, epochs = 0.25, 3.5, 30
    bounds = []
    for order in range(2, 64):
        k = torch.arange(order + 1).double()
        binomial = math.lgamma(order + 1) - torch.lgamma(k + 1) - torch.lgamma(order - k + 1)
        terms = binomial + k * math.log(q) + (order - k) * math.log(1 - q) + k * (k - 1) / (2 * noise**2)
        renyi = terms.logsumexp(0).item() / (order - 1) * epochs / q
        bounds.append(
            renyi + math.log1p(-1 / order) - (math.log(example.DELTA) + math.log(order)) / (order - 1)
        )
    found = example.epsilons(noise, q, epochs)[example.DELTAS.index(example.DELTA)]
    assert 0.85 * min(bounds) < found < min(bounds)


def test_scores_are_likelihood_ratios(example: ModuleType) -> None:
    sure, member = torch.randn(6, 5).double(), torch.rand(6, 5) < 0.5
    member[:, 0], member[:, 1], member[:3, 2:], member[3:, 2:] = True, False, True, False
    scores = example.lira(sure, member)
    assert (scores[:, :2] == 0).all()  # nothing to compare with
    k, i, logs = 1, 3, []
    for inside in (True, False):
        groups = [[sure[j, n] for j in range(6) if j != k and member[j, n] == inside] for n in range(5)]
        centred = [v - sum(group) / len(group) for group in groups for v in group]
        spread = math.sqrt(sum(v**2 for v in centred) / len(centred))
        mean = sum(groups[i]) / len(groups[i])
        logs.append(torch.distributions.Normal(mean, spread).log_prob(sure[k, i]))
    torch.testing.assert_close(scores[k, i], logs[0] - logs[1])


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_attack_finds_what_was_planted(example: ModuleType, shift: float) -> None:
    """Logits whose members are `shift` standard deviations surer, on top of how hard each scan is."""
    member, y = torch.rand(40, 400) < 0.5, torch.randint(0, 10, (400,))
    sure = 10 * torch.randn(400) + torch.randn(40, 400) + shift * member
    logits = torch.zeros(40, 400, 10).scatter(2, y.expand(40, 400).unsqueeze(2), sure.unsqueeze(2))
    torch.testing.assert_close(example.confidence(logits, y), sure - math.log(9))
    found = example.attack(logits, y, member, None)
    assert found.area[1] <= found.area[0] <= found.area[2] and found.area[2] - found.area[1] < 0.03
    assert found.area[0] == pytest.approx(normal(torch.tensor(shift / math.sqrt(2))).item(), abs=0.02)
    best = normal(torch.special.ndtri(torch.tensor(0.01)) + shift).item()
    assert found.curve[0, example.ONE] == pytest.approx(best, rel=0.25)
    assert found.named.mean().item() == pytest.approx(found.curve[0, example.ONE], rel=0.05)
    hidden = (sure > 0) & ~member
    assert found.accuracy.mean().item() == pytest.approx((hidden.sum() / (~member).sum()).item(), abs=0.02)
