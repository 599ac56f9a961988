"""Work between two units of an array: callbacks, scheduler steps, members that stop, their best weights, and saves."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hfusion.array.array_editing import changed_tensors
from hfusion.array.module import FusedModule
from hfusion.checkpoint import files
from hfusion.checkpoint.save import SaveReader, array_state, member_stacks, packed, saves_of
from hfusion.core.errors import CheckpointError, PlanError
from hfusion.core.member_table import MemberTable, is_row
from hfusion.core.membership import has_rows
from hfusion.core.patience import Patience
from hfusion.core.text import file_name
from hfusion.optim.lr_scheduler import PerMember
from hfusion.runtime.training import Training
from hfusion.schedule.plan import Phase, TaskPlan, Unit
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.reading import Position
from hfusion.tasks.source import Stream
from hfusion.tasks.task import Evaluation, Step
from hfusion.tasks.training_report import ArrayEvent, ArrayNote

Answer: TypeAlias = "bool | Tensor | Iterable[int] | None"
OnResult: TypeAlias = Callable[[Step | Evaluation], Answer]
"""The members that stop. None, False or an empty list: none; True: all members of the result; otherwise these members
of the task, or a bool tensor with a value for each of ``result.members``."""


@dataclass(eq=False)
class Border:
    """Does the work between the units of one array.

    Attributes:
        plan: the plan of the array.
        streams: its sources of minibatches: for training and, if there is an eval loader, for evaluation.
        scheduler: drives the array's optimizer.
        saves: saves the array; None if it is not saved.
        on_result: returns the members that stop. It is called with the lock ``asking`` held.
        listen: called with every event of the array.
        rates: float64 ``[B]``, the learning rates before the first minibatch.
        eager: why the array is not compiled; empty if it is.
        aborted: returns whether the run is being aborted, so that evictions may be incomplete.
        reach: called with the number of minibatches that are trained, and whether the array is over.
    """

    setup: Arrangement
    plan: TaskPlan
    training: Training
    streams: Sequence[Stream]
    scheduler: LRScheduler | None
    kept: KeptMembers
    saves: ArraySaves | None
    on_result: OnResult | None
    asking: Lock
    listen: Callable[[ArrayEvent], None]
    rates: Tensor
    eager: str
    aborted: Callable[[], bool] = lambda: False
    reach: Callable[[int, bool], object] = lambda steps, over: None
    # Number of minibatches that have ended, and how many of their losses were passed to callbacks.
    _ended: int = 0
    _heard: int = 0

    @property
    def units(self) -> int:
        """Number of scheduled units up to and including the last minibatch."""
        training = self.training
        return training.scheduled.units if training.over else training.units_after(training.minibatches)

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of `ArraySaves.load`, before the first unit.

        `on_result` gets the earlier results again, so that it can rebuild its state.
        """
        training = self.training
        training.losses.extend(saved["losses"].unbind())
        if saved["evaluations"] is not None:
            training.evaluations.extend(saved["evaluations"].unbind())
        training.generators.states.update(saved["random"])
        training.resumed_calls.update(saved["calls"])
        for stream, position in zip(self.streams, saved["positions"], strict=True):
            stream.resume(Position(**position))
        self.kept.resume(dict(saved["stopped"]))
        self._note_stopped()
        self._ended = self._heard = len(self.training.losses)
        epochs = len(self.training.evaluations) // max(1, self.plan.evaluated)
        for epoch in range(epochs):
            self.kept.count(self._evaluation(epoch).losses)
        for step in range(len(self.training.losses) if self.on_result is not None else 0):
            self._ask(self._step(step))
            epoch, rest = divmod(step + 1, self.setup.task.epoch)
            if not rest and epoch <= epochs:
                self._ask(self._evaluation(epoch - 1))

    def ended(self, unit: Unit) -> None:
        """Handle the end of a unit, and save an array that has stopped."""
        training, plan = self.training, self.plan
        if self.saves is not None and plan.trained(unit):
            self.saves.bound(unit.step + 1)
        if unit.phase is Phase.BACKWARD and unit.shard == 0:
            self._ended = unit.step + 1
            self._hear()
            if self._ended == plan.steps:
                self.arrive()
                self._finish(self.streams[0])
        if plan.trained(unit):
            self._trained(unit.step)
        elif unit.phase is Phase.EVALUATE and unit.shard == len(plan.shards) - 1:
            self.arrive()
            training.evaluations[unit.step] = self.kept.hide(training.evaluations[unit.step])
            epoch, step = divmod(unit.step, plan.evaluated)
            if step == plan.evaluated - 1:
                self._evaluated(epoch)
                if epoch == self.setup.task.epochs - 1:
                    self._finish(self.streams[1])
        if training.over or (unit.phase is Phase.BACKWARD and unit.shard == 0):
            self.reach(training.minibatches, training.over)
        if training.over:
            self._save()

    def save(self) -> None:
        """Save the array in the lane that computes it, between two units."""
        self.training.state.settle()
        if not self.aborted():
            self._save()

    def _save(self) -> None:
        if self.saves is not None:
            self.saves.save(self)
            self.note_end()

    def note_end(self) -> None:
        """Tell the listener if the array is trained."""
        if self.training.over or self.training.minibatches == self.plan.steps:
            self.listen(ArrayNote("finished", self.training.minibatches))

    def _finish(self, stream: Stream) -> None:
        """Raise PlanError if a loader has more minibatches, which would not be trained or evaluated."""
        stream.finish(self.training.generators.copy().active(torch.device("cpu")))

    def arrive(self) -> None:
        """Wait for the losses of all minibatches that have ended, and pass them to callbacks."""
        self.training.arrive()
        self._hear()

    def _hear(self) -> None:
        """Pass the losses that have arrived on the host to callbacks."""
        losses = self.training.losses
        while self._heard < min(self._ended, len(losses)):
            step, self._heard = self._heard, self._heard + 1
            losses[step] = self.kept.hide(losses[step])
            self._tell(self._step(step))

    def _trained(self, step: int) -> None:
        epoch = self.setup.task.epoch
        if self.plan.closes(step):
            self._step_scheduler("step", lambda: self._losses(step, step + 1))
        if not (step + 1) % epoch and not self.plan.evaluated:
            self._step_scheduler("epoch", lambda: self._losses(step + 1 - epoch, step + 1))
        if self.on_result is not None:
            self.arrive()
            self._stop(self._ask(self._step(step)))

    def _evaluated(self, epoch: int) -> None:
        evaluation = self._evaluation(epoch)
        self._step_scheduler("epoch", lambda: evaluation.losses)
        # Another copy, as callbacks may write to it.
        self._tell(self._evaluation(epoch))
        improved, over = self.kept.count(evaluation.losses)
        if improved and self.setup.task.restores_best:
            self.training.state.settle()
            if not self.aborted():
                self.kept.keep_best(improved)
        self._stop({*(self.setup.members[row] for row in over), *self._ask(evaluation)})

    def _step_scheduler(self, interval: str, losses: Callable[[], Tensor]) -> None:
        """Step the scheduler where a loop over one member would: after each ``"step"`` or each ``"epoch"``.

        ``losses``: returns ``[n, B]``, of the step, or of the evaluation or training of the epoch. It may wait, so it
        is called only if a member has a ReduceLROnPlateau.
        """
        if self.scheduler is None or interval != self.setup.task.scheduler_interval:
            return
        if isinstance(self.scheduler, PerMember):
            metrics = losses().mean(0) if any(self.scheduler.takes_metrics) else None
            self.scheduler.step(metrics=metrics, rows=self.kept.rows)
        else:
            self.scheduler.step()

    def _losses(self, start: int, end: int) -> Tensor:
        """Return the losses ``[n, B]`` of minibatches; wait for those that are not on the host yet."""
        if len(self.training.losses) < end:
            self.arrive()
        return torch.stack(self.training.losses[start:end])

    def _step(self, step: int) -> Step:
        epoch, minibatch = divmod(step, self.setup.task.epoch)
        # A copy, as callbacks may write to it.
        losses = self.training.losses[step].clone()
        return Step(self.setup.task.name, epoch, minibatch, self.setup.members, losses)

    def _evaluation(self, epoch: int) -> Evaluation:
        count = self.plan.evaluated
        losses = torch.stack(self.training.evaluations[epoch * count : (epoch + 1) * count])
        return Evaluation(self.setup.task.name, epoch, self.setup.members, losses)

    def _tell(self, heard: Step | Evaluation) -> None:
        for callback in self.setup.task.callbacks:
            callback(heard)
        self.listen(heard)

    def _ask(self, result: Step | Evaluation) -> list[int]:
        """Call `on_result`, if there is one, and return the members that it stops."""
        if self.on_result is None:
            return []
        with self.asking:
            answer: Any = self.on_result(result)
        return answered(answer, result)

    def _stop(self, members: Collection[int]) -> None:
        if not members:
            return
        self.training.state.settle()
        if not self.aborted():
            self.kept.stop(members, self.training.minibatches)
            self._note_stopped()
            self.listen(ArrayNote("stopped", self.training.minibatches, tuple(self.kept.steps)))

    def _note_stopped(self) -> None:
        self.training.over = self.kept.all_stopped
        self.training.idle = frozenset(range(len(self.setup.members))).difference(self.kept.rows)


