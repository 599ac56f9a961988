"""Machines and what is measured of them: what is parsed, refused, kept, and not believed."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from hfusion.core.errors import PlanError
from hfusion.device import calibrate
from hfusion.device.cache import (
    MAX_BYTES,
    cache_folder,
    read,
    read_sealed,
    write,
    write_sealed,
)
from hfusion.device.calibrate import compute_rates, standard_rates
from hfusion.device.machine import Device, Machine, host_memory, parse_bytes

# Machines: what is parsed and refused, how they print, what is measured and kept.
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
    assert asdict(rates["a"]) == {"device": "cpu", **kept_rates}
    assert not (tmp_path / "spill").exists()

    for kind, name in (("compute", "flops"), ("moving", "load")):
        content = json.loads(kept(kind).read_text())
        content["rates"][name] = 123.0
        kept(kind).write_text(json.dumps(content))
    assert machine.calibrate()["a"].flops == machine.calibrate()["a"].load == 123.0
    elsewhere = Machine([Device("cpu", memory=1)], disk=tmp_path / "other").calibrate()["cpu"]
    assert elsewhere.flops == 123.0
    assert elsewhere.load != 123.0


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


# The cache folder: where it is, whom it belongs to, and which files there are not believed.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
STRANGER = 12345


@contextmanager
def masked(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_only_the_user_reads_and_writes_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "hfusion" / "kernels.so"
    path.parent.parent.mkdir()
    with masked(mask & 0o077):
        write(path.parent / "first", b"")
    with masked(mask):
        write(path, b"x")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path) == b"x"
    assert {entry.name for entry in path.parent.iterdir()} == {"first", "kernels.so"}


HOMES: dict[str, tuple[dict[str, str | None], str]] = {
    "named": ({"XDG_CACHE_HOME": "{}/a", "HOME": "{}/b"}, "{}/a/hfusion"),
    "by default": ({"XDG_CACHE_HOME": None, "HOME": "{}/b"}, "{}/b/.cache/hfusion"),
    "relative": ({"XDG_CACHE_HOME": "a", "HOME": "{}/b"}, "{}/b/.cache/hfusion"),
    "empty": ({"XDG_CACHE_HOME": "", "HOME": "{}/b"}, "{}/b/.cache/hfusion"),
}


@pytest.mark.parametrize("name", HOMES)
def test_location_of_the_cache_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, expected = HOMES[name]
    monkeypatch.chdir(tmp_path)
    set_all(variables, tmp_path, monkeypatch)
    assert cache_folder() == Path(expected.format(tmp_path))


def set_all(variables: dict[str, str | None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in variables.items():
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value.format(folder))


def stranger(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, STRANGER, -1)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def dangling(folder: Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")


FOLDERS = [
    pytest.param(stranger, f"it belongs to user {STRANGER}", marks=needs_root),
    pytest.param(open_to_all, r"others can write to it \(mode 777\): chmod go-w"),
    pytest.param(Path.touch, "Not a directory"),
    pytest.param(dangling, ""),
]


@pytest.mark.parametrize(("make", "why"), FOLDERS)
def test_an_unusable_folder_is_reported_once(
    make: Callable[[Path], None], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make(tmp_path / "hfusion")
    with pytest.warns(UserWarning, match=f"no cache folder can be used .*hfusion: .*{why}") as records:
        private = cache_folder()
    assert len(records) == 1
    assert private.parent != tmp_path
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert cache_folder() == private
    write(private / "kept", b"x")
    assert read(private / "kept") == b"x"
    (private / "kept").unlink()


def given_away(path: Path) -> None:
    os.chown(path, STRANGER, -1)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def another(path: Path) -> None:
    """A file of ours under a name that is not its own."""
    write_sealed(path.with_name("other"), b"other")
    path.with_name("other").rename(path)


ATTACKS = {
    "given away": pytest.param(given_away, f"it belongs to user {STRANGER}", marks=needs_root),
    "writable": pytest.param(lambda path: path.chmod(0o620), "others can write to it"),
    "a link": pytest.param(linked, "symbolic links"),
    "a pipe": pytest.param(pipe, "it is no regular file"),
    "a folder": pytest.param(a_folder, "it is no regular file"),
    "huge": pytest.param(lambda path: os.truncate(path, 1 << 40), f"more than {MAX_BYTES:,} bytes"),
    "cut short": pytest.param(lambda path: os.truncate(path, path.stat().st_size // 2), "damaged, or was cut short"),
    "empty": pytest.param(lambda path: os.truncate(path, 0), "damaged, or was cut short"),
    "flipped": pytest.param(flipped, "damaged, or was cut short"),
    "another": pytest.param(another, "damaged, or was cut short"),
}


@pytest.mark.parametrize(("attack", "why"), ATTACKS.values(), ids=ATTACKS)
def test_untrusted_files_are_refused(attack: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    path = tmp_path / "hfusion" / "kept"
    write_sealed(path, b"content of some length")
    assert read_sealed(path) == b"content of some length"
    attack(path)
    with pytest.raises(OSError, match=why) as error:
        read_sealed(path)
    assert error.value.strerror
    if path.is_dir():
        with pytest.raises(OSError, match="directory"):
            write_sealed(path, b"new")
        path.rmdir()
    write_sealed(path, b"new")
    assert read_sealed(path) == b"new"
