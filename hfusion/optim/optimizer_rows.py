"""The state of a fused optimizer, and members of it that leave, join, are copied, and restart."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hfusion.core.errors import CheckpointError, FusionError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import member_rows
from hfusion.core.memory import real_view
from hfusion.core.row_indices import check_once, copied, kept_rows, moved_rows, rows_of
from hfusion.optim import coupling
from hfusion.optim.formula import Formula
from hfusion.optim.group import State, membership_of, same_objects
from hfusion.optim.hyper import (
    MASTER_STACK,
    MASTER_WEIGHTS,
    Hyper,
    MemberVector,
    ParamGroup,
    Settings,
    copy_vectors,
    member_vector,
    named,
    plain,
    read,
    state_dtype,
)

if TYPE_CHECKING:
    from hfusion.optim.base import FusedOptimizer


# For each new row the former row of its member; None for a member that begins.
Sources = Sequence[int | None]


def made_for_rows(make: Callable[[Any], Any], params: Sequence[Any], rows: Sequence[int], members: int) -> Any:
    """Call ``make(params)`` as for an array of ``members`` members, for an array of only those in ``rows``.

    A hyper-parameter with a value for each member keeps those of ``rows``. Anything but a fused optimizer is returned
    as it is.
    """
    marks = [membership_of(param) for param in params]
    for param, mark in zip(params, marks, strict=True):
        param._hfusion_membership = replace(mark, members=members)
    try:
        optimizer = make(params)
    finally:
        for param, mark in zip(params, marks, strict=True):
            param._hfusion_membership = mark
    if isinstance(optimizer, MemberRows) and list(rows) != list(range(members)):
        fused = cast("FusedOptimizer", optimizer)
        hypers: Sequence[Hyper] = fused.hypers
        for group in fused.param_groups:
            # Makes the param group hold a vector of each hyper-parameter.
            read(group, hypers, members)
            for hyper in hypers:
                hyper.put(group, hyper.get(group)[list(rows)].clone())
    return optimizer


class MemberRows:
    """Operations of a fused optimizer on its members; call `keep`, `copy` and `append` of the fused module, too."""

    _held: Tensor | None = None

    @contextmanager
    def holding(self, members: Tensor) -> Iterator[None]:
        """Context manager: ``members``, bool ``[B]``, take no step; their parameters, state and counts stay."""
        before = self._held
        everybody = members if before is None else members | before
        self._held = everybody if bool(everybody.any()) else None
        try:
            yield
        finally:
            self._held = before

    @property
    def held_members(self) -> list[int]:
        """The members that take no step now, see `holding`."""
        return [] if self._held is None else [int(row) for row in self._held.nonzero().reshape(-1)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the state and the hyper-parameters of members ``rows`` only, in this order.

        Raises:
            ValueError: no rows, a repeated row, or a row out of range.
        """
        rearrange(self, kept_rows(rows, width(self)), {})

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Copy state, counts and hyper-parameters of members ``src`` to ``dst``: ints or lists.

        Raises:
            ValueError: a row is out of range or written twice, or ``src`` and ``dst`` differ in number.
        """
        rearrange(self, copied(src, dst, width(self)), {})

    def append(self, count: int = 1, **hypers: Any) -> None:
        """Add ``count`` members at the end, without state and with counts of 0, as in a new optimizer.

        Args:
            hypers: their hyper-parameters, one value or ``count`` values each, for the param groups that take the
                optimizer's default. As in torch, a group that was given its own value keeps it; only if it was given
                one for each member, new members get the value from here. By default the initial value, if that is one
                for all members.

        Raises:
            ValueError: a hyper-parameter that differs between members is missing, or a value is out of range; or every
                param group has its own.
        """
        if count < 1:
            raise ValueError(f"append() needs at least one member, got {count}.")
        rearrange(self, [*range(width(self)), *[None] * count], hypers)

    def restart(self, rows: int | Sequence[int], **hypers: Any) -> None:
        """Restart members ``rows``: clear their state and set their counts to 0.

        Args:
            hypers: new hyper-parameters, one value or one for each of ``rows``, for the same param groups as in
                `append`. By default they do not change.

        Raises:
            ValueError: a row is out of range or repeated, or a value is out of range, or no param group takes it.
        """
        members = width(self)
        fresh = rows_of(rows, members)
        check_once(fresh)
        rearrange(self, [None if row in fresh else row for row in range(members)], hypers, restart=True)

    def tables(self) -> dict[str, MemberTable]:
        """The members' hyper-parameters of each param group, and their state of each parameter: live, by name."""
        optimizer, members = cast("FusedOptimizer", self), width(self)
        tables: dict[str, MemberTable] = {}
        for number, group in enumerate(optimizer.param_groups):
            tables[f"param group {number}"] = _vector_table(self, group, members)
            for param in group["params"]:
                param_mark = membership_of(param)
                if param_mark.is_own:
                    entry = optimizer.state.get(param, {})
                    rows = {name: member_rows(value, param_mark) for name, value in entry.items()}
                    tables[f"state/{param_mark.name}"] = MemberTable(members, rows)
        return tables

    @torch.no_grad()
    def put(self, rows: Sequence[int], tables: Mapping[str, MemberTable]) -> None:
        """Give members ``rows`` the state and hyper-parameters of the first rows of ``tables``, from `tables`.

        State that ``tables`` lack begins anew.
        """
        optimizer, members = cast("FusedOptimizer", self), width(self)
        for number, group in enumerate(optimizer.param_groups):
            if (vectors := tables.get(f"param group {number}")) is not None:
                _vector_table(self, group, members).put(rows, vectors)
            for param in group["params"]:
                mark = membership_of(param)
                part = tables.get(f"state/{mark.name}", MemberTable(0))
                if part.columns.keys() - optimizer.state.get(param, {}).keys():
                    optimizer._state(param, optimizer._settings(group))
                entry = optimizer.state.get(param, {})
                for name in part.columns.keys() - entry.keys() - optimizer.numbers.keys():
                    # State that the present settings do not use, such as a momentum that was set to 0 later.
                    stack = part[name].new_zeros(members, *part[name].shape[1:])
                    entry[name] = stack if mark.stacked else stack[0]
                if entry and mark.is_own:
                    if lacking := entry.keys() - part.columns.keys():
                        _begin_rows(type(optimizer), param, entry, lacking, _begins(self, group, rows))
                    own = {name: member_rows(entry[name], mark) for name in part.columns if name in entry}
                    MemberTable(members, own).put(rows, MemberTable(0, {name: part[name] for name in own}))


