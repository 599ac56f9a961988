"""``python -m hfusion.bench`` and the scripts of benchmarks/: every command runs, and says what was wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import draw
from hfusion.bench import shard_benchmark
from hfusion.bench.__main__ import NAMES, main
from hfusion.bench.cases import CASES, classified
from hfusion.bench.contenders import CONTENDERS
from hfusion.bench.models import mlp
from hfusion.bench.shard_benchmark import ShardCase, linears, seeded

SHARDED = ShardCase(
    "tiny",
    "",
    partial(seeded, lambda: [mlp(*[8] * 7) for _ in range(2)]),
    partial(classified, 6, 8),
    linears,
    parts=(1, 2),
)


def rows_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json", str(folder / "bench.json")]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / "bench.json").read_text())["rows"]
    return rows


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert main(["fus"]) == 2
    shown = capsys.readouterr().out
    for name in (*NAMES, *(each.name for each in (*CASES, *CONTENDERS))):
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fuse", "--models", "cnn,mlp"], "unknown name 'mlp': choose from mlp-small, mlp-large, cnn, resnet8,"),
        (["--contenders", "vmap,vmap"], "a name occurs twice in 'vmap,vmap'"),
        (["--members", "4,-1"], "'-1' is not a whole number of at least 1"),
        (["optim", "--repeats", "0"], "'0' is not a whole number of at least 1"),
        (["--device", "tpu"], "unknown device 'tpu': choose from cpu, cuda"),
        (["optim", "--models", "cnn"], "unrecognized arguments: --models cnn"),
        (["--json", "no-such-directory/x.json"], "there is no directory"),
        (["--amp", "fp8"], "argument --amp: invalid choice: 'fp8'"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_fuse(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    arguments = ["--quick", "--models", "mlp-small", "--members", "2", "--contenders", "serial,vmap,hfusion"]
    command = [sys.executable, "-m", "hfusion.bench", *arguments, "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mlp-small" in done.stdout
    read = json.loads(target.read_text())
    assert {"cpu", "cores", "threads", "torch", "python", "platform", "date", "command"} <= read["machine"].keys()
    assert [row["contender"] for row in read["rows"]] == ["serial", "vmap", "hfusion"]
    assert read["rows"][0]["speedup"] == 1.0
    assert all(row["ms"] > 0 and row["reason"] == "" for row in read["rows"])
    assert read["rows"][2]["best_other"] in ("serial", "vmap")
    pytest.importorskip("matplotlib")
    draw.main([str(target), str(tmp_path / "bench.svg")])
    assert "mlp-small" in (tmp_path / "bench.svg").read_text()


def test_optim(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "optim", "--quick", "--members", "2", "--repeats", "1")
    assert len(rows) == 9 * 5
    assert all(row["ns_per_param"] > 0 for row in rows)


def test_sweep(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    threads = torch.get_num_threads()
    names = "one-by-one,threads,hfusion"
    rows = rows_of(tmp_path, "sweep", "--quick", "--contenders", names, "--trials", "3")
    torch.set_num_threads(threads)
    assert [row["contender"] for row in rows] == names.split(",")
    for row in rows:
        assert row["trials"] == 3
        assert 3 <= row["epochs"] <= 9
        assert row["speedup"] == rows[0]["seconds"] / row["seconds"]


def test_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_benchmark, "QUICK_CASES", (SHARDED,))
    rows = rows_of(tmp_path, "shard", "--quick")
    ours = shard_benchmark.OURS.name
    assert [(row["budget"], row["contender"]) for row in rows] == [
        ("1/1", "plain loop"),
        ("1/1", ours),
        ("1/2", ours),
        ("-", "fsdp2 offload"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert [row["shards"] for row in rows[:2]] == [1, 1]
    assert rows[2]["shards"] > 1
    assert rows[2]["peak_bytes"] <= rows[0]["peak_bytes"] // 2
