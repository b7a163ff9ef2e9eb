#include "primitives/controls/table.hpp"

#include <string>

namespace shardproof::controls {

void add(Registry& registry, std::span<const Row> rows) {
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
