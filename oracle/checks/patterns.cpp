// A pattern has two halves: where the wrong elements lie (all of them, a rank's block, rows, every
// second column) and what stands in them (zero, NaN, p times the truth, the truth of other places).
#include "oracle/checks/patterns.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

using judging::coordinates;
using judging::ranks_text;

// Factors and offsets are read off rounded results: agreement to 1 in 1000 names a pattern. It
// words a finding and decides nothing.
constexpr double alike = 1e-3;

template <class Predicate>
bool all(const Wrongness& w, Predicate holds) {
  return std::all_of(w.wrong.begin(), w.wrong.end(), holds);
}

std::set<int> wrong_ranks(const Wrongness& w) {
  std::set<int> ranks;
  for (const WrongElement& e : w.wrong) ranks.insert(e.rank);
  return ranks;
}

// Along which there are copies: "cp", "tp*cp"; and how many of an element.
std::pair<std::string, int> copies(const Wrongness& w) {
  std::pair<std::string, int> found{"", 1};
  for (const auto& [axis, p] : w.layout) {
    const int held = copies(p, w.mesh->size(axis));
    if (!equal_bits(p) || held == 1) continue;
    found.first += (found.first.empty() ? "" : "*") + std::string(name(axis));
    found.second *= held;
  }
  return found;
}

bool replicated(const Wrongness& w) { return copies(w).second > 1; }

// ---- where ----

// Ranks whose every element is wrong while other ranks are right: "block of rank 3".
std::string whole_ranks(const Wrongness& w) {
  std::map<int, int64_t> wrong;
  for (const WrongElement& e : w.wrong) ++wrong[e.rank];
  if (int(wrong.size()) >= w.mesh->world()) return "";
  std::vector<int> ranks;
  for (const auto& [rank, n] : wrong) {
    if (n < product(local_shape(w.operand->shape, w.layout, *w.mesh, rank))) return "";
    ranks.push_back(rank);
  }
  const char* what = replicated(w)      ? (ranks.size() > 1 ? "copies" : "copy")
                     : ranks.size() > 1 ? "blocks"
                                        : "block";
  return fmt::format("{} of {}", what, ranks_text(ranks, w.mesh->world()));
}

std::string slice_text(size_t dim, size_t dims, int64_t first, int64_t last) {
  const std::string range =
      first == last ? fmt::format("{}", first) : fmt::format("{}..{}", first, last);
  const char* plural = first == last ? "" : "s";
  if (dim == 0 && dims >= 2) return fmt::format("row{} {}", plural, range);
  if (dim == 1 && dims == 2) return fmt::format("column{} {}", plural, range);
  return fmt::format("{} of dim {}", range, dim);
}

// The wrong places are full slices of one dim: a range of them, or every k-th.
std::string slices(const Wrongness& w) {
  const auto shape = denoted_shape(w.operand->shape, w.layout, *w.mesh);
  const size_t stacked = shape.size() - w.operand->shape.size();
  std::set<int64_t> places;
  for (const WrongElement& e : w.wrong) places.insert(e.at);
  for (size_t d = 0; d < shape.size(); ++d) {
    std::set<int64_t> at;
    for (int64_t p : places) at.insert(coordinates(p, shape)[d]);
    const int64_t others = product(shape) / shape[d];
    if (int64_t(at.size()) == shape[d] || int64_t(places.size()) != int64_t(at.size()) * others)
      continue;
    const int64_t first = *at.begin(), last = *at.rbegin(), n = int64_t(at.size());
    if (d < stacked) {
      const char* axis = name(stacked_axes(w.layout, *w.mesh, true)[d]);
      return n == 1 ? fmt::format("{}={}", axis, first) : fmt::format("{} places of {}", n, axis);
    }
    const size_t dim = d - stacked, dims = w.operand->shape.size();
    if (last - first + 1 == n) return slice_text(dim, dims, first, last);
    const int64_t step = n > 1 ? (last - first) / (n - 1) : 0;
    // Any two places are a step apart: a stride shows in three, or where it is every other place.
    bool even = step >= 2 && (n > 2 || step == 2) && first < step && last + step >= shape[d];
    for (int64_t k = first; even && k <= last; k += step) even = at.count(k) > 0;
    const char* nth = step == 2 ? "2nd" : step == 3 ? "3rd" : nullptr;
    if (even) return fmt::format("every {} of dim {}", nth ? nth : fmt::format("{}th", step), dim);
  }
  return "";
}

