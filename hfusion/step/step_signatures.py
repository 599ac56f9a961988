"""The variants of a step, one for each kind of call, and how they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hfusion.compiler.compiled_program import BoundProgram, Location
from hfusion.core.membership import is_own_hook
from hfusion.core.text import html_table, paragraph
from hfusion.step.compile_request import BackgroundJob
from hfusion.step.compiled_step import BlocksStep
from hfusion.step.parallel_blocks import BlockPartition
from hfusion.step.program_cache import StepTimes
from hfusion.step.recorded_step import RecordedStep
from hfusion.step.step_graph import StepCall
from hfusion.torch_private.export_state import TensorGuards, tensor_guards
from hfusion.torch_private.module_hooks import has_global_hooks

_TRAITS = attrgetter("shape", "dtype", "device", "requires_grad")

_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class CallReport:
    """How calls of one kind run; ``why``: the reason if they are not compiled."""

    call: str
    how: str
    why: str = ""

    @property
    def is_compiled(self) -> bool:
        return not self.how.startswith("eager")

    def __str__(self) -> str:
        return f"{self.call}: {self.how}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, repr=False)
class StepReport:
    """``str(report)`` is for people, ``rows`` for programs: one for each kind of call so far."""

    rows: tuple[CallReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "no step so far"

    def __repr__(self) -> str:
        compiled = sum(row.is_compiled for row in self.rows)
        return f"<StepReport: kinds of calls {len(self.rows)}, compiled {compiled}; print() shows them>"

    def _repr_html_(self) -> str:
        if not self.rows:
            return paragraph(str(self))
        return html_table(
            ("call", "runs as", "why"), ((row.call, row.how, row.why) for row in self.rows), len(self.rows)
        )


# Eager and compiled steps take turns: each runs up to _TURNS steps in a row, _ROWS rows in all. The first step of a row
# warms up and does not count; a row of long steps has a single step that counts.
_TURNS, _ROWS, _LONG = 5, 4, 0.5
# The largest ratio of median to minimum of a steady measurement; on a busy machine it is several times as large.
_STEADY = 1.5


@dataclass(eq=False)
class Trial:
    """A comparison of eager and compiled steps of one kind, made while they train.

    Attributes:
        key: by which the times are kept for later processes; None: they are not.
        rows: seconds of steps in a row, of eager and of compiled steps in turn.
    """

    key: str | None
    rows: list[list[float]] = field(default_factory=lambda: [[]])

    @property
    def eager_next(self) -> bool:
        """True if the next step is to run eagerly."""
        return len(self.rows) % 2 == 1

    def add(self, seconds: float) -> bool:
        """Add the seconds of the next step. Return True after the last one."""
        row = self.rows[-1]
        row.append(seconds)
        if len(row) < _TURNS and (len(row) < 2 or sum(row) < _LONG):
            return False
        self.rows.append([])
        return len(self.rows) > _ROWS

    def times(self) -> StepTimes | None:
        """Return the least times of both, which depend least on other load meanwhile; None if times are unsteady."""
        eager, compiled = ([s for row in self.rows[first::2] for s in row[1:]] for first in (0, 1))
        if any(median(seconds) > _STEADY * min(seconds) for seconds in (eager, compiled)):
            return None
        return StepTimes(min(compiled), min(eager))


@dataclass(eq=False)
class StepVariant:
    """How the calls of one signature run, as long as the tensors at ``tensor_refs`` have the properties ``traits``.

    Attributes:
        sources: forward and loss, of which a program can be made.
        program: the program that steps run by. None: they run by autograd.
        why: the reason why there will be no program; empty if there may be one.
        job: another process that compiles the program.
        partition: how its program is divided into blocks, once that is decided.
        seconds: seconds that its eager steps have taken, without the first, which captures.
        times: the times by which its program was chosen, or eager steps.
        trial: the comparison of both that is going on.
        checked: the tensors at ``tensor_refs`` that were found valid last, each of them once, and torch's guards of
            these.
    """

    call: str
    situation: Any
    tensor_refs: list[Location]
    traits: Any
    sources: tuple[BoundProgram, BoundProgram] | None = None
    program: BlocksStep | None = None
    why: str = ""
    job: BackgroundJob | None = None
    partition: BlockPartition | None = None
    seconds: float = 0.0
    times: StepTimes | None = None
    trial: Trial | None = None
    checked: tuple[list[Tensor], list[Tensor], TensorGuards] | None = None

    def decide(self, times: StepTimes) -> None:
        """Use the program unless eager steps are faster."""
        self.trial, self.times = None, times
        if times.eager_wins:
            self.program, self.why = None, f"eager steps are faster on this machine, {times}"

    def cancel(self) -> None:
        """End the process that compiles its program, if there is one."""
        if self.job is not None:
            self.job.cancel()
            self.job = None

    @property
    def most(self) -> int | None:
        """The most members that the memory budget allows a compiled step at a time; None for all."""
        most: int | None = self.situation[-1][1]
        return most

    def is_valid(self) -> bool:
        """Return whether the tensors have the traits that its program assumes."""
        tensors = [holder[name] for holder, name in self.tensor_refs]
        if self.checked is not None:
            # Five times as fast as checks in Python. Under another autocast, guards may fail for unchanged tensors.
            before, unique, guards = self.checked
            if all(map(is_, tensors, before)) and guards.check(*unique) and not any_hooks(unique):
                return True
        if traits_of(self.tensor_refs) != self.traits:
            return False
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        self.checked = tensors, unique, tensor_guards(unique)
        return True

    def takes_order(self, call: StepCall) -> bool:
        """Return whether its program was captured for the order of the dims in memory of such a call's inputs."""
        orders = None if self.sources is None else self.sources[0].compiled.memory_orders
        return orders is None or orders == call.inputs.memory_orders

    def release(self) -> None:
        """Hold no tensors until the next step."""
        self.checked = None
        if isinstance(self.program, RecordedStep):
            self.program.release()

    @property
    def kind(self) -> Any:
        """What its program depends on, except for the number of samples."""
        return self.situation, self.traits, self.why, [id(source.compiled) for source in self.sources or ()]

    def row(self) -> CallReport:
        if self.program is not None:
            partly = f"in one part: {self.partition.why}" if self.partition and self.partition.why else ""
            return CallReport(self.call, ", ".join(filter(None, (self.program.how, partly, str(self.times or "")))))
        waits = "the first step of its kind" if self.job is None else "its program is being compiled in the background"
        return CallReport(self.call, "eager", self.why or waits)


