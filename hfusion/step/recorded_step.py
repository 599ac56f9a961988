"""A compiled step whose kernel launches are recorded once and replayed by a single launch, as a CUDA graph.

See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hfusion.device.backend import Recorder, Recordings, backend
from hfusion.step.compiled_step import BlocksStep, StepProgram
from hfusion.step.step_graph import StepCall, refilled


@dataclass(frozen=True, eq=False)
class _RecordedBatch:
    """A recorded step. ``replay()`` reads ``batch``, and overwrites ``losses`` and ``grads`` in place."""

    batch: list[Tensor]
    replay: Callable[[], object]
    losses: Tensor
    grads: list[Tensor | None]


class RecordedStep:
    """Runs ``program`` on ``device``, and records it at the second step of each kind of batch.

    Recordings are dropped when tensors of the program move. Gradients lie in the same memory at every step of a kind.
    Calls that cannot be recorded run unrecorded. ``record``: the recorder, or the reason why nothing can be recorded.
    """

    def __init__(self, program: BlocksStep, device: torch.device, record: Recorder | str) -> None:
        self._program, self._device, self._record = program, device, record
        # Some kernels must run before they can be recorded.
        self._recorded = Recordings[_RecordedBatch](record, after=2)
        self._addresses: list[int] = []
        # The device of the last batch, if it differs from that of the array; such calls are not recorded.
        self._batch_device: torch.device | None = None

    team: None = None

    @property
    def how(self) -> str:
        """How the program runs, and the reason if it is not recorded."""
        why = self._recorded.why
        if not why and self._batch_device is not None:
            why = f"the batch lies on {self._batch_device}, the array on {self._device}"
        return f"{self._program.how}, " + (f"not recorded: {why}" if why else "recorded and replayed as one")

    def fits(self, call: StepCall) -> bool:
        return self._program.fits(call)

    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers, and return the losses ``[B]``."""
        batch = call.batch()
        # A tensor on the host would be read only once, during the recording.
        self._batch_device = next((tensor.device for tensor in batch if tensor.device != self._device), None)
        if self._recorded.why or self._batch_device is not None:
            return self._program.step(call)
        addresses = list(map(Tensor.data_ptr, self._program.tensors.all()))
        if addresses != self._addresses:
            # Replays would read and write where the tensors were at the last step.
            self._recorded.forget()
            self._addresses = addresses
        kind = tuple((tensor.shape, tensor.dtype) for tensor in batch)
        recording = self._recorded.find(kind, lambda: self._recording(call, batch))
        if recording is None:
            return self._program.step(call)
        for static_input, new_input in zip(recording.batch, batch, strict=True):
            static_input.copy_(new_input, non_blocking=True)
        recording.replay()
        for (holder, name), grad in zip(self._program.params, recording.grads, strict=True):
            holder[name].grad = grad
        return recording.losses.clone()

    def release(self) -> None:
        """Drop all recordings, because the tensors leave the device."""
        self._recorded.forget()

    def _recording(self, call: StepCall, batch: list[Tensor]) -> _RecordedBatch:
        assert not isinstance(self._record, str)
        # Copies, because replays read these addresses, while the caller may free or change its own tensors.
        copies = [tensor.clone() for tensor in batch]
        recorded_call = refilled(call, copies)
        replay, losses = self._record(lambda: self._program.step(recorded_call))
        return _RecordedBatch(copies, replay, losses, [holder[name].grad for holder, name in self._program.params])


def recorded(program: BlocksStep) -> StepProgram:
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
    return RecordedStep(program, devices[0], record) if record else program
