"""LSTMs, and what GRUs share with them: values, gradients and second derivatives against the loop over members."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.layout import Layout
from hfusion.core.tree import leaves
from hfusion.device import native
from hfusion.ops import rnn
from hfusion.ops.rule import call_per_member
from hfusion.passes.batch import batch
from tests.oracle import Case, Draw, check, member_graph, t

aten = torch.ops.aten
# Of operators that are called by themselves, torch's warnings reach Python from 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

MEMBERS = 3


def case(
    *, features: int = 3, size: int = 4, layers: int = 1, bidirectional: bool = False, biases: bool = True, first: bool
) -> Case:
    """An LSTM over 5 steps of 2 samples."""
    directions = 2 if bidirectional else 1
    params: list[Draw] = []
    for layer in range(layers):
        inputs = directions * size if layer else features
        for _ in range(directions):
            params += [t(4 * size, inputs), t(4 * size, size), *[t(4 * size), t(4 * size)][: 2 * biases]]
    states = [t(layers * directions, 2, size), t(layers * directions, 2, size)]
    x = t(2, 5, features) if first else t(5, 2, features)
    return Case(aten.lstm.input, (x, states, params, biases, layers, 0.0, True, bidirectional, first), members=(3,))


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


@pytest.fixture(params=["kernels", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("HFUSION_NATIVE", "0")
    elif isinstance(library := native.library(rnn.SOURCE), str):
        pytest.skip(library)
    return str(request.param)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lstm(case: Case) -> None:
    check(case)


def lowered(features: int, size: int, *, train: bool = True, members: int = MEMBERS) -> Any:
    operands = [torch.zeros(2, 5, features), torch.zeros(1, 2, size), torch.zeros(1, 2, size)]
    weights = [t(4 * size, features), t(4 * size, size)]
    operands += [torch.zeros(draw.shape) for draw in weights]
    states = [t(1, 2, size), t(1, 2, size)]
    case = Case(aten.lstm.input, (t(2, 5, features), states, weights, False, 1, 0.0, train, False, True))
    graph = batch(member_graph(case, operands), [Layout.STACKED] * len(operands), members).graph
    return next(n for n in graph.nodes if "origin" in n.meta and n.meta["origin"].target is case.target).target


def test_without_kernels_the_torch_operator_runs_per_member(form: str) -> None:
    assert lowered(3, 4) is {"kernels": rnn.lstm_stacked, "torch": call_per_member}[form]


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
    fused.eval()
    output, _ = fused(x)
    assert torch.allclose(output[0], output[1])


@pytest.mark.usefixtures("kernels")
def test_second_derivatives() -> None:
    models = [nn.LSTM(3, 4, bidirectional=True).double() for _ in range(2)]
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
