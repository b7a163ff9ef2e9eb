// Twins of a family as a table: a row is a control whose witness is its contract and `words`.
#pragma once
#include <memory>
#include <span>

#include "oracle/registry.hpp"

namespace shardproof::controls {

struct Row {
  const char *contract, *name;
  std::unique_ptr<Kernel> (*make)();
  const char *check, *silent, *imitates, *words, *makes_visible;
  bool alone = false;
};

template <class Twin>
std::unique_ptr<Kernel> twin() {
  return std::make_unique<Twin>();
}

// The control of a row.
Control control_of(const Row&);
void add(Registry&, std::span<const Row>);

}  // namespace shardproof::controls
