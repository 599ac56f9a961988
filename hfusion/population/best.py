"""The best weights that each member has had, kept on its device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save_contents import OWN, SaveWriter
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import Membership, is_per_member, member_rows, membership
from hfusion.core.patience import is_better, numbers
from hfusion.core.row_indices import rows_of
from hfusion.population.members import Roll, apart

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup

_SAVED = "population/best"


@dataclass(frozen=True)
class BestRecord:
    """A member's best state so far. A copy of a member has the record of its source, and the same tensors.

    Attributes:
        score: the best metric; NaN while no metric was a number.
        age: the member's number of updates at that time; -1 while there is no score.
        waited: the number of metrics since then, none of which was an improvement.
        weights: parameters and buffers at that time, by key, on the array's device; None while there is no score.
    """

    score: float = math.nan
    age: int = -1
    waited: int = 0
    weights: Mapping[str, Tensor] | None = None


def member_tensors(fused: FusedModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the stacks ``[B, *shape]`` of the members' parameters and buffers with their keys, tied ones once."""
    for name, tensor, mark in marked_tensors(fused):
        yield name, member_rows(tensor, mark)


def tensors_of_member(fused: FusedModule, row: int) -> dict[str, Tensor]:
    """Return a member's parameters and buffers by key, as views of the array's tensors; tied ones once."""
    return {name: member_rows(tensor, mark)[row] for name, tensor, mark in marked_tensors(fused)}


def marked_tensors(fused: FusedModule) -> Iterator[tuple[str, Tensor, Membership]]:
    """Yield key, tensor of the array and mark of the members' parameters and buffers, tied ones once."""
    visited: set[int] = set()
    fused._views.update(fused)
    for name, tensor in tensors(fused):
        mark = membership(tensor)
        if mark is not None and mark.is_own and id(tensor) not in visited:
            visited.add(id(tensor))
            yield name, tensor.detach(), mark


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
        """Keep the weights of members whose metric has improved by more than ``least``, and return their rows.

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
            ages = pop.ages.tolist()
            for row, tag in enumerate(pop.tags):
                if tag is None:
                    continue
                record = self._record(tag)
                if is_better(values[row], record.score, mode, least):
                    weights = {name: tensor.clone() for name, tensor in tensors_of_member(pop.fused, row).items()}
                    self._records[tag] = BestRecord(values[row], ages[row], 0, weights)
                    improved.append(row)
                else:
                    self._records[tag] = replace(record, waited=record.waited + 1)
        return improved

    @torch.no_grad()
    def restore(self, rows: int | Sequence[int] | None = None) -> list[int]:
        """Write the best weights into their members, all or those in ``rows``, and return the written rows.

        A member without a record stays as it is, and so do all optimizers and schedules.
        """
        pop = self._population
        with pop._lock:
            chosen = range(len(pop)) if rows is None else rows_of(rows, len(pop))
            stored = {row: self._rows()[row].weights for row in chosen}
            written = {row: weights for row, weights in stored.items() if weights is not None}
            for row, weights in written.items():
                for name, tensor in tensors_of_member(pop.fused, row).items():
                    tensor.copy_(weights[name])
        return list(written)

    def clear(self, rows: int | Sequence[int] | None = None) -> None:
        """Remove the records of all members, or of members in ``rows``, and free their memory."""
        pop = self._population
        for row in range(len(pop)) if rows is None else rows_of(rows, len(pop)):
            self._records.pop(pop.tags[row] or "", None)

    @torch.no_grad()
    def __getitem__(self, row: int) -> nn.Module:
        """Return a copy of the member in ``row`` with its best weights. Raises ValueError if there is no record."""
        pop = self._population
        with pop._lock:
            (index,) = rows_of(row, len(pop))
            tag = pop._roll.tag(index)
            weights = self._record(tag).weights
            if weights is None:
                raise no_best(tag, index)
            model = apart(pop.fused, index)
            model_tensors = dict(tensors(model))
            for name, value in weights.items():
                model_tensors[name].detach().copy_(value)
            return model


def no_best(tag: str, row: int) -> ValueError:
    """Return the error for a member without a record."""
    return ValueError(f"{tag!r} in row {row} has no best weights: call pop.best.update(metrics) before")


def copy_records(records: dict[str, BestRecord], pairs: Sequence[tuple[str, str]]) -> None:
    """Give each copy the record of its source, or none if that has none.

    ``pairs``: names ``(source, copy)``. All sources are read before a record is written.
    """
    sources = [records.get(source) for source, _ in pairs]
    for (_, tag), record in zip(pairs, sources, strict=True):
        if record is None:
            records.pop(tag, None)
        else:
            records[tag] = record


def write_records(writer: SaveWriter, records: Mapping[str, BestRecord], roll: Roll) -> None:
    """Add the members' records to a save, as stacks on the CPU; nothing if there are none."""
    rows = [records.get(roll.tag(row), BestRecord()) for row in roll.live]
    if not any(record.weights is not None or record.waited for record in rows):
        return

    def write(key: str, values: Any) -> None:
        writer.tensors[f"{OWN}{_SAVED}/{key}"] = values

    write("score", torch.tensor([record.score for record in rows], dtype=torch.float64, device="cpu"))
    write("age", torch.tensor([record.age for record in rows], device="cpu"))
    write("waited", torch.tensor([record.waited for record in rows], device="cpu"))
    held = [record.weights or {} for record in rows]
    for name in dict.fromkeys(name for weights in held for name in weights):
        values = [weights[name] for weights in held if name in weights]
        stack = values[0].new_zeros(len(rows), *values[0].shape, device="cpu")
        for row, weights in zip(stack, held, strict=True):
            if name in weights:
                row.copy_(weights[name])
        write(f"weights/{name}", stack)


def read_records(wide: SaveReader, rows: Sequence[str | None], fused: FusedModule) -> dict[str, BestRecord]:
    """Return the records of the members in ``rows`` by name, if any. Raises CheckpointError if shapes differ."""
    records, start = {}, 0
    for saved, places in wide.parts:
        tags, first, start = rows[start : start + len(places)], start, start + len(places)
        if f"{OWN}{_SAVED}/score" not in saved.tensors:
            continue

        def read(key: str, index: int, held: Callable[[str], Tensor] = saved.tensors.__getitem__) -> Tensor:
            return held(f"{OWN}{_SAVED}/{key}")[index]

        for row, (tag, index) in enumerate(zip(tags, places, strict=True), start=first):
            if tag is None:
                continue
            score, age, waited = (read(key, index).item() for key in ("score", "age", "waited"))
            weights = None
            if age >= 0:
                weights = {}
                for name, tensor in tensors_of_member(fused, row).items():
                    value = read(f"weights/{name}", index)
                    if value.shape != tensor.shape:
                        raise CheckpointError(f"{saved.path}: the best {name} of {tag!r} has shape {list(value.shape)}")
                    weights[name] = value.to(tensor.device, copy=True)
            records[tag] = BestRecord(float(score), int(age), int(waited), weights)
    return records
