"""Compile this project's C sources with the machine's compiler, cache the libraries, and load them.

If that fails, callers fall back to slower code. The environment variable ``HFUSION_NATIVE=0`` selects the fallback, and
``CC`` names the compiler.
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
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from hfusion.core.claimed_folder import temporary_folder
from hfusion.device.cache import cache_folder, read_sealed, write_sealed

T = TypeVar("T")

# Without contraction a vector and its remainder round alike. The two -fno- only spare
# errno and traps, which are unused here; the arithmetic stays that of IEEE 754.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Not every compiler supports both.
_EXTRAS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
_SECONDS = 60

TYPES = {torch.float32: "float", torch.float64: "double"}
"""What C calls the dtypes of the kernels: a function for each has this after its name."""


def library(source: Path, text: str | None = None) -> ctypes.CDLL | str:
    """Compile and load ``source``, at most once in a process; or return the reason why that failed.

    text: the contents of ``source``, which then need not exist as a file.
    """
    if os.environ.get("HFUSION_NATIVE") == "0":
        return "HFUSION_NATIVE=0"
    return _loaded(source, text)


@cache
def _loaded(source: Path, text: str | None) -> ctypes.CDLL | str:
    try:
        command = compiler()
        if command is None:
            return "no C compiler ($CC, cc, gcc, clang) was found"
        return build(source, command, cache_folder(), text)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def compiler() -> list[str] | None:
    """Return the command of the C compiler; None if there is none."""
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def build(source: Path, compiler: Sequence[str], directory: Path, text: str | None = None) -> ctypes.CDLL | str:
    """Load the library of ``source`` from ``directory``, or compile it. Returns the reason if that fails.

    text: the contents of ``source``, by default those of the file. Raises OSError if the compiler cannot be run.
    """
    content = source.read_bytes() if text is None else text.encode()
    identity = [b"sealed", content, _version(tuple(compiler)), repr((compiler, _FLAGS, _EXTRAS, processor())).encode()]
    path = directory / f"{source.stem}-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:24]}.so"
    try:
        if (library := _load(read_sealed(path), path)) is not None:
            return library
    except FileNotFoundError:
        pass
    except OSError as error:
        warnings.warn(f"the compiled kernels in {path} are built again: {error.strerror}", stacklevel=2)
    with temporary_folder() as folder:
        copy, output = folder / source.name, folder / path.name
        copy.write_bytes(content)
        for extras in _EXTRAS:
            command = [*compiler, *_FLAGS, *extras, "-o", str(output), str(copy), "-lm"]
            process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
            if process.returncode == 0 and (library := _load(binary := output.read_bytes(), path)) is not None:
                try:
                    write_sealed(path, binary)
                except OSError as error:
                    warnings.warn(
                        f"cannot keep compiled kernels in {path.parent}: {error.strerror}; every process compiles them "
                        "again, unless XDG_CACHE_HOME names a folder that can be written",
                        stacklevel=2,
                    )
                return library
    return f"{shlex.join(command)} failed: {process.stderr.strip()[-300:] or 'the library does not load'}"


@cache
def _version(compiler: tuple[str, ...]) -> bytes:
    return subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS).stdout


def _load(content: bytes, path: Path) -> ctypes.CDLL | None:
    """Load the library with these bytes; None if a library that it links to is missing at run time."""
    try:
        return load_copy(content, path, lambda copy: ctypes.CDLL(str(copy)))
    except OSError:
        return None


def load_copy(content: bytes, path: Path, load: Callable[[Path], T], parent: Path | None = None) -> T:
    """Return ``load(file)`` for a file of these bytes. Raises its errors.

    A private copy is loaded and its name removed: a file that is truncated while it is mapped ends the process. Some
    systems execute no files in their temporary folder; there the copy is created next to ``path``.

    parent: the folder of the copy, by default the system's for temporary files.
    """
    try:
        with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
            copy = Path(folder, path.name)
            copy.write_bytes(content)
            return load(copy)
    except (OSError, ImportError):
        if parent is not None:
            raise
        return load_copy(content, path, load, path.parent)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def processor() -> str:
    """Return the properties of the processor that -march=native depends on; machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(fields)))


def processor_name() -> str:
    """Return the processor's model where the system tells it, else its architecture."""
    described = dict(line.partition(":")[::2] for line in processor().splitlines())
    names = {key.strip(): value.strip() for key, value in described.items()}
    return names.get("model name") or platform.processor() or platform.machine()


def core_cache() -> int:
    """Return the bytes of a core's L2 cache; 2 MiB if torch does not report it."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return int(capabilities.get("l2_cache_size") or 1 << 21)
