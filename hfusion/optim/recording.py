"""Record the launches of an optimizer's steps once and replay them with one call, as a CUDA graph.

The graph is separate from the graph of forward and backward, because hooks and gradient clipping run between them.
Hyper-parameters and step counts, which the host knows, are copied to the device before each replay. Rows of members
that skip the step are restored after it.
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

# How often gradients must have the same addresses before launches are recorded: autograd may allocate them elsewhere.
STEADY = 3
# Largest number of different sets of gradient addresses that are counted.
MAX_ADDRESS_COUNTS = 64

_Part: TypeAlias = tuple[RecordableStepper, Sequence[torch.Tensor]]


class _Recorded(NamedTuple):
    """A function that replays recorded launches, and the objects that must stay alive for it."""

    replay: Callable[[], object]
    references: object


class RecordedUpdates:
    """The steps of one optimizer. ``record``: as `hfusion.device.backend.Recorder`."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._groups: list[Group] = []
        self._address_counts: dict[Hashable, int] = {}
        self._recorded = Recordings[_Recorded]()
        self._unrecordable = ""

    @property
    def how(self) -> str:
        """Description of how a step is launched, with the reason if its launches are not recorded."""
        if self._recorded.why:
            return f"launched one by one: {self._recorded.why}"
        if self._unrecordable:
            return f"launched one by one: {self._unrecordable}"
        if self._recorded:
            return "recorded and replayed as one"
        return f"launched one by one so far: gradients must lie at the same addresses in {STEADY} steps"

    def step(self, work: Work) -> None:
        """Run a step of all groups in ``work``, and record or replay its launches where that is possible."""
        if self._record.recording:
            raise FusionError(
                "opt.step() was called while a graph of the device is being captured, which would repeat this step's "
                "hyper-parameters and counts for ever: capture forward and backward, and call opt.step() behind the "
                "replay, which records its own launches; or use hf.train_step, which records both"
            )
        parts: list[_Part] = [
            (recordable, grads) for _, group, grads in work if (recordable := group.recordable) is not None
        ]
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
            # Recording does not run the launches; the replay below does.
            recorded = self._recorded.add(key, lambda: _Recorded(*self._record(lambda: _launch(parts))))
        if recorded is None:
            _launch(parts)
        else:
            recorded.replay()

    def forget(self) -> None:
        """Discard recordings and counts of addresses, which are no longer valid."""
        self._groups = []
        self._address_counts.clear()
        self._recorded.forget()

    def _look(self, groups: list[Group]) -> None:
        if not same_objects(groups, self._groups):
            self.forget()
            self._groups = groups

    def _steady(self, key: Hashable) -> bool:
        """Count ``key``, and return whether gradients had these addresses often enough to record the launches."""
        if len(self._address_counts) == MAX_ADDRESS_COUNTS:
            self._address_counts.clear()
        count = self._address_counts[key] = self._address_counts.get(key, 0) + 1
        return count >= STEADY and not self._recorded.full


def _launch(parts: Sequence[_Part]) -> object:
    return [stepper.launch(grads) for stepper, grads in parts]


def recording_on(device: torch.device) -> RecordedUpdates | str:
    """Return a `RecordedUpdates` for ``device``, or the reason why it cannot record launches (empty for the host)."""
    record = backend(device).recorder()
    if isinstance(record, str):
        return record and f"launched one by one: {record}"
    return RecordedUpdates(record)
