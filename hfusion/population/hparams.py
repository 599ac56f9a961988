"""Hyper-parameters and schedules of a population's members, live: what is written there holds from the next step on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hfusion.core.patience import numbers
from hfusion.core.row_indices import rows_of
from hfusion.optim.hyper import MemberVector, member_vector, plain, read
from hfusion.optim.lr_scheduler import Make, PerMember, one_for_each
from hfusion.optim.optimizer_rows import explicit_everywhere, groups_taking

if TYPE_CHECKING:
    from hfusion.population.population import Population
    from hfusion.population.training_group import TrainingGroup


@dataclass(frozen=True, eq=False)
class RowVector:
    """A hyper-parameter of all members, ``[rows]``, to read and to write; NaN where no member has it.

    It is held in several vectors, of param groups and of groups of members. Where several hold a row, reading gives
    what they agree on, and writing writes to all.

    Attributes:
        label: its name in errors.
        size: the number of rows.
        parts: the vectors, with the entry of each row that they hold; and the error message of writes, if the param
            groups were given values of their own.
        live: the rows that have members.
    """

    label: str
    size: int
    parts: Sequence[tuple[dict[int, int], MemberVector, str]]
    live: Collection[int]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rows: Any) -> Tensor:
        """Raises ValueError where the param groups differ."""
        values = torch.full((self.size,), float("nan"), dtype=torch.float64, device="cpu")
        differs = torch.zeros(self.size, dtype=torch.bool, device="cpu")
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
        values = torch.full((self.size,), float("nan"), dtype=torch.float64, device="cpu")
        written = torch.zeros(self.size, dtype=torch.bool, device="cpu")
        values[rows], written[rows] = torch.as_tensor(value, dtype=torch.float64, device="cpu"), True
        chosen = set(written.nonzero().reshape(-1).tolist())
        lacking = chosen.intersection(self.live).difference(*(places for places, _, _ in self.parts))
        if lacking:
            raise ValueError(f"the optimizer of the member in row {min(lacking)} has no {self.label}")
        if refusals := [why for places, _, why in self.parts if why and chosen & places.keys()]:
            raise ValueError(refusals[0])
        for places, vector, _ in self.parts:
            taken = [row for row in places if row in chosen]
            vector[[places[row] for row in taken]] = values[taken]

    def tolist(self) -> list[float]:
        """Return the values of all rows. Raises ValueError where the param groups differ."""
        return cast("list[float]", self[:].tolist())

    def __repr__(self) -> str:
        parts = [{row: float(vector[entry]) for row, entry in places.items()} for places, vector, _ in self.parts]
        return f"{self.label} of {self.size} rows, in {len(parts)} vectors: {parts}"


class Hparams(MutableMapping[str, Any]):
    """By name a float64 vector ``[rows]`` to read and write, a pair of them for betas.

    With several param groups it is the value of those that take the optimizer's default. A group that was given its own
    keeps it: read and write ``optimizer.param_groups[...]``. If one vector holds it, it is that vector itself, and a
    `RowVector` otherwise.
    """

    def __init__(self, population: Population) -> None:
        self._population = population

    def __getitem__(self, key: str) -> Any:
        population = self._population
        # For each number of the hyper-parameter, of which betas have two: the vectors that hold it.
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
        vectors: list[Any] = []
        for index, of_index in parts.items():
            label = key if len(parts) == 1 else f"{key}[{index}]"
            whole = not population._parted and len(of_index) == 1
            joined = RowVector(label, len(population), of_index, population._layout.live)
            vectors.append(of_index[0][1] if whole else joined)
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

    def _of_groups(self) -> list[tuple[TrainingGroup, PerMember]]:
        return [(group, cast(PerMember, group.scheduler)) for group in self._population._groups]

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
        chosen = set(range(count) if rows is None else rows_of(rows, count))
        for group, scheduler in self._of_groups():
            local = [index for index, row in enumerate(group.rows) if row in chosen]
            if local:
                of_group = None if given is None else [given[row] for row in group.entries()]
                scheduler.step(epoch, rows=None if rows is None else local, metrics=of_group)

    def restart(self, rows: int | Sequence[int], make: Make | Sequence[Make] | None = None) -> None:
        """Let members begin their schedules, or those that ``make`` makes, from their present hyper-parameters."""
        chosen = rows_of(rows, len(self._population))
        makes = [None] * len(chosen) if make is None else one_for_each(make, len(chosen))
        for row, of_row in zip(chosen, makes, strict=True):
            group, local = self._population._layout.slot_of(row)
            cast(PerMember, group.scheduler).restart(local, of_row)

    @property
    def kinds(self) -> list[str]:
        """The class of each member's scheduler, one group after the other."""
        return [kind for _, scheduler in self._of_groups() for kind in scheduler.kinds]

    def get_last_lr(self) -> list[Tensor]:
        """The learning rates that were set last, for each param group ``[rows]``."""
        rates = [scheduler.get_last_lr() for _, scheduler in self._of_groups()]
        return [self._population._layout.collected(list(of_group)) for of_group in zip(*rates, strict=True)]

    @property
    def last_epochs(self) -> Tensor:
        """Number of steps of each member's scheduler: ``[rows]``."""
        return self._population._layout.collected([scheduler.last_epochs for _, scheduler in self._of_groups()])
