"""Tensors that were converted, moved or replaced behind an optimizer's back: an error in words, or the right step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.optim.arrays import Array, run, start

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {}),
    "adadelta": ("Adadelta", {}),
}
ALL = pytest.mark.parametrize(("name", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
# Two steps prepare, the third takes the short way.
STEPS = pytest.mark.parametrize("steps", [1, 3])


@pytest.fixture(autouse=True, params=["kernels of our own", "torch's kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_NATIVE", "0" if request.param == "torch's kernels" else "")


def begun(name: str, options: dict[str, Any], steps: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Array]:
    array = Array(3, shapes=[(40, 30), (5,)], dtype=dtype)
    fused, alone = start(name, {"lr": 0.01, **options}, array)
    run(array, fused, alone, steps)
    array.draw_grads()
    return fused, array


def convert(param: Tensor, **to: Any) -> None:
    grad = param.grad
    assert grad is not None
    param.grad = None
    param.data = param.data.to(**to)
    param.grad = grad.to(**to)


KINDS: dict[str, dict[str, Any]] = {
    "double": {"dtype": torch.float64},
    "half": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "complex": {"dtype": torch.complex64},
}


@ALL
@STEPS
@pytest.mark.parametrize("to", KINDS.values(), ids=KINDS)
def test_converted_parameters(name: str, options: dict[str, Any], steps: int, to: dict[str, Any]) -> None:
    fused, array = begun(name, options, steps)
    for param in array.params:
        convert(param, **to)
    kind = str(to.get("dtype", torch.float32)).removeprefix("torch.")
    message = rf"of parameter 'p0' is float32 \[3, 40, 30\] on cpu, the parameter {kind} \[3, 40, 30\] on cpu"
    with pytest.raises(hf.FusionError, match=rf"{message}.*opt\.load_state_dict\(opt\.state_dict\(\)\)"):
        fused.step()


def state(fused: Any, array: Array) -> dict[str, Tensor]:
    entry: dict[str, Tensor] = fused.state[array.params[0]]
    return entry


def stack(entry: dict[str, Tensor]) -> str:
    return next(name for name in entry if name != "step")


def replaced(change: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], None]:
    return lambda entry: entry.update({stack(entry): change(entry[stack(entry)])})


def data(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def write(entry: dict[str, Tensor]) -> None:
        entry[stack(entry)].data = change(entry[stack(entry)].data)

    return write


BROKEN: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "double": replaced(Tensor.double),
    "shorter": replaced(lambda t: t[:, :1].clone()),
    "another shape": replaced(lambda t: t.reshape(3, 30, 40)),
    "another device": replaced(lambda t: t.to("meta")),
    "sparse": replaced(Tensor.to_sparse),
    "one row": replaced(lambda t: t[0].clone()),
    "data double": data(Tensor.double),
    "data of another view": data(lambda t: t[:, :1]),
    "data as integers": data(lambda t: t.view(torch.int32)),
    "data of half the members": data(lambda t: t[:1]),
    "counts elsewhere": lambda entry: entry.update(step=entry["step"].to("meta")),
    "counts of others": lambda entry: entry.update(step=torch.zeros(7)),
    "one count": lambda entry: entry.update(step=torch.tensor(3.0)),
    "a number": lambda entry: entry.update(step=3),  # type: ignore[call-overload]
}


@ALL
@STEPS
@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_state_that_does_not_fit(name: str, options: dict[str, Any], steps: int, change: Any) -> None:
    fused, array = begun(name, options, steps)
    before = [param.detach().clone() for param in array.params]
    change(state(fused, array))
    with pytest.raises(hf.FusionError, match=r"of parameter 'p0' (is|are|must) "):
        fused.step()
    assert all(map(torch.equal, array.params, before))


GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another shape": (lambda g: g.reshape(3, 30, 40), r"has shape \[3, 30, 40\], the parameter \[3, 40, 30\]"),
    "complex": (lambda g: g.to(torch.complex64), r"is torch.complex64, the parameter torch.float32"),
    "fewer": (lambda g: g[:1], r"has shape \[1, 40, 30\]"),
}


@ALL
@STEPS
@pytest.mark.parametrize(("change", "message"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_do_not_fit(name: str, options: dict[str, Any], steps: int, change: Any, message: str) -> None:
    fused, array = begun(name, options, steps)
    param = array.params[0]
    assert param.grad is not None
    param.grad.data = change(param.grad.data)
    for act in (fused.step, lambda: hf.optim.clip_grad_norm_(array.params, 1.0)):
        with pytest.raises(RuntimeError, match=rf"the gradient of 'p0' {message}"):
            act()


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "fewer": lambda t: t[:2].clone(),
    "more": lambda t: torch.cat([t, t]),
    "none": lambda t: t[:0].clone(),
    "a number": lambda t: torch.ones((), dtype=t.dtype),
}


@ALL
@STEPS
@pytest.mark.parametrize("change", ROWS.values(), ids=ROWS)
def test_stacks_of_other_members(name: str, options: dict[str, Any], steps: int, change: Any) -> None:
    fused, array = begun(name, options, steps)
    if steps == 1:
        # Before there is any state that would not fit.
        fused = getattr(hf.optim, name)(array.params, lr=0.01, **options)
    param, other = array.params[0], array.params[1].detach().clone()
    param.grad = None
    param.data = change(param.data)
    param.grad = torch.ones_like(param)
    with pytest.raises(hf.FusionError, match=r"parameter 'p0' has shape .* in an array of 3 members.*through .data"):
        fused.step()
    assert torch.equal(array.params[1], other)


def test_a_module_that_is_converted_with_its_optimizer() -> None:
    fused = hf.fuse([nn.Linear(4, 3) for _ in range(2)])
    optimizer = hf.optim.Adam(fused.parameters())

    def step() -> None:
        fused.zero_grad()
        fused(torch.ones(2, 4, dtype=fused.get_parameter("weight").dtype)).sum().backward()
        optimizer.step()

    step()
    copied = pickle.loads(pickle.dumps(optimizer))
    fused.double()
    with pytest.raises(hf.FusionError, match="parameter 'weight'"):
        step()
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    fused.to_empty(device="cpu")
    fused.load_state_dict({key: torch.ones_like(value) for key, value in fused.state_dict().items()})
    fused.get_parameter("bias").requires_grad_(False)
    step()
    fused.get_parameter("bias").requires_grad_(True)
    step()
    assert copy.deepcopy(optimizer).state_dict()["state"][0]["step"].tolist() == [4.0, 4.0]
    assert copied.state_dict()["state"][0]["step"].tolist() == [1.0, 1.0]
    assert optimizer.state_dict()["state"][1]["step"].tolist() == [3.0, 3.0]