# Members that stop before their task ends keep their state, and may get back their best weights.


def answered(answer: Any, result: Step | Evaluation) -> list[int]:
    """Return the members that an answer stops. Raises PlanError for an invalid answer."""
    if hasattr(answer, "dtype") and not isinstance(answer, Tensor):
        # numpy's bools are not instances of bool.
        answer = torch.as_tensor(np.asarray(answer), device="cpu")
    if isinstance(answer, Tensor) and answer.dtype is torch.bool and answer.dim():
        if answer.shape != (len(result.members),):
            raise PlanError(
                f"on_result gave a bool tensor of shape {list(answer.shape)} for {len(result.members)} members of the "
                f"task {result.task!r}: give one value for each"
            )
        return [member for member, stops in zip(result.members, answer.tolist(), strict=True) if stops]
    answer = answer.tolist() if isinstance(answer, Tensor) else answer
    if answer is None or answer is False:
        return []
    if answer is True:
        return list(result.members)
    members: list[Any] = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, Mapping) else [None]
    if not all(is_row(member) and not isinstance(member, bool) for member in members):
        raise PlanError(
            f"on_result gave {answer!r} for the task {result.task!r}: give None or False to go on, True to stop, the "
            "members that stop, or a bool tensor with a value for each of result.members"
        )
    for member in members:
        if member not in result.members:
            raise PlanError(
                f"on_result stops member {member} of the task {result.task!r}, but was asked for members "
                f"{list(result.members)}"
            )
    return list(map(int, members))


