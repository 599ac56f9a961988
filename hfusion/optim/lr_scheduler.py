"""Schedulers whose arguments, metrics and decisions are the members' own.

The schedulers of torch.optim.lr_scheduler drive the vectors of an array as they drive one learning rate, so most need
nothing more. What is here is for those that decide on a value, or take arguments that differ between members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from hfusion.core.errors import FusionError
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.hyper import read

__all__ = ["OneCycleLR", "PerMember", "ReduceLROnPlateau"]


class PerMember(torch_schedulers.LRScheduler):
    """One scheduler of torch for each member of an array; a subclass names its class in ``kind``.

    ``options``: those of torch's class. A list, tuple or tensor holds one value per member, anything else is for all.
    Raises TypeError for an optimizer of others, ValueError for a list of another length than B.
    """

    kind: ClassVar[type[torch_schedulers.LRScheduler]]

    def __init__(self, optimizer: FusedOptimizer, **options: Any) -> None:
        if not isinstance(optimizer, FusedOptimizer):
            raise TypeError(f"{type(optimizer).__name__} is no optimizer of hf.optim: use torch's {self.kind.__name__}")
        self.optimizer = optimizer
        values = {name: _each(name, value, optimizer.members) for name, value in options.items()}
        self._stand_ins = [_stand_in(optimizer, member) for member in range(optimizer.members)]
        self._pull()
        self._schedulers: list[Any] = []
        for member, stand_in in enumerate(self._stand_ins):
            self._schedulers.append(self.kind(stand_in, **{name: value[member] for name, value in values.items()}))
            # Torch warns of a step before the first one of the optimizer, which is another one here.
            stand_in._opt_called = True  # type: ignore[attr-defined]
        self._push()

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """As of torch's schedulers; all members are at the same."""
        found: int = self._schedulers[0].last_epoch
        return found

    @property
    def base_lrs(self) -> list[Tensor]:  # type: ignore[override]
        """As of torch's schedulers: for each param group ``[B]``."""
        rates = zip(*(scheduler.base_lrs for scheduler in self._schedulers), strict=True)
        return [torch.tensor([float(rate) for rate in group], dtype=torch.float64) for group in rates]

    def get_last_lr(self) -> list[Tensor]:  # type: ignore[override]
        """The learning rates that were set last, for each param group ``[B]``."""
        rates = zip(*(scheduler.get_last_lr() for scheduler in self._schedulers), strict=True)
        return [torch.tensor(group, dtype=torch.float64) for group in rates]

    def step(self, epoch: int | None = None) -> None:
        """One step of every member's scheduler."""
        self._step([()] * len(self._schedulers) if epoch is None else [(epoch,)] * len(self._schedulers))

    def _step(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._pull()
        for scheduler, own in zip(self._schedulers, arguments, strict=True):
            scheduler.step(*own)
        self._push()

    def state_dict(self) -> dict[str, Any]:
        """The state of every member's scheduler, with what torch keeps of a schedule in the param groups."""
        keys = {hyper.key for hyper in self._hypers} | {"params"}
        groups = [
            [{key: value for key, value in group.items() if key not in keys} for group in stand_in.param_groups]
            for stand_in in self._stand_ins
        ]
        return {"members": [scheduler.state_dict() for scheduler in self._schedulers], "groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; FusionError if it is of another number of members."""
        members = state_dict["members"]
        if len(members) != len(self._schedulers):
            raise FusionError(
                f"the state of a {type(self).__name__} of {len(members)} members does not fit one of "
                f"{len(self._schedulers)}"
            )
        self._pull()
        for scheduler, stand_in, own, groups in zip(
            self._schedulers, self._stand_ins, members, state_dict["groups"], strict=True
        ):
            scheduler.load_state_dict(dict(own))
            for group, saved in zip(stand_in.param_groups, groups, strict=True):
                group.update(saved)

    @property
    def _hypers(self) -> Any:
        return self.optimizer.hypers  # type: ignore[attr-defined]

    def _pull(self) -> None:
        """Let the stand-ins have the hyper-parameters that the array's optimizer has now, in as many groups."""
        for index, group in enumerate(self.optimizer.param_groups):
            _, columns = read(group, self._hypers, len(self._stand_ins))
            for member, stand_in in enumerate(self._stand_ins):
                if index == len(stand_in.param_groups):
                    stand_in.add_param_group({"params": [torch.zeros(())]})
                own = stand_in.param_groups[index]
                for hyper, column in zip(self._hypers, columns, strict=True):
                    _write(own, hyper.key, hyper.index, column[member])

    def _push(self) -> None:
        """Give the array's optimizer what the schedulers have written."""
        for index, group in enumerate(self.optimizer.param_groups):
            vectors, _ = read(group, self._hypers, len(self._stand_ins))
            for hyper, vector in zip(self._hypers, vectors, strict=True):
                values = [stand_in.param_groups[index][hyper.key] for stand_in in self._stand_ins]
                own = values if hyper.index is None else [value[hyper.index] for value in values]
                vector.copy_(torch.tensor([float(value) for value in own], dtype=torch.float64))


class ReduceLROnPlateau(PerMember, torch_schedulers.ReduceLROnPlateau):
    """torch.optim.lr_scheduler.ReduceLROnPlateau for every member by itself: ``step(metrics)`` with metrics ``[B]``."""

    kind = torch_schedulers.ReduceLROnPlateau

    def step(self, metrics: Tensor | Sequence[float], epoch: int | None = None) -> None:  # type: ignore[override]
        """Note one metric per member, and reduce the learning rates of those that got no better for too long."""
        values = torch.as_tensor(metrics).detach()
        if values.shape != (len(self._schedulers),):
            raise ValueError(
                f"metrics have shape {list(values.shape)} for an array of {len(self._schedulers)} members: give one "
                "number per member, such as the losses of hf.per_model"
            )
        self._step([(value,) if epoch is None else (value, epoch) for value in values.tolist()])

    @property
    def in_cooldown(self) -> Tensor:
        """Whether the members wait after a reduction: bool ``[B]``."""
        return torch.tensor([scheduler.in_cooldown for scheduler in self._schedulers])


class OneCycleLR(PerMember, torch_schedulers.OneCycleLR):
    """torch.optim.lr_scheduler.OneCycleLR with a ``max_lr``, and every other argument, of each member's own."""

    kind = torch_schedulers.OneCycleLR

    def __init__(self, optimizer: FusedOptimizer, max_lr: float | Sequence[float] | Tensor, **options: Any) -> None:
        super().__init__(optimizer, max_lr=max_lr, **options)


def _each(name: str, value: Any, members: int) -> list[Any]:
    """``value`` for each member."""
    if isinstance(value, Tensor) and value.dim():
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [value] * members
    if len(value) != members:
        raise ValueError(f"{name} has {len(value)} values for an array of {members} members: give one, or {members}")
    return [float(one) if isinstance(one, Tensor) else one for one in value]


def _stand_in(optimizer: FusedOptimizer, member: int) -> Optimizer:
    """An optimizer of nothing, whose param groups hold the hyper-parameters of one member."""
    groups = [{"params": [torch.zeros(())]} for _ in optimizer.param_groups]
    return Optimizer(groups, {hyper.key: 0.0 for hyper in optimizer.hypers})


def _write(group: dict[str, Any], key: str, index: int | None, value: float) -> None:
    if index is None:
        group[key] = value
    else:
        pair = list(group[key]) if isinstance(group[key], tuple) else [0.0, 0.0]
        pair[index] = value
        group[key] = tuple(pair)
