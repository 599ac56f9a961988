"""How an operator runs for the whole array, as a record.

Whatever chooses among lowerings, plans memory, checks programs or tells of them reads the fields of a `Lowering`. Its
text is for people alone.
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

    ``operands``: shapes by argument name, nested as they were given; what is no tensor stands there unchanged.
    ``result``: the shape of the result, the first if there are several. ``width``: bytes of one value of it.
    """

    operands: Mapping[str, Any]
    result: Shape
    width: int


# Something to be counted for one member: bytes, operations.
Count: TypeAlias = Callable[[Sizes], int]


class KeptOperands(enum.Enum):
    """Which operands autograd keeps for backward."""

    NONE = "none"
    ALL = "all"
    # Each whose partner gets a gradient, as of a product.
    FACTORS = "factors"


@dataclass(frozen=True)
class Saves:
    """What autograd keeps for the backward of a call.

    ``operands`` and ``result`` of it, and ``beside`` these so many bytes. ``workspace``: bytes that it takes while it
    runs, and gives back.
    """

    operands: KeptOperands = KeptOperands.ALL
    result: bool = False
    beside: Count | None = None
    workspace: Count | None = None


class View(enum.Enum):
    """Whether a result lies in the memory of an operand: the first that is no number."""

    ALWAYS = "always"
    # Counted as a view; of an array that lies otherwise than its members do it is a copy.
    USUALLY = "usually"
    # Counted as a view where the member's operand lies in the order of its dims.
    IN_ORDER = "in order"
    # Counted as a copy; at times it is the operand itself.
    PERHAPS = "perhaps"
    NEVER = "never"

    @property
    def likely(self) -> bool:
        """Whether it is no work, as far as is known."""
        return self in (View.ALWAYS, View.USUALLY, View.IN_ORDER)


@dataclass(frozen=True)
class Efficiency:
    """How a lowering fares on a CPU against the machine's own rates, forward and backward together.

    ``calls``: how many calls of small operators one call takes the time of, beside arithmetic and traffic;
    ``arithmetic`` and ``traffic``: the shares of the machine's rates that it reaches; ``more``: floating-point
    operations beside those of products. What was not measured is at its best: full rates, and the four calls that a
    small operator and its backward take in a program.
    """

    calls: float = 4.0
    arithmetic: float = 1.0
    traffic: float = 1.0
    more: Count | None = None


PLAIN = Efficiency()


@dataclass(frozen=True)
class Lowering:
    """``fn(*args, **kwargs)`` of a `Call` gives the value in ``layout``.

    ``loops``: ``fn`` calls the operator once per member. ``text`` is for people: nothing looks into it.
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
    """An operator's name without namespace, overload and mark of in-place: ``"linear"``, ``"add"``, ``"getitem"``."""
    name = target._schema.name if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
    return str(name).rpartition("::")[2].rstrip("_")
