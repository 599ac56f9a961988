"""Every example runs at a small size, and prints what it is about."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import TensorDataset

from tests.step.test_train_step import needs_compiler

ROOT = Path(__file__).parents[1]
# Arguments, with a file or folder for OUT; and words that are printed.
SMALL: dict[str, tuple[str, tuple[str, ...]]] = {
    "adapters": ("--members 2 --steps 10 --eager --out OUT", ("textwrap",)),
    "all_cores": ("--members 4 --steps 10", ("2 threads of torch's",)),
    "compiled_tasks": ("--members 3 --epochs 1", ("eager: compile=False", "one program of")),
    "customers": ("--customers 20 --days 6 --eager", ()),
    "deep_ensemble": ("--members 2 --epochs 1 --out OUT.png", ("ensemble of 2", "best member")),
    "digits_sweep": ("--members 2 --epochs 1 --batch 64 --out OUT.png", ("speed-up", "differs from alone")),
    "federated": ("--clients 12 --rounds 1 --part 0.5 --eager", ("accuracy",)),
    "first_second": ("--members 2 --seconds 0", ("2 eager steps",)),
    "kfold": ("--folds 3 --epochs 1 --eager", ("mean",)),
    "many_models_many_devices": ("--epochs 1 --out OUT", ("13 tasks  4 devices", "equal bit for bit")),
    "over_ranks": ("--members 8 --epochs 3", ("epoch 2: best",)),
    "member_sinks": ("", ()),
    "own_pace": ("--shops 4 --epochs 1 --eager", ()),
    "population": ("--members 4 --rounds 2 --eager", ("fixed rates",)),
    "resume": ("--steps 20", ("is killed at step", "the same, to the last bit")),
    "sparse_autoencoders": ("--width 8 --features 16 --ks 1 2 --steps 5", ()),
    "sweep": ("--trials 2 --epochs 1 --directory OUT", ("sweep 'sweep'  2 trials",)),
    "train_bigger_than_memory": (
        "--width 32 --layers 2 --steps 4 --memory 1MiB --out OUT.png",
        ("spilled", "equal, bit for bit", "of a budget of 1.0 MiB"),
    ),
}
COMPILED = ("all_cores", "compiled_tasks")


def test_every_example_is_run() -> None:
    assert SMALL.keys() == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_compiler] * (name in COMPILED)) for name in SMALL])
def test_an_example_runs(
    name: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("sklearn", "optuna", "peft", "transformers"):
        pytest.importorskip(package)
    if name == "all_cores":
        request.getfixturevalue("two_threads")
    example = importlib.import_module(f"examples.{name}")
    if name == "many_models_many_devices":
        digits = example.load(seed=0)
        few = replace(digits, train=TensorDataset(*digits.train[: 2 * example.BATCH]))
        monkeypatch.setattr(example, "load", lambda seed: few)
    arguments, words = SMALL[name]
    out = tmp_path / "out"
    example.main(arguments.replace("OUT", str(out)).split())
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []
    if "OUT.png" in arguments:
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
