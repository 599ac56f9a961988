"""A process that compiles steps while this one trains.

It receives requests, which hold plain values and no models or their code. It stores the compiled programs in a folder
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

    def __init__(self, requests: Sequence[CompileRequest], folder: Path, owner: object) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        files = run_folder()
        written = files.path / "requests.json"
        try:
            written.write_text(json.dumps([compile_request.content for compile_request in requests]))
            self._process = _started([str(written), str(folder)], self._log)
        except OSError:
            self._log.close()
            files.remove()
            raise
        self._finalizer = weakref.finalize(owner, _end, self._process, self._log, files, os.getpid())

    def ready(self) -> bool:
        """Return immediately whether the job has ended, successfully or not."""
        return self._process.poll() is not None

    def result(self) -> str:
        """Wait for the end of the job. Return an empty string on success, else the reason for the failure."""
        assert self._process.stdout is not None
        lines = self._process.stdout.read().decode(errors="replace").splitlines()
        self._process.wait()
        self._log.seek(0)
        last = self._log.read()[-_TAIL:].decode(errors="replace").strip().splitlines()
        self._finalizer()
        if lines:
            return str(json.loads(lines[-1]))
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
    """Entry point of the process: compile the requests in the first file into the second folder."""
    _end_with_parent()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    # Only the answer goes to the pipe: what other code prints goes to the log.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder = Path(arguments[1])
    outcomes = (_carried_out(content, folder) for content in json.loads(Path(arguments[0]).read_text()))
    answer.write(json.dumps(next(filter(None, outcomes), "")) + "\n")
    answer.flush()
    # Skip torch's cleanup at exit.
    os._exit(0)


def _carried_out(content: dict[str, Any], folder: Path) -> str:
    """Compile a request into ``folder``. Return an empty string, or the reason for the failure."""
    # Imported late: the process that only starts jobs does not need these modules here.
    from hfusion.step import program_cache
    from hfusion.step.compile_request import read_request
    from hfusion.step.compiled_step import compile_program

    try:
        with read_request(content) as source:
            result = compile_program(source)
    except Exception as error:
        return error_text(error)
    kept = program_cache.keep(CompileRequest(content), result, folder)
    return "" if kept else "what inductor made of it cannot be handed over"


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
