"""The first run on a GPU (``contact``), in ten minutes: whether hfusion is right there, and how fast.

Every check runs in a process of its own with a time limit, since an error on a GPU leaves a process without one. Where
the repository is checked out, its tests marked ``gpu`` are run, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import hfusion as hf
from hfusion.bench import fuse_benchmark, harness
from hfusion.bench.cases import CASES, Running, Unavailable, Workload, check_agreement, losses
from hfusion.bench.contenders import CONTENDERS, start_serial, trained
from hfusion.bench.harness import Benchmark, Row
from hfusion.device.backend import accelerators, backend

MODELS = ("mlp-small", "cnn", "resnet8", "mobilenet-v3", "dcgan", "transformer", "bert", "lstm")
AMPS = {"float32": None, "bf16-autocast": torch.bfloat16}
RIVALS = ("serial", "vmap-compiled", "processes", "hfusion", "hfusion-compiled")
# Calls until a step is compiled and its launches are recorded.
_SETTLING = 8
_TESTS = Path(hf.__file__).resolve().parents[1] / "tests"

# What a check measures, by name. It raises Unavailable if it needs what is not here, another error for a fault.
Figures = dict[str, Any]


def computes(device: torch.device) -> bool:
    """Return whether kernels of ``device`` compute anything; whole numbers are exact in every precision."""
    numbers = torch.arange(16.0).view(4, 4)
    on_device = numbers.to(device)
    return torch.equal((on_device @ on_device + on_device).cpu(), numbers @ numbers + numbers)


def describe_device(device: torch.device) -> Figures:
    """Return facts of the device that decide on its values and times."""
    facts = {
        "devices": ", ".join(map(str, accelerators())) or "none",
        "computes": computes(device),
        "tf32": f"{torch.get_float32_matmul_precision()}, cuDNN {torch.backends.cudnn.allow_tf32}",
    }
    if device.type == "cuda":
        facts |= {"capability": torch.cuda.get_device_capability(device), "cuda": torch.version.cuda}
        facts |= {"cudnn": torch.backends.cudnn.version(), "records graphs": str(backend(device).recorder())}
    return facts


def run_gpu_tests(device: torch.device) -> Figures:
    """Run the tests marked ``gpu``."""
    if device.type != "cuda" or not _TESTS.is_dir():
        raise Unavailable("needs a CUDA device, and a checkout of the repository")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider", str(_TESTS)]
    done = subprocess.run(command, cwd=_TESTS.parent, capture_output=True, text=True, check=False)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode:
        raise RuntimeError("; ".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or lines[-1])
    return {"tests": lines[-1]}


def _workload(model: str, members: int, device: torch.device, amp: torch.dtype | None = None) -> Workload:
    (case,) = (case for case in CASES if case.name == model)
    return Workload(case, members, device, amp)


def check_step(model: str, precision: str, members: int, device: torch.device) -> Figures:
    """Compare losses of hf.train_step with the loop's, until steps are compiled and recorded."""
    workload = _workload(model, members, device, AMPS[precision])
    fused = hf.fuse(workload.models(), verify=computes(device))
    optimizer = hf.optim.Adam(trained(fused), lr=list(workload.rates))
    train = hf.train_step(fused, workload.case.loss, optimizer, compile=True)
    inputs, target = workload.batch()

    def step() -> Tensor:
        with workload.autocast():
            return train(inputs, target)

    _compare(workload, losses(Running(step), _SETTLING))
    return {"runs": "; ".join(f"{row.how} {row.why}".strip() for row in train.report().rows)}


def _compare(workload: Workload, actual: Tensor) -> None:
    if computes(workload.device):
        check_agreement("hfusion", losses(start_serial(workload), len(actual)), actual, workload.tolerance)


