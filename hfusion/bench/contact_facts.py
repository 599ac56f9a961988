"""Facts about the machine for ``contact``: versions, the device, its links; and the tests that need a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

import hfusion
from hfusion.bench.contact_item import CheckResult, ContactItem, ContactStatus, Need, computes
from hfusion.bench.fuse_benchmark import reason_of
from hfusion.bench.gpu_state import gpu_state
from hfusion.bench.machine_description import describe
from hfusion.device.backend import accelerators, backend
from hfusion.device.calibrate import compute_rates

_TESTS = Path(hfusion.__file__).resolve().parents[1] / "tests"
_PACKAGES = ("triton", "nvidia-ml-py", "numpy")
_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,pstate,compute_mode", "--format=csv,noheader")


def fact_items(quick: bool) -> Iterator[ContactItem]:
    """Yield the check that only collects facts, and, if the tests are there, the run of those marked ``gpu``."""
    yield ContactItem("facts", describe_machine, limit=90.0)
    if _TESTS.is_dir():
        yield ContactItem("pytest -m gpu", partial(run_gpu_tests, quick), Need.CUDA, limit=600.0)


def describe_machine(device: torch.device) -> CheckResult:
    """Describe the machine; a fact that cannot be had is the error in one line."""
    values: dict[str, Any] = {"hfusion": hfusion.__version__, **describe(device), "computes": computes(device)}
    values["packages"] = {name: _version(name) for name in _PACKAGES}
    values["tf32"] = {"matmul": torch.get_float32_matmul_precision(), "cudnn": torch.backends.cudnn.allow_tf32}
    values["devices"] = [str(accelerator) for accelerator in accelerators()]
    values["rates"] = asdict(compute_rates(device))
    if device.type != "cpu":
        recorder = backend(device).recorder()
        values["records graphs"] = recorder if isinstance(recorder, str) else True
    if device.type == "cuda":
        values |= {name: _fact(ask) for name, ask in _cuda_facts(device).items()}
    shown = ("gpu", "driver", "capability", "peer access", "nvml", "tf32", "packages", "cpu", "torch")
    return CheckResult(
        summary="; ".join(f"{name} {_text(values[name])}" for name in shown if name in values), values=values
    )


def _text(value: Any) -> str:
    return ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)


def _cuda_facts(device: torch.device) -> dict[str, Callable[[], Any]]:
    count = torch.cuda.device_count()
    pairs = list(permutations(range(count), 2))
    return {
        "driver": lambda: subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True).stdout.strip(),
        "cuda": lambda: torch.version.cuda or f"hip {torch.version.hip}",
        "cudnn": torch.backends.cudnn.version,
        "capability": lambda: ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory": lambda: torch.cuda.get_device_properties(device).total_memory,
        "processors": lambda: torch.cuda.get_device_properties(device).multi_processor_count,
        "peer access": lambda: {f"{a}->{b}": torch.cuda.can_device_access_peer(a, b) for a, b in pairs} or "one device",
        "nvml": lambda: gpu_state(device) or "none",
        "mps": lambda: Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists(),
    }


def _fact(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return f"none: {reason_of(error)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def run_gpu_tests(quick: bool, device: torch.device) -> CheckResult:
    """Run the tests marked ``gpu``, one file after the other: all files that have some, if ``quick`` the first."""
    files = sorted(path for path in _TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text())
    summaries, faults = {}, []
    for file in files[: 1 if quick else None]:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider", str(file)]
        done = subprocess.run(
            command, cwd=_TESTS.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        lines = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
        name = file.relative_to(_TESTS).as_posix()
        summaries[name] = lines[-1]
        faults += [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
        # It is all there is where the time limit ends this process.
        print(f"{name}: {lines[-1]}", *faults, sep="\n", flush=True)
    values = {"files": summaries, "faults": faults}
    summary = f"{len(faults)} faults in {len(summaries)} files"
    if not computes(device):
        return CheckResult(ContactStatus.NOT_COMPUTED, summary=summary, values=values)
    return CheckResult(summary=summary, values=values).unless_fault("; ".join(faults))
