"""The best weights that each member has had, kept on its device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.named import tensors
from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save_contents import OWN, SaveWriter
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import is_per_member, member_rows, membership
from hfusion.core.patience import is_better, numbers
from hfusion.core.row_indices import rows_of
from hfusion.population.members import Roll, apart

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup

_SAVED = "population/best"


@dataclass(frozen=True)
class BestRecord:
    """The best that a member has been. A copy of a member has the record of its source, and the same tensors.

    Attributes:
        score: the metric then; NaN while no metric was a number.
        age: the updates that the member had had; -1 while there is no score.
        waited: the metrics since then that were no improvement.
        weights: parameters and buffers then, by key, on the device of the array; empty while there is no score.
    """

    score: float = math.nan
    age: int = -1
    waited: int = 0
    weights: Mapping[str, Tensor] | None = None


def member_tensors(fused: FusedModule) -> Iterator[tuple[str, Tensor]]:
    """The stacks ``[B, *shape]`` of the members' parameters and buffers by key, tied ones once."""
    visited: set[int] = set()
    for name, tensor in tensors(fused):
        mark = membership(tensor)
        if mark is not None and mark.is_own and id(tensor) not in visited:
            visited.add(id(tensor))
            yield name, member_rows(tensor.detach(), mark)


def check_independent(fused: FusedModule, action: str) -> None:
    """Raise a ValueError if members train a tensor together, so that ``action`` on one would be on all of them."""
    for name, parameter in fused.named_parameters():
        if parameter.requires_grad and not is_per_member(parameter):
            raise ValueError(
                f"{action}: {name} is one tensor that all members train. Freeze it, or give each member its own by "
                "copy.deepcopy"
            )


class BestMembers:
    """Each member's best weights: parameters and buffers when its metric was best.

    A member that is copied takes its record along, one that stops loses it, and `Population.save` saves it.

    Example:
        >>> # for each epoch: pop.best.update(pop.evaluate(accuracy, loader), mode="max")
        >>> # pop.best.restore()  # members are what they were at their best
    """

    def __init__(self, population: ArrayGroup) -> None:
        self._population, self._records = population, population._best

    @property
    def scores(self) -> Tensor:
        """The best metrics: float64 ``[rows]``, NaN where a row has none."""
        return torch.tensor([record.score for record in self._rows()], dtype=torch.float64, device="cpu")

    @property
    def ages(self) -> Tensor:
        """Number of updates of each member at its best: int64 ``[rows]``, -1 for rows without one."""
        return torch.tensor([record.age for record in self._rows()], device="cpu")

    @property
    def waited(self) -> Tensor:
        """Number of successive metrics without an improvement: int64 ``[rows]``."""
        return torch.tensor([record.waited for record in self._rows()], device="cpu")

    def _rows(self) -> list[BestRecord]:
        return [BestRecord() if tag is None else self._record(tag) for tag in self._population.tags]

    def _record(self, tag: str) -> BestRecord:
        return self._records.get(tag, BestRecord())

    @torch.no_grad()
    def update(
        self, metrics: Tensor | Sequence[float], *, mode: Literal["min", "max"] = "min", least: float = 0.0
    ) -> list[int]:
        """Keep the weights of members whose metric has improved by more than ``least``: the rows of these.

        ``metrics`` has a number for each row; NaN is no improvement.

        Raises:
            ValueError: another number of metrics, or a tensor that all members train together.
        """
        if mode not in ("min", "max") or not least >= 0:
            raise ValueError(f"mode={mode!r}, least={least}: min or max, and at least 0")
        pop, improved = self._population, []
        with pop._lock:
            values = numbers(metrics, len(pop))
            check_independent(pop.fused, "the best weights of each member")
            stacks, ages = dict(member_tensors(pop.fused)), pop.ages.tolist()
            for row, tag in enumerate(pop.tags):
                if tag is None:
                    continue
                record = self._record(tag)
                if is_better(values[row], record.score, mode, least):
                    weights = {name: stack[row].clone() for name, stack in stacks.items()}
                    self._records[tag] = BestRecord(values[row], ages[row], 0, weights)
                    improved.append(row)
                else:
                    self._records[tag] = replace(record, waited=record.waited + 1)
        return improved

    @torch.no_grad()
    def restore(self, rows: int | Sequence[int] | None = None) -> list[int]:
        """Write the best weights into their members, all or those in ``rows``: the rows that were written.

        A member without a record stays as it is, and so do all optimizers and schedules.
        """
        pop = self._population
        with pop._lock:
            chosen = range(len(pop)) if rows is None else rows_of(rows, len(pop))
            stored = {row: self._rows()[row].weights for row in chosen}
            written = {row: weights for row, weights in stored.items() if weights is not None}
            for name, stack in member_tensors(pop.fused) if written else ():
                for row, weights in written.items():
                    stack[row].copy_(weights[name])
        return list(written)

    def clear(self, rows: int | Sequence[int] | None = None) -> None:
        """Forget the records of all members, or of those in ``rows``, and give their memory back."""
        pop = self._population
        for row in range(len(pop)) if rows is None else rows_of(rows, len(pop)):
            self._records.pop(pop.tags[row] or "", None)

    @torch.no_grad()
    def __getitem__(self, row: int) -> nn.Module:
        """A copy of the member in ``row`` as it was at its best. Raises ValueError where there is no record."""
        pop = self._population
        with pop._lock:
            (index,) = rows_of(row, len(pop))
            tag = pop._roll.tag(index)
            weights = self._record(tag).weights
            if weights is None:
                raise no_best(tag, index)
            model = apart(pop.fused, index)
            own = dict(tensors(model))
            for name, value in weights.items():
                own[name].detach().copy_(value)
            return model


