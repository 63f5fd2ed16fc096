// The Python module: devices, counters, and collectives on device memory by a group of the CPU.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "memory.h"

namespace simulated {

int count_devices();
at::Generator default_generator(c10::DeviceIndex index);
int64_t num_kernels();
void register_hooks();

namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A collective that has ended before its call returns.
class FinishedWork final : public c10d::Work {
 public:
  explicit FinishedWork(Tensors results) : results_(std::move(results)) { finish(); }

  Tensors result() override { return results_; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Tensors results_;
};

// Device tensors as tensors of the CPU, for the duration of a collective.
class Host {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kDevice,
                "the group communicates tensors of the simulated device only, but one is on ",
                tensor.device());
    return access_.alias(tensor);
  }
  Tensors operator()(const Tensors& tensors) {
    Tensors host;
    for (const auto& tensor : tensors) {
      host.push_back((*this)(tensor));
    }
    return host;
  }
  TensorLists operator()(const TensorLists& lists) {
    TensorLists host;
    for (const auto& tensors : lists) {
      host.push_back((*this)(tensors));
    }
    return host;
  }

 private:
  Access access_;
};

WorkPtr finish(const WorkPtr& work, Tensors results) {
  work->wait();
  return c10::make_intrusive<FinishedWork>(std::move(results));
}

Tensors flatten(const TensorLists& lists) {
  Tensors all;
  for (const auto& tensors : lists) {
    all.insert(all.end(), tensors.begin(), tensors.end());
  }
  return all;
}

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void abort() override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Host host;
    auto values = host(tensors);
    return finish(inner_->broadcast(values, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Host host;
    auto values = host(tensors);
    return finish(inner_->allreduce(values, options), tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    Host host;
    auto values = host(tensors);
    return finish(inner_->allreduce_coalesced(values, options), tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Host host;
    auto values = host(tensors);
    return finish(inner_->reduce(values, options), tensors);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    Host host;
    auto results = host(outputs);
    auto values = host(inputs);
    return finish(inner_->allgather(results, values, options), flatten(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Host host;
    auto result = host(output);
    auto value = host(input);
    return finish(inner_->_allgather_base(result, value, options), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    Host host;
    auto results = host(outputs);
    auto values = host(inputs);
    return finish(inner_->allgather_into_tensor_coalesced(results, values, options), outputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Host host;
    auto results = host(outputs);
    auto values = host(inputs);
    return finish(inner_->gather(results, values, options), flatten(outputs));
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    Host host;
    auto results = host(outputs);
    auto values = host(inputs);
    return finish(inner_->scatter(results, values, options), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Host host;
    auto results = host(outputs);
    auto values = host(inputs);
    return finish(inner_->reduce_scatter(results, values, options), outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Host host;
    auto result = host(output);
    auto value = host(input);
    return finish(inner_->_reduce_scatter_base(result, value, options), {output});
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    Host host;
    auto result = host(output);
    auto value = host(input);
    return finish(inner_->alltoall_base(result, value, output_sizes, input_sizes, options), {output});
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    Host host;
    auto values = host(tensors);
    return finish(inner_->send(values, target, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    Host host;
    auto values = host(tensors);
    return finish(inner_->recv(values, source, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return finish(inner_->barrier(options), {});
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
};

}  // namespace

PYBIND11_MODULE(_simulated, module) {
  register_hooks();
  module.def("device_count", &count_devices);
  module.def("default_generator", &default_generator);
  module.def("num_kernels", &num_kernels);
  module.def(
      "wrap_group",
      [](const c10::intrusive_ptr<c10d::Backend>& inner) {
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(inner));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace simulated
