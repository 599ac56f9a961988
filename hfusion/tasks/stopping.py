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
from hfusion.core.membership import has_rows
from hfusion.core.patience import Patience
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.task import Evaluation, Step

Answer: TypeAlias = "bool | Tensor | Iterable[int] | None"
OnResult: TypeAlias = Callable[[Step | Evaluation], Answer]
"""The members that stop. None, False or an empty list: none; True: all members of the result; otherwise these members
of the task, or a bool tensor with a value for each of ``result.members``."""


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
