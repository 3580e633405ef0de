"""Run many configurations, or show one: `python -m tests.fuzz --count 10000 --jobs 2`, `python -m tests.fuzz
--seed 1234`.
"""

import argparse
import re
import time
from collections import Counter, defaultdict
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from .fuzzer import KINDS, VERDICTS, Result, timed, work

SPAWN = get_context("spawn")


def begin(seeds: range, only: str | None) -> Connection:
    """A process for these numbers, whose results can be received."""
    answers, out = SPAWN.Pipe(duplex=False)
    SPAWN.Process(target=work, args=(seeds, only, out), daemon=True).start()
    out.close()
    return answers


def run_all(start: int, count: int, jobs: int, only: str | None) -> list[Result]:
    """The results of all numbers; one at which a process dies is unclear, and another process goes on after
    it.
    """
    results: list[Result] = []
    left = {
        begin(seeds, only): seeds for i in range(jobs) if (seeds := range(start + i, start + count, jobs))
    }
    while left:
        for answers in wait(list(left)):
            seeds = left.pop(answers)
            try:
                results.append(answers.recv())
            except EOFError:
                results.append(
                    Result(seeds[0], only or KINDS[seeds[0] % len(KINDS)], "unclear", "the process has died")
                )
                answers = begin(seeds[1:], only) if seeds[1:] else answers
            if seeds[1:]:
                left[answers] = seeds[1:]
    return sorted(results, key=lambda r: r.seed)


def pattern(message: str) -> str:
    """A message without the numbers and names that differ from one configuration to another."""
    return re.sub(r"`[^`]*`", "`...`", re.sub(r"\d[\d.e+-]*", "#", message.partition("\n")[0]))[:240]


def summary(results: list[Result]) -> str:
    lines = [f"{'':8}" + "".join(f"{v:>10}" for v in (*VERDICTS, "by loop"))]
    for kind in KINDS:
        own = [r for r in results if r.kind == kind]
        counts = Counter(r.verdict for r in own)
        lines.append(
            f"{kind:8}" + "".join(f"{counts[v]:10}" for v in VERDICTS) + f"{sum(r.slow for r in own):10}"
        )
    for verdict in VERDICTS[1:]:
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for r in results:
            if r.verdict == verdict:
                found[r.kind, pattern(r.message)].append(r.seed)
        for (kind, message), seeds in sorted(found.items(), key=lambda pair: -len(pair[1])):
            lines.append(f"\n{verdict}, {kind}, {len(seeds)} times, seeds {seeds[:6]}:\n  {message}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="show one configuration in full, and its verdict")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=KINDS, help="this kind for every number")
    args = parser.parse_args()
    if args.seed is not None:
        print(timed(args.seed, args.only))
        return
    start = time.perf_counter()
    print(summary(run_all(args.start, args.count, args.jobs, args.only)))
    print(f"\n{args.count} configurations in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
