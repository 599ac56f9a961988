"""One process or several, by numbers; and what a process hands to those that it starts."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from hfusion.cluster.process_executor import ProcessSettings


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
