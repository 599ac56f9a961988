"""Sizes that vary: few captures serve them all, and each call gives what the members alone give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.alone import Call, assert_alone, call, normal

SIZES = [(7, 3), (9, 3), (12, 2), (5, 5), (3, 6), (6, 3), (15, 4)]


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any], **parts: Callable[[], nn.Module | Tensor]) -> None:
        super().__init__()
        self.function = forward
        for name, make in parts.items():
            part = make()
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.double()

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def causal(self: Any, ids: Tensor) -> Tensor:
    n, t = ids.shape
    h = self.token(ids) + self.table[:t] + self.position(torch.arange(t))
    mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
    scores = (self.query(h) @ h.mT).masked_fill(~mask, float("-inf")).softmax(-1)
    heads = h.view(n, t, 2, 2).transpose(1, 2)
    more = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return scores @ h + more.transpose(1, 2).reshape(n, t, 4)


def convolved(self: Any, x: Tensor) -> Tensor:
    h = F.max_pool1d(self.norm(self.first(x.mT)), 2, padding=1)
    h = F.interpolate(self.second(h), size=x.shape[1], mode="linear")
    return h * torch.linspace(0, 1, x.shape[1], dtype=h.dtype) + F.adaptive_avg_pool1d(h, 1)


def sliced(self: Any, x: Tensor) -> Tensor:
    h = F.pad(self.fc(x), (0, 0, 0, -x.shape[1] % 4)).clone()
    h[:, 0] = 0
    n, t, c = h.shape
    return torch.cat([h.view(n, t // 4, 4, c).mean(2), h[:, t // 2 :].flip(1)], 1).cumsum(1)


def scaled(self: Any, x: Tensor) -> Tensor:
    return self.fc(x).sum(1) / x.shape[1] ** 0.5 / torch.tensor(x.shape[0])


def branching(self: Any, x: Tensor) -> Tensor:
    return self.fc(x) * (2 if x.shape[1] > 8 else 1) * (3 if x.shape[0] == x.shape[1] else 1)


FC = {"fc": lambda: nn.Linear(4, 4)}
SEQUENCE: Callable[..., Call] = lambda t, n: call(normal(n, t, 4))  # noqa: E731
IDS: Callable[..., Call] = lambda t, n: call(torch.randint(11, (n, t)))  # noqa: E731
STACKED: Callable[..., Call] = lambda t, n: call(hf.stacked(normal(2, n, t, 4)))  # noqa: E731
PAIRS: Callable[..., Call] = lambda t, n: call(normal(n, t, 4), normal(n, 2 + t % 3 * 3, 4))  # noqa: E731
# The model, its calls by length and number of samples, and how many captures they may take.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Call], int]] = {
    "lstm": (lambda: Model(lambda s, x: s.m(x)[0], m=lambda: nn.LSTM(4, 3, batch_first=True)), STACKED, 2),
    "deep lstm": (lambda: Model(lambda s, x: s.m(x)[1], m=lambda: nn.LSTM(4, 3, 2, bidirectional=True)), SEQUENCE, 2),
    "gru": (lambda: Model(lambda s, x: s.m(x)[0], m=lambda: nn.GRU(4, 3, batch_first=True)), SEQUENCE, 2),
    "rnn": (lambda: Model(lambda s, x: s.m(x)[1], m=lambda: nn.RNN(4, 3, nonlinearity="relu")), SEQUENCE, 2),
    "attention": (
        lambda: Model(lambda s, x: s.m(x, x, x)[0], m=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
        SEQUENCE,
        2,
    ),
    "causal": (
        lambda: Model(
            causal,
            token=lambda: nn.Embedding(11, 4),
            position=lambda: nn.Embedding(20, 4),
            table=lambda: normal(20, 4),
            query=lambda: nn.Linear(4, 4),
        ),
        IDS,
        2,
    ),
    "convolved": (
        lambda: Model(
            convolved,
            first=lambda: nn.Conv1d(4, 6, 3, padding=1),
            norm=lambda: nn.BatchNorm1d(6),
            second=lambda: nn.Conv1d(6, 6, 3, padding="same", groups=2),
        ),
        SEQUENCE,
        2,
    ),
    "two lengths": (lambda: Model(lambda s, x, y: (s.fc(x) @ y.mT).softmax(-1) @ y, **FC), PAIRS, 2),
    "sliced": (lambda: Model(sliced, **FC), SEQUENCE, 3),
    "scaled": (lambda: Model(scaled, **FC), SEQUENCE, 2),
    "branching": (lambda: Model(branching, **FC), SEQUENCE, 4),
}


def captures(fused: hf.FusedModule) -> int:
    return sum(map(len, fused._compiler.families.values()))


@pytest.mark.parametrize("name", CASES)
def test_few_captures_serve_all_sizes(name: str) -> None:
    make, inputs, most = CASES[name]
    torch.manual_seed(0)
    fused = assert_alone([make(), make()], *(inputs(t, n) for t, n in SIZES))
    assert captures(fused) <= most


def test_a_single_step_or_sample_is_a_size_of_its_own() -> None:
    make, inputs, _ = CASES["causal"]
    fused = assert_alone(
        [make(), make()], *(inputs(*size) for size in [(5, 3), (7, 3), (1, 3), (9, 2), (4, 1), (1, 2)])
    )
    assert captures(fused) <= 4


def test_equal_sizes_are_not_one_size() -> None:
    """Captured where all lengths happen to be equal, and called where they are not."""
    make, _, _ = CASES["two lengths"]
    calls = [call(normal(n, t, 4), normal(n, u, 4)) for n, t, u in [(3, 4, 6), (5, 5, 5), (2, 3, 7), (4, 4, 2)]]
    assert captures(assert_alone([make(), make()], *calls)) <= 2


def test_parts_of_a_larger_tensor_are_sizes_like_any() -> None:
    """Neither strides nor where a batch begins matter."""
    make, _, _ = CASES["convolved"]
    data = normal(9, 40, 4)
    parts = [data[:3, :7], data[3:6, 2:11], data[::2, 1:20:2], data[2:, 5:9].flip(0), data[:4, :30].transpose(0, 1)]
    assert captures(assert_alone([make(), make()], *(call(part) for part in parts))) <= 2


def test_sizes_met_in_training_are_open_in_evaluation() -> None:
    make, inputs, _ = CASES["gru"]
    fused = hf.fuse([make(), make()])
    for t, n in SIZES[:3]:
        fused(*inputs(t, n).args)
    fused.eval()
    for t, n in SIZES:
        x = inputs(t, n).args[0]
        torch.testing.assert_close(fused(x)[1], fused[1](x), rtol=1e-9, atol=1e-11)
    assert captures(fused) <= 4


class Loop(nn.Module):
    """Cells in a Python loop: every length is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


def test_a_loop_over_a_length_is_right_for_each() -> None:
    assert_alone([Loop(), Loop()], *(call(normal(n, t, 4)) for t, n in [(3, 2), (2, 3), (4, 2), (3, 5)]))


def test_a_task_of_many_lengths() -> None:
    models = [Model(lambda s, x: s.fc(x).cumsum(1), **FC) for _ in range(2)]
    alone = copy.deepcopy(models)
    data = [(normal(3, t, 4), normal(3, t, 4)) for t in (5, 7, 6)]
    task = hf.Task(models, F.mse_loss, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loader=data, epochs=1, name="a")
    losses = hf.train([task], hf.Machine.detect())["a"].losses
    for step, (x, y) in enumerate(data):
        for b, model in enumerate(alone):
            loss = F.mse_loss(model(x), y)
            torch.testing.assert_close(losses[step, b].double(), loss.detach(), rtol=1e-6, atol=1e-9)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.data -= 0.1 * grad
