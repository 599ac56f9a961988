"""Every refusal says what, where, the values and the remedy."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hfusion as hf
from tests.alone import net, normal


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def changed(change: Callable[[nn.Sequential], Any]) -> list[nn.Module]:
    models = [mlp(), mlp()]
    change(models[1])
    return [*models]


def hook(*args: Any) -> None:
    return None


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]


def partly_shared() -> list[nn.Module]:
    models = [mlp() for _ in range(3)]
    models[1][0] = models[0][0]
    return [*models]


def free_tensor() -> nn.Module:
    module = mlp()
    module.scale = torch.ones(4, requires_grad=True)
    return module


def old_norm(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        # It is deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        return wrap(nn.Linear(3, 3))


ONE = mlp()
UNFUSABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "empty": (list, "empty list; give it at least one model"),
    "one module": (mlp, "takes a list of modules, not Sequential"),
    "generator": (lambda: (mlp() for _ in range(2)), "takes a list of modules, not generator"),
    "not a module": (lambda: [mlp(), 3], "model 1 is int"),
    "same object": (lambda: [ONE, mlp(), ONE], r"models 0 and 2 are one object.*deepcopy"),
    "shapes": (
        lambda: [nn.Linear(4, 4), nn.Linear(4, 5)],
        r"weight has shape \(4, 4\) in model 0 and \(5, 4\) in model 1",
    ),
    "classes": (
        lambda: [nn.Sequential(nn.Linear(4, 2), nn.ReLU()), nn.Sequential(nn.Linear(4, 3), nn.Tanh())],
        "module 1 is ReLU in model 0 and Tanh in model 1",
    ),
    "structures": (lambda: [mlp(), nn.Sequential(nn.Linear(4, 2))], "model 1 has no module 1"),
    "biases": (
        lambda: [nn.Linear(4, 4), nn.Linear(4, 3, bias=False)],
        "model 0 has a tensor bias that model 1 lacks",
    ),
    "dtypes": (
        lambda: changed(lambda m: m.double()),
        "0.weight has dtype torch.float32 in model 0 and torch.float64",
    ),
    "devices": (lambda: changed(lambda m: m.to("meta")), "model 1: 0.weight is on the meta device"),
    "training": (
        lambda: changed(lambda m: m.eval()),
        r"\(root\) is in train mode in model 0 and in eval mode in model 1",
    ),
    "training of one": (lambda: changed(lambda m: m[1].eval()), "module 1 is in train mode in model 0"),
    "requires_grad": (
        lambda: changed(lambda m: m[0].bias.requires_grad_(False)),
        "0.bias has requires_grad True in",
    ),
    "ties": (lambda: changed(lambda m: setattr(m, "twin", m[0])), "model 1 has a module twin"),
    "partly shared": (partly_shared, "0.bias is one object in some models but not in all"),
    "lazy": (lambda: [nn.LazyLinear(3)], "weight of a lazy module is not initialized; call each model once"),
    "listed module": (lambda: [Listing()], r"layers.0 holds a module, Linear, that is not registered.*nn.ModuleList"),
    "free tensor": (
        lambda: [free_tensor()],
        "attribute scale is a tensor that requires grad but no parameter",
    ),
    "parallel": (lambda: [nn.DataParallel(mlp())], "got DataParallel. Fuse the module inside"),
    "forward hook": (
        lambda: changed(lambda m: m[1].register_forward_hook(hook)),
        r"model 1, module 1 \(ReLU\) has a hook",
    ),
    "pre-hook": (
        lambda: changed(lambda m: m.register_forward_pre_hook(hook)),
        r"\(root\).* has a hook in _forward_pre",
    ),
    "backward hook": (
        lambda: changed(lambda m: m[0].register_full_backward_hook(hook)),
        "hook in _backward_hooks",
    ),
    "backward pre-hook": (
        lambda: changed(lambda m: m[0].register_full_backward_pre_hook(hook)),
        "hook in _backward_pre_hooks",
    ),
    "hooks in the wrong order": (
        lambda: [prune.l1_unstructured(old_norm(torch.nn.utils.weight_norm), "weight_v", 1)],
        r"\(root\) \(Linear\): a hook reads weight_v before the next one computes it",
    ),
    "tensor hook": (lambda: changed(lambda m: m[0].weight.register_hook(hook)), "0.weight has a tensor hook"),
    "accumulation hook": (
        lambda: changed(lambda m: m[0].weight.register_post_accumulate_grad_hook(hook)),
        "0.weight has a tensor hook",
    ),
}


@pytest.mark.parametrize("name", UNFUSABLE)
def test_models_that_cannot_be_fused(name: str) -> None:
    make, message = UNFUSABLE[name]
    with pytest.raises(hf.FusionError, match=message):
        hf.fuse(make())


BUILDS: dict[str, tuple[Callable[[], Any], list[int], str]] = {
    "no seeds": (mlp, [], "no seeds"),
    "not a module": (lambda: 3, [0], "gave int"),
    "same object": (lambda: ONE, [0, 1], "one object for seeds 0 and 1"),
    "shapes": (
        lambda sizes=itertools.count(2): nn.Linear(4, next(sizes)),  # noqa: B008
        [0, 1],
        r"weight has shape \(2, 4\)",
    ),
}


@pytest.mark.parametrize("name", BUILDS)
def test_builds_that_fail(name: str) -> None:
    make, seeds, message = BUILDS[name]
    with pytest.raises(hf.FusionError, match=message):
        hf.build(make, seeds)


CALLS: dict[str, tuple[Callable[[hf.FusedModule], Any], str]] = {
    "no input": (
        lambda f: f(),
        r"Sequential.forward\(input.*forward\(\): missing a required argument: 'input'",
    ),
    "two inputs": (lambda f: f(1, 2), r"forward\(\.\.\., \.\.\.\): too many positional"),
    "keyword": (lambda f: f(z=normal(4, 4)), r"forward\(z=\.\.\.\): missing a required argument"),
    "leading size": (lambda f: f(hf.stacked(normal(3, 4, 4))), "leading size 3 .* array has 2 members"),
    "object": (lambda f: f(object()), "arguments must be tensors.* got object"),
    "nothing to stack": (lambda f: f(hf.stacked(3)), "hf.stacked got int"),
    "empty stack": (lambda f: f(hf.stacked([])), "hf.stacked got an empty list"),
    "ragged stack": (lambda f: f(hf.stacked([normal(2, 2), normal(2)])), "numbers of dims"),
    "numbers in a stack": (
        lambda f: f(hf.stacked([{"a": 1}, {"a": 2}])),
        "only tensors may differ between members",
    ),
    "structures in a stack": (lambda f: f(hf.stacked([{"a": normal(2)}, normal(2)])), "different structures"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_fail(name: str) -> None:
    use, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        use(hf.fuse([mlp(), mlp()]))


def test_members_that_do_different_things() -> None:
    make = net(lambda self, x: self.fc(x) * self.state if self.state else self.fc(x))
    models = [make(), make()]
    models[0].state, models[1].state = 0.0, 2.0
    with pytest.raises(hf.FusionError, match=r"different numbers of nodes \(model 0: \d, model 1: \d\)"):
        hf.fuse(models)(normal(2, 4))
    models[0].state, models[1].state = torch.ones(4), torch.ones(1)
    make.forward = lambda self, x: self.fc(x) * self.state
    with pytest.raises(hf.FusionError, match=r"\(4,\) torch.float32 on cpu in model 0, \(1,\)"):
        hf.fuse(models)(normal(2, 4))


@pytest.mark.parametrize("first", [False, True], ids=["own input", "shared input"])
def test_shared_statistics_are_refused_in_training(first: bool) -> None:
    norm = nn.BatchNorm1d(4)
    models = [nn.Sequential(*([norm, nn.Linear(4, 4)][:: 1 if first else -1])) for _ in range(3)]
    with pytest.raises(hf.FusionError, match="give each model its own"):
        hf.fuse(models)(torch.randn(5, 4))
    norm.eval()
    assert hf.fuse(models)(torch.randn(5, 4)).shape == (3, 5, 4)


def test_data_dependent_sizes_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.fc(x).relu().nonzero()

    make = net(forward)
    with pytest.raises(hf.FusionError, match=r"shapes that depend on values .* use a form of fixed size"):
        hf.fuse([make(), make()])(normal(4, 4))
