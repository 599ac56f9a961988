"""Values of programs: sizes that are assumed, ragged stacks, seeds of members, keys of what a function reads."""

from __future__ import annotations

import ast
import copy
import io
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.calls import Ragged
from hfusion.core.fingerprint import read_state
from hfusion.core.guards import Assumptions, Guards
from hfusion.core.member_random import MemberSeeds
from tests.alone import Branch, Member, Own, close, normal
from tests.forwards.outside import READS
from tests.forwards.table import Sevenfold


# The fingerprint of the state that a function reads changes with each value that it reads.
@pytest.mark.parametrize("kind", READS)
def test_another_value_gives_another_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAU", raising=False)
    read, put = READS[kind]
    put(1.0)
    before = read_state(read)
    put(0.5)
    # None: more than can be compared, so that nothing is reused.
    assert before is None or read_state(read) != before
    put(1.0)
    assert read_state(read) == before


# Assumptions of a trace about sizes, checked on numbers and on another trace's symbols.
class Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1).sum(1) + (y if y.shape[0] > 4 else y * 2).mean(0)


@pytest.mark.parametrize(
    ("shapes", "holds"),
    [
        ([(3, 8), (6, 4)], True),
        ([(2, 10), (7, 5)], True),
        ([(2, 9), (7, 5)], False),
        ([(2, 10), (7, 4)], False),
        ([(2, 10), (3, 5)], False),
        ([(1, 10), (7, 5)], False),
        ([(2, 10), (0, 5)], False),
    ],
)
def test_sizes(shapes: list[tuple[int, ...]], holds: bool) -> None:
    captured = capture(Halves(), (torch.ones(3, 8), torch.ones(6, 4)), {}, dims=[{1}, {1}])
    assert captured.guards(shapes) is holds
    assert isinstance(captured.guards, Guards)
    assumed = captured.guards.assumptions()
    assert assumed(shapes) is holds
    # They are plain values.
    assert Assumptions(*ast.literal_eval(repr((assumed.sizes, assumed.code)))) == assumed


# Tensors of different sizes, one per member, and what may be done with them.
def ragged(*sizes: int) -> Ragged:
    return Ragged([torch.arange(size * 2.0).view(size, 2) for size in sizes])


def test_it_is_a_sequence_of_the_members_tensors() -> None:
    y = ragged(3, 1)
    assert len(y) == 2
    assert y.sizes == (3, 1)
    assert [tensor.shape[0] for tensor in y] == [3, 1]
    assert y[-1] is y[1]
    assert y[:1].sizes == (3,)
    assert repr(y) == "Ragged(2 members: float32 [3, 2], [1, 2])"
    assert y.map(torch.Tensor.double)[0].dtype == torch.float64
    with pytest.raises(IndexError):
        y[2]
    with pytest.raises(TypeError, match="give a member first"):
        y[0, 1]  # type: ignore[call-overload]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y))])
def test_copies_hold_the_same(copied: Any) -> None:
    y = ragged(3, 1)
    again = copied(y)
    assert again is not y
    assert all(torch.equal(a, b) for a, b in zip(y, again, strict=True))


def test_stacked_gives_it_for_batches_of_different_sizes() -> None:
    xs = [torch.zeros(3, 2), torch.zeros(5, 2)]
    assert isinstance(hf.stacked(xs), Ragged)
    assert hf.stacked(hf.stacked(xs)).sizes == (3, 5)
    nested = hf.stacked([{"x": x, "mask": (x[:, 0], 1)} for x in xs])
    assert nested["x"].sizes == nested["mask"][0].sizes == (3, 5)
    assert nested["mask"][1] == 1
    widths = hf.stacked([torch.zeros(3, 2), torch.zeros(3, 4)])
    assert isinstance(widths, Ragged)
    assert [list(tensor.shape) for tensor in widths] == [[3, 2], [3, 4]]


# Random numbers from seeds of the members: theirs alone, and as random as they should be.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def seeds(members: int) -> torch.Tensor:
    return torch.empty(members, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0))


@DTYPES
def test_the_numbers_of_a_member_are_its_own(dtype: torch.dtype) -> None:
    whole, row = MemberSeeds(seeds(5)), MemberSeeds(seeds(5)[3:4])
    for shape in ((2, 3), (7,)):
        draws = whole.uniform((5, *shape), dtype), row.uniform((1, *shape), dtype)
        assert torch.equal(draws[0][3:4], draws[1])
        assert draws[0].dtype is dtype
    assert not torch.equal(whole.uniform((5, 4), dtype), whole.uniform((5, 4), dtype))
    assert len(whole.uniform((5, 99), dtype)[:, 0].unique()) == 5


# Arrays in several threads: each trains as alone, and what else the process does goes on meanwhile.


def train(rounds: int) -> None:
    for _ in range(rounds):
        models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double() for _ in range(2)]
        alone = [Member(model, torch.optim.SGD, F.mse_loss, Own(0.1)) for model in copy.deepcopy(models)]
        fused = hf.fuse(models)
        step = hf.train_step(
            fused, lambda out, y: F.mse_loss(out, y), hf.optim.SGD(fused.parameters(), 0.1), compile=False
        )
        x, y = normal(5, 4), normal(5, 1)
        for _ in range(2):
            close(step(x, y), [member.call(x, y)[0] for member in alone], "losses")
        hf.fuse([Branch(4, 1).double(), Branch(4, 1).double()])(x)


def chatter(stop: threading.Event) -> int:
    rounds = 0
    while not stop.wait(0.005):
        x = torch.ones(2, requires_grad=True)
        print(".", end="")
        Sevenfold.apply(x).sum().backward()
        assert x.grad is not None
        assert (x.grad == 7).all()
        nn.Linear(2, 2)(x.detach())
        rounds += 1
    return rounds


def test_threads_that_capture_and_one_that_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, out = threading.Event(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    before = torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr

    with ThreadPoolExecutor(3) as pool:
        talker = pool.submit(chatter, stop)
        try:
            list(pool.map(train, (2, 2)))
        finally:
            stop.set()
    assert (torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr) == before
    assert talker.result() == out.getvalue().count(".") > 0
