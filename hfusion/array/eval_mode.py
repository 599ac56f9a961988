"""Train and eval of arrays whose members override them, and a context in which an array is in eval mode.

A frozen backbone, a teacher, adapters that merge: each member's own method runs, and what it changes is a change made
to that member.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.array.array_description import ArrayState
from hfusion.array.member_views import put_tensor
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError
from hfusion.core.tree import leaves

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

ModeSetter: TypeAlias = Callable[[nn.Module], object]


def own_modes(model: nn.Module) -> bool:
    """Return whether a module of ``model`` overrides train or eval."""
    return any(_overrides_mode(module) for module in model.modules())


def _overrides_mode(module: nn.Module) -> bool:
    kind = type(module)
    overridden = kind.train is not nn.Module.train or kind.eval is not nn.Module.eval
    return overridden or "train" in vars(module) or "eval" in vars(module)


def switch_mode(fused: FusedModule, path: str, set_mode: ModeSetter) -> None:
    """Call the members' own train or eval.

    Raises:
        FusionError: a member writes into a tensor that all share, or an array cannot hold what it does. Modules,
            tensors and modes are then as before.
    """
    fused._split()
    members = list(fused)
    before = [(dict(tensors(member)), [(module, module.training) for module in member.modules()]) for member in members]
    shared = {name: stack for name, stack in fused.stacks.items() if name in fused._array.comparison.shared}
    try:
        for index, member in enumerate(members):
            for module in member.get_submodule(path).modules():
                _check_bound(index, module)
            with _Unwritten(index, shared):
                set_mode(member.get_submodule(path))
        fused._split()
    except FusionError:
        for member, (held, modes) in zip(members, before, strict=True):
            for name, tensor in held.items():
                put_tensor(member, name, tensor)
            for module, training in modes:
                module.training = training
        raise


@contextmanager
def evaluating(fused: FusedModule) -> Iterator[None]:
    """Context manager: see `FusedModule.evaluating`."""
    fused._split()
    modes = [(branch, branch.training) for branch in fused._branches]
    views, has_own = fused._views, own_modes(fused._array.skeletons[0])
    state = ArrayState(fused._number, fused._array, fused._compiler)
    values = [(t, t.requires_grad, t.detach().clone()) for t in fused.stacks.values()] if has_own else []
    member_modes = {row: member.training for row, member in views.members.items()}
    fused.eval()
    written = any(t.requires_grad != trained or not torch.equal(t.detach(), value) for t, trained, value in values)
    try:
        if written:
            with torch.no_grad():
                for tensor, trained, value in values:
                    tensor.requires_grad_(trained).copy_(value)
            raise FusionError(
                f"the own eval of {fused._original} changes parameters or buffers, and this evaluation uses them as "
                "training has them; evaluate the trained models by themselves"
            )
        yield
    finally:
        for branch, training in modes:
            branch.training = training
        fused._enter(state)
        if has_own:
            views.renew(fused)
        views.set_modes(fused, member_modes)


def _check_bound(index: int, module: nn.Module) -> None:
    """Raise a FusionError if train or eval was set on the instance and is not bound to it, so cannot be copied."""
    for name in ("train", "eval"):
        method = vars(module).get(name)
        if method is not None and not (isinstance(method, types.MethodType) and method.__self__ is module):
            raise FusionError(
                f"model {index}: {name} of {type(module).__name__} was set to {method}, which does not work on copies "
                "of the module. Define it in the class, or set types.MethodType(function, module)."
            )


class _Unwritten(TorchDispatchMode):
    """Refuses writes into the tensors that all members share, before they happen."""

    def __init__(self, index: int, shared: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in shared.items()}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                argument = args[position] if position < len(args) else kwargs.get(parameter.name)
                for name in (self._names.get(t.untyped_storage().data_ptr()) for t in leaves(argument, Tensor)):
                    if name is not None:
                        raise FusionError(
                            f"the own train or eval of model {self._index} writes into {name}, which all members "
                            "share. Give each model its own copy of it before fusing"
                        )
        return func(*args, **kwargs)
