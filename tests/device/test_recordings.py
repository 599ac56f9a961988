"""Recordings are kept by kind, up to a count, and given up if tensors keep moving or work cannot be recorded."""

from __future__ import annotations

from hfusion.device.recordings import MAX_MOVES, MAX_RECORDED, Recordings


def test_each_kind_is_recorded_once_up_to_a_count() -> None:
    recordings = Recordings[int]()
    for kind in range(MAX_RECORDED):
        assert not recordings.full
        assert recordings.get(kind) is None
        assert recordings.add(kind, lambda kind=kind: kind * 10) == kind * 10  # type: ignore[misc]
    assert recordings.full
    assert [recordings.get(kind) for kind in range(MAX_RECORDED)] == [kind * 10 for kind in range(MAX_RECORDED)]


def test_tensors_that_move_again_and_again_are_recorded_no_more() -> None:
    recordings = Recordings[int]()
    # Nothing is lost by a move before anything is recorded.
    recordings.forget()
    for move in range(MAX_MOVES):
        assert not recordings.why
        recordings.add("kind", lambda: 1)
        recordings.forget()
        assert recordings.get("kind") is None, move
    assert recordings.why == f"its tensors have moved {MAX_MOVES} times"


def test_an_error_ends_recording_and_says_its_first_line() -> None:
    recordings = Recordings[int]()
    recordings.add("kind", lambda: 1)

    def fails() -> int:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    assert recordings.add("other", fails) is None
    assert recordings.why == "RuntimeError: operation not permitted"
    assert not recordings
