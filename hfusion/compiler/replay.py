"""Replay the random draws of a program in a member's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.core.errors import FusionError
from hfusion.ops.random import ELEMENTWISE, FACTORIES
from hfusion.ops.rule import is_random
from hfusion.passes.candidates import by_name

aten = torch.ops.aten

# Operators whose whole result is drawn, by name; in place they have the same name, and an underscore.
_DRAWN = {target.overloadpacket.__name__ for target in (*ELEMENTWISE, *FACTORIES)}
_DRAWN |= {"randperm", "multinomial", "_standard_gamma", "_sample_dirichlet"}
_RRELU = (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)


class Unmatched(Exception):
    """The member's code draws other random numbers than the program."""


class Replay:
    """Gives the random operators of one member's code the member's rows of ``draws``, in order.

    A backward that runs a part of forward again, as a checkpoint does, restores the state of torch's random numbers.
    That state identifies the rows to give again.
    """

    def __init__(self, draws: Sequence[Tensor], member: int) -> None:
        self._rows = iter([drawn[member] for drawn in draws])
        self._rows_by_state: dict[bytes, Tensor] = {}
        self._state = _state()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager: random operators return the next rows. Raises Unmatched if rows remain at the end."""
        self._state = _state()
        with _Replaced(self._next):
            yield
        if next(self._rows, None) is not None:
            raise Unmatched("a member draws fewer random numbers than the program")

    def backward(self) -> AbstractContextManager[Any]:
        """Return a context manager in which random operators return the same rows as in forward."""
        return _Replaced(self._forward_row)

    def _next(self, func: OpOverload) -> Tensor:
        if _state() != self._state:
            raise FusionError(
                f"forward sets the state of torch's random numbers before {func}, which a fused array would lose; "
                "draw from the numbers as they are, or keep what is drawn in a buffer"
            )
        row = next(self._rows, None)
        if row is None:
            raise Unmatched(f"a member's {func} draws random numbers that the program draws elsewhere")
        self._rows_by_state[self._state] = row
        self._state = _advanced()
        return row

    def _forward_row(self, func: OpOverload) -> Tensor:
        row = self._rows_by_state.get(_state())
        if row is None:
            raise Unmatched(f"a member's backward draws random numbers, by {func}")
        _advanced()
        return row


def _state() -> bytes:
    state: bytes = torch.get_rng_state().numpy().tobytes()
    return state


def _advanced() -> bytes:
    """Draw one number, and return the new random state."""
    torch.rand((), device="cpu")
    return _state()


class _Replaced(TorchDispatchMode):
    """Replaces the draws of every random operator ``func`` by ``row(func)``."""

    def __init__(self, row: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._row = row

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = by_name(func, args, kwargs)
        if not is_random(func, arguments):
            return func(*args, **kwargs)
        row = self._row(func)
        if func is aten.native_dropout.default:
            return _native_dropout(func, row, arguments["input"], arguments["p"])
        if func in _RRELU:
            return _rrelu(func, row, arguments["self"], arguments["noise"])
        if func.overloadpacket.__name__.removesuffix("_") not in _DRAWN:
            raise Unmatched(f"a member's {func} draws what cannot be given to it")
        return _overwritten(func, row, args, kwargs)


def _overwritten(func: OpOverload, row: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Return the result of the operator with its draws replaced by ``row``, in place for in-place operators."""
    state = torch.get_rng_state()
    drawn: Tensor = func(*args, **kwargs)
    torch.set_rng_state(state)
    _check(func, row, drawn)
    return drawn.copy_(row)


def _native_dropout(func: OpOverload, row: Tensor, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    _check(func, row, x)
    return x * row * (0.0 if p == 1 else 1 / (1 - p)), row.bool()


def _rrelu(func: OpOverload, row: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    _check(func, row, x)
    noise.copy_(row)
    return x.mul_(row) if func is aten.rrelu_with_noise_.default else x * row


def _check(func: OpOverload, row: Tensor, drawn: Tensor) -> None:
    if drawn.shape != row.shape:
        raise Unmatched(f"a member's {func} draws {tuple(drawn.shape)}, the program {tuple(row.shape)}")
