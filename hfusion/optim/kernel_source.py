"""The kernels of a formula, written in C and in Triton from a trace of its `scalars` and `update`.

Both languages have a macro or function of the same name for each operator (``operators.h``, ``triton_kernels.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from torch import fx

from hfusion.optim.formula import Formula

Operand: TypeAlias = str | float
"""The name of a value, or a number that is the same for all members."""

_INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COUNTS = {
    **dict.fromkeys(_INFIX, (2,)),
    **dict.fromkeys(("neg", "abs", "sqrt", "rsqrt", "reciprocal", "square", "sign", "to_double"), (1,)),
    **dict.fromkeys(("div", "maximum", "minimum", "pow", "cast_like"), (2,)),
    **dict.fromkeys(("where", "lerp"), (3,)),
    **dict.fromkeys(("addcmul", "addcdiv"), (3, 4)),
    "add": (2, 3),
}
"""The operators, and how many operands they may have."""
_ALIASES = {"truediv": "div", "to": "cast_like", "double": "to_double"}
# Their results have no more bits than their operands.
_EXACT = ("abs", "sign", "maximum", "minimum", "where")
_DIVIDING = ("div", "addcdiv", "rsqrt")
_OPERATORS = Path(__file__).with_name("operators.h")


class Operation(NamedTuple):
    """One operator of a formula. ``stacked``: it computes elements of stacks, not a number of each member."""

    name: str
    operator: str
    operands: tuple[Operand, ...]
    stacked: bool


@dataclass(frozen=True, eq=False)
class KernelProgram:
    """What a formula computes for param groups with certain options and state.

    Attributes:
        formula: its class.
        states: the names of the stacks in the state.
        before: the operations that compute scalars.
        scalars: the scalars that the update reads, by name.
        new_numbers: numbers other than ``step`` after the step, by name.
        update: the operations of the update.
        results: the new parameter and the new stacks, by name.
    """

    formula: type[Formula]
    states: tuple[str, ...]
    before: Sequence[Operation]
    scalars: Mapping[str, Operand]
    new_numbers: Mapping[str, Operand]
    update: Sequence[Operation]
    results: Mapping[str, Operand]

    def flushes(self, eps: float) -> bool:
        """Return whether 0 may be taken for denormal numbers, if the least ``eps`` of a member is this."""
        stacked = {operation.operator for operation in self.update if operation.stacked}
        compared = stacked & {"sign", "lt", "le", "gt", "ge", "eq", "ne"}
        # Beside such an eps no float can tell a denormal square from 0.
        return not compared and (eps >= 1e-12 or not stacked & set(_DIVIDING))


def program(formula: type[Formula], options: Any, states: tuple[str, ...]) -> KernelProgram | None:
    """Return what ``formula`` computes for tensors with these ``states``; None if there are no kernels for it."""
    try:
        return _program(formula, options, states) if formula.elementwise else None  # type: ignore[arg-type]
    # A formula is user code, and may do anything with the symbols of a trace.
    except Exception:
        return None


@lru_cache(maxsize=256)
def _program(formula: type[Formula], options: Any, states: tuple[str, ...]) -> KernelProgram:
    trace = _FormulaTrace("b")
    h = formula.Values(*(trace.symbol(f"h_{hyper.name}") for hyper in formula.hypers))
    n = SimpleNamespace(**{name: trace.symbol(f"n_{name}") for name in formula.numbers})
    scalars = {name: trace.operand(value) for name, value in formula.scalars(h, options, n).items()}
    before = trace.operations(())

    trace = _FormulaTrace("v")
    # A number that is the same for all members is no scalar.
    s = {name: trace.symbol(f"s_{name}") if isinstance(value, str) else value for name, value in scalars.items()}
    names = [f"x_{name}" for name in ("param", "grad", *states)]
    param, grad, *stacks = map(trace.symbol, names)
    state = dict(zip(states, stacks, strict=True))
    new_param, new_state = formula.update(param, grad, state, SimpleNamespace(**s), options)
    if new_state.keys() != state.keys():
        raise ValueError(f"update returned the state {sorted(new_state)}, not {sorted(state)}")
    update = trace.operations(names)
    results = {"param": trace.operand(new_param), **{name: trace.operand(new_state[name]) for name in states}}
    read = {*results.values(), *(operand for operation in update for operand in operation.operands)}
    return KernelProgram(
        formula,
        states,
        before,
        {name: operand for name, operand in scalars.items() if f"s_{name}" in read},
        {name: scalars[name] for name in formula.numbers if name != "step"},
        update,
        results,
    )


class _FormulaTrace:
    """The operators that a function applies to symbols. ``prefix``: of the names of their results."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._tracer = prefix, fx.Tracer()
        self._tracer.graph = fx.Graph()

    def symbol(self, name: str) -> Any:
        """Return a new symbol."""
        return self._tracer.create_proxy("placeholder", name, (), {})

    def operand(self, value: Any) -> Operand:
        """Return what operations call a value. Raises TypeError if it is neither a symbol, a result nor a number."""
        node = value.node if isinstance(value, fx.Proxy) else value
        if isinstance(node, fx.Node):
            return str(node.target) if node.op == "placeholder" else f"{self._prefix}_{node.name}"
        if isinstance(node, (bool, int, float)):
            return float(node)
        raise TypeError(f"{value!r} is no number")

    def operations(self, stacks: Iterable[str]) -> list[Operation]:
        """Return the operations in their order. Raises ValueError for others than `_COUNTS` has.

        ``stacks``: the symbols that are stacks, whose elements are computed.
        """
        operations: list[Operation] = []
        stacked = set(stacks)
        for node in self._tracer.graph.nodes:
            if node.op == "placeholder":
                continue
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            operator = _ALIASES.get(name, name)
            operands = tuple(map(self.operand, (*node.args, *node.kwargs.values())))
            is_stacked = not stacked.isdisjoint(operands)
            allowed = _COUNTS.get(operator, ())
            if len(operands) not in allowed or not node.kwargs.keys() <= {"alpha", "value", "weight"}:
                raise ValueError(f"{name} with {len(operands)} operands is not an operator of kernels")
            # Powers of 2, products and quotients round as these do.
            if operator == "square" or (operator == "pow" and operands[1] == 2.0):
                operator, operands = "mul", operands[:1] * 2
            elif operator == "neg":
                operator, operands = "mul", (*operands, -1.0)
            elif operator == "reciprocal":
                operator, operands = "div", (1.0, *operands)
            if is_stacked and operator in ("pow", "cast_like", "to_double"):
                raise ValueError(f"kernels have no {name} of elements")
            if operator in ("addcmul", "addcdiv") and len(operands) == 3:
                operands = (*operands, 1.0)
            operations.append(Operation(f"{self._prefix}_{node.name}", operator, operands, is_stacked))
            if is_stacked:
                stacked.add(operations[-1].name)
        return operations


