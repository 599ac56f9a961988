"""Functions of one member's parameters and gradients, run for all members of an array together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

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
from hfusion.core.row_gradients import settle
from hfusion.core.row_indices import check_once, rows_of
from hfusion.device.backend import random_states_kept
from hfusion.optim import FusedOptimizer
from hfusion.torch_private.functorch import in_transform, vmap_fallback_refused

# A function runs member by member once the values that it reads besides its arguments have changed this often.
MAX_STATES = 16


@runtime_checkable
class Members(Protocol):
    """An owner of an array of which only some rows train, such as `hfusion.Population`."""

    @property
    def active_rows(self) -> list[int]: ...

    def each(self, fn: Any, *args: Any, rows: int | Sequence[int] | None = None, **kwargs: Any) -> None: ...


@dataclass(frozen=True)
class _Vmapped:
    """Calls run by `torch.func.vmap`, whose results equal those of the loop over members."""


@dataclass(frozen=True)
class _Looped:
    """Calls run member by member, because of ``why``."""

    why: str


_TOO_MANY = _Looped(
    f"values it reads besides its arguments have changed {MAX_STATES} times: pass them as further arguments"
)


class MemberFunction:
    """A function of one member, for all of them; see `each`."""

    def __init__(self, fn: Callable[..., Any], buffers: bool = False) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._buffers = fn, buffers
        self._name = getattr(fn, "__name__", type(fn).__name__)
        # By the kind of call, and by the values that the function reads besides its arguments.
        self._plans: dict[Any, dict[Any, _Vmapped | _Looped]] = {}

    def __repr__(self) -> str:
        return f"each({self._name})"

    def __reduce__(self) -> Any:
        """Pickle by name if this object has replaced the function in its module, otherwise as the function alone."""
        module, path = sys.modules.get(self._fn.__module__ or ""), getattr(self._fn, "__qualname__", "")
        return path if getattr(module, path, None) is self else (MemberFunction, (self._fn, self._buffers))

    def __call__(
        self,
        target: FusedModule | nn.Module | Members,
        *args: Any,
        rows: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Run the function for the members of ``target``; see `each`."""
        if isinstance(target, FusedModule):
            chosen = training_rows(target) if rows is None else rows_of(rows, len(target))
            check_once(chosen)
            with torch.no_grad():
                self._run(target, chosen, Arguments.of(args, kwargs))
        elif isinstance(target, nn.Module):
            if rows is not None:
                raise ValueError(
                    f"rows={rows!r} is for arrays, got {type(target).__name__}, which is one model. Leave it out."
                )
            with torch.no_grad():
                self._run_alone(target, args, kwargs)
        elif isinstance(target, Members):
            target.each(self, *args, rows=rows, **kwargs)
        else:
            raise ValueError(
                f"{self!r} got {type(target).__name__}: give what hf.fuse or hf.build gave, a Population, or a model"
            )

    def step_hook(self, target: FusedModule | Members, *args: Any) -> Callable[..., None]:
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
        plans = [plan for plans in self._plans.values() for plan in plans.values()]
        reasons = dict.fromkeys(plan.why for plan in plans if isinstance(plan, _Looped))
        return FusionReport((), tuple(f"{self._name}: loop over members: {why}" for why in reasons))

    def _run_alone(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        check_materialized(model, "the model")
        named = dict(model.named_parameters()) | (dict(model.named_buffers()) if self._buffers else {})
        tensors = {("params", name): tensor.detach() for name, tensor in named.items()}
        tensors |= {("grads", name): t.grad.detach() for name, t in named.items() if t.grad is not None}
        call = MemberFunctionCall(
            (0,), {key: t[None] for key, t in tensors.items()}, frozenset(), Arguments.of(args, kwargs)
        )
        if any(isinstance(leaf, StackedInput) for leaf in call.arguments.leaves):
            raise ValueError(
                f"{self!r} got hf.stacked for {type(model).__name__}, which is one model. Give its own tensor."
            )
        run_looped(self._fn, self._name, call)

    def _run(self, fused: FusedModule, rows: Sequence[int], arguments: Arguments) -> None:
        if in_transform():
            raise FusionError(f"{self!r} writes into an array, which a transform of torch.func cannot follow")
        if arguments.ragged:
            raise ValueError(f"{self!r} got rows of different sizes; give stacks [B, ...]")
        if any(isinstance(leaf, Listed) for leaf in arguments.leaves):
            raise ValueError(
                f"{self!r} got different values of the members that are no tensors; give a tensor [B, ...]"
            )
        # Apply tensors and gradients that were assigned to members to the stacks.
        fused._split()
        settle(fused.parameters())
        named = dict(fused.named_parameters()) | (dict(fused.named_buffers()) if self._buffers else {})
        for name, tensor in named.items():
            self._check_tensor(name, tensor)
        whole = self._whole(named, arguments, len(fused))
        groups: dict[Any, list[int]] = {}
        absent = {name: _absent(tensor) for name, tensor in named.items()}
        for row in rows:
            without_grad = frozenset(name for name, flags in absent.items() if flags is not None and flags[row])
            groups.setdefault(without_grad, []).append(row)
        for without_grad, members in groups.items():
            tensors = {
                (kind, name): tensor
                for (kind, name), tensor in whole.tensors.items()
                if not (kind == "grads" and name in without_grad)
            }
            with selected(MemberFunctionCall(whole.rows, tensors, whole.shared, whole.arguments), members) as call:
                self._run_together(call)

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

    def _whole(self, named: Mapping[str, Tensor], arguments: Arguments, members: int) -> MemberFunctionCall:
        stacks = {("params", name): tensor.detach() for name, tensor in named.items()}
        stacks |= {("grads", name): t.grad.detach() for name, t in named.items() if t.grad is not None}
        shared = frozenset(key for key in stacks if not has_rows(named[key[1]]))
        for leaf in arguments.leaves:
            if isinstance(leaf, StackedInput) and len(leaf.tensor) != members:
                raise ValueError(f"hf.stacked of {len(leaf.tensor)} values for {members} members: give one for each")
        return MemberFunctionCall(tuple(range(members)), stacks, shared, arguments.mapped(Tensor.detach))

    def _run_together(self, call: MemberFunctionCall) -> None:
        if len(call.rows) == 1:
            run_looped(self._fn, self._name, call)
            return
        state = read_state(self._fn)
        plans = self._plans.setdefault(self._key(call), {})
        if state not in plans:
            # All states beyond the limit share one entry, so that the table does not grow with every call.
            state = _TOO_MANY if len(plans) >= MAX_STATES else state
            plans[state] = _TOO_MANY if state is _TOO_MANY else self._choose(call, state)
        plan = plans[state]
        if isinstance(plan, _Looped):
            run_looped(self._fn, self._name, call)
            return
        versions = _versions(call)
        try:
            run_vmapped(self._fn, self._name, call)
        except Exception as error:
            if versions != _versions(call):
                error.add_note(f"hf.each: {self._name} failed after it had written; tensors may be partly changed")
                raise
            # Other numbers among the arguments may lead to operators that vmap does not support.
            plans[state] = self._choose(call, state)
            if plans[state] == plan:
                raise
            run_looped(self._fn, self._name, call)

    def _key(self, call: MemberFunctionCall) -> Any:
        tensors = tuple((key, t.shape[1:], t.dtype, t.device, key in call.shared) for key, t in call.tensors.items())
        return tensors, call.arguments.numberless_key, torch.get_default_dtype()

    def _choose(self, call: MemberFunctionCall, state: Any) -> _Vmapped | _Looped:
        """Compare vmap with the loop on copies of two members. Raises the function's own errors."""
        positions = (0, len(call.rows) - 1)
        looped, vmapped = call.cloned(positions), call.cloned(positions)
        with random_states_kept():
            run_looped(self._fn, self._name, looped)
        if state is None:
            return _Looped("it reads more values besides its arguments than can be compared on every call")
        if read_state(self._fn) != state:
            raise FusionError(
                f"{self._name} changes, in hf.each, a value that it reads besides its arguments, which would happen "
                "once for each member or once for all: pass it as a further argument, hf.stacked([B, ...]) where it is "
                "each member's own"
            )
        try:
            with random_states_kept():
                run_vmapped(self._fn, self._name, vmapped)
        except Exception as error:
            return _Looped(f"torch.func.vmap: {str(error).splitlines()[0]}")
        wrong = differs(looped, vmapped)
        return _Looped(f"torch.func.vmap gives another value for {wrong}") if wrong else _Vmapped()


def _versions(call: MemberFunctionCall) -> list[int]:
    return [tensor._version for _, tensor in call.written_tensors() if not tensor.is_inference()]


def training_rows(fused: FusedModule) -> list[int]:
    """Return the members that train at least one parameter; all members if the array trains none."""
    # Apply settings that were made on members to the stacks.
    fused._split()
    flags = [frozen_rows(parameter) for parameter in fused.parameters() if parameter.requires_grad]
    frozen = [rows for rows in flags if rows is not None]
    if not frozen or len(frozen) < len(flags):
        return list(range(len(fused)))
    return [row for row, is_frozen in enumerate(torch.stack(frozen).all(0).tolist()) if not is_frozen]


def _absent(tensor: Tensor) -> Sequence[bool] | None:
    """The members that have no gradient of a stack; None if all have one, or the stack has none."""
    absent = None if tensor.grad is None else absent_rows(tensor.grad)
    return None if absent is None else absent.tolist()


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

        It runs by `torch.func.vmap` if the first call of its kind gave the same as the loop on copies of two members;
        else member by member, and ``run.report()`` says why.

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
