"""Losses and metrics of a population's members: from one reading of the data, and by the weights of samples."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments, row_of_leaf
from hfusion.core.calls import Ragged, StackedInput, call_arguments, entry_counts, is_stacked, stacked, take_entries
from hfusion.core.errors import ForwardsDiffer, noting
from hfusion.core.layout import Listed, member_values, same_value, values_of

if TYPE_CHECKING:
    from hfusion.population.population import Population


Convert = Callable[[Any], Any] | None


@torch.no_grad()
def evaluate(population: Population, metric: Any, loader: Iterable[Any], convert: Convert = None) -> dict[int, Any]:
    """Return the ``metric`` of each member by its row of the population, as in `member_metrics`.

    Every batch is read once.
    """
    if not callable(metric) and not is_updated(metric):
        raise ValueError(
            f"the metric must be a function of a member's outputs and targets, got {type(metric).__name__}. Give "
            "evaluate the metric first, then the loader."
        )
    # Imported late: a sweep of plain trials needs metrics, and no groups.
    from hfusion.array.unfused_calls import run_members
    from hfusion.population.grouping import part
    from hfusion.population.training_group import evaluating_members, member_outputs

    # Of each group and batch the outputs, with a leading dim of its rows, and the targets.
    outputs = defaultdict[Any, list[tuple[Any, Any]]](list)
    with ExitStack() as modes:
        in_eval: set[Any] = set()
        for batch in loader:
            inputs, target = pair_of(batch)
            check_entries((inputs, target), len(population))
            queue = deque(population._groups)
            while queue:
                group = queue.popleft()
                if group not in in_eval:
                    in_eval.add(group)
                    modes.enter_context(evaluating_members(group.fused))
                args, kwargs = call_arguments(take_entries(inputs, group.entries()), {})
                try:
                    with group.table.naming():
                        output = member_outputs(group.fused, args, kwargs)
                except ForwardsDiffer as error:
                    if not outputs[group]:
                        # The groups leave eval mode, since splitting one copies members with their modes.
                        modes.close()
                        in_eval.clear()
                        queue.extendleft(reversed(part(population, group, error)))
                        continue
                    # The outputs so far are of all its members.
                    output = run_members(group.fused, Arguments.of(args, kwargs), str(error))
                outputs[group].append((output, take_entries(target, group.entries())))
    values: dict[int, Any] = {}
    for group in population._groups:
        rows = {local: row for local, row in enumerate(group.rows) if row is not None}
        names = {local: group.table["tag"][local] for local in rows}
        of_group = member_metrics(outputs[group], metric, names, rows, convert)
        values |= {rows[local]: value for local, value in of_group.items()}
    return values


def pair_of(batch: Any, source: str = "the loader") -> tuple[Any, Any]:
    """Return the inputs and the target of a batch from ``source``. Raises ValueError if it is not a pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ValueError(
            f"expected batches (inputs, target), got {type(batch).__name__}{many} from {source}. Several inputs are a "
            "tuple, ((x, mask), target)."
        )
    return batch[0], batch[1]


def check_entries(values: Any, rows: int | Sequence[int]) -> None:
    """Raise a ValueError unless each stacked tensor in nested ``values`` has an entry for each of ``rows``."""
    expected = rows if isinstance(rows, int) else len(rows)
    for entries in entry_counts(values):
        if entries != expected:
            owner = f"a population of {rows} rows" if isinstance(rows, int) else f"rows={list(rows)}"
            raise ValueError(f"a stacked argument has {entries} entries for {owner}: give one for each, in that order")


