"""Ensembles: the mean and spread of the members' outputs as one module, and which members predict best together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import device_of
from hfusion.core.calls import call_arguments, is_stacked, take_entries
from hfusion.core.layout import member_values, values_of
from hfusion.population.evaluation import check_entries, joined_batches, number, pair_of
from hfusion.population.grouping import copied_member
from hfusion.population.population import Population
from hfusion.population.training_group import evaluating_members, member_outputs
from hfusion.population.weights import check_member_weights

_Group = tuple[nn.Module, Sequence[int | None]]
"""An array or a plain model, and the row of the population of each member, None for a free row."""


class JoinedMembers(nn.Module):
    """Arrays and plain models that are called with the same arguments: outputs ``[B, ...]`` of all members.

    Args:
        groups: fused modules, and models of one member.
        rows: for each group, the rows of its members, which errors name. Outputs are in ascending order of rows.
    """

    def __init__(self, groups: Sequence[nn.Module], rows: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(groups)
        self._rows = [list(of_group) for of_group in rows]
        joined = [row for of_group in self._rows for row in of_group]
        self._entries = [[sorted(joined).index(row) for row in of_group] for of_group in self._rows]
        # The place of each member in the outputs of all groups, in ascending order of rows.
        self._order = sorted(range(len(joined)), key=joined.__getitem__)

    def __len__(self) -> int:
        return len(self._order)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments are those of one member, or stacked. Raises ValueError if outputs differ in structure or shape."""
        check_entries((args, kwargs), len(self))
        # The paths and leaves of each group's outputs, with a leading dim of members, and their structure.
        outputs: list[tuple[Any, Any]] = []
        for group, entries in zip(self.groups, self._entries, strict=True):
            positional, named = take_entries((args, kwargs), entries)
            outputs.append(pytree.tree_flatten_with_path(member_outputs(group, positional, named)))
        kinds = [{f"output{pytree.keystr(path)}": _kind(leaf) for path, leaf in leaves} for leaves, _ in outputs]
        for kind, (_, spec), rows in zip(kinds, outputs, self._rows, strict=True):
            if kind != kinds[0] or spec != outputs[0][1]:
                raise ValueError(
                    f"{kinds[0]} of the members in rows {self._rows[0]}, {kind} of those in rows {rows}. Members are "
                    "averaged if their outputs have one shape and dtype: choose such rows by weights="
                )
        columns = zip(*([leaf for _, leaf in leaves] for leaves, _ in outputs), strict=True)
        return pytree.tree_unflatten(list(map(self._joined, columns)), outputs[0][1])

    def _joined(self, leaves: Sequence[Any]) -> Any:
        """Join one output of all groups."""
        if isinstance(leaves[0], Tensor):
            return torch.cat(list(leaves))[self._order]
        pairs = zip(leaves, self._rows, strict=True)
        each = [value for leaf, rows in pairs for value in values_of(leaf, len(rows))]
        return member_values([each[index] for index in self._order])


def _kind(leaf: Any) -> str:
    """Describe what members' outputs must share."""
    return f"{leaf.dtype} {list(leaf.shape[1:])}" if isinstance(leaf, Tensor) else "a value"


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
        live = sorted(row for _, of_group in groups for row in of_group if row is not None)
        rows, values = live, None
        if weights is not None:
            values = check_member_weights(weights, members, f"of {members} members")
            rows = [row for row in range(members) if values[row] > 0]
            if free := sorted(set(rows).difference(live)):
                raise ValueError(f"weights: row {free[0]} is free; members are in rows {live}")
            values = values[rows] / values[rows].sum()
        self.members, self.softmax = _selected_members(groups, rows), softmax
        self.register_buffer("weights", None if values is None else values.to(device_of(self.members)))

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
        values = _probabilities(output.float() if output.dtype.itemsize < 4 else output, self.softmax)
        if self.weights is None:
            mean, std = values.mean(0), values.std(0, correction=0)
        else:
            weights = self.weights.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
            mean = (weights * values).sum(0)
            std = torch.linalg.vector_norm(weights.sqrt() * (values - mean), dim=0)
        return mean.to(output.dtype), std.to(output.dtype)

    def extra_repr(self) -> str:
        weights = None if self.weights is None else [round(weight, 4) for weight in self.weights.tolist()]
        return f"{len(self.members)} members, {weights=}, softmax={self.softmax}"


