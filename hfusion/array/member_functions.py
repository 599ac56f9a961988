"""Functions of one member's parameters and gradients, run for all members of an array together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import check_materialized
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.fusion_report import FusionReport
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.errors import FusionError, noting
from hfusion.core.fingerprint import read_state
from hfusion.core.gradient_usage import absent_rows, frozen_rows
from hfusion.core.layout import Listed
from hfusion.core.member_table import check_once, rows_of
from hfusion.core.membership import has_rows, membership
from hfusion.core.memory import has_address, version_of
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

    def __call__(self, target: Any, *args: Any, rows: int | Sequence[int] | None = None, **kwargs: Any) -> None:
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
        # A deep copy of it is for the copied target.
        return functools.partial(self._run_as_hook, target, args)

    def _run_as_hook(self, target: Any, args: tuple[Any, ...], optimizer: Any, *_: Any) -> None:
        held = optimizer.held_members if isinstance(optimizer, FusedOptimizer) else []
        active = training_rows(target) if isinstance(target, FusedModule) else target.active_rows
        rows = [row for row in active if row not in held]
        if rows:
            self(target, *args, rows=rows)

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
        held = {name: (tensor, tensor.grad) for name, tensor in named.items() if tensor.grad is not None}
        absent = {name: flags for name, (_, grad) in held.items() if (flags := absent_rows(grad)) is not None}

        def leaf(owner: Tensor, tensor: Tensor) -> Any:
            if rows is None:
                return StackedInput(tensor.detach()[None])
            return StackedInput(tensor.detach()) if has_rows(owner) else tensor.detach()

        params = {name: leaf(tensor, tensor) for name, tensor in named.items()}
        grads = {name: leaf(*pair) for name, pair in held.items()}
        args, kwargs = arguments.mapped(Tensor.detach).args_and_kwargs()
        # Members that have gradients of the same parameters run together.
        groups: dict[frozenset[str], list[int]] = {}
        for row in [0] if rows is None else rows:
            groups.setdefault(frozenset(name for name, flags in absent.items() if flags[row]), []).append(row)
        for without, members in groups.items():
            present = {name: grad for name, grad in grads.items() if name not in without}
            self._run_together(Arguments.of((params, present, *args), kwargs), len(params) + len(present), members)

    def _run_together(self, call: Arguments, count: int, rows: list[int]) -> None:
        """Run the function for some members. ``count``: the number of their parameters and gradients in ``call``."""
        key = call.numberless_key, tuple(call.shapes[:count]), torch.get_default_dtype()
        why = self._loops.get(key)
        is_first, state = why is None, read_state(self._fn) if why is None else None
        if is_first:
            why = "" if state is not None else "it reads more values besides its arguments than can be compared"
        # What may fail half-way runs on copies.
        in_place = not is_first and not why and all(rows == list(range(len(stack))) for stack in _stacks(call)[:1])
        part = call if in_place else _copied(call, rows)
        versions, is_vmapped = list(map(version_of, _stacks(part))), False
        if not why and len(rows) > 1:
            try:
                _run_vmapped(self._fn, self._name, part)
                is_vmapped = True
            except (ValueError, FusionError):
                raise
            except Exception as error:
                if in_place and versions != list(map(version_of, _stacks(part))):
                    error.add_note(f"hf.each: {self._name} failed after it had written; tensors may be partly changed")
                    raise
                why, part = f"torch.func.vmap: {str(error).splitlines()[0]}", _copied(call, rows)
                versions = list(map(version_of, _stacks(part)))
        if not is_vmapped:
            _run_looped(self._fn, self._name, part, rows)
        if state is not None and read_state(self._fn) != state:
            raise FusionError(
                f"{self._name} changes, in hf.each, a value that it reads besides its arguments, which would happen "
                "once for each member or once for all: pass it as a further argument, hf.stacked([B, ...]) where it is "
                "each member's own"
            )
        if any(values.shape[1:] != stack.shape[1:] for stack, values in zip(_stacks(call), _stacks(part), strict=True)):
            raise ValueError(
                f"{self._name} changes the shape of a tensor in place, in hf.each: put another in its place"
            )
        if len(rows) > 1:
            self._loops[key] = why or ""
        for stack, values, version in zip(_stacks(call), _stacks(part), versions, strict=True):
            # What is written by ``tensor.data`` has no new version.
            if stack is not values and (not is_vmapped or version_of(values) != version or values.is_inference()):
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


# One function of a member's tensors, run for several members: by `torch.func.vmap`, or member by member. The arguments
# of a call are two dicts, of parameters and of gradients, and what the user passes further. What is stacked in them has
# a row for each member, and all members share the other tensors.

_KINDS = ("params", "grads")


def _copied(call: Arguments, rows: list[int]) -> Arguments:
    """Return the call for copies of the members ``rows``."""
    return replace(call, leaves=tuple(StackedInput(x.tensor[rows]) if is_stacked(x) else x for x in call.leaves))


def _stacks(call: Arguments) -> list[Tensor]:
    """Return all stacks, which a function may write into."""
    return [leaf.tensor for leaf in call.leaves if is_stacked(leaf)]


def _run_vmapped(fn: Callable[..., Any], name: str, call: Arguments) -> None:
    """Run ``fn`` once, under `torch.func.vmap`. Raises vmap's own errors."""
    changed: list[tuple[int, str]] = []

    def single(*leaves: Any) -> tuple[Tensor, ...]:
        changes = _call_member(fn, name, *replace(call, leaves=leaves).args_and_kwargs())
        changed.extend(changes)
        return tuple(changes.values())

    in_dims = tuple(0 if is_stacked(leaf) else None for leaf in call.leaves)
    with _common_unwritten(name, call), vmap_fallback_refused():
        values = torch.func.vmap(single, in_dims=in_dims)(*call.values)
    _write(name, call, slice(None), dict(zip(changed, values, strict=True)))


