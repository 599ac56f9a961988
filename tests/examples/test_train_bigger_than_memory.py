"""The language model in shards at a small size: it learns what the plain loop does, within its budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hfusion as hf
from examples import train_bigger_than_memory as example
from hfusion.schedule.actions import Act
from hfusion.schedule.timeline import Span, Timeline

SMALL = ["--width", "32", "--layers", "2", "--steps", "4", "--memory", "1MiB"]


def test_main_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "plot.png"
    example.main([*SMALL, "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for words in ("python  spilled", "seconds per step", "equal, bit for bit", "of a budget of 1.0 MiB"):
        assert words in printed


def test_text_is_that_of_the_standard_library_with_the_next_characters() -> None:
    torch.manual_seed(0)
    batches = list(example.load(steps=3, seed=0))
    assert len(batches) == 3
    for characters, target in batches:
        assert characters.shape == target.shape == (example.BATCH, example.LENGTH)
        assert torch.equal(characters[:, 1:], target[:, :-1])
    letters = "".join(map(chr, batches[0][0].flatten().tolist()))
    assert "e" in letters
    assert letters.isascii()


def test_the_plain_loop_learns() -> None:
    model = example.make_model(width=32, layers=1, seed=0)
    run = example.train_plainly(model, example.load(steps=30, seed=0), seed=0)
    assert run.losses.shape == (30,)
    assert run.losses[-5:].mean() < run.losses[0] - 0.5


def test_a_difference_of_one_bit_is_found() -> None:
    model = example.make_model(width=8, layers=1, seed=0)
    other = example.make_model(width=8, layers=1, seed=0)
    losses = torch.tensor([2.0, 1.0])
    example.check_equal(example.Run(losses, model, 1.0), example.Run(losses, other, 2.0))
    with pytest.raises(AssertionError, match="losses differ"):
        example.check_equal(example.Run(losses, model, 1.0), example.Run(losses.nextafter(losses + 1), other, 1.0))
    with torch.no_grad():
        other.head.bias[0] = other.head.bias[0].nextafter(torch.tensor(1.0))
    with pytest.raises(AssertionError, match=r"head\.bias differs"):
        example.check_equal(example.Run(losses, model, 1.0), example.Run(losses, other, 1.0))


def test_steps_and_memory_are_read_from_the_timeline() -> None:
    actions = (
        Span(Act.LOAD, "t", 0, 0, "cpu", 0.0, 1.0, 10),
        Span(Act.FORWARD, "t", 0, 0, "cpu", 1.0, 2.0, 5),
        Span(Act.FORWARD, "t", 0, 1, "cpu", 3.0, 4.0, 5),
        Span(Act.EVICT, "t", 0, 1, "cpu", 4.0, 5.0, 10),
    )
    timeline = Timeline(actions, ("cpu",), 0.0)
    assert example.step_seconds(timeline) == 2.0
    moments = [(0.0, 10), (1.0, 15), (2.0, 10), (3.0, 15), (4.0, 10), (5.0, 0)]
    assert example.memory_in_time(timeline) == moments


def test_a_budget_below_one_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hf.PlanError, match="smallest budget that would do"):
        example.main([*SMALL[:-1], "64KiB", "--out", str(tmp_path / "plot.png")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30"], "--width is 30; it must be a multiple of 4"),
        (["--layers", "0"], "--layers is 0; it must be at least 1"),
        (["--steps", "2"], "--steps is 2; it must be at least 3"),
    ],
)
def test_refuses_what_cannot_be_trained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(arguments)
    assert message in capsys.readouterr().err
