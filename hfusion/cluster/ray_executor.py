"""Actors of Ray, one for each device of each node. Ray is imported when the first is asked for. Tried with ray 2.60."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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

# Seconds that an actor has to begin, with its imports and the measuring of its rates; until those that have not are
# named; and to end by itself.
_BEGIN = 300.0
_PATIENCE = 10.0
_GRACE = 5.0


class DeviceActor:
    """A Ray actor that trains arrays on the one device that Ray gave it, and yields messages."""

    def __init__(self, name: str, memory: int | None, host: int | None, disk: Path) -> None:
        found = Machine.detect(disk)
        one = found.devices[0]
        device = Device(one.device, memory=memory or one.memory)
        self._trainer = ArrayTrainer(name, Machine([device], host or found.host, disk))

    def info(self) -> DeviceInfo:
        return self._trainer.info()

    def train(self, job: ArrayJob | CallJob) -> Iterator[bytes]:
        """Yield messages as bytes, in which classes go by name: Ray would send copies of those of a script."""
        import ray

        told: SimpleQueue[Message] = SimpleQueue()
        thread = Thread(target=self._trainer.run, args=(job, ray.get, told.put), name="hfusion train")
        thread.start()
        while True:
            message = told.get()
            yield pack_message(message)
            if isinstance(message, End):
                break
        thread.join()

    def leave(self, name: str) -> None:
        self._trainer.leaving = name

    def answer(self, members: list[int]) -> None:
        self._trainer.answers.put(members)

    def stop(self) -> None:
        """Stop all training at the next minibatch boundary."""
        self._trainer.stopping.set()


class RayExecutor:
    """Actors on the nodes of a Ray cluster; ``options`` are theirs, as of ray.remote.

    Args:
        machine: bytes of a device and of host memory, None for what is found, and the folder for what is spilled.

    Raises:
        ImportError: Ray is not installed.
        PlanError: no node has what the options ask for, or none begins; this process is connected to another cluster.
    """

    def __init__(
        self,
        address: str | None,
        options: Mapping[str, Any],
        runtime_env: Mapping[str, Any] | None,
        machine: tuple[int | None, int | None, Path],
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("hf.Cluster needs Ray: pip install ray cloudpickle (extra: hfusion[cluster])") from error
        self._ray: Any = ray
        self._own = not ray.is_initialized()
        self._options = {name: value for name, value in options.items() if value is not None}
        self._machine = machine
        environment = None if runtime_env is None else dict(runtime_env)
        # Of actors alone where this process is connected already.
        self._environment = None if self._own else environment
        # Actors of this run, in Ray's dashboard.
        self._run = f"hfusion {uuid.uuid4().hex[:8]}"
        if self._own:
            ray.init(address=address, runtime_env=environment)
        elif address not in (None, "auto", there := ray.get_runtime_context().gcs_address):
            raise PlanError(
                f"hf.Cluster({address!r}): this process is connected to the Ray cluster at {there}; call "
                "ray.shutdown() before, or give None for the present one"
            )
        self._nodes: list[str] = []
        self._actors: list[Any] = []
        self._running: dict[int, Any] = {}
        self.devices: list[DeviceInfo] = []
        self.offsets: list[float] = []
        try:
            self._begin_all()
        except BaseException:
            self.close()
            raise

    def _begin_all(self) -> None:
        free, left_out = self._free([(node, place) for place, node in enumerate(self._alive())])
        infos = []
        for node, name in free:
            self._nodes.append(node["NodeID"])
            self._actors.append(self._actor(node, name))
            infos.append(self._actors[-1].info.remote())
        for place, info in reversed(list(enumerate(infos))):
            try:
                self.devices.insert(0, self._ray.get(info, timeout=_BEGIN))
            except self._ray.exceptions.RayError as error:
                left_out.append(f"node {free[place][0]['NodeName']} failed: {_last_line(error)}")
                with suppress(Exception):
                    self._ray.kill(self._actors[place])
                del self._nodes[place], self._actors[place]
        if not self._actors:
            raise PlanError(f"no process could begin on the Ray cluster: {'; '.join(left_out)}")
        for text in left_out:
            _log.warning("the run goes without a device: %s", text)
        self.offsets = [self._offset(actor) for actor in self._actors]

    def _free(self, nodes: Sequence[tuple[dict[str, Any], int]]) -> tuple[list[tuple[dict[str, Any], str]], list[str]]:
        """Return the devices whose resources are free, as (node, name) pairs, and texts about the others.

        Raises PlanError where no node has what the options ask for.
        """
        devices = [(node, f"node{place}/{number}") for node, place in nodes for number in range(self._count(node))]
        if not devices:
            asked = self._options or "a CPU"
            raise PlanError(
                f"no node of the Ray cluster has {asked}: its nodes have {[n['Resources'] for n, _ in nodes]}"
            )
        # A task that wants the same, and imports nothing.
        probes = [self._ray.remote(lambda: None).options(**self._place(node)).remote() for node, _ in devices]
        _, busy = self._ray.wait(probes, num_returns=len(probes), timeout=_PATIENCE)
        for probe in busy:
            self._ray.cancel(probe)
        pairs = list(zip(devices, probes, strict=True))
        texts = [
            f"node {node['NodeName']}: others use what {name} needs, {self._wanted(node)}"
            for (node, name), probe in pairs
            if probe in busy
        ]
        return [device for device, probe in pairs if probe not in busy], texts

    def _offset(self, actor: Any) -> float:
        """Return the offset of an actor's clock, read at the midpoint of a request and its answer."""
        before = time.time()
        told = self._ray.get(actor.info.remote(), timeout=_BEGIN).now
        return float(told - (before + time.time()) / 2)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _wanted(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return an actor's resources on a node: one GPU each, or all CPUs for one actor without GPUs."""
        there = node["Resources"]
        wanted = dict(self._options)
        if "num_gpus" not in wanted:
            wanted["num_gpus"] = 1 if there.get("GPU", 0) >= 1 else 0
        if "num_cpus" not in wanted:
            wanted["num_cpus"] = there.get("CPU", 0) / max(1, self._slots(there, {"GPU": wanted["num_gpus"]}, 1))
        return wanted

    @staticmethod
    def _slots(there: Mapping[str, float], wanted: Mapping[str, float], most: int) -> int:
        """Return how often the wanted resources are available; ``most`` if none is wanted."""
        return min((int(there.get(name, 0) // value) for name, value in wanted.items() if value), default=most)

    def _count(self, node: Mapping[str, Any]) -> int:
        """Return the number of actors for a node: without GPUs one, as the CPU is one device."""
        wanted = self._wanted(node)
        asks = {"CPU": wanted["num_cpus"], "GPU": wanted["num_gpus"], **(wanted.get("resources") or {})}
        if not any(asks.values()) and not self._options:
            # Such as a head that is to run no tasks.
            return 0
        found = self._slots(node["Resources"], asks, 1)
        return found if wanted["num_gpus"] else min(found, 1)

    def _place(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of what runs on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {**self._wanted(node), "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)}

    def _actor(self, node: Mapping[str, Any], name: str) -> Any:
        # One thread trains, the other hears that it is to stop. The name is for Ray's dashboard.
        options = {**self._place(node), "max_concurrency": 2, "name": f"{self._run} {name} {uuid.uuid4().hex[:4]}"}
        if self._environment is not None:
            options["runtime_env"] = self._environment
        return self._ray.remote(DeviceActor).options(**options).remote(name, *self._machine)

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def begin(self, device: int, job: ArrayJob | CallJob) -> None:
        self._running[device] = self._actors[device].train.options(num_returns="streaming").remote(job)

    def leave(self, device: int, name: str) -> None:
        self._actors[device].leave.remote(name)

    def answer(self, device: int, members: list[int]) -> None:
        self._actors[device].answer.remote(members)

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        streams = list(self._running.values())
        if not streams:
            time.sleep(seconds)
            return []
        self._ray.wait(streams, num_returns=1, timeout=seconds)
        # Looking at all streams costs as much for one message as for those of all.
        ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0)
        arrived = set(map(id, ready))
        return [
            found
            for device, stream in list(self._running.items())
            if id(stream) in arrived and (found := self._next(device, stream)) is not None
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
        with suppress(Exception):
            self._ray.kill(self._actors[device])
        # Its own node, then one that took its place: that a node is gone may be known only once an actor fails there.
        own, taken = self._nodes[device], set(self._nodes)
        return any(self._begins(device, node) for node in self._alive() if node["NodeID"] == own) or any(
            self._begins(device, node) for node in self._alive() if node["NodeID"] not in taken and self._count(node)
        )

    def _begins(self, device: int, node: Mapping[str, Any]) -> bool:
        """Begin the process of a device on a node; return whether it runs."""
        actor = self._actor(node, self.devices[device].name)
        try:
            offset, info = self._offset(actor), self._ray.get(actor.info.remote(), timeout=_BEGIN)
        except self._ray.exceptions.RayError:
            with suppress(Exception):
                self._ray.kill(actor)
            return False
        self._nodes[device], self._actors[device], self.offsets[device] = node["NodeID"], actor, offset
        self.devices[device] = replace(self.devices[device], process=info.process, node=info.node)
        return True

    def close(self) -> None:
        if not self._ray.is_initialized():
            return
        if self._running:
            # What trains gives back its files and processes.
            stops = [self._actors[device].stop.remote() for device in self._running]
            with suppress(Exception):
                self._ray.wait(stops, num_returns=len(stops), timeout=_GRACE)
            end = time.monotonic() + _GRACE
            while self._running and time.monotonic() < end:
                self.wait(0.2)
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]
