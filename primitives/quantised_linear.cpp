#include "primitives/quantised_linear.hpp"

#include <algorithm>
#include <string>

#include "primitives/line.hpp"

namespace shardproof::primitives {
namespace {

bool is_row(const Case& line) { return line.text("parallel") == "row"; }
bool high(const Case& line) { return line.text("wgrad") == "high"; }

// What a linear does between its product and its results.
struct Column : ColumnParallel {
  using ColumnParallel::reduce_input_gradient;
};
struct Row : RowParallel {
  using RowParallel::bias_gradient;
  using RowParallel::reduce_and_add_bias;
};

View gathered_as_it_is(Parallel& p, const View& own) {
  const View whole = p.workspace(own.dtype, with_extent(own.shape, 0, own.shape[0] * p.tp.size()));
  all_gather(p.rank, p.tp, own, whole, 0);
  return whole;
}

bool has_history(const Case& line) { return line.at("history") > 0; }

bool in_squares(const Case& line) { return line.text("weight_block") == "square"; }

// The last dim first.
View turned_view(View v) {
  std::rotate(v.shape.begin(), v.shape.end() - 1, v.shape.end());
  std::rotate(v.strides.begin(), v.strides.end() - 1, v.strides.end());
  return v;
}

// Squares of a matrix one behind the other.
View squares_view(View v, int64_t side) {
  const int64_t rows = v.shape[0], columns = v.shape[1], down = v.strides[0], along = v.strides[1];
  v.shape = {rows / side, columns / side, side, side};
  v.strides = {side * down, side * along, down, along};
  return v;
}

Refusal histories(const Case& line) {
  if (!has_history(line)) return std::nullopt;
  const int64_t others = int64_t(line.ranks(Axis::dp)) * line.ranks(Axis::cp);
  return first_refusal(when(line.at("block") > 0 || line.text("amax") == "shard",
                            "one scale of a tensor with history",
                            said(line, "block") + " " + said(line, "amax"), "leave the other out"),
                       when(others > 1 && line.text("over") == "tp", "over=all with history",
                            said(line, "over"), "all ranks of dp and cp have one history"));
}

Refusal blocks(const Case& line) {
  const int64_t block = line.at("block"), p = line.ranks(Axis::tp);
  if (block == 0)
    return when(in_squares(line), "block with weight_block=square", "block=0",
                "say how long a side is");
  const int64_t tokens = line.at("tokens") / (int64_t(line.ranks(Axis::dp)) * line.ranks(Axis::cp)),
                own = tokens / (line.on("sp") ? p : 1);
  const auto cut = [&](const char* what, int64_t extent) {
    return when(extent % block != 0, "block of a divisor of " + std::string(what),
                said(line, "block") + ", " + std::to_string(extent) + " of them",
                "a block lies on one rank");
  };
  return first_refusal(
      cut("the own tokens", own),
      cut("the own columns of x", line.at("in") / (is_row(line) ? p : 1)),
      cut("the own columns of y", line.at("out") / (is_row(line) ? 1 : p)),
      when(line.text("over") == "all" || line.text("amax") == "shard",
           "over=tp and amax=tensor with block", said(line, "over") + " " + said(line, "amax"),
           "no amax of a block is reduced: leave them out"));
}

}  // namespace

std::optional<Rejected> refused_quantised_linear(const Case& line) {
  const int64_t p = line.ranks(Axis::tp);
  return first_refusal(other_axes(line), uncut_tokens(line),
                       undivided(line, is_row(line) ? "in" : "out", p, "tp"), histories(line),
                       blocks(line), countable(line, {"tokens", "in"}),
                       countable(line, {"tokens", "out"}), countable(line, {"in", "out"}));
}

Recipe QuantisedLinear::recipe(const Case& line, Of of) const {
  Recipe r(line, of == Of::g ? format_of(line, "grad_format") : e4m3);
  if (of == Of::w && in_squares(line)) r.block *= r.block;
  return r;
}

// With wgrad=high a row linear needs G as it came, and gathers that alone.
bool QuantisedLinear::gathered(const Case& line, Of of) const {
  if (!line.on("sp") || line.ranks(Axis::tp) == 1) return false;
  return is_row(line) ? of == Of::g && !high(line) : of == Of::x;
}

std::vector<Axis> QuantisedLinear::reduced_over(const Case& line, Of of) const {
  const bool cut = of == Of::w || (of == Of::x) == is_row(line),
             own_scale = line.text("amax") == "shard";
  std::vector<Axis> axes;
  if (gathered(line, of) || (cut && !own_scale)) axes.push_back(Axis::tp);
  if (of != Of::w && line.text("over") == "all") axes.insert(axes.end(), {Axis::cp, Axis::dp});
  std::erase_if(axes, [&](Axis axis) { return line.ranks(axis) == 1; });
  return axes;
}

void QuantisedLinear::own_amax(const Recipe& r, Of, const View& x, const View& amax) {
  greatest_of(r, x, amax);
}

void QuantisedLinear::reduce_amax(Rank& rank, Of, const std::vector<Axis>& axes, const View& own,
                                  const View& all) {
  all_reduce(rank, rank.along(axes), own, all, Reduce::max);
}

View QuantisedLinear::amax_of(Rank& rank, const Recipe& r, Of of, const View& x) {
  const View own = rank.workspace(r.type, {r.scales(x.elements())});
  own_amax(r, of, x, own);
  const auto axes = reduced_over(rank.line(), of);
  if (!r.one_scale() || axes.empty()) return own;
  const View all = rank.workspace(r.type, own.shape);
  reduce_amax(rank, of, axes, own, all);
  return all;
}

View QuantisedLinear::amax_of_history(Rank& rank, const Recipe& r, Of, const View& history) {
  const View most = rank.workspace(r.type, {1});
  greatest_of(r, history, most);
  return most;
}

void QuantisedLinear::roll(Of, const View& history, const View& amax, const View& next) {
  roll_history(history, amax, next);
}

void QuantisedLinear::scales_of(const Recipe& r, Of, const View& amax, const View& scales) {
  scales_from(r, amax, scales);
}

void QuantisedLinear::quantise(Rank&, const Recipe& r, Of, const View& x, const View& scales,
                               const View& words) {
  codes_from(r, x, scales, words);
}

void QuantisedLinear::dequantise(Rank&, const Recipe& r, Of, const View& words, const View& scales,
                                 const View& y) {
  values_from(r, words, scales, y.elements(), y);
}

void QuantisedLinear::gather_codes(Rank& rank, Of, const View& own, const View& all) {
  all_gather(rank, rank.along(Axis::tp), own, all, 0);
}
void QuantisedLinear::gather_scales(Rank& rank, Of, const View& own, const View& all) {
  all_gather(rank, rank.along(Axis::tp), own, all, 0);
}

// The order in which groups of elements that share a scale follow one another.
View QuantisedLinear::in_order(const Case& line, Of of, const View& x, bool turned) const {
  if (of == Of::w && in_squares(line)) return squares_view(x, line.at("block"));
  return turned ? turned_view(x) : x;
}

QuantisedLinear::Codes QuantisedLinear::codes(Rank& rank, Of of, const View& x, bool turned) {
  const Recipe r = recipe(rank.line(), of);
  const View read = in_order(rank.line(), of, x, turned);
  View amax = amax_of(rank, r, of, read);
  if (const auto& [history, next] = histories_[size_t(of)]; history.data) {
    roll(of, history, amax, next);
    amax = amax_of_history(rank, r, of, history);
  }
  Codes c{Kept(DType::i32, {words_of(x.elements())}), Kept(r.type, amax.shape), x.shape, turned};
  scales_of(r, of, amax, c.scales.view());
  quantise(rank, r, of, read, c.scales.view(), c.words.view());
  return c;
}

// Under wgrad=high the second copy of X and G has no reader; squares of W are those of its
// transpose.
QuantisedLinear::Copies QuantisedLinear::copies(Rank& rank, Of of, const View& x) {
  Copies c{codes(rank, of, x, false), {}};
  const bool read = of == Of::w ? !in_squares(rank.line()) : !high(rank.line());
  if (!recipe(rank.line(), of).one_scale() && read) c.across = codes(rank, of, x, true);
  return c;
}

View QuantisedLinear::values(Parallel& p, Of of, const Codes& c) {
  const Recipe r = recipe(p.rank.line(), of);
  View words = c.words.view(), scales = c.scales.view();
  const int64_t ranks = gathered(p.rank.line(), of) ? p.tp.size() : 1, rows = c.shape[0],
                own_words = words.elements(), own_scales = scales.elements();
  if (ranks > 1) {
    words = p.workspace(words.dtype, {ranks * own_words});
    gather_codes(p.rank, of, c.words.view(), words);
    if (!r.one_scale()) {
      scales = p.workspace(scales.dtype, {ranks * own_scales});
      gather_scales(p.rank, of, c.scales.view(), scales);
    }
  }
  const View y = p.workspace(p.accumulate, with_extent(c.shape, 0, ranks * rows));
  for (int64_t i = 0; i < ranks; ++i) {
    const View block = y.narrow(0, i * rows, rows);
    dequantise(p.rank, r, of, words.narrow(0, i * own_words, own_words),
               r.one_scale() ? scales : scales.narrow(0, i * own_scales, own_scales),
               in_order(p.rank.line(), of, block, c.turned));
  }
  return y;
}

void QuantisedLinear::multiply(Parallel& p, const Factor& a, const Factor& b, const View& c,
                               const View& bias) {
  gemm(a, b, c, p.accumulate, &bias);
}

void QuantisedLinear::output(Parallel& p, const View& x, const View& w, const View& b,
                             const View& y) {
  if (!is_row(p.rank.line())) return multiply(p, plain(x), turned(w), y, b);
  const View z = p.workspace(p.partial(), with_extent(x.shape, last(x), w.shape[0]));
  multiply(p, plain(x), turned(w), z);
  reduce_output(p, z, b, y);
}

void QuantisedLinear::reduce_output(Parallel& p, const View& z, const View& b, const View& y) {
  Row().reduce_and_add_bias(p, z, b, y);
}

// inputs x, w, [b] and, with history=, those of x, w and g; outputs y and the next ones of x and w.
std::unique_ptr<Saved> QuantisedLinear::forward(Rank& rank, std::span<const View> inputs,
                                                std::span<const View> outputs) {
  if (auto refused = refused_quantised_linear(rank.line())) throw *refused;
  Parallel p(rank);
  auto state = std::make_unique<State>();
  state->given = inputs[0];
  std::fill(std::begin(histories_), std::end(histories_), History{});
  if (const size_t n = inputs.size(); has_history(rank.line())) {
    histories_[size_t(Of::x)] = {inputs[n - 3], outputs[1]};
    histories_[size_t(Of::w)] = {inputs[n - 2], outputs[2]};
    state->g_history = inputs[n - 1];
  }
  state->x = copies(rank, Of::x, inputs[0]);
  state->w = copies(rank, Of::w, inputs[1]);
  output(p, values(p, Of::x, state->x.along), values(p, Of::w, state->w.along),
         rank.line().on("bias") ? inputs[2] : View{}, outputs[0]);
  return state;
}

void QuantisedLinear::input_gradient(Parallel& p, const View& g, const View& w, const View& dx) {
  if (is_row(p.rank.line())) return multiply(p, plain(g), plain(w), dx);
  const View partial = p.workspace(p.partial(), with_extent(g.shape, last(g), w.shape[1]));
  multiply(p, plain(g), plain(w), partial);
  reduce_input_gradient(p, partial, dx);
}

void QuantisedLinear::reduce_input_gradient(Parallel& p, const View& partial, const View& dx) {
  Column().reduce_input_gradient(p, partial, dx);
}

void QuantisedLinear::weight_gradient(Parallel& p, State& state, const View& g, const View& dw) {
  multiply(p, turned(g), plain(weight_gradient_input(p, state)), dw);
}

View QuantisedLinear::weight_gradient_input(Parallel& p, State& state) {
  if (!high(p.rank.line())) return values(p, Of::x, state.x.over_first());
  return p.sp && p.tp.size() > 1 && !is_row(p.rank.line()) ? gathered_as_it_is(p, state.given)
                                                           : state.given;
}

void QuantisedLinear::bias_gradient(Parallel& p, const View& g, const View& db) {
  if (is_row(p.rank.line()))
    Row().bias_gradient(p, g, g, db);
  else
    column_sums(g, db, p.accumulate);
}

void QuantisedLinear::gradients_of(Parallel& p, State& state, const View& g,
                                   std::span<const View> gradients) {
  const Case& line = p.rank.line();
  const bool gathers = p.sp && p.tp.size() > 1 && is_row(line) && high(line);
  const View read = gathers ? gathered_as_it_is(p, g) : g;
  const Copies coded = copies(p.rank, Of::g, read);
  const View along = values(p, Of::g, coded.along);
  const View across = high(line)                   ? read
                      : coded.across.shape.empty() ? along
                                                   : values(p, Of::g, coded.across);
  weight_gradient(p, state, across, gradients[1]);
  if (gradients.size() > 2) bias_gradient(p, g, gradients[2]);
  input_gradient(p, along, values(p, Of::w, state.w.over_first()), gradients[0]);
}

void QuantisedLinear::backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                               std::span<const View> gradients) {
  Parallel p(rank);
  auto& state = static_cast<State&>(saved);
  histories_[size_t(Of::g)] = {state.g_history, gradients.back()};
  into_running_sums(
      p, gradients.first(rank.line().on("bias") ? 3 : 2),
      [&](auto own) { gradients_of(p, state, cotangents[0], own); }, add_into);
}

}  // namespace shardproof::primitives
