"""Settings of torch and the process that code can read: a program of such code is valid while they are unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Any

import torch


def _workers() -> tuple[int, int] | None:
    """Return the rank of this process and the number of processes; None without a process group."""
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if ready else None


def _backends(*settings: str) -> Callable[[], Any]:
    """Return a function that reads settings below torch.backends; those that this torch lacks are None."""

    def read(setting: str) -> Any:
        held: Any = torch.backends
        return reduce(lambda holder, name: getattr(holder, name, None), setting.split("."), held)

    return lambda: tuple(map(read, settings))


_FUNCTIONS = (
    "are_deterministic_algorithms_enabled",
    "get_default_device",
    "get_deterministic_debug_mode",
    "get_float32_matmul_precision",
    "get_num_interop_threads",
    "get_num_threads",
    "is_anomaly_check_nan_enabled",
    "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_inference_mode_enabled",
    "is_warn_always_enabled",
)
_KERNELS = ("flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")

SETTINGS: Mapping[str, Callable[[], Any]] = {
    **{name: getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)},
    **{name: getattr(torch.backends.cuda, name) for name in _KERNELS if hasattr(torch.backends.cuda, name)},
    **dict.fromkeys(
        ("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
        lambda: tuple(map(torch.get_autocast_dtype, ("cpu", "cuda", "xpu", "mps"))),
    ),
    **dict.fromkeys(("is_initialized", "get_rank", "get_world_size"), _workers),
    "benchmark": _backends("cudnn.benchmark"),
    "deterministic": _backends("cudnn.deterministic", "mkldnn.deterministic"),
    "allow_tf32": _backends("cuda.matmul.allow_tf32", "cudnn.allow_tf32"),
    "enabled": _backends("cudnn.enabled", "mkldnn.enabled", "opt_einsum.enabled"),
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
    **dict.fromkeys(("environ", "getenv"), lambda: tuple(os.environ.items())),
}
"""Functions that read settings, by the name that code uses for them."""


RANDOM_STATE = frozenset({"initial_seed", "get_rng_state"})
"""Functions that return the state of random numbers, which differs at every call."""


def asked_settings(names: Collection[str]) -> tuple[Callable[[], Any], ...]:
    """Return functions that read the settings which code with these ``names`` in it may read."""
    return tuple(dict.fromkeys(read for name, read in SETTINGS.items() if name in names))


def read_settings(settings: Collection[Callable[[], Any]]) -> tuple[Any, ...]:
    """Return the present values of ``settings``, hashable."""
    return tuple([read() for read in settings])
