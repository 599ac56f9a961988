"""The record of how an operator runs for the whole array.

Code that chooses among lowerings, plans memory, checks programs or reports them reads the fields of a `Lowering`. Its
text is only for people.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch._ops import OpOverload

from hfusion.core.layout import Layout

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """One member's call in numbers.

    ``operands``: shapes by argument name, nested like the arguments; arguments that are no tensors are unchanged.
    ``result``: the shape of the result, the first if there are several. ``width``: bytes of one value of it.
    """

    operands: Mapping[str, Any]
    result: Shape
    width: int


# Something to be counted for one member: bytes, operations.
Count: TypeAlias = Callable[[Sizes], int]


class KeptOperands(enum.Enum):
    """The operands that autograd keeps for backward."""

    NONE = "none"
    ALL = "all"
    # Each factor whose partner gets a gradient, as for a matrix product.
    FACTORS = "factors"


@dataclass(frozen=True)
class Saves:
    """The memory that autograd keeps for the backward of a call.

    ``operands``, ``result``: whether these are kept. ``extra_bytes``: further bytes that are kept. ``workspace``: bytes
    that the call allocates and frees while it runs.
    """

    operands: KeptOperands = KeptOperands.ALL
    result: bool = False
    extra_bytes: Count | None = None
    workspace: Count | None = None


class View(enum.Enum):
    """True if a result is a view of the first operand that is not a number."""

    ALWAYS = "always"
    # Counted as a view; a copy if the array is stored in another order than its members are.
    USUALLY = "usually"
    # Counted as a view if the member's operand is stored in the order of its dims.
    IN_ORDER = "in order"
    # Counted as a copy; at times it is the operand itself.
    PERHAPS = "perhaps"
    NEVER = "never"

    @property
    def likely(self) -> bool:
        """True if the result is expected to be a view, which costs nothing."""
        return self in (View.ALWAYS, View.USUALLY, View.IN_ORDER)


@dataclass(frozen=True)
class Efficiency:
    """The efficiency of a lowering relative to the machine's rates, forward and backward together.

    ``calls``: fixed cost of a call, in calls of small operators, in addition to arithmetic and traffic;
    ``arithmetic`` and ``traffic``: the shares of the machine's rates that it reaches; ``more``: floating-point
    operations in addition to those of products. Defaults, for lowerings that were not measured, are full rates and the
    four calls that a small operator and its backward take in a program. These are of a CPU; ``gpu`` is of an
    accelerator, `PLAIN` where it was not measured.
    """

    calls: float = 4.0
    arithmetic: float = 1.0
    traffic: float = 1.0
    more: Count | None = None
    gpu: Efficiency | None = None


PLAIN = Efficiency()


@dataclass(frozen=True)
class Lowering:
    """A function that computes an operator for the array: ``fn(*args, **kwargs)`` of a `Call` returns it in ``layout``.

    ``loops``: whether ``fn`` calls the operator once per member. ``text``: a description for people; no code reads it.
    """

    fn: Callable[..., Any]
    layout: Layout
    text: str
    efficiency: Efficiency = PLAIN
    saves: Saves = Saves()
    view: View = View.NEVER
    loops: bool = False

    def __str__(self) -> str:
        return self.text


def family(target: Any) -> str:
    """Return an operator's name without namespace, overload and in-place suffix, such as ``"linear"`` or ``"add"``."""
    name = target._schema.name if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
    return str(name).rpartition("::")[2].rstrip("_")