def check_training(how: str, device: torch.device) -> Figures:
    """Train by hf.train: resident, compiled, or spilled, with two thirds of the memory that it needs."""
    home = _workload("mlp-large", 4, harness.CPU)

    def task() -> hf.Task:
        array = hf.fuse(home.models(), verify=computes(device))
        optimizer = partial(hf.optim.Adam, lr=list(home.rates))
        return hf.Task(array, home.case.loss, optimizer, [home.batch()] * 6, name="task", compile=how == "compiled")

    def machine(memory: int) -> hf.Machine:
        return hf.Machine([hf.Device(str(device), memory=memory)])

    needed = hf.plan([task()], machine(1 << 40)).tasks[0].device_bytes
    memory = needed * 2 // 3 if how == "spilled" else 4 * needed
    report = hf.train([task()], machine(memory))
    if computes(device):
        _compare(_workload("mlp-large", 4, device), report["task"].losses.double())
    return {"shards": len(report.plan.tasks[0].shards), "peak": max(report.peak.values()), "memory": memory}


def time_steps(model: str, members: int, device: torch.device) -> Figures:
    """Time a training step of all members by every contender whose losses are right."""
    chosen = [contender for contender in CONTENDERS if contender.name in RIVALS]
    rows = fuse_benchmark.compare(_workload(model, members, device), chosen, 5, 0.05, torch.get_num_threads())
    for row in rows:
        if row.get("disagrees") and computes(device):
            raise RuntimeError(row["reason"])
    return {row["contender"]: row["reason"] or f"{row['ms']:.3g} ms" for row in rows}


Check = Callable[[torch.device], Figures]


def checks_of(quick: bool) -> dict[str, tuple[float, Check]]:
    """Return the time limit in seconds and the function of each check by name, the most informative first."""
    checks: dict[str, tuple[float, Check]] = {"facts": (60, describe_device), "pytest -m gpu": (600, run_gpu_tests)}
    for model in MODELS[: 1 if quick else None]:
        for precision in AMPS:
            for members in (4,) if quick else (1, 16):
                check = partial(check_step, model, precision, members)
                checks[f"train_step {model} {precision} B={members}"] = (300, check)
    for how in ("resident", "compiled", "spilled"):
        checks[f"hf.train {how}"] = (180, partial(check_training, how))
    for members in (4,) if quick else (16, 64, 4, 1):
        for model in ("mlp-small", "resnet8", "transformer")[: 1 if quick else None]:
            checks[f"speed {model} B={members}"] = (200, partial(time_steps, model, members))
    return checks


def run_check(name: str, device: torch.device, quick: bool, limit: float) -> Row:
    """Run a check in a process of its own, and return its row however that ends."""
    command = [sys.executable, "-m", "hfusion.bench", "contact", "--check", name, "--device", device.type]
    command += ["--quick"] if quick else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "reason": f"not done after {limit:.0f} s"}
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        missing = last.startswith(f"{Unavailable.__module__}.{Unavailable.__name__}")
        return {"status": "skipped" if missing else "failed", "reason": f"status {done.returncode}: {last}"}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _run(options: argparse.Namespace) -> Iterator[Row]:
    device = options.device if options.device.type != "cpu" else next(iter(accelerators()), options.device)
    checks = checks_of(options.quick)
    if options.check:
        warnings.simplefilter("ignore")
        figures = checks[options.check][1](options.device)
        status = "ok" if computes(options.device) else "not computed"
        print(json.dumps({"status": status, "figures": figures, "reason": ""}, default=str))
        sys.exit()
    until = time.monotonic() + 60 * options.minutes
    for name, (limit, _) in checks.items():
        start = time.monotonic()
        if not name.startswith(tuple(options.only.split(","))):
            continue
        if start > until:
            row: Row = {"status": "skipped", "reason": "there was no time left for it: give more --minutes"}
        else:
            harness.say(name)
            row = run_check(name, device, options.quick, min(limit, until - start))
        seconds, fault = time.monotonic() - start, row["status"] in ("failed", "timeout")
        yield {"contender": name, "seconds": seconds, "disagrees": fault} | row


def _table(rows: Sequence[Row]) -> Table:
    shown = Table("check", "result", "s", "figures, or what is wrong", title="first contact with this machine")
    for row in rows:
        figures = ", ".join(f"{name} {value}" for name, value in row.get("figures", {}).items())
        shown.add_row(row["contender"], row["status"], f"{row['seconds']:.1f}", row["reason"] or figures)
    return shown


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="no check starts after them (default 10)")
    parser.add_argument("--only", metavar="A,B", default="", help="checks whose names start so")
    parser.add_argument("--check", help=argparse.SUPPRESS)


BENCHMARK = Benchmark(__doc__, _run, _table, {}, add_options=_options)
