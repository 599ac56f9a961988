"""Jobs and messages of actors of Ray. Ray is imported when the first executor is made. Tried with ray 2.60."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from hfusion.cluster.messages import DeviceInfo, Lost, Raised
from hfusion.cluster.node import ArrayJob, ArrayTrainer, CallJob, End, Message
from hfusion.cluster.serialization import pack_message, unpack_message
from hfusion.core.errors import PlanError
from hfusion.device.machine import Device, Machine

_log = logging.getLogger(__name__)

# Seconds that an actor has to end before it is killed.
_GRACE = 5.0


class RayExecutor:
    """Actors on the nodes of a Ray cluster.

    Args:
        address: the address of the cluster, as in ray.init.
        options: options of the actors.
        runtime_env: as in ray.init; for the actors only if this process is connected already.

    Raises:
        ImportError: Ray is not installed.
        PlanError: no node has the wanted resources, no actor starts, or this process uses another cluster.
    """

    def __init__(self, address: str | None, options: ActorOptions, runtime_env: Mapping[str, Any] | None) -> None:
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
        self.timeout = options.timeout
        self._nodes = RayDevices(ray, options if self._started_ray else replace(options, environment=runtime_env))
        self._actor_devices: list[ActorDevice] = []
        self._running: dict[int, Any] = {}
        self.devices: list[DeviceInfo] = []
        try:
            for device in self._nodes.first():
                self._add(device)
        except BaseException:
            self.close()
            raise

    def _add(self, device: ActorDevice) -> DeviceInfo:
        assert device.info is not None
        self._actor_devices.append(device)
        self.devices.append(device.info)
        return device.info

    @property
    def starting(self) -> bool:
        return self._nodes.beginning

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        name = job.name if isinstance(job, ArrayJob) else type(job).__name__
        train = self._actor_devices[device].actor.train.options(num_returns="streaming", name=f"train {name}")
        self._running[device] = train.remote(job)

    def answer(self, device: int, members: list[int]) -> None:
        self._actor_devices[device].actor.answer.remote(members)

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        joined: list[tuple[int, Message]] = []
        for device in self._nodes.started():
            joined.append((len(self._actor_devices), self._add(device)))
            _log.info("the device %s of the node %s has joined", device.name, device.node["NodeName"])
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
        try:
            message: Message = unpack_message(self._ray.get(next(stream)))
        except StopIteration:
            self._running.pop(device, None)
            return None
        except (errors.RayActorError, errors.ObjectLostError) as error:
            self._running.pop(device, None)
            return device, Lost(str(error).strip().splitlines()[0])
        except errors.RayError as error:
            self._running.pop(device, None)
            return device, Raised(error)
        if isinstance(message, End):
            self._running.pop(device, None)
        return device, message

    def revive(self, device: int) -> bool:
        if not self._nodes.revive(self._actor_devices[device]):
            return False
        info = self._actor_devices[device].info
        assert info is not None
        self.devices[device] = replace(self.devices[device], process=info.process, node=info.node)
        return True

    def close(self) -> None:
        if not self._ray.is_initialized():
            return
        self._nodes.close()
        if self._running:
            # Arrays that are training release their files and processes.
            stops = [self._actor_devices[device].actor.stop.remote() for device in self._running]
            with suppress(Exception):
                self._ray.wait(stops, num_returns=len(stops), timeout=_GRACE)
            end = time.monotonic() + _GRACE
            while self._running and time.monotonic() < end:
                self.wait(0.2)
        for device in self._actor_devices:
            with suppress(Exception):
                self._ray.kill(device.actor)
        if self._started_ray:
            self._ray.shutdown()


# The devices of a Ray cluster, one actor each: devices that are free at the start, and those of nodes that join.

# Seconds: the limit for an actor to start, import and measure its rates; how long the first devices wait for others
# that are starting; until devices in use by other jobs are reported; and between two checks of the nodes.
_BEGIN = 300.0
_STRAGGLE = 60.0
_PATIENCE = 10.0
_LOOK = 2.0
_NAMESPACE = "hfusion"


@dataclass(frozen=True, eq=False)
class ActorOptions:
    """Options of the actors of a run.

    Attributes:
        resources: resources as in ray.remote.
        environment: a runtime_env for the actors; None: the one of the cluster.
        machine: bytes of device and of host memory, each None to detect it, and the folder for spilled tensors.
        timeout: seconds to wait for a device while there is none.
        devices: how many devices to request from an autoscaler; None: no request.
    """

    resources: Mapping[str, Any]
    environment: Mapping[str, Any] | None
    machine: tuple[int | None, int | None, Path]
    timeout: float
    devices: int | None


@dataclass(eq=False)
class ActorDevice:
    """A device and its actor. ``info`` is None while the actor starts; ``actor`` is None while other jobs use it."""

    node: Mapping[str, Any]
    name: str
    since: float
    actor: Any = None
    answer: Any = None
    info: DeviceInfo | None = None


class RayDevices:
    """Creates the actors of a run. Devices in use by other jobs, and devices of new nodes, get actors later."""

    def __init__(self, ray: Any, options: ActorOptions) -> None:
        self._ray, self._options = ray, options
        # The prefix of the actor names of this run in Ray's dashboard.
        self._run = f"hfusion {uuid.uuid4().hex[:8]}"
        self._known_node_ids: set[str] = set()
        self._waiting: list[ActorDevice] = []
        self._failed: list[str] = []
        self._looked = -_LOOK

    def first(self) -> list[ActorDevice]:
        """Request the devices that a run starts with from the autoscaler, if there is one, and wait for them.

        Raises PlanError if there is none in time.
        """
        if self._options.devices is not None:
            self._request([self._bundle({})] * self._options.devices)
        begun = since = time.monotonic()
        devices, warned = list[ActorDevice](), False
        while True:
            devices += self.started()
            now = time.monotonic()
            since = since if devices else now
            beginning, waited = self.beginning, now - begun
            late = now - since > _STRAGGLE if beginning else waited > _PATIENCE or not self._waiting
            if devices and late:
                break
            limit = max(self._options.timeout, _PATIENCE if self._waiting else 0.0)
            if not devices and not beginning and waited >= limit:
                raise PlanError(f"no process could begin on the Ray cluster: {self._obstacles()}")
            if not devices and not warned and waited > _PATIENCE:
                warned = True
                _log.warning("waiting for a device of the Ray cluster, for at most %g s: %s", limit, self._obstacles())
            time.sleep(0.1)
        for text in [*self._failed, *map(self._why, self._waiting)]:
            _log.warning("the run begins without a device: %s", text)
        return devices

    @property
    def beginning(self) -> bool:
        """True if an actor is starting."""
        return any(device.actor is not None for device in self._waiting)

    def started(self) -> list[ActorDevice]:
        """Return the devices whose actors have begun since the last call."""
        if time.monotonic() - self._looked >= _LOOK:
            self._look()
        answers = {device.answer: device for device in self._waiting if device.answer is not None}
        if not answers:
            return []
        ready, pending = self._ray.wait(list(answers), num_returns=len(answers), timeout=0)
        for answer in pending:
            if time.monotonic() - answers[answer].since > _BEGIN:
                self._fail(answers[answer], f"its process did not begin within {_BEGIN:g} s")
        return [answers[answer] for answer in ready if self._complete_start(answers[answer])]

    def _complete_start(self, device: ActorDevice) -> bool:
        try:
            device.info = self._ray.get(device.answer, timeout=_BEGIN)
        except self._ray.exceptions.RayError as error:
            self._fail(device, f"failed: {str(error).strip().splitlines()[-1]}")
            return False
        if device in self._waiting:
            self._waiting.remove(device)
        return True

    def _fail(self, device: ActorDevice, reason: str) -> None:
        self._waiting = [other for other in self._waiting if other is not device]
        self._failed.append(f"node {device.node['NodeName']} {reason}")
        with suppress(Exception):
            self._ray.kill(device.actor)

    def _look(self) -> None:
        """Add the devices of new nodes, and create actors on free devices."""
        # Ray has no public function that returns the free resources of a node.
        from ray._private import state

        available: Any = state.available_resources_per_node
        self._looked, nodes = time.monotonic(), self._alive()
        for node in nodes:
            if node["NodeID"] not in self._known_node_ids:
                index, count = len(self._known_node_ids), self._count(node)
                self._known_node_ids.add(node["NodeID"])
                self._waiting += [ActorDevice(node, f"node{index}/{n}", self._looked) for n in range(count)]
        alive = {node["NodeID"] for node in nodes}
        self._waiting = [
            waiting_device
            for waiting_device in self._waiting
            if waiting_device.actor is not None or waiting_device.node["NodeID"] in alive
        ]
        idle = [device for device in self._waiting if device.actor is None]
        free: Mapping[str, dict[str, float]] = available() if idle else {}
        for device in idle:
            free_resources = free.get(device.node["NodeID"], {})
            bundle = self._bundle(device.node)
            if all(free_resources.get(name, 0) >= value for name, value in bundle.items()):
                for name, value in bundle.items():
                    free_resources[name] -= value
                self._create(device)

    def _create(self, device: ActorDevice) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # One thread trains, the other receives the request to stop. Name and namespace are for Ray's dashboard.
        options = {
            **self._actor_resources(device.node),
            "scheduling_strategy": NodeAffinitySchedulingStrategy(device.node["NodeID"], soft=False),
            "max_concurrency": 2,
            "name": f"{self._run} {device.name} {uuid.uuid4().hex[:4]}",
            "namespace": _NAMESPACE,
        }
        if self._options.environment is not None:
            options["runtime_env"] = dict(self._options.environment)
        actor = self._ray.remote(DeviceActor).options(**options).remote(device.name, *self._options.machine)
        device.actor, device.answer, device.since = actor, actor.info.remote(), time.monotonic()

    def revive(self, device: ActorDevice) -> bool:
        """Restart the actor of a device on its node; return whether it runs again."""
        with suppress(Exception):
            self._ray.kill(device.actor)
        # Ray may notice that a node is lost only when an actor fails to start there.
        if all(node["NodeID"] != device.node["NodeID"] for node in self._alive()):
            return False
        self._create(device)
        return self._complete_start(device)

    def close(self) -> None:
        """End actors that are still starting, and withdraw the request to the autoscaler."""
        for device in self._waiting:
            with suppress(Exception):
                self._ray.kill(device.actor)
        self._waiting, self._looked = [], math.inf
        if self._options.devices is not None:
            self._request([])

    @staticmethod
    def _request(bundles: list[dict[str, float]]) -> None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=bundles)

    def _obstacles(self) -> str:
        texts = [*self._failed, *map(self._why, self._waiting)]
        if texts:
            return "; ".join(texts)
        resources = dict(self._options.resources) or "a CPU"
        return f"no node of the Ray cluster has {resources}: its nodes have {[n['Resources'] for n in self._alive()]}"

    def _why(self, device: ActorDevice) -> str:
        if device.actor is not None:
            return f"node {device.node['NodeName']}: the process of {device.name} has not begun yet"
        return (
            f"node {device.node['NodeName']}: others use what {device.name} needs, {self._actor_resources(device.node)}"
        )

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _actor_resources(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return an actor's resources on a node: one GPU each, or all CPUs for one actor without GPUs."""
        node_resources = node["Resources"]
        resources = dict(self._options.resources)
        if "num_gpus" not in resources:
            resources["num_gpus"] = 1 if node_resources.get("GPU", 0) >= 1 else 0
        if "num_cpus" not in resources:
            resources["num_cpus"] = node_resources.get("CPU", 0) / max(
                1, _slots(node_resources, {"GPU": resources["num_gpus"]}, 1)
            )
        return resources

    def _bundle(self, node: Mapping[str, Any]) -> dict[str, float]:
        """Return an actor's resources by Ray's names (CPU, GPU); without a node, those of the options."""
        resources = self._actor_resources(node) if node else dict(self._options.resources)
        bundle = {
            "CPU": resources.get("num_cpus"),
            "GPU": resources.get("num_gpus"),
            **(resources.get("resources") or {}),
        }
        return {name: value for name, value in bundle.items() if value}

    def _count(self, node: Mapping[str, Any]) -> int:
        """Return the number of actors for a node: without GPUs one, as the CPU is one device."""
        bundle = self._bundle(node)
        if not bundle and not self._options.resources:
            # For example a head node that runs no tasks.
            return 0
        slots = _slots(node["Resources"], bundle, 1)
        return slots if bundle.get("GPU") else min(slots, 1)