# The variants of each array, which all of its steps with an equal loss share. Variants whose loss holds tensors are
# left out, since the tensors belong to one step.
shared_variants: WeakKeyDictionary[nn.Module, dict[Any, list[StepVariant]]] = WeakKeyDictionary()


def family(call: StepCall, situation: Any) -> Any:
    """Return the key of calls that may share a program, without their sizes."""
    return call.inputs.loose_key, call.target.loose_key, situation


def traits_of(places: Sequence[Location]) -> Any:
    """Return the properties of tensors that a traced step assumes: types, strides, hooks, identities."""
    tensors = [holder[name] for holder, name in places]
    ids = list(map(id, tensors))
    ties = [ids.index(i) for i in ids] if len(set(ids)) < len(ids) else None
    return list(map(_TRAITS, tensors)), list(map(Tensor.stride, tensors)), ties, any_hooks(tensors)


def any_hooks(tensors: Sequence[Tensor]) -> bool:
    # The hooks of a tensor are None or a dict, which may have become empty.
    if not any(map(any, map(_HOOKS, tensors))):
        return False
    held = [hooks for tensor in tensors for hooks in _HOOKS(tensor) if hooks]
    return not all(is_own_hook(hook) for hooks in held for hook in hooks.values())


def hooked(module: nn.Module) -> bool:
    """Return whether calls of ``module`` run hooks in addition to its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or has_global_hooks()


def obstacle_to_program(sources: Sequence[BoundProgram], places: Sequence[Location], call: StepCall) -> str:
    """Return the reason against a program without autograd; empty if there is none."""
    forward, loss = sources
    if forward.compiled.opaque:
        path = forward.compiled.opaque[0].path
        return f"{path or 'forward'} runs in a loop over members: {forward.compiled.opaque[0].why}"
    if forward.compiled.program.gives_member_values:
        return "members return different values that are no tensors, for which the loss runs member by member"
    if any(tensor.requires_grad for tensor in call.batch()):
        return "an input requires grad, and a program gives gradients of parameters only; detach it"
    if any(holder[name].requires_grad for holder, name in loss.locations):
        return "the loss has parameters of its own that require grad; freeze them, or train them apart"
    if any_hooks([holder[name] for holder, name in places]):
        return "a parameter has hooks, which a program does not call; use hooks of the optimizer's step"
    return ""
