"""Functions of one member's parameters and gradients, run for all members of an array together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import check_materialized
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.fusion_report import FusionReport
from hfusion.core.calls import StackedInput
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import read_state
from hfusion.core.gradient_usage import absent_rows, frozen_rows
from hfusion.core.layout import Listed
from hfusion.core.membership import has_rows, membership
from hfusion.core.memory import has_address
from hfusion.core.row_indices import check_once, rows_of
from hfusion.optim import FusedOptimizer
from hfusion.torch_private.dispatch_modes import in_transform, vmap_fallback_refused


class MemberFunction:
    """A function of one member, for all of them; see `each`."""

    def __init__(self, fn: Callable[..., Any], buffers: bool = False) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._buffers = fn, buffers
        self._name = getattr(fn, "__name__", type(fn).__name__)
        # By the kind of call, why it runs member by member; empty if by `torch.func.vmap`.
        self._loops: dict[Any, str] = {}

    def __repr__(self) -> str:
        return f"each({self._name})"

    def __reduce__(self) -> Any:
        """Pickle by name if this object has replaced the function in its module, otherwise as the function alone."""
        module, path = sys.modules.get(self._fn.__module__ or ""), getattr(self._fn, "__qualname__", "")
        return path if getattr(module, path, None) is self else (MemberFunction, (self._fn, self._buffers))

    def __call__(
        self,
        target: Any,
        *args: Any,
        rows: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Run the function for the members of ``target``; see `each`."""
        arguments = Arguments.of(args, kwargs)
        if isinstance(target, FusedModule):
            chosen = training_rows(target) if rows is None else rows_of(rows, len(target))
            check_once(chosen)
            self._check_arguments(len(target), arguments)
            # Apply tensors that were assigned to members to the stacks.
            target._split()
            named = self._named(target)
            for name, tensor in named.items():
                self._check_tensor(name, tensor)
            self._run(named, chosen, arguments)
        elif isinstance(target, nn.Module):
            if rows is not None:
                raise ValueError(
                    f"rows={rows!r} is for arrays, got {type(target).__name__}, which is one model. Leave it out."
                )
            if any(isinstance(leaf, StackedInput) for leaf in arguments.leaves):
                raise ValueError(
                    f"{self!r} got hf.stacked for {type(target).__name__}, which is one model. Give its own tensor."
                )
            check_materialized(target, "the model")
            self._run(self._named(target), None, arguments)
        elif hasattr(target, "active_rows"):
            target.each(self, *args, rows=rows, **kwargs)
        else:
            raise ValueError(
                f"{self!r} got {type(target).__name__}: give what hf.fuse or hf.build gave, a Population, or a model"
            )

    def _named(self, model: nn.Module) -> dict[str, Tensor]:
        return dict(model.named_parameters()) | (dict(model.named_buffers()) if self._buffers else {})

    def step_hook(self, target: Any, *args: Any) -> Callable[..., None]:
        """Return a hook for ``register_step_pre_hook`` or ``register_step_post_hook`` of the optimizer of ``target``.

        Members that take no step, as their gradients overflowed or they are frozen, are left alone.
        """

        def hook(optimizer: Any, *_: Any) -> None:
            held = optimizer.held_members if isinstance(optimizer, FusedOptimizer) else []
            active = training_rows(target) if isinstance(target, FusedModule) else target.active_rows
            rows = [row for row in active if row not in held]
            if rows:
                self(target, *args, rows=rows)

        return hook

    def report(self) -> FusionReport:
        """Report why calls run in a loop over members; there is no line if they run by `torch.func.vmap`."""
        reasons = dict.fromkeys(filter(None, self._loops.values()))
        return FusionReport((), tuple(f"{self._name}: loop over members: {why}" for why in reasons))

    def _check_arguments(self, members: int, arguments: Arguments) -> None:
        if in_transform():
            raise FusionError(f"{self!r} writes into an array, which a transform of torch.func cannot follow")
        if arguments.ragged:
            raise ValueError(f"{self!r} got rows of different sizes; give stacks [B, ...]")
        if any(isinstance(leaf, Listed) for leaf in arguments.leaves):
            raise ValueError(
                f"{self!r} got different values of the members that are no tensors; give a tensor [B, ...]"
            )
        for leaf in arguments.leaves:
            if isinstance(leaf, StackedInput) and len(leaf.tensor) != members:
                raise ValueError(f"hf.stacked of {len(leaf.tensor)} values for {members} members: give one for each")

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        mark = membership(tensor)
        if mark is not None and mark.padded:
            raise FusionError(
                f"{name} is padded, as members' ranks differ, and {self!r} would see the padding: give all members "
                f"one rank, or call it for each member's own model"
            )
        for label, value in ((name, tensor), (f"the gradient of {name}", tensor.grad)):
            if value is not None and not has_address(value):
                kind = "sparse" if value.layout is not torch.strided else type(value).__name__
                raise FusionError(
                    f"{label} is {kind}, and {self!r} can write to plain strided tensors only: call the function for "
                    "each member's own model"
                )

    @torch.no_grad()
    def _run(self, named: Mapping[str, Tensor], rows: Sequence[int] | None, arguments: Arguments) -> None:
        """Run the function for members ``rows`` of an array's tensors; for None, for the tensors of one model."""
        grads = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
        held = {("params", name): tensor.detach() for name, tensor in named.items()}
        held |= {("grads", name): grad.detach() for name, grad in grads.items()}
        stacks = {key: tensor[None] for key, tensor in held.items()} if rows is None else held
        shared = frozenset(key for key in stacks if rows is not None and not has_rows(named[key[1]]))
        absent = {name: flags for name, grad in grads.items() if (flags := absent_rows(grad)) is not None}
        # Members that have gradients of the same parameters run together.
        groups: dict[frozenset[str], list[int]] = {}
        for row in [0] if rows is None else rows:
            groups.setdefault(frozenset(name for name, flags in absent.items() if flags[row]), []).append(row)
        for without_grad, members in groups.items():
            tensors = {key: t for key, t in stacks.items() if key[0] == "params" or key[1] not in without_grad}
            self._run_together(MemberCall(tensors, shared, arguments.mapped(Tensor.detach)), members)

    def _run_together(self, call: MemberCall, rows: list[int]) -> None:
        described = tuple((key, t.shape[1:], t.dtype, t.device, key in call.shared) for key, t in call.tensors.items())
        key = described, call.arguments.numberless_key, torch.get_default_dtype()
        why = self._loops.get(key)
        is_first, state = why is None, read_state(self._fn) if why is None else None
        if is_first:
            why = "" if state is not None else "it reads more values besides its arguments than can be compared"
        # What may fail half-way runs on copies.
        in_place = not is_first and not why and rows == list(range(call.members))
        part = call if in_place else call.copied(rows)
        versions, is_vmapped = list(map(_version, part.written())), False
        if not why and len(rows) > 1:
            try:
                run_vmapped(self._fn, self._name, part)
                is_vmapped = True
            except (ValueError, FusionError):
                raise
            except Exception as error:
                if in_place and versions != list(map(_version, part.written())):
                    error.add_note(f"hf.each: {self._name} failed after it had written; tensors may be partly changed")
                    raise
                why, part = f"torch.func.vmap: {str(error).splitlines()[0]}", call.copied(rows)
                versions = list(map(_version, part.written()))
        if not is_vmapped:
            run_looped(self._fn, self._name, part, rows)
        if state is not None and read_state(self._fn) != state:
            raise FusionError(
                f"{self._name} changes, in hf.each, a value that it reads besides its arguments, which would happen "
                "once for each member or once for all: pass it as a further argument, hf.stacked([B, ...]) where it is "
                "each member's own"
            )
        if len(rows) > 1:
            self._loops[key] = why or ""
        for stack, values, version in zip(call.written(), part.written(), versions, strict=True):
            # What is written by ``tensor.data`` has no new version.
            if stack is not values and (not is_vmapped or _version(values) != version or values.is_inference()):
                stack[rows] = values