def _groups(models: Any) -> tuple[list[_Group], int]:
    """The arrays and plain models with the rows of their members, and the number of rows."""
    if isinstance(models, Population):
        return [(group.fused, group.rows) for group in models._groups], len(models)
    fused = models if isinstance(models, FusedModule) else fuse(models)
    return [(fused, range(len(fused)))], len(fused)


def _selected_members(groups: Sequence[_Group], rows: Sequence[int]) -> FusedModule | JoinedMembers:
    """Return the members of ``rows``, which ascend, as one module: of the groups themselves if all take part.

    Otherwise members are copied: to an array for each group, or as a plain model where a group has one member.
    """
    if not rows:
        raise ValueError("every row of the population is free: an ensemble has one member at least")
    chosen = set(rows)
    is_whole = all(row in chosen for _, of_group in groups for row in of_group)
    modules: list[nn.Module] = []
    members: list[list[int]] = []
    for module, of_group in groups:
        chosen_rows = [row for row in of_group if row is not None and row in chosen]
        if not chosen_rows:
            continue
        members.append(chosen_rows)
        if is_whole:
            modules.append(module)
        else:
            copies = [copied_member(module, of_group.index(row)) for row in chosen_rows]
            modules.append(copies[0] if len(copies) == 1 else fuse(copies))
    if members == [list(rows)] and isinstance(modules[0], FusedModule):
        return modules[0]
    return JoinedMembers(modules, members)


# Greedy selection of the members of an ensemble.

Score = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Selection:
    """An ensemble chosen from the rows of a population or an array.

    Attributes:
        order: the rows as they were added; one that was added twice is there twice.
        scores: the score of the ensemble after each addition.
        members: how many rows there are.
    """

    order: tuple[int, ...]
    scores: tuple[float, ...]
    members: int

    @property
    def counts(self) -> dict[int, int]:
        """Number of times each row was added, the most frequent first."""
        return dict(sorted(Counter(self.order).items(), key=lambda item: (-item[1], item[0])))

    @property
    def rows(self) -> list[int]:
        """The rows that were added."""
        return sorted(set(self.order))

    @property
    def weights(self) -> Tensor:
        """The counts as weights ``[B]`` that sum to 1, 0 for rows that were not added: for `Ensemble`."""
        return torch.bincount(torch.tensor(self.order, device="cpu"), minlength=self.members).double() / len(self.order)

    @property
    def score(self) -> float:
        """The score of the ensemble."""
        return self.scores[-1]


