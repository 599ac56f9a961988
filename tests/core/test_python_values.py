"""The walk over Python values: what a value refers to, what a walk visits, and keys of equal values."""

from __future__ import annotations

import copy
import functools
import math
import types
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfusion.core.python_values import IdentityRef, KeyReader, Link, container_key, parts, plain_key, put, slots, walk


class Slotted:
    __slots__ = ("a", "empty")

    def __init__(self) -> None:
        self.a = 1


class SlottedAndMore(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.b = 2


class Forbidding(list[Any]):
    def __iter__(self) -> Any:
        raise TypeError("a Forbidding is read by index")


class Options(dict[str, Any]):
    scale: float


def options() -> Options:
    held = Options(a=1)
    held.scale = 2.0
    return held


def with_closure() -> Callable[..., Any]:
    held = 1.0
    if held > 2:
        later = 3

    def function(x: float, y: float = 2.0, *, z: float = 3.0) -> float:
        return held * x * y * z * later

    function.note = 4.0  # type: ignore[attr-defined]
    return function


class Owner:
    def method(self) -> None:
        pass


OWNER = Owner()
CASES: dict[str, tuple[Any, list[tuple[Link, Any, Any]]]] = {
    "number": (1, []),
    "text": ("ab", []),
    "list": ([1, 2], [(Link.INDEX, 0, 1), (Link.INDEX, 1, 2)]),
    "list that forbids iteration": (Forbidding([1]), [(Link.INDEX, 0, 1)]),
    "tuple": ((1,), [(Link.INDEX, 0, 1)]),
    "deque": (deque([1], maxlen=3), [(Link.INDEX, 0, 1), (Link.ATTRIBUTE, "maxlen", 3)]),
    "dict": ({"a": 1}, [(Link.KEY, "a", 1)]),
    "mapping proxy": (types.MappingProxyType({"a": 1}), [(Link.KEY, "a", 1)]),
    "dict with an attribute": (options(), [(Link.KEY, "a", 1), (Link.ATTRIBUTE, "scale", 2.0)]),
    "UserDict": (UserDict(a=1), [(Link.KEY, "a", 1), (Link.ATTRIBUTE, "data", {"a": 1})]),
    "set": ({1}, [(Link.ELEMENT, None, 1)]),
    "frozenset": (frozenset([1]), [(Link.ELEMENT, None, 1)]),
    "slots": (Slotted(), [(Link.ATTRIBUTE, "a", 1)]),
    "slots and a dict": (SlottedAndMore(), [(Link.ATTRIBUTE, "b", 2), (Link.ATTRIBUTE, "a", 1)]),
    "bound method": (OWNER.method, [(Link.ATTRIBUTE, "__self__", OWNER)]),
    "partial": (
        functools.partial(abs, 1),
        [(Link.ATTRIBUTE, "func", abs), (Link.ATTRIBUTE, "args", (1,)), (Link.ATTRIBUTE, "keywords", {})],
    ),
    "function": (
        with_closure(),
        [
            (Link.CELL, "held", 1.0),
            (Link.DEFAULT, "y", 2.0),
            (Link.DEFAULT, "z", 3.0),
            (Link.ATTRIBUTE, "note", 4.0),
        ],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_parts_of_a_value(kind: str) -> None:
    value, expected = CASES[kind]
    assert parts(value) == expected


def test_items_of_an_ordered_dict_are_in_its_order() -> None:
    held = OrderedDict(a=1, b=2)
    held.move_to_end("a")
    assert [name for _, name, _ in parts(held)] == ["b", "a"]


def test_parts_that_are_put_are_read_again() -> None:
    for value in ([1], {"a": 1}, deque([1]), types.SimpleNamespace(a=1), Slotted()):
        link, name, _ = parts(value)[0]
        put(value, link, name, 5)
        assert parts(value)[0] == (link, name, 5)


def test_slots_of_classes_are_not_kept_alive() -> None:
    import gc
    import weakref

    kind = type("Short", (), {"__slots__": ("a",)})
    assert slots(kind) == ["a"]
    alive = weakref.ref(kind)
    del kind
    gc.collect()
    assert alive() is None


def test_a_walk_visits_each_object_once() -> None:
    inner: list[Any] = [1.5]
    inner.append(inner)
    outer = {"a": inner, "b": (inner,)}
    visits = Counter[int]()

    def visit(value: Any) -> list[Any]:
        visits[id(value)] += 1
        return [part for _, _, part in parts(value)]

    visited = walk([outer, inner], visit)
    assert set(visits.values()) == {1}
    assert visits.keys() == visited.keys()
    assert {id(outer), id(inner), id(outer["b"])} <= visited.keys()


class ByValue(KeyReader):
    def leaf(self, value: Any, path: str) -> Any:
        return None

    def read_new(self, value: Any, path: str) -> Any:
        return self.compound(type(value), parts(value), path)


plain = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=16) | st.text("ab", max_size=2)
hashable = st.recursive(plain, lambda inner: st.tuples(inner, inner), max_leaves=3)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2)
        | st.sets(hashable, max_size=2)
        | st.lists(inner, max_size=2).map(lambda values: deque(values, 4))
        | inner.map(lambda value: types.SimpleNamespace(a=value))
    ),
    max_leaves=8,
)


def exact(value: Any) -> Any:
    """The text of a value: it shows types, the sign of zero and NaN, but not the order of a set."""
    if isinstance(value, set):
        return "set", frozenset(map(exact, value))
    held = parts(value)
    return (type(value), tuple((link, name, exact(part)) for link, name, part in held)) if held else repr(value)


@given(nested, nested)
@settings(deadline=None)
def test_keys_are_equal_for_equal_values_only(a: Any, b: Any) -> None:
    for key in (lambda value: ByValue().read(value, "x"), lambda value: container_key(value, exact, 9)):
        assert key(a) == key(copy.deepcopy(a))
        assert hash(key(a)) == hash(key(copy.deepcopy(a)))
        assert (key(a) == key(b)) == (exact(a) == exact(b))


@pytest.mark.parametrize("pair", [(0.0, -0.0), (True, 1), (1, 1.0), ((1,), [1]), (torch.Size([1]), (1,))])
def test_values_that_python_calls_equal_may_have_other_keys(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert ByValue().read(a) != ByValue().read(b)


def test_nan_has_one_key() -> None:
    assert plain_key(math.nan) == plain_key(float("nan"))


def test_shared_objects_and_cycles_are_part_of_a_key() -> None:
    shared: list[Any] = [1]
    assert ByValue().read([shared, shared]) != ByValue().read([[1], [1]])
    shared.append(shared)
    other: list[Any] = [1]
    other.append(other)
    assert ByValue().read(shared) == ByValue().read(other)


def test_long_and_deep_containers_count_by_identity() -> None:
    long, deep = [0] * 10_001, [[[[1]]]]
    assert container_key(long, IdentityRef, 4) == IdentityRef(long)
    assert container_key(deep, IdentityRef, 2) == (list, ((list, (IdentityRef(deep[0][0]),)),))
