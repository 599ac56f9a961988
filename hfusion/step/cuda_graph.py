"""A compiled step whose launches are recorded once and replayed by one: a CUDA graph.

See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.compiler.compiler import Place
from hfusion.step.compiled import Each, StepProgram, Whole
from hfusion.step.step_graph import Call, refilled

# Kinds of batches that are recorded; each keeps the memory of a step.
MOST_RECORDED = 4

Work: TypeAlias = Callable[[], Tensor]
Record: TypeAlias = Callable[[Work], tuple[Callable[[], object], Tensor]]
"""Records what work launches, without running it: what replays that, and where it leaves the losses."""


def record(work: Work) -> tuple[Callable[[], object], Tensor]:
    """As a CUDA graph, in memory of its own. Raises what CUDA raises for work that it cannot record."""
    graph = torch.cuda.CUDAGraph()
    # Threads that load data may go on.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        losses = work()
    return graph.replay, losses


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A step that is replayed: it reads ``batch``, and leaves ``losses`` and ``grads`` where they are."""

    addresses: list[int]
    batch: list[Tensor]
    replay: Callable[[], object]
    losses: Tensor
    grads: list[Tensor | None]


class Captured:
    """``program``, recorded at the first step of each kind of batch, as long as its tensors stay where they are.

    Gradients lie in the same memory at every step of a kind. What cannot be recorded runs as it is.
    """

    def __init__(self, program: Whole | Each, record: Record = record) -> None:
        self._program = program
        self._record = record
        self._recorded: dict[Any, _Recorded] = {}
        self._why = ""

    @property
    def how(self) -> str:
        """In words."""
        return f"{self._program.how}, " + (f"not as a CUDA graph: {self._why}" if self._why else "as a CUDA graph")

    def fits(self, call: Call) -> bool:
        return self._program.fits(call)

    def step(self, call: Call) -> Tensor:
        """Write gradients and buffers; the losses ``[B]``."""
        batch = call.batch()
        kind = tuple((tensor.shape, tensor.dtype) for tensor in batch)
        found = self._recorded.get(kind)
        if found is None or found.addresses != self._addresses():
            full = found is None and len(self._recorded) == MOST_RECORDED
            return self._program.step(call) if full or self._why else self._first(kind, call, batch)
        for mine, given in zip(found.batch, batch, strict=True):
            mine.copy_(given, non_blocking=True)
        found.replay()
        self._give(found.grads)
        return found.losses.clone()

    def _first(self, kind: Any, call: Call, batch: list[Tensor]) -> Tensor:
        """A step that is recorded for those to come."""
        self._recorded.pop(kind, None)
        # Not the caller's own tensors, which may change while the graph is there.
        kept = [tensor.clone() for tensor in batch]
        own = refilled(call, kept)
        losses = self._program.step(own)
        grads = self._grads()
        try:
            replay, place = self._record(lambda: self._program.step(own))
            self._recorded[kind] = _Recorded(self._addresses(), kept, replay, place, self._grads())
        except Exception as error:
            first, _, _ = str(error).strip().partition("\n")
            self._why = f"{type(error).__name__}: {first[:300]}"
        finally:
            # Recorded gradients have not been computed.
            self._give(grads)
        return losses

    @property
    def _params(self) -> tuple[Place, ...]:
        return self._program.params

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._program.tensors.all()))

    def _grads(self) -> list[Tensor | None]:
        return [holder[name].grad for holder, name in self._params]

    def _give(self, grads: list[Tensor | None]) -> None:
        for (holder, name), grad in zip(self._params, grads, strict=True):
            holder[name].grad = grad


def captured(program: Whole | Each) -> StepProgram:
    """``program`` as a CUDA graph, where all its tensors lie on a CUDA device."""
    return Captured(program) if all(tensor.is_cuda for tensor in program.tensors.all()) else program
