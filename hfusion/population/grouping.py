"""Groups of members: by modules and shapes at first, by their operators once a forward shows a difference."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.attribute_fingerprint import differing_attributes, fingerprint
from hfusion.capture.compare_models import check_alone, check_models, check_pair, compare, hooked_tensor
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import copy_tensor_hooks, is_per_member, membership
from hfusion.core.memory import module_copy
from hfusion.population.training_group import TrainingGroup, group_of, signature

if TYPE_CHECKING:
    from hfusion.population.population import Population

Given = Mapping[str, Any]

# Maximum length of a reason: the messages of a capture name all attributes in which members differ.
_LONGEST = 300
# Maximum number of members of a group that are compared with those of another.
_COMPARED = 8


@dataclass(frozen=True)
class PopulationGroup:
    """Members of a population that are computed together.

    Attributes:
        rows: their rows, in order.
        kind: "array", batched operators for all of them; "plain", one member that runs as plain torch.
        why: why it is a group of its own.
    """

    rows: tuple[int, ...]
    kind: Literal["array", "plain"]
    why: str

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.rows))
        return f"{self.kind} of row{'s' if len(self.rows) > 1 else ''} {rows}: {self.why}"


class MemberLayout:
    """The group of each row of a population, and the row there.

    Attributes:
        slots: for each row of the population, its group and the row there; None for a free row.
        order: for each row of the population, its index into the concatenated rows of all groups; free rows have the
            index after the last.
        live, free: the rows with a member, and those without.
    """

    def __init__(self, groups: Sequence[TrainingGroup], size: int) -> None:
        self.slots: list[tuple[TrainingGroup, int] | None] = [None] * size
        start, order = 0, [sum(map(len, groups))] * size
        for group in groups:
            for local, row in enumerate(group.rows):
                if row is not None:
                    self.slots[row], order[row] = (group, local), start + local
            start += len(group)
        self.order = torch.tensor(order, device="cpu")
        self.live = [row for row, slot in enumerate(self.slots) if slot is not None]
        self.free = [row for row, slot in enumerate(self.slots) if slot is None]

    def slot_of(self, row: int) -> tuple[TrainingGroup, int]:
        """Return a member's group and its row there. Raises ValueError for a free row."""
        slot = self.slots[row]
        if slot is None:
            raise ValueError(f"row {row} is free; members are in rows {self.live}")
        return slot

    def collected(self, values: Sequence[Tensor], empty: float | None = None) -> Tensor:
        """Return ``[rows]``, gathered from a tensor ``[rows of the group]`` of each group.

        ``empty``: the value of free rows; by default NaN or 0.
        """
        kind = torch.float64 if isinstance(empty, float) else torch.int64
        # A population without members has no groups.
        values = values or [torch.zeros(0, dtype=kind, device="cpu")]
        first, dtype = values[0], reduce(torch.promote_types, (value.dtype for value in values))
        if empty is None:
            empty = math.nan if dtype.is_floating_point else 0
        held = [*(value.to(first.device, dtype) for value in values), first.new_full((1,), empty, dtype=dtype)]
        return torch.cat(held)[self.order.to(first.device)]


Candidates = tuple[list[int], str]
"""Indices of models that may share an array unless their forwards differ, or of one model, and why."""

UNIQUE = "no other member has its modules and shapes"
TWINS = "members of the same modules and shapes"


