"""The C++ that inductor makes of a block of members, as a function that threads without Python call.

Inductor's programs take handles of tensors and give handles, between which they hold no lock of Python's; but they
begin by letting go of it, which only a thread that has it may do. So its source gets two changes before it is
compiled: the lock is let go of by who has it, and `hfusion_rows` stands at its end, which takes stacks of all members,
computes a block of rows of them, and writes losses and gradients to the rows of other stacks.
Tried with torch 2.13; where its source or its wrappers are others than expected, there is no entry.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hfusion.step.entry import NativeEntry

_RELEASE = "py::gil_scoped_release_simple release;"
# Of a thread without a state of Python's, and of one that has it.
_OWN_RELEASE = """
    struct Release {
        PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
        ~Release() { if (state) PyEval_RestoreThread(state); }
    } release;"""

_ENTRY = """
#include <cstdio>
#include <cstring>
#include <vector>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

static AtenTensorHandle hfusion_row(AtenTensorHandle whole, int64_t start, int64_t rows) {
    int64_t dim, *sizes, *strides;
    AtenTensorHandle found;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(whole, &dim));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(whole, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(whole, &strides));
    std::vector<int64_t> shape(sizes, sizes + dim);
    shape[0] = rows;
    AOTI_TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(whole, dim, shape.data(), strides, start * strides[0], &found));
    return found;
}

extern "C" __attribute__((visibility("default"))) int hfusion_rows(
        AtenTensorHandle const* tensors, const char* stacked, int64_t inputs, int64_t start, int64_t rows,
        char* const* outputs, const int64_t* bytes, int64_t count, char* message, int64_t room) noexcept {
    int failed = 1;
    std::vector<AtenTensorHandle> made;
    try {
        std::vector<AtenTensorHandle> given(inputs);
        made.resize(count, nullptr);
        for (int64_t i = 0; i < inputs; i++) {
            if (stacked[i]) given[i] = hfusion_row(tensors[i], start, rows);
            else AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensors[i], &given[i]));
        }
        inductor_entry_impl(given.data(), made.data());
        for (int64_t k = 0; k < count; k++) {
            void* data;
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(made[k], &data));
            std::memcpy(outputs[k] + start * bytes[k], data, rows * bytes[k]);
        }
        failed = 0;
    } catch (std::exception const& error) {
        std::snprintf(message, room, "%s", error.what());
    } catch (...) {
        std::snprintf(message, room, "an error of an unknown kind");
    }
    for (AtenTensorHandle handle : made)
        if (handle) aoti_torch_delete_tensor_object(handle);
    return failed;
}
"""


@contextmanager
def with_row_entries() -> Iterator[None]:
    """Programs that inductor compiles or loads inside have an entry. For one thread at a time."""
    from torch._inductor.codecache import CppWrapperCodeCache

    original = CppWrapperCodeCache.load_pybinding

    def load_pybinding(*args: Any, main_code: str = "", **kwargs: Any) -> Any:
        if main_code.count(_RELEASE) == 1 and "void inductor_entry_impl(" in main_code:
            main_code = main_code.replace(_RELEASE, _OWN_RELEASE) + _ENTRY
        return original(*args, main_code=main_code, **kwargs)

    CppWrapperCodeCache.load_pybinding = load_pybinding  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CppWrapperCodeCache.load_pybinding
        if CppWrapperCodeCache.load_pybinding != original:
            CppWrapperCodeCache.load_pybinding = original  # type: ignore[method-assign]


class Unparted(Exception):
    """A program cannot be called by other threads; the message says why."""


def row_entry(run: Callable[..., Any]) -> int:
    """Where `hfusion_rows` of the program ``run`` is, which must be kept. Raises Unparted."""
    if not isinstance(run, NativeEntry):
        raise Unparted("its program is more than C++")
    # It may be a copy whose file is gone: what is loaded is found by its name.
    library = ctypes.CDLL(run.path)
    if not hasattr(library, "hfusion_rows"):
        raise Unparted("torch writes programs in another way than expected")
    return ctypes.cast(library.hfusion_rows, ctypes.c_void_p).value or 0
