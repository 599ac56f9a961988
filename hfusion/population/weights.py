"""Members' weights beside those that train: the best of each, averages, and saves of a population."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.save import SaveReader, array_state, groups_of, packed, run_state, saves_of
from hfusion.core.errors import CheckpointError
from hfusion.core.member_table import MemberTable, Widths, rows_of
from hfusion.core.membership import member_rows, membership
from hfusion.core.patience import is_better, numbers
from hfusion.optim.group import membership_of
from hfusion.population.grouping import Candidates, copied_member, grouped
from hfusion.population.members import LIMITS, NO_BEST, Event, EventKind, GroupOptions
from hfusion.population.training_group import TrainingGroup

if TYPE_CHECKING:
    from hfusion.population.population import Population


def member_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the stacks ``[B, *shape]`` of the members' parameters and buffers with their keys, tied ones once.

    ``module``: an array, or the model of a plain group.
    """
    visited: set[int] = set()
    if isinstance(module, FusedModule):
        module._views.update(module)
    for name, tensor in tensors(module):
        mark = membership(tensor)
        if mark is not None and mark.is_own and id(tensor) not in visited:
            visited.add(id(tensor))
            yield name, member_rows(tensor.detach(), mark)


def _stacks(population: Population) -> dict[TrainingGroup, dict[str, Tensor]]:
    """Return the stacks of each group's parameters and buffers by key, without those that members share."""
    for group in population._groups:
        group.settle()
    return {group: dict(member_tensors(group.fused)) for group in population._groups}


class BestMembers:
    """Each member's best weights: parameters and buffers when its metric was best.

    A member that is copied takes its record along, one that stops loses it, and `Population.save` saves it.

    Example:
        >>> # for each epoch: pop.best.update(pop.evaluate(accuracy, loader), mode="max")
        >>> # pop.best.restore()  # members are what they were at their best
    """

    def __init__(self, population: Population) -> None:
        self._population = population

    @property
    def scores(self) -> Tensor:
        """The best metrics: float64 ``[rows]``, NaN where a row has none."""
        return self._column("score")

    @property
    def ages(self) -> Tensor:
        """Number of updates of each member at its best: int64 ``[rows]``, -1 for rows without one."""
        return self._column("age")

    @property
    def waited(self) -> Tensor:
        """Number of successive metrics without an improvement: int64 ``[rows]``."""
        return self._column("waited")

    def _column(self, name: str) -> Tensor:
        columns = [group.best[name] for group in self._population._groups]
        return self._population._layout.collected(columns, NO_BEST[name])

    @torch.no_grad()
    def update(
        self, metrics: Tensor | Sequence[float], *, mode: Literal["min", "max"] = "min", least: float = 0.0
    ) -> list[int]:
        """Keep the weights of members whose metric has improved by more than ``least``, and return their rows.

        ``metrics`` has a number for each row; NaN is no improvement.

        Raises:
            ValueError: another number of metrics.
        """
        if mode not in ("min", "max") or not least >= 0:
            raise ValueError(f"mode={mode!r}, least={least}: min or max, and at least 0")
        pop, improved = self._population, []
        with pop._lock:
            values = numbers("metrics", metrics, len(pop))
            stacks = _stacks(pop)
            for row in pop._layout.live:
                group, local = pop._layout.slot_of(row)
                best = group.best
                best["waited"][local] += 1
                if is_better(values[row], float(best["score"][local]), mode, least):
                    best["score"][local], best["age"][local] = values[row], group.table["age"][local]
                    best["waited"][local] = 0
                    for name, stack in stacks[group].items():
                        if f"weights/{name}" not in best:
                            best.begin(f"weights/{name}", stack)
                        best[f"weights/{name}"][local].copy_(stack[local])
                    improved.append(row)
        return improved

    @torch.no_grad()
    def restore(self, rows: int | Sequence[int] | None = None) -> list[int]:
        """Write the best weights into their members, all or those in ``rows``, and return the written rows.

        A member without a record stays as it is, and so do all optimizers and schedules.
        """
        pop = self._population
        with pop._lock:
            chosen = list(range(len(pop))) if rows is None else rows_of(rows, len(pop))
            ages, stacks = self.ages.tolist(), _stacks(pop)
            written = [row for row in chosen if ages[row] >= 0]
            for row in written:
                group, local = pop._layout.slot_of(row)
                for name, stack in stacks[group].items():
                    stack[local].copy_(group.best[f"weights/{name}"][local])
        return written

    def clear(self, rows: int | Sequence[int] | None = None) -> None:
        """Remove the records of all members, or of members in ``rows``, and free the memory if none is left."""
        pop = self._population
        chosen = set(range(len(pop)) if rows is None else rows_of(rows, len(pop)))
        for group in pop._groups:
            group.best.clear(local for local, row in enumerate(group.rows) if row in chosen)
            if not bool((group.best["age"] >= 0).any()):
                group.best.drop("weights")

    @torch.no_grad()
    def __getitem__(self, row: int) -> nn.Module:
        """Return a copy of the member in ``row`` with its best weights. Raises ValueError if there is no record."""
        pop = self._population
        with pop._lock:
            (index,) = rows_of(row, len(pop))
            group, local = pop._layout.slot_of(index)
            if self.ages[index] < 0:
                tag = group.table["tag"][local]
                raise ValueError(f"{tag!r} in row {index} has no best weights: call pop.best.update(metrics) before")
            weights = {name: stack[local] for name, stack in group.best.of("weights").items()}
            return _with_tensors(copied_member(group.fused, local), weights)


