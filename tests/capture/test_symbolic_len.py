"""``len(x)`` in forward and in a loss holds for all sizes of batches."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture.export import symbolic_len


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.view(len(x), -1)) / len(x)
        return out


def _rows(x: Tensor) -> int:
    return len(x)


def _divided(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / len(output)


def _with_helper(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / _rows(target)


def _closure() -> Callable[..., Tensor]:
    parts = [1, 2]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() * len(parts) / len(output)

    return loss


class Loss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().sum() / len(output)


@pytest.mark.parametrize("loss", [_divided, _with_helper, _closure(), Loss(), lambda o, t: (o - t).sum() / len(o)])
def test_batches_of_many_sizes_stay_fused(loss: Callable[..., Tensor]) -> None:
    """Warnings are errors here, and what runs member by member is warned of."""
    torch.manual_seed(0)
    models = [Flat().double() for _ in range(3)]
    fused = hf.fuse(models)
    optimizer = hf.optim.SGD(fused.parameters(), lr=0.0)
    step = hf.train_step(fused, loss, optimizer, compile=True)
    for count in (8, 5, 3, 4, 6):
        x, target = torch.randn(count, 2, 3).double(), torch.randn(count, 2).double()
        expected = [loss(model(x), target).detach() for model in models]
        torch.testing.assert_close(step(x, target), torch.stack(expected))
    assert "loop" not in str(fused.report())


def test_python_has_its_own_len_again() -> None:
    class Fails(Flat):
        def forward(self, x: Tensor) -> Tensor:
            assert len is not builtins.len
            assert (len(x), len([1, 2]), len({})) == (x.shape[0], 2, 0)
            with pytest.raises(TypeError, match="0-d"):
                len(x.sum())
            raise RuntimeError("no forward")

    assert "len" not in globals()
    model = Fails()
    with symbolic_len(model), pytest.raises(RuntimeError, match="no forward"):
        model(torch.zeros(2, 3))
    assert "len" not in globals()


def test_a_len_of_the_users_own_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_len: Any = lambda value: 1  # noqa: E731
    monkeypatch.setitem(globals(), "len", custom_len)
    with symbolic_len(Flat()):
        assert globals()["len"] is custom_len
    assert globals()["len"] is custom_len
