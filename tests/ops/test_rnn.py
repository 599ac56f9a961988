"""Recurrent layers: values, gradients and second derivatives are those of the loop over members."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.tree import leaves
from hfusion.device import native
from hfusion.ops import rnn, rnn_steps
from hfusion.ops.rnn_steps import run_per_member
from tests.oracle import Case, Draw, check, t

aten = torch.ops.aten
# Of operators that are called by themselves, torch's warnings reach Python from 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

MEMBERS = 3


@pytest.fixture
def kernels() -> None:
    """The C kernels of recurrent layers; a test that needs them is skipped where they cannot be compiled."""
    if isinstance(library := native.library(rnn.SOURCE), str):
        pytest.skip(library)


def case(
    target: Any,
    features: int = 3,
    size: int = 4,
    layers: int = 1,
    directions: int = 1,
    biases: bool = True,
    steps_first: bool = False,
) -> Case:
    """A layer over 5 steps of 2 samples."""
    gates, params = 4 if target is aten.lstm.input else 3, list[Draw]()
    for layer in range(layers):
        inputs = directions * size if layer else features
        for _ in range(directions):
            params += [t(gates * size, inputs), t(gates * size, size), *[t(gates * size)] * (2 * biases)]
    state = t(layers * directions, 2, size)
    x = t(5, 2, features) if steps_first else t(2, 5, features)
    options = (params, biases, layers, 0.0, True, directions == 2, not steps_first)
    return Case(target, (x, [state, state] if gates == 4 else state, *options), members=(3,))


CASES = [
    made
    for target in (aten.lstm.input, aten.gru.input)
    for made in (
        case(target),
        case(target, steps_first=True),
        case(target, biases=False),
        case(target, directions=2, steps_first=True),
        case(target, layers=2),
        case(target, layers=2, directions=2, biases=False, steps_first=True),
        case(target, features=1, size=1),
        case(target, features=3, size=19),
    )
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator(case: Case) -> None:
    check(case)


MODULES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm of two layers": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "lstm with projections": (nn.LSTM, {"proj_size": 2}),
    "lstm without biases": (nn.LSTM, {"bias": False, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru of two layers": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}


def gradients(outputs: Any, parameters: Any, weights: list[Tensor]) -> list[Tensor]:
    y, state = outputs
    parts = [y, *(state if isinstance(state, tuple) else [state])]
    total = sum((part * weight).sum() for part, weight in zip(parts, weights, strict=False))
    return list(torch.autograd.grad(total, list(parameters)))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("dtype", "stacked"), [(torch.float64, True), (torch.float32, False)])
def test_modules_equal_their_members(name: str, dtype: torch.dtype, stacked: bool) -> None:
    kind, options = MODULES[name]
    models = [kind(3, 4, **options).to(dtype) for _ in range(MEMBERS)]
    fused = hf.fuse(models)
    xs = torch.randn(MEMBERS if stacked else 1, 4, 5, 3, dtype=dtype)
    for train in (True, False):
        y, state = outputs = fused.train(train)(hf.stacked(xs) if stacked else xs[0])
        parts = [y, *(state if isinstance(state, tuple) else [state])]
        weights = [torch.randn_like(part) for part in parts]
        grads = gradients(outputs, fused.parameters(), weights)
        for b, model in enumerate(models):
            want = model.train(train)(xs[b % len(xs)])
            torch.testing.assert_close(y[b], want[0])
            expected_grads = gradients(want, model.parameters(), [weight[b] for weight in weights])
            for actual, other in zip(grads, expected_grads, strict=True):
                torch.testing.assert_close(actual[b], other)


@pytest.mark.usefixtures("kernels")
def test_members_drop_between_layers_by_their_own_draws() -> None:
    fused = hf.fuse([nn.LSTM(3, 4, 2, dropout=0.5) for _ in range(MEMBERS)], verify=False)
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter).clone())
    x = torch.randn(5, 2, 3)
    output, _ = fused(x)
    assert not torch.equal(output[0], output[1])
    assert output.ne(0).all(), "nothing is dropped behind the last layer"
    fused.eval()
    output, _ = fused(x)
    assert torch.allclose(output[0], output[1])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_second_derivatives(layer: type[nn.RNNBase]) -> None:
    models = [layer(3, 4, bidirectional=True).double() for _ in range(2)]
    fused = hf.fuse(models)
    x = torch.randn(5, 2, 3, dtype=torch.float64)

    def penalty(model: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(leaf)[0].square().sum(), leaf, create_graph=True)
        return list(torch.autograd.grad(first.sum(), list(model.parameters()), allow_unused=True))

    penalties = penalty(fused)
    expected = [penalty(model) for model in models]
    for index, actual in enumerate(penalties):
        torch.testing.assert_close(actual, torch.stack([member_penalties[index] for member_penalties in expected]))


@pytest.mark.usefixtures("kernels")
def test_frozen_weights_get_no_gradients_and_inputs_theirs() -> None:
    fused = hf.fuse([nn.LSTM(3, 4).double() for _ in range(2)])
    for name, parameter in fused.named_parameters():
        parameter.requires_grad_(name == "bias_hh_l0")
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    fused(x)[1][1].sum().backward()
    assert [name for name, p in fused.named_parameters() if p.grad is not None] == ["bias_hh_l0"]
    expected = torch.zeros_like(x)
    for model in fused.unfuse():
        expected += torch.autograd.grad(model(x)[1][1].sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_a_member_that_explodes_changes_no_other(layer: type[nn.RNNBase]) -> None:
    fused = hf.fuse([layer(3, 4) for _ in range(3)])
    x = torch.randn(5, 2, 3)

    def run() -> list[Tensor]:
        y, _ = fused(x)
        return [y, *torch.autograd.grad(y.sum(), list(fused.parameters()))]

    before = run()
    with torch.no_grad():
        fused.weight_ih_l0[1, 0] = math.nan
        fused.weight_hh_l0[1, 1] = math.inf
    after = run()
    assert after[0][1].isnan().any()
    for first, other in zip(before, after, strict=True):
        assert torch.equal(first[[0, 2]], other[[0, 2]])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("where", ["input", "state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_values_that_are_not_finite_give_the_gradients_of_torch(
    layer: type[nn.RNNBase], dtype: torch.dtype, where: str, value: float
) -> None:
    models = [layer(3, 4).to(dtype) for _ in range(3)]
    x, state = torch.randn(3, 5, 2, 3, dtype=dtype), torch.randn(3, 1, 2, 4, dtype=dtype)
    with torch.no_grad():
        {"input": x[1], "state": state[1], **models[1].state_dict()}[where].flatten()[5] = value
    two = layer is nn.LSTM
    fused = hf.fuse(models)
    states = hf.stacked(state)
    fused(hf.stacked(x), (states, states) if two else states)[0].sum().backward()
    for member, model in enumerate(models):
        model(x[member], (state[member], state[member]) if two else state[member])[0].sum().backward()
        for name, parameter in model.named_parameters():
            actual = fused.get_parameter(name).grad[member]
            torch.testing.assert_close(actual, parameter.grad, equal_nan=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_gives_what_torch_gives(dtype: torch.dtype, inside: bool) -> None:
    """Also where backward runs under it."""
    models = [nn.LSTM(3, 4, num_layers=2, bidirectional=True, dtype=dtype) for _ in range(2)]
    fused = hf.fuse(models)
    x = torch.randn(5, 2, 3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            expected = [model(x) for model in models]
        except RuntimeError as error:
            # Some processors have no such LSTM; then the array has none, either.
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                fused(x)
            return
        outputs = fused(x)
    limits = {} if dtype is torch.float64 else {"rtol": 0.02, "atol": 0.02}
    for actual, *rows in zip(leaves(outputs, Tensor), *(leaves(output, Tensor) for output in expected), strict=True):
        torch.testing.assert_close(actual, torch.stack(rows), **limits)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        for (y, _), *_ in [(outputs,), *((pair,) for pair in expected)]:
            y.square().sum().backward()
    for name, parameter in fused.named_parameters():
        grads = [model.get_parameter(name).grad for model in models]
        torch.testing.assert_close(parameter.grad, torch.stack([grad for grad in grads if grad is not None]), **limits)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_with_a_loss_of_all_outputs_is_compiled(autocast: bool) -> None:
    """The gradient of the outputs is transposed."""
    models = [nn.LSTM(3, 4, batch_first=True) for _ in range(2)]
    x, y = torch.randn(5, 2, 3), torch.randn(5, 2, 4)

    def losses(compile: bool) -> list[Tensor]:
        fused = hf.fuse(models)
        optimizer = hf.optim.SGD(fused.parameters(), lr=0.1)
        step = hf.train_step(fused, lambda output, y: F.mse_loss(output[0].float(), y), optimizer, compile=compile)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            step_losses = [step(x, y) for _ in range(4)]
        assert ("eager" in str(step.report())) is not compile
        return step_losses

    torch.testing.assert_close(losses(True), losses(False), **({"rtol": 1e-3, "atol": 1e-3} if autocast else {}))


# Recurrent layers by time steps of all members: values and gradients against torch's own operator, member by member.

STEPS, SAMPLES, FEATURES, SIZE = 5, 2, 3, 4
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


def gradients_of_parts(results: Any, leaves: list[Tensor]) -> list[Tensor]:
    total = sum(
        (part * torch.linspace(-1, 2, part.numel(), dtype=part.dtype).view(part.shape)).sum() for part in results
    )
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "shared"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_torch_member_by_member(kind: str, name: str, stacked: bool) -> None:
    settings = options(name)
    x, states, weights = operands(kind, settings, stacked)
    operand_leaves = [x, *states, *weights]
    actual = rnn_steps.recurrent_stacked(kind, MEMBERS, x, states, weights, **settings)
    expected = run_per_member(kind, MEMBERS, x, states, weights, settings)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        gradients_of_parts(actual, operand_leaves), gradients_of_parts(expected, operand_leaves), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_steps_are_as_they_are_described(kind: str) -> None:
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


def test_second_derivatives_of_steps_are_refused() -> None:
    """As those of cuDNN's layers."""
    x, states, weights = operands("gru", options("plain"), True)
    y, _ = rnn_steps.recurrent_stacked("gru", MEMBERS, x, states, weights, **options("plain"))
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of recurrent layers"):
        first.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_explodes_changes_no_other_in_steps(kind: str) -> None:
    x, states, weights = operands(kind, options("plain"), False)
    spoilt = [weight.detach().clone() for weight in weights]
    spoilt[0][1, 0], spoilt[1][1, 1] = torch.nan, torch.inf
    before, after = (
        rnn_steps.recurrent_stacked(kind, MEMBERS, x, states, weight_set, **options("plain"))[0]
        for weight_set in (weights, spoilt)
    )
    assert torch.equal(before[[0, 2]], after[[0, 2]])


ON_GPU: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "gru": (nn.GRU, {"batch_first": True}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_layers_equal_their_members_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    kind, settings = ON_GPU[name]
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
