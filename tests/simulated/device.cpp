// The part of the simulated device that torch asks for in C++: memory, streams, events, generators. It calls back to
// Python (queues.py), which decides what is done when. Tensors lie in memory of the host, so that views are as anywhere.
// Source: https://docs.pytorch.org/docs/stable/accelerator/index.html

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// As in queues.py.
struct Calls {
  int64_t devices;
  int64_t (*allocate)(int64_t device, int64_t bytes);
  void (*release)(int64_t address);
  void (*used)(int64_t address, int64_t stream);
  int64_t (*allocated)(int64_t device, int64_t peak);
  void (*forget_peak)(int64_t device);
  int64_t (*pin)(int64_t bytes);
  void (*unpin)(int64_t address);
  int64_t (*pinned)(int64_t address);
  int64_t (*stream)(int64_t device);
  int64_t (*record)(int64_t event, int64_t stream);
  void (*block)(int64_t event, int64_t stream);
  void (*wait)(int64_t event);
  int64_t (*query)(int64_t event);
  void (*forget)(int64_t event);
  void (*wait_stream)(int64_t stream);
  int64_t (*query_stream)(int64_t stream);
  void (*wait_device)(int64_t device);
};
Calls calls;

thread_local c10::DeviceIndex current = 0;
// By device; 0 is the default stream.
thread_local std::unordered_map<c10::DeviceIndex, int64_t> streams;

int64_t key(const c10::Stream& stream) {
  // The default stream of each device has a number of its own in Python.
  return stream.id() == 0 ? -1 - stream.device_index() : stream.id();
}

template <typename T>
void* pointer(T number) {
  return reinterpret_cast<void*>(static_cast<intptr_t>(number));
}

int64_t number(const void* pointer) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kType, std::exchange(current, device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kType, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), calls.stream(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = std::exchange(streams[stream.device_index()], stream.id());
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), old);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return pointer(stream.id()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) calls.forget(number(event));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = pointer(calls.record(number(*event), key(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) calls.block(number(event), key(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || calls.query(number(event)) != 0; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) calls.wait(number(event));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(calls.devices); }
  bool queryStream(const c10::Stream& stream) const override { return calls.query_stream(key(stream)) != 0; }
  void synchronizeStream(const c10::Stream& stream) const override { calls.wait_stream(key(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { calls.wait_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) calls.used(number(data.get()), key(stream));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Memory final : c10::DeviceAllocator {
  static void release(void* address) {
    if (address != nullptr) calls.release(number(address));
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto device = c10::Device(kType, current);
    void* address = bytes == 0 ? nullptr : pointer(calls.allocate(current, static_cast<int64_t>(bytes)));
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not a copy that a queue makes"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Guard().recordDataPtrOnStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = calls.allocated(device, 0);
    stats.allocated_bytes[0].peak = calls.allocated(device, 1);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { calls.forget_peak(device); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

struct Pinned final : c10::Allocator {
  static void release(void* address) {
    if (address != nullptr) calls.unpin(number(address));
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes == 0 ? nullptr : pointer(calls.pin(static_cast<int64_t>(bytes)));
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};
Pinned pinned;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(calls.devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return calls.pinned(number(data)) != 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    TORCH_CHECK(bytes == 0 || storage.nbytes() == 0, "memory is given back whole, and taken anew");
    c10::impl::VirtualGuardImpl(kType).setDevice(storage.device());
    storage.set_data_ptr_noswap(memory.allocate(bytes));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, keys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

// torch lists the backends between which ``.data`` may change, and leaves out those from outside.
bool may_replace(const at::Tensor& mine, const at::Tensor& other) {
  return mine.layout() == other.layout();
}
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_has_compatible_shallow_copy_type", may_replace);
}

// What only looks at memory, or takes some.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", may_replace);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}

}  // namespace

extern "C" void simulated_device(const Calls* found) {
  calls = *found;
  // Lives as long as the process, as torch asks of it.
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

extern "C" int64_t simulated_stream(int64_t device) {
  auto index = static_cast<c10::DeviceIndex>(device);
  return key(Guard().getStream(c10::Device(kType, index)));
}