def entry_bytes(values: Any) -> int:
    """Return the bytes of one entry of all stacked tensors in nested ``values``."""
    stacks = filter(is_stacked, pytree.tree_leaves(values, is_leaf=is_stacked))
    return sum(leaf.tensor.nbytes // max(1, len(leaf.tensor)) for leaf in stacks)


# The metric of each member from its outputs of all batches.


@torch.no_grad()
def member_metrics(
    batches: Sequence[tuple[Any, Any]],
    metric: Callable[..., Any],
    members: Mapping[int, str],
    rows: Mapping[int, int] | None = None,
    convert: Convert = None,
) -> dict[int, Any]:
    """Return the ``metric`` of each of ``members``, by row, from outputs ``[rows, ...]`` and targets of all batches.

    ``rows``: the row that errors name for each; by default the row of the outputs. ``convert``: a function of what the
    metric returned; by default `number`.
    """
    updated = is_updated(metric)
    # Members may have different numbers of samples.
    apart = not updated and any(isinstance(leaf, Ragged) for leaf in pytree.tree_leaves(batches))
    parts = batches if batches and (updated or apart) else [joined_batches(batches)]
    values = {}
    for row, tag in members.items():
        own = [_of_member(part, row) for part in parts]
        with noting(f"This is of the metric of member {tag!r} in row {(rows or {}).get(row, row)}."):
            if updated:
                # On a copy, so that members share no state.
                member_metric: Any = copy.deepcopy(metric)
                member_metric.reset()
                for output, target in own:
                    member_metric.update(output, target)
                value = member_metric.compute()
            else:
                value = metric(*(joined_batches(own, 0) if apart else own[0]))
            values[row] = number(value) if convert is None else convert(value)
    return values


def is_updated(metric: object) -> bool:
    """Return whether a metric is updated batch by batch, as those of torchmetrics."""
    return all(hasattr(metric, name) for name in ("reset", "update", "compute"))


def joined_batches(batches: Sequence[tuple[Any, Any]], dim: int = 1) -> tuple[Any, Any]:
    """Return the concatenated outputs ``[rows, N, ...]`` and targets of all batches; ``dim``: the samples of outputs.

    What has no samples gets one entry per batch: tensors ``[rows]`` become ``[rows, batches]``, other values lists
    unless they are the same in all batches. Raises ValueError.
    """
    if not batches:
        raise ValueError("the loader gave no batch, so that there is nothing to evaluate")
    return _joined([output for output, _ in batches], dim), _joined([target for _, target in batches], 0)


def _of_member(batch: tuple[Any, Any], row: int) -> tuple[Any, Any]:
    outputs, target = batch
    own = pytree.tree_map(lambda leaf: leaf[row] if isinstance(leaf, Tensor | Ragged | Listed) else leaf, outputs)
    return own, pytree.tree_map(lambda leaf: row_of_leaf(leaf, row), target, is_leaf=is_stacked)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    """Return the batches concatenated along ``dim``, or along dim 1 for stacked values."""
    flat = [pytree.tree_flatten(part, is_leaf=is_stacked) for part in parts]
    for _, spec in flat:
        if spec != flat[0][1]:
            raise ValueError(f"batches of different structures, {flat[0][1]} and {spec}, cannot be joined")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_cat(column, dim) for column in columns], flat[0][1])


def _cat(leaves: Sequence[Any], dim: int) -> Any:
    first = leaves[0]
    if len(leaves) == 1:
        return first
    if is_stacked(first):
        return StackedInput(torch.cat([leaf.tensor for leaf in leaves], 1))
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return torch.cat(list(leaves), dim) if first.dim() > dim else torch.stack(list(leaves), dim)
    members = max((len(leaf) for leaf in leaves if isinstance(leaf, Listed)), default=1)
    by_member = list(zip(*(values_of(leaf, members) for leaf in leaves), strict=True))
    return member_values([v[0] if all(same_value(x, v[0]) for x in v) else list(v) for v in by_member])


def number(value: Any, source: str = "the metric", subject: str = "one member") -> float:
    """Return a metric as ``float(value)`` does, never rounded to a narrower type. Raises ValueError."""
    if isinstance(value, list | tuple) and len(value) == 1:
        return number(value[0], source, subject)
    shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
    try:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            array = value.detach() if isinstance(value, Tensor) else np.asarray(value)
            is_real = not value.is_complex() if isinstance(value, Tensor) else value.dtype.kind in "biuf"
            shown = f"{'tensor' if isinstance(value, Tensor) else shown} of {array.dtype} of shape {list(array.shape)}"
            value = array.item() if is_real and math.prod(array.shape) == 1 else None
        elif isinstance(value, str | bytes):
            raise TypeError("text is no number")
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{source} must give a number for {subject}, got {shown}") from error


@contextmanager
def evaluating_model(model: nn.Module) -> Iterator[None]:
    """Context manager: a model is in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def with_row(value: Any) -> Any:
    """Return nested ``value`` with a leading dim of 1 added to every tensor."""
    return pytree.tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, value)


# Weights in a loss: of calls that make an update together, and of samples, which count as often as theirs says.


# Their mean is over the weights of the targets' classes, without targets that are ignored.
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_CLASS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
# Their mean is over the weights that they take for all elements.
_OF_ELEMENTS = (F.mse_loss, F.l1_loss)


def weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``loss`` for targets with a weight: with the same values, and gradients multiplied by the weight."""

    @wraps(loss, updated=())
    def weighted_loss(output: Any, target: Any) -> Any:
        value = loss(output, target["target"])
        held = value.detach()
        # The added term is zero for every finite weight; a value that is not finite stays so.
        weight = target["weight"].to(torch.promote_types(value.dtype, torch.float32))
        return held + (value - held) * weight

    return weighted_loss


def check_keyword(kind: type[nn.Module], name: str) -> None:
    """Raise ValueError if the members' forward takes a keyword that `Population.step` takes itself."""
    if name in _parameters(kind.forward):
        raise ValueError(
            f"{name}= is for step, and forward of {kind.__name__} has a parameter of that name: give it by "
            "position, in inputs"
        )


