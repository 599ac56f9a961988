"""The arguments ``compile`` and ``parts`` of a training step."""

from __future__ import annotations

from typing import TypeAlias

Compile: TypeAlias = bool | None
"""None compiles once steps took two seconds, if that is faster, True always, False never."""


def check_compile(compile: object) -> None:
    """Raise ValueError unless ``compile`` is a `Compile`."""
    if compile is not None and not isinstance(compile, bool):
        raise ValueError(
            f"compile is {compile!r}. Give None to compile where that pays, True to compile always, or False to "
            "compile never"
        )


def check_parts(parts: object) -> int | str:
    """Return the argument ``parts`` of `hfusion.train_step`. Raises ValueError if it is invalid."""
    if parts == "auto" and isinstance(parts, str):
        return parts
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(
            f'parts is {parts!r}: give "auto", or how many shall run at the same time, an integer from 1 on'
        )
    return parts
