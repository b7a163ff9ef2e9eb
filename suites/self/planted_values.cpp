// Wrong numbers and wrong writes: what the eye of the judge must not miss, however small.
#include <cfenv>
#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "suites/self/planted.hpp"

namespace shardproof::planted {
namespace {

void put(const View& v, int64_t at, double value) { store(v.flat(at), v.dtype, value); }
double get(const View& v, int64_t at) { return load(v.flat(at), v.dtype); }

std::function<void(const View&)> element(int64_t at, double value) {
  return [=](const View& out) { put(out, at, value); };
}
void add_one(const View& out, int64_t at) { put(out, at, get(out, at) + 1); }

// A value where there was a zero of the other sign.
Map with_negative_zeros(Map right) {
  return [=](Rank& rank, const View& in, const View& out) {
    right(rank, in, out);
    for (int64_t i = 0; i < out.elements(); ++i)
      if (get(out, i) == 0) put(out, i, -0.0);
  };
}

std::string holds_a_negative_zero(const Judged& j) {
  for (const RankRecord& r : j.evidence.ranks)
    for (const ResultTensor& t : r.shots.at(0).results)
      for (size_t at = 0; at < t.bytes.size(); at += size_of(t.dtype)) {
        const double v = load(t.bytes.data() + at, t.dtype);
        if (v == 0 && std::signbit(v)) return "";
      }
  return "expected a -0 among the results, met none: this line plants nothing";
}

// All but the last element of the sum.
void without_its_last_element(Rank& rank, const View& in, const View& out) {
  const View sum = like(rank, in);
  reduced(rank, in, sum);
  for (int64_t i = 0; i + 1 < out.elements(); ++i) put(out, i, get(sum, i));
}

// Each rank begins with its own part: integers and two summands show nothing of it.
void in_own_order(Rank& rank, const View& in, const View& out) {
  const int p = group(rank).size(), own = group(rank).rank();
  const View all = rank.workspace(in.dtype, {p, in.elements()});
  group(rank).all_gather(view_of(in.data, in.dtype, {1, in.elements()}), all, 0);
  for (int64_t i = 0; i < out.elements(); ++i) {
    double sum = 0;
    for (int m = 0; m < p; ++m) sum += get(all, (own + m) % p * in.elements() + i);
    put(out, i, sum);
  }
}

// One element past the end, into the guard.
void beyond_its_end(const View& out) { store(out.data + out.bytes(), out.dtype, 7); }

void into_the_argument(Rank& rank, const View& in, const View& out) {
  reduced(rank, in, out);
  add_one(in, 4);
}

void beyond_a_workspace(Rank& rank, const View& in, const View& out) {
  beyond_its_end(like(rank, in));
  reduced(rank, in, out);
}

void rounds_upward(Rank& rank, const View& in, const View& out) {
  reduced(rank, in, out);
  std::fesetround(FE_UPWARD);
}

#if defined(__x86_64__)
void flushes_to_zero(Rank& rank, const View& in, const View& out) {
  reduced(rank, in, out);
  _mm_setcsr(_mm_getcsr() | 0x8000u);
}
#endif

}  // namespace

std::vector<Plant> values() {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::string small = "mapping_reduce tp=4 tokens=3 hidden=5";
  std::vector<Plant> list{
      {"nan",
       small,
       forward(spoilt(reduced, 2, element(7, nan))),
       {{"forward", Verdict::failed, 2, "y[1,2]", {"NaN"}}, {"replica", Verdict::failed, 2}}},
      {"nan_within_bounds",
       small + " fill=normal",
       forward(spoilt(reduced, 0, element(0, nan))),
       {{"forward", Verdict::failed, 0, "y[0,0]", {"NaN"}}}},
      {"infinity",
       small + " fill=normal",
       forward(spoilt(reduced, 1, element(14, -infinity))),
       {{"forward", Verdict::failed, 1, "y[2,4]"}}},
      // Sums of four bf16 integers of [-64, 64] often cancel; equal as a value, and on all ranks.
      {"negative_zero",
       "mapping_reduce tp=4 dtype=bf16",
       forward(with_negative_zeros(reduced)),
       {{"forward", Verdict::passed}, {"replica", Verdict::passed}, {"memory", Verdict::passed}},
       forward_only(),
       false,
       1,
       "",
       holds_a_negative_zero},
      {"one_in_a_million",
       "mapping_gather tp=2 tokens=1000 hidden=1000 dtype=f32",
       forward(spoilt(gathered, 1, [](const View& y) { add_one(y, 123456); })),
       {{"forward", Verdict::failed, 1, "y[123,456]", {"one element"}}},
       forward_only(),
       false,
       1,
       "mapping_gather tp=2 tokens=4 hidden=6 dtype=f32"},
      {"last_rank_only",
       small,
       forward(spoilt(reduced, 3, [](const View& y) { add_one(y, 14); })),
       {{"forward", Verdict::failed, 3, "y[2,4]"}, {"replica", Verdict::failed, 3}}},
      {"own_order_on_integers",
       small,
       forward(in_own_order),
       {{"replica", Verdict::failed, -1, "", {"in 'replica:normal'"}},
        {"forward", Verdict::passed}}},
      {"unwritten",
       small,
       forward(on_rank(1, without_its_last_element, reduced)),
       {{"memory", Verdict::failed, 1, "y[2,4]", {"1 element never written"}},
        {"forward", Verdict::failed, 1, "y[2,4]"}}},
      {"guard_written",
       small,
       forward(spoilt(reduced, 2, beyond_its_end)),
       {{"memory", Verdict::failed, 2, "", {"guard zone after", "y"}},
        {"forward", Verdict::passed}}},
      {"workspace_guard_written",
       small,
       forward(on_rank(2, beyond_a_workspace, reduced)),
       {{"memory", Verdict::failed, 2, "", {"guard zone after", "workspace"}},
        {"forward", Verdict::passed}}},
      {"argument_written",
       small,
       forward(on_rank(1, into_the_argument, reduced)),
       {{"memory", Verdict::failed, 1, "x[tp=1][0,4]", {"argument"}},
        {"forward", Verdict::passed}}},
      {"rounding_mode_changed",
       small,
       forward(on_rank(3, rounds_upward, reduced)),
       {{"memory", Verdict::failed, 3, "", {"rounding mode changed"}}}},
  };
#if defined(__x86_64__)
  list.push_back({"flush_to_zero",
                  small,
                  forward(on_rank(1, flushes_to_zero, reduced)),
                  {{"memory", Verdict::failed, 1, "", {"flush-to-zero switched on"}}}});
#endif
  return list;
}

}  // namespace shardproof::planted