def _run_looped(fn: Callable[..., Any], name: str, call: Arguments, rows: Sequence[int]) -> None:
    """Run ``fn`` member by member; ``rows`` are the members' for errors."""
    for position, row in enumerate(rows):
        args, kwargs = call.of_member(position)
        # After `tensor.data = value` a tensor does not lie in the row any more.
        given = [{key: tensor.detach() for key, tensor in held.items()} for held in args[:2]]
        with noting(f"hf.each: {name} ran for member {row}"), _common_unwritten(name, call):
            changes = _call_member(fn, name, (*given, *args[2:]), kwargs)
        for kind in range(2):
            for key, tensor in given[kind].items():
                if tensor.data_ptr() != args[kind][key].data_ptr():
                    _check_value(name, f"{_KINDS[kind]}[{key!r}]", tensor, args[kind][key])
                    changes[kind, key] = tensor
        _write(name, call, position, changes)


def _call_member(
    fn: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[tuple[int, str], Tensor]:
    """Call ``fn`` for one member and return the tensors that replace those it was given.

    They are by their place: 0 for parameters and 1 for gradients, and the name.

    Raises:
        ValueError: ``fn`` returned, or put into a dict, a value for a name that the member does not have.
    """
    params, grads = map(dict, args[:2])
    further = args[2:], kwargs
    leaves = pytree.tree_leaves(further)
    answer = fn(params, grads, *args[2:], **kwargs)
    if answer is not None and not isinstance(answer, Mapping):
        raise ValueError(
            f"{name} returned {type(answer).__name__} to hf.each: return None, or a dict of new values by the names of "
            "parameters"
        )
    changes: dict[tuple[int, str], Tensor] = {}
    for kind, (given, current) in enumerate(zip(args, ({**params, **(answer or {})}, grads), strict=False)):
        if missing := given.keys() - current.keys():
            label = f"{_KINDS[kind]}[{min(missing)!r}]"
            raise ValueError(f"{name} removed {label} in hf.each: keep it, and change the tensor or assign another")
        for key, value in current.items():
            label = f"{_KINDS[kind]}[{key!r}]"
            if key not in given:
                hint = "this member has no gradient of it" if key in args[0] else f"names: {list(given)}"
                raise ValueError(f"{name} gave hf.each a value for {label}, which is not there; {hint}")
            if value is not given[key]:
                _check_value(name, label, value, given[key])
                changes[kind, key] = value
    for key, tensor in args[0].items():
        if tensor.grad is not None:
            raise ValueError(f"{name} set .grad of params[{key!r}] in hf.each: write into grads[{key!r}]")
    after = pytree.tree_leaves(further)
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
def _common_unwritten(name: str, call: Arguments) -> Iterator[None]:
    """Context manager: raise a FusionError if the function has written into what all members see."""
    args, kwargs = call.args_and_kwargs()
    common = {f"{kind}[{key!r}]": t for kind, held in zip(_KINDS, args, strict=False) for key, t in held.items()}
    further = pytree.tree_leaves((args[2:], kwargs), is_leaf=is_stacked)
    common |= {f"argument tensor {k}": leaf for k, leaf in enumerate(further)}
    common = {label: leaf for label, leaf in common.items() if isinstance(leaf, Tensor)}
    versions = list(map(version_of, common.values()))
    yield
    for (label, tensor), version in zip(common.items(), versions, strict=True):
        if version_of(tensor) != version:
            raise FusionError(
                f"{name} writes into {label} in hf.each, which all members see: give each member its own, "
                "hf.stacked([B, ...]) for an argument, or write into a copy"
            )


def _write(name: str, call: Arguments, row: int | slice, changes: Mapping[tuple[int, str], Tensor]) -> None:
    """Write new values into a row, or all rows, of stacks; all are read before any is written."""
    args, _ = call.args_and_kwargs()
    for kind, key in changes:
        if not is_stacked(args[kind][key]):
            raise FusionError(
                f"{name} gives a value for {_KINDS[kind]}[{key!r}] in hf.each, which is one tensor of all members: "
                "give each member its own, by copy.deepcopy"
            )
    for (kind, key), value in {place: value.clone() for place, value in changes.items()}.items():
        args[kind][key].tensor[row].copy_(value)
