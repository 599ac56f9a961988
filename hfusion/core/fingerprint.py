"""The state that a function reads besides its arguments; a captured program is valid while it is unchanged."""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import operator
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from hfusion.core.membership import marks
from hfusion.core.python_values import (
    IdentityRef,
    KeyReader,
    Link,
    attributes,
    own_attributes,
    parts,
    read_attribute,
    slots,
)
from hfusion.torch_private import module_hooks

MAX_VALUES = 2000

_DATA = (str, bool, int, float, complex, bytes, Tensor, list, tuple, dict)
_OWN = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


# Functions of these, and what they read, are taken to stay as they are.
_FIXED = ("torch", "numpy", "math", "functools", "operator", "itertools", "builtins")


class TooMuch(Exception):
    """The state is too large to read on every call, or has a part that cannot be read."""


def global_hooks() -> tuple[tuple[str, IdentityRef], ...]:
    """Return the hooks that run at every call of any module, hashable."""
    if not module_hooks.has_global_hooks():
        return ()
    return tuple((table, IdentityRef(hook)) for table, hook in module_hooks.global_hooks())


def read_state(function: Callable[..., Any]) -> Any:
    """Return all state that ``function`` can read besides its arguments, as a hashable value.

    Functions that read the same have equal states, whether or not they are one object. Tensors count by identity
    and version, but not those of a module, which are looked up in it. A state keeps no tensor alive. None if what is
    read is too much, or cannot be compared.
    """
    # The common case comes first, since this runs in every step.
    if type(function) is types.FunctionType and _fixed(function.__module__):
        return IdentityRef(function)
    try:
        return _ClosureReader().read(function)
    except (TooMuch, RecursionError):
        return None


def read_model(module: nn.Module, *more: Any) -> Any:
    """Return all state that a model's forward can read, including the code of its classes, as `read_state` does.

    ``more``: further values to read, such as the arguments of a call. Code of torch and Python counts as unchanged.
    """
    try:
        return _ClosureReader(classes=True).read((module, more))
    except (TooMuch, RecursionError):
        return None