def no_best(tag: str, row: int) -> ValueError:
    """The error for a member without a record."""
    return ValueError(f"{tag!r} in row {row} has no best weights: call pop.best.update(metrics) before")


def copy_records(records: dict[str, BestRecord], pairs: Sequence[tuple[str, str]]) -> None:
    """Let members have the records of those that they were copied from: names ``(source, copy)``, at the same time."""
    sources = [records.get(source) for source, _ in pairs]
    for (_, tag), record in zip(pairs, sources, strict=True):
        if record is None:
            records.pop(tag, None)
        else:
            records[tag] = record


def write_records(writer: SaveWriter, records: Mapping[str, BestRecord], roll: Roll) -> None:
    """Let a save hold the records of its members, as stacks on the CPU; nothing if there are none."""
    rows = [records.get(roll.tag(row), BestRecord()) for row in roll.live]
    filled = next((record.weights for record in rows if record.weights is not None), None)
    if filled is None and not any(record.waited for record in rows):
        return

    def write(key: str, values: Any) -> None:
        writer.tensors[f"{OWN}{_SAVED}/{key}"] = values

    write("score", torch.tensor([record.score for record in rows], dtype=torch.float64, device="cpu"))
    write("age", torch.tensor([record.age for record in rows], device="cpu"))
    write("waited", torch.tensor([record.waited for record in rows], device="cpu"))
    for name, like in (filled or {}).items():
        values = [torch.zeros_like(like) if record.weights is None else record.weights[name] for record in rows]
        write(f"weights/{name}", torch.stack([value.cpu() for value in values]))


def read_records(wide: SaveReader, rows: Sequence[str | None], fused: FusedModule) -> dict[str, BestRecord]:
    """The records of the members in ``rows`` by name; saves may have none. Raises CheckpointError for other shapes."""
    stacks, records, start = dict(member_tensors(fused)), {}, 0
    for saved, places in wide.parts:
        tags, start = rows[start : start + len(places)], start + len(places)
        if f"{OWN}{_SAVED}/score" not in saved.tensors:
            continue

        def read(key: str, place: int, held: Callable[[str], Tensor] = saved.tensors.__getitem__) -> Tensor:
            return held(f"{OWN}{_SAVED}/{key}")[place]

        for tag, place in zip(tags, places, strict=True):
            if tag is None:
                continue
            score, age, waited = (read(key, place).item() for key in ("score", "age", "waited"))
            weights = None
            if age >= 0:
                weights = {name: read(f"weights/{name}", place).to(stack.device) for name, stack in stacks.items()}
                for name, value in weights.items():
                    if value.shape != stacks[name].shape[1:]:
                        raise CheckpointError(f"{saved.path}: the best {name} of {tag!r} has shape {list(value.shape)}")
            records[tag] = BestRecord(float(score), int(age), int(waited), weights)
    return records
