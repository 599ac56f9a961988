"""Runs on CUDA of tasks, populations and sweeps: what the host waits for, and that no call would be refused."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfusion as hf
from tests.cluster.temporary_files import nothing_left, shared_memory
from tests.null.calls import REFUSED_CALLS, Calls, calls_per_step, losses_of, reset, since_reset

pytestmark = pytest.mark.null

SHORT, LONG = 4, 20


def compiled(
    minibatches: int, clip: float | None, *callbacks: Callable[[hf.Step | hf.Evaluation], None], layers: int = 6
) -> hf.Task:
    """Return a compiled task of this many minibatches."""
    models = [nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers - 1)], nn.Linear(8, 3)) for _ in range(3)]
    fused = hf.fuse(models, verify=False)
    loader = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)) for _ in range(minibatches)]
    return hf.Task(
        fused,
        losses_of,
        optimizer=lambda params: hf.optim.AdamW(params, lr=0.1),
        loader=loader,
        clip_norm=clip,
        compile=True,
        callbacks=callbacks,
    )


def calls_per_minibatch(clip: float | None, layers: int) -> Calls:
    """Return the calls of a minibatch beyond the first ones; the first run makes some more."""
    counts = []
    for minibatches in (SHORT, SHORT, LONG):
        task = compiled(minibatches, clip, layers=layers)
        reset()
        hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
        counts.append(since_reset())
        assert counts[-1].refused == ()
    names = ("launches", "graphs", "waits", "pageable")
    return Calls(*[(getattr(counts[2], name) - getattr(counts[1], name)) / (LONG - SHORT) for name in names])


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize(("clip", "launches"), [(None, 6), (1.0, 19)], ids=["plain", "clipped"])
def test_calls_of_a_compiled_minibatch(clip: float | None, launches: int, layers: int) -> None:
    calls = calls_per_minibatch(clip, layers)
    # What the machine does once falls on few minibatches.
    assert calls.waits < 0.3
    assert (round(calls.launches), round(calls.graphs), round(calls.pageable)) == (launches, 2, 0)


def test_callbacks_hear_all_losses_in_order() -> None:
    heard: list[hf.Step | hf.Evaluation] = []
    task = compiled(LONG, None, heard.append)
    report = hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
    assert [step.step for step in heard if isinstance(step, hf.Step)] == list(range(LONG))
    assert torch.equal(torch.stack([step.losses for step in heard]), report["task"].losses)


class Offset(nn.Module):
    """Adds numbers that forward makes, which its graph holds as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + torch.tensor([0.5, 1.0, 1.5], device=x.device)
        return out


def test_constants_are_copied_once() -> None:
    def pageable(minibatches: int) -> float:
        fused = hf.fuse([Offset() for _ in range(3)], verify=False)
        loader = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)) for _ in range(minibatches)]
        task = hf.Task(
            fused, losses_of, optimizer=lambda params: hf.optim.SGD(params, lr=0.1), loader=loader, compile=False
        )
        reset()
        hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
        return since_reset().pageable

    pageable(SHORT)
    assert pageable(LONG) - pageable(SHORT) <= 2


def test_runs_that_follow_take_no_further_memory() -> None:
    """cuBLAS keeps a workspace for each stream that it has met."""
    machine, allocated = hf.Machine([hf.Device("cuda:0", memory="1GiB")]), []
    for _ in range(4):
        hf.train([compiled(SHORT, None)], machine)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    # A workspace is of 32 MiB. Programs that are kept for later runs may have small constants.
    assert allocated[3] - allocated[1] < 1 << 20


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("loader_device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("array_device", ["cpu", "cuda:0"])
def test_arrays_and_loaders_may_be_anywhere(array_device: str, loader_device: str, compile: bool) -> None:
    array = hf.fuse([nn.Linear(8, 3) for _ in range(3)], verify=False).to(array_device)
    x, target = torch.zeros(6, 8, device=loader_device), torch.zeros(6, dtype=torch.int64, device=loader_device)
    task = hf.Task(
        array,
        losses_of,
        lambda params: hf.optim.SGD(params, lr=0.1),
        [(x, target)] * 3,
        eval_loader=[(x, target)],
        compile=compile,
    )
    reset()
    hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
    assert since_reset().refused == ()
    assert {str(tensor.device) for tensor in array.state_dict().values()} == {array_device}


# Populations and sweeps on CUDA make no call that a real device would refuse.

ROWS = 4


def mlp(hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))


