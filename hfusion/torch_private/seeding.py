"""What `torch.manual_seed` locks, and what it keeps for accelerators that this process has not used yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seeding_locks() -> list[Any]:
    """Return the locks that `torch.manual_seed` takes."""
    places = (torch.cuda, torch.xpu, torch.mtia)
    return [place._initialization_lock for place in places if hasattr(place, "_initialization_lock")]


@contextmanager
def waiting_seeds_kept() -> Iterator[None]:
    """Context manager: an accelerator's first use takes the seed that it would have taken without the seeds set inside.

    torch keeps only the last seed of such a device.
    """
    places = [place for place in (torch.cuda, torch.xpu, torch.mtia) if not place.is_initialized()]
    before = [dict(vars(place._lazy_seed_tracker)) for place in places]
    try:
        yield
    finally:
        for place, kept in zip(places, before, strict=True):
            if place.is_initialized():
                # It was first used inside.
                for call in filter(None, kept["call_order"]):
                    call[0]()
            else:
                vars(place._lazy_seed_tracker).update(kept)
