"""The user's cache folder. A file is trusted if no other user can have written it, and if it is complete."""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import secrets
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from hfusion.core.claimed_folder import run_folder

MAX_BYTES = 1 << 24

# A link is not followed, and a pipe of that name does not block.
_CAREFUL = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
# Files on Windows have no such owner; there the system protects the user's profile.
_HAS_OWNERS = hasattr(os, "geteuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder of calibrations and compiled kernels: ``$XDG_CACHE_HOME/hfusion``, or ``~/.cache/hfusion``.

    Issues a UserWarning if the folder cannot be created or another user can write to it; this process then has a
    private one until it ends.
    """
    return _usable(_preferred_folder())


def lasts() -> bool:
    """Return whether files in the cache folder are visible to later processes."""
    folder = _preferred_folder()
    with suppress(OSError):
        if folder is not None:
            _make(folder)
            return os.access(folder, os.W_OK)
    return False


def _preferred_folder() -> Path | None:
    """Return the preferred cache folder, or None. Relative paths are ignored, as the XDG specification requires."""
    try:
        # With an empty HOME, Python would return ``/``.
        is_empty = _HAS_OWNERS and os.environ.get("HOME") == ""
        home = Path(import_module("pwd").getpwuid(os.getuid()).pw_dir) if is_empty else Path.home()
        default = home / ".cache"
    except (RuntimeError, KeyError):
        default = Path()
    bases = (Path(os.environ.get("XDG_CACHE_HOME", "")), default)
    return next((base / "hfusion" for base in bases if base.is_absolute()), None)


@cache
def _usable(folder: Path | None) -> Path:
    trouble = "the user has no home folder"
    if folder is not None:
        try:
            _make(folder)
            return folder
        except OSError as error:
            trouble = f"{folder}: {error.strerror}"
    private, process = run_folder(), os.getpid()
    # A forked child that exits must not remove the folder of its parent.
    atexit.register(lambda: private.remove() if os.getpid() == process else None)
    warnings.warn(
        f"no cache folder can be used ({trouble}): what is kept there, such as compiled kernels, is made again by each "
        "process; let XDG_CACHE_HOME name a folder of your own that can be written",
        stacklevel=2,
    )
    return private.path


def _make(folder: Path) -> None:
    """Create a folder. Raises OSError if that fails, or another user can write to it."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(0o700, exist_ok=True)
    # Raises NotADirectoryError.
    os.scandir(folder).close()
    _check_own(folder.stat())


def _check_own(status: os.stat_result) -> None:
    if _HAS_OWNERS and status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if _HAS_OWNERS and status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(errno.EPERM, f"others can write to it (mode {mode:o}): chmod go-w")


def read_sealed(path: Path) -> bytes:
    """Return the bytes that `write_sealed` stored.

    Raises OSError, with the reason in ``strerror``, for a missing file, a damaged one, and one that another user could
    have written.
    """
    _check_own(path.parent.stat())
    handle = os.open(path, os.O_RDONLY | _CAREFUL)
    try:
        # The open file is checked, so that a renamed one cannot take its place.
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        _check_own(status)
        with open(handle, "rb", closefd=False) as file:
            sealed = file.read(MAX_BYTES + 1)
    finally:
        os.close(handle)
    if len(sealed) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES:,} bytes")
    content = sealed[: -hashlib.sha256().digest_size]
    if sealed != content + _digest(path.name, content):
        raise OSError(errno.EIO, "it is damaged, or was cut short")
    return content


def write_sealed(path: Path, content: bytes) -> None:
    """Write ``content`` with a digest of it and of the file's name. Raises OSError.

    The file is written atomically: other processes see all of it or nothing, even after a crash.
    """
    _make(path.parent)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL, 0o600), "wb") as file:
            if _HAS_OWNERS:
                os.fchmod(file.fileno(), 0o600)
            file.write(content + _digest(path.name, content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def cache_file(kind: str, description: Mapping[str, str]) -> Path:
    """Return the path of the file for measurements on a machine of this description."""
    return cache_folder() / f"{kind}-{hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]}.rates"
