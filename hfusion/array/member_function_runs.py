"""One function of a member's tensors, run for several members: by `torch.func.vmap`, or member by member."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import StackedInput
from hfusion.core.errors import FusionError
from hfusion.torch_private.functorch import vmap_fallback_refused

# How far results of `torch.func.vmap` may be from those of the loop, relative to the largest number of the tensor.
_RELATIVE = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5}
_RELATIVE_OF_HALVES = 1e-2

Address = tuple[str, str]
"""A tensor that a function gets: ``("params", name)`` or ``("grads", name)``."""


@dataclass(frozen=True)
class MemberFunctionCall:
    """The arguments of a function for some members.

    Attributes:
        rows: the members, in the order of the stacks below.
        tensors: stacks ``[len(rows), *shape]``, or ``[*shape]`` of a tensor that all members share.
        shared: the addresses of the tensors that all members share.
        arguments: further arguments, whose stacked leaves have a row for each of ``rows``.
    """

    rows: tuple[int, ...]
    tensors: Mapping[Address, Tensor]
    shared: frozenset[Address]
    arguments: Arguments

    def cloned(self, rows: Sequence[int]) -> MemberFunctionCall:
        """Copy the arguments of the members at the positions ``rows``."""
        index = list(rows)

        def copied(tensor: Tensor) -> Tensor:
            return tensor[index].clone()

        tensors = {key: t.clone() if key in self.shared else copied(t) for key, t in self.tensors.items()}
        leaves = [
            StackedInput(copied(leaf.tensor))
            if isinstance(leaf, StackedInput)
            else leaf.clone()
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in self.arguments.leaves
        ]
        arguments = replace(self.arguments, leaves=tuple(leaves))
        return replace(self, rows=tuple(self.rows[k] for k in index), tensors=tensors, arguments=arguments)

    def common(self) -> dict[str, Tensor]:
        """The tensors that every member sees, by their names in messages."""
        named = {f"{kind}[{name!r}]": self.tensors[kind, name] for kind, name in self.shared}
        leaves = enumerate(self.arguments.leaves)
        return named | {f"argument tensor {k}": leaf for k, leaf in leaves if isinstance(leaf, Tensor)}

    def written_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all stacks, which a function may write into, by their names in messages."""
        named = [
            (f"{kind}[{name!r}]", t) for (kind, name), t in self.tensors.items() if (kind, name) not in self.shared
        ]
        leaves = enumerate(self.arguments.leaves)
        return named + [(f"argument {k}", leaf.tensor) for k, leaf in leaves if isinstance(leaf, StackedInput)]


def run_vmapped(fn: Callable[..., Any], name: str, call: MemberFunctionCall) -> None:
    """Run ``fn`` once, under `torch.func.vmap`. Raises vmap's own errors."""
    keys, leaves = list(call.tensors), call.arguments.values
    batched = [isinstance(leaf, StackedInput) for leaf in call.arguments.leaves]
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    in_dims = (
        *(None if key in call.shared else 0 for key in keys),
        *(0 if batched[index] else None for index in tensors),
    )
    changed: list[Address] = []

    def single(*values: Tensor) -> tuple[Tensor, ...]:
        member_tensors = dict(zip(keys, values[: len(keys)], strict=True))
        filled = list(leaves)
        for index, value in zip(tensors, values[len(keys) :], strict=True):
            filled[index] = value
        args, kwargs = replace(call.arguments, leaves=tuple(filled)).of_member(0)
        changes = call_member(fn, name, member_tensors, args, kwargs)
        changed.extend(changes)
        return tuple(changes.values())

    versions = {label: _version(tensor) for label, tensor in call.common().items()}
    with vmap_fallback_refused():
        values = torch.func.vmap(single, in_dims=in_dims)(*call.tensors.values(), *(leaves[k] for k in tensors))
    _check_common(name, call, versions)
    _commit(call, dict(zip(changed, values, strict=True)), name)


def run_looped(fn: Callable[..., Any], name: str, call: MemberFunctionCall) -> None:
    """Run ``fn`` member by member."""
    for position, row in enumerate(call.rows):
        tensors = {key: t if key in call.shared else t[position] for key, t in call.tensors.items()}
        addresses = {key: t.data_ptr() for key, t in tensors.items()}
        versions = {label: _version(tensor) for label, tensor in call.common().items()}
        args, kwargs = call.arguments.of_member(position)
        try:
            changes = call_member(fn, name, tensors, args, kwargs)
        except Exception as error:
            done = f"; members {list(call.rows[:position])} have been changed" if position else ""
            error.add_note(f"hf.each: {name} ran for member {row}{done}")
            raise
        member = {key: t if key in call.shared else t[position] for key, t in call.tensors.items()}
        for key, tensor in tensors.items():
            # After `tensor.data = value` the tensor does not lie in the row any more.
            if tensor.data_ptr() != addresses[key]:
                _check_value(name, f"{key[0]}[{key[1]!r}]", tensor, member[key])
                changes[key] = tensor
        _check_common(name, call, versions)
        _commit(replace(call, tensors=member), changes, name)


