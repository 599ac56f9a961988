"""Submodules that change an object, list or dict among their arguments, or whose results are changed afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.alone import assert_alone, looped, normal
from tests.capture.test_export import Sevenfold


def held_back(x: Tensor) -> Tensor:
    return x if x.sum() < 1e9 else -x


class Cache:
    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def append(self, x: Tensor) -> None:
        self.held.append(x)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(x)


class Layer(nn.Module):
    """Lets a cache grow, as the attention of a decoder; only its activation cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4).double(), Square()

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.append(self.fc(x))
        held = cache if isinstance(cache, list) else cache.held
        return self.act(torch.cat(held)).sum(0, keepdim=True) + x


class Whole(Layer):
    """As a whole no graph can hold it."""

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return super().forward(held_back(x), cache)


class Noting(Layer):
    def forward(self, x: Tensor, notes: Any) -> Tensor:
        notes["count"] = notes.get("count", 0) + 1
        return self.fc(held_back(x))


class Giving(Layer):
    def forward(self, x: Tensor) -> Any:
        return [self.fc(held_back(x))]


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], cache: type, read: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.cache, self.read = kind(), kind(), cache, read

    def forward(self, x: Tensor) -> Tensor:
        cache = self.cache()
        y = self.last(self.first(x, cache), cache)
        return y * cache.get("count", 5) if self.read else y


class Extending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = Giving(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        values = self.first(x)
        values.append(self.fc(x))
        return torch.stack(values).sum(0)


ROWS: dict[str, tuple[Any, set[str]]] = {
    "object": (lambda: Net(Layer, Cache), {"first.act", "last.act"}),
    "list": (lambda: Net(Layer, list), {"first.act", "last.act"}),
    "object in a loop": (lambda: Net(Whole, Cache), {"forward"}),
    "list in a loop": (lambda: Net(Whole, list), {"forward"}),
    "number in a dict": (lambda: Net(Noting, dict, read=True), {"forward"}),
    "results": (Extending, {"first"}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_changes_to_arguments_are_kept(name: str, training: bool) -> None:
    make, expected = ROWS[name]
    fused = assert_alone([make().train(training) for _ in range(2)], normal(3, 4), normal(3, 4), normal(2, 4))
    assert looped(fused.report().parts[0]) == expected
