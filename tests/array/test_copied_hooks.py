"""Hooks of one member, in the array and in all that is copied from it, against a model with the same hook."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf


def output_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def output_hook_with_kwargs(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
    return output * 2 + len(kwargs)


def input_hook(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def input_hook_with_kwargs(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    return (args[0] * 2,), kwargs


def gradient_hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 3 for grad in inputs)


def output_gradient_hook(module: nn.Module, outputs: Any) -> Any:
    return (outputs[0] * 3,)


class Scaled(nn.Linear):
    """Its hook is a method, and so belongs to each copy of the model."""

    factor = 2.0

    def scaled(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor


def method_hook(module: nn.Module) -> Any:
    layer = module if isinstance(module, Scaled) else module.get_submodule("2")
    assert isinstance(layer, Scaled)
    return module.register_forward_hook(layer.scaled)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "output": lambda module: module.register_forward_hook(output_hook),
    "output with kwargs": lambda module: module.register_forward_hook(output_hook_with_kwargs, with_kwargs=True),
    "output always": lambda module: module.register_forward_hook(output_hook, always_call=True),
    "input": lambda module: module.register_forward_pre_hook(input_hook),
    "input with kwargs": lambda module: module.register_forward_pre_hook(input_hook_with_kwargs, with_kwargs=True),
    "gradient": lambda module: module.register_full_backward_hook(gradient_hook),
    "output gradient": lambda module: module.register_full_backward_pre_hook(output_gradient_hook),
    "method": method_hook,
}


def gradients(model: nn.Module, row: int | None = None) -> list[Tensor]:
    """The output and the gradients of ``model``, or of member ``row`` of an array."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.zero_grad()
    output = model(x.requires_grad_())
    output.square().sum().backward()
    values = [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return values if row is None else [value[row] for value in values]


@pytest.mark.parametrize("where", ["2", ""])
@pytest.mark.parametrize("hook", HOOKS)
def test_copies_have_the_hooks_of_a_member(hook: str, where: str) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Scaled(5, 2)).double() for _ in range(3)]
    alone = copy.deepcopy(models[1])
    fused = hf.fuse(models)
    for model in (alone, fused[1]):
        HOOKS[hook](model.get_submodule(where))
    results = {
        "array": gradients(fused, 1),
        "member": gradients(fused[1]),
        "unfuse": gradients(fused.unfuse()[1]),
        "unfuse of a copy": gradients(copy.deepcopy(fused).unfuse()[1]),
        "copy": gradients(copy.deepcopy(fused), 1),
        "pickle": gradients(pickle.loads(pickle.dumps(fused)), 1),
        "copy of the member": gradients(copy.deepcopy(fused[1])),
    }
    expected = gradients(alone)
    for name, values in results.items():
        for value, expected_value in zip(values, expected, strict=True):
            torch.testing.assert_close(
                value, expected_value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_method_as_a_hook_is_one_of_the_copy() -> None:
    fused = hf.fuse([nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Scaled(5, 2)) for _ in range(2)])
    method_hook(fused[1])
    model = fused.unfuse()[1]
    [hook] = model._forward_hooks.values()
    assert hook.__self__ is model[2]


def test_a_hook_of_a_shared_submodule_is_copied_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x))
            return y

    fused = hf.fuse([Twice().double() for _ in range(2)])
    fused[0].get_submodule("first").register_forward_hook(output_hook)
    x = torch.ones(2, 3, dtype=torch.float64)
    for model in (fused.unfuse()[0], copy.deepcopy(fused)[0]):
        torch.testing.assert_close(model(x), fused(x)[0])