def _slots(available: Mapping[str, float], required: Mapping[str, float], default: int) -> int:
    """Return how many times the required resources fit into the available ones; ``default`` if none are required."""
    return min((int(available.get(name, 0) // value) for name, value in required.items() if value), default=default)


# The actor of a device of a Ray cluster.


class DeviceActor:
    """A Ray actor that trains arrays on the one device that Ray gave it, and yields messages."""

    def __init__(self, name: str, memory: int | None, host: int | None, disk: Path) -> None:
        machine = Machine.detect(disk)
        first_device = machine.devices[0]
        device = Device(first_device.device, memory=memory or first_device.memory)
        self._trainer = ArrayTrainer(name, Machine([device], host or machine.host, disk))

    def info(self) -> DeviceInfo:
        return self._trainer.info()

    def train(self, job: ArrayJob | CallJob) -> Iterator[bytes]:
        """Yield messages as bytes, in which classes go by name: Ray would send copies of those of a script."""
        import ray

        messages: SimpleQueue[Message] = SimpleQueue()
        thread = Thread(target=self._trainer.run, args=(job, ray.get, messages.put), name="hfusion train")
        thread.start()
        while True:
            message = messages.get()
            yield pack_message(message)
            if isinstance(message, End):
                break
        thread.join()

    def answer(self, members: list[int]) -> None:
        self._trainer.answers.put(members)

    def stop(self) -> None:
        """Stop all training at the next minibatch boundary."""
        self._trainer.stopping.set()
