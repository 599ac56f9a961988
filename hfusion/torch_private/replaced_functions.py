"""Functions of torch that are replaced while forward runs or is traced. For one thread at a time."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.hub
from torch.fx import interpreter

_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "lshift", "rlshift", "rshift", "rrshift", "and", "rand", "or", "ror", "xor", "rxor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min", "divmod", "rdivmod", "int_truediv"),
)
_SYMBOLS = (torch.SymInt, torch.SymFloat)
NUMBER_OPERATORS = tuple(
    dict.fromkeys(name for kind in _SYMBOLS for name in (f"__{o}__" for o in _OPERATORS) if name in vars(kind))
)
"""The methods by which Python computes with symbols of numbers."""


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: set these attributes of ``owner``, restore them at the end, and remove those it did not have."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
        # An interrupt may have come before some were set.
        for name in vars(owner).keys() & (values.keys() - before.keys()):
            delattr(owner, name)


def autograd_functions_replaced(apply: Callable[..., Any]) -> AbstractContextManager[None]:
    """Context manager: call ``apply(original, function, *args)`` whenever code applies a `torch.autograd.Function`."""
    original = vars(torch.autograd.Function)["apply"]

    def called(cls: type, *args: Any, **kwargs: Any) -> Any:
        return apply(original.__get__(None, cls), cls, *args, **kwargs)

    return replaced(torch.autograd.Function, {"apply": classmethod(called)})


def autograd_grad_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Context manager: wrap the function through which `torch.autograd.grad` calls the engine.

    Replacing ``grad`` would miss code that has already imported it, and torch documents no hook for it.
    """
    name = "_engine_run_backward"
    engine = getattr(torch.autograd, name, None)
    return replaced(torch.autograd, {} if engine is None else {name: wrap(engine)})


@contextmanager
def number_operators_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context manager: wrap the methods `NUMBER_OPERATORS`."""
    first, second = (
        {name: wrap(vars(kind)[name]) for name in NUMBER_OPERATORS if name in vars(kind)} for kind in _SYMBOLS
    )
    with replaced(_SYMBOLS[0], first), replaced(_SYMBOLS[1], second):
        yield


def torch_functions_replaced(
    names: tuple[str, ...], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Context manager: wrap each function ``torch.<name>`` that exists in the installed torch."""
    return replaced(torch, {name: wrap(name, getattr(torch, name)) for name in names if hasattr(torch, name)})


# Silence torch's tracers: errors are raised anyway. Filters of warnings and loggers belong to the process.

_hub: Any = torch.hub


@contextmanager
def silence_tracers() -> Iterator[None]:
    """Context manager: no warnings, no logs of torch up to level ERROR, no graphs printed on errors.

    For one thread at a time. To export inside, import ``torch.export._trace`` first, which torch does late.
    """
    # The import of the module takes long.
    exporter: Any = sys.modules.get("torch.export._trace", SimpleNamespace())
    loggers = [
        log
        for name, log in list(logging.root.manager.loggerDict.items())
        if name.partition(".")[0] == "torch" and isinstance(log, logging.Logger) and _drop not in log.filters
    ]
    for logger in loggers:
        logger.addFilter(_drop)
    # On a failure, export prints the graph in addition to raising the error.
    unprinted = replaced(exporter, {"print": lambda *values, **options: None})
    try:
        with unprinted, replaced(interpreter, {"tqdm": _bar}), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_drop)


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
