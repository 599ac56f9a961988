"""Lower the shards of a task to the actions of one minibatch: `lower`. Bytes of shards are counted here only.

A spilled task keeps its state in host memory: the needs of a shard are loaded before it computes and evicted
afterwards, and its backward recomputes it from the values alive at its input cut (Hydra, arXiv:2110.08633;
recomputation: Chen et al., arXiv:1604.06174). The last shard turns from forward to backward in place and recomputes
nothing. A last shard that is kept is loaded when the minibatch begins, and evicted when it ends, unless the next one
begins there: the only shard of a resident task, or that of a spilled task with room for it. (A cyclic scan is cached
best by keeping a part of it: Belady, IBM Systems Journal 5(2), 1966.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate as running_sums

from hfusion.schedule.actions import Act, Action, Section, Shard

_STATE = frozenset({Section.WEIGHTS, Section.OPTIMIZER, Section.GRADIENTS})
_ENTRY = frozenset({Section.WEIGHTS, Section.BOUNDARY})


def lower(
    shards: Sequence[Shard],
    *,
    keeps_last: bool = False,
    accumulate: bool = False,
    clip: bool = False,
    evaluate: bool = False,
    growth: float = 1.0,
    save: bool = False,
) -> tuple[Action, ...]:
    """Return the actions of a minibatch with its optimizer step, or of an evaluated minibatch.

    Args:
        keeps_last: the last shard stays on the device as long as the task does.
        accumulate: gradients are summed over minibatches.
        clip: the optimizer steps after all backwards. As with `accumulate`, gradients then outlive their backward, and
            move with the shard.
        evaluate: only the forwards, which save nothing for backward.
        growth: bytes of an evaluated minibatch's values over those of a trained one; at least 1.
        save: the last unit also copies all weights and optimizer state for a checkpoint.
    """
    builder = _ActionList(shards, keeps_last, accumulate or clip, clip, save)
    return builder.evaluation(growth) if evaluate else builder.training()


def host_bytes(shard: Shard, *, carried: bool) -> int:
    """Return the bytes of a shard on the host: weights, optimizer state and, if ``carried``, gradients."""
    return shard.weights + shard.optimizer + (shard.gradients if carried else 0)


def levels(actions: Iterable[Action]) -> list[int]:
    """Return the bytes on the device while each action runs, if they run in the order of the list."""
    changes = [change for action in actions for change in (action.takes, -action.frees)]
    return list(running_sums(changes))[::2]


def need(actions: Iterable[Action]) -> int:
    """Return the smallest budget, in bytes, with which a device can run the list in order."""
    return max(levels(actions))


@dataclass
class _ActionList:
    """Builds the list of actions."""

    shards: Sequence[Shard]
    keeps_last: bool
    carried: bool
    clip: bool
    save: bool
    actions: list[Action] = field(default_factory=list)
    loaded: dict[int, int] = field(default_factory=dict)
    evicted: dict[int, int] = field(default_factory=dict)
    computed: int | None = None

    def training(self) -> tuple[Action, ...]:
        order = range(len(self.shards))
        for index in order:
            self._forward(index)
        for index in reversed(order):
            self._backward(index)
        if self.clip:
            for index in order:
                self._update(index)
        return self._ended()

    def evaluation(self, growth: float) -> tuple[Action, ...]:
        larger = [part.of_larger(growth) if growth > 1 else part for part in self.shards]
        at = 0
        for index, part in enumerate(larger):
            self._load_needed_shards(index, _ENTRY, part.weights + at)
            extra = part.workspace + part.boundary + (at if self._pins(index) else 0)
            self._compute(Act.EVALUATE, index, part.forward, extra, extra)
            self._save(index, ends=index == len(self.shards) - 1)
            self._end(index, part.boundary)
            at = part.boundary
        return self._ended()

    def _forward(self, index: int) -> None:
        part = self.shards[index]
        if index == len(self.shards) - 1:
            # The backward follows immediately, so that saved activations take memory from now on.
            held = self._held(part)
            self._load_needed_shards(index, self._sections, held, held + self._at(index))
            self._compute(Act.FORWARD, index, part.forward, self._alive_between(index) + part.workspace, part.workspace)
            return
        extra = part.workspace + part.boundary
        self._load_needed_shards(index, _ENTRY, part.weights + self._at(index))
        self._compute(Act.FORWARD, index, part.forward, extra, extra)
        self._end(index, part.boundary)

    def _backward(self, index: int) -> None:
        part = self.shards[index]
        more = max(0, part.peak - part.activations)
        if index == len(self.shards) - 1:
            self._compute(Act.BACKWARD, index, part.backward, more, more + self._alive_between(index))
        else:
            self._load_needed_shards(index, self._sections, self._held(part) + self._at(index) + part.boundary)
            self._compute(Act.RECOMPUTE, index, part.forward, part.peak, 0)
            self._compute(Act.BACKWARD, index, part.backward, 0, part.peak)
        changed = 0
        if not self.clip:
            self._compute(Act.STEP, index, part.step)
            changed = part.weights - part.frozen + part.optimizer
            self._save(index, ends=index == 0)
        self._end(index, changed + self._gradients(part) + self._at(index))

    def _update(self, index: int) -> None:
        part = self.shards[index]
        if not self._pins(index):
            size = host_bytes(part, carried=self.carried)
            self._load(index, _STATE, size, size, ())
        self._compute(Act.STEP, index, part.step)
        self._save(index, ends=index == len(self.shards) - 1)
        self._end(index, part.weights - part.frozen + part.optimizer)

    def _save(self, index: int, *, ends: bool) -> None:
        """Add a SAVE if this is the last unit of the minibatch. Gradients have been used by then."""
        if self.save and ends:
            self._compute(Act.SAVE, index, moves=sum(host_bytes(part, carried=False) for part in self.shards))

    @property
    def _sections(self) -> frozenset[Section]:
        """The sections that a backward needs."""
        excluded = {Section.OPTIMIZER} if self.clip else set()
        return _STATE - excluded - (set() if self.carried else {Section.GRADIENTS}) | {Section.BOUNDARY}

    def _pins(self, index: int) -> bool:
        return self.keeps_last and index == len(self.shards) - 1

    def _at(self, index: int) -> int:
        """Return the bytes of values at the input cut."""
        return self.shards[index - 1].boundary if index else 0

    def _alive_between(self, index: int) -> int:
        """Bytes alive between the forward and the backward of the last shard."""
        return self._at(index) + self.shards[index].boundary + self.shards[index].activations

    def _gradients(self, part: Shard) -> int:
        """Bytes of gradients that outlive a backward."""
        return part.gradients if self.carried else 0

    def _held(self, part: Shard) -> int:
        """Bytes of the state that a backward needs."""
        return part.weights + (0 if self.clip else part.optimizer) + self._gradients(part)

    def _load_needed_shards(
        self, index: int, sections: frozenset[Section], size: int, moves: int | None = None
    ) -> None:
        """Load a shard; with the first one, also the last shard if it is kept."""
        if not self._pins(index):
            self._load(index, sections, size, size if moves is None else moves, self.shards[index].borrows)
        if self.computed is None and self.keeps_last:
            last, gradients = self.shards[-1], set() if self.carried else {Section.GRADIENTS}
            size = host_bytes(last, carried=self.carried)
            self._load(last.index, _STATE - gradients | {Section.BOUNDARY}, size, size, last.borrows)

    def _load(self, index: int, sections: frozenset[Section], size: int, moves: int, borrows: Sequence[int]) -> None:
        after = tuple(sorted({self.evicted.get(shard, ~shard) for shard in (index, *borrows)}))
        self.loaded[index] = len(self.actions)
        self.actions.append(Action(Act.LOAD, index, sections, size, 0, moves, 0.0, after))

    def _compute(
        self, act: Act, index: int, seconds: float = 0.0, takes: int = 0, frees: int = 0, moves: int = 0
    ) -> None:
        after = {self.loaded[index]} | ({self.computed} if self.computed is not None else set())
        self.computed = len(self.actions)
        self.actions.append(Action(act, index, frozenset(), takes, frees, moves, seconds, tuple(sorted(after))))

    def _end(self, index: int, moves: int) -> None:
        if not self._pins(index):
            self._evict(index, moves)

    def _evict(self, index: int, moves: int) -> None:
        load = self.actions[self.loaded.pop(index)]
        assert self.computed is not None
        # Evictions run in order, since values at cuts must leave in the order in which they were computed.
        after = tuple(sorted({self.computed, max(self.evicted.values(), default=self.computed)}))
        self.evicted[index] = len(self.actions)
        self.actions.append(replace(load, act=Act.EVICT, takes=0, frees=load.takes, moves=moves, after=after))

    def _ended(self) -> tuple[Action, ...]:
        for index in [*self.loaded]:
            part = self.shards[index]
            self._evict(index, host_bytes(part, carried=self.carried) - part.frozen)
        return tuple(self.actions)