def _expression(operation: Operation, operands: Iterable[str]) -> str:
    """Return the expression of an operation. Functions have operands that infix operators do not have."""
    first, *others = operands
    if operation.operator in _INFIX and len(operation.operands) == 2:
        return f"{first} {_INFIX[operation.operator]} {others[0]}"
    return f"{operation.operator}({', '.join([first, *others])})"


@lru_cache(maxsize=256)
def c_source(program: KernelProgram, real: str, kinds: tuple[str, ...]) -> str:
    """Return the functions ``fill`` and ``row`` of ``kernels.c`` for a program, in C.

    Args:
        program: what they compute.
        real: the type of parameters, "float" or "double".
        kinds: the types of the numbers in the state; empty if there is no state.
    """
    hypers, numbers = program.formula.hypers, dict(zip(program.formula.numbers, kinds, strict=False))

    def scalar(operand: Operand) -> str:
        return operand if isinstance(operand, str) else repr(operand).replace("inf", "INFINITY").replace("nan", "NAN")

    def element(operand: Operand) -> str:
        return operand if isinstance(operand, str) else f"(({real}){scalar(operand)})"

    def lines(operations: Iterable[Operation], text: Callable[[Operand], str]) -> list[str]:
        assigned = []
        for operation in operations:
            operands = list(map(text, operation.operands))
            value = _expression(operation, operands)
            if operation.operator == "div" and operation.stacked and operation.operands[1] not in elements:
                # One division for all elements of a member.
                value = f"{operands[0]} * (1 / {operands[1]})"
            assigned.append(f"const __auto_type {operation.name} = {value};")
        return assigned

    by_element = [operation for operation in program.update if operation.stacked]
    stacks = ("param", "grad", *program.states)
    elements = {*(f"x_{name}" for name in stacks), *(operation.name for operation in by_element)}
    fill = [
        "void fill(int64_t members, int64_t stride, const double *columns, const float *advance,",
        "          void *const *counts, void *records) {",
        *(f"{kind} *at_{name} = counts[{index}];" for index, (name, kind) in enumerate(numbers.items())),
        "for (int64_t b = 0; b < members; b++) {",
        *(f"const double h_{hyper.name} = columns[{index} * stride + b];" for index, hyper in enumerate(hypers)),
        f"const double n_step = {'at_step[b] += advance[b]' if numbers else 0};",
        *(f"const {numbers[name]} n_{name} = at_{name}[b];" for name in program.new_numbers),
        *lines(program.before, scalar),
        f"{real} *s = ({real} *)records + b * {len(program.scalars)};",
        *(f"s[{index}] = {scalar(operand)};" for index, operand in enumerate(program.scalars.values())),
        *(f"at_{name}[b] = {scalar(operand)};" for name, operand in program.new_numbers.items()),
        "}\n}",
    ]
    row = [
        "void row(int64_t n, void *const *at, const void *scalars) {",
        f"const {real} *s = scalars;",
        *(f"const {real} s_{name} = s[{index}];" for index, name in enumerate(program.scalars)),
        *lines((operation for operation in program.update if not operation.stacked), element),
        *(f"{real} *restrict at_{name} = at[{index}];" for index, name in enumerate(stacks)),
        "for (int64_t i = 0; i < n; i++) {",
        *(f"const {real} x_{name} = at_{name}[i];" for name in stacks),
        *lines(by_element, element),
        *(f"at_{name}[i] = {element(operand)};" for name, operand in program.results.items()),
        "}\n}\n",
    ]
    return "\n".join([_OPERATORS.read_text(), *fill, *row])


