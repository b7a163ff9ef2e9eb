// What the vocabulary-parallel primitives ask of a line.
#pragma once
#include <optional>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_embedding(const Case&);
std::optional<Rejected> refused_vocab_loss(const Case&);
std::optional<Rejected> refused_log_probs(const Case&);

// Of logits [.., V/p] of a rank.
inline int64_t own_classes(const View& logits) { return logits.shape.back(); }
inline int64_t first_class(const Communicator& tp, const View& logits) {
  return tp.rank() * own_classes(logits);
}

// s of the smoothed loss: alpha, or alpha V/(V-1) where alpha is what leaves the label.
double smoothing_of(const Case&, int64_t classes);

}  // namespace shardproof::primitives
