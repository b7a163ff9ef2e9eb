// Correct code that looks odd, and must pass; verdicts that say "nothing was proven".
#include "reference/regions.hpp"
#include "suites/self/planted.hpp"

namespace shardproof::planted {
namespace {

// --- odd but right

View flat(const View& v) { return view_of(v.data, v.dtype, {v.elements()}); }

void reduce_scatter_and_gather(Rank& rank, const View& in, const View& out) {
  const View block = rank.workspace(in.dtype, {in.elements() / group(rank).size()});
  group(rank).reduce_scatter(flat(in), block, 0);
  group(rank).all_gather(block, flat(out), 0);
}

// Y = X W^T with X [T,K/p], W [o,K/p]: every other column of the contraction first, from the last
// one down, then those between; each half is accumulated by itself.
void in_another_order(const View& x, const View& w, const View& y) {
  const int64_t T = x.shape[0], K = x.shape[1], o = w.shape[0];
  const float *a = x.as<float>(), *b = w.as<float>();
  float* c = y.as<float>();
  for (int64_t t = 0; t < T; ++t)
    for (int64_t j = 0; j < o; ++j) {
      float odd = 0, even = 0;
      for (int64_t k = K - 1; k >= 0; k -= 2) odd += a[t * K + k] * b[j * K + k];
      for (int64_t k = K - 2; k >= 0; k -= 2) even += a[t * K + k] * b[j * K + k];
      c[t * o + j] = odd + even;
    }
}

class RowInAnotherOrder final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const View partial = like(rank, outputs[0]);
    in_another_order(inputs[0], inputs[1], partial);
    rank.along(Axis::tp).all_reduce(partial, outputs[0]);
    return std::make_unique<Saved>();
  }
};

// --- nothing was proven

void zero(Rank&, const View&, const View& out) {
  fill_from(out, std::vector<double>(size_t(out.elements()), 0.0));
}

class WritesNothing final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View>, std::span<const View>) override {
    return std::make_unique<Saved>();
  }
};

// Gathers what the ranks hold and asks the reference for the sum.
void calls_the_reference(Rank& rank, const View& in, const View& out) {
  const int p = group(rank).size();
  const View all = rank.workspace(in.dtype, {p, in.elements()});
  group(rank).all_gather(view_of(in.data, in.dtype, {1, in.elements()}), all, 0);
  reference::Ranks parts;
  for (int r = 0; r < p; ++r) parts.push_back({in.shape, to_doubles(all.narrow(0, r, 1))});
  fill_from(out, reference::all_reduce(parts)[0].value);
}

// The sum of all ranks in order, in the storage type.
void sums_by_itself(Rank& rank, const View& in, const View& out) {
  const int p = group(rank).size();
  const int64_t n = in.elements();
  const View all = rank.workspace(in.dtype, {p, n});
  group(rank).all_gather(view_of(in.data, in.dtype, {1, n}), all, 0);
  const float* x = all.as<float>();
  float* y = out.as<float>();
  for (int64_t i = 0; i < n; ++i) {
    y[i] = x[i];
    for (int r = 1; r < p; ++r) y[i] += x[r * n + i];
  }
}

// --- contracts of their own

Contract renamed(const Registry& r, const std::string& from, const std::string& to) {
  Contract c = r.contract(from);
  c.name = to;
  c.family = "planted";
  c.cases = [](const std::string&) { return std::vector<std::string>{}; };
  c.witnesses.clear();
  c.illegal.clear();
  return c;
}

// A sum that may be moved as all-reduce or, under plan "halves", as reduce-scatter and all-gather.
Contract reduce_by_plan(const Registry& r) {
  Contract c = renamed(r, "mapping_reduce", "planted_reduce");
  c.traffic = [due = c.traffic](const Case& line, const std::string& plan, int rank) {
    if (plan != "halves") return due(line, plan, rank);
    const int64_t n = line.at("tokens") * line.at("hidden"), p = line.world();
    return std::vector<Traffic>{{Op::reduce_scatter, Reduce::sum, "tp", false, n, line.dtype()},
                                {Op::all_gather, Reduce::none, "tp", false, n / p, line.dtype()}};
  };
  c.plans = {"halves"};
  return c;
}

