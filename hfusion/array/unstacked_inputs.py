"""Inputs that probably hold a batch for each member, and were not wrapped in `hfusion.stacked`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled

# Operators that compute each position of the leading dims alone: a batch of batches passes through them unnoticed.
_POSITION_WISE = frozenset(
    {
        "add",
        "celu",
        "div",
        "dropout",
        "elu",
        "gelu",
        "hardswish",
        "hardtanh",
        "layer_norm",
        "leaky_relu",
        "linear",
        "mish",
        "mul",
        "prelu",
        "relu",
        "relu_",
        "relu6",
        "rms_norm",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "sub",
        "tanh",
    }
)
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


@contextmanager
def hint_at_stacked(arguments: Arguments, members: int) -> Iterator[None]:
    """Context manager: add a note to errors of forward if every member was given a whole input ``[B, N, ...]``."""
    try:
        yield
    except Exception as error:
        for leaf in arguments.leaves:
            if _may_be_stacked(leaf, members):
                error.add_note(
                    f"Each of the {members} members was called with the whole input of shape {list(leaf.shape)}. If it "
                    "holds one batch per member, pass hf.stacked(x)."
                )
        raise


class UnstackedInputs:
    """Warns once of an input ``[B, N, F]`` of members that treat all its dims but the last alike, such as MLPs.

    For these a batch per member and a batch of B sequences look the same, and the second is rare. Members with other
    operators raise an error for the extra dim, or use it.
    """

    def __init__(self) -> None:
        self._warned = False

    def look(self, name: str, compiled: Compiled, arguments: Arguments, members: int) -> None:
        """Warn if an argument of a new program is such an input."""
        if self._warned or len(arguments.leaves) != 1 or not _may_be_stacked(arguments.leaves[0], members):
            return
        calls = [node.target for node in compiled.graph.nodes if node.op == "call_function"]
        names = {getattr(target, "overloadpacket", target).__name__ for target in calls}
        if "linear" in names and names <= _POSITION_WISE:
            self._warned = True
            shape = list(arguments.leaves[0].shape)
            warnings.warn(
                f"{name}: each of the {members} members sees the whole input of shape {shape}. If it holds one batch "
                "per member, pass hf.stacked(x). To pass one batch to all members, as here, ignore this warning.",
                stacklevel=_depth_of_caller(),
            )


def _may_be_stacked(leaf: object, members: int) -> bool:
    return members > 1 and isinstance(leaf, Tensor) and leaf.dim() > 2 and len(leaf) == members


def _depth_of_caller() -> int:
    """Return the ``stacklevel`` that blames the code that called hfusion, for the caller of this function."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        depth, frame = depth + 1, frame.f_back
    return depth
