"""Which public models do per-sample gradient engines get right? Prints Markdown tables, writes
results/coverage.json.

    pip install -r benchmarks/requirements.txt      # beside pslayers and torch
    python benchmarks/coverage.py                   # everything: about ten minutes on one core
    python benchmarks/coverage.py --models timm/vit --engines pslayers

Each model is tiny, has random weights, and runs one batch in float64 and eval mode with all dropout off.
Every trainable parameter's rows are compared with a loop over samples by plain autograd
(`public_models/truth.py`). To an engine a model is

- right: every row of every parameter is the loop's;
- wrong: the engine has said nothing, and some row is not the loop's;
- missing: the engine has said nothing, and some parameter that the loss reaches has no rows;
- raises: an error.

Each peer is run in several ways, and the best outcome counts, in this order (an error is better than
silence):

- torch.func: `vmap(grad(functional_call))`, each sample a batch of one; for models of transformers also with
  their "eager" attention, since the default one looks at the values of masks.
- opacus: `GradSampleModule` with strict=False, since its strict mode refuses every module with a buffer; with
  its own formulas for the layers that have one, and with force_functorch=True. Its hooks see modules in
  training mode only, so modules with parameters are put there, but BatchNorm. They also see positional inputs
  only, so the model is called by position and, where that fails, by keyword.
"""

import argparse
import copy
import importlib.metadata
import inspect
import json
import logging
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pslayers as ps
from benchmarks.public_models import (
    MODELS,
    Inputs,
    PublicModel,
    Rows,
    compare,
    library,
    loop,
    losses,
    rows_of,
)

OUTCOMES = ("right", "raises", "missing", "wrong")  # the best first
WAYS = ("layer", "direct", "vmap, fast op", "vmap", "loop", "none")  # the fastest first

Engine = Callable[[nn.Module, Inputs, int], Rows]


# ------------------------------------------------------------------------------------------------ the engines
def pslayers_rows(model: nn.Module, inputs: Inputs, size: int) -> Rows:
    """`ps.convert_model`, modules without a replacement run with per-sample parameters."""
    ps.convert_model(model, on_unsupported="general")
    losses(model(**inputs), size).mean().backward()
    return rows_of(model)


def torch_func_rows(model: nn.Module, inputs: Inputs, size: int, attention: str = "") -> Rows:
    """`vmap(grad(functional_call))`, each sample a batch of one."""
    if attention:
        # an nn.Module has none
        choose: Callable[[str], None] | None = getattr(model, "set_attn_implementation", None)
        if choose is None:
            raise NotImplementedError(f"no {attention} attention to choose")
        choose(attention)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(own: dict[str, Tensor], one: Inputs) -> Tensor:
        output = torch.func.functional_call(
            model, own, kwargs={name: t.unsqueeze(0) for name, t in one.items()}
        )
        return losses(output, 1).sum()

    rows: Rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")(
        params, inputs
    )
    return rows


def opacus_rows(
    model: nn.Module, inputs: Inputs, size: int, functorch: bool = False, keywords: bool = False
) -> Rows:
    """Opacus' hooks, as far as they go."""
    from opacus import GradSampleModule

    logging.disable(logging.WARNING)
    names = [name for name in inspect.signature(model.forward).parameters if name in inputs]
    for module in model.modules():
        module.training = any(True for _ in module.parameters(recurse=False)) and not isinstance(
            module, _BatchNorm
        )
    hooked = GradSampleModule(model, strict=False, loss_reduction="mean", force_functorch=functorch)
    output = hooked(**inputs) if keywords else hooked(*_by_position(model, names, inputs))
    losses(output, size).mean().backward()
    found = {name: getattr(p, "grad_sample", None) for name, p in model.named_parameters() if p.requires_grad}
    return {
        name: torch.stack(rows).sum(0) if isinstance(rows, list) else rows for name, rows in found.items()
    }


def _by_position(model: nn.Module, names: list[str], inputs: Inputs) -> list[Tensor | None]:
    """The inputs in the order of the forward's arguments, None for those between them."""
    every = list(inspect.signature(model.forward).parameters)
    return (
        [inputs.get(name) for name in every[: max(every.index(name) for name in names) + 1]]
        if names
        else [*inputs.values()]
    )


ENGINES: dict[str, dict[str, Engine]] = {
    "pslayers": {"general": pslayers_rows},
    "torch.func": {
        "vmap": torch_func_rows,
        "vmap, eager attention": partial(torch_func_rows, attention="eager"),
    },
    "opacus": {
        f"{'functorch' if functorch else 'hooks'}, {'keywords' if keywords else 'positions'}": partial(
            opacus_rows, functorch=functorch, keywords=keywords
        )
        for functorch in (False, True)
        for keywords in (False, True)
    },
}


def ways(model: nn.Module) -> dict[str, int]:
    """How many trainable values of a converted model, after a call, go which way; the slowest where there are
    several.
    """
    found: dict[int, tuple[int, int]] = {}
    for row in ps.report(model).rows:
        fast = {id(p) for p in row.fast}
        for p in row.trainable:
            way = next(
                (w for w in ("loop", "vmap", "direct") if w in row.way), "none" if row.general else "layer"
            )
            way = "none" if not row.recorded else "vmap, fast op" if way == "vmap" and id(p) in fast else way
            found[id(p)] = max(found.get(id(p), (0, 0)), (WAYS.index(way), p.numel()))
    counts = Counter[str]()
    for place, values in found.values():
        counts[WAYS[place]] += values
    return dict(counts)


