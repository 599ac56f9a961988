"""Measured times, kept in the user's cache folder: one JSON file per processor, number of threads and torch version."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hfusion.device.cache import cache_file, number, read_json, write_json
from hfusion.device.calibrate import describe

# The range of seconds that are accepted from a file.
_PLAUSIBLE = (1e-12, 1e6)


@dataclass
class Times:
    """Seconds by key: those ``cached`` in the file, and those ``measured`` since."""

    cached: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)

    def get(self, key: str) -> float | None:
        return self.measured.get(key, self.cached.get(key))


@contextmanager
def times_on(device: torch.device) -> Iterator[Times]:
    """Context manager: the cached times of ``device``. New times are merged with those other processes wrote meanwhile.

    Warns with one UserWarning if the file cannot be read or written; new times then last for this process alone.
    """
    machine = describe(device)
    path = cache_file("lowerings", machine)
    cached, trouble = _read(path, machine)
    times = Times(cached)
    yield times
    if times.measured:
        latest, _ = _read(path, machine)
        try:
            write_json(path, {"machine": machine, "seconds": {**latest, **times.measured}})
        except OSError as error:
            trouble = trouble or f"cannot be written: {error.strerror}"
    if trouble:
        warnings.warn(
            f"the measured times of operators in {path} {trouble}; what is missing there is measured again, by every "
            "process if it cannot be kept. Delete the file, or let XDG_CACHE_HOME name a folder that can be written",
            stacklevel=2,
        )


def _read(path: Path, machine: dict[str, str]) -> tuple[dict[str, float], str]:
    """Read the seconds cached at ``path``; also returns what is wrong with the file, empty if nothing is."""
    try:
        cached = read_json(path)
        seconds = {str(key): number(value, *_PLAUSIBLE) for key, value in cached["seconds"].items()}
        if cached["machine"] != machine:
            raise ValueError("of another machine")
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}, "are no valid JSON of them"
    return seconds, ""
