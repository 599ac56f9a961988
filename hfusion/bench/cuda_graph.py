"""Members one after the other on a CUDA device, the whole step of each recorded as a graph and replayed.

https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hfusion.bench.serial import SerialLoop, trained
from hfusion.bench.workload import Running, Unavailable, Workload

WARM_UP = 3


def start(workload: Workload) -> Running:
    """Capture the step of each member. Raises Unavailable for another device."""
    if workload.device.type != "cuda":
        raise Unavailable("needs --device cuda")
    loop = SerialLoop.of(workload, range(workload.members))
    captured = [_capture(loop, model, rate) for model, rate in zip(loop.models, workload.rates, strict=True)]

    def step() -> list[Tensor]:
        for graph, _ in captured:
            graph.replay()
        return [loss for _, loss in captured]

    return Running(step)


def _capture(loop: SerialLoop, model: nn.Module, rate: float) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one step, and where it leaves the loss; model and optimizer are as before the first step."""
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

    # Without gradients before it, backward writes them anew at every replay, in the graph's own memory.
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    # In place: the graph knows addresses. A new Adam's state is zero, its count of steps included.
    model.load_state_dict(before)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    return graph, loss
