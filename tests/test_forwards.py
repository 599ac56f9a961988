"""Every row of the table of forwards: an array gives what its members give alone, in the expected way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hfusion as hf
from tests.alone import Member, Own, assert_trained_alone, compare_tensors, normal
from tests.forwards import gradients, numbers, outside, reads, sizes, state, submodules, tools, writes
from tests.forwards.table import Row, module

TABLES = (gradients, writes, submodules, tools, numbers, reads, state, sizes)
ROWS = [row for table in TABLES for row in table.ROWS]
BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize("row", ROWS[::8], ids=str)
def test_one_forward_of_eight(row: Row) -> None:
    row.check()


@pytest.mark.parametrize("row", [row for number, row in enumerate(ROWS) if number % 8], ids=str)
def test_other_forwards(row: Row) -> None:
    row.check()


def test_every_row_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(ROWS)


# Rows whose steps are compiled, and of which shards or whole minibatches are trained.
COMPILED = ["derivative: residual", "parameter written: norms bounded", "parameter written: teacher in place"]
COMPILED += ["parameter written: bounded Embedding", "side effect: unused"]
COMPILED += ["write into what may be a view: flatten"]


def mean(y: Any, _: Any = None) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(y) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore:.* runs in a loop over members")
def test_a_compiled_step_trains_as_alone(name: str) -> None:
    batches = [(x, x) for x in BY_NAME[name].calls() if isinstance(x, Tensor)][:3] * 2
    assert_trained_alone(BY_NAME[name].models(), mean, batches, momentum=0.9, compile=True)


NESTED = ["backward in backward: a part in another", "backward in backward: the whole"]


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("name", ["parameter written: norms bounded", "parameter written: teacher by foreach"])
def test_a_step_that_does_not_count_writes_nothing(name: str, bad: int) -> None:
    pop = hf.Population(
        BY_NAME[name].models(),
        optimizer=lambda parameters: hf.optim.SGD(parameters, lr=0.1),
        loss=lambda y, t: (y * t).square().mean(),
        compile=False,
    )
    for step in range(4):
        before = {key: value.clone() for key, value in pop.fused.state_dict().items()}
        scale = torch.tensor([[1.0], [math.nan if step == bad else 1.0]], dtype=torch.float64)
        pop.step(normal(5, 4), hf.stacked(scale))
        changed = {key for key, value in pop.fused.state_dict().items() if not torch.equal(value[1], before[key][1])}
        assert bool(changed) == (step < bad), changed


@pytest.mark.parametrize("light", [0, 1 << 22])
def test_a_step_of_some_members_writes_their_frozen_parameters(light: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few members of many are computed as copies, where a step of all is no light work."""
    monkeypatch.setattr("hfusion.population.training_group._LIGHT", light)
    models = [model for _ in range(2) for model in BY_NAME["parameter written: teacher in place"].models()]
    members = [Member(copy.deepcopy(model), torch.optim.SGD, mean, Own(0.1)) for model in models]
    pop = hf.Population(models, optimizer=lambda params: hf.optim.SGD(params, lr=0.1), loss=mean, compile=False)
    for row in (1, 1, 0, 1):
        x = normal(5, 4)
        pop.step(x, x, rows=[row])
        members[row].call(x, x)
    compare_tensors(pop.fused, [member.model for member in members], "after the steps")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", NESTED)
def test_the_check_changes_no_gradient(name: str) -> None:
    fused = hf.fuse(BY_NAME[name].models())
    before = [torch.rand_like(parameter) for parameter in fused.parameters()]
    for parameter, grad in zip(fused.parameters(), before, strict=True):
        parameter.grad = grad.clone()
    fused(normal(5, 4))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(fused.parameters(), before, strict=True))


# Values outside of the models.
def model_that_uses(read: Callable[[], float]) -> nn.Module:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * read()

    return Scaled(4, 2).double()


