"""``python -m hfusion.bench NAME``: ``--list`` says which there are, ``--help`` what one takes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hfusion.bench.harness import Benchmark, run_command

PROG = "python -m hfusion.bench"
NAMES = ("fuse", "optim", "sweep", "shard", "short", "lora", "contact")


def benchmark_of(name: str) -> Benchmark:
    """Import a benchmark, which may need packages that others do without."""
    benchmark: Benchmark = importlib.import_module(f"hfusion.bench.{name}_benchmark").BENCHMARK
    return benchmark


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that ``arguments`` name, ``fuse`` by default, and return the exit status."""
    if "--list" in arguments:
        for name in NAMES:
            benchmark = benchmark_of(name)
            print(name, (benchmark.about or "").partition("\n")[0], sep=": ")
            for kind, choices in benchmark.choices.items():
                print(f"  {kind}", *(f"    {choice.name:<16} {choice.about}" for choice in choices), sep="\n")
        return 0
    name, *rest = arguments if arguments and not arguments[0].startswith("-") else ["fuse", *arguments]
    if name not in NAMES:
        print(f"{PROG}: unknown benchmark {name!r}: choose from {', '.join(NAMES)}", file=sys.stderr)
        return 2
    return run_command(benchmark_of(name), f"{PROG} {name}", rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
