"""Values cross from part 0 to parts 1 and 2: on the device, by the host, and again in the next minibatch."""

from __future__ import annotations

import torch
from torch import Tensor

from hfusion.runtime.copying import copy_now
from hfusion.runtime.training import BoundaryStore

CPU = torch.device("cpu")
MAKERS = {"a": 0, "b": 1}


def boundary(*, resident: bool = False) -> BoundaryStore:
    store = BoundaryStore(pinned=False, resident=resident)
    store.start_minibatch({"data": torch.arange(3.0)}, MAKERS)
    return store


def forward(store: BoundaryStore, a: Tensor, b: Tensor) -> None:
    """Parts 0 and 1 give, part 2 takes, the first two are put away."""
    store.keep(0, {"a": a}, frozenset("ab"))
    copy_now(store.put_away(0))
    store.keep(1, {"b": b}, frozenset("ab"))
    copy_now(store.put_away(1))
    store.keep(2, {}, frozenset())


def backward(store: BoundaryStore, shard: int, names: list[str]) -> dict[str, Tensor]:
    """Return the values that a backward starts from, and put its shard away."""
    copy_now(store.load(shard, names, CPU))
    values = {name: value.clone() for name, value in store.entry(shard, names, CPU).items()}
    store.put_away(shard)
    return values


def test_values_stay_while_later_parts_take_them() -> None:
    store = boundary()
    inputs = torch.randn(2, requires_grad=True)
    store.keep(0, {"a": inputs * 2}, frozenset("a"))
    values = store.take(["a", "data"], CPU)
    assert torch.equal(values["a"], inputs * 2)
    assert values["a"].is_leaf
    assert values["a"].requires_grad
    assert values["data"].tolist() == [0, 1, 2]


def test_every_minibatch_finds_its_own_values_in_host_memory_used_again() -> None:
    store = boundary()
    addresses = set()
    for step in range(4):
        a, b = torch.full((4,), float(step)), torch.full((2,), 10.0 + step)
        forward(store, a, b)
        assert torch.equal(backward(store, 2, ["b", "a"])["a"], a)
        store.clean(2)
        assert torch.equal(backward(store, 1, ["a"])["a"], a)
        store.clean(1)
        addresses.add(store._old[1].storages[0].data_ptr())
        store.clean(0)
    assert len(addresses) == 1


def test_a_smaller_minibatch_has_memory_of_its_own() -> None:
    store = boundary()
    for size in (4, 3, 4):
        a = torch.randn(size)
        forward(store, a, a[:2])
        assert torch.equal(backward(store, 1, ["a"])["a"], a)
        store.clean(1)
        store.clean(0)


def test_values_that_are_still_referenced_are_not_overwritten() -> None:
    store = boundary()
    a = torch.randn(4)
    forward(store, a, a)
    copy_now(store.load(1, ["a"], CPU))
    entry = store.entry(1, ["a"], CPU)["a"]
    store.clean(1)
    store.clean(0)
    forward(store, a + 1, a)
    assert torch.equal(backward(store, 1, ["a"])["a"], a + 1)
    assert torch.equal(entry, a)


def test_a_task_that_leaves_takes_along_what_lives_between_units() -> None:
    store = boundary(resident=True)
    a, b = torch.randn(4), torch.randn(2)
    store.keep(0, {"a": a}, frozenset("a"))
    store.keep(1, {"b": b}, frozenset("b"))
    copy_now(store.leave())
    values = store.take(["a", "b"], CPU)
    assert torch.equal(values["a"], a)
    assert torch.equal(values["b"], b)
    assert values["a"].data_ptr() != a.data_ptr()
