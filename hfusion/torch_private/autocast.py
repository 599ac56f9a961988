"""Autocast: whether it is on for any device, and the calls that enter and leave it in exported graphs."""

from __future__ import annotations

import torch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["enter_autocast", "exit_autocast", "is_any_autocast_enabled"]


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is on for devices of any type in this thread."""
    return torch._C._is_any_autocast_enabled()
