"""Machines: what is parsed and refused, how they print, what is measured and kept."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from hfusion.core.errors import PlanError
from hfusion.device import machine as rooms
from hfusion.device.cache import cache_folder, write, write_json
from hfusion.device.machine import Device, Machine, Rates, host_memory, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), ("500MB", 500_000_000), ("12", 12), ("3b", 3), (7, 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8 gigs", "GiB", "-1GiB", "1e9", "0", 0, -3, "0.1B"])
def test_bad_sizes_say_how_to_write_them(text: str | int) -> None:
    with pytest.raises(PlanError, match='is no positive number of bytes: write it as "8GiB"') as caught:
        Device("cpu", memory=text)
    assert repr(text) in str(caught.value)


def test_devices_may_share_a_physical_one() -> None:
    a, b, c = Device("cuda:1", "a", memory="1GiB"), Device("cuda:1", "b", memory=5), Device("cpu:1", memory=5)
    assert a.physical == b.physical == torch.device("cuda:1")
    assert c.physical == Device("cpu", memory=1).physical
    assert c.name == "cpu:1"
    assert replace(a, name="z") == Device("cuda:1", "z", memory=2**30)


@pytest.mark.parametrize(
    ("device", "name", "message"),
    [("gpu", None, "device 'gpu' is not known"), ("cpu", "two words", "one word"), ("cpu", "", "one word")],
)
def test_bad_devices(device: str, name: str | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Device(device, name, memory=1)


def test_bad_machines() -> None:
    with pytest.raises(PlanError, match="no device"):
        Machine([])
    with pytest.raises(PlanError, match="2 devices are named 'cpu'"):
        Machine([Device("cpu", memory=1), Device("cpu", memory=2)])
    with pytest.raises(PlanError, match="'much'"):
        Machine([Device("cpu", memory=1)], host="much")


def test_print() -> None:
    machine = Machine([Device("cuda:0", "a", memory="8GiB"), Device("cpu:1", memory="512MiB")])
    assert str(machine).split("\n") == [
        "machine  2 devices",
        "  name   device    memory",
        "  a      cuda:0    8.0GiB",
        "  cpu:1  cpu:1   512.0MiB",
        "  host            64.0GiB",
        "  disk   spill",
    ]


def test_detect() -> None:
    machine = Machine.detect()
    kinds = {device.physical.type for device in machine.devices}
    assert kinds == {"cuda" if torch.cuda.is_available() else "cpu"}
    assert 0 < machine.host < host_memory()
    for device in machine.devices:
        whole = torch.cuda.mem_get_info(device.physical)[1] if device.physical.type == "cuda" else host_memory()
        assert 0 < device.memory <= whole


def test_calibration_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = Machine([Device("cpu:0", "a", memory=1), Device("cpu:1", "b", memory=1)], disk=tmp_path / "spill")
    rates = machine.calibrate()
    assert rates["a"] == rates["b"]
    assert all(getattr(rates["a"], field.name) > 0 for field in fields(Rates))
    (kept,) = cache_folder().iterdir()
    assert not (tmp_path / "spill").exists()

    content = json.loads(kept.read_text())
    content["rates"]["flops"] = 123.0
    kept.write_text(json.dumps(content))
    assert machine.calibrate()["a"].flops == 123.0
    elsewhere = Machine([Device("cpu", memory=1)], disk=tmp_path / "other").calibrate()
    assert elsewhere["cpu"].flops != 123.0


@pytest.mark.parametrize("damage", ["", "[]", '{"machine": {}}', "null"])
def test_a_damaged_calibration_is_measured_anew(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine([Device("cpu", memory=1)], disk=tmp_path)
    machine.calibrate()
    (kept,) = cache_folder().iterdir()
    kept.write_text(damage)
    rates = machine.calibrate()["cpu"]
    assert Rates(**json.loads(kept.read_text())["rates"]) == rates
    assert list(cache_folder().iterdir()) == [kept]


def test_a_missing_device_is_told() -> None:
    with pytest.raises(PlanError, match="there is no device cuda:99: torch sees"):
        Machine([Device("cuda:99", memory=1)]).calibrate()


def test_rates_are_positive() -> None:
    with pytest.raises(PlanError, match="rate memory is 0"):
        Rates(1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_cache_that_cannot_be_written_is_told_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="no cache folder can be used .*XDG_CACHE_HOME"):
        rates = Machine([Device("cpu", memory=1)], disk=tmp_path).calibrate()
    assert rates["cpu"].flops > 0


def test_a_calibration_that_cannot_be_read_or_replaced_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine([Device("cpu", memory=1)], disk=tmp_path)
    machine.calibrate()
    (kept,) = cache_folder().iterdir()
    kept.unlink()
    os.mkfifo(kept)
    with pytest.warns(UserWarning, match=r"the rates of the machine in .* are measured anew: it is no regular file"):
        rates = machine.calibrate()
    assert machine.calibrate() == rates
    kept.unlink()
    kept.mkdir()
    with pytest.warns(UserWarning, match="it is no regular file"), pytest.warns(UserWarning, match="cannot keep the"):
        machine.calibrate()


ABSURD = ["NaN", "Infinity", "1e999", "-1", "0", '"1e9"', "true", "null", "[1]", "1e300", "1" + 400 * "0", 9000 * "["]


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:9])
def test_absurd_rates_are_not_believed(value: str, tmp_path: Path) -> None:
    rates = dict.fromkeys((field.name for field in fields(Rates)), 1e9)
    path = tmp_path / "hfusion" / "rates.json"
    write_json(path, {"machine": {}, "rates": rates})
    assert rooms._read(path, {}) == Rates(**rates)
    write(path, json.dumps({"machine": {}, "rates": rates | {"read": 12345.0}}).replace("12345.0", value).encode())
    assert rooms._read(path, {}) is None


def test_a_disk_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(PlanError, match=r"cannot measure the disk by writing to .* as the machine's disk"):
            Machine([Device("cpu", memory=1)], disk=tmp_path / "other").calibrate()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
