// Memory of the simulated devices. The processor can reach it only while an `Access` is open.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

namespace simulated {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

c10::DeviceAllocator* allocator();

// Opens blocks of device memory for the lifetime of the object.
class Access {
 public:
  Access() = default;
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
  ~Access();

  // Returns a tensor of the CPU over the memory of a device tensor.
  at::Tensor alias(const at::Tensor& tensor);
  void open(const void* base);

 private:
  std::vector<const void*> bases_;
};

// Changes the size of a block, and keeps its content.
void resize(const c10::Storage& storage, size_t num_bytes);

}  // namespace simulated
