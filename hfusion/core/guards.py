"""Assumptions of a trace about the sizes of its inputs, to be checked on other inputs."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Guards:
    """``examples`` are the traced inputs, all of one fake mode; the sizes of tensors are numbers or symbols."""

    examples: tuple[Any, ...]
    # The assumptions as code, for so many of them: later passes may add some, and writing them takes milliseconds.
    _code: tuple[int, str | None] = field(default=(-1, None), repr=False)

    def hold(self, shapes: Sequence[Sequence[Any]]) -> bool:
        """Return whether the trace is valid for inputs of ``shapes``; the shape of a value that is no tensor is empty.

        The sizes may be symbols of another trace, which then records the comparison as a guard.
        """
        pairs = [
            (a if (known := fixed(a)) is None else known, b)
            for example, shape in zip(self.examples, shapes, strict=True)
            if isinstance(example, Tensor)
            for a, b in zip(example.shape, shape, strict=True)
        ]
        # A symbol was never 0 or 1, which ShapeEnv treats apart.
        if not all(a == b if isinstance(a, int) else b > 1 for a, b in pairs):
            return False
        symbols: list[tuple[Any, Any]] = [(a, b) for a, b in pairs if isinstance(a, torch.SymInt)]
        if not symbols:
            return True
        # Strides are no matter: programs are as good for any.
        env = symbols[0][0].node.shape_env
        code = self._written([a for a, _ in symbols])
        return code is None or bool(env.evaluate_guards_expression(code, [b for _, b in symbols]))

    __call__ = hold

    def _written(self, symbols: list[Any]) -> str | None:
        env = symbols[0].node.shape_env
        if self._code[0] != len(env.guards):
            self._code = len(env.guards), env.produce_guards_expression(symbols, ignore_static=False)
        return self._code[1]

    def assumptions(self) -> Assumptions:
        """The same without the trace. Raises ValueError where that cannot be said in numbers and operators alone."""
        sizes = tuple(
            tuple(map(fixed, example.shape)) if isinstance(example, Tensor) else None for example in self.examples
        )
        open_sizes = [
            size
            for example in self.examples
            if isinstance(example, Tensor)
            for size in example.shape
            if fixed(size) is None
        ]
        return Assumptions(sizes, self._written(open_sizes) if open_sizes else None)


@dataclass(frozen=True)
class Assumptions:
    """`Guards` as plain data: for each input its ``sizes``, None where one is open; None for what is no tensor.

    ``code`` is what is asked of the open sizes, ``L["t0"]`` and so on, in Python; None if nothing is.
    Raises ValueError for code that does more than reckon with them.
    """

    sizes: tuple[tuple[int | None, ...] | None, ...]
    code: str | None = None

    def __post_init__(self) -> None:
        if self.code is not None:
            _checked(self.code)

    @staticmethod
    def read(sizes: Sequence[Sequence[int | None] | None], code: str | None) -> Assumptions:
        """With lists for tuples, as JSON has them."""
        return Assumptions(tuple(None if one is None else tuple(one) for one in sizes), code)

    def hold(self, shapes: Sequence[Sequence[Any]]) -> bool:
        """As `Guards.hold`."""
        pairs = [
            (known, size)
            for sizes, shape in zip(self.sizes, shapes, strict=True)
            if sizes is not None
            for known, size in zip(sizes, shape, strict=True)
        ]
        if not all(size > 1 if known is None else known == size for known, size in pairs):
            return False
        if self.code is None:
            return True
        given = {f"t{k}": size for k, size in enumerate(size for known, size in pairs if known is None)}
        return bool(eval(_checked(self.code), {"__builtins__": {}, **_RECKONING}, {"L": given}))

    __call__ = hold

    def assumptions(self) -> Assumptions:
        """Return itself."""
        return self

    def of_inputs(self, positions: Sequence[int]) -> Assumptions | None:
        """Return the same of the inputs at ``positions`` alone; None if something is assumed of another one."""
        if any(sizes is not None and position not in positions for position, sizes in enumerate(self.sizes)):
            return None
        return Assumptions(tuple(self.sizes[position] for position in positions), self.code)


@dataclass(frozen=True)
class InputGuards:
    """What a trace has assumed of its inputs, which are those at ``positions`` of ``count``."""

    guards: Any
    positions: tuple[int, ...]
    count: int

    def __call__(self, shapes: Sequence[Sequence[Any]]) -> bool:
        return bool(self.guards([shapes[position] for position in self.positions]))

    def of_inputs(self, positions: Sequence[int]) -> InputGuards | None:
        """As of `Assumptions`."""
        if not set(self.positions) <= set(positions):
            return None
        return InputGuards(self.guards, tuple(map(positions.index, self.positions)), len(positions))

    def assumptions(self) -> Assumptions:
        """As of `Guards`."""
        assumed = self.guards.assumptions()
        sizes = dict(zip(self.positions, assumed.sizes, strict=True))
        return Assumptions(tuple(sizes.get(position) for position in range(self.count)), assumed.code)


@dataclass(frozen=True)
class AllHold:
    """Checks input shapes against the guards of several traces."""

    parts: tuple[Any, ...]

    def __call__(self, shapes: Sequence[Sequence[Any]]) -> bool:
        return all(part(shapes) for part in self.parts)

    def of_inputs(self, positions: Sequence[int]) -> AllHold:
        """Return what is assumed of the inputs at ``positions`` alone."""
        parts = [part.of_inputs(positions) for part in self.parts]
        return AllHold(tuple(part for part in parts if part is not None))


_NODES = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Attribute, ast.Subscript,
    ast.Constant, ast.Load, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
_RECKONING = {"math": math, "torch": torch, "max": max, "min": min}


@cache
def _checked(code: str) -> CodeType:
    """``code`` compiled, if it reckons with sizes and does nothing else."""
    tree = ast.parse(code, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ValueError(f"{code!r} is no question about sizes")
        if isinstance(node, ast.Name) and node.id not in {"L", *_RECKONING}:
            raise ValueError(f"{code!r} names {node.id}")
        if isinstance(node, ast.Attribute) and not _is_reckoning(node):
            raise ValueError(f"{code!r} names {node.attr}")
    return compile(tree, "<sizes>", "eval")


def _is_reckoning(node: ast.Attribute) -> bool:
    """Such as ``math.floor`` and ``torch.sym_max``."""
    if not isinstance(node.value, ast.Name) or node.value.id not in ("math", "torch"):
        return False
    return node.value.id == "math" or node.attr.startswith("sym_") or node.attr.startswith("_sym_")


def fixed(size: Any) -> int | None:
    """A size that a trace has fixed, perhaps while it went on; None if it is open."""
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    return None if known is None else int(known)


def open_dims(example: Any) -> frozenset[int]:
    """Return the dynamic dims of a traced tensor; none for other values."""
    sizes = example.shape if isinstance(example, Tensor) else ()
    return frozenset(dim for dim, size in enumerate(sizes) if fixed(size) is None)
