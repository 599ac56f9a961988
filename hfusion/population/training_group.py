"""Groups of a population: members with their optimizer, schedules, scales and limits, whose rows join and leave."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array import array_editing
from hfusion.array.fuse import fuse
from hfusion.array.gathered_rows import GatheredRows, check_unhooked
from hfusion.array.member_functions import MemberFunction, training_rows
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import check_materialized, device_of, tensors
from hfusion.checkpoint.save import member_stacks
from hfusion.compiler.arguments import map_leaf, row_of_leaf
from hfusion.core.calls import call_arguments, is_stacked, stacked, take_entries
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.member_table import MemberTable, Widths
from hfusion.core.membership import Membership, copy_tensor_hooks, is_per_member, mark, membership
from hfusion.core.memory import module_copy
from hfusion.core.step_arguments import check_losses
from hfusion.device.backend import active_autocast, sent, without_autocast
from hfusion.optim import clip_grad_norm_, clip_grad_value_, optimizer_rows
from hfusion.optim.clip import all_finite, overflowing
from hfusion.optim.group import membership_of
from hfusion.optim.lr_scheduler import Make, PerMember
from hfusion.optim.native_kernels import FiniteCheck
from hfusion.population.evaluation import entry_bytes, evaluating_model, sample_weighted, weighted, with_row
from hfusion.population.members import GroupOptions, GroupTable, check_numbers, key_of, leave_out, no_best, written_rows
from hfusion.step.memory_budget import state_bytes
from hfusion.step.train_step import train_step
from hfusion.torch_private.module_hooks import add_step_hooks, step_hooks

StepArguments = tuple[Any, Any, dict[str, Any]]
"""Inputs, target and keywords of a step."""

# Number of elements up to which one thread checks as fast as several.
_ONE_THREAD = 1 << 20
# Bytes of the values in a forward of all members, up to which it takes less time than to copy some of them.
_LIGHT = 4 << 20


class TrainingGroup:
    """Members of a population that one array computes together; each trains exactly as if alone.

    Rows here are those of the group; ``rows`` has the population's.

    Attributes:
        fused: the array.
        options: the population's options.
        table: what each member has besides tensors, optimizer state, scale and schedule, see `GroupTable`.
        best: each member's best weights, see `BestMembers`.
        why: why it is a group of its own.
        elsewhere: bytes that the state of other groups takes.
        seconds: how long its last step took in this process.
    """

    why = ""
    elsewhere = 0
    seconds = 0.0
    is_plain = False

    def __init__(self, module: Any, options: GroupOptions, origins: Sequence[int]) -> None:
        """Create a group of new members.

        Args:
            module: the array, or the model of a `PlainGroup`.
            origins: for each row, the initial member of the population whose options it has.

        Raises:
            FusionError: members train a parameter together.
        """
        check_own(module.parameters())
        self.fused: FusedModule = module
        self.options, self.optimizer, makes = options, options.optimizer_of(module, origins), options.schedules
        self.scheduler: Any = None if makes is None else PerMember(self.optimizer, [makes[row] for row in origins])
        self.scaler = None if options.scaler is None else options.scaler.of_rows(origins)
        self.table, self.best = GroupTable(options.numbers.take(origins), options.history), no_best(len(origins))
        for name in options.initial.keys() - self.table.columns.keys():
            # A save has limits that the population was not given.
            self.table.begin(name, torch.empty(1, dtype=torch.float64, device="cpu"))
        self.gradient_hooks: OrderedDict[int, MemberFunction] = OrderedDict()
        self._widths = Widths(len(origins))
        # Whether the loss that the step was made for has weights of calls, and of samples.
        self._weighs = self.scaler is not None or bool((self.table["accumulate"] > 1).any()), False
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy.deepcopy; the step is created again."""
        dropped = {"_before", "_resting", "_finite", "_shared_parameters", "_step", "_chosen", "_written", "_loss"}
        state = {name: value for name, value in vars(self).items() if name not in dropped}
        return {**state, "_expected_calls": self.known_calls, **step_hooks(self.optimizer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        add_step_hooks(self.optimizer, vars(self))
        self._prepare()

    def _prepare(self) -> None:
        """Create what no copy has."""
        self._finite = FiniteCheck()
        self._shared_parameters = [p for p in self.parameters() if not is_per_member(p)]
        # A small group for some of the members, with its array and optimizer.
        self._chosen: tuple[TrainingGroup, GatheredRows, optimizer_rows.GatheredState] | None = None
        # By key, what forward may write to, as it was before the present call.
        self._before: dict[str, Tensor] = {}
        # The members that the present call leaves as they are, bool [rows], or None.
        self._resting: Tensor | None = None
        self._make_step(*self._weighs)

    def _make_step(self, of_calls: bool, of_samples: bool) -> None:
        """Create the step for a loss with weights, as ``_weighs`` says. Raises ValueError for one without samples."""
        options = self.options
        loss = sample_weighted(options.loss) if of_samples else options.loss
        self._loss, self._weighs = weighted(loss) if of_calls else loss, (of_calls, of_samples)
        if self.is_plain:
            return
        self._step = train_step(self.fused, self._loss, self.optimizer, compile=options.compile, memory=options.memory)
        self._step.update = self._finish
        self._step.at_once = self._widths.at_once(len(self))
        # Kinds of calls for which the step of the group that this is a copy of had programs.
        self._step.expected_calls |= set(vars(self).pop("_expected_calls", ()))

        def hold_written(program: Any, this: Any = weakref.ref(self)) -> None:  # noqa: B008
            if (group := this()) is not None:
                group._written |= program.written
                group._hold(program.written)

        # Called with new programs, before they run.
        self.fused._on_program = hold_written
        # The keys of what forward writes to in the programs so far.
        self._written = array_editing.written_keys(self.fused)

    @property
    def known_calls(self) -> list[str]:
        """The kinds of calls that need no further eager step to determine how they run."""
        return [] if self.is_plain else sorted(self._step.known_calls)

    def __len__(self) -> int:
        """The number of rows, free ones too."""
        return self.table.rows

    @property
    def rows(self) -> list[int | None]:
        """The population's row of each row of the group; None for a free row."""
        return self.table["row"]  # type: ignore[no-any-return]

    @property
    def live(self) -> list[int]:
        """The population's rows of the members, in the order of the group."""
        return [row for row in self.rows if row is not None]

    @property
    def key(self) -> int:
        """Determines the random numbers of the group."""
        return key_of(next(tag for tag in self.table["tag"] if tag is not None))

    # The members' modules: a plain group has its own of these.

    @property
    def kind(self) -> type[nn.Module]:
        """The class of the models."""
        return type(self.fused if self.is_plain else self.fused._array.skeletons[0])

    def member(self, row: int) -> nn.Module:
        """Return the member in a row, live."""
        return self.fused[row]

    def read(self, row: int) -> nn.Module:
        """Return the member in a row as a module around its tensors, to read it."""
        return self.fused._member(row)

    def settle(self) -> None:
        """Apply what the user has done to members, or raise a FusionError for what does not fit the optimizer."""
        self.fused._views.update(self.fused)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.fused.parameters()

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.fused.named_parameters()

    def each(self, fn: MemberFunction, rows: list[int], *args: Any, **kwargs: Any) -> None:
        """Run a function of one member's parameters and gradients for members ``rows`` of the group."""
        fn(self.fused, *args, rows=rows, **kwargs)

    @property
    def active_rows(self) -> list[int]:
        """The group's rows of members that train: taken, and not frozen."""
        training = set(training_rows(self.fused))
        return [row for row in self.table.live if row in training and not bool(self.table["frozen"][row])]

    @cached_property
    def signature(self) -> Any:
        """What a model shares with the members if its structure allows it to join them."""
        return signature(self.read(0))

    # What belongs to the members.

    def tables(self) -> dict[str, MemberTable]:
        """All that each member has besides the tensors of its model: live tables by name."""
        return {**self.own_tables(), **self.optimizer.tables()}

    def own_tables(self) -> dict[str, MemberTable]:
        """The tables of what members have besides tensors and optimizer state, by name."""
        tables: dict[str, MemberTable] = {"member": self.table, "best": self.best}
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

    # Steps and updates.

    def step(self, arguments: StepArguments, rows: list[int] | None = None, weights: Any = None) -> Tensor:
        """Train all members, or those in ``rows`` of the group. Returns losses ``[rows of the group]``.

        ``weights``: None, or what `hfusion.population.evaluation.rows_of_weights` returns.
        """
        columns = self.table.columns
        resting, few = None, False
        (inputs, target, keywords), of_rows = arguments, weights
        if rows is not None and rows != list(range(self.table.rows)):
            few = 2 * len(rows) < self.table.rows
            if few and sum(p.nbytes for p in self.parameters()) + len(self) * entry_bytes(arguments) > _LIGHT:
                try:
                    return self._step_some(rows, arguments, weights)
                except FusionError as error:
                    # Only the array's own members keep Python state, and a loop leaves the others out.
                    if not isinstance(error.__cause__, KeepsState):
                        raise
            # To compute all costs less than to copy half of the members, or few of little work. Inputs of the others
            # repeat the first's.
            entry_of = {row: entry for entry, row in enumerate(rows)}
            entries = [entry_of.get(row, 0) for row in range(self.table.rows)]
            (inputs, target, keywords), of_rows = take_entries(arguments, entries), take_entries(weights, entries)
            if others := set(self.table.live) - entry_of.keys():
                resting = torch.zeros_like(columns["alive"])
                resting[list(others)] = True
        if self._shared_parameters:
            check_own(self._shared_parameters)
        # Whether a member accumulates the gradients of several calls.
        self._sums = bool((columns["accumulate"] > 1).any())
        weighs = self._weighs[0] or self._sums, self._weighs[1] or weights is not None
        if weighs != self._weighs:
            self._make_step(*weighs)
        if weighs[1]:
            target = {"target": target, "samples": map_leaf(of_rows, lambda rows: sent(rows, device_of(self.fused)))}
        if weighs[0]:
            shares = columns["accumulate"].double().reciprocal()
            shares = shares if self.scaler is None else self.scaler.scale(shares)
            target = {"target": target, "weight": stacked(sent(shares, device_of(self.fused)))}
        if rows is not None and resting is not None:
            if not self._step.lets_rest(inputs, keywords, _LIGHT if few else math.inf):
                return self._step_some(rows, arguments, weights)
            check_unhooked(self.fused)
            optimizer_rows.check_unhooked(self.optimizer, [self.rows[row] for row in rows])
        self._before, self._resting = {}, resting
        computed = columns["alive"] if resting is None else columns["alive"] & ~resting
        idle = () if bool(computed.all()) else (~computed).nonzero().reshape(-1).tolist()
        # Frozen members are computed, but make no step.
        computed = computed & ~columns["frozen"]
        with self.table.naming():
            losses = self._call(inputs, target, keywords, idle)
        return losses if bool(computed.all()) else losses.masked_fill(~computed.to(losses.device), math.nan)

    def _call(self, inputs: Any, target: Any, keywords: dict[str, Any], free: Iterable[int]) -> Tensor:
        """Compute losses and gradients, and call `_finish`. Returns losses ``[rows of the group]``.

        ``free``: the rows without a member, which need not be computed.
        """
        step, rows = self._step, self.table.rows
        if len(self.fused) != rows:
            raise ValueError(
                f"the array has {len(self.fused)} members and the population {rows} rows: let members join by "
                "pop.start and leave by pop.stop and pop.compact, which move all that belongs to them"
            )
        self._hold([*(name for name, _ in self.fused.named_buffers()), *self._written])
        step.keys, step.idle = self.table.columns["key"], frozenset(free)
        if step.budget is not None:
            summed = sum(p.nbytes for p in self.parameters() if p.requires_grad)
            step.budget.held = self.elsewhere + (summed if self._sums else 0)
        return step(inputs, target, **keywords)

    def _hold(self, names: Iterable[str]) -> None:
        """Keep the present values of tensors that forward may write to, see `restore`."""
        missing = [name for name in names if name not in self._before]
        self._before |= {name: rows.clone() for name, rows in written_rows(self.fused, missing)}

    @torch.no_grad()
    def restore(self, members: Tensor | None = None) -> None:
        """Restore what forward has written in this call, of ``members``, bool ``[rows]``.

        None: of all, to undo a call that has failed, unless its update has begun.
        """
        for name, rows in written_rows(self.fused, self._before):
            # The forward of a plain member may have assigned a tensor of another shape.
            if rows.shape == self._before[name].shape:
                places = ... if members is None else members.nonzero().reshape(-1).to(rows.device)
                rows[places] = self._before[name][places]
        if members is None:
            self._before = {}
            if self.scaler is not None:
                self.scaler.forget()

    def flush(self) -> bool:
        """Update members that have made some of the calls of an update. Returns whether there were any."""
        if not self.table.underway:
            return False
        self._before, self._resting = {}, None
        self.drop_gradients()
        with self.table.naming():
            self._finish(torch.zeros(len(self), device="cpu"), flushed=True)
        return True

    def _finish(self, losses: Tensor, *, flushed: bool = False) -> None:
        """End a call that has computed gradients, now or when all groups have theirs.

        Args:
            losses: ``[rows of the group]``.
            flushed: whether there was no call, and members are updated by the gradients of earlier calls.
        """
        table = self.table
        if self._resting is not None:
            leave_out(self.parameters(), self._resting)
        # The members that make an update, bool [rows], None for all in each call; how many calls of an update each has
        # made, with this one; and the sums of their gradients.
        due, done, sums = None, table.columns["done"], dict[str, Tensor]()
        if flushed:
            due = done > 0
            sums = {name: table[name].clone() for name in table.columns if name.startswith(("sum/", "absent/"))}
        elif self._sums:
            calls = (done + 1).masked_fill(~table["alive"] | table["frozen"], 0)
            done = calls if self._resting is None else torch.where(self._resting, done, calls)
            due = done == table["accumulate"]
            sums = table.summed(self.named_parameters(), last=bool(due.all()))
        if due is not None:
            table.hand_over(self.named_parameters(), sums, due)
        bad = self._bad_members(losses)
        table.history.end_call(self, bad, partial(self._end_call, bad, due, done, sums))

    def _end_call(self, bad: Tensor | None, due: Tensor | None, done: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Freeze members ``bad``, and unscale, clip and update the others that are due; see `_finish`."""
        table, optimizer, updates = self.table, self.optimizer, due is None or bool(due.any())
        frozen = table["frozen"] if bad is None else table["frozen"] | bad
        resting = frozen if self._resting is None else frozen | self._resting
        if self._before and bool(resting.any()):
            self.restore(resting)
        held = left_out = resting if due is None else resting | ~due

        def begin() -> None:
            """Note that the call was made. An error from here on undoes nothing."""
            self._before = {}
            if bad is not None:
                table.freeze(bad)
            if due is not None:
                table.count(done.masked_fill(due | frozen, 0), sums)
            if updates:
                table["age"].add_(table["alive"] & ~left_out)
                table.history.updated = True
                if self.scaler is not None:
                    self.scaler.update(resting=held)

        if not updates:
            begin()
        else:
            if self.scaler is not None:
                left_out = held | self.scaler.unscale_(optimizer)
            if self.gradient_hooks:
                idle = left_out.tolist()
                for hook in self.gradient_hooks.values():
                    if rows := [row for row in self.active_rows if not idle[row]]:
                        self.each(hook, rows)
            for name, clip in (("clip_value", clip_grad_value_), ("clip_norm", clip_grad_norm_)):
                if name in table.columns and (params := [p for p in self.parameters() if p.grad is not None]):
                    clip(params, table[name])
            with optimizer.holding(held, begin):
                optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self._resting is not None:
            self.drop_gradients()

    def _bad_members(self, losses: Tensor) -> Tensor | None:
        """Return the members whose loss or gradient is not finite, bool ``[rows]``; None if all train well."""
        if self.options.on_nonfinite == "ignore":
            return None
        # With a scaler, a member whose gradients overflow skips a step and gets a smaller scale.
        grads = [p.grad for p in self.parameters() if p.grad is not None] if self.scaler is None else []
        tensors = [*grads, losses.detach()]
        # Several threads check more elements than this faster.
        finite = self._finite(tensors) if sum(map(Tensor.numel, grads)) < _ONE_THREAD else None
        if all_finite(tensors) if finite is None else finite:
            return None
        stacks = [grad.reshape(len(self), -1) for grad in grads]
        bad = ~losses.detach().isfinite().cpu() | overflowing(stacks, len(self))
        bad &= self.table["alive"] & ~self.table["frozen"]
        bad &= ~self._resting if self._resting is not None else True
        return bad if bool(bad.any()) else None

    def _step_some(self, rows: list[int], arguments: StepArguments, weights: Any) -> Tensor:
        """Make a step of members ``rows`` as a small group, which has copies of them, and write its state back.

        Raises FusionError if they cannot be stepped separately.
        """
        width, budget = self._widths.of(len(rows)), self._step.budget
        # The members, and then free rows.
        places = [*rows, *rows[:1] * (width - len(rows))]
        with self.table.naming():
            chosen = self._chosen
            if chosen is None or chosen[2].whole is not self.optimizer or not (chosen[1].fits() and chosen[2].fits()):
                array = GatheredRows(self.fused, places)
                small, large = dict(array.array.named_parameters()), dict(self.fused.named_parameters())
                params: dict[Tensor, Tensor] = {large[name]: param for name, param in small.items()}
                state = optimizer_rows.GatheredState.of(self.optimizer, params, places)
                part = TrainingGroup.__new__(TrainingGroup)
                own = {"fused": array.array, "optimizer": state.part, "scheduler": None}
                part.__setstate__({**self.__getstate__(), **own})
                self._chosen = chosen = part, array, state
            part, array, state = chosen
            array.load(places)
            state.load(places)
        part.table = self.table.take(rows, width - len(rows))
        part.scaler = None if self.scaler is None else self.scaler.of_rows(places)
        part._step.at_once = self._widths.at_once(width)
        part.elsewhere = self.elsewhere + (0 if budget is None else state_bytes(self.fused, self.optimizer))
        # Inputs of free rows repeat those of the first.
        entries = [*range(len(rows)), *[0] * (width - len(rows))]
        losses = part.step(take_entries(arguments, entries), None, take_entries(weights, entries))
        self.drop_gradients()

        def store() -> None:
            array.store(len(rows))
            state.store(rows)
            if self.scaler is not None and part.scaler is not None:
                self.scaler.table.put(rows, part.scaler.table)
            self.table.put(rows, part.table)

        self.table.history.end_call(part, None, store)
        all_losses = losses.new_full((len(self),), math.nan)
        all_losses[torch.tensor(rows, device=losses.device)] = losses[: len(rows)]
        return all_losses

    # Rows that join, leave, move and are copied.

    def begin_anew(self, scheduler: Make | None, numbers: Mapping[str, Any], hypers: Mapping[str, Any]) -> None:
        """Give the only member the training state of one that joins later, see `Population.start`.

        Raises:
            ValueError: a value is invalid, or missing because members began with different ones.
        """
        initial, makes = self.options.initial, self.options.schedules
        values = {name: initial.get(name) if value is None else value for name, value in numbers.items()}
        for name, value in values.items():
            if value is None and name in initial:
                raise ValueError(f"{name} differs between the members: say what it is for those that join, {name}=...")
            if value is not None and name not in initial:
                raise ValueError(f"{name}={value}: this population has no {name}; give it one when it is made")
        for name, column in check_numbers(1, **values).items():
            self.table[name][:] = column
        optimizer_rows.rearrange(self.optimizer, [None], hypers)
        if makes is None:
            if scheduler is not None:
                raise ValueError("scheduler: this population has none; give it one when it is made")
        elif scheduler is None and any(make is not makes[0] for make in makes):
            raise ValueError("the members' schedules differ: say what those of members that join are, scheduler=...")
        elif self.scheduler is not None:
            self.scheduler.restart([0], scheduler or makes[0])
        if self.scaler is not None:
            self.scaler.restart([0])

    def places(self, rows: Sequence[int]) -> list[int]:
        """Return a place for each row of the population: its own, or a free one, that of its number if possible.

        The array grows if there are too few.
        """
        held = {row: local for local, row in enumerate(self.rows) if row is not None}
        joining = [row for row in rows if row not in held]
        if (lacking := len(joining) - len(self.table.free)) > 0:
            self.grow(lacking)
        free = self.table.free
        others = [place for place in free if place not in joining]
        return [held[row] if row in held else row if row in free else others.pop(0) for row in rows]

    def release(self, rows: Iterable[int]) -> None:
        """Free the rows of members that leave, go on in another group, or are replaced.

        Free rows are computed and updated as well, so they become copies of a member: values that are not finite would
        fail a check in forward or in the loss for all.
        """
        chosen = list(rows)
        for table in (self.table, self.best):
            table.clear(chosen)
        self.table.clear_updates(())
        live, free = self.table.live, self.table.free
        if not live or not free:
            return
        self.fused._views.release(self.fused, chosen)
        stacks = MemberTable(len(self), member_stacks(self.fused, self.optimizer))
        stacks.put(free, stacks.take(live[:1] * len(free)))

    def drop_gradients(self) -> None:
        """Release gradients: they are not needed between updates, and moving them takes time."""
        for param in self.parameters():
            param.grad = None

    def compact(self) -> bool:
        """Remove free rows as far as the widths of programs allow; return whether any were removed.

        Rows come in blocks, so that not every number of members needs its own compiled program.
        """
        live, free = self.table.live, self.table.free
        width = self._widths.of(len(live))
        if is_shorter := width < len(self):
            self.arrange([*live, *free[: width - len(live)]], range(len(live), width))
        return is_shorter

    def grow(self, count: int) -> None:
        """Add free rows at the end, for at least ``count`` more members."""
        rows, width = len(self), self._widths.of(len(self) + count)
        self.arrange([*range(rows), *[0] * (width - rows)], range(rows, width))

    def arrange(self, sources: Sequence[int], free: Iterable[int] = ()) -> None:
        """Let row b be the former row ``sources[b]``; the new rows ``free`` have no member."""
        optimizer_rows.check_base_rates(self.optimizer, sources)
        self.drop_gradients()
        array_editing.rearrange(self.fused, sources)
        optimizer_rows.rearrange(self.optimizer, sources, {})
        for table in self.own_tables().values():
            table.arrange(sources)
        if free := list(free):
            self.release(free)
            self._step.at_once = self._widths.at_once(len(sources))


class PlainGroup(TrainingGroup):
    """A group of one member; ``fused`` is its model.

    Its optimizer is one of hf.optim over the parameters of the model, which takes less time for one model than the
    fused optimizers of torch; so its state is that of a row of an array, to the bit.

    Attributes:
        shared: the names of frozen parameters that members of other groups hold, too.
    """

    is_plain = True
    shared: Sequence[str] = ()

    def member(self, row: int) -> nn.Module:
        return self.fused

    read = member

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of a Parameter has lost its mark.
        mark_plain(state["fused"], state["shared"])
        super().__setstate__(state)

    def _prepare(self) -> None:
        self._list_tensors()
        super()._prepare()

    def _call(self, inputs: Any, target: Any, keywords: dict[str, Any], free: Iterable[int]) -> Tensor:
        """Compute loss and gradients by autograd. Raises ValueError for a loss that is no number with a gradient."""
        self.settle()
        self._hold([name for name, tensor in self._tensors.items() if not isinstance(tensor, nn.Parameter)])
        args, kwargs = call_arguments(of_row(inputs), of_row(keywords))
        self.drop_gradients()
        with torch.enable_grad():
            loss = self._loss(self.fused(*args, **kwargs), of_row(target))
            check_losses(loss, trains=any(param.requires_grad for param in self.parameters()))
            # As torch advises: an autocast is for forward and loss.
            with without_autocast(active_autocast()):
                if loss.requires_grad:
                    loss.backward()
        losses: Tensor = loss.detach().reshape(1)
        self._finish(losses)
        return losses

    def _list_tensors(self) -> None:
        """Cache the tensors, which a step reads five times: walking the modules each time took half its overhead."""
        self._tensors, self._named = dict(tensors(self.fused)), tuple(self.fused.named_parameters())

    def settle(self) -> None:
        """Raise a FusionError if the model has other parameters than the optimizer; buffers may be replaced."""
        both = dict(tensors(self.fused)), self._tensors
        if len(both[0]) == len(both[1]) and all(map(is_, *map(dict.values, both))):
            return
        current, known = ({name: t for name, t in of.items() if isinstance(t, nn.Parameter)} for of in both)
        held, known_ids = set(map(id, current.values())), set(map(id, known.values()))
        odd = [
            f"it has another parameter {name}" if name in current else f"it has no parameter {name} any more"
            for name, parameter in known.items()
            if id(parameter) not in held
        ]
        odd += [f"the parameter {name} is new" for name, parameter in current.items() if id(parameter) not in known_ids]
        if odd:
            raise FusionError(
                f"what was done to a plain member of class {self.kind.__name__} does not fit its optimizer: {odd[0]}. "
                "Undo it, or stop the member, change its model and start it again: model = pop.stop(row); ...; "
                "pop.start(row, model)"
            )
        for name, parameter in self.fused.named_parameters():
            mark(parameter, replace(cast(Membership, membership(parameter)), name=name))
        self._list_tensors()

    def parameters(self) -> Iterable[nn.Parameter]:
        return [parameter for _, parameter in self._named]

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._named

    def each(self, fn: MemberFunction, rows: list[int], *args: Any, **kwargs: Any) -> None:
        fn(self.fused, *of_row(args), **of_row(kwargs))

    @property
    def active_rows(self) -> list[int]:
        """The member's row, unless it is frozen or has left, or nothing of it is trained."""
        trains = any(parameter.requires_grad for parameter in self.parameters())
        return [row for row in self.table.live if trains and not bool(self.table["frozen"][row])]


def signature(model: nn.Module) -> Any:
    """Return a key that members of an array share: classes, modes, shapes, dtypes, devices."""
    modules = tuple((path, type(m).__name__, m.training) for path, m in model.named_modules(remove_duplicate=False))
    return modules, tuple((name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors(model))


def check_own(parameters: Iterable[nn.Parameter]) -> None:
    """Raise a FusionError if members train a parameter together."""
    for parameter in parameters:
        if parameter.requires_grad and not is_per_member(parameter):
            raise FusionError(
                f"{membership_of(parameter).name} is one parameter that all members train, and each member of a "
                "population trains as if alone: freeze it, give each member its own by copy.deepcopy, or use hf.fuse "
                "and hf.train_step"
            )


def group_of(models: list[nn.Module], options: GroupOptions, rows: list[int], shared: Collection[int]) -> TrainingGroup:
    """Return a group of copies of ``models``: an array, or a plain group if there is one. Raises FusionError.

    Args:
        rows: for each model, the initial member of the population whose options it has.
        shared: ids of the frozen parameters that members of other groups hold, too. A plain group does not copy them.
    """
    if len(models) > 1:
        return TrainingGroup(fuse(models), options, rows)
    (model,) = models
    check_materialized(model, "the model")
    around = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters() if id(p) in shared}
    names = [name for name, tensor in tensors(model) if id(tensor) in around]
    copied = module_copy(model, dict(around))
    copy_tensor_hooks(model, copied)
    mark_plain(copied, names)
    group = PlainGroup(copied, options, rows)
    group.shared = names
    return group


def mark_plain(model: nn.Module, shared: Collection[str]) -> None:
    """Mark the tensors of a single model; ``shared``: the names of those that other members hold, too."""
    for name, tensor in tensors(model):
        mark(tensor, Membership(name, 1, stacked=False, standalone=name not in shared))


def member_outputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the outputs, with a leading dim of members, of an array or the model of a plain group."""
    if isinstance(module, FusedModule):
        return module(*args, **kwargs)
    return with_row(module(*of_row(args), **of_row(kwargs)))


def evaluating_members(module: nn.Module) -> AbstractContextManager[None]:
    """Context manager: an array or the model of a plain group is in eval mode."""
    return module.evaluating() if isinstance(module, FusedModule) else evaluating_model(module)


def of_row(value: Any) -> Any:
    """Return nested ``value`` with each stacked tensor replaced by its only row."""
    if isinstance(value, Tensor):
        return value
    return pytree.tree_map(lambda leaf: row_of_leaf(leaf, 0), value, is_leaf=is_stacked)
