"""Options that the groups of a population share, and what a group gets of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hfusion.core.member_table import MemberTable
from hfusion.core.row_indices import is_row
from hfusion.core.step_arguments import Compile, check_loss_function
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.hyper import HyperValue, member_vector, plain
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.optim.optimizer_rows import made_for_rows
from hfusion.population.members import History

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
        initial: by the name of such a column the value that all members began with, the default of joining members;
            None where they differed. A limit is missing where nothing is clipped by it.
        initial_hypers: after a load, the hyper-parameters of each param group that the saved members once began with;
            None: those that ``optimizer`` sets.
        history: of the population.
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
        self.numbers = MemberTable(
            total, check_numbers(total, clip_norm=clip_norm, clip_value=clip_value, accumulate=accumulate)
        )
        columns = self.numbers.columns.items()
        self.initial: dict[str, Any] = {
            name: column[0].item() if bool((column == column[0]).all()) else None for name, column in columns
        }
        self.initial_hypers: list[dict[str, float | None]] | None = None
        self.history = History()

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


def check_numbers(rows: int, **given: Any) -> dict[str, Tensor]:
    """Return the numbers that are not None, as a column ``[rows]`` each.

    Args:
        rows: the number of members.
        given: ``accumulate``, and limits of gradients: one value, or one for each member.

    Raises:
        ValueError: a wrong number of values, a limit below 0, or ``accumulate`` below 1.
    """
    columns = {}
    for name, value in given.items():
        if name == "accumulate":
            calls = value.tolist() if isinstance(value, Tensor) else value
            calls = [calls] * rows if isinstance(calls, int) else list(calls or ())
            if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in calls):
                raise ValueError(f"accumulate={value}: at least one call of step makes an update, and a whole number")
            if len(calls) != rows:
                raise ValueError(f"accumulate has {len(calls)} values for {rows} members: give one, or one for each")
            columns[name] = torch.tensor(calls, dtype=torch.int64, device="cpu")
        elif value is not None:
            columns[name] = plain(member_vector(name, value, rows))
            if not bool((columns[name] >= 0).all()):
                raise ValueError(f"{name}={columns[name].tolist()}: every limit must be at least 0")
    return columns
