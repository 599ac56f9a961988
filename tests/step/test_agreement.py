"""What counts as a mistake of a compiled program, and that none is used."""

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
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.01))
    return [step(*batch) for _ in range(count)], str(step.report())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_that_is_wrong_is_not_used(dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)

    batch = torch.randn(6, 5, dtype=dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    expected, _ = _steps(model, batch)
    told = r"WrongProgram: .* the losses, f\d\d\[2\] of norm [\d.]+, differs by"
    with config.patch(post_grad_custom_post_pass=_Wrong()), pytest.warns(UserWarning, match=told):
        found, report = _steps(model, batch)
    assert "eager" in report
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@needs_compiler
def test_gradients_of_nothing_but_rounding_are_no_mistake() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))

    torch.manual_seed(1)
    _, report = _steps(model, (100 * torch.randn(64, 40), torch.randint(3, (64,))))
    assert "program of" in report
