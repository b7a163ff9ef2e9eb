// Attention on tiles (primitives/attention_tiles.hpp), by one thread on tiles of several sizes and
// by the blocks of a device's kernels, which run on the host here (cuda_on_host/): against loops in
// double that are written out, bit for bit where all of it is exact, and against the reference
// within its bounds elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "fixtures/tensor.hpp"
#include "primitives/attention_tiles.hpp"
#include "primitives/serial.hpp"
#include "primitives/work.hpp"
#include "reference/attention.hpp"
#include "suites/self/cuda_on_host/block.hpp"

namespace shardproof::primitives {

namespace kernels_executor {
template <class Body>
int launch(const Body&, void*);
}

namespace {

using reference::Label;
using Values = std::vector<double>;
using cuda_on_host::Order, cuda_on_host::Schedule, cuda_on_host::set_schedule;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// ---- Who runs a body

enum class Runner { serial, small_strips, as_a_block, device };
constexpr Runner all_runners[] = {Runner::serial, Runner::small_strips, Runner::as_a_block,
                                  Runner::device};

template <class Body>
void run_by(Runner runner, const Body& body) {
  if constexpr (Body::shape == Shape::tiles) {
    if (runner == Runner::device) {
      ASSERT_EQ(kernels_executor::launch(body, nullptr), 0) << cuda_on_host::complaint();
    } else {
      in_arithmetic_of(body, [&](auto math) {
        using Math = decltype(math);
        if (runner == Runner::serial) run(body);
        if (runner == Runner::small_strips)
          run_tiles<Math, OneThread<TileSize<16, 16, 16, 16, 8, 2>>>(body);
        if (runner == Runner::as_a_block)
          run_tiles<Math, OneThread<typename BlockTile<Math>::Size>>(body);
        return 0;
      });
    }
  } else {
    run(body);
  }
}

// ---- What is attended to

struct Problem {
  int64_t heads = 4, kv_heads = 1, key_dim = 5, value_dim = 3;
  std::vector<Label> queries, keys;
  reference::AttentionMask mask;
  double scale = 1, softcap = 0;
  DType storage = DType::f32;
  Number factors = Number::f32;
  Strides strides = Strides::contiguous;
  int64_t first_block = -1;  // keys of it; -1: all