def training_rows(fused: FusedModule) -> list[int]:
    """Return the members that train at least one parameter; all members if the array trains none."""
    # Apply settings that were made on members to the stacks.
    fused._split()
    flags = [frozen_rows(parameter) for parameter in fused.parameters() if parameter.requires_grad]
    frozen = [rows for rows in flags if rows is not None]
    if not frozen or len(frozen) < len(flags):
        return list(range(len(fused)))
    return [row for row, is_frozen in enumerate(torch.stack(frozen).all(0).tolist()) if not is_frozen]


@functools.lru_cache(maxsize=64)
def as_each(fn: Callable[..., Any] | MemberFunction) -> MemberFunction:
    """Return `each` of ``fn``, the same object at every call."""
    return fn if isinstance(fn, MemberFunction) else each(fn)


def each(fn: Callable[..., Any], *, buffers: bool = False) -> MemberFunction:
    """Run a function of one model's parameters and gradients for all members of an array together.

    For code between backward and step, or after a step: unit-norm decoders, projected gradients, weights that
    are clamped, averages of weights over time.

    Args:
        fn: ``fn(params, grads, *args, **kwargs)``, written for one model. ``params`` are its parameters by name, as of
            `torch.nn.Module.named_parameters`, ``grads`` the gradients of those that have one: plain tensors without
            the dim of members. It runs without gradients and may write into these tensors, put others in their places
            in the two dicts, or return a dict of new values of parameters. It must be a function of its arguments: it
            may be called once for all members, once for each, or twice.
        buffers: let ``params`` hold the buffers, too.

    Returns:
        A callable ``run(target, *args, rows=None, **kwargs)``. ``target`` is a fused module, a `hfusion.Population`, or
        one plain model. ``rows`` are the members to run for, by default those that train: members that have left a
        population, or are frozen (after a gradient that was not finite, or by ``fused[b].requires_grad_(False)``) stay
        as they are, to the bit. Frozen ones in ``rows`` are changed. Further tensors are seen by every member, those in
        `hfusion.stacked` row by row; the function may write into the latter.

        It runs by `torch.func.vmap` if that can run it; else member by member, and
        ``run.report()`` says why.

    Raises:
        ValueError: when called, if ``fn`` returned something else, an unknown name, or another shape or dtype.
        FusionError: when called, if ``fn`` writes into shared tensors, or changes values that are not its arguments.

    Example:
        >>> import torch, hfusion as hf
        >>> fused = hf.build(lambda: torch.nn.Linear(3, 2), seeds=[0, 1])
        >>> @hf.each
        ... def unit_norm(params, grads):
        ...     params["weight"].div_(params["weight"].norm(dim=0, keepdim=True))
        >>> unit_norm(fused)
        >>> fused.weight.detach().norm(dim=1).allclose(torch.ones(2, 3))
        True
    """
    if not callable(fn):
        raise ValueError(f"hf.each expects a function fn(params, grads), got {type(fn).__name__}")
    return MemberFunction(fn, buffers)


