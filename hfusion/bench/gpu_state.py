"""The clock, the temperature and the throttle reasons of an NVIDIA GPU, by NVML.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

# Bits of NVML, in its order: the reasons for which a clock is below its maximum.
_REASONS = (
    "idle",
    "clocks set by an application",
    "power limit",
    "hardware slowdown",
    "clocks bound to those of another GPU",
    "thermal slowdown by software",
    "thermal slowdown by hardware",
    "power brake",
    "clocks set for a display",
)


def gpu_state(device: torch.device) -> str:
    """Return the state in words, such as ``"1980 MHz, 33 degrees, not throttled"``.

    Empty for other devices, and where the package nvidia-ml-py or NVML itself is missing.
    """
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("pynvml") is None:
        return ""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        degrees = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
        # Its name before 2024, which later versions keep.
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        return f"{clock} MHz, {degrees} degrees, {throttled(reasons)}"
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    finally:
        nvml.nvmlShutdown()


def throttled(reasons: int) -> str:
    """Return NVML's bits of throttle reasons in words."""
    names = [name for bit, name in enumerate(_REASONS) if reasons >> bit & 1]
    return f"throttled: {', '.join(names)}" if names else "not throttled"
