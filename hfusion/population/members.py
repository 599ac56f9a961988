"""Members by row: names, ages, history and options, and the views by which users read and write them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from hfusion.capture.registered_tensors import tensors
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.member_table import MemberTable, check_once, is_row, rows_of
from hfusion.core.membership import Membership, member_rows, membership
from hfusion.core.patience import numbers
from hfusion.core.step_arguments import Compile, check_loss_function
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import HyperValue, MemberVector, as_numbers, member_vector, plain, read
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.optim.optimizer_rows import explicit_everywhere, groups_taking, made_for_rows

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


Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """Decorate a method to hold the population's lock, so that a save from another thread sees no unfinished call."""

    @wraps(method)
    def called(population: Any, *args: Any, **kwargs: Any) -> Any:
        with population._lock:
            return method(population, *args, **kwargs)

    return cast("Method", called)


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

    def end_call(self, group: TrainingGroup, bad: Tensor | None, end: Callable[[], object]) -> None:
        """Call ``end`` now, or when all groups have gradients; see ``deferred``."""
        if self.deferred is None:
            end()
        else:
            self.deferred.append((group, bad, end))


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

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Context manager: add a note to errors that says which members of the population the rows of the group are."""
        try:
            yield
        except Exception as error:
            held = {row: (tag, self["row"][row]) for row, tag in enumerate(self["tag"]) if tag is not None}
            if any(row != of_population for row, (_, of_population) in held.items()):
                shown = (
                    f"member {row} is {tag!r} in row {of_population}" for row, (tag, of_population) in held.items()
                )
                error.add_note(f"In this group of the population, {', '.join(shown)}.")
            raise

    def enter(self, row: int, tag: str, population_row: int | None) -> None:
        """Write the name of a member, and its row of the population, without an event in the history."""
        self["tag"][row], self["row"][row], self["alive"][row] = tag, population_row, True

    def note(self, row: int, kind: EventKind, source: str | None = None) -> None:
        """Add an event of a member to the history."""
        self.history.events.append(Event(self.history.step, self["tag"][row], kind, source))

    def thaw(self, row: int) -> None:
        """Let a frozen member train again, from the first call of an update."""
        if bool(self["frozen"][row]):
            self.note(row, EventKind.THAW)
            self["frozen"][row] = False
            # Gradients of calls that it did not train in were added while others were amid an update.
            self.clear_updates([row])

    def freeze(self, bad: Tensor) -> None:
        """Freeze members ``bad``, bool ``[rows]``."""
        for row in bad.nonzero().reshape(-1).tolist():
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


@torch.no_grad()
def leave_out(params: Iterable[Tensor], members: Tensor) -> None:
    """Clear the gradients of ``members``, bool ``[rows]``, as if they had none."""
    for param in params:
        if (grad := param.grad) is not None:
            missing = absent_rows(grad)
            grad[members.to(grad.device)] = 0
            mark_absent(grad, members if missing is None else members | missing.cpu())


def written_rows(module: nn.Module, names: Collection[str]) -> list[tuple[str, Tensor]]:
    """Return tensors by key as ``[rows, ...]``, without those that all members share; writing there writes to them."""
    # What the forward of a plain member has assigned has no mark.
    own = Membership("", 1, stacked=False, standalone=True)
    found = [(n, t.detach(), membership(t) or own) for n, t in tensors(module) if n in names] if names else ()
    return [(name, member_rows(tensor, mark)) for name, tensor, mark in found if mark.is_own]


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


Parts = Sequence[tuple[dict[int, int], MemberVector, str]]
"""Vectors, with the entry of each row that they hold; and the error message of writes, if the param groups were given
values of their own."""


@dataclass(frozen=True, eq=False)
class RowVector:
    """A hyper-parameter of all members, ``[rows]``, to read and to write; NaN where no member has it.

    It is held in several vectors, of param groups and of groups of members. Where several hold a row, reading gives
    what they agree on, and writing writes to all. They are looked up at each use, so that members may move.

    Attributes:
        index: its place in a pair, or 0.
        label: its name in errors.
    """

    population: Population
    key: str
    index: int
    label: str

    @property
    def parts(self) -> Parts:
        return self.population.hparams.parts(self.key)[self.index]

    def __len__(self) -> int:
        return len(self.population)

    def __getitem__(self, rows: Any) -> Tensor:
        """Raises ValueError where the param groups differ."""
        values = torch.full((len(self),), float("nan"), dtype=torch.float64, device="cpu")
        differs = torch.zeros(len(self), dtype=torch.bool, device="cpu")
        for places, vector, _ in self.parts:
            taken, found = list(places), plain(vector)[list(places.values())]
            differs[taken] |= ~values[taken].isnan() & (values[taken] != found)
            values[taken] = found
        if bool(differs[rows].any()):
            raise ValueError(
                f"{self.label} differs between the param groups: read and write optimizer.param_groups[...] instead"
            )
        return values[rows]

    def __setitem__(self, rows: Any, value: Any) -> None:
        """Raises ValueError for a row whose member has no such hyper-parameter, or has its own in each param group."""
        values, parts = torch.full((len(self),), float("nan"), dtype=torch.float64, device="cpu"), self.parts
        values[rows] = as_numbers(self.label, value)
        chosen = set(torch.arange(len(self), device="cpu")[rows].reshape(-1).tolist())
        lacking = chosen.intersection(self.population._layout.live).difference(*(places for places, _, _ in parts))
        if lacking:
            raise ValueError(f"the optimizer of the member in row {min(lacking)} has no {self.label}")
        if refusals := [why for places, _, why in parts if why and chosen & places.keys()]:
            raise ValueError(refusals[0])
        for places, vector, _ in parts:
            taken = [row for row in places if row in chosen]
            vector[[places[row] for row in taken]] = values[taken]

    def tolist(self) -> list[float]:
        """Return the values of all rows. Raises ValueError where the param groups differ."""
        return cast("list[float]", self[:].tolist())

    def __repr__(self) -> str:
        parts = [{row: float(vector[entry]) for row, entry in places.items()} for places, vector, _ in self.parts]
        return f"{self.label} of {len(self)} rows, in {len(parts)} vectors: {parts}"


class Hparams(MutableMapping[str, Any]):
    """By name a float64 vector ``[rows]`` to read and write, a pair of them for betas.

    With several param groups it is the value of those that take the optimizer's default. A group that was given its own
    keeps it: read and write ``optimizer.param_groups[...]``. If one vector holds it, it is that vector itself, and a
    `RowVector` otherwise.
    """

    def __init__(self, population: Population) -> None:
        self._population = population

    def parts(self, key: str) -> dict[int, Parts]:
        """Return the vectors that hold each number of the hyper-parameter, of which betas have two."""
        population = self._population
        parts: dict[int, list[tuple[dict[int, int], MemberVector, str]]] = {}
        for group in population._groups:
            optimizer, rows = group.optimizer, group.rows if population._parted else range(len(group))
            hypers = [hyper for hyper in optimizer.hypers if hyper.key == key]
            taking = groups_taking(optimizer, key) if hypers else []
            refusal = explicit_everywhere(optimizer, key) if hypers and not taking else ""
            places = {row: local for local, row in enumerate(rows) if row is not None}
            for param_group in taking or optimizer.param_groups:
                for index, vector in enumerate(read(param_group, hypers, optimizer.members)[0]):
                    parts.setdefault(index, []).append((places, vector, refusal))
        if not parts:
            kinds = " and ".join(dict.fromkeys(type(group.optimizer).__name__ for group in population._groups))
            raise KeyError(f"{key!r} is no hyper-parameter of {kinds}; it has {list(self)}")
        return {**parts}

    def __getitem__(self, key: str) -> Any:
        population, parts, vectors = self._population, self.parts(key), list[Any]()
        for index, of_index in parts.items():
            joined = RowVector(population, key, index, key if len(parts) == 1 else f"{key}[{index}]")
            vectors.append(joined if population._parted or len(of_index) > 1 else of_index[0][1])
        return vectors[0] if len(vectors) == 1 else tuple(vectors)

    def __setitem__(self, key: str, value: Any) -> None:
        """Raises ValueError for what is no number or one for each row, and is out of range."""
        population, held = self._population, self[key]
        if isinstance(held, tuple) and (not isinstance(value, tuple | list) or len(value) != len(held)):
            raise ValueError(f"{key}={value!r} is not a pair")
        vectors, values = (held, value) if isinstance(held, tuple) else ((held,), (value,))
        hypers = [hyper for group in population._groups for hyper in group.optimizer.hypers if hyper.key == key]
        new = [member_vector(h.label, v, len(population)) for h, v in zip(hypers, values, strict=False)]
        live = population._layout.live if population._parted else range(len(population))
        for hyper, vector in zip(hypers, new, strict=False):
            hyper.check([vector.tolist()[row] for row in live], live)
        for held_vector, vector in zip(vectors, new, strict=True):
            held_vector[:] = vector.as_subclass(Tensor)

    def __delitem__(self, key: str) -> None:
        raise TypeError("hyper-parameters cannot be taken away")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(hyper.key for group in self._population._groups for hyper in group.optimizer.hypers))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"Hparams({', '.join(f'{key}={self[key]}' for key in self)})"


class MemberSchedules:
    """The schedules of members of several groups, as those of a `hfusion.optim.lr_scheduler.PerMember`."""

    def __init__(self, population: Population) -> None:
        self._population = population

    def step(
        self,
        epoch: int | None = None,
        *,
        rows: Sequence[int] | None = None,
        metrics: Tensor | Sequence[float] | None = None,
    ) -> None:
        """One step of every member's scheduler, or of those of members ``rows``. ``metrics``: one number per row."""
        count = len(self._population)
        given = None if metrics is None else numbers("metrics", metrics, count)
        chosen = range(count) if rows is None else rows_of(rows, count)
        check_once(chosen)
        for group, local in self._population._by_group(chosen):
            of_group = None if given is None else [given[row] for row in group.entries()]
            group.scheduler.step(epoch, rows=None if rows is None else local, metrics=of_group)

    def restart(self, rows: int | Sequence[int], make: Make | Sequence[Make] | None = None) -> None:
        """Let members begin their schedules, or those that ``make`` makes, from their present hyper-parameters."""
        chosen = rows_of(rows, len(self._population))
        makes = [None] * len(chosen) if make is None else one_for_each(make, len(chosen))
        for row, of_row in zip(chosen, makes, strict=True):
            group, local = self._population._layout.slot_of(row)
            group.scheduler.restart(local, of_row)

    @property
    def kinds(self) -> list[str]:
        """The class of the scheduler of each row that holds a member."""
        return [group.scheduler.kinds[local] for group, local in filter(None, self._population._layout.slots)]

    def get_last_lr(self) -> list[Tensor]:
        """The learning rates that were set last, for each param group ``[rows]``."""
        rates = [group.scheduler.get_last_lr() for group in self._population._groups]
        return [self._population._layout.collected(list(of_group)) for of_group in zip(*rates, strict=True)]

    @property
    def last_epochs(self) -> Tensor:
        """Number of steps of each member's scheduler: ``[rows]``."""
        return self._population._layout.collected([group.scheduler.last_epochs for group in self._population._groups])


