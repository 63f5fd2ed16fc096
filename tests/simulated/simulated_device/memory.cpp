// Blocks of whole pages that are protected against the processor unless a kernel runs.
#include "memory.h"

#include <ATen/core/TensorBase.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace simulated {
namespace {

struct Block {
  size_t num_bytes;
  size_t requested_bytes;
  c10::DeviceIndex device;
  int num_open = 0;
};

constexpr size_t kTotalBytes = size_t{1} << 32;
std::mutex mutex;
std::unordered_map<const void*, Block> blocks;
std::unordered_map<c10::DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> statistics;

void count(c10::DeviceIndex device, size_t num_bytes, bool is_added) {
  auto& stats = statistics[device];
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  for (auto* stat : {&stats.allocated_bytes[all], &stats.reserved_bytes[all], &stats.active_bytes[all],
                     &stats.requested_bytes[all]}) {
    is_added ? stat->increase(num_bytes) : stat->decrease(num_bytes);
  }
}

void release(void* base) {
  if (base == nullptr) {
    return;
  }
  size_t num_bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto& block = blocks.at(base);
    num_bytes = block.num_bytes;
    count(block.device, block.requested_bytes, false);
    blocks.erase(base);
  }
  munmap(base, num_bytes);
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::impl::VirtualGuardImpl guard(kDevice);
    const auto device = guard.getDevice();
    if (num_bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (num_bytes + page - 1) / page * page;
    void* base = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "simulated device: out of memory");
    const std::lock_guard<std::mutex> lock(mutex);
    blocks[base] = Block{whole, num_bytes, device.index()};
    count(device.index(), num_bytes, true);
    return {base, base, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    Access access;
    access.open(target);
    access.open(source);
    std::memcpy(target, source, num_bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& /*pointer*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex);
    return statistics[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { reset(device, false); }
  void resetPeakStats(c10::DeviceIndex device) override { reset(device, true); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto used = static_cast<size_t>(getDeviceStats(device).allocated_bytes[all].current);
    return {kTotalBytes - std::min(used, kTotalBytes), kTotalBytes};
  }

 private:
  static void reset(c10::DeviceIndex device, bool is_peak) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto& stats = statistics[device];
    for (auto* array :
         {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      for (auto& stat : *array) {
        is_peak ? stat.reset_peak() : stat.reset_accumulated();
      }
    }
  }
};

Allocator instance;
REGISTER_ALLOCATOR(kDevice, &instance);

void protect(const void* base, const Block& block, int protection) {
  const int failed = mprotect(const_cast<void*>(base), block.num_bytes, protection);
  TORCH_CHECK(failed == 0, "simulated device: memory cannot be protected");
}

}  // namespace

c10::DeviceAllocator* allocator() { return &instance; }

void Access::open(const void* base) {
  if (base == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(base);
  TORCH_CHECK(found != blocks.end(), "simulated device: not the memory of a device");
  if (found->second.num_open++ == 0) {
    protect(base, found->second, PROT_READ | PROT_WRITE);
  }
  bases_.push_back(base);
}

Access::~Access() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const void* base : bases_) {
    const auto found = blocks.find(base);
    if (found != blocks.end() && --found->second.num_open == 0) {
      mprotect(const_cast<void*>(base), found->second.num_bytes, PROT_NONE);
    }
  }
}

at::Tensor Access::alias(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  void* base = const_cast<void*>(storage.data());
  open(base);
  c10::DataPtr pointer(base, c10::Device(c10::DeviceType::CPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer));
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

void resize(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const c10::impl::VirtualGuardImpl guard(kDevice);
  const auto previous = guard.exchangeDevice(impl->device());
  auto pointer = instance.allocate(num_bytes);
  guard.setDevice(previous);
  if (const size_t kept = std::min(num_bytes, impl->nbytes())) {
    instance.copy_data(pointer.get(), impl->data(), kept);
  }
  impl->set_data_ptr_noswap(std::move(pointer));
  impl->set_nbytes(num_bytes);
}

}  // namespace simulated
