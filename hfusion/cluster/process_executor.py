"""Processes of this machine, one for each of its devices: a cluster without anything to install."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, get_all_start_methods, get_context, set_start_method
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hfusion.cluster.messages import DeviceInfo, Lost, failure, pack, pack_message, unpack, unpack_message
from hfusion.cluster.node import ArrayJob, ArrayTrainer, CallJob, Message
from hfusion.core.claimed_folder import run_folder
from hfusion.core.errors import HFusionError
from hfusion.device.forked_worker import Failure
from hfusion.device.machine import Device, Machine

# Seconds that a process has to end before it is killed.
_GRACE = 5.0
_swaps = Lock()


class ProcessExecutor:
    """One process for each device of ``machine``, which share its host memory evenly.

    They do not import the script that runs here: what it defines comes by pickle, so that the script needs no
    ``if __name__ == "__main__":``.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._folder = run_folder()
        self._stored_count = 0
        count = len(machine.devices)
        self._pipes: list[Connection | None] = [None] * count
        self._processes: list[BaseProcess | None] = [None] * count
        # Control pipes: they carry answers. A process ends when its pipe is closed.
        self._stops: list[Connection | None] = [None] * count
        self.devices: list[DeviceInfo] = []
        # No device joins a machine.
        self.timeout, self.starting = 0.0, False
        try:
            for device in range(count):
                self._start(device)
            self.devices = [self._info(device) for device in range(count)]
        except BaseException:
            self.close()
            raise

    def _start(self, device: int) -> None:
        context = get_context("spawn")
        pipe, worker_pipe = context.Pipe()
        end, stop = context.Pipe(duplex=False)
        machine_device, host = self._machine.devices[device], max(1, self._machine.host // len(self._machine.devices))
        args = (worker_pipe, end, machine_device, host, self._machine.disk, ProcessSettings.current())
        process = context.Process(target=_work, args=args, name=f"hfusion {machine_device.name}", daemon=False)
        with _main_left_out():
            process.start()
        worker_pipe.close()
        end.close()
        self._pipes[device], self._processes[device], self._stops[device] = pipe, process, stop

    def _info(self, device: int) -> DeviceInfo:
        pipe = self._pipes[device]
        assert pipe is not None
        try:
            message = unpack_message(pipe.recv_bytes())
        except (EOFError, OSError) as error:
            name = self._machine.devices[device].name
            raise HFusionError(f"the process of the device {name!r} ended before it began") from error
        if isinstance(message, Failure):
            raise message.error_of(f"the process of {self._machine.devices[device].name!r}")
        info: DeviceInfo = message
        return info

    def put(self, value: Any) -> Any:
        self._stored_count += 1
        path = self._folder.path / str(self._stored_count)
        path.write_bytes(pack("what the tasks share", value, {}))
        return path

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        pipe = self._pipes[device]
        # Whoever is gone is found to be so by the next wait.
        with suppress(OSError):
            if pipe is not None:
                _send(pipe, job)

    def answer(self, device: int, members: list[int]) -> None:
        stop = self._stops[device]
        with suppress(OSError):
            if stop is not None:
                _send(stop, members)

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        devices = {pipe: device for device, pipe in enumerate(self._pipes) if pipe is not None}
        messages: list[tuple[int, Message]] = []
        for pipe in connection.wait(list(devices), seconds):
            assert isinstance(pipe, Connection)
            device = devices[pipe]
            try:
                messages.append((device, unpack_message(pipe.recv_bytes())))
            except (EOFError, OSError):
                process = self._processes[device]
                self._end(device)
                code = None if process is None else process.exitcode
                messages.append((device, Lost(f"its process has ended with exit code {code}")))
        return messages

    def _end(self, device: int) -> None:
        pipe, process, stop = self._pipes[device], self._processes[device], self._stops[device]
        if pipe is None or process is None or stop is None:
            return
        try:
            stop.close()
            with suppress(OSError):
                _send(pipe, None)
            pipe.close()
            process.join(_GRACE)
        finally:
            # Also where Ctrl-C ends the wait: Python waits at its exit for processes that are left.
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
            self._pipes[device] = self._processes[device] = self._stops[device] = None

    def revive(self, device: int) -> bool:
        self._start(device)
        try:
            info = self._info(device)
        except HFusionError:
            self._end(device)
            return False
        self.devices[device] = replace(self.devices[device], process=info.process)
        return True

    def close(self) -> None:
        # The time limit runs for all of them at the same time.
        for stop in self._stops:
            if stop is not None:
                stop.close()
        with ExitStack() as stack:
            stack.callback(self._folder.remove)
            for device in range(len(self._processes)):
                stack.callback(self._end, device)


def _send(pipe: Connection, message: Any) -> None:
    # Connection.send would share the memory of tensors through sockets that live in the folder for temporary files:
    # they outlive this call, and their paths may be too long.
    pipe.send_bytes(pack_message(message))


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Context manager: started processes do not import the main module, which multiprocessing finds in sys.modules."""
    with _swaps:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _work(pipe: Connection, end: Connection, device: Device, host: int, disk: Path, settings: ProcessSettings) -> None:
    """Run the process of a device: receive jobs, and send their messages back."""
    # Code that starts processes here, such as a DataLoader, must work as in any other program.
    set_start_method(get_all_start_methods()[0], force=True)
    # Ctrl-C is handled by the driver, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings.apply()
        trainer = ArrayTrainer(device.name, Machine([device], host, disk))
        _send(pipe, trainer.info())
    except Exception as error:
        _send(pipe, failure(error))
        return
    Thread(target=_hear, args=(end, trainer), daemon=True).start()

    def part(path: Path) -> Any:
        return unpack(path.read_bytes())

    # The driver may have ended.
    with suppress(EOFError, OSError):
        while (job := unpack_message(pipe.recv_bytes())) is not None:
            trainer.run(job, part, partial(_send, pipe))


def _hear(end: Connection, trainer: ArrayTrainer) -> None:
    with suppress(EOFError, OSError):
        while True:
            trainer.answers.put(unpack_message(end.recv_bytes()))
    trainer.stopping.set()


# Settings of a process that its results depend on, carried over to its workers.


@dataclass(frozen=True, eq=False)
class ProcessSettings:
    """Settings of torch, and the states of the generators of Python and numpy.

    Attributes:
        threads: the number of threads of torch's operators.
        deterministic: whether only deterministic algorithms are used, and whether others warn only.
        flags: values of flags of ``torch.backends``, by module and name.
    """

    threads: int
    dtype: torch.dtype
    matmul_precision: str
    deterministic: tuple[bool, bool]
    flags: dict[tuple[str, str], Any]
    python_state: Any
    numpy_state: Any

    @staticmethod
    def current() -> ProcessSettings:
        """Return the settings of this process."""
        return ProcessSettings(
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            {flag: value for names in _FLAGS for flag, value in _first_readable(names)},
            random.getstate(),
            np.random.get_state(),
        )

    def apply(self) -> None:
        """Apply the settings to this process."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.dtype)
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        for flag, value in self.flags.items():
            if (flag, value) not in _first_readable((flag,)):
                setattr(attrgetter(flag[0])(torch.backends), flag[1], value)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


# The first readable name of each row is used: torch refuses to read the older one once the newer one was set.
_FLAGS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("cudnn", "enabled"),),
    (("cudnn", "benchmark"),),
    (("cudnn", "deterministic"),),
    (("cudnn", "allow_tf32"), ("cudnn.conv", "fp32_precision")),
    (("cuda.matmul", "allow_tf32"), ("cuda.matmul", "fp32_precision")),
    (("cuda.matmul", "allow_fp16_reduced_precision_reduction"),),
    (("cuda.matmul", "allow_bf16_reduced_precision_reduction"),),
    (("mkldnn", "enabled"),),
)


def _first_readable(flags: Sequence[tuple[str, str]]) -> list[tuple[tuple[str, str], Any]]:
    for holder, name in flags:
        with suppress(RuntimeError, AttributeError):
            return [((holder, name), getattr(attrgetter(holder)(torch.backends), name))]
    return []
