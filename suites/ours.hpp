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
template <class Primitive>
void add_ours(Registry& registry, const std::string& contract, const Declared& declared = {}) {
  add_ours_on_host<Primitive>(registry, contract, declared);
  add_ours_on_device(registry, contract, declared);
}

}  // namespace shardproof
