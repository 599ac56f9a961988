from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfusion.bench import command_line, optim_benchmark
from hfusion.bench.__main__ import collect, main
from hfusion.bench.cases import CASES
from hfusion.bench.contenders import CONTENDERS


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    for name in (
        *command_line.SUB_BENCHMARKS,
        *command_line.SEPARATE,
        *(case.name for case in (*CASES, *optim_benchmark.CASES)),
        *(contender.name for contender in CONTENDERS),
        *optim_benchmark.ABOUT,
    ):
        assert f"  {name} " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fus"], "unknown sub-benchmark 'fus': choose from fuse, optim"),
        (["--models", "cnn,mlp"], "unknown model 'mlp': choose from mlp-small, mlp-large, cnn, resnet8,"),
        (["--models", ""], "unknown model '': choose from"),
        (["--contenders", "vmap,vmap"], "a contender is named twice in 'vmap,vmap'"),
        (["--contenders", "numpy"], "unknown contender 'numpy': choose from serial, serial-channels-last,"),
        (["--members", "4,-1"], "'-1' is not a whole number of at least 1"),
        (["--repeats", "0"], "'0' is not a whole number of at least 1"),
        (["--device", "tpu"], "unknown device 'tpu': choose from cpu, cuda"),
        (["optim", "--models", "cnn"], "--models belongs to fuse, not to optim: leave it out"),
        (["optim", "--plot", "x.png"], "--plot belongs to fuse, not to optim: leave it out"),
        (["optim", "--memory"], "--memory belongs to fuse, not to optim: leave it out"),
        (["--json", "no-such-directory/x.json"], "there is no directory"),
        (["--plot", "x.png", "--plot", "no-such-directory/x.svg"], "--plot no-such-directory/x.svg: there is no"),
        (["--plot", "x.txt"], "--plot x.txt: end it with one of .png, .svg, .pdf"),
        (["--from", "no-such.json"], "--from draws: say where to with --plot"),
        (["--from", "no-such.json", "--plot", "x.png"], "no-such.json cannot be read: No such file or directory"),
        (["--from", "pyproject.toml", "--plot", "x.png"], "pyproject.toml holds no rows of fuse"),
        (["--amp", "fp8"], "argument --amp: invalid choice: 'fp8'"),
        (["--startup", "--memory"], "argument --memory: not allowed with argument --startup"),
        (["--startup", "--contenders", "serial"], "--contenders does not belong to --startup: leave it out"),
        (["--memory", "--repeats", "2"], "--repeats does not belong to --memory: leave it out"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_quick_fills_only_what_was_not_chosen() -> None:
    chosen = command_line.fuse_settings(command_line.parse(["--quick", "--models", "lstm", "--repeats", "9"]))
    assert [case.name for case in chosen.cases] == ["lstm"]
    assert chosen.rounds == 9
    assert chosen.members == command_line.QUICK_MEMBERS
    assert [contender.name for contender in chosen.contenders] == [*command_line.QUICK_CONTENDERS]


def test_the_whole_command(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    arguments = ["--quick", "--models", "mlp-small", "--members", "2", "--contenders", "serial,vmap"]
    command = [sys.executable, "-m", "hfusion.bench", *arguments, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mlp-small" in done.stdout
    assert len(json.loads(target.read_text())["rows"]) == 2


def test_earlier_runs_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    arguments = ["--quick", "--models", "mlp-small", "--members", "2", "--contenders", "serial,vmap"]
    assert main([*arguments, "--repeats", "1", "--json", str(target)]) == 0
    assert main(["--from", str(target), "--from", str(target), "--plot", str(picture)]) == 0
    assert "mlp-small" in picture.read_text()


def test_memory_instead_of_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    arguments = [
        "--memory",
        "--models",
        "mlp-small",
        "--members",
        "2",
        "--contenders",
        "serial,hfusion",
        "--amp",
        "bf16",
    ]
    assert main([*arguments, "--json", str(target)]) == 0
    assert "MiB per member" in capsys.readouterr().out
    read = json.loads(target.read_text())
    assert read["machine"]["amp"] == "bf16"
    assert [(row["contender"], row["bytes_per_member"] > 0) for row in read["memory"]] == [
        ("serial", True),
        ("hfusion", True),
    ]


def test_optim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["optim", "--quick", "--members", "2", "--repeats", "1", "--json", str(target)]) == 0
    assert "ns per parameter" in capsys.readouterr().out
    rows = json.loads(target.read_text())["rows"]
    assert {"optimizer", "params", "members", "contender", "ns_per_param"} <= rows[0].keys()
    assert {row["optimizer"] for row in rows} == {*optim_benchmark.OPTIMIZERS}


def test_an_interruption_keeps_what_was_found() -> None:
    def results() -> Iterator[int]:
        yield 1
        raise KeyboardInterrupt

    assert collect(results()) == ([1], True)
    assert collect([1, 2]) == ([1, 2], False)
