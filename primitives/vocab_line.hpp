// What the vocabulary-parallel primitives ask of a line.
#pragma once
#include <optional>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_embedding(const Case&);
std::optional<Rejected> refused_vocab_loss(const Case&);

// s of the smoothed loss: alpha, or alpha V/(V-1) where alpha is what leaves the label.
double smoothing_of(const Case&, int64_t classes);

}  // namespace shardproof::primitives
