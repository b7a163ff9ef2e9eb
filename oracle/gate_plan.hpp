// What planning a gate and running it share.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "oracle/gate.hpp"

namespace shardproof {

// A transport and where the tensors live.
using Place = std::pair<std::string, std::string>;

// A contract that contradicts its own lines: "" where it refuses what it has to, and nothing else.
std::string contradiction(const Contract&, const Case&, bool due_to_refuse);
// Whether the options' rank counts and dtypes leave the line.
bool within(const Options&, const Case&);
// Parts between separators, without the spaces around them; empty ones are left out.
std::vector<std::string> trimmed_words(const std::string&, char separator);

}  // namespace shardproof
