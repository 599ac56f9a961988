"""From tasks to the arrays that are sent to devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.checkpoint import files
from hfusion.cluster.jobs import RunOptions, arranged
from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.node import ArrayDone, ArrayJob, ArrayTrainer, Message, ResultMessage
from hfusion.cluster.serialization import pack_with_keys
from hfusion.core.text import file_name
from tests.trained import RATES


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden"])
def test_a_save_stays_in_the_folder(name: str, tmp_path: Path) -> None:
    task = hf.Task([nn.Linear(2, 1)], F.mse_loss, hf.optim.SGD, [(torch.zeros(1, 2), torch.zeros(1, 1))], name=name)
    device = DeviceInfo("one", torch.device("cpu"), 1 << 30, RATES, 0.0)
    (array,) = arranged([task], [device], RunOptions(tmp_path, None, "fifo"), resume=True).arrays
    assert array.options.checkpoint is not None
    assert (array.options.checkpoint / file_name(array.load.name)).resolve().parent == tmp_path.resolve()


class Watched(list[Any]):
    """Minibatches; each read notes the number of results sent so far, and that in the last save."""

    messages: ClassVar[list[Message]] = []
    counts: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__([(torch.zeros(1, 2), torch.zeros(1, 1))] * count)
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        for pair in super().__iter__():
            # The save first: more may be sent meanwhile.
            saved = files.read(self.folder).step if files.saves(self.folder) else 0
            self.counts.append(
                (saved, sum(len(message.results) for message in self.messages if isinstance(message, ResultMessage)))
            )
            yield pair


def test_results_are_sent_before_they_are_saved(tmp_path: Path) -> None:
    """An array that resumes from the save does not send them again."""
    Watched.messages.clear()
    Watched.counts.clear()
    loader = Watched(tmp_path / "one", 40)
    task = hf.Task([nn.Linear(2, 1)], F.mse_loss, lambda params: hf.optim.SGD(params, lr=0.1), loader, name="one")
    parcel, _ = pack_with_keys("the task 'one'", task, {})
    job = ArrayJob("one", (0,), parcel, {}, "fifo", tmp_path, 2)
    trainer = ArrayTrainer("cpu:0", hf.Machine([hf.Device("cpu", memory="1GiB")], "1GiB"))
    trainer.run(job, lambda key: key, Watched.messages.append)
    assert isinstance(Watched.messages[-1], ArrayDone)
    assert any(saved for saved, _ in Watched.counts)
    assert all(sent >= saved for saved, sent in Watched.counts), Watched.counts
