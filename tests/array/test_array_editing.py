"""After members leave, join or are overwritten, the array equals one fused from its members, without a capture."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler import compiled_program as compiling
from hfusion.core.membership import membership
from tests.alone import Member, Own, close, compare_call, normal
from tests.array.test_fuse import Adapted, base
from tests.forwards.table import branch, linear, module


class Net(nn.Module):
    """A model with running statistics, its own scalar and constant, and one tensor under two names."""

    def __init__(self, slope: float = 0.1, shift: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.slope = slope
        self.shift = torch.tensor([shift, 1.0])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.first(x)), self.slope)
        return self.last(h) + self.shift.to(h).sum()


# Decides on values, so that its members run one after another.
Branching = module(lambda self, x: branch(self.fc(x)) * self.scale, fc=linear, scale=2.0)
_BASE = nn.Linear(4, 4).double().requires_grad_(False)
OnBase = module(lambda self, x: self.head(self.base(x).relu()), base=lambda: _BASE, head=linear)


def scaled(scale: float) -> nn.Module:
    model = Branching()
    model.scale = scale
    return cast(nn.Module, model)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "alike": lambda member: Net(),
    "scalars": lambda member: Net(slope=0.1 * (member % 3)),
    "constants": lambda member: Net(shift=float(member % 2)),
    "own code": lambda member: Branching(),
    "own code, scalars": lambda member: scaled(2.0 + member % 3),
    "shared base": lambda member: OnBase(),
}

# In this order, one after the other: what is done with two more models, 4 and 5, and who the members are then.
CHANGES: dict[str, tuple[Callable[[hf.FusedModule, list[nn.Module]], object], list[int]]] = {
    "permute": (lambda fused, more: fused.keep([2, 0, -1, 1]), [2, 0, 3, 1]),
    "copy": (lambda fused, more: fused.copy([0, 1], [1, 2]), [0, 0, 1, 3]),
    "spread": (lambda fused, more: fused.copy(3, [0, 2]), [3, 1, 3, 3]),
    "put": (lambda fused, more: fused.put([3, 1], more), [0, 5, 2, 4]),
    "append": (lambda fused, more: fused.append(more), [0, 1, 2, 3, 4, 5]),
    "keep": (lambda fused, more: fused.keep([3, 0, 1]), [3, 0, 1]),
    "exchange": (lambda fused, more: fused.put([0, 1, 2], [fused[2], fused[0], fused[1]]), [2, 0, 1]),
}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The captures that are made, one entry for each."""
    calls: list[Any] = []
    original = compiling.capture_member

    def counted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(compiling, "capture_member", counted)
    return calls


def _same(fused: hf.FusedModule, alone: Sequence[nn.Module]) -> None:
    """One forward and backward of the array against those of its members alone."""
    x = normal(6, 4)
    compare_call(fused, alone, x)
    for member, model in zip(fused.unfuse(), alone, strict=True):
        close(member(x).unsqueeze(0), [copy.deepcopy(model)(x)], "unfused")


@pytest.mark.parametrize("kind", KINDS)
def test_members_after_a_change_equal_members_alone(kind: str, captures: list[Any]) -> None:
    models = [KINDS[kind](member) for member in range(4)]
    alone = [copy.deepcopy(model) for model in models]
    fused = hf.fuse(models)
    _same(fused, alone)
    params, captures_before = list(fused.parameters()), len(captures)
    assert captures_before
    for name, (change, sources) in CHANGES.items():
        more = [KINDS[kind](0), KINDS[kind](2)]
        members = [*alone, *copy.deepcopy(more)]
        change(fused, more)
        alone = [copy.deepcopy(members[source]) for source in sources]
        _same(fused, alone)
        _same(fused, alone)
        assert len(fused) == len(alone), name
    assert all(a is b for a, b in zip(params, fused.parameters(), strict=True))
    assert len(captures) == captures_before
    if kind == "shared base":
        assert fused.get_parameter("base.weight").data_ptr() == _BASE.weight.data_ptr()