@pytest.fixture
def _outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Values outside are what they were, before and after."""
    monkeypatch.delenv("TAU", raising=False)
    outside.reset()
    yield
    outside.reset()


@pytest.mark.usefixtures("_outside")
@pytest.mark.parametrize("kind", outside.READS)
def test_a_value_that_others_change_counts_at_each_call(kind: str) -> None:
    read, put = outside.READS[kind]
    models = [model_that_uses(read) for _ in range(2)]
    fused, losses = hf.fuse(models), hf.per_model(lambda y: y.sum() * read())
    try:
        for value in (1.0, 0.5, 0.25, 1.0):
            put(value)
            x = normal(3, 4)
            alone = torch.stack([model(x) for model in models])
            assert_close(fused(x), alone, rtol=1e-12, atol=0)
            assert_close(losses(alone), alone.sum((1, 2)) * read(), rtol=1e-12, atol=0)
    finally:
        put(1.0)
        vars(outside.CONFIG).pop("level", None)


@pytest.mark.usefixtures("_outside")
@pytest.mark.parametrize("count", outside.COUNTERS)
def test_a_value_that_forward_changes_counts_as_in_the_loop(count: Callable[[], float]) -> None:
    models, batches = [model_that_uses(count) for _ in range(2)], [normal(3, 4) for _ in range(4)]
    expected = [torch.stack([model(x) for model in models]) for x in batches]
    outside.reset()
    fused = hf.fuse(models)
    for x, rows in zip(batches, expected, strict=True):
        assert_close(fused(x), rows, rtol=1e-12, atol=0)


ITERATORS: Mapping[str, Callable[[], float]] = {
    "count": lambda: next(outside.NUMBERED),
    "list": lambda: next(outside.LISTED),
    "generator": lambda: next(outside.YIELDED),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_outside_is_refused(kind: str) -> None:
    fused = hf.fuse([model_that_uses(ITERATORS[kind]) for _ in range(2)])
    with pytest.raises(hf.FusionError, match="an iterator outside of the model, and so do captures"):
        fused(normal(3, 4))


OUTSIDE = nn.Linear(4, 2).double()


class UsesOutside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OUTSIDE.weight.sum()


def test_a_parameter_outside_gets_its_gradient() -> None:
    models, x = [UsesOutside(4, 2).double() for _ in range(2)], normal(3, 4)
    fused, weight = hf.fuse(models), [OUTSIDE.weight]
    (gradient,) = torch.autograd.grad(fused(x).square().sum(), weight)
    (expected,) = torch.autograd.grad(torch.stack([model(x) for model in models]).square().sum(), weight)
    assert_close(gradient, expected)
    assert "that the model does not register" in str(fused.report())


def test_a_number_of_many_values_is_reported() -> None:
    powered = [type("Powered", (nn.Linear,), {"forward": _power})(4, 4).double() for _ in range(2)]
    array, x = hf.fuse(powered, verify=False), normal(3, 4).abs()
    for value in range(1, 16):
        array(x, value)
    with pytest.warns(UserWarning, match=r"16 values of a number, now \[16\].* such as torch.tensor\(16\)"):
        array(x, 16)
    for value in (17, torch.tensor(3)):
        assert_close(array(x, value), torch.stack([model(x, value) for model in powered]))


def _power(self: nn.Linear, x: Tensor, power: Any) -> Tensor:
    return nn.functional.linear(x, self.weight, self.bias) ** power


def test_outputs_of_a_loop_are_the_callers() -> None:
    array, x = hf.fuse(BY_NAME["looped: number"].models()), normal(5, 4)
    before = x.clone()
    array(x).add_(1)
    assert torch.equal(x, before)
    assert not [name for name in vars(x) if "dynamo" in name]


def test_autocast_regions() -> None:
    class Region(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = super().forward(x).relu()
            return h.float() + super().forward(x)

    models, x = [Region(4, 4) for _ in range(3)], torch.randn(5, 4)
    assert torch.allclose(hf.fuse(models)(x), torch.stack([model(x) for model in models]), rtol=1e-5, atol=1e-6)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hf.fuse([nn.Linear(4, 4)])(x).dtype is torch.bfloat16


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense_in_an_array(make: Callable[..., nn.Module]) -> None:
    models, ids = [make(6, 4, sparse=True) for _ in range(2)], torch.tensor([[1, 2, 2], [0, 1, 5]])
    fused = hf.fuse(models)
    fused(ids).sin().sum().backward()
    for row, model in zip(fused.weight.grad, models, strict=True):
        model(ids).sin().sum().backward()
        assert_close(row, model.weight.grad.to_dense())


def test_tensors_of_all_members_are_not_written() -> None:
    models: list[Any] = BY_NAME["parameter written: teacher in place"].models()
    models[1].teacher = models[0].teacher
    with pytest.raises(hf.FusionError, match="is one object in all members"):
        hf.fuse(models)(normal(5, 4))


def test_a_loop_writes_what_it_did_not_when_it_was_captured() -> None:
    def rarely(weight: nn.Parameter) -> None:
        if weight.abs().max() > 5:
            weight.data = weight.data / 2

    models = [writes.Convex(rarely) for _ in range(2)]
    alone = copy.deepcopy(models)
    fused, x = hf.fuse(models), normal(5, 4)
    for scale in (1.0, 20.0, 1.0):
        with torch.no_grad():
            for weight in (fused.get_parameter("inner.weight"), *(model.inner.weight for model in alone)):
                weight.mul_(scale)
        assert_close(fused(x), torch.stack([model(x) for model in alone]), rtol=1e-9, atol=0)
        weights = torch.stack([model.inner.weight for model in alone])
        assert_close(fused.get_parameter("inner.weight"), weights, rtol=1e-9, atol=0)


def test_a_failed_check_of_all_values_raises_the_error_of_the_member() -> None:
    array = hf.fuse(BY_NAME["checks"].models())
    array(normal(3, 4))
    with pytest.raises(RuntimeError, match="too large"):
        array(normal(3, 4) + 1000)


class Masked(nn.TransformerEncoder):
    """While gradients are off torch takes another way, in which what is masked gives zeros."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, src_key_padding_mask=torch.arange(x.shape[1]).expand(x.shape[:2]) > 2)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_part_that_asks_for_gradients_gives_what_it_gives_alone(off: Callable[[], Any]) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), Masked(), nn.Linear(4, 4)).double().eval() for _ in range(2)]
    array, x = hf.fuse(models), normal(3, 5, 4)
    for mode in (torch.enable_grad, off, torch.enable_grad):
        with mode():
            assert_close(array(x), torch.stack([model(x) for model in models]), rtol=1e-9, atol=1e-12)


