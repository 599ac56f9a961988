"""Observations, programs and reports of the zoo's models as text, one file each.

They show what a change of capture, rules, passes or costs does. ``python -m tests.test_golden`` writes the files again;
read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import hfusion as hf
from hfusion.capture.eager_runs import observe
from hfusion.device import native
from hfusion.ops import rnn
from tests.zoo import MODELS, Model

FOLDER = Path(__file__).with_name("golden")
MEMBERS = 3
# Other versions write other graphs.
TORCH = "2.13"


def path(model: Model) -> Path:
    return FOLDER / f"{model.name}.txt"


def text(model: Model) -> str:
    """Return the observation of a member, and the program and the report in training.

    Sources show no line numbers: lines move.
    """
    torch.manual_seed(0)
    observed = observe(model.make().double(), (model.draw(4),), {})
    torch.manual_seed(0)
    # Which lowerings are cheapest depends on the machine.
    with mock.patch.dict(os.environ, {"HFUSION_RATES": "standard"}):
        fused = hf.fuse([model.make().double() for _ in range(MEMBERS)], verify=False)
        fused(model.draw(4))
    (part,) = fused.report().parts
    return re.sub(r"(\w\.py):\d+", r"\1", f"{observed}\n\n{part.program}\n\n{fused.report()}\n\n{fused}\n")


@pytest.mark.skipif(not torch.__version__.startswith(f"{TORCH}."), reason=f"the texts are of torch {TORCH}")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_program_is_the_golden_one(model: Model) -> None:
    if model.name == "recurrent" and isinstance(error := native.library(rnn.SOURCE), str):
        pytest.skip(error)
    assert text(model) == path(model).read_text()


def test_every_text_has_its_model() -> None:
    assert set(FOLDER.glob("*.txt")) == set(map(path, MODELS))


if __name__ == "__main__":
    for each in MODELS:
        path(each).write_text(text(each))
