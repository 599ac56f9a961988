"""The kernels of ``kernels.c``: compiled once by the machine's own compiler, kept in the user's cache, loaded.

Where that does not work, the optimizers run torch's kernels row by row (``rows.py``) and are only slower.
The environment variable ``HFUSION_NATIVE=0`` chooses that way; ``CC`` names the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from hfusion.machine import cache_folder
from hfusion.optim.settings import Settings

Kernel: TypeAlias = Callable[..., int]

SOURCE = Path(__file__).with_name("kernels.c")

# Without contraction a vector and what is left over at its end round alike. The two -fno- only spare what
# nobody here looks at, errno and traps; the arithmetic stays that of IEEE 754.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Not every compiler has both.
_EXTRAS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
_SECONDS = 60
_TYPES = {torch.float32: "float", torch.float64: "double"}
_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def library() -> ctypes.CDLL | str:
    """The loaded kernels, or in words why there are none. Compiles at most once in a process."""
    if os.environ.get("HFUSION_NATIVE") == "0":
        return "HFUSION_NATIVE=0"
    return _loaded()


def kernel(name: str, dtype: torch.dtype) -> Kernel | None:
    """The kernel ``name`` for tensors of ``dtype`` (float32 or float64) on the CPU, or None without a library."""
    found = library()
    if isinstance(found, str):
        return None
    made: Kernel = found[f"{name}_{_TYPES[dtype]}"]
    # params ... counts are addresses, the other arguments numbers (kernels.c).
    made.argtypes = [*[_INTEGER] * 3, *[_POINTER] * 6, *[_INTEGER] * 2]  # type: ignore[attr-defined]
    return made


class Plan:
    """The arguments of ``kernel`` that stay from step to step.

    ``stacks``: the parameters, then each state buffer; each a list of contiguous tensors ``[members, ...]``
    of one dtype on the CPU, which the caller keeps alive.
    """

    def __init__(self, kernel: Kernel, stacks: Sequence[Sequence[Tensor]]) -> None:
        params, *state = stacks
        self._kernel = kernel
        self._members = len(params[0])
        self._sizes = array("q", [param.numel() // self._members for param in params])
        self._addresses = [_addresses(params), _addresses([tensor for stack in state for tensor in stack])]

    def step(self, grads: Sequence[Tensor], settings: Settings, counts: Tensor | None) -> None:
        """One step. ``grads``: as ``params``; ``counts``: the contiguous float32 ``[members]`` of this step."""
        fresh = _addresses(grads)
        sizes, params, state = (_start(values) for values in (self._sizes, *self._addresses))
        failed = self._kernel(
            len(self._sizes),
            self._members,
            len(settings.members),
            sizes,
            params,
            _start(fresh),
            state,
            settings.table.data_ptr(),
            None if counts is None else counts.data_ptr(),
            settings.bits,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the scalars of {self._members} members")


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    # Through a list: an array filled from an iterator is slower.
    return array("Q", list(map(Tensor.data_ptr, tensors)))


def _start(values: array[int]) -> int:
    return values.buffer_info()[0]


@cache
def _loaded() -> ctypes.CDLL | str:
    try:
        compiler = _compiler()
        if compiler is None:
            return "no C compiler ($CC, cc, gcc, clang) was found"
        made = build(compiler, cache_folder())
        return ctypes.CDLL(str(made)) if isinstance(made, Path) else made
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def _compiler() -> list[str] | None:
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def build(compiler: Sequence[str], directory: Path) -> Path | str:
    """The shared library of ``SOURCE`` below ``directory``, compiled unless it is there; or why it is not.

    Raises OSError if ``directory`` cannot be written or the compiler not be run.
    """
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS).stdout
    identity = [SOURCE.read_bytes(), version, repr((compiler, _FLAGS, _EXTRAS, _processor())).encode()]
    wanted = directory / f"kernels-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:24]}.so"
    if wanted.exists() and _loads(wanted):
        return wanted
    directory.mkdir(parents=True, exist_ok=True)
    # Another process may do the same: the file appears whole or not at all.
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        made = Path(folder) / wanted.name
        for extras in _EXTRAS:
            command = [*compiler, *_FLAGS, *extras, "-o", str(made), str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
            if done.returncode == 0 and _loads(made):
                os.replace(made, wanted)
                return wanted
    return f"{shlex.join(command)} failed: {done.stderr.strip()[-300:] or 'the library does not load'}"


def _loads(made: Path) -> bool:
    """Whether the libraries that the compiler linked are there at run time."""
    try:
        ctypes.CDLL(str(made))
    except OSError:
        return False
    return True


def _processor() -> str:
    """What -march=native depends on: a home may be shared by machines, and a container move."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(told)))
