"""One configuration by its number: built, run, batched_outputs."""

import copy
import itertools
import re
import signal
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import nn

import pslayers as ps

from . import layers, leaks, models, ragged, steps
from .draw import Config, Draw
from .live import InvalidError, Live, WrongError, assert_near, is_random, plainly, without_checkpoints

KINDS = ("layer", "model", "calls", "leak", "ragged")
VERDICTS = ("right", "refused", "unclear", "wrong", "invalid")
SECONDS = 60  # for one configuration
WAY_OUT = re.compile(
    r"\b(use|call|convert|give|pass|set|say|see|write|turn|compute|leave|freeze|run|pack|check|once)\b",
    re.IGNORECASE,
)
CAUSE = "samples interact ("  # and where to look for it


@dataclass
class Result:
    """What became of a configuration: right; refused (an error that names a module and a way out); unclear
    (any other error); wrong (numbers differ, or samples that interact were let pass); invalid (it makes no
    sense in plain torch).
    """

    seed: int
    kind: str
    verdict: str
    message: str = ""
    config: str = ""
    trace: str = ""
    slow: bool = False  # some module ran sample by sample

    def __str__(self) -> str:
        shown = [
            f"seed {self.seed}: {self.verdict}{' (by a loop)' if self.slow else ''}",
            self.config,
            self.message,
            self.trace,
        ]
        return "\n".join(part for part in shown if part)


def is_clear(error: BaseException, config: Config) -> bool:
    """Whether the library raised it on purpose, naming a module (by path or class) and a way out."""
    text, frames = str(error), traceback.extract_tb(error.__traceback__)
    modules = list(config.model.named_modules())
    named = any(f"`{path}" in text for path, _ in modules if path) or any(
        type(m).__name__ in text for _, m in modules
    )
    named = named or any(f"`{name}`" in text for name, _ in config.model.named_parameters())
    return (
        "/pslayers/" in frames[-1].filename
        and (named or "ps.sample_ids" in text)
        and (bool(WAY_OUT.search(text)) or CAUSE in text)
        and not isinstance(error, AssertionError)
    )


def run(seed: int, only: str | None = None) -> Result:
    """Configuration `seed` of all kinds in turn, or of one."""
    kind = only or KINDS[seed % len(KINDS)]
    draw = Draw(seed)
    torch.manual_seed(seed)
    result = Result(seed, kind, "right")
    config, must_refuse = None, kind == "leak"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if kind == "leak":
                config, seen = leaks.build(draw)
                leak(config, draw, seen)
            elif kind == "ragged":
                config, must_refuse = ragged.build(draw)
                rows = ragged.RaggedLive(config, draw)
                if must_refuse:
                    ragged.leak(rows, draw)
                else:
                    steps.run(rows, draw, ragged.STEPS)
            else:
                config = (layers if kind == "layer" else models).build(draw)
                live = Live(config, draw, example=draw.maybe(0.15))
                if kind == "calls":
                    steps.run(live, draw)
                else:
                    several(live, draw)
        except WrongError as error:
            result.verdict, result.message = "wrong", str(error)
        except InvalidError as error:
            result.verdict, result.message = "invalid", str(error)
        except Exception as error:
            clear = config is not None and is_clear(error, config)
            result.verdict = "refused" if clear else "unclear"
            result.message = f"{type(error).__name__}: {error}"
            result.trace = "".join(traceback.format_exception(error)[-6:])
    if must_refuse and result.verdict == "refused":
        result.verdict = "right"
    slow = any("sample by sample" in str(w.message) for w in caught)
    if slow and result.verdict == "wrong" and config is not None and is_random(config.model):
        result.verdict = "invalid"  # a loop draws each sample's numbers in turn, the oracle those of all
    result.config = str(config)
    result.slow = slow
    return result


def late(*_: object) -> None:
    raise TimeoutError(f"no answer in {SECONDS} seconds")


def timed(seed: int, only: str | None = None) -> Result:
    """The same, and not for ever."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return run(seed, only)
    finally:
        signal.alarm(0)


def work(seeds: range, only: str | None, out: Connection) -> None:
    """In a process of its own: the results of these numbers."""
    for seed in seeds:
        out.send(timed(seed, only))


def several(live: Live, draw: Draw) -> None:
    """A few batches, read in several ways."""
    ways = [
        live.train,
        *(
            draw.pick(live.train, live.train, live.one_call, live.functional, live.stream, live.factored)
            for _ in range(2)
        ),
    ]
    if not steps.differentiable(live):
        ways = [live.train] * 2
    sizes = [draw.pick(2, 3, 4, 5), *(draw.pick(0, 1, 2, 3, 4) for _ in ways[1:])]
    draw.shuffle(sizes)
    live.config.notes.append(f"batches: {[(way.__name__, n) for way, n in zip(ways, sizes, strict=True)]}")
    for i, (way, n) in enumerate(zip(ways, sizes, strict=True), 1):
        draw.begin(i)
        way(n)


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in which what samples give does not depend on chance; without checkpoints."""
    net = without_checkpoints(model)
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        elif isinstance(getattr(m, "dropout", None), float):
            m.dropout = 0.0
    return net


def leak(config: Config, draw: Draw, seen: bool) -> None:
    """Must be refused; what autograd does not see, check_model must report."""
    inputs, model = config.inputs(draw.randint(2, 4)), config.model.double()
    with plainly():
        net = plain_copy(model)
        torch.manual_seed(0)
        together = config.losses(net(*inputs))
        for i, loss in enumerate(together):
            alone = config.losses(net(*config.alone(inputs, i)))
            try:
                assert_near("a loss", loss[None], alone)
            except WrongError:
                break
        else:
            raise InvalidError("the leak changes nothing")
        seen = seen and leaks.gradients_cross(net, inputs, config)
    ours = ps.convert_model(copy.deepcopy(model), **config.options)
    if seen:
        config.reduced(ours(*inputs)).backward()
    others = (config.inputs(4) for _ in range(4))  # of one batch a sum may stay the same by chance
    if seen or all(
        ps.check_model(ours, *batch, loss_fn=config.losses) for batch in itertools.chain([inputs], others)
    ):
        raise WrongError(
            f"samples interact ({'seen' if seen else 'not seen'} by autograd), and were let pass"
        )