  DType sums() const { return factors == Number::f64 ? DType::f64 : DType::f32; }
  int64_t rows() const { return int64_t(queries.size()) * heads; }
  int64_t key_rows() const { return int64_t(keys.size()) * kv_heads; }
  reference::Attention truth() const {
    return {heads, kv_heads, key_dim, value_dim, scale, softcap, mask, queries, keys};
  }
};

std::vector<Label> one_sequence(int64_t n, int64_t first = 0) {
  std::vector<Label> labels;
  for (int64_t i = 0; i < n; ++i) labels.push_back({0, first + i});
  return labels;
}
// Documents one after the other, each with rows of padding behind it.
std::vector<Label> documents(std::initializer_list<int64_t> lengths, int64_t padding) {
  std::vector<Label> labels;
  int64_t document = 0;
  for (int64_t n : lengths) {
    for (int64_t i = 0; i < n; ++i) labels.push_back({document, i});
    for (int64_t i = 0; i < padding; ++i) labels.push_back({-1, 0});
    ++document;
  }
  return labels;
}

struct Given {
  Values q, k, v, g, lse, delta;
};
struct Result {
  Values m, l, a, o, lse, q, k, v;
};

using Draw = std::function<double()>;
Values drawn(const std::vector<Label>& labels, int64_t width, DType dtype, const Draw& draw) {
  Values all;
  for (const Label& l : labels)
    for (int64_t c = 0; c < width; ++c) {
      const double value = draw();
      all.push_back(l.sequence < 0 ? nan : value);
    }
  const Buffer b(dtype, {int64_t(all.size())});
  fill_from(b.view(), all);
  return to_doubles(b.view());
}
Given drawn(const Problem& p, const Draw& draw) {
  Given x;
  x.q = drawn(p.queries, p.heads * p.key_dim, p.storage, draw);
  x.k = drawn(p.keys, p.kv_heads * p.key_dim, p.storage, draw);
  x.v = drawn(p.keys, p.kv_heads * p.value_dim, p.storage, draw);
  x.g = drawn(p.queries, p.heads * p.value_dim, p.storage, draw);
  return x;
}

Buffer buffer(DType dtype, std::vector<int64_t> shape, const Values& values,
              Strides strides = Strides::contiguous) {
  Buffer b(dtype, std::move(shape), strides);
  fill_from(b.view(), values);
  return b;
}
Buffer table(const std::vector<Label>& labels) {
  Values numbers;
  for (const Label& l : labels)
    numbers.push_back(double(l.sequence)), numbers.push_back(double(l.position));
  return buffer(DType::i64, {int64_t(labels.size()), 2}, numbers);
}

AttentionPairs pairs(const Problem& p, const View& q, const View& k, const View& v,
                     const View& queries, const View& keys) {
  return {tensor(q),    tensor(k), tensor(v),  tensor(queries),
          tensor(keys), p.heads,   p.kv_heads, p.key_dim,
          p.value_dim,  p.scale,   p.softcap,  {p.mask.left, p.mask.right, p.mask.causal},
          p.factors};
}

// The forward over one block of keys or two, and the backward; lse and delta of the forward where
// none are given.
Result result_of(const Problem& p, const Given& x, Runner runner) {
  const int64_t nq = int64_t(p.queries.size()), nk = int64_t(p.keys.size());
  const Buffer q = buffer(p.storage, {nq, p.heads, p.key_dim}, x.q, p.strides),
               k = buffer(p.storage, {nk, p.kv_heads, p.key_dim}, x.k, p.strides),
               v = buffer(p.storage, {nk, p.kv_heads, p.value_dim}, x.v, p.strides),
               g = buffer(p.storage, {nq, p.heads, p.value_dim}, x.g, p.strides),
               queries = table(p.queries), keys = table(p.keys);
  const auto filled = [&](std::vector<int64_t> shape, double value) {
    Values values(size_t(product(shape)), value);
    return buffer(p.sums(), std::move(shape), values);
  };
  const double infinity = std::numeric_limits<double>::infinity();
  const Buffer m = filled({nq, p.heads}, -infinity), l = filled({nq, p.heads}, 0),
               a = filled({nq, p.heads, p.value_dim}, 0), o = filled({nq, p.heads, p.value_dim}, 0),
               lse = filled({nq, p.heads}, 0), delta = filled({nq, p.heads}, 0),
               dq = filled({nq, p.heads, p.key_dim}, 0),
               dk = filled({nk, p.kv_heads, p.key_dim}, 0),
               dv = filled({nk, p.kv_heads, p.value_dim}, 0);
  std::vector<std::pair<int64_t, int64_t>> blocks;
  if (p.first_block >= 0)
    blocks = {{0, p.first_block}, {p.first_block, nk - p.first_block}};
  else
    blocks = {{0, nk}};
  const auto block_of = [&](std::pair<int64_t, int64_t> b) {
    const auto part = [&](const Buffer& x) { return x.view().narrow(0, b.first, b.second); };
    return pairs(p, q.view(), part(k), part(v), queries.view(), part(keys));
  };
  for (const auto& b : blocks)
    run_by(runner, AttendBlock{block_of(b), tensor(m.view()), tensor(l.view()), tensor(a.view())});
  run(AttentionOutput{tensor(m.view()), tensor(l.view()), tensor(a.view()), tensor(o.view()),
                      tensor(lse.view()), tensor(o.view()), tensor(lse.view()), p.value_dim,
                      p.factors == Number::f64});
  Result r{to_doubles(m.view()),
           to_doubles(l.view()),
           to_doubles(a.view()),
           to_doubles(o.view()),
           to_doubles(lse.view()),
           {},
           {},
           {}};
  run(AttentionDelta{tensor(o.view()),
                     tensor(g.view()),
                     {},
                     tensor(delta.view()),
                     p.value_dim,
                     p.factors == Number::f64});
  if (!x.lse.empty()) fill_from(lse.view(), x.lse);
  if (!x.delta.empty()) fill_from(delta.view(), x.delta);
  for (const auto& b : blocks) {
    const auto part = [&](const Buffer& x) {
      return tensor(x.view().narrow(0, b.first, b.second));
    };
    const AttentionPull pull{block_of(b), tensor(g.view()), tensor(lse.view()),
                             tensor(delta.view())};
    run_by(runner, QueryGradient{pull, tensor(dq.view())});
    run_by(runner, KeyGradient{pull, part(dk)});
    run_by(runner, ValueGradient{pull, part(dv)});
  }
  r.q = to_doubles(dq.view()), r.k = to_doubles(dk.view()), r.v = to_doubles(dv.view());
  return r;
}

// ---- Exact: every product and sum is a small integer

// q and k have no column in common, so that every score is 0 and every p is 1, which the statistics
// of the backward are given to fit.
Given exact(const Problem& p, unsigned seed) {
  std::mt19937 random(seed);
  Given x = drawn(p, [&] { return double(int(random() % 7) - 3); });
  const int64_t half = p.key_dim / 2;
  for (size_t i = 0; i < x.q.size(); ++i)
    if (int64_t(i) % p.key_dim >= half && !std::isnan(x.q[i])) x.q[i] = 0;
  for (size_t i = 0; i < x.k.size(); ++i)
    if (int64_t(i) % p.key_dim < half && !std::isnan(x.k[i])) x.k[i] = 0;
  for (const Label& l : p.queries)
    for (int64_t h = 0; h < p.heads; ++h) {
      x.lse.push_back(l.sequence < 0 ? nan : 0);
      x.delta.push_back(l.sequence < 0 ? nan : double(int(random() % 5) - 2));
    }
  return x;
}

// What it is then, by plain loops over pairs.
Result truth_of(const Problem& p, const Given& x) {
  Result r{Values(size_t(p.rows()), -INFINITY),
           Values(size_t(p.rows())),
           Values(x.g.size()),
           {},
           {},
           Values(x.q.size()),
           Values(x.k.size()),
           Values(x.v.size())};
  for (size_t i = 0; i < p.queries.size(); ++i)
    for (size_t h = 0; h < size_t(p.heads); ++h)
      for (size_t j = 0; j < p.keys.size(); ++j) {
        if (!reference::visible(p.mask, p.queries[i], p.keys[j])) continue;
        const size_t row = i * size_t(p.heads) + h,
                     key = j * size_t(p.kv_heads) + h / size_t(p.heads / p.kv_heads);
        const size_t dk = size_t(p.key_dim), dv = size_t(p.value_dim);
        r.m[row] = 0, r.l[row] += 1;
        double along = -x.delta[row];
        for (size_t c = 0; c < dv; ++c) {
          r.a[row * dv + c] += x.v[key * dv + c];
          r.v[key * dv + c] += x.g[row * dv + c];
          along += x.g[row * dv + c] * x.v[key * dv + c];
        }
        for (size_t c = 0; c < dk; ++c) {
          r.q[row * dk + c] += p.scale * along * x.k[key * dk + c];
          r.k[key * dk + c] += p.scale * along * x.q[row * dk + c];
        }
      }
  return r;
}

void expect_equal(const Result& met, const Result& due, const std::string& what) {
  EXPECT_EQ(met.m, due.m) << what;
  EXPECT_EQ(met.l, due.l) << what;
  EXPECT_EQ(met.a, due.a) << what;
  EXPECT_EQ(met.q, due.q) << what;
  EXPECT_EQ(met.k, due.k) << what;
  EXPECT_EQ(met.v, due.v) << what;
}

struct Named {
  std::string name;
  Problem problem;
};
std::vector<Named> shapes() {
  std::vector<Named> all;
  const auto add = [&](const char* name, Problem p) { all.push_back({name, std::move(p)}); };
  Problem p;
  p.queries = one_sequence(1, 64), p.keys = one_sequence(65), p.mask.causal = true;
  add("one query, 65 keys", p);
  p.queries = one_sequence(67), p.keys = one_sequence(67);
  add("causal", p);
  p.first_block = 40;
  add("causal, two blocks of keys", p);
  p.first_block = -1, p.mask = {true, 9, -1};
  add("causal window", p);
  p.mask = {false, 3, 20};
  add("window of both sides", p);
  p.mask = {true, -1, -1}, p.queries = p.keys = documents({40, 1, 29}, 2);
  add("documents and padding", p);
  p.heads = 6, p.kv_heads = 2, p.strides = Strides::transposed;
  add("strided, 3 heads of a group", p);
  p.strides = Strides::contiguous, p.key_dim = 134, p.value_dim = 130;
  p.queries = one_sequence(19), p.keys = one_sequence(35);
  add("wider than a strip", p);
  // The last key of a tile stands one ahead of the first query of one, or the first one too far
  // back.
  p = {}, p.queries = one_sequence(33, 14), p.keys = one_sequence(48), p.mask.causal = true;
  add("one pair of a tile is masked", p);
  p.mask = {false, 16, -1};
  add("one pair is out of the window", p);
  p.heads = p.kv_heads = 1, p.key_dim = 8, p.value_dim = 8, p.queries = one_sequence(3),
  p.keys = {};
  add("no keys", p);
  p.keys = one_sequence(3), p.queries = {};
  add("no queries", p);
  p.queries = documents({0, 0}, 5);
  add("nothing but padding", p);
  return all;
}

struct Arithmetic {
  DType storage;
  Number factors;
};
constexpr Arithmetic arithmetics[] = {{DType::f32, Number::f32},   {DType::f64, Number::f64},
                                      {DType::f32, Number::f64},   {DType::bf16, Number::f32},
                                      {DType::bf16, Number::bf16}, {DType::f16, Number::f16}};

class OnTiles : public testing::TestWithParam<Runner> {};

// Blocks on the host take their time: they have each shape in one arithmetic or two, in turn.
bool left_to_hosts(Runner runner, const Named& shape, const Arithmetic& arithmetic) {
  const size_t which = shape.name.size() + size_t(&arithmetic - arithmetics);
  return runner == Runner::device && which % 4 != 0;
}

TEST_P(OnTiles, IntegersAreExact) {
  for (const Named& shape : shapes())
    for (const Arithmetic& arithmetic : arithmetics) {
      if (left_to_hosts(GetParam(), shape, arithmetic)) continue;
      Problem p = shape.problem;
      p.storage = arithmetic.storage, p.factors = arithmetic.factors;
      const Given x = exact(p, 11);
      expect_equal(result_of(p, x, GetParam()), truth_of(p, x),
                   shape.name + " in " + name(p.storage));
    }
}

// What no query of a document sees may be anything, in the same tile: the other document's results
// are NaN, those of the first are what they were.
TEST_P(OnTiles, WhatIsMaskedIsNoTerm) {
  for (const Arithmetic& arithmetic : arithmetics) {
    Problem p;
    p.storage = arithmetic.storage, p.factors = arithmetic.factors;
    p.queries = p.keys = documents({13, 21}, 0);
    Given x = exact(p, 12);
    const Result due = truth_of(p, x);
    const auto spoil = [](Values& all, double value) {
      for (size_t i = all.size() * 13 / 34; i < all.size(); ++i) all[i] = value;
    };
    for (const double value : {nan, double(INFINITY)}) {
      spoil(x.q, value), spoil(x.k, value), spoil(x.v, value), spoil(x.g, value);
      const Result met = result_of(p, x, GetParam());
      for (const auto& [m, d] : {std::pair(&met.l, &due.l),
                                 {&met.a, &due.a},
                                 {&met.q, &due.q},
                                 {&met.k, &due.k},
                                 {&met.v, &due.v}}) {
        const size_t first = d->size() * 13 / 34;
        EXPECT_EQ(Values(m->begin(), m->begin() + int64_t(first)),
                  Values(d->begin(), d->begin() + int64_t(first)))
            << name(p.storage) << " " << value;
        if (m != &met.l) {
          EXPECT_FALSE(std::isfinite(m->back())) << "what it sees is a term";
        }
      }
    }
  }
}

// ---- Rounding data, within what the reference allows

void expect_within(const Values& met, const Values& due, const Values& bound,
                   const std::string& what) {
  ASSERT_EQ(met.size(), due.size()) << what;
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < met.size(); ++i) {
    if (met[i] == due[i]) continue;
    const double ratio = std::abs(met[i] - due[i]) / bound[i];
    if (!(ratio <= worst)) worst = ratio, at = i;
  }
  EXPECT_LE(worst, 1) << what << "[" << at << "]: " << met[at] << " for " << due[at];
}

TEST_P(OnTiles, RoundingStaysWithinTheBounds) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  for (const Named& shape : shapes())
    for (const Arithmetic& arithmetic : arithmetics)
      for (const double softcap : {0.0, 1.5}) {
        if (left_to_hosts(GetParam(), shape, arithmetic)) continue;
        Problem p = shape.problem;
        p.storage = arithmetic.storage, p.factors = arithmetic.factors;
        p.softcap = softcap, p.scale = 1 / std::sqrt(double(p.key_dim));
        if (softcap != 0 && shape.name != "causal") continue;
        Given x = drawn(p, [&] { return normal(random); });
        const Result met = result_of(p, x, GetParam());
        for (Values* values : {&x.q, &x.k, &x.v, &x.g})
          for (double& value : *values) value = std::isnan(value) ? 0 : value;
        const reference::Attention a = p.truth();
        reference::AttentionRounding r;
        r.accumulate = unit_roundoff(p.sums()) + unit_roundoff(DType::f64);
        r.output = r.statistics = unit_roundoff(p.sums());
        r.tiny = smallest_subnormal(p.sums());
        r.ranks = p.first_block < 0 ? 1 : 2;
        r.wire = unit_roundoff(p.sums()), r.wire_tiny = smallest_subnormal(p.sums()) / 2;
        if (p.factors == Number::bf16 || p.factors == Number::f16)
          r.factors = unit_roundoff(p.storage),
          r.tiny = std::max(r.tiny, smallest_subnormal(p.storage));
        const auto due = reference::attention(a, x.q, x.k, x.v);
        const auto gradients = reference::attention_backward(a, x.q, x.k, x.v, x.g, {});
        const auto bounds = reference::attention_bounds(a, r, x.q, x.k, x.v, x.g, {});
        const std::string what = shape.name + " in " + name(p.storage) + " and number " +
                                 std::to_string(int(p.factors)) + ": ";
        // Stored in the type of the sums.
        const double u = unit_roundoff(p.sums());
        const auto stored = [u](Values bound, const Values& due_there) {
          for (size_t i = 0; i < bound.size(); ++i)
            bound[i] += u * (std::abs(due_there[i]) + bound[i]);
          return bound;
        };
        expect_within(met.o, due.o, stored(bounds.o, due.o), what + "o");
        expect_within(met.lse, due.lse, stored(bounds.lse, due.lse), what + "lse");
        expect_within(met.q, gradients.q, stored(bounds.q, gradients.q), what + "dq");
        expect_within(met.k, gradients.k, stored(bounds.k, gradients.k), what + "dk");
        expect_within(met.v, gradients.v, stored(bounds.v, gradients.v), what + "dv");
      }
}

