"""Many small tasks of one shape: planned and trained as one after the other, and captured once."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.array import shared_programs
from hfusion.compiler import compiled_program
from hfusion.tasks import array_plan

COUNT, STEPS, EPOCHS = 6, 5, 2
RATES = [1e-2, 1e-3]


@pytest.fixture(autouse=True)
def first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_RATES", "standard")
    monkeypatch.setattr(shared_programs, "_programs", OrderedDict())
    monkeypatch.setattr(array_plan, "_plans", {})


def models(width: int, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.25), nn.Linear(width, 3)) for _ in RATES]


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(STEPS)]


def task(number: int, **options: Any) -> hf.Task:
    arguments = {"width": 6, "epochs": EPOCHS, "seed": number, **options}
    return hf.Task(
        models(arguments.pop("width"), number),
        F.cross_entropy,
        lambda params: hf.optim.Adam(params, lr=RATES),
        batches(number),
        name=f"task-{number}",
        compile=False,
        **arguments,
    )


def machine(memory: str = "1MiB") -> hf.Machine:
    return hf.Machine([hf.Device("cpu", memory=memory)], "1GiB")


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    capture, plan = compiled_program._captured, array_plan.shards_at

    def captured(*args: Any) -> Any:
        counts["captures"] += 1
        return capture(*args)

    def planned(*args: Any) -> Any:
        counts["plans"] += 1
        return plan(*args)

    monkeypatch.setattr(compiled_program, "_captured", captured)
    monkeypatch.setattr(array_plan, "shards_at", planned)
    return counts


def test_a_shape_is_captured_and_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [task(number) for number in range(COUNT)]
    counts = counted(monkeypatch)
    plan = hf.plan(tasks, machine())
    first = dict(counts)
    assert first == {"captures": 1, "plans": 2}, "for both members together, and for one"
    assert [task_plan.name for task_plan in plan.tasks] == [f"task-{number}" for number in range(COUNT)]
    assert {str(task_plan.shards) for task_plan in plan.tasks} == {str(plan.tasks[0].shards)}
    hf.plan([*tasks, task(COUNT, width=7)], machine())
    assert counts["captures"] == 2
