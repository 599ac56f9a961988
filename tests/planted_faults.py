"""Faults planted one at a time, and the tests that find them: the table is planted_faults.toml.

``python -m tests.planted_faults`` plants each fault in a copy of this folder, never in the folder itself, and runs
tests until one fails: those that found the fault before, then the tests of the room whose line is changed, then all.
Which test found a fault is written to planted_faults.json, so that the next run begins with it. ``--quick`` runs no
more than the tests of the room. Names of faults as arguments choose some.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.slow_tests import RECORD, is_slow

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
# A run of the whole suite that takes longer counts as one that a fault lets hang.
SECONDS = 7200
# A single test that takes longer fails.
TEST_SECONDS = 300
PACKAGE = ("hfusion", "ops", "passes")
LEFT_OUT = (".git", ".venv*", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


@dataclass(frozen=True)
class Fault:
    """One change of a line, or of a few.

    Attributes:
        name: of the fault, unique.
        old: text that occurs once in the package, so that the fault stays where its file is moved.
        new: its replacement.
        symptom: what a user would see.
    """

    name: str
    old: str
    new: str
    symptom: str

    def file_in(self, folder: Path) -> Path:
        """Return the file of the package in ``folder`` that has the text ``old``. Raises ValueError unless one has it,
        once.
        """
        places = [(path, text.count(self.old)) for path, text in sources(folder).items() if self.old in text]
        if len(places) != 1 or places[0][1] != 1:
            found = ", ".join(f"{path.relative_to(folder)} ({count})" for path, count in places) or "none"
            raise ValueError(f"{self.name}: {self.old!r} must have one place, and has {found}")
        return places[0][0]


def faults() -> list[Fault]:
    """Return the table."""
    return [Fault(name, **entry) for name, entry in tomllib.loads(TABLE.read_text()).items()]


def record() -> dict[str, list[str]]:
    """Return the tests that found each fault in earlier runs, by its name."""
    found: dict[str, list[str]] = json.loads(RECORD.read_text())
    return found


@cache
def sources(folder: Path) -> dict[Path, str]:
    """Return the texts of the package's files in ``folder``, without those that are reached through links."""
    paths = [
        path
        for root in PACKAGE
        for kind in ("*.py", "*.c")
        for path in sorted((folder / root).rglob(kind))
        if not any(parent.is_symlink() for parent in path.parents)
    ]
    return {path: path.read_text() for path in paths}


def room_tests(file: str) -> list[str]:
    """Return the folder or file with the tests of a room, or all tests if it has none, and the room's doctests.

    >>> room_tests("hfusion/optim/adam.py"), room_tests("passes/cost/cost.py")
    (['tests/optim', 'hfusion/optim'], ['tests/passes', 'hfusion/passes'])
    """
    parts = Path(file).with_suffix("").parts
    room = parts[0] if parts[0] in PACKAGE[1:] else parts[1]
    # Through the link: the package's modules must not be imported once more under another name.
    source = f"{PACKAGE[0]}/{room}"
    paths = [f"tests/{room}", f"tests/test_{room}.py", source, f"{source}.py"]
    found = [path for path in paths if (ROOT / path).exists()]
    return found if found[0].startswith("tests/") else ["tests", *found]


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[Path]:
    """Context manager in which ``copy`` has the fault. Yields the changed file."""
    path = fault.file_in(copy)
    before = path.read_text()
    path.write_text(before.replace(fault.old, fault.new))
    _forget_bytecode(path)
    try:
        yield path
    finally:
        path.write_text(before)
        _forget_bytecode(path)


