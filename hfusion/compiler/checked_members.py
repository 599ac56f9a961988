"""Choose the members of a large array for the self-check: those that differ most in their numbers and variants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hfusion.compiler.compiled_program import Compiled
from hfusion.passes.align import scalars

# Largest number of members of which all are compared.
MAX_COMPARED_WHOLE = 16
# The least number of members compared in larger arrays, and of values of one kind that are distinguished.
MIN_COMPARED, MAX_VALUES = 8, 8


def checked_members(compiled: Compiled, variants: Sequence[int]) -> list[int]:
    """Return the members to compare, in ascending order, the same for the same program.

    All members of a program compute the same operators, except for the differences that `scalars` of its graph returns:
    the numbers of each member at an operator, and operators that only some members run. For each of these, one member
    per value is compared if there are few values, else those with the least and the greatest. The first and the last
    member, and some between them, are always compared; all members are if some code runs member by member.

    Args:
        variants: for each member, the index of its set of Python numbers.
    """
    members = compiled.program.members
    if members <= MAX_COMPARED_WHOLE or compiled.opaque:
        return list(range(members))
    columns = [tuple(variants), *scalars(compiled.graph, members)]
    spread = {round(step * (members - 1) / (MIN_COMPARED - 1)) for step in range(MIN_COMPARED)}
    return sorted(spread.union(*map(_distinct, columns)))


def _distinct(column: Sequence[Any]) -> Iterator[int]:
    """Yield members that represent the different values of a column ``[B]``."""
    first: dict[Any, int] = {}
    for member, value in enumerate(column):
        first.setdefault(repr(value), member)
    if len(first) <= MAX_VALUES:
        yield from first.values()
        return
    numbers = [member for member, value in enumerate(column) if isinstance(value, int | float)]
    kinds: dict[Any, int] = {}
    for member, value in enumerate(column):
        kinds.setdefault((type(value), isinstance(value, float) and not math.isfinite(value)), member)
    yield from kinds.values()
    ordered = sorted((member for member in numbers if math.isfinite(column[member])), key=column.__getitem__)
    yield from (*ordered[:1], *ordered[-1:])
    # The value nearest to zero, since zero often switches something off.
    yield from (min(ordered, key=lambda member: abs(column[member])),) if ordered else ()