def _vector_table(optimizer: Any, group: ParamGroup, members: int) -> MemberTable:
    """Return the members' hyper-parameters of a param group, live."""
    vectors, _ = read(group, optimizer.hypers, members)
    columns = {hyper.label: v.as_subclass(Tensor) for hyper, v in zip(optimizer.hypers, vectors, strict=True)}
    return MemberTable(members, columns)


def width(optimizer: Any) -> int:
    """Return the number of members that the optimizer knows of; the array may already have more or fewer."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    items = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    members: int = next((len(item) for item in items if isinstance(item, MemberVector)), optimizer.members)
    return members


@torch.no_grad()
def rearrange(optimizer: Any, sources: Sources, new_hypers: Mapping[str, Any], *, restart: bool = False) -> None:
    """Make the former member ``sources[b]`` member b; None is a new member, with hyper-parameters from ``new_hypers``.

    Args:
        restart: whether the new members are those that were in their rows before, and keep their hyper-parameters.

    Raises ValueError in the same cases as `MemberRows.append`.
    """
    before = width(optimizer)
    if list(sources) == list(range(before)):
        return
    # Everything that may fail comes first, so that an error changes nothing.
    fresh = [row for row, source in enumerate(sources) if source is None]
    # New members have some rows, which then begin anew.
    places = [min(row, before - 1) if source is None else source for row, source in enumerate(sources)]
    new_values = _read_new_hypers(optimizer, new_hypers, fresh, restart)
    kept = [[] if restart else _kept_values(optimizer, group, before, bool(fresh)) for group in optimizer.param_groups]
    for group, values, keys in zip(optimizer.param_groups, new_values, kept, strict=True):
        vectors = _vector_table(optimizer, group, before)
        vectors.arrange(places)
        for hyper in optimizer.hypers:
            vector = vectors[hyper.label]
            if hyper.label in values:
                vector[fresh] = values[hyper.label]
            if len(sources) != before:
                hyper.put(group, vector.as_subclass(MemberVector))
        for key in keys:
            group[key] = moved_rows(group[key], places, {}).as_subclass(type(group[key]))
        begins = _begins(optimizer, group, fresh)
        for param in group["params"]:
            entry, mark = optimizer.state.get(param, {}), membership_of(param)
            if mark.stacked and entry:
                MemberTable(before, entry).arrange(places)
            if mark.is_own and fresh:
                _begin_rows(type(optimizer), param, entry, entry, begins)
    if len(sources) != before:
        optimizer.forget()


def groups_taking(optimizer: Any, key: str) -> list[ParamGroup]:
    """Return the param groups that take the optimizer's default of an option, because they were not given their own."""
    groups = zip(optimizer.param_groups, optimizer.explicit_keys, strict=True)
    return [group for group, explicit in groups if key not in explicit]


