#include "primitives/rotary_context.hpp"

#include "primitives/rotary_pairs.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
std::optional<Rejected> refused_rotary(const Case& line) {
  if (auto refused = refused_context(line)) return refused;
  const int64_t d = line.at("head_dim"), n = line.at("heads"), tp = line.ranks(Axis::tp);
  if (d % 2) return Rejected("an even head_dim", std::to_string(d), "features are turned in pairs");
  if (n % tp)
    return Rejected("heads divisible by tp = " + std::to_string(tp), std::to_string(n),
                    "choose a multiple");
  const ContextLine c(line);
  return countable(whole_operand, {c.rows, c.batch, line.ranks(Axis::dp), n, d});
}

void turn(const View& x, const std::vector<int64_t>& positions, double base, int sense, bool single,
          const View& y) {
  const int64_t dim = x.shape.back(), heads = x.shape[x.shape.size() - 2];
  const Kept places = uploaded(positions);
  perform(
      RotaryPairs{tensor(x), tensor(places.view()), tensor(y), heads, dim, base, sense, !single},
      "a rotation");
}

std::vector<int64_t> RotaryContext::positions(const ContextLine& c, int r) const {
  std::vector<int64_t> list;
  for (const Label& label : local_labels(
           c, c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c), r))
    list.push_back(label.position);
  return list;
}

std::unique_ptr<Saved> RotaryContext::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_rotary(line)) throw *refused;
  turn(inputs[0], positions(ContextLine(line), rank.coordinate(Axis::cp)),
       number_of(line, "base", 10000), 1, in_single(line), outputs[0]);
  return std::make_unique<Saved>();
}

void RotaryContext::backward(Rank& rank, Saved&, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  const Case& line = rank.line();
  turn(cotangents[0], positions(ContextLine(line), rank.coordinate(Axis::cp)),
       number_of(line, "base", 10000), -1, in_single(line), gradients[0]);
}

}  // namespace shardproof::primitives
