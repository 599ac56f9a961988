"""Options that the groups of a population share, and what a group gets of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hfusion.core.loss_checks import check_loss_function
from hfusion.core.member_table import MemberTable
from hfusion.core.row_indices import is_row
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.hyper import HyperValue, member_vector, plain
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.optim.optimizer_rows import made_for_rows
from hfusion.step.compile_mode import Compile

OnNonfinite = Literal["freeze", "raise", "ignore"]

LIMITS = ("clip_norm", "clip_value")
"""The columns of bounds of the members' gradients, float64 ``[rows]``: of their norm, and of their magnitude."""


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
        self.initial_hypers: list[dict[str, float | None]] | None = None

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
        optimizer = made_for_rows(lambda params: self.optimizer(iter(params)), params, rows, self.total)
        if not isinstance(optimizer, FusedOptimizer):
            raise ValueError(
                f"optimizer gave {type(optimizer).__name__}, whose state has no rows: give one of hf.optim"
            )
        if self.initial_hypers is not None and len(self.initial_hypers) == len(optimizer.initial_values):
            optimizer.initial_values = copy.deepcopy(self.initial_hypers)
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


def check_limits(rows: int, **given: HyperValue | None) -> dict[str, Tensor]:
    """Return the limits that are given, by name. Raises ValueError for a wrong number of values, or a value below 0."""
    limits = {}
    for name, value in given.items():
        if value is not None:
            limits[name] = values = plain(member_vector(name, value, rows))
            if not bool((values >= 0).all()):
                raise ValueError(f"{name}={values.tolist()}: every limit must be at least 0")
    return limits


def common_value(values: Tensor) -> Any:
    """Return the value that all rows have; None if they differ."""
    return values[0].item() if bool((values == values[0]).all()) else None


def limits_of_new(initial: Mapping[str, float | None], **given: HyperValue | None) -> dict[str, Tensor]:
    """Return the limits of a member that starts; one that is not given is what all members began with.

    ``initial``: the limits that all members began with, by name; None where they differed.

    Raises ValueError for None if members began with different limits, or for a limit that the population lacks.
    """
    for name, value in given.items():
        if name not in initial and value is not None:
            raise ValueError(f"{name}={value}: this population has no {name}; give it one when it is made")
        if name in initial and value is None and initial[name] is None:
            raise ValueError(
                f"{name} differs between the members: say what it is for those that join, {name}=...; "
                'float("inf") clips nothing'
            )
    return check_limits(1, **{name: initial[name] if given[name] is None else given[name] for name in initial})


def check_calls(calls: int | Sequence[int] | Tensor | None, members: int) -> Tensor:
    """Return how many calls make an update, int64 ``[members]``. Raises ValueError for invalid or too few ``calls``."""
    values = calls.tolist() if isinstance(calls, Tensor) else calls
    values = [values] * members if isinstance(values, int) else list(values or ())
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in values):
        raise ValueError(f"accumulate={calls}: at least one call of step makes an update, and a whole number of them")
    if len(values) != members:
        raise ValueError(f"accumulate has {len(values)} values for {members} members: give one, or one for each")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
