"""An observation of a member records what forward may read, what it changes, and what it returns."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from hfusion.capture.observe import observe

FACTOR = 2.0


class Settings:
    rate = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.p, self.sizes, self.unread = nn.Linear(3, 2), 0.3, [1, 2], 7
        self.steps = 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, flag: bool = True) -> tuple[Tensor, int]:
        self.steps += 1
        self.seen += 1
        if x.requires_grad and not flag:
            x = x * Settings.rate
        if torch.are_deterministic_algorithms_enabled():
            x = x + 1
        self.layer.eval()
        return self.layer(x) * self.p * FACTOR, len(self.sizes)


def test_an_observation_as_text() -> None:
    observed = observe(Net(), (torch.ones(4, 3),), {"flag": True})
    name = __name__.rpartition(".")[2]
    assert_expected_inline(
        str(observed).replace(__name__, name),
        """\
one run of Net in train mode
inputs
  f32[4,3]
  True
reads
  Settings.rate
  test_observe.FACTOR
writes
  seen
  steps
  layer.training
outputs
  f32[4,2]
  2
gradients
  layer.weight
  layer.bias""",
    )


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.detach()


def test_a_forward_without_gradients() -> None:
    assert str(observe(Detached(), (torch.ones(2),), {})).endswith("gradients\n  none")
