"""A script whose classes and functions only it has, as a user writes one: ``python tests/cluster/own_script.py``.

It trains on two processes, or with ``--ray`` on the nodes of a Ray cluster.
"""

from __future__ import annotations

import enum
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hfusion as hf

SCALE = 2.0


class Kind(enum.Enum):
    WIDE = 1


def scaled(x: Tensor) -> Tensor:
    return x.tanh() * SCALE


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.activation, self.kind = nn.Linear(3, 2), scaled, Kind.WIDE
        power = 2
        self.last: Callable[[Tensor], Tensor] = lambda y: y**power * SCALE

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(self.activation(x)) * SCALE)


def local_class() -> Callable[[int], nn.Module]:
    factor = 0.5

    class Local(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * factor

    return Local


BASE = nn.Linear(3, 3).requires_grad_(False)


class Plain(nn.Module):
    """A model that torch.save can write: no closures, a base that all members share, buffers."""

    batches: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.norm, self.linear = BASE, nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer("batches", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.batches.add_(1)
        return self.linear(self.norm(self.base(x)))


class Loss(nn.Module):
    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs, target) * SCALE


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), index / 8), torch.ones(2)


class OwnSGD(hf.optim.SGD):
    pass


STEPS: list[Any] = []


def note(result: Any) -> None:
    STEPS.append(result)


MAKERS: dict[str, Callable[[int], nn.Module]] = {"own": Net, "local": local_class(), "plain": Plain}


def make_tasks() -> list[hf.Task]:
    fused = hf.fuse([Net(0), Net(1)])
    tasks = [
        hf.Task(
            [make(0), make(1)],
            Loss(),
            lambda params: OwnSGD(params, lr=[0.1, 0.2]),
            DataLoader(Samples(), batch_size=4),
            name=name,
            callbacks=(note,),
        )
        for name, make in MAKERS.items()
    ]
    optimizer = OwnSGD(fused.parameters(), lr=0.1)
    return [*tasks, hf.Task(fused, Loss(), optimizer, DataLoader(Samples(), batch_size=4), name="fused")]


def check_same(report: hf.Report, expected: hf.Report) -> None:
    """On one machine models are the user's; those of a cluster are the same, bit for bit."""
    assert list(report) == list(expected)
    for name in expected:
        assert torch.equal(report[name].losses, expected[name].losses)
        for model, expected_model in zip(report[name].models, expected[name].models, strict=True):
            assert type(model) is type(expected_model) is MAKERS.get(name, Net)
            tensors = dict([*model.named_parameters(), *model.named_buffers()])
            for key, value in [*expected_model.named_parameters(), *expected_model.named_buffers()]:
                assert torch.equal(tensors[key], value), (name, key)


def check_models(cluster: hf.Cluster, machine: hf.Machine) -> None:
    global SCALE
    forward, base = Net.forward, BASE.weight.clone()
    torch.manual_seed(1)
    expected = hf.train(make_tasks(), machine)
    STEPS.clear()
    torch.manual_seed(1)
    report = hf.train(make_tasks(), cluster)
    check_same(report, expected)
    model = report["plain"].models[0]
    assert torch.equal(BASE.weight, base)
    with tempfile.TemporaryFile() as file:
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert type(loaded) is Plain
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    model = report["own"].models[0]
    assert Net.forward is forward
    assert model.kind is Kind.WIDE
    assert model.activation is scaled
    SCALE = 3.0
    x = torch.ones(1, 3)
    expected = (model.linear(x.tanh() * 3) * 3) ** 2 * 3
    torch.testing.assert_close(model(x), expected)
    assert len(STEPS) == 2 * len(MAKERS)


def main() -> None:
    single_machine, two_devices = (
        hf.Machine(
            [hf.Device(f"cpu:{number}", memory="256MiB") for number in range(count)],
            host="1GiB",
            disk=tempfile.gettempdir(),
        )
        for count in (1, 2)
    )
    check_models(hf.Cluster() if sys.argv[1:] == ["--ray"] else hf.Cluster(two_devices), single_machine)
    print("all classes are the script's")


if __name__ == "__main__":
    main()
