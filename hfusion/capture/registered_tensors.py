"""Registered tensors of a model by name: parameters and buffers, their ties, and checks of forward's changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.core.errors import FusionError
from hfusion.core.memory import is_plain, overlap

# The attribute of a member's tensor that had other strides, such as channels_last, before it was stacked.
RESTRIDED = "_hfusion_restrided"


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, then the buffers, of ``model`` by key; a tensor with two names is yielded twice."""
    kind = type(model)
    listed = kind.named_parameters, kind.named_buffers
    if listed != (nn.Module.named_parameters, nn.Module.named_buffers):
        # A class may list other tensors.
        yield from model.named_parameters(remove_duplicate=False)
        yield from model.named_buffers(remove_duplicate=False)
        return
    # The same in a third of the time, as one walk over the modules serves both: it is done a hundred times for a task.
    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules(remove_duplicate=False)]
    for held in ("_parameters", "_buffers"):
        for prefix, module in modules:
            for name, tensor in getattr(module, held).items():
                if tensor is not None:
                    yield prefix + name, tensor


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first tensor; the CPU if it has none."""
    return next((tensor.device for _, tensor in tensors(module)), torch.device("cpu"))


def is_array(module: nn.Module) -> bool:
    """Return whether ``module`` is an array, which a model may hold as any other submodule."""
    return hasattr(type(module), "fingerprint")


def holder_of(model: nn.Module, key: str) -> tuple[Any, str, str]:
    """Return where ``model`` holds its tensor ``key``: the dict of a submodule, and the name in it; and the key."""
    path, _, name = key.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if name in module._parameters else module._buffers), name, key


def check_materialized(model: nn.Module, label: str) -> None:
    """Raise FusionError if a tensor of ``model``, which the message calls ``label``, is on the meta device."""
    name = next((name for name, tensor in tensors(model) if tensor.is_meta), None)
    if name is not None:
        raise FusionError(
            f"{label}: {name} is on the meta device and has no values. Materialize the model first: load its weights "
            "by load_state_dict(state, assign=True), or call to_empty(device=...) and initialize it"
        )


def ties(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of tied tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in named.items() if first.setdefault(id(t), name) != name}


def overlaps(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of different tensors that overlap in memory."""
    held: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        if is_plain(tensor) and tensor.numel() and not tensor.is_meta:
            held.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), {})[name] = tensor
    for group in held.values():
        for (key, a), (other_key, b) in itertools.combinations(group.items(), 2):
            if a is not b and overlap(a, b):
                yield key, other_key


def shared_memory(named: Mapping[str, Tensor]) -> frozenset[tuple[str, str]]:
    """Return each name, in a pair after the first name with the same storage, which may be itself."""
    first: dict[int, str] = {}
    addresses = {name: t.untyped_storage().data_ptr() for name, t in named.items() if t.layout is torch.strided}
    return frozenset((first.setdefault(address, name), name) for name, address in addresses.items() if address)


def check_registered(
    module: nn.Module, before: Mapping[str, Tensor], shared: frozenset[tuple[str, str]], member: nn.Module
) -> None:
    """Raise FusionError for changes of tensors by forward that a stack cannot represent.

    Args:
        module: the original of ``member``, as it was before the call.
        before, shared: the tensors of the copy ``member`` before the call, and its `shared_memory` then.
    """
    named, originals = dict(tensors(member)), dict(tensors(module))
    for name in {**named, **before}:
        if name not in named or name not in before:
            verb = "registers" if name in named else "takes away"
            raise FusionError(
                f"forward {verb} the tensor {name}; call each model once before fusing (where a function makes the "
                "models, in that function), or let __init__ do so, or keep a table as an attribute"
            )
        new = named[name]
        for flag in ("shape", "dtype", "device", "requires_grad"):
            a, b = getattr(originals[name], flag), getattr(new, flag)
            if a != b and not (flag == "requires_grad" and not isinstance(before[name], nn.Parameter)):
                raise FusionError(
                    f"forward changes {flag} of {name} from {a} to {b}, where an array has one stack for all calls; "
                    "call each model once before fusing, or keep a table that grows as an attribute, not as a buffer"
                )
    current_ties = ties(named)
    for name, first in ties(before).items():
        if current_ties.get(name) != first:
            raise FusionError(
                f"{first} and {name} are one tensor, and forward makes them two by assigning one of them; write "
                "into it, or untie them before fusing: assign a clone(), or call the models once"
            )
    for first, second in shared_memory(named) - shared:
        if first != second:
            raise FusionError(f"forward makes {first} and {second} share memory; assign a clone() to one of them")
    for name, _ in module.named_parameters():
        if named[name] is not before[name]:
            raise FusionError(
                f"forward makes {name} another parameter, which no optimizer knows; write into it under torch.no_grad()"
            )
