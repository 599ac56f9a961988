"""Members that stop before their task ends keep their state, and may get back their best weights."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.array.module import FusedModule
from hfusion.checkpoint.save import member_stacks
from hfusion.core.errors import CheckpointError, PlanError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import has_rows, is_per_member
from hfusion.core.patience import Patience
from hfusion.optim.base import FusedOptimizer
from hfusion.tasks.task import Evaluation, Step, Task

Answer: TypeAlias = "bool | Tensor | Iterable[int] | None"
OnResult: TypeAlias = Callable[[Step | Evaluation], Answer]
"""The members that stop. None, False or an empty list: none; True: all members of the result; otherwise these members
of the task, or a bool tensor with a value for each of ``result.members``."""


def answered(answer: Any, result: Step | Evaluation) -> list[int]:
    """Return the members that an answer stops. Raises PlanError for an invalid answer."""
    if hasattr(answer, "dtype") and not isinstance(answer, Tensor):
        # numpy's bools are not instances of bool.
        answer = torch.as_tensor(np.asarray(answer), device="cpu")
    if isinstance(answer, Tensor):
        answer = answer.tolist() if answer.dtype is not torch.bool or not answer.dim() else _marked(answer, result)
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


def _marked(answer: Tensor, result: Step | Evaluation) -> list[int]:
    if answer.shape != (len(result.members),):
        raise PlanError(
            f"on_result gave a bool tensor of shape {list(answer.shape)} for {len(result.members)} members of the task "
            f"{result.task!r}: give one value for each"
        )
    return [member for member, stops in zip(result.members, answer.tolist(), strict=True) if stops]


class StoppedMembers:
    """The members of an array that have stopped. ``steps``: for each, how many minibatches it was trained on.

    The array still computes their rows, as all rows are computed together. A copy of their parameters, buffers,
    optimizer state and hyper-parameters is kept on the host, and written back at the end. ``best``: the best weights.
    """

    def __init__(self, task: Task, members: Sequence[int], array: FusedModule, optimizer: FusedOptimizer) -> None:
        self.steps: dict[int, int] = {}
        self._members = list(members)
        self._array = array
        self._optimizer = optimizer
        self._epochs = task.epochs
        self.best = BestWeights(task, array)
        self._stopped_copies: list[tuple[list[int], MemberTable]] = []

    @property
    def rows(self) -> list[int]:
        """The rows of the members that have not stopped."""
        return [row for row, member in enumerate(self._members) if member not in self.steps]

    @property
    def all(self) -> bool:
        return len(self.steps) == len(self._members)

    def stop(self, members: Iterable[int], steps: int) -> None:
        """Stop members after ``steps`` minibatches and copy their state. The array's tensors must be up to date.

        Raises:
            PlanError: only some members stop, but all members train one shared tensor.
        """
        fresh = dict.fromkeys(member for member in members if member not in self.steps)
        self.steps |= dict.fromkeys(fresh, steps)
        if not fresh:
            return
        if not self.all:
            self._check_apart(list(fresh))
        rows = [self._members.index(member) for member in fresh]
        self._stopped_copies.append((rows, self._table(self._stacks()).take(rows).to("cpu")))

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

    def write(self, stacks: dict[str, Tensor]) -> None:
        """Write the copies of stopped members into their rows of ``stacks``, which may hold other keys, too."""
        for rows, copies in self._stopped_copies:
            self._table(stacks).put(rows, copies)

    def _table(self, stacks: dict[str, Tensor]) -> MemberTable:
        return MemberTable(len(self._members), stacks)

    def put_back(self) -> None:
        """Write stopped members back into the array and optimizer and, once training is over, all best weights."""
        if self._stopped_copies:
            self.write(self._stacks())
            self._optimizer.forget()
        if self.all or self.best.evaluated == self._epochs:
            self.best.restore()

    def _check_apart(self, members: Sequence[int]) -> None:
        for name, param in self._array.named_parameters():
            if param.requires_grad and not has_rows(param):
                raise PlanError(
                    f"on_result stops members {members} alone, but {name!r} is one tensor that all members train: stop "
                    "all of them (True), freeze it, or give each member its own"
                )

    def _stacks(self) -> dict[str, Tensor]:
        """Return the stacked tensors that training changes, by the keys of a save."""
        changed = {f"module/{name}" for name in changed_tensors(self._array)}
        stacks = member_stacks(self._array, self._optimizer)
        return {key: stack for key, stack in stacks.items() if key in changed or not key.startswith("module/")}


# The best weights of each member of a task, by its evaluation losses.

NEVER = -1


class BestWeights:
    """Counts the evaluations of an array's members without an improvement, and keeps their best weights on the host.

    Attributes:
        epochs: for each row, the epoch of its best evaluation; `NEVER` while there is none.
        evaluated: the number of epochs that were counted.

    Raises:
        PlanError: all members train one shared tensor.
    """

    def __init__(self, task: Task, array: FusedModule) -> None:
        rule = Patience(sys.maxsize) if task.patience is None else task.patience
        self._patience = rule.renewed()
        self._task, self._array = task, array
        # The best weights, and the rows that have some.
        self._weights = MemberTable(len(array))
        self._kept: set[int] = set()
        self.epochs, self.evaluated = [NEVER] * len(array), 0
        for name, param in array.named_parameters() if task.patience is not None or task.restore_best else ():
            if param.requires_grad and not is_per_member(param) and len(array) > 1:
                raise PlanError(
                    f"task {task.name!r} has patience or restore_best, which are of each member, but {name!r} is one "
                    "tensor that all members train: freeze it, or give each member its own"
                )

    @property
    def _rule(self) -> list[Any]:
        """The ``mode`` and ``least`` of the patience, which decide whether an evaluation is an improvement."""
        return [self._patience.mode, self._patience.least]

    def count(self, losses: Tensor) -> tuple[list[int], list[int]]:
        """Count the evaluation of an epoch. Return the rows that improved, and the rows whose patience is over.

        ``losses``: ``[minibatches, B]``. Stopped members have losses of NaN, which are no improvement.
        """
        waited = [self._patience.count(str(row), value) for row, value in enumerate(losses.double().mean(0).tolist())]
        improved = [row for row, count in enumerate(waited) if not count]
        for row in improved:
            self.epochs[row] = self.evaluated
        self.evaluated += 1
        return improved, [row for row, count in enumerate(waited) if self._patience.is_over(count)]

    def keep(self, rows: Sequence[int]) -> None:
        """Copy the current weights of ``rows`` to the host. The array's tensors must be up to date."""
        self._weights.put(rows, self._table().take(rows).to("cpu"))
        self._kept.update(rows)

    def restore(self) -> None:
        """Write each member's best weights into the array. A member without any keeps its weights."""
        if rows := sorted(self._kept):
            self._table().put(rows, self._weights.take(rows))

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, without the evaluation losses; None if no weights are kept."""
        if not self._task.restores_best:
            return None
        rows = [row in self._kept for row in range(len(self.epochs))]
        return {"rule": self._rule, "rows": rows, "weights": self._weights.columns}

    def load_state(self, state: Mapping[str, Any] | None, path: Path) -> None:
        """Load the weights of the checkpoint in ``path``. The earlier losses must be passed to `count`.

        Raises:
            CheckpointError: the weights that the task restores were not kept, or by another rule.
        """
        if self._task.restores_best and (state is None or list(state["rule"]) != self._rule):
            how = "without restore_best" if state is None else f"with mode and least {list(state['rule'])}"
            raise CheckpointError(
                f"{path} was saved {how}, so that the best weights of the task {self._task.name!r} before it, by "
                f"{self._rule}, are not there: give the task as it was, or a new folder"
            )
        if state is not None:
            self._weights.columns = {name: stack.clone() for name, stack in state["weights"].items()}
            self._kept = {row for row, kept in enumerate(state["rows"]) if kept}

    def _table(self) -> MemberTable:
        """Return the live stacks ``[B, *shape]`` that training changes, by key. Tied tensors appear once."""
        changed = [item for item in changed_tensors(self._array).items() if has_rows(item[1])]
        first = {id(tensor): name for name, tensor in reversed(changed)}
        return MemberTable(
            len(self._array), {name: tensor.detach() for name, tensor in changed if first[id(tensor)] == name}
        )
