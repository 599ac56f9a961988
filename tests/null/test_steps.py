"""Steps on CUDA, of optimizers and compiled: one replay of a graph, for which the host waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.backend import computes_by_tf32
from tests.null.calls import MEMBERS, TENSORS, Calls, calls_per_step, losses_of, move, optimizer, parameters

pytestmark = pytest.mark.null

KERNELS = ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Lion", "RAdam", "RMSprop")
COPYING = ("Muon", "NAdam")
"""The host computes their numbers, and copies them at each step."""
REPLAYED = "recorded and replayed as one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_step_by_kernels_is_one_replay(name: str, dtype: torch.dtype) -> None:
    opt = optimizer(name, parameters(dtype))
    assert calls_per_step(opt.step) == Calls(launches=0, graphs=1, waits=0)
    assert opt.launches == REPLAYED


@pytest.mark.parametrize("name", COPYING)
def test_a_step_with_numbers_of_the_host_is_one_replay_and_a_copy_of_its_numbers(name: str) -> None:
    opt = optimizer(name, parameters())
    assert calls_per_step(opt.step) == Calls(launches=1, graphs=1, waits=0)
    assert opt.launches == REPLAYED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*KERNELS, *COPYING])
def test_a_step_with_master_weights_is_one_replay(name: str, dtype: torch.dtype) -> None:
    stacks = parameters(dtype)
    opt = optimizer(name, stacks, master_weights=True)
    assert calls_per_step(opt.step) == Calls(launches=name in COPYING, graphs=1, waits=0)
    assert opt.launches == REPLAYED
    move(stacks)
    assert calls_per_step(opt.step).graphs == 1
    assert opt.launches == REPLAYED


@pytest.mark.parametrize("name", [*KERNELS, *COPYING])
def test_steps_are_recorded_again_when_parameters_have_moved(name: str) -> None:
    stacks = parameters()
    opt = optimizer(name, stacks)
    for _ in range(2):
        assert calls_per_step(opt.step).graphs == 1
        move(stacks)
    assert calls_per_step(opt.step) == Calls(launches=name in COPYING, graphs=1, waits=0)
    assert opt.launches == REPLAYED


def test_a_step_with_rates_that_change_copies_them() -> None:
    opt = optimizer("Adam", parameters())

    def step() -> None:
        opt.param_groups[0]["lr"] *= 0.9
        opt.step()

    assert calls_per_step(step) == Calls(launches=1, graphs=1, waits=0)


def test_steps_that_are_not_recorded_report_the_reason() -> None:
    stacks = parameters()
    opt = optimizer("SGD", stacks)

    def step() -> None:
        # Gradients that never lie where they lay.
        for stack in stacks:
            stack.grad = torch.zeros_like(stack)
        gradients.append([stack.grad for stack in stacks])
        opt.step()

    gradients: list[object] = []
    assert calls_per_step(step).graphs == 0
    assert "gradients must lie at the same addresses" in opt.launches


def test_members_that_rest_are_put_back() -> None:
    stacks = parameters()
    opt = optimizer("Adam", stacks)
    holding = torch.zeros(MEMBERS, dtype=torch.bool)
    holding[3] = True

    def step() -> None:
        with opt.holding(holding):
            opt.step()

    calls = calls_per_step(step)
    assert (calls.graphs, calls.waits, calls.refused) == (1, 0, ())


def test_optimizers_of_members_go_on_as_one() -> None:
    models = [torch.nn.Linear(4, 2).cuda() for _ in range(3)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    fused = hf.fuse(models, verify=False)
    opt = hf.optim.fuse(optimizers, fused)
    for stack in fused.parameters():
        stack.grad = torch.zeros_like(stack)
    assert calls_per_step(opt.step) == Calls(launches=0, graphs=1, waits=0)


# Attention with dropout on CUDA: one launch for all members, and no matrix of weights is kept.

FEW, SAMPLES, HEADS, TOKENS, SIZE = 4, 2, 4, 512, 16


class Dropped(nn.Module):
    """One attention whose weights are dropped with probability ``p``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q = x * self.scale
        y: Tensor = F.scaled_dot_product_attention(q, q, q, dropout_p=self.p)
        return y


@pytest.mark.parametrize(("rates", "kernels"), [([0.1] * FEW, 1), ([0.1, 0.1, 0.2, 0.2], 2)], ids=["one p", "own p"])
def test_weights_are_not_kept(rates: tuple[float, ...], kernels: int) -> None:
    fused = hf.fuse([Dropped(p) for p in rates], verify=False).cuda()
    x = torch.zeros(SAMPLES, HEADS, TOKENS, SIZE, device="cuda")
    fused(x)
    assert "members as batch, own draws" in str(fused.report())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = fused(x)
    y.sum().backward()
    weights = FEW * SAMPLES * HEADS * TOKENS * TOKENS * x.element_size()
    assert torch.cuda.max_memory_allocated() - before < weights / 2
    calls = calls_per_step(lambda: fused(x))
    assert (calls.waits, calls.refused) == (0, ())
    # The product, the kernels of attention, and for several the copy of their results.
    assert calls.launches <= 4 + 2 * kernels


def test_attention_without_a_kernel_is_written_out() -> None:
    fused = hf.fuse([Dropped(0.1).double() for _ in range(FEW)], verify=False).cuda()
    x = torch.zeros(9, HEADS, TOKENS, SIZE, device="cuda", dtype=torch.float64)
    fused(x).sum().backward()
    assert "written out, own draws" in str(fused.report())
    assert calls_per_step(lambda: fused(x).sum().backward()).waits == 0


