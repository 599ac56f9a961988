"""Plain members of a population, spread over processes once that is measured to be faster than one after another."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, cast

import torch

from hfusion.core.fingerprint import read_state
from hfusion.core.torch_settings import SETTINGS
from hfusion.device.backend import active_autocast
from hfusion.device.forked_process import (
    ForkedProcess,
    note_start,
    start_seconds,
    why_never_fork,
    why_no_fork,
)
from hfusion.device.native import cores
from hfusion.population.group_step import GroupDraws
from hfusion.population.member_process import (
    RemoteMember,
    answers,
    argument_bytes,
    may_be_placed,
    placed,
)
from hfusion.population.movable_member import MovableMember, why_not_loss
from hfusion.population.plain_member import PlainMember, PlainStep
from hfusion.population.shared_arena import SharedArena
from hfusion.population.spread_step import SpreadStep
from hfusion.population.training_group import TrainingGroup
from hfusion.torch_private.autograd_engine import is_profiling
from hfusion.torch_private.dispatch_modes import function_modes, in_dispatch_mode
from hfusion.torch_private.module_hooks import has_global_hooks

_log = logging.getLogger(__name__)

# Steps of which the median decides whether processes are faster.
_STEPS = 8
_STAY = "plain members are computed one after another: %s"


@dataclass(eq=False)
class _Share:
    """A process, with the numbers of the groups that it computes."""

    process: ForkedProcess
    numbers: list[int]


@dataclass(eq=False)
class _Forks:
    """Processes that were forked at one moment.

    Attributes:
        members: what they know of each group, by number, with the versions of its hyper-parameters. A request names a
            member by its index in this dict.
        arguments: memory to which the arguments of a step are written.
        setting: the value of `_setting` at the fork.
        walls: seconds of the first steps with them, by the size of the arguments.
    """

    shares: list[_Share]
    members: dict[int, tuple[MovableMember, RemoteMember, list[int]]]
    arguments: SharedArena
    setting: Any
    walls: dict[int, list[float]] = field(default_factory=dict)


def _end(shares: list[_Share]) -> None:
    for share in shares:
        share.process.close()
    shares.clear()


class MemberSpread:
    """Lets forks of this process compute plain members, with the same results as in this process.

    A member stays here if code that it runs may have effects that a fork would keep to itself, or has changed since
    the fork. Members that may move are computed by one thread each, in any process.

    Args:
        most: the most processes, this one included; None: one for each core.
        loss: the population's loss.
    """

    def __init__(self, most: int | None, loss: Callable[..., Any]) -> None:
        self._most = cores() if most is None else most
        self._loss = loss
        # Whether processes were measured to be slower. Members keep one thread, so that results do not depend on time.
        self._processes_are_slower = False
        self._began = False
        self._movable_members: weakref.WeakKeyDictionary[PlainMember, MovableMember] = weakref.WeakKeyDictionary()
        self._forks: _Forks | None = None
        self._finalizer: Callable[[], object] = partial(_end, [])
        # Seconds of each group's last steps, in any process, by number.
        self._seconds: dict[int, deque[float]] = {}
        # Seconds of the last steps without other processes, by size of the arguments.
        self._walls: dict[int, deque[float]] = {}
        # Seconds of the last steps, without the time of movable members.
        self._seconds_without_movable: deque[float] = deque(maxlen=_STEPS)
        # Seconds that a fork costs; None: not measured since the last fork.
        self._cost: float | None = None
        # Seconds that this process spent on members that a new fork could compute, since the last fork.
        self._spent = 0.0

    def close(self) -> None:
        """End the processes."""
        self._finalizer()
        self._forks, self._spent = None, 0.0

    @contextmanager
    def step(
        self, groups: Sequence[TrainingGroup], device: torch.device, arguments: tuple[Any, Any] | None
    ) -> Iterator[SpreadStep]:
        """Context manager: groups make a step. ``arguments``: of the step; None if not all members step."""
        movable = {} if arguments is None else self._movable(groups, arguments)
        began = time.perf_counter()
        with GroupDraws(device) as draws:
            spread = SpreadStep(movable, draws)
            try:
                if movable:
                    self._start_step(spread, arguments)
                yield spread
            except BaseException:
                try:
                    spread.settle()
                finally:
                    self.close()
                raise
        if movable:
            self._learn(spread, argument_bytes(arguments), time.perf_counter() - began)

    def _movable(self, groups: Sequence[TrainingGroup], arguments: tuple[Any, Any]) -> dict[int, TrainingGroup]:
        """Return the groups that other processes may compute, by number; none if there are few, to use all threads."""
        if not self._began:
            self._began = True
            why = why_never_fork(torch.device("cpu")) or why_not_loss(self._loss)
            if why:
                _log.info(_STAY, why)
                self._most = 0
        plain = [group for group in groups if group.is_plain]
        if self._most < 2 or len(plain) < 2 or 2 * len(plain) <= self._most:
            return {}
        if _is_observed() or not may_be_placed(arguments):
            return {}
        movable = {}
        for group in plain:
            member = cast(PlainMember, group)
            if member.makes_plain_steps and not self._movable_member(member).why_not:
                movable[group.number] = group
        return movable if len(movable) > 1 and 2 * len(movable) > self._most else {}

    def _movable_member(self, member: PlainMember) -> MovableMember:
        movable = self._movable_members.get(member)
        if movable is None or not (movable.why_not or movable.is_unchanged()):
            # A change does not tell that a fork could compute it now: many members change at each forward.
            stays = movable is not None and movable.stays
            movable = self._movable_members[member] = MovableMember(member)
            movable.stays = stays
            if movable.why_not:
                _log.info("%s is computed in this process: %s", member._roll.tags[0], movable.why_not)
        return movable

    def _start_step(self, spread: SpreadStep, arguments: Any) -> None:
        """Let processes begin the step, if there are any; start them first if that pays now."""
        if self._pays(spread.movable):
            self._fork(spread.movable, arguments)
        forks = self._forks
        if forks is None:
            return
        written = placed(forks.arguments, arguments) if forks.setting == self._setting() else None
        if written is None:
            self.close()
            return
        indices = {number: index for index, number in enumerate(forks.members)}
        for share in forks.shares:
            numbers = [n for n in share.numbers if n in spread.movable and self._is_known(spread.movable[n])]
            if numbers:
                spread.send(share.process, written, [(n, indices[n], *forks.members[n]) for n in numbers])

    def _is_known(self, group: TrainingGroup) -> bool:
        """Return whether the forks know the present state of a member, or it stays in this process anyway."""
        movable = self._movable_members[cast(PlainMember, group)]
        held = None if self._forks is None else self._forks.members.get(group.number)
        return movable.stays if held is None else held[0] is movable and not movable.stays

    def _pays(self, movable: dict[int, TrainingGroup]) -> bool:
        """Return whether a fork after the last change would have saved more time than it costs."""
        if self._processes_are_slower or not self._spent:
            return False
        if self._cost is None:
            self._cost = start_seconds()
        count = min(self._most, len(movable))
        return self._spent * (1 - 1 / count) > self._cost

    def _setting(self) -> Any:
        """Return all that steps depend on besides members and arguments."""
        return read_state(self._loss), torch.get_default_dtype(), [read() for read in dict.fromkeys(SETTINGS.values())]

    def _fork(self, movable: dict[int, TrainingGroup], arguments: Any) -> None:
        self.close()
        if why := why_no_fork(torch.device("cpu")):
            _log.info(_STAY, why)
            return
        began = time.perf_counter()
        movable_members = {n: self._movable_members[cast(PlainMember, group)] for n, group in movable.items()}
        remote = _remote(movable, movable_members)
        members = {n: (movable_members[n], member, movable_members[n].versions) for n, member in remote.items()}
        forks = _Forks([], members, SharedArena(2 * argument_bytes(arguments)), self._setting())
        self._finalizer = weakref.finalize(self, _end, forks.shares)
        serve = partial(answers, list(remote.values()), forks.arguments)
        for _ in range(min(self._most, len(members)) - 1):
            others = [share.process for share in forks.shares]
            forks.shares.append(_Share(ForkedProcess(serve, others), []))
        self._forks, self._spent = forks, 0.0
        self._divide(forks)
        note_start(time.perf_counter() - began)
        self._cost = None
        _log.info("plain members are computed in %d processes", len(forks.shares) + 1)

    def _divide(self, forks: _Forks) -> None:
        """Divide members among this process and others, the longest first."""
        seconds = {number: median(self._seconds[number]) for number in forks.members if number in self._seconds}
        # This process also takes over results, and makes the steps of all other groups.
        loads = [median(self._seconds_without_movable), *[0.0] * len(forks.shares)]
        shares: list[list[int]] = [[] for _ in loads]
        # Members that have just joined are left out: how long they take is not known.
        for number in sorted(seconds, key=lambda n: -seconds[n]):
            least = loads.index(min(loads))
            loads[least] += seconds[number]
            shares[least].append(number)
        for share, numbers in zip(forks.shares, shares[1:], strict=True):
            share.numbers = numbers

    def _learn(self, spread: SpreadStep, size: int, wall: float) -> None:
        """Note what the step took, with arguments of ``size`` bytes."""
        self._seconds = {number: seconds for number, seconds in self._seconds.items() if number in spread.movable}
        for number, value in (spread.local_seconds | spread.remote_seconds).items():
            self._seconds.setdefault(number, deque(maxlen=_STEPS)).append(value)
        self._seconds_without_movable.append(wall - spread.waited - sum(spread.local_seconds.values()))
        self._spent += sum(value for n, value in spread.local_seconds.items() if not self._is_known(spread.movable[n]))
        for number in spread.failed:
            self._movable_members[cast(PlainMember, spread.movable[number])].stay("a fork could not compute it")
        if spread.ended:
            self.close()
        elif self._forks is None:
            self._walls.setdefault(size, deque(maxlen=_STEPS)).append(wall)
        elif len(walls := self._forks.walls.setdefault(size, [])) < 2 * _STEPS:
            walls.append(wall)
            # The first steps of a process are slow, and steps before the fork may have been slow.
            if len(walls) in (_STEPS // 4, _STEPS // 2, _STEPS):
                self._divide(self._forks)
            self._judge(walls[_STEPS:], self._walls.get(size))

    def _judge(self, walls: list[float], local_walls: deque[float] | None) -> None:
        """End the processes if steps with them took longer than ``local_walls``, for arguments of one size."""
        if len(walls) == _STEPS and local_walls and median(walls) > median(local_walls):
            _log.info(_STAY, f"a step took {median(walls):.2g} s in processes, {median(local_walls):.2g} s in this one")
            self.close()
            self._processes_are_slower = True


def _is_observed() -> bool:
    """Return whether modes, hooks or a profiler observe this thread's operators or modules, or change their results."""
    if active_autocast() or torch.is_inference_mode_enabled() or has_global_hooks():
        return True
    return is_profiling() or in_dispatch_mode() or bool(function_modes())


def _remote(groups: dict[int, TrainingGroup], movable_members: dict[int, MovableMember]) -> dict[int, RemoteMember]:
    """Move the tensors of members to memory that forks share, and make room for gradients there."""
    sizes = [movable_members[number].shared_bytes for number in groups]
    arena, remote = SharedArena(sum(sizes)), {}
    for number, group in groups.items():
        # The optimizer's own views of parameters would keep them from being moved.
        group.optimizer.forget(counts=True)
        if movable_members[number].move(arena):
            member = movable_members[number].member
            gradients = tuple(map(arena.like, cast(PlainStep, member._step).parameters))
            progress = arena.like(torch.zeros((), dtype=torch.uint8, device="cpu"))
            remote[number] = RemoteMember(
                group.key, member, tuple(movable_members[number].vectors), gradients, progress
            )
    return remote
