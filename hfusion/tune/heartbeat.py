"""Signs of life of sweeps in their study, so that trials of one that died are not in training for ever.

Optuna's own heartbeat is for study.optimize, and does not work where trials are asked and told.
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
# Seconds from one sign to the next at least, and how long a sweep may be silent: so long, or so many of its rounds.
_EVERY, _SILENT, _ROUNDS = 30.0, 600.0, 10


class Beats:
    """Writes the signs of life of the sweep ``run`` as an attribute of its study."""

    def __init__(self, study: Study, run: str, directory: Path | None) -> None:
        self._study, self._key = study, _PREFIX + run
        self._directory = None if directory is None else os.fspath(directory.absolute())
        self._last = self._before = time.time()
        self._write(self._last + _SILENT)

    def beat(self) -> None:
        """At the border of two rounds."""
        now = time.time()
        took, self._before = now - self._before, now
        if now - self._last > _EVERY:
            self._last = now
            self._write(now + max(_SILENT, _ROUNDS * took))

    def end(self) -> None:
        """The sweep has ended: what it left is left for ever."""
        self._write(0.0)

    def _write(self, until: float) -> None:
        known = {"host": socket.gethostname(), "process": os.getpid(), "directory": self._directory, "until": until}
        self._study.set_user_attr(self._key, known)


def dead_runs(study: Study) -> set[str]:
    """The sweeps of a study that nobody trains and nobody can go on with."""
    beats = {key.removeprefix(_PREFIX): value for key, value in study.user_attrs.items() if key.startswith(_PREFIX)}
    return {run for run, beat in beats.items() if _dead(beat)}


def _dead(beat: Any) -> bool:
    """One with a folder goes on when its call comes again, wherever that is."""
    if beat["directory"] is not None:
        return False
    if beat["host"] == socket.gethostname() and os.name == "posix":
        with suppress(PermissionError):
            try:
                os.kill(beat["process"], 0)
            except ProcessLookupError:
                return True
    return bool(time.time() > beat["until"])
