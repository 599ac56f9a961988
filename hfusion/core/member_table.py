"""A table of members: named columns with an entry for each row, and the row indices that users give."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from hfusion.core.memory import lies_within

# Number of blocks in the first number of rows; more blocks would waste fewer rows, and need more calls.
BLOCKS = 8


def kept_rows(rows: Sequence[int], members: int) -> list[int]:
    """Return the source rows of an array that keeps only ``rows``. Raises ValueError."""
    sources = [row_of(row, members) for row in rows]
    if not sources:
        raise ValueError(f"keep got no rows of an array of {members} members: an array has one member at least")
    check_once(sources)
    return sources


def copied(src: int | Sequence[int], dst: int | Sequence[int], members: int) -> list[int]:
    """Return the source row of each member if ``src`` is copied over ``dst``. Raises ValueError."""
    sources = list(range(members))
    for source, target in pairs(src, dst, members):
        sources[target] = source
    return sources


def pairs(src: int | Sequence[int], dst: int | Sequence[int], members: int) -> list[tuple[int, int]]:
    """Return the pairs ``(src, dst)`` of rows to copy. Raises ValueError."""
    targets = rows_of(dst, members)
    origins = [row_of(src, members)] * len(targets) if is_row(src) else rows_of(src, members)
    if len(origins) != len(targets):
        raise ValueError(
            f"copy of {len(origins)} members over {len(targets)}: give one source, or one for each of dst={targets}"
        )
    check_once(targets)
    return list(zip(origins, targets, strict=True))


def rows_of(rows: int | Sequence[int], members: int) -> list[int]:
    """Return one or several rows as a list of numbers from 0 on. Raises ValueError."""
    if is_row(rows) or not isinstance(rows, Iterable):
        return [row_of(rows, members)]
    return [row_of(row, members) for row in rows]


def row_of(row: Any, members: int) -> int:
    """Return a row, which may be negative, as a number from 0 on. Raises ValueError."""
    try:
        number = operator.index(row)
    except TypeError as error:
        raise ValueError(f"{row!r} is no row of an array of {members} members: give integers") from error
    if isinstance(row, bool) or getattr(row, "dtype", None) is torch.bool or not -members <= number < members:
        raise ValueError(f"{row!r} is no row of an array of {members} members: rows are 0 to {members - 1}")
    return number % members


def is_row(rows: Any) -> bool:
    """Return whether the argument is a single row. Arrays with one element have ``__index__``, too."""
    return hasattr(rows, "__index__") and getattr(rows, "ndim", 0) == 0


def check_once(rows: Sequence[int]) -> None:
    """Raise a ValueError where a row comes twice."""
    twice = sorted({row for row in rows if rows.count(row) > 1})
    if twice:
        raise ValueError(f"row {twice[0]} comes {rows.count(twice[0])} times in {list(rows)}: give it once")


# Rows of at least this many bytes are copied one by one. Copying all at once needs fresh memory; getting it from the
# system took fifty times as long as copying eight rows of 4 MiB (two cores).
_LARGE_ROW = 1 << 16


def moved_rows(stack: Tensor, sources: Sequence[Any], joining: Mapping[int, Tensor | None]) -> Tensor:
    """Return ``stack`` with rows ``sources``; in place if the number of rows does not change.

    ``joining``: the rows that join, by index; None for zeros. They may be rows of the stack itself.
    """
    joining = {
        index: value.detach().clone() if value is not None and lies_within(value, stack) else value
        for index, value in joining.items()
    }
    if len(sources) == len(stack):
        # As if all rows were read before one is written.
        changed = {row: source for row, source in enumerate(sources) if row != source and isinstance(source, int)}
        # Making tensors of indices would take longer than copying one row.
        if len(changed) > 1 and stack[0].numel() * stack.element_size() < _LARGE_ROW:
            rows, origins = (torch.tensor(list(places), device=stack.device) for places in (changed, changed.values()))
            stack.index_copy_(0, rows, stack[origins])
        else:
            aside = {source: stack[source].clone() for source in changed.values() if source in changed}
            for row, source in changed.items():
                stack[row].copy_(aside.get(source, stack[source]))
        target = stack
    else:
        places = [source if isinstance(source, int) else 0 for source in sources]
        target = stack.index_select(0, torch.tensor(places, device=stack.device))
    for index, value in joining.items():
        if value is None:
            target[index].zero_()
        else:
            target[index].copy_(value.detach())
    return target


def blocks_of(members: int, size: int) -> list[range]:
    """Return blocks of ``size`` consecutive members; the last block has the rest."""
    return [range(start, min(start + size, members)) for start in range(0, members, size)]


@dataclass(frozen=True)
class Widths:
    """Numbers of rows of an array that began with ``first`` rows.

    Each number of rows needs its own compiled programs, so an array that loses one member at a time would compile every
    time. Rows therefore come in blocks of an eighth of the first number. There is one program for the first number of
    rows, one for a block, called once per block, and one for a single member, for fewer members than a block. An array
    that loses one of 64 members at a time then computes 1.11 rows for each member, on average.
    """

    first: int

    @property
    def block(self) -> int:
        return max(1, -(-self.first // BLOCKS))

    def of(self, members: int) -> int:
        """Return the number of rows for ``members`` members."""
        if members >= self.block:
            return -(-members // self.block) * self.block if members != self.first else self.first
        return max(1, members)

    def at_once(self, rows: int) -> int | None:
        """Return the number of rows that one call of a compiled program computes; None for all."""
        if rows == self.first:
            return None
        return self.block if rows % self.block == 0 else 1


class MemberTable:
    """Columns by name, each a stack ``[rows, ...]`` or a list with an entry for each row.

    What becomes of a member that is copied, moved, saved or left out of a step is decided here once, so that a new kind
    of state of a member is one more column. Entries of lists are copied by ``copy.copy``.

    Attributes:
        rows: the number of rows.
        columns: the columns, of tensors without gradients. The dict may be that of another object, which then has what
            is written here.
        empty: the entries of a row without a member, by the column's name up to its first ``/``. A column that is not
            in it has no such entry: its free rows hold anything.

    Example:
        >>> table = MemberTable(3, {"age": torch.tensor([4, 5, 6]), "tag": ["a", "b", "c"]}, {"age": 0, "tag": None})
        >>> table.arrange([2, 1])
        >>> table.clear([1])
        >>> table["age"].tolist(), table["tag"]
        ([6, 0], ['c', None])
    """

    def __init__(
        self, rows: int, columns: dict[str, Any] | None = None, empty: Mapping[str, Any] | None = None
    ) -> None:
        self.rows, self.columns, self.empty = rows, {} if columns is None else columns, empty or {}

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor | list[Any]) -> None:
        self.columns[name] = column

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def of(self, kind: str) -> dict[str, Tensor]:
        """Return the columns ``kind/name`` by name."""
        start = f"{kind}/"
        return {name.removeprefix(start): c for name, c in self.columns.items() if name.startswith(start)}

    def begin(self, name: str, like: Tensor) -> None:
        """Add a column of rows without a member. ``like``: of the members' shape ``[..., *shape]``."""
        self.columns[name] = like.new_full((self.rows, *like.shape[1:]), self.empty.get(name.partition("/")[0], 0))

    def drop(self, *kinds: str) -> None:
        """Remove the columns ``kind/name`` of some kinds."""
        for name in [name for name in self.columns if "/" in name and name.partition("/")[0] in kinds]:
            del self.columns[name]

    def clear(self, rows: Iterable[int], kinds: Iterable[str] | None = None) -> None:
        """Let rows have no member; with ``kinds``, only in these columns."""
        places, chosen = list(rows), self.empty if kinds is None else kinds
        for name, column in self.columns.items() if places else ():
            kind = name.partition("/")[0]
            if kind in chosen and kind in self.empty:
                if isinstance(column, Tensor):
                    column[places] = self.empty[kind]
                else:
                    for row in places:
                        column[row] = self.empty[kind]

    def take(self, rows: Sequence[int], free: int = 0) -> Self:
        """Return a table of copies of ``rows``, which may repeat, and then of ``free`` rows without a member."""
        places = [*rows, *[rows[0]] * free]
        index = cache(lambda device: torch.tensor(places, device=device))
        part = copy.copy(self)
        part.rows = len(places)
        part.columns = {
            name: column.index_select(0, index(column.device))
            if isinstance(column, Tensor)
            else [copy.copy(column[row]) for row in places]
            for name, column in self.columns.items()
        }
        part.clear(range(len(rows), len(places)))
        return part

    def to(self, device: str | torch.device) -> MemberTable:
        """Return the table with its stacks on ``device``."""
        columns = {name: c.to(device) if isinstance(c, Tensor) else c for name, c in self.columns.items()}
        return MemberTable(self.rows, columns, self.empty)

    def put(self, rows: Sequence[int], other: MemberTable) -> None:
        """Write the first rows of ``other`` over ``rows``; a column that one of the tables lacks is empty there."""
        self.clear(rows, {name.partition("/")[0] for name in self.columns.keys() - other.columns.keys()})
        index = cache(lambda device: torch.tensor(list(rows), device=device))
        for name, values in other.columns.items():
            if isinstance(values, Tensor):
                if name not in self.columns:
                    self.begin(name, values)
                column, values = self.columns[name], values[: len(rows)]
                if isinstance(rows, range) and rows.start == 0:
                    column[: len(rows)].copy_(values)
                else:
                    column.index_copy_(0, index(column.device), values.to(column.device, column.dtype))
            else:
                entries = self.columns.setdefault(name, [None] * self.rows)
                for row, entry in zip(rows, values, strict=False):
                    entries[row] = entry

    @torch.no_grad()
    def arrange(self, sources: Sequence[int]) -> None:
        """Let row b be the former row ``sources[b]``: keep, drop, copy and move members at once."""
        for name, column in self.columns.items():
            if isinstance(column, Tensor):
                self.columns[name] = moved_rows(column, sources, {})
            else:
                entries, taken = list(column), set[int]()
                column.clear()
                for source in sources:
                    column.append(copy.copy(entries[source]) if source in taken else entries[source])
                    taken.add(source)
        self.rows = len(sources)
