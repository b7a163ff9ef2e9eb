// Our implementation of a contract, on the host and, made by the module of devices, on a device.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "oracle/device.hpp"
#include "oracle/registry.hpp"

namespace shardproof {

template <class Primitive>
void add_ours_on_host(Registry& registry, const std::string& contract, Declared declared = {}) {
  registry.add(
      Subject{"", contract, [] { return std::make_unique<Primitive>(); }, std::move(declared)});
}
// The same contract with products in TF32, which is due where `subject=cuda_tf32` says so.
inline void add_ours_in_tf32(Registry& registry, const std::string& contract) {
  Declared declared;
  declared.storage = {DType::f32};
  declared.multiplies_in_tf32 = true;
  registry.add(Subject{tf32_subject, contract,
                       [contract] { return make_device_kernel(contract, "", tf32_subject); },
                       std::move(declared)});
}
template <class Primitive>
void add_ours(Registry& registry, const std::string& contract, const Declared& declared = {}) {
  add_ours_on_host<Primitive>(registry, contract, declared);
  add_ours_on_device(registry, contract, declared);
}

}  // namespace shardproof
