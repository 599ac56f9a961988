"""Steps of several groups of a population, one after another: their updates and their random numbers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfusion.core.calls import take_entries
from hfusion.core.errors import ForwardsDiffer
from hfusion.device.backend import backend
from hfusion.optim.hyper import HyperValue
from hfusion.population.evaluation import check_entries
from hfusion.population.group_options import check_numbers
from hfusion.population.grouping import part
from hfusion.population.members import nonfinite
from hfusion.population.training_group import Deferred, TrainingGroup
from hfusion.step.memory_budget import state_bytes

if TYPE_CHECKING:
    from hfusion.population.population import Population


def step_groups(
    population: Population,
    inputs: Any,
    target: Any,
    rows: Sequence[int] | None,
    weights: Any,
    keywords: dict[str, Any],
    deferred: Deferred | None,
) -> Tensor:
    """Train the members of several groups for one step; see `Population.step`."""
    if rows is None:
        check_entries((inputs, target, keywords), len(population))
    if not population._held_groups:
        return torch.full((population._size,), math.nan, device="cpu")
    entries = {row: entry for entry, row in enumerate(range(len(population)) if rows is None else rows)}
    _note_memory(population)

    def arguments_of(group: TrainingGroup, places: Sequence[int]) -> tuple[Any, Any, dict[str, Any]]:
        x, y = (take_entries(value, places) for value in (inputs, target))
        return x, y, {name: take_entries(value, places) for name, value in keywords.items()}

    workers, groups = population._workers, population._held_groups
    all_step = rows is None and weights is None
    with (
        GroupDraws(_device(groups)) as draws,
        workers.step(
            groups, draws, (lambda group: arguments_of(group, group.entries(entries))) if all_step else None
        ) as losses,
    ):
        queue = deque(workers.owned_here(groups))
        while queue:
            group = queue.popleft()
            chosen = [local for local, row in enumerate(group.rows) if row in entries]
            if not chosen:
                continue
            whole = len(chosen) == len(group.live)
            places = group.entries(entries) if whole else [entries[group.rows[local] or 0] for local in chosen]
            x, y, named = arguments_of(group, places)
            group.deferred = deferred
            try:
                with draws.of_group(group.key), workers.at_home(group):
                    losses[group.number] = group.step(
                        x, y, None if whole else chosen, take_entries(weights, places), named
                    )
            except ForwardsDiffer as error:
                queue.extendleft(reversed(part(population, group, error, None if whole else chosen)))
            finally:
                group.deferred = None
    like = next(iter(losses.values()))
    no_loss = torch.full((1,), math.nan, dtype=like.dtype, device=like.device)
    # Groups may have parted. The layout is kept, so that members need not come home.
    layout, groups = population._held_layout or population._layout, population._held_groups
    return layout.collected([losses.get(g.number, no_loss.expand(len(g))) for g in groups])


def _note_memory(population: Population) -> None:
    """Set for each group the bytes that the state of the other groups takes, if memory is limited."""
    if population._options.memory is not None:
        sizes = [state_bytes(group.fused, group.optimizer) for group in population._held_groups]
        for group, size in zip(population._held_groups, sizes, strict=True):
            group.elsewhere = sum(sizes) - size


@contextmanager
def one_update(population: Population) -> Iterator[Deferred | None]:
    """Context manager: the updates of several groups count as one.

    With ``on_nonfinite="raise"`` this yields what the groups defer, and makes these updates at the end. If values of
    members are not finite, it raises a NonFiniteError before the first, and all are what they were before.
    """
    deferred = Deferred() if population._options.on_nonfinite == "raise" else None
    try:
        yield deferred
        bad = [
            (group.rows[local] or 0, group.table.tag(local))
            for group, found, _ in deferred or ()
            for local in ([] if found is None else found.nonzero().reshape(-1).tolist())
        ]
        if deferred and bad:
            for group, _, _ in deferred:
                group.restore_all()
            raise nonfinite(bad, population.steps)
        for _, _, end in deferred or ():
            end()
    finally:
        population._history.end_step()


def _device(groups: Sequence[TrainingGroup]) -> torch.device:
    devices = [p.device for group in groups for p in group.parameters()]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def flush(population: Population) -> bool:
    """Update members that have made fewer than ``accumulate`` calls of `step`. Return whether there were any.

    Their gradients stay divided by ``accumulate``, as in the last group of an epoch of `hfusion.Task`.
    """
    flushed = False
    with population._lock, one_update(population) as deferred:
        for group in population._groups:
            group.deferred = deferred
            try:
                flushed |= group.flush()
            finally:
                group.deferred = None
    return flushed


def limit_norms(population: Population, rows: Sequence[int], norms: HyperValue) -> None:
    """Set the largest gradient norms of members, from the next update on. Raises ValueError for one below 0."""
    limits = check_numbers(len(rows), clip_norm=norms)["clip_norm"]
    with population._lock:
        for row, limit in zip(rows, limits, strict=True):
            group, local = population._layout.slot_of(row)
            group.table["clip_norm"][local] = limit


_WORD = (1 << 63) - 1


def seeded(device: str, number: int, key: int) -> Tensor:
    """Return the generator state with which group ``key`` begins the step that drew ``number``."""
    seed = (number * 0x5851F42D4C957F2D + key) & _WORD
    return torch.Generator(device).manual_seed(seed).get_state()


class GroupDraws:
    """Seeds the generators of torch for each group of a step, from one number that the step draws.

    What a group draws so depends on no other group. A step in which no group draws leaves the generators as they were.

    Attributes:
        number: the random number that the step drew.
        has_drawn: whether a group has drawn random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = backend(device)
        self._previous_states: dict[str, Tensor] = self._backend.random_states()
        self.number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._drawn = torch.get_rng_state()
        self.has_drawn = False

    @contextmanager
    def of_group(self, key: int) -> Iterator[None]:
        """Context manager: torch's random numbers depend only on the step and ``key``."""
        states = {kind: seeded(kind, self.number, key) for kind in self._previous_states}
        self._backend.set_random_states(states)
        try:
            yield
        finally:
            after = self._backend.random_states()
            # torch.equal compares states byte by byte, which takes four times as long.
            self.has_drawn |= any(
                after[kind].numpy().tobytes() != state.numpy().tobytes() for kind, state in states.items()
            )

    def __enter__(self) -> GroupDraws:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the generators; if a group has drawn, the CPU's stays advanced by the draw of ``number``."""
        self._backend.set_random_states(
            {**self._previous_states, "cpu": self._drawn} if self.has_drawn else self._previous_states
        )
