"""Members that differ in modes, or have hooks of their own: each runs its own code, and the results are joined.

Its parameters are rows of the stacks, so that gradients reach the stacks through autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.member_module import RowView
from hfusion.array.ragged_rows import joined_blocks
from hfusion.array.unfused_calls import run_members, stacked_results
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import check_members
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import frozen_rows, watching_row
from hfusion.core.member_random import member_seeds
from hfusion.device.backend import random_states_kept, seed_in_use
from hfusion.torch_private.functorch import in_transform, is_wrapped

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


@dataclass(frozen=True, eq=False)
class MembersApart:
    """The members of an array, by row, that run their own code, and why.

    ``key``: equal for members that differ in the same way.
    """

    key: Any
    members: Mapping[int, RowView]
    why: str

    def run(self, fused: FusedModule, arguments: Arguments) -> Any:
        """Return the outputs of all members."""
        fused._loops[f"{fused._original}: loop over members: {self.why}"] = None
        if in_transform():
            return run_members(fused, arguments)
        check_members(len(fused), arguments)
        source = member_seeds()
        low, high = (None, None) if source is None else source.keys()
        results: list[Any] = []
        for row, member in sorted(self.members.items()):
            # What a member draws must not depend on the modes of others, which may draw nothing.
            with nullcontext() if low is None else random_states_kept():
                if low is not None and high is not None:
                    seed_in_use((int(high[row]) << 32) | int(low[row]))
                results.append(_run_alone(fused, row, member, arguments))
        if arguments.ragged:
            wide = [pytree.tree_map(lambda x: x[None] if isinstance(x, Tensor) else x, result) for result in results]
            return joined_blocks([([row], result) for row, result in enumerate(wide)])
        return stacked_results(results)


def apart(
    modes: Sequence[Mapping[str, bool]],
    trained: Sequence[Mapping[str, bool]],
    hooked: Mapping[int, str],
    members: Mapping[int, RowView],
) -> MembersApart:
    """Return how members differ that have these ``modes``, train these parameters, and have these hooks."""
    reasons = [f"member {row} {reason}" for row, reason in hooked.items()]
    other = next((row for row, member_modes in enumerate(modes) if member_modes != modes[0]), None)
    if other is not None:
        path = next(path for path, mode in modes[0].items() if modes[other][path] != mode)
        rows = [[row for row, flags in enumerate(modes) if flags[path] == mode] for mode in (True, False)]
        reasons.append(f"{path or 'member'} is in train mode in members {rows[0]}, in eval mode in {rows[1]}")
    elif not reasons:
        reasons.append("forward reads which parameters need a gradient, in which members differ")
    key = [tuple(tuple(row.items()) for row in rows) for rows in (modes, trained)]
    return MembersApart((*key, tuple(hooked.items())), dict(members), "; ".join(reasons))


@contextmanager
def holding(modules: Mapping[str, nn.Module], replacements: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: replace tensors of ``modules`` (by path) by ``replacements`` (by key), and restore them."""
    replaced = []
    for name, tensor in replacements.items():
        path, _, leaf = name.rpartition(".")
        table: Any = modules[path]._parameters
        table = table if dict.__contains__(table, leaf) else modules[path]._buffers
        replaced.append((table, leaf, dict.__getitem__(table, leaf)))
        dict.__setitem__(table, leaf, tensor)
    try:
        yield
    finally:
        for table, leaf, tensor in reversed(replaced):
            dict.__setitem__(table, leaf, tensor)


def _run_alone(fused: FusedModule, row: int, member: RowView, arguments: Arguments) -> Any:
    """Run a member's own code, with its hooks. Its parameters are rows of the stacks, so gradients reach the stacks."""
    stacks = dict(tensors(fused))
    rows_by_id: dict[int, Tensor] = {}
    for name, parameter in member.parameters.items():
        stack, frozen = stacks[name], frozen_rows(stacks[name])
        if id(stack) not in rows_by_id:
            tensor = stack.detach()[row] if frozen is not None and frozen[row] else stack[row]
            for hook in (parameter._backward_hooks or {}).values() if tensor.requires_grad else ():
                tensor.register_hook(hook)
            rows_by_id[id(stack)] = tensor
    member_rows = {name: rows_by_id[id(stacks[name])] for name in member.parameters}
    inputs = [leaf for leaf in arguments.leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in inputs]
    args, kwargs = arguments.of_member(row)
    with holding(member.modules, member_rows), watching_row(list(rows_by_id.values()), row, len(fused)):
        outputs = member.model(*args, **kwargs)
    with torch.no_grad():
        for name, tensor in member_rows.items():
            target = stacks[name].detach()[row]
            if not is_wrapped(stacks[name]) and tensor.data_ptr() != target.data_ptr():
                # Forward has assigned other data to the parameter.
                target.copy_(tensor.detach())
    if [tensor._version for tensor in inputs] != versions:
        raise FusionError(
            f"member {row} of a fused {fused._original} runs as its own code, as it has hooks, and writes into an "
            "input that all members see; let it write into a copy, or give each its own by hf.stacked"
        )
    return outputs


def flags_read(fused: FusedModule) -> list[dict[str, bool]]:
    """Return the parameters that each member trains, if members differ and forward reads that; else empty."""
    frozen = {name: rows for name, stack in fused.stacks.items() if (rows := frozen_rows(stack)) is not None}
    if not frozen or not fused._situations.asks_gradients(fused._array.skeletons):
        return []
    return [{name: not bool(rows[row]) for name, rows in frozen.items()} for row in range(len(fused))]


def check_together(fused: FusedModule, feature: str) -> None:
    """Raise FusionError if members differ in modes or hooks, so that ``feature`` cannot hold them."""
    split = fused._split()
    if split is not None:
        raise FusionError(
            f"members of a fused {fused._original} cannot be computed together: {split.why}; {feature} needs members "
            "of equal modes without hooks: call train() or eval() of the array, and remove the hooks"
        )


def check_alike(fused: FusedModule, feature: str) -> None:
    """Raise FusionError if members differ in modes, in hooks, or in the parameters they train."""
    check_together(fused, feature)
    for name, tensor in fused.stacks.items():
        frozen = frozen_rows(tensor)
        if frozen is not None:
            raise FusionError(
                f"members {frozen.nonzero().reshape(-1).tolist()} of a fused {fused._original} do not train {name}, "
                f"which others train; {feature} trains a parameter in all members or in none: use hf.train_step or "
                "hf.Population, or freeze it in all by requires_grad_ of the array"
            )
