"""Steps in blocks of members: on threads, within a memory, and without members that rest."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.step.memory_budget import block_bytes, state_bytes
from hfusion.step.step_signatures import InUse
from hfusion.step.train_step import TrainStep
from tests.step.test_step_graph import arrays, loss_of
from tests.step.test_train_step import ATTENTION, TINY, Pair, batch, needs_compiler
from tests.zoo import MODELS, Model, normal


# Steps in parts, on threads: the same bits as one part after the other.
def adam(array: hf.FusedModule) -> hf.optim.Adam:
    return hf.optim.Adam(array.parameters(), lr=[0.01 * (1 + row) for row in range(len(array))], eps=1e-4)


def parted(model: Model, count: int, parts: int) -> Pair:
    fused, reference = arrays(model, count)
    step = hf.train_step(fused, loss_of, adam(fused), parts=parts, compile=True)
    return Pair(step, fused, reference, hf.per_model(loss_of), adam(reference))


RECURRENT = Model("recurrent", lambda: RecurrentBothWays(), lambda n: torch.randn(n, 3, 4, dtype=torch.float64))


class RecurrentBothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 3, batch_first=True, bidirectional=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.lstm(x)[0].relu().sum(1))


@needs_compiler
@pytest.mark.parametrize("model", [TINY, ATTENTION, RECURRENT], ids=str)
def test_parts_equal_the_loop(model: Model) -> None:
    """Blocks of unequal sizes, other numbers of samples, loaded state, other rates."""
    comparison = parted(model, 5, 2)
    for step, size in enumerate([4, 4, 3, 3, 5, 5]):
        comparison.advance(*batch(model, size), f"after step {step}")
    comparison.load_ones([0.3, 0.2, 0.1, 0.4, 0.5])
    comparison.advance(*batch(model, 4), "after loading, at other rates")
    (row,) = comparison.step.report().rows
    assert row.how.endswith("for 3 and 2 members, called once per block, on 2 threads"), row.how


def classifier(count: int, **settings: Any) -> Any:
    """A step of members alike in all but their weights, with BatchNorm; B programs of one block each would be slow."""
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(count)]
    fused = hf.fuse(models)
    return hf.train_step(fused, F.cross_entropy, adam(fused), **{"compile": True, **settings})


def data(count: int = 0) -> tuple[Any, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x, target = torch.randn(max(count, 1), 5, 4, generator=draw), torch.randint(3, (5,), generator=draw)
    return (hf.stacked(x) if count else x[0]), target


def state(step: Any) -> list[Tensor]:
    tensors = [*step._fused.state_dict().values(), *(p.grad for p in step._fused.parameters())]
    moments = [value for entry in step._optimizer.state.values() for value in entry.values()]
    return [tensor.clone() for tensor in (*tensors, *moments)]


def advance(step: Any, *inputs: Any, times: int = 4) -> list[Tensor]:
    losses = [step(*inputs) for _ in range(times)]
    return [*losses, *state(step)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@needs_compiler
@pytest.mark.parametrize("stacked", [False, True])
def test_threads_show_in_no_bit(stacked: bool) -> None:
    """Blocks of two members, on one, two and four threads, and one after the other in this one."""
    inputs = data(8 if stacked else 0)
    results = []
    for threads in (1, 2, 4, 0):
        step = classifier(8, parts=4)
        step.at_once = 2
        advance(step, *inputs, times=2)
        variant = next(variant for variants in step._variants.values() for variant in variants)
        assert "for 2 members, called once per 2, on 4 threads" in variant.program.how
        if threads:
            variant.program._threads = threads
        else:
            variant.state = InUse(variant.program._program)
        results.append(advance(step, *inputs))
    assert all(same(results[0], other) for other in results[1:])


@needs_compiler
def test_an_error_of_one_part_is_raised_after_all_have_ended() -> None:
    step, (x, target) = classifier(6, parts=3), data()
    advance(step, x, target)
    with pytest.raises(RuntimeError, match="the step of members 0 to 1 failed"):
        step(x, target + 7)
    before = [param.detach().clone() for param in step._fused.parameters()]
    assert torch.isfinite(step(x, target)).all()
    assert not same(before, list(step._fused.parameters()))


@needs_compiler
def test_a_trained_parameter_of_all_members_is_one_part() -> None:
    base = nn.Linear(4, 4)
    fused = hf.fuse([nn.Sequential(base, nn.Linear(4, 3)) for _ in range(4)])
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), parts=2, compile=True)
    advance(step, *data())
    assert "in one part: all members share the trained 0.weight" in str(step.report())


def threads_left(expected: int) -> int:
    """Return the number of threads of teams, once it is `expected` or a minute has passed."""
    deadline = time.monotonic() + 60
    while True:
        gc.collect()
        count = sum(thread.name.startswith("hfusion-") for thread in threading.enumerate())
        if count == expected or time.monotonic() > deadline:
            return count
        time.sleep(0.01)


@needs_compiler
def test_threads_end_with_the_last_step() -> None:
    assert threads_left(0) == 0
    step, other, inputs = classifier(6, parts=3), classifier(6, parts=3), data()
    advance(step, *inputs)
    advance(other, *inputs)
    del step
    # The one that asks is the third.
    assert threads_left(2) == 2
    del other
    assert threads_left(0) == 0


@needs_compiler
def test_a_forked_process_has_threads_of_its_own() -> None:
    step, inputs = classifier(6, parts=3), data()
    advance(step, *inputs)
    process = os.fork()
    if process == 0:
        os._exit(0 if len(advance(step, *inputs)) > 4 else 1)
    assert os.waitpid(process, 0)[1] == 0
    advance(step, *inputs)


@pytest.mark.parametrize("parts", [0, -1, 1.5, "two", True, None])
def test_parts_are_a_number(parts: Any) -> None:
    with pytest.raises(ValueError, match="parts is"):
        classifier(2, parts=parts)


class Dropping(nn.Module):
    """Dropout of several kinds, on stacked and packed values, with rates that differ; normal numbers; attention."""

    instances = 0

    def __init__(self) -> None:
        super().__init__()
        Dropping.instances += 1
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.channels, self.some = nn.Dropout2d(0.4), nn.Dropout(0.1 * (Dropping.instances % 2 + 1))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.channels(F.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.3 if self.training else 0.0)
        h = self.some(h.mean(1))
        return self.head(h + 0.1 * torch.randn_like(h))


@needs_compiler
def test_draws_of_a_member_are_the_same_in_any_part() -> None:
    results = []
    for parts, count in ((1, 4), (2, 4), (4, 4), (1, 2)):
        Dropping.instances = 0
        torch.manual_seed(5)
        members = [Dropping().double() for _ in range(4)][:count]
        fused = hf.fuse(members)
        step = hf.train_step(fused, loss_of, hf.optim.SGD(fused.parameters(), lr=0.0), parts=parts, compile=True)
        x, target = torch.randn(6, 1, 4, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
        step(x, target)
        step(x, target)
        torch.manual_seed(6)
        losses = [step(x, target) for _ in range(3)]
        assert ("threads" in str(step.report())) == (parts > 1), step.report()
        assert not torch.allclose(losses[1], losses[2])
        results.append([*losses, *(param.grad.clone() for param in fused.parameters())])
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            if len(actual) == len(expected):
                torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    # Fewer members take fewer seeds, so the second step is another.
    torch.testing.assert_close(results[3][0], results[0][0][:2], rtol=1e-9, atol=1e-12)


# Members with statistics and draws, which a step in any number of parts leaves alike.
def member() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Dropout(0.3), nn.Linear(30, 3))


def made(parts: int | str = "auto", count: int = 3, **settings: Any) -> TrainStep:
    fused = hf.build(member, seeds=range(count))
    optimizer = hf.optim.Adam(fused.parameters(), lr=[0.1 * (1 + row) for row in range(count)])
    return hf.train_step(fused, F.cross_entropy, optimizer, parts=parts, **{"compile": True, **settings})


def advance_in_parts(step: TrainStep, times: int = 3) -> list[Tensor]:
    """Losses, state, gradients and what is drawn next: all that a step leaves behind."""
    torch.manual_seed(1)
    x, target = torch.randn(8, 40), torch.randint(3, (8,))
    losses = [step(x, target) for _ in range(times)]
    grads = [param.grad for param in step._fused.parameters() if param.grad is not None]
    return [t.clone() for t in (*losses, *step._fused.state_dict().values(), *grads, torch.rand(2))]


# ``hf.train_step(..., memory=)``: blocks of members, against the members alone in float64.
EPS = 1e-4
ZOO = {model.name: model for model in MODELS}


def budget(fused: hf.FusedModule, opt: Any, x: Any, size: int, samples: int, *, is_compiled: bool = False) -> int:
    """The least memory in which ``size`` members fit."""
    program = fused.compiled(Arguments.of((x,), {})).program
    return state_bytes(fused, opt) + block_bytes(program, size, samples, is_compiled=is_compiled)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


@dataclass(frozen=True)
class Case:
    """Five members in blocks of ``size``: 2 leaves a smaller last block."""

    name: str
    make: Any
    draw: Any
    size: int
    optimizer: str = "Adam"
    clip: bool = False
    stacked: bool = False
    compile: bool = False

    def __str__(self) -> str:
        words = [self.name, str(self.size), self.optimizer]
        return "-".join(words + [name for name in ("clip", "stacked", "compile") if getattr(self, name)])


CASES = [
    Case("cnn", small, normal(2, 6, 6), 2),
    Case("cnn", small, normal(2, 6, 6), 3, "SGD", clip=True),
    Case("cnn", small, normal(2, 6, 6), 1, "RMSprop", stacked=True),
    Case("tied", Tied, normal(4), 2, "AdamW", clip=True, stacked=True),
    Case("tied", Tied, normal(4), 3, "SGD"),
    *(Case(name, ZOO[name].make, ZOO[name].draw, 2, clip=True) for name in ("convnet", "attention") if name in ZOO),
    Case("cnn", small, normal(2, 6, 6), 2, clip=True, compile=True),
    Case("tied", Tied, normal(4), 3, "SGD", stacked=True, compile=True),
]


def memory_budget_loss_of(output: Any, target: Tensor) -> Tensor:
    return (output.sin() * target.reshape(-1, *[1] * (output.dim() - 1))).mean()


def clip(fused: hf.FusedModule) -> None:
    hf.optim.clip_grad_norm_(fused.parameters(), 0.05)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_train_as_the_members_alone(case: Case) -> None:
    torch.manual_seed(0)
    models = [case.make().double() for _ in range(5)]
    alone = copy.deepcopy(models)
    fused = hf.fuse(models)
    options = {} if case.optimizer == "SGD" else {"eps": EPS}
    rates = [0.02 * (b + 1) for b in range(5)]
    opt = getattr(hf.optim, case.optimizer)(fused.parameters(), lr=rates, **options)
    kind = getattr(torch.optim, case.optimizer)
    opts = [kind(model.parameters(), lr=lr, **options) for model, lr in zip(alone, rates, strict=True)]
    if case.clip:
        opt.register_step_pre_hook(lambda *_: clip(fused))

    def draw(size: int) -> list[Tensor]:
        return [case.draw(size) for _ in range(5)] if case.stacked else [case.draw(size)] * 5

    def inputs(xs: list[Tensor]) -> Any:
        return hf.stacked(torch.stack(xs)) if case.stacked else xs[0]

    memory = budget(fused, opt, inputs(draw(6)), case.size, 6, is_compiled=case.compile)
    step = hf.train_step(fused, memory_budget_loss_of, opt, compile=case.compile, memory=memory, parts=1)
    for size in (6, 6, 5, 6):
        xs, target = draw(size), torch.rand(size, dtype=torch.float64)
        losses = step(inputs(xs), target)
        expected = []
        for model, other, x in zip(alone, opts, xs, strict=True):
            other.zero_grad()
            loss = memory_budget_loss_of(model(x), target)
            loss.backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            other.step()
            expected.append(loss.detach())
        torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-9, atol=1e-11)
    for name, stack in fused.state_dict().items():
        reference = torch.stack([model.state_dict()[name] for model in alone])
        torch.testing.assert_close(stack, reference, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    for name, param in fused.named_parameters():
        reference = torch.stack([dict(model.named_parameters())[name].grad for model in alone])
        torch.testing.assert_close(param.grad, reference, rtol=1e-9, atol=1e-11)
    assert f"{case.size} of 5 at a time, at an estimated peak of" in str(step.report())
    assert ("program" in str(step.report())) == case.compile


def dropout(p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 2)).double()


def test_what_members_draw_depends_on_no_block() -> None:
    """Also for members with different dropout rates."""
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    losses = []
    for size in (1, 2, 3, 5):
        torch.manual_seed(0)
        fused = hf.fuse([dropout(0.2 + 0.1 * (b % 3)) for b in range(5)])
        opt = hf.optim.SGD(fused.parameters(), lr=0.1)
        step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, size, 6))
        torch.manual_seed(1)
        losses.append(torch.stack([step(x, y) for _ in range(3)]))
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-12, atol=0)


def test_a_shared_parameter_gets_the_sum_over_blocks() -> None:
    torch.manual_seed(0)
    base = nn.Linear(4, 4).double()
    models = [nn.Sequential(base, nn.Tanh(), nn.Linear(4, 2).double()) for _ in range(5)]
    alone = copy.deepcopy(models)
    fused = hf.fuse(models)
    opt = hf.optim.SGD(fused.parameters(), lr=0.1)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, 2, 6))
    losses = step(x, y)
    expected = torch.stack([F.mse_loss(model(x), y) for model in alone])
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-9, atol=0)
    shared = dict(fused.named_parameters())["0.weight"]
    torch.testing.assert_close(shared.grad, alone[0][0].weight.grad, rtol=1e-9, atol=1e-12)


def test_too_little_memory_names_the_numbers() -> None:
    fused = hf.fuse([nn.Linear(4, 2) for _ in range(3)])
    opt = hf.optim.SGD(fused.parameters(), lr=0.1)
    step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=64)
    # Of 10 weights in each of 3 members, and as many gradients.
    with pytest.raises(hf.PlanError, match=r"3 members of Linear takes .*: 240B for .* memory=64B is less"):
        step(torch.randn(6, 4), torch.randn(6, 2))


def test_hooks_are_refused_where_members_are_computed_in_blocks() -> None:
    fused = hf.fuse([nn.Linear(4, 2) for _ in range(3)])
    opt, x = hf.optim.SGD(fused.parameters(), lr=0.1), torch.randn(6, 4)
    step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, 1, 6))
    fused.register_forward_hook(lambda *_: None)
    with pytest.raises(hf.FusionError, match=r"memory= lets a step compute 1 of 3 members at a time.* has a hook"):
        step(x, torch.randn(6, 2))


# Idle members: computation in blocks leaves them out, and the results of the others do not change.
MEMBERS = 6


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def convolved() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


def shuffling() -> nn.Module:
    """Draws from the generator of all members."""

    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.randperm(9)]

    return nn.Sequential(Shuffled(), nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("make", "size", "parts", "left_out"),
    [
        (dense, None, 1, []),
        (dense, 2, 1, [2, 3]),
        (dense, None, 2, [0, 1, 2]),
        (dense, 4, 1, []),
        (convolved, 1, 1, [0, 2, 3]),
        (shuffling, 2, 1, []),
    ],
    ids=["one program", "blocks", "threads", "blocks of two sizes", "members", "drawn together"],
)
def test_others_do_not_notice(make: type[nn.Module], size: int | None, parts: int, left_out: list[int]) -> None:
    idle = frozenset([0, 1, 2] if parts == 2 else [0, 2, 3])

    def run(resting: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        fused = hf.fuse([make() for _ in range(MEMBERS)])
        opt = hf.optim.AdamW(fused.parameters(), lr=0.01)
        step, losses = hf.train_step(fused, F.cross_entropy, opt, parts=parts, compile=True), []
        step.at_once = size
        for number in range(8):
            if number == 4 and resting:
                step.idle = idle
            losses.append(step(torch.randn(5, 9), torch.randint(3, (5,))))
        states = [tensor for entry in opt.state.values() for tensor in entry.values()]
        return losses, [*fused.state_dict().values(), *states]

    whole, with_idle = run(False), run(True)
    others = [member for member in range(MEMBERS) if member not in idle]
    for actual, expected in zip([*with_idle[0], *with_idle[1]], [*whole[0], *whole[1]], strict=True):
        assert torch.equal(actual[others], expected[others])
    assert with_idle[0][-1].isnan().nonzero().flatten().tolist() == left_out
