"""How far the program of a step is, as states, and the events that lead from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hfusion.step.compiled_step import StepProgram
from hfusion.step.pending_program import PendingProgram


@dataclass(frozen=True, eq=False)
class Eager:
    """Steps run by autograd; ``why``: the reason why no program is made yet, if one is known."""

    why: str = ""


@dataclass(frozen=True, eq=False)
class Compiling:
    """Steps run by autograd while another process makes the program; ``behind``: however long that takes."""

    pending: PendingProgram
    behind: bool = False


@dataclass(frozen=True, eq=False)
class Deferred:
    """Steps run by autograd until the step at which the program, which is there, is due."""

    program: StepProgram


@dataclass(frozen=True, eq=False)
class InUse:
    """Steps run by the program."""

    program: StepProgram


@dataclass(frozen=True, eq=False)
class Refused:
    """Steps run by autograd for good; ``by_choice``: a program could be made, and would not pay."""

    why: str
    by_choice: bool = False


ProgramState: TypeAlias = Eager | Compiling | Deferred | InUse | Refused


@dataclass(frozen=True)
class Postponed:
    """A program does not pay yet."""

    why: str


@dataclass(frozen=True, eq=False)
class Requested:
    """Another process began to make the program."""

    pending: PendingProgram
    behind: bool


@dataclass(frozen=True)
class Ended:
    """The other process ended, or what it makes is not wanted any more."""


@dataclass(frozen=True, eq=False)
class Made:
    """The program is there; ``due``: the next step may use it."""

    program: StepProgram
    due: bool = True


@dataclass(frozen=True)
class Due:
    """The next step may use a program."""


@dataclass(frozen=True)
class Failed:
    """There will be no program."""

    why: str
    by_choice: bool = False


Event: TypeAlias = Postponed | Requested | Ended | Made | Due | Failed


def next_state(state: ProgramState, event: Event) -> ProgramState:
    """Return the state after ``event``. Raises ValueError for an event that cannot come in ``state``."""
    match state, event:
        case Eager(), Postponed(why):
            return Eager(why)
        case Eager(), Requested(pending, behind):
            return Compiling(pending, behind)
        case Eager(), Made(program, due):
            return InUse(program) if due else Deferred(program)
        case Eager(), Failed(why, by_choice):
            return Refused(why, by_choice)
        case Compiling(), Ended():
            return Eager()
        case Deferred(program), Due():
            return InUse(program)
        case _:
            raise ValueError(f"{type(event).__name__} cannot come in the state {type(state).__name__}")