def tensors_of(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in a state that are still alive."""
    if isinstance(state, tuple):
        for item in state:
            yield from tensors_of(item)
    elif isinstance(state, WeakIdRef) and (held := state()) is not None:
        yield held


def root(function: Callable[..., Any]) -> Any:
    """Return the code of a function, or its class: equal for functions that one line of code creates repeatedly."""
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function.__code__ if isinstance(function, types.FunctionType) else type(function)


# Methods of users' classes that code calls without naming them, but for equality: that of a dataclass reads all fields.
OPERATORS = (frozenset(vars(operator)) - {"__eq__", "__ne__"}) | {
    *("__len__", "__iter__", "__next__", "__bool__", "__int__", "__float__", "__enter__", "__exit__", "__get__"),
    *(f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")),
}


class _ClosureReader(KeyReader):
    """Reads the state of functions. ``classes``: also what the code of classes reads."""

    def __init__(self, classes: bool = False) -> None:
        super().__init__()
        self._classes = classes

    def leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, types.BuiltinFunctionType) or (isinstance(value, type) and is_installed(value.__module__)):
            return type(value), value
        if isinstance(value, Tensor):
            # The text comes first, since such a reference compares with others of its kind only.
            key = "tensor", WeakIdRef(value), 0 if value.is_inference() else value._version, value.requires_grad
            held = marks(value)
            return (*key, self.read(held)) if held else key
        return None

    def name(self, key: Any) -> Any:
        return self.read(key)

    def read_new(self, value: Any, path: str) -> Any:
        if len(self._visited) > MAX_VALUES:
            raise TooMuch
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value) if self._classes else (value, self._data(value))
        if isinstance(value, nn.Module):
            return self._modules(value)
        if isinstance(value, list | tuple | Mapping | set | frozenset | functools.partial):
            return self.compound(type(value), parts(value), "")
        if isinstance(value, types.MethodType):
            return value.__func__.__code__, self.read(value.__func__), self.read(value.__self__)
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | logging.Logger):
            return IdentityRef(value)
        has_attributes = read_attribute(value, "__dict__", None) is not None
        if not has_attributes or isinstance(value, types.ModuleType) or _has_slots(type(value)):
            raise TooMuch
        called = [inspect.getattr_static(value, "__call__", None)]
        for base in type(value).__mro__:
            if is_user_code(base.__module__) and not is_installed_package(base.__module__):
                called += [vars(base)[name] for name in sorted(OPERATORS.intersection(vars(base)))]
        code = tuple([self.read(method) for method in called if isinstance(method, types.FunctionType)])
        return code, self._data(type(value)), self.compound(type(value), attributes(value), "")

    def _data(self, kind: type) -> Any:
        """The variables of a class that are data, and those of its bases."""
        held = [(n, v) for n, v in _variables(kind) if isinstance(v, _DATA) and not n.startswith("__")]
        return tuple([(name, self.read(value)) for name, value in held])

    def _class(self, kind: type) -> Any:
        """Read a class: the functions and variables of it and its bases."""
        held = [
            (name, value)
            for name, value in _variables(kind)
            if (callable(value) or not name.startswith("__")) and not isinstance(value, _DESCRIPTORS)
            # Constructors have run already.
            if not (name == "__init__" and issubclass(kind, nn.Module))
        ]
        return (kind, tuple([(name, self.read(_plain_function(value))) for name, value in held]))

    def _function(self, function: types.FunctionType) -> Any:
        if _fixed(function.__module__) or (self._classes and is_installed(function.__module__)):
            return IdentityRef(function)
        names = names_in(function.__code__)
        outside = list(_outside(names.variables, names, function.__globals__, set()))
        for module in imported_modules(function.__code__):
            outside += _outside(names.attributes, names, vars(module), set())
        if not names.all.isdisjoint(RANDOM_STATE):
            raise TooMuch
        settings = read_settings(asked_settings(names.all))
        held = [part for part in attributes(function) if not (part[0] is Link.ATTRIBUTE and part[1].startswith("__"))]
        return self.compound(function.__code__, held, ""), self.read(outside), settings

    def _modules(self, whole: nn.Module) -> Any:
        """A module and those below it: where they stand, what they are, and which of their tensors are one."""
        named_modules = list(whole.named_modules(remove_duplicate=False))
        tensors = [t for _, m in named_modules for t in (*m._parameters.values(), *m._buffers.values())]
        ids = [id(part) for part in (*(m for _, m in named_modules), *tensors)]
        ties = tuple([ids.index(i) for i in ids]) if len(set(ids)) < len(ids) else None
        return (ties, global_hooks(), tuple([(path, type(m), self._module(m)) for path, m in named_modules]))

    def _module(self, module: nn.Module) -> Any:
        named_tensors = [(n, t) for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None]
        held = attributes(module, _OWN)
        kinds = tuple((n, t.dtype, t.device, t.shape, t.requires_grad) for n, t in named_tensors)
        hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
        own_code = type(module) if self._classes else type(module).forward
        forward = None if _fixed(type(module).__module__) else self.read(own_code)
        return (module.training, kinds, forward, self.read(hooks), self.compound(None, held, ""))


def _variables(kind: type) -> list[tuple[str, Any]]:
    """Return what a class and its bases hold, but for those of torch and Python."""
    bases = [base for base in kind.__mro__ if not is_installed(base.__module__)]
    return [variable for base in bases for variable in list(vars(base).items())]


def _outside(variables: Sequence[str], names: CodeNames, space: Mapping[str, Any], visited: set[int]) -> Iterator[Any]:
    """Yield the ``variables`` of a module; of user modules among them, the attributes in ``names`` instead."""
    visited.add(id(space))
    for name in variables:
        value = space.get(name)
        if not isinstance(value, types.ModuleType):
            yield value
        elif not _fixed(value.__name__) and id(vars(value)) not in visited:
            yield from _outside(names.attributes, names, vars(value), visited)


# The size of objects that have a ``__dict__``, and neither slots nor content in C.
_PLAIN_SIZE = type("Bare", (), {}).__basicsize__


def is_installed(module: str | None) -> bool:
    """Return whether a module is part of torch or of Python's installation."""
    return _fixed(module) or (isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names)


def is_user_code(module: str | None) -> bool:
    """Return whether code of a Python module may read or keep state that a capture must know.

    Modules of torch, numpy, Python and hfusion do not; those of other packages count as user code.
    """
    return isinstance(module, str) and not is_installed(module) and module.partition(".")[0] != "hfusion"


@functools.lru_cache(maxsize=4096)
def is_installed_package(module: str) -> bool:
    """Return whether a Python module is a part of an installed package, rather than a file of the user's."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def functions_behind(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions behind an attribute: itself, those that it wraps, or those of a class."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        yield from functions_behind(value.__func__)
    elif isinstance(value, property):
        yield from (code for part in (value.fget, value.fset) if part is not None for code in functions_behind(part))
    elif isinstance(value, type):
        if is_user_code(value.__module__):
            yield from (part for part in vars(value).values() if isinstance(part, types.FunctionType))
    elif callable(value) and not isinstance(value, nn.Module):
        if isinstance(value, types.FunctionType):
            # A wrapper that a library defines may have the module of the function that it wraps.
            defined_in = value.__globals__.get("__name__")
            if defined_in == value.__module__ or is_user_code(defined_in):
                yield value
        yield from functions_behind(own_attributes(value).get("__wrapped__"))


# Attributes that every class has, and types without content to read.
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType)


def _plain_function(value: Any) -> Any:
    """Return the functions behind a static or class method or a property; other values as they are."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return [value.fget, value.fset] if isinstance(value, property) else value


def _has_slots(kind: type) -> bool:
    """Return whether objects of a class have slots, or content in C, in addition to their ``__dict__``."""
    return kind.__basicsize__ > _PLAIN_SIZE or bool(kind.__itemsize__ or slots(kind))


def _fixed(module: str | None) -> bool:
    # Classes of proxies have a property of this name.
    return isinstance(module, str) and module.partition(".")[0] in _FIXED


class CodeNames(NamedTuple):
    """The names in a function's code and in the functions inside it, sorted.

    Attributes:
        variables: names of global variables, also of those that the code sets.
        attributes: names of attributes of any object, among them what is imported from a module.
        modules: names of the modules that the code imports.
        texts: constants that may name something, as for getattr.
    """

    variables: tuple[str, ...]
    attributes: tuple[str, ...]
    modules: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def all(self) -> set[str]:
        return {*self.variables, *self.attributes, *self.texts}


# Instructions of Python 3.11 to 3.14 for names that are looked up among global variables, last or only.
_OF_VARIABLES = ("_GLOBAL", "_NAME", "_GLOBALS")
# Arguments of these instructions have flags below the index of a name.
_FLAG_BITS = {"LOAD_GLOBAL": 1, "LOAD_ATTR": int(sys.version_info >= (3, 12)), "LOAD_SUPER_ATTR": 2}
_NAMING = {op: (dis.opname[op], _FLAG_BITS.get(dis.opname[op], 0)) for op in dis.hasname}


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> CodeNames:
    """Return the names in ``code``: an attribute that is called like a global variable is none."""
    variables, attributes, modules, texts = set[str](), set[str](), set[str](), set[str]()
    extended = 0
    # Much faster than the functions of `dis`.
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        arg = extended | low
        extended = arg << 8 if op == dis.EXTENDED_ARG else 0
        if op in _NAMING:
            opname, flags = _NAMING[op]
            is_variable = opname.endswith(_OF_VARIABLES)
            names = modules if opname == "IMPORT_NAME" else variables if is_variable else attributes
            names.add(code.co_names[arg >> flags])
    for const in code.co_consts:
        if isinstance(const, str) and const.isidentifier():
            texts.add(const)
        elif isinstance(const, types.CodeType):
            for names, inner in zip((variables, attributes, modules, texts), names_in(const), strict=True):
                names.update(inner)
    return CodeNames(*(tuple(sorted(names)) for names in (variables, attributes, modules, texts)))


def imported_modules(code: types.CodeType) -> list[types.ModuleType]:
    """The modules that ``code`` imports by absolute names, as far as they have been imported, but for fixed ones."""
    loaded = (sys.modules.get(name) for name in names_in(code).modules)
    return [module for module in loaded if module is not None and not _fixed(module.__name__)]


# Settings of torch and the process that code can read: a program of such code is valid while they are unchanged.


def _workers() -> tuple[int, int] | None:
    """Return the rank of this process and the number of processes; None without a process group."""
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if ready else None


def _backends(*settings: str) -> Callable[[], Any]:
    """Return a function that reads settings below torch.backends."""
    return functools.partial(operator.attrgetter(*settings), torch.backends)


_FUNCTIONS = (
    "are_deterministic_algorithms_enabled",
    "get_default_device",
    "get_deterministic_debug_mode",
    "get_float32_matmul_precision",
    "get_num_interop_threads",
    "get_num_threads",
    "is_anomaly_check_nan_enabled",
    "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_inference_mode_enabled",
    "is_warn_always_enabled",
)
_KERNELS = ("flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled")

SETTINGS: Mapping[str, Callable[[], Any]] = {
    **{name: getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)},
    **{name: getattr(torch.backends.cuda, name) for name in _KERNELS if hasattr(torch.backends.cuda, name)},
    **dict.fromkeys(
        ("get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype"),
        lambda: tuple(map(torch.get_autocast_dtype, ("cpu", "cuda", "xpu", "mps"))),
    ),
    **dict.fromkeys(("is_initialized", "get_rank", "get_world_size"), _workers),
    "benchmark": _backends("cudnn.benchmark"),
    "deterministic": _backends("cudnn.deterministic", "mkldnn.deterministic"),
    "allow_tf32": _backends("cuda.matmul.allow_tf32", "cudnn.allow_tf32"),
    "enabled": _backends("cudnn.enabled", "mkldnn.enabled", "opt_einsum.enabled"),
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
    **dict.fromkeys(("environ", "getenv"), lambda: tuple(os.environ.items())),
}
"""Functions that read settings, by the name that code uses for them."""


RANDOM_STATE = frozenset({"initial_seed", "get_rng_state"})
"""Functions that return the state of random numbers, which differs at every call."""


def asked_settings(names: Collection[str]) -> tuple[Callable[[], Any], ...]:
    """Return functions that read the settings which code with these ``names`` in it may read."""
    return tuple(dict.fromkeys(read for name, read in SETTINGS.items() if name in names))


def read_settings(settings: Collection[Callable[[], Any]]) -> tuple[Any, ...]:
    """Return the present values of ``settings``, hashable."""
    return tuple([read() for read in settings])
