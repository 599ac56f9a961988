"""The digits sweep at a small size: what it learns, what it compares, what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from examples import digits_sweep
from examples.digits_sweep import Labelled

CPU = torch.device("cpu")
RATES = [1e-6, 3e-3, 1e-2]


@pytest.fixture(scope="module")
def data() -> tuple[Labelled, Labelled]:
    return digits_sweep.load(0, CPU)


def test_data_is_split_and_scaled(data: tuple[Labelled, Labelled]) -> None:
    (images, labels), (test_images, test_labels) = data
    assert images.shape == (1347, 1, 8, 8)
    assert test_images.shape == (450, 1, 8, 8)
    assert abs(float(images.mean())) < 1e-5
    assert abs(float(images.std()) - 1) < 1e-5
    # Stratified: every class keeps its share of about a tenth.
    for part in (labels, test_labels):
        assert (part.bincount(minlength=10) / len(part)).sub(0.1).abs().max() < 0.01


def test_members_equal_their_solo_runs(data: tuple[Labelled, Labelled]) -> None:
    batches = digits_sweep.shuffled(data[0], 16, 1, seed=0)[:4]
    models = digits_sweep.make_models(3, 0, CPU)
    assert max(digits_sweep.check(models, RATES, batches)) < 1e-9


def test_check_sees_another_learning_rate(data: tuple[Labelled, Labelled]) -> None:
    batches = digits_sweep.shuffled(data[0], 16, 1, seed=0)[:2]
    models = digits_sweep.make_models(2, 0, CPU)
    fused, _ = digits_sweep.train_array(models, [1e-3, 1e-3], batches)
    digits_sweep.train_alone(models[1], 1.01e-3, batches)
    assert digits_sweep.difference(fused[1], models[1]) > 1e-6


def test_sweep_learns_and_agrees(data: tuple[Labelled, Labelled]) -> None:
    batches = digits_sweep.shuffled(data[0], 32, 2, seed=0)
    models = digits_sweep.make_models(3, 0, CPU)
    fused, result = digits_sweep.sweep(models, RATES, batches, data[1], epochs=2)
    assert len(fused) == 3
    assert result.array.losses.shape == result.alone.losses.shape == (len(batches), 3)
    assert max(result.accuracies) > 0.9
    # The smallest rate moves nothing in two epochs.
    assert result.accuracies[0] < 0.5
    torch.testing.assert_close(result.array.losses[0], result.alone.losses[0])
    assert result.accuracies == pytest.approx(result.alone_accuracies, abs=0.05)


def test_main_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "sweep.png"
    digits_sweep.main(["--members", "2", "--epochs", "1", "--batch", "64", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for words in (
        "1.0e-05",
        "1.0e-01",
        "as one array",
        "one by one",
        "speed-up",
        "best: learning rate",
        "In float64",
        "differs from alone",
    ):
        assert words in printed


def test_one_member_one_step(tmp_path: Path) -> None:
    out = tmp_path / "one.png"
    digits_sweep.main(["--members", "1", "--epochs", "1", "--batch", "1347", "--out", str(out)])
    assert out.stat().st_size > 0


def test_check_alone_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none.png"
    digits_sweep.main(["--members", "2", "--epochs", "1", "--batch", "256", "--out", str(out), "--check"])
    assert "In float64, after 5 steps" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize("option", ["--members", "--epochs", "--batch"])
def test_refuses_nothing_to_do(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        digits_sweep.main([option, "0"])
    assert f"{option} is 0; it must be at least 1" in capsys.readouterr().err


def test_a_difference_is_not_passed_over(data: tuple[Labelled, Labelled], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits_sweep, "LARGEST_DIFFERENCE", 0.0)
    models = digits_sweep.make_models(2, 0, CPU)
    batches = digits_sweep.shuffled(data[0], 16, 1, seed=0)[:2]
    with pytest.raises(SystemExit, match="the array is not exact"):
        digits_sweep.compared(Console(), models, RATES[:2], batches)


def test_refuses_a_batch_beyond_the_set(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1347 training images"):
        digits_sweep.main(["--batch", "2000", "--out", str(tmp_path / "none.png")])
