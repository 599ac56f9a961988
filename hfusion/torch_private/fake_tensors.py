"""Tensors without values, by which torch infers shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "detect_fake_mode",
    "with_dynamic_dims",
]


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
