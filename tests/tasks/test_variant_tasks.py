"""Tasks of arrays whose members differ in submodules: whole, in shards, evaluated, and resumed, as the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
LRS = [0.1, 0.2, 0.3, 0.4]


class Net(nn.Module):
    def __init__(self, act: nn.Module, norm: nn.Module, classes: int = 3, blocks: int = 1) -> None:
        super().__init__()
        self.stem, self.norm, self.act, self.head = nn.Linear(8, 32), norm, act, nn.Linear(32, classes)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(blocks))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.stem(x)))
        for block in self.blocks:
            h = h + self.act(block(h))
        return self.head(h)


def models(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    if name == "heads":
        return [Net(nn.Tanh(), nn.Identity(), classes) for classes in (3, 5, 3, 4)]
    if name == "blocks":
        return [Net(nn.Tanh(), nn.Identity(), blocks=blocks) for blocks in (1, 2, 1, 3)]
    norms = (nn.BatchNorm1d(32), nn.Identity(), nn.LayerNorm(32), nn.BatchNorm1d(32))
    acts = (nn.PReLU(), nn.ReLU(), nn.PReLU(32), nn.Tanh())
    return [Net(act, norm) for act, norm in zip(acts, norms, strict=True)]


def sgd(params: list[nn.Parameter]) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=LRS, momentum=0.9)


def task(array: hf.FusedModule, **options: Any) -> hf.Task:
    arguments = {"epochs": 2, "clip_norm": 0.5, "eval_loader": [(X, Y)], "seed": 0, **options}
    return hf.Task(array, F.cross_entropy, sgd, [(X, Y), (X + 1, Y)], **arguments)


def looped(name: str) -> tuple[hf.FusedModule, Tensor]:
    array, losses = hf.fuse(models(name)), []
    optimizer = sgd(list(array.parameters()))
    for _ in range(2):
        for x in (X, X + 1):
            optimizer.zero_grad()
            step_losses = hf.per_model(F.cross_entropy)(array(x), Y)
            step_losses.sum().backward()
            hf.optim.clip_grad_norm_(array.parameters(), 0.5)
            optimizer.step()
            losses.append(step_losses.detach())
    return array, torch.stack(losses)


def assert_same_bits(array: hf.FusedModule, other: hf.FusedModule) -> None:
    for name, tensor in other.state_dict().items():
        assert torch.equal(array.state_dict()[name], tensor), name


@pytest.mark.parametrize("memory", ["64MiB", "180KiB"])
@pytest.mark.parametrize("name", ["submodules", "blocks", "heads"])
def test_a_task_is_the_plain_loop_bit_for_bit(name: str, memory: str) -> None:
    array, (expected, losses) = hf.fuse(models(name)), looped(name)
    machine = hf.Machine([hf.Device("cpu:0", memory=memory)])
    # The evaluation of variants of norms in shards is refused: its operators come in another order.
    evaluated = memory == "64MiB" or name != "submodules"
    trained = task(array, compile=False, eval_loader=[(X, Y)] if evaluated else None)
    (plan,) = hf.plan([trained], machine).tasks
    assert plan.resident == (memory == "64MiB")
    assert torch.equal(hf.train([trained], machine)["task"].losses, losses)
    assert_same_bits(array, expected)


def test_a_compiled_task_is_the_plain_loop() -> None:
    _, losses = looped("heads")
    report = hf.train([task(hf.fuse(models("heads")), compile=True)])["task"]
    torch.testing.assert_close(report.losses, losses, rtol=1e-9, atol=1e-12)


class Stopped(Exception):
    pass


def test_an_evaluation_in_shards_is_refused_where_tensors_come_in_another_order() -> None:
    machine = hf.Machine([hf.Device("cpu:0", memory="180KiB")])
    with pytest.raises(hf.PlanError, match=r"after tensors of later shards.*or leave the eval loader out"):
        hf.train([task(hf.fuse(models("submodules")), compile=False)], machine)


@pytest.mark.parametrize("name", ["submodules", "heads"])
def test_a_task_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    def stop(result: hf.Step | hf.Evaluation) -> None:
        if isinstance(result, hf.Evaluation):
            raise Stopped

    with pytest.raises(hf.TrainError, match="Stopped"):
        hf.train([task(hf.fuse(models(name)), compile=False, callbacks=[stop])], checkpoint=tmp_path, every=1)
    array, (expected, losses) = hf.fuse(models(name)), looped(name)
    report = hf.train([task(array, compile=False)], checkpoint=tmp_path, every=1, resume=True)["task"]
    assert torch.equal(report.losses, losses)
    assert_same_bits(array, expected)
