"""A group of a population: an array with its optimizer, schedules, scales and limits, whose rows join and leave."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hfusion.array.array_editing import rearrange as rearrange_array
from hfusion.array.member_functions import MemberFunction, training_rows
from hfusion.array.module import FusedModule
from hfusion.array.per_model import per_model
from hfusion.capture.registered_tensors import device_of
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import call_arguments
from hfusion.core.member_random import keyed
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import is_per_member
from hfusion.core.row_indices import Widths
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, PerMember
from hfusion.optim.native_kernels import FiniteCheck
from hfusion.optim.optimizer_rows import rearrange as rearrange_optimizer
from hfusion.population.accumulation import Accumulation, check_calls, weighed, weighted
from hfusion.population.chosen_rows import step_rows
from hfusion.population.group_options import GroupOptions
from hfusion.population.grouping import signature
from hfusion.population.members import EMPTY, EventKind, Roll, key_of, no_best
from hfusion.population.plain_module import PlainModule
from hfusion.population.sample_weights import sample_weighted, weigh_samples
from hfusion.population.update_guard import (
    bad_rows,
    check_common,
    clip,
    gradients_finite,
    limits_of_new,
)
from hfusion.step.eager_step import EagerStep, backward
from hfusion.step.train_step import train_step

if TYPE_CHECKING:
    from hfusion.population.group_step import GroupUpdates


class TrainingGroup:
    """Members of a population that one array computes together; each trains exactly as if alone.

    Rows here are those of the group; ``rows`` has the population's.

    Args:
        module: the array, or a plain model.
        options: the population's options.
        origins: for each row, the initial member of the population whose options it has.

    Attributes:
        table: what each member has besides tensors, optimizer state, scale and schedule: see `Roll` and `Accumulation`,
            and ``clip_norm`` and ``clip_value``.
        best: each member's best weights, see `BestMembers`.
        initial_limits: see `GroupOptions`.
        number: the number of this group in its population, never used again.
        why: why it is a group of its own.
        elsewhere: bytes that the state of other groups takes.
    """

    number = 0
    why = ""
    elsewhere = 0
    is_plain = False
    _samples = False  # whether the loss weighs samples
    _deferred: GroupUpdates | None = None  # makes the updates if they are deferred until all groups have gradients

    def __init__(self, module: FusedModule | PlainModule, options: GroupOptions, origins: Sequence[int]) -> None:
        self.fused = cast(FusedModule, module)
        self.optimizer = options.optimizer_of(module, origins)
        makes = options.schedules
        self.scheduler = None if makes is None else PerMember(self.optimizer, [makes[row] for row in origins])
        self.scaler = options.scaler_of(origins)
        self.table, self.initial_limits = options.numbers.take(origins), options.initial_limits
        self.table.empty, self.table["done"] = EMPTY, torch.zeros_like(self.table["calls"])
        self.table["spoilt"] = self.table["done"].bool()
        self.best = no_best(len(module))
        for name in self.initial_limits.keys() - self.table.columns.keys():
            self.table.begin(name, torch.empty(1, dtype=torch.float64, device="cpu"))
        self._roll, self._updates = Roll.begin(self.table), Accumulation(self.table, options.initial_calls)
        self._on_nonfinite, self._function = options.on_nonfinite, options.loss
        self._compiles, self._memory = options.compile, options.memory
        self._gradient_hooks: OrderedDict[int, MemberFunction] = OrderedDict()
        self._widths = Widths(len(module))
        self._common = any(p.requires_grad and not is_per_member(p) for p in self.fused.parameters())
        if self._common and bool((self._updates.calls != self._updates.calls[0]).any()):
            calls = self._updates.calls.tolist()
            raise ValueError(f"accumulate={calls}: members who train a parameter together make an update together")
        self._prepare(())

    def _share(self, table: MemberTable, whole: TrainingGroup) -> None:
        """Let this be a group of some members of ``whole``, which ``table`` describes."""
        self.table, self._roll = table, Roll(table, whole._roll.step)
        self._updates = Accumulation(table, whole._updates.initial_calls, whole._updates.holds)

    def put_rows(self, rows: Sequence[int], table: MemberTable) -> None:
        """Write the first rows of another group's ``table`` over ``rows``."""
        # Members amid an update of their own have the present values of what only the others' forward has written to.
        self._updates.hold(self.fused, table.of("before"))
        self.table.put(rows, table)
        self._updates.holds |= bool(table["done"].any())
        self._updates.end(self._none())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy.deepcopy; the step is created again."""
        dropped = {"_finite", "_step", "_together", "_chosen", "_deferred"}
        state = {name: value for name, value in vars(self).items() if name not in dropped}
        return {**state, "known": sorted(self._step.known_calls)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "known"})
        self._prepare(state["known"])

    def _prepare(self, expected_calls: Iterable[str]) -> None:
        """Create the step. ``expected_calls``: calls for which an earlier step had programs."""
        self._finite = FiniteCheck()
        self._weighs = self.scaler is not None or self._updates.sums_gradients
        self._make_step(expected_calls)

    def _make_step(self, expected_calls: Iterable[str]) -> None:
        function = sample_weighted(self._function) if self._samples else self._function
        self._together = EagerStep(self.fused, per_model(function))
        loss = weighted(function) if self._weighs else function
        self._step = train_step(self.fused, loss, self.optimizer, compile=self._compiles, memory=self._memory)
        self._step.update = self._computed
        self._step.at_once = self._widths.at_once(len(self))
        self._step.expected_calls |= set(expected_calls)

    def __len__(self) -> int:
        """The number of rows, free ones too."""
        return self.table.rows

    @property
    def rows(self) -> list[int | None]:
        """The population's row of each row of the group; None for a free row."""
        return self.table["row"]  # type: ignore[no-any-return]

    @rows.setter
    def rows(self, rows: Sequence[int | None]) -> None:
        self.table["row"] = list(rows)

    @property
    def live(self) -> list[int]:
        """The population's rows of the members, in the order of the group."""
        return [row for row in self.rows if row is not None]

    @property
    def key(self) -> int:
        """Determines the random numbers of the group."""
        return key_of(next(tag for tag in self._roll.tags if tag is not None))

    @property
    def model(self) -> nn.Module:
        """One of the members, as a module around its tensors."""
        return self.fused._member(0)

    @cached_property
    def signature(self) -> Any:
        """What a model shares with the members if its structure allows it to join them."""
        return signature(self.model)

    def tables(self) -> dict[str, MemberTable]:
        """All that each member has besides the tensors of its model: live tables by name."""
        return {**self._own_tables(), **self.optimizer.tables()}

    def saved_tables(self) -> dict[str, MemberTable]:
        """The tables whose columns a save holds beside the optimizer, scheduler and scaler."""
        return {"member": self.table, "best": self.best}

    def _own_tables(self) -> dict[str, MemberTable]:
        tables = {"member": self.table, "best": self.best}
        if self.scaler is not None:
            self.scaler.begin(len(self))
            tables["scaler"] = self.scaler.table
        if self.scheduler is not None:
            tables["schedule"] = self.scheduler.table
        return tables

    def entries(self, by_row: Mapping[int, int] | None = None) -> list[int]:
        """Return the entry of stacked arguments for each row of the group; by default its row of the population."""
        # Inputs of a free row of the group do not matter.
        first = next((row for row in self.rows if row is not None), 0)
        rows = [first if row is None else row for row in self.rows]
        return rows if by_row is None else [by_row[row] for row in rows]

    def step(self, inputs: Any, target: Any, rows: list[int] | None, weights: Any, keywords: Any) -> Tensor:
        """Train all members, or those in ``rows`` of the group. Returns losses ``[rows of the group]``.

        ``weights``: None, or what `hfusion.population.sample_weights.rows_of_weights` returns.
        """
        if len(self.fused) != len(self):
            raise ValueError(
                f"the array has {len(self.fused)} members and the population {len(self)} rows: let members join by "
                "pop.start and leave by pop.stop and pop.compact, which move all that belongs to them"
            )
        if weights is not None or self._samples:
            target = weigh_samples(self, target, weights)
        arguments = inputs, target, keywords
        return self._step_all(*arguments) if rows is None else step_rows(self, rows, *arguments)

    def _step_all(self, inputs: Any, target: Any, keywords: dict[str, Any]) -> Tensor:
        self.hold_buffers()
        if self._updates.sums_gradients and not self._weighs:
            self._weighs = True
            self._make_step(())
        self._step.keys, self._step.idle = self._roll.keys, frozenset(self._roll.free)
        if self._step.budget is not None:
            summed = sum(p.nbytes for p in self.fused.parameters() if p.requires_grad)
            self._step.budget.held = self.elsewhere + (summed if self._updates.sums_gradients else 0)
        if self._common:
            losses = self._step_together(inputs, target, keywords)
        else:
            if self._weighs:
                target = weighed(target, self._updates.weights, self.scaler, device_of(self.fused))
            losses = self._step(inputs, target, **keywords)
        return torch.where(self._roll.alive.to(losses.device), losses, math.nan) if self._roll.free else losses

    def _step_together(self, inputs: Any, target: Any, keywords: dict[str, Any]) -> Tensor:
        """Make an eager step of members that train a parameter together. Returns losses ``[rows of the group]``."""
        updates = self._updates
        if not updates.underway:
            self.optimizer.zero_grad()
            self.fused.zero_grad()
        args, kwargs = call_arguments(inputs, keywords)
        training = {row for row in self._roll.live if not bool(self._roll.frozen[row])}
        scales = torch.ones(len(self.fused), dtype=torch.float64, device="cpu")
        scales = (scales if self.scaler is None else self.scaler.scale(scales)) / int(updates.calls[0])

        def of_block(losses: Tensor, rows: range) -> None:
            chosen = [row - rows.start for row in rows if row in training]
            if chosen:
                block_scales = scales[rows.start : rows.stop].to(losses)
                backward((losses * block_scales)[chosen])

        budget = self._step.budget
        block = None if budget is None else budget.plan(Arguments.of(args, kwargs)).eager.block
        with keyed(self._step.keys):
            values, _ = self._together.run(args, kwargs, target, block, budget is not None, of_block)
        if not training:
            return values
        self.table["spoilt"] |= ~values.isfinite().cpu()
        due = updates.count(self._roll.alive)
        if bool((due & self._roll.alive).any()):
            self._update(values, due)
        return values

    def hold_buffers(self) -> None:
        """Save the tensors that forward may write to, if they may have to be restored."""
        if self._on_nonfinite != "ignore":
            self._updates.hold_buffers(self.fused)

    def _computed(self, losses: Tensor) -> None:
        """Handle the gradients of a call; make the update if it is the last call of one."""
        if not (self._weighs or self._updates.sums_gradients or self._deferred is not None):
            self._update_all(losses)
            return
        if self._weighs:
            self.table["spoilt"] |= ~losses.isfinite().cpu()
        if not self._updates.sums_gradients:
            self._update(losses, ~self._none())
            return
        training = self._roll.alive & ~self._roll.frozen
        self._updates.add(self.fused)
        due = self._updates.count(training)
        if bool((due & training).any()):
            self._updates.hand_over(self.fused, due)
            self._update(losses, due)
        else:
            self._updates.put_back(self.fused, ~training)

    def _update_all(self, losses: Tensor) -> None:
        """Update all members if each call is an update; takes few operators if all members are healthy."""
        if not self.are_healthy(losses):
            self._update(losses, ~self._none())
            return
        try:
            self.make_update()
        except BaseException:
            self.give_up()
            raise
        self.count_update()

    def are_healthy(self, losses: Tensor) -> bool:
        """Return whether no member is frozen, and losses and gradients are finite or need not be."""
        healthy = self._on_nonfinite == "ignore" or gradients_finite(self.fused, losses, self._finite)
        return healthy and not bool(self._roll.frozen.any())

    def make_update(self) -> None:
        """Update all members with their gradients."""
        if self._gradient_hooks:
            self._run_gradient_hooks(self._none())
        clip(self.fused, self.table)
        self.optimizer.step()

    def count_update(self) -> None:
        """Count an update that all members have made, if no member has an unfinished one."""
        self._roll.count_step()
        if self._updates.holds:
            self._updates.discard()

    def flush(self) -> bool:
        """Update members that have made some of the calls of an update. Returns whether there were any."""
        if not self._updates.underway:
            return False
        due = self._updates.done > 0
        if not self._common:
            self._updates.hand_over(self.fused, due)
        # Losses that are not finite were noted at each call.
        self._update(torch.zeros(len(self), device="cpu"), due)
        return True

    def _update(self, losses: Tensor, due: Tensor) -> None:
        """Update members ``due``; if that fails, the next step begins a new update of all members."""
        if self._deferred is not None:
            self._deferred.add(self, losses, due)
            return
        try:
            self._apply(losses, due)
        except BaseException:
            self.give_up()
            raise
        self._updates.end(due)

    def give_up(self) -> None:
        """Discard the present updates and restore buffers; the next step begins a new update of all members."""
        everybody = ~self._none()
        self._updates.put_back(self.fused, everybody)
        if self.scaler is not None:
            self.scaler.forget()
        self._updates.end(everybody)

    def bad_members(self, losses: Tensor, due: Tensor) -> Tensor:
        """Return the members of ``due`` that are not finite in this update, bool ``[rows of the group]``."""
        # With a scaler, a member whose gradients overflow skips a step and gets a smaller scale.
        bad: Tensor = self.table["spoilt"] | (
            self._none() if self.scaler is not None else bad_rows(self.fused, losses, self._finite)
        )
        return bad & due & self._roll.alive & ~self._roll.frozen

    def _apply(self, losses: Tensor, due: Tensor) -> None:
        """Unscale gradients, freeze members with gradients that are not finite, clip and update."""
        roll = self._roll
        overflown = self._none() if self.scaler is None else self.scaler.unscale_(self.optimizer)
        if self._on_nonfinite != "ignore":
            roll.freeze(self.bad_members(losses, due), self._on_nonfinite == "raise")
            if bool(roll.frozen.any()):
                self._updates.put_back(self.fused, roll.frozen)
            if self.scaler is None:
                check_common(self.fused)
        self._run_gradient_hooks(overflown | ~due)
        clip(self.fused, self.table)
        with self.optimizer.holding(roll.frozen | ~due):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update(resting=~due)
        roll.ages.add_(roll.alive & due & ~(roll.frozen | overflown))
        roll.step += 1

    def _none(self) -> Tensor:
        return torch.zeros(len(self.fused), dtype=torch.bool, device="cpu")

    @property
    def active_rows(self) -> list[int]:
        """The group's rows of members that train: taken, and not frozen."""
        training = set(training_rows(self.fused))
        return [row for row in self._roll.live if row in training and not bool(self._roll.frozen[row])]

    def _run_gradient_hooks(self, resting: Tensor) -> None:
        for hook in self._gradient_hooks.values():
            if rows := [row for row in self.active_rows if not bool(resting[row])]:
                self._run_each(hook, rows)

    def _run_each(self, fn: MemberFunction, rows: list[int], *args: Any, **kwargs: Any) -> None:
        fn(self.fused, *args, rows=rows, **kwargs)

    def each(self, fn: MemberFunction, rows: list[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run a function of one member's parameters and gradients for members ``rows`` of the group."""
        self._run_each(fn, rows, *args, **kwargs)
        # Steps restore the buffers of frozen members.
        written = self._none()
        written[rows] = self._roll.frozen[rows]
        self._updates.renew(self.fused, written)

    def put(self, rows: Sequence[int], models: Sequence[nn.Module]) -> None:
        """Write models to free rows. Raises FusionError for a model that cannot be fused with the members."""
        self._drop_gradients()
        self.fused.put(rows, models)

    def restart(
        self,
        rows: Sequence[int],
        scheduler: Make | Sequence[Make] | None,
        clip_norm: HyperValue | None,
        clip_value: HyperValue | None,
        accumulate: int | Sequence[int] | None,
        hypers: Mapping[str, Any],
        models: Sequence[nn.Module] = (),
    ) -> None:
        """Give rows the training state of new members, and ``models`` if there are any; see `Population.start`.

        Raises:
            ValueError: a value is invalid, or missing because members began with different ones.
            FusionError: a model cannot be fused with the members.
        """
        if scheduler is not None and self.scheduler is None:
            raise ValueError("scheduler: this population has none; give it one when it is made")
        limits = limits_of_new(self.initial_limits, len(rows), clip_norm=clip_norm, clip_value=clip_value)
        if accumulate is None and self._updates.initial_calls is None:
            raise ValueError("accumulate differs between the members: give it for those that join, accumulate=...")
        calls = check_calls(self._updates.initial_calls if accumulate is None else accumulate, len(rows))
        if models:
            self.put(rows, models)
        rearrange_optimizer(self.optimizer, [None if slot in rows else slot for slot in range(len(self))], hypers)
        if self.scheduler is not None:
            self.scheduler.replace(rows, scheduler)
        if self.scaler is not None:
            self.scaler.restart(rows)
        for name, values in (limits | {"calls": calls}).items():
            self.table[name][list(rows)] = values
        self._updates.clear(rows)

    def limit_norms(self, rows: Sequence[int], norms: HyperValue) -> None:
        """Set the largest gradient norms of members, from the next update on. Raises ValueError for one below 0."""
        known: dict[str, float | None] = {"clip_norm": None} if "clip_norm" in self.table else {}
        self.table["clip_norm"][list(rows)] = limits_of_new(known, len(rows), clip_norm=norms)["clip_norm"]

    def leave(self, row: int) -> None:
        """Free the row of a member that stops."""
        self._roll.note(row, EventKind.STOP)
        self.release(row)
        self._updates.clear([row])

    def release(self, row: int) -> None:
        """Free the row of a member that goes on in another group, or is replaced."""
        for table in (self.table, self.best):
            table.clear([row])

    def _drop_gradients(self) -> None:
        """Release gradients: they are not needed between updates, and moving them takes time."""
        for param in self.fused.parameters():
            param.grad = None

    def copy(self, moves: Sequence[tuple[int, int]], names: Mapping[int, tuple[int, str]]) -> None:
        """Copy members by pairs of rows of the group. ``names``: the row and the name of the copy in a free row."""
        roll, sources = self._roll, list(range(len(self)))
        for source, target in moves:
            sources[target] = source
        origins = {target: roll.tag(source) for source, target in moves}
        own = {target: (self.rows[target], roll.tags[target]) for target in origins}
        self._rearrange(sources)
        for target, origin in origins.items():
            row, name = own[target]
            if name is None:
                self.rows[target], name = names[target]
                roll.enter(target, name, origin)
            else:
                self.rows[target] = row
                roll.rename(target, name)
                roll.note(target, EventKind.COPY, origin)

    def compact(self) -> bool:
        """Remove free rows as far as the widths of programs allow; return whether any were removed.

        Rows come in blocks, so that not every number of members needs its own compiled program.
        """
        live, free = self._roll.live, self._roll.free
        width = self._widths.of(len(live))
        if width < len(self):
            self.resize([*live, *free[: width - len(live)]], len(live))
            return True
        return False

    def grow(self, count: int) -> None:
        """Add free rows at the end, for at least ``count`` more members."""
        rows = len(self)
        self.resize([*range(rows), *[0] * (self._widths.of(rows + count) - rows)], rows)

    def resize(self, sources: Sequence[int], occupied: int) -> None:
        """Rearrange rows by ``sources``; rows from index ``occupied`` on are free."""
        self._rearrange(sources)
        for table in (self.table, self.best):
            table.clear(range(occupied, len(sources)))
        self._step.at_once = self._widths.at_once(len(sources))
        self._updates.clear(self._roll.free)

    def check_between(self) -> None:
        """Raise a ValueError if members that train a parameter together have an unfinished update."""
        if self._common and self._updates.underway:
            progress = f"{int(self._updates.done.max())} of {int(self._updates.calls[0])} steps of an update are made"
            raise ValueError(f"{progress}: members who train a parameter together start and are copied between updates")

    def _rearrange(self, sources: Sequence[int]) -> None:
        self.check_between()
        self._drop_gradients()
        rearrange_array(self.fused, sources)
        rearrange_optimizer(self.optimizer, sources, {})
        for table in self._own_tables().values():
            table.arrange(sources)


@dataclass(frozen=True, eq=False)
class MemberLayout:
    """The group of each row of a population, and the row there.

    Attributes:
        slots: for each row of the population, its group and the row there; None for a free row.
        order: for each row of the population, its index into the concatenated rows of all groups; free rows have the
            index after the last.
    """

    slots: tuple[tuple[TrainingGroup, int] | None, ...]
    order: Tensor

    @staticmethod
    def of(groups: Sequence[TrainingGroup], size: int) -> MemberLayout:
        """Return the layout of ``groups`` in a population of ``size`` rows."""
        slots: list[tuple[TrainingGroup, int] | None] = [None] * size
        start, order = 0, [sum(map(len, groups))] * size
        for group in groups:
            for local, row in enumerate(group.rows):
                if row is not None:
                    slots[row], order[row] = (group, local), start + local
            start += len(group)
        return MemberLayout(tuple(slots), torch.tensor(order, device="cpu"))

    @property
    def live(self) -> list[int]:
        return [row for row, slot in enumerate(self.slots) if slot is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, slot in enumerate(self.slots) if slot is None]

    @property
    def tags(self) -> list[str | None]:
        """The members' names by row."""
        return [None if slot is None else slot[0]._roll.tags[slot[1]] for slot in self.slots]

    def slot_of(self, row: int) -> tuple[TrainingGroup, int]:
        """Return a member's group and its row there. Raises ValueError for a free row."""
        slot = self.slots[row]
        if slot is None:
            raise ValueError(f"row {row} is free; members are in rows {self.live}")
        return slot

    def collected(self, values: Sequence[Tensor]) -> Tensor:
        """Return ``[rows]``, gathered from a tensor ``[rows of the group]`` of each group; NaN or 0 for free rows."""
        if not values:
            return torch.zeros(len(self.slots), dtype=torch.int64, device="cpu")
        first = values[0]
        dtype = first.dtype
        for value in values[1:]:
            dtype = torch.promote_types(dtype, value.dtype)
        empty = torch.full((1,), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=first.device)
        joined = torch.cat([*(value.to(first.device, dtype) for value in values), empty])
        return joined[self.order.to(first.device)]
