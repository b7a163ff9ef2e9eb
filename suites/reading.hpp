// How contracts read a line: by themselves. A reading that they shared with the kernels under test
// would be wrong in truth, traffic and kernel alike, and nobody would see it.
#pragma once
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oracle/case.hpp"

namespace shardproof::reading {

inline constexpr double norm_eps = 1e-5;

// A decimal with a point, whatever the locale of the process; none where the text is anything else.
inline std::optional<double> decimal(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool all = error == std::errc() && end == text.data() + text.size();
  return all && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

// "0.1", "1/8"; the fallback where the line leaves it empty or the contract has no such key.
inline double number(const Case& line, const char* key, double fallback = 0) {
  const std::string_view text = line.has(key) ? line.text(key) : std::string_view();
  const size_t bar = text.find('/');
  if (bar == std::string_view::npos) return decimal(text).value_or(fallback);
  return decimal(text.substr(0, bar)).value_or(0) / decimal(text.substr(bar + 1)).value_or(1);
}

inline double kept_share(const Case& line) { return 1 - number(line, "dropout"); }

// Of these axes, in this order, those that have ranks.
inline std::vector<Axis> with_ranks(const Case& line, std::initializer_list<Axis> axes) {
  std::vector<Axis> list;
  for (Axis axis : axes)
    if (line.ranks(axis) > 1) list.push_back(axis);
  return list;
}

// Axes of more than one rank over which a layer sums a gradient: tp where `over_tp`, cp and dp
// unless reduce=tp leaves these to the training step.
inline std::vector<Axis> summed_axes(const Case& line, bool over_tp) {
  const bool all = !line.has("reduce") || line.text("reduce") == "all";
  std::vector<Axis> axes;
  for (const auto& [axis, due] : {std::pair(Axis::tp, over_tp), {Axis::cp, all}, {Axis::dp, all}})
    if (due && line.ranks(axis) > 1) axes.push_back(axis);
  return axes;
}

// Of what meets the own tokens: over tp under sp.
inline std::vector<Axis> axes_of_tokens(const Case& line) {
  return summed_axes(line, line.on("sp"));
}

// Of key weights that ranks of tp share.
inline std::vector<Axis> axes_of_copies(const Case& line) {
  std::vector<Axis> axes{Axis::rep};
  for (Axis axis : summed_axes(line, false)) axes.push_back(axis);
  return axes;
}

// Of a block's replicated parameters; over dp and cp the training step sums.
inline std::vector<Axis> axes_of_block(const Case& line) {
  return line.on("sp") && line.ranks(Axis::tp) > 1 ? std::vector{Axis::tp} : std::vector<Axis>{};
}

// "tp,cp"
inline std::vector<Axis> axes_in(const Case& line, const char* key) {
  std::vector<Axis> axes;
  std::string_view rest = line.text(key);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    if (const auto axis = axis_from(rest.substr(0, comma))) axes.push_back(*axis);
    rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
  }
  return axes;
}

inline std::string label(const std::vector<Axis>& axes) {
  std::string text;
  for (Axis axis : axes) text += (text.empty() ? "" : ",") + std::string(name(axis));
  return text;
}

// Ranks of tp that hold the same key heads.
inline int64_t copies_of_keys(const Case& line) {
  return line.has("kv_replicas") ? line.at("kv_replicas") : 1;
}
// One weight, cut over all ranks, whose results are gathered.
inline bool gathers(const Case& line) { return line.text("form") == "gather"; }
// Query, key and value weights are operands of their own.
inline bool splits_weights(const Case& line) { return copies_of_keys(line) > 1 && !gathers(line); }

// Heads of a rank of tp, and rows of a weight that holds all of them.
struct OwnHeads {
  int64_t query, key, dim, rows;

  explicit OwnHeads(const Case& line)
      : query(line.at("heads") / line.ranks(Axis::tp)),
        key(line.at("kv_heads") * copies_of_keys(line) / line.ranks(Axis::tp)),
        dim(line.at("head_dim")),
        rows((line.at("heads") + 2 * line.at("kv_heads")) * dim) {}
};

}  // namespace shardproof::reading
