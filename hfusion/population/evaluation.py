"""Outputs and metrics of a population's members, from one reading of the data."""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments, row_of_leaf
from hfusion.core.calls import Ragged, StackedInput, call_arguments, entry_counts, is_stacked, take_entries
from hfusion.core.errors import ForwardsDiffer
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
        try:
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
        except Exception as error:
            error.add_note(f"This is of the metric of member {tag!r} in row {(rows or {}).get(row, row)}.")
            raise
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
