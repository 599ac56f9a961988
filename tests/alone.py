"""Fused equals alone, call by call: outputs, gradients and tensors of an array against copies of its members."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from hfusion.capture import fallback_runtime
from hfusion.compiler.fusion_report import ProgramReport
from hfusion.core.calls import is_stacked
from hfusion.passes.islands import OPAQUE

RELATIVE = 1e-9
ABSOLUTE = 1e-11


@dataclass(frozen=True)
class Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def of_member(self, member: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def row(leaf: Any) -> Any:
            return leaf.tensor[member] if is_stacked(leaf) else leaf

        args, kwargs = pytree.tree_map(row, (self.args, self.kwargs), is_leaf=is_stacked)
        return args, kwargs


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def net(forward: Callable[..., Any], prepare: Callable[[nn.Module], None] = lambda module: None) -> type[nn.Module]:
    """A class of float64 modules with a 4-4 linear layer ``fc`` and this ``forward``."""

    def init(self: nn.Module) -> None:
        nn.Module.__init__(self)
        self.fc = nn.Linear(4, 4).double()
        prepare(self)

    return type("Net", (nn.Module,), {"__init__": init, "forward": forward})


def looped(part: ProgramReport) -> set[str]:
    """The paths of the submodules that run as their own code."""
    nodes = [node for node in part.program.module.graph.nodes if "origin" in node.meta]
    return {fallback_runtime.calls[node.args[0][0]].path for node in nodes if node.meta["origin"].target is OPAQUE}


def assert_alone(models: Sequence[nn.Module], *calls: Call | Tensor, grads: bool = True) -> hf.FusedModule:
    """Fuse ``models``, make the calls, and compare with copies of the members after every one; returns the array."""
    alone = copy.deepcopy(list(models))
    fused = hf.fuse(models)
    for k, one in enumerate(calls):
        made = one if isinstance(one, Call) else call(one)
        fused.zero_grad()
        for model in alone:
            model.zero_grad()
        ours = fused(*made.args, **made.kwargs)
        theirs = [model(*args, **kwargs) for model, (args, kwargs) in zip(alone, _rows(made, len(alone)), strict=True)]
        _compare_outputs(ours, theirs, f"call {k}")
        if grads:
            for outputs in (ours, *theirs):
                _backward(outputs)
            _compare_gradients(fused, alone, f"call {k}")
        for name, parameter in fused.named_parameters():
            close(parameter, [model.get_parameter(name) for model in alone], f"call {k}: parameter {name}")
        for name, buffer in fused.named_buffers():
            close(buffer, [model.get_buffer(name) for model in alone], f"call {k}: buffer {name}")
    return fused


def _rows(made: Call, members: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [made.of_member(member) for member in range(members)]


def close(stack: Tensor, rows: Sequence[Tensor], what: str) -> None:
    """``stack [B, ...]`` or, for a tensor that is one for all members, ``[...]``, against the members' own."""
    expected = torch.stack(list(rows)) if stack.dim() > rows[0].dim() else rows[0]
    assert stack.dtype == expected.dtype, what
    torch.testing.assert_close(
        stack, expected, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def _compare_outputs(ours: Any, theirs: Sequence[Any], what: str) -> None:
    leaves, spec = pytree.tree_flatten(ours)
    rows, specs = zip(*(pytree.tree_flatten(t) for t in theirs), strict=True)
    assert all(s == spec for s in specs), what
    for leaf, row in zip(leaves, zip(*rows, strict=True), strict=True):
        if isinstance(leaf, Tensor):
            close(leaf, row, f"{what}: output")
            assert leaf.requires_grad == any(r.requires_grad for r in row), f"{what}: requires_grad"
        else:
            assert all(type(leaf) is type(r) and leaf == r for r in row), what


def _backward(outputs: Any) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if leaves:
        torch.stack([(leaf.abs().sin() * (k + 1)).sum() for k, leaf in enumerate(leaves)]).sum().backward()


def _compare_gradients(fused: hf.FusedModule, alone: Sequence[nn.Module], what: str) -> None:
    for name, parameter in fused.named_parameters():
        rows = [model.get_parameter(name).grad for model in alone]
        present = [row for row in rows if row is not None]
        if not present:
            assert parameter.grad is None or not parameter.grad.any(), f"{what}: gradient of {name}"
            continue
        assert parameter.grad is not None, f"{what}: no gradient of {name}"
        filled = [torch.zeros_like(present[0]) if row is None else row for row in rows]
        close(parameter.grad, filled, f"{what}: gradient of {name}")
