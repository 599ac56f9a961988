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


def check_models(cluster: hf.Cluster) -> None:
    global SCALE
    local = local_class()
    forward, fused = Net.forward, hf.fuse([Net(0), Net(1)])
    makers: dict[str, Callable[[int], nn.Module]] = {"own": Net, "local": local}
    tasks = [
        hf.Task(
            [make(0), make(1)],
            Loss(),
            lambda params: OwnSGD(params, lr=[0.1, 0.2]),
            DataLoader(Samples(), batch_size=4),
            name=name,
            callbacks=(note,),
        )
        for name, make in makers.items()
    ]
    optimizer = OwnSGD(fused.parameters(), lr=0.1)
    tasks.append(hf.Task(fused, Loss(), optimizer, DataLoader(Samples(), batch_size=4), name="fused"))
    report = hf.train(tasks, cluster, progress=False)
    assert all(type(model) is Net for name in ("own", "fused") for model in report[name].models)
    assert all(type(model) is local for model in report["local"].models)
    model = report["own"].models[0]
    assert Net.forward is forward
    assert model.kind is Kind.WIDE
    assert model.activation is scaled
    SCALE = 3.0
    x = torch.ones(1, 3)
    expected = (model.linear(x.tanh() * 3) * 3) ** 2 * 3
    torch.testing.assert_close(model(x), expected)
    assert len(STEPS) == 4


def main() -> None:
    if sys.argv[1:] == ["--ray"]:
        check_models(hf.Cluster())
    else:
        devices = [hf.Device(f"cpu:{number}", memory="256MiB") for number in range(2)]
        check_models(hf.Cluster(hf.Machine(devices, host="1GiB", disk=tempfile.gettempdir())))
    print("all classes are the script's")


if __name__ == "__main__":
    main()
