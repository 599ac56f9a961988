"""Members that stop before their task ends keep the state that they had when they stopped."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.array.module import FusedModule
from hfusion.checkpoint.save import member_stacks
from hfusion.core.errors import PlanError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import has_rows
from hfusion.optim.base import FusedOptimizer
from hfusion.tasks.best_weights import BestWeights
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
    optimizer state and hyper-parameters is kept on the host, and written back at the end. ``best``: the best weights,
    if the task has patience or ``restore_best``.
    """

    def __init__(self, task: Task, members: Sequence[int], array: FusedModule, optimizer: FusedOptimizer) -> None:
        self.steps: dict[int, int] = {}
        self._members = list(members)
        self._array = array
        self._optimizer = optimizer
        self._epochs = task.epochs
        self.best = BestWeights(task, array) if task.patience is not None or task.restore_best else None
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
        if self.best is not None and (self.all or self.best.evaluated == self._epochs):
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
