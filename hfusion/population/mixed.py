"""A population of several groups: arrays of members that are alike, and plain members that are like no other."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.array.member_functions import MemberFunction
from hfusion.checkpoint.save import Writing
from hfusion.core.calls import take_entries
from hfusion.core.errors import ForwardsDiffer
from hfusion.core.exclusive import FairLock
from hfusion.core.row_indices import check_once, is_row, pairs, rows_of
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.population.best import BestRecord
from hfusion.population.chosen_rows import check_stacked
from hfusion.population.group_options import GroupOptions, value_of
from hfusion.population.group_updates import GroupUpdates
from hfusion.population.grouping import TWINS, Candidates, grouped, shared_frozen
from hfusion.population.member_layout import MemberLayout, PlacedGroup, check_entries
from hfusion.population.members import Event, EventKind, Roll, listed
from hfusion.population.mixed_evaluation import evaluate_mixed, mixed_outputs
from hfusion.population.moving import MemberState, copy_member_state
from hfusion.population.plain_module import PlainModule
from hfusion.population.population import ArrayGroup
from hfusion.population.regroup import part, settle
from hfusion.population.sample_weights import check_keyword, check_weights, rows_of_weights
from hfusion.population.saving import in_turn
from hfusion.population.spread_members import MemberSpread
from hfusion.step.memory_budget import state_bytes


class MixedMembers:
    """The members of a `hfusion.Population` that are not one array; its methods are those of the population.

    Attributes:
        groups: in the order in which they are stepped.
        size: the number of rows, free ones too.
        lineage: the history of the members of all groups.
        steps: the number of updates.
        tag_number: the number in the next generated name, which is how many were generated.
        apart: pairs of groups, by number, whose members look alike but whose forwards differ.
        best: the best weights that members have had, by name; of all groups.
        hooks: functions of the gradients, of all groups.
        pairs: hyper-parameters that are pairs, such as betas.
        spread: computes plain members in other processes.
        unsettled: plain members that were split off a group, and may join another before the next step.
    """

    def __init__(self, options: GroupOptions) -> None:
        self.options = options
        self.groups: list[PlacedGroup] = []
        self.size = self.steps = self.tag_number = self.numbers = 0
        self.lineage: list[Event] = []
        self.apart: set[frozenset[int]] = set()
        self.unsettled: list[PlacedGroup] = []
        self.pairs: set[str] = set()
        self.best: dict[str, BestRecord] = {}
        self.hooks: OrderedDict[int, MemberFunction] = OrderedDict()
        self.saving: Writing | None = None
        self._layout: MemberLayout | None = None
        self._lock = FairLock()
        self.spread = MemberSpread(options.processes, options.loss)

    def __getstate__(self) -> dict[str, Any]:
        excluded = ("_lock", "_layout", "saving", "spread")
        return {name: value for name, value in vars(self).items() if name not in excluded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._layout, self._lock, self.saving = None, FairLock(), None
        self.spread = MemberSpread(self.options.processes, self.options.loss)

    @staticmethod
    def of_models(
        models: Sequence[nn.Module],
        candidates: Sequence[Candidates],
        options: GroupOptions,
        tags: Sequence[str] | None,
    ) -> MixedMembers:
        """Create the members that a population begins with."""
        mixed = MixedMembers(options)
        # Checks the names, and generates those that are not given.
        roll = Roll.of(len(models), tags)
        shared = shared_frozen(models)
        mixed.size, mixed.tag_number, mixed.lineage = len(models), roll.tag_number, roll.lineage
        for candidate in candidates:
            rows = list(candidate.models)
            of_group = [models[row] for row in rows]
            members = options.array(of_group if len(rows) > 1 else PlainModule(of_group[0], shared), rows)
            for local, row in enumerate(rows):
                members._roll.tags[local], members._roll.keys[local] = roll.tags[row], roll.keys[row]
            mixed.add(members, list(rows), candidate.why)
        return mixed

    @staticmethod
    def of_array(array: ArrayGroup, options: GroupOptions) -> MixedMembers:
        """Create the members of a population that was one array so far."""
        mixed = MixedMembers(options.with_initial_values(array))
        if array._gradient_hooks is not None:
            mixed.hooks = array._gradient_hooks
        roll = array._roll
        mixed.size, mixed.steps, mixed.tag_number, mixed.lineage = len(array), roll.step, roll.tag_number, roll.lineage
        if roll.live:
            rows = [row if tag is not None else None for row, tag in enumerate(roll.tags)]
            mixed.add(array, rows, TWINS)
        return mixed

    def add(self, members: ArrayGroup, rows: list[int | None], why: str, index: int | None = None) -> PlacedGroup:
        """Add a group to the population, at ``index`` or at the end of its groups, and return it."""
        members._roll.lineage, members._roll.step = self.lineage, self.steps
        self.best |= members._best
        members._best, members._gradient_hooks = self.best, self.hooks
        self.pairs |= {hyper.key for hyper in members.optimizer.hypers if hyper.index is not None}
        self.numbers += 1
        group = PlacedGroup(members, rows, self.numbers, why)
        self.groups.insert(len(self.groups) if index is None else index, group)
        self._layout = None
        return group

    def changed(self) -> None:
        """Remove groups without members, and compute the layout again when it is needed."""
        self.groups = [group for group in self.groups if group.live]
        self._layout = None

    @property
    def layout(self) -> MemberLayout:
        if self._layout is None:
            self._layout = MemberLayout.of(self.groups, self.size)
        return self._layout

    def __len__(self) -> int:
        return self.size

    def model_of(self, row: int) -> nn.Module | None:
        """Return the member in a row; None if the row is free."""
        slot = self.layout.slots[row]
        return None if slot is None else slot[0].members.fused[slot[1]]

    def collected(self, of_group: Callable[[ArrayGroup], Tensor], empty: Tensor) -> Tensor:
        """Return a number of every member by row; ``empty`` if there are no groups."""
        return self.layout.collected([of_group(group.members) for group in self.groups]) if self.groups else empty

    @in_turn
    def step(
        self, inputs: Any, target: Any, *, rows: Sequence[int] | None = None, weights: Any = None, **keywords: Any
    ) -> Tensor:
        """Make a step of the groups, one after another. Return losses ``[rows]``, see `hfusion.Population.step`."""
        self._settle()
        stepping = self._stepping(rows, (inputs, target, keywords))
        if weights is not None:
            keywords["weights"] = rows_of_weights(weights)
            check_weights(keywords["weights"], stepping, self.layout.free)
        if not self.groups:
            return torch.full((self.size,), math.nan, device="cpu")
        entries = {row: entry for entry, row in enumerate(stepping)}
        self._note_memory()
        losses: dict[int, Tensor] = {}
        arguments = (inputs, target) if rows is None and not keywords else None
        with self.updates() as updates, self.spread.step(self.groups, self._device, arguments) as spread:
            queue = spread.ordered(self.groups)
            while queue:
                group = queue.popleft()
                chosen = [local for local, row in enumerate(group.rows) if row in entries]
                if not chosen:
                    continue
                whole = len(chosen) == len(group.live)
                places = group.entries(entries) if whole else [entries[group.rows[local] or 0] for local in chosen]
                of_group = [take_entries(value, places) for value in (inputs, target)]
                group_keywords = {name: take_entries(value, places) for name, value in keywords.items()}
                group_keywords |= {} if whole else {"rows": chosen}
                try:
                    with spread.of_group(group), updates.of_group(group.members, group.rows, whole):
                        losses[group.number] = group.members.step(*of_group, **group_keywords)
                except ForwardsDiffer as error:
                    queue.extendleft(reversed(part(self, group, error, None if whole else chosen)))
        like = next(iter(losses.values()))
        no_loss = torch.full((1,), math.nan, dtype=like.dtype, device=like.device)
        return self.layout.collected([losses.get(g.number, no_loss.expand(len(g.rows))) for g in self.groups])

    def _note_memory(self) -> None:
        """Set for each group the bytes that the state of the other groups takes, if memory is limited."""
        if self.options.memory is not None:
            sizes = [state_bytes(group.members.fused, group.members.optimizer) for group in self.groups]
            for group, size in zip(self.groups, sizes, strict=True):
                group.members.elsewhere = sum(sizes) - size

    def _stepping(self, rows: Sequence[int] | None, arguments: Any) -> list[int]:
        """Return the rows that have entries in stacked arguments, in the order of the entries. Raises ValueError."""
        if rows is None:
            check_entries(arguments, self.size)
            return list(range(self.size))
        chosen = rows_of(rows, self.size)
        check_once(chosen)
        if not chosen:
            raise ValueError("rows=[] is empty: give the row of at least one member")
        for row in chosen:
            self.layout.slot_of(row)
        for group in self.groups:
            check_keyword(group.members, "rows")
        check_stacked(arguments, chosen)
        return chosen

    @contextmanager
    def updates(self) -> Iterator[GroupUpdates]:
        """Context manager: groups make updates, which count as one. Deferred updates are made at the end."""
        updates = GroupUpdates(self.options.on_nonfinite == "raise")
        for group in self.groups:
            group.members._roll.step = self.steps
        yield updates
        updates.make()
        self.steps = max([self.steps, *(group.members._roll.step for group in self.groups)])

    def _settle(self) -> None:
        if self.unsettled and not any(g.members._common and g.members._updates.underway for g in self.groups):
            waiting, self.unsettled = [group for group in self.unsettled if group in self.groups], []
            settle(self, waiting)

    @property
    def _device(self) -> torch.device:
        devices = [p.device for group in self.groups for p in group.members.fused.parameters()]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    @in_turn
    def stop(self, row: int | Sequence[int]) -> Any:
        single, rows = is_row(row), rows_of(row, self.size)
        check_once(rows)
        slots = [self.layout.slot_of(member_row) for member_row in rows]
        models = []
        for group, local in slots:
            models.append(group.members.stop(local))
            group.rows[local] = None
        self.changed()
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
        models = listed("model", model, nn.Module)
        tags = [None] * len(models) if tag is None else listed("tag", tag, str)
        self.check_between()
        rows = (self.layout.free or [self.size])[:1] if row is None else rows_of(row, self.size)
        names = self.names_of(rows, tags, len(models))
        grouped(models)
        makes = [None] * len(models) if scheduler is None else one_for_each(scheduler, len(models))
        shared = shared_frozen(models, [group.model for group in self.groups])
        count, joining = len(models), []
        for index, each in enumerate(models):
            clips = tuple(None if v is None else value_of("clip", v, index, count) for v in (clip_norm, clip_value))
            values = {key: value_of(key, value, index, count, pair=key in self.pairs) for key, value in hypers.items()}
            calls = value_of("accumulate", accumulate, index, count)
            joining.append(self.options.joining(each, shared, makes[index], (clips[0], clips[1]), calls, values))
        self.size = max(self.size, *(each + 1 for each in rows))
        new = []
        for new_row, name, member in zip(rows, names, joining, strict=True):
            member._roll = Roll.of(1, [name])
            new.append(self.add(member, [new_row], ""))
            self.lineage.append(Event(self.steps, name, EventKind.START))
        settle(self, new)
        return rows[0] if row is None or is_row(row) else rows

    def names_of(self, rows: Sequence[int], tags: Sequence[str | None], models: int) -> list[str]:
        """Return the names of members that start in ``rows``. Raises ValueError, as for an array."""
        ages = torch.zeros(max(self.size, *(row + 1 for row in rows)), dtype=torch.int64, device="cpu")
        row_tags = [*self.layout.tags, *[None] * (len(ages) - self.size)]
        roll = Roll(row_tags, ages, ages.bool(), ages.clone(), tag_number=self.tag_number)
        roll.check_start(rows, tags, models)
        for row, tag in zip(rows, tags, strict=True):
            roll.enter(row, tag)
        self.tag_number = roll.tag_number
        return [roll.tag(row) for row in rows]

    @in_turn
    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        moves = [
            (source_row, target_row)
            for source_row, target_row in pairs(src, dst, self.size)
            if source_row != target_row
        ]
        if not moves:
            return
        self.check_between()
        for source_row, _ in moves:
            group, local = self.layout.slot_of(source_row)
            if bool(group.members._roll.frozen[local]):
                tag = group.members._roll.tag(local)
                raise ValueError(f"{tag!r} in row {source_row} went bad and is frozen: copy a healthy member")
        within: dict[int, tuple[PlacedGroup, list[int], list[int]]] = {}
        across: list[tuple[int, MemberState]] = []
        for source_row, target_row in moves:
            group, local = self.layout.slot_of(source_row)
            target = self.layout.slots[target_row]
            if target is not None and target[0] is group:
                _, sources, targets = within.setdefault(group.number, (group, [], []))
                sources.append(local)
                targets.append(target[1])
            else:
                across.append((target_row, copy_member_state(group.members, local)))
        records = dict(self.best)
        for group, sources, targets in within.values():
            group.members._roll.step = self.steps
            group.members.copy(sources, targets)
        self._replace(across, records)

    def _replace(self, copies: Sequence[tuple[int, MemberState]], records: dict[str, BestRecord]) -> None:
        """Replace members of other groups, or fill free rows, with copies: each keeps its row's name or gets a new one.

        ``records``: the best weights of the members that are copied.
        """
        names = dict(zip(range(self.size), self.layout.tags, strict=True))
        free = [row for row, _ in copies if names[row] is None]
        names |= dict(zip(free, self.names_of(free, [None] * len(free), len(free)), strict=True)) if free else {}
        for row, _ in copies:
            slot = self.layout.slots[row]
            if slot is not None:
                slot[0].members._roll.tags[slot[1]] = None
                slot[0].members._roll._alive = None
                slot[0].rows[slot[1]] = None
        self.changed()
        new = []
        for row, state in copies:
            name = names[row]
            assert name is not None
            shared = shared_frozen([state.model], [group.model for group in self.groups])
            members = self.options.group_of([state], shared)
            members._roll.tags[0] = name
            new.append(self.add(members, [row], ""))
            self.best.pop(name, None)
            if state.tag in records:
                self.best[name] = records[state.tag]
            self.lineage.append(Event(self.steps, name, EventKind.COPY, state.tag))
        settle(self, new)

    @in_turn
    def thaw(self, row: int | Sequence[int]) -> None:
        for member_row in rows_of(row, self.size):
            group, local = self.layout.slot_of(member_row)
            group.members._roll.step = self.steps
            group.members.thaw(local)

    @in_turn
    def compact(self) -> list[int]:
        live = self.layout.live
        for group in self.groups:
            before = len(group.members)
            remaining = group.members.compact()
            if len(group.members) < before:
                rows = [group.rows[local] for local in remaining]
                group.rows = [*rows, *[None] * (len(group.members) - len(rows))]
        moved = {row: index for index, row in enumerate(live)}
        for group in self.groups:
            group.rows = [None if row is None else moved[row] for row in group.rows]
        self.size = max(1, len(live))
        self.changed()
        return live

    @in_turn
    def grow(self, count: int) -> None:
        if not is_row(count) or isinstance(count, bool) or count < 1:
            raise ValueError(f"grow by {count!r}: a whole number of rows, one at least")
        self.check_between()
        self.size += int(count)
        self.changed()

    def check_between(self) -> None:
        """Raise a ValueError if members that train a parameter together have an unfinished update."""
        for group in self.groups:
            group.members._check_between()

    @in_turn
    def evaluate(self, metric: Callable[..., Any], loader: Iterable[Any]) -> Tensor:
        """See `hfusion.Population.evaluate`; the loader is read once for all groups."""
        values = torch.full((self.size,), math.nan, dtype=torch.float64, device="cpu")
        for row, number in evaluate_mixed(self, metric, loader).items():
            values[row] = number
        return values

    @in_turn
    def outputs(self, loader: Iterable[Any]) -> tuple[Any, Any]:
        """Return all members' outputs in eval mode, ``[rows, N, ...]``, and the targets; reads the loader once."""
        return mixed_outputs(self, loader)
