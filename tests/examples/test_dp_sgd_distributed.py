"""The example gives in two processes what it gives in one, empty parts of batches and all."""

import os
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import pslayers as ps

from ..oracle import loop
from .loading import EXAMPLES


@pytest.mark.long
def test_two_processes_are_as_one(example: ModuleType) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    options = ["--steps", "25", "--batch", "3"]
    run = subprocess.run(
        [*command, str(EXAMPLES / "dp_sgd_distributed.py"), *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )
    empty = re.search(r"empty parts of batches .*? (\d+) of 50", run.stdout)
    apart = re.search(r"difference from one process .*? (\d\S+)", run.stdout)
    assert empty is not None and int(empty[1]) > 0, run.stdout
    assert apart is not None and float(apart[1]) < 1e-12, run.stdout


def test_one_process_learns(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--steps", "40"]) < 1e-12
    accuracy = re.search(r"digits .*? ([\d.]+)%", capsys.readouterr().out)
    assert accuracy is not None and float(accuracy[1]) > 60


def test_clipped_sum_against_a_loop(example: ModuleType) -> None:
    model = example.network()
    x, y = torch.rand(5, 1, 8, 8, dtype=torch.float64), torch.arange(5)
    each = loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,))
    rows = torch.cat([g.flatten(1) for g in each.values()], 1)
    clipped = rows * (example.CLIP / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    ps.convert_model(model)
    torch.testing.assert_close(example.clipped_sum(model, x, y), clipped.sum(0))
    assert not example.clipped_sum(model, x[:0], y[:0]).any()
