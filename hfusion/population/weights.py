"""Operations on members' weights: best weights, averages, and functions applied to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hfusion.array.member_functions import MemberFunction, as_each, training_rows
from hfusion.capture.registered_tensors import tensors
from hfusion.core.row_indices import check_once, rows_of, write_rows
from hfusion.population.accumulation import Accumulation
from hfusion.population.average import checked_weights, mean_tensors
from hfusion.population.best import BestRecord
from hfusion.population.members import apart
from hfusion.population.saving import in_turn

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup


class MemberWeights:
    """The weights of a population's members: their best ones, their average, and what functions do to them."""

    _best: dict[str, BestRecord]
    _gradient_hooks: OrderedDict[int, MemberFunction] | None = None

    @in_turn
    def average(
        self,
        rows: int | Sequence[int] | None = None,
        weights: Tensor | Sequence[float] | None = None,
        *,
        into: int | Sequence[int] | Literal["all"] | None = None,
        optimizer: Literal["keep", "reset"] = "keep",
    ) -> nn.Module | None:
        """See `hfusion.Population.average`."""
        pop = cast("ArrayGroup", self)
        if optimizer not in ("keep", "reset"):
            raise ValueError(f'optimizer={optimizer!r}: it is "keep" or "reset"')
        sources = _members(pop, rows)
        shares = checked_weights(weights, sources)
        targets = [] if into is None else _members(pop, None if isinstance(into, str) and into == "all" else into)
        if into is None:
            model = apart(pop.fused, sources[0])
            held = dict(tensors(model))
            for name, _, mean in mean_tensors(pop.fused, shares):
                held[name].detach().copy_(mean)
            return model
        for row in targets:
            check_not_underway(pop._updates, row, row)
        for _, stack, mean in mean_tensors(pop.fused, shares):
            write_rows(stack, targets, mean.expand(len(targets), *mean.shape))
        if optimizer == "reset":
            pop.optimizer.restart(targets)
        return None

    @property
    def active_rows(self) -> list[int]:
        """The rows of members that train: taken, and not frozen."""
        pop = cast("ArrayGroup", self)
        training = set(training_rows(pop.fused))
        return [row for row in pop._roll.live if row in training and not bool(pop._roll.frozen[row])]

    @in_turn
    def each(
        self,
        fn: Callable[..., Any] | MemberFunction,
        *args: Any,
        rows: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """See `hfusion.Population.each`."""
        pop, active = cast("ArrayGroup", self), self.active_rows
        chosen = active if rows is None else _members(pop, rows)
        if chosen:
            self._run_each(as_each(fn), chosen, *args, **kwargs)
        if pop._updates.buffers is not None:
            # Steps restore the buffers of frozen members.
            written = pop._none()
            written[chosen] = pop._roll.frozen[chosen]
            pop._updates.buffers.renew(written)

    @in_turn
    def register_gradient_hook(self, fn: Callable[..., Any] | MemberFunction) -> RemovableHandle:
        """See `hfusion.Population.register_gradient_hook`."""
        if self._gradient_hooks is None:
            self._gradient_hooks = OrderedDict()
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = as_each(fn)
        return handle

    def _run_gradient_hooks(self, resting: Tensor) -> None:
        for hook in (self._gradient_hooks or {}).values():
            if rows := [row for row in self.active_rows if not bool(resting[row])]:
                self._run_each(hook, rows)

    def _run_each(self, fn: MemberFunction, rows: list[int], *args: Any, **kwargs: Any) -> None:
        fn(cast("ArrayGroup", self).fused, *args, rows=rows, **kwargs)


def _members(pop: ArrayGroup, rows: int | Sequence[int] | None) -> list[int]:
    """Rows with members; None for all. Raises ValueError."""
    chosen = pop._roll.live if rows is None else rows_of(rows, len(pop))
    check_once(chosen)
    for row in chosen:
        pop._roll.tag(row)
    return chosen


def check_not_underway(updates: Accumulation, index: int, row: int) -> None:
    """Raise a ValueError for the member at ``index``, in ``row`` of the population, in the midst of an update."""
    if int(updates.done[index]):
        raise ValueError(
            f"{int(updates.done[index])} of {int(updates.calls[index])} steps of an update of row {row} are made, with "
            "gradients at its present weights: average into members between their updates"
        )
