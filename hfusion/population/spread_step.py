"""One step of a population whose plain members other processes may compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor

from hfusion.core.errors import HFusionError
from hfusion.device.forked_process import EndedProcess, ForkedProcess
from hfusion.device.openmp import torch_threads
from hfusion.population.group_step import GroupDraws
from hfusion.population.member_process import ComputedStep, RemoteMember, StepRequest
from hfusion.population.movable_member import MovableMember
from hfusion.population.plain_member import PlainStep
from hfusion.population.training_group import TrainingGroup


class SpreadStep:
    """One step of a population whose plain members may be computed elsewhere.

    Attributes:
        movable: the groups that other processes may compute, by number.
        local_seconds: seconds of each of these groups that this process computed, by number.
        remote_seconds: seconds of each group that another process computed, by number.
        waited: seconds in which this process waited for others.
        failed: numbers of the groups that a process could not compute.
    """

    def __init__(self, movable: dict[int, TrainingGroup], draws: GroupDraws) -> None:
        self.movable, self.draws = movable, draws
        self.local_seconds: dict[int, float] = {}
        self.remote_seconds: dict[int, float] = {}
        self.waited = 0.0
        self.failed: list[int] = []
        self._ended_processes: set[ForkedProcess] = set()
        self._sent: dict[int, tuple[ForkedProcess, RemoteMember]] = {}
        self._computed: dict[int, ComputedStep | None] = {}
        self._waiting: dict[ForkedProcess, deque[int]] = {}
        self._buffers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def send(
        self,
        process: ForkedProcess,
        written: Any,
        members: Sequence[tuple[int, int, MovableMember, RemoteMember, list[int]]],
    ) -> None:
        """Send members to a process: of each the number of its group, its index there, and what is known of it."""
        for number, index, movable, remote, versions in members:
            member = movable.member
            member.hold_buffers()
            # A process that ends during a step may have written to some of them.
            self._buffers[number] = [(buffer, buffer.clone()) for _, buffer in member.fused.named_buffers()]
            self._sent[number] = process, remote
            remote.progress.zero_()
            waiting = self._waiting.setdefault(process, deque())
            vectors = None if movable.versions == versions else tuple(v.reshape(-1).tolist() for v in movable.vectors)
            fields = self.draws.number, member.updates_anywhere, vectors
            entry = self.movable[number].live[0]
            waiting.append(number)
            # That a process has ended is reported when its answer is awaited.
            with suppress(EndedProcess):
                process.send(StepRequest(index, entry, written if len(waiting) == 1 else None, *fields))

    def settle(self) -> None:
        """Wait for the processes. For members that the step did not reach, count a made update or restore buffers."""
        for process, waiting in self._waiting.items():
            while waiting and process not in self._ended_processes:
                self._receive(process, waiting)
        for number, before in self._buffers.items():
            computed = self._computed.get(number)
            if computed is not None and computed.is_updated:
                self._sent[number][1].member.count_update()
            else:
                _put_back(before)

    def _receive(self, process: ForkedProcess, waiting: deque[int]) -> None:
        """Wait for the next result of a process. Raises HFusionError if it has ended during an update."""
        try:
            self._computed[waiting.popleft()] = process.answer()
        except EndedProcess as error:
            self._ended_processes.add(process)
            unanswered = [self._sent[number] for number in self._sent if number not in self._computed]
            lost = [remote for other, remote in unanswered if other is process and int(remote.progress)]
            if names := ", ".join(repr(remote.member._roll.tags[0]) for remote in lost):
                raise HFusionError(
                    f"a process that trained members of the population ended with {error}, as if the system had killed "
                    f"it, which it does when memory runs out. It was updating {names}, whose "
                    "weights are of no step now: load the last save, or pass processes=1"
                ) from error

    @property
    def ended(self) -> bool:
        """True if a process has ended."""
        return bool(self._ended_processes)

    def ordered(self, groups: Sequence[TrainingGroup]) -> deque[TrainingGroup]:
        """Return the groups, those that other processes compute last; in given order if there are gradient hooks."""
        if any(group._gradient_hooks for group in groups):
            return deque(groups)
        answered = {number: rank for numbers in self._waiting.values() for rank, number in enumerate(numbers)}
        return deque(sorted(groups, key=lambda group: answered.get(group.number, -1)))

    @contextmanager
    def of_group(self, group: TrainingGroup) -> Iterator[None]:
        """Context manager: a group makes its step, with the result of another process if there is one."""
        if group.number not in self.movable:
            with self.draws.of_group(group.key):
                yield
            return
        computed, began = self._apply_result(group), time.perf_counter()
        with self.draws.of_group(group.key), torch_threads(1):
            if computed is not None and computed.random_state is not None:
                # Hooks of gradients may draw, too.
                torch.set_rng_state(torch.frombuffer(bytearray(computed.random_state), dtype=torch.uint8))
            yield
        if computed is None:
            self.local_seconds[group.number] = time.perf_counter() - began

    def _apply_result(self, group: TrainingGroup) -> ComputedStep | None:
        """Write a process's result to the step of a group, and return it; None if there is none."""
        if group.number not in self._sent:
            return None
        step = cast(PlainStep, group._step)
        process, remote = self._sent[group.number]
        waiting, began = self._waiting[process], time.perf_counter()
        while group.number not in self._computed and process not in self._ended_processes:
            self._receive(process, waiting)
        self.waited += time.perf_counter() - began
        computed, before = self._computed.get(group.number), self._buffers.pop(group.number)
        if computed is None:
            _put_back(before)
            self.failed += [] if process in self._ended_processes else [group.number]
            return None
        for parameter, gradient, has in zip(step.parameters, remote.gradients, computed.has_gradient, strict=True):
            parameter.grad = gradient.clone() if has else None
        step.computed = torch.tensor([computed.loss], dtype=computed.dtype, device="cpu")
        step.is_updated = computed.is_updated
        self.remote_seconds[group.number] = computed.seconds
        return computed


def _put_back(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in buffers:
        buffer.copy_(before)
