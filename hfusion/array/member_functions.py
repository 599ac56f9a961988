"""Functions of one member's parameters and gradients, run for all members of an array together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hfusion.array.member_function_runs import MemberFunctionCall, differs, run_looped, run_vmapped, selected
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
from hfusion.torch_private.functorch import in_transform

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
