"""Members that differ in modes, or have hooks: computed in groups, by a program for each, and joined again.

A group is an array of some of the members, with the rows of the stacks as tensors: gradients reach the stacks through
autograd. A member with hooks runs as its own code, where hooks run as they do alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.array.failed_assertions import REFUSALS, call_members
from hfusion.array.member_module import RowView
from hfusion.array.ragged_rows import DIFFERENT_SIZES, joined_blocks
from hfusion.array.unfused_calls import run_members
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import bind
from hfusion.compiler.compiled_program import Compiled, check_members
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.core.gradient_usage import frozen_rows, of_rows, watching_row
from hfusion.core.member_random import seeds_of_rows
from hfusion.torch_private.functorch import in_transform, is_wrapped

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

# Maximum number of cached arrays of some of the members, for when they are divided in the same way again.
MAX_PARTS = 8


@dataclass(frozen=True, eq=False)
class MemberGroup:
    """Members ``rows`` as an array whose parameters have memory only while it is captured."""

    rows: tuple[int, ...]
    array: FusedModule

    def ready(self, fused: FusedModule, arguments: Arguments) -> Compiled:
        """Return the program for a call with ``arguments``, captured and checked with the current values."""
        array = self.array
        cached = array.find(arguments)
        if cached is not None and id(cached) in array._checks:
            return cached
        stacks = fused.stacks
        for name, tensor in tensors(array):
            if name not in array._array.comparison.shared:
                tensor.data = stacks[name].detach()[list(self.rows)]
        try:
            compiled = array._program(arguments)
            array._check_once(compiled, arguments)
        except ForwardsDiffer as error:
            raise error.of_rows(self.rows) from error
        finally:
            for parameter in array.parameters():
                parameter.data = parameter.new_zeros(()).expand(parameter.shape)
        if compiled.modes:
            raise FusionError(
                f"forward of {array._original} sets train and eval modes, and members are in different "
                "modes; set the same modes in all members, by train() or eval() of the array"
            )
        return compiled

    def run(self, fused: FusedModule, compiled: Compiled, arguments: Arguments, watch: bool) -> Any:
        """Return the outputs of the group's members, whose arguments are ``arguments``."""
        array, rows, members = self.array, list(self.rows), len(fused)
        stacks, shared = dict(tensors(fused)), array._array.comparison.shared
        fixed = {name for name, parameter in array.named_parameters() if not parameter.requires_grad}
        index = {device: torch.tensor(rows, device=device) for device in {t.device for t in stacks.values()}}
        rows_by_id: dict[int, Tensor] = {}
        group_tensors = {
            name: stack
            if name in shared
            else rows_by_id.setdefault(id(stack), stack.index_select(0, index[stack.device]))
            for name, stack in stacks.items()
        }
        group_tensors = {name: tensor.detach() if name in fixed else tensor for name, tensor in group_tensors.items()}
        with (
            holding(dict(array.named_modules(remove_duplicate=False)), group_tensors),
            of_rows(rows, members),
            seeds_of_rows(rows),
        ):
            outputs = bind(compiled, array, len(rows) if watch else None)(arguments.values)
        with torch.no_grad():
            for name in compiled.written - shared:
                stacks[name].detach()[rows] = group_tensors[name].detach()
        if compiled.opaque:
            array._situations.ran([call.module_path for call in compiled.opaque])
        return outputs


