"""Parameters of half precision have the bits of B optimizers of torch.optim, by Triton kernels and by torch's class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hfusion.optim import base
from tests.optim.arrays import CASES, Array, Per, start
from tests.optim.interpreted import Closure, forget, interpret

ROUNDED_ALIKE = {
    case: (name, options)
    for case, (name, options) in CASES.items()
    if hasattr(torch.optim, name) and name not in ("Adagrad", "NAdam", "RAdam") and case != "rmsprop-all"
}
"""Of these, torch's implementations for CPUs and for GPUs round the same results; a centered variance cancels."""
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
SHAPES = ((7, 5), (2,), (0,), (131,))
EXACT = {
    "lr": Per(0.125, 0.5),
    "momentum": Per(0.5, 0.5),
    # What is left of 1: 1/2, 1/4, -1/8.
    "dampening": Per(0.5, 1.5),
    "weight_decay": Per(0.125, 0.5),
    "eps": Per(2**-10, 2.0),
}
"""Powers of 2: on a CPU, other than on CUDA, ``add`` rounds ``alpha``, and products with it, to the dtype."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps by the Triton kernels, in the interpreter, whose launches are recorded."""
    interpret(monkeypatch)
    monkeypatch.setattr(base, "recording_on", lambda device: base.RecordedUpdates(Closure()))
    yield
    forget()


def exact(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with such hyper-parameters; the default eps rounds to zero in float16."""
    return {name: EXACT.get(name, value) if value else value for name, value in ({"eps": 1.0} | options).items()}


def unequal(name: str, options: Mapping[str, Any], array: Array, steps: int) -> tuple[Any, dict[str, int]]:
    """Step an array: its optimizer, and how many elements of parameters and state differ from the members' own.

    Gradients are written to the same memory at each step, so that steps are recorded.
    """
    fused, alone = start(name, options, array)
    array.draw_grads()
    grads = [param.grad for param in array.params]
    for _ in range(steps):
        array.draw_grads()
        for param, grad in zip(array.params, grads, strict=True):
            assert grad is not None
            assert param.grad is not None
            param.grad = grad.copy_(param.grad)
        fused.step()
        for optimizer in alone:
            optimizer.step()
    differences = {}
    for index, param in enumerate(array.params):
        member_params = [params[index] for params in array.members]
        differences[f"p{index}"] = _count(param.detach(), [member.detach() for member in member_params])
        states = [optimizer.state[member] for optimizer, member in zip(alone, member_params, strict=True)]
        for key in fused.state[param].keys() - fused.numbers.keys():
            # torch keeps no buffer for a member without momentum.
            rows = [row for row, state in enumerate(states) if state.get(key) is not None]
            differences[f"p{index}.{key}"] = _count(fused.state[param][key][rows], [states[row][key] for row in rows])
    return fused, differences


def _count(actual: Tensor, expected: list[Tensor]) -> int:
    whole = torch.stack(expected)
    assert actual.dtype is whole.dtype
    # Whatever has other bits is next to them.
    eps = torch.finfo(whole.dtype).eps
    torch.testing.assert_close(actual, whole, rtol=4 * eps, atol=eps * 2**-4, equal_nan=True)
    return int((actual != whole).sum())


@DTYPES
@pytest.mark.parametrize(("name", "options"), ROUNDED_ALIKE.values(), ids=ROUNDED_ALIKE)
@pytest.mark.usefixtures("recorded")
def test_kernels_round_where_torch_does(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    array = Array(3, SHAPES, dtype)
    options = exact(options)
    if name == "SGD":
        del options["eps"]
    fused, differences = unequal(name, options, array, 4)
    # A CPU rounds products that CUDA and the kernels do not round.
    assert sum(differences.values()) <= 2, differences
    assert fused.launches == "recorded and replayed as one"


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_equals_alone_on_a_gpu(name: str, options: dict[str, Any], strided: bool, dtype: torch.dtype) -> None:
    array = Array(3, ((7, 5), (), (3, 300), (0,), (1025,), (64, 48)), dtype, "cuda")
    if strided:
        array.params[0].data = array.params[0].data.transpose(1, 2).contiguous().transpose(1, 2)
    if dtype is torch.float16 and name not in ("SGD", "Lion"):
        options = {**options, "eps": Per(1e-4, 2.0)}
    if not hasattr(torch.optim, name):
        pytest.skip("torch has none")
    fused, differences = unequal(name, options, array, 6)
    # What torch contracts to one operation is its compiler's choice.
    assert sum(differences.values()) <= 1e-3 * sum(param.numel() for param in array.params), differences
    if not strided:
        assert fused.launches == "recorded and replayed as one"