// One place, on all of its copies or on some: "one element", "one element of rank 1".
std::string one_place(const Wrongness& w) {
  for (const WrongElement& e : w.wrong)
    if (e.at != w.wrong[0].at) return "";
  const std::set<int> ranks = wrong_ranks(w);
  if (!replicated(w) || int(ranks.size()) == w.mesh->world()) return "one element";
  return "one element of " +
         ranks_text(std::vector<int>(ranks.begin(), ranks.end()), w.mesh->world());
}

// Of fewer elements nothing is said of where among them the wrong ones lie.
bool enough(const Wrongness& w) {
  return product(denoted_shape(w.operand->shape, w.layout, *w.mesh)) >= 8;
}

// Only the first of many wrong elements are there.
bool cut(const Wrongness& w) { return int64_t(w.wrong.size()) < w.total; }

std::string where(const Wrongness& w) {
  if (w.total == w.compared) return w.compared == 1 ? "one element" : "all";
  if (cut(w)) return "";
  if (std::string text = one_place(w); !text.empty()) return text;
  if (std::string text = whole_ranks(w); !text.empty()) return text;
  return slices(w);
}

// ---- what ----

// got = factor * want on every wrong element; 0 where there is no such factor.
double common_factor(const Wrongness& w) {
  double factor = 0;
  for (const WrongElement& e : w.wrong) {
    if (e.want == 0 || e.got == 0 || !std::isfinite(e.got)) return 0;
    const double f = e.got / e.want;
    if (factor == 0) factor = f;
    if (std::abs(f - factor) > alike * std::abs(factor)) return 0;
  }
  // Near 1 the spread of rounding and a scale look alike unless the scale is the larger one.
  for (const WrongElement& e : w.wrong)
    if (std::abs(factor - 1) < 1 && std::abs(e.got / e.want - factor) > 0.1 * std::abs(factor - 1))
      return 0;
  return factor;
}

// got = want + offset on every wrong element; 0 where there is no such offset.
double common_offset(const Wrongness& w) {
  const double offset = w.wrong[0].got - w.wrong[0].want;
  if (!std::isfinite(offset)) return 0;
  return all(w,
             [&](auto& e) { return std::abs(e.got - e.want - offset) <= alike * std::abs(offset); })
             ? offset
             : 0;
}

