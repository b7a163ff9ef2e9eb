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

// Rows of one contract: `constexpr RowsOf of{"muon_step"};`.
struct RowsOf {
  const char* contract;
  constexpr Row operator()(const char* name, std::unique_ptr<Kernel> (*make)(), const char* check,
                           const char* silent, const char* imitates, const char* words,
                           const char* makes_visible) const {
    return {contract, name, make, check, silent, imitates, words, makes_visible};
  }
};

template <class Twin>
std::unique_ptr<Kernel> twin() {
  return std::make_unique<Twin>();
}

// The control of a row.
Control control_of(const Row&);
void add(Registry&, std::span<const Row>);

}  // namespace shardproof::controls
