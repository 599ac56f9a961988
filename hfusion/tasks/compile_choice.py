"""Decide from estimates whether to compile an array, before its first minibatch, if its task leaves that open."""

from __future__ import annotations

from hfusion.compiler.bound_program import BoundProgram
from hfusion.schedule.plan import TaskPlan
from hfusion.tasks.arrange import Arrangement

# Estimated seconds of eager minibatches from which a compilation pays, which takes 5 to 20 s.
LEAST_SECONDS = 20.0


def shards_obstacle(plan: TaskPlan) -> str:
    """Return why the shards of a plan keep an array from being compiled; empty if they do not."""
    if not plan.resident:
        return f"it is spilled, in {len(plan.shards)} shards, which run one by one"
    if len(plan.shards) > 1:
        return f"its plan cuts it into {len(plan.shards)} shards, which run one by one"
    return ""


def eager_reason(arrangement: Arrangement, plan: TaskPlan, *, draws: bool = False) -> str:
    """Return why an array runs eagerly; empty if its minibatches are steps of `hfusion.train_step`.

    With ``compile=None`` the estimated seconds of all its minibatches decide, once: a switch between minibatches would
    depend on time, and with it the last bits of the results.

    Args:
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
    seconds = plan.steps * plan.step_seconds
    if seconds < LEAST_SECONDS:
        return f"its {plan.steps} steps take about {seconds:.2g} s, too little for a compilation to pay"
    return ""
