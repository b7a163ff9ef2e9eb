// Linears around a broken part.
#pragma once
#include <memory>

#include "primitives/linear.hpp"

namespace shardproof::controls {

template <class Part>
std::unique_ptr<Kernel> column_with() {
  return std::make_unique<primitives::LinearColumn>(std::make_unique<Part>());
}
template <class Part>
std::unique_ptr<Kernel> row_with() {
  return std::make_unique<primitives::LinearRow>(std::make_unique<Part>());
}

}  // namespace shardproof::controls
