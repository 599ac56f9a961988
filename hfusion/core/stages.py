"""Stages between a model and its programs, which can be checked, and written to files as text.

``HFUSION_DUMP=folder`` writes each stage to a file of its own, ``0007-Net-batched.txt``, in the order in which they
came about, and checks it; ``HFUSION_STAGES=1`` checks alone, as all tests do. ``HFUSION_CHECK=n`` compares every n-th
call of a program with the members' own code.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_given = os.environ.get("HFUSION_CHECK", "0")
if not _given.isdecimal():
    raise ValueError(f"HFUSION_CHECK={_given!r}: give n, to compare every n-th call with the members' own code")
RECHECKED = int(_given)
"""Each so many calls of a program are compared with the members' own code, besides the first; 0: none."""


class BrokenProgram(AssertionError):
    """A pass returned a graph that violates the rules for its kind: a bug of hfusion, never of a model."""


def stage(subject: str, name: str, text: Callable[[], str], check: Callable[[], None]) -> None:
    """Write and check one stage of ``subject``, if enabled. It is written first, so that a broken stage can be read.

    Raises BrokenProgram if the ``check`` does.
    """
    folder = os.environ.get("HFUSION_DUMP")
    if folder:
        _write(Path(folder), f"{subject}-{name}", text())
    if folder or os.environ.get("HFUSION_STAGES") == "1":
        try:
            check()
        except BrokenProgram as error:
            raise BrokenProgram(f"{subject}, {name}: {error}\n{text()}") from error


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", name)
    numbers = [int(path.name[:4]) for path in folder.glob("[0-9][0-9][0-9][0-9]-*.txt")]
    for number in itertools.count(max(numbers, default=0) + 1):
        # Another process may be faster.
        with suppress(FileExistsError), (folder / f"{number:04d}-{name}.txt").open("x") as file:
            file.write(text + "\n")
            return
