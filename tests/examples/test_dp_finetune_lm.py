"""The language model that is fine-tuned privately: each step is that of clipped gradients, one by one; over
processes too; and what ranks send is what the arithmetic says.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from .loading import EXAMPLES

ROOT = EXAMPLES.parent
SMALL = "--width 16 --layers 2 --length 8 --samples 200 --batch 6 --micro-batch 4 --public-steps 2 --noise 1"


def parsed(example: ModuleType, text: str) -> argparse.Namespace:
    """The options that `main` makes of these."""
    found: list[argparse.Namespace] = []
    example.compared, kept = found.append, example.compared
    try:
        example.main([*SMALL.split(), *text.split()])
    finally:
        example.compared = kept
    return found[0]


@pytest.fixture(scope="module", autouse=True)
def texts(example: ModuleType) -> tuple[Tensor, Tensor, Tensor]:
    """The text is read once, by the first that asks."""
    load, found = example.load, []

    def once(options: argparse.Namespace) -> Any:
        found[:] = found or [load(options)]
        return found[0]

    example.load = once
    return once(parsed(example, ""))


def drawn(options: argparse.Namespace, x: Tensor) -> Tensor:
    """The samples of the first batch, by coins that are thrown as the example throws them."""
    coins = torch.Generator().manual_seed(options.seed + 1)
    return (torch.rand(len(x), generator=coins) < options.batch / len(x)).nonzero().squeeze(1)


def clipped_sum(example: ModuleType, options: argparse.Namespace, start: Any, x: Tensor) -> dict[str, Tensor]:
    """The sum of clipped gradients, sample by sample in plain torch."""
    model = example.prepared(options, start)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    for i in drawn(options, x):
        loss = F.cross_entropy(model(x[i : i + 1]).logits[0, :-1], x[i, 1:])
        grads = torch.autograd.grad(loss, list(trained.values()))
        norm = sum(g.square().sum() for g in grads).sqrt()
        for name, g in zip(trained, grads, strict=True):
            total[name] += g * (options.max_norm / norm).clamp(max=1)
    return total


@pytest.mark.parametrize("kind", ["--full", "--lora 2", "--full --checkpoint", "--lora 2 --checkpoint"])
def test_a_step_is_that_of_the_loop(
    example: ModuleType, texts: tuple[Tensor, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGD: the sum of clipped gradients plus noise, over the expected batch size."""
    options = parsed(example, f"--double --steps 1 --lr 1 --max-norm 0.05 {kind}")
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)
    start, x = example.pretrain(options, False), texts[1]
    first = {n: p.detach().clone() for n, p in example.prepared(options, start).named_parameters()}
    run, total = example.train(options, start, True), clipped_sum(example, options, start, x)
    noise = torch.Generator().manual_seed(options.seed + 2)
    assert len(drawn(options, x)) > options.micro_batch and run.weights.keys() == total.keys()
    for name, sums in total.items():
        noisy = sums + options.noise * 0.05 * torch.randn(sums.shape, generator=noise, dtype=sums.dtype)
        torch.testing.assert_close(run.weights[name], first[name] - noisy / options.batch, rtol=0, atol=1e-12)
    assert run.clipped == 1 and len(run.curve) == 2 and 0 < run.epsilon < 20


def test_an_empty_batch_is_noise_alone(
    example: ModuleType, texts: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parsed(example, "--double --steps 1 --lr 1 --batch 1 --full")
    while len(drawn(options, texts[1])):
        options.seed += 1
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)
    start = example.pretrain(options, False)
    noise = torch.Generator().manual_seed(options.seed + 2)
    for name, t in example.train(options, start, True).weights.items():
        drawn_noise = torch.randn(t.shape, generator=noise, dtype=t.dtype)
        torch.testing.assert_close(t, start[name] - options.noise * options.max_norm * drawn_noise)


