"""What a population keeps of its members' weights, computes of them, and lets functions do to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hfusion.array.each import Each, as_each, training_rows
from hfusion.capture.named import tensors
from hfusion.core.rows import check_once, rows_of
from hfusion.population.average import checked_weights, mean_tensors, write_rows
from hfusion.population.best import BestMembers, BestRecord
from hfusion.population.members import apart
from hfusion.population.saving import in_turn

if TYPE_CHECKING:
    from hfusion.population.population import Population


class MemberWeights:
    """The weights of a population's members: their best ones, their average, and what functions do to them."""

    _best: dict[str, BestRecord]
    _gradient_hooks: OrderedDict[int, Each] | None = None

    @property
    def best(self) -> BestMembers:
        """Each member's best weights, to update, restore and copy: see `hfusion.population.best.BestMembers`."""
        return BestMembers(cast("Population", self))

    @in_turn
    def average(
        self,
        rows: int | Sequence[int] | None = None,
        weights: Tensor | Sequence[float] | None = None,
        *,
        into: int | Sequence[int] | Literal["all"] | None = None,
        optimizer: Literal["keep", "reset"] = "keep",
    ) -> nn.Module | None:
        """Average members: parameters and floating-point buffers, weighted.

        Other buffers, such as BatchNorm's count of batches, are those of the last of ``rows`` with a weight, as
        `torch.optim.swa_utils.AveragedModel` has those of the model that it got last. Halves are averaged in float32.

        Args:
            rows: the members that are averaged; None: all.
            weights: one for each of them, at least 0, of any sum above 0, such as numbers of samples. Who has 0 is left
                out. None: all alike.
            into: the rows that the average is written into, ``"all"`` of the members, as a server of federated
                averaging sends it to its clients. None: it is returned as a model, a copy of the first of ``rows``, and
                members stay as they are.
            optimizer: what members that are written have of the optimizer: ``"keep"`` their own moments and counts,
                or ``"reset"``, as if they began. Rates and schedules stay.

        Raises:
            ValueError: a row that is none, is free or comes twice, or weights that are none.
        """
        pop = cast("Population", self)
        if optimizer not in ("keep", "reset"):
            raise ValueError(f'optimizer={optimizer!r}: it is "keep" or "reset"')
        sources = _members(pop, rows)
        shares = checked_weights(weights, sources)
        if into is None:
            model = apart(pop.fused, sources[0])
            held = dict(tensors(model))
            for name, _, mean in mean_tensors(pop.fused, shares):
                held[name].detach().copy_(mean)
            return model
        targets = _members(pop, None if isinstance(into, str) and into == "all" else into)
        if midst := [row for row in pop._updates.underway if row in targets]:
            made, calls = int(pop._updates.done[midst[0]]), int(pop._updates.calls[midst[0]])
            raise ValueError(
                f"{made} of {calls} steps of an update of row {midst[0]} are made, with gradients at its present "
                "weights: average into members between their updates"
            )
        for _, stack, mean in mean_tensors(pop.fused, shares):
            write_rows(stack, targets, mean)
        if optimizer == "reset":
            pop.optimizer.restart(targets)
        return None

    @property
    def active_rows(self) -> list[int]:
        """The rows of members that train: taken, and not frozen."""
        pop = cast("Population", self)
        training = set(training_rows(pop.fused))
        return [row for row in pop._roll.live if row in training and not bool(pop._roll.frozen[row])]

    @in_turn
    def each(
        self, fn: Callable[..., Any] | Each, *args: Any, rows: int | Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        """Run a function of one member's parameters and gradients for all members at once: see `hfusion.each`.

        Args:
            fn: the function, or what `hfusion.each` gave for it.
            rows: the members it is for; None: all that train. Free rows and frozen members stay as they are, to the
                bit.
            args, kwargs: passed on; values in `hfusion.stacked` have a row for each row of the population.

        Raises:
            ValueError: a row that is free, frozen or comes twice; and as `hfusion.each`.
        """
        pop, active = cast("Population", self), self.active_rows
        chosen = active if rows is None else _members(pop, rows)
        if resting := [row for row in chosen if bool(pop._roll.frozen[row])]:
            raise ValueError(f"{pop._roll.tag(resting[0])!r} in row {resting[0]} went bad and is frozen: thaw it first")
        if chosen:
            as_each(fn)(pop.fused, *args, rows=chosen, **kwargs)

    @in_turn
    def register_gradient_hook(self, fn: Callable[..., Any] | Each) -> RemovableHandle:
        """Let `step` run a function between backward and update, before gradients are clipped.

        It is called as by `each`, once for each update, with gradients that are summed over ``accumulate`` calls and
        unscaled; for members that make this update only. Saves do not hold it.

        Returns: a handle whose ``remove()`` ends it.
        """
        if self._gradient_hooks is None:
            self._gradient_hooks = OrderedDict()
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = as_each(fn)
        return handle

    def _run_gradient_hooks(self, resting: Tensor) -> None:
        for hook in (self._gradient_hooks or {}).values():
            if rows := [row for row in self.active_rows if not bool(resting[row])]:
                hook(cast("Population", self).fused, rows=rows)


def _members(pop: Population, rows: int | Sequence[int] | None) -> list[int]:
    """Rows with members; None for all. Raises ValueError."""
    chosen = pop._roll.live if rows is None else rows_of(rows, len(pop))
    check_once(chosen)
    for row in chosen:
        pop._roll.tag(row)
    return chosen