// Axes on which copies ought to agree, every set of them, the largest first.
std::vector<std::vector<Axis>> sets_of_copies(const Wrongness& w) {
  std::vector<Axis> axes;
  for (const auto& [axis, p] : w.layout)
    if (equal_bits(p) && copies(p, w.mesh->size(axis)) > 1) axes.push_back(axis);
  std::vector<std::vector<Axis>> sets;
  for (unsigned set = 1; set < (1u << axes.size()); ++set) {
    sets.emplace_back();
    for (size_t i = 0; i < axes.size(); ++i)
      if (set >> i & 1) sets.back().push_back(axes[i]);
  }
  std::stable_sort(sets.begin(), sets.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  return sets;
}

int copies_along(const Wrongness& w, const std::vector<Axis>& axes) {
  int n = 1;
  for (Axis a : axes) n *= copies(placement_on(w.layout, a), w.mesh->size(a));
  return n;
}

// Whether copies along these axes add up to the truth: no one reduced them. A copy that is right
// has all of the sum at this place, and where each lacks something the others have nothing there.
bool add_up(const Wrongness& w, const std::vector<Axis>& axes) {
  struct Sum {
    double total = 0, magnitude = 0, want = 0;
    int wrong = 0;
  };
  std::map<std::pair<int64_t, int>, Sum> sums;  // by place and first member of the group
  std::set<int> members;                        // that lack something, by place in their group
  for (const WrongElement& e : w.wrong) {
    const std::vector<int> group = w.mesh->group(axes, e.rank);
    Sum& sum = sums[{e.at, group[0]}];
    sum.total += e.got, sum.magnitude += std::abs(e.got), sum.want = e.want;
    ++sum.wrong;
    members.insert(int(std::find(group.begin(), group.end(), e.rank) - group.begin()));
  }
  const int n = copies_along(w, axes);
  if (int(members.size()) < n) return false;
  return std::all_of(sums.begin(), sums.end(), [&](const auto& one) {
    const Sum& s = one.second;
    const int right = n - s.wrong;
    return std::abs(s.total + (right - 1) * s.want) <=
           alike * (s.magnitude + right * std::abs(s.want));
  });
}

// The axes whose sum was not made; none.
std::vector<Axis> own_parts(const Wrongness& w) {
  if (wrong_ranks(w).size() < 2) return {};
  for (const auto& axes : sets_of_copies(w))
    if (add_up(w, axes)) return axes;
  return {};
}

// Closer to the truth of the same place than what a pattern tells apart.
constexpr double close = 1e-2 * alike;

bool in_place(const Wrongness& w) {
  return all(w, [](auto& e) { return std::abs(e.got - e.want) <= close * std::abs(e.want); });
}

// Several values, and the truth is 0 at each.
bool where_nothing_is_due(const Wrongness& w) {
  return w.wrong.size() > 2 && all(w, [](auto& e) { return e.want == 0 && std::isfinite(e.got); });
}

// Each is off, and all of them together by less than a fifth: what is there is mostly the truth.
bool near_everywhere(const Wrongness& w) {
  if (cut(w) || w.total != w.compared || w.wrong.size() < 8) return false;
  double off = 0, size = 0;
  for (const WrongElement& e : w.wrong) {
    off += (e.got - e.want) * (e.got - e.want);
    size += e.want * e.want;
  }
  return off <= 0.04 * size;
}

// The wrong values are the right ones in another order. Places that hold the right value by chance
// drop out of both sides alike.
bool permuted(const Wrongness& w) {
  if (w.wrong.size() < 2) return false;
  std::vector<double> got, want;
  for (const WrongElement& e : w.wrong) {
    if (!std::isfinite(e.got) || !std::isfinite(e.want)) return false;
    got.push_back(e.got);
    want.push_back(e.want);
  }
  std::sort(got.begin(), got.end());
  std::sort(want.begin(), want.end());
  for (size_t i = 0; i < got.size(); ++i)
    if (!(std::abs(got[i] - want[i]) <= close * std::abs(want[i]))) return false;
  return true;
}

std::string where_zero_is_due(const Wrongness& w) {
  return std::string("padding, a place that is masked or a row of no token") +
         (w.gradient ? ", an input that no result depends on" : "") +
         ": it was counted, or written to, or never cleared";
}

Pattern of_own_parts(const Wrongness& w, const std::vector<Axis>& axes) {
  std::string names;
  for (Axis a : axes) names += (names.empty() ? "" : "*") + std::string(name(a));
  const bool of_every_rank = copies_along(w, axes) == w.mesh->world();
  return {of_every_rank ? "each rank holds its own part"
                        : "each copy along " + names + " is its rank's own part",
          fmt::format("the parts of the ranks {}add up to the truth: the reduction is missing",
                      of_every_rank ? "" : "along " + names + " ")};
}

Pattern content(const Wrongness& w) {
  const bool one = !cut(w) && one_place(w) != "";
  if (all(w, [](auto& e) { return std::isnan(e.got); })) return {"NaN", means_of_nan};
  if (all(w, [](auto& e) { return std::isinf(e.got); }))
    return {"infinite", "an overflow, or a division by zero"};
  if (all(w, [](auto& e) { return e.got == 0; })) {
    if (const auto axes = cut(w) ? std::vector<Axis>() : own_parts(w); !axes.empty())
      return of_own_parts(w, axes);
    return {"zero", std::string("nothing arrived here: a block that was lost, or ") +
                        (w.gradient ? "a gradient that has no way back to its input"
                                    : "a part that no rank computes")};
  }
  if (const double f = common_factor(w); f != 0 && (!one || !factor_name(f, *w.mesh).empty())) {
    const std::string is = factor_name(f, *w.mesh);
    return {fmt::format("x {}{}", factor_text(f), is.empty() ? "" : " = " + is),
            factor_means(f, *w.mesh)};
  }
  if (const auto axes = cut(w) ? std::vector<Axis>() : own_parts(w); !axes.empty())
    return of_own_parts(w, axes);
  if (where_nothing_is_due(w)) return {"values where 0 is due", where_zero_is_due(w)};
  if (in_place(w)) return {"off by roundings", means_of_roundings};
  if (!cut(w) && permuted(w))
    return {"values of the truth from other places",
            "blocks that went to the wrong owner, or were put together in the wrong order"};
  if (const double d = common_offset(w); d != 0 && !one)
    return {fmt::format("off by a constant, {:+.6g}", d),
            "a constant that is added once too often or too rarely"};
  if (near_everywhere(w)) return {"", means_of_near};
  return {"", ""};
}

std::string place_means(const Wrongness& w, const std::string& place) {
  if (place.starts_with("block"))
    return "what this rank computed or received is wrong: its peer, its index map, or a call that "
           "it leaves out";
  if (place.starts_with("copy") || place.starts_with("copies"))
    return "a replica that parted from the others";
  if (place.starts_with("every"))
    return "a stride: interleaved data read as blocks, or the other way round";
  if (place.starts_with("one element") && enough(w))
    return "a single element: a boundary or an index, not a reduction";
  return "";
}

}  // namespace