def test_parts_hold_each_sample_once(example: ModuleType) -> None:
    x = torch.arange(40).view(20, 2)
    for n in (0, 1, 5, 8, 20):
        ranks = [example.parts(torch.arange(n), x, 3, rank, 2) for rank in range(2)]
        assert len({len(found) for found in ranks}) == 1 and ranks[0]
        kept = [ids for found in ranks for ids, labels in found if (labels != -100).any()]
        assert sorted(row[0].item() // 2 for ids in kept for row in ids) == list(range(n))
        assert all(0 < len(ids) <= 3 for found in ranks for ids, _ in found)


def test_losses_are_means_over_own_tokens(example: ModuleType, texts: tuple[Tensor, ...]) -> None:
    options = parsed(example, "--double --full")
    model = example.prepared(options, example.base_model(options).state_dict())
    ids = texts[1][:3]
    labels = ids.masked_fill(torch.arange(8) >= torch.tensor([[8], [3], [0]]), -100)
    found = example.sequence_losses(model, ids, labels)
    each = [F.cross_entropy(model(ids).logits[i, : n - 1], ids[i, 1:n]) for i, n in enumerate((8, 3))]
    torch.testing.assert_close(found, torch.stack([*each, torch.zeros((), dtype=torch.float64)]))


def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.png"
    options = SMALL.replace("--noise 1", "--epsilon 5").split()
    runs = example.main([*options, "--quick", "--output", str(picture)])
    out = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in out and "held-out loss" in out
    assert 4.9 < runs["private"].epsilon <= 5 and runs["plain"].epsilon == float("inf")
    assert runs["plain"].curve[-1][1] < runs["plain"].curve[0][1] == runs["private"].curve[0][1]


@pytest.mark.slow
def test_processes_of_their_own_and_a_saved_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    """A model and a tokenizer by their folder; memory is measured."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    options = parsed(example, "")
    example.base_model(options).save_pretrained(tmp_path)
    characters = {chr(i): i for i in range(256)}
    tokenizer = Tokenizer(models.BPE(characters, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    command = [sys.executable, str(EXAMPLES / "dp_finetune_lm.py"), *SMALL.split(), "--steps", "3", "--bf16"]
    command += ["--model", str(tmp_path), "--output", str(tmp_path / "curves.png")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    rows = re.findall(r"│ (plain|private) +│ +([\d.]+) │ +(\S+) │ +(\d+) │ +(\d+) │", run.stdout)
    assert [row[0] for row in rows] == ["plain", "private"], run.stdout
    assert "of its memory above the model's" in run.stdout.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "kind"),
    [
        (2, "--fsdp --full"),
        (2, "--fsdp"),
        (2, "--fsdp --full --checkpoint"),
        (2, "--full"),
        (4, "--fsdp --full"),
    ],
)
def test_processes_are_as_one(example: ModuleType, processes: int, kind: str) -> None:
    """Parts of batches are empty on some of them; what is sent under FSDP2 is what `on_many` says."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--standalone",
    ]
    options = [*SMALL.split(), "--double", "--steps", "4", "--micro-batch", "1", *kind.split()]
    run = subprocess.run(
        [*command, str(EXAMPLES / "dp_finetune_lm.py"), *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    apart = re.search(r"differ from those of one process by (\S+) at most", run.stdout.replace("\n", " "))
    assert apart is not None and float(apart[1]) < 1e-12, run.stdout
    rows = {
        row[0].strip(): row[1:] for row in (line.split("│")[1:-1] for line in run.stdout.splitlines()) if row
    }
    assert {str(rank) for rank in range(processes)} <= rows.keys(), run.stdout
    if "--fsdp" in kind:
        for counted, said in zip(rows["0"], rows["by arithmetic"], strict=True):
            assert not said.strip() or counted == said, run.stdout
        assert sum(bool(said.strip()) for said in rows["by arithmetic"]) == 5


def test_the_table_of_the_guide_is_what_the_arithmetic_gives(example: ModuleType) -> None:
    """Every row of docs/private_language_models.md: model, GPUs, then GB."""
    models = {
        "GPT-2 XL, full": (1_557_611_200, 1_557_611_200, 48, 30_740_800),
        "7 billion, full": (6_738_415_616, 6_738_415_616, 32, 202_383_360),
        "7 billion, LoRA": (6_738_415_616 + 19_988_480, 19_988_480, 32, 202_383_360 + 624_640),
    }
    page = (ROOT / "docs/private_language_models.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 9 and {name for name, *_ in rows} == models.keys()
    for name, world, numbers in rows:
        params, trained, blocks, block = models[name]
        found = example.on_many(int(world), params, trained, blocks, block)
        shards = sum(found[key] for key in ("parameters", "gradients", "AdamW's states"))
        expected = [shards, found["gathered"], found["all-gathers"], found["reduce-scatters"]]
        assert numbers == " | ".join(f"{n / 1e9:.2f}" for n in expected), (name, world)
