"""Decide from estimates whether to compile an array, before its first minibatch, if its task leaves that open."""

from __future__ import annotations

from hfusion.compiler.bound_program import BoundProgram
from hfusion.schedule.plan import TaskPlan
from hfusion.step.compile_payoff import judge, read_records
from hfusion.step.compiled_step import MAX_LOOPED_CALLS
from hfusion.tasks.arrange import Arrangement


def shards_obstacle(plan: TaskPlan) -> str:
    """Return why the shards of a plan keep an array from being compiled; empty if they do not."""
    if not plan.resident:
        return f"it is spilled, in {len(plan.shards)} shards, which run one by one"
    if len(plan.shards) > 1:
        return f"its plan cuts it into {len(plan.shards)} shards, which run one by one"
    return ""


def eager_reason(arrangement: Arrangement, plan: TaskPlan, *, accelerator: bool, draws: bool = False) -> str:
    """Return why an array runs eagerly; empty if its minibatches are steps of `hfusion.train_step`.

    With ``compile=None`` the estimated seconds of all its minibatches are judged against those of a compilation, once:
    a switch between minibatches would depend on time, and with it the last bits of the results.

    Args:
        accelerator: it is not a CPU that trains the array.
        draws: forward or the loss draws random numbers, or runs code that may.
    """
    if arrangement.task.compile is False:
        return "compile=False"
    obstacle = shards_obstacle(plan)
    if obstacle or arrangement.task.compile is not None:
        return obstacle
    source = BoundProgram.of(
        arrangement.array.compiled(arrangement.minibatch().arguments_for(arrangement.array)), arrangement.array
    )
    if source.compiled.opaque:
        part = source.compiled.opaque[0]
        return f"{part.path or 'forward'} runs in a loop over members: {part.why}"
    if draws:
        # A program draws other numbers than the plain loop.
        return "it may draw random numbers; pass compile=True"
    # The first minibatch waits for its program, so that no core is spared for its compilation.
    looped = source.looped_calls > MAX_LOOPED_CALLS
    # What compilations took before is known of CPUs only.
    records = [] if accelerator else read_records()
    return judge(plan.steps, plan.step_seconds, len(source.compiled.graph.nodes), looped, records, spare=False).why
