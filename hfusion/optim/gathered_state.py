"""An optimizer of some members of an array: gather their rows of state and hyper-parameters, and write state back."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.row_indices import write_rows
from hfusion.optim import coupling
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.group import membership_of, same_objects
from hfusion.optim.hyper import copy_vectors, plain, read
from hfusion.optim.optimizer_rows import write_hyper
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
        for whole_group, part_group in zip(whole.param_groups, part.param_groups, strict=True):
            self._load_group(whole_group, part_group, list(rows))
            for param in whole_group["params"]:
                if param in self.params:
                    self._load_state(param, rows)

    def _small(self, group: ParamGroup) -> list[Tensor]:
        return [self.params[param] for param in group["params"] if param in self.params]

    def _load_group(self, whole_group: ParamGroup, part_group: ParamGroup, rows: list[int]) -> None:
        whole = self.whole
        vectors, _ = read(whole_group, whole.hypers, whole.members)
        keys = {"params", *(hyper.key for hyper in whole.hypers)}
        for key, value in whole_group.items():
            if key not in keys:
                by_member = isinstance(value, Tensor) and value.shape == (whole.members,)
                part_group[key] = value[rows] if by_member else value
        for hyper, vector in zip(whole.hypers, vectors, strict=True):
            write_hyper(part_group, hyper, plain(vector)[rows])

    def _load_state(self, param: Tensor, rows: Sequence[int]) -> None:
        whole, part, small = self.whole, self.part, self.params[param]
        entry = whole.state.get(param)
        if entry is None:
            part.state.pop(small, None)
            return
        if not membership_of(param).stacked:
            part.state[small] = entry
            return
        part_state = part.state[small]
        for name in part_state.keys() - entry.keys():
            del part_state[name]
        for name, value in entry.items():
            chosen = value.index_select(0, torch.tensor(list(rows), device=value.device))
            current = part_state.get(name)
            if current is not None and (current.shape, current.dtype) == (chosen.shape, chosen.dtype):
                current.copy_(chosen)
            else:
                part_state[name] = chosen

    @torch.no_grad()
    def store(self, rows: Sequence[int]) -> None:
        """Write the state of the first ``len(rows)`` members of ``part`` into ``rows`` of the whole optimizer."""
        whole, part = self.whole, self.part
        for group in whole.param_groups:
            settings: Any = None
            for param in group["params"]:
                part_state = part.state.get(self.params[param]) if param in self.params else None
                if not part_state:
                    continue
                if not membership_of(param).stacked:
                    whole.state[param] = part_state
                    continue
                if param not in whole.state or part_state.keys() - whole.state[param].keys():
                    # Members that are not in ``rows`` get the state from before their first step.
                    settings = settings or whole._settings(group)
                    whole._state(param, settings)
                for name, value in part_state.items():
                    write_rows(whole.state[param][name], rows, value[: len(rows)])
