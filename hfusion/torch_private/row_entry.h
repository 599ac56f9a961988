/* Put behind the C++ of a program by hfusion/torch_private/inductor.py: an entry for threads without Python's lock,
   which computes a block of members and writes their rows of the results. */

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
