"""The modes that torch's dispatcher passes calls through, the calls that skip them, and tensors without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, overrides
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "PreDispatchMode",
    "UnsupportedFakeTensorException",
    "detect_fake_mode",
    "disable_current_modes",
    "enable_python_dispatcher",
    "enter_autocast",
    "exit_autocast",
    "function_modes",
    "in_dispatch_mode",
    "is_any_autocast_enabled",
    "no_dispatch",
    "replace_function_modes",
    "with_dynamic_dims",
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


# Autocast: whether it is on for any device, and the calls that enter and leave it in exported graphs.


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is on for devices of any type in this thread."""
    return torch._C._is_any_autocast_enabled()


# Tensors without values, by which torch infers shapes.


def with_dynamic_dims(mode: FakeTensorMode, tensor: Tensor, dynamic: Sequence[bool], name: str) -> Tensor:
    """Return the fake tensor of ``tensor``, whose sizes are symbols at the dims that are ``dynamic``.

    Args:
        mode: the mode of the fake tensor, which has a ``shape_env``.
        tensor: a tensor with values, whose sizes are the hints of the symbols.
        dynamic: for each dim, whether its size is a symbol.
        name: the source of the symbols in guards.
    """
    # Imported late: the first import of Dynamo takes a second.
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DYNAMIC if is_dynamic else DimDynamic.STATIC for is_dynamic in dynamic]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))
