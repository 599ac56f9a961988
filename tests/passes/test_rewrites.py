"""Rewrites of graphs compute what the graphs computed, and refuse what they cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.errors import FusionError
from hfusion.core.program import Program
from hfusion.ops import norm
from hfusion.ops.rule import MemberScalars
from hfusion.passes.align import align, plain
from hfusion.passes.inductor_rewrites import (
    DECOMPOSITIONS,
    batch_member_loops,
    inline_constants,
    sink_transposes,
    transpose_products,
)

# Graphs of members that differ in scalars become one graph; all other differences are reported.
aten = torch.ops.aten


def graph(target: Any, *rest: Any, swap: bool = False, more: bool = False, **kwargs: Any) -> fx.Graph:
    built = fx.Graph()
    x, y = built.placeholder("x"), built.placeholder("y")
    node = built.call_function(target, (*((y, x) if swap else (x, y)), *rest), kwargs)
    if more:
        node = built.call_function(aten.relu.default, (node,))
    built.output((node,))
    return built


def test_a_default_that_one_graph_leaves_out_counts() -> None:
    merged = align([graph(aten.add.Tensor), graph(aten.add.Tensor, alpha=2)], [0, 1])
    (node,) = [n for n in merged.nodes if n.op == "call_function"]
    assert node.meta["arguments"][1]["alpha"] == MemberScalars((1, 2))


@pytest.mark.parametrize("values", [(1, 1.0), (1, True), (0.0, -0.0)], ids=str)
def test_numbers_that_only_compare_equal_stay_each_members_own(values: tuple[Any, ...]) -> None:
    assert plain(MemberScalars(values)) == MemberScalars(values)
    assert repr(plain(MemberScalars((values[1], values[1])))) == repr(values[1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: graph(aten.sub.Tensor), "aten.add.Tensor in model 0 and aten.sub.Tensor in model 1"),
        (lambda: graph(aten.add.Tensor, swap=True), "different operands"),
        (lambda: graph(aten.add.Tensor, more=True), r"different numbers of nodes \(model 0: 4, model 1: 5\)"),
    ],
)
def test_differences_are_reported(other: Callable[[], fx.Graph], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        align([graph(aten.add.Tensor), other()], [0, 1])


# Writes that no graph without writes can say.
class Writing(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.write(h)
        return h


def transpose_under_a_view(h: Tensor) -> None:
    g = h.detach().clone()
    row = g[0]
    g.t_()
    h.add_(row.sum())


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda h: h.detach().mul_(2), "unseen by autograd"),
        (transpose_under_a_view, "changes the shape of a tensor that has views"),
        (lambda h: h.clone().as_strided((2,), (1,)).zero_(), "cannot undo"),
    ],
)
def test_writes_that_cannot_be_undone_are_refused(write: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        capture(Writing(write), (torch.randn(3, 4),), {})


# The checker sees what is broken, and stages can be read.
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x).relu()).mT


def program() -> Program:
    fused = hf.fuse([Net() for _ in range(3)], verify=False)
    fused(torch.randn(5, 4))
    return fused.report().parts[0].program


def test_every_stage_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_DUMP", str(tmp_path / "stages"))
    whole = program()
    names = sorted(path.name for path in (tmp_path / "stages").iterdir())
    kinds = ("observed", "captured", "aligned", "batched", "gathered")
    assert names == [f"{number:04d}-Net-{kind}.txt" for number, kind in enumerate(kinds, start=1)]
    texts = [(tmp_path / "stages" / name).read_text() for name in names]
    assert texts[0].startswith("one run of Net in train mode\n")
    assert texts[3] == f"{whole}\n"
    assert all("relu" in text and "return" in text for text in texts[1:])


# What is rewritten before Inductor gives what was there before.
class Norms(nn.Module):
    """Enough elements for a loop of kernels."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.layer = nn.LayerNorm((4, 32), bias=affine)
        self.rms = nn.RMSNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rms(self.layer(x * self.layer.weight).sin())
        return y


