"""Inductor: compile graphs with the settings of the process and fewer repetitions, and call the C++ of a program.

A program with ``cpp_wrapper`` is compiled to an extension module, whose function is called without Inductor's wrappers,
and loaded without Inductor. If it differs from what is expected, the step is called through torch's wrappers. Without
the names that are patched, nothing changes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.torch_private.replaced_functions import replaced

HEADER = Path(__file__).with_name("program.h")
# One of the two headers that `HEADER` includes.
_WRAPPER = "torch/csrc/inductor/cpp_wrapper/cpu.h"


@contextmanager
def quick_inductor() -> Iterator[None]:
    """Context manager: Inductor compiles the same programs faster. For one thread at a time."""
    with ExitStack() as stack:
        for patch in (_dtype_rules_once, _all_headers_precompiled, _numbers_stay_tensors):
            with suppress(AttributeError, ImportError):
                stack.enter_context(patch())
        yield


def _numbers_stay_tensors() -> AbstractContextManager[None]:
    """Context manager: do not let torch turn 0-dim float64 tensors into Python numbers; programs take tensors only.

    If torch specialized one to a number, it would request a new trace, which works only with Dynamo.
    """
    from torch.fx.passes import _tensorify_python_scalars as numbers

    return replaced(numbers, {"_is_tensorify_enabled": lambda: False})


def _dtype_rules_once() -> AbstractContextManager[None]:
    """Context manager: fill the table of dtype rules once, not per operator, a third of torch's Python time."""
    # Imported for its effect: it registers the rules of all operators.
    importlib.import_module("torch._inductor.lowering")
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    # The class has one instance, which each call of it fills again.
    DtypePropagationOpsHandler()
    return replaced(DtypePropagationOpsHandler, {"__init__": lambda self: None})


def _all_headers_precompiled() -> AbstractContextManager[None]:
    """Context manager: precompile both headers of a program. torch precompiles one; the other takes a fifth of the time
    to compile a small program.
    """
    from torch._inductor.codecache import CppWrapperCodeCache

    original = CppWrapperCodeCache._get_uncompiled_header

    def header(cls: type, device: str) -> Any:
        path = original(device)
        # Inside a zip import there is no header file.
        return str(HEADER) if path == _WRAPPER and HEADER.is_file() else path

    return replaced(CppWrapperCodeCache, {"_get_uncompiled_header": classmethod(header)})


# Inductor: compile a graph, and read and set the settings of the process.


def compile_graph(
    module: fx.GraphModule, examples: Sequence[Tensor], options: Mapping[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """Return ``module`` compiled by Inductor for tensors like ``examples``. Raises what Inductor raises."""
    # Imported late: most programs never compile, and Inductor takes a second to import.
    from torch._inductor import compile as compile_by_inductor

    run: Callable[..., Sequence[Tensor]] = compile_by_inductor(module, list(examples), dict(options))
    return run


def changed_values() -> dict[str, Any]:
    """Return the settings that differ from torch's defaults, by name, without importing Inductor.

    Settings of AOTInductor are left out: it stores properties of the machine there.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    names = [] if config is None else [name for name in sorted(config._config) if not config._is_default(name)]
    values = {name: getattr(config, name) for name in names if not name.startswith("aot_inductor.")}
    # A setting that was changed only during a compilation is no longer "default" to torch afterwards.
    return {name: value for name, value in values.items() if value != config._config[name].default}


def under_values(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Context manager: Inductor compiles under these settings. Imports Inductor."""
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(dict(values))
    return patched


def last_pass(own: Callable[[fx.Graph], None]) -> Any:
    """Return a pass for Inductor: the custom ones that the settings of the process run last, and then ``own``.

    Imports Inductor.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    present: Any = config.post_grad_custom_post_pass
    earlier: Sequence[Any] = () if present is None else (present,) if callable(present) else tuple(present)

    class LastPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for graph_pass in (*earlier, own):
                graph_pass(graph)

        def uuid(self) -> Any:
            names = [graph_pass.uuid() for graph_pass in earlier]
            # With None, torch caches no program.
            return None if None in names else (get_hash_for_files((own.__code__.co_filename,)), *names)

    return LastPass()


# Call the C++ function of a compiled step without wrappers.

_NAME = "inductor_entry_cpp"
_TAKES = re.compile(r"steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\)")
_GIVES = re.compile(r"num_outputs=(\d+),")
_numbers = itertools.count()


_aoti: Any = torch._C._aoti


# Returns a handle for each tensor, as a capsule, which keeps the tensor alive until `tensors_of` takes it.
handles_of: Callable[[Sequence[Tensor]], list[Any]] = _aoti.unsafe_alloc_void_ptrs_from_tensors
# Returns the tensors of handles, and releases the handles.
tensors_of: Callable[[Sequence[Any]], Sequence[Tensor]] = _aoti.alloc_tensors_by_stealing_from_void_ptrs


class NativeEntry:
    """A compiled step. ``takes``: its number of tensors. ``content``: the bytes of its library."""

    def __init__(self, content: bytes, takes: int, call: Callable[..., Any]) -> None:
        self.content, self.takes = content, takes
        self._call = call

    @property
    def path(self) -> str:
        """The path from which the library was loaded; the file may have been deleted since."""
        return str(self._call.__self__.__file__)  # type: ignore[attr-defined]

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


def with_row_entries() -> AbstractContextManager[None]:
    """Context manager: add `hfusion_rows` to programs that Inductor compiles or loads. For one thread at a time."""
    # Imported late: Inductor takes a second to import.
    from torch._inductor.codecache import CppWrapperCodeCache

    original = CppWrapperCodeCache.load_pybinding

    def load_pybinding(*args: Any, main_code: str = "", **kwargs: Any) -> Any:
        # Inside a zip import there are no such files.
        if main_code.count(_RELEASE) == 1 and main_code.count(_MAIN) == 1 and _PLACES.is_file():
            head, main = main_code.replace(_RELEASE, _OWN_RELEASE).split(_MAIN)
            main = main.replace(_ALLOCATES, f"hfusion_{_ALLOCATES[11:]}")
            main_code = head + _PLACES.read_text() + _MAIN + main + _ENTRY.read_text()
        return original(*args, main_code=main_code, **kwargs)

    return replaced(CppWrapperCodeCache, {"load_pybinding": load_pybinding})


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
