"""Find out whether a process of this machine still runs."""

from __future__ import annotations

import os
from pathlib import Path


def process_start(number: int) -> str | None:
    """Return when a process was started, in clock ticks since the machine started; None if that is not known.

    Process ids are reused; an id together with its start time is unique.
    """
    try:
        # The name, in parentheses, may have spaces.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19]


def is_running(number: int, start: str | None) -> bool | None:
    """Return whether the process that was started at ``start`` runs; None if the system does not report it."""
    if os.name != "posix":
        return None
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state not in "ZX" and start in (None, process_start(number))
