"""Jobs and messages of actors of Ray. Ray is imported when the first executor is made. Tried with ray 2.60."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hfusion.cluster.messages import DeviceInfo, Lost, Raised
from hfusion.cluster.node import ArrayJob, CallJob, End, Message
from hfusion.cluster.ray_devices import ActorDevice, ActorOptions, RayDevices
from hfusion.cluster.serialization import unpack_message
from hfusion.core.errors import PlanError

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
    def offsets(self) -> list[float]:
        return [device.offset for device in self._actor_devices]

    @property
    def starting(self) -> bool:
        return self._nodes.beginning

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        name = job.name if isinstance(job, ArrayJob) else type(job).__name__
        train = self._actor_devices[device].actor.train.options(num_returns="streaming", name=f"train {name}")
        self._running[device] = train.remote(job)

    def leave(self, device: int, name: str) -> None:
        self._actor_devices[device].actor.leave.remote(name)

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
