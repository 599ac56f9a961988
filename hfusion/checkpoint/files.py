"""One save is one directory: tensors in the safetensors format, a manifest in JSON, and the manifest's checksum.

The manifest holds the checksum of the tensors' file, since safetensors loads a flipped bit without a word.

A directory is written under a temporary name, flushed to the disk, and then renamed, so it is complete or absent. The
format is described in docs/checkpoints.md.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfusion.core.claimed_folder import ClaimedFolder, remove_abandoned
from hfusion.core.errors import CheckpointError, HFusionError
from hfusion.core.memory import real_view

FORMAT, VERSION = "hfusion checkpoint", 5
MANIFEST, CHECKSUM, TENSORS = "manifest.json", "manifest.blake2b", "tensors.safetensors"
_SAVE = re.compile(r"save-\d{12,}")
_ASIDE = ".aside-"
# Number of attempts to list a folder, and to read a save, while other processes change them.
_LISTINGS, _READINGS = 3, 100
# Maximum bytes of a manifest: a hundred for each of ten million tensors.
MAX_JSON = 1 << 30


@dataclass(frozen=True)
class Saved:
    """A save that was read and verified: its path, and what was passed to `write`."""

    path: Path
    body: Any
    tensors: dict[str, Tensor]
    step: int


def write(
    root: str | os.PathLike[str],
    body: Any,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    keep: int,
    score: float | None = None,
) -> Path:
    """Write a new save under ``root``, then delete all but the last ``keep`` and the one with the highest ``score``.

    ``body`` is a JSON value; ``tensors`` are on the CPU and must not change. See `checked` for ``keep`` and ``score``.

    Raises:
        CheckpointError: the save could not be written; earlier saves are unchanged.
    """
    folder = Path(root)
    with wrap_load_errors(folder, "could not write a checkpoint, and the last one stands"):
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        aside = ClaimedFolder(folder, _ASIDE)
        try:
            packed, complex_keys = pack(tensors)
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "score": score,
                "tensors": blake2b(packed).hexdigest(),
                "complex": complex_keys,
                "body": body,
            }
            text = json.dumps(manifest, allow_nan=False, sort_keys=True, indent=1).encode()
            checksum = blake2b(text).hexdigest().encode()
            for name, content in ((TENSORS, packed), (MANIFEST, text), (CHECKSUM, checksum)):
                with open(aside.path / name, "xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            _sync(aside.path)
            path = _named(aside.path, folder)
            _sync(folder)
        finally:
            shutil.rmtree(aside.path, ignore_errors=True)
            aside.drop()
        _prune(folder, keep)
    return path


def checked(keep: Any, score: Any) -> tuple[int, float | None]:
    """Return ``keep`` and ``score`` as numbers. Raises CheckpointError for other values."""
    if isinstance(keep, bool) or not hasattr(keep, "__index__") or operator.index(keep) < 1:
        raise CheckpointError(f"keep={keep!r}: give how many saves are left, at least 1")
    try:
        number = None if score is None else float(score)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"score={score!r}: give one number, or None") from error
    if number is not None and not math.isfinite(number):
        raise CheckpointError(
            f"score={number}: no save is better or worse than this; give a finite number, or None (a free row has NaN)"
        )
    return operator.index(keep), number


def pack(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return tensors on the CPU in the safetensors format, and the keys of complex ones, stored as pairs of numbers."""
    # Imported late: it imports sympy.
    from safetensors.torch import save

    packed = save({key: real_view(tensor).contiguous() for key, tensor in tensors.items()})
    return packed, sorted(key for key, tensor in tensors.items() if tensor.is_complex())


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to the disk. Only POSIX systems can open folders."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _named(aside: Path, folder: Path) -> Path:
    """Rename a save to the next number, counting plain files too; retry if another process takes the name first."""
    while True:
        numbers = [_number(path) for path in folder.iterdir() if _SAVE.fullmatch(path.name)]
        target = folder / f"save-{max(numbers, default=0) + 1:012d}"
        try:
            os.rename(aside, target)
        except OSError as error:
            # A save that took the name may be gone again.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) and not os.path.lexists(target):
                raise
        else:
            return target


def clean(folder: Path) -> None:
    """Remove what killed processes have left in the folder of a checkpoint, and links that were set aside."""
    for path in filter(Path.is_symlink, folder.glob(f"{_ASIDE}*")):
        path.unlink(missing_ok=True)
    remove_abandoned(folder, _ASIDE)


def _prune(folder: Path, keep: int) -> None:
    paths, scores = saves(folder), dict[Path, float]()
    for path in paths:
        with suppress(CheckpointError, OSError):
            score = read_manifest(path)["score"]
            if isinstance(score, float | int):
                scores[path] = score
    # The later one of two.
    best = max(reversed(scores), key=scores.__getitem__, default=None)
    for path in [path for path in paths[: -max(1, keep)] if path != best]:
        with suppress(OSError):
            if path.is_symlink():
                path.unlink()
            else:
                # Rename the save first, so that no reader finds it half deleted.
                aside = path.rename(folder / f"{_ASIDE}{uuid.uuid4().hex}")
                aside.chmod(0o700)
                shutil.rmtree(aside, ignore_errors=True)


