"""A table of members: named columns with an entry for each row, which are taken, written and rearranged together."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from hfusion.core.row_indices import moved_rows


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
