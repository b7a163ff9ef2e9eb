// Twins of a family as a table: a row is a control whose witness is its contract and `words`.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "oracle/registry.hpp"

namespace shardproof::controls {

struct Row {
  const char *contract, *name;
  std::unique_ptr<Kernel> (*make)();
  const char *check, *silent, *imitates, *words, *makes_visible;
  bool alone = false, backward = true;
};

inline void add(Registry& registry, std::span<const Row> rows) {
  for (const Row& row : rows) {
    Control c;
    c.contract = row.contract;
    c.name = row.name;
    c.make = row.make;
    c.check = row.check;
    c.silent = row.silent;
    c.alone = row.alone;
    c.imitates = row.imitates;
    c.witness = std::string(row.contract) + " " + row.words;
    c.makes_visible = row.makes_visible;
    c.declared.backward = row.backward;
    registry.add(std::move(c));
  }
}

}  // namespace shardproof::controls
