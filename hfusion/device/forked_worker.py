"""Workers that are forks of this process, and so have all of its functions, data and imports already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hfusion.core.errors import HFusionError
from hfusion.device.backend import accelerators

# Modules in which idle threads wait; such threads hold no lock that training needs.
_WAITING = {"threading", "queue", "selectors", "socket", "connection", "heartbeat"}


class WorkerEnded(HFusionError):
    """A worker ended before it had answered, usually killed by the system because memory ran out."""


class ForkedWorker:
    """A forked process that answers requests in order. It ends with `close`, and with this process for any reason.

    What a worker holds, it owns: whoever needs it here asks for it.

    Args:
        name: its name in errors.
        serve: called once in the worker, with a function that returns whether this process has ended. Returns the
            function that answers a request. Errors that it raises are raised by `poll`.
        siblings: workers that already run. The new fork closes its copies of their pipes.
        remedy: what to do if the worker is killed, for the error.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[Callable[[], bool]], Callable[[Any], Any]],
        siblings: Sequence[ForkedWorker] = (),
        remedy: str = "",
    ) -> None:
        self.name, self._remedy = name, remedy
        context = multiprocessing.get_context("fork")
        self._pipe, worker_pipe = context.Pipe()
        parent_pipes = [self._pipe, *(sibling._pipe for sibling in siblings)]
        self._process = context.Process(
            target=_serve, args=(worker_pipe, parent_pipes, serve, os.getpid()), daemon=True
        )
        with _no_warning_of_threads():
            self._process.start()
        worker_pipe.close()

    def call(self, request: Any) -> None:
        """Send a request without waiting. Raises WorkerEnded."""
        try:
            self._pipe.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise self._ended() from error

    def poll(self) -> Any:
        """Wait for the answer to the oldest request, and return it, or raise the error that it raised in the worker.

        Errors have the worker's traceback as a note. Raises WorkerEnded.
        """
        try:
            answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(answer, Failure):
            raise answer.error_of(self.name)
        return answer

    def fileno(self) -> int:
        """Return what `multiprocessing.connection.wait` waits for: the answer to a request."""
        return self._pipe.fileno()

    def ask(self, request: Any) -> Any:
        """Send a request, and return its answer as `poll` does, if no other answer is awaited."""
        self.call(request)
        return self.poll()

    def _ended(self) -> WorkerEnded:
        self._process.join(1.0)
        return WorkerEnded(
            f"{self.name} ended with exit code {self._process.exitcode}, as if the system had killed it, which it does "
            f"when memory runs out. {self._remedy}"
        )

    def close(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Failure:
    """An error raised in a worker, and its traceback as text. Errors that cannot be pickled keep their text only.

    ``dumps``: pickles the error for the process that reads it.
    """

    def __init__(self, error: BaseException, dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
        self._kind, self._text = type(error).__name__, str(error)
        self._traceback = "".join(traceback.format_exception(error))
        self._error: bytes | None = None
        with suppress(Exception):
            self._error = dumps(error)

    def error_of(self, worker: str) -> BaseException:
        """Return the error with the traceback as a note that names the worker."""
        error: BaseException = HFusionError(f"{self._kind}: {self._text}")
        # An exception class may fail, or change its text, when it is unpickled.
        with suppress(Exception):
            original: Any = None if self._error is None else pickle.loads(self._error)
            if type(original).__name__ == self._kind and str(original) == self._text:
                error = original
        error.add_note(f"in {worker}:\n{self._traceback}")
        return error


def why_no_fork(device: torch.device) -> str:
    """Return why a fork of this process could not train on ``device`` now; empty if it could."""
    if sys.platform != "linux":
        return f"processes are not forked on {sys.platform}"
    if device.type != "cpu" or accelerators():
        return "a fork cannot use what an accelerator's driver holds"
    if multiprocessing.current_process().daemon:
        return "this process is a fork itself, or a reader of data"
    if threading.current_thread() is not threading.main_thread():
        return "training is not in the main thread"
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        busy = frame is not None and Path(frame.f_code.co_filename).stem not in _WAITING
        if thread is not threading.current_thread() and busy:
            return f"thread {thread.name!r} may hold locks"
    return ""


@contextmanager
def _no_warning_of_threads() -> Iterator[None]:
    """Context manager: no DeprecationWarning of forks in a process with threads, which `why_no_fork` has checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


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
            try:
                reply = answer(request)
            except BaseException as error:
                reply = Failure(error)
            if is_orphan():
                return
            sys.stdout.flush()
            pipe.send_bytes(pickle.dumps(reply))
