"""Numbers of members, member by member, to files and services; and a line that tells of the best and the worst."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hfusion.core.screen import ProgressBars, Tenths, plain
from hfusion.core.text import file_name

if TYPE_CHECKING:
    from rich.console import Console

Numbers = Tensor | Sequence[float]


class LogSink(Protocol):
    """Where numbers go."""

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Csv:
    """A file with the columns step, member, name, value; an existing one goes on.

    What was written is in the file, also where the process is killed. Raises ValueError for a file of other columns.
    """

    columns = ("step", "member", "name", "value")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+", newline="", encoding="utf-8")  # noqa: SIM115
        self._writer = csv.writer(self._file)
        try:
            self._go_on(path)
        except BaseException:
            self._file.close()
            raise

    def _go_on(self, path: str | os.PathLike[str]) -> None:
        self._file.seek(0)
        head = next(csv.reader(self._file), None)
        if head is None:
            self._writer.writerow(self.columns)
        elif head != [*self.columns]:
            raise ValueError(f"{path} begins with {head}, and a log with {[*self.columns]}: give another file")
        else:
            with open(path, "rb") as content:
                content.seek(-1, os.SEEK_END)
                torn = content.read() != b"\n"
            self._file.seek(0, os.SEEK_END)
            if torn:
                # The machine went down in the middle of a line.
                self._file.write("\r\n")
        self._file.flush()

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        self._writer.writerows([step, member, name, value] for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """A run for each member, in a folder of its name, where what is no letter of ASCII is written as in a URL.

    Needs the package tensorboard.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder = SummaryWriter, Path(folder)
        self._writers: dict[str, Any] = {}

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._writers:
            self._writers[member] = self._make(str(self._folder / file_name(member, safe=" ")))
        for name, value in values.items():
            self._writers[member].add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Wandb:
    """A run for each member of the service Weights & Biases. Needs the package wandb; ``options`` go to its init."""

    def __init__(self, **options: Any) -> None:
        import wandb

        self._init, self._options = wandb.init, options
        self._runs: dict[str, Any] = {}

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._runs:
            # Several runs at a time in one process.
            self._runs[member] = self._init(name=member, reinit="create_new", **self._options)
        self._runs[member].log(dict(values), step=step)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


class Mlflow:
    """A run for each member of an experiment of MLflow. Needs the package mlflow."""

    def __init__(self, experiment: str) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self._runs: dict[str, str] = {}

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._runs:
            self._runs[member] = self._client.create_run(self._experiment, run_name=member).info.run_id
        for name, value in values.items():
            self._client.log_metric(self._runs[member], name, value, step=step)

    def close(self) -> None:
        for run in self._runs.values():
            self._client.set_terminated(run)


class MemberLogger:
    """Writes one number of each member under its name, to any of these: files, TensorBoard, W&B, MLflow.

    Args:
        csv: a file, see `Csv`.
        tensorboard: a folder, see `TensorBoard`.
        wandb: options of ``wandb.init``, such as ``{"project": "sweep"}``.
        mlflow: the name of an experiment.
        sinks: whatever else has ``write(step, member, values)`` and ``close()``.

    Example:
        >>> with MemberLogger() as logger:
        ...     logger.log(["a", None, "b"], 7, loss=[0.5, float("nan"), 0.25])
    """

    def __init__(
        self,
        *,
        csv: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        wandb: Mapping[str, Any] | None = None,
        mlflow: str | None = None,
        sinks: Sequence[LogSink] = (),
    ) -> None:
        self._sinks = list(sinks)
        if csv is not None:
            self._sinks.append(Csv(csv))
        if tensorboard is not None:
            self._sinks.append(TensorBoard(tensorboard))
        if wandb is not None:
            self._sinks.append(Wandb(**wandb))
        if mlflow is not None:
            self._sinks.append(Mlflow(mlflow))

    def log(self, members: Any, step: int, **values: Numbers) -> None:
        """Note numbers ``[rows]`` by name; ``members``: a population, or the members' names, None where nobody is.

        Raises:
            ValueError: another number of values than of rows, or names that are none, or of two members.
        """
        tags = names_of(members)
        columns = {name: numbers_of(name, given, len(tags)) for name, given in values.items()}
        for row, tag in enumerate(tags):
            if tag is not None:
                for sink in self._sinks:
                    sink.write(step, tag, {name: column[row] for name, column in columns.items()})

    def close(self) -> None:
        """Write what is left, and close everything."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> MemberLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemberProgress:
    """A progress bar with the best and the worst member, in terminals and notebooks; else ten lines.

    ``total``: how many calls of `update` there will be. ``name`` is that of the number told of, ``mode`` whether less
    or more of it is better.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> with MemberProgress(2, console=Console(file=io.StringIO())) as progress:
        ...     progress.update(["a", "b"], [0.5, 0.25])
        ...     progress.text
        'loss: best b 0.25, worst a 0.5'
    """

    def __init__(self, total: int, *, name: str = "loss", mode: str = "min", console: Console | None = None) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: it is min or max")
        self._name, self._least = name, mode == "min"
        # Imported late: not everybody looks at bars.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TimeRemainingColumn

        columns = [BarColumn(), TaskProgressColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        self._console, self._total, self._done = Console() if console is None else console, total, 0
        self._screen = ProgressBars(self._console, *columns, plain("{task.description}"))
        self._lines = None if self._screen.draws else Tenths(0, total)
        self._task = self._screen.progress.add_task("", total=total)
        self.text = ""

    def update(self, members: Any, values: Numbers) -> None:
        """One step further; ``members`` and ``values`` as of `MemberLogger.log`. NaN is worst of all."""
        tags = names_of(members)
        column = numbers_of(self._name, values, len(tags))
        sign = 1 if self._least else -1
        ranked = sorted(
            ((math.inf if math.isnan(v) else sign * v, tag, v) for v, tag in zip(column, tags, strict=True) if tag),
            key=lambda one: one[:2],
        )
        if ranked:
            (_, best, low), (_, worst, high) = ranked[0], ranked[-1]
            self.text = f"{self._name}: best {best} {low:.4g}, worst {worst} {high:.4g}"
        self._done += 1
        self._screen.progress.update(self._task, advance=1, description=self.text)
        self._screen.draw()
        if self._lines is not None and self._done <= self._total and self._lines.reached(self._done, self._total):
            line = f"{self._done}/{self._total} {self.text}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> MemberProgress:
        self._screen.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.__exit__()


def names_of(members: Any) -> list[str | None]:
    """Of a population, or as given. Raises ValueError for what is no name, or of two members."""
    if hasattr(members, "tags"):
        return list(members.tags)
    if isinstance(members, str):
        raise ValueError(f"members={members!r}: give a population, or a list with a name for each row")
    found = list(members)
    names = [name for name in found if name is not None]
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{name!r} among the members: a name is a string with something in it, or None")
    if len(set(names)) < len(names):
        raise ValueError(f"members={found}: every member has a name of its own")
    return found


def numbers_of(name: str, given: Numbers, rows: int) -> list[float]:
    """``given`` as numbers. Raises ValueError unless there is one for each row."""
    values = [float(value) for value in torch.as_tensor(given).detach().cpu().reshape(-1).tolist()]
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} values for {rows} rows: give one for each")
    return values
