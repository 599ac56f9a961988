"""Views of a population of several groups by row: hyper-parameters, models, schedules."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfusion.core.row_indices import rows_of
from hfusion.optim.hyper import member_vector
from hfusion.optim.lr_scheduler import Make, one_for_each
from hfusion.population.hparams import Hparams

if TYPE_CHECKING:
    from hfusion.population.member_layout import PlacedGroup
    from hfusion.population.mixed import MixedMembers


class MixedVector:
    """A hyper-parameter of all members, ``[rows]``, to read and to write; NaN where no member has it."""

    def __init__(self, mixed: MixedMembers, label: str, vectors: Sequence[tuple[PlacedGroup, Any]]) -> None:
        self._mixed, self._label, self._vectors = mixed, label, vectors

    def __len__(self) -> int:
        return len(self._mixed)

    def _read(self) -> Tensor:
        values = torch.full((len(self),), float("nan"), dtype=torch.float64, device="cpu")
        for group, vector in self._vectors:
            for row, value in zip(group.rows, vector.tolist(), strict=True):
                if row is not None:
                    values[row] = value
        return values

    def __getitem__(self, rows: Any) -> Tensor:
        return self._read()[rows]

    def __setitem__(self, rows: Any, value: Any) -> None:
        """Raises ValueError for a row whose member has no such hyper-parameter."""
        values = torch.full((len(self),), float("nan"), dtype=torch.float64, device="cpu")
        written = torch.zeros(len(self), dtype=torch.bool, device="cpu")
        values[rows], written[rows] = torch.as_tensor(value, dtype=torch.float64, device="cpu"), True
        having = {row for group, _ in self._vectors for row in group.live}
        lacking = [
            row for row in written.nonzero().reshape(-1).tolist() if row in set(self._mixed.layout.live) - having
        ]
        if lacking:
            raise ValueError(f"the optimizer of the member in row {lacking[0]} has no {self._label}")
        for group, vector in self._vectors:
            for local, row in enumerate(group.rows):
                if row is not None and bool(written[row]):
                    vector[local] = values[row]

    def copy_(self, values: Tensor) -> None:
        self[:] = values

    def tolist(self) -> list[float]:
        values: list[float] = self._read().tolist()
        return values

    def __repr__(self) -> str:
        return f"{self._label} of {len(self)} rows: {self.tolist()}"


class MixedHparams(MutableMapping[str, Any]):
    """By name a `MixedVector`, a pair of them for betas; see `hfusion.population.hparams.Hparams`."""

    def __init__(self, mixed: MixedMembers) -> None:
        self._mixed = mixed

    def _of_groups(self) -> list[tuple[PlacedGroup, Hparams]]:
        return [(group, Hparams(group.members.optimizer)) for group in self._mixed.groups]

    def __getitem__(self, key: str) -> Any:
        group_vectors = [(group, hparams[key]) for group, hparams in self._of_groups() if key in list(hparams)]
        if not group_vectors:
            raise KeyError(f"{key!r} is no hyper-parameter of the members' optimizers; they have {list(self)}")
        if not isinstance(group_vectors[0][1], tuple):
            return MixedVector(self._mixed, key, group_vectors)
        count = len(group_vectors[0][1])
        return tuple(
            MixedVector(self._mixed, f"{key}[{i}]", [(group, pair[i]) for group, pair in group_vectors])
            for i in range(count)
        )

    def __setitem__(self, key: str, value: Any) -> None:
        """Raises ValueError for what is no number or one for each row, and is out of range."""
        held = self[key]
        if isinstance(held, tuple) and (not isinstance(value, tuple | list) or len(value) != len(held)):
            raise ValueError(f"{key}={value!r} is not a pair")
        vectors, new_values = (held, value) if isinstance(held, tuple) else ((held,), (value,))
        new_vectors = [
            member_vector(key, member_values, len(self._mixed)).as_subclass(Tensor) for member_values in new_values
        ]
        for group in self._mixed.groups:
            hypers = [hyper for hyper in group.members.optimizer.hypers if hyper.key == key]
            for hyper, vector in zip(hypers, new_vectors, strict=False):
                hyper.check([float(vector[row]) for row in group.live])
        for vector, values in zip(vectors, new_vectors, strict=True):
            vector.copy_(values)

    def __delitem__(self, key: str) -> None:
        raise TypeError("hyper-parameters cannot be taken away")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for _, hparams in self._of_groups() for key in hparams))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"MixedHparams({', '.join(f'{key}={self[key]}' for key in self)})"


class MixedScheduler:
    """The members' schedules, as those of a `hfusion.optim.lr_scheduler.PerMember`."""

    def __init__(self, mixed: MixedMembers) -> None:
        self._mixed = mixed

    def step(
        self,
        epoch: int | None = None,
        *,
        rows: Sequence[int] | None = None,
        metrics: Tensor | Sequence[float] | None = None,
    ) -> None:
        """One step of every member's scheduler, or of those of members ``rows``. ``metrics``: one number per row."""
        values = None
        if metrics is not None:
            values = (
                metrics if isinstance(metrics, Tensor) else torch.as_tensor(metrics, dtype=torch.float64, device="cpu")
            ).detach()
            if values.shape != (len(self._mixed),):
                raise ValueError(
                    f"metrics have shape {list(values.shape)}: give one number for each of {len(self._mixed)} rows"
                )
        chosen = None if rows is None else set(rows_of(rows, len(self._mixed)))
        for group in self._mixed.groups:
            local = [i for i, row in enumerate(group.rows) if row is not None and (chosen is None or row in chosen)]
            of_group = None if values is None else values[[group.live[0] if row is None else row for row in group.rows]]
            if local:
                everybody = chosen is None
                scheduler = group.members.scheduler
                assert scheduler is not None
                scheduler.step(epoch, rows=None if everybody else local, metrics=of_group)

    def restart(self, rows: int | Sequence[int], make: Make | Sequence[Make] | None = None) -> None:
        """Let members begin their schedules, or those that ``make`` makes, from their present hyper-parameters."""
        chosen = rows_of(rows, len(self._mixed))
        makes = [None] * len(chosen) if make is None else one_for_each(make, len(chosen))
        for row, of_row in zip(chosen, makes, strict=True):
            group, local = self._mixed.layout.slot_of(row)
            scheduler = group.members.scheduler
            assert scheduler is not None
            scheduler.restart(local, of_row)

    @property
    def kinds(self) -> list[str]:
        """The class of each member's scheduler, one group after the other."""
        return [kind for group in self._mixed.groups for kind in group.members.scheduler.kinds]  # type: ignore[union-attr]

    def get_last_lr(self) -> list[Tensor]:
        """The learning rates that were set last, for each param group ``[rows]``."""
        rates = [group.members.scheduler.get_last_lr() for group in self._mixed.groups]  # type: ignore[union-attr]
        return [self._mixed.layout.collected(list(of_group)) for of_group in zip(*rates, strict=True)]

    @property
    def last_epochs(self) -> Tensor:
        """Number of steps of each member's scheduler: ``[rows]``."""
        epochs = [group.members.scheduler.last_epochs for group in self._mixed.groups]  # type: ignore[union-attr]
        return self._mixed.layout.collected(epochs)
