"""An array with its optimizer, loss, schedules, scales and limits, whose rows join and leave together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from hfusion.array.array_editing import rearrange as rearrange_array
from hfusion.array.module import FusedModule
from hfusion.array.per_model import per_model
from hfusion.capture.registered_tensors import device_of
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import call_arguments
from hfusion.core.exclusive import FairLock
from hfusion.core.member_random import keyed
from hfusion.core.membership import is_per_member
from hfusion.core.row_indices import Widths, check_once, is_row, pairs, rows_of
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, PerMember
from hfusion.optim.native_kernels import FiniteCheck
from hfusion.optim.optimizer_rows import rearrange as rearrange_optimizer
from hfusion.population.accumulation import Accumulation
from hfusion.population.best import BestRecord, copy_records
from hfusion.population.chosen_rows import step_rows
from hfusion.population.evaluate import evaluate
from hfusion.population.gradients import weighed, weighted
from hfusion.population.group_updates import GroupUpdates
from hfusion.population.hparams import Hparams
from hfusion.population.members import EventKind, MembersByRow, Roll, apart, freeze, listed, population_array
from hfusion.population.plain_module import PlainModule
from hfusion.population.sample_weights import sample_weighted, weigh_samples
from hfusion.population.saving import Saving, in_turn
from hfusion.population.update_guard import Limits, OnNonfinite, bad_rows, check_common, gradients_finite
from hfusion.population.weights import MemberWeights
from hfusion.step.compile_mode import Compile
from hfusion.step.eager_step import EagerStep, backward
from hfusion.step.train_step import train_step


class ArrayGroup(Saving, MembersByRow, MemberWeights):
    """B members that train, leave, join and are copied as one array; each exactly as if alone.

    Its arguments and methods are those of `hfusion.Population`, for models that share an array.
    """

    _samples = False  # whether the loss weighs samples
    _deferred: GroupUpdates | None = None  # makes the updates if they are deferred until all groups have gradients
    elsewhere = 0  # bytes that members of other groups take

    def __init__(
        self,
        models: Sequence[nn.Module] | FusedModule,
        *,
        optimizer: Callable[[Any], FusedOptimizer],
        loss: Callable[..., Any],
        scheduler: Make | Sequence[Make] | None = None,
        scaler: GradScaler | None = None,
        clip_norm: HyperValue | None = None,
        clip_value: HyperValue | None = None,
        accumulate: int | Sequence[int] | Tensor = 1,
        on_nonfinite: OnNonfinite = "freeze",
        tags: Sequence[str] | None = None,
        compile: Compile = None,
        memory: str | int | None = None,
    ) -> None:
        if on_nonfinite not in ("freeze", "raise", "ignore"):
            raise ValueError(f'on_nonfinite={on_nonfinite!r}: it is "freeze", "raise" or "ignore"')
        plain = isinstance(models, PlainModule)
        self.fused: FusedModule = cast(Any, models) if plain else population_array(cast(Any, models))
        self.optimizer = optimizer(self.fused.parameters())
        if not isinstance(self.optimizer, FusedOptimizer):
            name = type(self.optimizer).__name__
            raise ValueError(f"optimizer gave {name}, whose state has no rows: give one of hf.optim")
        self.scheduler = None if scheduler is None else PerMember(self.optimizer, scheduler)
        self.scaler = scaler
        if scaler is not None:
            scaler.begin(len(self.fused))
        self._limits = Limits.of(clip_norm, clip_value, len(self.fused))
        self._updates, self._on_nonfinite = Accumulation.of(accumulate, len(self.fused)), on_nonfinite
        self._roll, self._widths = Roll.of(len(self.fused), tags), Widths(len(self.fused))
        self._best: dict[str, BestRecord] = {}
        self._function, self._compiles, self._memory = loss, compile, memory
        self._common = any(p.requires_grad and not is_per_member(p) for p in self.fused.parameters())
        if self._common and self._updates.initial_calls is None:
            raise ValueError(f"accumulate={accumulate}: members who train a parameter together make an update together")
        self._prepare(())

    def _prepare(self, expected_calls: Iterable[str]) -> None:
        """Create the step. ``expected_calls``: calls for which an earlier step had programs."""
        self._lock, self._finite = FairLock(), FiniteCheck()
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

    def __repr__(self) -> str:
        roll = self._roll
        frozen = f", {int(roll.frozen.sum())} frozen" if bool(roll.frozen.any()) else ""
        kinds = f"{self.fused._original}, {type(self.optimizer).__name__}"
        return f"Population({kinds}, {len(roll.live)} members in {len(self)} rows{frozen}, step {roll.step})"

    @property
    def hparams(self) -> Hparams:
        """The hyper-parameters by name, vectors ``[rows]`` to read and write: ``pop.hparams["lr"][rows] *= 1.2``."""
        return Hparams(self.optimizer)

    @in_turn
    def step(
        self, inputs: Any, target: Any, *, rows: Sequence[int] | None = None, weights: Any = None, **keywords: Any
    ) -> Tensor:
        """See `hfusion.Population.step`."""
        self._roll.check_width(len(self.fused))
        if weights is not None or self._samples:
            target = weigh_samples(self, target, weights, rows)
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
            losses = step_together(self, inputs, target, keywords)
        else:
            if self._weighs:
                target = weighed(target, self._updates.weights, self.scaler, device_of(self.fused))
            losses = self._step(inputs, target, **keywords)
        return torch.where(self._roll.alive.to(losses.device), losses, math.nan) if self._roll.free else losses

    def hold_buffers(self) -> None:
        """Save the tensors that forward may write to, if they may have to be restored."""
        if self._on_nonfinite != "ignore":
            self._updates.hold_buffers(self.fused)

    def _computed(self, losses: Tensor) -> None:
        """Handle the gradients of a call; make the update if it is the last call of one."""
        self.fused._views.settle()
        if not (self._weighs or self._updates.sums_gradients or self._deferred is not None):
            self._update_all(losses)
            return
        if self._weighs:
            self._updates.spoilt |= ~losses.isfinite().cpu()
        if not self._updates.sums_gradients:
            self._update(losses, ~self._none())
            return
        training = self._roll.alive & ~self._roll.frozen
        self._updates.sums.add(self.fused)
        due = self._updates.count(training)
        if bool((due & training).any()):
            self._updates.sums.take(self.fused, due)
            self._update(losses, due)
        elif self._updates.buffers is not None:
            self._updates.buffers.put_back(~training)

    def _update_all(self, losses: Tensor) -> None:
        """Update all members if each call is an update; takes few operators if all members are healthy."""
        if not self.are_healthy(losses):
            self._update(losses, ~self._none())
            return
        try:
            self.make_update()
        except BaseException:
            self._give_up()
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
        self._limits.clip(self.fused)
        self.optimizer.step()

    def count_update(self) -> None:
        """Count an update that all members have made, if no member has an unfinished one."""
        self._roll.count_step()
        self._updates.buffers = None

    def _update(self, losses: Tensor, due: Tensor) -> None:
        """Update members ``due``; if that fails, the next step begins a new update of all members."""
        if self._deferred is not None:
            self._deferred.add(self, losses, due)
            return
        try:
            self._apply(losses, due)
        except BaseException:
            self._give_up()
            raise
        self._updates.end(due)

    def _give_up(self) -> None:
        """Discard the present updates and restore buffers; the next step begins a new update of all members."""
        everybody = ~self._none()
        if self._updates.buffers is not None:
            self._updates.buffers.put_back(everybody)
        if self.scaler is not None:
            self.scaler.forget()
        self._updates.end(everybody)

    def _bad(self, losses: Tensor, due: Tensor) -> Tensor:
        """Return the members of ``due`` that are not finite in this update, bool ``[rows]``."""
        # With a scaler, a member whose gradients overflow skips a step and gets a smaller scale.
        bad = self._updates.spoilt | (
            self._none() if self.scaler is not None else bad_rows(self.fused, losses, self._finite)
        )
        return bad & due & self._roll.alive & ~self._roll.frozen

    def _apply(self, losses: Tensor, due: Tensor) -> None:
        """Unscale gradients, freeze members with gradients that are not finite, clip and update."""
        roll = self._roll
        overflown = self._none() if self.scaler is None else self.scaler.unscale_(self.optimizer)
        if self._on_nonfinite != "ignore":
            freeze(roll, self._bad(losses, due), self._on_nonfinite == "raise")
            if self._updates.buffers is not None and bool(roll.frozen.any()):
                self._updates.buffers.put_back(roll.frozen)
            if self.scaler is None:
                check_common(self.fused)
        self._run_gradient_hooks(overflown | ~due)
        self._limits.clip(self.fused)
        with self.optimizer.holding(roll.frozen | ~due):
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update(resting=~due)
        roll.ages += roll.alive & due & ~(roll.frozen | overflown)
        roll.step += 1

    def _none(self) -> Tensor:
        return torch.zeros(len(self.fused), dtype=torch.bool, device="cpu")

    @in_turn
    def stop(self, row: int | Sequence[int]) -> Any:
        """See `hfusion.Population.stop`."""
        single, rows = is_row(row), rows_of(row, len(self))
        check_once(rows)
        tags = [self._roll.tag(member_row) for member_row in rows]
        models = [apart(self.fused, member_row) for member_row in rows]
        for member_row, tag in zip(rows, tags, strict=True):
            self._best.pop(tag, None)
            self._roll.leave(member_row)
        self._updates.clear(rows)
        return models[0] if single else models

    @in_turn
    def start(
        self,
        row: int | Sequence[int] | None,
        model: nn.Module | Sequence[nn.Module],
        *,
        tag: str | Sequence[str] | None = None,
        scheduler: Make | Sequence[Make] | None = None,
        clip_norm: HyperValue | None = None,
        clip_value: HyperValue | None = None,
        accumulate: int | Sequence[int] | None = None,
        **hypers: Any,
    ) -> Any:
        """See `hfusion.Population.start`. Raises FusionError for a model that cannot be fused with the members."""
        models = listed("model", model, nn.Module)
        tags = [None] * len(models) if tag is None else listed("tag", tag, str)
        self._check_between()
        if scheduler is not None and self.scheduler is None:
            raise ValueError("scheduler: this population has none; give it one when it is made")
        with self._room(row) as rows:
            self._roll.check_start(rows, tags, len(models))
            limits = self._limits.with_rows(rows, clip_norm, clip_value)
            updates = self._updates.restart(rows, accumulate)
            self._drop_gradients()
            self.fused.put(rows, models)
            rearrange_optimizer(self.optimizer, [None if slot in rows else slot for slot in range(len(self))], hypers)
            if self.scheduler is not None:
                self.scheduler.replace(rows, scheduler)
            if self.scaler is not None:
                self.scaler.restart(rows)
        self._limits, self._updates = limits, updates
        self._updates.clear(rows)
        for slot, name in zip(rows, tags, strict=True):
            self._roll.enter(slot, name)
        return rows[0] if row is None or is_row(row) else rows

    @contextmanager
    def _room(self, row: int | Sequence[int] | None) -> Iterator[list[int]]:
        """Context manager: rows for members that start; rows that were added for them are removed on an error."""
        before = len(self)
        if row is None and not self._roll.free:
            self.grow(1)
        try:
            yield self._roll.free[:1] if row is None else rows_of(row, len(self))
        except BaseException:
            if len(self) > before:
                self._resize(list(range(before)), before)
            raise

    def _drop_gradients(self) -> None:
        """Release gradients: they are not needed between updates, and moving them takes time."""
        for param in self.fused.parameters():
            param.grad = None

    @in_turn
    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """See `hfusion.Population.copy`."""
        roll = self._roll
        moves = [(source, target) for source, target in pairs(src, dst, len(self)) if source != target]
        for source, _ in moves:
            roll.tag(source)
            if bool(roll.frozen[source]):
                raise ValueError(f"{roll.tag(source)!r} in row {source} went bad and is frozen: copy a healthy member")
        sources = list(range(len(self)))
        for source, target in moves:
            sources[target] = source
        names = [(target, roll.tag(source), int(roll.ages[source]), int(roll.keys[source])) for source, target in moves]
        self._rearrange(sources)
        for (source, target), (_, name, age, key) in zip(moves, names, strict=True):
            if roll.tags[target] is None:
                roll.enter(target, None, source)
            else:
                roll.note(target, EventKind.COPY, name)
            roll.ages[target], roll.keys[target], roll.frozen[target] = age, key, False
        copy_records(self._best, [(name, roll.tag(target)) for target, name, _, _ in names])

    @in_turn
    def thaw(self, row: int | Sequence[int]) -> None:
        """Let frozen members train again, from where they were before the step that was not finite."""
        for member_row in rows_of(row, len(self)):
            self._roll.thaw(member_row)

    @in_turn
    def compact(self) -> list[int]:
        """See `hfusion.Population.compact`.

        Rows come in blocks, so that not every number of members needs its own compiled program.
        """
        live, free = self._roll.live, self._roll.free
        width = self._widths.of(len(live))
        if width < len(self):
            self._resize([*live, *free[: width - len(live)]], len(live))
        return live

    @in_turn
    def grow(self, count: int) -> None:
        """Add free rows at the end, for at least ``count`` more members."""
        if not is_row(count) or isinstance(count, bool) or count < 1:
            raise ValueError(f"grow by {count!r}: a whole number of rows, one at least")
        rows = len(self)
        self._resize([*range(rows), *[0] * (self._widths.of(rows + count) - rows)], rows)

    def _resize(self, sources: Sequence[int], occupied: int) -> None:
        """Rearrange rows by ``sources``; rows from index ``occupied`` on are free."""
        self._rearrange(sources)
        self._roll.rearrange([source if row < occupied else None for row, source in enumerate(sources)])
        self._step.at_once = self._widths.at_once(len(sources))
        self._updates.clear(self._roll.free)

    def _check_between(self) -> None:
        if self._common and self._updates.underway:
            progress = f"{int(self._updates.done.max())} of {int(self._updates.calls[0])} steps of an update are made"
            raise ValueError(f"{progress}: members who train a parameter together start and are copied between updates")

    def _rearrange(self, sources: Sequence[int]) -> None:
        self._check_between()
        self._drop_gradients()
        rearrange_array(self.fused, sources)
        rearrange_optimizer(self.optimizer, sources, {})
        if self.scheduler is not None:
            self.scheduler.rearrange(sources)
        if self.scaler is not None and self.scaler.state_dict():
            self.scaler.rearrange(sources)
        self._limits = self._limits.rearranged(sources)
        self._updates = self._updates.rearranged(sources, self.fused)

    @in_turn
    def evaluate(self, metric: Callable[..., Any], loader: Iterable[Any]) -> Tensor:
        """See `hfusion.Population.evaluate`."""
        values = evaluate(self.fused, metric, loader, {row: self._roll.tag(row) for row in self._roll.live})
        return torch.tensor([values.get(row, math.nan) for row in range(len(self))], dtype=torch.float64, device="cpu")


def step_together(pop: ArrayGroup, inputs: Any, target: Any, keywords: dict[str, Any]) -> Tensor:
    """Make an eager step with the losses of rows that are neither free nor frozen. Return losses ``[rows]``."""
    updates = pop._updates
    if not updates.underway:
        pop.optimizer.zero_grad()
        pop.fused.zero_grad()
    args, kwargs = call_arguments(inputs, keywords)
    training = set(pop._roll.live).difference(pop.frozen)
    scales = torch.ones(len(pop.fused), dtype=torch.float64, device="cpu")
    scales = (scales if pop.scaler is None else pop.scaler.scale(scales)) / int(updates.calls[0])

    def of_block(losses: Tensor, rows: range) -> None:
        chosen = [row - rows.start for row in rows if row in training]
        if chosen:
            block_scales = scales[rows.start : rows.stop].to(losses)
            backward((losses * block_scales)[chosen])

    budget = pop._step.budget
    block = None if budget is None else budget.plan(Arguments.of(args, kwargs)).eager.block
    with keyed(pop._step.keys):
        values, _ = pop._together.run(args, kwargs, target, block, budget is not None, of_block)
    if not training:
        return values
    updates.spoilt |= ~values.isfinite().cpu()
    due = updates.count(pop._roll.alive)
    if bool((due & pop._roll.alive).any()):
        pop._update(values, due)
    return values