def select(
    models: Population | FusedModule | Sequence[nn.Module],
    loader: Iterable[Any],
    size: int,
    score: Score | None = None,
    *,
    mode: Literal["min", "max"] = "min",
    softmax: int | None = None,
) -> Selection:
    """Choose an ensemble of at most ``size`` members on a validation set, greedily and with replacement.

    Starts with the best member, and repeatedly adds the member that improves the mean prediction most; a member that is
    added twice counts twice. Returns the best ensemble on the way, the smallest of equal ones. R. Caruana, A.
    Niculescu-Mizil, G. Crew, A. Ksikes, "Ensemble selection from libraries of models", ICML 2004.

    Args:
        models: a population, a fused module, or a list of models, evaluated in eval mode. Groups of a population must
            have outputs of one shape.
        loader: the validation set, batches ``(inputs, target)``, the same for all members.
        size: the maximum number of additions.
        score: ``score(prediction, target)`` returns a number for the mean prediction on the whole set. By default
            cross-entropy for integer targets, with logits in dim 1 as in `torch.nn.functional.cross_entropy`, and mean
            squared error for floating-point targets.
        mode: ``"min"`` or ``"max"``: whether lower or higher scores are better.
        softmax: a dim of one member's output that is turned into probabilities before the average, see `Ensemble`. By
            default 1 with the cross-entropy above, and none otherwise.

    Raises:
        ValueError: ``size`` is invalid, the loader has no batches or stacked targets, groups differ in the shape of
            outputs, or no score is a number.

    Example:
        >>> import hfusion as hf
        >>> fused = hf.fuse([nn.Linear(4, 3) for _ in range(5)])
        >>> chosen = hf.select(fused, [(torch.randn(32, 4), torch.randint(3, (32,)))], size=10)
        >>> ensemble = hf.Ensemble(fused, chosen.weights, softmax=-1)
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"size={size!r}: at least one member is chosen")
    if mode not in ("min", "max"):
        raise ValueError(f'mode={mode!r}: it is "min" or "max"')
    groups, members = _groups(models)
    rows = sorted(row for _, of_group in groups for row in of_group if row is not None)
    joined, batches = _selected_members(groups, rows), []
    with torch.no_grad(), ExitStack() as modes:
        for array in joined.groups if isinstance(joined, JoinedMembers) else [joined]:
            modes.enter_context(evaluating_members(array))
        for inputs, target in map(pair_of, loader):
            args, kwargs = call_arguments(inputs, {})
            batches.append((joined(*args, **kwargs), target))
    predictions, target = joined_batches(batches)
    if any(is_stacked(leaf) for leaf in pytree.tree_leaves(target, is_leaf=is_stacked)):
        raise ValueError(
            "the loader gives each member its own target: an ensemble is chosen for targets of all members"
        )
    if score is None:
        score, softmax = _default(predictions, target, mode, softmax)
    leaves, spec = pytree.tree_flatten(predictions)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"members give {kind}, of which there is no mean: let them give logits or numbers")
    stacks = [_probabilities(leaf, softmax) for leaf in leaves]
    sums = [torch.zeros_like(stack[0], dtype=torch.float64) for stack in stacks]
    sign, order, losses = 1.0 if mode == "min" else -1.0, list[int](), list[float]()

    def loss_with(index: int) -> float:
        pairs = zip(sums, stacks, strict=True)
        means = [((total + stack[index]) / (len(order) + 1)).to(stack.dtype) for total, stack in pairs]
        value = sign * number(score(pytree.tree_unflatten(means, spec), target), "the score", "an ensemble")
        return math.inf if math.isnan(value) else value

    with torch.no_grad():
        while len(order) < size and (not losses or losses[-1] < math.inf):
            candidates = list(map(loss_with, range(len(rows))))
            losses.append(min(candidates))
            order.append(candidates.index(losses[-1]))
            for total, stack in zip(sums, stacks, strict=True):
                total += stack[order[-1]]
    if losses[0] == math.inf:
        raise ValueError(f"the score of every member in rows {rows} is NaN or infinite: there is no member to choose")
    best = losses.index(min(losses)) + 1
    chosen = tuple(rows[index] for index in order[:best])
    return Selection(chosen, tuple(sign * value for value in losses[:best]), members)


def _default(predictions: Any, target: Any, mode: str, softmax: int | None) -> tuple[Score, int | None]:
    """The score for these targets, and the dim of classes. Raises ValueError where there is none."""
    if mode != "min":
        raise ValueError(
            f"mode={mode!r} without a score: cross-entropy and mean squared error are the lower the better"
        )
    if not isinstance(predictions, Tensor) or not isinstance(target, Tensor):
        raise ValueError("members give, or targets are, a nest of tensors: give score=function(prediction, target)")
    if target.is_floating_point():
        if predictions.shape[1:] != target.shape:
            raise ValueError(
                f"members give {list(predictions.shape[1:])} for targets {list(target.shape)}: give score="
            )
        return F.mse_loss, softmax
    return lambda probabilities, classes: F.nll_loss(probabilities.log(), classes), 1 if softmax is None else softmax


def _probabilities(outputs: Tensor, softmax: int | None) -> Tensor:
    """Apply softmax to members' outputs ``[B, ...]`` along a dim of one member's output; None: return them."""
    dims = outputs.dim() - 1
    if softmax is not None and not -dims <= softmax < dims:
        raise ValueError(f"softmax={softmax} for members' outputs {list(outputs.shape[1:])}: give one of their dims")
    return outputs if softmax is None else outputs.softmax(softmax + 1 if softmax >= 0 else softmax)