# As many members as rows of the weight: no shape alone tells them apart.
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("affine", [False, True])
def test_norms_of_all_members_at_once(affine: bool, members: int) -> None:
    models = [Norms(affine).double() for _ in range(members)]
    for model in models:
        nn.init.normal_(model.layer.weight)
    if affine:
        for model in models:
            model.layer.bias = models[0].layer.bias.requires_grad_(False)
    fused = hf.fuse(models)
    x = torch.randn(norm.ROWS_FROM // 128, 4, 32, dtype=torch.float64)
    y = fused(x)
    (part,) = fused.report().parts
    before = part.program.module
    after = batch_member_loops(before)
    assert norm.rows in {node.target for node in before.graph.nodes}
    assert norm.rows not in {node.target for node in after.graph.nodes}
    state = fused.state_dict(keep_vars=True)
    (output,) = after(*[x if slot.name == "0" else state[slot.name] for slot in part.program.slots])
    torch.testing.assert_close(output, y, rtol=1e-9, atol=1e-12)
    parameters = [p for p in fused.parameters() if p.requires_grad]
    actual, expected = (torch.autograd.grad(o.sin().sum(), parameters) for o in (output, y))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


# Operators written as several give what the one gives, also into buffers.


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def decompositions_norm(affine: bool, training: bool) -> Callable[..., tuple[Tensor, ...]]:
    def compute(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        mean, var = mean.clone(), var.clone()
        affine_parameters = (weight, bias) if affine else (None, None)
        results = aten._native_batch_norm_legit.default(x, *affine_parameters, mean, var, training, 0.3, 1e-3)
        return (*results, mean, var)

    return compute


def batches(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    channels = shape[1]
    return (normal(*shape, dtype=dtype), *(normal(channels, dtype=dtype).abs() + k for k in range(4)))


MATRICES = (normal(3, 1, 5), normal(3, 4, 2), normal(3, 2, 5))
OF_BFLOAT16 = (normal(4, 3, 5, dtype=torch.bfloat16), *batches(4, 3, 5, dtype=torch.float32)[1:])
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], bool]] = {
    "product": (torch.baddbmm, MATRICES, True),
    "scaled product": (partial(torch.baddbmm, beta=0.5, alpha=2), MATRICES, False),
    "norm of 3 dims": (decompositions_norm(True, True), batches(6, 3, 5), True),
    "norm without weights": (decompositions_norm(False, True), batches(4, 3, 5), True),
    "norm in eval": (decompositions_norm(True, False), batches(4, 3, 5), False),
    "norm of bfloat16": (decompositions_norm(True, True), OF_BFLOAT16, True),
}


@pytest.mark.parametrize(("fn", "tensors", "written"), CASES.values(), ids=CASES)
def test_the_same_values(fn: Callable[..., Any], tensors: tuple[Tensor, ...], written: bool) -> None:
    module = make_fx(fn, decomposition_table=DECOMPOSITIONS)(*tensors)
    assert any(node.target in DECOMPOSITIONS for node in module.graph.nodes) is not written
    # Values of bfloat16 may round to either side.
    limit = 2**-8 if tensors[0].dtype is torch.bfloat16 else 1e-12
    torch.testing.assert_close(module(*tensors), fn(*tensors), rtol=limit, atol=limit)


@pytest.mark.parametrize(
    "held",
    [
        torch.tensor([0.1, -0.0, float("inf"), float("nan")]),
        torch.rand(2, 3, 1, dtype=torch.float64),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.tensor([(1 << 62) + 1, -5]),
    ],
    ids=["not finite", "float64", "scalar", "bool", "large integers"],
)
def test_small_tensors_are_written_out(held: Tensor) -> None:
    module = make_fx(lambda x: (x + held.clone(), held.clone()))(torch.zeros(held.shape, dtype=held.dtype))
    inlined = inline_constants(module)
    assert not [node for node in inlined.graph.nodes if node.op == "get_attr"]
    x = torch.zeros(held.shape, dtype=held.dtype)
    for actual, expected in zip(inlined(x), module(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(actual), torch.signbit(expected))


# Graphs with transpositions sunk against the graphs themselves: one result, bit for bit, in the same memory order.
def traced(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(function, tracing_mode="fake")(*args)
    return module


def mixed(x: Tensor, y: Tensor) -> Tensor:
    """Operands of which only one is transposed."""
    return x.mT + y.mT.contiguous()


def expanded(x: Tensor, y: Tensor) -> Tensor:
    """Bases whose memory order is not that of their dims."""
    return (x[:1].expand(2, 3, 4).mT.exp() + y.mT).mT.reshape(-1)


def written(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Writes through a view that is sunk, before and after its use."""
    t = x.mT.sin()
    u = t.cos()
    t.add_(1)
    u[0].mul_(y.mT[0])
    return t.mul(2), u.mT


@pytest.mark.parametrize("strides", ["dense", "transposed"])
@pytest.mark.parametrize("function", [mixed, expanded, written], ids=lambda f: f.__name__)
def test_same_values_and_strides(function: Callable[..., Any], strides: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 3, 4)
    if strides == "transposed":
        x = torch.randn(2, 4, 3).mT
    before = traced(function, x, y)
    after = sink_transposes(before)
    results = [module(x.clone(), y.clone()) for module in (before, after)]
    for expected, actual in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()


# Products that are read transposed are computed so, and nothing else is touched.
A, B = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
C = torch.randn(3, 2, 4, dtype=torch.float64)


TURNED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "of a transposed": lambda a, b, c: torch.bmm(c.transpose(1, 2), b.transpose(1, 2)).transpose(1, 2).contiguous(),
    "added twice": lambda a, b, c: (c + (turned := torch.bmm(a, b).transpose(-1, -2))) * turned,
}


@pytest.mark.parametrize("name", TURNED)
def test_products_that_are_read_transposed_are_computed_transposed(name: str) -> None:
    transposed = transpose_products(traced(TURNED[name], A, B, C))
    assert aten.clone.default not in {node.target for node in transposed.graph.nodes}
    torch.testing.assert_close(transposed(A, B, C), TURNED[name](A, B, C), rtol=1e-12, atol=1e-12)
    (product,) = (n for n in transposed.graph.nodes if n.target in (aten.bmm.default, aten.mm.default))
    assert product.meta["val"].is_contiguous()
    assert product.meta["val"].shape[-1] == 4
    for node in transposed.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], Tensor)
