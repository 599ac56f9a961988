"""hf.Population: members of any models that train, leave, join and are copied, each exactly as if alone."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hfusion.array.fuse import fuse
from hfusion.array.member_functions import MemberFunction, as_each
from hfusion.array.module import FusedModule
from hfusion.checkpoint import files
from hfusion.checkpoint.save import Root, in_thread
from hfusion.core.calls import take_entries
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.core.exclusive import FairLock
from hfusion.core.member_table import check_once, is_row, pairs, rows_of
from hfusion.core.step_arguments import Compile
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.hyper import HyperValue
from hfusion.optim.lr_scheduler import Make, PerMember, one_for_each
from hfusion.population import grouping
from hfusion.population.evaluation import check_entries, check_keyword, evaluate, rows_of_weights
from hfusion.population.group_step import MemberWorkers, one_update, step_groups
from hfusion.population.grouping import TWINS, Candidates, MemberLayout, PopulationGroup, copied_member
from hfusion.population.members import (
    Event,
    EventKind,
    GroupOptions,
    Hparams,
    MemberSchedules,
    Models,
    OnNonfinite,
    in_turn,
    key_of,
    listed,
    new_names,
    value_of,
)
from hfusion.population.training_group import TrainingGroup, group_of
from hfusion.population.weights import BestMembers, average, gathered, load, load_run
from hfusion.torch_private.module_hooks import has_step_hooks


class Population:
    """Members that train, join, leave and are copied, each exactly as if alone.

    Members that can share an array of batched operators do; the others run as plain torch, see `groups`. Rows without
    a member are free, with NaN in results, until `compact` removes them.

    Args:
        models: the initial members, of any classes and shapes, or a fused module. The models are not changed.
        optimizer: makes an optimizer of hf.optim from parameters. It is called for each group. Lists with a value for
            each member of the population, such as learning rates, are divided among the groups.
        loss: a functional loss, see `hfusion.per_model`.
        scheduler: makes a scheduler of torch.optim.lr_scheduler from the optimizer of one member; or a list of such
            functions, see `hfusion.optim.lr_scheduler.PerMember`. ``pop.scheduler.step()`` steps it.
        scaler: scales each member's loss by its own scale.
        clip_norm, clip_value: limits of the gradients, one or one per member; values are clipped first.
        accumulate: the number of `step` calls per update, which uses the mean of their gradients; one, or one per
            member.
        on_nonfinite: what to do if a loss or gradient of a member is not finite. ``"freeze"`` undoes the member's step
            and leaves it out until it is stopped, overwritten or thawed. ``"raise"`` undoes the step of all members and
            raises a NonFiniteError that names it. ``"ignore"`` continues. Other members are never affected.
        tags: the members' names, also in checkpoints; "member 0" and so on by default.
        compile, memory: as in `hfusion.train_step`, for arrays; ``memory`` is the limit of a step of all members.
        processes: the number of processes that train plain members, this one included; by default this one alone. The
            others are forks, see "Use all CPU cores" in docs/different-models.md.

    Raises:
        FusionError: models train one tensor together.
        ValueError: options exclude each other, or the optimizer is not one of hf.optim.

    Example:
        >>> import hfusion as hf, torch
        >>> models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))]
        >>> make, loss = lambda p: hf.optim.SGD(p, lr=0.1), torch.nn.functional.mse_loss
        >>> pop = hf.Population(models, optimizer=make, loss=loss, compile=False)
        >>> pop.step(torch.ones(4, 3), torch.zeros(4, 2)).shape
        torch.Size([3])
        >>> [(group.kind, group.rows) for group in pop.groups]
        [('array', (0, 1)), ('plain', (2,))]
    """

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
        accumulate: int | Sequence[int] = 1,
        on_nonfinite: OnNonfinite = "freeze",
        tags: Sequence[str] | None = None,
        compile: Compile = None,
        memory: str | int | None = None,
        processes: int = 1,
    ) -> None:
        step = clip_norm, clip_value, accumulate, on_nonfinite, compile, memory, processes
        options = GroupOptions(len(models), optimizer, loss, scheduler, scaler, *step)
        if tags is not None and len(tags) != len(models):
            raise ValueError(f"{len(tags)} tags for {len(models)} models: give one for each")
        names = new_names(tags or [None] * len(models), [], options.history)
        options.history.events += [Event(0, name, EventKind.START) for name in names]
        twins = list(range(len(models))), TWINS
        candidates = [twins] if isinstance(models, FusedModule) else grouping.grouped(models)
        self._form(options, candidates, models, names, scaler)

    # Whether there have been several groups: they draw random numbers apart from each other from then on.
    _parted = False

    def _form(self, options: GroupOptions, candidates: list[Candidates], models: Any, tags: Any, scaler: Any) -> None:
        """Create the attributes, and the groups of the first members.

        Args:
            tags: the names by row, None for a free row. There is a model for each name.
            scaler: the user's, which the only array has itself.
        """
        self._size, self._options = options.total, options
        # In the order of their first rows, in which they are stepped.
        self._held_groups: list[TrainingGroup] = []
        self._parted |= len(candidates) > 1
        self._history = options.history
        self._gradient_hooks: OrderedDict[int, MemberFunction] = OrderedDict()
        self._prepare()
        members = [(row, name) for row, name in enumerate(tags) if name is not None]
        shared = grouping.shared_frozen(models) if self._parted else ()
        for indices, why in candidates:
            rows = [members[index][0] for index in indices]
            if self._parted:
                group = group_of([models[index] for index in indices], self._options, rows, shared)
            else:
                array = models if isinstance(models, FusedModule) else fuse(list(models))
                group = TrainingGroup(array, self._options, rows)
                if scaler is not None:
                    scaler.begin(self._size)
                    scaler.table.arrange(rows)
                    group.scaler = scaler
            # A loaded array gets its free rows later.
            self._add(group, rows if self._parted else range(len(rows)), why, [members[index][1] for index in indices])
        self._changed()

    def _prepare(self) -> None:
        """Create what no copy has."""
        self._lock = FairLock()
        self._saving: Future[Path] | None = None
        # They own plain members while only steps are made.
        self._workers = MemberWorkers(self._options.processes)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy.deepcopy."""
        self._workers.come_home()
        excluded = ("_lock", "_saving", "_workers")
        return {name: value for name, value in vars(self).items() if name not in excluded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    @property
    def array(self) -> TrainingGroup:
        """The group of all members, an array with the population's rows. Raises AttributeError for several groups."""
        if self._parted:
            raise AttributeError(
                f"the members are {len(self.groups)} groups, each with an array or a model, an optimizer and a scaler "
                "of its own; pop.groups shows them, and step, evaluate, hparams, models, scheduler and save are of all"
            )
        return self._groups[0]

    @property
    def fused(self) -> FusedModule:
        """The array of all members, see `array`."""
        return self.array.fused

    @property
    def optimizer(self) -> FusedOptimizer:
        """The optimizer of the array of all members, see `array`."""
        return self.array.optimizer

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler of the array of all members, see `array`."""
        return self.array.scaler

    def check_hooks(self) -> None:
        """Raise a FusionError if one array becomes several groups, and its optimizer has hooks of its step."""
        if not self._parted and has_step_hooks(self._groups[0].optimizer):
            raise FusionError(
                "members become several groups, each with an optimizer of its own, and the optimizer of the array "
                "has hooks of its step: use register_gradient_hook, or each after step, which are for all members"
            )

    def _add(self, group: TrainingGroup, rows: Sequence[int | None], why: str, names: Sequence[str] = ()) -> None:
        """Add a group whose members are in ``rows``; ``names``: those of new members."""
        group.why, group.table["row"] = why, list(rows)
        for local, name in enumerate(names):
            group.table.enter(local, name, rows[local])
            group.table["key"][local] = key_of(name)
        group.gradient_hooks = self._gradient_hooks
        self._held_groups.append(group)

    def _changed(self) -> None:
        """Remove groups without members, sort the others, and compute the layout again."""
        live = sorted((group for group in self._held_groups if group.live), key=lambda group: min(group.live))
        self._parted |= live not in ([], self._held_groups[:1])
        if self._parted:
            self._held_groups = live
        else:
            # One array has the population's rows, free ones too.
            self._held_groups = self._held_groups[:1]
            self._size = len(self._held_groups[0])
        self._held_layout = MemberLayout(self._held_groups, self._size)

    @property
    def _groups(self) -> list[TrainingGroup]:
        """The groups, with all members in this process. While only steps are made, some may be in others."""
        self._workers.come_home()
        return self._held_groups

    @property
    def _layout(self) -> MemberLayout:
        self._workers.come_home()
        return self._held_layout

    def __repr__(self) -> str:
        frozen = f", {len(self.frozen)} frozen" if self.frozen else ""
        members = f"{len(self._layout.live)} members in {len(self)} rows{frozen}, step {self.steps}"
        if not self._parted:
            return f"Population({self.array.kind.__name__}, {type(self.optimizer).__name__}, {members})"
        return "\n  ".join([f"Population({members})", *map(str, self.groups)])

    def __len__(self) -> int:
        """The number of rows, free ones too."""
        return self._size

    @property
    def groups(self) -> tuple[PopulationGroup, ...]:
        """The groups of members, with their kind and the reason."""
        return tuple(
            PopulationGroup(tuple(sorted(group.live)), "plain" if group.is_plain else "array", group.why)
            for group in self._groups
        )

    @property
    def hparams(self) -> Hparams:
        """The hyper-parameters by name, vectors ``[rows]`` to read and write: ``pop.hparams["lr"][rows] *= 1.2``."""
        return Hparams(self)

    @property
    def models(self) -> Models:
        """The members by row, as modules that are live views; None where a row is free."""
        return Models(self)

    @property
    def scheduler(self) -> PerMember | MemberSchedules | None:
        """The members' schedules; None without."""
        several = None if self._options.schedules is None else MemberSchedules(self)
        return several if self._parted else self.array.scheduler

    @property
    def best(self) -> BestMembers:
        """Each member's best weights, to update, restore and copy: see `hfusion.population.weights.BestMembers`."""
        return BestMembers(self)

    @property
    def tags(self) -> list[str | None]:
        """The members' names by row; None where a row is free."""
        return [None if slot is None else slot[0].table["tag"][slot[1]] for slot in self._layout.slots]

    @property
    def ages(self) -> Tensor:
        """Number of updates of the member in each row: int64 ``[rows]``."""
        return self._layout.collected([group.table["age"] for group in self._groups])

    @property
    def frozen(self) -> list[int]:
        """The rows of members left out of steps after a loss or gradient was not finite; see ``on_nonfinite``."""
        frozen = self._layout.collected([group.table["frozen"] for group in self._groups])
        return frozen.nonzero().reshape(-1).tolist()

    @property
    def lineage(self) -> tuple[Any, ...]:
        """History of the members, in order: events with ``step``, ``tag``, ``what``, ``source``."""
        return tuple(self._history.events)

    @property
    def steps(self) -> int:
        """Number of updates of the population."""
        return self._history.step

    def row(self, tag: str) -> int:
        """Return the row of the member with this name. Raises KeyError."""
        tags = self.tags
        if tag not in tags:
            raise KeyError(f"{tag!r} is no member; members are {[t for t in tags if t is not None]}")
        return tags.index(tag)

    @property
    def active_rows(self) -> list[int]:
        """The rows of members that train: taken, and not frozen."""
        return sorted(row for g in self._groups for local in g.active_rows if (row := g.rows[local]) is not None)

    def _chosen(self, rows: int | Sequence[int] | None) -> list[int]:
        """Return rows with members as a list, all of them for None. Raises ValueError for free or repeated rows."""
        chosen = self._layout.live if rows is None else rows_of(rows, self._size)
        check_once(chosen)
        for row in chosen:
            self._layout.slot_of(row)
        return chosen

    def _by_group(self, rows: Sequence[int]) -> list[tuple[TrainingGroup, list[int]]]:
        """Return each group of members in ``rows``, with their rows in the group."""
        groups: dict[TrainingGroup, list[int]] = {}
        for slot in map(self._layout.slots.__getitem__, rows):
            if slot is not None:
                groups.setdefault(slot[0], []).append(slot[1])
        return list(groups.items())

    @in_turn
    def each(
        self,
        fn: Callable[..., Any] | MemberFunction,
        *args: Any,
        rows: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Run a function of one member's parameters and gradients for all members at once: see `hfusion.each`.

        Args:
            fn: the function, or what `hfusion.each` gave for it.
            rows: the members it is for, which may be frozen; None: all that train. Others stay as they are, to the bit.
            args, kwargs: passed on; values in `hfusion.stacked` have a row for each row of the population.

        Raises:
            ValueError: a row that is free or comes twice; and as `hfusion.each`.
        """
        check_entries((args, kwargs), self._size)
        chosen = self.active_rows if rows is None else self._chosen(rows)
        for group, places in self._by_group(chosen):
            positional, named = take_entries((args, kwargs), group.entries())
            with group.table.naming():
                group.each(as_each(fn), places, *positional, **named)

    def register_gradient_hook(self, fn: Callable[..., Any] | MemberFunction) -> RemovableHandle:
        """Let `step` run a function between backward and update, before gradients are clipped.

        It is called as by `each`, once for each update, with gradients that are summed over ``accumulate`` calls and
        unscaled; for members that make this update only. Saves do not hold it.

        Returns: a handle whose ``remove()`` ends it.
        """
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = as_each(fn)
        return handle

    def clear_gradients(self) -> None:
        """Free the gradients of all members, which are not needed between updates."""
        for group in self._groups:
            group.drop_gradients()

    def step(
        self, inputs: Any, target: Any, *, rows: Sequence[int] | None = None, weights: Any = None, **keywords: Any
    ) -> Tensor:
        """Train all members, or ``rows``, for one step. Returns losses ``[rows]``, NaN for rows that do not step.

        Rows that do not step are free, frozen by an earlier call, or not in ``rows``.

        Args:
            inputs, target, keywords: as in `hfusion.train_step`. Stacked ones have a row for each member that steps, in
                the order of ``rows``.
            rows: the members that step, each once. The others do not change: neither weights nor moments, counts,
                schedules and scales.
            weights: the weight of each sample in the loss, ``[N]`` for all members or ``[rows, N]``; 0 removes the
                sample. The loss needs ``reduction=``, as torch's have, or to return values ``[N]``.

        Raises:
            ValueError: rows are out of range, free or repeated; a stacked argument has another number of members; or
                weights are negative, all 0 for a member, or used with a loss without values of samples.
            FusionError: ``rows`` with a hook of all members.
        """
        with self._lock:
            for name in [name for name, value in (("rows", rows), ("weights", weights)) if value is not None]:
                for group in self._groups:
                    check_keyword(group.kind, name)
            if rows is not None:
                rows = self._chosen(rows)
                if not rows:
                    raise ValueError("rows=[] is empty: give the row of at least one member")
                check_entries((inputs, target, keywords), rows)
            if weights is not None:
                weights = rows_of_weights(weights, range(self._size) if rows is None else rows, self._layout.free)
            with one_update(self):
                if not self._parted:
                    (group,) = self._held_groups
                    try:
                        return group.step((inputs, target, keywords), rows, weights)
                    except ForwardsDiffer as error:
                        grouping.part(self, group, error, rows)
                return step_groups(self, (inputs, target, keywords), rows, weights)

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
        """Add a model of any shape as a member, with a step count of 0, and return its row. The model is not changed.

        Args:
            row: a free row; None for the first free row, or a new one. For several rows, pass a list of models, and for
                each argument below one value for all rows, or a list; a list of rows is returned.
            hypers: the member's hyper-parameters. One may be left out if all members began with the same value. Write a
                pair such as ``betas`` as a tuple; a list of pairs is one for each row.
            scheduler, clip_norm, clip_value, accumulate: likewise.

        Raises:
            ValueError: the row is taken, the tag is in use, a value is missing since members began with different
                ones, or a value is invalid.
        """
        models = listed("model", model, nn.Module)
        tags = [None] * len(models) if tag is None else listed("tag", tag, str)
        taken, count, size = self.tags, len(models), self._size
        rows = rows_of(row, size) if row is not None else [*self._layout.free, *range(size, size + count)][:count]
        check_once(rows)
        if not len(rows) == count == len(tags):
            raise ValueError(f"{count} models with {len(tags)} tags for {len(rows)} rows: give one for each")
        for new_row in rows:
            if new_row < size and taken[new_row] is not None:
                others = f"rows {self._layout.free} are free"
                raise ValueError(f"row {new_row} is taken by {taken[new_row]!r}: stop it first; {others}")
        grouping.grouped(models)
        makes = [None] * count if scheduler is None else one_for_each(scheduler, count)
        numbers = {"clip_norm": clip_norm, "clip_value": clip_value, "accumulate": accumulate}
        shared = grouping.shared_frozen(models, [group.read(0) for group in self._groups])
        pairs_of = {h.key for group in self._groups for h in group.optimizer.hypers if h.index is not None}
        events, new = len(self._history.events), list[TrainingGroup]()
        try:
            names = new_names(tags, taken, self._history)
            for index, joining in enumerate(models):
                own_numbers = {name: value_of(name, given, index, count) for name, given in numbers.items()}
                own = {key: value_of(key, given, index, count, pair=key in pairs_of) for key, given in hypers.items()}
                new.append(group_of([joining], self._options, [0], shared))
                new[-1].table.enter(0, names[index], rows[index])
                with new[-1].table.naming():
                    new[-1].begin_anew(makes[index], own_numbers, own)
            for new_row, name, group in zip(rows, names, new, strict=True):
                self._add(group, [new_row], "", [name])
                group.table.note(0, EventKind.START)
            grouping.settle(self, new)
            if sum(bool(group.live) for group in self._groups) > 1:
                self.check_hooks()
        except BaseException:
            del self._history.events[events:]
            for group in self._groups:
                group.release(local for local, of_local in enumerate(group.rows) if of_local in rows)
            self._changed()
            raise
        self._size = max(self._size, *(each + 1 for each in rows))
        self._changed()
        return rows[0] if is_row(row) or (row is None and isinstance(model, nn.Module)) else rows

    def append(self, models: nn.Module | Sequence[nn.Module], **given: Any) -> list[int]:
        """Add models of any shape in free and new rows, and return their rows. For ``given`` see `start`."""
        rows: list[int] = self.start(None, listed("models", models, nn.Module), **given)
        return rows

    @in_turn
    def stop(self, row: int | Sequence[int]) -> Any:
        """Remove a member and return its model, or a list of models for several rows. The rows are free afterwards.

        The model has copies of its own tensors; a frozen base that all members share stays shared.

        Raises:
            ValueError: rows are out of range, free or repeated.
        """
        single, rows = is_row(row), self._chosen(row)
        slots = [self._layout.slot_of(member_row) for member_row in rows]
        models = [copied_member(group.fused, local) for group, local in slots]
        for group, local in slots:
            group.table.note(local, EventKind.STOP)
            group.release([local])
        self._changed()
        return models[0] if single else models

    @in_turn
    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Make members ``dst`` copies of ``src``: model, weights, moments, counts, schedule, hyper-parameters, scale.

        Modes, frozen flags and hooks of the model and of its parameters follow.
        ``src`` is one row, or as many as ``dst``. All are read before any is written. A taken row keeps its tag, a
        free one gets a new tag.

        Raises:
            ValueError: ``src`` is free or frozen, or rows are out of range or written twice.
        """
        layout, tags = self._layout, self.tags
        moves = [(source, target) for source, target in pairs(src, dst, self._size) if source != target]
        copies: dict[TrainingGroup, list[tuple[int, int]]] = {}
        for source, target in moves:
            group, local = layout.slot_of(source)
            if bool(group.table["frozen"][local]):
                raise ValueError(f"{tags[source]!r} in row {source} went bad and is frozen: copy a healthy member")
            copies.setdefault(group, []).append((local, target))
        free = [target for _, target in moves if tags[target] is None]
        names = dict(zip(free, new_names([None] * len(free), tags, self._history), strict=True))
        new, written = list[TrainingGroup](), list[tuple[TrainingGroup, int, int]]()
        for group, of_group in copies.items():
            if group.is_plain:
                for local, target in of_group:
                    new.append(grouping.group_of_states(self, [grouping.copy_member_state(group, local)]))
                    written.append((new[-1], 0, target))
                continue
            places, sources = group.places([target for _, target in of_group]), list(range(len(group)))
            for place, (local, _) in zip(places, of_group, strict=True):
                sources[place] = local
            group.arrange(sources)
            written += [(group, place, target) for place, (_, target) in zip(places, of_group, strict=True)]
        # All were read: members that are written over, and were in other groups, leave these.
        for _, target in moves:
            if (slot := layout.slots[target]) is not None and not any(slot == held[:2] for held in written):
                slot[0].release([slot[1]])
        for group, place, target in written:
            if group.is_plain:
                self._add(group, [target], "")
            # The name was copied, too.
            origin = group.table["tag"][place]
            group.table.enter(place, tags[target] or names[target], target)
            group.table.note(place, EventKind.COPY, origin)
        grouping.settle(self, new)
        self._changed()

    @in_turn
    def thaw(self, row: int | Sequence[int]) -> None:
        """Let frozen members train again, from their state before the step that was not finite."""
        for member_row in rows_of(row, self._size):
            group, local = self._layout.slot_of(member_row)
            group.table.thaw(local)

    @in_turn
    def compact(self) -> list[int]:
        """Remove free rows, and so their time and memory. The remaining members move up.

        A few free rows may remain, since arrays have sizes in blocks to limit the number of compiled programs. Returns
        the old row of each member, in the new order.
        """
        live = self._layout.live
        resized = [group.compact() for group in self._groups]
        if self._parted or any(resized):
            moved = {row: index for index, row in enumerate(live)}
            for group in self._groups:
                group.table["row"] = [None if row is None else moved[row] for row in group.rows]
            self._size = max(1, len(live))
            self._changed()
        return live

    @in_turn
    def grow(self, count: int) -> None:
        """Add free rows at the end, for at least ``count`` more members."""
        if not is_row(count) or isinstance(count, bool) or count < 1:
            raise ValueError(f"grow by {count!r}: a whole number of rows, one at least")
        self._size += int(count)
        if not self._parted:
            self.array.grow(int(count))
        self._changed()

    @in_turn
    def evaluate(self, metric: Callable[..., Any], loader: Iterable[Any]) -> Tensor:
        """Return a metric of every member over all batches ``(inputs, target)``, in eval mode: float64 ``[rows]``.

        ``metric(output, target)`` gets one member's outputs of all batches, concatenated, and returns a number: a
        loss, a function of torchmetrics.functional, or your own. A metric with ``update`` and ``compute`` gets batch
        by batch. The loader is read once. Free rows are NaN. Raises ValueError for no metric, or batches of no pairs.
        """
        values = torch.full((self._size,), math.nan, dtype=torch.float64, device="cpu")
        for row, number in evaluate(self, metric, loader).items():
            values[row] = number
        return values

    @in_turn
    def average(
        self,
        rows: int | Sequence[int] | None = None,
        weights: Tensor | Sequence[float] | None = None,
        *,
        into: int | Sequence[int] | Literal["all"] | None = None,
        optimizer: Literal["keep", "reset"] = "keep",
    ) -> nn.Module | None:
        """Average the parameters and floating-point buffers of members of one shape, weighted.

        Other buffers, such as BatchNorm's count of batches, are taken from the last of ``rows`` with a weight, as in
        `torch.optim.swa_utils.AveragedModel`. Half precision is averaged in float32.

        Args:
            rows: the members to average; by default all.
            weights: a weight for each, at least 0, such as the number of samples; by default equal. 0 leaves one out.
            into: the rows to write the average into, or ``"all"``, as a server of federated averaging does. By default
                it is returned as a model, a copy of the first of ``rows``, and members do not change.
            optimizer: for members that are written, ``"keep"`` keeps their moments and counts, and ``"reset"`` clears
                them. Learning rates and schedules stay.

        Raises:
            ValueError: rows are out of range, free or repeated, members differ in shape, or weights are invalid.
        """
        return average(self, rows, weights, into, optimizer)

    def save(
        self,
        directory: Root,
        *,
        loader: Any = None,
        extra: Any = None,
        keep: int = 3,
        score: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Save everything in a new folder under ``directory``, and return its path, as `hfusion.save` does.

        With ``wait=False`` this copies the state, and a background thread writes it; ``result()`` of the returned
        future is the path, or raises; an error is also a warning. A save waits for the previous one.
        """
        keep, score = files.checked(keep, score)
        if self._saving is not None:
            # One save at a time.
            self._saving.exception()
        with self._lock:
            (body, tensors), steps = gathered(self, loader, extra), self.steps
        write = partial(files.write, directory, body, tensors, step=steps, keep=keep, score=score)
        if wait:
            return write()
        self._saving = in_thread(write)
        return self._saving

    @classmethod
    def load(
        cls,
        directory: Root | Sequence[Root],
        make_model: Callable[..., nn.Module],
        *,
        optimizer: Callable[[Any], FusedOptimizer],
        loss: Callable[..., Any],
        tags: str | Sequence[str] | None = None,
        scheduler: Make | Sequence[Make] | Mapping[str, Make] | None = None,
        loader: Any = None,
        random: bool = True,
        **options: Any,
    ) -> Population:
        """Return the population of the latest save under ``directory``, or of several, or only its members ``tags``.

        Args:
            make_model: makes a model of each member; its tensors are overwritten. It may take the member's name, and
                must if members are of different models.
            optimizer: as when the population was made, with one value of each hyper-parameter for all members; saved
                values replace them. The same holds for ``scaler``, ``clip_norm`` and ``clip_value``.
            options: further options of the population; ``accumulate`` and ``on_nonfinite`` are saved, too.
            scheduler: as when the population was made; a dict by name if members have different ones.
            loader, random: as in `hfusion.load`; the position of the loader is restored.

        Raises:
            CheckpointError: there is no save, a file is damaged, or it belongs to other models.
        """
        options |= {"optimizer": optimizer, "loss": loss, "scheduler": scheduler}
        population = cls.__new__(cls)
        load_run(population, load(population, directory, make_model, tags, options), loader, random)
        return population
