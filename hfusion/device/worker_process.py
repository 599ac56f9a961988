"""Workers: processes of this machine that answer requests, as forks of this process or spawned ones."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfusion.core.errors import HFusionError
from hfusion.device.backend import accelerators
from hfusion.device.team import stay

# Modules in which idle threads wait; such threads hold no lock that training needs.
_WAITING = {"threading", "queue", "selectors", "socket", "connection", "heartbeat"}
_spawning = threading.Lock()


class WorkerEnded(HFusionError):
    """A worker ended before it had answered, usually killed by the system because memory ran out."""


class WorkerProcess:
    """A process that answers requests in order. It ends with `close`, and with this process for any reason.

    What a worker holds, it owns: whoever needs it here asks for it.

    Args:
        name: its name in errors.
        serve: called once in the worker, with its `Parent`. Returns the function that answers a request. Errors that
            either raises are raised by `poll`.
        siblings: forks that already run. The new one closes its copies of their pipes.
        remedy: what to do if the worker is killed, for the error.
        method: a ``"fork"`` has all functions, data and imports of this process, and computes with one thread.
            ``"spawn"``: a new process, for which ``serve`` is pickled. It does not import the main module, so that a
            script needs no ``if __name__ == "__main__":``.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[Parent], Callable[[Any], Any]],
        siblings: Sequence[WorkerProcess] = (),
        remedy: str = "",
        method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        self.name, self._remedy = name, remedy
        context: Any = multiprocessing.get_context(method)
        self._pipe: Connection
        self._pipe, worker_pipe = context.Pipe()
        others = [self._pipe, *(sibling._pipe for sibling in siblings)] if method == "fork" else []
        # A daemon could not have processes of its own, such as the workers of a DataLoader.
        daemon = method == "fork"
        arguments = worker_pipe, others, serve, os.getpid()
        self._process = context.Process(target=_serve, args=arguments, name=name, daemon=daemon)
        # Python warns of forks in a process with threads, which `why_no_fork` has checked.
        unwarned = warnings.catch_warnings(action="ignore", category=DeprecationWarning)
        with unwarned if method == "fork" else _main_left_out():
            self._process.start()
        worker_pipe.close()

    def call(self, request: Any) -> None:
        """Send a request, or the reply to `Parent.ask`, without waiting. Raises WorkerEnded."""
        try:
            self._pipe.send_bytes(pack_message(request))
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        """Wait for the next message: one that the worker tells, or its answer, which is a `Failure` for an error.

        Raises WorkerEnded.
        """
        try:
            return unpack_message(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def poll(self) -> Any:
        """Wait for the answer to the oldest request, and return it, or raise the error that it raised in the worker.

        Errors have the worker's traceback as a note. Raises WorkerEnded.
        """
        answer = self.receive()
        if isinstance(answer, Failure):
            raise answer.error_of(self.name)
        return answer

    def fileno(self) -> int:
        """Return what `multiprocessing.connection.wait` waits for: a message of the worker."""
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
        close_workers([self])


def close_workers(workers: Sequence[WorkerProcess], seconds: float = 0.0) -> None:
    """End workers. Those that find their parent gone within ``seconds`` end by themselves, the others are killed."""
    for worker in workers:
        worker._pipe.close()
    end = time.monotonic() + seconds
    try:
        for worker in workers:
            worker._process.join(max(0.0, end - time.monotonic()))
    finally:
        # Also where Ctrl-C ends the wait: Python waits at its exit for processes that are left.
        for worker in workers:
            worker._process.kill()
            worker._process.join()


class Parent:
    """The process that a worker answers, as the worker sees it."""

    def __init__(self, pipe: Connection, number: int) -> None:
        self._pipe, self._number = pipe, number

    def tell(self, message: Any) -> None:
        """Send a message other than the answer. Raises OSError if the parent has ended, or closes the worker."""
        self._pipe.send_bytes(pack_message(message))

    def ask(self, message: Any) -> Any:
        """Send a message, and wait for the reply. Raises EOFError or OSError as `tell` does."""
        self.tell(message)
        return unpack_message(self._pipe.recv_bytes())

    def is_gone(self) -> bool:
        """Return whether the parent has ended, or closes the worker. Call it while a request is answered."""
        return os.getppid() != self._number or self._pipe.poll()


class Failure:
    """An error raised in a worker, and its traceback as text. Errors that cannot be pickled keep their text only."""

    def __init__(self, error: BaseException) -> None:
        self._kind, self._text = type(error).__name__, str(error)
        self._traceback = "".join(traceback.format_exception(error))
        self._error: bytes | None = None
        with suppress(Exception):
            self._error = pack_message(error)

    def error_of(self, worker: str) -> BaseException:
        """Return the error with the traceback as a note that names the worker."""
        error: BaseException = HFusionError(f"{self._kind}: {self._text}")
        # An exception class may fail, or change its text, when it is unpickled.
        with suppress(Exception):
            original: Any = None if self._error is None else unpack_message(self._error)
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
        # A team has a job only while the thread that gave it is busy.
        idle = frame is None or frame.f_code is stay.__code__ or Path(frame.f_code.co_filename).stem in _WAITING
        if thread is not threading.current_thread() and not idle:
            return f"thread {thread.name!r} may hold locks"
    return ""


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Context manager: started processes do not import the main module, which multiprocessing finds in sys.modules."""
    with _spawning:
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _serve(pipe: Connection, others: Sequence[Connection], serve: Callable[[Parent], Any], number: int) -> None:
    """Answer the requests of the process ``number``, in a worker, until that ends."""
    for connection in others:
        connection.close()
    # Ignore Ctrl-C: the parent handles it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if multiprocessing.current_process().daemon:
        torch.set_num_threads(1)
        # Objects from before the fork are never collected here: visiting them would copy their memory.
        gc.freeze()
    answer: Callable[[Any], Any] | None = None
    with suppress(EOFError, OSError):
        while os.getppid() == number:
            data = pipe.recv_bytes()
            try:
                answer = serve(Parent(pipe, number)) if answer is None else answer
                reply = pack_message(answer(unpack_message(data)))
            except BaseException as error:
                reply = pack_message(Failure(error))
            sys.stdout.flush()
            if os.getppid() == number:
                pipe.send_bytes(reply)


# Messages: tensors as bytes, and classes and functions by name, which the process that reads them looks up.


def pack_message(message: Any) -> bytes:
    """Pickle a message for another process, which must have the classes of its objects.

    Classes and functions that cloudpickle recreated from a script cannot be imported here. They are pickled by name,
    and looked up in the process that reads the message.
    """
    target = io.BytesIO()
    _MessagePickler(target).dump(message)
    return target.getvalue()


def unpack_message(data: bytes) -> Any:
    """Unpickle the bytes of `pack_message`. Raises AttributeError or ImportError for names that are not found here."""
    return pickle.loads(data)


class _MessagePickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if is_plain_tensor(value):
            return tensor_as_bytes(value)
        if isinstance(value, type | types.FunctionType):
            with suppress(AttributeError, ImportError):
                if _named(value.__module__, value.__qualname__) is value:
                    return NotImplemented
            return _named, (value.__module__, value.__qualname__)
        return NotImplemented


def _named(module: str, name: str) -> Any:
    """Return the class or function of this process with this module and qualified name."""
    return attrgetter(name)(import_module(module))


def is_plain_tensor(value: object) -> bool:
    """Return whether a value is a tensor that its bytes, dtype and shape describe."""
    if type(value) not in (Tensor, nn.Parameter) or not isinstance(value, Tensor):
        return False
    if not (value.is_cpu and value.is_leaf and value.layout is torch.strided and value.is_contiguous()):
        return False
    if value.is_quantized or value.is_conj() or value.is_neg() or vars(value) or value._backward_hooks:
        return False
    return 0 < value.nbytes == value.untyped_storage().nbytes()


def tensor_as_bytes(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a plain tensor to its bytes. torch's own reduction takes ten times as long for small ones."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _of_bytes, (data, tensor.dtype, tensor.shape, tensor.requires_grad, type(tensor) is nn.Parameter)


def _of_bytes(data: bytes, dtype: torch.dtype, shape: torch.Size, trained: bool, is_parameter: bool) -> Tensor:
    # The clone is in memory allocated by torch, with the usual alignment of tensors.
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).clone().reshape(shape)
    return nn.Parameter(tensor, trained) if is_parameter else tensor.requires_grad_(trained)
