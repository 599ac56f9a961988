"""Silence torch's tracers: errors are raised anyway. Filters of warnings and loggers belong to the process."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.hub
from torch.fx import interpreter

_hub: Any = torch.hub
_interpreter: Any = interpreter


@contextmanager
def silence_tracers() -> Iterator[None]:
    """Context manager: no warnings, no logs of torch up to level ERROR, no graphs printed on errors.

    For one thread at a time. To export inside, import ``torch.export._trace`` first, which torch does late.
    """
    # A new dict if the module is not imported: its import takes long.
    exporter = vars(sys.modules["torch.export._trace"]) if "torch.export._trace" in sys.modules else {}
    named_loggers = list(logging.root.manager.loggerDict.items())
    loggers = [
        log
        for name, log in named_loggers
        if name.partition(".")[0] == "torch" and isinstance(log, logging.Logger) and _drop not in log.filters
    ]
    before = exporter.get("print"), _interpreter.tqdm
    for logger in loggers:
        logger.addFilter(_drop)
    # On a failure, export prints the graph in addition to raising the error.
    exporter["print"], _interpreter.tqdm = _nothing, _bar
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_drop)
        exporter["print"], _interpreter.tqdm = before
        if before[0] is None:
            del exporter["print"]


@contextmanager
def noted(category: type[Warning]) -> Iterator[list[str]]:
    """Context manager: collect the texts of warnings of ``category`` in a list, and show only the others."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield texts
    for warning in caught:
        if issubclass(warning.category, category):
            texts.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _drop(record: logging.LogRecord) -> bool:
    """Drop logs up to level ERROR."""
    return record.levelno > logging.ERROR


def _bar(*args: Any, **options: Any) -> Any:
    """Return a progress bar of torch's interpreter, or a fake if it is disabled.

    Even a disabled bar of tqdm would start a thread, ``tqdm_monitor``, which never ends.
    """
    return (_hub._Faketqdm if options.get("disable") else _hub.tqdm)(*args, **options)


def _nothing(*values: Any, **options: Any) -> None:
    """Print nothing."""
