from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hfusion.core.errors import SpillError
from hfusion.runtime.copying import copy_now
from hfusion.runtime.task_state import STATE, BufferLayout, Copy, HostStore
from hfusion.schedule.actions import Section

CPU = torch.device("cpu")
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


ORDERS = [(WEIGHTS,), (WEIGHTS, OPTIMIZER), (WEIGHTS, GRADIENTS), (WEIGHTS, OPTIMIZER, GRADIENTS), (GRADIENTS,)]


def loaded(home: HostStore, sections: tuple[Section, ...]) -> Copy:
    copy = home.load(sections, CPU)
    copy_now(copy.moves)
    return copy


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> HostStore:
    return HostStore(tensors(), pinned=False, file=tmp_path / "0.safetensors" if request.param == "disk" else None)


def test_the_layout_aligns_every_tensor() -> None:
    layout = BufferLayout.of(tensors())
    assert layout.sizes == (128 + 64 + 0 + 64, 128, 64 + 64)
    assert all(field.offset % ALIGNMENT == 0 for field in layout.fields)
    assert [field.bytes for field in layout.fields] == [120, 3, 0, 40, 120, 34, 8]


@pytest.mark.parametrize("sections", ORDERS, ids=str)
def test_load_gives_what_is_at_home(home: HostStore, sections: tuple[Section, ...]) -> None:
    copy = loaded(home, sections)
    assert tuple(copy.buffers) == tuple(copy.views) == sections
    for section in sections:
        expected = tensors()[section]
        assert list(copy.views[section]) == list(expected)
        for name, tensor in expected.items():
            view = copy.views[section][name]
            assert torch.equal(view, tensor)
            assert view.is_contiguous()
            assert view.dtype is tensor.dtype
            assert not view.numel() or view.data_ptr() % ALIGNMENT == 0
    copy.views[sections[0]]["w"].zero_()
    assert torch.equal(home.views[sections[0]]["w"], tensors()[sections[0]]["w"])


def test_save_writes_back_what_is_named(home: HostStore) -> None:
    copy = loaded(home, (WEIGHTS, GRADIENTS))
    for section in copy.views:
        for tensor in copy.views[section].values():
            tensor.zero_()
    copy_now(home.save(copy, WEIGHTS, ["flags"]))
    assert not home.views[WEIGHTS]["flags"].any()
    assert torch.equal(home.views[WEIGHTS]["w"], tensors()[WEIGHTS]["w"])
    copy_now(home.save(copy, WEIGHTS, [*home.views[WEIGHTS]]))
    assert not any(tensor.any() for tensor in home.views[WEIGHTS].values())
    for section in (OPTIMIZER, GRADIENTS):
        for name, tensor in tensors()[section].items():
            assert torch.equal(home.views[section][name], tensor)


def test_a_home_of_nothing(tmp_path: Path) -> None:
    nothing: dict[Section, dict[str, Tensor]] = {section: {} for section in STATE}
    for file in (None, tmp_path / "0.safetensors"):
        home = HostStore(nothing, pinned=False, file=file)
        assert sum(home.layout.sizes) == 0
        assert loaded(home, STATE).views == {section: {} for section in STATE}


def test_writing_to_one_tensor_is_no_writing_to_the_others_for_autograd() -> None:
    home = HostStore(tensors(), pinned=False, file=None)
    views = loaded(home, (WEIGHTS,)).views[WEIGHTS]
    weight = views["w"].requires_grad_()
    result = (weight * weight).sum()
    views["t"].add_(1)
    result.backward()
    assert weight.grad is not None


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
