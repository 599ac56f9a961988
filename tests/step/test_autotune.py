"""Parts or one part: measured once, and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.cache import read_sealed, write_sealed
from hfusion.step.autotune import ONE_PART, PARTS
from hfusion.step.train_step import TrainStep
from tests.step.test_train_step import needs_compiler


def member() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Dropout(0.3), nn.Linear(30, 3))


def made(parts: int | str = "auto", count: int = 3, **settings: Any) -> TrainStep:
    fused = hf.build(member, seeds=range(count))
    optimizer = hf.optim.Adam(fused.parameters(), lr=[0.1 * (1 + row) for row in range(count)])
    return hf.train_step(fused, F.cross_entropy, optimizer, parts=parts, **{"compile": True, **settings})


def advance(step: TrainStep, times: int = 3) -> list[Tensor]:
    """Losses, state, gradients and what is drawn next: all that a step leaves behind."""
    torch.manual_seed(1)
    x, target = torch.randn(8, 40), torch.randint(3, (8,))
    losses = [step(x, target) for _ in range(times)]
    grads = [param.grad for param in step._fused.parameters() if param.grad is not None]
    return [t.clone() for t in (*losses, *step._fused.state_dict().values(), *grads, torch.rand(2))]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def keep(path: Path, seconds: object) -> None:
    write_sealed(path, json.dumps({"seconds": seconds}).encode())


@needs_compiler
@pytest.mark.parametrize("background", [False, True])
def test_what_was_measured_once_holds_for_all(background: bool, folder: Path) -> None:
    """Measuring leaves nothing behind in the step that does it."""
    settings: dict[str, Any] = {"compile": "background", "eager_steps": 1} if background else {}
    first = made(**settings)
    results = [advance(first), advance(made())]
    (path,) = folder.glob("*-choice.json")
    assert path.stat().st_mode & 0o777 == 0o600
    seconds = json.loads(read_sealed(path))["seconds"]
    assert set(seconds) == {ONE_PART, PARTS}
    fastest = min(seconds, key=seconds.get)
    assert f"chosen: {fastest} " in str(first.report())
    results.append(advance(made(parts=1 if fastest == ONE_PART else 2)))
    assert same(results[0], results[1])
    assert same(results[0], results[2])

    for variant, parts in ((ONE_PART, 1), (PARTS, 2)):
        keep(path, {ONE_PART: 1.0, PARTS: 1.0, variant: 0.5})
        step = made(**settings)
        results = [advance(step), advance(made(parts=parts))]
        assert step.compilations == 0
        assert f"chosen: {variant} 500 ms" in str(step.report())
        assert same(*results)


@needs_compiler
def test_without_a_choice_that_can_be_kept_parts_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_PROGRAMS", "0")
    step = made(count=2)
    assert same(advance(step), advance(made(parts=2, count=2)))
    assert "chosen" not in str(step.report())
    assert not list(folder.glob("*-choice.json"))
