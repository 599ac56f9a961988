"""Arrays with sparse arguments, which run member by member."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf

# Of torch's own.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")


class Graph(nn.Module):
    """A layer of a graph, which a member may leave out."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.inner, self.norm, self.unused = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.register_buffer("skips", torch.tensor(skips))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        self.calls = self.calls + 1
        hidden = self.norm(edges @ self.inner(x))
        return hidden if self.skips else self.unused(hidden)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_with_sparse_arguments_trains_as_alone(layout: str) -> None:
    torch.manual_seed(0)
    members = [Graph(skips).double() for skips in (False, True)]
    array = hf.fuse(members)
    x = torch.randn(5, 4, dtype=torch.float64)
    edges = LAYOUTS[layout](torch.eye(5, dtype=torch.float64) + torch.eye(5, dtype=torch.float64).roll(1, 0))
    fused_optimizer = hf.optim.SGD(array.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in members]
    for _ in range(2):
        outputs, *rows = [module(x, edges) for module in (array, *members)]
        torch.testing.assert_close(outputs, torch.stack(rows), rtol=1e-9, atol=1e-12)
        for optimizer, output in zip((fused_optimizer, *optimizers), (outputs, *rows), strict=True):
            optimizer.zero_grad()
            output.sin().sum().backward()
            optimizer.step()
    for name, stack in array.state_dict().items():
        torch.testing.assert_close(stack, torch.stack([m.state_dict()[name] for m in members]), rtol=1e-9, atol=1e-12)
    assert f"an argument is a tensor of layout {edges.layout}" in str(array.report())
