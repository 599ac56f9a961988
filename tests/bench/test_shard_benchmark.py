"""The sub-benchmark ``shard``: contenders compute the same, budgets are kept, and limits are read rightly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfusion.bench import shard_benchmark, shard_cases
from hfusion.bench.__main__ import console, main
from hfusion.bench.cases import classified, tokens
from hfusion.bench.models import TransformerLM, mlp
from hfusion.bench.offload import FsdpWorkload, fsdp_offload
from hfusion.bench.progress import Meter
from hfusion.bench.shard_benchmark import Entry, ShardSettings, ShardWorkload, compare, read
from hfusion.bench.shard_cases import ShardCase, adapters, blocks, children, linears, seeded
from hfusion.bench.shard_results import (
    ALONE,
    BY_HAND,
    FSDP,
    OURS,
    PLAIN,
    STILL,
    Sample,
    ShardRow,
    StepTimes,
    filled,
    limits,
    table,
)
from hfusion.bench.workload import Unavailable
from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Plan, Shard, TaskPlan
from hfusion.schedule.timeline import Span, Timeline
from tests.bench.tiny import CPU

QUIET = Meter(say=lambda _: None, advance=lambda _: None)
TINY = ShardCase(
    "tiny", "", partial(seeded, partial(mlp, *[8] * 7), 2), partial(classified, 6, 8), linears, parts=(1, 2)
)
LORA = ShardCase("lora", "", partial(adapters, 3, 16, 4, 2), partial(classified, 6, 16), children, parts=(2,))
LM = ShardCase(
    "lm",
    "",
    partial(seeded, partial(TransformerLM, vocabulary=12, width=8, layers=2, heads=2, length=5), 2),
    partial(tokens, 4, 5, 12),
    blocks,
    parts=(1, 2),
)


def workload(case: ShardCase = TINY, steps: int = 4) -> ShardWorkload:
    return ShardWorkload(case, steps, CPU)


def rows_of(case: ShardCase) -> list[ShardRow]:
    done = [0]

    def advance(pieces: int) -> None:
        done[0] += pieces

    settings = ShardSettings((case,), 1, 4, CPU)
    (rows,) = shard_benchmark.run(settings, Meter(say=lambda _: None, advance=advance))
    assert done[0] == shard_benchmark.pieces(settings)
    return rows


def exact(case: ShardCase) -> ShardCase:
    """The case in float64."""

    def batch() -> tuple[Tensor, Tensor]:
        inputs, target = case.make_batch()
        return inputs.double() if inputs.is_floating_point() else inputs, target

    return replace(case, make_models=lambda: [model.double() for model in case.make_models()], make_batch=batch)


def trained_alone(case: ShardCase, steps: int) -> Tensor:
    """Losses ``[steps, B]`` of the members trained one by one with torch alone."""
    inputs, target = case.make_batch()
    columns = []
    for model, lr in zip(case.make_models(), workload(case).rates, strict=True):
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
        column = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = case.loss(model(inputs), target)
            loss.backward()
            optimizer.step()
            column.append(loss.detach())
        columns.append(torch.stack(column))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("case", [TINY, LM, LORA], ids=lambda case: case.name)
def test_every_contender_runs_within_its_budget_and_learns_the_same(case: ShardCase) -> None:
    chosen = workload(exact(case))
    expected = trained_alone(exact(case), 4)
    for entry in chosen.entries():
        sample = entry.run()
        torch.testing.assert_close(sample.losses, expected, rtol=1e-9, atol=1e-11)
        assert sample.seconds > 0
        if entry.contender in (OURS, ALONE):
            budget = chosen.need // int(entry.budget.removeprefix("1/"))
            assert sample.peak is not None
            assert sample.peak <= budget
            assert (sample.shards == 1) == (entry.budget == "1/1")
            assert (sample.moved == 0) == (entry.budget == "1/1")


def test_the_rows() -> None:
    rows = rows_of(TINY)
    names = [(row.budget, row.contender) for row in rows]
    spilled = [("1/2", OURS), ("1/2", ALONE), ("1/2", BY_HAND), ("1/2", STILL)]
    assert names == [("1/1", PLAIN), ("1/1", OURS), *spilled, ("-", FSDP)]
    by_name = dict(zip(names, rows, strict=True))
    assert {row.reason for row in rows} == {""}
    assert by_name["1/1", PLAIN].over_limit == by_name["1/1", PLAIN].speedup == 1.0
    assert by_name["1/1", OURS].limit_ms == by_name["1/1", PLAIN].ms
    assert len({by_name[name].limit_ms for name in spilled}) == 1
    assert by_name["-", FSDP].limit_ms is None
    fused_peak, largest = by_name["1/2", OURS].peak_bytes, by_name["1/2", ALONE].peak_bytes
    assert fused_peak is not None
    assert largest is not None
    assert largest <= fused_peak


def test_a_frozen_base_is_copied_once_for_all_members() -> None:
    moved = {}
    for members in (1, 3):
        case = replace(LORA, make_models=partial(adapters, members, 256, 4, 2), make_batch=partial(classified, 6, 256))
        chosen = workload(case)
        sample = chosen.run_hfusion(chosen.need // 2, prefetch=True)
        assert sample.moved is not None
        moved[members] = sample.moved
    # What is trained and what crosses the cuts is three times as much, the base is not.
    assert moved[3] < 1.5 * moved[1]


class Counting(nn.Sequential):
    """Has buffers."""

    def __init__(self) -> None:
        super().__init__(*mlp(*[8] * 5), nn.BatchNorm1d(8))


def test_the_loop_by_hand_says_what_it_cannot_do() -> None:
    chosen = workload(replace(TINY, make_models=partial(seeded, Counting, 2)))
    with pytest.raises(Unavailable, match="the model has buffers"):
        chosen.by_hand(chosen.need // 2)


def test_computing_alone_copies_nothing_and_computes_the_same() -> None:
    chosen = workload(exact(LM))
    expected, actual = chosen.plain(), chosen.still(chosen.need // 2)
    torch.testing.assert_close(actual.losses, expected.losses)
    assert (actual.moved, actual.peak) == (None, None)


def test_the_loop_by_hand_leaves_what_it_trained_at_home() -> None:
    chosen = workload(exact(LM))
    chosen.plain()
    expected = {name: tensor.clone() for name, tensor in chosen.array.state_dict().items()}
    chosen.by_hand(chosen.need // 2)
    for name, tensor in chosen.array.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11)


def test_fsdp_says_why_it_cannot_run() -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no such loss\nand a second line")

    alone = FsdpWorkload(TINY.make_models(), linears, [1e-3, 1e-3], broken, TINY.make_batch())
    with pytest.raises(Unavailable, match=r"^FSDP2: no such loss$"):
        fsdp_offload(alone, 3, CPU)
    # Nothing of it is left that would be in the way of the next one.
    assert fsdp_offload(replace(alone, loss=F.cross_entropy), 3, CPU).losses.shape == (3, 2)


def entry(contender: str, run: Callable[[], Sample], *, equal: bool = False) -> Entry:
    return Entry("1/1", contender, run, equal)


def test_failed_and_wrong_entries_have_a_reason_and_no_time() -> None:
    losses = torch.ones(4, 2)

    def infeasible() -> Sample:
        raise PlanError("no cut fits")

    entries = [
        entry(PLAIN, lambda: Sample(2.0, losses), equal=True),
        entry("near", lambda: Sample(1.0, losses + 1e-3)),
        entry("one bit off", lambda: Sample(1.0, losses.nextafter(losses + 1)), equal=True),
        entry("infeasible", infeasible),
    ]
    plain, near, wrong, none = compare(workload(), entries, 2, QUIET)
    assert (plain.ms, near.ms, near.speedup) == (2e3, 1e3, 2.0)
    assert (wrong.ms, wrong.disagrees) == (None, True)
    assert wrong.reason.startswith("one bit off: member 0 has loss")
    assert (none.ms, none.disagrees, none.reason) == (None, False, "no cut fits")
    out = console()
    shown, footnotes = table([plain, near, wrong, none])
    with out.capture() as captured:
        out.print(shown)
    for text in ("WRONG [1]", "n/a [2]", "2.00x"):
        assert text in captured.get()
    assert "[2] infeasible, tiny, 1/1: no cut fits" in footnotes


def test_a_plain_loop_that_differs_from_itself_is_seen() -> None:
    outcomes = iter([torch.ones(4, 2), torch.full((4, 2), 2.0)])
    only, other = compare(
        workload(),
        [
            entry(PLAIN, lambda: Sample(1.0, next(outcomes)), equal=True),
            entry("other", lambda: Sample(1.0, torch.ones(4, 2))),
        ],
        2,
        QUIET,
    )
    assert only.disagrees
    assert (other.ms, other.speedup, other.over_limit) == (1e3, None, None)


def test_the_limit_is_the_longest_lane_by_itself() -> None:
    losses = torch.ones(4, 2)
    plain = [Sample(3.0, losses), Sample(5.0, losses)]
    hand = [Sample(9.0, losses, StepTimes(3.0, 2.0, 1.0)), Sample(9.0, losses, StepTimes(2.0, 1.0, 6.0))]
    still = [Sample(9.0, losses, StepTimes(4.0, 0.0, 0.0)), Sample(9.0, losses, StepTimes(5.0, 0.0, 0.0))]
    samples = [Sample(6.0, losses, StepTimes(6.0, 2.0, 1.0)), Sample(6.0, losses, StepTimes(4.0, 1.0, 6.0))]
    limits_by_budget = limits(
        {("1/1", PLAIN): plain, ("1/2", OURS): samples, ("1/2", BY_HAND): hand, ("1/2", STILL): still}
    )
    assert limits_by_budget == {"1/1": [3.0, 5.0], "1/2": [4.0, 6.0]}
    row = filled(ShardRow("c", 2, "1/2", OURS), samples, plain, limits_by_budget["1/2"])
    assert row.limit_ms == 5e3
    # The ratios of the rounds are 6/4 and 6/6, and 3/6 and 5/6 against the plain loop.
    assert row.over_limit == 1.25
    assert row.speedup == pytest.approx(2 / 3)
    assert (row.compute_ms, row.in_ms, row.out_ms) == (5e3, 1.5e3, 3.5e3)


def test_steady_steps_are_read_from_a_timeline() -> None:
    first_shard = Shard(0, 0, 1, 100, 100, 200, 10, 10, 120, 7, 1.0, 1.0, 1.0)
    two = replace(first_shard, index=1, first=1, last=2, boundary=0)
    task = TaskPlan("t", (first_shard, two), 5, resident=False)
    actions = []
    # Each step: shard 0 forward, shard 1 forward and backward with its update, shard 0 backward with its update.
    for step in range(5):
        length = 10.0 if step == 0 else 1.0
        start = 0.0 if step == 0 else 100.0 + 10 * step
        for index, (kind, shard_, seconds) in enumerate(
            [
                (Act.LOAD, 0, 0.5),
                (Act.FORWARD, 0, 1.0),
                (Act.EVICT, 0, 0.25),
                (Act.LOAD, 1, 0.5),
                (Act.FORWARD, 1, 1.0),
                (Act.BACKWARD, 1, 1.0),
                (Act.STEP, 1, 0.5),
                (Act.EVICT, 1, 0.25),
                (Act.LOAD, 0, 0.5),
                (Act.BACKWARD, 0, 1.5),
                (Act.STEP, 0, 0.5),
                (Act.EVICT, 0, 0.25),
            ]
        ):
            span_start = start + index * length / 2
            actions.append(Span(kind, "t", shard_, step, "cpu", span_start, span_start + seconds * length, 1))
    sample = read(Timeline(tuple(actions), ("cpu",), 0.0), Plan((task,), {"cpu": 10_000}, 1.0, 1.0))
    assert sample.seconds == 10.0
    assert sample.lanes == StepTimes(compute=5.5, into=1.5, out=0.75)
    # In: weights; all and the cut; all and both cuts. Out: the cut; weights and Adam's state, with the cut of shard 1.
    assert sample.moved == 100 + 307 + 307 + 7 + 307 + 300
    assert sample.shards == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cases, "QUICK_CASES", (TINY,))
    target = tmp_path / "bench.json"
    assert main(["shard", "--quick", "--json", str(target)]) == 0
    assert "that do not fit" in capsys.readouterr().out
    rows = json.loads(target.read_text())["rows"]
    assert {"case", "budget", "contender", "ms", "limit_ms", "peak_bytes"} <= rows[0].keys()
    assert {row["case"] for row in rows} == {"tiny"}
    assert all(row["ms"] > 0 for row in rows)


def test_members_do_not_belong_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["shard", "--members", "4"])
    assert "--members does not belong to shard: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("case", shard_cases.CASES, ids=lambda case: case.name)
def test_the_smallest_budget_of_every_case_can_be_planned(case: ShardCase) -> None:
    chosen = workload(case)
    for part in {1, max(case.parts)}:
        (task,) = chosen.plan(chosen.need // part).tasks
        assert task.resident == (part == 1)
