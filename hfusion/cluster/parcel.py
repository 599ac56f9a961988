"""What goes to other processes as bytes, without the parts that these have already."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hfusion.core.errors import PlanError


def pack(what: str, value: Any, parts: Mapping[int, str]) -> bytes:
    """``value`` as bytes; an object whose id is in ``parts`` as its key there. Raises PlanError with ``what``."""
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("hf.Cluster sends functions to other processes: pip install 'hfusion[cluster]'") from error

    class Packer(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, found: object) -> str | None:
            return parts.get(id(found))

    target = io.BytesIO()
    try:
        Packer(target).dump(value)
    except Exception as error:
        raise PlanError(
            f"{what} cannot go to another process, as pickle fails: {type(error).__name__}: {error}; leave out what "
            "only this process has, such as open files, locks and generators"
        ) from error
    return target.getvalue()


def _no_parts(key: str) -> Any:
    raise KeyError(key)


def unpack(data: bytes, part: Callable[[str], Any] = _no_parts) -> Any:
    """What was packed; ``part`` gives the parts by key, where some were left out."""

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, key: str) -> Any:
            return part(key)

    return Unpacker(io.BytesIO(data)).load()
