"""A thread that is quiet silences itself only, and leaves the process as it was."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable

import pytest

from hfusion.torch_private.tracer_warnings import noted, silence_tracers


def in_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def speak() -> None:
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("torch.export").error("a log of torch's")
    logging.getLogger("mine").warning("a log of mine")


def test_only_its_own_thread_and_torch(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with silence_tracers():
            speak()
            assert not heard
            assert caplog.messages == ["a log of mine"]
            in_thread(speak)
            assert len(heard) == 1
        speak()
        assert len(heard) == 2
    assert caplog.messages.count("a log of mine") == 3
    assert logging.root.manager.disable == 0


def test_warnings_are_noted_of_one_thread_and_kind() -> None:
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with noted(UserWarning) as texts:
            for text in ("one", "one", "two"):
                warnings.warn(text, stacklevel=1)
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            in_thread(lambda: warnings.warn("elsewhere", stacklevel=1))
        assert not any(getattr(entry[1], "texts", ()) for entry in warnings.filters)
    assert texts == ["one", "one", "two"]
    assert [str(warning.message) for warning in heard] == ["old", "elsewhere"]
    assert list(warnings.filters) == before
