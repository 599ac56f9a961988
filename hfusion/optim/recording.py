"""The launches of an optimizer's steps, recorded once and replayed by one on a device that can: a CUDA graph.

It is a graph of its own, behind that of forward and backward, as hooks and clipping come between. What the host knows,
hyper-parameters and counts, is written into the device's memory before it is replayed; who rests is put back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from hfusion.core.errors import FusionError
from hfusion.device.backend import Recorder, backend
from hfusion.device.recordings import Recordings
from hfusion.optim.group import Group, RecordableStepper, same_objects
from hfusion.optim.step_cache import Work

# Steps whose gradients lie at one place before they are recorded: those of a loop by autograd may lie at others.
STEADY = 3
# Places that are counted.
MAX_MET = 64

_Part: TypeAlias = tuple[RecordableStepper, Sequence[torch.Tensor]]


class _Recorded(NamedTuple):
    """What replays launches, and what must be kept for that."""

    replay: Callable[[], object]
    kept: object


class RecordedUpdates:
    """The steps of one optimizer. ``record``: as `hfusion.device.backend.Recorder`."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._groups: list[Group] = []
        self._met: dict[Hashable, int] = {}
        self._recorded = Recordings[_Recorded]()
        self._unrecordable = ""

    @property
    def how(self) -> str:
        """How the launches of a step are made, and why they are not recorded if they are not."""
        if self._recorded.why:
            return f"launched one by one: {self._recorded.why}"
        if self._unrecordable:
            return f"launched one by one: {self._unrecordable}"
        if self._recorded:
            return "recorded and replayed as one"
        return f"launched one by one so far: gradients must lie at the same addresses in {STEADY} steps"

    def step(self, work: Work) -> None:
        """Make the step."""
        if self._record.recording:
            raise FusionError(
                "opt.step() was called while a graph of the device is being captured, which would repeat this step's "
                "hyper-parameters and counts for ever: capture forward and backward, and call opt.step() behind the "
                "replay, which records its own launches; or use hf.train_step, which records both"
            )
        parts: list[_Part] = [(found, grads) for _, group, grads in work if (found := group.recordable) is not None]
        self._unrecordable = next((why for _, group, _ in work if (why := group.unrecordable)), "")
        if self._unrecordable or not work or self._recorded.why:
            for settings, group, grads in work:
                group.step(grads, settings)
            return
        self._look([group for _, group, _ in work])
        for (settings, group, grads), (stepper, _) in zip(work, parts, strict=True):
            torch.autograd.graph.increment_version(group.written)
            stepper.ready(grads, settings)
        key = tuple((stepper.key, *((grad.data_ptr(), grad.stride()) for grad in grads)) for stepper, grads in parts)
        recorded = self._recorded.get(key)
        if recorded is None and self._steady(key):
            # The launches are not made by that.
            recorded = self._recorded.add(key, lambda: _Recorded(*self._record(lambda: _launch(parts))))
        if recorded is None:
            _launch(parts)
        else:
            recorded.replay()

    def forget(self) -> None:
        """Everything lies elsewhere from now on."""
        self._groups = []
        self._met.clear()
        self._recorded.forget()

    def _look(self, groups: list[Group]) -> None:
        if not same_objects(groups, self._groups):
            self.forget()
            self._groups = groups

    def _steady(self, key: Hashable) -> bool:
        """Whether gradients have lain there often enough."""
        if len(self._met) == MAX_MET:
            self._met.clear()
        count = self._met[key] = self._met.get(key, 0) + 1
        return count >= STEADY and not self._recorded.full


def _launch(parts: Sequence[_Part]) -> object:
    return [stepper.launch(grads) for stepper, grads in parts]


def recording_on(device: torch.device) -> RecordedUpdates | str:
    """For parameters on ``device``; in words why launches cannot be recorded there, empty for the host."""
    record = backend(device).recorder()
    if isinstance(record, str):
        return record and f"launched one by one: {record}"
    return RecordedUpdates(record)
