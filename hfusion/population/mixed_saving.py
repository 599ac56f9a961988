"""A population of several groups on disk and back: each group as an array, in one save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hfusion.checkpoint import files
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.packed import PackedSave
from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save import Root, Writing, in_thread
from hfusion.checkpoint.save_contents import SaveWriter
from hfusion.core.errors import CheckpointError
from hfusion.population.group_options import GroupOptions
from hfusion.population.grouping import Candidates, grouped, shared_frozen
from hfusion.population.members import Event, EventKind
from hfusion.population.mixed import MixedMembers
from hfusion.population.plain_module import PlainModule
from hfusion.population.saving import gathered, restore

if TYPE_CHECKING:
    from hfusion.population.any_models import Population

_GROUP = "groups/"


def save_mixed(
    mixed: MixedMembers, root: Root, loader: Any, extra: Any, keep: int, score: float | None, wait: bool
) -> Writing:
    """See `hfusion.Population.save`."""
    keep, score = files.checked(keep, score)
    before, mixed.saving = mixed.saving, None
    if before is not None:
        before.settle()
    with mixed._lock:
        writer = gathered_mixed(mixed, loader, extra)
    write = partial(files.write, root, writer.body, writer.tensors, step=mixed.steps, keep=keep, score=score)
    mixed.saving = saving = in_thread(write)
    if wait:
        saving.result()
    return saving


def gathered_mixed(mixed: MixedMembers, loader: Any, extra: Any) -> SaveWriter:
    """Return copies of all that a save holds. Raises CheckpointError during an update, or if all rows are free."""
    if not mixed.groups:
        raise CheckpointError("every row of the population is free: there is no member to save")
    bodies: list[Any] = []
    tensors: dict[str, Tensor] = {}
    names: list[str] = []
    for number, group in enumerate(mixed.groups):
        group.members.check_saved()
        # All groups have one lineage, which is saved once.
        lineage, group.members._roll.lineage = group.members._roll.lineage, []
        try:
            writer = gathered(group.members, None if number else loader, None if number else extra)
        finally:
            group.members._roll.lineage = lineage
        bodies.append(writer.body)
        tensors |= {f"{_GROUP}{number}/{key}": tensor for key, tensor in writer.tensors.items()}
        names += writer.body["members"]
    index = {group.number: position for position, group in enumerate(mixed.groups)}
    apart = sorted(sorted(index[n] for n in pair) for pair in mixed.apart if all(n in index for n in pair))
    body = {
        "members": names,
        "groups": bodies,
        "mixed": {
            "rows": mixed.layout.tags,
            "why": [group.why for group in mixed.groups],
            "apart": apart,
            "step": mixed.steps,
            "made": mixed.tag_number,
            "lineage": [[event.step, event.tag, event.what.value, event.source] for event in mixed.lineage],
        },
    }
    return SaveWriter([], body, tensors)


def is_mixed(saved: Saved) -> bool:
    """Return whether a save is of a population of several groups."""
    return isinstance(saved.body, dict) and "mixed" in saved.body


@dataclass(frozen=True, eq=False)
class SavedGroup:
    """A group of a save, as if it had been saved alone.

    Attributes:
        save: the index of its save among those that are loaded.
        number: the index of the group in that save.
        apart: pairs of groups of the save, by number, that look alike but whose forwards differ.
    """

    saved: Saved
    save: int
    number: int
    apart: frozenset[tuple[int, int]] = frozenset()


def groups_of(saves: Sequence[Saved]) -> list[SavedGroup]:
    """Return the groups of some saves; a save of one array is one group."""
    groups = []
    for save_index, saved in enumerate(saves):
        if not is_mixed(saved):
            groups.append(SavedGroup(saved, save_index, 0))
            continue
        with wrap_load_errors(saved.path):
            for number, body in enumerate(saved.body["groups"]):
                prefix = f"{_GROUP}{number}/"
                tensors = {k.removeprefix(prefix): t for k, t in saved.tensors.items() if k.startswith(prefix)}
                groups.append(SavedGroup(replace(saved, body=body, tensors=tensors), save_index, number, _pairs(saved)))
    return groups


def _pairs(saved: Saved) -> frozenset[tuple[int, int]]:
    return frozenset((int(a), int(b)) for a, b in saved.body["mixed"]["apart"])


def rows_of_saves(saves: Sequence[Saved], names: Sequence[str] | None) -> list[str | None]:
    """Return the member names by row, as `hfusion.population.saving.rows_of`. Raises CheckpointError."""
    held: list[str] = [name for saved in saves for name in saved.body["members"]]
    for member_name in held if names is None else names:
        count = held.count(member_name)
        if count != 1:
            where = " and ".join(str(saved.path) for saved in saves)
            shown = f"is no member in {where}: it holds {held}" if count == 0 else f"is a member twice in {where}"
            raise CheckpointError(f"{member_name!r} {shown}")
    if names is not None:
        if not names or len(set(names)) < len(names):
            raise CheckpointError(f"tags={list(names)}: name at least one member, and each once")
        return list(names)
    if len(saves) == 1:
        body = saves[0].body
        rows: list[str | None] = list((body["mixed"] if is_mixed(saves[0]) else body["population"])["rows"])
        return rows
    return list(held)


def load_mixed(
    groups: Sequence[SavedGroup],
    rows: Sequence[str | None],
    models: Mapping[int, nn.Module],
    options: GroupOptions,
    loader: Any,
    random: bool,
    counted: bool,
) -> MixedMembers:
    """Return members of saves, each in its row of ``rows`` with a model of ``models``; ``counted``: see `restore`.

    Raises CheckpointError.
    """
    mixed = MixedMembers(options)
    mixed.size = len(rows)
    live = list(models)
    where = {name: group for group in groups for name in group.saved.body["members"]}
    candidates = _candidates([models[row] for row in live], [where[str(rows[row])] for row in live])
    shared = shared_frozen(list(models.values()))
    for candidate in candidates:
        places = [live[index] for index in candidate.models]
        of_group = [models[row] for row in places]
        names = [str(rows[row]) for row in places]
        members = options.array(of_group if len(places) > 1 else PlainModule(of_group[0], shared), places)
        holders = list(dict.fromkeys(where[name] for name in names))
        reader = SaveReader.of([holder.saved for holder in holders], names)
        restore(members, reader, names, None, False, counted)
        members._updates.initial_calls = options.updates.initial_calls
        if not mixed.groups:
            mixed.options = mixed.options.with_initial_values(members)
        mixed.add(members, list(places), candidate.why)
    first = SaveReader([(groups[0].saved, [0])])
    with wrap_load_errors(first.path):
        if loader is not None:
            if (position := first.value("loader")) is None:
                raise CheckpointError(f"{first.path} holds no position of a loader")
            loader.load_state_dict(position)
        if random:
            for group in mixed.groups:
                first.random(group.members.fused)()
    return mixed


def history(mixed: MixedMembers, saves: Iterable[Saved]) -> None:
    """Restore the saved lineage and step count. Raises CheckpointError."""
    bodies = []
    for saved in saves:
        with wrap_load_errors(saved.path):
            body = saved.body["mixed"] if is_mixed(saved) else saved.body["population"]
            mixed.lineage += [Event(int(s), str(t), EventKind(w), o) for s, t, w, o in body["lineage"]]
            bodies.append((int(body["step"]), int(body["made"])))
    mixed.steps, mixed.tag_number = (max(values) for values in zip(*bodies, strict=True))
    for group in mixed.groups:
        group.members._roll.lineage, group.members._roll.step = mixed.lineage, mixed.steps


def _candidates(models: Sequence[nn.Module], holders: Sequence[SavedGroup]) -> list[Candidates]:
    """Divide models into groups by structure, and by the differences in forward that were known when saved."""
    candidates = [part for candidate in grouped(models) for part in _as_saved(candidate, holders)]
    return sorted(candidates, key=lambda candidate: candidate.models[0])


def _as_saved(candidate: Candidates, holders: Sequence[SavedGroup]) -> list[Candidates]:
    """Divide models that look alike by the differences in forward that were known when they were saved."""
    by_group: dict[tuple[int, int], list[int]] = {}
    for index in candidate.models:
        holder = holders[index]
        by_group.setdefault((holder.save, holder.number), []).append(index)
    parts: list[tuple[set[tuple[int, int]], list[int]]] = []
    apart = {frozenset(((holder.save, a), (holder.save, b))) for holder in holders for a, b in holder.apart}
    for group, indices in by_group.items():
        for part_groups, members in parts:
            if not any(frozenset((group, other)) in apart for other in part_groups):
                part_groups.add(group)
                members += indices
                break
        else:
            parts.append(({group}, list(indices)))
    return [Candidates(tuple(sorted(members)), candidate.why) for _, members in parts]


def packed(population: Population) -> PackedSave:
    """Return the contents of a save of a population, for its ``load`` in another process."""
    members = population._members
    with members._lock:
        if isinstance(members, MixedMembers):
            writer = gathered_mixed(members, None, None)
        else:
            writer = gathered(members, None, None)
        return PackedSave.of(writer.body, writer.tensors, members.steps)
