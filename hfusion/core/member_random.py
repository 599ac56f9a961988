"""Random numbers of an array: every member draws its own, and a run can be replayed with the same draws.

All random operators of a fused program draw through `draw`. While `recording` is active the draws are kept, stacked
``[B, *S]`` in the order of the program; the self-check replays them through the members' original code.

A program that is compiled for a CPU draws from a seed of each member instead (`MemberSeeds`): the numbers of a member
then depend neither on the number of other members nor on which of them a program computes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfusion.torch_private.dispatch_modes import in_dispatch_mode
from hfusion.torch_private.replaced_functions import replaced


def draws_random(target: object) -> bool:
    """Return whether an operator draws from torch's generators, so that two calls give different results."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class _Active(threading.local):
    """What this thread draws from, and the draws that it records.

    Attributes:
        source, make: the source of seeds; ``make`` creates them at first use.
        keys: the keys of `new_seeds`.
    """

    draws: list[Tensor] | None = None
    source: MemberSeeds | None = None
    make: Callable[[], Tensor] | None = None
    keys: Tensor | None = None


_active = _Active()


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Context manager: collect every draw of this thread, in order; each is ``[B, *S]``. Not for nested use."""
    draws: list[Tensor] = []
    with replaced(_active, {"draws": draws}):
        yield draws


def draw(sample: Callable[[], Tensor]) -> Tensor:
    """Return ``sample()``, the stacked draws ``[B, *S]`` of the drawing members; note it if a recording is active."""
    drawn = sample()
    if _active.draws is not None:
        _active.draws.append(drawn.detach().clone())
    return drawn


# A hash of 32 bits, from https://github.com/skeeto/hash-prospector/issues/19. Its factors are below 2**31, so that
# products fit in 63 bits: C++ compilers take it for granted that signed numbers never overflow.
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))
_LAST = 15
_WORD = (1 << 32) - 1
_GOLDEN = 0x9E3779B9


@dataclass(eq=False)
class MemberSeeds:
    """Random numbers of members, computed only from ``seeds``, an integer for each, and from the numbers' positions.

    ``count``: the number of draws so far; each gives different numbers.
    """

    seeds: Tensor
    count: int = 0

    def keys(self) -> tuple[Tensor, Tensor]:
        """Return two integers of 32 bits for each member, from which the numbers of one draw follow.

        They are the hashed seed of the member and the number of the draw.
        """
        self.count += 1
        # The number of the draw, times a constant that spreads it over a word.
        offset = self.count * _GOLDEN % (1 << 32)
        low = _stored(_hashed(((self.seeds & _WORD) + offset) & _WORD))
        return low, _stored(_hashed(((self.seeds >> 32) & _WORD) ^ low))

    def uniform(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in [0, 1), ``shape`` is ``[B, *S]``; 53 bits for float64, 24 for other dtypes."""
        indices = torch.arange(math.prod(shape[1:]), device=self.seeds.device).view(1, *shape[1:])
        keys = self.keys()
        low, high = (key.view(-1, *[1] * (len(shape) - 1)) for key in keys)
        numbers = _hashed((indices + low) & _WORD)
        first = _hashed(numbers ^ high)
        if dtype is not torch.float64:
            return (first >> 8).to(torch.float32) * 2.0**-24
        second = _hashed(numbers ^ _stored(_hashed(keys[1] ^ _GOLDEN)).view_as(high))
        return (first >> 5).to(dtype) * 2.0**-27 + (second >> 6).to(dtype) * 2.0**-53

    def normal(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return normal numbers ``[B, *S]``, the inverse of the distribution function at uniform numbers."""
        bits = 53 if dtype is torch.float64 else 24
        numbers: Tensor = torch.special.ndtri(self.uniform(shape, dtype) + 0.5 * 2.0**-bits)
        return numbers


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


def member_seeds() -> MemberSeeds | None:
    """Return the active source of random numbers of this thread; None for torch's generator."""
    if _active.make is None:
        return _active.source
    # During capture under a mode, values belong to no member.
    if in_dispatch_mode():
        return None
    if _active.source is None:
        _active.source = MemberSeeds(_active.make())
    return _active.source


def seeded(seeds: Tensor | Callable[[], Tensor] | None) -> AbstractContextManager[None]:
    """Context manager: operators that can draw from ``seeds``, an integer per member, or a function that makes them."""
    if isinstance(seeds, Tensor):
        return replaced(_active, {"source": MemberSeeds(seeds), "make": None})
    return replaced(_active, {"source": None, "make": seeds})


def keyed(keys: Tensor | None) -> AbstractContextManager[None]:
    """Context manager: `new_seeds` depends on ``keys``, an integer per member, not on the number of members."""
    return replaced(_active, {"keys": keys})


def new_seeds(members: int) -> Tensor:
    """Return a seed for each member, from torch's generator and the keys of `keyed`, if any."""
    keys = _active.keys
    if keys is None:
        return torch.empty(members, dtype=torch.int64, device="cpu").random_()
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
    low = _hashed(((keys & _WORD) + (drawn & _WORD)) & _WORD)
    high = _hashed((((keys >> 32) & _WORD) + (drawn >> 32) + low) & _WORD)
    return ((high & (_WORD >> 1)) << 32) | low
