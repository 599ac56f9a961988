"""Members that differ in submodules leave, join and are written over: they and their optimizers go on as alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf

X = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    """A common body; the activation, norm, hidden width and number of blocks differ between models."""

    def __init__(self, act: nn.Module, norm: bool = False, hidden: int = 4, blocks: int = 0) -> None:
        super().__init__()
        self.act = act
        self.stem = nn.Linear(5, 16)
        self.body = nn.Linear(16, 8)
        if norm:
            self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(blocks))
        self.hidden, self.back = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.tail, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.act(self.stem(x)))
        h = h + self.back(self.hidden(h).relu())
        h = self.norm(h) if hasattr(self, "norm") else h
        for block in self.blocks:
            h = h + block(h).relu()
        out: Tensor = self.head(self.tail(h).relu())
        return out


KINDS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Net(nn.ReLU()),
    "prelu": lambda: Net(nn.PReLU()),
    "prelus": lambda: Net(nn.PReLU(16, 0.1)),
    "norm": lambda: Net(nn.Tanh(), norm=True),
    "wide": lambda: Net(nn.ReLU(), hidden=7),
    "block": lambda: Net(nn.ReLU(), blocks=1),
    "blocks": lambda: Net(nn.ELU(0.5), norm=True, blocks=2),
}

OPTIMIZERS: dict[str, tuple[type[hf.optim.FusedOptimizer], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (hf.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    # Biases before a BatchNorm have gradients of rounding alone, which a smaller eps would make steps of.
    "AdamW": (hf.optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-3}),
}


class Members:
    """An array and its members alone, each with a separate optimizer and learning rate."""

    def __init__(self, kinds: Sequence[str], optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.fused_class, self.plain_class, self.options = OPTIMIZERS[optimizer]
        self.alone = [KINDS[kind]() for kind in kinds]
        self.fused = hf.fuse(self.alone, verify=False)
        self.rates = [0.01 * (1 + row) for row in range(len(kinds))]
        self.opt = self.fused_class(self.fused.parameters(), lr=self.rates, **self.options)
        self.plain = [self._optimizer(model, rate) for model, rate in zip(self.alone, self.rates, strict=True)]

    def _optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return self.plain_class(model.parameters(), lr=rate, **self.options)

    def step(self) -> None:
        self.opt.zero_grad()
        losses = hf.per_model(F.cross_entropy)(self.fused(X), Y)
        losses.sum().backward()
        self.opt.step()
        for row, (model, optimizer) in enumerate(zip(self.alone, self.plain, strict=True)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(losses[row].detach(), loss.detach(), rtol=1e-9, atol=1e-12)

    def keep(self, rows: Sequence[int]) -> None:
        self.fused.keep(rows)
        self.opt.keep(rows)
        self.alone = [self.alone[row] for row in rows]
        self.plain = [self.plain[row] for row in rows]

    def append(self, kinds: Sequence[str], rate: float = 0.02) -> None:
        models = [KINDS[kind]() for kind in kinds]
        self.fused.append(models)
        self.opt.append(len(models), lr=rate)
        self.alone += models
        self.plain += [self._optimizer(model, rate) for model in models]

    def put(self, row: int, kind: str, rate: float = 0.03) -> None:
        model = KINDS[kind]()
        self.fused.put(row, model)
        self.opt.restart(row, lr=rate)
        self.alone[row], self.plain[row] = model, self._optimizer(model, rate)

    def copy(self, src: int, dst: int) -> None:
        self.fused.copy(src, dst)
        self.opt.copy(src, dst)
        model = copy.deepcopy(self.alone[src])
        optimizer = self._optimizer(model, 1.0)
        optimizer.load_state_dict(copy.deepcopy(self.plain[src].state_dict()))
        self.alone[dst], self.plain[dst] = model, optimizer

    def compare(self) -> None:
        """State dicts and optimizers are those of the members alone."""
        expected = hf.fuse(self.alone, verify=False).state_dict()
        state = self.fused.state_dict()
        assert list(state) == list(expected)
        assert state._metadata == expected._metadata
        for name, stack in expected.items():
            torch.testing.assert_close(state[name], stack, rtol=1e-9, atol=1e-12)
        assert {id(p) for p in self.fused.parameters()} == {id(p) for p in self.opt.param_groups[0]["params"]}
        for member_state, plain in zip(self.opt.unfuse(), self.plain, strict=True):
            expected_state = plain.state_dict()["state"]
            assert member_state["state"].keys() == expected_state.keys()
            for key, entry in expected_state.items():
                for name, value in entry.items():
                    if isinstance(value, Tensor):
                        torch.testing.assert_close(member_state["state"][key][name], value, rtol=1e-9, atol=1e-12)
        for row, model in zip(self.fused, self.alone, strict=True):
            assert [name for name, _ in row.named_modules()] == [name for name, _ in model.named_modules()]


CHANGES: dict[str, Callable[[Members], object]] = {
    "a variant leaves": lambda members: members.keep([0, 3, 2]),
    "one structure is left": lambda members: members.keep([1, 4]),
    "one member is left": lambda members: members.keep([3]),
    "members change places": lambda members: members.keep([4, 2, 0, 1, 3]),
    "the widest leaves": lambda members: members.keep([0, 1, 2]),
    "a variant joins": lambda members: members.append(["block"]),
    "variants join": lambda members: members.append(["prelus", "blocks", "relu"]),
    "a member of a variant joins": lambda members: members.append(["wide"]),
    "over the last of a variant": lambda members: members.put(3, "block"),
    "by another variant": lambda members: members.put(0, "norm"),
    "by a larger one": lambda members: members.put(1, "blocks"),
    "a variant is copied over another": lambda members: members.copy(2, 0),
    "over the last of a variant, by copy": lambda members: members.copy(0, 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_members_train_on_as_alone(name: str) -> None:
    check_change(name, "SGD")


@pytest.mark.parametrize("name", ["variants join", "the widest leaves", "by a larger one"])
def test_adam_follows(name: str) -> None:
    check_change(name, "AdamW")


def check_change(name: str, optimizer: str) -> None:
    members = Members(["relu", "prelu", "norm", "wide", "prelu"], optimizer)
    for _ in range(2):
        members.step()
    CHANGES[name](members)
    members.compare()
    for _ in range(2):
        members.step()
    members.compare()


def test_an_array_of_one_structure_gets_variants_and_loses_them() -> None:
    members = Members(["relu", "relu"])
    members.step()
    members.append(["blocks"])
    members.step()
    members.compare()
    members.keep([1, 0])
    members.step()
    members.compare()
    members.append(["blocks", "prelu"])
    members.step()
    members.compare()


walks = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.randoms(use_true_random=False)),
        st.tuples(st.just("append"), st.sampled_from(list(KINDS))),
        st.tuples(st.just("put"), st.integers(0, 9), st.sampled_from(list(KINDS))),
        st.tuples(st.just("copy"), st.integers(0, 9), st.integers(0, 9)),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=3), walks)
def test_walk(kinds: list[str], walk: list[Any]) -> None:
    members = Members(kinds)
    members.step()
    for action, *arguments in walk:
        count = len(members.alone)
        match action:
            case "keep":
                order = arguments[0].sample(range(count), arguments[0].randint(1, count))
                members.keep(order)
            case "append":
                members.append(arguments)
            case "put":
                members.put(arguments[0] % count, arguments[1])
            case "copy":
                members.copy(arguments[0] % count, arguments[1] % count)
        members.compare()
        members.step()
    members.compare()


class Largest(nn.Module):
    """Reads a number in Python out of a buffer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(count))

    def forward(self, x: Tensor) -> Tensor:
        return x - x.topk(int(self.count), -1).values.mean(-1, keepdim=True)


