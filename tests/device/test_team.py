"""Threads that do the pieces of one work."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from hfusion.device.team import library, team

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


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_caller_is_one_of_the_threads(threads: int) -> None:
    """The caller computes like the other threads. A barrier makes each thread take one piece."""
    identifiers: set[int] = set()
    numbers: list[int] = []
    meeting = threading.Barrier(threads)

    def do(work: int, index: int, message: object, room: int) -> int:
        meeting.wait(60)
        identifiers.add(threading.get_ident())
        numbers.append(torch.get_num_threads())
        return 0

    piece = Piece(do)
    helpers = team(threads, joined=True)
    try:
        torch.set_num_threads(3)
        for times in range(1, 31):
            identifiers.clear()
            helpers.run(address(piece), 0, threads)
            assert len(identifiers) == threads
            assert threading.get_ident() in identifiers
            assert torch.get_num_threads() == 3
            assert numbers == [1] * threads * times
            # Closer and further apart than the threads look for work.
            time.sleep((times % 3) * 0.001)
    finally:
        torch.set_num_threads(1)
