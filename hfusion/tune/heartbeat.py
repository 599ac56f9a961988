"""Heartbeats of sweeps in their study, so that the trials of a crashed sweep do not stay RUNNING for ever.

Optuna's own heartbeat is for study.optimize, and does not work with ask and tell.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna import Study

_PREFIX = "hfusion:sweep:"
# Least seconds between heartbeats, and how long a sweep may be silent: seconds or rounds, whichever is longer.
_EVERY, _SILENT, _ROUNDS = 30.0, 600.0, 10


class Heartbeat:
    """Writes heartbeats of the sweep ``run`` as a user attribute of its study."""

    def __init__(self, study: Study, run: str, directory: Path | None) -> None:
        self._study, self._key = study, _PREFIX + run
        self._directory = None if directory is None else os.fspath(directory.absolute())
        self._last_write = self._last_round = time.time()
        self._write(self._last_write + _SILENT)

    def beat(self) -> None:
        """Write a heartbeat, unless the last one is recent. Called after every round."""
        now = time.time()
        took, self._last_round = now - self._last_round, now
        if now - self._last_write > _EVERY:
            self._last_write = now
            self._write(now + max(_SILENT, _ROUNDS * took))

    def end(self) -> None:
        """Mark the sweep as ended. Without a directory, later sweeps fail the trials that it left in training."""
        self._write(0.0)

    def _write(self, until: float) -> None:
        beat = {"host": socket.gethostname(), "process": os.getpid(), "directory": self._directory, "until": until}
        self._study.set_user_attr(self._key, beat)


def dead_runs(study: Study) -> set[str]:
    """Return the names of a study's sweeps that no process trains and that cannot be resumed."""
    beats = {key.removeprefix(_PREFIX): value for key, value in study.user_attrs.items() if key.startswith(_PREFIX)}
    return {run for run, beat in beats.items() if _dead(beat)}


def _dead(beat: Any) -> bool:
    """Return whether a sweep is dead, by its heartbeat. A sweep with a directory never is, as it can be resumed."""
    if beat["directory"] is not None:
        return False
    if beat["host"] == socket.gethostname() and os.name == "posix":
        with suppress(PermissionError):
            try:
                os.kill(beat["process"], 0)
            except ProcessLookupError:
                return True
    return bool(time.time() > beat["until"])
