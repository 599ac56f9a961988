"""Random walks over what can be said to an array and to its members, against the models alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hfusion as hf
from tests.array.test_member_views import MEMBERS, MODELS, Make, backward, compare, double, inputs, outputs, pair

STEPS = 25


def shifted(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


def tripled(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 3 for grad in grad_inputs)


def initialise(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        nn.init.kaiming_uniform_(module.weight)
        nn.init.zeros_(module.bias)


class Walk:
    """An array and its models, with an optimizer of the array, and one of each member."""

    def __init__(self, seed: int, make: Make) -> None:
        self.random = random.Random(seed)
        self.fused, self.models = pair(make)
        self.views = list(self.fused) if seed % 2 else []
        self.hooks: list[Any] = []
        self.optimizer = hf.optim.SGD(self.fused.parameters(), lr=0.02, weight_decay=0.1, momentum=0.8)
        self.alone = [torch.optim.SGD(m.parameters(), lr=0.02, weight_decay=0.1, momentum=0.8) for m in self.models]
        pairs = zip(self.fused, self.models, strict=True) if seed % 3 else ()
        self.of_members = [[torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in two] for two in pairs]

    def member(self) -> tuple[nn.Module, nn.Module]:
        row = self.random.randrange(MEMBERS)
        return self.fused[row], self.models[row]

    def path(self) -> str:
        return self.random.choice([path for path, _ in self.models[0].named_modules()])

    def to_all(self, change: Callable[[Any], object]) -> None:
        for module in (self.fused, *self.models):
            change(module)

    def backward_of_all(self) -> None:
        backward(self.fused, self.models, inputs(self.random.randrange(100)))

    def backward_of_a_member(self) -> None:
        x = inputs(self.random.randrange(100))
        for output in [model(x) for model in self.member()]:
            if output.requires_grad:
                output.square().sum().backward()

    def clear_a_member(self) -> None:
        for model in self.member():
            model.zero_grad()

    def clear_all(self) -> None:
        self.to_all(nn.Module.zero_grad) if self.random.random() < 0.5 else self.clear_by_optimizers()

    def clear_by_optimizers(self) -> None:
        for optimizer in (self.optimizer, *self.alone):
            optimizer.zero_grad()
        self.fused(inputs())
        for model in self.models:
            model(inputs())

    def step_of_all(self) -> None:
        for optimizer in (self.optimizer, *self.alone):
            optimizer.step()

    def step_of_a_member(self) -> None:
        for optimizer in self.random.choice(self.of_members) if self.of_members else ():
            optimizer.step()

    def freeze_in_a_member(self) -> None:
        path, trained = self.path(), self.random.random() < 0.4
        for model in self.member():
            model.get_submodule(path).requires_grad_(trained)

    def freeze_in_all(self) -> None:
        path, trained = self.path(), self.random.random() < 0.7
        self.to_all(lambda module: module.get_submodule(path).requires_grad_(trained))

    def mode_of_a_member(self) -> None:
        path, mode = self.path(), self.random.random() < 0.5
        for model in self.member():
            model.get_submodule(path).train(mode)

    def mode_of_all(self) -> None:
        path, mode = self.path(), self.random.random() < 0.5
        self.to_all(lambda module: module.get_submodule(path).train(mode))

    def hook(self) -> None:
        path, kind = self.random.choice(["fc", "norm", ""]), self.random.randrange(4)
        for model in self.member():
            module = model.get_submodule(path)
            weight = model.get_parameter("norm.weight")
            if kind == 0:
                self.hooks.append(module.register_forward_hook(double))
            elif kind == 1:
                self.hooks.append(module.register_forward_pre_hook(shifted))
            elif kind == 2:
                self.hooks.append(model.get_submodule("norm").register_full_backward_hook(tripled))
            elif weight.requires_grad:
                self.hooks.append(weight.register_hook(lambda grad: grad * 2))

    def unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def set_an_attribute(self) -> None:
        value = self.random.choice([0.5, 1.0, 2.0])
        for model in self.member():
            model.scale = value  # type: ignore[assignment]

    def load_a_member(self) -> None:
        state = copy.deepcopy(self.random.choice(self.models).state_dict())
        for model in self.member():
            model.load_state_dict(state)

    def write_a_vector(self) -> None:
        view, original = self.member()
        vector = parameters_to_vector(original.parameters()).detach() + 0.01
        for model in (view, original):
            vector_to_parameters(vector.clone(), model.parameters())

    def move_the_array(self) -> None:
        vector_to_parameters(parameters_to_vector(self.fused.parameters()).detach().clone(), self.fused.parameters())

    def initialise_a_member(self) -> None:
        for model in self.member():
            torch.manual_seed(5)
            model.apply(initialise)

    def set_data(self) -> None:
        value = torch.randn(4).double()
        for model in self.member():
            model.get_parameter("norm.bias").data = value.clone()

    def look(self) -> None:
        with torch.no_grad():
            outputs(self.fused, self.models, inputs())


ACTIONS = [action for name, action in vars(Walk).items() if name not in ("member", "path", "to_all")]
ACTIONS = [action for action in ACTIONS if callable(action) and action is not Walk.__init__]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_walk(make: Make, seed: int) -> None:
    walk = Walk(seed, make)
    for _ in range(STEPS):
        action = walk.random.choice([*ACTIONS, *[Walk.backward_of_all] * 4, Walk.backward_of_a_member])
        action(walk)
        compare(walk.fused, walk.models)
