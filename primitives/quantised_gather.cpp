#include "primitives/quantised_gather.hpp"

#include <string>
#include <string_view>

#include "primitives/line.hpp"

namespace shardproof::primitives {
namespace {

bool gathers(const Case& line) { return line.text("output") != "shard"; }

std::vector<Axis> axes_of(std::string_view words) {
  std::vector<Axis> axes;
  for (Axis axis : {Axis::tp, Axis::cp, Axis::dp})
    if (words.find(name(axis)) != std::string_view::npos) axes.push_back(axis);
  return axes;
}

View own_rows(Rank& rank, const View& whole, int64_t rows) {
  return whole.narrow(0, rank.along(Axis::tp).rank() * rows, rows);
}

}  // namespace

std::optional<Rejected> refused_quantised(const Case& line) {
  const std::string over = line.text("over"), wire = line.text("wire");
  int64_t cuts = 1;
  for (Axis axis : axes_of(over)) cuts *= line.ranks(axis);
  const int64_t block = line.at("block");
  return first_refusal(
      other_axes(line),
      when(line.ranks(Axis::tp) > 1 && over.find("tp") == std::string::npos,
           "tp among the axes of over=", "over=" + over,
           "one scale is due for all that is gathered"),
      undivided(line, "tokens", cuts, "the ranks of over=" + over),
      when(block > 0 && line.at("hidden") % block != 0, "block of a divisor of hidden",
           said(line, "block") + " " + said(line, "hidden"), "a block lies in one row"),
      when(block > 0 && line.at("history") > 0, "one scale for a tensor with history",
           said(line, "block") + " " + said(line, "history"), "leave one of them out"),
      when(line.on("fresh") && line.at("history") == 0, "history= with fresh=on", "history=0",
           "say how many steps it holds"),
      when(line.text("grad_format") != "none" && line.text("output") == "replicate",
           "grad_format with output=shard or invariant", "output=replicate",
           "a gradient that is still to be summed is not quantised"),
      when(!wire.empty() && wire != line.text("dtype"), "values that are sent as they are stored",
           "wire=" + wire, "leave wire= out"),
      when(line.at("zero_rows") == 1, "zero_rows=0, or of 2 and more", "zero_rows=1",
           "rows that are all zero show nothing"),
      countable(line, {"tokens", "hidden"}));
}

std::vector<Axis> QuantisedGather::reduced_over(const Case& line) const {
  std::vector<Axis> axes;
  for (Axis axis : axes_of(line.text("over")))
    if (line.ranks(axis) > 1) axes.push_back(axis);
  return axes;
}

void QuantisedGather::reduce_amax(Rank& rank, Communicator& group, const View& own,
                                  const View& all) {
  all_reduce(rank, group, own, all, Reduce::max);
}

void QuantisedGather::own_amax(const Recipe& r, const View& x, const View& amax) {
  greatest_of(r, x, amax);
}

View QuantisedGather::amax_of(Rank& rank, const Recipe& r, const View& x) {
  const int64_t n = x.elements();
  const View own = rank.workspace(r.type, {r.scales(n)});
  own_amax(r, x, own);
  const auto axes = reduced_over(rank.line());
  if (!r.one_scale() || axes.empty()) return own;
  const View all = rank.workspace(r.type, own.shape);
  reduce_amax(rank, rank.along(axes), own, all);
  return all;
}

View QuantisedGather::amax_of_history(Rank& rank, const Recipe& r, const View& history) {
  const View most = rank.workspace(r.type, {1});
  greatest_of(r, history, most);
  return most;
}

void QuantisedGather::roll(const View& history, const View& amax, const View& next) {
  roll_history(history, amax, next);
}

void QuantisedGather::scales_of(const Recipe& r, const View& amax, const View& scales) {
  scales_from(r, amax, scales);
}

void QuantisedGather::quantise(Rank&, const Recipe& r, const View& x, const View& scales,
                               const View& words) {
  codes_from(r, x, scales, words);
}

void QuantisedGather::dequantise(Rank&, const Recipe& r, const View& words, const View& scales,
                                 int64_t own, const View& y) {
  values_from(r, words, scales, own, y);
}

void QuantisedGather::gather_codes(Rank& rank, const View& own, const View& all) {
  all_gather(rank, rank.along(Axis::tp), own, all, 0);
}
void QuantisedGather::gather_scales(Rank& rank, const View& own, const View& all) {
  all_gather(rank, rank.along(Axis::tp), own, all, 0);
}

// inputs x [T/p,h] and, with history, [steps]; outputs y, scale and the next history.
std::unique_ptr<Saved> QuantisedGather::forward(Rank& rank, std::span<const View> inputs,
                                                std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_quantised(line)) throw *refused;
  const Recipe recipe(line, format_of(line, "format"));
  const View &x = inputs[0], &y = outputs[0];
  const int64_t n = x.elements();
  View amax = amax_of(rank, recipe, x);
  if (inputs.size() > 1) {
    roll(inputs[1], amax, outputs[2]);
    amax = amax_of_history(rank, recipe, inputs[1]);
  }
  View scales = rank.workspace(recipe.type, amax.shape),
       words = rank.workspace(DType::i32, {words_of(n)});
  scales_of(recipe, amax, scales);
  quantise(rank, recipe, x, scales, words);
  if (const int p = rank.along(Axis::tp).size(); gathers(line) && p > 1) {
    const View own = words, own_scales = scales;
    words = rank.workspace(DType::i32, {p * words_of(n)});
    gather_codes(rank, own, words);
    if (!recipe.one_scale()) {
      scales = rank.workspace(recipe.type, {p * own_scales.elements()});
      gather_scales(rank, own_scales, scales);
    }
  }
  dequantise(rank, recipe, words, scales, n, y);
  convert(scales, outputs[1]);
  return std::make_unique<Saved>();
}

void QuantisedGather::own_gradient(Rank& rank, const View& g, const View& dx) {
  Communicator& tp = rank.along(Axis::tp);
  const std::string& output = rank.line().text("output");
  if (output == "replicate" && tp.size() > 1)
    reduce_scatter(rank, tp, g, dx, 0);
  else
    convert(output == "invariant" ? own_rows(rank, g, dx.shape[0]) : g, dx);
}

void QuantisedGather::quantise_gradient(Rank& rank, const Recipe& recipe, const View& g,
                                        const View& dx) {
  const int64_t n = g.elements();
  const View amax = amax_of(rank, recipe, g), scales = rank.workspace(recipe.type, amax.shape),
             words = rank.workspace(DType::i32, {words_of(n)});
  scales_of(recipe, amax, scales);
  quantise(rank, recipe, g, scales, words);
  dequantise(rank, recipe, words, scales, n, dx);
}

void QuantisedGather::backward(Rank& rank, Saved&, std::span<const View> cotangents,
                               std::span<const View> gradients) {
  const Case& line = rank.line();
  const View& dx = gradients[0];
  if (line.text("grad_format") == "none") return own_gradient(rank, cotangents[0], dx);
  const View g = rank.workspace(dx.dtype, dx.shape);
  own_gradient(rank, cotangents[0], g);
  quantise_gradient(rank, Recipe(line, format_of(line, "grad_format")), g, dx);
}

}  // namespace shardproof::primitives
