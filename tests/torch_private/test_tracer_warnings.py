"""Tracers are silent, and leave the process as it was."""

from __future__ import annotations

import logging
import warnings

import pytest

from hfusion.torch_private.replaced_functions import noted, silence_tracers


def speak() -> None:
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("torch.export").error("a log of torch's")
    logging.getLogger("mine").warning("a log of mine")


def test_only_torch_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    before = list(warnings.filters), list(logging.getLogger("torch").filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with silence_tracers():
            with silence_tracers():
                speak()
            speak()
            assert not heard
            assert caplog.messages == ["a log of mine"] * 2
        speak()
        assert len(heard) == 1
    assert caplog.messages.count("a log of torch's") == 1
    assert logging.root.manager.disable == 0
    assert (list(warnings.filters), list(logging.getLogger("torch").filters)) == before


def test_warnings_are_noted_of_one_kind() -> None:
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with noted(UserWarning) as texts:
            for text in ("one", "one", "two"):
                warnings.warn(text, stacklevel=1)
            warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert texts == ["one", "one", "two"]
    assert [str(warning.message) for warning in heard] == ["old"]
    assert list(warnings.filters) == before