def rows_of_weights(weights: Any, rows: Sequence[int], free: Sequence[int]) -> Any:
    """Return weights marked as one row per member, unless they are ``[N]`` for all.

    Raises ValueError unless there are weights for each of ``rows``, and those of members can be used.
    """
    if not isinstance(weights, Tensor | StackedInput | Ragged | list | tuple | np.ndarray):
        raise ValueError(f"weights={weights!r:.80}: give [N] numbers for all members, or [members, N]")
    if isinstance(weights, list | tuple) and len(weights):
        each = [row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu") for row in weights]
        weights = torch.stack(each) if all(row.dim() == 0 for row in each) else stacked(each)
    if not isinstance(weights, StackedInput | Ragged):
        weights = weights if isinstance(weights, Tensor) else torch.as_tensor(weights, device="cpu")
        if weights.dim() not in (1, 2):
            raise ValueError(f"weights of shape {list(weights.shape)}: give [N] for all members, or [members, N]")
        weights = weights if weights.dim() == 1 else stacked(weights)
    for count in entry_counts(weights):
        if count != len(rows):
            raise ValueError(f"weights have {count} rows for {len(rows)} members: give one for each, in their order")
    for entry, row in enumerate(rows):
        values = row_of_leaf(weights, entry).detach()
        if row not in free and not bool(((values >= 0) & values.isfinite()).all()):
            raise ValueError(f"weights of member {row}: {values.tolist()!s:.80}; they are finite, and at least 0")
        if row not in free and not bool(values.any()):
            raise ValueError(
                f"weights of member {row} are 0 for all of its samples, of which there is no mean: leave it out of the "
                "step, by rows="
            )
    return weights


def sample_weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss for a target with the weights of its samples: the mean loss by weights, or the sum.

    The target is a dict of the ``target`` and its ``samples``, the weights; None: all count as 1.

    Raises ValueError for a loss that has no values of single samples.
    """
    single, names = _single_losses(loss), ("reduction", "weight", "ignore_index")
    is_module = isinstance(loss, nn.Module)
    given: dict[str, Any] = {n: getattr(loss, n, None) for n in names} if is_module else _parameters(loss)
    reduction, function = given.get("reduction"), loss.func if isinstance(loss, functools.partial) else loss
    of_classes = isinstance(loss, _CLASS_MODULES) or any(function is class_loss for class_loss in _OF_CLASSES)

    @wraps(loss, updated=())
    def weighted_loss(output: Any, target: Any) -> Any:
        expected, weights = target["target"], target["samples"]
        if weights is None:
            return loss(output, expected)
        removed = weights == 0
        losses = single(_without(output, removed), expected)
        # len() would need to know a size that may vary.
        if losses.dim() == 0 or losses.shape[0] != weights.shape[0]:
            raise ValueError(
                f"{len(weights)} weights for losses of shape {list(losses.shape)}: weights= takes one for each sample, "
                "and a loss that returns [N] or takes reduction="
            )
        share = _like(weights, losses).to(torch.promote_types(losses.dtype, weights.dtype)).to(losses.dtype)
        total = torch.where(_like(removed, losses), 0, losses * share).sum()
        if reduction == "sum":
            return total
        counts = torch.ones_like(losses)
        if of_classes:
            counts = _class_counts(losses, expected, given["weight"], given["ignore_index"])
        if any(function is weighing for weighing in _OF_ELEMENTS) and given["weight"] is not None:
            counts = given["weight"]
        if reduction == "batchmean":
            counts = counts / counts[0].numel()
        return total / (counts * share).sum()

    return weighted_loss


def _single_losses(loss: Callable[..., Any]) -> Callable[..., Any]:
    """``loss`` without its reduction: one value per sample, or one per element."""
    if loss is F.ctc_loss or isinstance(loss, nn.CTCLoss):
        raise ValueError("ctc_loss divides by the lengths of targets: with weights=, give a loss that returns [N]")
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        single: Any = copy.copy(loss)
        single.reduction = "none"
        return single  # type: ignore[no-any-return]
    if "reduction" in _parameters(loss):
        return functools.partial(loss, reduction="none")
    return loss


def _parameters(loss: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the function's parameters."""
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}


def _class_counts(losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the weight of each element in a mean of cross entropies, in the shape of the losses."""
    if target.shape != losses.shape or target.is_floating_point():
        return torch.ones_like(losses)
    counted = target != ignore_index
    if weight is None:
        return counted.to(losses.dtype)
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).to(losses.dtype)


def _without(output: Any, removed: Tensor) -> Any:
    """Return ``output`` with zeros for removed samples, so that their NaNs reach no gradient."""

    def clear(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:1] == removed.shape and leaf.is_floating_point():
            return torch.where(_like(removed, leaf), 0, leaf)
        return leaf

    return pytree.tree_map(clear, output, is_leaf=is_stacked)


def _like(values: Tensor, other: Tensor) -> Tensor:
    """Return ``values [N]`` as ``[N, 1, ...]`` with as many dims as ``other``."""
    return values.reshape(-1, *[1] * (other.dim() - 1))