def _with_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Write tensors by key into a model, and return it."""
    held = dict(tensors(model))
    for name, value in values.items():
        held[name].detach().copy_(value)
    return model


def check_member_weights(weights: Any, members: int, where: str) -> Tensor:
    """Return weights as float64 ``[members]`` on the CPU. Raises ValueError, with ``where``, for invalid ones."""
    values = torch.as_tensor(weights, device="cpu").detach().to("cpu", torch.float64)
    if values.shape != (members,) or not bool((values >= 0).all()) or not 0 < float(values.sum()) < torch.inf:
        raise ValueError(f"weights {values.tolist()} {where}: give one for each, at least 0, with a sum above 0")
    return values


@torch.no_grad()
def average(population: Population, rows: Any, weights: Any, into: Any, optimizer: str) -> nn.Module | None:
    """Average members and write the mean into others, or return it; see `hfusion.Population.average`.

    Raises:
        ValueError: members differ in keys or shapes, weights are invalid, or a target is in the midst of an update.
    """
    if optimizer not in ("keep", "reset"):
        raise ValueError(f'optimizer={optimizer!r}: it is "keep" or "reset"')
    targets = None if into is None else population._chosen(None if isinstance(into, str) and into == "all" else into)
    rows = population._chosen(rows)
    if not rows:
        raise ValueError("average of no rows: give at least one member")
    weights = [1.0] * len(rows) if weights is None else weights
    values = check_member_weights(weights, len(rows), f"for the average of rows {list(rows)}")
    shares = {row: share for row, share in zip(rows, (values / values.sum()).tolist(), strict=True) if share > 0}
    stacks, members = _stacks(population), dict[int, dict[str, Tensor]]()
    for row in dict.fromkeys((*rows, *(targets or ()))):
        group, local = population._layout.slot_of(row)
        members[row] = {name: stack[local] for name, stack in stacks[group].items()}
        shapes = [{name: list(tensor.shape) for name, tensor in members[each].items()} for each in (rows[0], row)]
        for name in {**shapes[0], **shapes[1]}:
            first, other = (held.get(name, "none") for held in shapes)
            if first != other:
                raise ValueError(
                    f"average of members of different shapes: {name} is {first} in row {rows[0]} and {other} in row "
                    f"{row}. Average members of one shape, by rows="
                )
        done = int(group.table["done"][local])
        if targets and row in targets and done:
            raise ValueError(
                f"{done} of {int(group.table['accumulate'][local])} steps of an update of row {row} are made, with "
                "gradients at its present weights: average into members between their updates"
            )
    means = {name: _mean([members[row][name] for row in shares], [*shares.values()]) for name in members[rows[0]]}
    if targets is None:
        group, local = population._layout.slot_of(rows[0])
        return _with_tensors(copied_member(group.fused, local), means)
    for row in targets:
        for name, tensor in members[row].items():
            tensor.copy_(means[name])
    for group, places in population._by_group(targets) if optimizer == "reset" else ():
        group.optimizer.restart(places)
    return None


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the mean of members' tensors, weighted by ``shares``. Half precision is averaged in float32.

    Integer tensors, such as BatchNorm's count of batches, are not averaged but copied from the last member, as
    `torch.optim.swa_utils.AveragedModel` copies the buffers of its latest model.
    """
    last = values[-1]
    same = all(torch.equal(value.to(last.device), last) for value in values)
    if same or not (last.is_floating_point() or last.is_complex()):
        # The mean of equal values, such as those of a common base, is that to the bit, without the rounding of a sum.
        return last.clone()
    stack = torch.stack([value.to(last.device) for value in values])
    wide = stack.float() if stack.dtype.itemsize < 4 else stack
    weights = torch.tensor(shares, dtype=torch.float64, device="cpu").to(wide)
    mean: Tensor = torch.tensordot(weights, wide, 1).to(stack.dtype)
    return mean


# A population on disk and back: all of it, some members, or the members of several; each group as an array.


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
        state["group"] = {"rows": table["tag"], "first": group._widths.first, "known": group.known_calls}
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
        for held, members in parts:
            if held.setdefault(save, number) == number:
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
                    f"{reader.path} holds a {part}, and {part}= was not given: members go on without one", stacklevel=4
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
