"""Random numbers from seeds of the members: theirs alone, and as random as they should be."""

from __future__ import annotations

import math

import pytest
import torch

from hfusion.core.member_random import MemberSeeds

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def seeds(members: int) -> torch.Tensor:
    return torch.empty(members, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0))


def hashed(x: int) -> int:
    """As its source has it."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def test_the_numbers_are_hashes() -> None:
    seed = (0x1234567 << 32) + 0x89ABCDEF
    low = hashed((0x89ABCDEF + 0x9E3779B9) & 0xFFFFFFFF)
    high = hashed(0x1234567 ^ low)
    single = MemberSeeds(torch.tensor([seed])).uniform((1, 2, 3), torch.float32)
    wide = MemberSeeds(torch.tensor([seed])).uniform((1, 2, 3), torch.float64)
    for index in range(6):
        number = hashed((index + low) & 0xFFFFFFFF)
        first, second = hashed(number ^ high), hashed(number ^ hashed(high ^ 0x9E3779B9))
        assert single.flatten()[index].item() == (first >> 8) * 2.0**-24
        assert wide.flatten()[index].item() == (first >> 5) * 2.0**-27 + (second >> 6) * 2.0**-53


@DTYPES
def test_the_numbers_of_a_member_are_its_own(dtype: torch.dtype) -> None:
    whole, row = MemberSeeds(seeds(5)), MemberSeeds(seeds(5)[3:4])
    for shape in ((2, 3), (7,)):
        draws = whole.uniform((5, *shape), dtype), row.uniform((1, *shape), dtype)
        assert torch.equal(draws[0][3:4], draws[1])
        assert draws[0].dtype is dtype
    assert not torch.equal(whole.uniform((5, 4), dtype), whole.uniform((5, 4), dtype))
    assert len(whole.uniform((5, 99), dtype)[:, 0].unique()) == 5


@DTYPES
def test_normal(dtype: torch.dtype) -> None:
    values = MemberSeeds(seeds(4)).normal((4, 1 << 14), dtype).double()
    assert torch.isfinite(values).all()
    assert values.mean().item() == pytest.approx(0, abs=5 / math.sqrt(values.numel()))
    assert values.var().item() == pytest.approx(1, abs=0.05)
    assert (values**4).mean().item() == pytest.approx(3, abs=0.2)
