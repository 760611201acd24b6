// A CUDA device that is not there: see fake_cuda.py, which compiles this.
// It registers on the CUDA dispatch key of a CPU build of torch an allocator, a device guard, and a fallback that runs
// every operator on the CPU, on the same memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
using namespace at;
using Format = std::optional<MemoryFormat>;
using Dtype = std::optional<ScalarType>;
using Place = std::optional<Layout>;
using Where = std::optional<Device>;
using Flag = std::optional<bool>;
const Device GPU(kCUDA, 0);

struct Memory : c10::Allocator {
  DataPtr allocate(size_t n) override { void* p = n ? malloc(n) : nullptr; return {p, p, &free, GPU}; }
  DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} memory;
static int registered = (c10::SetAllocator(kCUDA, &memory, /*priority*/ 100), 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<kCUDA> {
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, GPU); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, GPU); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
// Instead of libtorch's own, which in a CPU build knows no CUDA: this library is loaded before it, so calls come here.
namespace at::accelerator { std::optional<DeviceType> getAccelerator(bool) { return kCUDA; } }

// The same memory as a tensor of the other device; of a view the storage is that of its base.
Tensor moved(const Tensor& t, Device device, const Tensor* base = nullptr) {
  auto drop = [](void* s) { delete static_cast<c10::Storage*>(s); };
  const c10::Storage& old = t.storage();
  c10::Storage storage = base ? base->storage() : c10::Storage(c10::Storage::use_byte_size_t(), old.nbytes(), DataPtr(
      const_cast<void*>(old.data()), new c10::Storage(old), drop, device), c10::GetAllocator(device.type()), true);
  DispatchKeySet keys(device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
  auto result = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, t.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}
Tensor host(const Tensor& t) { return t.defined() && t.is_cuda() ? moved(t, kCPU) : t; }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& takes = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const size_t begin = stack->size() - takes.size();
  const std::string name = op.schema().name();
  const bool indexing = name.find("aten::index") == 0 || name.find("aten::_index_put") == 0;
  const std::vector<IValue> given(stack->begin() + begin, stack->end());
  std::vector<std::pair<Tensor, Tensor>> written;  // what is written to, and what the CPU is given for it
  bool on_gpu = false, on_cpu = false;
  for (size_t i = 0; i < takes.size(); i++) {
    auto to_host = [&](const Tensor& t, bool alone = true) {
      Tensor result = host(t);
      bool free = (t.defined() && !t.dim() && alone) || (indexing && takes[i].name() == "indices");
      if (t.defined()) (t.is_cuda() ? on_gpu : on_cpu) |= t.is_cuda() || !free;
      if (takes[i].alias_info() && takes[i].alias_info()->isWrite()) written.emplace_back(t, result);
      return result;
    };
    IValue& value = (*stack)[begin + i];
    if (value.isTensor()) value = to_host(value.toTensor());
    else if (value.isDevice()) value = Device(kCPU);
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(to_host(t, false));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(to_host(*t)) : t);
      value = list;
    }
  }
  TORCH_CHECK(!(on_gpu && on_cpu), name, ": Expected all tensors to be on the same device, but found cuda:0 and cpu!");
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (auto& [original, alias] : written)  // out= may have been resized
    if (alias.sizes() != original.sizes()) original.set_(moved(alias, GPU));
  for (size_t r = 0; r < returns.size(); r++) {
    IValue& value = (*stack)[stack->size() - returns.size() + r];
    const auto* alias = returns[r].alias_info();
    const IValue* source = nullptr;
    for (size_t i = 0; alias && i < takes.size(); i++)
      if (takes[i].alias_info() && takes[i].alias_info()->beforeSets() == alias->beforeSets()) source = &given[i];
    if (source && alias->isWrite()) value = *source;
    else if (value.isTensor() && value.toTensor().defined())
      value = moved(value.toTensor(), GPU, source ? &source->toTensor() : nullptr);
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(moved(t, GPU));
      value = list;
    }
  }
}

Tensor own_empty(IntArrayRef size, Dtype dtype, Place, Where, Flag, Format format) {
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}
Tensor own_empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, Place, Where, Flag) {
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, dtype_or_default(dtype));
}
Tensor own_as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  c10::Storage storage(self.storage());
  auto result = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return result;
}
Tensor own_view(const Tensor& self, IntArrayRef size) {
  Tensor shape = host(self).view(size);
  return own_as_strided(self, shape.sizes(), shape.strides(), self.storage_offset());
}
void resize_storage(const Tensor& self, int64_t bytes) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  DataPtr fresh = memory.allocate(bytes);
  if (bytes && storage->nbytes()) memcpy(fresh.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}
const Tensor& own_resize(const Tensor& self, IntArrayRef size, Format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  int64_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  if (bytes > (int64_t)self.storage().nbytes()) resize_storage(self, bytes);
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", own_empty);
  m.impl("empty_strided", own_empty_strided);
  m.impl("as_strided", own_as_strided);
  m.impl("view", own_view);
  m.impl("resize_", own_resize);
  m.impl("record_stream", +[](Tensor&, Stream) {});
  m.impl("copy_", +[](Tensor& self, const Tensor& source, bool) -> Tensor& {
    host(self).copy_(host(source));
    return self;
  });
  m.impl("_reshape_alias", +[](const Tensor& t, IntArrayRef size, IntArrayRef stride) {
    return own_as_strided(t, size, stride, {});
  });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", +[](Tensor& t, c10::Storage s) -> Tensor& {
    int64_t n = s.nbytes() / t.itemsize();
    return set_storage(t, s, 0, {n}, {1});
  });
  m.impl("set_.source_Tensor", +[](Tensor& t, const Tensor& s) -> Tensor& {
    return set_storage(t, s.storage(), s.storage_offset(), s.sizes(), s.strides());
  });
}
TORCH_LIBRARY(fake_cuda, m) {
  m.def("resize_storage(Tensor t, int bytes) -> ()");
  m.def("host(Tensor t) -> Tensor");
}
TORCH_LIBRARY_IMPL(fake_cuda, CUDA, m) {
  m.impl("resize_storage", resize_storage);
  m.impl("host", host);
}