def triton_source(program: KernelProgram) -> str:
    """Return the functions ``prepare`` and ``update`` of a program, in Triton; see ``triton_kernels.py``."""

    def text(operand: Operand) -> str:
        return f'float("{operand}")' if operand in (math.inf, -math.inf) or operand != operand else str(operand)

    def assigned(operations: Iterable[Operation], dtype: str) -> list[str]:
        lines = []
        for operation in operations:
            value = _expression(operation, [*map(text, operation.operands), dtype])
            rounds = program.formula.torch_class is not None and operation.stacked and operation.operator not in _EXACT
            lines.append(f"{operation.name} = {f'rounded({value}, {dtype})' if rounds else value}")
        return lines

    count, states, hypers = len(program.scalars), program.states, program.formula.hypers
    prepare = [
        "@triton.jit\ndef prepare(table, counts, scalars, members, ROWS: tl.constexpr):",
        "tensor, member = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)",
        "mask, column = member < members, table + member",
        *(f"h_{h.name} = tl.load(column + {index} * members, mask, other=0.0)" for index, h in enumerate(hypers)),
        f"n_step = counted(counts + tensor * members + member, column + {len(hypers)} * members, mask)",
        *assigned(program.before, "tl.float64"),
        f"base = scalars + tensor * {count} * members + member",
        *(
            f"tl.store(base + {index} * members, {operand}.to(scalars.dtype.element_ty), mask)"
            for index, operand in enumerate(program.scalars.values())
        ),
    ]
    constants = "dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr"
    update = [
        f"@triton.jit\ndef update(spots, sizes, tensors, members, stacks, grads, scalars, {constants}):",
        "tensor, member, offsets, mask = spot(spots, sizes, BLOCK, LANES)",
        f"base = scalars + tensor * {count} * members + member",
        *(f"s_{name} = tl.load(base + {index} * members)" for index, name in enumerate(program.scalars)),
        "at_param = address(stacks, tensor, offsets, dtype, LANES)",
        "at_grad = address(grads, tensor, offsets, dtype, LANES)",
        *(
            f"at_{name} = address(stacks + {index} * tensors, tensor, offsets, dtype, LANES)"
            for index, name in enumerate(states, 1)
        ),
        *(f"x_{name} = loaded(at_{name}, mask, dtype)" for name in ("param", "grad", *states)),
        *assigned(program.update, "dtype"),
        *(f"tl.store(at_{name}, {text(operand)}, mask)" for name, operand in program.results.items()),
    ]
    # Where other numbers than counts are in the state, the host computes the scalars.
    functions = [update] if program.new_numbers else [prepare, update]
    return "\n\n".join("\n    ".join(lines) for lines in functions) + "\n"
