"""Check that models can be fused, and report the first difference."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.capture.attribute_fingerprint import fingerprint, python_attributes
from hfusion.capture.hooks import is_part_of_forward, outdated
from hfusion.capture.python_state import GENERATORS, MUTABLE_CONTAINERS
from hfusion.capture.registered_tensors import check_materialized, overlaps, tensors, ties
from hfusion.core.errors import FusionError
from hfusion.core.membership import is_own_hook
from hfusion.core.python_values import PLAIN, attributes, parts, walk
from hfusion.torch_private.export_state import uncompiled

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Comparison:
    """The result of comparing B models.

    Attributes:
        variants: for each member, the number of its set of scalars (dropout p, eps, ...). Members of one variant share
            a capture.
        shared: the keys of tensors that are one object in all models.
        partly: the keys of buffers that only some models share, and of tensors that overlap another tensor of their
            model. An array keeps a row of these for each member and name, so no member may write to them.
        common: the names of Python attributes that hold one mutable object in several models. An array has a copy of it
            for each member, so no member may change it.
    """

    variants: tuple[int, ...]
    shared: frozenset[str]
    partly: frozenset[str] = frozenset()
    common: frozenset[str] = frozenset()


def compare(models: Sequence[nn.Module]) -> Comparison:
    """Check that ``models`` can be fused.

    Raises:
        FusionError: the first difference, or the first thing that fusion cannot honour, with the model's index, the
            module path, the values and the remedy.
    """
    check_list(models)
    for index, model in enumerate(models):
        check_alone(index, model)
    for index, model in enumerate(models[1:], start=1):
        check_pair(models[0], index, model)
    prints: dict[Any, int] = {}
    variants = tuple(prints.setdefault(fingerprint(model), len(prints)) for model in models)
    sharing = Sharing()
    for index, model in enumerate(models):
        sharing.add(index, model)
    _check_memory(models)
    return Comparison(variants, sharing.keys, sharing.partly, frozenset(sharing.common))


def check_list(models: Sequence[nn.Module]) -> None:
    """Raise FusionError unless ``models`` is a list of different modules."""
    if not isinstance(models, Sequence | nn.ModuleList) or isinstance(models, str):
        raise FusionError(f"fuse takes a list of modules, not {type(models).__name__}; write fuse([model, ...])")
    if len(models) == 0:
        raise FusionError("fuse got an empty list; give it at least one model")
    check_models(models)


def check_models(models: Sequence[nn.Module]) -> None:
    """Raise FusionError for objects that are no modules or have no values, and for a module that is given twice."""
    first: dict[int, int] = {}
    for index, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise FusionError(f"model {index} is {type(model).__name__}, not a torch.nn.Module")
        if id(model) in first:
            raise FusionError(
                f"models {first[id(model)]} and {index} are one object; give each member its own, by copy.deepcopy"
            )
        check_materialized(model, f"model {index}")
        first[id(model)] = index


def check_pair(model: nn.Module, index: int | str, other: nn.Module) -> None:
    """Raise FusionError if ``other``, model ``index``, differs in structure from ``model``, model 0."""
    try:
        _check_modules(model, index, other)
        _check_tensors(model, index, other)
    except FusionError as error:
        raise FusionError(f"{error}. hf.Population trains models of different structures together") from None


def check_alone(index: int, model: nn.Module) -> None:
    """Raise FusionError if ``model`` has features that a fused array cannot honour."""
    where = f"model {index}"
    if isinstance(model, torch.jit.ScriptModule | nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise FusionError(f"{where} must be a plain module, got {type(model).__name__}. Fuse the module inside it.")
    check_materialized(model, where)
    for name, tensor in tensors(model):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise FusionError(
                f"{where}: {name} of a lazy module is not initialized; call each model once before fusing, on a batch "
                "of its own kind (where a function makes the models, in that function)"
            )
    for path, module in model.named_modules():
        if path and uncompiled(module) is not module:
            raise FusionError(
                f"{where}, module {path} is wrapped by torch.compile. Give the module inside it, and leave "
                "compiling to hf.train_step."
            )
        for hooks in _HOOKS:
            held = getattr(module, hooks).values()
            others = [hook for hook in held if not (is_part_of_forward(hook) or is_own_hook(hook))]
            if others:
                raise FusionError(
                    f"{where}, module {path or '(root)'} ({type(module).__name__}) has a hook in {hooks}: {others[0]}; "
                    "a fused array does not run members' hooks: remove it, or register it on the fused module"
                )
        if (attribute := outdated(module)) is not None:
            raise FusionError(
                f"{where}, module {path or '(root)'} ({type(module).__name__}): a hook reads {attribute} before the "
                "next one computes it, as it was in the call before; register the hook that computes it first"
            )
    for name, tensor in tensors(model):
        if tensor.layout is not torch.strided:
            raise FusionError(f"{where}: {name} is {tensor.layout} on {tensor.device}; only dense tensors are fused")
    if name := hooked_tensor(model):
        raise FusionError(f"{where}: {name} has a tensor hook, which a fused array would not run; remove it")
    named = dict(tensors(model))
    for key, other in overlaps(named):
        if any(isinstance(t, nn.Parameter) and t.requires_grad for t in (named[key], named[other])):
            raise FusionError(
                f"{where}: {key} and {other} share memory, so that training one changes the other, and are "
                "two tensors, of which an array has a stack each; register one under both names, or assign a clone()"
            )


def hooked_tensor(model: nn.Module) -> str:
    """Return the key of a tensor with a user's hook; empty if there is none."""
    for name, tensor in tensors(model):
        if not all(is_own_hook(h) for hooks in _TENSOR_HOOKS for h in (getattr(tensor, hooks, None) or {}).values()):
            return name
    return ""


