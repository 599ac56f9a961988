"""The log of a run in its folder: lines of events, for people and for ``python -m hfusion status``.

``logs/run.log`` has the runs that were started in the folder, ``logs/arrays/NAME.log`` the events of an array, and
``logs/trials/NUMBER.log`` those of a trial. A line is ``TIME EVENT key=value ...``; values with spaces are JSON.
A file is open only while a line is written to it, so nothing is left open, and another process reads it at any time.
"""

from __future__ import annotations

import json
import os
import re
import socket
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from hfusion.core.text import file_name

LOGS, RUN, ARRAYS, TRIALS = "logs", "run.log", "arrays", "trials"
# Bytes at the end of a file that tell how things are; each line is a few hundred.
_TAIL = 1 << 16
_LINE = re.compile(r"(\S+Z) (\w+)((?: \w+=(?:\"(?:[^\"\\]|\\.)*\"|[^\s\"]*))*)")
_VALUE = re.compile(r" (\w+)=(\"(?:[^\"\\]|\\.)*\"|[^\s\"]*)")


class EventLog:
    """Writes the log of one run of ``kind`` ("train" or "sweep"), as a context manager. Thread-safe.

    If a line cannot be written, as on a full disk, there is one warning and no more lines.

    Args:
        root: the folder of the run; None: nothing is written.
        values: of the line that says that the run was started.
    """

    def __init__(self, root: Path | None, kind: str, **values: object) -> None:
        self._folder = None if root is None else root / LOGS
        self._values = {"kind": kind, **values}
        # The rank is of torchrun, where each rank may train tasks of its own in one folder.
        rank = os.environ.get("RANK")
        self._process_values = {"process": os.getpid(), "node": socket.gethostname(), "rank": rank}
        self._lock = Lock()
        self._continued: set[Path] = set()

    def __enter__(self) -> EventLog:
        self._append(RUN, "started", {**self._process_values, "start": process_start(os.getpid()), **self._values})
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        event = "finished" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
        self._append(RUN, event, {**self._process_values, "error": None if error is None else first_line(error)})

    @property
    def writes(self) -> bool:
        """True if there is a folder to write to."""
        return self._folder is not None

    def array(self, name: str, event: str, values: Mapping[str, object]) -> None:
        """Write a line about an array; values that are None are left out."""
        self._append(f"{ARRAYS}/{file_name(name)}.log", event, {**self._process_values, **values})

    def trial(self, number: int, event: str, values: Mapping[str, object]) -> None:
        """Write a line about a trial; values that are None are left out."""
        self._append(f"{TRIALS}/{number}.log", event, {**self._process_values, **values})

    def _append(self, name: str, event: str, values: Mapping[str, object]) -> None:
        if self._folder is None:
            return
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        cells = [f"{key}={_cell(str(value))}" for key, value in values.items() if value is not None]
        line = " ".join([time, event, *cells]) + "\n"
        with self._lock:
            path = self._folder / name
            try:
                if path not in self._continued:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    # The last line of a run that was killed may be torn.
                    line = "\n" * bool(_tail(path, 1).strip(b"\n")) + line
                    self._continued.add(path)
                # One write, so that a reader sees no part of a line unless the disk is full.
                with path.open("ab", buffering=0) as file:
                    file.write(line.encode())
            except OSError as error:
                self._folder = None
                warnings.warn(f"{path} could not be written, and the run goes on without logs: {error}", stacklevel=2)


@dataclass(frozen=True)
class LoggedEvent:
    """A line of a log; ``values`` are text."""

    time: datetime
    event: str
    values: Mapping[str, str]


def read_events(path: Path) -> list[LoggedEvent]:
    """Return the last events of a log, the oldest first; none where there is no such file.

    Lines that are damaged, or not yet whole, are left out. Raises OSError for a file that cannot be read.
    """
    lines = _tail(path, _TAIL).decode(errors="replace").split("\n")
    return [event for line in lines if (event := _event(line)) is not None]


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {message}" if message else "")


def _tail(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read(size)
    except FileNotFoundError:
        return b""


def _cell(text: str) -> str:
    return text if re.fullmatch(r"[!#-~]+", text) and "=" not in text else json.dumps(text)


def _event(line: str) -> LoggedEvent | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    try:
        time = datetime.fromisoformat(match[1])
        cells = {key: json.loads(cell) if cell.startswith('"') else cell for key, cell in _VALUE.findall(match[3])}
    except ValueError:
        return None
    return LoggedEvent(time, match[2], cells)


# Find out whether a process of this machine still runs.


def process_start(number: int) -> str | None:
    """Return when a process was started, in clock ticks since the machine started; None if that is not known.

    Process ids are reused; an id together with its start time is unique.
    """
    fields = _properties(number)
    return fields[19] if fields else None


def _properties(number: int) -> list[str]:
    """Return the state of a process and the numbers behind it, as in ``/proc``; nothing if that is not known."""
    try:
        # The name, in parentheses, may have spaces.
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


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
    fields = _properties(number)
    return not fields or (fields[0] not in "ZX" and start in (None, fields[19]))


# Checkpoint folders of runs that were started by ``python -m hfusion run SCRIPT --resume FOLDER``.

_root: Path | None = None
_counts: Counter[str] = Counter()


@contextmanager
def resuming(root: Path) -> Iterator[None]:
    """Context manager: runs without a `directory` use a folder below this one. Not for nested use."""
    global _root
    _root = root
    _counts.clear()
    try:
        yield
    finally:
        _root = None


def resume_folder(kind: str) -> Path | None:
    """The folder of the next run of this kind, by the order in which a script starts them; None where it has none."""
    if _root is None:
        return None
    _counts[kind] += 1
    return _root / f"{kind}-{_counts[kind]}"
