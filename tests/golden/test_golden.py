from __future__ import annotations

import pytest
import torch

from hfusion.device import native
from hfusion.ops import rnn
from tests.golden.texts import FOLDER, TORCH, path, text
from tests.zoo import MODELS, Model


@pytest.mark.skipif(not torch.__version__.startswith(f"{TORCH}."), reason=f"the texts are of torch {TORCH}")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_program_is_the_golden_one(model: Model) -> None:
    if model.name == "recurrent" and isinstance(error := native.library(rnn.SOURCE), str):
        pytest.skip(error)
    assert text(model) == path(model).read_text()


def test_every_text_has_its_model() -> None:
    assert set(FOLDER.glob("*.txt")) == set(map(path, MODELS))