std::string name_of(const testing::TestParamInfo<Runner>& i) {
  const char* const names[] = {"serial", "small_strips", "as_a_block", "device"};
  return names[size_t(i.param)];
}
INSTANTIATE_TEST_SUITE_P(, OnTiles, testing::ValuesIn(all_runners), name_of);

// ---- A device's threads

// Sums of whole factors are made in one order, whoever makes them, and in whichever order the
// threads of a block come.
TEST(Device, BitsAreThoseOfOneThread) {
  std::mt19937_64 random(6);
  std::normal_distribution<double> normal;
  for (const Named& shape : shapes())
    for (const Arithmetic& arithmetic : {arithmetics[0], arithmetics[1], arithmetics[3]}) {
      if (arithmetic.storage != DType::f32 && shape.name != "documents and padding") continue;
      Problem p = shape.problem;
      p.storage = arithmetic.storage, p.factors = arithmetic.factors;
      p.scale = 0.3;
      const Given x = drawn(p, [&] { return normal(random); });
      const Result due = result_of(p, x, Runner::as_a_block);
      for (const Schedule s : {Schedule{Order::descending, 0, true}, {Order::shuffled, 1}}) {
        set_schedule(s);
        expect_equal(result_of(p, x, Runner::device), due, shape.name);
      }
      set_schedule({});
    }
}

