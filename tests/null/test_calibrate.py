"""Layers are timed on CUDA with its rates, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hfusion.device.calibrate import calibrate, compute_rates
from hfusion.device.layer_times import CALLS, KINDS, SHARES
from tests.null.calls import by_name, reset, since_reset

pytestmark = pytest.mark.null


def test_layers_are_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HFUSION_RATES")
    device = torch.device("cuda", 0)
    reset()
    rates = compute_rates(device)
    assert since_reset().refused == ()
    assert by_name()["cudnnBackendExecute"] > 0
    assert list(rates.kinds) == list(KINDS)
    for calls, share in rates.kinds.values():
        assert CALLS[0] <= calls <= CALLS[1]
        assert SHARES[0] <= share <= SHARES[1]
    reset()
    again = calibrate(device, tmp_path)
    assert "cudnnBackendExecute" not in by_name()
    assert again.kinds == rates.kinds
