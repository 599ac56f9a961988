"""Numbers that forward reads out of tensors while it is traced: Python must not compute with them.

A trace knows the number of a `Tensor.item` as a symbol. Conditions on symbols that torch can decide without a value,
such as ``v != v`` and ``v * 0 == 0``, leave no trace in the graph, though a NaN decides them otherwise; and a symbol's
text is its name. So what reads a number that no graph can hold is refused where it happens, and runs as members' code.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import SymFloat, SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hfusion.core.errors import FusionError

# Reads of values that give no symbol, and the Python functions of torch that read a value and format it.
_TEXTS = frozenset({Tensor.__repr__, Tensor.__format__})
_NUMBERS = frozenset({Tensor.item, Tensor.tolist})
STRIDE_QUESTIONS = frozenset({"stride", "is_contiguous", "dim_order"})
"""The names of methods of tensors that tell how a tensor lies in memory."""
_STRIDES = frozenset(getattr(Tensor, name) for name in STRIDE_QUESTIONS)
_MEMORY = frozenset({Tensor.storage_offset, Tensor.untyped_storage, Tensor.storage, Tensor.storage_type})
# Modules between the code that calls a function of torch and a mode; and those that trace. Tried on torch 2.13.
_BETWEEN = frozenset({"torch.overrides", "torch._tensor", "torch._subclasses.fake_tensor"})
_TRACERS = ("torch._", "torch.fx", "torch.export", "torch.utils._", "hfusion.")


class _Symbol:
    """A symbol that may be kept, as in an attribute for a log, but not computed with: each use needs its ``node``."""

    def __init__(self, number: SymInt | SymFloat, source: str) -> None:
        vars(self)["source"] = source

    @property
    def node(self) -> NoReturn:
        raise FusionError(
            f"{self.source} reads a number out of a tensor, by item() or tolist(), and computes with it in Python; "  # type: ignore[attr-defined]
            "values differ between members and calls, so compute with the tensor, such as by torch.where"
        )


class _Float(_Symbol, SymFloat):
    __class__ = float  # type: ignore[assignment]


class _Int(_Symbol, SymInt):
    __class__ = int  # type: ignore[assignment]


def _unreadable(number: Any, source: str) -> Any:
    """``number`` as something that raises a FusionError when it is computed with; numbers that are known, unchanged."""
    if isinstance(number, SymFloat):
        return _Float(number, source)
    if isinstance(number, SymInt):
        return _Int(number, source)
    if isinstance(number, torch.SymBool):
        # ``is True`` cannot be seen.
        raise _refusal(source, "the truth of a value")
    return number


def _refusal(source: str, what: str) -> FusionError:
    return FusionError(
        f"{source} reads {what} of a tensor in Python, which differs between members and calls; compute with the "
        "tensor, such as by torch.where"
    )


class PythonReads(TorchFunctionMode):
    """While a forward is traced, numbers and texts of tensors' values are refused where Python uses them.

    ``tensor.data`` is read as ``tensor.detach()``: of the former an export knows not what it is computed from.

    Attributes:
        asked_strides: whether forward has asked how a tensor lies in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked_strides = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func in _TEXTS and _has_no_value(args[0]) and (source := _source()) is not None:
            raise _refusal(source, "the text")
        if func in _MEMORY and (source := _source()) is not None:
            raise FusionError(f"{source} asks for the memory of a tensor ({func.__name__}), which a graph has not")
        if func in _STRIDES and not self.asked_strides:
            self.asked_strides = _source() is not None
        result = func(*args, **(kwargs or {}))
        if func in _NUMBERS and (source := _source()) is not None:
            return pytree.tree_map(lambda number: _unreadable(number, source), result)
        return result


# What an array cannot answer as a member alone would, with what to do instead: of any tensor, of a tensor that forward
# is given or has registered, and of such an input that needs a gradient.
_OF_ANY = {
    "_version": "keep a count in a buffer",
    "_is_view": "clone what must be no view",
    "_base": "clone what must be no view",
}
_OF_OWN = {
    "grad": "give forward what it needs of gradients as an argument, or in a buffer",
    "is_inference": "ask torch.is_inference_mode_enabled()",
}
_OF_INPUTS = dict.fromkeys(("is_leaf", "grad_fn", "retains_grad"), "ask requires_grad")
UNANSWERABLE = frozenset({*_OF_ANY, *_OF_OWN, *_OF_INPUTS})
"""The names of attributes and methods of tensors of which `RefusedReads` refuses some reads."""


class RefusedReads(TorchFunctionMode):
    """While a forward runs, raise a FusionError where it asks of tensors what differs in an array.

    Args:
        own: the tensors that forward is given and has registered.
        restrided: whether some of these lie otherwise in memory than the original's did, and so what follows.
    """

    def __init__(self, own: Collection[Tensor], restrided: bool) -> None:
        super().__init__()
        self._own, self._restrided = own, restrided

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        getter = func.__name__ == "__get__"
        name = func.__self__.__name__ if getter else func.__name__
        if (
            (name in UNANSWERABLE or name in STRIDE_QUESTIONS)
            and (remedy := self._remedy(name, args[0]))
            and (source := _source()) is not None
        ):
            raise FusionError(
                f"{source} reads {name} of a tensor of shape {tuple(args[0].shape)}, which a member of an array, whose "
                f"tensors are rows of stacks, has otherwise than alone; {remedy}"
            )
        return func(*args, **(kwargs or {}))

    def _remedy(self, name: str, tensor: Tensor) -> str | None:
        if name in STRIDE_QUESTIONS:
            remedy = "convert the models by .to(memory_format=torch.contiguous_format) before fusing"
            return remedy if self._restrided else None
        if name in _OF_ANY:
            return _OF_ANY[name]
        if not any(tensor is held for held in self._own):
            return None
        if name in _OF_OWN:
            return _OF_OWN[name]
        return _OF_INPUTS[name] if tensor.requires_grad and not isinstance(tensor, nn.Parameter) else None


def _has_no_value(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _source() -> str | None:
    """``file.py:12``, where forward calls the function that is intercepted; None if a tracer of torch calls it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    if frame is None or str(frame.f_globals.get("__name__")).startswith(_TRACERS):
        return None
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _passes_on(frame: FrameType) -> bool:
    """Whether a frame is one of those between a call of a function of torch and the modes that intercept it."""
    module = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_name == "__torch_function__" or module in _BETWEEN
