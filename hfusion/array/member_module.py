"""One member of an array as a module, which detects changes made to it.

``nn.Module`` looks into its table of parameters first whenever an attribute is set or deleted, and a tensor or
submodule is read (`__setattr__`, `__delattr__` and `__getattr__` of torch 2.11 to 2.14). So the tables of a member
mark it as touched, and an array checks only members that were touched since its last call, or whose parameters are
referenced outside.
"""

from __future__ import annotations

import copy
import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from sys import _getframe
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.capture.hooks import is_part_of_forward
from hfusion.capture.registered_tensors import tensors
from hfusion.core.membership import is_own_hook, own_hook
from hfusion.core.python_values import PLAIN
from hfusion.torch_private.module_hooks import RegisteredHook, registered_hooks

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STANDARD = frozenset(nn.Module().__dict__)
# Subclasses of these may have attributes that change.
_FIXED = frozenset({*PLAIN, types.FunctionType, types.BuiltinFunctionType})
_MISSING = object()
_TRAINED = attrgetter("requires_grad")
_HOOKED, _UNHOOKED = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"), (None, None)


class ParameterTable(dict[str, Any]):
    """The parameters of one module of a member. A copy is a plain dict."""

    __slots__ = ("member",)

    def __init__(self, member: RowView, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.member = member

    def __contains__(self, name: object) -> bool:
        # Dynamo traces this. Setting or deleting an attribute looks up the table like reading one.
        if not torch.compiler.is_dynamo_compiling():
            self.member.touch(_getframe(1).f_code.co_name != "__getattr__")
        return super().__contains__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.member.touch(True)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.member.touch(True)
        super().__delitem__(name)

    def items(self) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            self.member.touch()
        return super().items()

    def values(self) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            self.member.touch()
        return super().values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (list(super().items()),)


class HookTable(OrderedDict[Any, Any]):
    """The hooks of one module of a member. A copy is a plain OrderedDict, without hfusion's own hooks."""

    def __init__(self, member: RowView, entries: Mapping[Any, Any]) -> None:
        self.member = member
        super().__init__(entries)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.member.touch(True)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self.member.touch(True)
        super().__delitem__(key)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (self.of_model(),)

    def of_model(self) -> list[tuple[Any, Any]]:
        """Hooks that the model would have alone."""
        return [(key, hook) for key, hook in self.items() if not is_own_hook(hook)]


def is_of_user(hook: Any) -> bool:
    """Return whether ``hook`` is the user's: neither hfusion's own, nor one of torch that is captured with forward."""
    return not is_own_hook(hook) and not is_part_of_forward(hook)


class RowView:
    """A member of an array: ``model``, with tensors that share the memory of its row.

    Attributes:
        parameters, buffers: the tensors of ``model`` that are rows of stacks, by key.
        modules: the modules of ``model``, by path.
        touched: whether it may have been changed since the last `mark_changes_applied`.
        flat: its parameters, each once; ``trains``: which of them were trained at the last `look`.
        hooked: where it had a hook of the user at the last `look`; empty where it had none.
        hard_to_watch: whether parameters may be reached without the module's tables.
        fingerprint: all that forward can read of it besides tensors, at the last check; None if not known.
    """

    def __init__(
        self,
        model: nn.Module,
        row: int,
        shared: frozenset[str],
        touched: Callable[[int, bool], None],
        called: Callable[[], None],
    ) -> None:
        self.model, self.row = model, row
        self._touched, self._called = touched, called
        self.touched = True
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._watch_tables()
        self._watch_calls()
        self.take_tensors(shared)
        self.fingerprint: Any = None
        self._latest: Any = None
        self.hooked, self.trains = "", list[bool]()
        self.accept()
        if self.hard_to_watch:
            self.fingerprint = modeless_fingerprint(model)

    def touch(self, changed: bool = False) -> None:
        """Record that the member was read, or that it may have been ``changed``."""
        if changed or not self.touched:
            self.touched = True
            self._touched(self.row, changed)

    def _watch_tables(self) -> None:
        for module in self.modules.values():
            attributes = module.__dict__
            if (
                not isinstance(attributes["_parameters"], ParameterTable)
                or attributes["_parameters"].member is not self
            ):
                attributes["_parameters"] = ParameterTable(self, attributes["_parameters"])
            for name in HOOKS:
                if not isinstance(attributes[name], HookTable) or attributes[name].member is not self:
                    attributes[name] = HookTable(self, attributes[name])

    def _watch_calls(self) -> None:
        def forward_pre_hook(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._called()

        self.model.__dict__["_forward_pre_hooks"]["hfusion"] = own_hook(forward_pre_hook)

    def take_tensors(self, shared: frozenset[str]) -> None:
        """Record the tensors that the model has now, except those in ``shared``."""
        named = {name: tensor for name, tensor in tensors(self.model) if name not in shared}
        self.parameters = {name: t for name, t in named.items() if isinstance(t, nn.Parameter)}
        self.buffers = {name: t for name, t in named.items() if not isinstance(t, nn.Parameter)}
        self.flat = tuple({id(t): t for t in self.parameters.values()}.values())
        self._state: Any = None

    def accept(self) -> None:
        """Record the current attributes, so that they do not count as changes by the user."""
        self._attributes = [(vars(module), dict(vars(module))) for module in self.modules.values()]
        self.hard_to_watch = any(
            name not in _STANDARD and not (type(value) in _FIXED or isinstance(value, type | enum.Enum))
            for _, attributes in self._attributes
            for name, value in attributes.items()
        )

    def mark_changes_applied(self) -> None:
        """Mark all changes to the member as applied."""
        self.touched = False
        self.accept()
        self.look()

    def look(self) -> None:
        """Record which parameters are trained, and where hooks are."""
        self._state = tensor_states(self.flat)
        self.trains = self._state[0]
        self.hooked = self._find_hook()

    def may_have_changed(self) -> bool:
        """True if the view or its parameters may have changed since `mark_changes_applied`."""
        return self.touched or tensor_states(self.flat) != self._state

    @property
    def training(self) -> dict[str, bool]:
        """The modes by path."""
        return {path: module.training for path, module in self.modules.items()}

    def _find_hook(self) -> str:
        """Return the path of a user's hook; empty if there is none."""
        for path, module in self.modules.items():
            attributes = module.__dict__
            if any(map(is_of_user, chain.from_iterable(attributes[name].values() for name in HOOKS))):
                return path or "(root)"
        return next((name for name, p in self.parameters.items() if tensor_hooks(p)), "")

    @property
    def hooks(self) -> dict[str, list[RegisteredHook]]:
        """The hooks of the user, by path."""
        hooks = {path: registered_hooks(module, is_of_user) for path, module in self.model.named_modules()}
        return {path: registered for path, registered in hooks.items() if registered}

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
        for module in self.modules.values():
            attributes = module.__dict__
            attributes["_parameters"] = dict(dict.items(attributes["_parameters"]))
            attributes |= {name: OrderedDict(attributes[name].of_model()) for name in HOOKS}

    @property
    def changed(self) -> bool:
        """True if attributes may have changed since `mark_changes_applied`."""
        return self.hard_to_watch or any(_differ(current, recorded) for current, recorded in self._attributes)

    def take_changed_names(self) -> Collection[str] | None:
        """Return the names of the attributes that changed since the last check; None if others may have, too."""
        if self.hard_to_watch:
            before, self._latest = self._latest or self.fingerprint, modeless_fingerprint(self.model)
            if before is None or before[1:] != self._latest[1:]:
                return None
            differing = set(before[0]) ^ set(self._latest[0])
            return {name.rpartition(".")[2] for name, _ in differing}
        return {
            name
            for current, recorded in self._attributes
            for name in current.keys() | recorded.keys()
            if current.get(name, _MISSING) is not recorded.get(name, _MISSING) and name != "training"
        }

    @property
    def same_modules(self) -> bool:
        """True if its modules are still the original ones."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        return modules.keys() == self.modules.keys() and all(
            modules[path] is module for path, module in self.modules.items()
        )

    def take_modules(self) -> None:
        """Adopt the modules that the model has now."""
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        self._watch_tables()

    def become(self, skeleton: nn.Module) -> None:
        """Replace the attributes by those of ``skeleton``, a model of the same structure."""
        others = dict(skeleton.named_modules(remove_duplicate=False))
        model_tensors, skeleton_tensors = dict(tensors(self.model)), dict(tensors(skeleton))
        memo: dict[int, Any] = {id(skeleton_tensors[name]): tensor for name, tensor in model_tensors.items()}
        memo |= {id(others[path]): module for path, module in self.modules.items()}
        for path, module in dict(self.model.named_modules()).items():
            values = {name: value for name, value in vars(others[path]).items() if name not in _STANDARD}
            attributes = module.__dict__
            for name in attributes.keys() - _STANDARD:
                del attributes[name]
            attributes.update({name: copy.deepcopy(value, memo) for name, value in values.items()})
        self.fingerprint = None
        self.accept()
        if self.hard_to_watch:
            self.fingerprint = modeless_fingerprint(self.model)


@dataclass(frozen=True)
class MemberSettings:
    """A user's settings of a member: modes by path, trained parameters by key, hooks by path."""

    modes: Mapping[str, bool]
    trained: Mapping[str, bool]
    hooks: Mapping[str, Sequence[RegisteredHook]]


def settings_of(member: RowView) -> MemberSettings:
    """Return the user's settings of a member."""
    return MemberSettings(member.training, {n: p.requires_grad for n, p in member.parameters.items()}, member.hooks)


def _differ(current: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    if len(current) != len(recorded):
        return True
    return any(current.get(name, _MISSING) is not value for name, value in recorded.items() if name != "training")


def tensor_states(parameters: Sequence[Tensor]) -> tuple[list[bool], list[int], Any]:
    """Return the state that users can change in parameters: requires_grad, memory and hooks."""
    hooks = list(map(_HOOKED, parameters))
    hook_lists = [tensor_hooks(parameter) for parameter in parameters] if hooks.count(_UNHOOKED) < len(hooks) else None
    return list(map(_TRAINED, parameters)), list(map(Tensor.data_ptr, parameters)), hook_lists


def tensor_hooks(parameter: Tensor) -> list[Any]:
    """The hooks of a parameter."""
    return [hook for table in _HOOKED(parameter) for hook in (table or {}).values()]


def without_hooks(model: nn.Module) -> nn.Module:
    """``model`` without the user's hooks."""
    for module in model.modules():
        for name in HOOKS:
            table = getattr(module, name)
            for key in [key for key, hook in table.items() if not is_part_of_forward(hook)]:
                del table[key]
    return model
