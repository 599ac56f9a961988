"""The sub-benchmark ``schedule``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfusion.bench import schedule_benchmark
from hfusion.bench.__main__ import main
from hfusion.bench.policies import COMPARED


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["schedule", "--quick", "--json", str(target)]) == 0
    assert "makespan" in capsys.readouterr().out
    rows = json.loads(target.read_text())["rows"]
    policies = [*COMPARED] * len(schedule_benchmark.QUICK_CASES) + ["placement"]
    plans = ["first plan", "made anew", "rates known"]
    assert len(rows) == len(schedule_benchmark.MIXES) * (len(policies) + len(plans))
    assert {row["policy"] for row in rows} == {*policies, *plans}
    first, replanned, *_ = (row["makespan"] for row in rows if row["mix"] == "estimates wrong")
    assert replanned < 0.7 * first
    first, replanned, *_ = (row["makespan"] for row in rows if row["mix"] == "estimates right")
    assert replanned == first
    names = "tasks devices mix policy makespan lower_bound ratio us_per_decision"
    assert list(rows[0]) == names.split()
    for row in rows:
        assert row["ratio"] == row["makespan"] / row["lower_bound"] >= 1
        assert row["us_per_decision"] > 0


def test_members_do_not_belong_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["schedule", "--members", "4"])
    assert "--members does not belong to schedule: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("mix", schedule_benchmark.MIXES)
@pytest.mark.parametrize("case", schedule_benchmark.CASES)
def test_every_case_is_a_plan_of_its_size(case: schedule_benchmark.ScheduleCase, mix: str) -> None:
    plan = schedule_benchmark.plan_of(case, mix)
    assert (len(plan.tasks), len(plan.devices)) == (case.tasks, case.devices)
    assert len({task.seconds for task in plan.tasks}) == (1 if mix == "homogeneous" else case.tasks)