def explicit_everywhere(optimizer: Any, key: str) -> str:
    """Return the text of an error about an option that every param group gives itself."""
    return (
        f"every param group of the {type(optimizer).__name__} was given its own {key}, so that {key}= has no effect. "
        f"Leave it out of a group, or write optimizer.param_groups[...][{key!r}]"
    )


def _read_new_hypers(
    optimizer: Any, new_hypers: Mapping[str, Any], rows: Sequence[int], restart: bool
) -> list[dict[str, Tensor]]:
    """Return the hyper-parameters of the new members ``rows``, by label, for each param group.

    They are ``new_hypers``, which the user passed, or else the initial ones. Members that ``restart`` keep theirs.
    """
    unknown = [key for key in new_hypers if key not in {hyper.key for hyper in optimizer.hypers}]
    if unknown:
        keys = ", ".join(dict.fromkeys(hyper.key for hyper in optimizer.hypers))
        raise ValueError(f"{unknown[0]} is no hyper-parameter of {type(optimizer).__name__}; it has {keys}")
    new_values: list[dict[str, Tensor]] = [{} for _ in optimizer.param_groups]
    for key, value in new_hypers.items():
        hypers = [hyper for hyper in optimizer.hypers if hyper.key == key]
        taken = False
        for hyper in hypers:
            values = plain(member_vector(hyper.label, hyper.get({key: value}), len(rows)))
            hyper.check(values.tolist(), rows)
            for group_values, explicit, first in zip(
                new_values, optimizer.explicit_keys, optimizer.initial_values, strict=True
            ):
                initial = first.get(hyper.label) if key in explicit else None
                group_values[hyper.label] = values if initial is None else torch.full_like(values, initial)
                taken |= initial is None
        if not taken:
            raise ValueError(explicit_everywhere(optimizer, key))
    for first, group_values in zip(optimizer.initial_values, new_values, strict=True):
        for hyper in optimizer.hypers if rows and not restart else ():
            if hyper.label in group_values:
                continue
            if (initial := first.get(hyper.label)) is None:
                raise ValueError(
                    f"{hyper.label} differs between the members: say what it is for those that join, {hyper.key}=..."
                )
            group_values[hyper.label] = torch.tensor(initial, dtype=torch.float64, device="cpu")
    return new_values


def first_values(group: ParamGroup, hypers: Sequence[Hyper], members: int) -> dict[str, float | None]:
    """Return the value of each hyper-parameter by label; None if it differs between members."""
    _, columns = read(group, hypers, members)
    return {h.label: column[0] if len(set(column)) == 1 else None for h, column in zip(hypers, columns, strict=True)}


def _kept_values(optimizer: Any, group: ParamGroup, width: int, joining: bool) -> list[str]:
    """Return the keys under which schedulers keep a value of each member in a param group.

    Raises FusionError if there are any, and members join.
    """
    excluded = {"params", *(hyper.key for hyper in optimizer.hypers)}
    keys = [key for key, value in group.items() if isinstance(value, Tensor) and value.shape == (width,)]
    keys = [key for key in keys if key not in excluded]
    if keys and joining:
        raise FusionError(
            f"a scheduler of torch keeps {keys[0]!r} of every member, and knows none of members that join; use "
            "hf.optim.lr_scheduler, whose schedulers let members join"
        )
    return keys


