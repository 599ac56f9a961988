"""GRUs: values, gradients and second derivatives against the loop over members."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.layout import Layout
from hfusion.ops.rnn import gru_stacked
from hfusion.ops.rule import call_per_member
from hfusion.passes.batch import batch
from tests.oracle import Case, Draw, check, member_graph, t

aten = torch.ops.aten

MEMBERS = 3


def case(
    *, features: int = 3, size: int = 4, layers: int = 1, bidirectional: bool = False, biases: bool = True, first: bool
) -> Case:
    """A GRU over 5 steps of 2 samples."""
    directions = 2 if bidirectional else 1
    params: list[Draw] = []
    for layer in range(layers):
        inputs = directions * size if layer else features
        for _ in range(directions):
            params += [t(3 * size, inputs), t(3 * size, size), *[t(3 * size), t(3 * size)][: 2 * biases]]
    x = t(2, 5, features) if first else t(5, 2, features)
    h = t(layers * directions, 2, size)
    return Case(aten.gru.input, (x, h, params, biases, layers, 0.0, True, bidirectional, first), members=(MEMBERS,))


CASES = [
    case(first=True),
    case(first=False),
    case(first=True, biases=False),
    case(first=False, bidirectional=True),
    case(first=True, layers=2),
    case(first=False, layers=2, bidirectional=True, biases=False),
    case(first=True, features=1, size=1),
    case(first=True, features=3, size=19),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gru(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("native_code", ["1", "0"])
def test_large_layers_and_those_without_kernels_run_per_member(
    native_code: str, monkeypatch: pytest.MonkeyPatch, kernels: None
) -> None:
    monkeypatch.setenv("HFUSION_NATIVE", native_code)
    for size, expected in ((4, gru_stacked if native_code == "1" else call_per_member), (512, call_per_member)):
        gru_case = case(features=size, size=size, biases=False, first=True)
        operands = [torch.zeros(2, 5, size), torch.zeros(1, 2, size)]
        operands += [torch.zeros(3 * size, size), torch.zeros(3 * size, size)]
        graph = batch(member_graph(gru_case, operands), [Layout.STACKED] * len(operands), MEMBERS).graph
        (called,) = [n for n in graph.nodes if "origin" in n.meta and n.meta["origin"].target is aten.gru.input]
        assert called.target is expected


@pytest.mark.usefixtures("kernels")
def test_second_derivatives() -> None:
    models = [nn.GRU(3, 4, bidirectional=True).double() for _ in range(2)]
    fused = hf.fuse(models)
    x = torch.randn(5, 2, 3, dtype=torch.float64)

    def penalty(model: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y, h = model(leaf)
        (first,) = torch.autograd.grad(y.square().sum() + h.sin().sum(), leaf, create_graph=True)
        return list(torch.autograd.grad((first * x.cos()).sum(), list(model.parameters()), allow_unused=True))

    expected = [penalty(model) for model in models]
    for index, actual in enumerate(penalty(fused)):
        torch.testing.assert_close(actual, torch.stack([member_grads[index] for member_grads in expected]))


@pytest.mark.usefixtures("kernels")
def test_a_step_with_a_loss_of_all_outputs_is_compiled() -> None:
    models = [nn.GRU(3, 4, batch_first=True, bidirectional=True) for _ in range(2)]
    x, y = torch.randn(5, 2, 3), torch.randn(5, 2, 8)

    def losses(compile: bool) -> list[Tensor]:
        fused = hf.fuse(models)
        optimizer = hf.optim.SGD(fused.parameters(), lr=0.1)
        step = hf.train_step(fused, lambda output, y: F.mse_loss(output[0], y), optimizer, compile=compile)
        step_losses = [step(x, y) for _ in range(4)]
        assert ("eager" in str(step.report())) is not compile
        return step_losses

    torch.testing.assert_close(losses(True), losses(False))
