"""Steps of some members of a population: a small population makes them, and its state is written back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.array.gathered_rows import GatheredRows
from hfusion.core.calls import StackedInput, entry_counts, is_stacked
from hfusion.core.ragged import Ragged
from hfusion.optim.gathered_state import GatheredState
from hfusion.step.memory_budget import state_bytes

if TYPE_CHECKING:
    from hfusion.population.training_group import TrainingGroup


@dataclass(eq=False)
class ChosenRows:
    """A small population ``part`` that steps some members of ``whole``; `load` fills it before each step."""

    whole: TrainingGroup
    part: TrainingGroup
    array: GatheredRows
    state: GatheredState

    @staticmethod
    def of(whole: TrainingGroup, places: Sequence[int]) -> ChosenRows:
        """Create it for the rows ``places``. Raises FusionError if they cannot be stepped separately."""
        array = GatheredRows.of(whole.fused, places)
        small, large = dict(array.array.named_parameters()), dict(whole.fused.named_parameters())
        params: dict[Tensor, Tensor] = {large[name]: param for name, param in small.items()}
        state = GatheredState.of(whole.optimizer, params, places)
        part: TrainingGroup = object.__new__(type(whole))
        vars(part).update(vars(whole))
        vars(part).pop("_chosen", None)
        part.fused, part.optimizer, part.scheduler = array.array, state.part, None
        part._share(whole.table.take(places), whole)
        part._prepare(whole._step.known_calls)
        part._step.tell = whole._step.tell
        return ChosenRows(whole, part, array, state)

    def fits(self) -> bool:
        """Return whether the population still has the tensors for which this was created."""
        whole, part = self.whole, self.part
        same_options = part._function is whole._function and part._compiles == whole._compiles
        return same_options and self.state.whole is whole.optimizer and self.array.fits() and self.state.fits()

    def load(self, rows: Sequence[int], width: int) -> None:
        """Copy the present state of members ``rows`` to ``part``, followed by free rows up to ``width``."""
        whole, part = self.whole, self.part
        places = [*rows, *list(rows[:1]) * (width - len(rows))]
        part._share(whole.table.take(rows, width - len(rows)), whole)
        self.array.load(places)
        self.state.load(places)
        part.scaler = None if whole.scaler is None else whole.scaler.of_rows(places)
        part._on_nonfinite, part._common = whole._on_nonfinite, whole._common
        part._gradient_hooks = whole._gradient_hooks
        weighs = whole._weighs or part._weighs
        if (weighs, whole._samples) != (part._weighs, part._samples):
            part._weighs, part._samples = weighs, whole._samples
            part._make_step(())
        part._step.at_once = None if whole._common else whole._widths.at_once(width)

    def store(self, rows: Sequence[int]) -> None:
        """Write the state of the first members of ``part`` back to members ``rows`` of ``whole``."""
        whole, part = self.whole, self.part
        self.array.store(len(rows))
        self.state.store(rows)
        if whole.scaler is not None and part.scaler is not None:
            whole.scaler.table.put(rows, part.scaler.table)
        whole.put_rows(rows, part.table)
        whole._roll.step = part._roll.step
        whole._roll.lineage += part._roll.lineage


def step_rows(group: TrainingGroup, chosen: list[int], inputs: Any, target: Any, keywords: dict[str, Any]) -> Tensor:
    """Make a step of members ``chosen``, rows of the group; see `Population.step`."""
    arguments = inputs, target, keywords
    if chosen == list(range(len(group))):
        return group._step_all(inputs, target, keywords)
    if group._common and group._updates.sums_gradients:
        raise ValueError(
            f"rows={chosen}: members who train a parameter together make its updates together, of accumulate= calls of "
            "all: step all rows, or have accumulate=1"
        )
    # Members that train a parameter together all contribute to its gradient.
    width = len(chosen) if group._common else group._widths.of(len(chosen))
    small = _small_population(group, chosen, width)
    arguments = pytree.tree_map(lambda leaf: _filled(leaf, width), arguments, is_leaf=is_stacked)
    deferred = small.part._deferred = group._deferred
    if small.part._step.budget is not None:
        small.part.elsewhere = group.elsewhere + state_bytes(group.fused, group.optimizer)
    losses = small.part._step_all(*arguments)
    group._drop_gradients()
    if deferred is None:
        small.store(chosen)
    else:
        deferred.finish(lambda: small.store(chosen))
    all_losses = losses.new_full((len(group),), math.nan)
    all_losses[torch.tensor(chosen, device=losses.device)] = losses[: len(chosen)]
    return all_losses


def _small_population(group: TrainingGroup, rows: Sequence[int], width: int) -> ChosenRows:
    chosen: ChosenRows | None = vars(group).get("_chosen")
    if chosen is None or not chosen.fits():
        chosen = vars(group)["_chosen"] = ChosenRows.of(group, [*rows, *list(rows[:1]) * (width - len(rows))])
    chosen.load(rows, width)
    return chosen


def check_stacked(arguments: Any, rows: Sequence[int]) -> None:
    """Raise a ValueError unless every stacked tensor has an entry for each of ``rows``."""
    for count in entry_counts(arguments):
        if count != len(rows):
            raise ValueError(
                f"a stacked argument holds {count} entries, and rows={list(rows)} names {len(rows)} "
                "members: give one entry for each of them, in that order"
            )


def _filled(leaf: Any, width: int) -> Any:
    """Return a stacked argument with ``width`` entries; those of free rows repeat the first."""
    if isinstance(leaf, Ragged):
        return Ragged([*leaf, *[leaf[0]] * (width - len(leaf))])
    if not is_stacked(leaf) or len(leaf.tensor) == width:
        return leaf
    first = leaf.tensor[:1].expand(width - len(leaf.tensor), *leaf.tensor.shape[1:])
    return StackedInput(torch.cat([leaf.tensor, first]))
