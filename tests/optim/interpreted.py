"""The Triton kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hfusion.optim import clip, gpu, group


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Let optimizers step and clip tensors on the CPU by the Triton kernels. Call `forget` afterwards."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    patch.delenv("HFUSION_NATIVE", raising=False)
    patch.setenv("TRITON_INTERPRET", "1")
    patch.setattr(group, "KERNELS", {"cpu": gpu.plan})
    patch.setattr(clip, "EACH_ALONE", ())
    # Those of Triton's language that are written in it were compiled when it was imported, which may be long ago.
    patch.setattr(tl, "sum", lambda value: tl.reduce(value, None, tl.standard._sum_combine))
    patch.setattr(tl, "max", lambda value: tl.reduce(value, None, tl.standard._elementwise_max))
    patch.setattr(InterpreterBuilder, "cast_impl", _rounding(InterpreterBuilder.cast_impl))
    forget()


def forget() -> None:
    """Import the kernels again: what is imported is interpreted or compiled for good."""
    sys.modules.pop("hfusion.optim.triton_kernels", None)
    gpu._loaded.cache_clear()
    gpu.generated.cache_clear()
    gpu.cached_tables.cache_clear()


def _rounding(cast: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even, as GPUs do; the interpreter truncates (Triton 3.6, 3.9)."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    return cast_impl


# A stand-in for CUDA graphs on a CPU: it records operators with the tensors they read and write, and replays them.


class _Taping(TorchDispatchMode):
    """Runs operators, and notes them and what lay before where they write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (tensor, _bytes(tensor).clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _tensors(result)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class Tape:
    """A `hfusion.device.backend.Recorder`. ``made``: how often it recorded, ``replayed``: how often that was done."""

    recording = False

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        taped = _Taping()
        try:
            with taped:
                result = work()
        finally:
            # Nothing is done while it is recorded.
            for tensor, before in taped.before.values():
                _bytes(tensor).copy_(before)
        self.made += 1

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, wrote in taped.calls:
                for target, output in zip(wrote, _tensors(func(*args, **kwargs)), strict=True):
                    if target.data_ptr() != output.data_ptr():
                        target.copy_(output)

        return replay, result


class Closure(Tape):
    """For kernels that are no operators of torch: recorded is which are called."""

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        self.made += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay, None