def test_a_buffer_that_forward_reads_goes_with_its_members() -> None:
    models = [nn.Sequential(nn.Linear(5, 8), Largest(count), nn.Linear(8, 3)).double() for count in (2, 3)]
    fused = hf.fuse(models)
    other = nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.Linear(8, 3)).double()
    for row, model in enumerate(models):
        torch.testing.assert_close(fused(X)[row], model(X), rtol=1e-9, atol=1e-12)
    fused.put([0, 1], [other, copy.deepcopy(other)])
    torch.testing.assert_close(fused(X), torch.stack([other(X)] * 2), rtol=1e-9, atol=1e-12)


def test_a_compiled_step_follows() -> None:
    members = Members(["relu", "prelu", "wide"], "SGD")
    step = hf.train_step(members.fused, F.cross_entropy, members.opt, compile=True)

    def steps() -> None:
        for _ in range(3):
            losses = step(X, Y)
            for row, (model, optimizer) in enumerate(zip(members.alone, members.plain, strict=True)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(X), Y)
                loss.backward()
                optimizer.step()
                torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-9, atol=1e-12)
        members.compare()

    steps()
    members.keep([0, 1])
    steps()
    members.append(["wide"])
    steps()
    assert sum("program" in row.how for row in step.report().rows) >= 2