# ------------------------------------------------------------------------------------------- running them all
def run_engine(
    engine: str, model: nn.Module, inputs: Inputs, truth: Rows, tolerance: float, size: int
) -> dict[str, Any]:
    """One engine on one model, by the way that serves it best."""
    best: dict[str, Any] = {}
    for way, rows in ENGINES[engine].items():
        found = {"by": way} | _attempt(rows, copy.deepcopy(model), inputs, truth, tolerance, size)
        if not best or OUTCOMES.index(found["outcome"]) < OUTCOMES.index(best["outcome"]):
            best = found
        if best["outcome"] == "right":
            break
    return best


def _attempt(
    engine: Engine, model: nn.Module, inputs: Inputs, truth: Rows, tolerance: float, size: int
) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        rows = engine(model, {name: t.clone() for name, t in inputs.items()}, size)
    except Exception as error:  # whatever an engine raises is its result
        return {"outcome": "raises", "detail": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    seconds = round(time.perf_counter() - start, 3)
    wrong = compare(rows, truth, tolerance)
    outcome = "right" if not wrong else "missing" if set(wrong.values()) == {"missing"} else "wrong"
    found = {"outcome": outcome, "seconds": seconds}
    if wrong:
        found |= {"parameters at fault": len(wrong), "detail": dict(list(wrong.items())[:3])}
    if engine is pslayers_rows:
        found |= {"ways": ways(model)}
    return found


def run_model(case: PublicModel, engines: Iterable[str], size: int) -> dict[str, Any]:
    """One model, all engines."""
    model, inputs = case.make(), case.batch(size)
    start = time.perf_counter()
    truth = loop(model, inputs, size, case.copies)
    seconds = round(time.perf_counter() - start, 3)
    values = sum(p.numel() for p in model.parameters() if p.requires_grad)
    results = {engine: run_engine(engine, model, inputs, truth, case.tolerance, size) for engine in engines}
    return {"parameters": values, "loop seconds": seconds} | results


def outcomes_table(results: dict[str, Any], engines: Iterable[str]) -> str:
    """How many models of each library are right, and what the others are."""
    lines = ["| library | engine | " + " | ".join(OUTCOMES) + " |", "|---|---|" + "---|" * len(OUTCOMES)]
    for group in [*sorted({name.split("/")[0] for name in results}), "all"]:
        members = [r for name, r in results.items() if group in ("all", name.split("/")[0])]
        for engine in engines:
            counts = Counter(r[engine]["outcome"] for r in members)
            lines.append(
                f"| {group} ({len(members)}) | {engine} | "
                + " | ".join(str(counts[o]) for o in OUTCOMES)
                + " |"
            )
    return "\n".join(lines)


def ways_table(results: dict[str, Any]) -> str:
    """By which ways the parameters of pslayers go."""
    found = [r["pslayers"]["ways"] for r in results.values() if "ways" in r.get("pslayers", {})]
    values, shares = Counter[str](), Counter[str]()
    for each in found:
        values.update(each)
        shares.update({way: n / sum(each.values()) for way, n in each.items()})
    lines = [
        "| pslayers: share of the trainable parameters, % | " + " | ".join(WAYS) + " |",
        "|---|" + "---|" * len(WAYS),
    ]
    for title, counted, whole in (
        ("of all values", values, sum(values.values())),
        ("of a model's, on average", shares, len(found)),
    ):
        lines.append(
            f"| {title} | " + " | ".join(f"{100 * counted[way] / max(whole, 1):.2f}" for way in WAYS) + " |"
        )
    return "\n".join(lines)


def environment() -> dict[str, str]:
    """What this was measured with."""
    versions = {"pslayers": ps.__version__}
    for name in ("torch", "transformers", "timm", "torchvision", "opacus"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions | {"python": platform.python_version(), "date": datetime.now(UTC).date().isoformat()}


def main() -> None:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="*", default=[""], help="names or beginnings of names; default: all"
    )
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "coverage.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    cases: Iterable[PublicModel] = [
        c for n, c in MODELS.items() if any(n.startswith(each) for each in args.models)
    ]
    for name in sorted({case.library for case in cases}):
        library(name)
    try:
        from tqdm import tqdm

        cases = tqdm(cases, unit="model", mininterval=10)
    except ImportError:
        pass
    results: dict[str, Any] = {}
    for case in cases:
        results[case.name] = found = run_model(case, args.engines, args.batch_size)
        ours = found.get("pslayers", {"outcome": "right"})
        if ours["outcome"] != "right":
            print(f"pslayers: {case.name}: {ours['outcome']}: {ours['detail']}", flush=True)
    print(outcomes_table(results, args.engines), ways_table(results), sep="\n\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    note = {"environment": environment(), "batch size": args.batch_size, "models": results}
    args.out.write_text(json.dumps(note, indent=1) + "\n")


if __name__ == "__main__":
    main()
