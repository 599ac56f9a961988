"""The self-check allows for TF32 where torch computes by it, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hfusion.device.backend import computes_by_tf32

pytestmark = pytest.mark.null

CUDA = torch.device("cuda", 0)
# mypy does not know all of its settings.
BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    convolutions, products = BACKENDS.cudnn.conv.fp32_precision, BACKENDS.cuda.matmul.fp32_precision
    yield
    BACKENDS.cudnn.conv.fp32_precision, BACKENDS.cuda.matmul.fp32_precision = convolutions, products


def test_by_torchs_defaults() -> None:
    assert computes_by_tf32(CUDA, ["aten.relu.default", "aten.convolution.default"])
    assert computes_by_tf32(CUDA, ["aten.lstm.input"])
    assert not computes_by_tf32(CUDA, ["aten.addmm.default", "aten.relu.default"])
    assert not computes_by_tf32(torch.device("cpu"), ["aten.convolution.default"])


def test_as_it_is_set() -> None:
    BACKENDS.cudnn.conv.fp32_precision = "ieee"
    assert not computes_by_tf32(CUDA, ["aten.convolution.default"])
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    assert computes_by_tf32(CUDA, ["aten.addmm.default"])
