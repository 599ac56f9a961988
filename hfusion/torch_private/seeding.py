"""The lock of `torch.manual_seed`, and the seeds that it keeps for accelerators that are not in use yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seeding_locks() -> list[Any]:
    """Return the locks that `torch.manual_seed` takes."""
    modules = (torch.cuda, torch.xpu, torch.mtia)
    return [module._initialization_lock for module in modules if hasattr(module, "_initialization_lock")]


@contextmanager
def waiting_seeds_kept() -> Iterator[None]:
    """Context manager: an accelerator's first use takes the seed that it would have taken without the seeds set inside.

    torch keeps only the last seed of such a device.
    """
    modules = [module for module in (torch.cuda, torch.xpu, torch.mtia) if not module.is_initialized()]
    trackers = [dict(vars(module._lazy_seed_tracker)) for module in modules]
    try:
        yield
    finally:
        for module, tracker in zip(modules, trackers, strict=True):
            if module.is_initialized():
                # It was first used inside.
                for call in filter(None, tracker["call_order"]):
                    call[0]()
            else:
                vars(module._lazy_seed_tracker).update(tracker)