def _forget_bytecode(path: Path) -> None:
    # Python compares seconds and sizes, which two faults may share.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def failing_tests(copy: Path, paths: Sequence[str], *, fast: bool = False, first: bool = True) -> list[str] | None:
    """Run pytest in ``copy`` and return the tests that fail, only one if ``first``; None if a path has no test."""
    options = ["-q", "-p", "no:cacheprovider", "--tb=no", f"--timeout={TEST_SECONDS}"]
    options += [*["-x"] * first, *["--fast"] * fast, *paths]
    output = copy.parent / "output.txt"
    child = get_context("fork").Process(target=_run_pytest, args=(copy, options, output))
    child.start()
    child.join(SECONDS)
    if child.exitcode is None:
        os.killpg(child.pid or 0, signal.SIGKILL)
        return [f"{paths[0]}: no result after {SECONDS} s"]
    text = output.read_text(errors="replace")
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    status = child.exitcode
    if status == 4 and "ERROR: not found:" in text:
        return None
    if status in (3, 4):
        raise RuntimeError(f"pytest could not run {options}:\n{text[-4000:]}")
    return found or [f"{paths[0]}: exit status {status}"] * (status not in (0, 5))


def _run_pytest(copy: Path, options: list[str], output: Path) -> NoReturn:
    """Run pytest in this process, which has imported torch already, and end it."""
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    # Caches of compiled programs and kernels of its own: what a faulty package compiles is for nobody else.
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    os.environ |= {
        "XDG_CACHE_HOME": str(copy.parent / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(copy.parent / "inductor"),
    }
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hfusion", "tests")]:
        del sys.modules[name]
    status = 3
    try:
        status = int(pytest.main(options))
    finally:
        sys.stdout.flush()
        os._exit(status)


def find(fault: Fault, known: Sequence[str], quick: bool, copy: Path) -> str | None:
    """Plant a fault and return a test that fails with it; None if none does.

    Args:
        known: tests that found it before.
        quick: run no more than the tests of its room.
    """
    with planted(fault, copy) as path:
        room = room_tests(path.relative_to(copy).as_posix())
        stages = [
            *([partial(failing_tests, copy, known)] if known else []),
            *(partial(failing_tests, copy, room, fast=fast) for fast in (True, False)),
            *(partial(failing_tests, copy, ["tests", "hfusion"], fast=fast) for fast in (True, False) if not quick),
        ]
        return next((failing[0] for stage in stages if (failing := stage())), None)


_copy: Path


def _take_copy(folders: Any) -> None:
    global _copy
    _copy = folders.get()


def _find_in_copy(fault: Fault, known: Sequence[str], quick: bool) -> str | None:
    return find(fault, known, quick, _copy)


def found_by(chosen: Sequence[Fault], known: dict[str, list[str]], workers: int, quick: bool) -> dict[str, str | None]:
    """Return the test that finds each fault, None for none, and write each to the record as it comes."""
    context = get_context("fork")
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="hfusion-faults-") as root:
        folders = context.Queue()
        for number in range(workers):
            copy = Path(root) / str(number) / "hfusion"
            shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
            folders.put(copy)
        with ProcessPoolExecutor(workers, context, _take_copy, (folders,)) as pool:
            runs = {pool.submit(_find_in_copy, fault, known.get(fault.name, []), quick): fault for fault in chosen}
            for run in as_completed(runs):
                name, test = runs[run].name, run.result()
                found[name] = test
                print(f"{name}: {test}", flush=True)
                if test is not None and "::" in test:
                    RECORD.write_text(json.dumps({**record(), name: [test]}, indent=1, sort_keys=True) + "\n")
        new = sorted({test for name, test in found.items() if test is not None and test not in known.get(name, ())})
        for test in failing_tests(copy, new, first=False) or () if new else ():
            print(f"fails without a fault, too: {test}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults; by default all")
    parser.add_argument("--workers", type=int, default=2, help="faults that are tried at once")
    parser.add_argument("--quick", action="store_true", help="run no more than the tests of each fault's room")
    options = parser.parse_args()
    table = {fault.name: fault for fault in faults()}
    chosen = [table[name] for name in options.names or table]
    # Once, for all runs: what the package itself imports.
    for name in ("torch._dynamo", "torch._inductor"):
        import_module(name)
    found = found_by(chosen, record(), options.workers, options.quick)
    fast = sum(test is not None and not is_slow(test) for test in found.values())
    survived = [name for name, test in found.items() if test is None]
    print(f"{len(found)} faults: {fast} found by make test, {len(found) - len(survived)} by make test-all")
    print(f"survived: {', '.join(survived) or 'none'}")


if __name__ == "__main__":
    main()
