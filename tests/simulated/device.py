"""Two simulated accelerators, ``sim:0`` and ``sim:1``, for all of this process, by torch's own way to add a device.

As a plugin of pytest it runs tests there: tensors made without a device are on ``sim:0``, values are real, and a tensor
that is on another device than the others is an error, as on a GPU. ``python -m pytest -p tests.simulated.device
tests/population``. Source: https://docs.pytorch.org/docs/stable/accelerator/index.html
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from hfusion.device.cache import cache_folder
from tests.simulated import operators
from tests.simulated.operators import TYPE, generator
from tests.simulated.queues import DEVICES, QUEUES

SOURCE = Path(__file__).with_name("device.cpp")

_NUMBER = ctypes.c_int64
# As `Calls` in device.cpp: what it gives, how many numbers it takes, who answers.
_CALLS: dict[str, tuple[Any, int]] = {
    "allocate": (_NUMBER, 2),
    "release": (None, 1),
    "used": (None, 2),
    "allocated": (_NUMBER, 2),
    "forget_peak": (None, 1),
    "pin": (_NUMBER, 1),
    "unpin": (None, 1),
    "pinned": (_NUMBER, 1),
    "stream": (_NUMBER, 1),
    "record": (_NUMBER, 2),
    "block_stream": (None, 2),
    "wait": (None, 1),
    "query": (_NUMBER, 1),
    "forget": (None, 1),
    "wait_stream": (None, 1),
    "query_stream": (_NUMBER, 1),
    "wait_device": (None, 1),
}


class _Calls(ctypes.Structure):
    _fields_ = [
        ("devices", _NUMBER),
        *((name, ctypes.CFUNCTYPE(gives, *[_NUMBER] * count)) for name, (gives, count) in _CALLS.items()),
    ]


def missing() -> str | None:
    """Return why there can be no simulated device here, None if there can."""
    return None if shutil.which("g++") else "there is no g++"


def _library() -> Path:
    """The part in C++, compiled once for this torch."""
    path = cache_folder() / f"simulated-{torch.__version__}-{hash_of(SOURCE)}.so"
    if not path.exists():
        home = Path(torch.__file__).parent
        includes = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            compiled = Path(folder, "made.so")
            options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", *includes]
            libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = ["g++", *options, str(SOURCE), "-o", str(compiled), *libraries]
            subprocess.run(command, check=True, timeout=300)
            compiled.replace(path)
    return path


def hash_of(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()[:24]


@cache
def install() -> object:
    """Add the devices to torch; what this gives lives as long as the process."""
    # To measure their rates would take minutes, and times mean nothing here.
    os.environ["HFUSION_RATES"] = "standard"
    library = ctypes.PyDLL(str(_library()))
    library.simulated_stream.argtypes, library.simulated_stream.restype = [_NUMBER], _NUMBER
    QUEUES.current = library.simulated_stream
    calls = _Calls(DEVICES, *(kind(_answer(name)) for name, kind in _Calls._fields_[1:]))
    library.simulated_device(ctypes.byref(calls))
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _module())
    return library, calls, operators.register()


def _answer(name: str) -> Any:
    """Errors cannot go through C: they are kept, and raised when the run ends."""
    method = getattr(QUEUES, name)

    def answer(*numbers: int) -> Any:
        try:
            return method(*numbers)
        except BaseException as error:
            QUEUES.errors.append(error)
            return 0

    return answer


def _module() -> ModuleType:
    """The module ``torch.sim``, by which torch uses such devices in Python."""
    module: Any = ModuleType(f"torch.{TYPE}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES
    module.current_device = lambda: torch.accelerator.current_device_index()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_device_name = lambda device=None: "simulated"
    module.mem_get_info = lambda device=None: (1 << 30, 1 << 30)
    module.get_rng_state = lambda device=None: generator(_index(device)).get_state()
    module.set_rng_state = _set_rng_state
    module.manual_seed_all = lambda seed: [generator(device).manual_seed(seed) for device in range(DEVICES)]
    return module  # type: ignore[no-any-return]


def _index(device: Any) -> int:
    return int(torch.device(TYPE if device is None else device).index or 0)


def _set_rng_state(state: Tensor, device: Any = None) -> None:
    generator(_index(device)).set_state(state)


class OnDevice(TorchFunctionMode):
    """Like ``torch.set_default_device``; generators of the CPU draw in host memory, and the draws are moved."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func in _device_constructors() and arguments.get("device") is None:
            generator = arguments.get("generator")
            tensor = func(*args, **{**arguments, "device": "sim:0" if generator is None else generator.device})
            return tensor.to("sim:0")
        return func(*args, **arguments)


def pytest_configure() -> None:
    # Before the modules of tests are imported, which make tensors.
    install()
    OnDevice().__enter__()