# One function of a member's tensors, run for several members: by `torch.func.vmap`, or member by member.

Address = tuple[str, str]
"""A tensor that a function gets: ``("params", name)`` or ``("grads", name)``."""


@dataclass(frozen=True)
class MemberCall:
    """The arguments of a function for some members.

    Attributes:
        tensors: stacks ``[members, *shape]``, or ``[*shape]`` of a tensor that all members share.
        shared: the addresses of the tensors that all members share.
        arguments: further arguments, whose stacked leaves have a row for each member.
    """

    tensors: Mapping[Address, Tensor]
    shared: frozenset[Address]
    arguments: Arguments

    @property
    def members(self) -> int:
        return next((len(tensor) for key, tensor in self.tensors.items() if key not in self.shared), 0)

    def copied(self, rows: Sequence[int]) -> MemberCall:
        """Return the call for copies of the members ``rows``."""
        index = list(rows)
        tensors = {key: t if key in self.shared else t[index] for key, t in self.tensors.items()}
        leaves = [StackedInput(x.tensor[index]) if isinstance(x, StackedInput) else x for x in self.arguments.leaves]
        return replace(self, tensors=tensors, arguments=replace(self.arguments, leaves=tuple(leaves)))

    def written(self) -> list[Tensor]:
        """Return all stacks, which a function may write into."""
        stacks = [tensor for key, tensor in self.tensors.items() if key not in self.shared]
        return stacks + [leaf.tensor for leaf in self.arguments.leaves if isinstance(leaf, StackedInput)]