// Those of halves do not depend on the threads' order either.
TEST(Device, TensorCoresGiveTheSameBitsInAnyOrderOfThreads) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  Problem p = shapes()[5].problem;
  p.key_dim = p.value_dim = 40;
  for (const Arithmetic& arithmetic : {arithmetics[4], arithmetics[5]}) {
    p.storage = arithmetic.storage, p.factors = arithmetic.factors;
    const Given x = drawn(p, [&] { return normal(random); });
    const Result due = result_of(p, x, Runner::device);
    for (const Schedule s : {Schedule{Order::descending, 0, true}, {Order::shuffled, 1}}) {
      set_schedule(s);
      expect_equal(result_of(p, x, Runner::device), due, name(p.storage));
    }
    set_schedule({});
  }
}

// ---- What is left out

int64_t asked, taken;
struct Counting : OneThread<> {
  template <class Math>
  using Dots = FusedDots<Math, Counting>;
  template <class Math>
  using Sums = FusedSums<Math, Counting>;
  bool any(bool own) const {
    ++asked, taken += own;
    return own;
  }
};

// Tiles of rows (query, head) and of keys of which at least one pair is seen, tried one by one.
int64_t tiles_with_pairs(const Problem& p, int64_t size) {
  const int64_t shared = p.heads / p.kv_heads, rows = int64_t(p.queries.size()) * shared,
                keys = int64_t(p.keys.size());
  int64_t count = 0;
  for (int64_t r = 0; r < rows; r += size)
    for (int64_t k = 0; k < keys; k += size) {
      bool any = false;
      for (int64_t i = r; i < std::min(r + size, rows); ++i)
        for (int64_t j = k; j < std::min(k + size, keys); ++j)
          any = any || reference::visible(p.mask, p.queries[size_t(i / shared)], p.keys[size_t(j)]);
      count += any;
    }
  return count * p.kv_heads;
}

