"""A population on disk and back: all of it, some members, or the members of several; each group as an array."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from hfusion.checkpoint import files
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.json_tree import encode
from hfusion.checkpoint.packed import PackedSave
from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save import Root, Writing, gather, groups_of, in_thread, saves_of, writing
from hfusion.checkpoint.save_contents import GROUPS, OWN, SaveWriter
from hfusion.core.copies import module_copy
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import member_rows
from hfusion.core.row_indices import Widths
from hfusion.optim.group import membership_of
from hfusion.optim.lr_scheduler import Make
from hfusion.population.accumulation import Accumulation
from hfusion.population.group_options import GroupOptions
from hfusion.population.grouping import Candidates, grouped, settle_waiting, shared_frozen
from hfusion.population.members import Event, EventKind, Roll
from hfusion.population.training_group import TrainingGroup
from hfusion.population.update_guard import Buffers, Limits, OnNonfinite
from hfusion.population.weights import read_records, write_records

if TYPE_CHECKING:
    from hfusion.population.population import Population


def save(
    population: Population, root: Root, loader: Any, extra: Any, keep: int, score: float | None, wait: bool
) -> Writing:
    """Save a population in a new folder under ``root``; see `hfusion.Population.save`."""
    keep, score = files.checked(keep, score)
    before, population._saving = population._saving, None
    if before is not None:
        before.settle()
    with population._lock:
        writer, steps = gathered(population, loader, extra), population.steps
    write = partial(files.write, root, writer.body, writer.tensors, step=steps, keep=keep, score=score)
    population._saving = saving = in_thread(write)
    if wait:
        saving.result()
    return saving


def packed(population: Population) -> PackedSave:
    """Return the contents of a save of a population, for its ``load`` in another process."""
    with population._lock:
        writer = gathered(population, None, None)
        return PackedSave.of(writer.body, writer.tensors, population.steps)


def gathered(population: Population, loader: Any, extra: Any) -> SaveWriter:
    """Return copies of all that a save holds. Raises CheckpointError during an update, or if all rows are free."""
    # Members that wait to join a group of members like them do so now, as before the next step.
    settle_waiting(population)
    groups = population._groups
    if not population._layout.live:
        raise CheckpointError("every row of the population is free: there is no member to save")
    writer = SaveWriter([], {}, {})
    writer.run(loader, extra, [group.fused for group in groups])
    bodies = []
    for number, group in enumerate(groups):
        of_group = _gathered_group(population, group)
        bodies.append(of_group.body)
        writer.tensors |= {f"{GROUPS}{number}/{key}": tensor for key, tensor in of_group.tensors.items()}
    writer.body |= {
        "members": [name for body in bodies for name in body["members"]],
        "groups": bodies,
        "population": {
            "rows": population.tags,
            "array": population._whole,
            "step": population.steps,
            "made": population._names.number,
            "lineage": [[event.step, event.tag, event.what.value, event.source] for event in population.lineage],
        },
    }
    return writer


def _gathered_group(population: Population, group: TrainingGroup) -> SaveWriter:
    """Return copies of all that is saved of one group. Raises CheckpointError during an update."""
    if group._common and group._updates.underway:
        raise CheckpointError("members train a parameter together, and are amid an update: save after it")
    roll = group._roll
    tags = [roll.tag(row) for row in roll.live]
    writer = SaveWriter(roll.live, {"members": tags}, {})
    gather(writer, group.fused, group.optimizer, group.scheduler, group.scaler)
    writer.store_rows("population/ages", roll.ages)
    writer.store_rows("population/frozen", roll.frozen)
    writer.store_rows("population/keys", roll.keys)
    for name, bounds in group._limits.values.items():
        writer.store_rows(f"population/{name}", bounds)
    writer.body["limits begun"] = encode(dict(group._limits.initial), {}, "limits begun")
    write_records(writer, population._records, tags)
    _save_updates(writer, group)
    writer.body["group"] = {
        "rows": roll.tags,
        "accumulate": group._updates.initial_calls,
        "on_nonfinite": group._on_nonfinite,
        "first": group._widths.first,
        "known": sorted(group._step.known_calls),
    }
    return writer


def load(
    population: Population,
    root: Root | Saved | Sequence[Root],
    make_model: Callable[..., nn.Module],
    names: str | Sequence[str] | None,
    loader: Any,
    random: bool,
    options: dict[str, Any],
) -> None:
    """Load the members of the latest saves into a population without any; see `hfusion.Population.load`.

    options: the population's arguments that the user has passed; ``scheduler`` may be a dict by name.
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
    counted = "accumulate" in options
    calls = _option_values(groups, "accumulate", lambda value: value is None or (type(value) is int and value >= 1))
    initial_calls = calls.pop() if len(calls) == 1 else None
    options.setdefault("accumulate", initial_calls or 1)
    if "on_nonfinite" not in options:
        values = _option_values(groups, "on_nonfinite", lambda value: value in get_args(OnNonfinite))
        if len(values) > 1:
            raise CheckpointError(
                f"on_nonfinite was not the same in the populations that are merged, {sorted(map(str, values))}: give "
                "on_nonfinite=..."
            )
        options["on_nonfinite"] = values.pop()
    models = _models_of(make_model, rows)
    if isinstance(makes := options.get("scheduler"), Mapping):
        options["scheduler"] = _makes_of(makes, rows)
    shared_options = GroupOptions.of_arguments(len(rows), **options)
    if not counted:
        shared_options = replace(shared_options, updates=replace(shared_options.updates, initial_calls=initial_calls))
    live = [row for row, tag in enumerate(rows) if tag is not None]
    holders = [where[str(rows[row])] for row in live]
    candidates = [part for found in grouped([models[row] for row in live]) for part in _as_saved(found, holders)]
    candidates.sort(key=lambda candidate: candidate.models[0])
    whole = len(candidates) == 1 and all(arrays)
    population._begin(len(rows), shared_options, whole)
    shared = shared_frozen([models[row] for row in live])
    for candidate in candidates:
        places = list(range(len(rows))) if whole else [live[index] for index in candidate.models]
        of_group = [models[row] for row in places]
        group = population._new_group(of_group, places, shared, options.get("scaler"))
        tags = [rows[row] for row in places]
        held = [tag for tag in tags if tag is not None]
        reader = SaveReader.of([saved for saved in groups if not set(saved.body["members"]).isdisjoint(held)], held)
        _restore(population, group, reader, tags, counted)
        group._updates.initial_calls = shared_options.updates.initial_calls
        if not population._groups:
            population._options = shared_options.with_initial_values(group)
        population._add(group, [row if rows[row] is not None else None for row in places], candidate.why)
    _load_run(population, saves, loader, random)


