"""A population on disk and back: all of it, some members, or the members of several; each group as an array."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from hfusion.array.fuse import fuse
from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint import files
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.json_tree import encode
from hfusion.checkpoint.reader import GROUPS, OWN, SaveReader
from hfusion.checkpoint.save import Root, SaveWriter, gather, groups_of, in_thread, saves_of, writing
from hfusion.core.errors import CheckpointError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import member_rows
from hfusion.core.row_indices import Widths
from hfusion.optim.group import membership_of
from hfusion.population.group_options import LIMITS, GroupOptions, OnNonfinite, check_limits
from hfusion.population.grouping import Candidates, grouped, shared_frozen
from hfusion.population.members import Event, EventKind
from hfusion.population.plain_group import group_of
from hfusion.population.training_group import TrainingGroup

if TYPE_CHECKING:
    from hfusion.population.population import Population


def save(
    population: Population, root: Root, loader: Any, extra: Any, keep: int, score: float | None, wait: bool
) -> Future[Path]:
    """Save a population in a new folder under ``root``; see `hfusion.Population.save`."""
    keep, score = files.checked(keep, score)
    if population._saving is not None:
        # One save at a time.
        population._saving.exception()
    with population._lock:
        writer, steps = gathered(population, loader, extra), population.steps
    write = partial(files.write, root, writer.body, writer.tensors, step=steps, keep=keep, score=score)
    if wait:
        saving: Future[Path] = Future()
        saving.set_result(write())
        return saving
    population._saving = saving = in_thread(write)
    return saving


def gathered(population: Population, loader: Any, extra: Any) -> SaveWriter:
    """Return copies of all that a save holds. Raises CheckpointError during an update, or if all rows are free."""
    groups = population._groups
    if not population._layout.live:
        raise CheckpointError("every row of the population is free: there is no member to save")
    writer = SaveWriter([], {}, {})
    writer.run(loader, extra, [group.fused for group in groups])
    bodies = []
    for number, group in enumerate(groups):
        of_group = _gathered_group(group)
        bodies.append(of_group.body)
        writer.tensors |= {f"{GROUPS}{number}/{key}": tensor for key, tensor in of_group.tensors.items()}
    writer.body |= {
        "members": [name for body in bodies for name in body["members"]],
        "groups": bodies,
        "population": {
            "rows": population.tags,
            "array": not population._parted,
            "step": population.steps,
            "made": population._names.number,
            "lineage": [[event.step, event.tag, event.what.value, event.source] for event in population.lineage],
        },
    }
    return writer


def _gathered_group(group: TrainingGroup) -> SaveWriter:
    """Return copies of all that is saved of one group."""
    table = group.table
    group.settle()
    writer = SaveWriter(table.live, {"members": [table.tag(row) for row in table.live]}, {})
    gather(writer, group.fused, group.optimizer, group.scheduler, group.scaler)
    if not table.underway:
        table.discard()
    for kind, saved in group.saved_tables().items():
        for name, column in saved.columns.items():
            if isinstance(column, Tensor):
                writer.store_rows(f"{kind}/{name}", column)
    writer.body["limits begun"] = encode(group.options.initial_limits, {}, "limits begun")
    writer.body["group"] = {
        "rows": table["tag"],
        "accumulate": group.options.initial_calls,
        "on_nonfinite": group.options.on_nonfinite,
        "first": group._widths.first,
        "known": group.known_calls,
    }
    return writer


def load(
    population: Population,
    root: Root | Sequence[Root],
    make_model: Callable[..., nn.Module],
    names: str | Sequence[str] | None,
    loader: Any,
    random: bool,
    arguments: dict[str, Any],
) -> None:
    """Load the members of the latest saves into a population without any; see `hfusion.Population.load`.

    arguments: those of the population that the user has passed; ``scheduler`` may be a dict by name.
    """
    saves, groups, arrays = saves_of(root), [], []
    # The group that holds a member, as the index of its save and of the group in it.
    where: dict[str, tuple[int, int]] = {}
    for save, saved in enumerate(saves):
        with wrap_load_errors(saved.path):
            arrays.append(bool(saved.body["population"]["array"]))
            for number, group_save in enumerate(groups_of(saved)):
                groups.append(group_save)
                where |= dict.fromkeys(group_save.body["members"], (save, number))
    rows = _names_by_row(saves, groups, [names] if isinstance(names, str) else names)
    tags = [tag for tag in rows if tag is not None]
    counted = "accumulate" in arguments
    calls = _option_values(groups, "accumulate", lambda value: value is None or (type(value) is int and value >= 1))
    initial_calls = calls.pop() if len(calls) == 1 else None
    arguments.setdefault("accumulate", initial_calls or 1)
    if "on_nonfinite" not in arguments:
        values = _option_values(groups, "on_nonfinite", lambda value: value in get_args(OnNonfinite))
        if len(values) > 1:
            raise CheckpointError(
                f"on_nonfinite was not the same in the populations that are merged, {sorted(map(str, values))}: give "
                "on_nonfinite=..."
            )
        arguments["on_nonfinite"] = values.pop()
    named = any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        for parameter in inspect.signature(make_model).parameters.values()
    )
    models = [make_model(tag) if named else make_model() for tag in tags]
    if isinstance(makes := arguments.get("scheduler"), Mapping):
        if missing := [tag for tag in tags if tag not in makes]:
            raise CheckpointError(f"scheduler has none for {missing[0]!r}: give one for each of {tags}")
        # Free rows get any: a member that starts there brings its own, or gets the common one.
        arguments["scheduler"] = [makes[tags[0] if tag is None else tag] for tag in rows]
    options = GroupOptions(len(rows), **arguments)
    if not counted:
        options.initial_calls = initial_calls
    candidates = [part for found in grouped(models) for part in _as_saved(found, [where[tag] for tag in tags])]
    candidates.sort(key=lambda candidate: candidate.models[0])
    population._begin(len(rows), options)
    population._parted = len(candidates) > 1 or not all(arrays)
    shared = shared_frozen(models)
    for candidate in candidates:
        held, of_group = [tags[index] for index in candidate.models], [models[index] for index in candidate.models]
        places = [rows.index(tag) for tag in held]
        if population._parted:
            group = group_of(of_group, options, places, shared, population._history)
        else:
            group = TrainingGroup.begin(fuse(of_group), options, places, population._history)
            if (scaler := arguments.get("scaler")) is not None:
                scaler.begin(len(rows))
                scaler.table.arrange(places)
                group.scaler = scaler
        reader = SaveReader.of([saved for saved in groups if not set(saved.body["members"]).isdisjoint(held)], held)
        _restore(group, reader, counted)
        if not population._held_groups:
            # Members that join begin as those of the first group did.
            _keep_initial_values(options, group, reader)
        population._add(group, list(places), candidate.why)
        group.table["tag"], group.table["alive"] = held, torch.ones(len(held), dtype=torch.bool, device="cpu")
    if not population._parted:
        _spread(population.array, groups, rows)
    population._changed()
    _load_run(population, saves, loader, random)


def _keep_initial_values(options: GroupOptions, group: TrainingGroup, reader: SaveReader) -> None:
    """Keep the values that the members of a group once began with, which those that join get by default."""
    options.initial_hypers = [dict(values) for values in group.optimizer.initial_values]
    if options.scaler is not None and group.scaler is not None:
        options.scaler.initial_values = dict(group.scaler.initial_values)
    begun = reader.initial_hyperparameters("limits begun")
    options.initial_limits |= {name: begun.get(name) for name in LIMITS if name in begun}


def _spread(group: TrainingGroup, saves: Sequence[Saved], rows: Sequence[str | None]) -> None:
    """Give the members of the only array the rows that they had, between free ones. ``rows``: the name in each."""
    held, free = group.table["tag"], [row for row, tag in enumerate(rows) if tag is None]
    if held != list(rows):
        group.arrange([0 if tag is None else held.index(tag) for tag in rows], free)
        group.table["row"] = [None if tag is None else row for row, tag in enumerate(rows)]
    with wrap_load_errors(saves[0].path):
        body = saves[0].body["group"]
        group._widths = Widths(int(body["first"]) if len(saves) == 1 and body["rows"] == list(rows) else len(rows))
    group._step.at_once = group._widths.at_once(len(rows))


def _load_run(population: Population, saves: Sequence[Saved], loader: Any, random: bool) -> None:
    """Restore the history, and from the first save the position of the loader and the random generators."""
    steps, made = [0], [0]
    for saved in saves:
        with wrap_load_errors(saved.path):
            body = saved.body["population"]
            population._history.events += [Event(int(s), str(t), EventKind(w), o) for s, t, w, o in body["lineage"]]
            steps.append(int(body["step"]))
            made.append(int(body["made"]))
    population._names.number = max(made)
    population._history.step = max(steps)
    first = SaveReader([(saves[0], [0])])
    with wrap_load_errors(first.path):
        if loader is not None:
            if (position := first.value("loader")) is None:
                raise CheckpointError(f"{first.path} holds no position of a loader")
            loader.load_state_dict(position)
        if random:
            first.random(*(group.fused for group in population._groups))()


def _option_values(groups: Sequence[Saved], name: str, is_allowed: Callable[[Any], bool]) -> set[Any]:
    """Return the values of an option in the saved groups. Raises CheckpointError for one that is not allowed."""
    values = set()
    for saved in groups:
        with wrap_load_errors(saved.path):
            value = saved.body["group"][name]
            if not is_allowed(value):
                raise CheckpointError(f"{saved.path}: {name} is {value!r}")
            values.add(value)
    return values


def _names_by_row(saves: Sequence[Saved], groups: Sequence[Saved], names: Sequence[str] | None) -> list[str | None]:
    """Return the names by row: as saved if all members of one save are loaded, else without free rows.

    Raises CheckpointError.
    """
    tags = SaveReader.of(groups, names).tags
    if twice := sorted({name for name in tags if tags.count(name) > 1}):
        raise CheckpointError(f"{twice[0]!r} is named twice: load it once, and give it more rows by pop.copy")
    if names is not None or len(saves) > 1:
        return list(tags)
    with wrap_load_errors(saves[0].path):
        rows: list[str | None] = list(saves[0].body["population"]["rows"])
        if sorted(tag for tag in rows if tag is not None) != sorted(tags):
            raise CheckpointError(f"{saves[0].path}: its rows {rows} are not those of {tags}")
        return rows


def _as_saved(candidate: Candidates, holders: Sequence[tuple[int, int]]) -> list[Candidates]:
    """Divide models that look alike: members of different groups of one save stay apart, since their forwards differ.

    ``holders``: for each model the index of its save, and of its group there.
    """
    parts: list[tuple[dict[int, int], list[int]]] = []
    for index in candidate.models:
        save, number = holders[index]
        for numbers, members in parts:
            if numbers.setdefault(save, number) == number:
                members.append(index)
                break
        else:
            parts.append(({save: number}, [index]))
    return [Candidates(tuple(members), candidate.why) for _, members in parts]


def _restore(group: TrainingGroup, reader: SaveReader, counted: bool) -> None:
    """Load members into a group, which has a model for each. Raises CheckpointError.

    counted: whether the user has passed ``accumulate``, which is used instead of the saved one.
    """
    with wrap_load_errors(reader.path):
        write = writing(reader, group.fused, group.optimizer, group.scheduler, group.scaler, None, False)
        named = dict(tensors(group.fused))
        columns = {kind: _saved_columns(reader, kind, table, named) for kind, table in group.saved_tables().items()}
        members = columns["member"]
        check_limits(len(group), **{name: members[name] for name in LIMITS if name in members})
        _check_progress(reader, group, members, counted)
        for part, key, component in (("scheduler", "schedule", group.scheduler), ("scaler", "scaler", group.scaler)):
            if component is None and any(saved.body.get(key) for saved, _ in reader.parts):
                warnings.warn(
                    f"{reader.path} holds a {part}, and {part}= was not given: members go on without one",
                    stacklevel=4,
                )
        known = {call for saved, _ in reader.parts for call in saved.body["group"]["known"]}
        write()
        for kind, table in group.saved_tables().items():
            table.columns |= columns[kind]
        group.table.holds = group.table.underway
        if not group.is_plain:
            group._step.expected_calls |= known


def _saved_columns(reader: SaveReader, place: str, table: MemberTable, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the members' rows of the saved columns of a table, by name. Raises CheckpointError for unfit ones.

    Saves that lack a column have the rows of ``table`` there, or those of no member.

    named: the tensors of the group by key, whose shape columns of tensors have.
    """
    prefix = f"{OWN}{place}/"
    held = {
        key.removeprefix(prefix): stack
        for saved, _ in reader.parts
        for key, stack in saved.tensors.items()
        if key.startswith(prefix)
    }
    columns: dict[str, Any] = {}
    for name, like in held.items():
        if name not in table:
            kind, _, key = name.partition("/")
            of_tensor = key and kind != "absent"
            table.begin(name, member_rows(named[key].detach(), membership_of(named[key])) if of_tensor else like)
        present, parts, start = table[name], [], 0
        for saved, places in reader.parts:
            stack, stop = saved.tensors.get(prefix + name), start + len(places)
            parts.append(present[start:stop].cpu() if stack is None else stack[places])
            start = stop
        values = torch.cat(parts)
        if (values.dtype, values.shape) != (present.dtype, present.shape):
            raise CheckpointError(f"{reader.path}: {name} of the members is {values.dtype} {list(values.shape)}")
        columns[name] = values.to(present.device)
    return columns


def _check_progress(reader: SaveReader, group: TrainingGroup, members: dict[str, Any], counted: bool) -> None:
    """Check saved numbers of calls of an update, which ``counted`` ones of the user replace. Raises CheckpointError."""
    given, saved, done = group.table["calls"], members["calls"], members["done"]
    if counted:
        if bool(((done > 0) & (saved != given)).any()):
            row = int(((done > 0) & (saved != given)).nonzero()[0])
            raise CheckpointError(
                f"accumulate={int(given[row])} for {reader.tags[row]!r}, which is in the midst of an update of "
                f"{int(saved[row])} calls: leave accumulate out"
            )
        members["calls"] = given
