"""Members of other depths are one array: the blocks that all have are computed together, each trains as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

DOUBLE = torch.float64
Y = torch.tensor([0, 1, 2, 0, 1, 2])

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
    "norms with buffers": lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()),
    "residual": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()),
    "dropout": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3)),
}


class Deep(nn.Module):
    def __init__(self, kind: str, depth: int) -> None:
        super().__init__()
        self.stem, self.head, self.residual = nn.Linear(5, 16), nn.Linear(16, 3), kind == "residual"
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        for block in self.blocks:
            h = h + block(h) if self.residual else block(h)
        out: Tensor = self.head(h)
        return out


def flat(depth: int) -> nn.Module:
    """A chain in which the head has another key in each depth."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), *layers, nn.Linear(16, 3))


def made(kind: str, depths: Sequence[int]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [(flat(depth) if kind == "flat" else Deep(kind, depth)).double() for depth in depths]


def inputs() -> Tensor:
    return torch.randn(6, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["plain", "norms with buffers", "residual", "flat"])
def test_each_depth_trains_as_alone(kind: str, compiled: bool) -> None:
    models, x = made(kind, (1, 2, 3, 2)), inputs()
    fused = hf.fuse(models)
    opt = hf.optim.SGD(fused.parameters(), lr=[0.01, 0.02, 0.03, 0.04], momentum=0.9, weight_decay=0.1)
    step = hf.train_step(fused, F.cross_entropy, opt, compile=compiled)
    alone = [
        torch.optim.SGD(model.parameters(), lr=0.01 * (1 + row), momentum=0.9, weight_decay=0.1)
        for row, model in enumerate(models)
    ]
    for _ in range(3):
        losses = step(x, Y)
        for row, (model, optimizer) in enumerate(zip(models, alone, strict=True)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), Y)
            loss.backward()
            optimizer.step()
            assert_close(losses[row], loss.detach())
    for member, model in zip(fused.unfuse(), models, strict=True):
        assert list(member.state_dict()) == list(model.state_dict())
        for actual, expected in zip(member.state_dict().values(), model.state_dict().values(), strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(
    ("depths", "rows"), [((0, 1, 1, 0), [4, 2, 4]), ((2, 4, 6, 2), [4, 4, 4, 2, 2, 1, 1, 4])], ids=["none", "many"]
)
def test_blocks_are_computed_for_all_who_have_them(kind: str, depths: Sequence[int], rows: list[int]) -> None:
    models, x = made(kind, depths), inputs()
    fused = hf.fuse(models)
    # The self-check replays the draws of dropout.
    fused(x)
    program = fused.report().parts[0].program
    linears = [n for n in program.module.graph.nodes if _origin(n) is torch.ops.aten.linear.default]
    assert [len(node.meta.get("rows", range(4))) for node in linears] == rows
    fused.eval()
    outputs = fused(x)
    for row, model in enumerate(models):
        model(x)
        assert_close(outputs[row], model.eval()(x))


def _origin(node: torch.fx.Node) -> object:
    return None if node.meta.get("transition") else getattr(node.meta.get("origin"), "target", None)
