"""Call the C++ function of a compiled step without Inductor's wrappers, and load it without Inductor.

A program with ``cpp_wrapper`` is compiled to an extension module. If it differs from what is expected, the step is
called through torch's wrappers.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfusion.torch_private.replaced_functions import replaced

_NAME = "inductor_entry_cpp"
_TAKES = re.compile(r"steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\)")
_GIVES = re.compile(r"num_outputs=(\d+),")
_numbers = itertools.count()


_aoti: Any = torch._C._aoti


def handles_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return a handle for each tensor, as a capsule, which keeps the tensor alive until `tensors_of` takes it."""
    handles: list[Any] = _aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return handles


def tensors_of(handles: Sequence[Any]) -> Sequence[Tensor]:
    """Return the tensors of these handles, and release the handles."""
    tensors: Sequence[Tensor] = _aoti.alloc_tensors_by_stealing_from_void_ptrs(handles)
    return tensors


class NativeEntry:
    """A compiled step. ``takes``: its number of tensors. ``content``: the bytes of its library."""

    def __init__(self, content: bytes, takes: int, call: Callable[..., Any]) -> None:
        self.content, self.takes = content, takes
        self._call = call

    @property
    def path(self) -> str:
        """The path from which the library was loaded; the file may have been deleted since."""
        file: str = self._call.__self__.__file__  # type: ignore[attr-defined]
        return file

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return tensors_of(self._call(handles_of(tensors)))


def entry_of(run: Callable[..., Any], inputs: int, outputs: int) -> NativeEntry | None:
    """Return the C++ function of a compiled step; None if the step needs constants or Python as well."""
    source, constants = getattr(run, "source_code", None), getattr(run, "constants", True)
    if not isinstance(source, str) or constants:
        return None
    takes, gives = _TAKES.findall(source), _GIVES.findall(source)
    if takes != [str(inputs)] or gives != [str(outputs)]:
        return None
    calls = [call for call in _called(getattr(run, "current_callable", None)) if call.__name__ == _NAME]
    path = getattr(getattr(calls[0], "__self__", None), "__file__", None) if len(calls) == 1 else None
    if path is None:
        return None
    try:
        return NativeEntry(Path(path).read_bytes(), inputs, calls[0])
    except OSError:
        return None


def _called(function: Any) -> Iterator[types.BuiltinFunctionType]:
    """Yield the C functions in the closures of ``function``."""
    waiting, visited = [function], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) not in visited:
            visited.add(id(item))
            waiting += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
            if isinstance(item, types.BuiltinFunctionType):
                yield item


def load_function(path: Path) -> Callable[..., Any]:
    """Load the extension module ``path`` of a compiled step, and return its function.

    Raises OSError, ImportError, AttributeError or RuntimeError if it does not load.
    """
    # As torch tells its own libraries where to find this function; see CppPythonBindingsCodeCache.
    guards: Any = torch._C._dynamo.guards
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(guards._torchinductor_pyobject_tensor_data_ptr)
    name = f"hfusion_step_{next(_numbers)}.{_NAME}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(name, None)
    call: Callable[..., Any] = getattr(module, _NAME)
    return call


# Patch Inductor's C++ for a block of members, so that threads without the GIL can call it.
#
# Inductor's programs take and return tensor handles, and compute without the GIL. But they begin by releasing it, which
# only a thread that holds it may do. Three changes are made to the source before it is compiled:
#
# - The GIL is released only if the thread holds it.
# - A function `hfusion_rows` is added. It takes stacks of all members, computes a block of their rows, and writes
#   losses and gradients to the same rows of other stacks.
# - A result is allocated directly in its rows, if their address is aligned like memory of torch.
#
# If the source or the wrappers differ from what is expected, there is no such function.

_RELEASE = "py::gil_scoped_release_simple release;"
# The replacement works in threads that do not hold the GIL, too.
_OWN_RELEASE = """
    struct Release {
        PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
        ~Release() { if (state) PyEval_RestoreThread(state); }
    } release;"""

_ALLOCATES = "aoti_torch_empty_strided("
_MAIN = "void inductor_entry_impl("
# C++ that is put before and behind that of a program.
_PLACES, _ENTRY = (Path(__file__).with_name(name) for name in ("row_places.h", "row_entry.h"))


@contextmanager
def with_row_entries() -> Iterator[None]:
    """Context manager: add `hfusion_rows` to programs that Inductor compiles or loads. For one thread at a time."""
    # Imported late: Inductor takes a second to import.
    from torch._inductor.codecache import CppWrapperCodeCache

    original = CppWrapperCodeCache.load_pybinding

    def load_pybinding(*args: Any, main_code: str = "", **kwargs: Any) -> Any:
        if main_code.count(_RELEASE) == 1 and main_code.count(_MAIN) == 1:
            head, main = main_code.replace(_RELEASE, _OWN_RELEASE).split(_MAIN)
            main = main.replace(_ALLOCATES, f"hfusion_{_ALLOCATES[11:]}")
            main_code = head + _PLACES.read_text() + _MAIN + main + _ENTRY.read_text()
        return original(*args, main_code=main_code, **kwargs)

    with replaced(CppWrapperCodeCache, {"load_pybinding": load_pybinding}):
        yield


class CannotPartition(Exception):
    """A program cannot be called by other threads; the message says why."""


def row_entry(run: Callable[..., Any]) -> int:
    """Return the address of `hfusion_rows` in the program ``run``, which must stay alive. Raises CannotPartition."""
    if not isinstance(run, NativeEntry):
        raise CannotPartition("its program is more than C++")
    # The file may have been deleted: dlopen finds a library that is already loaded by its name.
    library = ctypes.CDLL(run.path)
    if not hasattr(library, "hfusion_rows"):
        raise CannotPartition("torch writes programs in another way than expected")
    return ctypes.cast(library.hfusion_rows, ctypes.c_void_p).value or 0
