"""What is recorded is kept by its kind, up to a count, and given up where tensors move on, or it cannot be recorded."""

from __future__ import annotations

from hfusion.device.recordings import MAX_MOVES, MAX_RECORDED, Recordings


def test_each_kind_is_recorded_once_up_to_a_count() -> None:
    kept = Recordings[int]()
    for kind in range(MAX_RECORDED):
        assert not kept.full
        assert kept.get(kind) is None
        assert kept.add(kind, lambda kind=kind: kind * 10) == kind * 10  # type: ignore[misc]
    assert kept.full
    assert [kept.get(kind) for kind in range(MAX_RECORDED)] == [kind * 10 for kind in range(MAX_RECORDED)]


def test_tensors_that_move_again_and_again_are_recorded_no_more() -> None:
    kept = Recordings[int]()
    # Nothing is lost by a move before anything is recorded.
    kept.forget()
    for move in range(MAX_MOVES):
        assert not kept.why
        kept.add("kind", lambda: 1)
        kept.forget()
        assert kept.get("kind") is None, move
    assert kept.why == f"its tensors have moved {MAX_MOVES} times"


def test_an_error_ends_recording_and_says_its_first_line() -> None:
    kept = Recordings[int]()
    kept.add("kind", lambda: 1)

    def fails() -> int:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    assert kept.add("other", fails) is None
    assert kept.why == "RuntimeError: operation not permitted"
    assert not kept
