"""The example of federated learning at a small size: every weight is that of the loop over clients, and it learns."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("sklearn")
import hfusion as hf
from examples import federated
from tests.step.test_train_step import needs_compiler


@pytest.mark.parametrize(
    ("proximal", "compile"), [(False, False), (True, False), pytest.param(True, True, marks=needs_compiler)]
)
def test_it_equals_the_loop_over_clients(proximal: bool, compile: bool) -> None:
    clients, _ = federated.load(12, torch.float64)
    assert len({len(client.labels) for client in clients}) > 6
    picked = list(federated.rounds(clients, 3, 0.5))
    array, loop = federated.Array(6, proximal, torch.float64, compile), federated.Loop(proximal, torch.float64)
    for chosen, seeds in picked:
        array.round(chosen, seeds)
        loop.round(chosen, seeds)
        assert federated.difference(array.server, loop.server) < 1e-9
        for row in range(6):
            assert federated.difference(array.pop.fused[row], array.server) == 0


def test_who_has_ended_stays_as_it_is() -> None:
    clients, _ = federated.load(8, torch.float32)
    shortest, longest = (pick(clients, key=lambda client: len(client.labels)) for pick in (min, max))
    array = federated.Array(2, True, torch.float32, compile=False)
    ended = len(list(shortest.minibatches(0)))
    for step, (images, (labels, weights)) in enumerate(federated.together([shortest, longest], [0, 1])):
        before = copy.deepcopy(array.server.state_dict())
        array.pop.step(hf.stacked(images), (hf.stacked(labels), hf.stacked(weights)))
        for name, value in array.server.state_dict().items():
            assert torch.equal(value, before[name]) == (step >= ended or name.startswith("server"))


def test_it_learns(capsys: pytest.CaptureFixture[str]) -> None:
    accuracies = federated.main(["--clients", "20", "--rounds", "12", "--part", "0.5", "--eager"])
    assert min(accuracies.values()) > 0.3
    assert "FedProx: accuracy" in capsys.readouterr().out


def test_it_is_timed() -> None:
    ratios = federated.main(["--clients", "4", "--rounds", "2", "--part", "0.5", "--eager", "--compare"])
    assert set(ratios) == {"FedAvg", "FedProx"}