def saves(root: str | os.PathLike[str]) -> list[Path]:
    """Return the saves under ``root``, the oldest first."""
    folder = Path(root)
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _SAVE.fullmatch(path.name) and path.is_dir()), key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("save-"))


def newest(root: str | os.PathLike[str]) -> Path:
    """Return the latest save under ``root``, or ``root`` if it is a save. Raises CheckpointError if there is none."""
    folder = Path(root)
    with wrap_load_errors(folder, "cannot be read"):
        if (folder / MANIFEST).exists():
            return folder
        # While other processes write, a listing may miss both the new save and the one deleted in its favour.
        paths = next(filter(None, (saves(folder) for _ in range(_LISTINGS))), [])
    if not paths:
        problem = "is no folder" if not folder.is_dir() else "holds no save"
        raise CheckpointError(
            f"{folder} {problem}: give the folder that a checkpoint was saved to, or a save-... in it"
        )
    return paths[-1]


def read(root: str | os.PathLike[str]) -> Saved:
    """Read the latest save under ``root``, or the save ``root`` itself, and verify its checksums.

    If another process deletes the save meanwhile, because there is a later one, the later one is read instead.

    Raises:
        CheckpointError: there is none, or a file of it is missing, damaged, or of another version.
    """
    for _ in range(_READINGS):
        path = newest(root)
        try:
            return _read(path)
        except CheckpointError:
            if path.exists() or path == Path(root):
                raise
    raise CheckpointError(f"{root}: {_READINGS} saves were deleted while they were read: keep more of them, by keep=2")


def _read(path: Path) -> Saved:
    manifest = read_manifest(path)
    with wrap_load_errors(path / TENSORS, "is damaged"):
        tensors = _tensors(path / TENSORS, manifest)
    with wrap_load_errors(path / MANIFEST, "is damaged"):
        return Saved(path, manifest["body"], tensors, int(manifest["step"]))


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest: all of a save except its tensors. Raises CheckpointError if it is missing or damaged."""
    file = path / MANIFEST
    with wrap_load_errors(file, "is damaged"):
        text = _content(file, MAX_JSON)
        checksum = _content(path / CHECKSUM, 1024)
        if blake2b(text).hexdigest().encode() != checksum:
            raise CheckpointError(
                f"{file} does not have the checksum in {CHECKSUM}: one of them is damaged; {_advice(path)}"
            )
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CheckpointError(f"{file} is no manifest of a checkpoint of hfusion")
        if manifest.get("version") != VERSION:
            raise CheckpointError(
                f"{file} is of version {manifest.get('version')!r}, and this hfusion reads version {VERSION}: load it "
                "with the hfusion that wrote it"
            )
        return manifest


def _advice(path: Path) -> str:
    others = [other.name for other in saves(path.parent) if other != path]
    return f"another save is {path.parent / others[-1]}" if others else "there is no other save beside it"


def _content(file: Path, limit: int) -> bytes:
    """Read a plain file of at most ``limit`` bytes. Raises CheckpointError."""
    _check_plain(file)
    size = file.stat().st_size
    if size > limit:
        raise CheckpointError(f"{file} has {size} bytes, and more than {limit} are none of ours")
    return file.read_bytes()


def _check_plain(file: Path) -> None:
    """Raise CheckpointError unless a file exists that is neither a link nor a folder nor a pipe."""
    if not os.path.lexists(file):
        raise CheckpointError(f"{file} is missing; {_advice(file.parent)}")
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{file} is no plain file")


def _tensors(file: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors import safe_open

    _check_plain(file)
    with file.open("rb") as opened:
        digest = file_digest(opened, "blake2b").hexdigest()
    if digest != manifest["tensors"]:
        raise CheckpointError(f"{file} is damaged: it does not have the checksum in {MANIFEST}; {_advice(file.parent)}")
    with safe_open(file, framework="pt") as content:
        # Copies, since the file is mapped: one that is cut short later would end the process.
        tensors = {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118
    return tensors | {key: torch.view_as_complex(tensors[key]) for key in manifest["complex"]}


@contextmanager
def wrap_load_errors(path: Path, problem: str = "cannot be loaded") -> Iterator[None]:
    """Context manager: turn errors of files, also those of damaged ones, into a CheckpointError that names the file."""
    try:
        yield
    except Exception as error:
        ours, named = isinstance(error, CheckpointError), str(path.parent) in str(error)
        if (ours and named) or (not ours and isinstance(error, HFusionError | Warning)):
            raise
        kind = "" if ours or isinstance(error, OSError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{path} {problem}: {kind}{error}") from error
