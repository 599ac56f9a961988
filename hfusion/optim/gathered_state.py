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
from hfusion.core.row_indices import cut_rows, write_rows
from hfusion.optim import coupling
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.group import membership_of, same_objects
from hfusion.optim.hyper import own, plain, read
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
        theirs = [self._small(group) for group in self.whole.param_groups]
        ours = [group["params"] for group in self.part.param_groups]
        return len(ours) == len(theirs) and all(map(same_objects, ours, theirs))

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
                mine = {**group, "params": self._small(group)}
                own(mine)
                part.param_groups.append(mine)
        for theirs, ours in zip(whole.param_groups, part.param_groups, strict=True):
            self._load_group(theirs, ours, list(rows))
            for param in theirs["params"]:
                if param in self.params:
                    self._load_state(param, rows)

    def _small(self, group: ParamGroup) -> list[Tensor]:
        return [self.params[param] for param in group["params"] if param in self.params]

    def _load_group(self, theirs: ParamGroup, ours: ParamGroup, rows: list[int]) -> None:
        whole = self.whole
        vectors, _ = read(theirs, whole.hypers, whole.members)
        keys = {"params", *(hyper.key for hyper in whole.hypers)}
        for key, value in theirs.items():
            if key not in keys:
                by_member = isinstance(value, Tensor) and value.shape == (whole.members,)
                ours[key] = value[rows] if by_member else value
        for hyper, vector in zip(whole.hypers, vectors, strict=True):
            write_hyper(ours, hyper, plain(vector)[rows])

    def _load_state(self, param: Tensor, rows: Sequence[int]) -> None:
        whole, part, small = self.whole, self.part, self.params[param]
        entry = whole.state.get(param)
        if entry is None:
            part.state.pop(small, None)
            return
        if not membership_of(param).stacked:
            part.state[small] = entry
            return
        ours = part.state[small]
        for name in ours.keys() - entry.keys():
            del ours[name]
        for name, value in entry.items():
            own = cut_rows(value, small.shape[1:])
            chosen = own.index_select(0, torch.tensor(list(rows), device=value.device))
            known = ours.get(name)
            if known is not None and (known.shape, known.dtype) == (chosen.shape, chosen.dtype):
                known.copy_(chosen)
            else:
                ours[name] = chosen

    @torch.no_grad()
    def store(self, rows: Sequence[int]) -> None:
        """Write the state of the first ``len(rows)`` members of ``part`` into ``rows`` of the whole optimizer."""
        whole, part = self.whole, self.part
        for group in whole.param_groups:
            settings: Any = None
            for param in group["params"]:
                ours = part.state.get(self.params[param]) if param in self.params else None
                if not ours:
                    continue
                if not membership_of(param).stacked:
                    whole.state[param] = ours
                    continue
                if param not in whole.state or ours.keys() - whole.state[param].keys():
                    # Members that are not in ``rows`` get the state from before their first step.
                    settings = settings or whole._settings(group)
                    whole._state(param, settings)
                for name, value in ours.items():
                    write_rows(whole.state[param][name], rows, value[: len(rows)])
