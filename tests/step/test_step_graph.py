"""The traced step, run as it is: what inductor is given must be the eager step already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import BoundProgram, Location
from hfusion.step.compiled_step import BlocksStep, StepBlocks, StepProgram
from hfusion.step.program_cache import BlockProgram
from hfusion.step.step_graph import StepCall, StepSource, trace, written_inputs
from tests.zoo import MODELS, Model, normal

EPS = 1e-4


class Shared(nn.Module):
    """A frozen base that is one object in all members, and a slope of each member's own."""

    base = nn.Linear(4, 6).double().requires_grad_(False)

    def __init__(self) -> None:
        super().__init__()
        self.base = Shared.base
        self.head = nn.Linear(6, 3)
        self.act = nn.LeakyReLU(float(torch.rand(())))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.base(x)))


class Partly(nn.Module):
    """A parameter without a gradient, one that is frozen, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.twin = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.twin(self.twin(x)) + self.scale, self.frozen(x * self.scale)


# Not "branching", which runs member by member.
TRACED = [
    *(model for model in MODELS if model.name != "branching"),
    Model("shared", Shared, normal(4)),
    Model("partly", Partly, normal(4)),
]


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss that reaches every output, one number."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([(leaf.sin() * (k + 1)).mean() for k, leaf in enumerate(leaves)]).sum() * target.mean()


def arrays(model: Model, count: int) -> tuple[hf.FusedModule, hf.FusedModule]:
    """Two arrays of the same members."""
    torch.manual_seed(count)
    models = [model.make().double() for _ in range(count)]
    return hf.fuse(models), hf.fuse(models, verify=False)


def adam(fused: hf.FusedModule) -> hf.optim.Adam:
    return hf.optim.Adam(fused.parameters(), lr=[0.01 * (b + 1) for b in range(len(fused))], eps=EPS)


def eager(fused: hf.FusedModule, loss: Any, opt: Any, x: Any, target: Any) -> Tensor:
    opt.zero_grad()
    losses = loss(fused(x), target)
    losses.sum().backward()
    opt.step()
    return losses.detach()


def close(actual: Tensor, expected: Tensor, label: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=lambda m: f"{label}: {m}")


def compare(module: nn.Module, reference: nn.Module, when: str) -> None:
    expected = reference.state_dict()
    for name, tensor in module.state_dict().items():
        close(tensor, expected[name], f"{name} {when}")
    grads = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == (grads[name] is None), f"gradient of {name} {when}"
        if parameter.grad is not None:
            assert parameter.grad.is_contiguous()
            close(parameter.grad, grads[name], f"gradient of {name} {when}")


def sources(fused: hf.FusedModule, loss: Any, call: StepCall, outputs: Any) -> tuple[BoundProgram, BoundProgram]:
    return BoundProgram.of(fused.find(call.inputs), fused), loss.find_program(outputs, *call.target.values)


def places(fused: hf.FusedModule) -> tuple[Location, ...]:
    return tuple((m._parameters, name) for m in fused.modules() for name, p in m._parameters.items() if p is not None)


def stepped(
    fused: hf.FusedModule, programs: tuple[BoundProgram, BoundProgram], call: StepCall, size: int | None
) -> BlocksStep:
    blocks = StepBlocks.of(*programs, call, size)
    graphs = map(trace, blocks.sources)
    return blocks.step([BlockProgram(graph, graph.module) for graph in graphs], places(fused))


def whole(fused: hf.FusedModule, programs: tuple[BoundProgram, BoundProgram], call: StepCall) -> BlocksStep:
    return stepped(fused, programs, call, None)


def each(fused: hf.FusedModule, programs: tuple[BoundProgram, BoundProgram], call: StepCall) -> BlocksStep:
    return stepped(fused, programs, call, 1)


# Each model in both ways and with both kinds of inputs, and each way with both: two of the four for each model.
PAIRS = [
    pytest.param(model, kind == "stacked", make_step, id=f"{model}-{kind}-{make_step.__name__}")
    for index, model in enumerate(TRACED)
    for kind, make_step in zip(("shared", "stacked"), (whole, each)[:: 1 - index % 2 * 2], strict=True)
]


@pytest.mark.parametrize(("model", "per_member", "make_step"), PAIRS)
def test_five_steps_of_the_graph(model: Model, per_member: bool, make_step: Any) -> None:
    fused, reference = arrays(model, 3)
    loss, opt, other = hf.per_model(loss_of), adam(fused), adam(reference)
    program: StepProgram | None = None
    for step, size in enumerate([4, 4, 3, 5, 3]):
        rows = [model.draw(size) for _ in range(3)] if per_member else model.draw(size)
        x, target = hf.stacked(rows) if per_member else rows, torch.rand(size, dtype=torch.float64)
        expected = eager(reference, loss, other, x, target)
        call = StepCall(Arguments.of((x,), {}), Arguments.of((target,), {}))
        if program is None:
            losses = eager(fused, loss, opt, x, target)
            with torch.no_grad():
                outputs = reference(x)
            loss(outputs, target)
            reference.load_state_dict(fused.state_dict())
            program = make_step(fused, sources(fused, loss, call, outputs), call)
        else:
            assert program.fits(call)
            losses = program.step(call)
            opt.step()
        close(losses, expected, f"losses at step {step}")
        compare(fused, reference, f"after step {step}")


def test_sizes_that_fit() -> None:
    """Inputs and target of one size, which is open."""
    model = TRACED[0]
    fused, _ = arrays(model, 2)
    loss = hf.per_model(lambda output, target: ((output.mean(1) - target) ** 2).mean())
    x, target = model.draw(4), torch.rand(4, dtype=torch.float64)
    outputs = fused(x)
    loss(outputs, target)
    call = StepCall(Arguments.of((x,), {}), Arguments.of((target,), {}))
    graph = trace(StepSource.of(*sources(fused, loss, call, outputs), call))
    for sizes, fits in [((4, 4), True), ((9, 9), True), ((9, 4), False), ((1, 1), False), ((0, 0), False)]:
        assert graph.fits([model.draw(sizes[0]), torch.rand(sizes[1]).double()]) is fits


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda a, b: a * b, set()),
        (lambda a, b: a.add_(b), {0}),
        (lambda a, b: b[0].mul_(2) + a[0], {1}),
        (lambda a, b: torch._foreach_add_([a, b], 1), {0, 1}),
        (lambda a, b: torch.mul(a, 2, out=b), {1}),
    ],
    ids=["none", "whole", "view", "list", "out"],
)
def test_inputs_that_a_graph_writes(run: Any, expected: set[int]) -> None:
    assert written_inputs(make_fx(run)(torch.ones(2, 2), torch.ones(2, 2)).graph) == expected
