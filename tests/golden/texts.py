"""Observations, programs and reports of the zoo's models as text, one file each.

They show what a change of capture, rules, passes or costs does.

``python -m tests.golden`` writes the files again; read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import torch

import hfusion as hf
from hfusion.capture.observe import observe
from tests.zoo import MODELS, Model

FOLDER = Path(__file__).parent
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


def write() -> None:
    for model in MODELS:
        path(model).write_text(text(model))
