"""An array of members on disk and back: all of it, some members, or the members of several."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hfusion.checkpoint import files
from hfusion.checkpoint.files import wrap_load_errors
from hfusion.checkpoint.json_tree import encode
from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save import Root, Writing, gather, in_thread, writing
from hfusion.checkpoint.save_contents import OWN, SaveWriter
from hfusion.core.copies import module_copy
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import member_rows
from hfusion.core.row_indices import Widths
from hfusion.optim.group import membership_of
from hfusion.optim.lr_scheduler import Make
from hfusion.population.accumulation import Accumulation
from hfusion.population.best import read_records, write_records
from hfusion.population.gradients import GradientSums
from hfusion.population.members import Event, EventKind, Roll, key_of
from hfusion.population.update_guard import Buffers, Limit

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup


Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """Decorate a method to hold the population's lock, so that a save from another thread sees no unfinished call."""

    @wraps(method)
    def called(population: Any, *args: Any, **kwargs: Any) -> Any:
        with population._lock:
            return method(population, *args, **kwargs)

    return cast("Method", called)


class Saving:
    """Saving, loading and copying of a population."""

    _saving: Writing | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy.deepcopy; the step is created again."""
        pop = cast("ArrayGroup", self)
        dropped = {"_lock", "_finite", "_step", "_together", "_saving", "_chosen"}
        state = {name: value for name, value in vars(self).items() if name not in dropped}
        return {**state, "known": sorted(pop._step.known_calls)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "known"})
        cast("ArrayGroup", self)._prepare(state["known"])

    def check_saved(self) -> None:
        """Raise a CheckpointError during an update of members that train a parameter together."""
        pop = cast("ArrayGroup", self)
        if pop._common and pop._updates.underway:
            raise CheckpointError("members train a parameter together, and are amid an update: save after it")

    def save(
        self,
        root: Root,
        *,
        loader: Any = None,
        extra: Any = None,
        keep: int = 3,
        score: float | None = None,
        wait: bool = True,
    ) -> Future[Path]:
        """Save everything in a new folder under ``root``; see `hfusion.save` for the arguments, and what is raised.

        ``wait=False``: copies are made now, and a background thread writes them; ``result()`` of the returned future is
        the folder, or raises. A save waits for the previous one, and raises its error if nothing else has.
        """
        pop = cast("ArrayGroup", self)
        keep, score = files.checked(keep, score)
        before, self._saving = self._saving, None
        if before is not None:
            before.settle()
        with pop._lock:
            self.check_saved()
            writer, steps = gathered(pop, loader, extra), pop.steps
        write = partial(files.write, root, writer.body, writer.tensors, step=steps, keep=keep, score=score)
        self._saving = saving = in_thread(write)
        if wait:
            saving.result()
        return saving


def gathered(pop: ArrayGroup, loader: Any, extra: Any) -> SaveWriter:
    """Return copies of all that a save of ``pop`` holds. Raises CheckpointError if all rows are free."""
    roll, limits = pop._roll, pop._limits
    if not roll.live:
        raise CheckpointError("every row of the population is free: there is no member to save")
    tags = [roll.tag(row) for row in roll.live]
    writer = SaveWriter(roll.live, {"members": tags}, {})
    gather(writer, pop.fused, pop.optimizer, pop.scheduler, pop.scaler, loader, extra)
    writer.store_rows("population/ages", roll.ages)
    writer.store_rows("population/frozen", roll.frozen)
    writer.store_rows("population/keys", roll.keys)
    for name in ("norm", "value"):
        if (limit := getattr(limits, name)) is not None:
            writer.store_rows(f"population/clip_{name}", limit.values)
    write_records(writer, pop._best, roll)
    save_updates(writer, pop)
    initial_limits = {
        name: limit.initial_value for name in ("norm", "value") if (limit := getattr(limits, name)) is not None
    }
    writer.body["limits begun"] = encode(initial_limits, {}, "limits begun")
    writer.body["population"] = {
        "rows": roll.tags,
        "accumulate": pop._updates.initial_calls,
        "on_nonfinite": pop._on_nonfinite,
        "first": pop._widths.first,
        "step": roll.step,
        "made": roll.tag_number,
        "lineage": [[event.step, event.tag, event.what.value, event.source] for event in roll.lineage],
        "known": sorted(pop._step.known_calls),
    }
    return writer


def rows_of(reader: SaveReader, tags: str | Sequence[str] | None) -> list[str | None]:
    """Return the names by row: as saved if all members of one save are loaded, else without free rows."""
    with wrap_load_errors(reader.path):
        if tags is None and len(reader.parts) == 1:
            rows: list[str | None] = list(reader.parts[0][0].body["population"]["rows"])
            if [tag for tag in rows if tag is not None] != reader.tags:
                raise CheckpointError(f"{reader.path}: its rows {rows} are not those of {reader.tags}")
            return rows
    twice = sorted({name for name in reader.tags if reader.tags.count(name) > 1})
    if twice:
        raise CheckpointError(f"{twice[0]!r} is named twice: load it once, and give it more rows by pop.copy")
    return list(reader.tags)


def makes_of(schedules: Mapping[str, Make], rows: Sequence[str | None]) -> list[Make]:
    """Return the functions that make the members' schedules, by row. Raises CheckpointError if one is missing."""
    missing = [tag for tag in rows if tag is not None and tag not in schedules]
    if missing:
        raise CheckpointError(f"scheduler has none for {missing[0]!r}: give one for each of {[t for t in rows if t]}")
    # Free rows get any: a member that starts there brings its own, or gets the common one.
    other = next(schedules[tag] for tag in rows if tag is not None)
    return [other if tag is None else schedules[tag] for tag in rows]


