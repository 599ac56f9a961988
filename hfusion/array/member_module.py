"""One member of an array as a module, and how it is compared with what it was."""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.capture.hooks import is_part_of_forward
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.variable_guards import content
from hfusion.core.membership import is_own_hook
from hfusion.core.python_values import PLAIN
from hfusion.core.row_gradients import untie
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass
from hfusion.torch_private.module_hooks import RegisteredHook, registered_hooks

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STANDARD = frozenset(nn.Module().__dict__)
# nn.RNNBase renews the references to its parameters in forward.
_OWN = _STANDARD | {"_flat_weights", "_flat_weight_refs"}
# Subclasses of these may have attributes that change.
_FIXED = frozenset({*PLAIN, types.FunctionType, types.BuiltinFunctionType})
_MISSING = object()
_TRAINED = attrgetter("requires_grad")
_TENSOR_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)


class _CatchUp:
    """The hook of a member that lets it follow its array before a call. A copy of it does nothing."""

    # As `own_hook` marks a function.
    _hfusion_own_hook = True

    def __init__(self, catch_up: Callable[[], None] | None = None) -> None:
        self._catch_up = None if catch_up is None else weakref.WeakMethod(catch_up)

    def __call__(self, *_: Any) -> None:
        if self._catch_up is not None and not torch.compiler.is_compiling() and (call := self._catch_up()) is not None:
            call()

    def __deepcopy__(self, memo: dict[int, Any]) -> _CatchUp:
        return _CatchUp()

    def __reduce__(self) -> Any:
        return _CatchUp, ()


class MemberWatch:
    """What may be changed of ``members``, as it is when this is made, except inside their containers and objects.

    `is_unchanged` takes half a microsecond for each module: an array calls it at each of its calls.
    """

    def __init__(self, members: Iterable[MemberModule]) -> None:
        members = list(members)
        modules = [module.__dict__ for member in members for module in member.modules.values()]
        tables = [held[name] for held in modules for name in _TABLES]
        self._sized: list[Any] = [*modules, *tables]
        self._sizes = list(map(len, self._sized))
        self._filled = [table for table in tables if table]
        named = [["training", *(name for name in held if name not in _OWN), "training"] for held in modules]
        self._readers = [(itemgetter(*names), held) for names, held in zip(named, modules, strict=True)]
        self._values = list(self._read())
        self._flat = [parameter for member in members for parameter in member.flat]
        self._state = tensor_states(self._flat)

    def _read(self) -> Iterator[Any]:
        held = chain.from_iterable(map(dict.values, self._filled))
        return chain(held, chain.from_iterable([read(attributes) for read, attributes in self._readers]))

    def is_unchanged(self) -> bool:
        """Return whether the members hold the same objects, with the same flags, memory and hooks."""
        try:
            same = self._sizes == list(map(len, self._sized)) and all(map(is_, self._read(), self._values))
        except KeyError:
            return False
        return same and tensor_states(self._flat) == self._state