def listed(name: str, value: Any, kind: type) -> list[Any]:
    """Return ``value`` as a list; a single value of type ``kind`` gives a list of one. Raises ValueError."""
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} must be one {kind.__name__}, or one for each row, got {value!r}")
    return list(value)


# Options that the groups of a population share, and what a group gets of them.

OnNonfinite = Literal["freeze", "raise", "ignore"]

LIMITS = ("clip_norm", "clip_value")
"""The columns of bounds of the members' gradients, float64 ``[rows]``: of their norm, and of their magnitude."""


class GroupOptions:
    """The arguments of a population.

    Attributes:
        total: the number of initial members, which is the length of optimizer options with a value per member.
        schedules: the function that makes each initial member's scheduler; None without schedulers.
        scaler: the scaler, with the scales of the initial members; None without one.
        numbers: the gradient limits and the numbers of calls per update of the initial members, in columns.
        initial: by the name of such a column the value that all members began with, the default of joining members;
            None where they differed. A limit is missing where nothing is clipped by it.
        initial_hypers: after a load, the hyper-parameters of each param group that the saved members once began with;
            None: those that ``optimizer`` sets.
        history: of the population.
        others: see `hfusion.Population`.

    Raises:
        ValueError: a list without ``total`` values, or a loss of `hfusion.per_model`.
    """

    def __init__(
        self,
        total: int,
        optimizer: Callable[[Any], FusedOptimizer],
        loss: Callable[..., Any],
        scheduler: Make | Sequence[Make] | None = None,
        scaler: GradScaler | None = None,
        clip_norm: HyperValue | None = None,
        clip_value: HyperValue | None = None,
        accumulate: int | Sequence[int] = 1,
        on_nonfinite: OnNonfinite = "freeze",
        compile: Compile = None,
        memory: str | int | None = None,
        processes: int = 1,
    ) -> None:
        check_loss_function(loss)
        if not callable(optimizer):
            kind = type(optimizer).__name__
            raise ValueError(f"optimizer must be a function that makes one from parameters, got {kind}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ValueError(
                f"scaler is of {type(scaler).__module__}.{type(scaler).__qualname__}: give one of hf.optim, which has "
                "a scale for each member"
            )
        if not is_row(processes) or processes < 0:
            raise ValueError(
                f"processes={processes!r}: give a whole number of processes, such as 2. 1 is this one alone."
            )
        if on_nonfinite not in ("freeze", "raise", "ignore"):
            raise ValueError(f'on_nonfinite={on_nonfinite!r}: it is "freeze", "raise" or "ignore"')
        self.total, self.optimizer, self.loss, self.on_nonfinite = total, optimizer, loss, on_nonfinite
        self.compile, self.memory, self.processes = compile, memory, processes
        self.schedules = None if scheduler is None else tuple(one_for_each(scheduler, total))
        self.scaler = copy.deepcopy(scaler)
        if self.scaler is not None:
            self.scaler.begin(total)
        self.numbers = MemberTable(
            total, check_numbers(total, clip_norm=clip_norm, clip_value=clip_value, accumulate=accumulate)
        )
        columns = self.numbers.columns.items()
        self.initial: dict[str, Any] = {
            name: column[0].item() if len(column.unique()) == 1 else None for name, column in columns
        }
        self.initial_hypers: list[dict[str, float | None]] | None = None
        self.history = History()

    def optimizer_of(self, module: Any, rows: Sequence[int]) -> FusedOptimizer:
        """Make the optimizer of a group whose members began in ``rows``. Raises ValueError for one of another kind.

        Of options with a value for each of ``total`` members, such as learning rates, the group gets those of ``rows``.
        """
        params = list(module.parameters())
        optimizer = made_for_rows(lambda params: self.optimizer(iter(params)), params, rows, self.total)
        if not isinstance(optimizer, FusedOptimizer):
            raise ValueError(
                f"optimizer gave {type(optimizer).__name__}, whose state has no rows: give one of hf.optim"
            )
        if self.initial_hypers is not None and len(self.initial_hypers) == len(optimizer.initial_values):
            optimizer.initial_values = copy.deepcopy(self.initial_hypers)
        return optimizer


