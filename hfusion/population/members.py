"""Members by row: names, ages, and their history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.core.copies import module_copy
from hfusion.core.errors import NonFiniteError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import is_per_member
from hfusion.core.row_indices import check_once
from hfusion.population.plain_module import PlainModule

if TYPE_CHECKING:
    from hfusion.population.population import Population


class EventKind(StrEnum):
    """Kinds of events in a member's history."""

    START = "start"
    STOP = "stop"
    COPY = "copy"
    FREEZE = "freeze"
    THAW = "thaw"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of member ``tag`` at a step of the population; ``source`` is the member it was copied from."""

    step: int
    tag: str
    what: EventKind
    source: str | None = None

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} {self.tag}" + (f" from {self.source}" if self.source else "")


EMPTY = {
    "tag": None,
    "row": None,
    "alive": False,
    "age": 0,
    "frozen": False,
    "done": 0,
    "spoilt": False,
    "sum": 0,
    "absent": True,
    "clip_norm": math.inf,
    "clip_value": math.inf,
}
"""What a free row of a group has in the columns of its table."""
NO_BEST = {"score": math.nan, "age": -1, "waited": 0, "weights": 0}
"""What a member that had no metric has in the columns of best weights."""


def no_best(rows: int) -> MemberTable:
    """Return the table of best weights of members that had no metric."""
    columns = {name: torch.full((rows,), NO_BEST[name], device="cpu") for name in ("score", "age", "waited")}
    return MemberTable(rows, {**columns, "score": columns["score"].double()}, NO_BEST)


class Roll:
    """The members of a group by row, in columns of its table, and the history of the population.

    The columns are ``tag``, the member's name, and ``row``, its row of the population, both None where a row is free;
    ``alive``, whether it is taken; ``age``, the number of the member's updates; ``frozen``, whether it makes no steps
    since a loss or gradient was not finite; and ``key``, which determines the random numbers of compiled steps: it is
    computed from the member's name, and a copy has the key of its source.

    Attributes:
        step: the number of updates of the population.
        lineage: its history, which all groups share.
    """

    def __init__(self, table: MemberTable, step: int = 0) -> None:
        self._table, self.step, self.lineage = table, step, list[Event]()

    @staticmethod
    def begin(table: MemberTable) -> Roll:
        """Add columns of free rows to a table."""
        nobody = torch.zeros(table.rows, dtype=torch.int64, device="cpu")
        table["tag"], table["row"] = [None] * table.rows, [None] * table.rows
        table.columns |= {"alive": nobody.bool(), "age": nobody, "frozen": nobody.bool(), "key": nobody.clone()}
        return Roll(table)

    @property
    def tags(self) -> list[str | None]:
        return self._table["tag"]  # type: ignore[no-any-return]

    @property
    def alive(self) -> Tensor:
        return self._table["alive"]  # type: ignore[no-any-return]

    @property
    def ages(self) -> Tensor:
        return self._table["age"]  # type: ignore[no-any-return]

    @property
    def frozen(self) -> Tensor:
        return self._table["frozen"]  # type: ignore[no-any-return]

    @property
    def keys(self) -> Tensor:
        return self._table["key"]  # type: ignore[no-any-return]

    @property
    def live(self) -> list[int]:
        """The rows that are taken."""
        return [row for row, tag in enumerate(self.tags) if tag is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, tag in enumerate(self.tags) if tag is None]

    def count_step(self) -> None:
        """Count a step that all members have made."""
        self.ages.add_(self.alive)
        self.step += 1

    def tag(self, row: int) -> str:
        """Return the name of the member in a row. Raises ValueError for a free row."""
        name = self.tags[row]
        if name is None:
            raise ValueError(f"row {row} is free; members are in rows {self.live}")
        return name

    def enter(self, row: int, tag: str, source: str | None = None) -> None:
        """Record a member in a free row: a new one, or with ``source`` a copy of the member of that name."""
        self.rename(row, tag)
        if source is None:
            self.keys[row] = key_of(tag)
        self.note(row, EventKind.START if source is None else EventKind.COPY, source)

    def rename(self, row: int, tag: str | None) -> None:
        """Write the name in a row without an event in the history; None frees the row."""
        self.tags[row], self.alive[row] = tag, tag is not None

    def thaw(self, row: int) -> None:
        """Let a frozen member train again."""
        if bool(self.frozen[row]):
            self.note(row, EventKind.THAW)
            self.frozen[row] = False

    def note(self, row: int, kind: EventKind, source: str | None = None) -> None:
        """Add an event of a member to the history."""
        self.lineage.append(Event(self.step, self.tag(row), kind, source))

    def freeze(self, bad: Tensor, raises: bool) -> None:
        """Freeze members ``bad``, bool ``[rows]``, or raise a NonFiniteError that names them."""
        rows = bad.nonzero().reshape(-1).tolist()
        if rows and raises:
            raise nonfinite([(self._table["row"][row], self.tag(row)) for row in rows], self.step)
        for row in rows:
            self.note(row, EventKind.FREEZE)
        self.frozen.logical_or_(bad)


@dataclass
class Names:
    """The names of a population's members. ``number``: the number in the next generated name."""

    number: int = 0

    def given(self, tags: Sequence[str | None], taken: Sequence[str | None]) -> list[str]:
        """Return the names of new members beside those ``taken``, by row; None stands for a generated one.

        Raises ValueError for a name that is invalid, repeated or in use.
        """
        for tag in tags:
            if tag is not None:
                check_name(tag, taken)
        named = [tag for tag in tags if tag is not None]
        if len(set(named)) < len(named):
            raise ValueError(f"tag={list(tags)}: every member has a name of its own")
        used, names = {*taken, *named}, []
        for tag in tags:
            while tag is None:
                generated, self.number = f"member {self.number}", self.number + 1
                tag = None if generated in used else generated
            names.append(tag)
        return names


