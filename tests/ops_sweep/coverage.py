"""Write the findings of a sweep as text: docs/reference/coverage.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch

from tests.ops_sweep.trial import Finding, Verdict

NAMES = {
    Verdict.RIGHT: "right",
    Verdict.LOOPED: "right, in a loop over members",
    Verdict.REFUSED: "refused",
    Verdict.ERROR: "error",
    Verdict.WRONG: "wrong",
    Verdict.NONE: "nothing to compare",
}

INTRODUCTION = """# Coverage of PyTorch's operators

Written by `make ops-sweep`, with torch {version}: {operators} functions and in-place forms of PyTorch's operator
database (`torch.testing._internal.common_methods_invocations.op_db`), each called by a small module with
up to {samples} of the database's samples. A pair is an operator and a pattern: one or three members, and which tensor
arguments are stacked: none, each alone, all. The array must give the outputs and gradients of the members
alone, in float64 (relative 1e-9), or raise a clear error. Of several samples the worst counts.

{table}

{share:.1%} of the pairs of functions on float64 that can be compared are right.
"""

REASONS = {
    Verdict.WRONG: "Wrong",
    Verdict.ERROR: "Other errors",
    Verdict.REFUSED: "Refused",
    Verdict.LOOPED: "Right, but with operators that run in a loop over members",
    Verdict.NONE: "Nothing to compare",
}


def worst(findings: Iterable[Finding]) -> list[Finding]:
    """Of every pair the worst finding, in the order of the first."""
    pairs: dict[tuple[str, int, str], Finding] = {}
    for finding in findings:
        key = (finding.operator, finding.pattern.members, finding.pattern.label)
        if key not in pairs or finding.verdict > pairs[key].verdict:
            pairs[key] = finding
    return list(pairs.values())


def document(findings: Iterable[Finding], samples: int) -> str:
    """The whole of docs/reference/coverage.md."""
    pairs = worst(findings)
    plain = Counter(finding.verdict for finding in pairs if finding.group == "function, float64")
    compared = sum(plain.values()) - plain[Verdict.NONE]
    introduction = INTRODUCTION.format(
        version=torch.__version__.partition("+")[0],
        operators=len({finding.operator for finding in pairs}),
        samples=samples,
        table=table(pairs),
        share=(plain[Verdict.RIGHT] + plain[Verdict.LOOPED]) / max(compared, 1),
    )
    parts = [f"\n## {title}\n\n{reasons(pairs, verdict)}" for verdict, title in REASONS.items()]
    return introduction + "".join(parts)


def table(pairs: Sequence[Finding]) -> str:
    """How many pairs got which verdict, by kind of call."""
    groups = list(dict.fromkeys(sorted(finding.group for finding in pairs)))
    counts = Counter((finding.group, finding.verdict) for finding in pairs)
    lines = [f"| pairs | {' | '.join(groups)} |", f"|---|{'---:|' * len(groups)}"]
    for verdict, name in NAMES.items():
        lines.append(f"| {name} | {' | '.join(str(counts[group, verdict]) for group in groups)} |")
    return "\n".join(lines)


def reasons(pairs: Sequence[Finding], verdict: Verdict) -> str:
    """One line per reason, with the operators and patterns that it concerns."""
    lines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for finding in pairs:
        if finding.verdict is verdict:
            lines[finding.reason][finding.operator].append(str(finding.pattern))
    if not lines:
        return "None.\n"
    return "".join(f"- {reason}: {_operators(where)}\n" for reason, where in sorted(lines.items()))


def _operators(where: dict[str, list[str]]) -> str:
    """Operators, with their patterns where these are few."""
    return ", ".join(f"{name} ({'; '.join(p)})" if len(p) <= 2 else name for name, p in sorted(where.items()))
