"""Lowering: the bytes of the list are those of the plan, and the lists of some tasks as text."""

from __future__ import annotations

from hypothesis import given

from hfusion.schedule.actions import Act, Action
from hfusion.schedule.lower import levels, lower, need
from hfusion.schedule.plan import TaskPlan
from tests.shards import shard, tasks


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