std::string factor_text(double factor) {
  if (!(std::abs(factor - 1) < 0.05) || factor == 1) return fmt::format("{:.3f}", factor);
  std::string text = fmt::format("{:.7g}", factor);
  for (int digits = 8; digits <= 17 && text == "1"; ++digits)
    text = fmt::format("{:.{}g}", factor, digits);
  return text;
}

std::string factor_name(double factor, const Mesh& mesh) {
  std::vector<Axis> axes;
  for (Axis a : mesh.order())
    if (mesh.size(a) > 1) axes.push_back(a);
  if (mesh.size(Axis::rep) > 1 && mesh.size(Axis::kv) > 1) axes.push_back(Axis::rep);
  std::string names;
  for (unsigned set = 1; set < (1u << axes.size()); ++set) {
    double size = 1;
    std::string product;
    for (size_t i = 0; i < axes.size(); ++i)
      if (set >> i & 1) {
        size *= mesh.size(axes[i]);
        product += (product.empty() ? "" : "*") + std::string(name(axes[i]));
      }
    const bool several = product.find('*') != std::string::npos;
    if (std::abs(factor - size) <= alike * size)
      names += (names.empty() ? "" : " or ") + product;
    else if (std::abs(factor * size - 1) <= alike)
      names += (names.empty() ? "" : " or ") + (several ? "1/(" + product + ")" : "1/" + product);
  }
  return names;
}

std::string factor_means(double factor, const Mesh& mesh) {
  const std::string is = factor_name(factor, mesh);
  if (is.empty())
    return factor == -1  ? "the sign is turned"
           : factor == 0 ? "nothing comes back: there is no way from the result to its input"
                         : "";
  if (factor > 1)
    return "a sum that was already whole was summed again: one reduction too many, or a sum in "
           "place of a mean";
  return "a reduction is missing, or a mean stands in place of a sum";
}

Pattern pattern_of(const Wrongness& w) {
  const std::string place = where(w);
  Pattern what = content(w);
  if (what.means.empty()) what.means = place_means(w, place);
  if (what.text.starts_with("x ") && place == "all" && replicated(w) &&
      factor_name(w.wrong[0].got / w.wrong[0].want, *w.mesh) != "")
    what.means += "; the replicas agree, so a hash cannot see it";
  const char* between = place.empty() || what.text.empty()              ? ""
                        : what.text.starts_with("x ") && place == "all" ? " "
                                                                        : ", ";
  if (cut(w) && !what.text.empty())
    what.text += fmt::format(", as far as the first {} of them go", w.wrong.size());
  return {place + between + what.text, what.means};
}

}  // namespace shardproof
