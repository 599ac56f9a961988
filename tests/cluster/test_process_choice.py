"""One process or several, by numbers; and what a process hands to those that it starts."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.cluster.process_choice import ArraySeconds, choose_processes, devices_at_once
from hfusion.cluster.process_executor import ProcessSettings
from hfusion.device.native import cores
from hfusion.tasks.arrange import arrange
from tests.trained import RATES


@pytest.mark.parametrize(
    ("python", "computing", "minibatches", "arrays", "devices", "count"),
    [
        pytest.param(3e-3, 1e-3, 100_000, 8, 8, 8, id="Python takes longer"),
        pytest.param(3e-3, 30e-3, 100_000, 8, 8, 1, id="devices take longer, all of them busy"),
        pytest.param(3e-3, 12e-3, 100_000, 8, 8, 8, id="one process keeps four devices busy"),
        pytest.param(3e-3, 12e-3, 100_000, 4, 4, 1, id="which is all"),
        pytest.param(3e-3, 1e-3, 100, 8, 8, 1, id="over before processes have begun"),
        pytest.param(3e-3, 1e-3, 100_000, 1, 8, 1, id="one array"),
        pytest.param(3e-3, 1e-3, 100_000, 2, 8, 8, id="fewer arrays than devices"),
    ],
)
def test_processes_by_what_python_takes(
    python: float, computing: float, minibatches: int, arrays: int, devices: int, count: int
) -> None:
    every = [ArraySeconds(python, computing, minibatches, overlaps=True)] * arrays
    assert choose_processes(every, devices, devices, 10.0).count == count


def test_devices_of_one_processor_share_its_cores() -> None:
    assert devices_at_once(8, RATES, cores()) == 1
    assert devices_at_once(8, RATES, 1) == min(8, cores())
    assert devices_at_once(8, replace(RATES, device="cuda"), cores()) == 8
    arrays = [ArraySeconds(1.0, 9.0, 100, overlaps=False)] * 2
    assert [choose_processes(arrays, 2, at_once, 1.0).count for at_once in (1, 2)] == [1, 1]
    python = [ArraySeconds(9.0, 1.0, 100, overlaps=False)] * 2
    assert [choose_processes(python, 2, at_once, 1.0).count for at_once in (1, 2)] == [1, 2]


def test_python_of_a_minibatch_is_that_of_its_calls() -> None:
    """It grows with the calls and not with the samples, and a compiled minibatch has none of its operators."""

    def seconds(layers: int, samples: int, *, compiled: bool = False) -> ArraySeconds:
        models = [nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]) for _ in range(2)]
        loader = [(torch.zeros(samples, 4), torch.zeros(samples, dtype=torch.int64))] * 5
        task = hf.Task(models, F.cross_entropy, lambda p: hf.optim.SGD(p, lr=0.1), loader, compile=compiled)
        (array,), plan = arrange([task], hf.Machine([hf.Device("cpu", memory="1GiB")]))
        return ArraySeconds.of(array, plan.tasks[0], RATES)

    few, many, wide = seconds(2, 8), seconds(6, 8), seconds(2, 800)
    assert many.python - few.python > RATES.action_seconds / 50
    assert wide.python == pytest.approx(few.python)
    assert wide.computing > 10 * few.computing
    assert seconds(6, 8, compiled=True).python == pytest.approx(seconds(2, 8, compiled=True).python)
    assert few.whole == pytest.approx(5 * (few.python + few.computing))


def test_settings_are_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessSettings.current()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        random.seed(5)
        np.random.seed(6)
        carried = pickle.loads(pickle.dumps(ProcessSettings.current()))
        draws = random.random(), float(np.random.rand())
        before.apply()
        assert torch.get_default_dtype() is torch.float32
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        carried.apply()
        assert torch.get_default_dtype() is torch.float64
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.benchmark
        assert (random.random(), float(np.random.rand())) == draws
    finally:
        before.apply()
