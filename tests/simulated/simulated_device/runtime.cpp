// Devices, streams, events and generators of the simulation. Kernels finish before they return.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>

#include "memory.h"

namespace simulated {
namespace {

constexpr int kMaxDevices = 8;
using Clock = std::chrono::steady_clock;

c10::DeviceIndex num_devices() {
  static const auto count = [] {
    const char* text = std::getenv("SIMULATED_DEVICES");
    return static_cast<c10::DeviceIndex>(text == nullptr ? 2 : std::stoi(text));
  }();
  return count;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};
std::atomic<c10::StreamId> last_stream{0};

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "simulated device ", static_cast<int>(index),
              " does not exist; there are ", static_cast<int>(num_devices()));
  return index;
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      current_device = checked(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : current_device;
    return stream(current_streams.at(checked(index)), index);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(0, device.has_index() ? device.index() : current_device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream(++last_stream, device.has_index() ? device.index() : current_device);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto previous = getStream(next.device());
    current_streams.at(next.device_index()) = next.id();
    return previous;
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(const c10::DeviceIndex /*device*/) const override {}

  void record(void** event, const c10::Stream& /*stream*/, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*device*/) const override {
    const auto passed =
        *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(start);
    return std::chrono::duration<double, std::milli>(passed).count();
  }

 private:
  static c10::Stream stream(c10::StreamId id, c10::DeviceIndex index) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A generator of the device; a generator of the CPU draws its numbers.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kDevice, index),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  static c10::DeviceType device_type() { return kDevice; }
  const at::Generator& host() const { return host_; }
  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.seed(); }
  void set_offset(uint64_t offset) override { host_.set_offset(offset); }
  uint64_t get_offset() const override { return host_.get_offset(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override { return new Generator(device_.index(), host_.clone()); }

  at::Generator host_;
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = current_device;
    current_device = checked(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void* /*data*/) const override { return {kDevice, current_device}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize(storage, num_bytes);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : checked(index));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static const auto generators = [this] {
      std::vector<at::Generator> made;
      for (c10::DeviceIndex device = 0; device < num_devices(); ++device) {
        made.push_back(getNewGenerator(device));
        made.back().set_current_seed(c10::default_rng_seed_val);
      }
      return made;
    }();
    return generators.at(index < 0 ? current_device : checked(index));
  }
};

Hooks hooks;

}  // namespace

at::Generator host_generator(const std::optional<at::Generator>& generator) {
  const auto& chosen = generator && generator->defined()
      ? *generator
      : hooks.getDefaultGenerator(current_device);
  TORCH_CHECK(chosen.device().type() == kDevice, "expected a generator of the simulated device, got ",
              chosen.device());
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->host();
}

int count_devices() { return num_devices(); }

at::Generator default_generator(c10::DeviceIndex index) { return hooks.getDefaultGenerator(index); }

void register_hooks() { at::RegisterPrivateUse1HooksInterface(&hooks); }

}  // namespace simulated
