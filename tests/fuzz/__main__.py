"""Run random programs for a time, ``python -m tests.fuzz --seconds 600``; a difference is shrunk and printed."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter, defaultdict
from functools import partial

from tests.fuzz.compare import Outcome, Verdict, Worker, shrink
from tests.fuzz.generate import LARGE, SMALL, for_compilation, generate


def gist(words: str) -> str:
    """Words without the numbers and names of one program."""
    words = re.sub(r"\b(Block|Net|s|v|h|x)\d*\b(\.[\w.]+)?", "_", words)
    return re.sub(r"[-\d.e]*\d[-\d.e+]*", "#", words)[:200]


def kind_of(result: Outcome) -> tuple[Verdict, str]:
    """Return the part of an outcome that a smaller program must share."""
    raw = result.verdict is Verdict.RAW
    return result.verdict, result.words.split(":")[0] if raw else str("self-check" in result.words)


def shares_fault(worker: Worker, kind: tuple[Verdict, str], text: str) -> bool:
    return kind_of(worker.outcome(text)) == kind


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; a fresh one if it is left out")
    parser.add_argument("--programs", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--small", action="store_true", help="small programs, as where they are compiled")
    parser.add_argument("--compiled", action="store_true", help="train by hf.train_step, compiled")
    parser.add_argument("--shrink", type=float, default=120.0, help="seconds for one difference")
    arguments = parser.parse_args()
    first = time.time_ns() // 1000 % 10**9 if arguments.seed is None else arguments.seed
    print(f"seeds from {first}", flush=True)
    verdicts, faults, start = Counter[Verdict](), defaultdict[str, list[int]](list), time.monotonic()
    seed = first
    with Worker() as worker:
        while time.monotonic() < start + arguments.seconds and seed < first + arguments.programs:
            program = generate(seed, SMALL if arguments.small or arguments.compiled else LARGE)
            if arguments.compiled:
                program = for_compilation(program)
            result = worker.outcome(program.text())
            verdicts[result.verdict] += 1
            if result.bad:
                faults[gist(result.words)].append(program.seed)
            if result.bad and len(faults[gist(result.words)]) == 1:
                print(f"--- seed {seed}: {result.verdict}: {result.words}", flush=True)
                faulty = partial(shares_fault, worker, kind_of(result))
                small = shrink(program.text(), faulty, arguments.shrink)
                print(f"{small}\n--- {worker.outcome(small).words}\n", flush=True)
            seed += 1
    programs, seconds = seed - first, time.monotonic() - start
    print(f"{programs} programs in {seconds:.0f} s, {programs / seconds:.2f} per second")
    for verdict, number in verdicts.most_common():
        print(f"{number:6} {verdict}")
    for words, seeds in faults.items():
        print(f"FAULT {len(seeds)} times: {words}\n      seeds {seeds[:10]}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
