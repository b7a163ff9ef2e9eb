#include "primitives/vocab_line.hpp"

#include "primitives/line.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_embedding(const Case& line) {
  return first_refusal(other_axes(line), uncut_tokens(line),
                       undivided(line, "padded_vocab", line.ranks(Axis::tp), "tp"),
                       when(line.at("padded_vocab") < line.at("vocab"), "padded_vocab >= vocab",
                            said(line, "padded_vocab") + " " + said(line, "vocab"),
                            "rows beyond vocab are padding: leave padded_vocab out for none"),
                       countable(line, {"tokens", "hidden"}));
}

std::optional<Rejected> refused_vocab_loss(const Case& line) {
  return first_refusal(other_axes(line), uncut_tokens(line),
                       undivided(line, "vocab", line.ranks(Axis::tp), "tp"));
}

std::optional<Rejected> refused_log_probs(const Case& line) {
  return first_refusal(refused_vocab_loss(line),
                       when(line.at("masked") == 1, "masked=0 or 2 and more", said(line, "masked"),
                            "with every class masked none is left to choose"));
}

double smoothing_of(const Case& line, int64_t classes) {
  const double alpha = number_of(line, "label_smoothing");
  if (line.text("smoothing") == "all") return alpha;
  return alpha * double(classes) / double(classes - 1);
}

}  // namespace shardproof::primitives
