"""Arrays and losses inside the transforms of torch.func, called there for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as pytree

import hfusion as hf
from tests.alone import Branch

Parameters: TypeAlias = dict[str, Tensor]
Forward: TypeAlias = Callable[[Parameters, Tensor], Tensor]

MEMBERS = 2

# Of torch's own forward-mode derivatives, `linearize`, and attention in `vmap`.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


class Gated(nn.Module):
    """Divides by what it computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        with torch.no_grad():
            size = hidden.square().mean(-1, keepdim=True)
        return self.outer((hidden / (1 + size)).tanh())


class Column(nn.Linear):
    """Counts its calls, and writes into a column, which torch.vmap refuses if the tensor is a stack."""

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "calls"):
            self.calls += 1
        y = super().forward(x).clone()
        y[:, 0] = 1
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(-1, (2, 4)), nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 2)
    ),
    "without gradients": Gated,
    "refused": lambda: nn.Sequential(nn.Unflatten(-1, (1, 2, 4)), nn.Conv2d(1, 3, 2), nn.Flatten(), Column(9, 2)),
    "looped": lambda: nn.Sequential(nn.Linear(8, 4), Branch(4, 4), nn.Linear(4, 2)),
}


def total(forward: Forward) -> Callable[[Parameters, Tensor], Tensor]:
    return lambda parameters, x: forward(parameters, x).sin().sum()


def dual(forward: Forward, parameters: Parameters, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward(parameters, forward_ad.make_dual(x, x.cos())))[:2]


def squares(gradients: Parameters) -> Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()


TRANSFORMS: dict[str, Callable[[Forward, Parameters, Tensor], Any]] = {
    "grad": lambda f, p, x: grad(total(f))(p, x),
    "grad of grad": lambda f, p, x: grad(lambda p: squares(grad(total(f))(p, x)))(p),
    "vjp": lambda f, p, x: vjp(f, p, x)[1](torch.ones_like(f(p, x)))[0],
    "jvp": lambda f, p, x: jvp(lambda x: f(p, x), (x,), (x.cos(),)),
    "jvp of parameters": lambda f, p, x: jvp(lambda p: f(p, x), (p,), ({k: v.cos() for k, v in p.items()},)),
    "jvp of grad": lambda f, p, x: jvp(lambda x: grad(total(f))(p, x), (x,), (x.cos(),)),
    "vmap of grad": lambda f, p, x: pytree.tree_map(
        lambda g: g.movedim(0, -1), vmap(lambda row: grad(total(f))(p, row[None]))(x)
    ),
    "vmap of parameters": lambda f, p, x: vmap(lambda p: f(p, x), out_dims=-1)(
        {k: torch.stack([v, v.cos()]) for k, v in p.items()}
    ),
    "jacrev": lambda f, p, x: jacrev(lambda x: f(p, x).sum(-2))(x),
    "jacfwd": lambda f, p, x: jacfwd(lambda x: f(p, x).sum(-2))(x),
    "linearize": lambda f, p, x: linearize(lambda x: f(p, x), x)[1](x.cos()),
    "dual level": dual,
}


# By value (`.item()`) nothing can be batched or traced; torch has no batched LSTM.
IMPOSSIBLE = {*(("looped", name) for name in ("vmap of grad", "vmap of parameters", "linearize"))}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_first_call_inside_a_transform_is_that_of_the_members(model: str, transform: str) -> None:
    torch.manual_seed(0)
    members = [MODELS[model]().double().train(model != "convolution") for _ in range(MEMBERS)]
    array, x = hf.fuse(members), torch.randn(3, 8, dtype=torch.float64)

    def results(module: nn.Module) -> list[Tensor]:
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
        result = TRANSFORMS[transform](lambda p, x: functional_call(module, p, (x,)), parameters, x)
        return pytree.tree_leaves(result)

    if (model, transform) in IMPOSSIBLE:
        for module in (members[0], array):
            with pytest.raises(RuntimeError):
                results(module)
        return
    expected = zip(*map(results, members), strict=True)
    for actual, rows in zip(results(array), expected, strict=True):
        torch.testing.assert_close(actual, torch.stack(rows), rtol=1e-9, atol=1e-12)


def normed(y: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        size = y.square().mean()
    return F.mse_loss(y / size, target)


def in_columns(y: Tensor, target: Tensor) -> Tensor:
    y = y.clone()
    y[:, 0] = 1
    return F.mse_loss(y, target)


@pytest.mark.parametrize("loss", [F.mse_loss, normed, in_columns])
def test_a_loss_inside_a_transform(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    members = [MODELS["dense"]().double() for _ in range(MEMBERS)]
    array, x = hf.fuse(members), torch.randn(3, 8, dtype=torch.float64)
    target = torch.randn(3, 2, dtype=torch.float64)
    fused_loss = hf.per_model(loss)
    transforms: list[Any] = [
        lambda f: jvp(f, (x,), (x.cos(),)),
        lambda f: [vmap(f, out_dims=-1)(torch.stack([x, x.cos()]))],
    ]
    for transform in transforms:
        outputs = transform(lambda x: fused_loss(array(x), target))
        rows = [transform(lambda x, m=member: loss(m(x), target)) for member in members]
        for actual, expected in zip(outputs, zip(*rows, strict=True), strict=True):
            torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-9, atol=1e-12)
    assert ("inside torch.func" in str(fused_loss.report())) == (loss is in_columns)


def test_what_a_program_wrote_before_torch_refused_it_is_undone() -> None:
    for member in (counting := [Column(8, 2) for _ in range(MEMBERS)]):
        member.register_buffer("calls", torch.zeros(()))
    array = hf.fuse(counting)
    vmap(array)(torch.randn(2, 3, 8))
    assert array.calls.tolist() == [1, 1]
    assert "inside torch.func" in str(array.report())
