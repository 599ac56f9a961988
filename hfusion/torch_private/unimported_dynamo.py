"""Functions that torch hides from Dynamo, without the import of Dynamo, which takes a second.

Torch imports it at their first call. While nobody else has imported it, there is nothing to hide from.
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
    """Return a function of torch that hides from Dynamo only where Dynamo is there."""
    plain = inspect.unwrap(function)

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if is_dynamo_imported() else plain)(*args, **kwargs)

    return called


def sparing_dynamo(mode: ModeClass) -> ModeClass:
    """Decorate a class of modes, which torch hides from Dynamo when it is made."""
    dispatch: Any = without_dynamo(mode.__torch_dispatch__)
    mode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return mode
