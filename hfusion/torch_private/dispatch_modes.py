"""The stacks of modes that torch's dispatcher passes calls through, and the calls that skip them."""

from __future__ import annotations

import torch
from torch import overrides
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "PreDispatchMode",
    "disable_current_modes",
    "enable_python_dispatcher",
    "function_modes",
    "in_dispatch_mode",
    "no_dispatch",
    "replace_function_modes",
]


class PreDispatchMode(SchemaCheckMode):
    """A `TorchDispatchMode` that sees operators before torch decomposes them, as `torch.export` does.

    Of the modes that torch accepts there, the one that checks schemas is the base class that adds nothing else.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)


def in_dispatch_mode() -> bool:
    """Return whether a `TorchDispatchMode` is active in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def function_modes() -> list[TorchFunctionMode]:
    """Return the active `TorchFunctionMode` objects of this thread, the outermost first."""
    modes: list[TorchFunctionMode] = overrides._get_current_function_mode_stack()
    return modes


def replace_function_modes(modes: list[TorchFunctionMode]) -> None:
    """Make ``modes`` the active `TorchFunctionMode` objects of this thread."""
    for _ in function_modes():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)
