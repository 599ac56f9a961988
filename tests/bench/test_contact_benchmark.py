"""The checks of the first run on a GPU, on the CPU, and the processes in which they run."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from rich.console import Console

from hfusion.bench import (
    contact_benchmark,
    contact_child,
    contact_lowering,
    contact_speed,
    contact_steps,
    contact_training,
)
from hfusion.bench.command_line import named
from hfusion.bench.contact_item import (
    CheckResult,
    ContactItem,
    ContactStatus,
    Need,
    compare,
    compare_losses,
    difference,
)
from hfusion.bench.contact_items import items
from hfusion.bench.contact_process import NO_TIME, ContactRow, ContactRun, row, run_all, run_item
from tests.bench.tiny import CPU

FINE = (ContactStatus.OK, "")
ZERO, NAN = torch.zeros(2), torch.full((2,), torch.nan)


def run(seconds: float = 60.0) -> ContactRun:
    return ContactRun(CPU, time.monotonic() + seconds, Event())


def succeed(device: torch.device) -> CheckResult:
    return CheckResult(summary=f"ran on {device}", values={"device": device})


def raise_error(device: torch.device) -> CheckResult:
    raise ValueError(f"no such thing on {device}\nand a second line")


def die(device: torch.device) -> CheckResult:
    os.kill(os.getpid(), signal.SIGKILL)
    return CheckResult()


def crash(device: torch.device) -> CheckResult:
    os.abort()


def sleep(device: torch.device) -> CheckResult:
    time.sleep(600)
    return CheckResult()


def test_names_are_unique() -> None:
    names = [item.name for item in items()]
    assert len(names) == len(set(names))


def test_a_quick_run_has_checks_of_each_kind() -> None:
    kinds = [[item.name.split(" ")[0] for item in items(quick)] for quick in (False, True)]
    assert set(kinds[0]) == set(kinds[1])
    assert len(kinds[1]) < len(kinds[0]) / 5


@pytest.mark.parametrize("precision", contact_steps.DTYPES)
@pytest.mark.parametrize("name", contact_steps.OPTIMIZERS)
def test_optimizers(name: str, precision: str) -> None:
    result = contact_steps.check_optimizer(name, precision, CPU)
    assert (result.status, result.reason) == FINE


def test_steps() -> None:
    result = contact_steps.check_step("mlp-small", "float32", 2, CPU)
    assert (result.status, result.reason) == FINE
    assert set(result.values["differences"]) == {"first steps", "settled", "moved"}


@pytest.mark.parametrize("mode", [mode for mode in contact_training.MODES if not mode.compiled], ids=lambda m: m.name)
def test_training(mode: contact_training.TrainMode) -> None:
    result = contact_training.check_training(mode, CPU)
    assert (result.status, result.reason) == FINE
    assert (result.values["shards"] > 1) == mode.spilled


@pytest.mark.parametrize("name", contact_lowering.QUICK)
def test_lowerings(name: str) -> None:
    (layer,) = named(contact_lowering.LAYERS, [name])
    result = contact_lowering.time_layer(layer, CPU)
    assert (result.status, result.reason) == FINE
    assert set(result.values["ms"]) == {"loop", "hfusion", "tuned"}
    assert result.values["operators"]


def test_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact_speed, "CONTENDERS", ("serial", "vmap", "hfusion"))
    result = contact_speed.time_steps("mlp-small", 2, CPU)
    assert (result.status, result.reason) == FINE
    assert set(result.values["ms"]) == {"serial", "vmap", "hfusion"}


def test_differences_are_relative_to_the_largest_value() -> None:
    expected = torch.tensor([4.0, 0.0])
    assert difference(expected, torch.tensor([4.0, 0.5])) == 0.125
    assert difference(expected, expected) == difference(NAN, NAN) == difference(ZERO, ZERO) == 0.0
    assert difference(ZERO, NAN) == difference(NAN, ZERO) == difference(ZERO, expected[:1]) == torch.inf
    infinite = torch.tensor([torch.inf, 1.0])
    assert difference(infinite, infinite) == 0.0
    assert difference(infinite, -infinite) == torch.inf


@pytest.mark.parametrize(
    ("largest", "status"), [(1e-4, ContactStatus.OK), (1.0, ContactStatus.WRONG), (torch.inf, ContactStatus.WRONG)]
)
def test_wrong_values_are_a_fault(largest: float, status: ContactStatus) -> None:
    result = compare(CPU, {"weights": largest}, 1e-3, "")
    assert result.status is status
    assert ("weights" in result.reason) == status.is_fault


def test_wrong_losses_name_the_member() -> None:
    expected = torch.ones(5, 3)
    actual = expected.clone()
    actual[2, 1] = 2.0
    result = compare_losses(CPU, expected, {"settled": actual}, 1e-3, "")
    assert result.status is ContactStatus.WRONG
    assert "member 1 has loss 2 at step 2" in result.reason
    # The worse fault stays.
    assert result.unless_fault("not recorded") == result
    assert CheckResult().unless_fault("not recorded").status is ContactStatus.FAILED


def test_a_check_that_ends_well() -> None:
    line = run_item(ContactItem("check", succeed), run())
    assert (line.status, line.summary, line.values) == ("ok", "ran on cpu", {"device": "cpu"})


def test_a_check_that_raises_an_error() -> None:
    line = run_item(ContactItem("check", raise_error), run())
    assert (line.status, line.reason) == ("failed", "ValueError: no such thing on cpu")
    assert "in raise_error" in str(line.values["traceback"])


def test_a_check_whose_process_dies() -> None:
    line = run_item(ContactItem("check", die), run())
    assert (line.status, line.reason) == ("failed", "killed by SIGKILL: it printed nothing")


def test_a_check_that_crashes() -> None:
    line = run_item(ContactItem("check", crash), run())
    assert re.fullmatch(r'killed by SIGABRT: File ".*test_contact_benchmark.py", line \d+ in crash', line.reason)


def test_a_check_that_takes_too_long() -> None:
    line = run_item(ContactItem("check", sleep, limit=0.1), run())
    assert (line.status, line.reason) == ("timeout", "not done after 0 s; last line: it printed nothing")


def test_a_check_without_time_or_device() -> None:
    assert run_item(ContactItem("check", succeed), run(seconds=-1.0)).reason == NO_TIME
    line = run_item(ContactItem("check", succeed, Need.CUDA), run())
    assert (line.status, line.reason) == ("skipped", "needs a CUDA device")


def test_a_process_ends_when_its_parent_has_died(tmp_path: Path) -> None:
    check = tmp_path / "check"
    check.write_bytes(pickle.dumps((ContactItem("check", sleep), CPU)))
    command = [sys.executable, "-m", contact_child.__name__, str(check), str(tmp_path / "result")]
    # Its input is closed as that of a parent that was killed.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_timed_checks_run_one_by_one() -> None:
    running, most = [0], [0]

    def runner(item: ContactItem, shared: ContactRun) -> ContactRow:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        running[0] -= 1
        return row(item, CheckResult(), 0.0)

    timed = [ContactItem(f"item {index}", succeed, exclusive=True) for index in range(4)]
    rows = list(run_all(timed, run(), 4, runner))
    assert [line.item for line in rows] == [item.name for item in timed]
    assert most == [1]


def test_an_interrupted_run_keeps_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "contact.json"
    line = row(ContactItem("check", succeed), CheckResult(), 0.0)

    def lines() -> Iterator[ContactRow]:
        yield line
        assert json.loads(file.read_text())["item"] == "check"
        signal.raise_signal(signal.SIGTERM)

    with contact_benchmark.interrupted_by_termination():
        rows, interrupted = contact_benchmark.ContactLog(Console(quiet=True), file, 2).collect(lines())
    assert (rows, interrupted) == ([line], True)


def test_the_command_goes_on_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [ContactItem("first", raise_error), ContactItem("second", succeed)]
    monkeypatch.setattr(contact_benchmark, "items", lambda quick: checks)
    file = tmp_path / "contact.json"
    assert contact_benchmark.main(["--device", "cpu", "--json", str(file), "--jobs", "1"]) == 1
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["item"], line["status"]) for line in rows] == [("first", "failed"), ("second", "ok")]
    printed = capsys.readouterr().out
    assert "ran on cpu" in printed
    assert "1 failed, 1 ok" in printed


def test_facts_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "contact.json"
    assert contact_benchmark.main(["--device", "cpu", "--quick", "--only", "facts,pytest", "--json", str(file)]) == 0
    rows = {line["item"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert rows["facts"]["values"]["computes"] is True
    assert rows["pytest -m gpu"]["status"] == "skipped"
    assert (contact_benchmark.NO_ACCELERATOR in capsys.readouterr().out) == (
        contact_benchmark.first_accelerator() is None
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "argument --device: no abacus here: choose from cpu"),
        (["--json", "nowhere/contact.json"], "argument --json: there is no directory"),
        (["--only", "nothing"], "--only nothing: no check has a name that starts so"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        contact_benchmark.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_list_is_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert contact_benchmark.main(["--quick", "--list"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [item.name for item in items(quick=True)]
