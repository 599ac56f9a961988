"""Inductor patches apply during one compilation and are undone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.torch_private.inductor_patches import HEADER, quick_inductor
from tests.step.test_train_step import needs_compiler


@needs_compiler
def test_a_step_fills_the_table_of_dtypes_once_and_precompiles_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    fill, precompile = DtypePropagationOpsHandler.__init__, codecache._precompile_header
    filled, headers = [], []

    def counted(self: Any) -> None:
        filled.append(self)
        fill(self)

    def seen(header: str, *args: Any, **kwargs: Any) -> str:
        headers.append(header)
        return str(precompile(header, *args, **kwargs))

    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", counted)
    monkeypatch.setattr(codecache, "_precompile_header", seen)
    # Compiled by no other test.
    fused = hf.fuse([nn.Sequential(nn.Linear(4, 7), nn.Softplus(), nn.Linear(7, 3)) for _ in range(3)])
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), parts=1, compile=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        for _ in range(2):
            step(torch.ones(5, 4), torch.zeros(5, dtype=torch.long))
    assert "one program" in str(step.report())
    assert len(filled) == 1
    assert headers == [str(HEADER)]
    assert DtypePropagationOpsHandler.__init__ is counted


def test_torch_is_left_as_it_was() -> None:
    from torch._inductor.codecache import CppWrapperCodeCache
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    def state() -> list[Any]:
        names = ("_get_uncompiled_header", "load_pybinding")
        return [DtypePropagationOpsHandler.__init__, *(CppWrapperCodeCache.__dict__.get(name) for name in names)]

    def fail() -> None:
        with quick_inductor():
            assert all(patched is not original for patched, original in zip(state()[:2], before[:2], strict=True))
            assert CppWrapperCodeCache._get_uncompiled_header("cuda:0") == "torch/csrc/inductor/cpp_wrapper/cuda.h"
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        fail()
    assert state() == before
