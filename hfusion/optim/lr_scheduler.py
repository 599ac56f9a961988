"""Schedulers whose arguments, metrics and decisions are the members' own.

The schedulers of torch.optim.lr_scheduler drive the vectors of an array as they drive one learning rate, so most need
nothing more. What is here is for those that decide on a value, or take arguments that differ between members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from hfusion.core.errors import FusionError
from hfusion.core.member_table import MemberTable, check_once, copied, kept_rows, rows_of
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.hyper import read

__all__ = ["OneCycleLR", "PerMember", "ReduceLROnPlateau"]


Make: TypeAlias = Callable[[Any], Any]
"""From an optimizer of one member to a scheduler of torch.optim.lr_scheduler for it."""


def one_for_each(make: Make | Sequence[Make], count: int) -> list[Make]:
    """Return one scheduler-making function per member. Raises ValueError unless ``make`` has one, or ``count``."""
    makes = [make] * count if callable(make) else list(make)
    if len(makes) != count:
        raise ValueError(f"{len(makes)} functions that make schedulers for {count} members: give one, or {count}")
    return makes


class MemberSchedule:
    """The scheduler of one member. A copy is independent of it, and in the same state.

    Attributes:
        make: the function that makes the scheduler.
        stand_in: an optimizer of a number per param group, which the scheduler drives. `PerMember` exchanges its
            hyper-parameters, which are its ``defaults``.
        scheduler: the scheduler; None until it is made.
    """

    def __init__(self, make: Make, defaults: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        self.make = make
        params = [{**group, "params": [torch.zeros((), device="cpu")]} for group in groups]
        self.stand_in = Optimizer(params, dict(defaults))
        # torch warns if a scheduler steps before its optimizer has; the stand-in itself never steps.
        self.stand_in._opt_called = True  # type: ignore[attr-defined]
        self.scheduler: Any = None

    def __reduce__(self) -> Any:
        # By copy.copy, too.
        return MemberSchedule, (self.make, self.stand_in.defaults, self.stand_in.param_groups), self.state()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.scheduler = self.make(self.stand_in)
        self.load(state)

    def begin(self, member: int) -> None:
        """Make the scheduler, at step 0. Raises ValueError or TypeError that name ``member``."""
        try:
            self.scheduler = self.make(self.stand_in)
        except (ValueError, AssertionError, TypeError) as error:
            raise ValueError(
                f"the scheduler of member {member} cannot be made: {str(error).rstrip('.')}. Where a list has a value "
                "per member, give one function for each member, or the class and its arguments, in which a list as "
                "milestones is a list of lists: PerMember(opt, OneCycleLR, max_lr=[...], total_steps=100)."
            ) from error
        if not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(
                f"the function that makes the scheduler of member {member} gave {type(self.scheduler).__name__}: let "
                "it give one of torch.optim.lr_scheduler, such as lambda opt: StepLR(opt, 10)"
            )

    def state(self) -> dict[str, Any]:
        """Return the state of the scheduler, and what torch keeps of it in the param groups beside hyper-parameters."""
        excluded = {"params", *self.stand_in.defaults}
        groups = [{k: v for k, v in group.items() if k not in excluded} for group in self.stand_in.param_groups]
        return copy.deepcopy({"scheduler": self.scheduler.state_dict(), "groups": groups})

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self.scheduler.load_state_dict(dict(copy.deepcopy(state["scheduler"])))
        for group, saved in zip(self.stand_in.param_groups, state["groups"], strict=True):
            group.update(copy.deepcopy(saved))


class PerMember(torch_schedulers.LRScheduler):
    """One scheduler of torch per member of an array, each with its own class, arguments and step count.

    ``make``: makes the scheduler of one member from a stand-in for its optimizer; or a list of B such functions; or,
    with ``options``, a class of torch. Options are lists, tuples or tensors of one value per member, or values for all:
    ``PerMember(opt, CyclicLR, base_lr=[0.01, 0.02], max_lr=0.1)``. If torch takes a list with a value for each param
    group, a member's value may be one. Call `keep`, `copy` and `append` on the optimizer first. Raises TypeError for an
    optimizer that is not of hf.optim, ValueError for a list whose length is not B, or arguments that torch refuses.

    Example:
        >>> import hfusion as hf, torch
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
        >>> fused = hf.build(lambda: torch.nn.Linear(2, 1), seeds=[0, 1])
        >>> opt = hf.optim.SGD(fused.parameters(), lr=1.0)
        >>> kinds = [lambda o: LinearLR(o, 0.25, total_iters=4), lambda o: CosineAnnealingLR(o, 10)]
        >>> schedule = hf.optim.lr_scheduler.PerMember(opt, kinds)
        >>> opt.param_groups[0]["lr"].tolist()
        [0.25, 1.0]
    """

    kind: ClassVar[type[torch_schedulers.LRScheduler] | None] = None
    optimizer: FusedOptimizer

    def __init__(self, optimizer: FusedOptimizer, make: Make | Sequence[Make] | None = None, **options: Any) -> None:
        if not isinstance(optimizer, FusedOptimizer):
            name = "a scheduler" if self.kind is None else self.kind.__name__
            raise TypeError(f"{type(optimizer).__name__} is no optimizer of hf.optim: use torch's {name}")
        self.optimizer = optimizer
        makes = self._resolve_makes(make, options, optimizer.members)
        self._initial_make = makes[0] if all(maker is makes[0] for maker in makes) else None
        self._members: list[MemberSchedule] = []
        self.table = MemberTable(0, {"schedule": self._members})
        self._begin(range(len(makes)), makes)

    def _resolve_makes(self, make: Make | Sequence[Make] | None, options: dict[str, Any], count: int) -> list[Make]:
        """Return the functions that make the schedulers of ``count`` members, from ``make`` and ``options``."""
        kind = self.kind if make is None else make
        if kind is None:
            raise ValueError(f"{type(self).__name__} needs a function that makes the scheduler of one member")
        if not options:
            return one_for_each(kind, count)
        if not callable(kind):
            raise ValueError(f"give options or a list of functions, not both: {next(iter(options))}")
        if not any(isinstance(value, list | tuple | Tensor) for value in options.values()):
            return [partial(kind, **options)] * count
        rows: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, value in options.items():
            column = value.tolist() if isinstance(value, Tensor) else value
            column = column if isinstance(column, list | tuple) else [column] * count
            if len(column) != count:
                raise ValueError(
                    f"{name} has {len(column)} values for an array of {count} members: give one, or {count}; a "
                    "member's may be a list of one for each param group"
                )
            for row, item in zip(rows, column, strict=True):
                row[name] = float(item) if isinstance(item, Tensor) else item
        return [partial(kind, **row) for row in rows]

    def _begin(self, rows: Sequence[int], makes: Sequence[Make]) -> None:
        """Create the schedulers of members ``rows``, at step 0 and with the current hyper-parameters."""
        hypers = {hyper.key: 0.0 if hyper.index is None else (0.0, 0.0) for hyper in self.optimizer.hypers}
        for row, make in zip(rows, makes, strict=True):
            # A row behind the last one is added.
            self._members[row : row + 1] = [MemberSchedule(make, hypers, [{}] * len(self.optimizer.param_groups))]
        self.table.rows = len(self._members)
        self._pull()
        for row in rows:
            self._members[row].begin(row)
        self._push()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the schedules of members ``rows`` only, in this order."""
        self.table.arrange(kept_rows(rows, self.table.rows))

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Give members ``dst`` copies of the schedules of ``src``, at the same step."""
        self.table.arrange(copied(src, dst, self.table.rows))

    def append(self, count: int = 1, make: Make | Sequence[Make] | None = None, **options: Any) -> None:
        """Add ``count`` members at step 0; without ``make`` and options, with the schedule all others began with."""
        if make is None and not options and (make := self._initial_make) is None:
            raise ValueError("the members' schedules differ: say what those of members that join are, make=...")
        self._begin(range(self.table.rows, self.table.rows + count), self._resolve_makes(make, options, count))

    def restart(self, rows: int | Sequence[int], make: Make | Sequence[Make] | None = None, **options: Any) -> None:
        """Restart members ``rows`` at step 0; without ``make`` and options, with the schedules that they had."""
        fresh = rows_of(rows, self.table.rows)
        if make is None and not options:
            make = [self._members[row].make for row in fresh]
        self._begin(fresh, self._resolve_makes(make, options, len(fresh)))

    def load_member(self, row: int, state: Mapping[str, Any]) -> None:
        """Restore one member's scheduler from the result of `member_state`."""
        self._pull()
        self._members[row].load(state)

    def member_state(self, row: int) -> dict[str, Any]:
        """The state of one member's scheduler, and what torch keeps of a schedule in the param groups."""
        return self._members[row].state()

    @property
    def kinds(self) -> list[str]:
        """The class of each member's scheduler."""
        return [type(member.scheduler).__name__ for member in self._members]

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The step count of the first member, as in torch; see ``last_epochs``."""
        return int(self.last_epochs[0])

    @property
    def last_epochs(self) -> Tensor:
        """The step counts of the members' schedulers: ``[B]``."""
        return torch.tensor([member.scheduler.last_epoch for member in self._members], device="cpu")

    @property
    def base_lrs(self) -> list[Tensor]:  # type: ignore[override]
        """The initial learning rates, for each param group ``[B]``."""
        rates = zip(*(member.scheduler.base_lrs for member in self._members), strict=True)
        return [torch.tensor([float(rate) for rate in group], dtype=torch.float64, device="cpu") for group in rates]

    def get_last_lr(self) -> list[Tensor]:  # type: ignore[override]
        """Return the current learning rates, for each param group ``[B]``."""
        rates = (member.scheduler.get_last_lr() for member in self._members)
        return [torch.tensor(group, dtype=torch.float64, device="cpu") for group in zip(*rates, strict=True)]

    @property
    def takes_metrics(self) -> list[bool]:
        """The members that have a ReduceLROnPlateau of torch."""
        return [isinstance(member.scheduler, torch_schedulers.ReduceLROnPlateau) for member in self._members]

    def step(
        self,
        epoch: int | None = None,
        *,
        rows: Sequence[int] | None = None,
        metrics: Tensor | Sequence[float] | None = None,
    ) -> None:
        """Step the schedulers of all members, or of ``rows``; ``metrics [B]``: for each ReduceLROnPlateau of torch."""
        asking = self.takes_metrics
        if metrics is None and any(asking):
            raise ValueError(f"member {asking.index(True)} has a ReduceLROnPlateau: give step metrics, one per member")
        values = torch.as_tensor([0.0] * len(asking) if metrics is None else metrics, dtype=torch.float64, device="cpu")
        if values.shape != (len(asking),):
            raise ValueError(
                f"metrics have shape {list(values.shape)} for an array of {len(asking)} members: give one "
                "number per member, such as the losses of hf.per_model"
            )
        numbers, epochs = values.tolist(), () if epoch is None else (epoch,)
        chosen = range(self.table.rows) if rows is None else rows_of(rows, self.table.rows)
        check_once(chosen)
        self._pull()
        for row in chosen:
            self._members[row].scheduler.step(*([numbers[row]] if asking[row] else []), *epochs)
        self._push()

    def state_dict(self) -> dict[str, Any]:
        """The state of every member's scheduler, with what torch keeps of a schedule in the param groups."""
        return {"members": [member.state() for member in self._members]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; FusionError if it is of another number of members."""
        members = state_dict["members"]
        if len(members) != len(self._members):
            state = f"the state of {type(self).__name__} of {len(members)} members"
            raise FusionError(f"{state} does not fit one of {len(self._members)}")
        self._pull()
        for member, saved in zip(self._members, members, strict=True):
            member.load(saved)

    def _pull(self) -> None:
        """Copy the hyper-parameters and the number of param groups from the array's optimizer to the stand-ins."""
        for index, group in enumerate(self.optimizer.param_groups):
            _, columns = read(group, self.optimizer.hypers, self.table.rows)
            for member, stand_in in enumerate(schedule.stand_in for schedule in self._members):
                if index == len(stand_in.param_groups):
                    stand_in.add_param_group({"params": [torch.zeros((), device="cpu")]})
                stand_in_group = stand_in.param_groups[index]
                for hyper, column in zip(self.optimizer.hypers, columns, strict=True):
                    hyper.put(stand_in_group, column[member])

    def _push(self) -> None:
        """Copy the hyper-parameters that schedulers have written in the stand-ins to the array's optimizer."""
        for index, group in enumerate(self.optimizer.param_groups):
            vectors, _ = read(group, self.optimizer.hypers, self.table.rows)
            for hyper, vector in zip(self.optimizer.hypers, vectors, strict=True):
                numbers = [float(hyper.get(schedule.stand_in.param_groups[index])) for schedule in self._members]
                vector.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))


