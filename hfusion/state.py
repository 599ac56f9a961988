"""What a function reads besides its arguments: its captured program holds only while that stays the same."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MOST_VALUES = 2000

_PLAIN = str | bool | int | float | complex | bytes | type | torch.dtype | torch.device | types.BuiltinFunctionType
_OWN = frozenset(nn.Module().__dict__)


class TooMuch(Exception):
    """There is more to read than is worth reading on every call, or something that cannot be read."""


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal only to a holder of the very same object, which it keeps alive, so that its id is not used again."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def read_state(function: Callable[..., Any]) -> Any:
    """Everything that ``function`` can read by itself, as a hashable value: attributes, closures, global variables.

    Tensors count by identity and version. None if that is too much, or holds what cannot be compared.
    """
    # The common case first, as it is read at every step.
    if type(function) is types.FunctionType and _of_torch(function.__module__):
        return _Same(function)
    try:
        return _Reader().read(function)
    except TooMuch:
        return None


@dataclass
class _Reader:
    """``met`` keeps what was read, so that no id is used again meanwhile."""

    met: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def read(self, value: Any) -> Any:
        if value is None or isinstance(value, _PLAIN):
            return (type(value), value)
        if isinstance(value, Tensor):
            return (_Same(value), 0 if value.is_inference() else value._version)
        if id(value) in self.met:
            return self.met[id(value)][0]
        self.met[id(value)] = (len(self.met), value)
        if len(self.met) > MOST_VALUES:
            raise TooMuch
        return self._read_new(value)

    def _read_new(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, nn.Module):
            return (_Same(value), tuple(self._module(module) for module in value.modules()))
        if isinstance(value, Mapping):
            return tuple((self.read(k), self.read(v)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return (type(value), tuple(self.read(v) for v in value))
        if isinstance(value, types.MethodType):
            return (value.__func__.__code__, self.read(value.__func__), self.read(value.__self__))
        if isinstance(value, functools.partial):
            return self.read((value.func, value.args, value.keywords))
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return _Same(value)
        if not hasattr(value, "__dict__") or isinstance(value, types.ModuleType):
            raise TooMuch
        call = inspect.getattr_static(value, "__call__", None)
        return (
            type(value),
            self.read(call) if isinstance(call, types.FunctionType) else None,
            self.read(vars(value)),
        )

    def _function(self, function: types.FunctionType) -> Any:
        if _of_torch(function.__module__):
            return _Same(function)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        names = _names(function.__code__)
        read = [function.__globals__[name] for name in names if name in function.__globals__]
        outside = [value for value in read if not isinstance(value, types.ModuleType)]
        for module in read:
            if isinstance(module, types.ModuleType) and not _of_torch(module.__name__):
                found = [vars(module)[name] for name in names if name in vars(module)]
                outside += [value for value in found if isinstance(value, bool | int | float | complex | Tensor)]
        return (
            function.__code__,
            self.read([cells, function.__defaults__, function.__kwdefaults__, outside]),
        )

    def _module(self, module: nn.Module) -> Any:
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        attributes = [value for name, value in vars(module).items() if name not in _OWN]
        kinds = tuple((t.dtype, t.device, t.shape) for t in own)
        forward = None if _of_torch(type(module).__module__) else self.read(type(module).forward)
        return (module.training, kinds, forward, self.read(attributes))


def _of_torch(module: str | None) -> bool:
    return module is not None and (module == "torch" or module.startswith("torch."))


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global and attribute names in ``code`` and the functions inside it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return (*code.co_names, *(name for part in inner for name in _names(part)))
