"""The checkpoints of `hfusion.train`: one folder per array, with its latest saves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch.optim.lr_scheduler import LRScheduler

from hfusion.checkpoint import files
from hfusion.checkpoint.reader import OWN, SaveReader
from hfusion.checkpoint.save import SaveWriter
from hfusion.core.errors import CheckpointError
from hfusion.core.text import file_name
from hfusion.schedule.plan import TaskPlan
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.array_log import ArrayNote
from hfusion.tasks.minibatch_border import Border
from hfusion.tasks.reading import Position
from hfusion.tasks.stopping import KeptMembers

# Number of saves of an array that are kept in its folder.
_KEEP = 3


def check_every(every: int | None) -> None:
    """Raise CheckpointError unless ``every`` is None or a positive number."""
    if every is not None and (not isinstance(every, int) or every < 1):
        raise CheckpointError(f"every={every!r}: give how many minibatches may be lost, at least 1")


def _names(arrangement: Arrangement) -> list[str]:
    return [f"member {member}" for member in arrangement.members]


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


class Checkpoints:
    """Saves arrays between minibatches, and loads what was saved.

    `save` copies the tensors in the calling thread. Other threads write the copies.

    Args:
        root: the folder of the run, with a folder for each array.
        most: for each array, how many minibatches may be lost.
        threads: how many saves may be written at the same time.
        listen: called before an array is copied, and by the writing thread when the save is on the disk.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        arrays: Sequence[Arrangement],
        most: Sequence[int],
        threads: int,
        listen: Callable[[int, ArrayNote], None],
    ) -> None:
        self._root, self._arrays, self._most, self._listen = Path(root), arrays, most, listen
        self._writes: list[Future[None] | None] = [None] * len(arrays)
        # For each array, the minibatches of the last save known to be on the disk, and of the last copy.
        self._safe, self._copied = [0] * len(arrays), [0] * len(arrays)
        self._threads = ThreadPoolExecutor(threads, "hfusion checkpoint")

    def load(
        self, index: int, plan: TaskPlan, scheduler: LRScheduler | None, kept: KeptMembers
    ) -> Mapping[str, Any] | None:
        """Load the last save of an array into its module, optimizer, scheduler and best weights. Return the rest.

        Returns None if there is no save.

        Raises:
            CheckpointError: a file is damaged, or it is of another task, or of other members or shapes.
        """
        arrangement = self._arrays[index]
        folder = self._root / file_name(arrangement.plan.name)
        # Remove leftovers now: an array that has already ended is not saved again.
        files.clean(folder)
        if not files.saves(folder):
            return None
        reader = SaveReader.of([files.read(folder)], None)
        with files.wrap_load_errors(reader.path):
            saved = reader.value("task")
            if not isinstance(saved, dict):
                raise CheckpointError(f"{reader.path} was not saved by hf.train: load it by hf.load")
            expected = {"name": arrangement.task.name, "members": _names(arrangement), **_shape(plan)}
            actual = {"name": saved["name"], "members": reader.tags, **saved["shape"]}
            for field, value in expected.items():
                if actual[field] != value:
                    raise CheckpointError(
                        f"{reader.path}: {field} was {actual[field]!r} when it was saved, and is {value!r} in the task "
                        f"{arrangement.task.name!r}: give the task as it was, or a new folder"
                    )
            if not 0 < saved["steps"] <= plan.steps:
                raise CheckpointError(
                    f"{reader.path} was saved after {saved['steps']} minibatches, and the task "
                    f"{arrangement.task.name!r} has {plan.steps}: give it as many epochs as it had, or more"
                )
            if saved["evaluations"] is not None:
                kept.load_best(saved["best"], reader.path)
            writes = [reader.module(arrangement.array), reader.optimizer(arrangement.optimizer)]
            if scheduler is not None:
                writes.append(reader.scheduler(scheduler))
            elif reader.agreed("schedule") is not None:
                raise CheckpointError(
                    f"{reader.path} was saved with a scheduler, and the task {arrangement.task.name!r} has none: give "
                    "it that scheduler, or a new folder"
                )
            for write in writes:
                write()
        self._safe[index] = saved["steps"]
        return saved

    def bound(self, index: int, steps: int) -> None:
        """Wait for the save being written if a crash during the next minibatch could otherwise cost too much.

        Args:
            steps: how many minibatches it has been trained on.

        Raises:
            CheckpointError: see `save`.
        """
        if steps + 1 - self._safe[index] > self._most[index]:
            self._wait(index)

    def save(self, index: int, border: Border) -> None:
        """Save an array between units. At the end of its training, wait until the save is on the disk.

        Raises:
            CheckpointError: this save or the previous one could not be written. Earlier saves remain.
        """
        border.arrive()
        steps = len(border.training.losses)
        arrangement = self._arrays[index]
        # Wait for the previous save, so that there is only one copy at a time.
        self._wait(index)
        self._listen(index, ArrayNote("copied", steps))
        writer = SaveWriter(range(len(arrangement.members)), {"members": _names(arrangement)}, {})
        writer.module(arrangement.array)
        writer.optimizer(arrangement.optimizer)
        border.kept.write_stopped({key.removeprefix(OWN): stack for key, stack in writer.tensors.items()})
        if border.scheduler is not None:
            writer.scheduler(border.scheduler)
        writer.body["task"] = writer.tree("task", _progress(border))
        self._writes[index] = self._threads.submit(self._write, index, writer, steps)
        self._copied[index] = steps
        if border.training.over or steps == border.plan.steps:
            self._wait(index)
        else:
            self.bound(index, steps)

    def _write(self, index: int, writer: SaveWriter, steps: int) -> None:
        folder = self._root / file_name(self._arrays[index].plan.name)
        files.write(folder, writer.body, writer.tensors, step=steps, keep=_KEEP)
        self._listen(index, ArrayNote("saved", steps))

    def _wait(self, index: int) -> None:
        """Wait until the last copy of an array is written. Raises CheckpointError if that failed."""
        write, self._writes[index] = self._writes[index], None
        if write is not None:
            write.result()
            self._safe[index] = self._copied[index]

    def close(self) -> None:
        """Wait until all copies are written, and end the threads."""
        self._threads.shutdown()


def _shape(plan: TaskPlan) -> dict[str, int | bool | None]:
    """Return the properties of a plan that minibatch borders depend on."""
    names = ("epoch", "accumulate", "clipped", "evaluated")
    return {name: getattr(plan, name) for name in names}


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
    """Continue an array that has not started from the result of `Checkpoints.load`."""
    training = border.training
    training.losses.extend(saved["losses"].unbind())
    if saved["evaluations"] is not None:
        training.evaluations.extend(saved["evaluations"].unbind())
    training.generators.states.update(saved["random"])
    training.resumed_calls.update(saved["calls"])
    for stream, position in zip(border.streams, saved["positions"], strict=True):
        stream.resume(Position(**position))
    border.resume(dict(saved["stopped"]))
