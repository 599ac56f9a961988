"""Silence torch's tracers: errors are raised anyway. Filters of warnings and loggers belong to the process."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.hub
from torch.fx import interpreter

_hub: Any = torch.hub
_interpreter: Any = interpreter
# What `warnings.catch_warnings` replaces belongs to the process.
_CATCHING = threading.RLock()
# How many uses of `silence_tracers` have begun and not ended.
_silent, _LOCK = 0, threading.Lock()


def _drop(record: logging.LogRecord) -> bool:
    """Drop logs up to level ERROR."""
    return record.levelno > logging.ERROR


@contextmanager
def warnings_ignored() -> Iterator[None]:
    """Context manager: show no warnings.

    `warnings.catch_warnings` would restore the wrong filters where several threads enter and leave in turn.
    """
    entry: Any = ("ignore", None, Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # Inside warnings.catch_warnings the list may be another one.
        with suppress(ValueError):
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


@contextmanager
def silence_tracers() -> Iterator[None]:
    """Context manager: no warnings, torch logs up to level ERROR, or graphs printed on errors.

    To export inside, import ``torch.export._trace`` first: torch imports it only at the first export.
    """
    global _silent
    with warnings_ignored():
        with _LOCK:
            _silent += 1
            _silence()
        try:
            yield
        finally:
            with _LOCK:
                _silent -= 1
                if not _silent:
                    _speak()


@contextmanager
def noted(category: type[Warning]) -> Iterator[list[str]]:
    """Context manager: collect the texts of warnings of ``category`` in a list, and show only the others."""
    texts: list[str] = []
    with _CATCHING, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(warning.message) for warning in caught if issubclass(warning.category, category)]
    for warning in caught:
        if not issubclass(warning.category, category):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _silence() -> None:
    for logger in _loggers():
        logger.addFilter(_drop)
    # On a failure, export prints the graph in addition to raising the error.
    _exporter()["print"], _interpreter.tqdm = _nothing, _bar


def _speak() -> None:
    for logger in _loggers():
        logger.removeFilter(_drop)
    _exporter().pop("print", None)
    _interpreter.tqdm = _hub.tqdm


def _exporter() -> dict[str, Any]:
    """Return the globals of the module that prints; a new dict if it is not imported: the import takes long."""
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


def _nothing(*values: Any, **options: Any) -> None:
    """Print nothing."""
