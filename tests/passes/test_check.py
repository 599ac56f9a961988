"""The checker sees what is broken, and stages can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import hfusion as hf
from hfusion.core.layout import Layout
from hfusion.core.program import Program
from hfusion.core.stages import BrokenProgram
from hfusion.ops.lowering import View
from hfusion.passes.check import check_array, check_code, check_member

aten = torch.ops.aten


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


def node(module: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in module.graph.nodes if "origin" in n.meta and name in str(n.meta["origin"].target))


def wrong_shape(module: fx.GraphModule) -> None:
    node(module, "relu").meta["example"] = torch.empty(5, 3)


def wrong_dtype(module: fx.GraphModule) -> None:
    node(module, "relu").meta["example"] = torch.empty(5, 4, dtype=torch.float64)


def wrong_layout(module: fx.GraphModule) -> None:
    relu = node(module, "relu")
    relu.meta.update(layout=Layout.SHARED, lowering=replace(relu.meta["lowering"], layout=Layout.SHARED))


def no_lowering(module: fx.GraphModule) -> None:
    del node(module, "relu").meta["lowering"]


def another_function(module: fx.GraphModule) -> None:
    node(module, "relu").target = torch.sigmoid


def denied_view(module: fx.GraphModule) -> None:
    turned = node(module, "mT")
    turned.meta["lowering"] = replace(turned.meta["lowering"], view=View.NEVER)


def no_view(module: fx.GraphModule) -> None:
    relu = node(module, "relu")
    relu.meta["lowering"] = replace(relu.meta["lowering"], view=View.ALWAYS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (wrong_shape, "relu_default gives .*3, 5, 4.*it must give .*3, 5, 3"),
        (wrong_dtype, "must give .*float64"),
        (wrong_layout, "shared of 3 members, it must give"),
        (no_lowering, "relu_default tells no lowering"),
        (another_function, "calls .*sigmoid"),
        (denied_view, "shares memory with an operand"),
        (no_view, "is a copy"),
    ],
)
def test_a_broken_array_is_reported(fault: Callable[[fx.GraphModule], None], message: str) -> None:
    module = program().module
    check_array(module, 3)
    fault(module)
    with pytest.raises(BrokenProgram, match=message):
        check_array(module, 3)


def test_code_with_different_outputs_is_reported() -> None:
    whole = program()
    check_code(whole)
    (output,) = whole.code.graph.find_nodes(op="output")
    output.args = ((node(whole.code, "batch_norm"),),)
    whole.code.recompile()
    with pytest.raises(BrokenProgram, match="the code gives"):
        check_code(whole)


def member(target: object, *, val: bool = True) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(target, (x, x))  # type: ignore[arg-type]
    graph.output((call,))
    for operand in (x, call) if val else (x,):
        operand.meta["val"] = torch.empty(2, 3)
    return graph


def test_a_broken_member_is_reported() -> None:
    check_member(member(aten.add.Tensor), ())
    check_member(member(aten.copy_.default), ("x",))
    with pytest.raises(BrokenProgram, match="writes to what is no buffer"):
        check_member(member(aten.copy_.default), ())
    with pytest.raises(BrokenProgram, match="writes to what is no buffer"):
        check_member(member(aten.add_.Tensor), ("x",))
    with pytest.raises(BrokenProgram, match="has no example of its value"):
        check_member(member(aten.add.Tensor, val=False), ())


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
