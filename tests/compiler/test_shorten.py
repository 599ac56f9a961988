"""The self-check takes few samples only where values do not name samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.verify import FEW, shortened
from tests.alone import assert_alone, call, net, normal

NODES, EDGES = 20, 60


def edges(dim: int = 0) -> Tensor:
    ends = torch.randint(NODES, (2, EDGES))
    ends[:, 0] = NODES - 1
    return ends if dim == 0 else ends.t().contiguous()


def summed(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    start, end = edge_index
    return self.fc(torch.zeros_like(x).index_add(0, end, x[start]))


def rows_of_edges(self: Any, x: Tensor, pairs: Tensor) -> Tensor:
    return self.fc(x[pairs[:, 0]] - x[pairs[:, 1]])


def weighed(self: Any, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    index = edge_index[1][:, None].expand(-1, x.shape[1])
    return self.fc(torch.zeros_like(x).scatter_reduce(0, index, weight[:, None] * x[edge_index[0]], "amax"))


def pooled(self: Any, x: Tensor, batch: Tensor) -> Tensor:
    return self.fc(torch.zeros(5, 4, dtype=x.dtype).index_add(0, batch, x))


def parents(self: Any, parent: Tensor) -> Tensor:
    h = torch.arange(4 * parent.shape[0], dtype=torch.float64).view(-1, 4).sin()
    return self.fc(h + h[parent])


def places_as_floats(self: Any, x: Tensor) -> Tensor:
    return self.fc(x + x[(x[:, :1].abs() * 0 + x.shape[0] - 1).long().squeeze(1)])


def last_of_each(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return self.fc(x[torch.arange(x.shape[0]), lengths])


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(30, 4).double(), nn.Linear(4, 4).double()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.fc(self.table(ids.view(-1, 5)))
        return h.masked_fill((ids == 0).view(-1, 5, 1), 0) + torch.arange(5)[:, None]


def pairs(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    return F.log_softmax(h @ h.T, -1).diagonal() * x.shape[0]


CASES: dict[str, tuple[Any, Callable[[], tuple[Tensor, ...]], bool]] = {
    "edges in columns": (net(summed), lambda: (normal(NODES, 4), edges()), False),
    "edges in rows": (net(rows_of_edges), lambda: (normal(NODES, 4), edges(1)), False),
    "as many edges as nodes": (net(rows_of_edges), lambda: (normal(NODES, 4), edges(1)[:NODES]), False),
    "edges with weights": (net(weighed), lambda: (normal(NODES, 4), edges(), normal(EDGES)), False),
    "a pooled batch": (net(pooled), lambda: (normal(NODES, 4), torch.arange(NODES) // 4), False),
    "integers alone": (net(parents), lambda: (torch.arange(NODES).flip(0),), False),
    "places as floats": (net(places_as_floats), lambda: (normal(NODES, 4),), False),
    "places along another dim": (
        net(last_of_each),
        lambda: (normal(NODES, 3, 4), torch.randint(3, (NODES,))),
        False,
    ),
    "tokens": (Tokens, lambda: (torch.randint(30, (NODES, 5)),), True),
    "floats": (net(lambda self, x: self.fc(x)), lambda: (normal(NODES, 4),), True),
    "one sample": (net(lambda self, x: self.fc(x)), lambda: (normal(1, 4),), True),
    "a mask": (
        net(lambda self, x, mask: self.fc(x) * mask[:, None]),
        lambda: (normal(NODES, 4), torch.rand(NODES) < 0.5),
        True,
    ),
    "pairs of samples": (net(pairs), lambda: (normal(NODES, 4),), True),
    "rows in groups": (net(lambda self, x: self.fc(x.view(-1, 8)[:, :4])), lambda: (normal(NODES, 4),), True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_check_runs_and_takes_few_samples_where_it_may(name: str) -> None:
    make, draw, few = CASES[name]
    inputs = draw()
    array = assert_alone([make() for _ in range(3)], call(*inputs))
    assert "self-check passed" in str(array.report())
    arguments = Arguments.of(inputs, {})
    short = shortened(array.compiled(arguments), arguments)
    assert (short is not None) == few
    if short is not None:
        assert short.leaves[0].shape[0] == min(FEW, inputs[0].shape[0])


def test_one_sample_of_each_member() -> None:
    make = net(rows_of_edges)
    array = hf.fuse([make(), make()])
    array(hf.stacked(normal(2, NODES, 4)), hf.stacked(torch.stack([edges(1), edges(1)])))
    assert "self-check passed" in str(array.report())


class Few(nn.Module):
    """Cannot compute fewer than six samples, which a tracer cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((torch.ones_like(x[:, 0]).sum() > 5).bool())
        return self.fc(x)


def test_a_model_that_fails_on_few_samples_is_checked_on_all() -> None:
    array = hf.fuse([Few(), Few()])
    array(normal(8, 4))
    assert "self-check passed" in str(array.report())
