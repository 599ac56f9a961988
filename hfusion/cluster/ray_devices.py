"""The devices of a Ray cluster, one actor each: devices that are free at the start, and those of nodes that join."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.ray_actor import DeviceActor
from hfusion.core.errors import PlanError

_log = logging.getLogger(__name__)

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
    # Seconds by which the actor's clock is ahead of the driver's.
    offset: float = 0.0


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
            sent_at = time.time()
            actor_time = self._ray.get(device.actor.info.remote(), timeout=_BEGIN).clock_time
        except self._ray.exceptions.RayError as error:
            self._fail(device, f"failed: {str(error).strip().splitlines()[-1]}")
            return False
        # Read at the midpoint of the request and its answer.
        device.offset = actor_time - (sent_at + time.time()) / 2
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
