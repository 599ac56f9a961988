"""Workers that are forks of this process, and so have all of its functions, data and imports already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hfusion.device.backend import accelerators
from hfusion.device.calibrate import describe
from hfusion.device.measured_records import RecordFile, TimeRecord

# Modules in which idle threads wait; such threads hold no lock that training needs.
_WAITING = {"threading", "queue", "selectors", "socket", "connection", "heartbeat"}


class EndedProcess(Exception):
    """A forked process ended before it had answered."""

    def __init__(self, exitcode: int | None) -> None:
        super().__init__(f"exit code {exitcode}")
        self.exitcode = exitcode


class ForkedProcess:
    """A worker process. It ends when `close` is called, and when this process ends for any reason.

    Args:
        serve: called once in the worker, with a function that returns whether this process has ended. Returns the
            function that answers a request.
        siblings: workers that already run. The new fork closes its copies of their pipes.
    """

    def __init__(
        self,
        serve: Callable[[Callable[[], bool]], Callable[[Any], Any]],
        siblings: Sequence[ForkedProcess],
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, worker_pipe = context.Pipe()
        parent_pipes = [self._pipe, *(sibling._pipe for sibling in siblings)]
        self._process = context.Process(
            target=_serve, args=(worker_pipe, parent_pipes, serve, os.getpid()), daemon=True
        )
        with _no_warning_of_threads():
            self._process.start()
        worker_pipe.close()

    def send(self, request: Any) -> None:
        """Send a request; each is answered in turn. Raises EndedProcess."""
        try:
            self._pipe.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise self._ended() from error

    def answer(self) -> Any:
        """Wait for the answer to the oldest request. Raises EndedProcess."""
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> EndedProcess:
        self._process.join(1.0)
        return EndedProcess(self._process.exitcode)

    def close(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def why_no_fork(device: torch.device) -> str:
    """Return why a fork of this process could not train on ``device`` now; empty if it could."""
    if why := why_never_fork(device):
        return why
    if threading.current_thread() is not threading.main_thread():
        return "training is not in the main thread"
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        busy = frame is not None and Path(frame.f_code.co_filename).stem not in _WAITING
        if thread is not threading.current_thread() and busy:
            return f"thread {thread.name!r} may hold locks"
    return ""


def why_never_fork(device: torch.device) -> str:
    """Return why no fork of this process could ever train on ``device``; empty if there is no such reason."""
    if sys.platform != "linux":
        return f"processes are not forked on {sys.platform}"
    if device.type != "cpu" or accelerators():
        return "a fork cannot use what an accelerator's driver holds"
    if multiprocessing.current_process().daemon:
        return "this process is a fork itself, or a reader of data"
    return ""


@contextmanager
def _no_warning_of_threads() -> Iterator[None]:
    """Context manager: no DeprecationWarning of forks in a process with threads, which `why_no_fork` has checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def start_seconds() -> float:
    """Return the seconds that it last took to start processes on this machine; if unknown, time a fork."""
    if records := _records().read():
        seconds: float = records[-1].seconds
        return seconds
    began = time.perf_counter()
    with _no_warning_of_threads():
        child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return time.perf_counter() - began


def note_start(seconds: float) -> None:
    """Store the seconds that it took to start processes."""
    _records().add(TimeRecord(seconds))


def _records() -> RecordFile[TimeRecord]:
    return RecordFile(TimeRecord, "forked-processes", describe(torch.device("cpu")))


def _serve(pipe: Connection, others: Sequence[Connection], serve: Callable[..., Any], parent: int) -> None:
    """Answer requests in a worker process until its parent ends."""
    for connection in others:
        connection.close()
    # Ignore Ctrl-C: the parent handles it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    # Objects from before the fork are never collected here: visiting them would copy their memory.
    gc.freeze()

    def is_orphan() -> bool:
        return os.getppid() != parent

    answer = serve(is_orphan)
    with suppress(EOFError, OSError):
        while not is_orphan():
            request = pickle.loads(pipe.recv_bytes())
            reply = answer(request)
            if is_orphan():
                return
            sys.stdout.flush()
            pipe.send_bytes(pickle.dumps(reply))
