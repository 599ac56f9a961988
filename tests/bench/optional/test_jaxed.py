from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hfusion.bench import cases, serial
from hfusion.bench.workload import Unavailable, Workload, check_agreement, losses
from tests.bench.tiny import TINY, workload

pytest.importorskip("jax")

from hfusion.bench.optional import jax_forms, jaxed

STEPS = 3


@pytest.mark.parametrize("name", jax_forms.FORMS)
def test_every_form_trains_as_the_serial_loop(name: str) -> None:
    (case,) = (case for case in cases.CASES if case.name == name)
    chosen = workload(case, members=2)
    check_agreement("jax", losses(serial.start(chosen), STEPS), losses(jaxed.start(chosen), STEPS), 1e-3)


def test_a_model_without_a_form() -> None:
    with pytest.raises(Unavailable, match="no JAX form of this model"):
        jaxed.start(workload(TINY))


def test_only_float32() -> None:
    assert cases.CASES[0].loss is F.cross_entropy
    with pytest.raises(Unavailable, match="float32"):
        jaxed.start(Workload(cases.CASES[0], 2, torch.device("cpu"), torch.bfloat16))
