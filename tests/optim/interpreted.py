"""The Triton kernels on the CPU, in Triton's interpreter."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

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
    clip._tables.cache_clear()


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
