"""``import hfusion``: what it needs, what it does not load, and what it offers."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hfusion as hf

ROOT = Path(__file__).parents[1]
# What torch's own import does not load either, and takes long.
HEAVY = [
    "cloudpickle",
    "jax",
    "matplotlib",
    "networkx",
    "optuna",
    "ray",
    "rich",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "triton",
]

# A system without owners of files, locks and signals, as Windows is.
BARE = f"""
import importlib, json, os, shutil, sys, torch
sys.modules["fcntl"] = sys.modules["pwd"] = sys.modules["resource"] = None
for name in ("geteuid", "getuid", "sysconf", "fchmod", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "posix_fallocate"):
    delattr(os, name)
os.open in os.supports_dir_fd and os.supports_dir_fd.remove(os.open)
importlib.reload(shutil)  # It chooses at its import how to remove folders.
before = set(sys.modules)
import hfusion as hf
loaded = [name for name in {HEAVY} if name in sys.modules and name not in before]
from torch import nn
from hfusion.device import cache
from pathlib import Path
models = [nn.Linear(3, 2) for _ in range(2)]
fused = hf.fuse(models)
x = torch.randn(4, 3)
optimizer = hf.optim.Adam(fused.parameters(), lr=0.1)
fused(x).sum().backward()
optimizer.step()
cache.write_sealed(Path(sys.argv[1], "hfusion", "kept"), b"content")
kept = cache.read_sealed(Path(sys.argv[1], "hfusion", "kept")).decode()
loader = [(x, torch.zeros(4, 2))]
machine = hf.Machine([hf.Device("cpu", memory="1GiB")], host="1B", disk=sys.argv[1])
task = hf.Task(models, nn.functional.mse_loss, lambda params: hf.optim.SGD(params, lr=0.1), loader)
steps = len(hf.train(task, machine)["task"].losses)
print(json.dumps([loaded, kept, steps, os.listdir(sys.argv[1])]))
"""


def test_a_system_without_owners_locks_and_signals(tmp_path: Path) -> None:
    # As on Windows, where Python does not look up the name of the user in `pwd`.
    environment = {**os.environ, "USERNAME": "user"}
    command = [sys.executable, "-c", BARE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == [[], "content", 1, ["hfusion"]]


# Prints what is loaded after `import hfusion`, and then after a sweep that no array can pay for.
SHORT_SWEEP = f"""
import json, sys, torch, optuna
from torch import nn
before = set(sys.modules)
import hfusion as hf
imported = sorted(set(sys.modules) - before)
# An update of torch's own imports Dynamo, and with it sympy and others.
model = nn.Linear(3, 2)
model(torch.randn(8, 3)).sum().backward()
torch.optim.AdamW(model.parameters(), fused=True).step()
before = set(sys.modules)
optuna.logging.set_verbosity(optuna.logging.WARNING)
x = torch.randn(8, 3)
loader = [(x, torch.zeros(8, 2))] * 2

def make_model(width):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))

def space(trial):
    return {{"width": trial.suggest_categorical("width", [4, 8]), "lr": trial.suggest_float("lr", 1e-3, 1e-2)}}

hf.sweep(make_model, space, nn.functional.mse_loss, loader, trials=8, epochs=2, eval_loader=loader)
rooms = sorted({{name.split(".")[1] for name in sys.modules if name.startswith("hfusion.")}})
heavy = [name for name in {[*HEAVY, "torch.export._trace"]} if name in sys.modules and name not in before]
print(json.dumps([imported, rooms, heavy]))
"""


def test_a_short_sweep_imports_no_compiler(tmp_path: Path) -> None:
    environment = {**os.environ, "HFUSION_RATES": "standard", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", SHORT_SWEEP]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    imported, rooms, heavy = json.loads(done.stdout)
    assert [name for name in imported if name.startswith(("hfusion", "torch"))] == ["hfusion"]
    assert not {"array", "ops", "passes", "runtime", "schedule", "adapters"} & set(rooms)
    assert heavy == []


def test_type_checkers_see_the_names_that_are_imported_late() -> None:
    tree = ast.parse((ROOT / "hfusion" / "__init__.py").read_text())
    block = next(statement for statement in tree.body if isinstance(statement, ast.If))
    found = {alias.name: part.module for part in block.body if isinstance(part, ast.ImportFrom) for alias in part.names}
    assert found == hf._MODULES | {"optim": "hfusion"}
    assert set(found) == set(hf.__all__)


def test_the_version_is_told_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", hf.__version__)
    assert project["dynamic"] == ["version"]
    assert project["license"] == "MIT"
    assert project["authors"][0]["name"] in (ROOT / "LICENSE").read_text()


def test_dir_lists_what_is_public() -> None:
    assert set(dir(hf)) == {*hf.__all__, "lightning", "sklearn", "__version__"}


@pytest.mark.parametrize("name", [name for name in hf.__all__ if isinstance(getattr(hf, name), type)])
def test_errors_are_shown_by_the_name_to_import(name: str) -> None:
    kind = getattr(hf, name)
    if issubclass(kind, Exception):
        assert (kind.__module__, kind.__qualname__) == ("hfusion", name)
        assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize("name", hf.__all__)
def test_public_names_are_described_and_shown(name: str) -> None:
    assert getattr(hf, name).__doc__
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(re.search(rf"\bhf\.{name}\b", page.read_text()) for page in pages), "no page mentions it"


# Training without a capture does not import Dynamo.

PLAIN = """
import sys, torch, torch.nn.functional as F
from torch import nn
import hfusion as hf
def model(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
x, y = torch.randn(8, 4), torch.randint(3, (8,))
pop = hf.Population([model(w) for w in (5, 6)], optimizer=hf.optim.AdamW, loss=F.cross_entropy)
pop.step(x, y)
pop.evaluate(F.cross_entropy, [(x, y)])
hf.sweep(
    model, lambda trial: {"width": trial.suggest_int("width", 4, 9)}, F.cross_entropy, [(x, y)] * 2, trials=4,
    epochs=2, optimizer=hf.optim.Adam, eval_loader=[(x, y)], metric=F.cross_entropy,
)
assert "torch._dynamo" not in sys.modules
"""


def test_plain_training_does_not_import_dynamo() -> None:
    # Where Dynamo is imported, the last line says so.
    subprocess.run([sys.executable, "-c", PLAIN], check=True, timeout=120)
