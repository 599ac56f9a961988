"""Loading members into arrays of other widths and bases; invalid values, scores, names and schedulers are reported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, StepLR

import hfusion as hf
from hfusion.checkpoint.files import saves
from tests.checkpoint.living import OPTIONS, Batches, Net, population, train

BATCH = torch.randn(6, 4), torch.randint(3, (6,))


@pytest.mark.parametrize("trained", [False, True])
def test_one_of_the_members_of_a_base(trained: bool, tmp_path: Path) -> None:
    """Alone it has the base for itself, with its state in the optimizer."""

    def array(*bases: nn.Module) -> tuple[hf.FusedModule, hf.optim.SGD]:
        fused = hf.fuse([nn.Sequential(base.requires_grad_(trained), nn.Linear(4, 3)) for base in bases])
        return fused, hf.optim.SGD(fused.parameters(), lr=0.1, momentum=0.9)

    fused, optimizer = array(*[nn.Linear(4, 4)] * 3)
    hf.train_step(fused, F.cross_entropy, optimizer, compile=False)(*BATCH)
    hf.save(tmp_path, fused, optimizer)
    loaded, own = array(nn.Linear(4, 4))
    hf.load(tmp_path, loaded, own, tags="member 1")
    for name, tensor in loaded.named_parameters():
        stack = dict(fused.named_parameters())[name]
        expected = stack[1] if stack.dim() == tensor.dim() else stack
        torch.testing.assert_close(tensor[0], expected, rtol=0, atol=0)
        if tensor.requires_grad:
            moved = optimizer.state[stack]["momentum_buffer"]
            momentum = own.state[tensor]["momentum_buffer"][0]
            assert torch.equal(momentum, moved[1] if moved.dim() > momentum.dim() else moved)
    assert hf.train_step(loaded, F.cross_entropy, own, compile=False)(*BATCH).isfinite().all()
    if trained:
        with pytest.raises(
            hf.CheckpointError, match=r"0\.weight is trained and each member's own here, and was not in"
        ):
            hf.load(tmp_path, *array(*[nn.Linear(4, 4) for _ in range(3)]))


def test_a_base_that_members_train_together_is_saved_with_its_state(tmp_path: Path) -> None:
    def array(count: int) -> tuple[hf.FusedModule, hf.optim.FusedOptimizer]:
        base = nn.Linear(4, 4)
        fused = hf.fuse([nn.Sequential(base, nn.Linear(4, 3)) for _ in range(count)])
        return fused, hf.optim.SGD(fused.parameters(), lr=0.1, momentum=0.9)

    fused, opt = array(3)
    step = hf.train_step(fused, F.cross_entropy, opt, compile=False)
    step(*BATCH)
    hf.save(tmp_path, fused, opt)
    again, other = array(3)
    hf.load(tmp_path, again, other)
    pairs = zip(fused.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(opt.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"]) for p, q in pairs)
    losses = step(*BATCH)
    assert torch.equal(losses, hf.train_step(again, F.cross_entropy, other, compile=False)(*BATCH))
    alone, alone_opt = array(1)
    hf.load(tmp_path, alone, alone_opt, tags="member 1")
    with pytest.raises(hf.CheckpointError, match=r"0\.weight is trained and each member's own here, and was not in"):
        hf.load(tmp_path, hf.fuse([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)) for _ in range(3)]))


def test_free_rows_have_no_schedule_to_go_on(tmp_path: Path) -> None:
    """Members have schedules of different kinds, by name; who starts in a free row brings one."""
    makes: dict[str, Any] = {
        "a": lambda o: LinearLR(o, 0.1, total_iters=5),
        "b": lambda o: StepLR(o, 2),
        "c": lambda o: CosineAnnealingLR(o, 9),
    }
    options = {**OPTIONS, "scheduler": list(makes.values())}
    pop = hf.Population([Net() for _ in makes], **options, tags=list(makes))
    train(pop, Batches(), 2)
    pop.stop(0)
    pop.save(tmp_path)
    again = hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": makes})
    assert again.tags == [None, "b", "c"]
    assert again.scheduler is not None
    assert again.scheduler.kinds[1:] == ["StepLR", "CosineAnnealingLR"]
    assert torch.equal(again.hparams["lr"][1:], pop.hparams["lr"][1:])
    again.start(0, Net(), lr=0.1, scheduler=makes["a"])
    assert again.scheduler.last_epochs.tolist() == [0, 2, 2]
    with pytest.raises(hf.CheckpointError, match=r"scheduler has none for 'b': give one for each of \['b', 'c'\]"):
        hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": {"a": makes["a"]}})
    with pytest.raises(hf.CheckpointError, match="holds StepLR for 'b', and its scheduler here is Cosine"):
        hf.Population.load(tmp_path, Net, **OPTIONS)
    with pytest.raises(hf.CheckpointError, match="holds CosineAnnealingLR for 'c', and its scheduler here is Step"):
        hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": {"b": makes["b"], "c": makes["b"]}})
    with pytest.warns(UserWarning, match="holds a scheduler, and scheduler= was not given"):
        hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": None})


def test_a_name_is_loaded_once(tmp_path: Path) -> None:
    pop = population(3)
    pop.save(tmp_path)
    assert hf.load(tmp_path, Net(), tags="net 0.2").tags == ["net 0.2"]
    with pytest.raises(hf.CheckpointError, match=r"'net 0\.1' is named twice: load it once"):
        hf.Population.load(tmp_path, Net, tags=["net 0.1", "net 0.1"], **OPTIONS)
    with pytest.raises(hf.CheckpointError, match="no folder was given"):
        hf.Population.load([], Net, **OPTIONS)
    pop.save(tmp_path / "copy")
    with pytest.raises(hf.CheckpointError, match=r"'net 0\.0' is a member in .* and in .*copy"):
        hf.Population.load([tmp_path, tmp_path / "copy"], Net, **OPTIONS)


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"score": math.nan}, "score=nan: no save is better or worse than this"),
    "text": ({"score": "a"}, "score='a': give one number, or None"),
    "part": ({"keep": 1.5}, "keep=1.5: give how many saves are left, at least 1"),
    "sparse": ({"extra": torch.eye(2).to_sparse()}, "extra is a tensor that is torch.sparse_coo on cpu"),
    "loader": ({"loader": 3}, "loader must have a state_dict, .* got int"),
}


@pytest.mark.parametrize("name", ODD)
def test_invalid_values_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    pop = population(2)
    options, words = ODD[name]
    with pytest.raises(hf.CheckpointError, match=words):
        pop.save(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_in_the_background_warns(tmp_path: Path) -> None:
    pop = population(2)
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"a save has failed: .*file could not write a checkpoint"):
        assert isinstance(pop.save(tmp_path / "file", wait=False).exception(), hf.CheckpointError)
    assert pop.save(tmp_path / "good").result().name == "save-000000000001"


def test_a_save_without_its_files_names_another(tmp_path: Path) -> None:
    pop = population(2)
    pop.save(tmp_path)
    (tmp_path / "save-000000000009").mkdir()
    with pytest.raises(hf.CheckpointError, match=r"manifest.json is missing; another save is .*save-000000000001"):
        hf.load(tmp_path, pop.fused)
    (tmp_path / "save-999999999999").mkdir()
    assert pop.save(tmp_path).result() == saves(tmp_path)[-1] == tmp_path / "save-1000000000000"


def test_unsupported_optimizers_are_refused(tmp_path: Path) -> None:
    fused = hf.fuse([nn.Linear(4, 3) for _ in range(2)])
    other: Any = torch.optim.SGD(fused.parameters(), lr=0.1)
    hf.save(tmp_path, fused)
    words = r"optimizer must be of hf\.optim, got torch\.optim\.sgd\.SGD, whose state has no rows"
    for use in (hf.save, hf.load):
        with pytest.raises(hf.CheckpointError, match=words):
            use(tmp_path, fused, other)
