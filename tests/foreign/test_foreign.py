"""Models of other packages: two members, trained for two steps and evaluated, equal those alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.alone import assert_alone, compare_call
from tests.foreign.models import FOREIGN

# Other packages warn of what is theirs.
pytestmark = [pytest.mark.foreign, pytest.mark.filterwarnings("ignore")]

# Models that are computed by programs, though their packages hold code of all kinds within reach.
PROGRAMS = ("transformers Bloom", "transformers Longformer", "peft prefix tuning")


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", FOREIGN)
def test_trained_as_alone(name: str) -> None:
    make, batch = FOREIGN[name]
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        models.append(make())
    # Some of them cannot be copied.
    fused = assert_alone(models, batch(), batch(), rate=1e-2, copies=False)
    for module in (fused, *models):
        module.eval()
    with torch.no_grad():
        compare_call(fused, models, batch(), "evaluation", grads=False)
    assert name not in PROGRAMS or not fused.report().loops
