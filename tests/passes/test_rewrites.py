"""Rewrites of graphs compute what the graphs computed, and refuse what they cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.errors import FusionError
from hfusion.core.program import Capture, Kind, Program
from hfusion.ops.rule import MemberScalars
from hfusion.passes.align import align, plain

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


def test_scalars_that_differ_become_one_per_member() -> None:
    merged = align([graph(aten.add.Tensor, alpha=1), graph(aten.add.Tensor, alpha=2)], [0, 1, 0])
    (node,) = [n for n in merged.nodes if n.op == "call_function"]
    _, named = node.meta["arguments"]
    assert named["alpha"] == MemberScalars((1, 2, 1))
    assert [named[name].name for name in ("self", "other")] == ["x", "y"]


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


# Graphs without in-place writes compute what the code with them computes.
WHOLE = ("alias", "kept whole", "new")
# Views of a [4, 4] tensor, and writes into any of them.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[1],
    "rows": lambda x: x[1:3],
    "steps": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.view(-1),
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind(0)[0],
    "split": lambda x: x.split([1, x.shape[0] - 1])[1],
    "alias": lambda x: x.view_as(x),
    "kept whole": lambda x: F.dropout(x, 0.5, training=False),
    "new": lambda x: x * 1,
}
WRITES: dict[str, Callable[[Tensor, float], Any]] = {
    "add": lambda x, k: x.add_(k),
    "multiply": lambda x, k: x.mul_(x.sum() * 0.1),
    "fill": lambda x, k: x.fill_(k),
    "copy": lambda x, k: x.copy_(x.sin()),
    "mask": lambda x, k: x.masked_fill_(x > k, 0.5),
    "item": lambda x, k: x.__setitem__(0, k),
    "power": lambda x, k: x.pow_(2),
}

Step = tuple[str, int, float]
STEPS = st.lists(
    st.tuples(st.sampled_from([*VIEWS, *WRITES, *WRITES]), st.integers(0, 5), st.sampled_from([0.5, -2.0])),
    min_size=2,
    max_size=8,
)


class Steps(nn.Module):
    """Takes views of, and writes into, what the steps before gave; gives everything back."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        tensors = [x.clone(), x * 2]
        for name, index, number in self.steps:
            target = tensors[index % len(tensors)]
            if name in VIEWS and (target.dim() == 2 or name in WHOLE) and target.shape[0] > 1:
                tensors.append(_viewed(name, target))
            elif name in WRITES:
                WRITES[name](target, number)
        return tuple(tensors)


def _viewed(name: str, target: Tensor) -> Tensor:
    return target.reshape(-1) if name == "flat" and not target.is_contiguous() else VIEWS[name](target)


def run(captured: Capture, x: Tensor, held: dict[str, Tensor]) -> Any:
    held = held | captured.constants
    inputs = [x if slot.kind is Kind.INPUT else held[slot.name] for slot in captured.slots]
    return fx.GraphModule(nn.Module(), captured.graph)(*inputs)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_random_views_and_writes(steps: list[Step]) -> None:
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    module = Steps(steps)
    expected = module(x)
    found = capture(module, (x,), {}, varying=False)
    assert not [n for n in found.graph.nodes if n.op == "call_function" and _mutable(n)]
    for ours, theirs in zip(run(found, x, {}), expected, strict=True):
        assert torch.equal(ours, theirs)


def _mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


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


# Gathered loops compute what the separate loops compute, bit for bit, and write to buffers in the same order.
class Chain(nn.Module):
    """One run of loops, a linear layer, and a second run."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(F.leaky_relu(x, self.slope) * 2, self.slope)
        return F.leaky_relu(F.leaky_relu(self.linear(h), self.slope) + h, self.slope)


class Twice(nn.Module):
    """One BatchNorm on two branches of different depths: its running statistics depend on the order."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.norm = nn.BatchNorm1d(6, eps=1e-5 * (1 + slope))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        deep = self.norm(self.linear(F.leaky_relu(x, self.slope)))
        return deep - self.norm(F.leaky_relu(x * 3, self.slope))


class Counting(nn.Module):
    """A buffer that is read, written and read again."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        before = F.leaky_relu(x - self.seen, self.slope)
        self.seen += F.leaky_relu(x.detach(), self.slope).mean(0)
        return F.leaky_relu(before * self.seen, self.slope)


@pytest.mark.parametrize("model", [Chain, Twice, Counting])
def test_regions_equal_the_members(model: type[nn.Module]) -> None:
    models = [model(0.1 * (b + 1)).double() for b in range(3)]  # type: ignore[call-arg]
    fused, x = hf.fuse(models), torch.randn(4, 6, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in models]), rtol=1e-9, atol=1e-12)
    for name, buffer in fused.named_buffers():
        rows = torch.stack([m.get_buffer(name) for m in models])
        torch.testing.assert_close(buffer, rows, rtol=1e-9, atol=1e-12)


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
