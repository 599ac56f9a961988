"""Values cross from part 0 to parts 1 and 2: on the device, by the host, and again in the next minibatch."""

from __future__ import annotations

import torch
from torch import Tensor

from hfusion.runtime.boundary import BoundaryStore
from hfusion.runtime.copying import copy_now

CPU = torch.device("cpu")
MAKERS = {"a": 0, "b": 1}


def boundary(*, resident: bool = False) -> BoundaryStore:
    made = BoundaryStore(pinned=False, resident=resident)
    made.start_minibatch({"data": torch.arange(3.0)}, MAKERS)
    return made


def forward(made: BoundaryStore, a: Tensor, b: Tensor) -> None:
    """Parts 0 and 1 give, part 2 takes, the first two are put away."""
    made.keep(0, {"a": a}, frozenset("ab"))
    copy_now(made.put_away(0))
    made.keep(1, {"b": b}, frozenset("ab"))
    copy_now(made.put_away(1))
    made.keep(2, {}, frozenset())


def backward(made: BoundaryStore, shard: int, names: list[str]) -> dict[str, Tensor]:
    """What a backward starts from; then its shard is put away and all has left."""
    copy_now(made.load(shard, names, CPU))
    found = {name: value.clone() for name, value in made.entry(shard, names, CPU).items()}
    made.put_away(shard)
    return found


def test_values_stay_while_later_parts_take_them() -> None:
    made = boundary()
    given = torch.randn(2, requires_grad=True)
    made.keep(0, {"a": given * 2}, frozenset("a"))
    found = made.take(["a", "data"], CPU)
    assert torch.equal(found["a"], given * 2)
    assert found["a"].is_leaf
    assert found["a"].requires_grad
    assert found["data"].tolist() == [0, 1, 2]


def test_every_minibatch_finds_its_own_values_in_host_memory_used_again() -> None:
    made = boundary()
    places = set()
    for step in range(4):
        a, b = torch.full((4,), float(step)), torch.full((2,), 10.0 + step)
        forward(made, a, b)
        assert torch.equal(backward(made, 2, ["b", "a"])["a"], a)
        made.clean(2)
        assert torch.equal(backward(made, 1, ["a"])["a"], a)
        made.clean(1)
        places.add(made._old[1].storages[0].data_ptr())
        made.clean(0)
    assert len(places) == 1


def test_a_smaller_minibatch_has_memory_of_its_own() -> None:
    made = boundary()
    for size in (4, 3, 4):
        a = torch.randn(size)
        forward(made, a, a[:2])
        assert torch.equal(backward(made, 1, ["a"])["a"], a)
        made.clean(1)
        made.clean(0)


def test_values_that_somebody_kept_are_not_overwritten() -> None:
    made = boundary()
    a = torch.randn(4)
    forward(made, a, a)
    copy_now(made.load(1, ["a"], CPU))
    kept = made.entry(1, ["a"], CPU)["a"]
    made.clean(1)
    made.clean(0)
    forward(made, a + 1, a)
    assert torch.equal(backward(made, 1, ["a"])["a"], a + 1)
    assert torch.equal(kept, a)


def test_a_task_that_leaves_takes_along_what_lives_between_units() -> None:
    made = boundary(resident=True)
    a, b = torch.randn(4), torch.randn(2)
    made.keep(0, {"a": a}, frozenset("a"))
    made.keep(1, {"b": b}, frozenset("b"))
    copy_now(made.leave())
    found = made.take(["a", "b"], CPU)
    assert torch.equal(found["a"], a)
    assert torch.equal(found["b"], b)
    assert found["a"].data_ptr() != a.data_ptr()
