"""Models whose code calls functions of installed packages, which may have thousands of functions within reach."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf

# The number of functions of the package that call one another.
LENGTH = 250

SOURCE = "\n".join(
    [
        "LEVEL, FAR_LEVEL, IS_READ = 1.0, 1.0, False",
        "def last(x): return x * FAR_LEVEL if IS_READ else x",
        *(
            f"def f{k}(x): return x if x is None else {f'f{k + 1}' if k < LENGTH else 'last'}(x)"
            for k in range(LENGTH + 1)
        ),
        "def scale(x): return f0(x) * LEVEL",
    ]
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "chained_functions.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("chained_functions")
    monkeypatch.delitem(sys.modules, "chained_functions")


def scaled() -> list[nn.Module]:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            import chained_functions

            return chained_functions.scale(super().forward(x))  # type: ignore[no-any-return]

    return [Scaled(3, 2).double() for _ in range(2)]


@pytest.mark.parametrize("name", ["LEVEL", "FAR_LEVEL"])
def test_variables_of_a_package(package: types.ModuleType, name: str) -> None:
    """What forward's own code calls is followed; what is far away costs no capture when it changes."""
    models, x = scaled(), torch.randn(4, 3, dtype=torch.float64)
    fused = hf.fuse(models)
    for value in range(1, 8):
        setattr(package, name, float(value))
        torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]), rtol=1e-12, atol=0)
    assert ("more than 4 values" in str(fused.report())) == (name == "LEVEL")
