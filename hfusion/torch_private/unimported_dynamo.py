"""Call functions that torch hides from Dynamo without importing Dynamo, which takes a second.

Torch imports Dynamo at their first call. As long as nothing else has imported it, there is nothing to hide from.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

ModeClass = TypeVar("ModeClass", bound=type[TorchDispatchMode])


def is_dynamo_imported() -> bool:
    return "torch._dynamo" in sys.modules


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of a torch function that hides from Dynamo only if Dynamo is imported."""
    plain = inspect.unwrap(function)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if is_dynamo_imported() else plain)(*args, **kwargs)

    return called


def sparing_dynamo(mode: ModeClass) -> ModeClass:
    """Class decorator for modes, whose methods torch hides from Dynamo when the class is created."""
    dispatch: Any = without_dynamo(mode.__torch_dispatch__)
    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return mode