def models_of(make_model: Callable[..., nn.Module], rows: Sequence[str | None]) -> list[nn.Module]:
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


def restore(
    pop: ArrayGroup, reader: SaveReader, rows: Sequence[str | None], loader: Any, random: bool, counted: bool
) -> None:
    """Load a save into ``pop``, which has a model in each row. Raises CheckpointError.

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
        write = writing(wide, pop.fused, pop.optimizer, pop.scheduler, pop.scaler, loader, random)
        roll, records = _roll(wide, reader, rows), read_records(wide, rows, pop.fused)
        limits = pop._limits
        for name in ("norm", "value"):
            if wide.has_tensor(f"members/population/clip_{name}"):
                limits = replace(limits, **{name: _limit(wide, name, getattr(limits, name))})
        bodies = [saved.body["population"] for saved, _ in reader.parts]
        whole = len(bodies) == 1 and bodies[0]["rows"] == list(rows)
        for part, key, component in (("scheduler", "schedule", pop.scheduler), ("scaler", "scaler", pop.scaler)):
            if component is None and any(saved.body.get(key) for saved, _ in reader.parts):
                warnings.warn(
                    f"{reader.path} holds a {part}, and {part}= was not given: members go on without one",
                    stacklevel=3,
                )
        updates = load_updates(wide, pop, free, counted)
        write()
        pop._updates = updates
        pop._roll, pop._limits, pop._best = roll, limits, records
        pop._widths = Widths(int(bodies[0]["first"]) if whole else len(rows))
        pop._step.at_once = pop._widths.at_once(len(rows))
        for body in bodies:
            pop._step.expected_calls |= set(body["known"])


def _limit(reader: SaveReader, name: str, default: Limit | None) -> Limit:
    """Return a saved limit. Older saves lack ``initial_value``: it is that of ``default``, or of the members."""
    saved = Limit.of(f"clip_{name}", reader.member_rows(f"population/clip_{name}"), len(reader.tags))
    initial_limits = reader.initial_hyperparameters("limits begun")
    if name in initial_limits:
        return replace(saved, initial_value=initial_limits[name])
    return saved if default is None else replace(saved, initial_value=default.initial_value)


def _roll(wide: SaveReader, reader: SaveReader, rows: Sequence[str | None]) -> Roll:
    free = torch.tensor([tag is None for tag in rows], device="cpu")
    ages, frozen = wide.member_rows("population/ages"), wide.member_rows("population/frozen")
    if ages.dtype is not torch.int64 or frozen.dtype is not torch.bool or not ages.shape == frozen.shape == free.shape:
        raise CheckpointError(f"{reader.path}: ages and frozen members are {ages.dtype} and {frozen.dtype}")
    keys = _keys(wide, reader, rows)
    bodies = [saved.body["population"] for saved, _ in reader.parts]
    lineage = [Event(int(s), str(t), EventKind(w), o) for body in bodies for s, t, w, o in body["lineage"]]
    step, created = (max(int(body[key]) for body in bodies) for key in ("step", "made"))
    return Roll(list(rows), torch.where(free, 0, ages), frozen & ~free, keys, step, lineage, created)


def _keys(wide: SaveReader, reader: SaveReader, rows: Sequence[str | None]) -> Tensor:
    default_keys = torch.tensor([0 if tag is None else key_of(tag) for tag in rows], device="cpu")
    # Saves of older versions have none.
    keys = wide.member_rows("population/keys") if wide.has_tensor("members/population/keys") else default_keys
    if (keys.dtype, keys.shape) != (default_keys.dtype, default_keys.shape):
        raise CheckpointError(f"{reader.path}: keys are {keys.dtype} {list(keys.shape)}")
    return keys


_CALLS, _DONE, _SPOILT = (f"population/{name}" for name in ("accumulate", "calls made", "spoilt"))
_SUM, _ABSENT, _BEFORE = (f"population/{name}/" for name in ("sums", "absent", "before"))


def save_updates(writer: SaveWriter, pop: ArrayGroup) -> None:
    """Save the members' progress in their updates, with sums of gradients if an update is unfinished."""
    updates = pop._updates
    writer.store_rows(_CALLS, updates.calls)
    if not updates.underway:
        return
    writer.store_rows(_DONE, updates.done)
    writer.store_rows(_SPOILT, updates.spoilt)
    for name, value in updates.sums.sums.items():
        absent = updates.sums.absent[name]
        writer.store_rows(_SUM + name, value)
        writer.store_rows(_ABSENT + name, torch.zeros_like(updates.spoilt) if absent is None else absent)
    if updates.buffers is not None:
        for name, value in updates.buffers.saved_values.items():
            writer.store_rows(_BEFORE + name, value)


