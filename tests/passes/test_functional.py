"""Graphs without in-place writes compute what the code with them computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from hfusion.capture.export import capture
from hfusion.core.errors import FusionError
from hfusion.core.program import Capture, Kind

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
