"""Random numbers of an array: every member draws its own, and a run can be replayed with the same draws.

All random operators of a fused program draw through `draw`. While `recording` is active the draws are kept, stacked
``[B, *S]`` in the order of the program; the self-check replays them through the members' original code. Where only some
members draw (`DrawnBy`), a draw has their rows.

A program that is compiled for a CPU draws from a seed of each member instead (`MemberSeeds`): the numbers of a member
then depend neither on the number of other members nor on which of them a program computes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.torch_private.dispatch_modes import in_dispatch_mode


def draws_random(target: object) -> bool:
    """Return whether an operator draws from torch's generators, so that two calls give different results."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class _Recording(threading.local):
    draws: list[Tensor] | None = None
    rows: tuple[int, ...] | None = None


_active = _Recording()


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Context manager: collect every draw of this thread, in order; each is ``[B, *S]``. Not for nested use."""
    outer, draws = _active.draws, list[Tensor]()
    _active.draws = draws
    try:
        yield draws
    finally:
        _active.draws = outer


def draw(sample: Callable[[], Tensor]) -> Tensor:
    """Return ``sample()``, the stacked draws ``[B, *S]`` of the drawing members; note it if a recording is active."""
    drawn = sample()
    if _active.draws is not None:
        _active.draws.append(drawn.detach().clone())
        setattr(_active.draws[-1], _ROWS, _active.rows)
    return drawn


def is_recording() -> bool:
    """Return whether this thread's draws are recorded."""
    return _active.draws is not None


# Stored with a recorded draw: the members that draw, None for all.
_ROWS = "_hfusion_rows"


def draws_of(draws: Sequence[Tensor], member: int) -> list[Tensor]:
    """Return one member's rows of recorded draws, without draws that it did not make."""
    member_draws = []
    for drawn in draws:
        rows = getattr(drawn, _ROWS, None)
        if rows is None:
            member_draws.append(drawn[member])
        elif member in rows:
            member_draws.append(drawn[rows.index(member)])
    return member_draws


