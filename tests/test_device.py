"""Compiled libraries, threads and backends."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import PlanError
from hfusion.core.exclusive import FairLock, tracing
from hfusion.device import native
from hfusion.device.backend import Generators, accelerators, backend, random_states_kept
from hfusion.device.cache import MAX_BYTES, cache_folder, lasts, read_sealed, write_sealed
from hfusion.device.machine import Device, Machine, parse_bytes
from hfusion.device.team import SOURCE, team
from hfusion.ops import rnn
from hfusion.optim import native_kernels as kernels


# Compiling C with the machine's own compiler; that there is none is tested where it is used.
@pytest.mark.parametrize("source", [kernels.SOURCE, rnn.SOURCE], ids=lambda source: source.stem)
def test_a_library_is_compiled_once(source: Path, compiler: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert isinstance(native.build(source, compiler, folder), ctypes.CDLL)
    (binary,) = folder.iterdir()
    stamp = binary.stat().st_mtime_ns
    assert isinstance(native.build(source, compiler, folder), ctypes.CDLL)
    assert binary.stat().st_mtime_ns == stamp
    assert list(folder.iterdir()) == [binary]


def test_where_no_cache_can_be_a_process_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"no cache folder can be used \(.*: Not a directory\)"):
        assert cache_folder().is_dir()
    assert not lasts()


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """C that is compiled in no time."""
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }")
    return source


# Machines and what is measured of them: what is parsed, refused, kept, and not believed.


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), ("500MB", 500_000_000), ("12", 12), ("3b", 3), (7, 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of this machine, not the standard ones."""
    monkeypatch.delenv("HFUSION_RATES")


def kept(kind: str) -> Path:
    (path,) = cache_folder().glob(f"{kind}-*")
    return path


def rates_in(path: Path) -> dict[str, float]:
    rates: dict[str, float] = json.loads(read_sealed(path))
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
        write_sealed(kept(kind), json.dumps({**rates_in(kept(kind)), name: 123.0}).encode())
    assert machine.calibrate()["a"].flops == machine.calibrate()["a"].load == 123.0
    elsewhere = Machine([Device("cpu", memory=1)], disk=tmp_path / "other").calibrate()["cpu"]
    assert elsewhere.flops == 123.0
    assert elsewhere.load != 123.0


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
    "given away": pytest.param(
        lambda path: os.chown(path, STRANGER, -1), f"it belongs to user {STRANGER}", marks=needs_root
    ),
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


# Devices are asked in one place: no other file names a kind of accelerator.

ROOT = Path(__file__).parents[1]
FOLDERS = ("hfusion", "ops", "passes", "examples")
NAMED = re.compile(r"cuda|\bxpu\b|\bmps\b|\bhip\b|nccl", re.IGNORECASE)
WHY = {
    "hfusion/device/backend.py": "asks devices, and records graphs of CUDA and ROCm, which torch.accelerator refuses",
    "hfusion/torch_private/export_state.py": "asks devices that were not used yet for the seeds that wait for them",
    "hfusion/core/fingerprint.py": "lists the settings that forward may ask for",
    "hfusion/bench/contact_benchmark.py": "reports the settings of a GPU, and the tests that need one",
    "hfusion/cluster/node.py": "carries the flags of torch.backends to other processes",
}


