"""A compiled step whose kernel launches are recorded once and replayed by a single launch, as a CUDA graph.

See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hfusion.device.backend import Recorder, Recordings, backend
from hfusion.step.compiled_step import BlocksStep
from hfusion.step.step_graph import StepCall, refilled


@dataclass(frozen=True, eq=False)
class _RecordedBatch:
    """A recorded step. ``replay()`` reads ``batch``, and overwrites ``losses`` and ``grads`` in place."""

    batch: list[Tensor]
    replay: Callable[[], object]
    losses: Tensor
    grads: list[Tensor | None]


@dataclass(eq=False)
class RecordedStep(BlocksStep):
    """Runs on ``device``, and is recorded at the second step of each kind of batch.

    Recordings are dropped when tensors of the program move. Gradients lie in the same memory at every step of a kind.
    Calls that cannot be recorded run unrecorded. ``record``: the recorder, or the reason why nothing can be recorded.
    """

    device: torch.device
    record: Recorder | str

    def __post_init__(self) -> None:
        # Some kernels must run before they can be recorded.
        self._recorded = Recordings[_RecordedBatch](self.record, after=2)
        self._addresses: list[int] = []
        # The device of the last batch, if it differs from that of the array; such calls are not recorded.
        self._batch_device: torch.device | None = None

    @property
    def how(self) -> str:
        """How the program runs, and the reason if it is not recorded."""
        why = self._recorded.why
        if not why and self._batch_device is not None:
            why = f"the batch lies on {self._batch_device}, the array on {self.device}"
        return f"{super().how}, " + (f"not recorded: {why}" if why else "recorded and replayed as one")

    def step(self, call: StepCall) -> Tensor:
        batch = call.batch()
        # A tensor on the host would be read only once, during the recording.
        self._batch_device = next((tensor.device for tensor in batch if tensor.device != self.device), None)
        if self._recorded.why or self._batch_device is not None:
            return super().step(call)
        addresses = list(map(Tensor.data_ptr, self.tensors.all()))
        if addresses != self._addresses:
            # Replays would read and write where the tensors were at the last step.
            self._recorded.forget()
            self._addresses = addresses
        kind = tuple((tensor.shape, tensor.dtype) for tensor in batch)
        recording = self._recorded.find(kind, lambda: self._recording(call, batch))
        if recording is None:
            return super().step(call)
        for static_input, new_input in zip(recording.batch, batch, strict=True):
            static_input.copy_(new_input, non_blocking=True)
        recording.replay()
        for (holder, name), grad in zip(self.params, recording.grads, strict=True):
            holder[name].grad = grad
        return recording.losses.clone()

    def release(self) -> None:
        """Drop all recordings, because the tensors leave the device."""
        self._recorded.forget()

    def _recording(self, call: StepCall, batch: list[Tensor]) -> _RecordedBatch:
        assert not isinstance(self.record, str)
        # Copies, because replays read these addresses, while the caller may free or change its own tensors.
        copies = [tensor.clone() for tensor in batch]
        recorded_call = refilled(call, copies)
        replay, losses = self.record(partial(super().step, recorded_call))
        return _RecordedBatch(copies, replay, losses, [holder[name].grad for holder, name in self.params])


def recorded(program: BlocksStep) -> BlocksStep:
    """Return ``program`` itself on the host, else a `RecordedStep`, which records it or reports why it cannot."""
    devices = sorted({tensor.device for tensor in program.tensors.all()}, key=str)
    record = backend(devices[0]).recorder() if devices else ""
    # Operators whose values the host must read.
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    reads = [operator for operator in program.operators if tags.intersection(getattr(operator, "tags", ()))]
    if len(devices) > 1:
        record = f"its tensors lie on {' and '.join(map(str, devices))}"
    elif reads and not isinstance(record, str):
        record = f"the host must read values of {reads[0]}"
    return RecordedStep(*program.parts, devices[0], record) if record else program
