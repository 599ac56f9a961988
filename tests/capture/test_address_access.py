"""Members' own code that uses storage offsets sees a separate storage for each member, as alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, looped, normal
from tests.capture.test_export import Sevenfold


class Addressing(nn.Module):
    """Has no graph, and reads or writes by address."""

    def __init__(self, access: Callable[[Addressing, Tensor], Tensor]) -> None:
        super().__init__()
        self.what = access
        self.w = nn.Parameter(torch.randn(6))
        self.register_buffer("n", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(self.what(self, x))


def read(self: Addressing, x: Tensor) -> Tensor:
    return x.as_strided((2, 3), (1, 2), 1) * self.w[:3]


def read_by_keyword(self: Addressing, x: Tensor) -> Tensor:
    return torch.as_strided(x, (2, 3), (1, 2), storage_offset=1)


def scatter(self: Addressing, x: Tensor) -> Tensor:
    return torch.as_strided_scatter(x, self.w[:4].view(2, 2), (2, 2), (1, 2), 3)


def read_own(self: Addressing, x: Tensor) -> Tensor:
    return x[:, :3] * self.w.as_strided((3,), (2,), 1) + self.n.as_strided((3,), (1,), 2)


def write_own(self: Addressing, x: Tensor) -> Tensor:
    self.n.as_strided((3,), (2,), 0).add_(x.detach().mean())
    return x * self.n.clone()


def from_memory(self: Addressing, x: Tensor) -> Tensor:
    start = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage(), 1, (3,), (1,))
    return x[:, :3] * start


def where_it_begins(self: Addressing, x: Tensor) -> Tensor:
    return x + x.storage_offset()


WAYS = [read, read_by_keyword, scatter, read_own, write_own, from_memory, where_it_begins]


@pytest.mark.parametrize("access", WAYS, ids=lambda f: f.__name__)
def test_each_member_addresses_its_own_memory(access: Callable[[Addressing, Tensor], Tensor]) -> None:
    models = [nn.Sequential(nn.Linear(5, 6), Addressing(access)).double() for _ in range(3)]
    array = assert_alone(models, normal(4, 5), hf.stacked(normal(3, 4, 5)), normal(4, 5))
    assert looped(array.report().parts[0]) == {"1"}


def test_a_part_of_another_tensor_takes_the_whole_along() -> None:
    class Slicing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 6), Addressing(read)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)[1:])

    assert_alone([Slicing().double() for _ in range(3)], normal(4, 5), hf.stacked(normal(3, 4, 5)))
