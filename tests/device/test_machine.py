"""Machines: what is parsed and refused, how they print, what is measured and kept."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hfusion.core.errors import PlanError
from hfusion.device import calibrate
from hfusion.device.cache import cache_folder, write, write_json
from hfusion.device.calibrate import ComputeRates, Rates, compute_rates, standard_rates
from hfusion.device.machine import Device, Machine, host_memory, parse_bytes
from hfusion.device.native import cores

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


def test_processes_that_measure_at_the_same_time_choose_by_the_same_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one ends its measuring when the first has kept its rates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measure(flops: float, meanwhile: Callable[[], object]) -> Callable[[], dict[str, float]]:
        def measured() -> dict[str, float]:
            meanwhile()
            return {"flops": flops}

        return measured

    first: list[dict[str, float]] = []
    keep = partial(calibrate._cached_rates, "compute", {"device": "some"}, ["flops"])
    second, _ = keep(measure(2e9, lambda: first.append(keep(measure(1e9, dict))[0])))
    assert first == [second] == [{"flops": 1e9}]


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


def test_devices_share_an_interpreter_and_what_is_one_device_its_speed() -> None:
    card = Rates(8.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0, device="cuda")
    assert card.shared(1, 1) == card
    assert card.shared(1, 4) == replace(card, calls=2.0)
    assert card.shared(2, 4) == replace(card, flops=4.0, memory=4.0, calls=2.0)
    # As many names as this process has cores for threads of torch compute at full speed.
    host, room = replace(card, device="cpu"), max(1, cores() // torch.get_num_threads())
    assert host.shared(room, 1).flops == 8.0 > host.shared(2 * cores(), 1).flops
    assert card.shared(1, 2).action_seconds == 2 * card.action_seconds > 0


def test_calibration_warns_and_goes_on_if_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="no cache folder can be used .*XDG_CACHE_HOME"):
        rates = Machine([Device("cpu", memory=1)], disk=tmp_path).calibrate()
    assert rates["cpu"].load > 0


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kind", ["compute", "moving"])
def test_a_calibration_that_cannot_be_read_or_replaced_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine([Device("cpu", memory=1)], disk=tmp_path)
    machine.calibrate()
    path = kept(kind)
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match=r"the rates of the machine in .* are measured again: it is no regular file"):
        rates = machine.calibrate()
    assert machine.calibrate() == rates
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="it is no regular file"), pytest.warns(UserWarning, match="are not kept"):
        machine.calibrate()


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


@pytest.mark.usefixtures("measured")
def test_files_without_the_rates_of_half_precision_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine([Device("cpu", memory=1)], disk=tmp_path)
    machine.calibrate()
    path = kept("compute")
    content = json.loads(path.read_text())
    assert content["rates"].keys() == {"flops", "bfloat16", "float16", "memory", "calls"}
    earlier = dict.fromkeys(("flops", "memory", "calls"), 12345.0)
    path.write_text(json.dumps(content | {"rates": earlier}))
    rates = machine.calibrate()["cpu"]
    assert rates_in(path) == {name: getattr(rates, name) for name in content["rates"]}
    assert rates.flops != 12345.0


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_each_dtype_has_its_rate(name: str) -> None:
    dtype = getattr(torch, name)
    rates = ComputeRates(8.0, 4.0, 2.0, **{name: 32.0})
    assert (rates.flops_of(torch.float32), rates.flops_of(torch.float64), rates.flops_of(dtype)) == (8.0, 8.0, 32.0)
    assert ComputeRates(8.0, 4.0, 2.0).flops_of(dtype) == 8.0
    card = Rates(8.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0, **{name: 32.0}, device="cuda")
    assert card.shared(names=2, devices=4).flops_of(dtype) == 16.0
    with pytest.raises(PlanError, match=f"rate {name} is 0.0: it must be a positive number"):
        ComputeRates(8.0, 4.0, 2.0, **{name: 0.0})


@pytest.mark.usefixtures("measured")
def test_standard_rates_choose_lowerings_if_nothing_can_be_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compute_rates(CPU) == standard_rates(CPU)
    absent = torch.device("cuda", 99)
    assert compute_rates(absent) == standard_rates(absent)
    assert compute_rates(absent).device == "cuda"


def test_standard_rates_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compute_rates(CPU) == standard_rates(CPU)
    assert not list(tmp_path.iterdir())
    calibrated = Machine([Device("cpu", memory=1)], disk=tmp_path).calibrate()["cpu"]
    assert asdict(standard_rates(CPU)).items() <= asdict(calibrated).items()


ABSURD = ["NaN", "Infinity", "1e999", "-1", "0", '"1e9"', "true", "null", "[1]", "1e300", "1" + 400 * "0", 9000 * "["]


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:9])
def test_absurd_rates_are_not_believed(value: str, tmp_path: Path) -> None:
    rates = {"load": 1e9, "read": 2e9}
    path = tmp_path / "hfusion" / "rates.json"
    write_json(path, {"machine": {}, "rates": rates})
    assert calibrate._read(path, {}, ("load", "read")) == rates
    write(path, json.dumps({"machine": {}, "rates": rates | {"read": 12345.0}}).replace("12345.0", value).encode())
    assert calibrate._read(path, {}, ("load", "read")) is None


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(PlanError, match=r"cannot measure the disk by writing to .* as the machine's disk"):
            Machine([Device("cpu", memory=1)], disk=tmp_path / "other").calibrate()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