@pytest.mark.parametrize("on_nonfinite", ["ignore", "freeze"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_members_leave_join_and_are_copied(compile: bool, on_nonfinite: str) -> None:
    reset()
    pop = hf.Population(
        [mlp().cuda() for _ in range(ROWS)],
        optimizer=lambda params: hf.optim.AdamW(params, lr=[0.1, 0.2, 0.3, 0.4]),
        loss=losses_of,
        clip_norm=1.0,
        on_nonfinite=on_nonfinite,  # type: ignore[arg-type]
        compile=compile,
    )
    inputs, target = torch.zeros(6, 8, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    for _ in range(3):
        losses = pop.step(inputs, target)
    pop.stop(1)
    pop.step(inputs, target)
    pop.start(1, mlp().cuda(), lr=0.5)
    pop.copy(src=0, dst=[2])
    pop.hparams["lr"][[2]] *= 0.5
    pop.step(inputs, target)
    assert losses.shape == pop.evaluate(losses_of, [(inputs, target)]).shape == (ROWS,)
    pop.stop([0, 1, 2])
    pop.compact()
    pop.step(inputs, target)
    assert {str(param.device) for model in pop.models if model for param in model.parameters()} == {"cuda:0"}
    assert since_reset().refused == ()


def test_a_compiled_step_of_a_population_is_replayed() -> None:
    pop = hf.Population(
        [mlp().cuda() for _ in range(ROWS)],
        optimizer=lambda params: hf.optim.AdamW(params, lr=0.1),
        loss=losses_of,
        on_nonfinite="ignore",
        compile=True,
    )
    inputs, target = torch.zeros(6, 8, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    calls = calls_per_step(lambda: pop.step(inputs, target))
    assert (calls.graphs, calls.waits, calls.refused) == (2, 0, ())


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_sweep(compile: bool) -> None:
    optuna = pytest.importorskip("optuna")
    loader = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64))] * 3

    def space(trial: optuna.Trial) -> dict[str, object]:  # type: ignore[name-defined]
        return {
            "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            "hidden": trial.suggest_categorical("hidden", [8, 16]),
        }

    reset()
    result = hf.sweep(
        mlp,
        space,
        losses_of,
        loader,
        eval_loader=loader,
        pruner=optuna.pruners.NopPruner(),
        trials=6,
        epochs=2,
        machine=hf.Machine([hf.Device("cuda:0", memory="1GiB")]),
        compile=compile,
        clip_norm=1.0,
    )
    assert since_reset().refused == ()
    # Those whose losses are NaN by chance have failed: nothing is computed.
    assert [trial.state.is_finished() for trial in result.study.trials] == [True] * 6


# Layers are timed on CUDA with its rates, once.


# The benchmark's commands run to their end on CUDA, without a call that a real device would refuse.

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("fuse", "optim", "shard")
OK, WRONG_LOSSES = 0, 1


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the benchmark. Fails if one of its processes has made a call that is refused."""
    path = os.pathsep.join([str(Path(__file__).parent / "site"), str(ROOT)])
    environment = os.environ | {REFUSED_CALLS: str(folder), "PYTHONPATH": path}
    command = [sys.executable, "-m", "hfusion.bench", *arguments, "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    reports = [file.read_text() for file in folder.iterdir()]
    assert reports, output
    assert set(reports) == {""}, output
    return done


@pytest.mark.parametrize("benchmark", COMMANDS)
def test_commands_run_to_their_end(benchmark: str, tmp_path: Path) -> None:
    done = run(tmp_path, benchmark, "--quick")
    assert done.returncode in (OK, WRONG_LOSSES), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    # The last line of a table.
    assert "└" in done.stdout


def test_first_contact(tmp_path: Path) -> None:
    """And nothing is a fault but values, which are not compared."""
    calls = tmp_path / "calls"
    calls.mkdir()
    file = tmp_path / "contact.json"
    done = run(calls, "contact", "--quick", "--json", str(file))
    assert {row["status"] for row in json.loads(file.read_text())["rows"]} == {"not computed"}, done.stdout
    assert done.returncode == OK


# `hf.train` on several CUDA devices, in one process or in one for each: all of them train, and no call is refused.

pytest.importorskip("cloudpickle")


class Loader(list[Any]):
    """Minibatches that note in which process they are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__([(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64))] * 5)
        self.folder = folder

    def __iter__(self) -> Any:
        (self.folder / str(os.getpid())).touch()
        return super().__iter__()


@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 1), (2, 2), (8, 1)])
def test_every_device_trains(devices: int, processes: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} devices: NULL_DEVICES={devices}")
    names = [f"cuda:{number}" for number in range(devices)]
    machine = hf.Machine([hf.Device(name, memory="1GiB") for name in names], disk=tmp_path / "spill")
    heard: list[Any] = []

    def made(name: str) -> hf.Task:
        models = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3)]
        loader = Loader(tmp_path)
        return hf.Task(
            models, losses_of, lambda p: hf.optim.AdamW(p, lr=0.1), loader, name=name, callbacks=(heard.append,)
        )

    tasks = [made(f"task{number}") for number in range(max(2, devices))]
    before = shared_memory()
    for path in tmp_path.glob("[0-9]*"):
        path.unlink()
    reset()
    report = hf.train(tasks, machine, processes=processes)
    assert since_reset().refused == ()
    readers = {int(path.name) for path in tmp_path.glob("[0-9]*")} - {os.getpid()}
    assert len(readers) == (0 if processes == 1 else processes)
    assert {span.device for span in report.timeline.actions} == set(names)
    assert len(heard) == 5 * len(tasks)
    assert all(next(model.parameters()).device.type == "cpu" for task in tasks for model in report[task.name].models)
    assert nothing_left(tmp_path, before)
