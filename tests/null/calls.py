"""The calls that the null CUDA device counts: launches, replays of graphs, waits of the host.

The device is torch's own CUDA build over a CUDA runtime and driver that compute nothing. Dispatch, allocation, streams,
graph capture, Inductor, Triton's launcher and ptxas are real; what kernels would compute is not.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

import hfusion as hf
from hfusion.core import memory
from hfusion.core.membership import Membership, mark
from hfusion.step import compiled_step

FOLDER = "HFUSION_NULL_CUDA"
"""The environment variable that names the folder in which the device was built."""
REFUSED_CALLS = "HFUSION_NULL_REFUSED"
"""The environment variable that names the folder in which processes leave the calls that were refused."""
_LAUNCHES = ("kernel ", "triton ", "cublas", "cudnn", "memset", "memcpy")
_REFUSED = ("BAD", "REFUSED", "DEFAULT")
_ROOM = 1 << 24


def absence() -> str:
    """Return why the device is not there, empty where it is."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return f"needs the null CUDA device: see CONTRIBUTING.md; {FOLDER} is not set"
    if str(Path(folder) / "libnullcuda.so") not in os.environ.get("LD_PRELOAD", "").split(":"):
        return f"needs the null CUDA device of {FOLDER}={folder}: start Python with tests/null/run.sh, which loads it"
    if torch.version.cuda is None:
        return f"needs torch's CUDA build, torch {torch.__version__} is another"
    return ""


@dataclass(frozen=True)
class Calls:
    """The calls of a step to the device, each as a number per step.

    ``launches``: of kernels, library calls, copies and fills outside of graphs. ``graphs``: replays. ``waits``: of the
    host for the device. ``pageable``: copies of memory that is not pinned. ``refused``: calls that fail on a real
    device, such as those forbidden in capture.
    """

    launches: float
    graphs: float
    waits: float
    pageable: float = 0
    refused: tuple[str, ...] = ()


def calls_per_step(step: Callable[[], object], warm: int = 6, steps: int = 2) -> Calls:
    """Return the calls of a step, of which ``warm`` are made before any is counted. Calls refused in them count."""
    reset()
    for _ in range(warm):
        step()
    refused = since_reset().refused
    reset()
    for _ in range(steps):
        step()
    calls = since_reset(steps)
    return replace(calls, refused=tuple(dict.fromkeys((*refused, *calls.refused))))


def reset() -> None:
    """Count from zero."""
    _library().null_reset()


def since_reset(steps: int = 1) -> Calls:
    """Return what was called since `reset`, by ``steps``."""
    counts = by_name()

    pageable = sum(count for name, count in counts.items() if "memcpy" in name and "pageable" in name) / steps

    def total(*starts: str) -> float:
        return sum(count for name, count in counts.items() if name.startswith(starts)) / steps

    refused = tuple(name for name in counts if name.startswith(_REFUSED))
    return Calls(total(*_LAUNCHES), total("graph launch"), total("SYNC"), pageable, refused)


def by_name() -> dict[str, int]:
    """Return every call since `reset` with its count."""
    text = ctypes.create_string_buffer(_ROOM)
    _library().null_report(text, _ROOM)
    lines = (line.split("\t", 1) for line in text.value.decode().splitlines())
    return {name: int(count) for count, name in lines}


def compare_as_equal() -> torch.library.Library:
    """Let comparisons on the device say that all is equal, so that self-checks pass where nothing is computed.

    They hold as long as the result is alive. Attention does without cuDNN, whose graphs are planned by a device.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    equal = torch.equal
    torch.equal = lambda input, other: input.is_cuda or other.is_cuda or equal(input, other)
    distance = memory.distance
    memory.distance = lambda actual, expected: 0.0 if actual.is_cuda else distance(actual, expected)
    # Results of compiled steps are compared in host memory if the plan leaves too little on the device.
    compiled_step.distance = lambda actual, expected: 0.0

    def filled(a: Tensor, b: Tensor, value: bool) -> Tensor:
        # No wait, as the kernel would cause none.
        numbers = torch.full(torch.broadcast_shapes(a.shape, b.shape), value).pin_memory()
        return numbers.to(a.device, non_blocking=True)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of kernels that are replaced.
        warnings.simplefilter("ignore")
        library.impl("eq.Tensor", lambda a, b: filled(a, b, True), "CUDA")
        library.impl("ne.Tensor", lambda a, b: filled(a, b, False), "CUDA")
        library.impl("bitwise_or.Tensor", lambda a, b: (a.cpu() | b.cpu()).to(a.device), "CUDA")
        library.impl("all", lambda a: a.cpu().all().to(a.device), "CUDA")
        library.impl("any", lambda a: a.cpu().any().to(a.device), "CUDA")
    return library


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(os.environ[FOLDER]) / "libnullcuda.so"))
    library.null_report.restype = ctypes.c_long
    return library


# Parameters of an array on the null CUDA device.

MEMBERS, TENSORS = 16, 60
"""Of the optimizers that are counted."""


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Return ``TENSORS`` stacks of matrices, each with a gradient."""
    stacks = [
        mark(Parameter(torch.zeros(MEMBERS, 8, 6, dtype=dtype, device="cuda")), Membership(f"p{index}", MEMBERS, True))
        for index in range(TENSORS)
    ]
    for stack in stacks:
        stack.grad = torch.zeros_like(stack)
    return stacks


def move(tensors: list[Parameter]) -> None:
    """Let parameters lie elsewhere."""
    for tensor in tensors:
        tensor.data = tensor.data.clone()


def rates() -> list[float]:
    """Return a learning rate for each member."""
    return [0.1 / (1 + member) for member in range(MEMBERS)]


def optimizer(name: str, stacks: list[Parameter], master_weights: bool = False) -> hf.optim.FusedOptimizer:
    """Return the optimizer of this name, with a learning rate per member."""
    kind: Callable[..., hf.optim.FusedOptimizer] = getattr(hf.optim, name)
    return kind(stacks, lr=rates(), master_weights=master_weights)


def losses_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of one member."""
    return torch.nn.functional.cross_entropy(output, target)
