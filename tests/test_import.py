"""``import hfusion``: what it needs, what it does not load, and what it offers."""

from __future__ import annotations

import json
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
import json, os, sys, torch
sys.modules["fcntl"] = sys.modules["pwd"] = sys.modules["resource"] = None
for name in ("geteuid", "getuid", "sysconf", "fchmod", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "posix_fallocate"):
    delattr(os, name)
os.open in os.supports_dir_fd and os.supports_dir_fd.remove(os.open)
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
    done = subprocess.run([sys.executable, "-c", BARE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    loaded, kept, steps, left = json.loads(done.stdout)
    assert loaded == []
    assert (kept, steps) == ("content", 1)
    assert left == ["hfusion"]


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
