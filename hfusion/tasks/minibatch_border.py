"""Work between two units of an array: callbacks, scheduler steps, members that stop and their best weights."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hfusion.array.array_editing import changed_tensors
from hfusion.array.module import FusedModule
from hfusion.checkpoint.save import member_stacks
from hfusion.core.errors import CheckpointError, PlanError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import has_rows
from hfusion.core.patience import Patience
from hfusion.optim.lr_scheduler import PerMember
from hfusion.runtime.training import Training
from hfusion.schedule.plan import Phase, TaskPlan, Unit
from hfusion.tasks.arrange import Arrangement
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
        on_result: returns the members that stop. It is called with the lock ``asking`` held.
        listen: called with every event of the array.
        rates: float64 ``[B]``, the learning rates before the first minibatch.
        eager: why the array is not compiled; empty if it is.
        aborted: returns whether the run is being aborted, so that evictions may be incomplete.
    """

    setup: Arrangement
    plan: TaskPlan
    training: Training
    streams: Sequence[Stream]
    scheduler: LRScheduler | None
    kept: KeptMembers
    on_result: OnResult | None
    asking: Lock
    listen: Callable[[ArrayEvent], None]
    rates: Tensor
    eager: str
    aborted: Callable[[], bool] = lambda: False
    # Number of minibatches that have ended, and how many of their losses were passed to callbacks.
    _ended: int = 0
    _heard: int = 0

    @property
    def units(self) -> int:
        """Number of scheduled units up to and including the last minibatch."""
        training = self.training
        return training.scheduled.units if training.over else training.units_after(training.minibatches)

    def resume(self, stopped: dict[int, int]) -> None:
        """Continue an earlier run, in which the members ``stopped`` had stopped.

        `on_result` gets the earlier results again, so that it can rebuild its state.
        """
        self.kept.resume(stopped)
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
        """Handle the end of a unit."""
        training, plan = self.training, self.plan
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
    try:
        members = [operator.index(member) for member in answer]
        wrong = isinstance(answer, Mapping) or any(isinstance(member, bool) for member in answer)
    except (TypeError, ValueError):
        wrong = True
    if wrong:
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
    return members


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
