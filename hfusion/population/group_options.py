"""Options that the groups of a population share, and what a group gets of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfusion.core.loss_checks import check_loss_function
from hfusion.core.member_table import MemberTable
from hfusion.core.row_indices import is_row
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import HyperValue, read
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.population.accumulation import check_calls
from hfusion.population.update_guard import OnNonfinite, check_limits, common_value
from hfusion.step.compile_mode import Compile

if TYPE_CHECKING:
    from hfusion.population.training_group import TrainingGroup


class GroupOptions:
    """The arguments of a population.

    Attributes:
        total: the number of initial members, which is the length of optimizer options with a value per member.
        schedules: the function that makes each initial member's scheduler; None without schedulers.
        scaler: the scaler, with the scales of the initial members; None without one.
        numbers: the gradient limits and the numbers of calls per update of the initial members, in columns.
        initial_limits, initial_calls: those that all members began with, the defaults of joining members; None where
            they differed. A limit is missing where nothing is clipped by it.
        initial_hypers: after a load, the hyper-parameters of each param group that the saved members once began with;
            None: those that ``optimizer`` sets.
        others: see `hfusion.Population`.

    Raises:
        ValueError: a list without ``total`` values, or a loss of `hfusion.per_model`.
    """

    def __init__(
        self,
        total: int,
        *,
        optimizer: Callable[[Any], FusedOptimizer],
        loss: Callable[..., Any],
        scheduler: Make | Sequence[Make] | None = None,
        scaler: GradScaler | None = None,
        clip_norm: HyperValue | None = None,
        clip_value: HyperValue | None = None,
        accumulate: int | Sequence[int] = 1,
        on_nonfinite: OnNonfinite = "freeze",
        compile: Compile = None,
        memory: str | int | None = None,
        processes: int = 1,
    ) -> None:
        check_loss_function(loss)
        if not callable(optimizer):
            kind = type(optimizer).__name__
            raise ValueError(f"optimizer must be a function that makes one from parameters, got {kind}")
        if not is_row(processes) or processes < 0:
            raise ValueError(
                f"processes={processes!r}: give a whole number of processes, such as 2. 1 is this one alone."
            )
        if on_nonfinite not in ("freeze", "raise", "ignore"):
            raise ValueError(f'on_nonfinite={on_nonfinite!r}: it is "freeze", "raise" or "ignore"')
        self.total, self.optimizer, self.loss, self.on_nonfinite = total, optimizer, loss, on_nonfinite
        self.compile, self.memory, self.processes = compile, memory, processes
        self.schedules = None if scheduler is None else tuple(one_for_each(scheduler, total))
        self.scaler = copy.deepcopy(scaler)
        if self.scaler is not None:
            self.scaler.begin(total)
        limits = check_limits(total, clip_norm=clip_norm, clip_value=clip_value)
        self.numbers = MemberTable(total, {**limits, "calls": check_calls(accumulate, total)})
        self.initial_limits: dict[str, float | None] = {name: common_value(v) for name, v in limits.items()}
        self.initial_calls: int | None = common_value(self.numbers["calls"])
        self.initial_hypers: tuple[Mapping[str, float | None], ...] | None = None

    def with_initial_values(self, group: TrainingGroup) -> GroupOptions:
        """Return the options with the initial values of ``group``, which joining members get by default."""
        options = copy.copy(self)
        options.scaler = copy.deepcopy(self.scaler)
        if options.scaler is not None and group.scaler is not None:
            options.scaler.initial_values = dict(group.scaler.initial_values)
        options.initial_hypers = tuple(map(dict, group.optimizer.initial_values))
        options.initial_limits, options.initial_calls = group.initial_limits, group._updates.initial_calls
        return options

    def schedule_of_new(self, scheduler: Make | None) -> Make | None:
        """Return the scheduler function of a joining member. Raises ValueError if it is missing or not allowed."""
        if self.schedules is None:
            if scheduler is not None:
                raise ValueError("scheduler: this population has none; give it one when it is made")
            return None
        if scheduler is None and any(make is not self.schedules[0] for make in self.schedules):
            raise ValueError("the members' schedules differ: say what those of members that join are, scheduler=...")
        return scheduler or self.schedules[0]

    def optimizer_of(self, module: Any, rows: Sequence[int]) -> FusedOptimizer:
        """Make the optimizer of a group whose members began in ``rows``. Raises ValueError for one of another kind.

        Of options with a value for each of ``total`` members, such as learning rates, the group gets those of ``rows``.
        """
        params = list(module.parameters())
        everybody = list(rows) == list(range(self.total))
        marks = [membership_of(param) for param in params]
        for param, mark in zip(params, marks, strict=True):
            param._hfusion_membership = replace(mark, members=self.total)
        try:
            optimizer = self.optimizer(iter(params))
        finally:
            for param, mark in zip(params, marks, strict=True):
                param._hfusion_membership = mark
        if not isinstance(optimizer, FusedOptimizer):
            raise ValueError(
                f"optimizer gave {type(optimizer).__name__}, whose state has no rows: give one of hf.optim"
            )
        for param_group in () if everybody else optimizer.param_groups:
            # Makes the param group hold a vector of each hyper-parameter.
            read(param_group, optimizer.hypers, self.total)
            for hyper in optimizer.hypers:
                held = param_group[hyper.key]
                if hyper.index is None:
                    param_group[hyper.key] = held[list(rows)].clone()
                else:
                    pair = list(held)
                    pair[hyper.index] = pair[hyper.index][list(rows)].clone()
                    param_group[hyper.key] = tuple(pair)
        if self.initial_hypers is not None and len(self.initial_hypers) == len(optimizer.initial_values):
            optimizer.initial_values = [dict(values) for values in self.initial_hypers]
        return optimizer

    def scaler_of(self, rows: Sequence[int]) -> GradScaler | None:
        """Return a scaler with the scales of members that began in ``rows``."""
        return None if self.scaler is None else self.scaler.of_rows(rows)


def value_of(name: str, value: Any, index: int, count: int, *, pair: bool = False) -> Any:
    """Return the value for one of ``count`` joining members, from one for all or a list. Raises ValueError."""
    if pair and isinstance(value, tuple | list) and len(value) == 2:
        return tuple(value_of(name, item, index, count) for item in value)
    several = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)
    if not several:
        return value
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} members that join: give one value, or {count}")
    return float(value[index]) if isinstance(value[index], torch.Tensor) else value[index]