def check_name(tag: Any, taken: Sequence[str | None]) -> None:
    """Raise a ValueError for a name that is invalid or in use."""
    if not isinstance(tag, str) or not tag:
        raise ValueError(f"tag={tag!r}: a member's name is a string with something in it")
    if not tag.isprintable() and any(0xD800 <= ord(letter) < 0xE000 for letter in tag):
        raise ValueError(f"tag={tag!r}: a member's name has letters that no file can hold (lone surrogates)")
    if tag in taken:
        raise ValueError(f"tag={tag!r} is the name of the member in row {taken.index(tag)}: give another")


def check_start(rows: Sequence[int], tags: Sequence[str | None], taken: Sequence[str | None], models: int) -> None:
    """Raise a ValueError unless as many members can start in these rows; ``taken``: the present names by row."""
    check_once(rows)
    if not len(rows) == models == len(tags):
        raise ValueError(f"{models} models with {len(tags)} tags for {len(rows)} rows: give one for each")
    for row in rows:
        if row < len(taken) and taken[row] is not None:
            free = [other for other, tag in enumerate(taken) if tag is None]
            raise ValueError(f"row {row} is taken by {taken[row]!r}: stop it first; rows {free} are free")


def nonfinite(members: Sequence[tuple[int, str]], step: int) -> NonFiniteError:
    """Return the error for members, as pairs of row and name, that are not finite in a step."""
    shown = ", ".join(f"{tag!r} (row {row})" for row, tag in sorted(members))
    return NonFiniteError(
        f"the loss or a gradient of {shown} is not finite in step {step}; nothing was updated: lower its "
        'learning rate, stop it, or give on_nonfinite="freeze"'
    )


def key_of(tag: str) -> int:
    """Return the key for the random numbers of a member of this name, the same in every process."""
    return int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "little", signed=True)


class Models(Sequence[nn.Module | None]):
    """The members as modules, by row: live views of an array, or a plain member itself; None where a row is free."""

    def __init__(self, population: Population) -> None:
        self._population = population

    def __len__(self) -> int:
        return len(self._population)

    @overload
    def __getitem__(self, index: int) -> nn.Module | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Module | None]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module | None] | None:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        slot = self._population._layout.slots[index]
        return None if slot is None else slot[0].fused[slot[1]]

    def __iter__(self) -> Iterator[nn.Module | None]:
        return (self[row] for row in range(len(self)))


def listed(name: str, value: Any, kind: type) -> list[Any]:
    """Return ``value`` as a list; a single value of type ``kind`` gives a list of one. Raises ValueError."""
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} must be one {kind.__name__}, or one for each row, got {value!r}")
    return list(value)


def apart(fused: FusedModule | PlainModule, row: int) -> nn.Module:
    """Return a copy of a member that shares the frozen parameters of all members."""
    if isinstance(fused, PlainModule):
        # This works even if the user has changed the model to one that its optimizer does not fit.
        return fused.copied()
    view = fused._views.members.get(row)
    model = fused._member(row) if view is None else view.model
    per_member = {name for name, parameter in fused.named_parameters() if is_per_member(parameter)}
    frozen = [p for name, p in model.named_parameters() if name not in per_member and not p.requires_grad]
    return module_copy(model, {id(parameter): parameter for parameter in frozen})
