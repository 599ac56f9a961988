"""Steps that are compiled by another process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import hfusion as hf
from hfusion.step.compile_mode import CompileMode
from hfusion.step.train_step import TrainStep
from tests.step.test_train_step import needs_compiler

needs_groups = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs groups of processes")


@pytest.fixture
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HFUSION_CHECK")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def made(**options: Any) -> TrainStep:
    torch.manual_seed(0)
    fused = hf.fuse([nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)) for _ in range(2)])
    return hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), **options)


def advance(step: TrainStep, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [4, 4, 6, 3, 4, 4][:count]
    return [step(torch.randn(n, 4, generator=generator), torch.zeros(n, dtype=torch.long)) for n in sizes]


@needs_compiler
@pytest.mark.usefixtures("_kept")
def test_the_change_is_where_it_is_asked_for() -> None:
    background, immediate, cached = (made(compile=mode, eager_steps=3) for mode in ("background", True, "background"))
    eager = advance(made(compile=False), 6)
    background_losses, direct, again = (advance(step, 6) for step in (background, immediate, cached))
    for k in range(6):
        assert torch.equal(background_losses[k], direct[k])
        assert torch.equal(background_losses[k], again[k])
        torch.testing.assert_close(background_losses[k], eager[k], rtol=1e-4, atol=1e-6)
        assert k > 2 or torch.equal(background_losses[k], eager[k])
    assert [step.compilations for step in (background, immediate, cached)] == [1, 0, 0]
    assert str(background.report()) == str(immediate.report())
    # Without eager_steps, it changes as soon as it can.
    soon = made(compile="background")
    advance(soon, 2)
    assert soon.report().rows[0].how.startswith("one program")


class Nothing(CustomGraphPass):
    """A pass that changes no graph."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return "nothing"


@needs_compiler
@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    ("settings", "compilations"),
    [
        ({"epilogue_fusion": False, "cpp.cxx": (None, "g++", "clang++")}, [1, 0]),
        ({"aot_inductor.metadata": {"AOTI_PLATFORM": "linux"}}, [1, 0]),
        # A function cannot be handed to another process: the step is compiled in this one.
        ({"post_grad_custom_post_pass": Nothing()}, [1, 1]),
    ],
    ids=["plain values", "left by an exported package", "function"],
)
def test_settings_of_inductor_reach_the_other_process(settings: dict[str, Any], compilations: list[int]) -> None:
    with torch._inductor.config.patch(settings):
        steps = [made(compile="background", eager_steps=1), made(compile=True)]
        background_losses, direct = (advance(step, 3) for step in steps)
    for k in range(3):
        assert k == 0 or torch.equal(background_losses[k], direct[k])
    assert [step.compilations for step in steps] == compilations
    assert all("failed" not in str(step.report()) for step in steps)


@needs_compiler
@pytest.mark.usefixtures("_kept")
def test_an_error_is_told_and_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    step = made(compile="background", eager_steps=2)
    with pytest.warns(UserWarning, match=r"in the background failed: .*; install a C\+\+ compiler"):
        losses = advance(step, 4)
    for actual, expected in zip(losses, advance(made(compile=False), 4), strict=True):
        assert torch.equal(actual, expected)
    assert "in the background failed" in str(step.report())


def gone(process: int) -> bool:
    """Return True if a process ends in time. A zombie, which has ended and was not waited for, counts as gone."""
    for _ in range(600):
        try:
            os.kill(process, 0)
            if re.search(r"^State:\s+Z", Path(f"/proc/{process}/status").read_text(), re.MULTILINE):
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def worker_of(step: TrainStep) -> int:
    (pending,) = (variant.pending for variants in step._variants.values() for variant in variants)
    assert pending is not None
    return int(pending.job._process.pid)


@needs_groups
@pytest.mark.usefixtures("_kept")
def test_a_killed_worker_is_reported_and_steps_go_on() -> None:
    step = made(compile="background", eager_steps=2)
    advance(step, 2)
    os.kill(worker_of(step), signal.SIGKILL)
    with pytest.warns(UserWarning, match="in the background failed: it ended with code -9: without a word"):
        advance(step, 3)
    assert "in the background failed" in str(step.report())


SCRIPT = """
import sys, time
from tests.step.test_compile_scheduler import advance, made, worker_of
step = made(compile="background")
advance(step, 2)
print(worker_of(step), flush=True)
if sys.argv[1] != "end":
    time.sleep(100)
"""


@needs_groups
@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("how", ["end", "SIGINT", "SIGTERM", "SIGKILL"])
def test_it_ends_with_the_process(how: str) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        if how != "end":
            process.send_signal(getattr(signal, how))
        process.wait()
    assert gone(worker)


@pytest.mark.parametrize(
    ("compile", "steps", "match"),
    [
        ("later", None, "compile is 'later': give None to compile where that pays"),
        (1, None, "compile is 1"),
        ("auto", None, "compile is 'auto'"),
        (None, 3, "compile is None, which leaves open when steps change over"),
        (False, 3, "no step will be compiled; omit it"),
        (True, 0, "an integer from 1 on"),
        ("background", 1.5, "an integer from 1 on"),
        (True, True, "an integer from 1 on"),
    ],
)
def test_wrong_arguments(compile: Any, steps: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CompileMode.of(compile, steps)
