"""A function of one model runs for all members as in a loop over them: parameters, gradients, arguments, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

DOUBLE = torch.float64
Tensors = dict[str, Tensor]


def unit_norm(params: Tensors, grads: Tensors) -> None:
    weight = params["2.weight"]
    weight.div_(weight.norm(dim=0, keepdim=True))


def project(params: Tensors, grads: Tensors) -> None:
    if "2.weight" in grads:
        unit = F.normalize(params["2.weight"], dim=0)
        grads["2.weight"].sub_((grads["2.weight"] * unit).sum(0, keepdim=True) * unit)


def replaced(params: Tensors, grads: Tensors) -> None:
    params["0.bias"] = params["0.bias"].clamp(min=0) + 1
    for name in grads:
        grads[name] = grads[name] / (1 + grads[name].norm())


def returned(params: Tensors, grads: Tensors) -> Tensors:
    """Each takes the other's place; the values are read before one is written."""
    return {"0.weight": params["2.weight"].T, "2.weight": params["0.weight"].T}


def views(params: Tensors, grads: Tensors) -> None:
    params["0.weight"][1:, 0] = 2
    params["2.weight"].T[torch.tensor([0, 2])] += 1


def branches(params: Tensors, grads: Tensors) -> None:
    if params["0.bias"].sum() > 0:
        params["0.bias"].neg_()


def data(params: Tensors, grads: Tensors) -> None:
    params["0.bias"].data = params["0.bias"] * 3
    params["2.bias"].data.add_(1)


FUNCTIONS = [unit_norm, project, replaced, returned, views, branches, data]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()


def array(count: int = 5, backward: bool = True) -> tuple[hf.FusedModule, list[nn.Module]]:
    fused = hf.fuse([model(seed) for seed in range(count)])
    models = [copy.deepcopy(member) for member in fused.unfuse()]
    if backward:
        x = torch.randn(7, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(9))
        fused(x).square().mean((1, 2)).sum().backward()
        for member in models:
            member(x).square().mean().backward()
    return fused, models


def equal(fused: hf.FusedModule, models: list[nn.Module], rtol: float = 1e-12) -> None:
    for name, stack in fused.named_parameters():
        for row, member in enumerate(models):
            parameter = member.get_parameter(name)
            torch.testing.assert_close(stack[row], parameter, rtol=rtol, atol=1e-13, msg=name)
            if parameter.grad is not None:
                assert stack.grad is not None
                torch.testing.assert_close(stack.grad[row], parameter.grad, rtol=rtol, atol=1e-13)


def loop(fn: Callable[..., Any], members: list[nn.Module]) -> None:
    """By hand, as without hfusion."""
    for member in members:
        named = dict(member.named_parameters())
        params = {name: p.detach() for name, p in named.items()}
        grads = {name: p.grad for name, p in named.items() if p.grad is not None}
        with torch.no_grad():
            answer = fn(params, grads)
            for name, value in {**params, **(answer or {})}.items():
                named[name].copy_(value)
        for name, grad in grads.items():
            named[name].grad = grad


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("fn", [fn for fn in FUNCTIONS if fn is not returned])
def test_equals_the_loop(fn: Callable[..., Any], backward: bool) -> None:
    fused, models = array(backward=backward)
    run = hf.each(fn)
    for _ in range(3):
        run(fused)
        loop(fn, models)
        equal(fused, models)
    assert bool(run.report().loops) == (fn in (branches, data))


@pytest.mark.parametrize("fn", [unit_norm, replaced, branches])
@pytest.mark.parametrize("rows", [[1], [1, 2, 3], [3, 0], -1])
def test_other_rows_stay_to_the_bit(fn: Callable[..., Any], rows: Any) -> None:
    fused, models = array()
    before = [stack.detach().clone() for stack in fused.parameters()]
    hf.each(fn)(fused, rows=rows)
    chosen = [row % 5 for row in (rows if isinstance(rows, list) else [rows])]
    loop(fn, [models[row] for row in chosen])
    equal(fused, models)
    rest = [row for row in range(5) if row not in chosen]
    for stack, old in zip(fused.parameters(), before, strict=True):
        assert torch.equal(stack[rest], old[rest])


