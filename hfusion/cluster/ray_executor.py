"""Jobs and messages of actors of Ray. Ray is imported when the first executor is made. Tried with ray 2.60."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from hfusion.cluster.messages import DeviceInfo, Lost
from hfusion.cluster.node import ArrayJob, ArrayTrainer, CallJob, End, Message
from hfusion.core.errors import PlanError
from hfusion.device.machine import Device, Machine
from hfusion.device.worker_process import Failure, pack_message, unpack_message

_log = logging.getLogger(__name__)

# Seconds: the limit for an actor to start, import and measure its rates; how long the first devices wait for others;
# and between two looks for new nodes.
_BEGIN = 300.0
_STRAGGLE = 10.0
_LOOK = 2.0


class RayExecutor:
    """Actors on the nodes of a Ray cluster. Ray starts each when its resources are free, and restarts it if it dies.

    Args:
        address: the address of the cluster, as in ray.init.
        resources: resources of an actor, as in ray.remote.
        runtime_env: as in ray.init; for the actors only if this process is connected already.
        machine: bytes of device and of host memory, each None to detect it, and the folder for spilled tensors.
        timeout: seconds to wait for a device while there is none.
        devices: how many actors to create, which Ray places; None: those that fit each node.

    Raises:
        ImportError: Ray is not installed.
        PlanError: no actor starts in time, or this process uses another cluster.
    """

    def __init__(
        self,
        address: str | None,
        resources: Mapping[str, Any],
        runtime_env: Mapping[str, Any] | None,
        machine: tuple[int | None, int | None, Path],
        timeout: float,
        devices: int | None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("hf.Cluster needs Ray: pip install ray cloudpickle (extra: hfusion[cluster])") from error
        self._ray: Any = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(address=address, runtime_env=None if runtime_env is None else dict(runtime_env))
        elif address not in (None, "auto", connected_address := ray.get_runtime_context().gcs_address):
            raise PlanError(
                f"hf.Cluster({address!r}): this process is connected to the Ray cluster at {connected_address}; call "
                "ray.shutdown() before, or give None for the present one"
            )
        self._resources, self._environment = resources, None if self._started_ray else runtime_env
        self._machine, self.timeout, self._looks_for_nodes = machine, timeout, devices is None
        # The actors of ``devices``, and those that Ray has not started yet by their first answer.
        self._actors: list[Any] = []
        self._pending: dict[Any, Any] = {}
        self._known_nodes: set[str] = set()
        self._looked, self._created = -_LOOK, 0.0
        self._failures: list[str] = []
        self._running: dict[int, Any] = {}
        self.devices: list[DeviceInfo] = []
        try:
            for number in range(devices or 0):
                self._create(f"device{number}", dict(resources))
            self._wait_for_first()
        except BaseException:
            self.close()
            raise

    def _wait_for_first(self) -> None:
        """Wait for a first device, and a moment longer for others. Raises PlanError if there is none in time."""
        began = answered = time.monotonic()
        while not self.devices or (self._pending and time.monotonic() - answered <= _STRAGGLE):
            if self._started():
                answered = time.monotonic()
            elif not self.devices and not self.starting and time.monotonic() - began >= self.timeout:
                raise PlanError(f"no process could begin on the Ray cluster: {self._obstacles()}")
            time.sleep(0.1)
        if self._pending:
            _log.warning("the run begins without %d devices: %s", len(self._pending), self._obstacles())

    def _obstacles(self) -> str:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        waiting = f"{len(self._pending)} processes wait for their resources, {dict(self._resources) or 'a CPU'}"
        return "; ".join([*self._failures, f"{waiting}, on nodes with {nodes}"])

    @property
    def starting(self) -> bool:
        return bool(self._pending) and time.monotonic() - self._created < _BEGIN

    def _started(self) -> list[int]:
        """Look for new nodes, and return the devices whose actors have started since the last call."""
        if self._looks_for_nodes and time.monotonic() - self._looked >= _LOOK:
            self._looked = time.monotonic()
            for node in self._ray.nodes():
                if node["Alive"] and node["NodeID"] not in self._known_nodes:
                    self._create_on(node)
        before = len(self.devices)
        answers = list(self._pending)
        for answer in self._ray.wait(answers, num_returns=len(answers), timeout=0)[0] if answers else ():
            actor = self._pending.pop(answer)
            try:
                self.devices.append(self._ray.get(answer))
                self._actors.append(actor)
            except self._ray.exceptions.RayError as error:
                self._failures.append(f"a process failed: {str(error).strip().splitlines()[-1]}")
                _log.warning("%s", self._failures[-1])
        return list(range(before, len(self.devices)))

    def _create_on(self, node: Mapping[str, Any]) -> None:
        """Create the actors of a node: one for each GPU, or one for all its CPUs."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        available, resources = node["Resources"], dict(self._resources)
        gpus = resources.setdefault("num_gpus", 1 if available.get("GPU", 0) >= 1 else 0)
        count = int(available.get("GPU", 0) // gpus) if gpus else 1
        # A head may run no tasks.
        cpus = resources.setdefault("num_cpus", available.get("CPU", 0) / max(1, count))
        needs = {"CPU": cpus, "GPU": gpus, **(resources.get("resources") or {})}
        if not any(needs.values()) or any(available.get(name, 0) < value for name, value in needs.items()):
            count = 0
        index = len(self._known_nodes)
        self._known_nodes.add(node["NodeID"])
        resources["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for number in range(count):
            self._create(f"node{index}/{number}", resources)

    def _create(self, name: str, options: Mapping[str, Any]) -> None:
        # One thread trains, the other receives answers and the request to stop.
        options = {**options, "max_concurrency": 2, "max_restarts": -1}
        if self._environment is not None:
            options["runtime_env"] = dict(self._environment)
        actor = self._ray.remote(DeviceActor).options(**options).remote(name, *self._machine)
        self._pending[actor.info.remote()], self._created = actor, time.monotonic()

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        name = job.name if isinstance(job, ArrayJob) else type(job).__name__
        train = self._actors[device].train.options(num_returns="streaming", name=f"train {name}")
        self._running[device] = train.remote(job)

    def answer(self, device: int, members: list[int]) -> None:
        self._actors[device].answer.remote(members)

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        joined: list[tuple[int, Message]] = [(device, self.devices[device]) for device in self._started()]
        streams = list(self._running.values())
        if joined or not streams:
            time.sleep(0.0 if joined else seconds)
            return joined
        self._ray.wait(streams, num_returns=1, timeout=seconds)
        # Looking at all streams costs as much for one message as for those of all.
        ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0)
        arrived = set(map(id, ready))
        return [
            message
            for device, stream in list(self._running.items())
            if id(stream) in arrived and (message := self._next(device, stream)) is not None
        ]

    def _next(self, device: int, stream: Any) -> tuple[int, Message] | None:
        errors = self._ray.exceptions
        del self._running[device]
        try:
            message: Message = unpack_message(self._ray.get(next(stream)))
        except StopIteration:
            return None
        except (errors.RayActorError, errors.ObjectLostError) as error:
            return device, Lost(str(error).strip().splitlines()[0])
        except errors.RayError as error:
            return device, Failure(error)
        if not isinstance(message, End):
            self._running[device] = stream
        return device, message

    def revive(self, device: int) -> bool:
        """Wait until Ray has restarted the actor of a device; return False if it cannot, as on a node that is gone."""
        end = time.monotonic() + _BEGIN
        while time.monotonic() < end:
            try:
                info = self._ray.get(self._actors[device].info.remote(), timeout=_BEGIN)
            except self._ray.exceptions.ActorUnavailableError:
                time.sleep(0.5)
            except self._ray.exceptions.RayError:
                return False
            else:
                self.devices[device] = replace(self.devices[device], process=info.process, node=info.node)
                return True
        return False

    def close(self) -> None:
        if not self._ray.is_initialized():
            return
        for actor in (*self._actors, *self._pending.values()):
            with suppress(Exception):
                self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()


class DeviceActor:
    """A Ray actor that trains arrays on the one device that Ray gave it, and yields messages."""

    def __init__(self, name: str, memory: int | None, host: int | None, disk: Path) -> None:
        machine = Machine.detect(disk)
        first_device = machine.devices[0]
        device = Device(first_device.device, memory=memory or first_device.memory)
        self._answers: SimpleQueue[list[int]] = SimpleQueue()
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._trainer = ArrayTrainer(name, Machine([device], host or machine.host, disk), self)

    def info(self) -> DeviceInfo:
        return self._trainer.info()

    def train(self, job: ArrayJob | CallJob) -> Iterator[bytes]:
        """Yield messages as bytes, in which classes go by name: Ray would send copies of those of a script."""
        import ray

        thread = Thread(target=lambda: self._messages.put(self._trainer.run(job, ray.get)), name="hfusion train")
        thread.start()
        message: Message | None = None
        while not isinstance(message, End):
            message = self._messages.get()
            yield pack_message(message)
        thread.join()

    def answer(self, members: list[int]) -> None:
        self._answers.put(members)

    # The driver, as the trainer sees it. Ray ends the actor with it.

    def tell(self, message: Any) -> None:
        self._messages.put(message)

    def ask(self, message: Any) -> Any:
        self._messages.put(message)
        return self._answers.get()

    def is_gone(self) -> bool:
        return False
