"""The state of a fused optimizer, and members of it that leave, join, are copied, and restart."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import member_rows
from hfusion.core.memory import real_view
from hfusion.optim import coupling
from hfusion.optim.formula import Formula
from hfusion.optim.group import membership_of, same_objects
from hfusion.optim.hyper import MemberVector, ParamGroup, member_vector, plain, read

if TYPE_CHECKING:
    from hfusion.optim.base import FusedOptimizer


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
    if isinstance(optimizer, Formula):
        rearrange(optimizer, list(rows), {})
    return optimizer


def group_table(optimizer: Any, group: ParamGroup, members: int) -> MemberTable:
    """Return the members' hyper-parameters of a param group, and what schedulers keep of each there: live."""
    vectors, _ = read(group, optimizer.hypers, members)
    columns = {hyper.label: v.as_subclass(Tensor) for hyper, v in zip(optimizer.hypers, vectors, strict=True)}
    keys = group.keys() - {"params", *(hyper.key for hyper in optimizer.hypers)}
    kept = {key: group[key] for key in keys if isinstance(group[key], Tensor) and group[key].shape == (members,)}
    return MemberTable(members, {**columns, **kept})


def width(optimizer: Any) -> int:
    """Return the number of members that the optimizer knows of; the array may already have more or fewer."""
    values = (hyper.get(group) for group in optimizer.param_groups for hyper in optimizer.hypers)
    members: int = next((len(value) for value in values if isinstance(value, MemberVector)), optimizer.members)
    return members


@torch.no_grad()
def rearrange(
    optimizer: Any, sources: Sequence[int | None], new_hypers: Mapping[str, Any], *, restart: bool = False
) -> None:
    """Make the former member ``sources[b]`` member b; None is a new member, with hyper-parameters from ``new_hypers``.

    Args:
        restart: whether the new members are those that were in their rows before, and keep their hyper-parameters.

    Raises ValueError in the same cases as `FusedOptimizer.append`.
    """
    before = width(optimizer)
    if list(sources) == list(range(before)):
        return
    # Everything that may fail comes first, so that an error changes nothing.
    fresh = [row for row, source in enumerate(sources) if source is None]
    # New members have some rows, which then begin anew.
    places = [min(row, before - 1) if source is None else source for row, source in enumerate(sources)]
    new_values = _read_new_hypers(optimizer, new_hypers, fresh, restart)
    tables = [group_table(optimizer, group, before) for group in optimizer.param_groups]
    labels = {hyper.label for hyper in optimizer.hypers}
    if kept := [key for table in tables for key in table.columns.keys() - labels if fresh and not restart]:
        raise FusionError(
            f"a scheduler of torch keeps {kept[0]!r} of every member, and knows none of members that join; use "
            "hf.optim.lr_scheduler, whose schedulers let members join"
        )
    for group, values, table in zip(optimizer.param_groups, new_values, tables, strict=True):
        table.arrange(places)
        for label, value in values.items():
            table[label][fresh] = value
        for hyper in optimizer.hypers:
            hyper.put(group, table[hyper.label].as_subclass(MemberVector))
        for key in table.columns.keys() - labels:
            group[key] = table[key].as_subclass(type(group[key]))
        for param in group["params"]:
            entry, mark = optimizer.state.get(param, {}), membership_of(param)
            if mark.stacked and entry:
                MemberTable(before, entry).arrange(places)
            if mark.is_own and fresh:
                begin_rows(optimizer, group, param, entry, fresh)
    if len(sources) != before:
        optimizer.forget()


def check_base_rates(optimizer: Any, sources: Sequence[int]) -> None:
    """Raise a FusionError if a scheduler of torch has base rates that would not follow the members ``sources``."""
    for rates in (group.get("initial_lr") for group in optimizer.param_groups):
        held = rates.tolist() if isinstance(rates, Tensor) and rates.dim() else []
        moved = [held[source] for source in sources[: len(held)]]
        if held and moved != held[: len(moved)]:
            raise FusionError(
                f"a scheduler of torch keeps base rates {held} by row, and they do not follow members that change "
                "their rows or are copied; use hf.optim.lr_scheduler, such as PerMember(opt, LambdaLR, lr_lambda=...)"
            )


