"""Weights of a population's members: the best that each has had, kept on its device, and averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.core.member_table import rows_of
from hfusion.core.membership import member_rows, membership
from hfusion.core.patience import is_better, numbers
from hfusion.population.grouping import copied_member
from hfusion.population.members import NO_BEST
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
