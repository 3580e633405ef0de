"""Run many configurations, or show one: `python -m tests.fuzz --count 10000 --jobs 2`, `python -m tests.fuzz --seed 1234`."""

import argparse
import re
import time
from collections import Counter, defaultdict
from multiprocessing import get_context

from .fuzzer import KINDS, VERDICTS, Result, timed


def pattern(message: str) -> str:
    """A message without the numbers and names that differ from one configuration to another."""
    return re.sub(r"`[^`]*`", "`...`", re.sub(r"\d[\d.e+-]*", "#", message.partition("\n")[0]))[:240]


def summary(results: list[Result]) -> str:
    lines = [f"{'':8}" + "".join(f"{v:>10}" for v in (*VERDICTS, "by loop"))]
    for kind in KINDS:
        own = [r for r in results if r.kind == kind]
        counts = Counter(r.verdict for r in own)
        lines.append(f"{kind:8}" + "".join(f"{counts[v]:10}" for v in VERDICTS) + f"{sum(r.slow for r in own):10}")
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
        print(timed((args.seed, args.only)))
        return
    start, jobs = time.perf_counter(), [(i, args.only) for i in range(args.start, args.start + args.count)]
    with get_context("spawn").Pool(args.jobs) as pool:
        results = sorted(pool.imap_unordered(timed, jobs, chunksize=10), key=lambda r: r.seed)
    print(summary(results))
    print(f"\n{len(results)} configurations in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