class ReduceLROnPlateau(PerMember, torch_schedulers.ReduceLROnPlateau):
    """torch.optim.lr_scheduler.ReduceLROnPlateau for each member separately: ``step(metrics)`` with metrics ``[B]``."""

    kind = torch_schedulers.ReduceLROnPlateau

    def step(  # type: ignore[override]
        self, metrics: Tensor | Sequence[float], epoch: int | None = None, *, rows: Sequence[int] | None = None
    ) -> None:
        """Record one metric per member, and reduce the learning rates of members that have reached a plateau.

        ``rows``: the members to step, by default all.
        """
        super().step(epoch, rows=rows, metrics=metrics)

    @property
    def in_cooldown(self) -> Tensor:
        """Bool ``[B]``: true for members in cooldown after a reduction."""
        return torch.tensor([member.scheduler.in_cooldown for member in self._members], device="cpu")


class OneCycleLR(PerMember, torch_schedulers.OneCycleLR):
    """torch.optim.lr_scheduler.OneCycleLR with a ``max_lr``, and every other argument, for each member.

    With several param groups a member's ``max_lr`` is a list, a value for each: ``[[lr / 10, lr] for lr in rates]``.
    """

    kind = torch_schedulers.OneCycleLR

    def __init__(self, optimizer: FusedOptimizer, max_lr: float | Sequence[float] | Tensor, **options: Any) -> None:
        super().__init__(optimizer, max_lr=max_lr, **options)
