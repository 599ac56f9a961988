"""Members by row: names, ages, and their history."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import NonFiniteError
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import is_per_member, member_rows
from hfusion.optim.group import membership_of

if TYPE_CHECKING:
    from hfusion.population.population import Population
    from hfusion.population.training_group import TrainingGroup


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


@dataclass
class History:
    """The number of updates of a population, and the events of its members, in order.

    Attributes:
        updated: whether a group has made an update in the present step, which is counted at its end.
        deferred: collects the ends of calls if they wait until all groups have gradients: the group, its members whose
            values are not finite, and the function that makes the update.
    """

    step: int = 0
    events: list[Event] = field(default_factory=list)
    updated: bool = False
    deferred: list[tuple[TrainingGroup, Tensor | None, Callable[[], object]]] | None = None

    def end_step(self) -> None:
        """Count the updates of all groups in a step as one."""
        self.step, self.updated = self.step + self.updated, False


class GroupTable(MemberTable):
    """The members of a group by row: names, ages, and the progress of their updates.

    Columns about the member:

    - ``tag``: its name, and ``row``, its row of the population. Both are None where a row is free.
    - ``alive``: whether the row is taken.
    - ``age``: the number of its updates.
    - ``frozen``: whether it makes no steps since a loss or gradient was not finite.
    - ``key``: determines the random numbers of compiled steps. It is computed from the name; a copy has its source's.
    - ``clip_norm``, ``clip_value``: limits of its gradients, where the population has them.

    Columns about its present update:

    - ``accumulate``: how many calls make an update, and ``done``: how many were made.
    - ``sum/NAME``: the sum of a parameter's gradients, kept outside of ``grad``, which a compiled step overwrites.
      A row without a gradient so far is zero, and marked in ``absent/NAME``.

    Args:
        numbers: the columns ``accumulate``, ``clip_norm`` and ``clip_value`` of the members.
        history: of the population.
    """

    def __init__(self, numbers: MemberTable, history: History) -> None:
        super().__init__(numbers.rows, numbers.columns, EMPTY)
        nothing = torch.zeros(self.rows, dtype=torch.int64, device="cpu")
        self.columns |= {"tag": [None] * self.rows, "row": [None] * self.rows}
        self.columns |= {name: nothing.bool() for name in ("alive", "frozen")}
        self.columns |= {name: nothing.clone() for name in ("age", "key", "done")}
        self.history = history

    @property
    def live(self) -> list[int]:
        """The rows that are taken."""
        return [row for row, tag in enumerate(self["tag"]) if tag is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, tag in enumerate(self["tag"]) if tag is None]

    def tag(self, row: int) -> str:
        """Return the name of the member in a row. Raises ValueError for a free row."""
        name: str | None = self["tag"][row]
        if name is None:
            raise ValueError(f"row {row} is free; members are in rows {self.live}")
        return name

    def enter(self, row: int, tag: str, population_row: int | None) -> None:
        """Write the name of a member, and its row of the population, without an event in the history."""
        self["tag"][row], self["row"][row], self["alive"][row] = tag, population_row, True

    def note(self, row: int, kind: EventKind, source: str | None = None) -> None:
        """Add an event of a member to the history."""
        self.history.events.append(Event(self.history.step, self.tag(row), kind, source))

    def thaw(self, row: int) -> None:
        """Let a frozen member train again, from the first call of an update."""
        if bool(self["frozen"][row]):
            self.note(row, EventKind.THAW)
            self["frozen"][row] = False
            # Gradients of calls that it did not train in were added while others were amid an update.
            self.clear_updates([row])

    def freeze(self, bad: Tensor, raises: bool) -> None:
        """Freeze members ``bad``, bool ``[rows]``, or raise a NonFiniteError that names them."""
        rows = bad.nonzero().reshape(-1).tolist()
        if rows and raises:
            raise nonfinite([(self["row"][row], self.tag(row)) for row in rows], self.history.step)
        for row in rows:
            self.note(row, EventKind.FREEZE)
        self["frozen"].logical_or_(bad)

    # Updates that take several calls.

    @property
    def underway(self) -> bool:
        """True if a member has made some of the calls of an update."""
        return bool(self["done"].any())

    def put(self, rows: Sequence[int], other: MemberTable) -> None:
        super().put(rows, other)
        self.clear_updates(())

    def clear_updates(self, rows: Sequence[int]) -> None:
        """Discard the unfinished updates of members ``rows``."""
        self.clear(rows, ("done", "sum", "absent"))
        if not self.underway:
            self.drop("sum", "absent")

    @torch.no_grad()
    def summed(self, params: Iterable[tuple[str, Tensor]], *, last: bool = False) -> dict[str, Tensor]:
        """Return the columns of sums with the gradients of one more call. The table does not change.

        ``last``: whether the update of all members is complete, so that gradients may be written over.
        """
        columns: dict[str, Tensor] = {}
        for name, param in params:
            total, absent = self.columns.get(f"sum/{name}"), self.columns.get(f"absent/{name}")
            if param.grad is not None:
                grad, missing = member_rows(param.grad, membership_of(param)), absent_rows(param.grad)
                missing = torch.zeros(self.rows, dtype=torch.bool, device="cpu") if missing is None else missing.cpu()
                # Cloned, since a replayed step writes its gradients to the same memory again.
                total = grad.clone() if total is None else grad.add_(total) if last else grad + total
                absent = missing if absent is None else absent & missing
            if total is not None and absent is not None:
                columns |= {f"sum/{name}": total, f"absent/{name}": absent}
        return columns

    @torch.no_grad()
    def hand_over(self, params: Iterable[tuple[str, Tensor]], sums: Mapping[str, Tensor], due: Tensor) -> None:
        """Write ``sums`` of members ``due``, bool ``[rows]``, to the parameters' ``grad``, and 0 for others."""
        anybody, everybody = bool(due.any()), bool(due.all())
        for name, param in params:
            param.grad = None
            if not anybody or f"sum/{name}" not in sums:
                continue
            total, absent = sums[f"sum/{name}"], sums[f"absent/{name}"]
            if membership_of(param).standalone:
                param.grad = None if bool(absent) else total[0]
                continue
            param.grad = total if everybody else total.clone()
            if not everybody:
                param.grad[~due.to(total.device)] = 0
            mark_absent(param.grad, absent | ~due)

    def count(self, done: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Note that a call was made: ``done`` replaces the column, and sums stay of members amid an update."""
        self["done"] = done
        if self.underway:
            self.columns |= sums
        self.clear_updates((done == 0).nonzero().reshape(-1).tolist() if self.underway else ())


def written_rows(module: nn.Module, names: Collection[str]) -> list[tuple[str, Tensor]]:
    """Return tensors by key as ``[rows, ...]``, without those that all members share; writing there writes to them."""
    found = ((name, tensor) for name, tensor in tensors(module) if name in names) if names else ()
    return [(n, member_rows(t.detach(), membership_of(t))) for n, t in found if is_per_member(t)]


def new_names(tags: Sequence[str | None], taken: Sequence[str | None], history: History) -> list[str]:
    """Return the names of new members beside those ``taken``, by row; None stands for one that no member has had.

    Raises ValueError for a name that is invalid, repeated or in use.
    """
    for tag in tags:
        if tag is not None:
            check_name(tag, taken)
    named = [tag for tag in tags if tag is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"tag={list(tags)}: every member has a name of its own")
    used = {*taken, *named, *(event.tag for event in history.events)}
    unused = (name for name in map("member {}".format, itertools.count()) if name not in used)
    return [next(unused) if tag is None else tag for tag in tags]


def check_name(tag: Any, taken: Sequence[str | None]) -> None:
    """Raise a ValueError for a name that is invalid or in use."""
    if not isinstance(tag, str) or not tag:
        raise ValueError(f"tag={tag!r}: a member's name is a string with something in it")
    if not tag.isprintable() and any(0xD800 <= ord(letter) < 0xE000 for letter in tag):
        raise ValueError(f"tag={tag!r}: a member's name has letters that no file can hold (lone surrogates)")
    if tag in taken:
        raise ValueError(f"tag={tag!r} is the name of the member in row {taken.index(tag)}: give another")


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
        return None if slot is None else slot[0].member(slot[1])


def listed(name: str, value: Any, kind: type) -> list[Any]:
    """Return ``value`` as a list; a single value of type ``kind`` gives a list of one. Raises ValueError."""
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} must be one {kind.__name__}, or one for each row, got {value!r}")
    return list(value)
