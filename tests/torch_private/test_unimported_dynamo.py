"""Training without a capture does not import Dynamo, and steps as torch's optimizers do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from hfusion.torch_private import dynamo_state, module_hooks

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


def trained(kind: type[torch.optim.Optimizer], step: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    optimizer = kind(parameters, lr=0.1, **options)  # type: ignore[call-arg]
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        step(optimizer)
    return [p.detach() for p in parameters], optimizer.state_dict()["state"]


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.NAdam, {}),
    ],
)
def test_a_step_alone_is_the_step_of_torch(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(kind, lambda optimizer: optimizer.step(), **options)
    monkeypatch.setattr(module_hooks, "is_dynamo_imported", lambda: imported)
    monkeypatch.setattr(dynamo_state, "is_dynamo_imported", lambda: imported)
    actual = trained(kind, module_hooks.step_alone, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
