from __future__ import annotations

import pytest

from hfusion.bench import cases, serial
from hfusion.bench.workload import Unavailable, check_agreement, losses
from tests.bench.tiny import TINY_BATCH_NORM, workload

pytest.importorskip("modelbatch")

from hfusion.bench.optional import model_batch


def test_it_trains_as_the_serial_loop() -> None:
    chosen = workload(TINY_BATCH_NORM)
    check_agreement("modelbatch", losses(serial.start(chosen), 4), losses(model_batch.start(chosen), 4), 1e-3)


def test_a_frozen_base_is_refused() -> None:
    (adapters,) = (case for case in cases.CASES if case.make_base is not None)
    with pytest.raises(Unavailable, match="frozen base"):
        model_batch.start(workload(adapters))
