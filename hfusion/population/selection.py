"""Greedy ensemble selection: which members, how often, predict a validation set best together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.core.calls import is_stacked
from hfusion.population.evaluation import array_outputs, member_outputs
from hfusion.population.member_metrics import number
from hfusion.population.population import Population

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
    predictions, target, rows, members = _library(models, loader)
    if any(is_stacked(leaf) for leaf in pytree.tree_leaves(target, is_leaf=is_stacked)):
        raise ValueError(
            "the loader gives each member its own target: an ensemble is chosen for targets of all members"
        )
    if score is None:
        score, softmax = _default(predictions, target, mode, softmax)
    leaves, spec = pytree.tree_flatten(predictions)
    stacks = [_prediction(leaf, softmax) for leaf in leaves]
    sign = 1.0 if mode == "min" else -1.0

    def loss(sums: Sequence[Tensor], row: int, count: int) -> float:
        pairs = zip(sums, stacks, strict=True)
        means = [((total + stack[row]) / count).to(stack.dtype) for total, stack in pairs]
        value = sign * number(score(pytree.tree_unflatten(means, spec), target), "the score", "an ensemble")
        return math.inf if math.isnan(value) else value

    with torch.no_grad():
        order, losses = _greedy(stacks, rows, size, loss)
    if losses[0] == math.inf:
        raise ValueError(f"the score of every member in rows {rows} is NaN or infinite: there is no member to choose")
    best = losses.index(min(losses)) + 1
    return Selection(tuple(order[:best]), tuple(sign * value for value in losses[:best]), members)


def _greedy(
    stacks: Sequence[Tensor], rows: Sequence[int], size: int, loss: Callable[[Sequence[Tensor], int, int], float]
) -> tuple[list[int], list[float]]:
    """The rows in the order in which they are added, and the loss after each."""
    sums = [torch.zeros_like(stack[0], dtype=torch.float64) for stack in stacks]
    order: list[int] = []
    losses: list[float] = []
    for count in range(1, size + 1):
        candidates = [loss(sums, row, count) for row in rows]
        losses.append(min(candidates))
        if losses[-1] == math.inf:
            break
        order.append(rows[candidates.index(losses[-1])])
        for total, stack in zip(sums, stacks, strict=True):
            total += stack[order[-1]]
    return order, losses


def _library(models: Any, loader: Iterable[Any]) -> tuple[Any, Any, list[int], int]:
    """The members' outputs, the targets, the rows that have a member, and the number of rows. Raises ValueError."""
    if isinstance(models, Population):
        live = [row for row, tag in enumerate(models.tags) if tag is not None]
        if not live:
            raise ValueError("every row of the population is free: an ensemble has one member at least")
        return *member_outputs(models, loader), live, len(models)
    fused = models if isinstance(models, FusedModule) else fuse(models)
    return *array_outputs(fused, loader), list(range(len(fused))), len(fused)


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
    return _cross_entropy, 1 if softmax is None else softmax


def _cross_entropy(probabilities: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(probabilities.log(), target)


def _prediction(leaf: Any, softmax: int | None) -> Tensor:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
        raise ValueError(f"members give {kind}, of which there is no mean: let them give logits or numbers")
    if softmax is None:
        return leaf
    return leaf.softmax(softmax + 1 if softmax >= 0 else softmax)
