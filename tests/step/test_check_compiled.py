"""Mistakes of compiled programs are detected, and such programs are not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import hfusion as hf
from hfusion.step.compiled_step import disagreement, shaken
from hfusion.step.step_graph import StepGraph
from tests.step.test_train_step import needs_compiler


class _Wrong(CustomGraphPass):
    """A compiler that takes tanh for what is near it."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.erf.default

    def uuid(self) -> Any:
        return "wrong"


def _steps(model: Callable[[], nn.Module], batch: Sequence[Tensor], count: int = 3) -> tuple[list[Tensor], str]:
    torch.manual_seed(0)
    fused = hf.fuse([model() for _ in range(2)])
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.01), compile=True)
    return [step(*batch) for _ in range(count)], str(step.report())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_that_is_wrong_is_not_used(dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)

    batch = torch.randn(6, 5, dtype=dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    expected, _ = _steps(model, batch)
    message = r"WrongProgram: .* the losses, f\d\d\[2\] of norm [\d.]+, differs by"
    with config.patch(post_grad_custom_post_pass=_Wrong()), pytest.warns(UserWarning, match=message):
        losses, report = _steps(model, batch)
    assert "eager" in report
    for loss, expected_loss in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss, expected_loss)


@needs_compiler
def test_gradients_of_nothing_but_rounding_are_no_mistake() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))

    torch.manual_seed(1)
    _, report = _steps(model, (100 * torch.randn(64, 40), torch.randint(3, (64,))))
    assert "program of" in report


@pytest.mark.parametrize(("share", "wrong"), [(0.02, False), (0.2, True)])
def test_one_relu_at_zero_is_no_mistake_and_more_than_it_is_one(share: float, wrong: bool) -> None:
    # The difference of two rounded numbers is zero, or on either side of it.
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.ones(1), torch.cat([torch.ones(99), 20 * 0.1 * ((a - b) > 0).float()])]

    number = torch.tensor([1.2345])
    graph = StepGraph(torch.fx.symbolic_trace(step), (0,), (number,), (number,))
    for node, value in zip(graph.module.graph.nodes, (number, number), strict=False):
        node.meta["val"] = value
    generator = torch.Generator().manual_seed(0)

    def nearby() -> list[Tensor]:
        return [*graph.module(*shaken((number, number), generator)), number]

    expected = [*graph.module(number, number), number]
    outputs = [expected[0], expected[1] + torch.eye(100)[99] * 100 * share, number]
    message = disagreement(graph, outputs, expected, nearby)
    assert ("the gradient of tensor 0" in message) == wrong
    other = [expected[0] + 0.1, *outputs[1:]]
    assert "the losses" in disagreement(graph, other, expected, nearby)
