#include "primitives/controls/table.hpp"

#include <string>

namespace shardproof::controls {

Control control_of(const Row& row) {
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
  return c;
}

void add(Registry& registry, std::span<const Row> rows) {
  for (const Row& row : rows) registry.add(control_of(row));
}

}  // namespace shardproof::controls
