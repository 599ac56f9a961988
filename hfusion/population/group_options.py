"""Options that the groups of a population share, and the construction of a group from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hfusion.core.loss_checks import check_loss_function
from hfusion.core.row_indices import is_row
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, PerMember, one_for_each
from hfusion.optim.optimizer_rows import rearrange as rearrange_optimizer
from hfusion.population.accumulation import Accumulation
from hfusion.population.moving import MemberState, group_optimizer, put
from hfusion.population.plain_member import PlainMember
from hfusion.population.plain_module import PlainModule
from hfusion.population.population import ArrayGroup
from hfusion.population.update_guard import Limits, OnNonfinite
from hfusion.step.compile_mode import Compile


@dataclass(frozen=True, eq=False)
class GroupOptions:
    """The arguments of a population of any models.

    Attributes:
        total: the number of initial members, which is the length of optimizer options with a value per member.
        schedules: the function that makes each initial member's scheduler; None without schedulers.
        scaler: the scaler, with the scales of the initial members; None without one.
        limits: the gradient limits of the initial members.
        updates: the numbers of calls per update of the initial members.
        initial_hypers: after a load, the hyper-parameters of each param group that the saved members once began with;
            None: those that ``optimizer`` sets.
        others: see `hfusion.Population`.
    """

    total: int
    optimizer: Callable[[Any], FusedOptimizer]
    loss: Callable[..., Any]
    schedules: tuple[Make, ...] | None
    scaler: GradScaler | None
    limits: Limits
    updates: Accumulation
    on_nonfinite: OnNonfinite
    compile: Compile
    memory: str | int | None = None
    processes: int | None = None
    initial_hypers: tuple[Mapping[str, float | None], ...] | None = None

    @staticmethod
    def of_arguments(
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
        processes: int | None = None,
    ) -> GroupOptions:
        """Create options. Raises ValueError for a list without ``total`` values, or a loss of `hfusion.per_model`."""
        check_loss_function(loss)
        if not callable(optimizer):
            kind = type(optimizer).__name__
            raise ValueError(f"optimizer must be a function that makes one from parameters, got {kind}")
        if processes is not None and (not is_row(processes) or processes < 0):
            raise ValueError(f"processes={processes!r}: a whole number of processes, or None for one for each core")
        schedules = None if scheduler is None else tuple(one_for_each(scheduler, total))
        started_scaler = copy.deepcopy(scaler)
        if started_scaler is not None:
            started_scaler.begin(total)
        limits = Limits.of(clip_norm, clip_value, total)
        updates = Accumulation.of(accumulate, total)
        options = optimizer, loss, schedules, started_scaler, limits, updates, on_nonfinite, compile, memory, processes
        return GroupOptions(total, *options)

    def with_initial_values(self, group: ArrayGroup) -> GroupOptions:
        """Return the options with the initial values of ``group``, which joining members get by default."""
        limits = self.limits
        for name in ("norm", "value"):
            limit, group_limit = getattr(limits, name), getattr(group._limits, name)
            if limit is not None and group_limit is not None:
                limits = replace(limits, **{name: replace(limit, initial_value=group_limit.initial_value)})
        scaler = copy.deepcopy(self.scaler)
        if scaler is not None and group.scaler is not None:
            scaler.initial_values = dict(group.scaler.initial_values)
        updates = replace(self.updates, initial_calls=group._updates.initial_calls)
        initial_hypers = tuple(map(dict, group.optimizer.initial_values))
        return replace(self, limits=limits, scaler=scaler, updates=updates, initial_hypers=initial_hypers)

    def _set_initial_values(self, group: ArrayGroup) -> None:
        """Set the values that a group uses as defaults of joining members: those that all members began with."""
        group._updates.initial_calls = self.updates.initial_calls
        if self.initial_hypers is not None and len(self.initial_hypers) == len(group.optimizer.initial_values):
            group.optimizer.initial_values = [dict(values) for values in self.initial_hypers]

    def schedule_of_new(self, scheduler: Make | None) -> Make | None:
        """Return the scheduler function of a joining member. Raises ValueError if it is missing or not allowed."""
        if self.schedules is None:
            if scheduler is not None:
                raise ValueError("scheduler: this population has none; give it one when it is made")
            return None
        if scheduler is None and any(make is not self.schedules[0] for make in self.schedules):
            raise ValueError("the members' schedules differ: say what those of members that join are, scheduler=...")
        return scheduler or self.schedules[0]

    def array(self, models: Sequence[nn.Module] | PlainModule, rows: Sequence[int]) -> ArrayGroup:
        """Create a group of the models that the population begins with in ``rows``."""
        kind = PlainMember if isinstance(models, PlainModule) else ArrayGroup
        group = kind(
            cast(Any, models),
            optimizer=group_optimizer(self.optimizer, self.total, rows),
            loss=self.loss,
            scheduler=None if self.schedules is None else [self.schedules[row] for row in rows],
            scaler=self._scaler(rows),
            accumulate=self.updates.calls[list(rows)],
            on_nonfinite=self.on_nonfinite,
            compile=self.compile,
            memory=self.memory,
        )
        group._limits = self.limits.rearranged(rows)
        self._set_initial_values(group)
        return group

    def _scaler(self, rows: Sequence[int]) -> GradScaler | None:
        scaler = copy.deepcopy(self.scaler)
        if scaler is not None:
            scaler.rearrange(rows)
        return scaler

    def joining(
        self,
        model: nn.Module,
        shared: Collection[int],
        make: Make | None,
        clips: tuple[HyperValue | None, HyperValue | None],
        accumulate: int | None,
        hypers: Mapping[str, Any],
    ) -> PlainMember:
        """Create a member that joins later. Raises ValueError if a value is invalid, or missing if members differ."""
        limits = self.limits.with_rows([0], *clips).rearranged([0])
        calls = self.updates.restart([0], accumulate).calls[:1]
        scaler = copy.deepcopy(self.scaler)
        if scaler is not None and scaler.state_dict():
            scaler.append(1)
            scaler.keep([self.total])
        member = PlainMember(
            cast(Any, PlainModule(model, shared)),
            optimizer=group_optimizer(self.optimizer, self.total, None),
            loss=self.loss,
            scaler=scaler,
            accumulate=calls,
            on_nonfinite=self.on_nonfinite,
            compile=self.compile,
        )
        self._set_initial_values(member)
        rearrange_optimizer(member.optimizer, [None], hypers)
        make = self.schedule_of_new(make)
        member.scheduler = None if make is None else PerMember(member.optimizer, make)
        member._limits = limits
        return member

    def group_of(self, members: Sequence[MemberState], shared: Collection[int]) -> ArrayGroup:
        """Create a group of members that have trained: an array, or one plain member. Raises FusionError."""
        models = [member.model for member in members]
        placeholders = [0] * len(members)
        group = self.array(PlainModule(models[0], shared) if len(models) == 1 else models, placeholders)
        for row, member in enumerate(members):
            put(group, row, member)
        return group


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
