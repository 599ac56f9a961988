"""Faults planted one at a time, and whether the tests find them: the table is in planted_faults.toml.

``python -m tests.planted_faults`` plants each fault in a copy of this folder, never in the folder itself, and runs the
tests that mirror the changed file, first those of ``make test``, then those of ``make test-all``; ``--quick`` runs no
more, and otherwise all tests of the folder follow until one fails. Results go to a file
of JSON lines, and faults that have one there are left out. Names of faults as arguments choose some.
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
import time
import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
# A run of the tests that takes longer counts as one that a fault lets hang.
SECONDS = 1200
LEFT_OUT = (".git", ".venv*", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


@dataclass(frozen=True)
class Fault:
    """One change of a file.

    Attributes:
        name: of the fault, unique.
        file: relative to the folder of the project.
        old: text that occurs once in the file.
        new: its replacement.
        symptom: what a user would see.
        tests: further files and folders of tests that are likely to find it, besides the file that mirrors ``file``.
    """

    name: str
    file: str
    old: str
    new: str
    symptom: str
    tests: tuple[str, ...] = ()

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault. Raises ValueError if ``old`` does not occur exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} places with {self.old!r}, not one")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
        fault: its name.
        killed_by: a test that fails with it; None if it survived.
        fast: whether `make test` runs such a test; None if nobody looked.
        seconds: of all runs.
    """

    fault: str
    killed_by: str | None
    fast: bool | None
    seconds: int


def faults() -> list[Fault]:
    """Return the table."""
    table = tomllib.loads(TABLE.read_text())
    return [Fault(name, **{**entry, "tests": tuple(entry.get("tests", ()))}) for name, entry in table.items()]


def mirror(file: str) -> tuple[str, str]:
    """Return the test file and the folder of tests that mirror a file of the package.

    >>> mirror("hfusion/optim/adam.py"), mirror("passes/cost/price.py")
    (('tests/optim/test_adam.py', 'tests/optim'), ('tests/passes/cost/test_price.py', 'tests/passes'))
    """
    path = Path(file)
    parts = path.parts[1:] if path.parts[0] == "hfusion" else path.parts
    return Path("tests", *parts[:-1], f"test_{path.stem}.py").as_posix(), f"tests/{parts[0]}"


def nearest(fault: Fault) -> tuple[str, ...]:
    """Return the tests that are likeliest to find a fault: the file that mirrors the changed one, and its ``tests``."""
    test_file, folder = mirror(fault.file)
    return tuple(dict.fromkeys([*[test_file] * (ROOT / test_file).exists(), *fault.tests])) or (folder,)


@contextmanager
def copied() -> Iterator[Path]:
    """Context manager: a copy of this folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hfusion-faults-") as folder:
        copy = Path(folder) / "hfusion"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield copy


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """Context manager in which ``copy`` has the fault."""
    path = copy / fault.file
    before = path.read_text()
    path.write_text(fault.planted(before))
    _forget_bytecode(path)
    try:
        yield
    finally:
        path.write_text(before)
        _forget_bytecode(path)


def _forget_bytecode(path: Path) -> None:
    # Python compares seconds and sizes, which two faults may share.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def failing_tests(copy: Path, paths: Sequence[str], *, fast: bool, first: bool = True) -> list[str]:
    """Run pytest in ``copy`` and return the tests that fail, only one if ``first``."""
    options = ["-q", "-p", "no:cacheprovider", "--tb=no", *["-x"] * first, *["--fast"] * fast, *paths]
    output = copy.parent / "output.txt"
    if (child := os.fork()) == 0:
        _run_pytest(copy, options, output)
    deadline = time.monotonic() + SECONDS
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    if done == (0, 0):
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [f"{paths[0]}: no result after {SECONDS} s"]
    text = output.read_text(errors="replace")
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    status = os.waitstatus_to_exitcode(done[1])
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


def tried(fault: Fault, copy: Path, *, quick: bool) -> Result:
    """Plant a fault and run its nearest tests, then those of the whole folder, until one fails.

    Args:
        quick: run the nearest tests only.
    """
    start = time.monotonic()
    _, folder = mirror(fault.file)
    near, wide = nearest(fault), (folder, f"hfusion/{folder.removeprefix('tests/')}")
    slow: list[str] = []
    with planted(fault, copy):
        fast = failing_tests(copy, near, fast=True)
        if not fast:
            slow = failing_tests(copy, near, fast=False)
        if not fast and not quick:
            fast = failing_tests(copy, wide, fast=True)
        if not fast and not slow and not quick:
            slow = failing_tests(copy, wide, fast=False)
    killed_by = next(iter([*fast, *slow]), None)
    return Result(fault.name, killed_by, bool(fast) if fast or not quick else None, round(time.monotonic() - start))


def checked(results: Collection[Result], copy: Path) -> list[str]:
    """Return which of the tests that killed a fault fail without one, too."""
    tests = {result.killed_by for result in results if result.killed_by and "::" in result.killed_by}
    return failing_tests(copy, sorted(tests), fast=False, first=False) if tests else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults; by default all")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "planted_faults.jsonl")
    parser.add_argument("--quick", action="store_true", help="run the tests nearest to each fault only")
    options = parser.parse_args()
    chosen = [fault for fault in faults() if not options.names or fault.name in options.names]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    # Once, for all runs: what the package itself imports.
    for name in ("torch._dynamo", "torch._inductor"):
        import_module(name)
    lines = options.results.read_text().splitlines()
    results = {result.fault: result for result in (Result(**json.loads(line)) for line in lines)}
    with copied() as copy:
        for fault in chosen:
            before = results.get(fault.name)
            if before is None or (before.fast is None and not options.quick):
                results[fault.name] = result = tried(fault, copy, quick=options.quick)
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                print(result, flush=True)
        of_chosen = [results[fault.name] for fault in chosen]
        for test in checked(of_chosen, copy):
            print(f"fails without a fault, too: {test}")
    survived = [result.fault for result in of_chosen if result.killed_by is None]
    fast = sum(result.fast is True for result in of_chosen)
    print(f"{len(chosen)} faults: {fast} killed by make test, {len(chosen) - len(survived)} by make test-all")
    print(f"survived: {', '.join(survived) or 'none'}")


if __name__ == "__main__":
    main()
