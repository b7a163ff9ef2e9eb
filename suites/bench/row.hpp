// A line of the bench: a number, and what it is measured against.
#pragma once
#include <string>

namespace shardproof {

struct Row {
  std::string name, transport;
  int ranks;
  double value;
  std::string unit, against;
};

}  // namespace shardproof
