"""Members by row: names, ages, and their history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, overload

import torch
from torch import Tensor, nn

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.core.copies import module_copy
from hfusion.core.errors import NonFiniteError
from hfusion.core.membership import is_per_member
from hfusion.core.row_indices import check_once
from hfusion.population.plain_module import PlainModule


def population_array(models: Sequence[nn.Module] | FusedModule) -> FusedModule:
    """Return the array of a population's members."""
    return models if isinstance(models, FusedModule) else fuse(models)


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


@dataclass
class Roll:
    """The members by row: ``tags[row]`` is None where a row is free; ``ages`` counts the members' updates.

    ``frozen`` marks members that make no steps, since a loss or gradient was not finite. ``keys`` determine the random
    numbers of compiled steps: a member's key is computed from its name, and a copy has the key of its source.
    ``whole_rows``: the population's rows, if these are only some of them; None if they are all.
    """

    tags: list[str | None]
    ages: Tensor
    frozen: Tensor
    keys: Tensor
    step: int = 0
    lineage: list[Event] = field(default_factory=list)
    tag_number: int = 0
    whole_rows: Sequence[int] | None = None
    _alive: Tensor | None = None

    @staticmethod
    def of(count: int, tags: Sequence[str] | None) -> Roll:
        """Return the rows of ``count`` new members. Raises ValueError for invalid or repeated names."""
        ages = torch.zeros(count, dtype=torch.int64, device="cpu")
        frozen = torch.zeros(count, dtype=torch.bool, device="cpu")
        roll = Roll([None] * count, ages, frozen, ages.clone())
        if tags is not None and len(tags) != count:
            raise ValueError(f"{len(tags)} tags for {count} models: give one for each")
        for row in range(count):
            roll.enter(row, None if tags is None else tags[row])
        return roll

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def live(self) -> list[int]:
        """The rows that are taken."""
        return [row for row, tag in enumerate(self.tags) if tag is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, tag in enumerate(self.tags) if tag is None]

    @property
    def alive(self) -> Tensor:
        """Rows that have a member: bool ``[rows]``."""
        if self._alive is None:
            self._alive = torch.tensor([tag is not None for tag in self.tags], device="cpu")
        return self._alive

    def count_step(self) -> None:
        """Count a step that all members have made."""
        self.ages += self.alive
        self.step += 1

    def tag(self, row: int) -> str:
        """Return the name of the member in a row. Raises ValueError for a free row."""
        name = self.tags[row]
        if name is None:
            raise ValueError(f"row {row} is free; members are in rows {self.live}")
        return name

    def label(self, row: int) -> str:
        """Return the name of the member in ``row``, with its row in the whole population."""
        return f"{self.tag(row)!r} (row {row if self.whole_rows is None else self.whole_rows[row]})"

    def row(self, tag: str) -> int:
        """Return the row of a member. Raises KeyError."""
        try:
            return self.tags.index(tag)
        except ValueError:
            raise KeyError(f"{tag!r} is no member; members are {[t for t in self.tags if t is not None]}") from None

    def check_tag(self, tag: str) -> None:
        """Raise a ValueError for a name that is invalid or in use."""
        if not isinstance(tag, str) or not tag:
            raise ValueError(f"tag={tag!r}: a member's name is a string with something in it")
        if not tag.isprintable() and any(0xD800 <= ord(letter) < 0xE000 for letter in tag):
            raise ValueError(f"tag={tag!r}: a member's name has letters that no file can hold (lone surrogates)")
        if tag in self.tags:
            raise ValueError(f"tag={tag!r} is the name of the member in row {self.tags.index(tag)}: give another")

    def check_start(self, rows: Sequence[int], tags: Sequence[str | None], models: int) -> None:
        """Raise a ValueError unless members of these names can start in these rows; None stands for a new name."""
        check_once(rows)
        if not len(rows) == models == len(tags):
            raise ValueError(f"{models} models with {len(tags)} tags for {len(rows)} rows: give one for each")
        for row in rows:
            if self.tags[row] is not None:
                raise ValueError(f"row {row} is taken by {self.tags[row]!r}: stop it first; rows {self.free} are free")
        names = [tag for tag in tags if tag is not None]
        for tag in names:
            self.check_tag(tag)
        if len(set(names)) < len(names):
            raise ValueError(f"tag={list(tags)}: every member has a name of its own")

    def check_width(self, members: int) -> None:
        """Raise a ValueError unless the array has as many members as there are rows."""
        if members != len(self):
            raise ValueError(
                f"the array has {members} members and the population {len(self)} rows: let members join by pop.start "
                "and leave by pop.stop and pop.compact, which move all that belongs to them"
            )

    def enter(self, row: int, tag: str | None, source: int | None = None) -> None:
        """Record a new member in a free row; with ``source``, a copy of the member in that row."""
        if tag is None:
            tag = self._new_tag()
        self.check_tag(tag)
        self.tags[row] = tag
        self._alive = None
        self.frozen[row] = False
        self.ages[row] = 0 if source is None else self.ages[source]
        self.keys[row] = key_of(tag) if source is None else self.keys[source]
        origin = None if source is None else self.tag(source)
        self.lineage.append(Event(self.step, tag, EventKind.START if source is None else EventKind.COPY, origin))

    def _new_tag(self) -> str:
        while True:
            tag, self.tag_number = f"member {self.tag_number}", self.tag_number + 1
            if tag not in self.tags:
                return tag

    def leave(self, row: int) -> None:
        self.note(row, EventKind.STOP)
        self.tags[row] = None
        self._alive = None
        self.frozen[row] = False

    def thaw(self, row: int) -> None:
        self.tag(row)
        if bool(self.frozen[row]):
            self.note(row, EventKind.THAW)
            self.frozen[row] = False

    def note(self, row: int, kind: EventKind, source: str | None = None) -> None:
        self.lineage.append(Event(self.step, self.tag(row), kind, source))

    def of_rows(self, rows: Sequence[int], width: int) -> Roll:
        """Return the roll of the members in ``rows``, followed by free rows up to ``width``."""
        free = width - len(rows)
        places = [*rows, *[rows[0]] * free]
        ages, frozen, keys = (values[places] for values in (self.ages, self.frozen, self.keys))
        tags: list[str | None] = [*map(self.tag, rows), *[None] * free]
        return Roll(tags, ages, frozen, keys, self.step, [], self.tag_number, places)

    def put_rows(self, rows: Sequence[int], part: Roll) -> None:
        """Copy ages, frozen flags and new events of the first members of ``part`` to the members in ``rows``."""
        places, count = list(rows), len(rows)
        self.ages[places], self.frozen[places] = part.ages[:count], part.frozen[:count]
        self.step = part.step
        self.lineage += part.lineage

    def rearrange(self, sources: Sequence[int | None]) -> None:
        """Let row b be the former row ``sources[b]``; None makes a free row."""
        rows = [0 if source is None else source for source in sources]
        empty = torch.tensor([source is None for source in sources], device="cpu")
        self.tags = [None if source is None else self.tags[source] for source in sources]
        self._alive = None
        self.ages = torch.where(empty, 0, self.ages[rows])
        self.keys = self.keys[rows]
        self.frozen = self.frozen[rows] & ~empty


