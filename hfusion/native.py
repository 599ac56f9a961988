"""C of this project: compiled once by the machine's own compiler, kept in the user's cache, loaded.

Where that does not work, its users have a slower way. The environment variable ``HFUSION_NATIVE=0`` chooses that;
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from hfusion.machine import cache_folder

# Without contraction a vector and what is left over at its end round alike. The two -fno- only spare what
# nobody here looks at, errno and traps; the arithmetic stays that of IEEE 754.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Not every compiler has both.
_EXTRAS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
_SECONDS = 60

TYPES = {torch.float32: "float", torch.float64: "double"}
"""What C calls the dtypes of the kernels: a function for each has this after its name."""


def library(source: Path) -> ctypes.CDLL | str:
    """``source`` loaded, or in words why it is not. Compiles at most once in a process."""
    if os.environ.get("HFUSION_NATIVE") == "0":
        return "HFUSION_NATIVE=0"
    return _loaded(source)


@cache
def _loaded(source: Path) -> ctypes.CDLL | str:
    try:
        found = compiler()
        if found is None:
            return "no C compiler ($CC, cc, gcc, clang) was found"
        made = build(source, found, cache_folder())
        return ctypes.CDLL(str(made)) if isinstance(made, Path) else made
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def compiler() -> list[str] | None:
    """The command that compiles C, or None."""
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def build(source: Path, compiler: Sequence[str], directory: Path) -> Path | str:
    """The shared library of ``source`` below ``directory``, compiled unless it is there; or why it is not.

    Raises OSError if ``directory`` cannot be written or the compiler not be run.
    """
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS).stdout
    identity = [source.read_bytes(), version, repr((compiler, _FLAGS, _EXTRAS, _processor())).encode()]
    wanted = directory / f"{source.stem}-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:24]}.so"
    if wanted.exists() and _loads(wanted):
        return wanted
    directory.mkdir(parents=True, exist_ok=True)
    # Another process may do the same: the file appears whole or not at all.
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        made = Path(folder) / wanted.name
        for extras in _EXTRAS:
            command = [*compiler, *_FLAGS, *extras, "-o", str(made), str(source), "-lm"]
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
