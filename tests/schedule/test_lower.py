"""Lowering: the bytes of the list are those of the plan, and the lists of some tasks as text."""

from __future__ import annotations

import pytest
from hypothesis import given

from hfusion.schedule.actions import Act, Action
from hfusion.schedule.lower import levels, lower, need
from hfusion.schedule.plan import TaskPlan
from tests.shards import shard, task, tasks


def lowered(task_plan: TaskPlan, *, evaluate: bool = False) -> tuple[Action, ...]:
    sums, saves = task_plan.accumulate > 1, task_plan.save_every is not None
    return lower(
        task_plan.shards,
        keeps_last=bool(task_plan.pinned),
        accumulate=sums,
        clip=task_plan.clipped,
        evaluate=evaluate,
        growth=task_plan.growth,
        save=saves,
    )


def boundary(task_plan: TaskPlan, index: int) -> int:
    """Bytes at the cut before a shard."""
    return task_plan.shards[index - 1].boundary if index else 0


def alone(task_plan: TaskPlan, action: Action) -> int:
    """Bytes on the device while a task computes, by definition: state, both cuts, what the act works with."""
    part, last = task_plan.shards[action.shard], action.shard == len(task_plan.shards) - 1
    carried = part.gradients if task_plan.carried else 0
    cuts = boundary(task_plan, action.shard) + part.boundary
    state = part.weights + carried + (0 if task_plan.clipped else part.optimizer)
    kept = bool(task_plan.pinned)
    if kept and last:
        state = part.weights + part.optimizer + carried
    beside = task_plan.host_bytes(len(task_plan.shards) - 1) if kept and not last else 0
    if action.act is Act.STEP and task_plan.clipped:
        return beside + part.weights + part.optimizer + part.gradients
    works = {
        Act.FORWARD: part.workspace + (part.activations if last else 0),
        Act.EVALUATE: part.workspace,
        Act.STEP: 0,
    }.get(action.act, max(part.peak, part.activations) if last else part.peak)
    if action.act is Act.STEP:
        return beside + state + (0 if last else cuts)
    if action.act is Act.EVALUATE or (action.act is Act.FORWARD and not last):
        state = state if kept and last else part.weights
    return beside + state + cuts + works


@given(tasks("a"))
def test_the_bytes_on_the_device_are_those_of_the_definition(task_plan: TaskPlan) -> None:
    lists = [lowered(task_plan)] + ([lowered(task_plan, evaluate=True)] if task_plan.evaluated else [])
    assert task_plan.device_bytes == max(map(need, lists))
    for actions in lists:
        for action, level in zip(actions, levels(actions), strict=True):
            if action.act is Act.SAVE:
                assert action.takes == action.frees == 0
                assert action.moves == sum(part.weights + part.optimizer for part in task_plan.shards)
            elif action.act.lane == "compute":
                assert level == alone(task_plan, action)
        assert sum(action.takes - action.frees for action in actions) == 0


@given(tasks("a"))
def test_an_action_comes_after_those_it_needs(task_plan: TaskPlan) -> None:
    actions = lowered(task_plan)
    for position, action in enumerate(actions):
        assert all(~len(task_plan.shards) < index < position for index in action.after)
        dependencies = [actions[index] for index in action.after if index >= 0]
        if action.act.lane == "compute":
            assert [dependency.shard for dependency in dependencies if dependency.act is Act.LOAD] == [action.shard]
        elif action.act is Act.LOAD:
            assert all(dependency.act is Act.EVICT for dependency in dependencies)
    computed = [action for action in actions if action.act.lane == "compute"]
    assert sum(action.seconds for action in computed) == pytest.approx(
        sum(
            part.seconds + part.forward * (Act.RECOMPUTE in {a.act for a in computed if a.shard == part.index})
            for part in task_plan.shards
        )
    )


def test_a_shard_that_borrows_comes_after_its_owner() -> None:
    parts = (shard(0), shard(1), shard(2, boundary=0, borrows=(0,)))
    loads = [action for action in lower(parts, clip=True) if (action.act, action.shard) == (Act.LOAD, 2)]
    evicted = lower(parts, clip=True).index
    forward, update = (action.after for action in loads)
    assert [lower(parts, clip=True)[index].shard for index in forward if index >= 0] == [0]
    assert ~2 in forward
    assert len(update) == 1
    assert evicted(loads[0]) < evicted(loads[1])


def text(task_plan: TaskPlan, *, evaluate: bool = False) -> str:
    return "\n".join(map(str, lowered(task_plan, evaluate=evaluate)))