def _load_run(population: Population, saves: Sequence[Saved], loader: Any, random: bool) -> None:
    """Restore the history, and from the first save the position of the loader and the random generators."""
    steps, made = [0], [0]
    for saved in saves:
        with wrap_load_errors(saved.path):
            body = saved.body["population"]
            population._lineage += [Event(int(s), str(t), EventKind(w), o) for s, t, w, o in body["lineage"]]
            steps.append(int(body["step"]))
            made.append(int(body["made"]))
    population._names.number = max(made)
    population._set_steps(max(steps))
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


def _makes_of(schedules: Mapping[str, Make], rows: Sequence[str | None]) -> list[Make]:
    """Return the functions that make the members' schedules, by row. Raises CheckpointError if one is missing."""
    missing = [tag for tag in rows if tag is not None and tag not in schedules]
    if missing:
        raise CheckpointError(f"scheduler has none for {missing[0]!r}: give one for each of {[t for t in rows if t]}")
    # Free rows get any: a member that starts there brings its own, or gets the common one.
    other = next(schedules[tag] for tag in rows if tag is not None)
    return [other if tag is None else schedules[tag] for tag in rows]


def _models_of(make_model: Callable[..., nn.Module], rows: Sequence[str | None]) -> list[nn.Module]:
    """Return a model for every row; ``make_model`` is called with the member's name if it takes an argument."""
    named = any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        for parameter in inspect.signature(make_model).parameters.values()
    )
    first = next(tag for tag in rows if tag is not None)
    models = {row: make_model(tag) if named else make_model() for row, tag in enumerate(rows) if tag is not None}
    for row in range(len(rows)):
        if row not in models:
            models[row] = _another(make_model(first) if named else make_model(), list(models.values()))
    return [models[row] for row in range(len(rows))]


def _another(model: nn.Module, models: Sequence[nn.Module]) -> nn.Module:
    """Return ``model``, or a copy if it is one of ``models``; the copy keeps tensors that the others share."""
    if all(model is not existing for existing in models):
        return model
    others = {id(tensor) for existing in models if existing is not model for tensor in _tensors(existing)}
    return module_copy(model, {id(tensor): tensor for tensor in _tensors(model) if id(tensor) in others})


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


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


