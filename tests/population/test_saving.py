"""Saves restore the saved state: all members, some members, members of two saves, or one in a plain model."""

from __future__ import annotations

import copy
import math
import random
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.checkpoint import files
from tests.checkpoint.living import OPTIONS, Batches, Net, population, same, train


@pytest.mark.parametrize("compiled", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(compiled: bool, tmp_path: Path) -> None:
    batches = Batches()
    pop = population(4, compile=compiled, scaler=None)
    train(pop, batches, 3)
    pop.stop(1)
    pop.copy(0, 2)
    train(pop, batches, 2)
    pop.save(tmp_path, loader=batches, extra={"best": 0.5, "names": ("a", 1), "inf": math.inf})
    expected = train(pop, batches, 4)
    torch.manual_seed(99)
    again = Batches()
    other = hf.Population.load(tmp_path, Net, loader=again, **{**OPTIONS, "compile": compiled})
    assert other.tags == ["net 0.0", None, "net 0.2", "net 0.3"]
    losses = train(other, again, 4)
    assert torch.equal(losses[:, [0, 2, 3]], expected[:, [0, 2, 3]])
    assert same(pop, other)
    assert other.scheduler is not None
    other.start(1, Net(), lr=0.1, tag="new")
    assert other.step(*next(iter(again))).isfinite().all()


def test_some_members_and_the_members_of_two(tmp_path: Path) -> None:
    pops = [population(3, seed) for seed in (0, 1)]
    for number, pop in enumerate(pops):
        train(pop, Batches(), 3 + number)
        pop.save(tmp_path / str(number))
    some = hf.Population.load(tmp_path / "1", Net, tags=["net 1.2", "net 1.0"], **OPTIONS)
    assert some.tags == ["net 1.2", "net 1.0"]
    merged = hf.Population.load([tmp_path / "0", tmp_path / "1"], Net, **OPTIONS)
    assert merged.tags == [tag for pop in pops for tag in pop.tags]
    assert merged.ages.tolist() == [3, 3, 3, 4, 4, 4]
    assert torch.equal(merged.hparams["lr"][3:], pops[1].hparams["lr"])
    x, y = next(iter(Batches()))
    for pop in (*pops, merged, some):
        pop.fused.eval()
    expected = [pop.step(x, y) for pop in pops]
    torch.testing.assert_close(merged.step(x, y), torch.cat(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(some.step(x, y), expected[1][[2, 0]], rtol=1e-5, atol=1e-6)
    for merged_param, *params in zip(merged.fused.parameters(), *(pop.fused.parameters() for pop in pops), strict=True):
        torch.testing.assert_close(merged_param.detach(), torch.cat(params).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(hf.CheckpointError, match=r"'net 0.0' is a member in .* a merge wants every member once"):
        hf.Population.load([tmp_path / "0", tmp_path / "0"], Net, **OPTIONS)
    with pytest.raises(hf.CheckpointError, match="'nobody' is no member in"):
        hf.Population.load(tmp_path / "0", Net, tags=["nobody"], **OPTIONS)


def test_pieces_alone(tmp_path: Path) -> None:
    """A fused module with an optimizer, a torch scheduler and a scaler, in a hand-written training loop."""
    base = nn.Linear(4, 4).requires_grad_(False)

    def parts(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        fused = hf.fuse([nn.Sequential(base, nn.Dropout(0.1), nn.Linear(4, 3)) for _ in range(3)])
        opt = hf.optim.SGD(fused.parameters(), lr=[0.1, 0.2, 0.3], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4])
        return fused, opt, scheduler, hf.optim.GradScaler(init_scale=64.0, growth_interval=2)

    def step(fused: Any, opt: Any, scheduler: Any, scaler: Any) -> None:
        opt.zero_grad()
        losses = hf.per_model(F.cross_entropy)(fused(torch.randn(5, 4)), torch.randint(3, (5,)))
        scaler.scale(losses).sum().backward()
        scaler.step(opt)
        scaler.update()
        scheduler.step()

    saved, resumed = parts(0), parts(1)
    for _ in range(3):
        step(*saved)
    path = hf.save(tmp_path, *saved[:2], scheduler=saved[2], scaler=saved[3], tags=["a", "b", "c"], step=3)
    assert path.name == "save-000000000001"
    draws = random.random(), np.random.rand()
    step(*saved)
    loaded = hf.load(path, *resumed[:2], scheduler=resumed[2], scaler=resumed[3])
    assert (loaded.step, loaded.tags) == (3, ["a", "b", "c"])
    assert (random.random(), np.random.rand()) == draws
    step(*resumed)
    for (key, actual), expected in zip(saved[0].state_dict().items(), resumed[0].state_dict().values(), strict=True):
        assert torch.equal(actual, expected), key
    assert saved[3].get_scale().tolist() == resumed[3].get_scale().tolist()
    smaller = hf.fuse([nn.Sequential(base, nn.Dropout(0.1), nn.Linear(4, 3)) for _ in range(2)])
    opt = hf.optim.SGD(smaller.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4])
    with pytest.raises(hf.CheckpointError, match="MultiStepLR has one state for all members"):
        hf.load(path, smaller, opt, scheduler=scheduler, tags=["a", "c"])
    with pytest.raises(hf.CheckpointError, match=r"torch\.float32 in .*torch\.float64 here"):
        hf.load(path, resumed[0].double())


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    pop = population(2)
    for score in (0.1, 0.9, 0.3, 0.2, 0.5):
        pop.save(tmp_path, keep=2, score=score)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"save-{n:012d}" for n in (2, 4, 5)]
    saving = pop.save(tmp_path, keep=2, wait=False)
    assert saving.result().name == "save-000000000006"
    with pytest.raises(hf.CheckpointError, match="got Future"):
        hf.load(saving, pop.fused)


def test_a_save_in_the_background_holds_a_layer_of_all_members_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = Event(), files.write
    monkeypatch.setattr(
        files, "write", lambda *args, **options: write(*args, **options) if may_write.wait(60) else None
    )
    base = nn.Linear(4, 4).requires_grad_(False)
    pop = hf.Population(
        [nn.Sequential(base, nn.Linear(4, 3)) for _ in range(2)],
        optimizer=partial(hf.optim.SGD, lr=0.1),
        loss=F.cross_entropy,
        compile=False,
    )
    before = copy.deepcopy(pop.fused.state_dict())
    saving = pop.save(tmp_path, wait=False)
    pop.step(torch.randn(5, 4), torch.randint(3, (5,)))
    pop.fused.get_parameter("0.weight").zero_()
    may_write.set()
    saving.result()
    hf.load(tmp_path, pop.fused)
    for name, value in pop.fused.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_save_of_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pop = population(2)
    with monkeypatch.context() as later:
        later.setattr(files, "VERSION", files.VERSION + 1)
        pop.save(tmp_path)
    words = f"of version {files.VERSION + 1}, and this hfusion reads version {files.VERSION}"
    with pytest.raises(hf.CheckpointError, match=words):
        hf.Population.load(tmp_path, Net, **OPTIONS)


def two_groups(params: Any) -> hf.optim.AdamW:
    first, *others = params
    return hf.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.1)


def test_another_model_or_optimizer_is_an_error_at_load(tmp_path: Path) -> None:
    pop = population(2)
    train(pop, Batches(), 1)
    pop.save(tmp_path)

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 4)

    for make, options, words in (
        (Other, {}, r"last.weight is \[2, 3, 6\] torch.float32 in .* \[2, 4, 6\] torch.float32 here"),
        (lambda: nn.Linear(4, 3), {}, "do not have the same tensors: bias is in one of them only"),
        (Net, {"optimizer": lambda p: hf.optim.SGD(p, lr=0.1)}, "was saved with another optimizer: AdamW, not SGD"),
        (
            Net,
            {"optimizer": lambda p: hf.optim.AdamW(p, lr=0.1, amsgrad=True)},
            "'amsgrad': False.*, not .*'amsgrad': True",
        ),
        (Net, {"optimizer": two_groups}, "1 param groups, not 2"),
        (Net, {"scaler": hf.optim.GradScaler()}, "holds no scaler"),
    ):
        with pytest.raises(hf.CheckpointError, match=words):
            hf.Population.load(tmp_path, make, **{**OPTIONS, **options})
    with pytest.raises(hf.CheckpointError, match="holds no position of a loader"):
        hf.Population.load(tmp_path, Net, loader=Batches(), **OPTIONS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(hf.CheckpointError, match="holds no save"):
        hf.Population.load(tmp_path / "empty", Net, **OPTIONS)


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "NAdam", "SGD", "RMSprop"])
@pytest.mark.parametrize("last", [False, True])
def test_a_trained_array_merges_with_one_that_is_not(kind: str, last: bool, tmp_path: Path) -> None:
    more = {"initial_accumulator_value": 0.5} if kind == "Adagrad" else {}
    more |= {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}

    def options() -> dict[str, Any]:
        return {
            "optimizer": lambda params: getattr(hf.optim, kind)(params, lr=0.1, **more),
            "loss": F.cross_entropy,
            "compile": False,
        }

    torch.manual_seed(0)
    folders = [tmp_path / "old", tmp_path / "new"]
    old, new = (
        hf.Population([nn.Linear(3, 2).double() for _ in tags], tags=[*tags], **options()) for tags in ("ab", "c")
    )
    batch = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    old.step(*batch)
    for pop, folder in zip((old, new), folders, strict=True):
        pop.save(folder)
    merged = hf.Population.load(folders[::-1] if last else folders, lambda: nn.Linear(3, 2).double(), **options())
    for _ in range(3):
        for pop in (old, new, merged):
            pop.step(*batch)
    for pop in (old, new):
        for tag in pop.tags:
            merged_member, member = merged.models[merged.row(tag)], pop.models[pop.row(tag)]
            for actual, expected in zip(merged_member.parameters(), member.parameters(), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert sorted(merged.ages.tolist()) == [3, 4, 4]


def test_members_that_join_after_a_load_begin_as_those_before_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"loss": F.mse_loss, "compile": False}
    first, other = (
        {"optimizer": partial(hf.optim.SGD, lr=lr), "scaler": hf.optim.GradScaler(init_scale=scale), **options}
        for lr, scale in ((0.25, 8.0), (0.5, 2.0))
    )
    pop = hf.Population([nn.Linear(3, 2) for _ in range(2)], **first)
    pop.step(torch.randn(4, 3), torch.randn(4, 2))
    pop.save(tmp_path)
    again = hf.Population.load(tmp_path, lambda: nn.Linear(3, 2), **other)
    row = again.start(None, nn.Linear(3, 2))
    assert again.hparams["lr"][row] == 0.25
    assert again.scaler is not None
    assert again.scaler.get_scale()[row] == 8.0
