"""The best weights of each member of a task, by its evaluation losses."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.array.module import FusedModule
from hfusion.core.errors import PlanError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import has_rows, is_per_member
from hfusion.core.patience import Patience
from hfusion.tasks.task import Task

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
        for name, param in array.named_parameters():
            if param.requires_grad and not is_per_member(param) and len(array) > 1:
                raise PlanError(
                    f"task {task.name!r} has patience or restore_best, which are of each member, but {name!r} is one "
                    "tensor that all members train: freeze it, or give each member its own"
                )

    @property
    def rule(self) -> list[Any]:
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
        if self._task.restores_best and rows:
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
        return {"rule": self.rule, "rows": rows, "weights": self._weights.columns}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Load the weights of a checkpoint. The earlier losses must be passed to `count`."""
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