def test_views_follow_their_rows() -> None:
    members = Members(["relu", "prelu", "wide"])
    first, second, third = members.fused
    members.step()
    members.put(1, "norm")
    assert members.fused[0] is first
    assert members.fused[1] is not second
    members.keep([2, 0])
    assert members.fused[0] is third
    assert members.fused[1] is first
    members.step()
    for view, model in zip((third, first), members.alone, strict=True):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(view.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(view.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


def _other_root() -> nn.Module:
    class Other(Net):
        pass

    return Other(nn.ReLU())


def _frozen() -> nn.Module:
    model = KINDS["relu"]()
    model.stem.requires_grad_(False)
    return model


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another root": (_other_root, r"module \(root\) is Net in model 0 and Other in model 3; .* hf.Population takes"),
    "another mode": (lambda: KINDS["norm"]().eval(), "train mode in model 0 and in eval mode in model 3"),
    "a mode of a variant": (lambda: _with_norm_in_eval(), "module norm is in train mode in model 2 and in eval"),
    "frozen": (_frozen, "stem.weight has requires_grad True in model 0 and False in model 3"),
    "nothing in common": (lambda: _unlike(), "module tail|stem.weight has shape"),
}


def _with_norm_in_eval() -> nn.Module:
    model = KINDS["norm"]()
    model.norm.eval()  # type: ignore[union-attr, operator]
    return model


def _unlike() -> nn.Module:
    model = KINDS["relu"]()
    model.stem, model.body = nn.Linear(5, 9).double(), nn.Linear(9, 8).double()
    model.tail, model.head = nn.Linear(8, 20).double(), nn.Linear(20, 3).double()
    return model


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_member_leaves_the_array_unchanged(name: str) -> None:
    fused = hf.fuse([KINDS[kind]() for kind in ("relu", "prelu", "norm")])
    before = {key: value.clone() for key, value in fused.state_dict().items()}
    make, message = WRONG[name]
    with pytest.raises(hf.FusionError, match=message):
        fused.append([make()])
    assert all(torch.equal(before[key], value) for key, value in fused.state_dict().items())
    assert len(fused) == 3


def test_an_optimizer_without_the_new_parameters_refuses() -> None:
    members = Members(["relu", "relu"])
    members.step()
    members.fused.put(0, KINDS["prelu"]())
    members.fused(X).sum().backward()
    with pytest.raises(ValueError, match=r"brought parameters \(act.weight\) that this AdamW does not hold"):
        members.opt.step()
    members.opt.restart(0)
    members.opt.step()


def test_several_groups_are_asked_for_theirs() -> None:
    fused = hf.fuse([KINDS["relu"](), KINDS["relu"]()])
    heads = [p for name, p in fused.named_parameters() if name.startswith("head")]
    others = [p for name, p in fused.named_parameters() if not name.startswith("head")]
    opt = hf.optim.SGD([{"params": others}, {"params": heads, "lr": 0.2}], lr=0.1)
    fused.append([KINDS["prelu"]()])
    with pytest.raises(ValueError, match=r"parameters of their own \(act.weight\), and the SGD has 2 param groups"):
        opt.append(1)
    new = fused.get_parameter("act.weight")
    opt.append(1, groups={1: [new]})
    assert any(p is new for p in opt.param_groups[1]["params"])
    fused.append([KINDS["norm"]()])
    opt.append(1, groups={})
    assert not any(p is fused.get_parameter("norm.weight") for group in opt.param_groups for p in group["params"])
    with pytest.raises(ValueError, match="give parameters that joining members have brought: none"):
        opt.restart(0, groups={0: [new]})
