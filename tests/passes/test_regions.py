"""Gathered loops compute what the separate loops compute, bit for bit, and write to buffers in the same order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import hfusion as hf
from hfusion.core.program import Kind, Program
from hfusion.passes.regions import Region


class Chain(nn.Module):
    """One run of loops, a linear layer, and a second run."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(F.leaky_relu(x, self.slope) * 2, self.slope)
        return F.leaky_relu(F.leaky_relu(self.linear(h), self.slope) + h, self.slope)


class Twice(nn.Module):
    """One BatchNorm on two branches of different depths: its running statistics depend on the order."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.norm = nn.BatchNorm1d(6, eps=1e-5 * (1 + slope))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        deep = self.norm(self.linear(F.leaky_relu(x, self.slope)))
        return deep - self.norm(F.leaky_relu(x * 3, self.slope))


class Counting(nn.Module):
    """A buffer that is read, written and read again."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        before = F.leaky_relu(x - self.seen, self.slope)
        self.seen += F.leaky_relu(x.detach(), self.slope).mean(0)
        return F.leaky_relu(before * self.seen, self.slope)


def program_of(fused: hf.FusedModule) -> Program:
    return fused.report().parts[0].program


def run(module: fx.GraphModule, program: Program, fused: hf.FusedModule, x: Tensor) -> list[Tensor]:
    """Outputs, then the buffers as the run leaves them."""
    state = copy.deepcopy(dict(fused.state_dict()))
    inputs = [x if slot.kind is Kind.INPUT else state[slot.name] for slot in program.slots]
    outputs = module(*inputs)
    return [*outputs, *(state[slot.name] for slot in program.slots if slot.kind is Kind.BUFFER)]


@pytest.mark.parametrize(("model", "count"), [(Chain, 2), (Twice, 2), (Counting, 1)])
def test_regions_change_nothing(model: type[nn.Module], count: int) -> None:
    models = [model(0.1 * (b + 1)) for b in range(3)]  # type: ignore[call-arg]
    fused, x = hf.fuse(models), torch.randn(4, 6)
    fused(x)
    program = program_of(fused)
    regions = [m for m in program.code.modules() if isinstance(m, Region)]
    assert len(regions) == count
    for a, b in zip(run(program.module, program, fused, x), run(program.code, program, fused, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("model", [Chain, Twice, Counting])
def test_regions_equal_the_members(model: type[nn.Module]) -> None:
    models = [model(0.1 * (b + 1)).double() for b in range(3)]  # type: ignore[call-arg]
    fused, x = hf.fuse(models), torch.randn(4, 6, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in models]), rtol=1e-9, atol=1e-12)
    for name, buffer in fused.named_buffers():
        rows = torch.stack([m.get_buffer(name) for m in models])
        torch.testing.assert_close(buffer, rows, rtol=1e-9, atol=1e-12)