def _check_modules(model: nn.Module, index: int | str, other: nn.Module) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    other_modules = dict(other.named_modules(remove_duplicate=False))
    for path, module in other_modules.items():
        _same_class(modules.get(path), path, index, module)
    missing = [path for path in modules if path not in other_modules]
    if missing:
        raise FusionError(f"model {index} has no module {missing[0]}, which model 0 has")


def _same_class(first_module: nn.Module | None, path: str, index: int | str, module: nn.Module) -> None:
    where = path or "(root)"
    if first_module is None:
        raise FusionError(f"model {index} has a module {where} ({type(module).__name__}) that model 0 lacks")
    if not _alike(_class(first_module), _class(module)):
        names = (_class(first_module).__name__, _class(module).__name__)
        other = f"{names[1]}, a class with other code," if names[0] == names[1] else names[1]
        raise FusionError(f"module {where} is {names[0]} in model 0 and {other} in model {index}")
    if first_module.training != module.training:
        raise FusionError(
            f"module {where} is in {_mode(first_module)} mode in model 0 and in {_mode(module)} mode in model {index}; "
            "call train() or eval() on all models first"
        )


def _class(module: nn.Module) -> type[nn.Module]:
    if parametrize.is_parametrized(module):
        return parametrize.type_before_parametrizations(module)
    return type(module)


def _alike(kind: type, other: type) -> bool:
    """Return whether two classes are the same, or were created twice by the same code, as for graph modules."""
    if kind is other:
        return True
    if (kind.__module__, kind.__qualname__) != (other.__module__, other.__qualname__):
        return False
    if len(kind.__bases__) != len(other.__bases__) or not all(map(_alike, kind.__bases__, other.__bases__)):
        return False
    attributes, other_attributes = ({k: _code(v) for k, v in vars(c).items() if k not in _MADE} for c in (kind, other))
    return attributes == other_attributes


# Attributes that Python adds to every class, or that `torch.fx` stores in classes.
_MADE = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "_fx_wrapped"})


def _code(value: Any) -> Any:
    """Return the code of a function, without its closure, which `fingerprint` compares."""
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, staticmethod | classmethod):
        return (type(value), _code(value.__func__))
    if isinstance(value, property):
        return tuple(map(_code, (value.fget, value.fset, value.fdel)))
    return value if isinstance(value, (*PLAIN, type)) else type(value)


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _check_tensors(model: nn.Module, index: int | str, other: nn.Module) -> None:
    registered, other_registered = dict(tensors(model)), dict(tensors(other))
    for name in [*other_registered, *registered]:
        if (name in registered) != (name in other_registered):
            has, lacks = (0, index) if name in registered else (index, 0)
            raise FusionError(f"model {has} has a tensor {name} that model {lacks} lacks")
    for name, tensor in registered.items():
        other_tensor = other_registered[name]
        for attribute in ("shape", "dtype", "device", "requires_grad"):
            a, b = getattr(tensor, attribute), getattr(other_tensor, attribute)
            if a != b:
                a, b = (tuple(a), tuple(b)) if attribute == "shape" else (a, b)
                raise FusionError(f"{name} has {attribute} {a} in model 0 and {b} in model {index}; make them equal")
    if ties(registered) != ties(other_registered):
        raise FusionError(
            f"model 0 and model {index} tie different tensors: {ties(registered)} and {ties(other_registered)}"
        )