def shortened(reason: str) -> str:
    """Return a reason as one line, cut to the maximum length."""
    text = " ".join(reason.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def grouped(models: Sequence[nn.Module]) -> list[Candidates]:
    """Divide models into those that may share an array.

    Raises:
        FusionError: no or invalid models, or models in different groups that train one tensor together.
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise FusionError(f"hf.Population takes a list of models, not {type(models).__name__}; write [model, ...]")
    if len(models) == 0:
        raise FusionError("a population got an empty list; give it at least one model")
    check_models(models)
    for index, model in enumerate(models):
        if name := hooked_tensor(model):
            raise FusionError(
                f"{name} of model {index} has a tensor hook, which its copy in a population has not: register it on "
                "pop.models[row], or a function of all gradients by pop.register_gradient_hook"
            )
    buckets: dict[Any, list[int]] = {}
    for index, model in enumerate(models):
        buckets.setdefault(signature(model), []).append(index)
    groups: list[Candidates] = []
    for bucket in buckets.values():
        # Sets of models of which each might share an array with the first.
        classes: list[list[int]] = []
        for index in bucket:
            if reason := _refusal(check_alone, 0, models[index]):
                groups.append(([index], reason))
                continue
            alike = next((c for c in classes if not _refusal(check_pair, models[c[0]], 1, models[index])), None)
            if alike is None:
                classes.append([index])
            else:
                alike.append(index)
        for alike in classes:
            try:
                compare([models[index] for index in alike])
                groups.append((alike, TWINS if len(alike) > 1 else UNIQUE))
            except FusionError as error:
                groups += [([index], shortened(str(error))) for index in alike]
    _check_trained(models, groups)
    return sorted(groups)


def _refusal(check: Callable[..., object], *models: Any) -> str:
    """Return the message with which a check of models fails; empty if it passes."""
    try:
        check(*models)
    except FusionError as error:
        return shortened(str(error).replace("model 0", "the model"))
    return ""


def _check_trained(models: Sequence[nn.Module], groups: Sequence[Candidates]) -> None:
    """Raise a FusionError where a tensor that is trained is in models of several groups."""
    group_of_model = {index: number for number, (group, _) in enumerate(groups) for index in group}
    for (first, first_name, _), *others in _memory(models, trained=True).values():
        for index, name, _ in others:
            if group_of_model[index] != group_of_model[first]:
                raise FusionError(
                    f"{first_name} of model {first} and {name} of model {index} are one tensor that is trained, "
                    "and the models cannot share an array: give each model its own by copy.deepcopy, or freeze it"
                )


def shared_frozen(models: Sequence[nn.Module], others: Sequence[nn.Module] = ()) -> frozenset[int]:
    """Return the ids of frozen parameters of ``models`` whose memory another model, also of ``others``, shares."""
    places = _memory([*models, *others], trained=False).values()
    shared = [owners for owners in places if len({index for index, _, _ in owners}) > 1]
    return frozenset(id(parameter) for owners in shared for index, _, parameter in owners if index < len(models))


def _memory(models: Sequence[nn.Module], *, trained: bool) -> dict[Any, list[tuple[int, str, nn.Parameter]]]:
    """Return by device and address the index of the model, name and parameter of what is trained, or is not."""
    owners: dict[Any, list[tuple[int, str, nn.Parameter]]] = {}
    for index, model in enumerate(models):
        for name, p in model.named_parameters():
            if p.requires_grad is trained and p.numel():
                owners.setdefault((p.device, id(p) if p.is_meta else p.data_ptr()), []).append((index, name, p))
    return owners


# A member that moves from one group of a population to another, with all that belongs to it.


MemberState = tuple[nn.Module, dict[str, MemberTable]]
"""A member's model and training state, independent of any group: tables of one row, see `TrainingGroup.tables`."""


def copied_member(module: nn.Module, row: int) -> nn.Module:
    """Return a copy of a member of an array, or of a plain group's model, that shares the frozen parameters of others.

    A plain model may be one that its optimizer does not fit any more.
    """
    if not isinstance(module, FusedModule):
        frozen, model = [p for p in module.parameters() if membership(p) is not None and not is_per_member(p)], module
    else:
        view = module._views.members.get(row)
        model = module._member(row) if view is None else view.model
        per_member = {name for name, parameter in module.named_parameters() if is_per_member(parameter)}
        frozen = [p for name, p in model.named_parameters() if name not in per_member and not p.requires_grad]
    copied = module_copy(model, {id(parameter): parameter for parameter in frozen})
    copy_tensor_hooks(model, copied)
    return copied


def copy_member_state(group: TrainingGroup, row: int) -> MemberState:
    """Return a copy of the member in ``row`` of a group, with its training state."""
    group.settle()
    return copied_member(group.fused, row), {name: table.take([row]) for name, table in group.tables().items()}


def put_member_state(group: TrainingGroup, row: int, tables: dict[str, MemberTable]) -> None:
    """Write the training state of a member to a row of a group that has its model already, and what it lacks here."""
    group.optimizer.put([row], tables)
    for name, table in group.own_tables().items():
        if name in tables:
            table.put([row], tables[name])


def settle(population: Population, new: Sequence[TrainingGroup]) -> None:
    """Move plain members that have just been added, with their state, into groups of members like them."""
    joining: dict[TrainingGroup, list[TrainingGroup]] = {}
    # Groups in this set join another one, so no group joins them.
    moving = set(new)
    for group in new:
        model = group.read(0)
        candidates = [
            other
            for other in population._groups
            # No group that its members have just left; the only array keeps its rows without members.
            if (other.live or not population._parted)
            and other not in moving
            and bool(other.signature == group.signature)
            and not (_refusal(check_alone, 0, model) or _refusal(check_pair, other.read(0), 1, model))
        ]
        if not candidates:
            moving.remove(group)
            group.why = group.why or UNIQUE
            continue
        if len(candidates) > 1:
            # Preferably a group with a member that reads the same state.
            content = fingerprint(model)
            candidates.sort(key=lambda o: content not in [fingerprint(o.read(local)) for local in o.table.live])
        joining.setdefault(candidates[0], []).append(group)
    for target, groups in joining.items():
        rows = [group.live[0] for group in groups]
        states = [copy_member_state(group, 0) for group in groups]
        try:
            if target.is_plain:
                united = group_of_states(population, [copy_member_state(target, 0), *states])
                population._add(united, [target.live[0], *rows], TWINS)
                target.release([0])
            else:
                # In free or new rows.
                places = target.places(rows)
                target.drop_gradients()
                target.fused.put(places, [model for model, _ in states])
                for place, row, (_, tables) in zip(places, rows, states, strict=True):
                    put_member_state(target, place, tables)
                    target.rows[place] = row
        except FusionError as error:
            # They stay separate.
            for group in groups:
                group.why = shortened(str(error))
            continue
        for group in groups:
            group.release([0])


def group_of_states(population: Population, states: Sequence[MemberState]) -> TrainingGroup:
    """Return a group of members that have trained: an array, or one plain member. Raises FusionError."""
    models = [model for model, _ in states]
    shared = shared_frozen(models, [group.read(0) for group in population._groups])
    group = group_of(models, population._options, [0] * len(states), shared)
    for row, (_, tables) in enumerate(states):
        put_member_state(group, row, tables)
    return group


# Members that turn out to do different things in forward.


def part(
    population: Population, group: TrainingGroup, error: ForwardsDiffer, chosen: Sequence[int] | None = None
) -> list[TrainingGroup]:
    """Split a group into one group for each set of members that do the same in forward, and return these.

    ``chosen``: the rows of the group that were called; None: all. Members that the error does not name were not called,
    or have batches of another size; they join members like them. Raises the error itself if it does not tell the
    members apart.
    """
    population.check_hooks()
    live, called = group.table.live, range(len(group)) if chosen is None else chosen
    # An array of some members is filled up with copies of the first.
    of_graphs = [[called[index] for index in graph if index < len(called)] for graph in error.groups]
    parts = [rows for of_graph in of_graphs if (rows := [local for local in of_graph if local in live])]
    named = [local for rows in parts for local in rows]
    if not named or len(set(named)) < len(named):
        raise error
    old_rows, before = list(group.rows), list(population._groups)
    reasons = _reasons(group, parts, error, called)
    others = [[local] for local in live if local not in named]
    parts, reasons = [*parts, *others], [*reasons, *[""] * len(others)]
    new_groups: list[TrainingGroup] = []
    for rows, why in zip(parts, reasons, strict=True):
        new_groups.append(group_of_states(population, [copy_member_state(group, local) for local in rows]))
        population._add(new_groups[-1], [old_rows[local] for local in rows], why)
    group.release(range(len(group)))
    population._parted = True
    settle(population, new_groups[len(parts) - len(others) :])
    population._changed()
    for rows, why in zip(parts, reasons, strict=True):
        if why:
            # Another group, if others have joined.
            population._layout.slot_of(old_rows[rows[0]] or 0)[0].why = why
    return [new for new in population._groups if new not in before]


def _reasons(
    group: TrainingGroup, parts: Sequence[Sequence[int]], error: ForwardsDiffer, called: Sequence[int]
) -> list[str]:
    """Return why each part is a group: the attributes in which its members differ from those of another part."""
    if len(parts) == 1:
        # A member that differs has left: its row is free.
        return [group.why]

    def row(match: re.Match[str]) -> str:
        index = int(match[1])
        return f"row {group.rows[called[index if index < len(called) else 0]]}"

    message = re.sub(r"\bmodel (\d+)", row, str(error).split(". Fuse ")[0])
    models = [[group.read(local) for local in rows[:_COMPARED]] for rows in parts]
    reasons = []
    for number, rows in enumerate(parts):
        other = int(number == 0)
        names = f"row {group.rows[rows[0]]}", f"row {group.rows[parts[other][0]]}"
        difference = differing_attributes(models[number], models[other], names)
        reasons.append(shortened(f"its members do something else in forward: {difference or message}"))
    return reasons