SIZES = {"weights": 1000, "frozen": 300, "gradients": 200, "optimizer": 400, "activations": 50}
CUTS = {"workspace": 7, "boundary": 10}


@pytest.mark.parametrize(
    ("name", "task_plan", "evaluate"),
    [
        ("spilled", task("a", 2, resident=False, **SIZES, **CUTS), False),
        ("clipped", task("a", 2, resident=False, clipped=True, **SIZES, **CUTS), False),
        ("kept", task("a", 2, resident=False, kept=True, **SIZES, **CUTS), False),
        ("resident", task("a", 1, **SIZES, **CUTS), False),
        ("evaluated", task("a", 2, resident=False, **SIZES, **CUTS), True),
        ("larger ones evaluated", task("a", 2, resident=False, growth=2.0, **SIZES, **CUTS), True),
        ("larger ones evaluated there", task("a", 1, growth=2.0, **SIZES, **CUTS), True),
        ("saved", task("a", 1, save_every=1, **SIZES, **CUTS), False),
        ("evaluated and saved", task("a", 1, save_every=1, **SIZES, **CUTS), True),
    ],
)
def test_lists_as_text(name: str, task_plan: TaskPlan, evaluate: bool) -> None:
    assert text(task_plan, evaluate=evaluate) == TEXTS[name].strip()


