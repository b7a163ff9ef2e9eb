// Local results of all ranks against the truth of one tensor, in global coordinates.
//
// An element is accepted where it equals the truth as a value (-0 equals +0, NaN equals nothing),
// or where it is finite and |got - want| <= bound holds with a finite bound. Both are written
// positively: a NaN on either side of a comparison is never accepted. The passing path reads every
// element once and allocates nothing per element; what a failure has to say is collected in a
// second walk.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/patterns.hpp"
#include "oracle/checks/pieces.hpp"
#include "oracle/checks/wide.hpp"

namespace shardproof {
namespace {

using judging::Part;
using judging::piece;
using judging::read;

constexpr double infinity = std::numeric_limits<double>::infinity();

std::vector<Axis> partial_axes(const Layout& layout, const Mesh& mesh) {
  std::vector<Axis> axes;
  for (const auto& [axis, placement] : layout)
    if (placement.kind == Placement::partial && mesh.size(axis) > 1) axes.push_back(axis);
  return axes;
}

struct Tensor {
  const Evidence& e;
  int shot, step, operand;
  bool gradient;
  const Operand& what = e.operands[size_t(operand)];
  Layout layout = judging::result_layout(what, gradient);
  std::vector<Axis> summed = partial_axes(layout, e.mesh);
};

Finding unreadable(const Tensor& t, int rank, std::string message) {
  Finding f;
  f.tensor = judging::tensor_name(t.what, t.gradient);
  f.message = std::move(message);
  f.rank = rank;
  f.ranks = {rank};
  f.ratio = infinity;
  return f;
}

// The result of a rank, or why it cannot be compared.
const ResultTensor* find(const Tensor& t, int rank, size_t elements, std::optional<Finding>& why) {
  const ResultTensor* r = t.e.result(rank, t.shot, t.step, t.operand, t.gradient);
  if (!r)
    why = unreadable(t, rank,
                     "expected a result of every rank, met none of rank " + std::to_string(rank));
  else if (r->bytes.size() != elements * size_of(r->dtype))
    why = unreadable(t, rank,
                     "expected " + std::to_string(elements) + " elements of rank " +
                         std::to_string(rank) + ", met " +
                         std::to_string(r->bytes.size() / size_of(r->dtype)));
  else
    return r;
  return nullptr;
}

// Fills the piece of `part` that begins at `part.first` with what the group that `part.ranks` names
// holds. False: `why` says what is missing.
bool load(const Tensor& t, const Places& places, Part& part, std::optional<Finding>& why) {
  const ResultTensor* first = find(t, part.rank, places.size(), why);
  if (!first) return false;
  const size_t count = std::min(piece, places.size() - part.first);
  part.places = &places;
  read(*first, part.first, count, part.got);
  if (part.ranks.size() < 2) return true;
  part.sum_magnitude.resize(part.got.size());
  for (size_t i = 0; i < part.got.size(); ++i) part.sum_magnitude[i] = std::abs(part.got[i]);
  static thread_local std::vector<double> more;
  for (size_t m = 1; m < part.ranks.size(); ++m) {
    const ResultTensor* r = find(t, part.ranks[m], places.size(), why);
    if (!r) return false;
    read(*r, part.first, count, more);
    for (size_t i = 0; i < more.size(); ++i) {
      part.got[i] += more[i];
      part.sum_magnitude[i] += std::abs(more[i]);
    }
  }
  return true;
}

// The judge's own sum of p parts in double errs by at most (p-1) 2^-53 sum |parts|, to first order.
double allowance(const Part& part, size_t i, double bound) {
  return part.ranks.size() < 2 || bound == 0
             ? bound
             : bound + double(part.ranks.size()) * 0x1p-53 * part.sum_magnitude[i];
}

bool accepted(double got, double want, double bound) {
  return got == want || (std::isfinite(got) && std::abs(got - want) <= bound);
}

double ratio_of(double got, double want, double bound) {
  if (got == want) return 0;
  const double ratio = std::abs(got - want) / bound;
  return bound > 0 && std::isfinite(ratio) ? ratio : infinity;
}

// Who holds a copy of the result, or is the first of those that add to it.
std::vector<Part> parts_of(const Tensor& t) {
  std::vector<Part> parts;
  for (int rank = 0; rank < t.e.mesh.world(); ++rank) {
    Part part;
    part.rank = rank;
    if (!t.summed.empty()) part.ranks = t.e.mesh.group(t.summed, rank);
    if (part.ranks.empty() || part.ranks[0] == rank) parts.push_back(std::move(part));
  }
  return parts;
}

// Where nothing is allowed: takes a piece of which nothing is off either. `equal(i, due, n)` says
// whether the n elements from the i-th of the piece on are what is due.
template <class Equal>
bool is_due(const Part& part, size_t count, const Whole& want, const Equal& equal, Compared& c) {
  int64_t first_at = -1;
  bool all = true;
  part.places->each_run(part.first, count, [&](size_t i, int64_t at, size_t n) {
    if (i == 0) first_at = at;
    const double* due = want.value.data() + at;
    all = all && equal(i, due, n);
    c.zeros = c.zeros && std::all_of(due, due + n, [](double v) { return v == 0; });
  });
  if (!all) return false;
  if (c.worst_at < 0) c.worst_at = first_at, c.worst_rank = part.rank, c.worst_bound = 0;
  c.compared += int64_t(count);
  return true;
}

// What a rank holds by itself is compared where it lies.
bool piece_is_due(const Tensor& t, Part& part, const Whole& want, Compared& c) {
  const Places& places = *part.places;
  std::optional<Finding> why;
  if (part.ranks.size() > 1) {
    if (!load(t, places, part, why)) return false;
    const auto sums = [&](size_t i, const double* due, size_t n) {
      return wide::equal(part.got.data() + i, due, n);
    };
    if (!is_due(part, part.got.size(), want, sums, c)) return false;
    part.first += part.got.size();
    return true;
  }
  const ResultTensor* r = find(t, part.rank, places.size(), why);
  if (!r) return false;
  const size_t count = std::min(piece, places.size() - part.first), width = size_of(r->dtype);
  const std::byte* from = r->bytes.data() + part.first * width;
  const auto stored = [&](size_t i, const double* due, size_t n) {
    return wide::equal(from + i * width, r->dtype, due, n);
  };
  if (!is_due(part, count, want, stored, c)) return false;
  judging::looked_at(*r, part.first, count);
  part.first += count;
  return true;
}

// The same of all pieces; empty where one is missing or off. Rank beside rank: their rows lie side
// by side in the whole, which is then walked through once.
std::optional<Compared> all_due(const Tensor& t, const Whole& want) {
  std::vector<Part> parts = parts_of(t);
  std::vector<Places> places;
  places.reserve(parts.size());
  for (Part& part : parts)
    part.places =
        &places.emplace_back(Places::Of::denoted, t.what.shape, t.layout, t.e.mesh, part.rank);
  Compared c;
  for (bool more = true; more;) {
    more = false;
    for (Part& part : parts) {
      if (part.first > 0 && part.first >= part.places->size()) continue;
      if (!piece_is_due(t, part, want, c)) return std::nullopt;
      more = more || part.first < part.places->size();
    }
  }
  return c;
}

void compare_part(const Part& part, const Whole& want, const std::function<double(int64_t)>& bound,
                  Compared& c) {
  const auto indices = part.indices();
  for (size_t i = 0; i < part.got.size(); ++i) {
    const int64_t at = indices[i];
    const double got = part.got[i], due = want.value[size_t(at)], b = allowance(part, i, bound(at));
    c.zeros = c.zeros && got == 0 && due == 0;
    c.exact = c.exact && b == 0;
    c.unbounded += !std::isfinite(b);
    c.wrong += !accepted(got, due, b);
    const double ratio = ratio_of(got, due, b);
    if (ratio > c.worst_ratio || c.worst_at < 0) {
      c.worst_ratio = ratio;
      c.worst_at = at;
      c.worst_rank = part.rank;
      c.worst_bound = b;
    }
  }
  c.compared += int64_t(part.got.size());
}

double error_of(double got, double want) {
  const double error = std::abs(got - want);
  return std::isfinite(error) ? error : infinity;
}

// Worse: the larger ratio; where both are infinite (bound 0, NaN) the larger error.
struct Candidate {
  double ratio = -1, error = -1;
  bool worse_than(const Candidate& other) const {
    return ratio != other.ratio ? ratio > other.ratio : error > other.error;
  }
};

// Ranks on which an element is wrong: of a copy each that holds one, of a sum all that add to it.
std::vector<int> holders_of(const Tensor& t, const std::vector<WrongElement>& wrong, int64_t at) {
  std::vector<int> ranks;
  for (const WrongElement& w : wrong) {
    if (w.at != at) continue;
    const auto all = t.summed.empty() ? std::vector<int>{w.rank} : t.e.mesh.group(t.summed, w.rank);
    ranks.insert(ranks.end(), all.begin(), all.end());
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Wrong elements that are kept to say what they have in common; the first ones, in the order of
// ranks.
constexpr size_t most_told = size_t(1) << 18;

Finding explain(const Tensor& t, const Whole& want, const std::function<double(int64_t)>& bound,
                const Compared& c) {
  std::vector<WrongElement> wrong;
  Finding f;
  Candidate worst;
  int last_wrong = -1;  // rank of the part that has been named
  judging::each_part(t.e, t.shot, t.step, t.operand, t.gradient, [&](const Part& part) {
    bool here = false;
    const auto indices = part.indices();
    for (size_t i = 0; i < part.got.size(); ++i) {
      const int64_t at = indices[i];
      const double got = part.got[i], due = want.value[size_t(at)],
                   b = allowance(part, i, bound(at));
      if (accepted(got, due, b)) continue;
      here = true;
      if (wrong.size() < most_told) wrong.push_back({at, part.rank, got, due});
      const Candidate candidate{ratio_of(got, due, b), error_of(got, due)};
      if (!candidate.worse_than(worst)) continue;
      worst = candidate;
      f.rank = part.rank;
      f.got = got, f.want = due, f.error = candidate.error, f.bound = b, f.ratio = candidate.ratio;
      f.index = {at};
    }
    if (!here || last_wrong == part.rank) return;
    last_wrong = part.rank;
    if (part.ranks.empty())
      f.ranks.push_back(part.rank);
    else
      f.ranks.insert(f.ranks.end(), part.ranks.begin(), part.ranks.end());
  });
  f.holders = holders_of(t, wrong, f.index[0]);
  if (f.holders.empty()) f.holders = {f.rank};  // it is behind those that are kept
  const auto shape = denoted_shape(t.what.shape, t.layout, t.e.mesh);
  std::sort(f.ranks.begin(), f.ranks.end());
  f.tensor = judging::tensor_name(t.what, t.gradient);
  f.where = index_text(t.what.name, f.index[0], t.what.shape, t.layout, t.e.mesh, /*denoted=*/true);
  f.index = judging::coordinates(f.index[0], shape);
  f.numeric = true;
  f.wrong = c.wrong;
  f.compared = c.compared;
  const Pattern p =
      pattern_of({wrong, c.wrong, c.compared, &want, &t.what, t.layout, &t.e.mesh, t.gradient});
  f.pattern = p.text;
  f.means = p.means;
  return f;
}

}  // namespace

std::optional<Finding> judging::each_part(const Evidence& e, int shot, int step, int operand,
                                          bool gradient,
                                          const std::function<void(const Part&)>& visit) {
  const Tensor t{e, shot, step, operand, gradient};
  std::optional<Finding> why;
  for (Part& part : parts_of(t)) {
    const Places places(Places::Of::denoted, t.what.shape, t.layout, e.mesh, part.rank);
    do {
      if (!load(t, places, part, why)) return why;
      visit(part);
      part.first += part.got.size();
    } while (part.first < places.size());
  }
  return std::nullopt;
}

Compared compare(const Evidence& e, int shot, int step, int operand, bool gradient,
                 const Whole& want, const std::function<double(int64_t)>& bound) {
  const Tensor t{e, shot, step, operand, gradient};
  const auto shape = denoted_shape(t.what.shape, t.layout, e.mesh);
  if (int64_t(want.value.size()) != product(shape))
    throw std::logic_error("reference of " + e.contract->name + ": expected " +
                           judging::tensor_name(t.what, gradient) + " of " + shape_text(shape) +
                           ", met " + std::to_string(want.value.size()) +
                           " elements; the contract's reference and operands disagree");
  if (bound.target<NoError>())
    if (auto due = all_due(t, want)) return *due;
  Compared c;
  if (auto missing =
          judging::each_part(t.e, t.shot, t.step, t.operand, t.gradient,
                             [&](const Part& part) { compare_part(part, want, bound, c); })) {
    c.wrong += 1;
    c.finding = std::move(missing);
  } else if (c.wrong > 0) {
    c.finding = explain(t, want, bound, c);
  }
  return c;
}

}  // namespace shardproof