def _restore(
    population: Population, group: TrainingGroup, reader: SaveReader, rows: Sequence[str | None], counted: bool
) -> None:
    """Load members into a group, which has a model in each row. Raises CheckpointError.

    Args:
        rows: the tag of each row, None for a free one.
        counted: whether the user has passed ``accumulate``, which is used instead of the saved one.
    """
    with wrap_load_errors(reader.path):
        live = [row for row, tag in enumerate(rows) if tag is not None]
        # Free rows get the tensors of the first member.
        indices = {row: index for index, row in enumerate(live)}
        free = [row for row, tag in enumerate(rows) if tag is None]
        wide = reader.at([indices.get(row, 0) for row in range(len(rows))], free)
        write = writing(wide, group.fused, group.optimizer, group.scheduler, group.scaler, None, False)
        roll, records = _roll(wide, rows), read_records(wide, rows, group.fused)
        names = [name for name in ("clip_norm", "clip_value") if wide.has_tensor(f"{OWN}population/{name}")]
        limits = Limits.of(len(rows), **{name: wide.member_rows(f"population/{name}") for name in names})
        begun = wide.initial_hyperparameters("limits begun")
        initial = group._limits.initial | {name: begun.get(name) for name in names}
        limits = Limits(group._limits.values | limits.values, initial)
        bodies = [saved.body["group"] for saved, _ in reader.parts]
        for part, key, component in (("scheduler", "schedule", group.scheduler), ("scaler", "scaler", group.scaler)):
            if component is None and any(saved.body.get(key) for saved, _ in reader.parts):
                warnings.warn(
                    f"{reader.path} holds a {part}, and {part}= was not given: members go on without one",
                    stacklevel=4,
                )
        updates = _load_updates(wide, group, free, counted)
        write()
        group._updates, group._roll, group._limits = updates, roll, limits
        population._records |= records
        same_rows = len(bodies) == 1 and bodies[0]["rows"] == list(rows)
        group._widths = Widths(int(bodies[0]["first"]) if same_rows else len(rows))
        group._step.at_once = group._widths.at_once(len(rows))
        for body in bodies:
            group._step.expected_calls |= set(body["known"])


def _roll(wide: SaveReader, rows: Sequence[str | None]) -> Roll:
    free = torch.tensor([tag is None for tag in rows], device="cpu")
    ages, frozen = wide.member_rows("population/ages"), wide.member_rows("population/frozen")
    keys = wide.member_rows("population/keys")
    for name, values, dtype in (
        ("ages", ages, torch.int64),
        ("frozen", frozen, torch.bool),
        ("keys", keys, torch.int64),
    ):
        if (values.dtype, values.shape) != (dtype, free.shape):
            raise CheckpointError(f"{wide.path}: {name} are {values.dtype} {list(values.shape)}")
    return Roll(list(rows), torch.where(free, 0, ages), frozen & ~free, keys)


_CALLS, _UPDATE = "population/accumulate", "population/update/"


def _save_updates(writer: SaveWriter, group: TrainingGroup) -> None:
    """Save the members' progress in their updates, with sums of gradients if an update is unfinished."""
    writer.store_rows(_CALLS, group._updates.calls)
    if group._updates.underway:
        for name, stack in group._updates.stacks().items():
            writer.store_rows(_UPDATE + name, stack)


def _load_updates(wide: SaveReader, group: TrainingGroup, free: Sequence[int], has_accumulate: bool) -> Accumulation:
    """Restore the members' progress in their updates, for a group whose tensors are loaded.

    ``has_accumulate``: whether the user has passed ``accumulate``.

    Raises:
        CheckpointError: ``accumulate`` differs from the save for a member whose update is unfinished.
    """
    calls = group._updates.calls
    done = _saved_rows(wide, f"{_UPDATE}done", torch.zeros_like(calls))
    saved = _saved_rows(wide, _CALLS, calls)
    if has_accumulate and bool(((done > 0) & (saved != calls)).any()):
        row = int(((done > 0) & (saved != calls)).nonzero()[0])
        raise CheckpointError(
            f"accumulate={int(calls[row])} for {wide.tags[row]!r}, which is in the midst of an update of "
            f"{int(saved[row])} calls: leave accumulate out"
        )
    updates = Accumulation.of(calls if has_accumulate else saved, len(calls))
    if group._common and updates.initial_calls is None:
        raise CheckpointError(f"accumulate={updates.calls.tolist()}: members train a parameter together, and so update")
    if bool((done > 0).any()):
        updates.buffers = Buffers(group.fused)
        for name, param in group.fused.named_parameters():
            if any(f"{OWN}{_UPDATE}sums/{name}" in held.tensors for held, _ in wide.parts):
                updates.sums.begin(name, member_rows(param.detach(), membership_of(param)))
        for name, stack in updates.stacks().items():
            stack.copy_(_saved_rows(wide, _UPDATE + name, stack))
        updates.clear(free)
    return updates


def _saved_rows(wide: SaveReader, key: str, otherwise: Tensor) -> Tensor:
    """Return the members' rows of a saved tensor; for saves that do not hold it, the rows of ``otherwise``."""
    rows, start = [], 0
    for saved, places in wide.parts:
        stack = saved.tensors.get(OWN + key)
        stop = start + len(places)
        rows.append(otherwise[start:stop].cpu() if stack is None else stack[places])
        start = stop
    values = torch.cat(rows)
    if (values.dtype, values.shape) != (otherwise.dtype, otherwise.shape):
        raise CheckpointError(f"{wide.path}: {key} is {values.dtype} {list(values.shape)}")
    return values
