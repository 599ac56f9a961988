"""The actor of a device of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.node import ArrayJob, ArrayTrainer, CallJob, End, Message
from hfusion.cluster.serialization import pack_message
from hfusion.device.machine import Device, Machine


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

    def leave(self, name: str) -> None:
        self._trainer.leaving = name

    def answer(self, members: list[int]) -> None:
        self._trainer.answers.put(members)

    def stop(self) -> None:
        """Stop all training at the next minibatch boundary."""
        self._trainer.stopping.set()
