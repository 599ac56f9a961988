"""Processes of this machine, one for each of its devices: a cluster without anything to install."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import connection, get_all_start_methods, set_start_method
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hfusion.cluster.messages import DeviceInfo, Lost, pack, unpack
from hfusion.cluster.node import ArrayJob, ArrayTrainer, CallJob, Message
from hfusion.core.claimed_folder import run_folder
from hfusion.core.errors import HFusionError
from hfusion.device.machine import Device, Machine
from hfusion.device.worker_process import Parent, WorkerEnded, WorkerProcess, close_workers

# Seconds that processes have to end before they are killed.
_GRACE = 5.0


class ProcessExecutor:
    """A spawned process for each device of ``machine``, which share its host memory evenly."""

    # No device joins a machine.
    timeout, starting = 0.0, False

    def __init__(self, machine: Machine) -> None:
        self._machine, self._folder, self._stored_count = machine, run_folder(), 0
        self._workers: dict[int, WorkerProcess] = {}
        self.devices: list[DeviceInfo] = []
        try:
            for device in range(len(machine.devices)):
                self._start(device)
            self.devices += [worker.poll() for worker in self._workers.values()]
        except BaseException:
            self.close()
            raise

    def _start(self, device: int) -> None:
        """Start the process of a device, and ask it for its `DeviceInfo`."""
        machine = self._machine
        host = max(1, machine.host // len(machine.devices))
        serve = partial(_serve, machine.devices[device], host, machine.disk, self._folder.path, process_settings())
        name = f"the process of {machine.devices[device].name!r}"
        self._workers[device] = WorkerProcess(name, serve, method="spawn")
        self._workers[device].call(None)

    def put(self, value: Any) -> Any:
        self._stored_count += 1
        path = self._folder.path / str(self._stored_count)
        path.write_bytes(pack("what the tasks share", value, {}))
        return path

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        # A process that has ended is found by the next wait.
        with suppress(WorkerEnded):
            self._workers[device].call(job)

    def answer(self, device: int, members: list[int]) -> None:
        with suppress(WorkerEnded):
            self._workers[device].call(members)

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        devices = {worker: device for device, worker in self._workers.items()}
        messages: list[tuple[int, Message]] = []
        ready: list[Any] = connection.wait(list(devices), seconds)  # type: ignore[arg-type]
        for worker in ready:
            try:
                messages.append((devices[worker], worker.receive()))
            except WorkerEnded as error:
                close_workers([self._workers.pop(devices[worker])])
                messages.append((devices[worker], Lost(str(error))))
        return messages

    def revive(self, device: int) -> bool:
        try:
            self._start(device)
            info: DeviceInfo = self._workers[device].poll()
        except HFusionError:
            close_workers([self._workers.pop(device)])
            return False
        self.devices[device] = replace(self.devices[device], process=info.process)
        return True

    def close(self) -> None:
        try:
            close_workers(list(self._workers.values()), _GRACE)
        finally:
            self._folder.remove()


def _serve(
    device: Device, host: int, disk: Path, folder: Path, settings: Sequence[Callable[[], object]], parent: Parent
) -> Callable[[ArrayJob | CallJob | None], Any]:
    """Return the function that answers requests in the process of a device."""
    atexit.register(_leave, folder, os.getppid())
    # Code that starts processes here, such as a DataLoader, must work as in any other program.
    set_start_method(get_all_start_methods()[0], force=True)
    for setting in settings:
        setting()
    trainer = ArrayTrainer(device.name, Machine([device], host, disk), parent)

    def part(path: Path) -> Any:
        return unpack(path.read_bytes())

    return lambda job: trainer.info() if job is None else trainer.run(job, part)


def _leave(folder: Path, driver: int) -> None:
    """End this process at once: its last garbage collection frees nothing, and takes seconds on a busy machine."""
    if os.getppid() != driver:
        # The driver was killed, and left its folder.
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# Switches in torch.backends that results depend on. Some have an older and a newer name: torch refuses to read the
# older one once the newer one was set.
_SWITCHES = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cudnn.conv.fp32_precision",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "mkldnn.enabled",
)


def process_settings() -> list[Callable[[], object]]:
    """Return functions that give another process the settings of torch, and Python's and numpy's random states."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    return [
        partial(torch.set_num_threads, torch.get_num_threads()),
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.use_deterministic_algorithms, deterministic, warn_only=warns),
        partial(_set_switches, _switches()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
    ]


def _switches() -> dict[str, Any]:
    values: dict[str, Any] = {}
    with suppress(RuntimeError):
        values["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    for name in _SWITCHES:
        with suppress(RuntimeError, AttributeError):
            values[name] = attrgetter(name)(torch.backends)
    return values


def _set_switches(switches: dict[str, Any]) -> None:
    """Set what differs in this process: setting the older name of an equal switch would forbid the newer one."""
    for name, value in switches.items():
        # Setting one may change those that follow.
        if _switches().get(name) == value:
            continue
        holder, _, attribute = name.rpartition(".")
        if holder:
            setattr(attrgetter(holder)(torch.backends), attribute, value)
        else:
            torch.set_float32_matmul_precision(value)