def value_of(name: str, value: Any, index: int, count: int, *, pair: bool = False) -> Any:
    """Return the value for one of ``count`` joining members, from one for all or a list. Raises ValueError.

    ``pair``: whether it is a pair, of which each number may be a list of the members'. A list of pairs is one for each.
    """
    pairs = isinstance(value, list) and len(value) == count and all(isinstance(v, tuple | list) for v in value)
    if pair and isinstance(value, tuple | list) and len(value) == 2 and not pairs:
        return tuple(value_of(name, item, index, count) for item in value)
    several = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)
    if not several:
        return value
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} members that join: give one value, or {count}")
    return float(value[index]) if isinstance(value[index], torch.Tensor) else value[index]


def check_numbers(rows: int, **given: Any) -> dict[str, Tensor]:
    """Return the numbers that are not None, as a column ``[rows]`` each.

    Args:
        rows: the number of members.
        given: ``accumulate``, and limits of gradients: one value, or one for each member.

    Raises:
        ValueError: a wrong number of values, a limit below 0, or ``accumulate`` below 1.
    """
    columns = {}
    for name, value in given.items():
        if name == "accumulate":
            calls = value.tolist() if isinstance(value, Tensor) else value
            calls = [calls] * rows if isinstance(calls, int) else list(calls or ())
            if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in calls):
                raise ValueError(f"accumulate={value}: at least one call of step makes an update, and a whole number")
            if len(calls) != rows:
                raise ValueError(f"accumulate has {len(calls)} values for {rows} members: give one, or one for each")
            columns[name] = torch.tensor(calls, dtype=torch.int64, device="cpu")
        elif value is not None:
            columns[name] = plain(member_vector(name, value, rows))
            if not bool((columns[name] >= 0).all()):
                raise ValueError(f"{name}={columns[name].tolist()}: every limit must be at least 0")
    return columns
