"""Populations loaded from one save or from several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hfusion.checkpoint.files import Saved
from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save import Root, saves_of
from hfusion.core.errors import CheckpointError
from hfusion.population.group_options import GroupOptions
from hfusion.population.grouping import grouped
from hfusion.population.mixed import MixedMembers
from hfusion.population.mixed_saving import groups_of, history, is_mixed, load_mixed, rows_of_saves
from hfusion.population.population import ArrayGroup
from hfusion.population.saving import makes_of, models_of, restore, rows_of


def loaded_members(
    root: Root | Saved | Sequence[Root],
    make_model: Callable[..., nn.Module],
    names: str | Sequence[str] | None,
    loader: Any,
    random: bool,
    options: dict[str, Any],
) -> tuple[ArrayGroup | MixedMembers, GroupOptions]:
    """Return the members of the latest saves and the population's options; see `hfusion.Population.load`.

    options: the population's arguments that the user has passed; ``scheduler`` may be a dict by name.
    """
    saves = saves_of(root)
    member_names = [names] if isinstance(names, str) else names
    arrays = not any(map(is_mixed, saves))
    if arrays:
        reader = SaveReader.of(saves, member_names)
        rows = rows_of(reader, names)
    else:
        rows = rows_of_saves(saves, member_names)
    groups = groups_of(saves)
    counted = "accumulate" in options
    calls = {group.saved.body["population"].get("accumulate") for group in groups}
    initial_calls = calls.pop() if len(calls) == 1 else None
    options.setdefault("accumulate", initial_calls or 1)
    if "on_nonfinite" not in options and (value := _agreed([group.saved for group in groups], "on_nonfinite")):
        options["on_nonfinite"] = value
    models = models_of(make_model, rows)
    if isinstance(makes := options.get("scheduler"), Mapping):
        options["scheduler"] = makes_of(makes, rows)
    shared = GroupOptions.of_arguments(len(rows), **options)
    # For groups only.
    options.pop("processes", None)
    if not counted:
        shared = replace(shared, updates=replace(shared.updates, initial_calls=initial_calls))
    live = {row: models[row] for row, tag in enumerate(rows) if tag is not None}
    if arrays and len(grouped(list(live.values()))) == 1:
        array = ArrayGroup(models, **options)
        restore(array, reader, rows, loader, random, counted)
        return array, shared
    mixed = load_mixed(groups, rows, live, shared, loader, random, counted)
    history(mixed, saves)
    return mixed, shared


def _agreed(saves: Sequence[Saved], name: str) -> Any:
    """Return an option on which all saves agree; None for saves of older versions. Raises CheckpointError."""
    values = {saved.body["population"].get(name) for saved in saves}
    if len(values) > 1:
        raise CheckpointError(
            f"{name} was not the same in the populations that are merged, {sorted(map(str, values))}: give {name}=..."
        )
    return values.pop()
