"""Submodules that no graph holds run as the members' own code, with the array's tensors."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, normal
from tests.capture.test_export import Sevenfold


class Opaque(nn.Module):
    """Branches on values, and has a parameter and a buffer that it reassigns."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.factor = factor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, twice: bool = False, *, shift: Tensor | None = None) -> dict[str, Any]:
        self.steps = self.steps + 1
        y = x * self.scale * self.factor
        if y.sum() > 0:
            y = y.sin()
        return {"y": y * 2 if twice else y, "pair": (y, None)} if shift is None else {"y": y + shift, "pair": (y, None)}


class Around(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(4, 4), Opaque(factor), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(self.first(x), twice=True)
        return self.last(self.inside(h["y"], shift=x)["pair"][0])


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0)], ids=["alike", "variants"])
def test_calls_buffers_and_keywords(factors: tuple[float, ...]) -> None:
    models = [Around(factor).double() for factor in factors]
    array = assert_alone(models, normal(5, 4), normal(3, 4), hf.stacked(normal(3, 5, 4)))
    assert torch.equal(array.get_buffer("inside.steps"), torch.full((3,), 6.0, dtype=torch.float64))
    loops = [
        row.operator for row in array.report().parts[0].rows if "hfusion.opaque" in row.operator and row.lowering.loops
    ]
    assert loops
    assert any(not row.lowering.loops and "linear" in row.operator for row in array.report().parts[0].rows)


def test_shapes_that_depend_on_values_are_refused() -> None:
    class Picking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Sevenfold.apply(x[: int((x > 0).sum())])

    array = hf.fuse([Picking(), Picking()])
    with pytest.raises(hf.FusionError, match="shapes that depend on values cannot be fused"):
        array(hf.stacked(torch.tensor([[1.0, 2.0], [1.0, -1.0]])))


def test_results_beside_tensors_are_those_of_each_call() -> None:
    class Telling(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            return Sevenfold.apply(x), float(x.sum())

    array = hf.fuse([Telling(), Telling()])
    for scale in (1, 2, 3):
        assert array(torch.full((2, 2), float(scale)))[1] == 4.0 * scale


class Language(nn.Linear):
    """Like a transformers model: returns a cache unless use_cache is False."""

    config = types.SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        y = super().forward(x)
        return (y, types.SimpleNamespace(keys=y)) if use_cache else y


def test_a_cache_among_the_results_is_refused_with_its_remedy() -> None:
    fused, x = hf.fuse([Language(3, 2), Language(3, 2)]), torch.randn(4, 3)
    with pytest.raises(hf.FusionError, match="call the array with use_cache=False"):
        fused(x)
    assert fused(x, use_cache=False).shape == (2, 4, 2)


class Masked(nn.Module):
    """Branches on a value, and takes arguments that may be None before one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None, y: Tensor | None) -> Tensor:
        h = self.fc(x)
        h = h * 2 if h.sum() > 0 else h
        return h - y if mask is None and y is not None else h


class AroundMasked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masked = Masked()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.masked(x, None, x * 2)
        return h


def test_an_argument_that_is_none_keeps_its_place() -> None:
    models = [AroundMasked().double() for _ in range(3)]
    x = normal(5, 4)
    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(hf.fuse(models)(x), expected, rtol=1e-9, atol=1e-12)
