"""Copies of populations, and saves while other threads or processes train or save."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.checkpoint.files import saves
from tests.checkpoint.living import OPTIONS, Batches, Net, population, same, train


def loaded_by_torch(pop: hf.Population) -> hf.Population:
    # What a lambda makes is made by no pickle.
    pop.scheduler = None
    torch.save(pop, file := io.BytesIO())
    file.seek(0)
    loaded: hf.Population = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, loaded_by_torch], ids=["deepcopy", "torch.save"])
def test_a_copy_goes_on_as_the_population_would(copied: Any, compiled: bool) -> None:
    pop, batches = population(4, compile=compiled), Batches()
    train(pop, batches, 3)
    pop.stop(1)
    pop.copy(0, 2)
    before = copied(pop)
    assert same(before, pop)
    if pop.scheduler is None:
        pop.scheduler = before.scheduler = hf.optim.lr_scheduler.PerMember(pop.optimizer, OPTIONS["scheduler"])
        before = copied(pop)
        pop.scheduler, before.scheduler = (
            hf.optim.lr_scheduler.PerMember(run.optimizer, OPTIONS["scheduler"]) for run in (pop, before)
        )
    position, state = batches.place, torch.get_rng_state()
    expected = train(pop, batches, 3)
    assert not same(before, pop)
    batches.place = position
    torch.set_rng_state(state)
    assert torch.equal(train(before, batches, 3)[:, [0, 2, 3]], expected[:, [0, 2, 3]])
    assert same(before, pop)
    before.start(1, Net(), tag="new", lr=0.1)
    assert before.step(*next(iter(batches))).isfinite().all()


def test_a_save_is_of_one_step_whoever_trains_meanwhile(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "optimizer": lambda params: hf.optim.SGD(params, lr=0.1, momentum=0.5),
        "loss": F.mse_loss,
        "compile": False,
    }

    def make() -> nn.Module:
        return nn.Linear(64, 64, bias=False)

    pop, over, errors = hf.Population([make() for _ in range(4)], **options), threading.Event(), list[BaseException]()

    def save() -> None:
        try:
            while not over.is_set():
                pop.save(tmp_path, keep=1000)
        except BaseException as error:
            errors.append(error)

    def state(source: hf.Population) -> list[torch.Tensor]:
        entry = source.optimizer.state[source.fused.weight]
        return [source.fused.weight.detach().clone(), *(entry[key].clone() for key in sorted(entry))]

    x, y = torch.randn(8, 64), torch.randn(8, 64)
    pop.step(x, y)
    (thread := threading.Thread(target=save)).start()
    states = {}
    while len(saves(tmp_path)) < 6 and pop.steps < 10000:
        states[pop.steps] = state(pop)
        pop.step(x, y)
    over.set()
    thread.join()
    assert not errors
    paths = saves(tmp_path)
    assert len(paths) >= 6
    for path in paths[:6]:
        loaded = hf.Population.load(path, make, **options)
        if loaded.steps in states:
            assert all(torch.equal(a, b) for a, b in zip(state(loaded), states[loaded.steps], strict=True))


def test_processes_that_save_to_one_folder_harm_nobody(tmp_path: Path) -> None:
    code = f"""
import sys
from tests.checkpoint.living import population
pop = population(2, int(sys.argv[1]))
for _ in range(25):
    pop.save({str(tmp_path)!r}, keep=4)
"""
    root = Path(__file__).resolve().parents[2]
    runs = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(k)], cwd=root) for k in range(2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    assert [path.name.startswith("save-") for path in tmp_path.iterdir()] == [True] * 4
    for path in saves(tmp_path):
        assert len(hf.Population.load(path, Net, **OPTIONS)) == 2


def test_a_shared_base_is_unchanged_after_all_members_stop() -> None:
    base = nn.Linear(4, 4)
    pop = hf.Population(
        [nn.Sequential(base, nn.Linear(4, 3)) for _ in range(2)],
        optimizer=lambda params: hf.optim.AdamW(params, lr=0.1, weight_decay=0.1),
        loss=F.cross_entropy,
    )
    batch = torch.randn(5, 4), torch.randint(3, (5,))
    pop.step(*batch)
    stopped = pop.stop([0, 1])
    before = {name: tensor.clone() for name, tensor in pop.fused.state_dict().items()}
    assert pop.step(*batch).isnan().all()
    assert all(torch.equal(before[name], tensor) for name, tensor in pop.fused.state_dict().items())
    pop.start(0, stopped[0])
    assert pop.step(*batch)[0].isfinite()
    assert pop.ages[0] == 1
