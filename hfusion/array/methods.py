"""Methods of the members other than forward, called on an array like forward: captured, batched and checked.

Each method has an array around the same tensors, in which it is the members' forward.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hfusion.array.member_views import check_together
from hfusion.compiler.sandbox import apart
from hfusion.core.errors import FusionError

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_tied", "_fixed")


def method_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the methods that the authors of the class of ``model`` wrote, without those of torch."""
    kinds = type(model).__mro__[: type(model).__mro__.index(nn.Module)]
    return frozenset(
        name
        for kind in kinds
        if kind.__module__.partition(".")[0] != "torch"
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) and not name.startswith("__")
    )


def call_method(fused: FusedModule, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Implement `FusedModule.call`."""
    check_together(fused, f"{name}() of all of them")
    array = _array_of_method(fused, name)
    array.training = fused.training
    output = array.forward(*args, **kwargs)
    fused.training = array.training
    return output


def _array_of_method(fused: FusedModule, name: str) -> FusedModule:
    """Return the array around the tensors of ``fused`` whose forward is the members' method ``name``.

    Raises:
        FusionError: the members have no such method, or it is one of torch's.
    """
    if name not in method_names(fused._array.skeletons[0]):
        methods = ", ".join(sorted(method_names(fused._array.skeletons[0]))) or "none"
        raise FusionError(f"{fused._original} has no method {name} of its own that computes; it has {methods}")
    members, array = fused._methods.get(name, (None, fused))
    if members is not fused._array:
        array = _new_array(fused, name)
        fused._methods[name] = fused._array, array
    return array


def _new_array(fused: FusedModule, name: str) -> FusedModule:
    with apart():
        skeletons = tuple(map(copy.deepcopy, fused._array.skeletons))
    for skeleton in skeletons:
        kind: Any = type(skeleton)
        skeleton.__class__ = _class_with_forward(kind, name)
    array = type(fused).__new__(type(fused))
    nn.Module.__init__(array)
    # Share the dict objects themselves, so that both arrays see replaced tensors.
    vars(array).update({key: vars(fused)[key] for key in _SHARED})
    array._original = f"{fused._original}.{name}"
    array._array = replace(fused._array, skeletons=skeletons)
    array._prepare()
    array._is_part = True
    array._real = fused._real
    fused._own_branches(fused._array)
    return array


@functools.lru_cache(maxsize=256)
def _class_with_forward(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a subclass of ``kind`` whose forward runs the method ``name``; inside it, forward is that of ``kind``."""
    method: Callable[..., Any] = getattr(kind, name)
    running = threading.local()

    @functools.wraps(method)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside = getattr(running, "inside", None)
        if inside is self:
            return kind.forward(self, *args, **kwargs)
        running.inside = self
        try:
            return method(self, *args, **kwargs)
        finally:
            running.inside = inside

    namespace = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), namespace)
