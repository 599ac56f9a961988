"""When, by whom and how a step is compiled, and what comes of a compilation that fails."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import hfusion as hf
from hfusion.device.cache import read_sealed, write_sealed
from hfusion.step import compile_scheduler, program_cache, step_signatures
from hfusion.step.compile_request import BackgroundJob
from hfusion.step.program_cache import NoProgram, StepTimes
from hfusion.step.train_step import TrainStep
from tests.step.test_blocks import advance_in_parts, same
from tests.step.test_blocks import made as made_in_parts
from tests.step.test_train_step import needs_compiler


@needs_compiler
@pytest.mark.usefixtures("_kept")
def test_steps_are_compiled_once_they_took_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short jobs never compile."""
    monkeypatch.setattr(step_signatures, "_STEADY", 0.0)
    patient, short = made(compile=None), made(compile=None)
    advance(short, 4)
    assert "first step of its kind" in str(short.report())
    advance(patient, 2)
    monkeypatch.setattr(compile_scheduler, "PATIENCE", 0.0)
    advance(patient, 2)
    assert "compiled in the background" in str(patient.report())
    job_of(patient)._process.wait()
    losses = advance(patient, 2)
    assert "program of" in str(patient.report())
    plain = made(compile=False)
    expected = [loss for count in (2, 2, 2) for loss in advance(plain, count)][-2:]
    torch.testing.assert_close(losses, expected)


# Compiled steps are compared with eager ones, once, where ``compile=None`` leaves the choice.
@needs_compiler
@pytest.mark.parametrize("amp", [False, True])
def test_the_faster_way_runs(folder: Path, amp: bool) -> None:
    """Both are timed while they train, and later processes decide by the same times."""
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        compiled, eager = advance_in_parts(made_in_parts()), advance_in_parts(made_in_parts(compile=False))
        assert not list(folder.glob("*-eager.json"))
        first = made_in_parts(compile=None)
        advance_in_parts(first, 22)
        (path,) = folder.glob("*-eager.json")
        wins = StepTimes(**json.loads(read_sealed(path))).eager_wins
        assert first.compilations == 0
        assert ("eager steps are faster" in str(first.report())) is wins

        for way, expected in (("compiled", compiled), ("eager", eager)):
            write_sealed(path, json.dumps({"compiled": 1.0, "eager": 1.0, way: 0.5}).encode())
            step = made_in_parts(compile=None)
            assert same(advance_in_parts(step), expected)
            shown = "eager 1e+03" if way == "compiled" else "eager: eager steps are faster on this machine, measured:"
            assert shown in str(step.report())


# Steps that are compiled by another process.
needs_groups = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs groups of processes")


