"""Where forward's Python code reckons with sizes that vary: there, a number of a member may stand in no operator.

A trace of a member at one size shows every number that reaches an operator, but not one that is compared with a size,
or that a size is divided by: at another size, other operators may follow. So a capture notes such uses, and members
that differ in what may stand there are captured each.

Private to torch, tried on 2.13: the methods of ``torch.SymInt`` and ``torch.SymFloat`` for Python's operators.
"""

from __future__ import annotations

import dis
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "lshift", "rlshift", "rshift", "rrshift", "and", "rand", "or", "ror", "xor", "rxor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min", "divmod", "rdivmod", "int_truediv"),
)
_SYMBOLS = (torch.SymInt, torch.SymFloat)
NUMBER_OPERATORS = tuple(
    dict.fromkeys(name for kind in _SYMBOLS for name in (f"__{o}__" for o in _OPERATORS) if name in vars(kind))
)
"""The methods by which Python computes with symbols of numbers."""


@dataclass(frozen=True)
class SizeUse:
    """A number ``other`` that met a size.

    Attributes:
        other: the number.
        attribute: the attribute that it was read from, where the code tells; else empty.
        in_torch: whether torch's own code brought them together.
    """

    other: int | float
    attribute: str
    in_torch: bool


@contextmanager
def size_uses() -> Iterator[list[SizeUse]]:
    """While active, note the numbers that code of this thread brings together with sizes that vary.

    A number that stands in the code itself, right of the operator, is no member's own and is left out.
    """
    uses: list[SizeUse] = []
    here = threading.get_ident()
    before = [(kind, name, vars(kind)[name]) for kind in _SYMBOLS for name in NUMBER_OPERATORS if name in vars(kind)]

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(size: Any, *others: Any) -> Any:
            if others and threading.get_ident() == here:
                _note(uses, others[0], sys._getframe(1))
            return method(size, *others)

        return noted

    for kind, name, method in before:
        setattr(kind, name, noting(method))
    try:
        yield uses
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


def _note(uses: list[SizeUse], other: Any, frame: types.FrameType | None) -> None:
    if not isinstance(other, int | float) or isinstance(other, Tensor):
        return
    while frame is not None and _is_plumbing(frame):
        frame = frame.f_back
    if frame is None:
        return
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in ("sympy", "hfusion") or _computes_shapes(module):
        return
    operand = _right_operand(frame.f_code, frame.f_lasti)
    if operand != _LITERAL:
        uses.append(SizeUse(other, operand, module.partition(".")[0] == "torch"))


def _is_plumbing(frame: types.FrameType) -> bool:
    return frame.f_globals.get("__name__") in ("torch", "torch.fx.experimental.sym_node")


def _computes_shapes(module: str) -> bool:
    """Whether a module of torch has the rules for the shapes of operators, which take the numbers of their calls."""
    return module.startswith("torch.") and not module.startswith(("torch.nn.", "torch.functional"))


_LITERAL = "0"


def _right_operand(code: types.CodeType, offset: int) -> str:
    """Return the attribute that the right operand of the operator at ``offset`` was read from.

    `_LITERAL` where it is a constant of the code, empty where the code does not tell.
    """
    last: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.offset == offset:
            break
        if instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            last = instruction
    else:
        return ""
    if not instruction.opname.startswith(("BINARY_OP", "COMPARE_OP")) or last is None:
        return ""
    if last.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return _LITERAL
    return str(last.argval) if last.opname == "LOAD_ATTR" else ""
