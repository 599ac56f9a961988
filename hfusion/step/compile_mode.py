"""Check and interpret the argument ``compile`` and the options that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

AUTO = "auto"

Compile: TypeAlias = bool | Literal["background"] | None
"""None compiles once steps took two seconds, if that is faster, True always, False never; "background" always, in
another process."""


def check_compile(compile: object) -> None:
    """Raise ValueError unless ``compile`` is a `Compile`."""
    if compile is not None and not isinstance(compile, bool) and compile != "background":
        raise ValueError(
            f'compile is {compile!r}: give None to compile where that pays, True to compile always, "background" to do '
            "so in another process, or False to compile never"
        )


def check_parts(parts: object) -> int | str:
    """Return the argument ``parts`` of `hfusion.train_step`. Raises ValueError if it is invalid."""
    if parts == AUTO and isinstance(parts, str):
        return parts
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(
            f'parts is {parts!r}: give "auto", or how many shall run at the same time, an integer from 1 on'
        )
    return parts


@dataclass(frozen=True)
class CompileMode:
    """When steps are compiled, and by which process.

    Attributes:
        compile: whether steps may be compiled.
        background: whether another process compiles them.
        eager_steps, parts: the arguments of `hfusion.train_step`.
        patient: whether steps are compiled only once they took some time, and only if that is faster.
    """

    compile: bool
    background: bool = False
    eager_steps: int | None = None
    parts: int | str = AUTO
    patient: bool = False

    @staticmethod
    def of(compile: object, eager_steps: int | None, parts: object = AUTO) -> CompileMode:
        """Create the mode from arguments of `hfusion.train_step`. Raises ValueError if one is invalid."""
        check_compile(compile)
        divided = check_parts(parts)
        if eager_steps is None:
            background = compile is None or compile == "background"
            return CompileMode(compile is not False, background, None, divided, compile is None)
        if compile is False:
            raise ValueError(
                f"eager_steps is {eager_steps!r} where compile is False: no step will be compiled; omit it"
            )
        if isinstance(eager_steps, bool) or not isinstance(eager_steps, int) or eager_steps < 1:
            raise ValueError(f"eager_steps is {eager_steps!r}: give an integer from 1 on, as the first step is eager")
        if compile is None:
            raise ValueError(
                f"eager_steps is {eager_steps!r} where compile is None, which leaves open when steps change over: give "
                'compile=True or "background" as well'
            )
        return CompileMode(True, compile == "background", eager_steps, divided)

    def __str__(self) -> str:
        if self.patient or not self.compile:
            return "None" if self.patient else "False"
        return '"background"' if self.background else "True"

    def eager(self, steps: int) -> bool:
        """Return whether the step after ``steps`` of its kind is eager, even if its program is compiled."""
        return self.eager_steps is not None and steps < self.eager_steps

    def due(self, steps: int) -> bool:
        """Return whether the step after ``steps`` of its kind waits for its program."""
        return not self.background or (self.eager_steps is not None and steps >= self.eager_steps)