def move(optimizer: Any, sources: Sequence[int]) -> None:
    """Make the former member ``sources[b]`` member b. Raises FusionError as `check_base_rates`."""
    check_base_rates(optimizer, sources)
    rearrange(optimizer, sources, {})


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
) -> list[dict[str, Any]]:
    """Return the hyper-parameters of the new members ``rows``, by label, for each param group.

    They are ``new_hypers``, which the user passed, or else the initial ones. Members that ``restart`` keep theirs.
    """
    keys = list(dict.fromkeys(hyper.key for hyper in optimizer.hypers))
    if unknown := [key for key in new_hypers if key not in keys]:
        raise ValueError(f"{unknown[0]} is no hyper-parameter of {type(optimizer).__name__}; it has {', '.join(keys)}")
    given: dict[str, Tensor] = {}
    for hyper in optimizer.hypers:
        if hyper.key in new_hypers:
            values = member_vector(hyper.label, hyper.get(new_hypers), len(rows))
            given[hyper.label] = plain(values)
            hyper.check(values.tolist(), rows)
    new_values: list[dict[str, Any]] = []
    taken: set[str] = set()
    for explicit, first in zip(optimizer.explicit_keys, optimizer.initial_values, strict=True):
        new_values.append(group_values := {})
        for hyper in optimizer.hypers:
            initial = first.get(hyper.label)
            if hyper.label in given and (initial is None or hyper.key not in explicit):
                group_values[hyper.label] = given[hyper.label]
                taken.add(hyper.key)
            elif hyper.label in given or (rows and not restart):
                if initial is None:
                    raise ValueError(
                        f"{hyper.label} differs between the members: say what it is for those that join, "
                        f"{hyper.key}=..."
                    )
                group_values[hyper.label] = initial
    if unused := [key for key in new_hypers if key not in taken]:
        raise ValueError(explicit_everywhere(optimizer, unused[0]))
    return new_values


def begin_rows(
    optimizer: FusedOptimizer, group: ParamGroup, param: Tensor, names: Iterable[str], rows: Sequence[int]
) -> None:
    """Set ``rows`` of the entries ``names`` of a parameter's state to what they are before the first step."""
    _, columns = read(group, optimizer.hypers, width(optimizer))
    values, options = list(map(optimizer.Values, *columns)), optimizer._options(group)
    begins = [optimizer.begin(values[row], options) for row in rows]
    for name in names:
        # Values of a complex stack are those of the imaginary part, too.
        stack = member_rows(real_view(optimizer.state[param][name]), membership_of(param))
        for row, begin in zip(rows, begins, strict=True):
            stack[row] = optimizer.numbers[name] if name in optimizer.numbers else begin.get(name, 0.0)


def check_unhooked(optimizer: FusedOptimizer, rows: Sequence[int | None]) -> None:
    """Raise a FusionError if the optimizer has hooks of its steps, and only members ``rows`` are to step."""
    if coupling.has_hooks(optimizer):
        raise FusionError(
            f"{type(optimizer).__name__} has a hook of its steps, which takes all members, and only rows {list(rows)} "
            "are to step: step all rows, or remove the hook; hf.Population clips by clip_norm= and clip_value="
        )


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
        part.state = defaultdict(dict)
        gathered = GatheredState(whole, part, params)
        groups = zip(whole.param_groups, gathered._params(), strict=True)
        part.param_groups = [{**group, "params": small} for group, small in groups]
        for group, hyper in product(part.param_groups, whole.hypers):
            hyper.put(group, member_vector(hyper.label, hyper.get(group), whole.members))
        gathered.load(rows)
        return gathered

    def fits(self) -> bool:
        """Return whether the whole optimizer still has the parameters that this one was made for."""
        part_params, whole_params = [group["params"] for group in self.part.param_groups], self._params()
        return len(part_params) == len(whole_params) and all(map(same_objects, part_params, whole_params))

    @torch.no_grad()
    def load(self, rows: Sequence[int]) -> None:
        """Copy the current state and hyper-parameters of members ``rows`` from the whole optimizer.

        Raises FusionError in the same cases as `check_unhooked`.
        """
        whole, part = self.whole, self.part
        check_unhooked(whole, rows)
        if len(rows) != width(part):
            rearrange(part, [0] * len(rows), {})
        tables = {name: table.take(rows) for name, table in whole.tables().items()}
        for number, (whole_group, part_group) in enumerate(zip(whole.param_groups, part.param_groups, strict=True)):
            columns = tables[f"param group {number}"].columns
            keys = whole_group.keys() - {"params", *(hyper.key for hyper in whole.hypers)}
            part_group.update({key: columns.get(key, whole_group[key]) for key in keys})
        part.put(range(len(rows)), tables)

    def _params(self) -> list[list[Tensor]]:
        return [[self.params[p] for p in group["params"] if p in self.params] for group in self.whole.param_groups]

    def store(self, rows: Sequence[int]) -> None:
        """Write the state of the first ``len(rows)`` members of ``part`` into ``rows`` of the whole optimizer."""
        tables = self.part.tables().items()
        self.whole.put(rows, {name: table for name, table in tables if table.columns and name.startswith("state/")})