@dataclass(frozen=True, eq=False)
class Split:
    """The groups in which an array computes members that cannot be computed together.

    ``key``: equal for splits that divide members alike. ``hooked_members``: members that run their own code, by row, as
    they have hooks, or attributes that change often.
    """

    key: Any
    groups: tuple[MemberGroup, ...]
    hooked_members: Mapping[int, RowView]
    why: str

    @staticmethod
    def of(
        fused: FusedModule,
        modes: Sequence[Mapping[str, bool]],
        trained: Sequence[Mapping[str, bool]],
        hooked: Mapping[int, str],
        members: Mapping[int, RowView],
        parts: dict[Any, FusedModule],
    ) -> Split:
        """Divide members by their ``modes``, and by ``trained`` if forward reads it; those with hooks run separately.

        ``parts``: the cache of arrays of some of the members.
        """
        rows_by_modes: dict[Any, list[int]] = {}
        for row, member_modes in enumerate(modes):
            if row not in hooked:
                flags = tuple(trained[row].items()) if trained else ()
                rows_by_modes.setdefault((tuple(member_modes.items()), flags), []).append(row)
        groups = []
        for rows in rows_by_modes.values():
            key = fused._number, len(fused), tuple(rows)
            part = parts.pop(key, None) or part_of(fused, rows, copied_rows)
            parts[key] = part
            while len(parts) > MAX_PARTS:
                del parts[next(iter(parts))]
            for path, branch in part.named_modules():
                branch.training = modes[rows[0]][path]
            for name, parameter in part.named_parameters():
                group_trained = trained[rows[0]] if trained else {}
                parameter.requires_grad_(group_trained.get(name, fused.stacks[name].requires_grad))
            groups.append(MemberGroup(tuple(rows), part))
        division = (
            tuple((tuple(rows), member_modes) for member_modes, rows in rows_by_modes.items()),
            tuple(hooked.items()),
        )
        return Split(division, tuple(groups), {row: members[row] for row in hooked}, _why(rows_by_modes, hooked))

    def run(self, fused: FusedModule, arguments: Arguments) -> Any:
        """Return the outputs of all members."""
        if in_transform():
            fused._loops[f"{fused._original} inside torch.func: loop over members: {self.why}"] = None
            return run_members(fused, arguments)
        check_members(len(fused), arguments)
        calls = [(group, arguments.of_rows(group.rows)) for group in self.groups]
        compiled = [group.ready(fused, inputs) for group, inputs in calls]
        watch = bool(self.hooked_members) or any(group_program.opaque for group_program in compiled)
        parts: list[tuple[Sequence[int], Any]] = []
        for (group, inputs), program in zip(calls, compiled, strict=True):
            try:
                parts.append((group.rows, group.run(fused, program, inputs, watch)))
            except REFUSALS as error:
                models = [fused._member(row) for row in group.rows]
                for path, training in group.array.training_by_path().items():
                    for model in models:
                        model.get_submodule(path).training = training
                call_members(models, inputs, error)
                group.array._compiler.distrust(group.array._modes(inputs), inputs, program, str(error))
                parts.append((group.rows, group.run(fused, group.ready(fused, inputs), inputs, True)))
        for row, member in self.hooked_members.items():
            parts.append(([row], _run_alone(fused, row, member, arguments)))
        if arguments.ragged:
            return joined_blocks(parts, DIFFERENT_SIZES)
        return joined_blocks(parts, f"of a fused {fused._original} differ in modes or hooks", one_shape=True)


def _why(groups: Mapping[Any, Sequence[int]], hooked: Mapping[int, str]) -> str:
    reasons = [f"member {row} {reason}" for row, reason in hooked.items()]
    if len(groups) > 1:
        ((first_modes, _), first), ((second_modes, _), second) = list(groups.items())[:2]
        path = next((name for (name, a), (_, b) in zip(first_modes, second_modes, strict=True) if a != b), None)
        if path is None:
            reasons.append("forward reads which parameters need a gradient, in which members differ")
            return "; ".join(reasons)
        modes = ["train" if dict(group_modes)[path] else "eval" for group_modes in (first_modes, second_modes)]
        reasons.append(
            f"{path or 'member'} is in {modes[0]} mode in members {list(first)}, in {modes[1]} mode in {list(second)}"
        )
    return "; ".join(reasons)


def part_of(fused: FusedModule, rows: Sequence[int], stack: Callable[[Tensor, Any], Tensor]) -> FusedModule:
    """Return an array of some members, in the modes of ``fused``.

    Args:
        stack: ``stack(whole, rows)`` returns a tensor of it; ``rows`` is None for a tensor that all members share.
    """
    from hfusion.array.module import FusedModule

    array = fused._array
    comparison, variants = array.comparison.of_members(rows)
    skeletons = tuple(array.skeletons[variant] for variant in variants)
    part = replace(array, members=len(rows), skeletons=skeletons, comparison=comparison, origins=WeakIdKeyDictionary())
    for parameter, (member, name) in array.origins.items():
        if member in rows:
            part.origins[parameter] = (list(rows).index(member), name)
    shared = comparison.shared
    stacks_by_id: dict[int, Tensor] = {}
    stacks: dict[str, Tensor] = {}
    for name, whole in fused.stacks.items():
        if name in array.shapes:
            if id(whole) not in stacks_by_id:
                stacks_by_id[id(whole)] = stack(whole, None if name in shared else rows)
            stacks[name] = stacks_by_id[id(whole)]
    fused_part = FusedModule(part, stacks)
    modes = fused.training_by_path()
    for path, module in fused_part.named_modules(remove_duplicate=False):
        module.training = modes[path]
    return fused_part


def copied_rows(stack: Tensor, rows: Sequence[int] | None) -> Tensor:
    """Return a copy of rows of a stack, or a shared tensor (``rows`` is None) without a copy; keeps parameters."""
    copy = stack.detach() if rows is None else stack.detach()[list(rows)]
    return nn.Parameter(copy, requires_grad=stack.requires_grad) if isinstance(stack, nn.Parameter) else copy


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
    return pytree.tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, outputs)


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
