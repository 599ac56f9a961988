"""Machines: what is parsed and refused, how they print, what is measured and kept."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hfusion.core.errors import PlanError
from hfusion.device import calibrate
from hfusion.device.cache import cache_folder
from hfusion.device.calibrate import compute_rates, standard_rates
from hfusion.device.machine import Device, Machine, host_memory, parse_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), ("500MB", 500_000_000), ("12", 12), ("3b", 3), (7, 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_devices_may_share_a_physical_one() -> None:
    a, b, c = Device("cuda:1", "a", memory="1GiB"), Device("cuda:1", "b", memory=5), Device("cpu:1", memory=5)
    assert a.physical == b.physical == torch.device("cuda:1")
    assert c.physical == Device("cpu", memory=1).physical
    assert c.name == "cpu:1"
    assert replace(a, name="z") == Device("cuda:1", "z", memory=2**30)


def test_bad_machines() -> None:
    with pytest.raises(PlanError, match="no device"):
        Machine([])
    with pytest.raises(PlanError, match="2 devices are named 'cpu'"):
        Machine([Device("cpu", memory=1), Device("cpu", memory=2)])
    with pytest.raises(PlanError, match="'much'"):
        Machine([Device("cpu", memory=1)], host="much")
    device, wrong = Device("cpu", memory=1), None
    for devices in (device, ["cpu"], "cpu", None):
        with pytest.raises(PlanError, match=r"the devices are .*: give a list of hf.Device"):
            Machine(devices)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the disk is None: give a folder"):
        Machine([device], disk=wrong)  # type: ignore[arg-type]


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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of this machine, not the standard ones."""
    monkeypatch.delenv("HFUSION_RATES")


def kept(kind: str) -> Path:
    (path,) = cache_folder().glob(f"{kind}-*")
    return path


def rates_in(path: Path) -> dict[str, float]:
    rates: dict[str, float] = json.loads(path.read_text())["rates"]
    return rates


@pytest.mark.usefixtures("measured")
def test_calibration_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine = Machine([Device("cpu:0", "a", memory=1), Device("cpu:1", "b", memory=1)], disk=tmp_path / "spill")
    rates = machine.calibrate()
    assert rates["a"] == rates["b"]
    kept_rates = {**rates_in(kept("compute")), **rates_in(kept("moving"))}
    assert asdict(rates["a"]) == {"device": "cpu", "kinds": {}, **kept_rates}
    assert not (tmp_path / "spill").exists()

    for kind, name in (("compute", "flops"), ("moving", "load")):
        content = json.loads(kept(kind).read_text())
        content["rates"][name] = 123.0
        kept(kind).write_text(json.dumps(content))
    assert machine.calibrate()["a"].flops == machine.calibrate()["a"].load == 123.0
    elsewhere = Machine([Device("cpu", memory=1)], disk=tmp_path / "other").calibrate()["cpu"]
    assert elsewhere.flops == 123.0
    assert elsewhere.load != 123.0


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kind", ["compute", "moving"])
@pytest.mark.parametrize("damage", ["", "[]", '{"machine": {}}', "null"])
def test_a_damaged_calibration_is_measured_anew(
    damage: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine([Device("cpu", memory=1)], disk=tmp_path)
    machine.calibrate()
    path = kept(kind)
    path.write_text(damage)
    rates = machine.calibrate()["cpu"]
    assert rates_in(path).items() <= asdict(rates).items()
    assert len(list(cache_folder().iterdir())) == 2


@pytest.mark.usefixtures("measured", "two_threads")
def test_a_busy_machine_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_busy", {})
    monkeypatch.setattr(calibrate, "_chosen", {})
    # As if two threads together were slower than one.
    monkeypatch.setattr(calibrate, "_DISTURBED", 1e9)
    cpu = torch.device("cpu")
    assert compute_rates(cpu) == standard_rates(cpu)
    with pytest.warns(UserWarning, match="the rates of cpu are not kept: other programs are at work, and 2 threads"):
        rates = Machine([Device("cpu", memory=1)], disk=tmp_path).calibrate()["cpu"]
    assert rates.flops == standard_rates(cpu).flops
    assert not list(cache_folder().glob("compute-*"))
    assert torch.get_num_threads() == 2
    # One thread waits for no other.
    torch.set_num_threads(1)
    calibrate.calibrate(cpu, tmp_path)
    assert kept("compute").exists()


@pytest.mark.usefixtures("measured")
def test_lowerings_are_chosen_by_the_rates_of_this_machine_which_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rates = compute_rates(CPU)
    assert asdict(rates) == {"device": "cpu", "kinds": {}, **rates_in(kept("compute"))}
    calibrated = Machine([Device("cpu", memory=1)], disk=tmp_path).calibrate()["cpu"]
    assert asdict(rates).items() <= asdict(calibrated).items()
    kept("compute").unlink()
    assert compute_rates(CPU) == rates


def test_standard_rates_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compute_rates(CPU) == standard_rates(CPU)
    assert not list(tmp_path.iterdir())
    calibrated = Machine([Device("cpu", memory=1)], disk=tmp_path).calibrate()["cpu"]
    assert asdict(standard_rates(CPU)).items() <= asdict(calibrated).items()


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(PlanError, match=r"cannot measure the disk by writing to .* as the machine's disk"):
            Machine([Device("cpu", memory=1)], disk=tmp_path / "other").calibrate()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