def _begins(optimizer: Any, group: ParamGroup, rows: Iterable[int]) -> dict[int, Mapping[str, float]]:
    """Return `Formula.begin` of the members in ``rows``."""
    _, columns = read(group, optimizer.hypers, width(optimizer))
    values = named("Values", tuple(hyper.field for hyper in optimizer.hypers))
    options = optimizer._options(group)
    return {row: optimizer.begin(values._make(column[row] for column in columns), options) for row in rows}


# The state of one parameter: the shape and dtype of its numbers, how a stack begins, and the state of each member.


def saved_entries(optimizer: Any, state_dict: Any) -> list[tuple[Tensor, Mapping[str, Tensor]]]:
    """Return each parameter for which a state dict has state, with that state.

    Raises CheckpointError if it is not a state dict of such an optimizer.
    """
    try:
        state, groups = state_dict["state"], state_dict["param_groups"]
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            optimizer._settings({**saved, "params": group["params"]})
        keys = [key for group in groups for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if unknown := state.keys() - keys:
            raise ValueError(f"it has a parameter {min(unknown)!r} that is in none of its param groups")
        entries = [(key, param, dict(state[key])) for key, param in zip(keys, params, strict=False) if key in state]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        name = type(optimizer).__name__
        raise CheckpointError(f"the state is not one of this array and of {name}: {error}") from error
    for key, param, entry in entries:
        for name, value in entry.items():
            expected_shape = numbers_shape(param) if name in optimizer.numbers else param.shape
            if not isinstance(value, Tensor) or value.shape != expected_shape:
                actual = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise CheckpointError(
                    f"the state {name!r} of parameter {key} has {actual}, this optimizer needs a tensor of shape "
                    f"{list(expected_shape)}: load the state of an array with the same members"
                )
    return [(param, entry) for _, param, entry in entries]


def complete_state(param: Tensor, state: State, settings: Settings, formula: type[Formula]) -> State:
    """Add what a step needs and ``state`` of a parameter lacks, at its initial values; return ``state``."""
    dtype = state_dtype(param, settings.masters)
    if dtype != param.dtype and MASTER_STACK not in state:
        state[MASTER_STACK] = param.detach().to(torch.float32, copy=True)
    if state.keys() >= {*formula.numbers, *settings.names}:
        return state
    for name, first in formula.numbers.items():
        kind = torch.float32 if name == "step" else scalar_dtype()
        state.setdefault(name, torch.full(numbers_shape(param), first, dtype=kind, device="cpu"))
    begins = [formula.begin(values, settings.options) for values in settings.members]
    for name in settings.names:
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            if any(begin.get(name) for begin in begins):
                rows = range(len(member_rows(param, membership_of(param))))
                _begin_rows(formula, param, state, [name], dict(zip(rows, begins, strict=False)))
    return state


def _begin_rows(
    formula: type[Formula],
    param: Tensor,
    state: State,
    names: Iterable[str],
    begins: Mapping[int, Mapping[str, float]],
) -> None:
    """Set rows of the entries ``names`` of a parameter's state to what they are before the first step.

    ``begins``: for each row the values of stacks that do not begin with 0, also as the imaginary part.
    """
    for name in names:
        stack = member_rows(real_view(state[name]), membership_of(param))
        for row, begin in begins.items():
            stack[row] = formula.numbers[name] if name in formula.numbers else begin.get(name, 0.0)


def scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch's optimizers keep scalar state."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def numbers_shape(param: Tensor) -> torch.Size:
    """Return the shape of scalar state: ``[B]``, or ``[]`` for a parameter that is not stacked."""
    mark = membership_of(param)
    return torch.Size([mark.members] if mark.stacked else [])


def member_state_dicts(optimizer: Any) -> list[dict[str, Any]]:
    """Return B state dicts, one per member, as torch's optimizers load them; the state is copied."""
    kind = optimizer.torch_class
    example = None if kind is None else kind([torch.zeros(1, 1, device="cpu")])
    # Some classes have state before their first step.
    early = example is not None and bool(example.state)
    if early:
        optimizer.initialise()
    members, numbers = optimizer.members, {param: number for number, param in enumerate(optimizer._params())}
    state_dicts = []
    for member in range(members):
        states = {}
        for param, number in numbers.items():
            entry = optimizer.state.get(param, {}).items()
            rows = {name: value[member] if membership_of(param).stacked else value for name, value in entry}
            if rows and (early or rows["step"] > 0):
                kept = rows.keys() - ({"step"} if not optimizer.counts_steps else ())
                states[number] = {name: rows[name].clone(memory_format=torch.contiguous_format) for name in kept}
        groups = [{} if example is None else dict(example.param_groups[0]) for _ in optimizer.param_groups]
        for values, group in zip(groups, optimizer.param_groups, strict=True):
            own = {key: value for key, value in group.items() if key != MASTER_WEIGHTS}
            values.update({key: _member_value(plain(value), member, members) for key, value in own.items()})
            values["params"] = [numbers[param] for param in group["params"]]
        state_dicts.append({"state": states, "param_groups": groups})
    return state_dicts


def _member_value(value: Any, member: int, members: int) -> Any:
    if isinstance(value, Tensor) and value.shape == (members,):
        return float(value[member])
    if isinstance(value, tuple):
        return tuple(_member_value(item, member, members) for item in value)
    return value


# An optimizer of some members of an array: gather their rows of state and hyper-parameters, and write state back.


@dataclass(eq=False)
class GatheredState:
    """An optimizer ``part`` that steps some of the members of ``whole``, each as ``whole`` would.

    Attributes:
        params: maps each stack of parameters of ``whole`` to a stack of these members' rows, and shared parameters to
            themselves. Stacks in which none of these members has a row are missing.
    """

    whole: FusedOptimizer
    part: FusedOptimizer
    params: Mapping[Tensor, Tensor]

    @staticmethod
    def of(whole: FusedOptimizer, params: Mapping[Tensor, Tensor], rows: Sequence[int]) -> GatheredState:
        """Return the optimizer of members ``rows``. Raises FusionError in the same cases as `load`."""
        part = copy.copy(whole)
        part.param_groups, part.state = [], defaultdict(dict)
        gathered = GatheredState(whole, part, params)
        gathered.load(rows)
        return gathered

    def fits(self) -> bool:
        """Return whether the whole optimizer still has the parameters that this one was made for."""
        whole_params = [self._small(group) for group in self.whole.param_groups]
        part_params = [group["params"] for group in self.part.param_groups]
        return len(part_params) == len(whole_params) and all(map(same_objects, part_params, whole_params))

    @torch.no_grad()
    def load(self, rows: Sequence[int]) -> None:
        """Copy the current state and hyper-parameters of members ``rows`` from the whole optimizer.

        Raises:
            FusionError: the optimizer has step hooks, which expect the gradients of all members.
        """
        whole, part = self.whole, self.part
        if coupling.has_hooks(whole):
            raise FusionError(
                f"{type(whole).__name__} has a hook of its steps, which takes all members, and only rows {list(rows)} "
                "are to step: step all rows, or remove the hook; hf.Population clips by clip_norm= and clip_value="
            )
        if not part.param_groups:
            for group in whole.param_groups:
                read(group, whole.hypers, whole.members)
                new_group = {**group, "params": self._small(group)}
                copy_vectors(new_group)
                part.param_groups.append(new_group)
        if len(rows) != width(part):
            rearrange(part, [0] * len(rows), {})
        for whole_group, part_group in zip(whole.param_groups, part.param_groups, strict=True):
            keys = {"params", *(hyper.key for hyper in whole.hypers)}
            for key in whole_group.keys() - keys:
                value = whole_group[key]
                by_member = isinstance(value, Tensor) and value.shape == (whole.members,)
                part_group[key] = value[list(rows)] if by_member else value
        for param, small in self.params.items():
            if not membership_of(param).stacked and whole.state.get(param):
                part.state[small] = whole.state[param]
        part.put(range(len(rows)), {name: table.take(rows) for name, table in whole.tables().items()})

    def _small(self, group: ParamGroup) -> list[Tensor]:
        return [self.params[param] for param in group["params"] if param in self.params]

    def store(self, rows: Sequence[int]) -> None:
        """Write the state of the first ``len(rows)`` members of ``part`` into ``rows`` of the whole optimizer."""
        for param, small in self.params.items():
            if not membership_of(param).stacked and self.part.state.get(small):
                self.whole.state[param] = self.part.state[small]
        state = {
            name: table for name, table in self.part.tables().items() if table.columns and name.startswith("state/")
        }
        self.whole.put(rows, state)
