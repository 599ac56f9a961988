"""The self-check of a large array compares few members: each kind of them, and those with extreme numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler import verify
from hfusion.compiler.verify import MAX_COMPARED_WHOLE, MIN_COMPARED

MEMBERS = 40


class Net(nn.Module):
    def __init__(self, slope: float, scale: float, act: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.slope, self.scale, self.act = slope, scale, act()

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.leaky_relu(self.first(x), self.slope)
        y: Tensor = self.second(self.act(hidden)) * self.scale
        return y


CASES: dict[str, tuple[Callable[[int], nn.Module], set[int]]] = {
    "equal": (lambda b: Net(0.1, 2.0), {0, MEMBERS - 1}),
    # The greatest slope and the least, the scale nearest to zero.
    "numbers": (lambda b: Net((b * 7 + 3) % MEMBERS / 100, (b * 3 + 4) % MEMBERS - 19.5), {11, 28, 12, 25, 5}),
    "few values": (lambda b: Net([0.1, 0.2, 0.3][b >= 13 and b % 13 % 2 + 1], 2.0), {0, 13, 14}),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    members: list[int] = []
    outcome = verify._member_outcome

    def noting(subject: Any, member: int, *more: Any) -> Any:
        members.append(member)
        return outcome(subject, member, *more)

    monkeypatch.setattr(verify, "_member_outcome", noting)
    return members


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_member_is_compared(case: str, compared: list[int]) -> None:
    make, expected = CASES[case]
    models, x = [make(b).double() for b in range(MEMBERS)], torch.randn(5, 3, dtype=torch.float64)
    fused = hf.fuse(models)
    outputs = fused(x)
    outputs.sum().backward()
    assert expected <= set(compared)
    assert MIN_COMPARED <= len(compared) <= MIN_COMPARED + 8
    assert f"gradients of {len(compared)} of {MEMBERS} members" in str(fused.report())
    for member, model in enumerate(models):
        torch.testing.assert_close(outputs[member], model(x), rtol=1e-9, atol=1e-11)


def test_small_arrays_are_compared_whole(compared: list[int]) -> None:
    fused = hf.fuse([Net(0.1, 1.0) for _ in range(MAX_COMPARED_WHOLE)])
    fused(torch.randn(5, 3))
    assert sorted(compared) == list(range(MAX_COMPARED_WHOLE))