def freeze(roll: Roll, bad: Tensor, raises: bool) -> None:
    """Freeze members ``bad``, bool ``[rows]``, or raise a NonFiniteError that names them."""
    rows = bad.nonzero().reshape(-1).tolist()
    if rows and raises:
        raise NonFiniteError(
            f"the loss or a gradient of {', '.join(map(roll.label, rows))} is not finite in step {roll.step}; nothing "
            'was updated: lower its learning rate, stop it, or give on_nonfinite="freeze"'
        )
    for row in rows:
        roll.note(row, EventKind.FREEZE)
    roll.frozen |= bad


def key_of(tag: str) -> int:
    """Return the key for the random numbers of a member of this name, the same in every process."""
    return int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "little", signed=True)


class Models(Sequence[nn.Module | None]):
    """The members as modules, by row: live views of an array, or a plain member itself; None where a row is free."""

    def __init__(self, rows: Sized, member: Callable[[int], nn.Module | None]) -> None:
        self._rows, self._member = rows, member

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> nn.Module | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Module | None]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module | None] | None:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._member(index)

    def __iter__(self) -> Iterator[nn.Module | None]:
        return (self[row] for row in range(len(self)))


class MembersByRow:
    """Views of a population's members by row."""

    fused: FusedModule
    _roll: Roll

    def __len__(self) -> int:
        """The number of rows, free ones too."""
        return len(self._roll)

    @property
    def models(self) -> Models:
        """The members by row, as modules that are live views; None where a row is free."""
        return Models(self._roll, self._model)

    def _model(self, row: int) -> nn.Module | None:
        return None if self._roll.tags[row] is None else self.fused[row]

    @property
    def tags(self) -> list[str | None]:
        """The members' names by row; None where a row is free."""
        return list(self._roll.tags)

    @property
    def ages(self) -> Tensor:
        """Number of updates of the member in each row: int64 ``[rows]``."""
        return self._roll.ages.clone()

    @property
    def frozen(self) -> list[int]:
        """The rows of members left out of steps after a loss or gradient was not finite; see ``on_nonfinite``."""
        rows: list[int] = self._roll.frozen.nonzero().reshape(-1).tolist()
        return rows

    @property
    def lineage(self) -> tuple[Any, ...]:
        """History of the members, in order: events with ``step``, ``tag``, ``what``, ``source``."""
        return tuple(self._roll.lineage)

    @property
    def steps(self) -> int:
        """Number of updates of the population."""
        return self._roll.step

    def row(self, tag: str) -> int:
        """Return the row of the member with this name. Raises KeyError."""
        return self._roll.row(tag)


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
