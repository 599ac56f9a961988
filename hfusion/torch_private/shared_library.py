"""Torch's shared library for CPUs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def torch_library() -> ctypes.CDLL:
    """Load torch's CPU library, which also gives access to OpenMP and MKL. Raises OSError."""
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