def _check_memory(models: Sequence[nn.Module]) -> None:
    """Raise FusionError if trained parameters of two models are different tensors at the same address."""
    addresses: dict[tuple[torch.device, int], tuple[int, str, Tensor]] = {}
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            other_index, other_name, other_parameter = addresses.setdefault(
                (parameter.device, parameter.data_ptr()), (index, name, parameter)
            )
            if other_parameter is not parameter and other_index != index:
                raise FusionError(
                    f"{other_name} of model {other_index} and {name} of model {index} share memory, so that training "
                    "one changes the other; give each model its own, by copy.deepcopy"
                )


class Sharing:
    """The tensors that are one object in several models, collected model by model without keeping any alive.

    ``keys``: the keys of tensors that are one object in all models; ``partly``, ``common``: see `Comparison`.
    """

    def __init__(self) -> None:
        self.keys: frozenset[str] = frozenset()
        self.partly: frozenset[str] = frozenset()
        self.common: set[str] = set()
        # By id, the mutable objects in attributes of earlier models; they are kept so that no id is used again.
        self._held: dict[int, Any] = {}
        self._first: dict[str, Tensor] = {}
        self._owners = WeakIdKeyDictionary()

    def add(self, index: int, model: nn.Module) -> None:
        """Add model ``index``; model 0 must be added first.

        Raises:
            FusionError: a tensor that is trained is one object in some models but not in all.
        """
        named = dict(tensors(model))
        if index == 0:
            self._first = named
        shared = frozenset(name for name, tensor in named.items() if index and self._first.get(name) is tensor)
        keys = shared if index == 1 else self.keys & shared
        reused = frozenset(name for name, tensor in named.items() if self._owners.get(tensor, index) != index)
        partly_shared = ((self.keys | shared | reused) - keys) if index else frozenset()
        for name in sorted(partly_shared):
            if isinstance(named.get(name), nn.Parameter) and (
                named[name].requires_grad or self._first.get(name, named[name]).requires_grad
            ):
                raise FusionError(
                    f"{name} is one object in some models but not in all, and is trained; "
                    "share it among all members or among none"
                )
        self.keys = keys
        self.partly |= frozenset(name for pair in overlaps(named) for name in pair)
        self.partly |= frozenset(
            name for name in partly_shared if not isinstance(named.get(name, self._first.get(name)), nn.Parameter)
        )
        for tensor in named.values():
            self._owners.setdefault(tensor, index)
        held = {id(value): (name, value) for name, value in _objects_held(model)}
        self.common |= {held[key][0] for key in held.keys() & self._held.keys()}
        self._held.update((key, value) for key, (_, value) in held.items())


_IMMUTABLE = (*PLAIN, Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module)
_UNCHANGED = (*_IMMUTABLE, tuple, frozenset, enum.Enum, functools.partial, types.MethodType)
_MUTABLE = (*MUTABLE_CONTAINERS, *GENERATORS, Iterator, np.ndarray)


def _objects_held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the lists, dicts and other objects that Python attributes of ``model`` refer to, each with the name.

    Attributes that also lead to tensors or modules are left out: to keep them would keep the model.
    """

    def visit(value: Any) -> list[Any]:
        return [] if isinstance(value, _IMMUTABLE) else [part for _, _, part in parts(value)]

    for part in model.modules():
        for name, value in python_attributes(part):
            if not isinstance(value, _IMMUTABLE):
                held = walk([value], visit).values()
                if not any(isinstance(item, Tensor | nn.Module) for item in held):
                    changeable = (item for item in held if not isinstance(item, _UNCHANGED))
                    yield from ((name, item) for item in changeable if isinstance(item, _MUTABLE) or attributes(item))