def call_member(
    fn: Callable[..., Any], name: str, tensors: Mapping[Address, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[Address, Tensor]:
    """Call ``fn`` for one member and return the tensors that replace those it was given.

    Raises:
        ValueError: ``fn`` returned, or put into a dict, a value for a name that the member does not have.
    """
    inputs = {kind: {key: t for (k, key), t in tensors.items() if k == kind} for kind in ("params", "grads")}
    params, grads = dict(inputs["params"]), dict(inputs["grads"])
    leaves = pytree.tree_leaves((args, kwargs))
    answer = fn(params, grads, *args, **kwargs)
    if answer is not None and not isinstance(answer, Mapping):
        raise ValueError(
            f"{name} returned {type(answer).__name__} to hf.each: return None, or a dict of new values by the names of "
            "parameters"
        )
    changes: dict[Address, Tensor] = {}
    for kind, current in (("params", {**params, **(answer or {})}), ("grads", grads)):
        if missing := inputs[kind].keys() - current.keys():
            raise ValueError(
                f"{name} removed {kind}[{min(missing)!r}] in hf.each: keep it, and change the tensor or assign another"
            )
        for key, value in current.items():
            if key not in inputs[kind]:
                hint = (
                    "this member has no gradient of it" if key in inputs["params"] else f"names: {list(inputs[kind])}"
                )
                raise ValueError(f"{name} gave hf.each a value for {kind}[{key!r}], which is not there; {hint}")
            if value is not inputs[kind][key]:
                _check_value(name, f"{kind}[{key!r}]", value, inputs[kind][key])
                changes[kind, key] = value
    for key, tensor in inputs["params"].items():
        if tensor.grad is not None:
            raise ValueError(f"{name} set .grad of params[{key!r}] in hf.each: write into grads[{key!r}]")
    after = pytree.tree_leaves((args, kwargs))
    if len(after) != len(leaves) or any(a is not b for a, b in zip(leaves, after, strict=True)):
        raise ValueError(f"{name} replaced a tensor in its further arguments in hf.each: write into it, by copy_")
    return changes


def _check_value(name: str, label: str, value: Any, like: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must give hf.each a tensor for {label}, got {type(value).__name__}")
    if (value.shape, value.dtype, value.device) != (like.shape, like.dtype, like.device):
        raise ValueError(
            f"{name} gave hf.each a tensor {list(value.shape)} {value.dtype} on {value.device} for {label}, which is "
            f"{list(like.shape)} {like.dtype} on {like.device}"
        )


def _check_common(name: str, call: MemberFunctionCall, versions: Mapping[str, int]) -> None:
    for label, tensor in call.common().items():
        if _version(tensor) != versions[label]:
            raise FusionError(
                f"{name} writes into {label} in hf.each, which all members see: give each member its own, "
                "hf.stacked([B, ...]) for an argument, or write into a copy"
            )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _commit(call: MemberFunctionCall, changes: Mapping[Address, Tensor], name: str) -> None:
    """Write new values; all are read before any is written."""
    memory = {t.untyped_storage().data_ptr() for t in call.tensors.values()}
    for key in changes:
        if key in call.shared:
            raise FusionError(
                f"{name} gives a value for {key[0]}[{key[1]!r}] in hf.each, which is one tensor of all members: give "
                "each member its own, by copy.deepcopy"
            )
    values = {k: v.clone() if v.untyped_storage().data_ptr() in memory else v for k, v in changes.items()}
    for key, value in values.items():
        call.tensors[key].copy_(value)


def differs(looped: MemberFunctionCall, vmapped: MemberFunctionCall) -> str:
    """Return the name of a tensor that differs after the two runs; empty if there is none."""
    for (label, expected), (_, actual) in zip(looped.written_tensors(), vmapped.written_tensors(), strict=True):
        if not (expected.is_floating_point() or expected.is_complex()):
            if not torch.equal(expected, actual):
                return label
            continue
        finite = expected[expected.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        relative = _RELATIVE.get(expected.dtype, _RELATIVE_OF_HALVES)
        if not torch.allclose(expected, actual, rtol=relative, atol=relative * scale, equal_nan=True):
            return label
    return ""


@contextmanager
def selected(call: MemberFunctionCall, positions: Sequence[int]) -> Iterator[MemberFunctionCall]:
    """Context manager: the call for members at ``positions``, as views if neighbours, or as copies written back."""
    if len(positions) == len(call.rows):
        yield call
        return
    start, count = positions[0], len(positions)
    neighbours = list(positions) == list(range(start, start + count))
    index = list(positions)
    copies: list[tuple[Tensor, Tensor, int]] = []

    def select(stack: Tensor) -> Tensor:
        if neighbours:
            return stack.narrow(0, start, count)
        rows = stack[index]
        copies.append((stack, rows, _version(rows)))
        return rows

    tensors = {key: t if key in call.shared else select(t) for key, t in call.tensors.items()}
    leaves = [StackedInput(select(x.tensor)) if isinstance(x, StackedInput) else x for x in call.arguments.leaves]
    yield MemberFunctionCall(
        tuple(call.rows[k] for k in index), tensors, call.shared, replace(call.arguments, leaves=tuple(leaves))
    )
    for stack, rows, version in copies:
        if rows.is_inference() or rows._version != version:
            stack[index] = rows
