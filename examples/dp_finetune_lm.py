"""Fine-tune a language model with differential privacy, with LoRA or in full, in one process or sharded over
several by FSDP2.

A model of transformers, peft's adapters, accelerate for precision and processes, Opacus' accountant; clipped
by pslayers, without a per-sample gradient being formed:

    with ps.clipping(model, max_norm):
        sequence_losses(model, ids, labels).sum().backward()    # one loss a sequence: the mean of its tokens'

then noise once a step, and AdamW. What DP-SGD (Abadi et al. 2016, arXiv:1607.00133) asks for beside clipping
is all here: each sequence is in a batch by its own coin (Poisson sampling; a batch, or a process' part of
one, may be empty), micro-batches are parts of one batch, the sum is divided by the *expected* batch size.

Nothing is downloaded: without ``--model`` a small GPT-2 with random weights is first trained, plainly, on
text that counts as public, Python's own reference (its ``pydoc_data``), and then fine-tuned on text that
counts as private, scikit-learn's docstrings, byte by byte. One block of ``--length`` bytes is one sample: it
is what (epsilon, delta) protects, *not* a whole docstring, which is many of them. The curve is of held-out
blocks: the training loss would say something of the training text that epsilon does not count (as does the
share of clipped gradients, which is printed). Coins and noise come from seeds that can be read here: keep
them secret, and use a cryptographic generator, to publish a model.

Run it (some minutes on one core), and see ``--help`` for the options:

    pip install '.[language]'
    python examples/dp_finetune_lm.py
    python examples/dp_finetune_lm.py --full --lr 1e-3 --bf16 --checkpoint
    python examples/dp_finetune_lm.py --model openai-community/gpt2 --length 256 --lr 1e-3
    torchrun --nproc-per-node 2 examples/dp_finetune_lm.py --fsdp --double --steps 10

It trains plainly and privately, each in a process of its own, on the same batches; it prints losses, epsilon,
time and memory, and draws the curves. Under torchrun it trains privately over all processes (FSDP2, or DDP
without ``--fsdp``), then in process 0 alone, and says how far the weights are apart, what each rank holds,
and what it sends.
"""

import argparse
import math
import os
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus' own imports
        from opacus.accountants import RDPAccountant
        from opacus.accountants.utils import get_noise_multiplier
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import sklearn
    from accelerate import Accelerator
    from accelerate.utils import gather_object
    from peft import LoraConfig, get_peft_model
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config
except ImportError as error:
    sys.exit(f"This example needs {(error.name or str(error)).split('.')[0]}: pip install '.[language]'.")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pslayers as ps

HELD_OUT, MIB, WARM = 256, 2**20, 2  # sequences; bytes; steps that are not timed
Options = argparse.Namespace


