"""Serialization for other processes, without the parts that these already have."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from hfusion.core.errors import PlanError


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("hf.Cluster needs cloudpickle: pip install cloudpickle (extra: hfusion[cluster])") from error
    return cloudpickle


def pack(what: str, value: Any, parts: Mapping[int, str]) -> bytes:
    """``value`` as bytes; an object whose id is in ``parts`` as its key there. Raises PlanError with ``what``."""
    target = io.BytesIO()
    _dump(what, value, parts, target)
    return target.getvalue()


def _dump(what: str, value: Any, parts: Mapping[int, str], target: Any) -> None:
    pickler: Any = _cloudpickle().Pickler

    class Packer(pickler):  # type: ignore[misc]
        def persistent_id(self, found: object) -> str | None:
            return parts.get(id(found))

    try:
        Packer(target).dump(value)
    except Exception as error:
        raise PlanError(
            f"{what} cannot go to another process, as pickle fails: {type(error).__name__}: {error}; leave out what "
            "only this process has, such as open files, locks and generators"
        ) from error


class _Counter:
    """A file that only counts what is written."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count += size
        return size


def packed_bytes(what: str, value: Any) -> int:
    """Return how many bytes ``value`` is packed. Raises as `pack`."""
    counter = _Counter()
    _dump(what, value, {}, counter)
    return counter.count


def _no_parts(key: str) -> Any:
    raise KeyError(key)


def unpack(data: bytes, part: Callable[[str], Any] = _no_parts) -> Any:
    """Return the unpacked object; ``part`` gives omitted parts by key."""

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, key: str) -> Any:
            return part(key)

    return Unpacker(io.BytesIO(data)).load()


def pack_message(message: Any) -> bytes:
    """A message from one process to another as bytes, with the classes and functions that only one of them has."""
    data: bytes = _cloudpickle().dumps(message)
    return data


def unpack_message(data: bytes) -> Any:
    """The message of `pack_message`.

    Objects of classes that this process has sent are of these very classes, and functions read the variables of their
    modules here.
    """
    return _MessageUnpickler(data).load()


class _MessageUnpickler(pickle.Unpickler):
    """Keeps the classes and functions of this process as they are.

    cloudpickle knows a class again that it has sent, but writes its attributes over, and functions come back as copies
    with copies of the global variables that they read. The names are private to cloudpickle, tried on 3.1.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        internal = _cloudpickle().cloudpickle
        self._known = set(internal._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        self._internal = internal
        # By id: an original has its state, and a function that reads a module here must not write into it.
        self._originals: dict[int, Any] = {}
        self._bound: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        replaced = {
            "_class_setstate": self._set_class_state,
            "_make_function": self._make_function,
            "_function_setstate": self._set_function_state,
        }
        return (
            replaced[name]
            if module == self._internal.__name__ and name in replaced
            else super().find_class(module, name)
        )

    def _set_class_state(self, kind: type, state: Any) -> Any:
        return kind if kind in self._known else self._internal._class_setstate(kind, state)

    def _make_function(self, code: types.CodeType, variables: dict[str, Any], *more: Any) -> Any:
        module = sys.modules.get(variables.get("__name__", ""))
        if module is None:
            return self._internal._make_function(code, variables, *more)
        original: Any = module
        for part in code.co_qualname.split("."):
            original = getattr(original, part, None)
        if isinstance(original, types.FunctionType) and original.__code__ == code and not code.co_freevars:
            self._originals[id(original)] = original
            return original
        function = self._internal._make_function(code, vars(module), *more)
        self._bound[id(function)] = function
        return function

    def _set_function_state(self, function: Any, state: Any) -> None:
        if id(function) in self._originals:
            return
        attributes, slots = state
        if id(function) in self._bound:
            slots = {**slots, "__globals__": {}}
        self._internal._function_setstate(function, (attributes, slots))
