// Cost of a case, and what a machine cannot hold.
#include "oracle/cost.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <sstream>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/run.hpp"
#include "oracle/words.hpp"

namespace shardproof {
namespace {

double stacked_elements(const Evidence& e) {
  double elements = 0;
  for (const Operand& o : e.operands) {
    double n = 1;
    for (int64_t extent : whole_shape(o.shape, o.layout, e.mesh)) n *= double(extent);
    elements += n;
  }
  return elements;
}

// Features of all rows of inputs and outputs at one token.
double features_of_a_token(const Evidence& e, double tokens) {
  double features = 0;
  for (const Operand& o : e.operands) {
    double n = 1;
    for (int64_t extent : o.shape) n *= double(extent);
    features += n / tokens;
  }
  return features;
}

// Of the list of sequences; a contract that has none for this line counts by its longest operand.
double tokens_of(const Evidence& e) {
  double tokens = double(e.contract->sequences(*e.line, e.operands.at(0)).size());
  if (tokens > 0) return tokens;
  for (const Operand& o : e.operands)
    if (!o.shape.empty()) tokens = std::max(tokens, double(o.shape[0]));
  return std::max(tokens, 1.0);
}

double multiplications(const Evidence& e, double elements) {
  double sum = 30 * elements;
  if (e.contract->gemms)
    for (int rank = 0; rank < e.mesh.world(); ++rank)
      for (const Gemm& g : e.contract->gemms(*e.line, rank))
        sum += double(g.m) * double(g.n) * double(g.k);
  if (e.contract->further_work) sum += e.contract->further_work(*e.line);
  if (e.contract->visible && e.contract->sequences) {
    const double tokens = tokens_of(e);
    sum += 3.5 * tokens * tokens * features_of_a_token(e, tokens);
  }
  return sum;
}

// `leak` disturbs each sequence in a shot of its own.
double further_shots(const Evidence& e, const std::vector<std::string>& checks) {
  if (!contains(checks, "leak") || !e.contract->sequences) return 0;
  const auto tokens = e.contract->sequences(*e.line, e.operands.at(0));
  return double(std::set<int64_t>(tokens.begin(), tokens.end()).size());
}

double passes_of(const Shot& s) {
  std::istringstream words(s.program);
  double forwards = 0;
  for (std::string word; words >> word;) forwards += word[0] == 'F';
  return forwards;
}

std::string size_text(double bytes) {
  return bytes < 0x1p40 ? fmt::format("{:.1f} GiB", bytes / 0x1p30)
                        : fmt::format("{:.0f} TiB", bytes / 0x1p40);
}

struct Rounds {
  double passes = 0, feeds = 0;
};

Rounds rounds_of(const Evidence& e, double further) {
  Rounds r;
  r.passes = further;
  std::set<std::pair<int, uint64_t>> seen;
  for (const Shot& s : e.shots) {
    r.passes += passes_of(s);
    for (const Feed& f : s.feeds) seen.emplace(int(f.fill), f.seed);
  }
  r.feeds = double(seen.size());
  return r;
}

constexpr double bytes_of_pass = 24, bytes_of_truth = 16;  // an element

double bytes_of(const Evidence& e, const Rounds& r) {
  const bool exact = !e.shots.empty() && exact_data(e, e.shots[0].feeds[0]);
  return stacked_elements(e) *
         (bytes_of_pass * r.passes + (exact ? 1 : 3) * bytes_of_truth * r.feeds);
}

[[noreturn]] void refuse_bytes(const Case& line, const char* how_sure, double bytes) {
  throw BadInput(
      fmt::format("expected a case of at most {}, met {}, which needs {} {}; use smaller extents",
                  size_text(most_bytes), print(line), how_sure, size_text(bytes)));
}

}  // namespace

Cost cost_of(const Evidence& e, double further) {
  const Rounds r = rounds_of(e, further);
  Cost c;
  c.pass = multiplications(e, stacked_elements(e));
  c.work = c.pass * (r.passes + r.feeds);
  c.bytes = bytes_of(e, r);
  return c;
}

double calls_of(const Evidence& e) {
  if (illegal(*e.contract, *e.line)) return 0;  // a line of `rejection`
  if (!check_named("ledger").due(*e.contract, *e.line, e.declared)) return 0;
  const auto in_a_pass = [&] {
    size_t most = 0;
    for (int rank = 0; rank < e.mesh.world(); ++rank)
      most = std::max(most, traffic_due(*e.contract, e.declared, *e.line, rank).size());
    return double(most);
  };
  const double calls =
      e.declared.traffic ? in_a_pass() : e.kept->get<double>("calls:" + e.declared.plan, in_a_pass);
  return rounds_of(e, 0).passes * calls;
}

double deadline_of(const Evidence& e) {
  return case_deadline_seconds + cost_of(e).work / multiplications_per_second +
         calls_of(e) / calls_per_second;
}

void refuse_too_many_elements(const Case& line, const Registry& registry) {
  Evidence e;
  e.mesh = line.mesh();
  e.operands = registry.contract(line.contract).operands(line);
  // Of one pass and its truth, which every line has.
  const double bytes = (bytes_of_pass + bytes_of_truth) * stacked_elements(e);
  if (bytes > most_bytes) refuse_bytes(line, "at least", bytes);
}

void refuse_too_big(const Evidence& e, const std::vector<std::string>& checks) {
  const double further = further_shots(e, checks);
  // First: a list of the products of as many experts as no memory holds does not fit either.
  if (const double bytes = bytes_of(e, rounds_of(e, further)); bytes > most_bytes)
    refuse_bytes(*e.line, "about", bytes);
  const Cost c = cost_of(e, further);
  constexpr double most =
      (longest_case_seconds - case_deadline_seconds) * multiplications_per_second;
  if (c.work > most)
    throw BadInput(
        fmt::format("expected a case of at most {:.2g} multiplications, met {} with about {:.2g}; "
                    "use smaller extents",
                    most, print(*e.line), c.work));
  // A call between MPI ranks waits for the slowest rank, 10 s at most.
  const double in_a_call = call_deadline_seconds * multiplications_per_second;
  if (e.line->text("transport") == "mpi" && c.pass > in_a_call)
    throw BadInput(
        fmt::format("expected a case of at most {:.2g} multiplications in a pass with "
                    "transport=mpi, met {} with about {:.2g}; "
                    "use smaller extents or transport=processes",
                    in_a_call, print(*e.line), c.pass));
}

void refuse_beyond_memory(const Evidence& e, const std::vector<std::string>& checks) {
  const double needed = (16 + 8 * further_shots(e, checks)) * stacked_elements(e),
               there = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
  if (needed > there)
    throw BadInput(
        fmt::format("expected a case whose truth and data fit into the {} of memory of this "
                    "machine, met {}, which "
                    "needs at least {}; use smaller extents",
                    size_text(there), print(*e.line), size_text(needed)));
}

void refuse_too_big(const Case& line, const std::vector<std::string>& checks,
                    const Registry& registry) {
  refuse_too_big(plan_case(line, declared_of(line, registry), {}, registry), checks);
}

}  // namespace shardproof