# --------------------------------------------------------------------------------------------------- the text
def load(options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Public, private and held-out sequences of tokens, each (N, T)."""
    sources = [p for p in sorted(Path(sklearn.__file__).parent.rglob("*.py")) if "tests" not in p.parts]
    strings = [found for p in sources for found in re.findall('"""(.*?)"""', p.read_text("utf8"), re.DOTALL)]
    public, private = (blocks(text, options) for text in ("\n".join(topics.values()), "\n".join(strings)))
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(options.seed))
    order = order[: options.samples + HELD_OUT]
    return public, private[order[HELD_OUT:]], private[order[:HELD_OUT]]


def blocks(text: str, options: Options) -> Tensor:
    """The tokens of a text, by its bytes or by the model's own tokenizer: (N, T)."""
    if options.model:
        ids = AutoTokenizer.from_pretrained(options.model)(text, add_special_tokens=False)["input_ids"]
    else:
        ids = list(text.encode())
    return torch.tensor(ids[: len(ids) // options.length * options.length]).view(-1, options.length)


# -------------------------------------------------------------------------------------------------- the model
class Checkpointed(nn.Module):
    """A block whose inside is computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's, with no value inside of it kept."""
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def base_model(options: Options) -> Any:
    """The pretrained model, or one of its shape with random weights."""
    torch.manual_seed(options.seed)
    model: Any
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        shape: Any = {"n_embd": options.width, "n_layer": options.layers, "n_positions": options.length}
        config = GPT2Config(vocab_size=256, n_head=4, bos_token_id=0, eos_token_id=0, **shape)
        model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # noise and clipping regularise enough; and processes would draw other masks
    return model.to(torch.float64 if options.double else torch.float32)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The model's list of equal blocks."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def prepared(options: Options, weights: dict[str, Tensor]) -> nn.Module:
    """The model that is fine-tuned: with adapters, and checkpoints, where these are asked for."""
    model = base_model(options)
    model.load_state_dict(weights)
    if not options.full:
        lora = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of GPT-2's weights, which are transposed
            model = get_peft_model(model, lora)
    if options.checkpoint:
        layers = blocks_of(model)
        for i, block in enumerate(layers):
            layers[i] = Checkpointed(block)
    return model.train()


def sizes_of(model: nn.Module) -> dict[str, int]:
    """What `on_many` asks for."""
    layers, params = blocks_of(model), list(model.parameters())
    return {
        "params": sum(p.numel() for p in params),
        "trained": sum(p.numel() for p in params if p.requires_grad),
        "blocks": len(layers),
        "block": sum(p.numel() for p in layers[0].parameters()),
    }


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2: each block is gathered when it runs; what is outside of blocks, for the whole pass."""
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    return model


# ----------------------------------------------------------------------------------------------- the training
def sequence_losses(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """One loss a sequence, the mean over its tokens: (B,); 0 for one whose labels are all -100."""
    logits = model(ids).logits[:, :-1]  # (B, T - 1, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")  # (B, T - 1), 0 at -100
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)


def parts(drawn: Tensor, x: Tensor, micro: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """This process' micro-batches of a batch, ids and labels. All processes have equally many, since each
    pass is a collective operation. Where one has nothing to do, a sequence without labels stands in, whose
    gradient is zero (models of transformers take no batch of none).
    """
    found = []
    for part in drawn.split(micro * world):
        ids = x[part[rank::world]]
        found.append((ids, ids) if len(ids) else (x[:1], torch.full_like(x[:1], -100)))
    return found


def noise_for(p: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Normal noise for a whole parameter, of which a shard takes its part: the same in all processes."""
    noise = (scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)).to(p.device)
    if isinstance(p, DTensor):
        return distribute_tensor(noise, p.device_mesh, p.placements, src_data_rank=None)
    return noise


@dataclass
class Run:
    """What one training has given."""

    curve: list[tuple[int, float]] = field(default_factory=list)  # step, held-out loss
    epsilon: float = math.inf
    seconds: float = math.nan  # a step takes, in the median
    peak: float = math.nan  # MiB, above what was held before the first step
    clipped: float = math.nan  # share of the sequences whose gradient was
    weights: dict[str, Tensor] = field(default_factory=dict)  # of what was trained
    sizes: dict[str, int] = field(default_factory=dict)  # of the model, see `on_many`
    holds: dict[str, float] = field(default_factory=dict)  # bytes on this rank, see `holdings`
    sends: dict[str, float] = field(default_factory=dict)  # bytes in one pass, see `Sent`


def train(
    options: Options, weights: dict[str, Tensor], private: bool, rank: int = 0, world: int = 1, name: str = ""
) -> Run:
    """Fine-tune on this process' share of each batch, together with the others."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="bf16" if options.bf16 else "no"
    )
    _, x, held_out = (t.to(accelerator.device) for t in load(options))
    model = prepared(options, weights).to(accelerator.device)
    if private:
        ps.convert_model(model, loss_reduction="sum", example=x[:2])
    run = Run(sizes=sizes_of(model))
    if options.fsdp and world > 1:
        model = sharded(model)
    elif world > 1:
        model = accelerator.prepare_model(model)  # DistributedDataParallel
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=options.lr, weight_decay=0.0)
    coins, noise = (torch.Generator().manual_seed(options.seed + k) for k in (1, 2))
    rate, accountant = options.batch / len(x), RDPAccountant()
    # what a checkpoint does not keep, clipping need not either; FSDP2's shards take one pass
    twice: Any = "auto" if options.checkpoint and not (options.fsdp and world > 1) else 1

    def passes(drawn: Tensor) -> tuple[int, int]:
        """The passes of one batch; how many of this process' sequences there were, and how many clipped."""
        seen = cut = 0
        for ids, labels in parts(drawn, x, options.micro_batch, rank, world):
            clipping: Any = ps.clipping(model, options.max_norm, twice) if private else nullcontext()
            with clipping as clip:
                with accelerator.autocast():
                    losses = sequence_losses(model, ids, labels)
                (clip or accelerator).backward(losses.sum())
            if private:
                seen, cut = seen + len(clip.norms), cut + int((clip.norms > options.max_norm).sum())
        return seen, cut

    if world > 1:
        run.holds = holdings(model, x[rank : rank + options.micro_batch])
    clock = time.perf_counter if accelerator.device.type == "cuda" else time.process_time
    before, times, counts = reset_memory(accelerator.device), [], []
    for step in tqdm(range(options.steps + 1), name or "training", disable=rank > 0, mininterval=0.5):
        if step % max(1, options.steps // 10) == 0 or step == options.steps:
            run.curve.append((step, evaluate(model, held_out)))
        if step == options.steps:
            break
        start = clock()
        drawn = (torch.rand(len(x), generator=coins) < rate).nonzero().squeeze(1)  # a coin for each sequence
        counting = Sent() if world > 1 and step == 1 else nullcontext()
        with counting as sent:
            counts.append(passes(drawn))
        if sent is not None:
            passed = max(1, -(-len(drawn) // (options.micro_batch * world)))
            run.sends = {kind: n / passed for kind, n in sent.bytes.items()}
        for p in trained.values():
            total = torch.zeros_like(p) if p.grad is None else world * p.grad  # was averaged over processes
            if private:
                total = total + noise_for(p, options.noise * options.max_norm, noise)
            p.grad = total / options.batch
        optimizer.step()
        optimizer.zero_grad()
        accountant.step(noise_multiplier=options.noise, sample_rate=rate)
        if accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    run.seconds = statistics.median(times[WARM:] or times)
    run.peak = peak_memory(accelerator.device) - before
    if private:
        run.epsilon = accountant.get_epsilon(options.delta)
        run.clipped = sum(cut for _, cut in counts) / max(1, sum(seen for seen, _ in counts))
    for name, p in trained.items():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        run.weights[name.removeprefix("module.")] = whole.detach().cpu()
    if world > 1:
        states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        run.holds |= {"gradients": held(trained.values()), "AdamW's states": held(states)}
    return run


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor) -> float:
    """The mean loss of sequences."""
    return torch.cat([sequence_losses(model, part, part) for part in x.split(64)]).mean().item()


def pretrain(options: Options, show: bool = True) -> dict[str, Tensor]:
    """The weights that fine-tuning starts from: the checkpoint's, or of a short training on public text."""
    model, (public, _, _) = base_model(options), load(options)
    steps = 0 if options.model else options.public_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(1, steps))
    for _ in tqdm(range(steps), "public text", disable=not show, mininterval=0.5):
        ids = public[torch.randint(0, len(public), (64,))]
        optimizer.zero_grad()
        sequence_losses(model.train(), ids, ids).mean().backward()
        optimizer.step()
        schedule.step()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


# -------------------------------------------------------------------------------------- what a process holds
def reset_memory(device: torch.device) -> float:
    """Forget the peak of memory so far; MiB that are held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / MIB
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return of_process("VmRSS")


def peak_memory(device: torch.device) -> float:
    """The most since, in MiB: what torch has allocated on a GPU, what the process holds on a CPU."""
    return torch.cuda.max_memory_allocated() / MIB if device.type == "cuda" else of_process("VmHWM")


def of_process(field: str) -> float:
    """MiB by the kernel's count of this process; not known elsewhere than on Linux."""
    status = Path("/proc/self/status")
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found[1]) / 1024 if found else math.nan


def held(tensors: Any) -> int:
    """Bytes that this process holds of them."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def holdings(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Bytes that this rank holds of parameters, and for each sequence: what autograd saves for the backward
    pass, and the factors that clipping keeps to its end.
    """
    saved: dict[int, int] = {}

    def save(t: Tensor) -> Tensor:
        gathered = [p for p in model.parameters() if not isinstance(p, DTensor)]  # just now
        if (storage := t.untyped_storage()).data_ptr() not in {p.data_ptr() for p in gathered}:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    parameters = held(model.parameters())
    with ps.factored(model, grad=False) as grads:
        with saved_tensors_hooks(save, lambda t: t):
            loss = sequence_losses(model, ids, ids).sum()
        loss.backward()
    each = {"saved": sum(saved.values()) / len(ids), "factors": grads.nbytes / len(ids)}
    return {"parameters": parameters, **each}


class Sent(TorchDispatchMode):
    """Counts the bytes that this process sends in collective operations, as a ring of W processes sends them:
    (W - 1) / W of what is gathered, or scattered in sums; twice that for a sum that all get.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        world = torch.distributed.get_world_size()
        whole = {  # the tensor that is whole on every rank
            "_allgather_base_": ("all-gathers", 1, args[:1]),
            "all_gather_into_tensor": ("all-gathers", 1, result),
            "_reduce_scatter_base_": ("reduce-scatters", 1, args[1:2]),
            "reduce_scatter_tensor": ("reduce-scatters", 1, args[:1]),
            "allreduce_": ("all-reduces", 2, args[:1]),
            "all_reduce": ("all-reduces", 2, args[:1]),
        }
        name = op.__name__.partition(".")[0]
        if "c10d" in op.namespace and name in whole:
            kind, times, tensors = whole[name]
            n = sum(t.nbytes for t in torch.utils._pytree.tree_leaves(tensors) if isinstance(t, Tensor))
            self.bytes[kind] += times * n * (world - 1) // world
        return result


def on_many(
    world: int, params: int, trained: int, blocks: int, block: int, nbytes: int = 4
) -> dict[str, float]:
    """Bytes that each of many ranks holds under FSDP2, and sends for one pass of clipping, by arithmetic.

    Args:
        world: W, the number of ranks.
        params: numbers in all parameters.
        trained: how many of them are trained.
        blocks: how many blocks the model has.
        block: numbers in the parameters of one block.
        nbytes: bytes of a number.
    """
    share, outside = (world - 1) / world, params - blocks * block
    return {
        "parameters": nbytes * params / world,
        "gradients": nbytes * trained / world,
        "AdamW's states": nbytes * 2 * trained / world,
        "gathered": nbytes * (outside + 2 * block),  # for the whole pass; this block and the next
        "all-gathers": nbytes * share * (params + blocks * block),  # forward, and blocks again backward
        "reduce-scatters": nbytes * share * trained,
    }


# ----------------------------------------------------------------------------------------------- what is said
def in_a_process(function: Any, *arguments: Any) -> Any:
    """What a function returns in a process of its own, whose memory nothing else has shaped."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def compared(options: Options) -> dict[str, Run]:
    """Train plainly and privately, print the table, draw the curves."""
    call = (lambda f, *a: f(*a)) if options.quick else in_a_process
    weights = call(pretrain, options)
    runs = {
        name: call(train, options, weights, name == "private", 0, 1, name) for name in ("plain", "private")
    }
    plain, private = runs.values()
    numbers = sum(t.numel() for t in private.weights.values())
    what = "all" if options.full else f"LoRA of rank {options.lora},"
    table = Table("", title=f"{what} {numbers:,} numbers trained, {options.steps} steps of {options.batch}")
    for head in ("held-out loss*", "epsilon", "ms a step**", "peak, MiB"):
        table.add_column(head, justify="right")
    table.add_row("before", f"{plain.curve[0][1]:.3f}", "0", "", "")
    for name, run in runs.items():
        peak = "" if options.quick or math.isnan(run.peak) else f"{run.peak:.0f}"
        cells = f"{run.curve[-1][1]:.3f}", f"{run.epsilon:.2f}", f"{1e3 * run.seconds:.0f}", peak
        table.add_row(name, *cells)
    Console().print(table)
    memory = (
        "" if options.quick else f", and {private.peak / plain.peak:.2f}x of its memory above the model's"
    )
    print(
        f"* a token, in nats   ** of the processor's clock (of the wall's on a GPU)\n"
        f"delta {options.delta:g}, noise {options.noise:.2f} times the clipping norm {options.max_norm:g};"
        f" {private.clipped:.0%} of the gradients were longer.\nA private step takes"
        f" {private.seconds / plain.seconds:.2f}x of a plain one's time{memory}."
    )
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, run in runs.items():
        label = f"private, epsilon {run.epsilon:.1f}" if name == "private" else name
        axis.plot(*zip(*run.curve, strict=True), marker=".", label=label)
    axis.set(xlabel="step", ylabel="held-out loss, nats a token")
    axis.legend()
    figure.savefig(options.output, dpi=120)
    print(f"The picture: {options.output}")
    return runs


def spread(options: Options) -> float:
    """Train privately over all processes, and in process 0 alone; returns how far the weights are apart."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="bf16" if options.bf16 else "no"
    )
    rank, world = accelerator.process_index, accelerator.num_processes
    weights = pretrain(options, rank == 0)
    for t in weights.values():
        torch.distributed.broadcast(t, 0)
    run = train(options, weights, True, rank, world, f"{world} processes")
    rows, apart = gather_object([{**run.holds, **run.sends}]), math.nan
    if rank == 0:
        heads = ["parameters", "gradients", "AdamW's states", "saved", "factors", *sorted(run.sends)]
        kind = "FSDP2" if options.fsdp else "DDP"
        table = Table("rank", title=f"{kind}: KiB that each rank holds, and sends")
        for head in heads:
            table.add_column(head, justify="right")
        if options.fsdp:
            rows.append(on_many(world, **run.sizes, nbytes=8 if options.double else 4))
        for i, row in enumerate(rows):
            cells = (f"{row[head] / 1024:,.1f}" if head in row else "" for head in heads)
            table.add_row(str(i) if i < world else "by arithmetic", *cells)
        Console(width=130).print(table)
        print(
            "saved: by autograd for the backward pass; factors: what clipping keeps to its end (inputs of\n"
            "layers are in both); both for a sequence. The rest is sent in one pass."
        )
        alone = train(options, weights, True, name="1 process")
        apart = max(float((t - alone.weights[name]).abs().max()) for name, t in run.weights.items())
        print(
            f"{world} processes, {options.steps} steps: epsilon {run.epsilon:.2f} at delta {options.delta:g},"
            f" held-out loss {run.curve[0][1]:.3f} to {run.curve[-1][1]:.3f}.\nThe weights differ from those"
            f" of one process by {apart:.0e} at most."
        )
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return apart


def main(argv: list[str] | None = None) -> Any:
    """Compare private with plain training, or several processes with one."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model with differential privacy.")
    add = parser.add_argument
    add(
        "--model",
        help="a checkpoint of transformers, by name or folder (default: a small GPT-2 of random weights)",
    )
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument(
        "--lora", metavar="RANK", type=int, default=8, help="train adapters of this rank (default 8)"
    )
    trained.add_argument("--full", action="store_true", help="train all parameters")
    add("--steps", type=int, default=60, help="steps of fine-tuning (default 60)")
    add("--batch", type=int, default=128, help="the expected batch size (default 128)")
    add("--micro-batch", type=int, default=64, help="sequences of one pass, on each process (default 64)")
    add("--epsilon", type=float, default=3.0, help="the privacy budget (default 3)")
    add("--delta", type=float, default=1e-6, help="its delta, far below 1 / sequences (default 1e-6)")
    add("--noise", type=float, help="noise, in multiples of the clipping norm, instead of --epsilon")
    add("--max-norm", type=float, default=0.3, help="the clipping norm (default 0.3)")
    add("--lr", type=float, default=1e-2, help="AdamW's learning rate (default 0.01)")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add(
        "--double",
        action="store_true",
        help="double precision: shows that processes differ by rounding alone",
    )
    add("--checkpoint", action="store_true", help="compute blocks again in the backward pass")
    add("--fsdp", action="store_true", help="under torchrun: shard by FSDP2 (else DistributedDataParallel)")
    add("--length", type=int, default=64, help="tokens of a sequence (default 64)")
    add("--samples", type=int, default=50_000, help="training sequences at most (default 50,000)")
    add("--width", type=int, default=128, help="of the random model (default 128)")
    add("--layers", type=int, default=2, help="of the random model (default 2)")
    add("--public-steps", type=int, default=200, help="steps on public text before (default 200)")
    add("--seed", type=int, default=0, help="seed of weights, split, coins and noise (default 0)")
    add("--output", type=Path, default=Path("dp_finetune_lm.png"), help="where the picture goes")
    add("--quick", action="store_true", help="a few steps, all in one process: memory is not measured")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps, options.public_steps, options.samples = 4, 4, 2000
    for name in (
        "lora",
        "steps",
        "batch",
        "micro_batch",
        "max_norm",
        "lr",
        "samples",
        "width",
        "layers",
        "epsilon",
    ):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if options.length < 2 or not 0 < options.delta < 1 or (options.noise is not None and options.noise <= 0):
        parser.error("--length must be at least 2, --delta in 0..1, --noise above 0")
    options.samples = min(options.samples, len(load(options)[1]))
    if options.batch > options.samples:
        parser.error(f"--batch must be at most --samples, here {options.samples}")
    warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")
    if options.noise is None:
        options.noise = get_noise_multiplier(
            target_epsilon=options.epsilon,
            target_delta=options.delta,
            sample_rate=options.batch / options.samples,
            steps=options.steps,
        )
    return spread(options) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else compared(options)


if __name__ == "__main__":
    main()
