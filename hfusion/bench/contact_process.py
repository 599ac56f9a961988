"""Checks of ``contact`` in processes of their own, several at a time, each with a time limit."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import dropwhile, groupby
from pathlib import Path
from threading import Event

import torch

from hfusion.bench import contact_child
from hfusion.bench.contact_item import CheckResult, ContactItem, ContactStatus

_POLL = 0.05
_LINE, _OUTPUT = 600, 4000
NO_TIME = "there was no time left for it: give more --minutes"


@dataclass(frozen=True)
class ContactRow:
    """A line of the JSON file. ``seconds``: of the process, from start to end; the others are of `CheckResult`."""

    item: str
    status: str
    seconds: float
    reason: str
    summary: str
    values: dict[str, object]


@dataclass(frozen=True)
class ContactRun:
    """State shared by all checks of a run.

    ``until``: a time of `time.monotonic`. ``stopped``: set to end all processes.
    """

    device: torch.device
    until: float
    stopped: Event


Runner = Callable[[ContactItem, ContactRun], ContactRow]


def run_item(item: ContactItem, run: ContactRun) -> ContactRow:
    """Run a check in a process, however that ends."""
    start = time.monotonic()
    remaining = run.until - start
    missing = item.missing(run.device) or (NO_TIME if remaining <= 0 else "")
    if missing or run.stopped.is_set():
        return row(item, CheckResult(ContactStatus.SKIPPED, missing or "interrupted"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        result = _child(item, run, min(item.limit, remaining), Path(folder))
    return row(item, result, time.monotonic() - start)


def run_all(
    chosen: Sequence[ContactItem], run: ContactRun, jobs: int, runner: Runner = run_item
) -> Iterator[ContactRow]:
    """Yield a row as each check ends: ``jobs`` at a time, one by one those that are timed."""
    for exclusive, group in groupby(chosen, key=lambda item: item.exclusive):
        with ThreadPoolExecutor(1 if exclusive else jobs) as pool:
            pending: set[Future[ContactRow]] = {pool.submit(runner, item, run) for item in group}
            try:
                while pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            except BaseException:
                run.stopped.set()
                raise


def row(item: ContactItem, result: CheckResult, seconds: float) -> ContactRow:
    """Return the line of a check."""
    fields = result.status.value, round(seconds, 2), result.reason, result.summary, dict(result.values)
    return ContactRow(item.name, *fields)


def _child(item: ContactItem, run: ContactRun, limit: float, folder: Path) -> CheckResult:
    check, answer = folder / "check", folder / "result.json"
    check.write_bytes(pickle.dumps((item, run.device)))
    command = [sys.executable, "-m", contact_child.__name__, str(check), str(answer)]
    with (folder / "output").open("w+b") as output:
        # A session of its own, so that all that it has started can be killed with it.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
        try:
            code = _ended(process, time.monotonic() + limit, run.stopped)
        finally:
            _kill(process)
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
    if answer.exists():
        return contact_child.read(answer.read_text())
    lines = text.splitlines() or ["it printed nothing"]
    values = {"output": text[-_OUTPUT:]}
    if code is None:
        reason = f"not done after {limit:.0f} s; last line: {lines[-1][:_LINE]}"
        return CheckResult(ContactStatus.TIMEOUT, reason, values=values)
    if code < 0:
        # Python's faulthandler has printed the calls of all threads, the innermost first.
        crashed = dropwhile(lambda line: not line.startswith("Current thread"), lines)
        call = next((line.strip() for line in crashed if line.startswith("  File ")), lines[-1][:_LINE])
        return CheckResult(ContactStatus.FAILED, f"killed by {signal.Signals(-code).name}: {call}", values=values)
    return CheckResult(ContactStatus.FAILED, lines[-1][:_LINE], values=values)


def _ended(process: subprocess.Popen[bytes], until: float, stopped: Event) -> int | None:
    """Wait for the exit status; None if time is over or the user has interrupted before."""
    while time.monotonic() < until and not stopped.is_set():
        code = process.poll()
        if code is not None:
            return code
        time.sleep(_POLL)
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
    else:
        process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
