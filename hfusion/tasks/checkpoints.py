"""The checkpoints of `hfusion.train`: one folder per array, with its latest saves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hfusion.checkpoint import files
from hfusion.checkpoint.save import SaveReader, array_state, packed, saves_of
from hfusion.core.errors import CheckpointError
from hfusion.core.text import file_name
from hfusion.schedule.plan import TaskPlan
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.minibatch_border import Border, KeptMembers
from hfusion.tasks.reading import Position
from hfusion.tasks.training_report import ArrayNote

# Number of saves of an array that are kept in its folder.
_KEEP = 3


def check_folder(root: Path, names: Sequence[str], *, resume: bool, task: str | None = None) -> None:
    """Create the folder of a run, or check that its saves belong to arrays, or to tasks, of these names.

    Args:
        resume: saves are allowed, and the arrays continue from them.
        task: check only the saves of this task.

    Raises:
        CheckpointError: the folder cannot be created, or holds saves that this run must not continue.
    """
    with files.wrap_load_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        folders = list(root.iterdir())
        array_names = {file_name(name): name for name in names}
        saved = {array_names.get(path.name, unquote(path.name)) for path in folders if files.saves(path)}
        if task is not None:
            saved = {name for name in saved if _is_of(name, task)}
        if files.saves(root) or (root / files.MANIFEST).exists():
            raise CheckpointError(
                f"{root} is a checkpoint of one array, not of hf.train: give the folder of a run, or a new one"
            )
        if saved and not resume:
            raise CheckpointError(
                f"{root} holds saves of {sorted(saved)}: go on with resume=True, or give a new folder"
            )
        others = sorted(one for one in saved if not any(_is_of(one, name) for name in names))
        unsaved = [name for name in names if not any(_is_of(one, name) for one in saved)]
        if others and unsaved:
            raise CheckpointError(
                f"{root} holds saves of {others}, which are no arrays of these tasks, and none of {unsaved}: give the "
                "tasks the names that they had, on a machine on which the same members are together, or a new folder, "
                "or delete those that are not to go on"
            )


def _is_of(array: str, name: str) -> bool:
    """Return whether an array has this name, or is one of several of the task of this name."""
    return array.startswith(name) and re.fullmatch(r"(\.\d+)*", array.removeprefix(name)) is not None


class ArraySaves:
    """Saves an array between minibatches, and loads what was saved.

    `save` copies the tensors in the calling thread. Another thread writes the copies.

    Args:
        root: the folder of the run, with a folder for each array.
        most: how many minibatches may be lost.
        threads: write the copies.
        listen: called before the array is copied, and by the writing thread when the save is on the disk.
    """

    def __init__(
        self, root: Path, setup: Arrangement, most: int, threads: Executor, listen: Callable[[ArrayNote], None]
    ) -> None:
        self._folder, self._setup = root / file_name(setup.plan.name), setup
        self._names = [f"member {member}" for member in setup.members]
        self._most, self._threads, self._listen = most, threads, listen
        # The save that is being written, and the minibatches of the last one known to be on the disk.
        self._write: Future[int] | None = None
        self._safe = 0

    def load(self, plan: TaskPlan, scheduler: LRScheduler | None, kept: KeptMembers) -> Mapping[str, Any] | None:
        """Load the last save of the array into its module, optimizer, scheduler and best weights. Return the rest.

        Returns None if there is no save.

        Raises:
            CheckpointError: a file is damaged, or it is of another task, or of other members or shapes.
        """
        setup = self._setup
        # Remove leftovers now: an array that has already ended is not saved again.
        files.clean(self._folder)
        if not files.saves(self._folder):
            return None
        reader = SaveReader.of(saves_of(self._folder), None)
        with files.wrap_load_errors(reader.path):
            saved = reader.value("task")
            if not isinstance(saved, dict):
                raise CheckpointError(f"{reader.path} was not saved by hf.train: load it by hf.load")
            expected = {"name": setup.task.name, "members": self._names, **_shape(plan)}
            actual = {"name": saved["name"], "members": reader.tags, **saved["shape"]}
            for field, value in expected.items():
                if actual[field] != value:
                    raise CheckpointError(
                        f"{reader.path}: {field} was {actual[field]!r} when it was saved, and is {value!r} in the task "
                        f"{setup.task.name!r}: give the task as it was, or a new folder"
                    )
            if not 0 < saved["steps"] <= plan.steps:
                raise CheckpointError(
                    f"{reader.path} was saved after {saved['steps']} minibatches, and the task "
                    f"{setup.task.name!r} has {plan.steps}: give it as many epochs as it had, or more"
                )
            if saved["evaluations"] is not None:
                kept.load_best(saved["best"], reader.path)
            reader.array(setup.array, setup.optimizer, scheduler, None)
            if scheduler is None and reader.value("schedule") is not None:
                raise CheckpointError(
                    f"{reader.path} was saved with a scheduler, and the task {setup.task.name!r} has none: give "
                    "it that scheduler, or a new folder"
                )
            reader.write()
        self._safe = saved["steps"]
        return saved

    def bound(self, steps: int) -> None:
        """Wait for the save being written if a crash during the next minibatch could otherwise cost too much.

        Args:
            steps: how many minibatches it has been trained on.

        Raises:
            CheckpointError: see `save`.
        """
        if steps + 1 - self._safe > self._most:
            self._wait()

    def save(self, border: Border) -> None:
        """Save the array between units. At the end of its training, wait until the save is on the disk.

        Raises:
            CheckpointError: this save or the previous one could not be written. Earlier saves remain.
        """
        border.arrive()
        steps = len(border.training.losses)
        # Wait for the previous save, so that there is only one copy at a time.
        self._wait()
        self._listen(ArrayNote("copied", steps))
        rows, setup = range(len(self._names)), self._setup
        state = array_state(rows, setup.array, setup.optimizer, border.scheduler, None)
        body, tensors = packed({"members": self._names, **state, "task": _progress(border)})
        border.kept.write_stopped(tensors)
        self._write = self._threads.submit(self._written, body, tensors, steps)
        if border.training.over or steps == border.plan.steps:
            self._wait()
        else:
            self.bound(steps)

    def _written(self, body: dict[str, Any], tensors: dict[str, Tensor], steps: int) -> int:
        """Write a copy, and return its minibatches."""
        files.write(self._folder, body, tensors, step=steps, keep=_KEEP)
        self._listen(ArrayNote("saved", steps))
        return steps

    def _wait(self) -> None:
        """Wait until the last copy is written. Raises CheckpointError if that failed."""
        write, self._write = self._write, None
        if write is not None:
            self._safe = write.result()


def _shape(plan: TaskPlan) -> dict[str, int | bool | None]:
    """Return the properties of a plan that minibatch borders depend on."""
    return {name: getattr(plan, name) for name in ("epoch", "accumulate", "clipped", "evaluated")}


def _progress(border: Border) -> dict[str, Any]:
    training, positions = border.training, [stream.position for stream in border.streams]
    return {
        "name": border.setup.task.name,
        "shape": _shape(border.plan),
        "steps": len(training.losses),
        "losses": torch.stack(training.losses),
        "evaluations": torch.stack(training.evaluations) if training.evaluations else None,
        "seed": training.generators.seed,
        "random": training.generators.states,
        "calls": training.known_calls,
        "compiled": training.compiled,
        "positions": [dict(vars(position)) for position in positions],
        "stopped": [*border.kept.steps.items()],
        "best": border.kept.best_state(),
    }


def resume(saved: Mapping[str, Any], border: Border) -> None:
    """Continue an array that has not started from the result of `ArraySaves.load`."""
    training = border.training
    training.losses.extend(saved["losses"].unbind())
    if saved["evaluations"] is not None:
        training.evaluations.extend(saved["evaluations"].unbind())
    training.generators.states.update(saved["random"])
    training.resumed_calls.update(saved["calls"])
    for stream, position in zip(border.streams, saved["positions"], strict=True):
        stream.resume(Position(**position))
    border.resume(dict(saved["stopped"]))