def words(tree: ast.Module) -> Iterator[str]:
    """Names and texts of code; what only people read is left out."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name


def naming(source: str) -> list[str]:
    return [word for word in words(ast.parse(source)) if NAMED.search(word)]


def test_no_other_file_names_an_accelerator() -> None:
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names_by_file = {str(path.relative_to(ROOT)): naming(path.read_text()) for path in files}
    assert {name for name, names in names_by_file.items() if names} == set(WHY)


@pytest.mark.parametrize(("attack", "why"), ATTACKS.values(), ids=ATTACKS)
@pytest.mark.filterwarnings("ignore:cannot keep compiled kernels")
def test_a_library_that_is_not_believed_is_compiled_again(
    attack: Callable[[Path], None], why: str, seven: Path, compiler: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    native.build(seven, compiler, folder)
    (binary,) = folder.iterdir()
    attack(binary)
    with pytest.warns(UserWarning, match=rf"the compiled kernels in {binary} are built again: .*{why}"):
        library = native.build(seven, compiler, folder)
    assert isinstance(library, ctypes.CDLL)
    assert library.seven() == 7
    if binary.is_dir():
        binary.rmdir()
        native.build(seven, compiler, folder)
    assert isinstance(native.build(seven, compiler, folder), ctypes.CDLL)


def test_code_of_a_stranger_does_not_run(seven: Path, compiler: list[str], tmp_path: Path) -> None:
    """A library of that name whose constructor would leave a file."""
    folder, mark, evil = tmp_path / "cache", tmp_path / "mark", tmp_path / "evil.c"
    native.build(seven, compiler, folder)
    (binary,) = folder.iterdir()
    evil.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fclose(fopen("{mark}", "w")); }}'
    )
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", str(binary), str(evil)], check=True)
    with pytest.warns(UserWarning, match="are built again: it is damaged"):
        native.build(seven, compiler, folder)
    assert not mark.exists()


# Threads that do the pieces of one work.
needs_library = pytest.mark.skipif(isinstance(native.library(SOURCE), str), reason=str(native.library(SOURCE)))

Piece = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_char), ctypes.c_int64)


def address(piece: object) -> int:
    return ctypes.cast(piece, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


@needs_library
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("threads", [1, 3, 16])
def test_every_piece_is_done_once(threads: int) -> None:
    done: list[int] = []
    piece = Piece(lambda work, index, message, room: done.append(index) or 0)
    helpers = team(threads)
    for pieces in (0, 1, 2, 40):
        done.clear()
        helpers.run(address(piece), 0, pieces)
        assert sorted(done) == list(range(pieces))
    if not (child := os.fork()):
        try:
            helpers.run(address(piece), 0, 2)
        finally:
            os._exit(len(done) != 42)
    assert os.waitpid(child, 0)[1] == 0


# Backends of devices: the answers of the host here, and on an accelerator those of its module of torch.
DEVICES = [torch.device("cpu"), *accelerators()]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_random_states_come_back(device: torch.device) -> None:
    device_backend = backend(device)
    before = device_backend.random_states()
    first = torch.rand(3, device=device).cpu(), torch.rand(3)
    device_backend.set_random_states(before)
    with random_states_kept():
        torch.rand(5, device=device)
    again = torch.rand(3, device=device).cpu(), torch.rand(3)
    assert all(map(torch.equal, first, again))


@pytest.mark.gpu
@pytest.mark.parametrize("device", accelerators(), ids=str)
def test_free_memory_and_name_of_an_accelerator(device: torch.device) -> None:
    assert backend(device).free_bytes() > 0
    assert backend(device).name


CPU = torch.device("cpu")


def test_a_turn_is_taken_from_a_thread_that_hangs() -> None:
    going_on, hangs = Event(), Event()
    before = torch.get_rng_state()

    def hang() -> None:
        with suppress(RuntimeError), Generators(3).active(CPU):
            hangs.set()
            going_on.wait()

    thread = Thread(target=hang)
    thread.start()
    hangs.wait()
    tracing.take_from(thread.ident)
    torch.set_rng_state(before)
    torch.manual_seed(7)
    with Generators(4).active(CPU):
        going_on.set()
        thread.join()
    assert torch.initial_seed() == 7


class Interrupted(FairLock):
    """A lock of which ``calls`` are over when a KeyboardInterrupt comes, right after it was taken."""

    calls = 0

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        taken = super().acquire(*args, **kwargs)
        self.calls -= 1
        if self.calls == -1:
            raise KeyboardInterrupt
        return bool(taken)


@pytest.mark.parametrize("calls", [0, 1])
def test_an_interrupt_leaves_no_lock_taken(calls: int) -> None:
    lock, taken = Interrupted(), Event()
    lock.calls = calls
    with suppress(KeyboardInterrupt), lock, lock:
        pass
    Thread(target=lambda: lock.__enter__() and taken.set(), daemon=True).start()
    assert taken.wait(10)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    lock = FairLock()
    thread = Thread(target=lock.acquire)
    thread.start()
    thread.join()
    if not (child := os.fork()):
        os._exit(not lock.acquire(timeout=10))
    assert os.waitpid(child, 0)[1] == 0


def test_an_error_puts_torchs_generator_back() -> None:
    def fail() -> None:
        torch.rand(3)
        raise ValueError("inside")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), Generators(3).active(CPU):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


# Under ``torch.set_default_device``, arrays are where their members are, and numbers of members in host memory.
X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE = (
    torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double(),
    torch.tensor([0, 1, 2, 0, 1, 2]),
)
MACHINE = hf.Machine([hf.Device("cpu", memory="64MiB")])


def models(count: int = 3, width: int = 5) -> list[nn.Module]:
    with torch.device("cpu"):
        torch.manual_seed(0)
        members = [
            nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 3))
            for _ in range(count)
        ]
        return [model.double() for model in members]


def tensors(found: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in found.state_dict().values()]


def stepped(folder: Path) -> list[Tensor]:
    fused = hf.fuse(models())
    opt = hf.optim.AdamW(fused.parameters(), lr=[0.1, 0.01, 0.02])
    schedule = hf.optim.lr_scheduler.PerMember(opt, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
    step = hf.train_step(fused, F.cross_entropy, opt, compile=True)
    losses = []
    for _ in range(3):
        losses.append(step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE))
        schedule.step()
    hf.save(folder / "array", fused, opt)
    hf.load(folder / "array", fused, opt)
    return [*losses, *tensors(fused), hf.optim.clip_grad_norm_(fused.parameters(), [1.0, 2.0, 3.0])]


def scaled(folder: Path) -> list[Tensor]:
    fused = hf.fuse(models())
    opt, scaler = hf.optim.SGD(fused.parameters(), lr=0.1), hf.optim.GradScaler("cpu", init_scale=[8.0, 16.0, 4.0])
    for _ in range(2):
        opt.zero_grad()
        scaler.scale(hf.per_model(F.cross_entropy)(fused(X_DEFAULT_DEVICE), Y_DEFAULT_DEVICE)).sum().backward()
        scaler.step(opt)
        scaler.update()
    return tensors(fused)


def lived(folder: Path) -> list[Tensor]:
    pop = hf.Population(
        [*models(3), *models(1, 7)], optimizer=lambda p: hf.optim.AdamW(p, lr=0.01), loss=F.cross_entropy
    )
    losses = [
        pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE),
        pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE, rows=[0, 2]),
        pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE, weights=[1.0, 0.0, 1.0, 1.0, 1.0, 2.0]),
    ]
    pop.append(models(1))
    pop.hparams["lr"][0] = 0.5
    pop.stop([1])
    losses.append(pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE))
    pop.save(folder)
    kept = [model for model in pop.models if model is not None]
    return [*losses, *(tensor for model in kept for tensor in tensors(model))]


def trained(folder: Path) -> list[Tensor]:
    fused, loader = hf.fuse(models()), [(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE)] * 3
    task = hf.Task(fused, F.cross_entropy, lambda p: hf.optim.Adam(p, lr=0.01), loader, epochs=2)
    report = hf.train([task], MACHINE, checkpoint=folder)
    return [report["task"].losses, *tensors(fused)]


WAYS: dict[str, Callable[[Path], list[Tensor]]] = {
    "compiled": stepped,
    "scaler": scaled,
    "population of different models": lived,
    "train with saves": trained,
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_ours_is_there(way: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = WAYS[way](tmp_path / "without")
    torch.manual_seed(1)
    with torch.device("meta"):
        found = WAYS[way](tmp_path / "with")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
