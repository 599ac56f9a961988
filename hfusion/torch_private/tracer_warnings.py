"""Silence torch's tracers: errors are raised anyway.

Only the thread that traces is silenced. Filters of warnings and loggers apply to the process, so ours check the thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.hub
from torch.fx import interpreter

_hub: Any = torch.hub
_interpreter: Any = interpreter


class _Hush(logging.Filter):
    """A filter that matches all warnings and drops logs up to level ERROR, in threads that trace."""

    def __init__(self) -> None:
        super().__init__()
        self.thread_state = threading.local()

    @property
    def active(self) -> bool:
        return getattr(self.thread_state, "depth", 0) > 0

    def match(self, text: str) -> bool:
        """Match every warning while the thread traces, as the pattern of a warning filter."""
        return self.active

    def filter(self, record: logging.LogRecord) -> bool:
        return not (self.active and record.levelno <= logging.ERROR)


_HUSH = _Hush()
_WARNINGS: Any = ("ignore", _HUSH, Warning, None, 0)
_LOCK = threading.Lock()
_silent_threads = 0


@contextmanager
def silence_tracers() -> Iterator[None]:
    """Context manager: no warnings, torch logs up to level ERROR, or graphs printed on errors, from this thread.

    To export inside, import ``torch.export._trace`` first: torch imports it only at the first export.
    """
    global _silent_threads
    with _LOCK:
        _silent_threads += 1
        _install()
    _HUSH.thread_state.depth = getattr(_HUSH.thread_state, "depth", 0) + 1
    try:
        yield
    finally:
        _HUSH.thread_state.depth -= 1
        with _LOCK:
            _silent_threads -= 1
            if not _silent_threads:
                _remove()


class _Notes(type):
    """Metaclass of a warning filter that collects the texts of warnings of ``category`` in one thread.

    Python matches a filter's text first, then its class, whether the text matched or not.
    """

    thread: int
    category: type[Warning]
    texts: list[str]
    last: str

    @staticmethod
    def of(category: type[Warning]) -> _Notes:
        return _Notes("_Noted", (), {"thread": threading.get_ident(), "category": category, "texts": [], "last": ""})

    def match(cls, text: str) -> bool:
        """Match every warning while the thread traces, as the pattern of a warning filter."""
        is_own_thread = threading.get_ident() == cls.thread
        if is_own_thread:
            cls.last = text
        return is_own_thread

    def __subclasscheck__(cls, category: type) -> bool:
        matches = threading.get_ident() == cls.thread and issubclass(category, cls.category)
        if matches:
            cls.texts.append(cls.last)
        return matches


class _Never(Warning):
    """A warning category that no code raises."""


@contextmanager
def noted(category: type[Warning]) -> Iterator[list[str]]:
    """Context manager: collect the texts of this thread's warnings of ``category`` in a list, and do not show them.

    `warnings.catch_warnings` would catch warnings of all threads, and drop filters that other threads set meanwhile.
    """
    notes = _Notes.of(category)
    entry: Any = ("ignore", notes, notes, None, 0)
    with _LOCK:
        # Python caches the filters' decision per code location until this call invalidates it.
        warnings.simplefilter("ignore", _Never)
        warnings.filters[:1] = [entry]  # type: ignore[index]
    try:
        yield notes.texts
    finally:
        with _LOCK:
            if entry in warnings.filters:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]


def _install() -> None:
    # Inside warnings.catch_warnings the list is another one. A filter that stays in it has no effect later.
    if not warnings.filters or warnings.filters[0] is not _WARNINGS:
        warnings.filters.insert(0, _WARNINGS)  # type: ignore[attr-defined]
    for logger in _loggers():
        if _HUSH not in logger.filters:
            logger.addFilter(_HUSH)
    # On a failure, export prints the graph in addition to raising the error.
    _exporter()["print"] = _print
    _interpreter.tqdm = _bar


def _remove() -> None:
    while _WARNINGS in warnings.filters:
        warnings.filters.remove(_WARNINGS)  # type: ignore[attr-defined]
    for logger in _loggers():
        logger.removeFilter(_HUSH)
    _exporter().pop("print", None)
    _interpreter.tqdm = _hub.tqdm


def _exporter() -> dict[str, Any]:
    """Return the globals of the module that prints; empty if it is not imported: the import takes long."""
    module = sys.modules.get("torch.export._trace")
    return {} if module is None else vars(module)


def _loggers() -> list[logging.Logger]:
    named_loggers = list(logging.root.manager.loggerDict.items())
    return [log for name, log in named_loggers if name.partition(".")[0] == "torch" and isinstance(log, logging.Logger)]


def _bar(*args: Any, **options: Any) -> Any:
    """Return a progress bar of torch's interpreter, or a fake if it is disabled.

    Even a disabled bar of tqdm would start a thread, ``tqdm_monitor``, which never ends.
    """
    return (_hub._Faketqdm if options.get("disable") else _hub.tqdm)(*args, **options)


def _print(*values: Any, **options: Any) -> None:
    if not _HUSH.active:
        print(*values, **options)