def test_members_have_the_gradients_that_they_have_alone() -> None:
    """One that was cleared is not there, and what was assigned to a member is."""
    fused, models = array()
    fused[1].get_parameter("2.weight").grad = None
    fused[3].get_parameter("0.bias").grad = torch.ones(6, dtype=DOUBLE)
    fused[4].requires_grad_(False)
    models[1].get_parameter("2.weight").grad = None
    models[3].get_parameter("0.bias").grad = torch.ones(6, dtype=DOUBLE)

    def count(params: Tensors, grads: Tensors) -> Tensors:
        return {"0.bias": params["0.bias"] + len(grads)}

    hf.each(count)(fused)
    loop(count, models[:4])
    equal(fused, models)
    hf.each(replaced)(fused)
    loop(replaced, models[:4])
    equal(fused, models)
    assert torch.equal(fused[4].get_parameter("0.bias"), models[4].get_parameter("0.bias"))
    hf.each(count)(fused, rows=range(5))
    loop(count, models[:4])
    # Frozen after its backward, it has its four gradients.
    with torch.no_grad():
        assert torch.equal(fused[4].get_parameter("0.bias"), models[4].get_parameter("0.bias") + 4)
    assert fused[1].get_parameter("2.weight").grad is None


def test_members_that_do_not_step_are_left_alone() -> None:
    fused, _ = array(3)
    opt = hf.optim.SGD(fused.parameters(), lr=0.1)
    opt.register_step_post_hook(hf.each(unit_norm).step_hook(fused))
    before = [stack.detach().clone() for stack in fused.parameters()]
    with opt.holding(torch.tensor([False, True, False])):
        opt.step()
    for stack, old in zip(fused.parameters(), before, strict=True):
        assert torch.equal(stack[1], old[1])
        assert not torch.equal(stack[0], old[0])


def test_a_copied_population_has_hooks_of_its_own() -> None:
    def one(params: Tensors, grads: Tensors) -> None:
        params["weight"].fill_(1)

    models = [nn.Linear(4, 3) for _ in range(2)]
    pop = hf.Population(models, optimizer=hf.optim.SGD, loss=F.mse_loss, compile=False)
    pop.optimizer.register_step_post_hook(hf.each(one).step_hook(pop))
    copied = copy.deepcopy(pop)
    copied.step(torch.zeros(2, 4), torch.zeros(2, 3))
    assert [bool((each.fused.get_parameter("weight") == 1).all()) for each in (pop, copied)] == [False, True]


def test_buffers() -> None:
    fused = hf.fuse([nn.BatchNorm1d(3).double() for _ in range(3)])

    def reset(params: Tensors, grads: Tensors) -> None:
        params["running_mean"].add_(2)
        params["num_batches_tracked"].add_(7)

    hf.each(reset, buffers=True)(fused)
    assert bool((fused.running_mean == 2).all())
    assert fused.num_batches_tracked.tolist() == [7, 7, 7]
    with pytest.raises(KeyError, match="running_mean"):
        hf.each(reset)(fused)


CALLS = [0]
TOTAL = torch.zeros(())


def _global_list(params: Tensors, grads: Tensors) -> None:
    CALLS[0] += 1


def _global_tensor(params: Tensors, grads: Tensors) -> None:
    TOTAL.add_(1)


WRONG: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (lambda params, grads: 3, ValueError, "returned int"),
    (lambda params, grads: {"0.weigth": params["0.weight"]}, ValueError, "0.weigth"),
    (lambda params, grads: {"0.bias": 1.0}, ValueError, "got float"),
    (lambda params, grads: {"0.bias": params["0.bias"].float()}, ValueError, "float32"),
    (lambda params, grads: {"0.bias": params["0.bias"].sum()}, ValueError, r"tensor \[\]"),
    (lambda params, grads: params.pop("0.bias") and None, RuntimeError, "Boolean"),
    (lambda params, grads: params.clear(), ValueError, "removed"),
    (lambda params, grads: grads.update(extra=params["0.bias"]), ValueError, "extra"),
    (lambda params, grads: setattr(params["0.bias"], "grad", params["0.bias"] * 2), ValueError, "grads"),
    (_global_list, hf.FusionError, "further argument"),
    (_global_tensor, hf.FusionError, "further argument"),
]


@pytest.mark.parametrize(("fn", "kind", "message"), WRONG)
def test_refuses(fn: Callable[..., Any], kind: type[Exception], message: str) -> None:
    fused, models = array(3)
    with pytest.raises(kind, match=message):
        hf.each(fn)(fused)
    equal(fused, models, rtol=0)
