"""Patch Inductor's C++ for a block of members, so that threads without the GIL can call it.

Inductor's programs take and return tensor handles, and compute without the GIL. But they begin by releasing it, which
only a thread that holds it may do. Three changes are made to the source before it is compiled:

- The GIL is released only if the thread holds it.
- A function `hfusion_rows` is added. It takes stacks of all members, computes a block of their rows, and writes losses
  and gradients to the same rows of other stacks.
- A result is allocated directly in its rows, if their address is aligned like memory of torch.

If the source or the wrappers differ from what is expected, there is no such function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hfusion.torch_private.cpp_entry import NativeEntry

_RELEASE = "py::gil_scoped_release_simple release;"
# The replacement works in threads that do not hold the GIL, too.
_OWN_RELEASE = """
    struct Release {
        PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
        ~Release() { if (state) PyEval_RestoreThread(state); }
    } release;"""

_ALLOCATES = "aoti_torch_empty_strided("
_MAIN = "void inductor_entry_impl("
# A program always allocates the same tensors in the same order. The first call of each thread shows which allocations
# become results. Later calls place these directly if the address is 64-byte aligned, as torch's memory is: bits must
# not depend on the call.
_PLACES = """
#include <cstdint>
#include <vector>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace {
struct HfusionPlaces {
    bool wanted = false, known = false;
    int64_t next = 0, start = 0, rows = 0;
    char* const* outputs = nullptr;
    const int64_t* bytes = nullptr;
    std::vector<void*> made;
    std::vector<int64_t> results; /* of each allocation: the result that comes to lie there, or -1 */

    /* Where allocation `number` is to lie, if it needs so many bytes; 0 for anywhere. */
    char* place(int64_t number, int64_t needed) const {
        if (!wanted || !known || number >= static_cast<int64_t>(results.size()) || results[number] < 0) return nullptr;
        const int64_t k = results[number];
        char* found = outputs[k] + start * bytes[k];
        return needed == rows * bytes[k] && reinterpret_cast<uintptr_t>(found) % 64 == 0 ? found : nullptr;
    }
};
thread_local HfusionPlaces hfusion_places;

AOTITorchError hfusion_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                     int32_t device_type, int32_t device, AtenTensorHandle* found) {
    HfusionPlaces& places = hfusion_places;
    if (!places.wanted) return aoti_torch_empty_strided(dims, sizes, strides, dtype, device_type, device, found);
    const int64_t number = places.next++;
    int64_t last = 1;
    for (int64_t i = 0; i < dims; i++) last = sizes[i] ? last + (sizes[i] - 1) * strides[i] : 0;
    const int64_t needed = last * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
    if (char* place = places.place(number, needed))
        return aoti_torch_create_tensor_from_blob(place, dims, sizes, strides, 0, dtype, device_type, device, found);
    const AOTITorchError failed =
        aoti_torch_empty_strided(dims, sizes, strides, dtype, device_type, device, found);
    if (!failed && !places.known) {
        void* data = nullptr;
        aoti_torch_get_data_ptr(*found, &data);
        places.made.resize(number + 1);
        places.made[number] = data;
    }
    return failed;
}
}

"""

_ENTRY = """
#include <cstdio>
#include <cstring>
#include <stdexcept>
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
    HfusionPlaces& places = hfusion_places;
    places.next = 0;
    places.start = start;
    places.rows = rows;
    places.outputs = outputs;
    places.bytes = bytes;
    places.wanted = true;
    places.made.clear();
    try {
        std::vector<AtenTensorHandle> given(inputs);
        made.resize(count, nullptr);
        for (int64_t i = 0; i < inputs; i++) {
            if (stacked[i]) given[i] = hfusion_row(tensors[i], start, rows);
            else AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensors[i], &given[i]));
        }
        inductor_entry_impl(given.data(), made.data());
        if (!places.known) places.results.assign(places.made.size(), -1);
        std::vector<void*> found(count);
        for (int64_t k = 0; k < count; k++) {
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(made[k], &found[k]));
            for (size_t number = 0; !places.known && number < places.made.size(); number++)
                if (places.made[number] == found[k]) places.results[number] = k;
        }
        for (int64_t k = 0; k < count; k++) {
            char* to = outputs[k] + start * bytes[k];
            for (int64_t other = k + 1; found[k] != to && other < count; other++)
                if (found[other] == to) throw std::runtime_error("its memory was asked for in another order");
            if (found[k] != to) std::memcpy(to, found[k], rows * bytes[k]);
        }
        places.known = true;
        failed = 0;
    } catch (std::exception const& error) {
        std::snprintf(message, room, "%s", error.what());
    } catch (...) {
        std::snprintf(message, room, "an error of an unknown kind");
    }
    places.wanted = false;
    for (AtenTensorHandle handle : made)
        if (handle) aoti_torch_delete_tensor_object(handle);
    return failed;
}
"""


@contextmanager
def with_row_entries() -> Iterator[None]:
    """Context manager: add `hfusion_rows` to programs that Inductor compiles or loads. For one thread at a time."""
    from torch._inductor.codecache import CppWrapperCodeCache

    original = CppWrapperCodeCache.load_pybinding

    def load_pybinding(*args: Any, main_code: str = "", **kwargs: Any) -> Any:
        if main_code.count(_RELEASE) == 1 and main_code.count(_MAIN) == 1:
            head, main = main_code.replace(_RELEASE, _OWN_RELEASE).split(_MAIN)
            main_code = head + _PLACES + _MAIN + main.replace(_ALLOCATES, f"hfusion_{_ALLOCATES[11:]}") + _ENTRY
        return original(*args, main_code=main_code, **kwargs)

    CppWrapperCodeCache.load_pybinding = load_pybinding  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CppWrapperCodeCache.load_pybinding
        if CppWrapperCodeCache.load_pybinding != original:
            CppWrapperCodeCache.load_pybinding = original  # type: ignore[method-assign]


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
