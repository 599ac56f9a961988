"""Run torch's tracers without what they say: what matters of it is raised.

Only in the thread that traces. The filters of warnings and loggers are the process's, so ours tell threads apart.
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
    """Matches every warning, and drops every log up to errors, of threads that trace."""

    def __init__(self) -> None:
        super().__init__()
        self.here = threading.local()

    @property
    def active(self) -> bool:
        return getattr(self.here, "depth", 0) > 0

    def match(self, text: str) -> bool:
        """As a warning filter's pattern."""
        return self.active

    def filter(self, record: logging.LogRecord) -> bool:
        return not (self.active and record.levelno <= logging.ERROR)


_HUSH = _Hush()
_WARNINGS: Any = ("ignore", _HUSH, Warning, None, 0)
_LOCK = threading.Lock()
_silent_threads = 0


@contextmanager
def silence_tracers() -> Iterator[None]:
    """No warnings, no logs of torch's up to errors, and no graphs printed on errors, by this thread.

    Whoever exports inside imports ``torch.export._trace`` before, as torch does so at the first export only.
    """
    global _silent_threads
    with _LOCK:
        _silent_threads += 1
        _install()
    _HUSH.here.depth = getattr(_HUSH.here, "depth", 0) + 1
    try:
        yield
    finally:
        _HUSH.here.depth -= 1
        with _LOCK:
            _silent_threads -= 1
            if not _silent_threads:
                _remove()


class _Notes(type):
    """A class of warnings that those of one thread and ``category`` seem to derive from, and the texts of these.

    Python asks a filter for the text first, then for the class, whatever the answer was.
    """

    thread: int
    category: type[Warning]
    texts: list[str]
    last: str

    @staticmethod
    def of(category: type[Warning]) -> _Notes:
        return _Notes("_Noted", (), {"thread": threading.get_ident(), "category": category, "texts": [], "last": ""})

    def match(cls, text: str) -> bool:
        """As a warning filter's pattern."""
        here = threading.get_ident() == cls.thread
        if here:
            cls.last = text
        return here

    def __subclasscheck__(cls, category: type) -> bool:
        wanted = threading.get_ident() == cls.thread and issubclass(category, cls.category)
        if wanted:
            cls.texts.append(cls.last)
        return wanted


class _Never(Warning):
    """A warning category that no code raises."""


@contextmanager
def noted(category: type[Warning]) -> Iterator[list[str]]:
    """The texts of this thread's warnings of ``category``, which are not shown.

    `warnings.catch_warnings` would take those of all threads, and forget the filters that these set meanwhile.
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
    # The list is another one inside warnings.catch_warnings. One that is left behind there is silent.
    if not warnings.filters or warnings.filters[0] is not _WARNINGS:
        warnings.filters.insert(0, _WARNINGS)  # type: ignore[attr-defined]
    for logger in _loggers():
        if _HUSH not in logger.filters:
            logger.addFilter(_HUSH)
    # Export prints the graph of a failure, which is raised all the same.
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
    """Return the names in the module that prints; none before it is imported, which takes as long as a short sweep."""
    module = sys.modules.get("torch.export._trace")
    return {} if module is None else vars(module)


def _loggers() -> list[logging.Logger]:
    found = list(logging.root.manager.loggerDict.items())
    return [log for name, log in found if name.partition(".")[0] == "torch" and isinstance(log, logging.Logger)]


def _bar(*args: Any, **options: Any) -> Any:
    """A progress bar of torch's interpreter, where it is to be seen.

    Any other starts a thread, too, ``tqdm_monitor``, which never ends.
    """
    return (_hub._Faketqdm if options.get("disable") else _hub.tqdm)(*args, **options)


def _print(*values: Any, **options: Any) -> None:
    if not _HUSH.active:
        print(*values, **options)
