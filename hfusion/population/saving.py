"""A population on disk and back: all of it, some members, or the members of several; each group as an array."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint import files
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.json_tree import encode
from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save import Root, Writing, gather, groups_of, in_thread, saves_of, writing
from hfusion.checkpoint.save_contents import GROUPS, OWN, SaveWriter
from hfusion.core.copies import module_copy
from hfusion.core.errors import CheckpointError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import member_rows
from hfusion.core.row_indices import Widths
from hfusion.optim.group import membership_of
from hfusion.optim.lr_scheduler import Make
from hfusion.population.group_options import GroupOptions
from hfusion.population.grouping import Candidates, grouped, settle_waiting, shared_frozen
from hfusion.population.members import Event, EventKind
from hfusion.population.training_group import TrainingGroup
from hfusion.population.update_guard import LIMITS, OnNonfinite, check_limits, common_value

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
        of_group = _gathered_group(group)
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


def _gathered_group(group: TrainingGroup) -> SaveWriter:
    """Return copies of all that is saved of one group. Raises CheckpointError during an update."""
    if group._common and group._updates.underway:
        raise CheckpointError("members train a parameter together, and are amid an update: save after it")
    roll = group._roll
    tags = [roll.tag(row) for row in roll.live]
    writer = SaveWriter(roll.live, {"members": tags}, {})
    gather(writer, group.fused, group.optimizer, group.scheduler, group.scaler)
    if not group._updates.underway:
        group._updates.discard()
    for kind, table in group.saved_tables().items():
        for name, column in table.columns.items():
            if isinstance(column, Tensor):
                writer.store_rows(f"{kind}/{name}", column)
    writer.body["limits begun"] = encode(dict(group.initial_limits), {}, "limits begun")
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
    root: Root | Sequence[Root],
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
    shared_options = GroupOptions(len(rows), **options)
    if not counted:
        shared_options.initial_calls = initial_calls
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
        _restore(group, reader, tags, counted)
        group._updates.initial_calls = shared_options.initial_calls
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


def _restore(group: TrainingGroup, reader: SaveReader, rows: Sequence[str | None], counted: bool) -> None:
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
        begun, named = wide.initial_hyperparameters("limits begun"), dict(tensors(group.fused))
        initial = group.initial_limits | {name: begun.get(name) for name in LIMITS if name in begun}
        saved_tables = {kind: _saved_columns(wide, kind, table, named) for kind, table in group.saved_tables().items()}
        members = saved_tables["member"]
        check_limits(len(rows), **{name: members[name] for name in LIMITS if name in members})
        _check_progress(wide, group, members, counted)
        bodies = [saved.body["group"] for saved, _ in reader.parts]
        for part, key, component in (("scheduler", "schedule", group.scheduler), ("scaler", "scaler", group.scaler)):
            if component is None and any(saved.body.get(key) for saved, _ in reader.parts):
                warnings.warn(
                    f"{reader.path} holds a {part}, and {part}= was not given: members go on without one",
                    stacklevel=4,
                )
        write()
        for kind, table in group.saved_tables().items():
            table.columns |= saved_tables[kind]
            table.clear(free)
        group.table["tag"], group.table["alive"] = list(rows), torch.tensor([t is not None for t in rows], device="cpu")
        group.initial_limits = initial
        group._updates.holds = bool(group._updates.underway)
        same_rows = len(bodies) == 1 and bodies[0]["rows"] == list(rows)
        group._widths = Widths(int(bodies[0]["first"]) if same_rows else len(rows))
        group._step.at_once = group._widths.at_once(len(rows))
        for body in bodies:
            group._step.expected_calls |= set(body["known"])


def _saved_columns(wide: SaveReader, place: str, table: MemberTable, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the members' rows of the saved columns of a table, by name. Raises CheckpointError for unfit ones.

    Saves that lack a column have the rows of ``table`` there, or those of no member.

    named: the tensors of the group by key, whose shape columns of tensors have.
    """
    prefix = f"{OWN}{place}/"
    held = {
        key.removeprefix(prefix): stack
        for saved, _ in wide.parts
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
        for saved, places in wide.parts:
            stack, stop = saved.tensors.get(prefix + name), start + len(places)
            parts.append(present[start:stop].cpu() if stack is None else stack[places])
            start = stop
        values = torch.cat(parts)
        if (values.dtype, values.shape) != (present.dtype, present.shape):
            raise CheckpointError(f"{wide.path}: {name} of the members is {values.dtype} {list(values.shape)}")
        columns[name] = values.to(present.device)
    return columns


def _check_progress(wide: SaveReader, group: TrainingGroup, members: dict[str, Any], counted: bool) -> None:
    """Check saved numbers of calls of an update, which ``counted`` ones of the user replace. Raises CheckpointError."""
    given, saved, done = group.table["calls"], members["calls"], members["done"]
    if counted:
        if bool(((done > 0) & (saved != given)).any()):
            row = int(((done > 0) & (saved != given)).nonzero()[0])
            raise CheckpointError(
                f"accumulate={int(given[row])} for {wide.tags[row]!r}, which is in the midst of an update of "
                f"{int(saved[row])} calls: leave accumulate out"
            )
        members["calls"] = saved = given
    if group._common and common_value(saved) is None:
        raise CheckpointError(f"accumulate={saved.tolist()}: members train a parameter together, and so update")
