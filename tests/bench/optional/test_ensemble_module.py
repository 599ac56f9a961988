from __future__ import annotations

from dataclasses import replace

import pytest

from hfusion.bench import cases, serial
from hfusion.bench.workload import Unavailable, check_agreement, losses
from tests.bench.tiny import TINY_BATCH_NORM, workload

pytest.importorskip("tensordict")

from hfusion.bench.optional import ensemble_module


def test_it_trains_as_the_serial_loop() -> None:
    chosen = replace(workload(TINY_BATCH_NORM), one_rate=True)
    running = ensemble_module.start(chosen)
    assert "running statistics" in running.note
    check_agreement("ensemble-module", losses(serial.start(chosen), 4), losses(running, 4), 1e-3)


def test_a_frozen_base_is_refused() -> None:
    (adapters,) = (case for case in cases.CASES if case.make_base is not None)
    with pytest.raises(Unavailable, match="the base"):
        ensemble_module.start(workload(adapters))
