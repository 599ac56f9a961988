"""The states of a step's program, and which events lead from one to the next."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hfusion.step.program_lifecycle import (
    Compiling,
    Deferred,
    Due,
    Eager,
    Ended,
    Event,
    Failed,
    InUse,
    Postponed,
    ProgramReady,
    ProgramState,
    Refused,
    Requested,
    next_state,
)

PROGRAM, OTHER = cast(Any, "program"), cast(Any, "another program")
PENDING = cast(Any, "pending")

STATES: tuple[ProgramState, ...] = (
    Eager(),
    Eager("not yet"),
    Compiling(PENDING),
    Deferred(PROGRAM),
    InUse(PROGRAM),
    Refused("never"),
)
EVENTS: tuple[Event, ...] = (
    Postponed("later"),
    Requested(PENDING, True),
    Ended(),
    ProgramReady(OTHER),
    ProgramReady(OTHER, due=False),
    Due(),
    Failed("broken"),
    Failed("too slow", by_choice=True),
)
TABLE = """
Eager() + Postponed(later): Eager(later)
Eager() + Requested(pending, True): Compiling(pending, True)
Eager() + ProgramReady(another program, True): InUse(another program)
Eager() + ProgramReady(another program, False): Deferred(another program)
Eager() + Failed(broken, False): Refused(broken, False)
Eager() + Failed(too slow, True): Refused(too slow, True)
Eager(not yet) + Postponed(later): Eager(later)
Eager(not yet) + Requested(pending, True): Compiling(pending, True)
Eager(not yet) + ProgramReady(another program, True): InUse(another program)
Eager(not yet) + ProgramReady(another program, False): Deferred(another program)
Eager(not yet) + Failed(broken, False): Refused(broken, False)
Eager(not yet) + Failed(too slow, True): Refused(too slow, True)
Compiling(pending, False) + Ended(): Eager()
Deferred(program) + Due(): InUse(program)
"""


def text(value: object) -> str:
    shown = [str(field) for field in vars(value).values() if field != ""]
    return f"{type(value).__name__}({', '.join(shown)})"


def after(state: ProgramState, event: Event) -> ProgramState | None:
    try:
        return next_state(state, event)
    except ValueError:
        return None


def test_every_event_in_every_state() -> None:
    outcomes = [(state, event, after(state, event)) for state in STATES for event in EVENTS]
    lines = [f"{text(state)} + {text(event)}: {text(new)}" for state, event, new in outcomes if new is not None]
    assert lines == TABLE.strip().splitlines()


@pytest.mark.parametrize(
    ("state", "event"), [(InUse(PROGRAM), ProgramReady(OTHER)), (Refused("never"), ProgramReady(OTHER))]
)
def test_an_event_that_cannot_come(state: ProgramState, event: Event) -> None:
    with pytest.raises(ValueError, match=f"ProgramReady cannot come in the state {type(state).__name__}"):
        next_state(state, event)
