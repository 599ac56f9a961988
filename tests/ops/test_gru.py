"""GRUs: values, gradients and second derivatives against the loop over members."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.layout import Layout
from hfusion.ops import gru, rnn
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
    for size, expected in ((4, gru.gru_stacked if native_code == "1" else call_per_member), (512, call_per_member)):
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
@pytest.mark.parametrize("trained", ["weight_hh_l0", "bias_hh_l0", "weight_ih_l0"])
def test_frozen_weights_get_no_gradients_and_inputs_theirs(trained: str) -> None:
    fused = hf.fuse([nn.GRU(3, 4).double() for _ in range(2)])
    for name, parameter in fused.named_parameters():
        parameter.requires_grad_(name == trained)
    x, h = (torch.randn(*shape, 2, size, dtype=torch.float64) for shape, size in (((5,), 3), ((1,), 4)))
    for leaf in (x, h):
        leaf.requires_grad_()
    fused(x, h)[1].sum().backward()
    assert [name for name, p in fused.named_parameters() if p.grad is not None] == [trained]
    members = fused.unfuse()
    expected = [torch.autograd.grad(m(x, h)[1].sum(), [x, h, m.get_parameter(trained)]) for m in members]
    for actual, member_grads in zip((x.grad, h.grad), list(zip(*expected, strict=True))[:2], strict=True):
        torch.testing.assert_close(actual, sum(member_grads))
    torch.testing.assert_close(fused.get_parameter(trained).grad, torch.stack([grads[2] for grads in expected]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_far_from_zero_and_close_to_it(dtype: torch.dtype) -> None:
    """One unit, two steps: infinite inputs leave the sums over the hidden state finite."""
    far = torch.tensor([1e-6, 0.5, 1, 9, 20, 88, 104, 1e30, math.inf])
    x = torch.cat([far, -far, torch.tensor([0, math.nan])]).to(dtype).view(1, -1, 1).repeat(2, 1, 1)
    models = [nn.GRU(1, 1).to(dtype) for _ in range(2)]
    for actual, *expected in zip(hf.fuse(models, verify=False)(x), *(model(x) for model in models), strict=True):
        torch.testing.assert_close(actual, torch.stack(expected), equal_nan=True)


@pytest.mark.usefixtures("kernels")
def test_threads_share_the_rows() -> None:
    fused = hf.fuse([nn.GRU(8, 64) for _ in range(4)])
    x = torch.randn(3, 64, 8)

    def run() -> list[Tensor]:
        y, _ = fused(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(fused.parameters()))]

    single_threaded = run()
    try:
        torch.set_num_threads(3)
        other = run()
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(single_threaded, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_autocast_gives_what_torch_gives() -> None:
    models = [nn.GRU(3, 4, num_layers=2) for _ in range(2)]
    x = torch.randn(5, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        (output, _), expected = hf.fuse(models)(x), [model(x)[0] for model in models]
    torch.testing.assert_close(output, torch.stack(expected), rtol=0.02, atol=0.02)


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


def test_operators_are_as_they_are_described(kernels: None) -> None:
    """Their schemas, shapes for tracers, and outputs that are no views."""
    assert rnn.kernels() == ""
    sums, h, weights = torch.randn(2, 5, 3, 12), torch.randn(2, 3, 4), torch.randn(2, 5, 12)
    operators, checks = torch.ops.hfusion_gru, ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.steps.default, (sums, h, weights, 1), test_utils=checks)
    rows, y, gates = operators.steps(sums, h, weights, 1)
    operands = (gates, rows, torch.randn(2, 12, 4), torch.randn_like(y), torch.randn_like(h), 1)
    torch.library.opcheck(operators.steps_backward.default, operands, test_utils=checks)