TEXTS = {
    "spilled": """
LOAD 0 weights+boundary takes 1000 frees 0 moves 1000 seconds 0.0 after ~0
FORWARD 0 - takes 17 frees 17 moves 0 seconds 1.0 after 0
EVICT 0 weights+boundary takes 0 frees 1000 moves 10 seconds 0.0 after 1
LOAD 1 weights+optimizer+boundary takes 1400 frees 0 moves 1410 seconds 0.0 after ~1
FORWARD 1 - takes 67 frees 7 moves 0 seconds 1.0 after 1,3
BACKWARD 1 - takes 207 frees 267 moves 0 seconds 1.0 after 3,4
STEP 1 - takes 0 frees 0 moves 0 seconds 1.0 after 3,5
EVICT 1 weights+optimizer+boundary takes 0 frees 1400 moves 1110 seconds 0.0 after 2,6
LOAD 0 weights+optimizer+boundary takes 1410 frees 0 moves 1410 seconds 0.0 after 2
RECOMPUTE 0 - takes 257 frees 0 moves 0 seconds 1.0 after 6,8
BACKWARD 0 - takes 0 frees 257 moves 0 seconds 1.0 after 8,9
STEP 0 - takes 0 frees 0 moves 0 seconds 1.0 after 8,10
EVICT 0 weights+optimizer+boundary takes 0 frees 1410 moves 1100 seconds 0.0 after 7,11
""",
    "clipped": """
LOAD 0 weights+boundary takes 1000 frees 0 moves 1000 seconds 0.0 after ~0
FORWARD 0 - takes 17 frees 17 moves 0 seconds 1.0 after 0
EVICT 0 weights+boundary takes 0 frees 1000 moves 10 seconds 0.0 after 1
LOAD 1 weights+gradients+boundary takes 1200 frees 0 moves 1210 seconds 0.0 after ~1
FORWARD 1 - takes 67 frees 7 moves 0 seconds 1.0 after 1,3
BACKWARD 1 - takes 207 frees 267 moves 0 seconds 1.0 after 3,4
EVICT 1 weights+gradients+boundary takes 0 frees 1200 moves 210 seconds 0.0 after 2,5
LOAD 0 weights+gradients+boundary takes 1210 frees 0 moves 1210 seconds 0.0 after 2
RECOMPUTE 0 - takes 257 frees 0 moves 0 seconds 1.0 after 5,7
BACKWARD 0 - takes 0 frees 257 moves 0 seconds 1.0 after 7,8
EVICT 0 weights+gradients+boundary takes 0 frees 1210 moves 200 seconds 0.0 after 6,9
LOAD 0 weights+optimizer+gradients takes 1600 frees 0 moves 1600 seconds 0.0 after 10
STEP 0 - takes 0 frees 0 moves 0 seconds 1.0 after 9,11
EVICT 0 weights+optimizer+gradients takes 0 frees 1600 moves 1100 seconds 0.0 after 10,12
LOAD 1 weights+optimizer+gradients takes 1600 frees 0 moves 1600 seconds 0.0 after 6
STEP 1 - takes 0 frees 0 moves 0 seconds 1.0 after 12,14
EVICT 1 weights+optimizer+gradients takes 0 frees 1600 moves 1100 seconds 0.0 after 13,15
""",
    "kept": """
LOAD 0 weights+boundary takes 1000 frees 0 moves 1000 seconds 0.0 after ~0
LOAD 1 weights+optimizer+boundary takes 1400 frees 0 moves 1400 seconds 0.0 after ~1
FORWARD 0 - takes 17 frees 17 moves 0 seconds 1.0 after 0
EVICT 0 weights+boundary takes 0 frees 1000 moves 10 seconds 0.0 after 2
FORWARD 1 - takes 67 frees 7 moves 0 seconds 1.0 after 1,2
BACKWARD 1 - takes 207 frees 267 moves 0 seconds 1.0 after 1,4
STEP 1 - takes 0 frees 0 moves 0 seconds 1.0 after 1,5
LOAD 0 weights+optimizer+boundary takes 1410 frees 0 moves 1410 seconds 0.0 after 3
RECOMPUTE 0 - takes 257 frees 0 moves 0 seconds 1.0 after 6,7
BACKWARD 0 - takes 0 frees 257 moves 0 seconds 1.0 after 7,8
STEP 0 - takes 0 frees 0 moves 0 seconds 1.0 after 7,9
EVICT 0 weights+optimizer+boundary takes 0 frees 1410 moves 1100 seconds 0.0 after 3,10
EVICT 1 weights+optimizer+boundary takes 0 frees 1400 moves 1100 seconds 0.0 after 10,11
""",
    "resident": """
LOAD 0 weights+optimizer+boundary takes 1400 frees 0 moves 1400 seconds 0.0 after ~0
FORWARD 0 - takes 57 frees 7 moves 0 seconds 1.0 after 0
BACKWARD 0 - takes 207 frees 257 moves 0 seconds 1.0 after 0,1
STEP 0 - takes 0 frees 0 moves 0 seconds 1.0 after 0,2
EVICT 0 weights+optimizer+boundary takes 0 frees 1400 moves 1100 seconds 0.0 after 3
""",
    "evaluated": """
LOAD 0 weights+boundary takes 1000 frees 0 moves 1000 seconds 0.0 after ~0
EVALUATE 0 - takes 17 frees 17 moves 0 seconds 1.0 after 0
EVICT 0 weights+boundary takes 0 frees 1000 moves 10 seconds 0.0 after 1
LOAD 1 weights+boundary takes 1010 frees 0 moves 1010 seconds 0.0 after ~1
EVALUATE 1 - takes 7 frees 7 moves 0 seconds 1.0 after 1,3
EVICT 1 weights+boundary takes 0 frees 1010 moves 0 seconds 0.0 after 2,4
""",
    "saved": """
LOAD 0 weights+optimizer+boundary takes 1400 frees 0 moves 1400 seconds 0.0 after ~0
FORWARD 0 - takes 57 frees 7 moves 0 seconds 1.0 after 0
BACKWARD 0 - takes 207 frees 257 moves 0 seconds 1.0 after 0,1
STEP 0 - takes 0 frees 0 moves 0 seconds 1.0 after 0,2
SAVE 0 - takes 0 frees 0 moves 1400 seconds 0.0 after 0,3
EVICT 0 weights+optimizer+boundary takes 0 frees 1400 moves 1100 seconds 0.0 after 4
""",
    "larger ones evaluated": """
LOAD 0 weights+boundary takes 1000 frees 0 moves 1000 seconds 0.0 after ~0
EVALUATE 0 - takes 134 frees 134 moves 0 seconds 2.0 after 0
EVICT 0 weights+boundary takes 0 frees 1000 moves 20 seconds 0.0 after 1
LOAD 1 weights+boundary takes 1020 frees 0 moves 1020 seconds 0.0 after ~1
EVALUATE 1 - takes 114 frees 114 moves 0 seconds 2.0 after 1,3
EVICT 1 weights+boundary takes 0 frees 1020 moves 0 seconds 0.0 after 2,4
""",
    "larger ones evaluated there": """
LOAD 0 weights+optimizer+boundary takes 1400 frees 0 moves 1400 seconds 0.0 after ~0
EVALUATE 0 - takes 114 frees 114 moves 0 seconds 2.0 after 0
EVICT 0 weights+optimizer+boundary takes 0 frees 1400 moves 1100 seconds 0.0 after 1
""",
    "evaluated and saved": """
LOAD 0 weights+optimizer+boundary takes 1400 frees 0 moves 1400 seconds 0.0 after ~0
EVALUATE 0 - takes 7 frees 7 moves 0 seconds 1.0 after 0
SAVE 0 - takes 0 frees 0 moves 1400 seconds 0.0 after 0,1
EVICT 0 weights+optimizer+boundary takes 0 frees 1400 moves 1100 seconds 0.0 after 2
""",
}
