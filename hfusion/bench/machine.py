"""What a result depends on besides the code: the machine and the versions, without its name."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

from hfusion.device.backend import backend


def _cpu_model() -> str:
    """The processor's own name where the system tells it (Linux), else what Python knows of it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, str | int]:
    """Processor, cores, threads of torch, versions, system, today's date; with an accelerator its name too."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "date": datetime.date.today().isoformat(),
    }
    if device.type != "cpu":
        facts["gpu"] = backend(device).name
    return facts
