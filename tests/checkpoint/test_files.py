"""Saves as files: their folders, their numbers in JSON, and a save in memory."""

from __future__ import annotations

import enum
import json
import math
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.checkpoint import files
from hfusion.checkpoint.json_tree import decode, encode


# Folders of saves that others change: taken names, saves that go while they are read, writers side by side.
def save(folder: Path, step: int = 0, keep: int = 3) -> Path:
    return files.write(folder, {"members": ["a"]}, {"x": torch.full((2,), float(step))}, step=step, keep=keep)


def _full(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


TAKEN: dict[str, Callable[[Path], object]] = {
    "file": Path.touch,
    "broken link": lambda path: path.symlink_to("nowhere"),
    "link to a file": lambda path: path.symlink_to(__file__),
    "folder": _full,
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_save_takes_the_next_name_that_is_free(name: str, tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    TAKEN[name](tmp_path / "save-000000000002")
    second = save(tmp_path, 2)
    assert (first.name, second.name) == ("save-000000000001", "save-000000000003")
    assert files.read(tmp_path).step == 2
    assert list(tmp_path.glob(".aside-*")) == []


def test_sizes_that_were_exchanged_in_the_header_are_damage(tmp_path: Path) -> None:
    """The bytes of the tensor, and how many there are, fit both."""
    path = files.write(tmp_path, {}, {"x": torch.arange(6.0).view(2, 3)}, step=0, keep=1) / files.TENSORS
    content = path.read_bytes()
    changed = content.replace(b'"shape":[2,3]', b'"shape":[3,2]')
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(hf.CheckpointError, match="is damaged: it does not have the checksum in"):
        files.read(tmp_path)


def test_every_kind_of_number_comes_back(tmp_path: Path) -> None:
    """Complex tensors are stored as pairs of real numbers."""
    dtypes = (torch.complex64, torch.complex128, torch.bfloat16, torch.uint32, torch.bool, torch.float8_e4m3fn)
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"transposed": torch.randn(4, 2).T, "number": torch.tensor(2), "empty": torch.empty(0, 3)}
    files.write(tmp_path, {}, tensors, step=0, keep=1)
    read = files.read(tmp_path).tensors
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (read[key].dtype, read[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            read[key].float() if tensor.is_floating_point() else read[key],
            tensor.float() if tensor.is_floating_point() else tensor,
        )


def test_links_are_removed_and_what_they_lead_to_is_not(tmp_path: Path) -> None:
    """A save that is a link goes when it is too old; links that an older version has set aside go as well."""
    elsewhere = save(tmp_path / "elsewhere")
    root = tmp_path / "root"
    root.mkdir()
    (root / "save-000000000001").symlink_to(elsewhere)
    (root / ".aside-0").symlink_to(elsewhere)
    (root / ".aside-1").symlink_to("nowhere")
    for step in range(2):
        save(root, step, keep=1)
    assert [path.name for path in root.iterdir()] == ["save-000000000003"]
    assert files.read(elsewhere).step == 0


def test_a_save_that_cannot_be_written_to_goes(tmp_path: Path) -> None:
    save(tmp_path).chmod(0o500)
    save(tmp_path, 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["save-000000000002"]


def test_a_save_that_goes_while_it_is_read_is_read_as_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    read, steps = files.read_manifest, iter(range(1, 4))

    def slow(path: Path) -> dict[str, object]:
        manifest = read(path)
        if (step := next(steps, None)) is not None:
            monkeypatch.setattr(files, "read_manifest", read)
            save(tmp_path, step, keep=1)
            monkeypatch.setattr(files, "read_manifest", slow)
        return manifest

    monkeypatch.setattr(files, "read_manifest", slow)
    saved = files.read(tmp_path)
    assert saved.step == 3
    assert torch.equal(saved.tensors["x"], torch.full((2,), 3.0))


def test_writers_and_a_reader_side_by_side(tmp_path: Path) -> None:
    save(tmp_path)

    def write(start: int) -> None:
        for step in range(start, start + 12):
            save(tmp_path, step, keep=1)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, start) for start in (100, 200)]
        while not all(writer.done() for writer in writers):
            saved = files.read(tmp_path)
            assert torch.equal(saved.tensors["x"], torch.full((2,), float(saved.step)))
    for writer in writers:
        writer.result()
    save(tmp_path, 300, keep=1)
    assert len(list(tmp_path.iterdir())) == 1


def test_saves_are_ordered_by_number(tmp_path: Path) -> None:
    for number in (999_999_999_999, 1_000_000_000_000, 7):
        (tmp_path / f"save-{number:012d}").mkdir()
    assert [path.name for path in files.saves(tmp_path)] == [
        "save-000000000007",
        "save-999999999999",
        "save-1000000000000",
    ]


# Nests of values come back from JSON with the types that they had, or are refused by name.
ALIKE: list[Any] = [
    None, True, 1, 10**30, "a", 1.5, -0.0, math.inf, 2j, complex(math.nan, -0.0), b"\x00a", -math.inf,
    (1, (2,)), {1, 2}, frozenset([1]), {frozenset([1]): [2]}, {(1, 2): {"~": 1}}, [], {}, (), torch.Size([1, 2]),
    OrderedDict(b=1, a=(2,)), defaultdict(list, {1: [2]}), defaultdict(None, a=1), Counter("aab"),
    np.float32(0.1), np.float64(math.nan), np.int8(-3), np.bool_(True), np.complex64(1j),
    np.array(5.0), np.arange(6, dtype=np.uint16).reshape(2, 3), np.zeros((0, 2)), np.array([True]),
    torch.ones(2, dtype=torch.complex64), torch.tensor(3), nn.Parameter(torch.ones(2)),
    nn.Parameter(torch.ones(2), requires_grad=False), [OrderedDict(x=[{"y": frozenset([(1, 2)])}])],
]  # fmt: skip


def back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors, "extra"), allow_nan=False)), tensors)


@pytest.mark.parametrize("value", ALIKE, ids=lambda value: f"{type(value).__name__} {value!r}"[:40])
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    decoded = back(value)
    assert type(decoded) is type(value)
    assert repr(decoded) == repr(value)
    if isinstance(value, np.ndarray | Tensor):
        assert (decoded.dtype, decoded.shape) == (value.dtype, value.shape)
    if isinstance(value, dict):
        assert list(decoded.items()) == list(value.items())


def test_a_state_dict_of_torch_keeps_its_versions() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    decoded = back({"model": state})["model"]
    assert decoded._metadata == state._metadata  # type: ignore[attr-defined]
    assert type(decoded._metadata) is OrderedDict
    assert list(decoded) == list(state)


def test_a_defaultdict_goes_on_making_values() -> None:
    assert back(defaultdict(list))["new"] == []


Point = namedtuple("Point", "x y")


class Level(enum.IntEnum):
    LOW = 1


class Table(dict):  # type: ignore[type-arg]
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "namedtuple": (Point(1, 2), r"extra is of class .*Point, .*give tuple\(\.\.\.\) of it"),
    "structseq": (torch.ones(2).max(0), r"torch\.return_types\.max, .*give tuple\("),
    "enum": (Level.LOW, r"Level, .*give its \.value"),
    "dict": (Table(a=1), r"Table, .*give dict\("),
    "defaultdict": (defaultdict(lambda: 1), r"defaultdict of <function .*give dict\("),
    "deque": (deque([1]), r"collections\.deque, .*keep plain values"),
    "byte order": (np.ones(1, dtype=">f8"), r"numpy\.ndarray of >f8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_only_code_creates_are_refused_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(hf.CheckpointError, match=message):
        encode(value, {}, "extra")
