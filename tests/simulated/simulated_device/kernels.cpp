// Operators of the simulated device: views and memory here, arithmetic by the kernels of the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_map>

#include "memory.h"

namespace simulated {

at::Generator host_generator(const std::optional<at::Generator>& generator);

namespace {

std::atomic<int64_t> kernels{0};
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "only strided tensors are simulated");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

void grow(c10::TensorImpl* impl) {
  const size_t needed = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), impl->dtype().itemsize(), impl->storage_offset());
  if (needed > impl->storage().nbytes()) {
    resize(impl->storage(), needed);
  }
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> /*format*/) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  grow(impl);
  return self;
}

at::Tensor& set_geometry(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                         at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow(impl);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_geometry(self, std::move(source), 0, {length}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_geometry(self, source.storage(), source.storage_offset(), source.sizes(),
                      source.strides());
}

at::Tensor& clear(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

at::Tensor on_host(const at::Tensor& tensor, Access& access) {
  return tensor.device().type() == kDevice ? access.alias(tensor) : tensor;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool /*non_blocking*/) {
  Access access;
  on_host(target, access).copy_(on_host(self, access));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

at::Scalar read_scalar(const at::Tensor& self) {
  Access access;
  return access.alias(self).item();
}

void record_stream(at::Tensor& /*self*/, at::Stream /*stream*/) {}

// One call of an operator by its kernel for the CPU.
class HostCall {
 public:
  explicit HostCall(const c10::OperatorHandle& op) : op_(op) {}

  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument) {
    const auto* alias = argument.alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      return to_host(value.toTensor(), is_written);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> host;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        host.push_back(to_host(tensor, is_written));
      }
      return host;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> host;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        host.push_back(tensor ? std::optional(to_host(*tensor, is_written)) : std::nullopt);
      }
      return host;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      device_ = value.toDevice();
      return c10::Device(c10::DeviceType::CPU);
    }
    return value.isGenerator() || takes_generator(argument)
        ? c10::IValue(host_generator(value.toOptional<at::Generator>()))
        : value;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) {
      return to_device(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        results.push_back(to_device(tensor));
      }
      return results;
    }
    return value;
  }

  // Copies outputs that the operator has resized.
  void finish() {
    for (const auto& [device, host] : resized_) {
      if (host.numel() > 0) {
        device.resize_(host.sizes());
        access_.alias(device).copy_(host);
      }
    }
  }

 private:
  static bool takes_generator(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  at::Tensor to_host(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().type() != kDevice) {
      const bool is_scalar = tensor.device().is_cpu() && tensor.dim() == 0 && !is_written;
      TORCH_CHECK(is_scalar, op_.schema().name(), ": expected all tensors on the simulated device, but ",
                  "one of shape ", tensor.sizes(), " is on ", tensor.device());
      return tensor;
    }
    TORCH_CHECK(!device_ || *device_ == tensor.device(), op_.schema().name(),
                ": tensors are on two devices, ", *device_, " and ", tensor.device());
    device_ = tensor.device();
    if (is_written && tensor.numel() == 0) {
      auto host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
      resized_.emplace_back(tensor, host);
      return host;
    }
    auto host = access_.alias(tensor);
    if (const void* base = host.storage().data()) {
      owners_.emplace(base, tensor);
    }
    return host;
  }

  at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined() || host.device().type() == kDevice) {
      return host;
    }
    const auto owner = owners_.find(host.storage().data());
    if (owner != owners_.end()) {
      TORCH_CHECK(owner->second.dtype() == host.dtype(), op_.schema().name(), ": a view of another type");
      return at::native::as_strided_tensorimpl(owner->second, host.sizes(), host.strides(),
                                               host.storage_offset());
    }
    const auto dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
    const auto options = dense.options().device(device_.value_or(c10::Device(kDevice)));
    auto result = at::empty_strided(dense.sizes(), dense.strides(), options);
    access_.alias(result).copy_(dense);
    return result;
  }

  const c10::OperatorHandle& op_;
  Access access_;
  std::optional<c10::Device> device_;
  std::unordered_map<const void*, at::Tensor> owners_;
  std::vector<std::pair<at::Tensor, at::Tensor>> resized_;
};

// Returns the argument that an operator returns again, because it writes to it.
const c10::IValue* find_written(const c10::FunctionSchema& schema, const c10::Argument& result,
                                const std::vector<c10::IValue>& arguments) {
  const auto* alias = result.alias_info();
  if (alias == nullptr || !alias->isWrite()) {
    return nullptr;
  }
  for (size_t index = 0; index < arguments.size(); ++index) {
    const auto* other = schema.arguments()[index].alias_info();
    if (other != nullptr && other->beforeSet() == alias->beforeSet()) {
      return &arguments[index];
    }
  }
  return nullptr;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++kernels;
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  const auto begin = static_cast<std::ptrdiff_t>(stack->size() - num_arguments);
  const std::vector<c10::IValue> arguments(stack->begin() + begin, stack->end());
  HostCall call(op);
  for (size_t index = 0; index < num_arguments; ++index) {
    (*stack)[begin + index] = call.to_host(arguments[index], schema.arguments()[index]);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.finish();
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    auto& value = (*stack)[begin + index];
    const auto* written = find_written(schema, schema.returns()[index], arguments);
    value = written != nullptr ? *written : call.to_device(value);
  }
}

}  // namespace

int64_t num_kernels() { return kernels; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_geometry));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(clear));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(read_scalar));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace simulated
