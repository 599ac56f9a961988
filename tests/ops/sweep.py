"""One case under one pattern: the array's outputs and gradients against those of the members alone."""

from __future__ import annotations

import argparse
import enum
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import RULES, Compiled
from hfusion.core.layout import Layout
from hfusion.core.program import Kind
from hfusion.ops.rule import call_per_member, is_random
from hfusion.passes.batch import batch
from hfusion.passes.candidates import by_name
from hfusion.passes.cost.price import Model
from hfusion.passes.layouts import choose
from hfusion.passes.regions import regions

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput


RELATIVE = {
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.complex32: 1e-2,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

MAX_WORDS = 200


class Differs(Exception):
    """The array does not give what the members give."""


@dataclass(frozen=True, eq=False)
class Operands:
    """The tensors of a pattern: ``given[k]`` for the array, ``alone[k]`` one for each member, or one for all.

    A member alone gets separate tensors, because a row of a stack would start inside the memory of the stack.
    """

    given: tuple[Tensor, ...]
    alone: tuple[tuple[Tensor, ...], ...]
    stacked: tuple[bool, ...]

    @staticmethod
    def of(case: Case, pattern: Pattern) -> Operands:
        fused_inputs, alone = [], []
        for k, is_stacked in enumerate(pattern.stacked):
            grad = case.rows[0][k].requires_grad
            rows = [case.rows[b][k].detach().clone() for b in range(pattern.members if is_stacked else 1)]
            fused_inputs.append((torch.stack(rows) if is_stacked else rows[0].clone()).requires_grad_(grad))
            alone.append(tuple(row.requires_grad_(grad) for row in rows))
        return Operands(tuple(fused_inputs), tuple(alone), pattern.stacked)

    def of_member(self, member: int) -> list[Tensor]:
        return [rows[member % len(rows)] for rows in self.alone]

    @property
    def inputs(self) -> list[Any]:
        """As a fused module takes them."""
        return [hf.stacked(x) if is_stacked else x for x, is_stacked in zip(self.given, self.stacked, strict=True)]

    def array_gradients(self, rows: Sequence[Sequence[Any]]) -> list[Tensor | None]:
        return _gradients(rows, [x for x in self.given if x.requires_grad])

    def alone_gradients(self, rows: Sequence[Sequence[Any]]) -> list[Tensor | None]:
        """As `array_gradients`, of the members' own tensors."""
        trained = [tensors for tensors in self.alone if tensors[0].requires_grad]
        flat = iter(_gradients(rows, [x for tensors in trained for x in tensors]))
        parts = [[next(flat) for _ in tensors] for tensors in trained]
        flags = [is_stacked for is_stacked, x in zip(self.stacked, self.given, strict=True) if x.requires_grad]
        return [_stack(part) if is_stacked else part[0] for part, is_stacked in zip(parts, flags, strict=True)]


def _stack(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = next((part for part in parts if part is not None), None)
    return None if present is None else torch.stack([torch.zeros_like(present) if p is None else p for p in parts])


@dataclass(frozen=True, eq=False)
class Alone:
    """Results of the members alone, with their outputs flattened to a canonical form."""

    rows: list[list[Any]]
    spec: Any
    gradients: list[Tensor | None]


def sweep(case: Case, members: tuple[int, ...] = (1, 3)) -> Iterator[Finding]:
    """Every pattern of one case: the first goes the whole way, the others from the graph that it captured."""
    compiled: Compiled | None = None
    for pattern in sorted(patterns(len(case.rows[0]), members), key=lambda p: (-p.members, not all(p.stacked))):
        operands = Operands.of(case, pattern)
        try:
            alone = _alone(case, operands, pattern.members)
        except Exception as error:
            alone = f"torch itself refuses these arguments: {_words(error)}"
        if isinstance(alone, str):
            yield _finding(case, pattern, Verdict.NONE, alone)
            continue
        array = _Array(case, operands, pattern)
        try:
            run = array.whole if compiled is None or compiled.opaque else partial(array.of_graph, compiled)
            _compare(case, operands, run(), alone, pattern.members)
            looped = _looped(array.made)
            yield _finding(case, pattern, Verdict.LOOPED if looped else Verdict.RIGHT, looped)
        except Differs as difference:
            yield _finding(case, pattern, Verdict.WRONG, str(difference))
        except (hf.FusionError, ValueError) as error:
            failed = "self-check: " in str(error)
            yield _finding(case, pattern, Verdict.WRONG if failed else Verdict.REFUSED, _words(error))
        except Exception as error:
            yield _finding(case, pattern, Verdict.ERROR, _words(error))
        compiled = compiled or array.made


def _finding(case: Case, pattern: Pattern, verdict: Verdict, reason: str) -> Finding:
    return Finding(case.form.name, case.form.group, pattern, verdict, reason, str(case))


def _words(error: Exception) -> str:
    message = _short(str(error).removeprefix("Operator, model 0: "))
    return message if isinstance(error, hf.FusionError) else f"{type(error).__name__}: {message}"


def _short(text: str) -> str:
    """The first line, without the place in this file that every message names."""
    text = text.partition("self.form.call(value, *args, **kwargs): ")[2] or text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:MAX_WORDS] if lines else ""


@dataclass(eq=False)
class _Array:
    """The array for one pattern, and its program once that is made."""

    case: Case
    operands: Operands
    pattern: Pattern
    made: Compiled | None = None

    def whole(self) -> Any:
        """Outputs by the whole way, self-check included."""
        fused = hf.fuse(self.case.modules(self.pattern.members))
        self.made = fused.compiled(Arguments.of(tuple(self.operands.inputs), {}))
        return fused(*self.operands.inputs)

    def of_graph(self, compiled: Compiled) -> Any:
        """Outputs of a program of a graph that is captured already."""
        slots, stacked = compiled.program.slots, self.operands.stacked
        layouts = [Layout.STACKED if s.kind is Kind.INPUT and stacked[int(s.name)] else Layout.SHARED for s in slots]
        self.made = _program(compiled, layouts, self.pattern.members)
        inputs = iter(self.operands.given)
        arguments = [next(inputs) if s.kind is Kind.INPUT else compiled.constants[s.name] for s in slots]
        return pytree.tree_unflatten(list(self.made.program.run(*arguments)), compiled.program.out_spec)


def _program(compiled: Compiled, layouts: Sequence[Layout], members: int) -> Compiled:
    """The same graph for operands in other layouts, made as the compiler makes it."""
    choices = choose(compiled.graph, layouts, members, RULES, Model.of(compiled.graph, members))
    module = batch(compiled.graph, layouts, members, RULES, choices)
    code = regions(module, members)
    program = replace(compiled.program, members=members, module=module, code=code, layouts=tuple(layouts))
    return replace(compiled, program=program)


def _looped(compiled: Compiled | None) -> str:
    """Describe what runs in a loop over members: operators, or the reason for eager code. Empty if there is no loop."""
    assert compiled is not None
    if compiled.opaque:
        return _short(compiled.opaque[0].why)
    nodes = compiled.program.module.graph.nodes
    origins = [n.meta["origin"] for n in nodes if n.target is call_per_member]
    return ", ".join(dict.fromkeys(str(origin.target) for origin in origins if not _empty(origin)))


def _empty(origin: fx.Node) -> bool:
    """Return True if an operand has no elements, so that there is nothing to compute."""
    examples = [source.meta.get("val") for source in origin.all_input_nodes]
    return any(isinstance(example, Tensor) and not example.numel() for example in examples)


def _alone(case: Case, operands: Operands, members: int) -> Alone | str:
    """The members one by one; a string where there is nothing to compare."""
    # In a pass of its own: under a dispatch mode torch 2.13 gets complex products with a conjugate wrong.
    with _Draws() as draws:
        case.forward(*(x.detach().clone() for x in operands.of_member(0)))
    if draws.found:
        return "draws random numbers: tested in tests/ops/test_random.py"
    rows, specs = [], []
    for member in range(members):
        outputs = case.forward(*operands.of_member(member))
        flat, spec = pytree.tree_flatten(case.unique(outputs))
        rows.append(flat)
        specs.append(spec)
    tensors = [x for row in rows for x in row if isinstance(x, Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for x in tensors):
        return "gives sparse or nested tensors"
    return Alone(rows, specs[0], operands.alone_gradients(rows))


class _Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= is_random(func, by_name(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _compare(case: Case, operands: Operands, outputs: Any, alone: Alone, members: int) -> None:
    rows = []
    for member in range(members):
        row = pytree.tree_map_only(Tensor, lambda x, b=member: x[b], outputs)
        flat, spec = pytree.tree_flatten(case.unique(row))
        if spec != alone.spec:
            raise Differs(f"the array gives {spec}, the members {alone.spec}")
        rows.append(flat)
    for actual_row, expected_row in zip(rows, alone.rows, strict=True):
        for k, (a, b) in enumerate(zip(actual_row, expected_row, strict=True)):
            _check(case, a, b, f"output {k}", _relative(b))
    for k, (argument, member_arguments) in enumerate(zip(operands.given, operands.alone, strict=True)):
        # What forward writes into its inputs, such as running statistics.
        after = torch.stack(member_arguments) if operands.stacked[k] else member_arguments[0]
        _check(case, argument.detach(), after.detach(), f"argument {k} afterwards", _relative(after))
    # What passes through a narrower dtype is rounded before or after members' gradients are added.
    coarsest = max((_relative(x) for row in alone.rows for x in row), default=0.0)
    for k, (a, b) in enumerate(zip(operands.array_gradients(rows), alone.gradients, strict=True)):
        if b is None or a is None:
            if any(x is not None and x.any() for x in (a, b)):
                raise Differs(f"gradient {k}: only {'the array' if b is None else 'the members'} have one")
            continue
        _check(case, a, b, f"gradient {k}", max(coarsest, _relative(b)))


def _relative(value: Any) -> float:
    return RELATIVE.get(value.dtype, 1e-9) if isinstance(value, Tensor) else 0.0


def _check(case: Case, actual: Any, expected: Any, label: str, relative: float) -> None:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        if type(actual) is not type(expected) or not (
            actual == expected or (actual != actual and expected != expected)
        ):
            raise Differs(f"{label}: {actual!r} instead of {expected!r}")
        return
    for name in ("shape", "dtype", "requires_grad"):
        if getattr(actual, name) != getattr(expected, name):
            raise Differs(f"{label}: {name} {getattr(actual, name)} instead of {getattr(expected, name)}")
    if not _close(actual.detach(), expected.detach(), relative):
        raise Differs(f"{label}: values differ")


def _close(actual: Tensor, expected: Tensor, relative: float) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    if expected.dtype is torch.complex32:
        actual, expected = actual.to(torch.complex64), expected.to(torch.complex64)
    size = float(expected.nan_to_num(0, 0, 0).abs().double().max()) if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=relative, atol=relative * min(1.0, size) + 1e-12, equal_nan=True)


def _gradients(rows: Sequence[Sequence[Any]], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Of a random projection of all outputs."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for row in rows:
        for x in row:
            if isinstance(x, Tensor) and x.requires_grad and (x.is_floating_point() or x.is_complex()):
                real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
                parts.append((real * torch.randn(real.shape, generator=generator, dtype=torch.float64)).sum())
    if not parts or not leaves:
        return [None for _ in leaves]
    return list(torch.autograd.grad(torch.stack(parts).sum(), leaves, allow_unused=True))


# Findings of the sweep for one operator and one pattern of shared and stacked arguments.


class Verdict(enum.IntEnum):
    """From good to bad: of several samples the worst counts."""

    NONE = 0
    RIGHT = 1
    LOOPED = 2
    REFUSED = 3
    ERROR = 4
    WRONG = 5


@dataclass(frozen=True)
class Pattern:
    """How many members, and which of the tensor arguments are stacked."""

    members: int
    stacked: tuple[bool, ...]

    def __str__(self) -> str:
        return f"B={self.members} {self.label}"

    @property
    def label(self) -> str:
        if not any(self.stacked):
            return "all shared"
        if all(self.stacked):
            return "all stacked"
        return f"argument {self.stacked.index(True)} stacked"


@dataclass(frozen=True)
class Finding:
    """One trial: the verdict, and the reason where it is not right; ``group`` is the kind of call."""

    operator: str
    group: str
    pattern: Pattern
    verdict: Verdict
    reason: str = ""
    sample: str = ""


# Arguments that are stacked alone, at most.
MAX_ALONE = 4


def patterns(tensors: int, members: tuple[int, ...]) -> list[Pattern]:
    """All shared, each one stacked alone, all stacked."""
    rows = [(False,) * tensors, (True,) * tensors]
    rows += [tuple(k == alone for k in range(tensors)) for alone in range(min(tensors, MAX_ALONE))]
    return [Pattern(b, row) for b in members for row in dict.fromkeys(rows)]


# Cases of the sweep: operators of PyTorch's database with sample arguments, as modules of tensors only.

# Tried in this order: the first dtype that an operator takes.
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128, torch.float32)
MEMBERS = 3


# Their values are whatever memory held, which the self-check rightly finds to differ.
UNINITIALISED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, eq=False)
class Form:
    """One way to call an operator of the database: as a function, or in place on a copy of its first argument."""

    info: OpInfo
    in_place: bool

    @property
    def name(self) -> str:
        name = f"{self.info.name}[{self.info.variant_test_name}]" if self.info.variant_test_name else self.info.name
        return f"{name} in place" if self.in_place else name

    @property
    def group(self) -> str:
        return "in place" if self.in_place else f"function, {str(self.dtype).removeprefix('torch.')}"

    @property
    def dtype(self) -> torch.dtype | None:
        """None where the operator takes none of `DTYPES` on a CPU."""
        return next((dtype for dtype in DTYPES if dtype in self.info.dtypes), None)

    @property
    def differentiable(self) -> bool:
        dtype = self.dtype
        return self.info.supports_autograd and dtype is not None and (dtype.is_floating_point or dtype.is_complex)

    def call(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self.in_place:
            return self.info(value, *args, **kwargs)
        copy = value.clone()
        return self.info.inplace_variant(copy, *args, **kwargs), copy


@dataclass(frozen=True, eq=False)
class Case:
    """A form with one sample: ``rows[b]`` are the tensors of member b, ``process`` brings outputs to a unique form."""

    form: Form
    leaves: tuple[Any, ...]
    spec: Any
    rows: tuple[tuple[Tensor, ...], ...]
    process: Callable[[Any], Any]

    def forward(self, *tensors: Tensor) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        value, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs = self.form.call(value, *args, **kwargs)
        # A graph gives a torch.Size as the tuple that it is.
        return tuple(outputs) if isinstance(outputs, torch.Size) else outputs

    def unique(self, outputs: Any) -> Any:
        """Outputs that torch defines up to a sign or a phase, without that freedom."""
        return (self.process(outputs[0]), outputs[1]) if self.form.in_place else self.process(outputs)

    def modules(self, count: int) -> list[nn.Module]:
        """The call as members of an array; fuse refuses code that holds tensors with gradients, as the rows do."""
        call = replace(self, rows=()).forward

        class Operator(nn.Module):
            def forward(self, *tensors: Tensor) -> Any:
                return call(*tensors)

        return [Operator() for _ in range(count)]

    def __str__(self) -> str:
        arguments = [_told(leaf) for leaf in self.leaves]
        return f"{self.form.name}({', '.join(arguments)})"


def _told(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor) else repr(leaf)


def database() -> list[OpInfo]:
    """PyTorch's own, which takes a second to import and forbids setting flags of `torch.backends`; that is undone."""
    from torch.testing._internal.common_methods_invocations import op_db

    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    return op_db


def forms(only: Sequence[str] = ()) -> Iterator[Form]:
    """Every form that computes something, or those of the operators named in ``only``."""
    for info in database():
        if info.name in UNINITIALISED or (only and info.name not in only):
            continue
        yield Form(info, in_place=False)
        if info.inplace_variant is not None and info.name != "copysign_":
            yield Form(info, in_place=True)


def cases(form: Form, most: int) -> list[Case]:
    """At most ``most`` samples, spread over those that the database has."""
    if form.dtype is None:
        return []
    draws = [_draw(form, seed) for seed in range(MEMBERS)]
    usable = [k for k, sample in enumerate(draws[0]) if _usable(form, sample)]
    places = sorted({round(k * (len(usable) - 1) / max(most - 1, 1)) for k in range(most)}) if usable else []
    return [_case(form, [draw[usable[k]] if usable[k] < len(draw) else draw[0] for draw in draws]) for k in places]


def _draw(form: Form, seed: int) -> list[SampleInput]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return list(form.info.sample_inputs("cpu", form.dtype, requires_grad=form.differentiable))


def _usable(form: Form, sample: SampleInput) -> bool:
    tensors = _tensors(sample)
    strided = all(t.layout is torch.strided and not t.is_nested for t in tensors)
    return strided and not (form.in_place and (sample.broadcasts_input or not isinstance(sample.input, Tensor)))


def _flat(sample: SampleInput) -> tuple[list[Any], Any]:
    return pytree.tree_flatten((sample.input, sample.args, sample.kwargs))


def _tensors(sample: SampleInput) -> list[Tensor]:
    return [leaf for leaf in _flat(sample)[0] if isinstance(leaf, Tensor)]


def _case(form: Form, draws: Sequence[SampleInput]) -> Case:
    leaves, spec = _flat(draws[0])
    first = _tensors(draws[0])
    rows = [tuple(first)]
    for member, draw in enumerate(draws[1:], start=1):
        others = _tensors(draw)
        rows.append(tuple(_other(member, k, x, others) for k, x in enumerate(first)))
    held = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Case(form, held, spec, tuple(rows), draws[0].output_process_fn_grad)


def _other(member: int, index: int, x: Tensor, drawn: Sequence[Tensor]) -> Tensor:
    """Another legal value for ``x``: of another draw where shapes agree, else scaled."""
    if index < len(drawn) and (drawn[index].shape, drawn[index].dtype) == (x.shape, x.dtype):
        return drawn[index]
    if x.is_floating_point() or x.is_complex():
        return (x.detach() * (1 - member / 8)).requires_grad_(x.requires_grad)
    return x


# Write the findings of a sweep as text: docs/reference/coverage.md.

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


# `python -m tests.ops.sweep`: calls of every operator of PyTorch's database, as arrays against the members alone.

BAD = (Verdict.ERROR, Verdict.WRONG)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.sweep", description=__doc__)
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
