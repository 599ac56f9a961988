"""A process that compiles steps while this one trains.

It receives an order, which holds plain values and no models or their code. It stores the compiled programs in a folder
and reports the outcome on its standard output. No thread waits for it: training polls between minibatches. It ends when
its job is done, when the owner of the job is freed, and when this process ends, for whatever reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hfusion.core.claimed_folder import ClaimedFolder, run_folder
from hfusion.step.compile_request import CompileRequest

# The lowest priority: it only uses core time that training leaves. At 5 it displaced one OpenMP thread, for which the
# others waited: 250 steps of a CNN took twice as long on two cores (Xeon).
_NICENESS = 19
_START = "import sys; sys.path[:] = {path!r}; from hfusion.step.compile_worker import main; main({arguments!r})"
# How many bytes at the end of the log of a failed process are read for its error.
_TAIL = 2000


class BackgroundJob:
    """A compilation in a process of its own, which is killed when ``owner`` is freed.

    Raises OSError if no process can be started.
    """

    def __init__(self, compile_request: CompileRequest, folder: Path, owner: object) -> None:
        self.folder = folder
        self._outcome_text = ""
        self._began = time.time()
        self.seconds = 0.0
        """Seconds until the program was ready; 0 until `result` was called."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        files = run_folder()
        written = files.path / "order.json"
        try:
            written.write_text(compile_request.text)
            self._process = _started([str(written), str(folder)], self._log)
        except OSError:
            self._log.close()
            files.remove()
            raise
        self._finalizer = weakref.finalize(owner, _end, self._process, self._log, files, os.getpid())
        self.cancelled = False

    @property
    def age(self) -> float:
        """Seconds since the job started."""
        return time.time() - self._began

    def ready(self) -> bool:
        """Return immediately whether the job has ended, successfully or not."""
        if self._outcome_text or not self._finalizer.alive:
            return True
        return self._process.poll() is not None

    def result(self) -> str:
        """Wait for the end of the job. Return an empty string on success, else the reason for the failure.

        If it was cancelled or its owner freed before that, ``cancelled`` is True afterwards.
        """
        if not self._finalizer.alive and not self._outcome_text:
            self.cancelled = True
            return "cancelled"
        if not self._outcome_text:
            self._process.wait()
            self._outcome_text = self._outcome()
            self._finalizer()
        return "" if self._outcome_text == "done" else self._outcome_text

    def _outcome(self) -> str:
        assert self._process.stdout is not None
        lines = self._process.stdout.read().decode(errors="replace").splitlines()
        if lines:
            message = json.loads(lines[-1])
            # The time at which the process ended, not that of this call, which may come a long step later.
            self.seconds = max(0.0, message["ended"] - self._began)
            return str(message["told"])
        self._log.seek(0)
        last = self._log.read()[-_TAIL:].decode(errors="replace").strip().splitlines()
        return f"it ended with code {self._process.returncode}: {last[-1] if last else 'without a word'}"

    def cancel(self) -> None:
        """End the process."""
        self._finalizer()


def _started(arguments: Sequence[str], log: Any) -> subprocess.Popen[bytes]:
    start = _START.format(path=[str(Path(__file__).parents[2]), *sys.path], arguments=list(arguments))
    # Its standard input stays open as long as this process lives. Its own process group shields it from Ctrl-C, and
    # lets it be killed together with its children. In a session of its own, its niceness would count within that
    # session only (sched(7), autogroup).
    return subprocess.Popen(
        [sys.executable, "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes], log: Any, files: ClaimedFolder, starter: int) -> None:
    """Kill the process and its children, and close its files. Does nothing in a fork of the starting process."""
    if os.getpid() != starter:
        return
    if process.poll() is None:
        _kill(process)
        process.wait()
    for file in (process.stdin, process.stdout, log):
        if file is not None:
            file.close()
    files.remove()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if not hasattr(os, "killpg"):
        process.kill()
        return
    # It may have ended by itself meanwhile.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process: compile the request in the first file into the second folder."""
    _end_with_parent()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    # Only the answer goes to the pipe: what other code prints goes to the log.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    outcome = _carried_out(json.loads(Path(arguments[0]).read_text()), Path(arguments[1]))
    answer.write(json.dumps({"told": outcome, "ended": time.time()}) + "\n")
    answer.flush()
    # Skip torch's cleanup at exit.
    os._exit(0)


def _carried_out(content: dict[str, Any], folder: Path) -> str:
    """Compile the order into ``folder``. Return ``done``, or the reason for the failure."""
    # Imported late: the process that only starts jobs does not need these modules here.
    from hfusion.step import program_cache
    from hfusion.step.compile_limits import Unprofitable
    from hfusion.step.compile_request import read_request
    from hfusion.step.compiled_step import Library, compile_programs

    compile_request = CompileRequest(content)
    try:
        with read_request(content) as step:
            compile_programs(step.forward, step.loss, step.call, Library(), None, step.size, compile_request, folder)
    except Unprofitable:
        # `compile_programs` has cached the decision and its reason.
        pass
    except Exception as error:
        return error_text(error)
    return (
        "done"
        if program_cache.find(compile_request, folder) is not None
        else "what inductor made of it cannot be handed over"
    )


def _end_with_parent() -> None:
    """Kill this process group when the parent is gone, which closes the other end of standard input."""

    def watch() -> None:
        os.read(0, 1)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def error_text(error: Exception) -> str:
    """Return the error as one line, with the remedy if a C++ compiler is missing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    missing = "cxx" in type(error).__name__.lower() or "compiler" in text.lower()
    return f"{text}; install a C++ compiler (g++ or clang++), or name it in the variable CXX" if missing else text
