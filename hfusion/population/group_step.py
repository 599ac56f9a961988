"""Steps of a population: its groups one after another, and the minibatches of members with loaders of their own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.core.calls import stacked, take_entries
from hfusion.core.errors import ForwardsDiffer
from hfusion.device.backend import backend
from hfusion.optim.hyper import HyperValue
from hfusion.population.evaluation import check_entries, pair_of
from hfusion.population.group_options import check_numbers
from hfusion.population.grouping import part
from hfusion.population.members import nonfinite
from hfusion.population.training_group import StepArguments
from hfusion.step.memory_budget import state_bytes

if TYPE_CHECKING:
    from hfusion.population.population import Population


def step_groups(population: Population, arguments: StepArguments, rows: Sequence[int] | None, weights: Any) -> Tensor:
    """Train the members of several groups for one step; see `Population.step`."""
    groups, workers = population._held_groups, population._workers
    if rows is None:
        check_entries(arguments, len(population))
    if not groups:
        return torch.full((len(population),), math.nan, device="cpu")
    entries = {row: entry for entry, row in enumerate(range(len(population)) if rows is None else rows)}
    if population._options.memory is not None:
        sizes = [state_bytes(group.fused, group.optimizer) for group in groups]
        for group, size in zip(groups, sizes, strict=True):
            group.elsewhere = sum(sizes) - size
    devices = [p.device for group in groups for p in group.parameters()]
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    inputs, target, keywords = arguments

    def arguments_of(places: Sequence[int]) -> StepArguments:
        named = {name: take_entries(value, places) for name, value in keywords.items()}
        return take_entries(inputs, places), take_entries(target, places), named

    by_group = (lambda group: arguments_of(group.entries(entries))) if rows is None and weights is None else None
    with GroupDraws(device) as draws, workers.step(groups, draws, by_group) as (losses, here):
        queue = deque(here)
        while queue:
            group = queue.popleft()
            chosen = [local for local, row in enumerate(group.rows) if row in entries]
            if not chosen:
                continue
            some = None if len(chosen) == len(group.live) else chosen
            places = group.entries(entries) if some is None else [entries[group.rows[local] or 0] for local in chosen]
            try:
                with draws.of_group(group.key), workers.at_home(group):
                    of_group = take_entries(weights, places)
                    losses[group] = group.step(arguments_of(places), some, of_group)
            except ForwardsDiffer as error:
                queue.extendleft(reversed(part(population, group, error, some)))
    like = next(iter(losses.values()))
    no_loss = torch.full((1,), math.nan, dtype=like.dtype, device=like.device)
    # Groups may have parted. The layout is kept, so that members need not come home.
    layout = population._held_layout or population._layout
    return layout.collected([losses.get(g, no_loss.expand(len(g))) for g in population._held_groups])


@contextmanager
def one_update(population: Population) -> Iterator[None]:
    """Context manager: the updates of several groups count as one.

    With ``on_nonfinite="raise"`` the groups defer their updates, which are made at the end. If values of members are
    not finite, this raises a NonFiniteError before the first, and all are what they were before.
    """
    history = population._history
    history.deferred = [] if population._options.on_nonfinite == "raise" else None
    try:
        yield
        ends, history.deferred = history.deferred or [], None
        bad = [
            (group.rows[local] or 0, group.table.tag(local))
            for group, found, _ in ends
            for local in ([] if found is None else found.nonzero().reshape(-1).tolist())
        ]
        if bad:
            for group, _, _ in ends:
                group.restore()
            raise nonfinite(bad, population.steps)
        for _, _, end in ends:
            end()
    finally:
        history.deferred = None
        history.end_step()


def flush(population: Population) -> bool:
    """Update members that have made fewer than ``accumulate`` calls of `step`. Return whether there were any.

    Their gradients stay divided by ``accumulate``, as in the last group of an epoch of `hfusion.Task`.
    """
    with population._lock, one_update(population):
        flushed = [group.flush() for group in population._groups]
    return any(flushed)


def limit_norms(population: Population, rows: Sequence[int], norms: HyperValue) -> None:
    """Set the largest gradient norms of members, from the next update on. Raises ValueError for one below 0."""
    limits = check_numbers(len(rows), clip_norm=norms)["clip_norm"]
    with population._lock:
        for row, limit in zip(rows, limits, strict=True):
            group, local = population._layout.slot_of(row)
            group.table["clip_norm"][local] = limit


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
        seed = (self.number * 0x5851F42D4C957F2D + key) & ((1 << 63) - 1)
        states = {kind: torch.Generator(kind).manual_seed(seed).get_state() for kind in self._previous_states}
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


# One loader for each member.


def zip_loaders(
    loaders: Sequence[Iterable[Any]], *, epochs: int | Sequence[int] = 1, rows: Sequence[int] | None = None
) -> Iterator[tuple[Any, Any, list[int]]]:
    """Yield ``(inputs, target, rows)`` for `Population.step`, until each member has had its epochs.

    Epochs begin together. Within an epoch, members with full batches step together. Those whose last batch is smaller
    wait until no full one is left; then the smaller batches are one minibatch, `Ragged` if they differ in size. No
    sample is left out, and members that have finished do not step.

    Args:
        loaders: one per member, each yielding batches ``(inputs, target)``; their lengths may differ.
        epochs: the number of passes over each loader, one number or one per loader; 0 leaves a member out.
        rows: the row of each loader's member; by default 0, 1, ...

    Raises:
        ValueError: epochs or rows differ in number from loaders, a loader has no batch, or a batch is not a pair.

    Example:
        >>> import torch
        >>> loaders = [[(torch.zeros(4, 2), torch.zeros(4))] * 2, [(torch.ones(4, 2), torch.ones(4))]]
        >>> [rows for _, _, rows in zip_loaders(loaders)]
        [[0, 1], [0]]
    """
    counts = [epochs] * len(loaders) if isinstance(epochs, int) else list(epochs)
    numbers = list(range(len(loaders))) if rows is None else list(rows)
    for name, values in (("epochs", counts), ("rows", numbers)):
        if len(values) != len(loaders):
            raise ValueError(f"{name} has {len(values)} values for {len(loaders)} loaders: give one for each")
    if wrong := [count for count in counts if count < 0]:
        raise ValueError(f"epochs={wrong[0]}: a loader is gone through 0 times or more")
    return _rounds(loaders, counts, numbers)


def _rounds(
    loaders: Sequence[Iterable[Any]], counts: Sequence[int], numbers: Sequence[int]
) -> Iterator[tuple[Any, Any, list[int]]]:
    for epoch in range(max(counts, default=0)):
        members = zip(loaders, counts, numbers, strict=True)
        live = {row: _pairs(loader, row, epoch) for loader, count, row in members if epoch < count}
        batches: dict[int, Any] = {}  # of each member, the one that it steps with next
        full: dict[Any, tuple[int, ...]] = {}
        while live:
            groups: dict[Any, dict[int, tuple[int, ...]]] = {}
            for row, loader in list(live.items()):
                batches[row] = batches.get(row) or next(loader, None)
                if batches[row] is None:
                    del live[row], batches[row]
                    continue
                kind, sizes = _shapes(batches[row])
                groups.setdefault(kind, {})[row] = sizes
                full[kind] = max(full.get(kind, sizes), sizes)
            for kind, group in groups.items():
                rows = [row for row, sizes in group.items() if sizes == full[kind]] or list(group)
                inputs, targets = zip(*(batches.pop(row) for row in rows), strict=True)
                yield stacked(list(inputs)), stacked(list(targets)), rows


def _pairs(loader: Iterable[Any], row: int, epoch: int) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of one epoch of a member. Raises ValueError if there is none, or one is no pair."""
    empty = True
    for batch in loader:
        yield pair_of(batch, f"the loader of row {row}")
        empty = False
    if empty:
        raise ValueError(
            f"the loader of row {row} gave no batch in epoch {epoch}: leave it out by epochs=0; an iterator serves "
            "one epoch"
        )


def _shapes(batch: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the kind of a batch, equal for those that differ in their number of samples only, and its first sizes."""
    leaves, spec = pytree.tree_flatten(batch)
    kinds = tuple((x.shape[1:], x.dim(), x.dtype, x.device) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (spec, kinds), tuple(x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim())
