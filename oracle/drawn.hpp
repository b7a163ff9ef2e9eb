// Values of an operand, or of its cotangent, that a feed neither gives nor makes a basis vector of:
// what the line states, else what its fill draws. Ranks draw their shards, the parent the whole.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "oracle/job.hpp"

namespace shardproof {

// The random stream of its values.
std::string stream_of(const Operand&, bool cotangent);

// Dims along which strides=expanded shows one value at stride 0: all of a cotangent, as the
// backward of a sum hands it on; strides=expanded_inputs: the last but one of an input, as an
// expand over tokens, heads or a batch leaves it.
std::vector<int> expanded_dims(const Case&, const Operand&, bool cotangent);
bool expands(const Case&);

bool is_drawn(const Feed&, int operand);

struct Drawing {
  const Case& line;
  const Operand& operand;
  bool cotangent;
  const Feed& feed;
  DType dtype;
  std::span<const int64_t> whole_shape;  // stack, then dims
};
std::vector<double> drawn_at(const Drawing&, std::span<const int64_t> indices);
std::vector<double> drawn_whole(const Drawing&);

}  // namespace shardproof
