// What contracts of tokens and their labels have in common.
#pragma once
#include <vector>

#include "oracle/contract.hpp"
#include "reference/linear.hpp"

namespace shardproof::vocab {

// One a token, the same on every rank of tp.
std::vector<int64_t> shape_of_tokens(const Case&);
// Below vocab, in the type of the line.
Operand ids_of(const Case&, const char* name);
// The same, of which one in `ignored` is -100.
Operand labels_of(const Case&);

Key index_key(const char* what);
Key ignored_key();

std::vector<int64_t> integers(const Whole&);

}  // namespace shardproof::vocab
