"""The states of the program of a step, and the events that change them."""

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
    """Steps run by autograd while another process compiles; ``behind``: no step ever waits for the program."""

    pending: PendingProgram
    behind: bool = False


@dataclass(frozen=True, eq=False)
class Deferred:
    """The program is ready, but steps run by autograd until it is due."""

    program: StepProgram


@dataclass(frozen=True, eq=False)
class InUse:
    """Steps run by the program."""

    program: StepProgram


@dataclass(frozen=True, eq=False)
class Refused:
    """Steps always run by autograd; ``by_choice``: a program is possible, but does not pay."""

    why: str
    by_choice: bool = False


ProgramState: TypeAlias = Eager | Compiling | Deferred | InUse | Refused


@dataclass(frozen=True)
class Postponed:
    """A program does not pay yet."""

    why: str


@dataclass(frozen=True, eq=False)
class Requested:
    """A compilation that another process has begun."""

    pending: PendingProgram
    behind: bool


@dataclass(frozen=True)
class Ended:
    """The other process ended, or what it makes is not wanted any more."""


@dataclass(frozen=True, eq=False)
class ProgramReady:
    """The program is ready; ``due``: whether the next step may use it."""

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


Event: TypeAlias = Postponed | Requested | Ended | ProgramReady | Due | Failed


def next_state(state: ProgramState, event: Event) -> ProgramState:
    """Return the state after ``event``. Raises ValueError for an event that cannot come in ``state``."""
    match state, event:
        case Eager(), Postponed(why):
            return Eager(why)
        case Eager(), Requested(pending, behind):
            return Compiling(pending, behind)
        case Eager(), ProgramReady(program, due):
            return InUse(program) if due else Deferred(program)
        case Eager(), Failed(why, by_choice):
            return Refused(why, by_choice)
        case Compiling(), Ended():
            return Eager()
        case Deferred(program), Due():
            return InUse(program)
        case _:
            raise ValueError(f"{type(event).__name__} cannot come in the state {type(state).__name__}")
