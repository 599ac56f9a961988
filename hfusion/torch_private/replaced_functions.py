"""Functions of torch that are replaced while forward runs or is traced. For one thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

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
    """Context manager: set these attributes of ``owner``, and restore them at the end."""
    before = {name: vars(owner)[name] for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def autograd_functions_replaced(apply: Callable[..., Any]) -> Iterator[None]:
    """Context manager: call ``apply(original, function, *args)`` whenever code applies a `torch.autograd.Function`."""
    original = vars(torch.autograd.Function)["apply"]

    def called(cls: type, *args: Any, **kwargs: Any) -> Any:
        return apply(original.__get__(None, cls), cls, *args, **kwargs)

    with replaced(torch.autograd.Function, {"apply": classmethod(called)}):
        yield


@contextmanager
def autograd_grad_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context manager: wrap the function through which `torch.autograd.grad` calls the engine.

    Replacing ``grad`` would miss code that has already imported it, and torch documents no hook for it.
    """
    name = "_engine_run_backward"
    engine = getattr(torch.autograd, name, None)
    with replaced(torch.autograd, {} if engine is None else {name: wrap(engine)}):
        yield


@contextmanager
def number_operators_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context manager: wrap the methods `NUMBER_OPERATORS`."""
    first, second = (
        {name: wrap(vars(kind)[name]) for name in NUMBER_OPERATORS if name in vars(kind)} for kind in _SYMBOLS
    )
    with replaced(_SYMBOLS[0], first), replaced(_SYMBOLS[1], second):
        yield


@contextmanager
def torch_functions_replaced(
    names: tuple[str, ...], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Context manager: wrap each function ``torch.<name>`` that exists in the installed torch."""
    with replaced(torch, {name: wrap(name, getattr(torch, name)) for name in names if hasattr(torch, name)}):
        yield
