"""The best weights that members of a task have had, by the losses of its evaluations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.array.module import FusedModule
from hfusion.core.errors import PlanError
from hfusion.core.membership import has_rows, is_per_member
from hfusion.core.patience import Patience
from hfusion.tasks.task import Task

NEVER = -1


class BestWeights:
    """Counts the evaluations of an array's members without an improvement, and keeps their best weights on the host.

    Attributes:
        epochs: of each row, the epoch whose evaluation was its best; `NEVER` while there is none.
        evaluated: the epochs that were counted.

    Raises:
        PlanError: a tensor that all members train together.
    """

    def __init__(self, task: Task, array: FusedModule) -> None:
        rule = Patience(sys.maxsize) if task.patience is None else task.patience
        self._patience = rule.renewed()
        self._task, self._array = task, array
        self._weights: list[Mapping[str, Tensor] | None] = [None] * len(array)
        self.epochs, self.evaluated = [NEVER] * len(array), 0
        for name, param in array.named_parameters():
            if param.requires_grad and not is_per_member(param) and len(array) > 1:
                raise PlanError(
                    f"task {task.name!r} has patience or restore_best, which are of each member, but {name!r} is one "
                    "tensor that all members train: freeze it, or give each member its own"
                )

    @property
    def rule(self) -> list[Any]:
        """When an evaluation is an improvement, as plain values."""
        return [self._patience.mode, self._patience.least]

    def count(self, losses: Tensor) -> tuple[list[int], list[int]]:
        """Count the evaluation of an epoch, ``losses [minibatches, B]``: the rows that improved, and whose time is up.

        Members that stopped before have losses of NaN, which are no improvement.
        """
        waited = [self._patience.count(str(row), value) for row, value in enumerate(losses.double().mean(0).tolist())]
        improved = [row for row, count in enumerate(waited) if not count]
        for row in improved:
            self.epochs[row] = self.evaluated
        self.evaluated += 1
        return improved, [row for row, count in enumerate(waited) if self._patience.is_over(count)]

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Copy what members in ``rows`` are now; the array's tensors are what training made of them."""
        if not self._task.restores_best or not rows:
            return
        blocks = {name: stack[list(rows)].cpu() for name, stack in self._stacks().items()}
        for index, row in enumerate(rows):
            # A copy of its own: a view would hold the memory of all that improved with it.
            self._weights[row] = {name: block[index].clone() for name, block in blocks.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Write each member's best weights into the array; a member that never was evaluated stays as it is."""
        for name, stack in self._stacks().items():
            for row, weights in enumerate(self._weights):
                if weights is not None:
                    stack[row].copy_(weights[name])

    def state(self) -> dict[str, Any] | None:
        """What a save holds of it, besides the losses of the evaluations; None where no weights are kept."""
        if not self._task.restores_best:
            return None
        stored = next((weights for weights in self._weights if weights is not None), {})
        stacks = {
            name: torch.stack([like if weights is None else weights[name] for weights in self._weights])
            for name, like in stored.items()
        }
        return {"rule": self.rule, "rows": [weights is not None for weights in self._weights], "weights": stacks}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the weights of a save; the losses before it are counted by `count`."""
        if state is None:
            return
        for row, stored in enumerate(state["rows"]):
            if stored:
                self._weights[row] = {name: stack[row].clone() for name, stack in state["weights"].items()}

    def _stacks(self) -> dict[str, Tensor]:
        """The stacks ``[B, *shape]`` that training changes, by key, tied ones once."""
        changed = [item for item in changed_tensors(self._array).items() if has_rows(item[1])]
        first = {id(tensor): name for name, tensor in reversed(changed)}
        return {name: tensor.detach() for name, tensor in changed if first[id(tensor)] == name}
