"""Destinations of logged numbers: files, TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hfusion.core.text import file_name


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
        with path.open("rb") as content:
            content.seek(-1, os.SEEK_END)
            torn = content.read() != b"\n"
        # A truncated file may end in the middle of a UTF-8 character.
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(file)
            head = next(rows, None)
            if head != [*self.columns]:
                raise ValueError(f"{path} begins with {head}, and a log with {[*self.columns]}: give another file")
            if not torn and purge_step is None:
                return
            saved_rows = [*rows]
        if torn:
            # The last row was not written to its end, and its number may have lost digits.
            saved_rows.pop()
        aside = path.with_name(f"{path.name}.part")
        with aside.open("w", newline="", encoding="utf-8") as after:
            whole = (row for row in saved_rows if purge_step is None or int(row[0]) < purge_step)
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
        _imported("tensorboard", "tensorboard")
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


class Wandb:
    """A run for each member of the service Weights & Biases. Needs the package wandb; ``options`` go to its init.

    With ``id``, the id of each member's run is made of it and the member's name, and an existing run is resumed.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        if not isinstance(options, Mapping):
            raise ValueError(f'wandb={options!r}: give options of wandb.init, such as {{"project": "sweep"}}')
        for name, remedy in (("name", 'members have their own; give "group"'), ("reinit", "it is create_new")):
            if name in options:
                raise ValueError(f"wandb={{{name!r}: {options[name]!r}}}: leave it out, {remedy}")
        self._init: Any = _imported("wandb", "wandb").init
        self._id, self._options = options.get("id"), {key: value for key, value in options.items() if key != "id"}
        self._runs: dict[str, Any] = {}

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._runs:
            options = self._options
            if self._id is not None:
                run_id = f"{self._id}-{blake2b(member.encode(), digest_size=6).hexdigest()}"
                options = {"id": run_id, "resume": "allow", **options}
            # Several runs at a time in one process.
            self._runs[member] = self._init(name=member, reinit="create_new", **options)
        self._runs[member].log(dict(values), step=step)

    def close(self, error: BaseException | None) -> None:
        for run in self._runs.values():
            run.finish(exit_code=0 if error is None else 1)


class Mlflow:
    """A run for each member of an experiment of MLflow. Needs the package mlflow.

    If a run is active in this experiment, they are its children; if it is resumed, so are its children.
    """

    def __init__(self, experiment: str) -> None:
        mlflow = _imported("mlflow", "mlflow")
        self._entities: Any = _imported("mlflow.entities", "mlflow")
        self._client = mlflow.MlflowClient()
        record = self._client.get_experiment_by_name(experiment)
        self._experiment = record.experiment_id if record is not None else self._client.create_experiment(experiment)
        active = mlflow.active_run()
        inside = active is not None and active.info.experiment_id == self._experiment
        self._parent: dict[str, str] = {"mlflow.parentRunId": active.info.run_id} if inside else {}
        self._runs = self._children()
        self._running_members: set[str] = set()

    def _children(self) -> dict[str, str]:
        """Return the ids of the active run's children, by name."""
        run_ids: dict[str, str] = {}
        for key, parent in self._parent.items():
            token: Any = None
            while token != "":
                page = self._client.search_runs([self._experiment], f"tags.`{key}` = '{parent}'", page_token=token)
                run_ids |= {run.info.run_name: run.info.run_id for run in page}
                token = page.token or ""
        return run_ids

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        if member not in self._runs:
            self._runs[member] = self._client.create_run(
                self._experiment, run_name=member, tags=self._parent
            ).info.run_id
        elif member not in self._running_members:
            self._client.update_run(self._runs[member], status="RUNNING")
        self._running_members.add(member)
        timestamp = time.time_ns() // 1_000_000
        metrics = [self._entities.Metric(name, value, timestamp, step) for name, value in values.items()]
        self._client.log_batch(self._runs[member], metrics=metrics)

    def close(self, error: BaseException | None) -> None:
        killed = isinstance(error, KeyboardInterrupt)
        status = "FINISHED" if error is None else "KILLED" if killed else "FAILED"
        for member in self._running_members:
            self._client.set_terminated(self._runs[member], status)


def _imported(module: str, package: str) -> Any:
    """Return a module. Raises an ImportError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"hf.MemberLogger({package}=...) needs {package}: pip install {package}") from error
