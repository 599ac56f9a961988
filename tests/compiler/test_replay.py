"""Every random operator of torch: members draw for themselves, and the self-check replays them or says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from tests.alone import net, normal

Forward = Callable[[Any, Tensor], Tensor]


def filled(name: str, *args: Any) -> Forward:
    return lambda self, h: h * getattr(torch.empty_like(h), name)(*args)


def images(function: Callable[..., Tensor], dims: int, inplace: bool) -> Forward:
    return lambda self, h: function((h * 2).view(-1, 2, *(1,) * (dims - 1), 2), 0.4, True, inplace)


def written_slice(self: Any, h: Tensor) -> Tensor:
    noise = h * 2
    noise[:, 1:3].uniform_(1, 2)
    return noise


def stages(self: Any, h: Tensor) -> Tensor:
    h = checkpoint(lambda z: F.dropout(self.fc(F.dropout(z, 0.3)).tanh(), 0.2), F.dropout(h, 0.2), use_reentrant=False)
    return h * torch.rand_like(h)


CHECKED: dict[str, Forward] = {
    "rrelu": lambda self, h: F.rrelu(h, training=True),
    "rrelu_": lambda self, h: F.rrelu(h, training=True, inplace=True),
    "rrelu_ of a value used later": lambda self, h: F.rrelu(h.clone(), training=True, inplace=True) + h,
    "dropout": lambda self, h: F.dropout(h, 0.4),
    "dropout_": lambda self, h: F.dropout(h, 0.4, True, True),
    "dropout_ of a value used before": lambda self, h: h.exp() + F.dropout(h * 2, 0.4, True, True),
    "alpha_dropout": lambda self, h: F.alpha_dropout(h, 0.4, True),
    "alpha_dropout_": lambda self, h: F.alpha_dropout(h, 0.4, True, True),
    "feature_alpha_dropout": lambda self, h: F.feature_alpha_dropout(h.view(-1, 2, 2), 0.4, True),
    "feature_alpha_dropout_": lambda self, h: F.feature_alpha_dropout(h.view(-1, 2, 2), 0.4, True, True),
    **{
        f"dropout{dims}d{'_' * inplace}": images(function, dims, inplace)
        for dims, function in ((1, F.dropout1d), (2, F.dropout2d), (3, F.dropout3d))
        for inplace in (False, True)
    },
    "native_dropout": lambda self, h: torch.native_dropout(h, 0.4, True)[0],
    "bernoulli": lambda self, h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli_ of numbers": filled("bernoulli_", 0.3),
    "bernoulli_ of a tensor": lambda self, h: h * torch.empty_like(h).bernoulli_(h.sigmoid().detach()),
    "uniform_": filled("uniform_", 0.0, 2.0),
    "uniform_ of a slice": written_slice,
    "normal_": filled("normal_", 1.0, 2.0),
    "exponential_": filled("exponential_", 2.0),
    "geometric_": filled("geometric_", 0.3),
    "cauchy_": filled("cauchy_"),
    "log_normal_": filled("log_normal_"),
    "random_": filled("random_", 5),
    "multinomial": lambda self, h: h.gather(1, torch.multinomial(h.softmax(-1), 2)),
    "randperm": lambda self, h: h[:, torch.randperm(4)],
    "rand_like": lambda self, h: h * torch.rand_like(h),
    "randn_like": lambda self, h: h * torch.randn_like(h),
    "randint_like": lambda self, h: h * torch.randint_like(h, 1, 50),
    "rand": lambda self, h: h * torch.rand(h.shape[0], 4, dtype=h.dtype),
    "randn": lambda self, h: h * torch.randn(4, dtype=h.dtype),
    "randint": lambda self, h: h * torch.randint(1, 50, (4,)),
    "normal of tensors": lambda self, h: h * torch.normal(h, h.detach().abs()),
    "normal of a mean": lambda self, h: h * torch.normal(h, 1.5),
    "normal of a deviation": lambda self, h: h * torch.normal(1.0, h.detach().abs()),
    "normal of numbers": lambda self, h: h * torch.normal(1.0, 2.0, (4,)),
    "poisson": lambda self, h: h * torch.poisson(h.exp() * 9),
    "binomial": lambda self, h: h * torch.binomial(torch.full_like(h, 90), h.detach().sigmoid()),
    "fractional_max_pool2d": lambda self, h: F.fractional_max_pool2d(
        (h[:, None, :, None] * torch.arange(60)).repeat(1, 1, 15, 1), 2, output_size=(9, 9)
    ),
    "gumbel_softmax": lambda self, h: F.gumbel_softmax(h),
    "attention": lambda self, h: F.scaled_dot_product_attention(*[h.view(-1, 2, 2)] * 3, dropout_p=0.3),
    "a checkpoint": lambda self, h: checkpoint(lambda z: self.fc(F.dropout(z)).tanh(), h, use_reentrant=False),
    "a checkpoint between draws": stages,
    "rand with out": lambda self, h: h * torch.rand(4, out=torch.empty(4, dtype=h.dtype)),
}


def drawing(forwards: dict[str, Forward]) -> tuple[hf.FusedModule, dict[str, Tensor]]:
    """An array of three equal members, and what it gives for a tensor that stays as it is."""
    model = net(lambda self, x: {name: forward(self, self.fc(x)) for name, forward in forwards.items()})()
    array, x = hf.fuse([copy.deepcopy(model) for _ in range(3)]), normal(16, 4)
    before = x.clone()
    outputs = array(x)
    assert torch.equal(x, before)
    sum(y.sum() for y in outputs.values()).backward()
    return array, outputs


def test_members_draw_for_themselves_and_are_checked() -> None:
    array, outputs = drawing(CHECKED)
    assert "self-check passed" in str(array.report())
    for name, y in outputs.items():
        assert not torch.equal(y[0], y[1]), name
        assert not torch.equal(y[0], y[2]), name


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("make", [nn.RReLU, lambda inplace: nn.Dropout(0.5, inplace)])
def test_the_callers_batch_is_not_written(make: Callable[..., nn.Module], inplace: bool) -> None:
    array = hf.fuse([nn.Sequential(make(inplace=inplace), nn.Linear(4, 4).double()) for _ in range(2)])
    x = normal(8, 4)
    before = x.clone()
    if inplace:
        with pytest.raises(hf.FusionError, match="writes into"):
            array(x)
    else:
        array(x)
    assert torch.equal(x, before)


def seeded(self: Any, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h * torch.rand_like(h)


def forked(self: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        h = h * torch.rand_like(h)
    return F.dropout(h)


@pytest.mark.parametrize("forward", [seeded, forked])
def test_a_forward_that_seeds_runs_member_by_member(forward: Forward) -> None:
    array, outputs = drawing({"output": forward})
    assert "forward does what a graph would lose" in str(array.report())
    if forward is seeded:
        assert torch.equal(outputs["output"][0], outputs["output"][1])