class DrawnBy:
    """Calls ``fn``, which draws random numbers, for members ``rows`` only, from their seeds if seeds are active."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)

    def __call__(self, rows: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        outer, source = (_active.rows, _seeded.source, _seeded.make), member_seeds()
        row_seeds = None if source is None else source.of_rows(rows)
        _active.rows = rows
        if row_seeds is not None:
            _seeded.source, _seeded.make = row_seeds, None
        try:
            return self.fn(*args, **kwargs)
        finally:
            _active.rows, _seeded.source, _seeded.make = outer
            if row_seeds is not None and source is not None:
                source.count_rows(rows, row_seeds)
                _seeded.source = source


@functools.lru_cache(maxsize=256)
def drawn_by(fn: Callable[..., Any]) -> DrawnBy:
    """Return ``fn`` as a function of the rows that draw, followed by its arguments."""
    return DrawnBy(fn)


# A hash of 32 bits, from https://github.com/skeeto/hash-prospector/issues/19. Its factors are below 2**31, so that
# products fit in 63 bits: C++ compilers take it for granted that signed numbers never overflow.
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))
_LAST = 15
_WORD = (1 << 32) - 1
_GOLDEN = 0x9E3779B9


# Two integers of 32 bits for each member, from which the numbers of one draw follow.
Keys: TypeAlias = tuple[Tensor, Tensor]


@dataclass(eq=False)
class MemberSeeds:
    """Random numbers of members, computed only from ``seeds``, an integer for each, and from the numbers' positions.

    ``count``: the number of draws so far; each gives different numbers. ``more``: further draws of each member, if
    members differ in their number of draws.
    """

    seeds: Tensor
    count: int = 0
    more: tuple[int, ...] = ()

    def of_rows(self, rows: Sequence[int]) -> MemberSeeds:
        """Return a source for some of the members, which continues after the draws made so far."""
        seeds = torch.cat([self.seeds[row : row + 1] for row in rows])
        return MemberSeeds(seeds, self.count, tuple(self.more[row] for row in rows) if self.more else ())

    def count_rows(self, rows: Sequence[int], own: MemberSeeds) -> None:
        """Count the draws that members ``rows`` have made from ``own``, which `of_rows` returned."""
        more = list(self.more or (0,) * self.seeds.shape[0])
        for row in rows:
            more[row] += own.count - self.count
        self.more = tuple(more)

    def _offset(self) -> int | Tensor:
        """Return the number of this draw of each member, times a constant that spreads it over a word."""
        offsets = [(self.count + more) * _GOLDEN % (1 << 32) for more in self.more] or [
            self.count * _GOLDEN % (1 << 32)
        ]
        if len(set(offsets)) == 1:
            return offsets[0]
        return torch.cat([torch.full((1,), offset, device=self.seeds.device) for offset in offsets])

    def keys(self) -> Keys:
        """Return the keys of one draw: the member's seed and the number of the draw, hashed."""
        self.count += 1
        low = _stored(_hashed(((self.seeds & _WORD) + self._offset()) & _WORD))
        return low, _stored(_hashed(((self.seeds >> 32) & _WORD) ^ low))

    def uniform(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in [0, 1), ``shape`` is ``[B, *S]``; 53 bits for float64, 24 for other dtypes."""
        size = 1
        for length in shape[1:]:
            size = size * length
        indices = torch.arange(size, device=self.seeds.device).view(1, *shape[1:])
        return uniform_at(self.keys(), indices, dtype)

    def normal(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return normal numbers ``[B, *S]``, the inverse of the distribution function at uniform numbers."""
        bits = 53 if dtype is torch.float64 else 24
        numbers: Tensor = torch.special.ndtri(self.uniform(shape, dtype) + 0.5 * 2.0**-bits)
        return numbers


def uniform_at(keys: Keys, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute some of the numbers of a draw.

    Args:
        keys: the keys of the draw, from `MemberSeeds.keys`.
        indices: positions ``[1, *S]`` into a member's numbers.
    """
    low, high = (key.view(-1, *[1] * (indices.dim() - 1)) for key in keys)
    numbers = _hashed((indices + low) & _WORD)
    first = _hashed(numbers ^ high)
    if dtype is not torch.float64:
        return (first >> 8).to(torch.float32) * 2.0**-24
    second = _hashed(numbers ^ _stored(_hashed(keys[1] ^ _GOLDEN)).view_as(high))
    return (first >> 5).to(dtype) * 2.0**-27 + (second >> 6).to(dtype) * 2.0**-53


def _stored(keys: Tensor) -> Tensor:
    """Return ``keys`` such that Inductor stores them in memory, as it does with concatenated tensors.

    Otherwise it inlines the hash of a key into that of each number: compiling a step with one dropout in float64
    takes 8 s of Python instead of 4.
    """
    return torch.cat([keys, keys])[: keys.shape[0]]


def _hashed(numbers: Tensor) -> Tensor:
    for shift, factor in _ROUNDS:
        numbers = ((numbers ^ (numbers >> shift)) * factor) & _WORD
    return numbers ^ (numbers >> _LAST)


class _Seeded(threading.local):
    """A source of seeds; ``make`` creates them at first use."""

    source: MemberSeeds | None = None
    make: Callable[[], Tensor] | None = None
    keys: Tensor | None = None


_seeded = _Seeded()


def member_seeds() -> MemberSeeds | None:
    """Return the active source of random numbers of this thread; None for torch's generator."""
    if _seeded.make is None:
        return _seeded.source
    # During capture under a mode, values belong to no member.
    if in_dispatch_mode():
        return None
    if _seeded.source is None:
        _seeded.source = MemberSeeds(_seeded.make())
    return _seeded.source


@contextmanager
def seeded(seeds: Tensor | Callable[[], Tensor] | None) -> Iterator[None]:
    """Context manager: operators that can draw from ``seeds``, an integer per member, or a function that makes them."""
    outer = _seeded.source, _seeded.make
    _seeded.source = MemberSeeds(seeds) if isinstance(seeds, Tensor) else None
    _seeded.make = None if isinstance(seeds, Tensor) else seeds
    try:
        yield
    finally:
        _seeded.source, _seeded.make = outer


@contextmanager
def seeds_of_rows(rows: Sequence[int]) -> Iterator[None]:
    """Context manager: members ``rows`` draw the numbers that they would draw among all members."""
    source = member_seeds()
    if source is None:
        yield
        return
    with seeded(source.seeds[list(rows)]):
        yield


@contextmanager
def keyed(keys: Tensor | None) -> Iterator[None]:
    """Context manager: `new_seeds` depends on ``keys``, an integer per member, not on the number of members."""
    outer, _seeded.keys = _seeded.keys, keys
    try:
        yield
    finally:
        _seeded.keys = outer


def new_seeds(members: int) -> Tensor:
    """Return a seed for each member, from torch's generator and the keys of `keyed`, if any."""
    keys = _seeded.keys
    if keys is None:
        return torch.empty(members, dtype=torch.int64, device="cpu").random_()
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
    low = _hashed(((keys & _WORD) + (drawn & _WORD)) & _WORD)
    high = _hashed((((keys >> 32) & _WORD) + (drawn >> 32) + low) & _WORD)
    return ((high & (_WORD >> 1)) << 32) | low
