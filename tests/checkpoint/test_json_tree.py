"""Nests of values come back from JSON with the types that they had, or are refused by name."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.checkpoint.json_tree import decode, encode

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


class Name(str):
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "namedtuple": (Point(1, 2), r"extra is of class .*Point, .*give tuple\(\.\.\.\) of it"),
    "within": ({"a": [Point(1, 2)]}, r"extra/a/0 is of class .*Point"),
    "key": ({Point(1, 2): 1}, r"extra is of class .*Point"),
    "structseq": (torch.ones(2).max(0), r"torch\.return_types\.max, .*give tuple\("),
    "enum": (Level.LOW, r"Level, .*give its \.value"),
    "str": (Name("a"), r"Name, .*give str\("),
    "numpy str": (np.str_("a"), r"numpy\.str_ of <U1, .*give str\("),
    "dict": (Table(a=1), r"Table, .*give dict\("),
    "mapping": (UserDict(a=1), r"UserDict, .*give dict\("),
    "defaultdict": (defaultdict(lambda: 1), r"defaultdict of <function .*give dict\("),
    "deque": (deque([1]), r"collections\.deque, .*keep plain values"),
    "masked": (np.ma.array([1, 2], mask=[True, False]), r"MaskedArray of int64"),
    "byte order": (np.ones(1, dtype=">f8"), r"numpy\.ndarray of >f8"),
    "wide": (np.longdouble(1), r"numpy\.longdouble of"),
    "lazy": (nn.UninitializedParameter(), r"UninitializedParameter, .*give a plain tensor"),
    "dtype": (torch.float32, r"torch\.dtype, .*keep plain values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_only_code_creates_are_refused_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(hf.CheckpointError, match=message):
        encode(value, {}, "extra")