@pytest.fixture
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HFUSION_STAGES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def _impatient(_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compiled elsewhere at the second call of their kind, and used however fast they are."""
    monkeypatch.setattr(compile_scheduler, "PATIENCE", 0.0)
    monkeypatch.setattr(step_signatures, "_STEADY", 0.0)


def made(**options: Any) -> TrainStep:
    torch.manual_seed(0)
    fused = hf.fuse([nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)) for _ in range(2)])
    return hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), **options)


def advance(step: TrainStep, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [4, 4, 6, 3, 4, 4][:count]
    return [step(torch.randn(n, 4, generator=generator), torch.zeros(n, dtype=torch.long)) for n in sizes]


def job_of(step: TrainStep) -> BackgroundJob:
    """Return the only compilation that is going on."""
    (job,) = (variant.job for variants in step._variants.values() for variant in variants if variant.job is not None)
    return job


@needs_compiler
@pytest.mark.usefixtures("_impatient")
def test_an_error_is_told_and_steps_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    step, eager = made(compile=None), made(compile=False)
    losses, expected = advance(step, 2), advance(eager, 2)
    job_of(step)._process.wait()
    with pytest.warns(UserWarning, match=r"in the background failed: .*; install a C\+\+ compiler"):
        losses += advance(step, 4)
    for actual, plain in zip(losses, expected + advance(eager, 4), strict=True):
        assert torch.equal(actual, plain)
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


@needs_groups
@pytest.mark.usefixtures("_impatient")
def test_a_killed_worker_is_reported_and_steps_go_on() -> None:
    step = made(compile=None)
    advance(step, 2)
    process = job_of(step)._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.warns(UserWarning, match="in the background failed: it ended with code -9: no output"):
        advance(step, 3)
    assert "in the background failed" in str(step.report())


SCRIPT = """
import sys, time
from hfusion.step import compile_scheduler
from tests.step.test_compiling import advance, job_of, made
compile_scheduler.PATIENCE = 0.0
step = made(compile=None)
advance(step, 2)
print(job_of(step)._process.pid, flush=True)
if sys.argv[1] != "end":
    time.sleep(100)
"""


@needs_groups
@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("how", ["end", "SIGINT", "SIGTERM", "SIGKILL"])
def test_it_ends_with_the_process(how: str) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        if how != "end":
            process.send_signal(getattr(signal, how))
        process.wait()
    assert gone(worker)


# Compiled steps on disk.
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache folder in which programs and times are kept, however busy the machine is."""
    monkeypatch.setattr(step_signatures, "_STEADY", math.inf)
    monkeypatch.delenv("HFUSION_STAGES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hfusion"


@needs_compiler
def test_a_second_step_finds_what_the_first_has_compiled(folder: Path) -> None:
    first, second = made(compile=True), made(compile=True)
    losses = [advance(first, 4), advance(second, 4)]
    assert (first.compilations, second.compilations) == (1, 0)
    assert str(first.report()) == str(second.report())
    for expected, actual in zip(*losses, strict=True):
        assert torch.equal(expected, actual)
    programs = [path for path in folder.iterdir() if path.name.startswith("step-")]
    assert {path.suffix for path in programs} == {".json", ".so"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in programs)

    # A library that was damaged is not loaded, but compiled again.
    (library,) = (path for path in programs if path.suffix == ".so")
    library.write_bytes(library.read_bytes()[:-1])
    third = made(compile=True)
    with pytest.warns(UserWarning, match="made anew"):
        losses.append(advance(third, 4))
    assert third.compilations == 1
    for expected, actual in zip(losses[0], losses[2], strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("damage", ["not JSON", "code"])
def test_a_file_that_is_not_believed(damage: str, folder: Path) -> None:
    assert program_cache.find("a request") is None
    assert program_cache.keep("a request", NoProgram("too many operators"))
    assert program_cache.find("a request") == NoProgram("too many operators")
    (path,) = folder.glob("step-*.json")
    if damage == "not JSON":
        program_cache.write_sealed(path, b"{")
    else:
        row = {"trained": [], "operators": [], "sizes": [], "code": "__import__('os')", "takes": 1, "library": ""}
        program_cache.write_sealed(path, json.dumps(row).encode())
    with pytest.warns(UserWarning, match="is made anew"):
        assert program_cache.find("a request") is None


def test_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MAX_FOLDER", 150)
    for number in range(3):
        program_cache.keep(f"request {number}", NoProgram("x" * 20))
        for path in folder.glob("step-*"):
            os.utime(path, (path.stat().st_mtime - 100,) * 2)
    assert program_cache.find("request 0") is None
    assert program_cache.find("request 2") == NoProgram("x" * 20)


# Mistakes of compiled programs are detected, and such programs are not used.
class _Wrong(CustomGraphPass):
    """A compiler that takes tanh for what is near it."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.erf.default

    def uuid(self) -> Any:
        return "wrong"


def _steps(model: Callable[[], nn.Module], batch: Sequence[Tensor], count: int = 3) -> tuple[list[Tensor], str]:
    torch.manual_seed(0)
    fused = hf.fuse([model() for _ in range(2)])
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.01), compile=True)
    return [step(*batch) for _ in range(count)], str(step.report())


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_program_that_is_wrong_is_not_used(dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)

    batch = torch.randn(6, 5, dtype=dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    expected, _ = _steps(model, batch)
    message = r"WrongProgram: .* the losses, f\d\d\[2\] of norm [\d.]+, differs by"
    with config.patch(post_grad_custom_post_pass=_Wrong()), pytest.warns(UserWarning, match=message):
        losses, report = _steps(model, batch)
    assert "eager" in report
    for loss, expected_loss in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss, expected_loss)


@needs_compiler
def test_gradients_of_nothing_but_rounding_are_no_mistake() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))

    torch.manual_seed(1)
    _, report = _steps(model, (100 * torch.randn(64, 40), torch.randint(3, (64,))))
    assert "program of" in report
