"""Updates of several groups in one step: immediate, or deferred until the gradients of all are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from hfusion.core.errors import NonFiniteError

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup


class GroupUpdates:
    """Makes each group's update right after its gradients; ``together``: all after the gradients of the last group."""

    def __init__(self, together: bool) -> None:
        self._together = together
        self._rows: Sequence[int | None] = ()
        self._stepped: list[ArrayGroup] = []
        self._waiting: list[tuple[Sequence[int | None], ArrayGroup, Tensor, Tensor]] = []
        self._finishing: list[Callable[[], object]] = []

    @contextmanager
    def of_group(self, members: ArrayGroup, rows: Sequence[int | None], whole: bool = True) -> Iterator[None]:
        """Context manager: a group, or some of its members, make a step.

        ``rows``: the population's row of each row of the group.
        """
        if not self._together:
            yield
            return
        self._rows, members._deferred = rows, self
        if whole:
            self._stepped.append(members)
        try:
            yield
        finally:
            members._deferred = None

    def add(self, members: ArrayGroup, losses: Tensor, due: Tensor) -> None:
        """Defer an update of a group, or of some of its members that are stepped separately."""
        self._waiting.append((self._rows, members, losses, due))

    def finish(self, write: Callable[[], object]) -> None:
        """Defer ``write``, which runs after the deferred updates."""
        self._finishing.append(write)

    def make(self) -> None:
        """Make the deferred updates. If values of members are not finite, raise a NonFiniteError before the first."""
        bad: list[tuple[int, str]] = []
        for rows, members, losses, due in self._waiting:
            whole_rows = members._roll.whole_rows or range(len(rows))
            for local in members._bad(losses, due).nonzero().reshape(-1).tolist():
                bad.append((rows[whole_rows[local]] or 0, members._roll.tag(local)))
        if bad:
            for members in self._stepped:
                members._give_up()
            shown, step = ", ".join(f"{tag!r} (row {row})" for row, tag in sorted(bad)), self._waiting[0][1]._roll.step
            raise NonFiniteError(
                f"the loss or a gradient of {shown} is not finite in step {step}; nothing was updated: lower its "
                'learning rate, stop it, or give on_nonfinite="freeze"'
            )
        for _, members, losses, due in self._waiting:
            members._deferred = None
            members._update(losses, due)
        for write in self._finishing:
            write()