class MemberModule:
    """A member of an array that was handed out: ``model``, with tensors in the memory of its row.

    Attributes:
        parameters, buffers: the tensors of ``model`` that are rows of stacks, by key.
        modules: the modules of ``model``, by path.
        hooked: where it had a hook of the user at the last `accept`; empty where it had none.
        fingerprint: all that programs know of it besides tensors; None if not known.
    """

    def __init__(self, model: nn.Module, row: int, shared: frozenset[str], catch_up: Callable[[], None]) -> None:
        self.model, self.row = model, row
        hooks: Any = vars(model)["_forward_pre_hooks"]
        hooks["hfusion"] = _CatchUp(catch_up)
        hooks.move_to_end("hfusion", last=False)
        self.fingerprint: Any = None
        self._latest: Any = None
        self.take(shared)

    def take(self, shared: frozenset[str]) -> None:
        """Adopt the modules and tensors that the model has now."""
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        named = {name: tensor for name, tensor in tensors(self.model) if name not in shared}
        self.parameters = {name: t for name, t in named.items() if isinstance(t, nn.Parameter)}
        self.buffers = {name: t for name, t in named.items() if not isinstance(t, nn.Parameter)}
        self.flat = tuple({id(t): t for t in self.parameters.values()}.values())

    def accept(self) -> None:
        """Record what the member is now: later differences are changes."""
        self._watch = MemberWatch([self])
        self._attributes = [(vars(module), dict(vars(module))) for module in self.modules.values()]
        values = [
            (name, value)
            for _, attributes in self._attributes
            for name, value in attributes.items()
            if name not in _OWN and not _is_fixed(value)
        ]
        self._containers = [(name, value, content(value)) for name, value in values if _holds_fixed(value)]
        self._has_objects = len(self._containers) < len(values)
        if self._has_objects:
            self._latest = modeless_fingerprint(self.model)
            self.fingerprint = self.fingerprint or self._latest
        self.hooked = self._find_hook()

    def has_changed(self) -> bool:
        """Return whether anything of the member differs from what it was at the last `accept`."""
        return not self._watch.is_unchanged() or self.has_changed_inside()

    def has_changed_inside(self) -> bool:
        """Return whether a container or object of the member differs from what it was at the last `accept`."""
        return any(content(value) != key for _, value, key in self._containers) or (
            self._has_objects and modeless_fingerprint(self.model) != self._latest
        )

    def changed_names(self) -> Collection[str] | None:
        """Return the names of the attributes that changed since the last `accept`; None if others may have, too."""
        names = {
            name
            for current, recorded in self._attributes
            for name in current.keys() | recorded.keys()
            if current.get(name, _MISSING) is not recorded.get(name, _MISSING) and name not in _OWN
        }
        names |= {name for name, value, key in self._containers if content(value) != key}
        if self._has_objects:
            latest = modeless_fingerprint(self.model)
            if latest[1:] != self._latest[1:]:
                return None
            names |= {name.rpartition(".")[2] for name, _ in set(latest[0]) ^ set(self._latest[0])}
        return names

    @property
    def training(self) -> dict[str, bool]:
        """The modes by path."""
        return {path: module.training for path, module in self.modules.items()}

    @property
    def settings(self) -> MemberSettings:
        """The user's settings of the member."""
        hooks = {path: registered_hooks(module, _is_of_user) for path, module in self.model.named_modules()}
        trained = {name: parameter.requires_grad for name, parameter in self.parameters.items()}
        return MemberSettings(self.training, trained, {path: found for path, found in hooks.items() if found})

    def _find_hook(self) -> str:
        """Return the path of a user's hook; empty if there is none."""
        for path, module in self.modules.items():
            if any(map(_is_of_user, chain.from_iterable(vars(module)[name].values() for name in HOOKS))):
                return path or "(root)"
        return next((name for name, p in self.parameters.items() if _hooks_of(p)), "")

    def set(self, modes: Mapping[str, bool], trained: Mapping[str, bool]) -> None:
        """Set modes by path, and requires_grad of parameters by key."""
        for path, module in self.modules.items():
            module.training = modes[path]
        for name, parameter in self.parameters.items():
            if parameter.requires_grad != trained[name]:
                parameter.requires_grad_(trained[name])

    def leave(self) -> None:
        """Become an independent module, with copies of the tensors, as the row is removed."""
        for tensor in (*self.parameters.values(), *self.buffers.values()):
            tensor.data = tensor.data.clone()
            if isinstance(tensor, nn.Parameter):
                untie(tensor)
        del vars(self.model)["_forward_pre_hooks"]["hfusion"]

    def become(self, like: nn.Module) -> None:
        """Replace the attributes by those of ``like``, a model of the same structure."""
        others = dict(like.named_modules(remove_duplicate=False))
        own, other = dict(tensors(self.model)), dict(tensors(like))
        memo: dict[int, Any] = {id(other[name]): tensor for name, tensor in own.items()}
        memo |= {id(others[path]): module for path, module in self.modules.items()}
        for path, module in dict(self.model.named_modules()).items():
            values = {name: value for name, value in vars(others[path]).items() if name not in _STANDARD}
            attributes = module.__dict__
            for name in attributes.keys() - _STANDARD:
                del attributes[name]
            attributes.update({name: copy.deepcopy(value, memo) for name, value in values.items()})
        self.fingerprint = None
        self.accept()


@dataclass(frozen=True)
class MemberSettings:
    """A user's settings of a member: modes by path, trained parameters by key, hooks by path."""

    modes: Mapping[str, bool]
    trained: Mapping[str, bool]
    hooks: Mapping[str, Sequence[RegisteredHook]]


def tensor_states(parameters: Sequence[Tensor]) -> tuple[list[bool], list[int], Any]:
    """Return the state that users can change in parameters: requires_grad, memory and the numbers of hooks."""
    # Otherwise, each attribute of a subclass costs a search for its __torch_function__.
    with DisableTorchFunctionSubclass():
        hooks = list(map(len, filter(None, chain.from_iterable(map(_TENSOR_HOOKS, parameters)))))
        return list(map(_TRAINED, parameters)), list(map(Tensor.data_ptr, parameters)), hooks


def _hooks_of(parameter: Tensor) -> list[Any]:
    """Return the hooks of the user."""
    tables = filter(None, _TENSOR_HOOKS(parameter))
    return [hook for table in tables for hook in table.values() if not is_own_hook(hook)]


def _is_of_user(hook: Any) -> bool:
    """Return whether ``hook`` is the user's: neither hfusion's own, nor one of torch that is captured with forward."""
    return not is_own_hook(hook) and not is_part_of_forward(hook)


def _is_fixed(value: Any) -> bool:
    """Return whether a value cannot change."""
    kind = type(value)
    return kind in _FIXED or isinstance(value, type | enum.Enum) or (kind is tuple and all(map(_is_fixed, value)))


def _holds_fixed(value: Any) -> bool:
    """Return whether a value is fixed, or a container of such values, which `content` compares by value."""
    kind = type(value)
    items = (*value, *value.values()) if kind is dict else value if kind in (list, set, tuple) else ()
    return _is_fixed(value) or (kind in (dict, list, set, tuple) and all(map(_holds_fixed, items)))


def without_hooks(model: nn.Module) -> nn.Module:
    """``model`` without the user's hooks."""
    for module in model.modules():
        for name in HOOKS:
            table = getattr(module, name)
            for key in [key for key, hook in table.items() if not is_part_of_forward(hook)]:
                del table[key]
    return model
