// K: does anything of one sequence reach another, or of padding any?
//
// Each sequence in turn is made loud, inputs and cotangents times 2^36 (f16: 2^6), and all results
// of the others have to keep their bits: a mask that adds -1e4, or -1e9, to foreign scores is right
// on quiet data only. Padding in turn is filled with NaN. NaN in a sequence would flag kernels that
// multiply a masked probability by it, since 0 NaN is NaN; loud finite numbers do not. What passes
// a map as it is drawn (a decay) stays in the map's range: it is that of -2^36 times itself.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/pairing.hpp"

namespace shardproof {
namespace {

constexpr int64_t padding = -1;

bool has_tokens(const Operand& o) { return o.role == Operand::input || o.role == Operand::output; }

// Of all operands: a document may have queries and no keys.
std::set<int64_t> all_sequences(const Contract& c, const Case& line,
                                const std::vector<Operand>& operands) {
  std::set<int64_t> all;
  for (const Operand& o : operands)
    if (has_tokens(o))
      for (int64_t sequence : c.sequences(line, o)) all.insert(sequence);
  return all;
}

bool due(const Contract& c, const Case& line, const Declared&) {
  return c.sequences != nullptr && all_sequences(c, line, c.operands(line)).size() > 1;
}

std::string shot_of(int64_t sequence) {
  return "leak:" + (sequence == padding ? std::string("padding") : std::to_string(sequence));
}

// Tokens are the leading dims: an element's token is its place divided by the elements of a token.
int64_t elements_of_token(const Operand& o, const std::vector<int64_t>& sequences) {
  return product(o.shape) / int64_t(sequences.size());
}

double made_loud(const Evidence& e, const Operand& o, const Feed& feed, bool cotangent, double x) {
  const double loud = std::ldexp(1, judging::binary_orders_of_loud(*e.line));
  if (!o.through || cotangent) return x * loud;
  return round_to(o.through(-loud * x, feed.fill == Fill::integers), e.dtype_of(o));
}

std::vector<double> disturbed(const Evidence& e, int operand, const Feed& feed, bool cotangent,
                              int64_t sequence) {
  const Operand& o = e.operands[size_t(operand)];
  const auto sequences = e.contract->sequences(*e.line, o);
  auto value = filled(e, feed, operand, cotangent);
  const int64_t row = elements_of_token(o, sequences);
  for (size_t i = 0; i < value.size(); ++i) {
    if (sequences[size_t(int64_t(i) / row) % sequences.size()] != sequence) continue;
    value[i] = sequence == padding ? std::numeric_limits<double>::quiet_NaN()
                                   : made_loud(e, o, feed, cotangent, value[i]);
  }
  return value;
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  for (int64_t sequence : all_sequences(*e.contract, *e.line, e.operands)) {
    Shot s = shots.at(0);
    s.name = shot_of(sequence);
    Feed& feed = s.feeds.at(0);
    const Feed base = feed;
    for (int i = 0; i < int(e.operands.size()); ++i) {
      const Operand& o = e.operands[size_t(i)];
      const bool output = i >= e.inputs;
      if (!has_tokens(o) || (output && !o.gradient)) continue;
      feed.given.push_back({i, disturbed(e, i, base, output, sequence)});
    }
    shots.push_back(std::move(s));
  }
}

struct Reach {
  int64_t compared = 0;
  std::optional<Finding> first;
  double ratio = 0;
};

Finding reached(const Evidence& e, const ResultTensor& t, int rank, int64_t at, double got,
                double want, int64_t from, int64_t to) {
  const Operand& o = e.operands[size_t(t.operand)];
  const Layout layout = judging::result_layout(o, t.gradient);
  Finding f;
  f.tensor = judging::tensor_name(o, t.gradient);
  f.where = index_text(o.name, at, o.shape, layout, e.mesh, /*denoted=*/false);
  f.index = judging::coordinates(at, whole_shape(o.shape, layout, e.mesh));
  f.rank = rank;
  f.ranks = {rank};
  f.numeric = true;
  f.got = got, f.want = want;
  f.error =
      std::isfinite(got - want) ? std::abs(got - want) : std::numeric_limits<double>::infinity();
  f.ratio = std::numeric_limits<double>::infinity();
  const std::string changed = from == padding ? "padding was filled with NaN"
                                              : fmt::format("sequence {} was made loud", from);
  f.message = fmt::format(
      "{} changed when {}",
      to == padding ? std::string("a row of padding") : fmt::format("a row of sequence {}", to),
      changed);
  f.means =
      "one sequence is read by another: what is foreign (a key, a state, a neighbour's row) has to "
      "be left out, not made small";
  return f;
}

// Results of one tensor on one rank in the disturbed shot against those of the base shot.
void compare_tensor(const Evidence& e, const ResultTensor& want, const ResultTensor& got, int rank,
                    int64_t sequence, Reach& reach) {
  const Operand& o = e.operands[size_t(want.operand)];
  const auto sequences = e.contract->sequences(*e.line, o);
  const Layout layout = judging::result_layout(o, want.gradient);
  const auto indices = whole_indices(o.shape, layout, e.mesh, rank);
  const int64_t row = elements_of_token(o, sequences);
  const size_t width = size_of(want.dtype);
  std::vector<double> g, w;
  judging::read(got, g);
  judging::read(want, w);
  std::function<double(int64_t)> bound;
  if (!e.declared.leak_bitwise) {
    const Feed& feed = e.shots[0].feeds[0];
    const Truth& truth = e.truth(feed);
    const size_t k = size_t(want.gradient ? want.operand : want.operand - e.inputs);
    bound =
        bound_of(e, feed, o, want.gradient, (want.gradient ? truth.gradients : truth.outputs)[k],
                 judging::gauge_of(want.gradient ? truth.gradient_gauges : truth.output_gauges, k));
  }
  for (size_t i = 0; i < indices.size() && i < g.size(); ++i) {
    const int64_t to = sequences[size_t(indices[i] / row) % sequences.size()];
    if (to == sequence) continue;
    ++reach.compared;
    const bool same = std::equal(want.bytes.begin() + int64_t(i * width),
                                 want.bytes.begin() + int64_t((i + 1) * width),
                                 got.bytes.begin() + int64_t(i * width));
    if (same) continue;
    // Both runs may err by their bound.
    if (bound && std::abs(g[i] - w[i]) <= 2 * bound(indices[i])) {
      reach.ratio = std::max(reach.ratio, std::abs(g[i] - w[i]) / (2 * bound(indices[i])));
      continue;
    }
    if (!reach.first) reach.first = reached(e, want, rank, indices[i], g[i], w[i], sequence, to);
    ++reach.first->wrong;
    if (reach.first->ranks.back() != rank) reach.first->ranks.push_back(rank);
  }
}

CheckResult judge(const Evidence& e) {
  if (auto f = judging::incomplete(e, "base")) return judging::conclude("leak", 0, {*f});
  std::vector<Finding> findings;
  Reach all;
  for (int64_t sequence : all_sequences(*e.contract, *e.line, e.operands)) {
    const int shot = e.find_shot(shot_of(sequence));
    if (auto f = judging::incomplete(e, shot_of(sequence)))
      return judging::conclude("leak", 0, {*f});
    Reach reach;
    for (int r = 0; r < e.mesh.world(); ++r)
      for (const ResultTensor& want : e.record(r, 0).results) {
        if (!has_tokens(e.operands[size_t(want.operand)])) continue;
        const ResultTensor* got = e.result(r, shot, want.step, want.operand, want.gradient);
        if (got && got->bytes.size() == want.bytes.size())
          compare_tensor(e, want, *got, r, sequence, reach);
      }
    all.compared += reach.compared;
    all.ratio = std::max(all.ratio, reach.ratio);
    if (!reach.first) continue;
    reach.first->compared = reach.compared;
    findings.push_back(std::move(*reach.first));
  }
  std::string note;
  if (!e.declared.leak_bitwise)
    note = "compared within the bound, as declared; worst ratio " + judging::number(all.ratio);
  CheckResult result =
      judging::conclude("leak", all.compared, std::move(findings), std::move(note));
  result.exact = e.declared.leak_bitwise;
  result.ratio = std::max(result.ratio, all.ratio);
  return result;
}

}  // namespace

int judging::binary_orders_of_loud(const Case& line) { return line.dtype() == DType::f16 ? 6 : 36; }

Check leak_check() {
  return {.name = "leak",
          .letter = 'K',
          .asks = "does anything of one sequence reach another, or of padding any",
          .due = due,
          .plan = plan,
          .judge = judge};
}

}  // namespace shardproof
