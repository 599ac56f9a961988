"""Compiled steps in the user's cache folder, so that a second process neither traces nor compiles them.

The key of a program is its request, which describes it completely, and its environment: versions, processor,
environment variables. Files carry a digest, and `hfusion.device.cache` rejects those that another user could have
written. A JSON file next to the libraries describes when they are valid; only the libraries contain code.

``HFUSION_PROGRAMS=0`` disables the cache. ``HFUSION_STAGES=1`` and ``HFUSION_DUMP`` do so too, since they inspect the
stages of a compilation, which a cached program skips.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.core import errors
from hfusion.core.guards import Assumptions, Guards
from hfusion.device.cache import cache_folder, read_sealed, write_sealed
from hfusion.device.native import load_copy, processor
from hfusion.torch_private.inductor import NativeEntry, load_function

# The most bytes in the cache; the oldest programs are deleted first.
MAX_FOLDER = 1 << 30
_PREFIX = "step-"
TIMES = "-eager"
"""Ends the names of files with the times of a step, from which later processes decide as this one did."""


@dataclass(frozen=True, eq=False)
class BlockProgram:
    """A compiled step of some members.

    Attributes:
        run: the function that Inductor made: takes the tensors of a `hfusion.step.step_graph.StepGraph`.
        trained: the indices of the tensors that get a gradient.
        operators: the operators of its graph, one per call; from the cache, their names.
        guards: the sizes of a batch that it is valid for.
        seeded: whether it takes seeds for random numbers.
    """

    run: Callable[..., Sequence[Tensor]]
    trained: tuple[int, ...]
    operators: Sequence[Any]
    guards: Guards | Assumptions
    seeded: bool = False


@dataclass(frozen=True)
class NoProgram:
    """A cached decision not to compile a step, and the reason."""

    why: str


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step."""

    compiled: float
    eager: float

    @property
    def eager_wins(self) -> bool:
        """True if eager steps are clearly faster than compiled ones: a ratio closer to 1 may be noise."""
        return self.compiled > 1.03 * self.eager

    def __str__(self) -> str:
        return f"measured: compiled {1e3 * self.compiled:.3g} ms, eager {1e3 * self.eager:.3g} ms"


Result: TypeAlias = BlockProgram | NoProgram | StepTimes


def keeping() -> bool:
    """Return whether programs are cached on disk."""
    enabled = os.environ.get("HFUSION_PROGRAMS") != "0"
    return enabled and os.environ.get("HFUSION_STAGES") != "1" and not os.environ.get("HFUSION_DUMP")


def find(request: str, suffix: str = "") -> Result | None:
    """Return the cached result of a `hfusion.step.compile_request.write_request`.

    None if there is none, or, with a UserWarning, if it is unusable. ``suffix``: `TIMES` for the times of a step.
    """
    path = _path(request, suffix)
    try:
        return _read(json.loads(read_sealed(path)), path)
    except FileNotFoundError:
        return None
    except (OSError, ImportError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        warnings.warn(f"the compiled step in {path} is made anew: {reason}", stacklevel=2)
        return None


def keep(request: str, result: Result, suffix: str = "", folder: Path | None = None) -> bool:
    """Cache the result of a request; return whether it is cached. Warns if the folder cannot be written."""
    path = _path(request, suffix, folder)
    folder = path.parent
    try:
        description = _write(result, path) if isinstance(result, BlockProgram) else asdict(result)
        if description is None:
            return False
        write_sealed(path, json.dumps(description).encode())
        # The oldest are deleted first.
        files = sorted(((file.stat(), file) for file in folder.glob(f"{_PREFIX}*")), key=lambda pair: pair[0].st_mtime)
        size = sum(status.st_size for status, _ in files)
        for status, file in files:
            if size <= MAX_FOLDER:
                break
            file.unlink(missing_ok=True)
            size -= status.st_size
    except OSError as error:
        warnings.warn(
            f"cannot keep compiled steps in {folder}: {error.strerror}; every process compiles them anew, unless "
            "XDG_CACHE_HOME names a folder that can be written",
            stacklevel=2,
        )
        return False
    return True


def _path(request: str, suffix: str, folder: Path | None = None) -> Path:
    """Return the path of the file for ``request`` in the present environment, all that a program depends on besides."""
    prefixes = ("TORCH", "AOT", "CXX", "OMP_", "KMP_", "HFUSION_RATES")
    # Ignored: where torch keeps its files and what it prints do not affect programs.
    ignored = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TORCH_TRACE", "TORCH_HOME", "OMP_NUM_THREADS")
    variables = {n: v for n, v in os.environ.items() if n.startswith(prefixes) and n not in ignored}
    versions = [torch.__version__, torch.version.git_version, sys.version, processor(), _own_code()]
    description = json.dumps([versions, variables, request], sort_keys=True)
    digest = hashlib.sha256(description.encode()).hexdigest()[:32]
    return (folder or cache_folder()) / f"{_PREFIX}{digest}{suffix}.json"


def _write(program: BlockProgram, path: Path) -> dict[str, Any] | None:
    """Store the library of a program, and return its description; None if it has no library."""
    run = program.run
    if not isinstance(run, NativeEntry):
        return None
    try:
        assumed = program.guards.assumptions()
    except (ValueError, SyntaxError):
        return None
    write_sealed(path.with_suffix(".so"), run.content)
    return {
        "trained": program.trained,
        "operators": list(map(str, program.operators)),
        "seeded": program.seeded,
        "sizes": assumed.sizes,
        "code": assumed.code,
        "takes": run.takes,
        "library": hashlib.sha256(run.content).hexdigest(),
    }


def _read(row: Mapping[str, Any], path: Path) -> Result:
    if "why" in row:
        return NoProgram(str(row["why"]))
    if "eager" in row:
        return StepTimes(**row)
    trained, operators, seeded = tuple(row["trained"]), tuple(row["operators"]), row["seeded"]
    assumed = Assumptions.read(row["sizes"], row["code"])
    content = read_sealed(path.with_suffix(".so"))
    if hashlib.sha256(content).hexdigest() != row["library"]:
        raise ValueError("its library is of another step")
    # Python loads extension modules of this suffix only.
    module = path.with_suffix(EXTENSION_SUFFIXES[-1])
    run = NativeEntry(content, row["takes"], load_copy(content, module, load_function))
    return BlockProgram(run, trained, operators, assumed, seeded)


@cache
def _own_code() -> str:
    """Return a digest of hfusion's source files."""
    digest = hashlib.sha256()
    root = Path(errors.__file__).parents[1]
    folders = (root, root / "ops", root / "passes")
    for file in sorted(file for folder in folders for kind in ("*.py", "*.h") for file in folder.rglob(kind)):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