// One whose truth is zero, whatever the data.
Contract zeros(const Registry& r) {
  Contract c = renamed(r, "mapping_copy", "planted_zeros");
  c.forward = [](const Case&, std::span<const Whole> x, std::vector<Gauge>* gauges) {
    if (gauges) *gauges = {Gauge{}};
    return std::vector<Whole>{{x[0].shape, std::vector<double>(x[0].value.size(), 0.0)}};
  };
  return c;
}

// One without a result.
Contract nothing(const Registry& r) {
  Contract c = renamed(r, "mapping_copy", "planted_nothing");
  c.operands = [operands = c.operands](const Case& line) {
    Operand x = operands(line)[0];
    x.gradient = false;
    return std::vector<Operand>{x};
  };
  c.forward = [](const Case&, std::span<const Whole>, std::vector<Gauge>*) {
    return std::vector<Whole>{};
  };
  return c;
}

}  // namespace

void add_private_contracts(Registry& r) {
  r.add(reduce_by_plan(r));
  r.add(Subject{"", "planted_reduce", r.subject("mapping_reduce", "").make, {}});
  r.add(zeros(r));
  r.add(Subject{"", "planted_zeros", forward(zero), forward_only()});
  r.add(nothing(r));
  r.add(Subject{"", "planted_nothing", [] { return std::make_unique<WritesNothing>(); },
                forward_only()});
}

std::vector<Plant> odd_but_right() {
  const std::string sum = "planted_reduce tp=4 tokens=4 hidden=5";
  Declared even, halves;
  even.other_extents = false;  // blocks that four ranks do not cut evenly
  halves = even;
  halves.plan = "halves";
  const Make twice = [] { return pair(reduce_scatter_and_gather, identity); };
  return {
      {"scatter_that_gathers",
       "mapping_scatter tp=4 tokens=4 hidden=3",
       [] { return pair(own_block, gathered); },
       {{"adjoint", Verdict::passed}},
       {},
       true},
      {"reduce_in_halves", sum, twice, {{"ledger", Verdict::passed}}, halves, true},
      // The same calls under another plan than theirs.
      {"undeclared_halves",
       sum,
       twice,
       {{"ledger", Verdict::failed, 0, "", {"another operation", "met call 1 of forward"}}},
       even,
       true},
      {"another_order_of_k",
       "linear_row tp=2 bias=off dtype=f32 fill=normal tokens=6 in=24 out=5",
       [] { return std::make_unique<RowInAnotherOrder>(); },
       {{"forward", Verdict::passed}},
       forward_only(),
       true,
       1,
       "mapping_reduce tp=2 tokens=3 hidden=5"},
      {"own_sum_in_f32",
       "mapping_reduce tp=8 dtype=f32 fill=normal",
       forward(sums_by_itself),
       {{"forward", Verdict::passed}, {"replica", Verdict::passed}}},
  };
}

std::vector<Plant> vacuous() {
  return {
      {"all_zero_pair",
       "planted_zeros tp=2 tokens=3 hidden=5",
       forward(zero),
       {{"forward", Verdict::vacuous, -1, "", {"zero everywhere", "larger extents"}}},
       forward_only(),
       false,
       1,
       "mapping_copy tp=2 tokens=3 hidden=5"},
      {"nothing_compared",
       "planted_nothing tp=2 tokens=3 hidden=5",
       [] { return std::make_unique<WritesNothing>(); },
       {{"forward", Verdict::vacuous, -1, "", {"nothing was compared", "larger extents"}},
        {"memory", Verdict::vacuous},
        {"repeat", Verdict::vacuous}},
       forward_only(),
       false,
       1,
       "mapping_copy tp=2 tokens=3 hidden=5"},
      // Zero times anything is zero: no derivative says that a gradient is right.
      {"no_derivative",
       "planted_zeros tp=2 tokens=3 hidden=5 fill=normal",
       [] { return pair(zero, zero); },
       {{"gradcheck",
         Verdict::vacuous,
         -1,
         "",
         {"x: differences at the rounding floor", "larger extents"}}},
       {},
       false,
       1,
       "mapping_copy tp=2 tokens=3 hidden=5 fill=normal"},
      {"calls_the_reference",
       "mapping_reduce tp=8 dtype=f32 fill=normal",
       forward(calls_the_reference),
       {{"forward", Verdict::vacuous, -1, "", {"calls the reference"}}}},
  };
}

}  // namespace shardproof::planted
