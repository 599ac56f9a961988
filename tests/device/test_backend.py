"""Compiled libraries, threads and backends."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Thread

import pytest
import torch

from hfusion.core.exclusive import tracing
from hfusion.device import native
from hfusion.device.backend import GraphPool, accelerators, backend, random_states_kept
from hfusion.device.generators import Generators, draws_kept
from hfusion.device.team import library, team
from hfusion.ops import rnn
from hfusion.optim import native_kernels as kernels
from tests.device.test_machine import ATTACKS


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


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """C that is compiled in no time."""
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }")
    return source


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


def test_a_folder_that_cannot_be_written_is_warned_of(seven: Path, compiler: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.warns(UserWarning, match=r"are built again: Not a directory"),
        pytest.warns(UserWarning, match=r"cannot keep compiled kernels in .*: Not a directory; .* XDG_CACHE_HOME"),
    ):
        library = native.build(seven, compiler, tmp_path / "file")
    assert isinstance(library, ctypes.CDLL)
    assert library.seven() == 7


# Threads that do the pieces of one work.
needs_library = pytest.mark.skipif(isinstance(library(), str), reason=str(library()))

Piece = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_char), ctypes.c_int64)


def address(piece: object) -> int:
    return ctypes.cast(piece, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


@needs_library
@pytest.mark.parametrize("threads", [1, 3, 16])
def test_every_piece_is_done_once(threads: int) -> None:
    done: list[int] = []
    piece = Piece(lambda work, index, message, room: done.append(index) or 0)
    helpers = team(threads)
    for pieces in (0, 1, 2, 40):
        done.clear()
        helpers.run(address(piece), 0, pieces)
        assert sorted(done) == list(range(pieces))


@needs_library
def test_pieces_are_done_at_the_same_time() -> None:
    meeting = threading.Barrier(4)
    piece = Piece(lambda work, index, message, room: meeting.wait(60) * 0)
    team(4).run(address(piece), 0, 4)


# Backends of devices: the answers of the host here, and on an accelerator those of its module of torch.
DEVICES = [torch.device("cpu"), *accelerators()]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_queue_does_what_it_is_asked_for_in_turn(device: torch.device) -> None:
    queue, x = backend(device).queue(), torch.ones(1000, device=device)
    backend(device).wait()
    queue.run(lambda: x.add_(1))
    queue.run(lambda: x.mul_(3))
    queue.wait()
    assert (x.cpu() == 6).all()


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


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_memory_that_it_pins_is_pinned(device: torch.device) -> None:
    pins = backend(device).pins
    assert torch.empty(8, pin_memory=pins).is_pinned() is pins
    with backend(device).current():
        assert torch.empty(1, device=device).device.type == device.type


class Graph:
    """A graph in a new pool, or in the pool that it was given."""

    def __init__(self, handle: object) -> None:
        self._handle = handle or object()

    def pool(self) -> object:
        return self._handle


def test_graphs_share_a_pool_as_long_as_one_of_them_is_alive() -> None:
    pool = GraphPool()
    assert pool.handle() is None
    first = Graph(pool.handle())
    pool.add(first)
    second = Graph(pool.handle())
    pool.add(second)
    assert second.pool() is first.pool() is pool.handle()
    del first
    assert pool.handle() is second.pool()
    # torch frees the pool with its last graph, and asserts that it is not requested again.
    del second
    assert pool.handle() is None


def test_the_host_records_nothing() -> None:
    assert backend(torch.device("cpu")).recorder() == ""


@pytest.mark.gpu
@pytest.mark.parametrize("device", accelerators(), ids=str)
def test_free_memory_and_name_of_an_accelerator(device: torch.device) -> None:
    assert backend(device).free_bytes() > 0
    assert backend(device).name


CPU = torch.device("cpu")


def test_draws_inside_are_undone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with draws_kept():
        torch.rand(2)
        torch.manual_seed(6)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_turn_is_taken_from_a_thread_that_hangs() -> None:
    going_on, hangs = Event(), Event()
    before = torch.get_rng_state()

    def hang() -> None:
        with Generators(3).active(CPU):
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


def test_draws_are_those_after_manual_seed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4), torch.rand(4)
    torch.manual_seed(1)
    outside = torch.rand(4)
    torch.manual_seed(1)
    generators = Generators(5)
    with generators.active(CPU):
        assert torch.equal(torch.rand(4), expected[0])
    assert torch.equal(torch.rand(4), outside)
    with generators.active(CPU, advance=False):
        assert torch.equal(torch.rand(4), expected[1])
    with generators.active(CPU):
        assert torch.equal(torch.rand(4), expected[1])


def test_an_error_puts_torchs_generator_back() -> None:
    def fail() -> None:
        torch.rand(3)
        raise ValueError("inside")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), Generators(3).active(CPU):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_tasks_in_several_threads_draw_as_if_alone() -> None:
    start = Barrier(3)

    def draw(seed: int) -> torch.Tensor:
        generators, draws = Generators(seed), []
        start.wait()
        for _ in range(30):
            with generators.active(CPU):
                draws.append(torch.rand(2))
        return torch.stack(draws)

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(draw, range(3)))
    for seed, draws in enumerate(together):
        assert torch.equal(draws.flatten(), torch.rand(60, generator=torch.Generator().manual_seed(seed)))
