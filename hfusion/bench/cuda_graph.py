"""Members one after the other on a CUDA device, the whole step of each recorded as a graph and replayed.

https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfusion.bench.serial import SerialLoop, trained
from hfusion.bench.workload import Running, Unavailable, Workload

WARM_UP = 3


@dataclass(frozen=True)
class RecordedMember:
    """The graph of a member's step, and the tensor that holds the loss after a replay.

    A graph holds only addresses. ``reads``: the owners of that memory, kept alive so that it is not reused.
    """

    graph: torch.cuda.CUDAGraph
    loss: Tensor
    reads: tuple[object, ...]


def start(workload: Workload) -> Running:
    """Capture the step of each member. Raises Unavailable for another device."""
    if workload.device.type != "cuda":
        raise Unavailable("needs --device cuda")
    loop = SerialLoop.of(workload, range(workload.members))
    captured = [_capture(loop, model, rate) for model, rate in zip(loop.models, workload.rates, strict=True)]

    def step() -> list[Tensor]:
        for member in captured:
            member.graph.replay()
        return [member.loss for member in captured]

    return Running(step)


def _capture(loop: SerialLoop, model: nn.Module, rate: float) -> RecordedMember:
    """Record one step; model and optimizer are as before the first step."""
    optimizer = torch.optim.Adam(trained(model), lr=rate, capturable=True)
    before = copy.deepcopy(model.state_dict())

    def step() -> Tensor:
        loss = loop.loss_of(model, loop.inputs, loop.target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)

    # Without gradients before it, backward creates them at every replay, in the graph's own memory.
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    # In place: the graph knows addresses. A new Adam's state is zero, its count of steps included.
    model.load_state_dict(before)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    return RecordedMember(graph, loss, (loop, model, optimizer))