def run_vmapped(fn: Callable[..., Any], name: str, call: MemberCall) -> None:
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
        filled = list(leaves)
        for index, value in zip(tensors, values[len(keys) :], strict=True):
            filled[index] = value
        args, kwargs = replace(call.arguments, leaves=tuple(filled)).of_member(0)
        changes = call_member(fn, name, dict(zip(keys, values[: len(keys)], strict=True)), args, kwargs)
        changed.extend(changes)
        return tuple(changes.values())

    with _common_unwritten(name, call), vmap_fallback_refused():
        values = torch.func.vmap(single, in_dims=in_dims)(*call.tensors.values(), *(leaves[k] for k in tensors))
    _write(name, call, call.tensors, dict(zip(changed, values, strict=True)))


def run_looped(fn: Callable[..., Any], name: str, call: MemberCall, rows: Sequence[int]) -> None:
    """Run ``fn`` member by member; ``rows`` are the members' for errors."""
    for position, row in enumerate(rows):
        member = {key: t if key in call.shared else t[position] for key, t in call.tensors.items()}
        # After `tensor.data = value` a tensor does not lie in the row any more.
        given = {key: tensor.detach() for key, tensor in member.items()}
        args, kwargs = call.arguments.of_member(position)
        try:
            with _common_unwritten(name, call):
                changes = call_member(fn, name, given, args, kwargs)
        except Exception as error:
            error.add_note(f"hf.each: {name} ran for member {row}")
            raise
        for key, tensor in given.items():
            if tensor.data_ptr() != member[key].data_ptr():
                _check_value(name, f"{key[0]}[{key[1]!r}]", tensor, member[key])
                changes[key] = tensor
        _write(name, call, member, changes)


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


@contextmanager
def _common_unwritten(name: str, call: MemberCall) -> Iterator[None]:
    """Context manager: raise a FusionError if the function has written into what all members see."""
    common = {f"{kind}[{key!r}]": call.tensors[kind, key] for kind, key in call.shared}
    common |= {f"argument tensor {k}": x for k, x in enumerate(call.arguments.leaves) if isinstance(x, Tensor)}
    versions = list(map(_version, common.values()))
    yield
    for (label, tensor), version in zip(common.items(), versions, strict=True):
        if _version(tensor) != version:
            raise FusionError(
                f"{name} writes into {label} in hf.each, which all members see: give each member its own, "
                "hf.stacked([B, ...]) for an argument, or write into a copy"
            )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _write(name: str, call: MemberCall, tensors: Mapping[Address, Tensor], changes: Mapping[Address, Tensor]) -> None:
    """Write new values into ``tensors``; all are read before any is written."""
    for key in changes:
        if key in call.shared:
            raise FusionError(
                f"{name} gives a value for {key[0]}[{key[1]!r}] in hf.each, which is one tensor of all members: give "
                "each member its own, by copy.deepcopy"
            )
    for key, value in {key: value.clone() for key, value in changes.items()}.items():
        tensors[key].copy_(value)