# Clipping on CUDA takes as many launches for many tensors as for few, and the host waits for nothing.

LAUNCHES = 10
"""Copies of addresses and of limits; three kernels over all tensors; a norm over tensors, and four for factors."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("limit", [1.0, [1.0 + member for member in range(MEMBERS)]], ids=["one", "per member"])
def test_norms(limit: float | list[float], norm_type: float, dtype: torch.dtype) -> None:
    stacks = parameters(dtype)
    # The factors of half precision have float32 in between.
    launches = LAUNCHES + (dtype is not torch.float32)
    for some in (stacks, stacks[:3]):
        calls = calls_per_step(lambda some=some: hf.optim.clip_grad_norm_(some, limit, norm_type))  # type: ignore[misc]
        assert calls == Calls(launches=launches, graphs=0, waits=0)


def test_values() -> None:
    stacks = parameters()
    calls = calls_per_step(lambda: hf.optim.clip_grad_value_(stacks, 1.0))
    assert (calls.waits, calls.refused) == (0, ())


# Scaled steps on CUDA: the host waits once, to learn which members have overflowed.


def calls_of_a_scaled_step(max_norm: float | None) -> Calls:
    """Return the calls of a step of AdamW with a loss scale, whose gradients are clipped to ``max_norm``."""
    stacks = parameters()
    opt, scaler = optimizer("AdamW", stacks), hf.optim.GradScaler()
    losses = torch.zeros(MEMBERS, device="cuda", requires_grad=True)

    def step() -> None:
        scaler.scale(losses)
        if max_norm is not None:
            scaler.unscale_(opt)
            hf.optim.clip_grad_norm_(stacks, max_norm)
        scaler.step(opt)
        scaler.update()

    return calls_per_step(step)


def test_a_scaled_step_waits_once() -> None:
    # A largest magnitude and a product for each tensor, and what joins the flags of all, which the host then reads.
    assert calls_of_a_scaled_step(None) == Calls(launches=2 * TENSORS + 11, graphs=1, waits=1, pageable=1)


def test_a_scaled_and_clipped_step_waits_once() -> None:
    calls = calls_of_a_scaled_step(1.0)
    assert (calls.graphs, calls.waits, calls.refused) == (1, 1, ())


def test_losses_are_scaled_without_a_wait() -> None:
    scaler = hf.optim.GradScaler()
    losses = torch.zeros(MEMBERS, device="cuda", requires_grad=True)
    assert calls_per_step(lambda: scaler.scale(losses)).waits == 0


# The self-check allows for TF32 where torch computes by it, and nowhere else.

CUDA = torch.device("cuda", 0)
# mypy does not know all of its settings.
BACKENDS: Any = torch.backends


@pytest.fixture
def tf32_settings() -> Iterator[None]:
    convolutions, products = BACKENDS.cudnn.conv.fp32_precision, BACKENDS.cuda.matmul.fp32_precision
    yield
    BACKENDS.cudnn.conv.fp32_precision, BACKENDS.cuda.matmul.fp32_precision = convolutions, products


@pytest.mark.usefixtures("tf32_settings")
def test_by_torchs_defaults() -> None:
    assert computes_by_tf32(CUDA, ["aten.relu.default", "aten.convolution.default"])
    assert computes_by_tf32(CUDA, ["aten.lstm.input"])
    assert not computes_by_tf32(CUDA, ["aten.addmm.default", "aten.relu.default"])
    assert not computes_by_tf32(torch.device("cpu"), ["aten.convolution.default"])


@pytest.mark.usefixtures("tf32_settings")
def test_as_it_is_set() -> None:
    BACKENDS.cudnn.conv.fp32_precision = "ieee"
    assert not computes_by_tf32(CUDA, ["aten.convolution.default"])
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    assert computes_by_tf32(CUDA, ["aten.addmm.default"])


# `hf.train_step` on CUDA: few replays of graphs, no wait, also after tensors have moved.

COUNT = 4


class Attentive(nn.Module):
    """A layer of a transformer, and a head on the mean of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(x).mean(1))
        return scores


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8,)),
    "cnn": (cnn, (3, 8, 8)),
    "transformer": (Attentive, (5, 8)),
    "transformer of many tokens": (Attentive, (96, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_recorded(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    fused = hf.fuse([make() for _ in range(COUNT)], verify=False).cuda()
    opt = hf.optim.AdamW(fused.parameters(), lr=[0.1, 0.2, 0.3, 0.4])
    step = hf.train_step(fused, losses_of, opt, compile=True)
    inputs, target = torch.zeros(6, *shape, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")

    def train() -> None:
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            step(inputs, target)

    for _ in range(2):
        calls = calls_per_step(train)
        assert (calls.waits, calls.refused) == (0, ())
        # Forward with backward, and the optimizer.
        assert calls.graphs == 2
        (row,) = step.report().rows
        assert row.how.endswith("recorded and replayed as one")
        assert opt.launches == "recorded and replayed as one"
        move(list(fused.parameters()))


def test_after_members_left_and_joined() -> None:
    fused = hf.fuse([mlp() for _ in range(COUNT)], verify=False).cuda()
    opt = hf.optim.AdamW(fused.parameters(), lr=0.1)
    step = hf.train_step(fused, losses_of, opt, compile=True)
    inputs, target = torch.zeros(6, 8, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    for rows in ([0, 1, 2, 3], [0, 2, 3], [1, 2]):
        fused.keep(rows)
        opt.keep(rows)
        calls = calls_per_step(lambda: step(inputs, target))
        assert (calls.graphs, calls.waits, calls.refused) == (2, 0, ())
