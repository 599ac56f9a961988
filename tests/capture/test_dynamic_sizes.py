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
from tests.capture.test_export import Sevenfold

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
    """Cells in a Python loop, which a graph writes out for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


class Odd(nn.Module):
    """No graph holds it; it counts in a buffer, and gives what ``cut`` makes of its input."""

    def __init__(self, cut: Callable[..., Any]) -> None:
        super().__init__()
        self.cut = cut
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, *rest: Any) -> Any:
        self.mean += x.detach().mean((0, 1))
        return self.cut(Sevenfold.apply(x * self.w), *rest)


def odd(cut: Callable[..., Any], forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Model(forward, inner=lambda: Odd(cut), **FC)


def around(self: Any, x: Tensor) -> Tensor:
    return self.fc(self.inner(self.fc(x)).cumsum(1))


def told_a_length(self: Any, x: Tensor) -> Tensor:
    return self.fc(self.inner(self.fc(x), x.shape[1] - 1).cumsum(1))


def told_by_a_number(self: Any, x: Tensor) -> Tensor:
    y, t = self.inner(self.fc(x))
    return self.fc(y) / t


def stepwise(self: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        # Bounded, or rounding is all that is left after some steps.
        h = (self.inner(h[:, None])[:, 0] + self.fc(x[:, t])).tanh()
    return h


# The model, and what runs member by member when many sizes were met.
LOOPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "python loop": (Loop, "forward"),
    "python loop in a part": (
        lambda: Model(lambda s, x: s.out(s.loop(s.fc(x))), loop=Loop, out=lambda: nn.Linear(3, 2), **FC),
        "loop",
    ),
    "all of it": (odd(lambda x: x, around), "inner"),
    "one less": (odd(lambda x: x[:, 1:], around), "forward"),
    "as wide as long": (odd(lambda x: x.mT @ x, lambda s, x: s.fc(s.inner(s.fc(x)))), "inner"),
    "another order": (odd(lambda x: x.mT, lambda s, x: s.inner(s.fc(x)).sum(2)), "inner"),
    "flat": (odd(lambda x: x.mean(1, keepdim=True), around), "inner"),
    "as long as told": (odd(lambda x, t: x[:, :t], told_a_length), "inner"),
    "half": (odd(lambda x: x[:, : x.shape[1] // 2], around), "forward"),
    "a number": (odd(lambda x: (x, x.shape[1]), told_by_a_number), "forward"),
    "as many calls": (odd(lambda x: x, stepwise), "forward"),
}


@pytest.mark.parametrize("name", LOOPED)
def test_code_that_depends_on_sizes_ends_in_a_loop_over_members(name: str) -> None:
    make, island = LOOPED[name]
    torch.manual_seed(0)
    fused = assert_alone([make(), make()], *(SEQUENCE(t, n) for t, n in [*SIZES, (8, 3), (7, 2), (11, 3)]))
    assert captures(fused) <= 3
    assert f"loop over members, {island}: " in str(fused.report().parts[-1])


def test_sizes_that_were_inferred_wrongly() -> None:
    """Changes made before the error are undone, and all later calls run member by member."""
    make = odd(lambda x: x[:, :8], around)
    fused = assert_alone([make(), make()], *(SEQUENCE(t, 3) for t in (3, 5, 4, 12, 6, 20, 2)))
    assert captures(fused) <= 3
    assert "loop over members, forward: " in str(fused.report().parts[-1])


def test_many_programs_that_each_serve_some_sizes() -> None:
    """As many branches as lengths: no size is fixed, and yet every graph holds for a few of them only."""
    make = lambda: Model(lambda s, x: sum(part.sum(1) for part in s.fc(x).split(2, 1)), **FC)  # noqa: E731
    assert captures(assert_alone([make(), make()], *(SEQUENCE(t, 2) for t in range(2, 30)))) <= 9


def test_a_loss_over_a_python_loop() -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return torch.stack([(y[:, t] - target[:, t]).square().mean() * (t + 1) for t in range(y.shape[1])]).sum()

    losses = hf.per_model(loss)
    for t in (3, 5, 4, 7, 6, 9):
        y, target = normal(2, 3, t, 4), normal(3, t, 4)
        expected = torch.stack([loss(row, target) for row in y])
        torch.testing.assert_close(losses(y, target), expected, rtol=1e-9, atol=1e-11)
    assert len(losses.programs) <= 2


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
