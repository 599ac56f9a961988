"""What a trace has assumed of the sizes of its inputs, as a question to other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        """Whether the trace serves inputs of ``shapes``, empty for what is no tensor.

        The sizes may be symbols of another trace, which takes note of what is asked.
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
        if self._code[0] != len(env.guards):
            self._code = len(env.guards), env.produce_guards_expression([a for a, _ in symbols], ignore_static=False)
        code = self._code[1]
        return code is None or bool(env.evaluate_guards_expression(code, [b for _, b in symbols]))


def fixed(size: Any) -> int | None:
    """A size that a trace has fixed, perhaps while it went on; None if it is open."""
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    return None if known is None else int(known)


def open_dims(example: Any) -> frozenset[int]:
    """The dims of a traced tensor whose sizes are open; none for what is no tensor."""
    sizes = example.shape if isinstance(example, Tensor) else ()
    return frozenset(dim for dim, size in enumerate(sizes) if fixed(size) is None)
