"""Numbers of members, member by member, to files and services."""

from __future__ import annotations

import csv
import operator
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from hfusion.core.member_table import is_row
from hfusion.core.patience import numbers
from hfusion.core.text import file_name
from hfusion.population.members import check_name

Numbers = Tensor | Sequence[float]


class LogSink(Protocol):
    """A destination of numbers. ``close`` is called once, with the error that ended the program early, if any."""

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None: ...

    def close(self, error: BaseException | None) -> None: ...


class Csv:
    """A file with the columns step, member, name, value; rows are appended to an existing file.

    Written rows are in the file even if the process is killed. ``purge_step``: rows of this step and later are
    removed first. Raises ValueError for a file of other columns.
    """

    columns = ("step", "member", "name", "value")

    def __init__(self, path: str | os.PathLike[str], purge_step: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._go_on(path, purge_step)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(self.columns)
            self._file.flush()

    def _go_on(self, path: Path, purge_step: int | None) -> None:
        """Remove an unfinished last row, and rows of ``purge_step`` and later, from an existing file."""
        # A truncated file may end in the middle of a UTF-8 character.
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
        head, *rows = csv.reader(lines)
        if head != [*self.columns]:
            raise ValueError(f"{path} begins with {head}, and a log with {[*self.columns]}: give another file")
        # A name may have line breaks.
        if torn := not lines[-1].endswith("\n") or (rows and len(rows[-1]) < len(self.columns)):
            # The last row was not written to its end, and its number may have lost digits.
            del rows[-1:]
        if torn or purge_step is not None:
            aside = path.with_name(f"{path.name}.part")
            with aside.open("w", newline="", encoding="utf-8") as after:
                whole = (row for row in rows if purge_step is None or int(row[0]) < purge_step)
                csv.writer(after).writerows([self.columns, *whole])
            os.replace(aside, path)

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        self._writer.writerows([step, member, name, value] for name, value in values.items())
        self._file.flush()

    def close(self, error: BaseException | None) -> None:
        self._file.close()


class TensorBoard:
    """A run for each member, in a folder of its name, with special characters escaped as in a URL.

    ``purge_step``: earlier values of this step and later ones are hidden. Needs the package tensorboard.
    """

    def __init__(self, folder: str | os.PathLike[str], purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder, self._purge_step = SummaryWriter, Path(folder), purge_step
        self._writers: dict[str, Any] = {}

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._writers:
            folder = str(self._folder / file_name(member, safe=" "))
            self._writers[member] = self._make(folder, purge_step=self._purge_step)
        for name, value in values.items():
            self._writers[member].add_scalar(name, value, step)

    def close(self, error: BaseException | None) -> None:
        for writer in self._writers.values():
            writer.close()


class MemberLogger:
    """Log numbers of each member, under its name, to files, TensorBoard, and whatever else has a sink.

    Args:
        csv: the path of a file, see `Csv`.
        tensorboard: a folder, see `TensorBoard`.
        sinks: further objects with ``write(step, member, values)`` and ``close(error)``; examples/member_sinks.py has
            those of W&B and MLflow.
        purge_step: for a run that resumes from a checkpoint of this step: values of this step and later, which were
            logged before the run was killed, are ignored in the file and the folder.

    If an exception ends its ``with`` block, sinks are closed with it.

    Raises:
        ImportError: the package tensorboard is not installed.
        ValueError: the file is not a log.

    Example:
        >>> with MemberLogger() as logger:
        ...     logger.log(["a", None, "b"], 7, loss=[0.5, float("nan"), 0.25])
    """

    def __init__(
        self,
        *,
        csv: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        sinks: Sequence[LogSink] = (),
        purge_step: int | None = None,
    ) -> None:
        self._sinks = list(sinks)
        self._closed = False
        # Callbacks of tasks on several devices come from several threads.
        self._lock = Lock()
        try:
            if csv is not None:
                self._sinks.append(Csv(csv, purge_step))
            if tensorboard is not None:
                self._sinks.append(TensorBoard(tensorboard, purge_step))
        except BaseException as error:
            self._close(error)
            raise

    def log(self, members: Any, step: int, **values: Numbers) -> None:
        """Log values ``[rows]`` of each name. ``members`` is a population, or a list of names, None for free rows.

        Raises:
            ValueError: values and rows differ in number, a name is invalid or used twice, the step is not a whole
                number, or the logger is closed.
        """
        if self._closed:
            raise ValueError("this logger is closed: make another, which goes on in the same files")
        if not is_row(step):
            raise ValueError(f"step={step!r}: give a whole number, such as pop.steps")
        if isinstance(members, str):
            raise ValueError(f"members={members!r}: give a population, or a list with a name for each row")
        tags = list(getattr(members, "tags", members))
        for row, tag in enumerate(tags):
            if tag is not None:
                check_name(tag, tags[:row])
        columns = {name: numbers(name, row_values, len(tags)) for name, row_values in values.items()}
        with self._lock:
            for row, tag in enumerate(tags):
                if tag is not None:
                    for sink in self._sinks:
                        sink.write(operator.index(step), tag, {name: column[row] for name, column in columns.items()})

    def close(self) -> None:
        """Write what is buffered, and close all files and runs. Calling it again has no effect."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        """Close all, whatever one of them raises."""
        sinks, self._sinks, self._closed = self._sinks, [], True
        with ExitStack() as stack:
            for sink in reversed(sinks):
                stack.callback(sink.close, error)

    def __enter__(self) -> MemberLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)
