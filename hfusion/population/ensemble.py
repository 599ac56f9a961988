"""Mean and spread of the members' outputs, as one module to export and serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import device_of
from hfusion.core.calls import take_entries
from hfusion.population.evaluation import check_entries, joined_rows
from hfusion.population.plain_group import of_row, with_row
from hfusion.population.population import Population
from hfusion.population.training_group import copied_member
from hfusion.population.weights import check_member_weights

_SMALL = (torch.float16, torch.bfloat16)

_Group = tuple[nn.Module, Sequence[int | None], Callable[[int], nn.Module]]
"""An array or a plain model; the row of the population of each member, None for a free row; and how to copy one."""


class JoinedMembers(nn.Module):
    """Arrays and plain models that are called with the same arguments: outputs ``[B, ...]`` of all members.

    Args:
        groups: fused modules, and models of one member.
        rows: for each group, the rows of its members, which errors name. Outputs are in ascending order of rows.
    """

    order: Tensor | None

    def __init__(self, groups: Sequence[nn.Module], rows: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(groups)
        self._rows = [list(of_group) for of_group in rows]
        joined = [row for of_group in self._rows for row in of_group]
        self._entries = [[sorted(joined).index(row) for row in of_group] for of_group in self._rows]
        order = torch.tensor(sorted(range(len(joined)), key=joined.__getitem__), device="cpu")
        in_order = joined == sorted(joined)
        self.register_buffer("order", None if in_order else order.to(device_of(self.groups)), persistent=False)

    def __len__(self) -> int:
        return sum(len(of_group) for of_group in self._rows)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments are those of one member, or stacked. Raises ValueError if outputs differ in structure or shape."""
        check_entries((args, kwargs), len(self))
        outputs = []
        for group, entries in zip(self.groups, self._entries, strict=True):
            positional, named = take_entries(args, entries), take_entries(kwargs, entries)
            if isinstance(group, FusedModule):
                outputs.append(group(*positional, **named))
            else:
                outputs.append(with_row(group(*of_row(positional), **of_row(named))))
        return joined_rows(outputs, self._rows, self.order)


class Ensemble(nn.Module):
    """The members of arrays as one model: ``mean, std = ensemble(x)`` over the members' outputs.

    ``mean`` and ``std`` have the shapes of one member's output, a tensor or a nest of tensors. ``std`` divides by B,
    not by B - 1.

    Args:
        models: a fused module, a population, or a list of models. Groups of a population must have outputs of one
            shape. If all members take part, the ensemble shares their tensors and follows their training until a member
            joins or leaves. Otherwise it has copies.
        weights: ``[B]``, not negative, with a positive sum, such as ``select(...).weights``; by default equal. Members
            of weight 0 and free rows are left out, and take no time.
        softmax: a dim of one member's output, such as -1 for logits ``[N, classes]``, that is turned into probabilities
            before the average. By default outputs are averaged as they are.

    Raises:
        ValueError: weights are invalid, or there is no member. In a call: groups differ in the shape or dtype of
            outputs.
        TypeError: in a call, an output is not of floating-point numbers.

    Example:
        >>> import hfusion as hf
        >>> fused = hf.fuse([nn.Linear(4, 3) for _ in range(5)])
        >>> ensemble = hf.Ensemble(fused, softmax=-1).eval()
        >>> mean, std = ensemble(torch.randn(2, 4))
        >>> tuple(mean.shape), tuple(std.shape)
        ((2, 3), (2, 3))
    """

    weights: Tensor | None

    def __init__(
        self,
        models: FusedModule | Population | Sequence[nn.Module],
        weights: Tensor | Sequence[float] | None = None,
        *,
        softmax: int | None = None,
    ) -> None:
        super().__init__()
        groups, members = _groups(models)
        live = sorted(row for _, of_group, _ in groups for row in of_group if row is not None)
        chosen = _weights(weights, members, live)
        rows = [row for row in live if chosen[row] > 0]
        if not rows:
            raise ValueError("every row of the population is free: an ensemble has one member at least")
        self.members = _selected_members(groups, rows)
        self.softmax = softmax
        values = None if weights is None else (chosen[rows] / chosen[rows].sum()).to(device_of(self.members))
        self.register_buffer("weights", values)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return ``(mean, std)``. Arguments are those of the members, see `FusedModule.forward`."""
        leaves, spec = pytree.tree_flatten_with_path(self.members(*args, **kwargs))
        pairs = [(None, None) if leaf is None else self._moments(leaf, path) for path, leaf in leaves]
        mean, std = ([pair[index] for pair in pairs] for index in (0, 1))
        return pytree.tree_unflatten(mean, spec), pytree.tree_unflatten(std, spec)

    def _moments(self, output: Any, path: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of ``[B, ...]`` over the members."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"hf.Ensemble averages floating-point outputs, and output{pytree.keystr(path)} is {kind}. Let the "
                "members give logits or numbers"
            )
        values = output.float() if output.dtype in _SMALL else output
        if self.softmax is not None:
            values = values.softmax(self.softmax + 1 if self.softmax >= 0 else self.softmax)
        if self.weights is None:
            mean, std = values.mean(0), values.std(0, correction=0)
        else:
            weights = self.weights.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
            mean = (weights * values).sum(0)
            std = torch.linalg.vector_norm(weights.sqrt() * (values - mean), dim=0)
        return mean.to(output.dtype), std.to(output.dtype)

    def extra_repr(self) -> str:
        weights = "" if self.weights is None else f", weights={[round(w, 4) for w in self.weights.tolist()]}"
        return f"{len(self.members)} members{weights}" + (
            f", softmax={self.softmax}" if self.softmax is not None else ""
        )


def _groups(models: Any) -> tuple[list[_Group], int]:
    """The arrays and plain models with the rows of their members, and the number of rows."""
    if isinstance(models, Population):
        return [(group.fused, group.rows, group.copied) for group in models._groups], len(models)
    fused = models if isinstance(models, FusedModule) else fuse(models)
    return [(fused, range(len(fused)), partial(copied_member, fused))], len(fused)


def _weights(weights: Tensor | Sequence[float] | None, members: int, live: Sequence[int]) -> Tensor:
    """Weights ``[B]`` on the CPU, 0 where a row is free. Raises ValueError."""
    alive = torch.zeros(members, dtype=torch.float64, device="cpu")
    alive[list(live)] = 1
    if weights is None:
        return alive
    values = check_member_weights(weights, members, f"of {members} members")
    if free_rows := [row for row in range(members) if values[row] > 0 and not alive[row]]:
        raise ValueError(f"weights: row {free_rows[0]} is free; members are in rows {list(live)}")
    return values


def _selected_members(groups: Sequence[_Group], rows: Sequence[int]) -> FusedModule | JoinedMembers:
    """Return the members of ``rows``, which ascend, as one module: of the groups themselves if all take part.

    Otherwise members are copied: to an array for each group, or as a plain model where a group has one member.
    """
    chosen = set(rows)
    is_whole = all(row in chosen for _, of_group, _ in groups for row in of_group)
    modules: list[nn.Module] = []
    members: list[list[int]] = []
    for module, of_group, copied in groups:
        chosen_rows = [row for row in of_group if row is not None and row in chosen]
        if not chosen_rows:
            continue
        members.append(chosen_rows)
        if is_whole:
            modules.append(module)
        else:
            copies = [copied(of_group.index(row)) for row in chosen_rows]
            modules.append(copies[0] if len(copies) == 1 else fuse(copies))
    if members == [list(rows)] and isinstance(modules[0], FusedModule):
        return modules[0]
    return JoinedMembers(modules, members)
