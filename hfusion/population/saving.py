"""A population on disk and back: all of it, some members, or the members of several; each group as an array."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.save import SaveReader, array_state, groups_of, packed, run_state, saves_of
from hfusion.core.errors import CheckpointError
from hfusion.core.member_table import MemberTable, Widths
from hfusion.core.membership import member_rows
from hfusion.optim.group import membership_of
from hfusion.population.grouping import Candidates, grouped
from hfusion.population.members import LIMITS, Event, EventKind, GroupOptions
from hfusion.population.training_group import TrainingGroup

if TYPE_CHECKING:
    from hfusion.population.population import Population


def gathered(population: Population, loader: Any, extra: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return copies of all that a save holds, as `hfusion.checkpoint.files.write` takes them.

    Raises CheckpointError during an update, or if all rows are free.
    """
    if not population._layout.live:
        raise CheckpointError("every row of the population is free: there is no member to save")
    groups: list[dict[str, Any]] = []
    for group in population._groups:
        table = group.table
        group.settle()
        state = array_state(table.live, group.fused, group.optimizer, group.scheduler, group.scaler)
        for kind, saved in (("member", table), ("best", group.best)):
            columns = {name: column for name, column in saved.columns.items() if isinstance(column, Tensor)}
            state[kind] = MemberTable(saved.rows, columns).take(table.live).columns
        state["members"] = [table["tag"][row] for row in table.live]
        state["numbers begun"] = group.options.initial
        state["on_nonfinite"] = group.options.on_nonfinite
        state["group"] = {
            "rows": table["tag"],
            "first": group._widths.first,
            "known": group.known_calls,
        }
        groups.append(state)
    whole = {
        "members": [name for state in groups for name in state["members"]],
        "groups": groups,
        "population": {
            "rows": population.tags,
            "array": not population._parted,
            "step": population.steps,
            "lineage": [[event.step, event.tag, event.what.value, event.source] for event in population.lineage],
        },
    }
    return packed(whole | run_state(loader, extra, [group.fused for group in population._groups]))


def load(
    population: Population, root: Any, make_model: Callable[..., nn.Module], names: Any, arguments: dict[str, Any]
) -> Sequence[Saved]:
    """Load the members of the latest saves into a population without any, and return the saves; see
    `hfusion.Population.load`.

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
    tags = list(SaveReader.of(groups, [names] if isinstance(names, str) else names).tags)
    if twice := sorted({name for name in tags if tags.count(name) > 1}):
        raise CheckpointError(f"{twice[0]!r} is named twice: load it once, and give it more rows by pop.copy")
    # By row: as saved if all members of one save are loaded, else without free rows.
    rows: list[str | None] = [*tags]
    if names is None and len(saves) == 1:
        with wrap_load_errors(saves[0].path):
            rows = list(saves[0].body["population"]["rows"])
        tags = [tag for tag in rows if tag is not None]
    counted = "accumulate" in arguments
    if "on_nonfinite" not in arguments:
        arguments["on_nonfinite"] = SaveReader.of(groups, tags).agreed("on_nonfinite")
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
    candidates = sorted(part for found in grouped(models) for part in _as_saved(found, [where[tag] for tag in tags]))
    population._parted = not all(arrays)
    population._form(options, candidates, models, rows, arguments.get("scaler"))
    for group in population._groups:
        held = group.table["tag"]
        reader = SaveReader.of([saved for saved in groups if not set(held).isdisjoint(saved.body["members"])], held)
        _restore(group, reader, counted)
        if group is population._groups[0]:
            # Members that join begin as those of the first group did.
            options.initial_hypers = [dict(values) for values in group.optimizer.initial_values]
            if options.scaler is not None and group.scaler is not None:
                options.scaler.initial_values = dict(group.scaler.initial_values)
            begun = reader.initial_hyperparameters("numbers begun")
            options.initial |= {name: begun[name] for name in begun if name in LIMITS or not counted}
    if not population._parted:
        _spread(population.array, groups, rows)
    population._changed()
    return saves


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


def load_run(population: Population, saves: Sequence[Saved], loader: Any, random: bool) -> None:
    """Restore the history, and from the first save the position of the loader and the random generators."""
    steps = [0]
    for saved in saves:
        with wrap_load_errors(saved.path):
            body = saved.body["population"]
            population._history.events += [Event(int(s), str(t), EventKind(w), o) for s, t, w, o in body["lineage"]]
            steps.append(int(body["step"]))
    population._history.step = max(steps)
    first = SaveReader([(saves[0], [0])])
    with wrap_load_errors(first.path):
        if loader is not None:
            first.loader(loader)
        if random:
            first.random(*(group.fused for group in population._groups))
        first.write()


def _as_saved(candidate: Candidates, holders: Sequence[tuple[int, int]]) -> list[Candidates]:
    """Divide models that look alike: members of different groups of one save stay apart, since their forwards differ.

    ``holders``: for each model the index of its save, and of its group there.
    """
    parts: list[tuple[dict[int, int], list[int]]] = []
    for index in candidate[0]:
        save, number = holders[index]
        for numbers, members in parts:
            if numbers.setdefault(save, number) == number:
                members.append(index)
                break
        else:
            parts.append(({save: number}, [index]))
    return [(members, candidate[1]) for _, members in parts]


def _restore(group: TrainingGroup, reader: SaveReader, counted: bool) -> None:
    """Load members into a group, which has a model for each. Raises CheckpointError.

    counted: whether the user has passed ``accumulate``, which is used instead of the saved one.
    """
    with wrap_load_errors(reader.path):
        reader.array(group.fused, group.optimizer, group.scheduler, group.scaler)
        reader.write()
        given = group.table["accumulate"].clone()
        for kind, table in (("member", group.table), ("best", group.best)):
            _load_table(reader, kind, table, dict(tensors(group.fused)))
        if counted:
            if bool(((group.table["done"] > 0) & (group.table["accumulate"] != given)).any()):
                raise CheckpointError(
                    f"accumulate={given.tolist()} for members in the midst of an update of another number of calls, "
                    f"{group.table['accumulate'].tolist()}: leave accumulate out"
                )
            group.table["accumulate"] = given
        for part, key, component in (("scheduler", "schedule", group.scheduler), ("scaler", "scaler", group.scaler)):
            if component is None and any(saved.body.get(key) for saved, _ in reader.parts):
                warnings.warn(
                    f"{reader.path} holds a {part}, and {part}= was not given: members go on without one",
                    stacklevel=4,
                )
        if not group.is_plain:
            group._step.expected_calls |= {call for saved, _ in reader.parts for call in saved.body["group"]["known"]}


def _load_table(reader: SaveReader, kind: str, table: MemberTable, named: Mapping[str, Tensor]) -> None:
    """Write the columns that are saved as ``kind`` into a table. A column that a save lacks stays there.

    named: the tensors of the group by key, whose shape and device columns of tensors have.
    """
    stop = 0
    for saved, places in reader.parts:
        rows = range(stop, stop := stop + len(places))
        part = table.take(rows)
        for name, stack in saved.body[kind].items():
            of, _, key = name.partition("/")
            if name not in table:
                of_tensor = key and of != "absent"
                table.begin(name, member_rows(named[key].detach(), membership_of(named[key])) if of_tensor else stack)
            part[name] = stack[places]
        table.put(rows, part)
