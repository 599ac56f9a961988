"""Training without a capture does not import Dynamo."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PREPARED = """
    import sys, torch, torch.nn.functional as F
    from torch import nn
    import hfusion as hf
    def model(width):
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
"""
SCRIPTS = {
    "population": """
        pop = hf.Population([model(w) for w in (5, 6)], optimizer=hf.optim.AdamW, loss=F.cross_entropy)
        pop.step(x, y)
        pop.evaluate(F.cross_entropy, [(x, y)])
    """,
    "sweep": """
        hf.sweep(
            model, lambda trial: {"width": trial.suggest_int("width", 4, 9)}, F.cross_entropy, [(x, y)] * 2, trials=4,
            epochs=2, optimizer=hf.optim.Adam, eval_loader=[(x, y)], metric=F.cross_entropy,
        )
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_plain_training_does_not_import_dynamo(name: str) -> None:
    # Where Dynamo is imported, the last line says so.
    script = textwrap.dedent(PREPARED) + textwrap.dedent(SCRIPTS[name]) + "\nassert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