NEVER = -1


class KeptMembers:
    """The members of an array that have stopped, and host copies of their state and of each member's best weights.

    The array still computes the rows of stopped members, as all rows are computed together. Their parameters, buffers,
    optimizer state and hyper-parameters are written back at the end, and so are the best weights.

    Attributes:
        steps: the members that have stopped, each with the number of minibatches that it was trained on.
        best_epochs: for each row, the epoch of its best evaluation; `NEVER` while there is none.
        evaluated: the number of epochs that were counted.

    Raises:
        PlanError: members are to have best weights, but all train one shared tensor.
    """

    def __init__(self, setup: Arrangement) -> None:
        task, rows = setup.task, len(setup.array)
        self._setup = setup
        self.steps: dict[int, int] = {}
        self._stopped: list[tuple[list[int], MemberTable]] = []
        # The best weights, and the rows that have some.
        self._best, self._has_best = MemberTable(rows), set[int]()
        self._patience = (task.patience or Patience(sys.maxsize)).renewed()
        self.best_epochs, self.evaluated = [NEVER] * rows, 0
        wants_best = task.patience is not None or task.restore_best
        if wants_best and (name := shared_parameter(setup.array)) is not None:
            raise PlanError(
                f"task {task.name!r} has patience or restore_best, which are of each member, but {name!r} is one "
                "tensor that all members train: freeze it, or give each member its own"
            )

    @property
    def rows(self) -> list[int]:
        """The rows of the members that have not stopped."""
        return [row for row, member in enumerate(self._setup.members) if member not in self.steps]

    @property
    def all_stopped(self) -> bool:
        return len(self.steps) == len(self._setup.members)

    def stop(self, members: Iterable[int], steps: int) -> None:
        """Stop members after ``steps`` minibatches and copy their state. The array's tensors must be up to date.

        Raises:
            PlanError: only some members stop, but all members train one shared tensor.
        """
        fresh = dict.fromkeys(member for member in members if member not in self.steps)
        self.steps |= dict.fromkeys(fresh, steps)
        if not fresh:
            return
        if not self.all_stopped and (name := shared_parameter(self._setup.array)) is not None:
            raise PlanError(
                f"on_result stops members {list(fresh)} alone, but {name!r} is one tensor that all members train: stop "
                "all of them (True), freeze it, or give each member its own"
            )
        rows = [self._setup.members.index(member) for member in fresh]
        self._stopped.append((rows, self._table(self._stacks()).take(rows).to("cpu")))

    def resume(self, steps: Mapping[int, int]) -> None:
        """Stop members that had stopped in the resumed run. The array must hold their final state."""
        for count in dict.fromkeys(steps.values()):
            self.stop([member for member, stopped_at in steps.items() if stopped_at == count], count)

    def hide(self, losses: Tensor) -> Tensor:
        """Return ``losses [..., B]`` with NaN for the stopped members."""
        if not self.steps:
            return losses
        hidden = torch.full_like(losses, torch.nan)
        hidden[..., self.rows] = losses[..., self.rows]
        return hidden

    def write_stopped(self, stacks: dict[str, Tensor]) -> None:
        """Write the copies of stopped members into their rows of ``stacks``, which may hold other keys, too."""
        for rows, copies in self._stopped:
            self._table(stacks).put(rows, copies)

    def count(self, losses: Tensor) -> tuple[list[int], list[int]]:
        """Count the evaluation of an epoch. Return the rows that improved, and the rows whose patience is over.

        ``losses``: ``[minibatches, B]``. Stopped members have losses of NaN, which are no improvement.
        """
        waited = [self._patience.count(str(row), value) for row, value in enumerate(losses.double().mean(0).tolist())]
        improved = [row for row, count in enumerate(waited) if not count]
        for row in improved:
            self.best_epochs[row] = self.evaluated
        self.evaluated += 1
        return improved, [row for row, count in enumerate(waited) if self._patience.is_over(count)]

    def keep_best(self, rows: Sequence[int]) -> None:
        """Copy the current weights of ``rows`` to the host. The array's tensors must be up to date."""
        self._best.put(rows, self._weights().take(rows).to("cpu"))
        self._has_best.update(rows)

    def put_back(self) -> None:
        """Write stopped members back into the array and optimizer and, once training is over, all best weights."""
        if self._stopped:
            self.write_stopped(self._stacks())
            self._setup.optimizer.forget()
        ended = self.all_stopped or self.evaluated == self._setup.task.epochs
        if ended and (rows := sorted(self._has_best)):
            self._weights().put(rows, self._best.take(rows))

    def best_state(self) -> dict[str, Any] | None:
        """Return the best weights for a checkpoint, without the evaluation losses; None if none are kept."""
        if not self._setup.task.restores_best:
            return None
        rule = [self._patience.mode, self._patience.least]
        return {"rule": rule, "rows": sorted(self._has_best), "weights": self._best.columns}

    def load_best(self, state: Mapping[str, Any] | None, path: Path) -> None:
        """Load the best weights of the checkpoint in ``path``. The earlier losses must be passed to `count`.

        Raises:
            CheckpointError: the weights that the task restores were not kept, or by another rule.
        """
        rule = [self._patience.mode, self._patience.least]
        if self._setup.task.restores_best and (state is None or list(state["rule"]) != rule):
            how = "without restore_best" if state is None else f"with mode and least {list(state['rule'])}"
            raise CheckpointError(
                f"{path} was saved {how}, so that the best weights of the task {self._setup.task.name!r} before it, by "
                f"{rule}, are not there: give the task as it was, or a new folder"
            )
        if state is not None:
            self._best.columns = {name: stack.clone() for name, stack in state["weights"].items()}
            self._has_best = set(state["rows"])

    def _table(self, stacks: dict[str, Tensor]) -> MemberTable:
        return MemberTable(len(self._setup.members), stacks)

    def _stacks(self) -> dict[str, Tensor]:
        """Return the stacked tensors that training changes, by the keys of a save."""
        changed = {f"module/{name}" for name in changed_tensors(self._setup.array)}
        stacks = member_stacks(self._setup.array, self._setup.optimizer)
        return {key: stack for key, stack in stacks.items() if key in changed or not key.startswith("module/")}

    def _weights(self) -> MemberTable:
        """Return the live parameters and buffers of `_stacks`."""
        return self._table({key: stack for key, stack in self._stacks().items() if key.startswith("module/")})


def shared_parameter(array: FusedModule) -> str | None:
    """Return the name of a parameter that all members of an array train together; None if each trains its own."""
    trained = [(name, param) for name, param in array.named_parameters() if param.requires_grad]
    return next((name for name, param in trained if len(array) > 1 and not has_rows(param)), None)


# The checkpoints of `hfusion.train`: one folder per array, with its latest saves.

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
