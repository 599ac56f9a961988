"""A loss scaler for an array: each member has its own scale, and skips only the steps in which it overflows.

Source: https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.errors import CheckpointError, FusionError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import member_rows
from hfusion.core.row_indices import copied, kept_rows, rows_of
from hfusion.device.backend import sent
from hfusion.optim.base import FusedOptimizer
from hfusion.optim.clip import overflowing, unscale
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import HyperValue, member_vector, plain


class GradScaler:
    """``torch.amp.GradScaler`` with a scale for each member of an array; used in the same way.

    ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``: one value, or one per member.
    ``device`` is
    accepted as in torch and has no effect: losses and gradients are scaled on their own device.

    Example:
        >>> import hfusion as hf, torch
        >>> fused = hf.build(lambda: torch.nn.Linear(2, 1), seeds=[0, 1])
        >>> opt, scaler = hf.optim.SGD(fused.parameters(), lr=0.1), hf.optim.GradScaler(init_scale=[8.0, 16.0])
        >>> losses = fused(torch.ones(3, 2)).square().mean(dim=(1, 2))
        >>> scaler.scale(losses).sum().backward()
        >>> scaler.step(opt)
        >>> scaler.update()
        >>> scaler.get_scale()
        tensor([ 8., 16.])
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: HyperValue = 2.0**16,
        growth_factor: HyperValue = 2.0,
        backoff_factor: HyperValue = 0.5,
        growth_interval: HyperValue = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(device, str | torch.device | None):
            raise TypeError(f"device={device!r} is no device: give the scale as init_scale={device!r}")
        self._enabled = enabled
        self._arguments = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        values = {
            name: torch.as_tensor(value, dtype=torch.float32, device="cpu").reshape(-1)
            for name, value in self._arguments.items()
        }
        # The initial values for members that join; None if those of the first members differed.
        self.initial_values = {
            name: float(value[0]) if bool((value == value[0]).all()) else None for name, value in values.items()
        }
        # The members' scales and counts, live; without columns before the first use.
        self.table = MemberTable(0)
        if (members := max(map(len, values.values()))) > 1:
            # Each member's own: they follow its row also before the first use.
            self.begin(members)
        # The members that overflowed in this iteration, for each optimizer that was unscaled.
        self._overflowed_members: dict[int, Tensor] = {}
        self._stepped: set[int] = set()

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> Tensor:
        """The scales ``[B]``; ``[1]`` before the first use of a scaler that has one value for all."""
        if not self._enabled:
            return torch.ones(1, device="cpu")
        scales = self.table["scale"] if self.table.rows else self._arguments["scale"]
        return torch.as_tensor(scales, dtype=torch.float32, device="cpu").reshape(-1).clone()

    def scale(self, losses: Any) -> Any:
        """Multiply losses ``[B, ...]``, or a list or tuple of such, by the members' scales."""
        if not self._enabled:
            return losses
        if isinstance(losses, list | tuple):
            return type(losses)(self.scale(loss) for loss in losses)
        self.begin(len(losses))
        scales = sent(self.table["scale"], losses.device)
        return losses * scales.reshape(-1, *[1] * (losses.dim() - 1))

    @torch.no_grad()
    def unscale_(self, optimizer: FusedOptimizer) -> Tensor:
        """Divide the gradients by the scales in place. Returns which members have a gradient that is not finite: bool
        ``[B]``.

        Raises:
            RuntimeError: called twice since `update`.
            FusionError: all members share a trained parameter, whose gradient sums losses of different scales.
        """
        if not self._enabled:
            return torch.zeros(optimizer.members, dtype=torch.bool, device="cpu")
        if id(optimizer) in self._overflowed_members:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        self.begin(optimizer.members)
        scales = self.table["scale"]
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        shared = next((mark for mark in map(membership_of, trained) if not mark.stacked), None)
        if shared is not None and bool((scales != scales[0]).any()):
            raise FusionError(
                f"parameter {shared.name!r} is one tensor for all {shared.members} members, and their losses have "
                "different scales; freeze it, or use torch.amp.GradScaler"
            )
        grads = [member_rows(param.grad, membership_of(param)) for param in trained]
        bad = overflowing(grads, len(scales))
        unscale(grads, scales)
        self._overflowed_members[id(optimizer)] = bad
        return bad.clone()

    def step(self, optimizer: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step()`` for the members whose gradients are all finite; unscale them first if necessary.

        Raises:
            RuntimeError: called twice since `update`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called on this optimizer since the last update()")
        if id(optimizer) not in self._overflowed_members:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        with optimizer.holding(self._overflowed_members[id(optimizer)]):
            return optimizer.step(*args, **kwargs)

    def update(self, new_scale: HyperValue | None = None, *, resting: Tensor | None = None) -> None:
        """Lower the scale of members that have just overflowed, and raise that of members that have not for long.

        Args:
            resting: bool ``[B]``, the members that made no step, whose scales and counts stay.

        Raises:
            RuntimeError: no optimizer was unscaled since the last update.
        """
        if not self._enabled:
            return
        values = self.table
        if new_scale is not None:
            values["scale"] = _vector("new_scale", new_scale, len(values["scale"]))
        elif not self._overflowed_members:
            raise RuntimeError("no gradients were unscaled before update(): call step first")
        else:
            bad = torch.stack(list(self._overflowed_members.values())).any(0)
            tracker = torch.where(bad, 0, values["tracker"] + 1)
            full = tracker == values["growth_interval"]
            grown = values["scale"] * values["growth_factor"]
            raised = torch.where(full & grown.isfinite(), grown, values["scale"])
            scale = torch.where(bad, values["scale"] * values["backoff_factor"], raised)
            still = torch.zeros_like(bad) if resting is None else resting
            values["scale"] = torch.where(still, values["scale"], scale)
            values["tracker"] = torch.where(still, values["tracker"], torch.where(full, 0, tracker))
        self.forget()

    def forget(self) -> None:
        """Discard what was unscaled since the last `update`, after an error."""
        self._overflowed_members, self._stepped = {}, set()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the scales of members ``rows`` only, in this order."""
        if self.table.rows:
            self.table.arrange(kept_rows(rows, self.table.rows))

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Give members ``dst`` the scales of ``src``."""
        if self.table.rows:
            self.table.arrange(copied(src, dst, self.table.rows))

    def append(self, count: int = 1) -> None:
        """Add ``count`` members with the initial scale. Raises ValueError if initial scales differ."""
        if members := self.table.rows:
            # Raises an error before anything changes.
            self.restart([])
            self.table.arrange([*range(members), *[0] * count])
            self.restart(range(members, members + count))

    def restart(self, rows: int | Sequence[int]) -> None:
        """Restart members ``rows``; see `append`."""
        if self.table.rows:
            for name, value in self.initial_values.items():
                if value is None:
                    label = "init_scale" if name == "scale" else name
                    raise ValueError(
                        f"{label} of the GradScaler differs between the members: none is known for new ones"
                    )
            places = rows_of(rows, self.table.rows)
            for name, value in {**self.initial_values, "tracker": 0.0}.items():
                self.table[name][places] = value

    def state_dict(self) -> dict[str, Any]:
        """The scales and counts of the members, as tensors ``[B]``; empty before the first use."""
        return {name: value.clone() for name, value in self.table.columns.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore ``state_dict``. Raises CheckpointError if it is not the state of a scaler."""
        expected = {*self._arguments, "tracker"}
        shapes = {tuple(value.shape) for value in state_dict.values()}
        if state_dict and (set(state_dict) != expected or len(shapes) != 1 or len(next(iter(shapes))) != 1):
            raise CheckpointError(
                f"the state is not one of a GradScaler of members: it holds {sorted(state_dict)} of shapes "
                f"{sorted(shapes)}, and {sorted(expected)} of shape [B] are needed"
            )
        columns = {name: value.clone() for name, value in state_dict.items()}
        self.table = MemberTable(len(columns["scale"]) if columns else 0, columns)

    def begin(self, members: int) -> None:
        """Create a scale for each of ``members``. Raises ValueError if there are already scales for another number."""
        if not self._enabled:
            return
        if not self.table.rows:
            columns = {name: _vector(name, value, members) for name, value in self._arguments.items()}
            self.table = MemberTable(members, {**columns, "tracker": torch.zeros(members, device="cpu")})
        if self.table.rows != members:
            raise ValueError(
                f"the GradScaler has scales of {self.table.rows} members, the array has {members}: what was "
                "done to the fused module by keep or append must be done to it, too"
            )

    def of_rows(self, rows: Sequence[int]) -> GradScaler:
        """Return a scaler of members ``rows``; this one is not changed."""
        part = copy.copy(self)
        part.forget()
        part.initial_values = dict(self.initial_values)
        part.table = self.table.take(rows)
        return part


def _vector(name: str, value: HyperValue, members: int) -> Tensor:
    vector: Tensor = plain(member_vector(name, value, members)).float()
    return vector
