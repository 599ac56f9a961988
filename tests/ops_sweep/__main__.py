"""`python -m tests.ops_sweep`: calls of every operator of PyTorch's database, as arrays against the members alone."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.ops_sweep.cases import cases, forms
from tests.ops_sweep.coverage import document, reasons, table, worst
from tests.ops_sweep.trial import Finding, Verdict, sweep

BAD = (Verdict.ERROR, Verdict.WRONG)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops_sweep", description=__doc__)
    parser.add_argument("--docs", type=Path, help="where to write what was found")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="operators; all by default")
    parser.add_argument("--samples", type=int, default=3, help="samples of every operator, at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    findings = list(_findings(options.only, options.samples))
    if options.docs is not None:
        options.docs.write_text(document(findings, options.samples))
    pairs = worst(findings)
    print(table(pairs))
    for verdict in BAD if not options.only else (Verdict.NONE, Verdict.LOOPED, Verdict.REFUSED, *BAD):
        print(f"{verdict.name}\n{reasons(pairs, verdict)}")
    return int(any(finding.verdict in BAD for finding in pairs))


def _findings(only: tuple[str, ...], samples: int) -> Iterator[Finding]:
    began = time.perf_counter()
    for form in forms(only):
        for case in cases(form, samples):
            for finding in sweep(case):
                yield finding
                if finding.verdict in BAD:
                    print(
                        f"{finding.verdict.name} {finding.sample} {finding.pattern}: {finding.reason}", file=sys.stderr
                    )
        if sys.stderr.isatty():
            print(f"{time.perf_counter() - began:6.0f} s  {form.name:60}", end="\r", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