// In one sequence labels say all: exactly the tiles of which nothing is seen are left out, by rows
// as by keys. With documents at least those that are due are taken.
TEST(Skipping, TilesAreTakenThatHaveAPair) {
  struct Case {
    Problem problem;
    bool exactly;
  };
  std::vector<Case> cases;
  Problem p;
  p.heads = 2, p.kv_heads = 1, p.queries = p.keys = one_sequence(100);
  for (const reference::AttentionMask mask : {reference::AttentionMask{true, -1, -1},
                                              {true, 20, -1},
                                              {false, 17, 0},
                                              {false, 0, 33},
                                              {false, -1, 5},
                                              {false, -1, -1}})
    p.mask = mask, cases.push_back({p, true});
  p.queries = one_sequence(33, 67), p.mask = {true, 8, -1}, cases.push_back({p, true});
  p.queries = p.keys = documents({50, 3, 40}, 2), p.mask = {true, -1, -1};
  cases.push_back({p, false});
  for (const Case& c : cases) {
    const Given x = exact(c.problem, 13);
    const Buffer q = buffer(DType::f32, {int64_t(x.q.size())}, x.q),
                 k = buffer(DType::f32, {int64_t(x.k.size())}, x.k),
                 v = buffer(DType::f32, {int64_t(x.v.size())}, x.v),
                 g = buffer(DType::f32, {int64_t(x.g.size())}, x.g),
                 queries = table(c.problem.queries), keys = table(c.problem.keys),
                 m = buffer(DType::f32, {c.problem.rows()}, x.lse),
                 l = buffer(DType::f32, {c.problem.rows()}, x.delta),
                 a = buffer(DType::f32, {int64_t(x.g.size())}, Values(x.g.size())),
                 dv = buffer(DType::f32, {int64_t(x.v.size())}, Values(x.v.size()));
    const AttentionPairs of =
        pairs(c.problem, q.view(), k.view(), v.view(), queries.view(), keys.view());
    const int64_t due = tiles_with_pairs(c.problem, 16);
    const auto expect_taken = [&](const auto& body, const char* what) {
      asked = taken = 0;
      run_tiles<Whole<float>, Counting>(body);
      if (c.exactly) {
        EXPECT_EQ(taken, due) << what;
      }
      EXPECT_GE(taken, due) << what;
      EXPECT_GE(asked, taken);
    };
    expect_taken(AttendBlock{of, tensor(m.view()), tensor(l.view()), tensor(a.view())}, "by rows");
    expect_taken(ValueGradient{{of, tensor(g.view()), tensor(m.view()), tensor(l.view())},
                               tensor(dv.view())},
                 "by keys");
  }
}

}  // namespace
}  // namespace shardproof::primitives
