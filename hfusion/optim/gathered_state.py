"""An optimizer of some members of an array: gather their rows of state and hyper-parameters, and write state back."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.optim import coupling
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.group import membership_of, same_objects
from hfusion.optim.hyper import copy_vectors, read
from hfusion.optim.optimizer_rows import rearrange, width
from hfusion.optim.settings import ParamGroup


@dataclass(eq=False)
class GatheredState:
    """An optimizer ``part`` that steps some of the members of ``whole``, each as ``whole`` would.

    Attributes:
        params: maps each stack of parameters of ``whole`` to a stack of these members' rows, and shared parameters to
            themselves. Stacks in which none of these members has a row are missing.
    """

    whole: FusedOptimizer
    part: FusedOptimizer
    params: Mapping[Tensor, Tensor]

    @staticmethod
    def of(whole: FusedOptimizer, params: Mapping[Tensor, Tensor], rows: Sequence[int]) -> GatheredState:
        """Return the optimizer of members ``rows``. Raises FusionError in the same cases as `load`."""
        part = copy.copy(whole)
        part.param_groups, part.state = [], defaultdict(dict)
        gathered = GatheredState(whole, part, params)
        gathered.load(rows)
        return gathered

    def fits(self) -> bool:
        """Return whether the whole optimizer still has the parameters that this one was made for."""
        whole_params = [self._small(group) for group in self.whole.param_groups]
        part_params = [group["params"] for group in self.part.param_groups]
        return len(part_params) == len(whole_params) and all(map(same_objects, part_params, whole_params))

    @torch.no_grad()
    def load(self, rows: Sequence[int]) -> None:
        """Copy the current state and hyper-parameters of members ``rows`` from the whole optimizer.

        Raises:
            FusionError: the optimizer has step hooks, which expect the gradients of all members.
        """
        whole, part = self.whole, self.part
        if coupling.has_hooks(whole):
            raise FusionError(
                f"{type(whole).__name__} has a hook of its steps, which takes all members, and only rows {list(rows)} "
                "are to step: step all rows, or remove the hook; hf.Population clips by clip_norm= and clip_value="
            )
        if not part.param_groups:
            for group in whole.param_groups:
                read(group, whole.hypers, whole.members)
                new_group = {**group, "params": self._small(group)}
                copy_vectors(new_group)
                part.param_groups.append(new_group)
        if len(rows) != width(part):
            rearrange(part, [0] * len(rows), {})
        for whole_group, part_group in zip(whole.param_groups, part.param_groups, strict=True):
            keys = {"params", *(hyper.key for hyper in whole.hypers)}
            for key in whole_group.keys() - keys:
                value = whole_group[key]
                by_member = isinstance(value, Tensor) and value.shape == (whole.members,)
                part_group[key] = value[list(rows)] if by_member else value
        for param, small in self.params.items():
            if not membership_of(param).stacked and whole.state.get(param):
                part.state[small] = whole.state[param]
        part.put(range(len(rows)), {name: table.take(rows) for name, table in whole.tables().items()})

    def _small(self, group: ParamGroup) -> list[Tensor]:
        return [self.params[param] for param in group["params"] if param in self.params]

    def store(self, rows: Sequence[int]) -> None:
        """Write the state of the first ``len(rows)`` members of ``part`` into ``rows`` of the whole optimizer."""
        for param, small in self.params.items():
            if not membership_of(param).stacked and self.part.state.get(small):
                self.whole.state[param] = self.part.state[small]
        state = {
            name: table for name, table in self.part.tables().items() if table.columns and name.startswith("state/")
        }
        self.whole.put(rows, state)
