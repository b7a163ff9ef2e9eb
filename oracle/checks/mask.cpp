// P: does every query see exactly the keys that its mask shows it, also where scores are extreme?
//
// A mask that forward and backward share is self-consistent: no adjoint and no finite difference
// sees it. The probes of mask_probe.hpp read the mask itself, so that a finding names a query and a
// key. Then all scores are +c on the first half of the keys and -c on the others, e^c beyond the
// range of the accumulation type, which only a softmax that subtracts maxima survives.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "oracle/checks/judging.hpp"
#include "oracle/checks/mask_probe.hpp"

namespace shardproof {
namespace {

constexpr const char* opposed = "mask:opposed";

// Q = e_0 and K_j = +-c sqrt(dk) e_0: scores of +-c at the default scale.
void plan(const Evidence& e, std::vector<Shot>& shots) {
  judging::plan_mask_probe(e, shots);
  Shot s;
  s.name = opposed;
  s.program = "F0";
  s.feeds = {shots.at(0).feeds.at(0)};
  const double loud = e.line->dtype() == DType::f64 ? 800 : 100;
  for (int i = 0; i < e.inputs; ++i) {
    const Operand& o = e.operands[size_t(i)];
    if (o.name != "q" && o.name != "k") continue;
    const int64_t dim = o.shape.back(), n = product(o.shape);
    const double key = round_to(loud * std::sqrt(double(dim)), e.line->dtype());
    std::vector<double> value(static_cast<size_t>(n));
    for (int64_t at = 0; at < n; at += dim)
      value[size_t(at)] = o.name == "q" ? 1 : at < n / 2 ? key : -key;
    s.feeds[0].given.push_back({i, std::move(value)});
  }
  shots.push_back(std::move(s));
}

// By token of the operand of that name; empty where the contract tells none.
std::vector<int64_t> sequences_of(const Evidence& e, const std::string& operand) {
  for (const Operand& o : e.operands)
    if (o.name == operand && e.contract->sequences) return e.contract->sequences(*e.line, o);
  return {};
}

std::string sequence_text(const std::vector<int64_t>& sequences, int64_t token) {
  if (size_t(token) >= sequences.size()) return "";
  const int64_t s = sequences[size_t(token)];
  return s < 0 ? " (padding)" : fmt::format(" (sequence {})", s);
}

Finding found(const judging::SeenRow& row, std::string message, std::string means) {
  Finding f;
  f.tensor = "o";
  f.message = std::move(message);
  f.means = std::move(means);
  f.where = fmt::format("query {}, head {}", row.query, row.head);
  f.index = {row.query, row.head};
  f.rank = row.rank;
  f.ranks = {row.rank};
  f.ratio = std::numeric_limits<double>::infinity();
  f.wrong = 1;
  return f;
}

// What is wrong with a row; empty where nothing is.
std::optional<Finding> wrong_row(const judging::SeenRow& row, const std::vector<uint8_t>& visible,
                                 const std::vector<int64_t>& of_queries,
                                 const std::vector<int64_t>& of_keys) {
  if (!row.unreadable.empty())
    return found(row, row.unreadable,
                 "keys are weighted unequally although all scores are equal, or visited twice");
  const size_t keys = row.keys.size();
  for (size_t j = 0; j < keys; ++j) {
    const bool due = visible[size_t(row.query) * keys + j] != 0, met = row.keys[j] != 0;
    if (due == met) continue;
    return found(row,
                 fmt::format("query {}{} of head {} {} key {}{}", row.query,
                             sequence_text(of_queries, row.query), row.head,
                             met ? "sees" : "does not see", j, sequence_text(of_keys, int64_t(j))),
                 met ? "the mask shows more than it should: look at positions, window and "
                       "sequence of this pair"
                     : "a key is hidden or its block was never visited");
  }
  return std::nullopt;
}

CheckResult judge(const Evidence& e) {
  const judging::Seen seen = judging::seen_rows(e);
  if (seen.incomplete) return judging::conclude("mask", 0, {*seen.incomplete});
  if (auto f = judging::incomplete(e, opposed)) return judging::conclude("mask", 0, {*f});
  const auto visible = e.contract->visible(*e.line);
  const auto of_queries = sequences_of(e, "q"), of_keys = sequences_of(e, "k");
  std::optional<Finding> first;
  int64_t compared = 0, wrong = 0;
  for (const judging::SeenRow& row : seen.rows) {
    compared += int64_t(row.keys.size());
    auto f = wrong_row(row, visible, of_queries, of_keys);
    if (!f) continue;
    ++wrong;
    if (!first)
      first = std::move(f);
    else if (first->ranks.back() != row.rank)
      first->ranks.push_back(row.rank);
  }
  std::vector<Finding> findings;
  if (first) {
    first->message += fmt::format("; {} of {} rows differ", wrong, seen.rows.size());
    findings.push_back(std::move(*first));
  }
  judging::Judgement loud = judging::against_truth(e, e.find_shot(opposed), "F0", false);
  for (Finding& f : loud.findings) {
    f.message += (f.message.empty() ? "" : ", ") + std::string("with scores of +c and -c");
    // A rounding, of an approximate exp for one, is neither of these.
    const bool close = f.numeric && std::abs(f.got - f.want) <= 1e-3 * std::abs(f.want);
    f.means = close ? "" : "the softmax overflows or loses a block: subtract the running maximum";
    findings.push_back(std::move(f));
  }
  CheckResult result = judging::conclude("mask", compared + loud.compared, std::move(findings));
  result.ratio = std::max(result.ratio, loud.ratio);
  return result;
}

}  // namespace

Check mask_check() {
  return {
      .name = "mask",
      .letter = 'P',
      .asks = "does every query see exactly the keys that its mask shows it",
      .due = [](const Contract& c, const Case&, const Declared&) { return c.visible != nullptr; },
      .plan = plan,
      .judge = judge};
}

}  // namespace shardproof