def test_original_models_are_known_as_long_as_their_members_are() -> None:
    models = [Net() for _ in range(3)]
    fused = hf.fuse(models)
    fused.keep([2, 0])
    assert fused.origin(models[2].first.bias) == (0, "first.bias")
    assert fused.origin(models[1].first.bias) is None
    fused.copy(0, 1)
    assert fused.origin(models[2].first.bias) == (0, "first.bias")
    assert fused.origin(models[0].first.bias) is None
    fused.append(models[1:2])
    assert fused.origin(models[1].first.bias) == (2, "first.bias")


def test_another_base_cannot_join() -> None:
    fused, other = hf.fuse([OnBase(), OnBase()]), OnBase()
    other.base = copy.deepcopy(_BASE)
    other.base.weight.data.add_(1)
    with pytest.raises(hf.FusionError, match="is one tensor for all members"):
        fused.append([other])


# Slices of an array: some members, around the memory of their rows.


def adapted(members: int = 5) -> list[nn.Module]:
    one = base()
    return [Adapted(one, 0.1 if b % 2 else 0.3) for b in range(members)]


@pytest.mark.parametrize("rows", [slice(1, 4), slice(3, None), slice(-2, -1), slice(None)], ids=str)
def test_a_slice_trains_its_members_in_place(rows: slice) -> None:
    models = adapted()
    array, x, y = hf.fuse(models), normal(6, 4), normal(6, 3)
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    part, chosen = array[rows], range(5)[rows]
    assert type(part) is hf.FusedModule
    assert len(part) == len(chosen)
    opt = hf.optim.Adam(part.parameters(), lr=[0.1 * (b + 1) for b in chosen])
    step = hf.train_step(part, nn.functional.mse_loss, opt, compile=False)
    own = [Member(models[b], torch.optim.Adam, nn.functional.mse_loss, Own(0.1 * (b + 1))) for b in chosen]
    for _ in range(3):
        close(step(x, y), [member.call(x, y)[0] for member in own], "losses")
    for name, tensor in array.state_dict().items():
        stacked = name not in array._array.comparison.shared
        for b in range(5):
            row = tensor[b] if stacked else tensor
            alone = models[b].state_dict()[name] if b in chosen or not stacked else before[name][b]
            torch.testing.assert_close(row, alone, rtol=1e-9, atol=1e-11)
    assert array.get_parameter("adapter.weight").grad is None


def test_what_a_slice_knows() -> None:
    models = adapted()
    array = hf.fuse(models)
    array.get_submodule("norm").eval()
    part = array[2:4]
    found = membership(part.get_parameter("adapter.weight"))
    assert found is not None
    assert (found.members, found.stacked) == (2, True)
    assert part.origin(models[3].adapter.weight) == (1, "adapter.weight")
    assert part.origin(models[1].adapter.weight) is None
    assert not part.get_submodule("norm").training
    assert part[1].act.negative_slope == models[3].act.negative_slope
    assert part[0:1][0].act.negative_slope == models[2].act.negative_slope
    assert part.get_parameter("base.0.weight").data_ptr() == array.get_parameter("base.0.weight").data_ptr()
    with torch.no_grad():
        part.get_parameter("adapter.bias")[1].fill_(5)
    assert (array[3].adapter.bias == 5).all()
    for made in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert torch.equal(made.eval()(torch.ones(2, 4).double()), array[2:4].eval()(torch.ones(2, 4).double()))


@pytest.mark.parametrize("frozen", [False, True])
def test_outputs_of_before_do_not_hinder_the_next_backward(frozen: bool) -> None:
    alone = [Branching() for _ in range(4)]
    fused, x = hf.fuse(alone), torch.randn(3, 4, dtype=torch.float64)
    held = fused(x)
    held.square().sum().backward()
    fused.fc.weight.requires_grad_(not frozen)
    fused.keep([0, 2, 3])
    fused.fc.weight.requires_grad_()
    fused.zero_grad()
    fused(x).square().sum().backward()
    for row, model in enumerate([alone[0], alone[2], alone[3]]):
        model(x).square().sum().backward()
        assert torch.allclose(fused.fc.weight.grad[row], model.fc.weight.grad)
