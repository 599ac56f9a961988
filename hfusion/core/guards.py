"""Assumptions of a trace about the sizes of its inputs, to be checked on other inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Guards:
    """Guards of a trace. ``examples``: its inputs, all of one fake mode, with sizes that are numbers or symbols."""

    examples: tuple[Any, ...]
    # The number of guards and their code: later passes may add guards, and writing the code takes milliseconds.
    _code: tuple[int, str | None] = field(default=(-1, None), repr=False)

    def __call__(self, shapes: Sequence[Sequence[Any]]) -> bool:
        """Return whether the trace is valid for inputs of ``shapes``; the shape of a value that is no tensor is empty.

        The sizes may be symbols of another trace, which then records the comparison as a guard. Strides are not
        compared: programs are valid for any.
        """
        return self.assumptions()(shapes)

    def assumptions(self) -> Assumptions:
        """Return the present guards as plain data."""
        shapes = [example.shape if isinstance(example, Tensor) else None for example in self.examples]
        sizes = tuple(None if shape is None else tuple(map(fixed, shape)) for shape in shapes)
        symbols: list[Any] = [size for shape in shapes for size in shape or () if fixed(size) is None]
        if not symbols:
            return Assumptions(sizes)
        env = symbols[0].node.shape_env
        if self._code[0] != len(env.guards):
            self._code = len(env.guards), env.produce_guards_expression(symbols, ignore_static=False)
        return Assumptions(sizes, self._code[1])


@dataclass(frozen=True)
class Assumptions:
    """`Guards` as plain data. ``sizes``: of each input, with None for a dynamic size; None for other values.

    ``code``: a Python condition on the dynamic sizes, ``L["t0"]`` and so on; None if there is none.
    """

    sizes: tuple[tuple[int | None, ...] | None, ...]
    code: str | None = None

    @staticmethod
    def read(sizes: Sequence[Sequence[int | None] | None], code: str | None) -> Assumptions:
        """Return assumptions from lists, as JSON has them, in place of tuples."""
        return Assumptions(tuple(None if input_sizes is None else tuple(input_sizes) for input_sizes in sizes), code)

    def __call__(self, shapes: Sequence[Sequence[Any]]) -> bool:
        """Return whether the assumptions hold for inputs of ``shapes``, as `Guards`.

        A dynamic size is above 1: torch specializes 0 and 1.
        """
        pairs = [
            (expected, size)
            for sizes, shape in zip(self.sizes, shapes, strict=True)
            if sizes is not None
            for expected, size in zip(sizes, shape, strict=True)
        ]
        if not all(size > 1 if expected is None else expected == size for expected, size in pairs):
            return False
        if self.code is None:
            return True
        dynamic_sizes = {f"t{k}": size for k, size in enumerate(size for expected, size in pairs if expected is None)}
        return bool(eval(_compiled(self.code), {"math": math, "torch": torch}, {"L": dynamic_sizes}))

    def assumptions(self) -> Assumptions:
        """Return itself."""
        return self


@dataclass(frozen=True)
class AllHold:
    """Checks input shapes against the guards of several traces."""

    parts: tuple[Any, ...]

    def __call__(self, shapes: Sequence[Sequence[Any]]) -> bool:
        return all(part(shapes) for part in self.parts)


# torch's own text of conditions, from files beside libraries that are loaded as well: there is nothing to keep out.
_compiled = cache(lambda code: compile(code, "<sizes>", "eval"))


def fixed(size: Any) -> int | None:
    """Return a size that a trace has specialized, perhaps later in the trace; None if it is dynamic."""
    if isinstance(size, int):
        return size
    number = size.node.maybe_as_int()
    return None if number is None else int(number)


def open_dims(example: Any) -> frozenset[int]:
    """Return the dynamic dims of a traced tensor; none for other values."""
    sizes = example.shape if isinstance(example, Tensor) else ()
    return frozenset(dim for dim, size in enumerate(sizes) if fixed(size) is None)
