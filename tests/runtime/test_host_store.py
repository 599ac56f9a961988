from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hfusion.core.errors import SpillError
from hfusion.runtime.task_state import STATE, HostStore
from hfusion.schedule.actions import Section

WEIGHTS, OPTIMIZER, GRADIENTS = STATE
ALIGNMENT = 64


def tensors() -> dict[Section, dict[str, Tensor]]:
    """Sizes that are no multiples of the alignment, a dtype of one byte, an empty tensor, a number."""
    draw = torch.Generator().manual_seed(0)
    return {
        WEIGHTS: {
            "w": torch.randn(3, 5, generator=draw, dtype=torch.float64),
            "flags": torch.tensor([True, False, True]),
            "none": torch.empty(0, 4),
            "t": torch.randn(5, 2, generator=draw).T,
        },
        OPTIMIZER: {"w exp_avg": torch.randn(3, 5, generator=draw, dtype=torch.float64)},
        GRADIENTS: {"w": torch.randn(17, generator=draw).bfloat16(), "n": torch.tensor(7)},
    }


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> HostStore:
    return HostStore(tensors(), pinned=False, file=tmp_path / "0.safetensors" if request.param == "disk" else None)


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    file = tmp_path / "0.safetensors"
    home = HostStore(tensors(), pinned=False, file=file)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    size = sum(home.layout.sizes)
    assert header == {"shard": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    assert (8 + length) % ALIGNMENT == 0
    assert len(data) == 8 + length + size
    home.views[WEIGHTS]["w"].fill_(1)
    raw = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float64, count=15, offset=8 + length)
    assert raw.tolist() == [1.0] * 15


def test_a_file_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    words = r"cannot spill [\d,]+ bytes to .*gone/0.safetensors: No such file.*free space.*another folder.*more host"
    with pytest.raises(SpillError, match=words):
        HostStore(tensors(), pinned=False, file=tmp_path / "gone" / "0.safetensors")