def load_updates(wide: SaveReader, pop: ArrayGroup, free: Sequence[int], has_accumulate: bool) -> Accumulation:
    """Restore the members' progress in their updates, for a population whose tensors are loaded.

    ``has_accumulate``: whether the user has passed ``accumulate``.

    Raises:
        CheckpointError: ``accumulate`` differs from the save for a member whose update is unfinished.
    """
    calls = pop._updates.calls
    done = _saved_rows(wide, _DONE, torch.zeros_like(calls))
    saved = _saved_rows(wide, _CALLS, calls)
    if has_accumulate and bool(((done > 0) & (saved != calls)).any()):
        row = int(((done > 0) & (saved != calls)).nonzero()[0])
        raise CheckpointError(
            f"accumulate={int(calls[row])} for {wide.tags[row]!r}, which is in the midst of an update of "
            f"{int(saved[row])} calls: leave accumulate out"
        )
    updates = Accumulation.of(calls if has_accumulate else saved, len(calls))
    if pop._common and updates.initial_calls is None:
        raise CheckpointError(f"accumulate={updates.calls.tolist()}: members train a parameter together, and so update")
    updates.done, updates.spoilt = done, _saved_rows(wide, _SPOILT, updates.spoilt)
    if updates.underway:
        updates.sums = _sums(wide, pop, len(calls))
        updates.buffers = Buffers(pop.fused)
        for name, value in updates.buffers.saved_values.items():
            value.copy_(_saved_rows(wide, _BEFORE + name, value))
        updates.clear(free)
    return updates


def _sums(wide: SaveReader, pop: ArrayGroup, members: int) -> GradientSums:
    sums = GradientSums(members)
    for name, param in pop.fused.named_parameters():
        if any(OWN + _SUM + name in saved.tensors for saved, _ in wide.parts):
            like = torch.zeros_like(member_rows(param.detach(), membership_of(param)))
            sums.sums[name] = _saved_rows(wide, _SUM + name, like).to(param.device)
            sums.absent[name] = _saved_rows(wide, _ABSENT + name, torch.ones(members, dtype=torch.bool, device="cpu"))
    return sums


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
