"""One case under one pattern: the array's outputs and gradients against those of the members alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
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
from tests.ops_sweep.cases import Case
from tests.ops_sweep.verdicts import Finding, Pattern, Verdict, patterns

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

    A member alone has tensors of its own: a row of a stack would begin somewhere in the memory of the stack.
    """

    given: tuple[Tensor, ...]
    alone: tuple[tuple[Tensor, ...], ...]
    stacked: tuple[bool, ...]

    @staticmethod
    def of(case: Case, pattern: Pattern) -> Operands:
        given, alone = [], []
        for k, own in enumerate(pattern.stacked):
            grad = case.rows[0][k].requires_grad
            rows = [case.rows[b][k].detach().clone() for b in range(pattern.members if own else 1)]
            given.append((torch.stack(rows) if own else rows[0].clone()).requires_grad_(grad))
            alone.append(tuple(row.requires_grad_(grad) for row in rows))
        return Operands(tuple(given), tuple(alone), pattern.stacked)

    def of_member(self, member: int) -> list[Tensor]:
        return [rows[member % len(rows)] for rows in self.alone]

    @property
    def inputs(self) -> list[Any]:
        """As a fused module takes them."""
        return [hf.stacked(x) if own else x for x, own in zip(self.given, self.stacked, strict=True)]

    def array_gradients(self, rows: Sequence[Sequence[Any]]) -> list[Tensor | None]:
        return _gradients(rows, [x for x in self.given if x.requires_grad])

    def alone_gradients(self, rows: Sequence[Sequence[Any]]) -> list[Tensor | None]:
        """As `array_gradients`, of the members' own tensors."""
        trained = [tensors for tensors in self.alone if tensors[0].requires_grad]
        flat = iter(_gradients(rows, [x for tensors in trained for x in tensors]))
        parts = [[next(flat) for _ in tensors] for tensors in trained]
        own = [one for one, x in zip(self.stacked, self.given, strict=True) if x.requires_grad]
        return [_stack(part) if one else part[0] for part, one in zip(parts, own, strict=True)]


def _stack(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = next((part for part in parts if part is not None), None)
    return None if known is None else torch.stack([torch.zeros_like(known) if p is None else p for p in parts])


@dataclass(frozen=True, eq=False)
class Alone:
    """What the members give by themselves; their outputs flat, in a unique form."""

    rows: list[list[Any]]
    spec: Any
    gradients: list[Tensor | None]


def sweep(case: Case, members: tuple[int, ...] = (1, 3)) -> Iterator[Finding]:
    """Every pattern of one case: the first goes the whole way, the others from the graph that it captured."""
    known: Compiled | None = None
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
            run = array.whole if known is None or known.opaque else partial(array.of_graph, known)
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
        known = known or array.made


def _finding(case: Case, pattern: Pattern, verdict: Verdict, reason: str) -> Finding:
    return Finding(case.form.name, case.form.group, pattern, verdict, reason, str(case))


def _words(error: Exception) -> str:
    told = _short(str(error).removeprefix("Operator, model 0: "))
    return told if isinstance(error, hf.FusionError) else f"{type(error).__name__}: {told}"


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

    def of_graph(self, known: Compiled) -> Any:
        """Outputs of a program of a graph that is captured already."""
        slots, stacked = known.program.slots, self.operands.stacked
        layouts = [Layout.STACKED if s.kind is Kind.INPUT and stacked[int(s.name)] else Layout.SHARED for s in slots]
        self.made = _program(known, layouts, self.pattern.members)
        inputs = iter(self.operands.given)
        given = [next(inputs) if s.kind is Kind.INPUT else known.constants[s.name] for s in slots]
        return pytree.tree_unflatten(list(self.made.program.run(*given)), known.program.out_spec)


def _program(known: Compiled, layouts: Sequence[Layout], members: int) -> Compiled:
    """The same graph for operands in other layouts, made as the compiler makes it."""
    choices = choose(known.graph, layouts, members, RULES, Model.of(known.graph, members))
    module = batch(known.graph, layouts, members, RULES, choices)
    code = regions(module, members)
    program = replace(known.program, members=members, module=module, code=code, layouts=tuple(layouts))
    return replace(known, program=program)


def _looped(made: Compiled | None) -> str:
    """What runs in a loop over members: operators, or the members' own code and why; empty if nothing does."""
    assert made is not None
    if made.opaque:
        return _short(made.opaque[0].why)
    nodes = made.program.module.graph.nodes
    origins = [n.meta["origin"] for n in nodes if n.target is call_per_member]
    return ", ".join(dict.fromkeys(str(origin.target) for origin in origins if not _empty(origin)))


def _empty(origin: fx.Node) -> bool:
    """Whether there is nothing to compute: an operand has no elements."""
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
    for ours, theirs in zip(rows, alone.rows, strict=True):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _check(case, a, b, f"output {k}", _relative(b))
    for k, (given, own) in enumerate(zip(operands.given, operands.alone, strict=True)):
        # What forward writes into its inputs, such as running statistics.
        after = torch.stack(own) if operands.stacked[k] else own[0]
        _check(case, given.detach(), after.detach(), f"argument {k} afterwards", _relative(after))
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


def _check(case: Case, ours: Any, theirs: Any, what: str, relative: float) -> None:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        if type(ours) is not type(theirs) or not (ours == theirs or (ours != ours and theirs != theirs)):
            raise Differs(f"{what}: {ours!r} instead of {theirs!r}")
        return
    for name in ("shape", "dtype", "requires_grad"):
        if getattr(ours, name) != getattr(theirs, name):
            raise Differs(f"{what}: {name} {getattr(ours, name)} instead of {getattr(theirs, name)}")
    if not _close(ours.detach(), theirs.detach(), relative):
        raise Differs(f"{what}: values differ")


def _close(ours: Tensor, theirs: Tensor, relative: float) -> bool:
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return torch.equal(ours, theirs)
    if theirs.dtype is torch.complex32:
        ours, theirs = ours.to(torch.complex64), theirs.to(torch.complex64)
    size = float(theirs.nan_to_num(0, 0, 0).abs().double().max()) if theirs.numel() else 0.0
    return torch.allclose(ours, theirs, rtol=relative, atol=relative * min(1.0, size) + 1e-12, equal_nan=True)


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
