"""Recurrent layers by time steps of all members: values and gradients against torch's own operator, member by member.

Accelerators use them; here they run on the CPU, where torch has no fused cells.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.ops import rnn_steps
from hfusion.ops.rnn_steps import run_per_member

MEMBERS, STEPS, SAMPLES, FEATURES, SIZE = 3, 5, 2, 3, 4
KINDS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases": {"has_biases": False},
    "both directions": {"bidirectional": True},
    "layers": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "samples first": {"batch_first": True},
}


def options(name: str) -> dict[str, Any]:
    default = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False}
    return {**default, "batch_first": False} | OPTIONS[name]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def operands(
    kind: str, settings: dict[str, Any], stacked: bool, steps: int = STEPS
) -> tuple[Tensor, list[Tensor], Any]:
    directions, rows = (2 if settings["bidirectional"] else 1), KINDS[kind] * SIZE
    weights: list[Tensor] = []
    for layer in range(settings["num_layers"]):
        for _ in range(directions):
            inputs = directions * SIZE if layer else FEATURES
            weights += [draw(MEMBERS, rows, inputs), draw(MEMBERS, rows, SIZE)]
            weights += [draw(MEMBERS, rows), draw(MEMBERS, rows)] if settings["has_biases"] else []
    first = (MEMBERS,) if stacked else ()
    x = draw(*first, SAMPLES, steps, FEATURES) if settings["batch_first"] else draw(*first, steps, SAMPLES, FEATURES)
    count = directions * settings["num_layers"]
    states = [draw(*first, count, SAMPLES, SIZE) for _ in range(2 if kind == "lstm" else 1)]
    return x, states, weights


def gradients(results: Any, leaves: list[Tensor]) -> list[Tensor]:
    total = sum(
        (part * torch.linspace(-1, 2, part.numel(), dtype=part.dtype).view(part.shape)).sum() for part in results
    )
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "shared"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_member_by_member(kind: str, name: str, stacked: bool) -> None:
    settings = options(name)
    x, states, weights = operands(kind, settings, stacked)
    leaves = [x, *states, *weights]
    actual = rnn_steps.recurrent_stacked(kind, MEMBERS, x, states, weights, **settings)
    expected = run_per_member(kind, MEMBERS, x, states, weights, settings)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients(actual, leaves), gradients(expected, leaves), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_as_they_are_described(kind: str) -> None:
    """Their schemas, shapes for tracers, and outputs that are no views."""
    sums, w_hidden = draw(STEPS, MEMBERS, SAMPLES, KINDS[kind] * SIZE), draw(MEMBERS, KINDS[kind] * SIZE, SIZE)
    h, c = draw(MEMBERS, SAMPLES, SIZE), draw(MEMBERS, SAMPLES, SIZE) if kind == "lstm" else None
    bias = draw(MEMBERS, KINDS[kind] * SIZE) if kind == "gru" else None
    arguments = [None if t is None else t.detach() for t in (sums, h, c, w_hidden, bias)]
    checks = ("test_schema", "test_faketensor")
    operators: Any = torch.ops.hfusion_rnn
    torch.library.opcheck(operators.steps.default, (*arguments, kind, True), test_utils=checks)
    y, cells, step_state = operators.steps(*arguments, kind, True)
    saved = (y, arguments[1], cells, arguments[2], step_state, arguments[3])
    d_c = None if c is None else torch.ones_like(c)
    torch.library.opcheck(operators.steps_backward.default, (y, d_c, *saved, kind, True), test_utils=checks)


def test_second_derivatives_are_refused() -> None:
    """As those of cuDNN's layers."""
    x, states, weights = operands("gru", options("plain"), True)
    y, _ = rnn_steps.recurrent_stacked("gru", MEMBERS, x, states, weights, **options("plain"))
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of recurrent layers"):
        first.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_explodes_changes_no_other(kind: str) -> None:
    x, states, weights = operands(kind, options("plain"), False)
    spoilt = [weight.detach().clone() for weight in weights]
    spoilt[0][1, 0], spoilt[1][1, 1] = torch.nan, torch.inf
    before, after = (
        rnn_steps.recurrent_stacked(kind, MEMBERS, x, states, weight_set, **options("plain"))[0]
        for weight_set in (weights, spoilt)
    )
    assert torch.equal(before[[0, 2]], after[[0, 2]])


LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "gru": (nn.GRU, {"batch_first": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_their_members_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    kind, settings = LAYERS[name]
    models = [kind(FEATURES, SIZE, **settings).to("cuda", dtype) for _ in range(rnn_steps.MIN_MEMBERS)]
    fused = hf.fuse(models, verify=False)
    x = torch.randn(SAMPLES, STEPS, FEATURES, device="cuda", dtype=dtype)
    y, _ = fused(x)
    assert "members as batch" in str(fused.report())
    weights = torch.randn_like(y)
    grads = torch.autograd.grad((y * weights).sum(), list(fused.parameters()))
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 1e-1}[dtype]
    for row, model in enumerate(models):
        want, _ = model(x)
        torch.testing.assert_close(y[row], want, rtol=tolerance, atol=tolerance)
        expected_grads = torch.autograd.grad((want * weights[row]).sum(), list(model.parameters()))
        for actual, other in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(actual[row], other, rtol=tolerance, atol=tolerance)