def test_recomputed_dropout_has_the_mask_of_the_forward() -> None:
    drop = module(
        lambda self, x: tools.reentrant(lambda h: nn.functional.dropout(h * self.w, 0.5), x),
        w=lambda: nn.Parameter(torch.ones(64)),
    )
    fused = hf.fuse([nn.Sequential(nn.Identity(), drop()) for _ in range(3)])
    for _ in range(2):
        fused.zero_grad()
        y = fused(torch.ones(64, requires_grad=True, dtype=torch.float64))
        y.sum().backward()
        (w,) = fused.parameters()
        assert torch.equal(w.grad, y)
        assert not torch.equal(y[0], y[1])


def test_caches_hold_no_tensors_of_a_capture() -> None:
    state.GLOBAL.clear()
    state.cached.cache_clear()
    for name in ("cache: global table", "cache: lru_cache", "cache: table per size"):
        models: list[Any] = BY_NAME[name].models()
        fused = hf.fuse(models)
        for x in BY_NAME[name].calls():
            fused(x)
        assert all(not getattr(model, "state", None) for model in models)
    assert all(type(table) is Tensor for table in (*state.GLOBAL.values(), state.cached(5)))


class Marked(torch.Tensor):
    """A class that forward may ask for."""


class Asking(nn.Module):
    """Asks whether its inputs are one, and of which class the first is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3).double()

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        own: Tensor = self.fc(q) if q is k else self.fc(q) + k.sum()
        return own * 2 if isinstance(q, Marked) else own


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_inputs_count_by_identity_and_class(order: tuple[int, ...]) -> None:
    models = [Asking() for _ in range(2)]
    fused = hf.fuse(models)
    x = torch.randn(5, 4, dtype=torch.float64)
    calls = [(x, x), (x, x.clone()), (x.as_subclass(Marked), x.clone())]
    for number in order:
        expected = torch.stack([model(*calls[number]).as_subclass(torch.Tensor) for model in models])
        torch.testing.assert_close(fused(*calls[number]).as_subclass(torch.Tensor), expected, rtol=1e-9, atol=1e-11)
