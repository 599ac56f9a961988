"""Describe the machine and the versions that a result depends on, without the machine's name."""

from __future__ import annotations

import datetime
import os
import platform

import torch

from hfusion.device.backend import backend
from hfusion.device.native import processor_name


def describe(device: torch.device) -> dict[str, str | int]:
    """Processor, cores, threads of torch, versions, system, today's date; with an accelerator its name too."""
    facts: dict[str, str | int] = {
        "cpu": processor_name(),
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
