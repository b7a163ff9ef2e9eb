// Allowed errors: the formulas against first-order values worked out by hand, and real sums in real
// formats, which must stay inside and must not stay far inside everywhere.
#include <gtest/gtest.h>

#include <cmath>

#include "fixtures/random.hpp"
#include "suites/self/toy_evidence.hpp"

namespace shardproof {
namespace {
namespace bounds_test {

using namespace toy;

struct Setting {
  Registry registry;
  Case line;
  Contract c;
  Evidence e;
  explicit Setting(const std::string& keys, Placement to = I(), bool linear = true,
                   bool promises_exact_integers = true)
      : c(contract({4}, on_tp(P()), on_tp(to))) {
    c.linear = linear;
    if (!promises_exact_integers)
      c.integer_range = [](const Case&) { return std::optional<int64_t>(); };
    registry.add(c);
    line = parse("toy " + keys, registry);
    e.line = &line;
    e.contract = &c;
    e.mesh = line.mesh();
    e.operands = c.operands(line);
    e.inputs = 1;
    e.shots.emplace_back();
    e.shots[0].feeds[0].fill = fill_of(line);
  }
  Setting(const Setting&) = delete;
  double bound(double want, const Gauge& g, bool gradient = false) const {
    const Whole w{{1}, {want}};
    return bound_of(e, e.operands[gradient ? 0 : 1], gradient, w, g)(0);
  }
};

Gauge gauge(double magnitude, int64_t terms, int64_t reduced) {
  Gauge g;
  g.magnitude = {magnitude};
  g.squares = {magnitude * magnitude};
  g.terms = terms;
  g.reduced = reduced;
  return g;
}

// First order in u; the exact formula lies above it by a relative n u.
void expect_first_order(double bound, double first_order) {
  EXPECT_GE(bound, first_order * (1 - 1e-12));
  EXPECT_LE(bound, first_order * 1.001);
}

// A family's own bound is taken as it is, and says nothing where it knows nothing.
TEST(Bounds, OfAFamilyAreCountedInTheAccumulation) {
  Gauge g;
  g.magnitude = {3}, g.bound = {8};
  EXPECT_DOUBLE_EQ(Setting("tp=2 fill=normal").bound(3, g),
                   8 * 0x1p-53 + 0x1p-53 * (3 + 8 * 0x1p-53));
  const Setting f32("tp=2 dtype=f32 fill=normal");
  EXPECT_NEAR(f32.bound(3, g), 11 * 0x1p-24, 1e-12);
  g.bound = {1e80};
  EXPECT_TRUE(std::isinf(f32.bound(3, g)));
}

TEST(Precision, FollowsStorageAndDeclaration) {
  const auto of = [](const std::string& keys, Declared d = {}) {
    const Setting s("tp=2 fill=normal " + keys);
    return precision_of(s.line, d);
  };
  EXPECT_EQ(of("dtype=f64").u_acc, 0x1p-53);
  EXPECT_EQ(of("dtype=f32").u_acc, 0x1p-24);
  EXPECT_EQ(of("dtype=bf16").u_acc, 0x1p-24);
  EXPECT_EQ(of("dtype=bf16").u_wire, 0x1p-8);
  EXPECT_EQ(of("dtype=bf16").u_out, 0x1p-8);
  EXPECT_EQ(of("dtype=f16").u_acc, 0x1p-24);
  EXPECT_EQ(of("dtype=f16").u_out, 0x1p-11);
  EXPECT_EQ(of("dtype=bf16 wire=f32").u_wire, 0x1p-24);
  EXPECT_EQ(of("dtype=f32 acc=f64").u_acc, 0x1p-53);
  Declared half;
  half.accumulates_in_storage = true;
  EXPECT_EQ(of("dtype=bf16", half).u_acc, 0x1p-8);
  EXPECT_EQ(of("dtype=f32", half).u_acc, 0x1p-24);
  Declared doubles;
  doubles.accumulates_in_f64 = true;
  EXPECT_EQ(of("dtype=f32", doubles).u_acc, 0x1p-53);
  EXPECT_EQ(of("dtype=bf16", doubles).u_acc, 0x1p-53);
  EXPECT_EQ(of("dtype=bf16", doubles).u_wire, 0x1p-8);
  EXPECT_EQ(of("dtype=f32 acc=f32", doubles).u_acc, 0x1p-24);  // the line says it
  Declared truncating;
  truncating.truncates = true;
  EXPECT_TRUE(of("dtype=bf16", truncating).truncates);
  Declared tf32;
  tf32.multiplies_in_tf32 = true;
  EXPECT_EQ(of("dtype=f32", tf32).u_factor, 0x1p-10);
  EXPECT_EQ(of("dtype=bf16", tf32).u_factor, 0);  // holds its factors as they are
  EXPECT_EQ(of("dtype=f32").u_factor, 0);
}

TEST(Bounds, ZeroOnExactData) {
  EXPECT_EQ(Setting("tp=2 dtype=bf16").bound(3, gauge(10, 4, 2)), 0);
  EXPECT_GT(Setting("tp=2 dtype=bf16 fill=normal").bound(3, gauge(10, 4, 2)), 0);
  // Where the contract is not linear, integers keep exact only what its range says.
  EXPECT_GT(Setting("tp=2 dtype=f32 fill=integers", I(), /*linear=*/false, false)
                .bound(3, gauge(10, 4, 2)),
            0);
  EXPECT_EQ(Setting("tp=2 dtype=f32 fill=integers", I(), /*linear=*/false, true)
                .bound(3, gauge(10, 4, 2)),
            0);
}

TEST(Bounds, ZeroForDataThatAreMoved) {
  EXPECT_EQ(Setting("tp=2 dtype=f32 fill=normal").bound(3, Gauge{}), 0);
}

// |want| = 3, sum |terms| = 10, 4 local terms, 2 ranks: 4 u_acc 10 + 2 u_wire 10 + u_out 3.
TEST(Bounds, FirstOrder) {
  const Gauge g = gauge(10, 4, 2);
  expect_first_order(Setting("tp=2 dtype=f32 fill=normal").bound(3, g), 63 * 0x1p-24);
  expect_first_order(Setting("tp=2 dtype=bf16 fill=normal wire=f32").bound(3, g),
                     60 * 0x1p-24 + 3 * 0x1p-8);
  // f64: the reference errs like the subject, 8 terms in all.
  expect_first_order(Setting("tp=2 dtype=f64 fill=normal").bound(3, g), (63 + 80) * 0x1p-53);
  // No reduction: the wire does not enter.
  expect_first_order(Setting("tp=2 dtype=f32 fill=normal").bound(3, gauge(10, 4, 1)), 43 * 0x1p-24);
}

// Two factors of a product, each off by 2^-10 of itself at most: 2 x 10 x 2^-10 beside the rest.
TEST(Bounds, FactorsInTf32AreOffByAUnitEach) {
  Setting s("tp=2 dtype=f32 fill=normal");
  s.e.declared.multiplies_in_tf32 = true;
  const double bound = s.bound(3, gauge(10, 4, 2));
  EXPECT_GE(bound, 20 * 0x1p-10);
  EXPECT_LE(bound, 20.1 * 0x1p-10);
}

TEST(Bounds, TruncationDoublesAccumulation) {
  Setting s("tp=2 dtype=f32 fill=normal");
  s.e.declared.truncates = true;
  expect_first_order(s.bound(3, gauge(10, 4, 2)), 103 * 0x1p-24);
}

TEST(Bounds,
     PartsAreRoundedEach) {  // a result of type P: u_out sum |parts| in place of u_out |want|
  expect_first_order(Setting("tp=2 dtype=f32 fill=normal", P()).bound(3, gauge(10, 4, 2)),
                     70 * 0x1p-24);
}

TEST(Bounds, ComponentwiseBoundOfAFamily) {  // in units of u_acc; plus u_out |want|
  Gauge g;
  g.bound = {50};
  expect_first_order(Setting("tp=2 dtype=f32 fill=normal").bound(3, g), 53 * 0x1p-24);
}

TEST(Bounds, NoStatementBeyondOneOverU) {
  Declared half;
  half.accumulates_in_storage = true;
  Setting s("tp=2 dtype=bf16 fill=normal");
  s.e.declared = half;
  EXPECT_TRUE(std::isfinite(s.bound(3, gauge(10, 200, 1))));
  EXPECT_TRUE(std::isinf(s.bound(3, gauge(10, 256, 1))));
}

TEST(Bounds, AnInfiniteBoundIsVacuous) {
  Contract c = contract({4, 6}, on_tp(P()), on_tp(I()));
  const auto forward = c.forward;
  c.forward = [forward](const Case& line, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    auto y = forward(line, in, gauges);
    if (gauges) (*gauges)[0].terms = 1000;
    return y;
  };
  Play play(
      std::move(c), "tp=2 dtype=bf16 fill=normal", [](const Locals& x) { return all_reduce(x); },
      [](const Locals& x) { return x; });
  play.e.declared.accumulates_in_storage = true;
  const CheckResult r = play.judge("forward");
  EXPECT_EQ(r.verdict, Verdict::vacuous) << r.note;
  // What is no number is wrong all the same.
  const double right = play.get(1, false, 3);
  for (const double wrong : {double(INFINITY), double(NAN)}) {
    play.set(1, false, 3, wrong);
    EXPECT_EQ(play.judge_again("forward").verdict, Verdict::failed) << wrong;
  }
  play.set(1, false, 3, right);
  EXPECT_EQ(play.judge_again("forward").verdict, Verdict::vacuous);
}

// Two microbatches in f32, sums of parts in bf16 before they are reduced: 2 roundings of 8 bits of
// all |terms| beside what each microbatch and the sum of both may be off.
TEST(Bounds, OfSumsOfPartsRoundThePartsOnceAMicrobatch) {
  Setting s("tp=2 dtype=f32 wire=bf16 fill=cancelling");
  const Whole want{{1}, {1}};
  Gauge g = gauge(100, 8, 2);
  const auto bound = [&] {
    const Addend one{s.e.shots[0].feeds[0], &want, &g};
    return bound_of_sum(s.e, s.e.operands[0], {one, one})(0);
  };
  const double each = bound();
  g.deferred = true;
  const double first_order = 2 * 0x1p-8 * 2 * 100;
  EXPECT_NEAR(bound() - each, first_order, 0.02 * first_order);
}

// ---- Tier A ----

// The variance proxy as oracle/checks/README.md derives it, summed term by term: K terms on each of
// p ranks, in `parts` that the judge adds; sums C and of squares q.
struct Proxy {
  double terms, ranks, parts, sum, squares;

  double n() const { return terms * ranks * parts; }
  double of(double k) const {
    const double v2 = squares - sum * sum / n();
    return v2 * k * (n() - k) / (n() * (n() - 1)) + sum * sum * k * k / (n() * n());
  }
  double of_all(double step, double first, double last) const {
    double all = 0;
    for (double k = first; k <= last; ++k) all += of(step * k);
    return all;
  }
  double allowed(const Precision& p) const {
    const auto gamma = [](double m, double u) { return m * u / (1 - m * u); };
    const double on_wire = ranks > 1 ? parts * (ranks * of(terms) + of_all(terms, 2, ranks)) : 0;
    double proxy = p.u_acc * p.u_acc * (ranks * parts * of_all(1, 1, terms) + squares) +
                   p.u_wire * p.u_wire * on_wire + 0x1p-106 * (of_all(1, 1, n()) + squares);
    if (parts > 1) proxy += p.u_out * p.u_out * parts * of(ranks * terms);
    const double widened =
                     (1 + gamma(terms, p.u_acc)) * (ranks > 1 ? 1 + gamma(ranks, p.u_wire) : 1),
                 lambda = std::sqrt(2 * std::log(2 * 0x1p63 / false_alarm_budget)),
                 computed = lambda * widened * std::sqrt(proxy);
    return parts > 1 ? computed : computed + p.u_out * (std::abs(sum) + computed);
  }
};

Gauge of_signs(int64_t terms, int64_t ranks, int64_t parts) {
  Gauge g = gauge(double(terms * ranks * parts), terms, ranks);
  g.squares = {double(terms * ranks * parts)};  // +1 and -1
  return g;
}

TEST(Bounds, OfSumsInRandomOrderByHand) {
  for (const char* types : {"dtype=f64", "dtype=f32", "dtype=bf16", "dtype=f32 wire=bf16"})
    for (const double parts : {1., 2.}) {
      const Setting s("tp=2 fill=normal " + std::string(types), parts > 1 ? P() : I());
      for (const int64_t ranks : {1, 2, 5})
        for (const double sum : {0., 40.}) {
          const Gauge g = of_signs(512, ranks, int64_t(parts));
          const double due = Proxy{512, double(ranks), parts, sum, g.squares[0]}.allowed(
              precision_of_result(s.e, s.e.operands[1], false));
          EXPECT_NEAR(s.bound(sum, g), due, 1e-9 * due) << types << parts << ranks << sum;
        }
    }
}

// D says 512 u 512 and 512 u of storing; in random order a hundredth of it is allowed.
TEST(Bounds, OfSumsThatAreNotInRandomOrderAreThoseOfAnyOrder) {
  const Gauge g = of_signs(512, 1, 1);
  const double any_order = 512 * 0x1p-24 * 512;
  Setting s("tp=2 dtype=f32 fill=normal");
  EXPECT_LT(s.bound(0, g), 0.01 * any_order);
  s.e.declared.truncates = true;
  EXPECT_GE(s.bound(0, g), 2 * any_order);
  Gauge one_coefficient = g, of_its_own = g;
  one_coefficient.independent = false;
  of_its_own.bound = {512 * 512};
  const Setting plain("tp=2 dtype=f32 fill=normal");
  EXPECT_GE(plain.bound(0, one_coefficient), any_order);
  EXPECT_GE(plain.bound(0, of_its_own), any_order);
  for (const char* words : {"fill=normal strides=expanded", "fill=normal strides=expanded_inputs",
                            "fill=cancelling", "fill=offset"})
    EXPECT_GE(Setting("tp=2 dtype=f32 " + std::string(words)).bound(0, g), any_order) << words;
}

// L = ln(2 2^63 / budget); the tail of chi^2 beyond n + 2 sqrt(n L) + 2 L.
TEST(Bounds, OfTheRmsOfAWholeTensor) {
  const double l = std::log(2 * 0x1p63 / false_alarm_budget);
  for (const int64_t n : {1, 168, 1 << 20})
    EXPECT_DOUBLE_EQ(rms_limit(n) * rms_limit(n) * double(n),
                     double(n) + 2 * std::sqrt(double(n) * l) + 2 * l);
}

// ---- Edges ----

// Sums of 8 in bf16 on 2 ranks that add in bf16: roundings multiply.
TEST(Bounds, RoundingsOnTopOfOthers) {
  Setting s("tp=2 dtype=bf16 fill=cancelling");
  s.e.declared.accumulates_in_storage = true;
  const double u = 0x1p-8, sums = 8 * u / (1 - 8 * u), wire = 2 * u / (1 - 2 * u),
               computed = 10 * ((1 + sums) * (1 + wire) - 1);
  EXPECT_NEAR(s.bound(3, gauge(10, 8, 2)), computed + u * (3 + computed), 1e-12);
}

// A neighbour on a coarse grid is as right, and is rounded when it is stored.
TEST(Bounds, OfAStepOfTheGrid) {
  const Setting s("tp=2 dtype=bf16 fill=cancelling");
  Gauge g = gauge(10, 4, 2);
  const double without = s.bound(3, g);
  g.step = {0.25};
  EXPECT_DOUBLE_EQ(s.bound(3, g) - without, 0.25 * (1 + 0x1p-8));
}

// An infinity is due as it is: no finite number is near it.
TEST(Bounds, OfAnInfinityIsNone) {
  for (const char* fill : {"normal", "cancelling"})
    EXPECT_EQ(Setting("tp=2 dtype=f32 fill=" + std::string(fill)).bound(-INFINITY, gauge(10, 4, 2)),
              0)
        << fill;
}

// Integers of 11 bits pass a tensor core in tf32 as they are.
TEST(Precision, IntegersInTf32) {
  Contract c = contract({4}, on_tp(P()), on_tp(I()));
  c.integer_range = [](const Case&) { return std::optional<int64_t>(5000); };
  Registry r;
  r.add(c);
  Declared tf32;
  tf32.multiplies_in_tf32 = true;
  EXPECT_EQ(exact_range(c, parse("toy dtype=f32", r), tf32), 2048);
  EXPECT_EQ(exact_range(c, parse("toy dtype=f32", r), {}), 5000);
  EXPECT_EQ(exact_range(c, parse("toy dtype=f64", r), tf32), 5000);
}

TEST(Bounds, UnderflowIsAllowedFor) {
  // f16: halves of the smallest subnormal are lost, whatever the magnitude.
  EXPECT_GE(Setting("tp=2 dtype=f16 fill=normal").bound(0, gauge(1e-9, 1, 1)), 0x1p-25);
  EXPECT_LT(Setting("tp=2 dtype=f16 fill=normal").bound(0, gauge(1e-9, 1, 1)), 0x1p-24);
}

// Nothing but losses below the normal range: half of the smallest f16 when each of two parts is
// sent, and when the sum is stored.
TEST(Bounds, UnderflowOfEachPartOnTheWire) {
  EXPECT_NEAR(Setting("tp=2 dtype=f16 fill=normal").bound(0, gauge(0, 1, 2)) / 0x1p-25, 3, 1e-6);
  EXPECT_NEAR(Setting("tp=2 dtype=f16 wire=f32 fill=normal").bound(0, gauge(0, 1, 2)) / 0x1p-25, 1,
              1e-6);
}

// Each of five terms may vanish where it is added up, on each of two ranks; then as above.
TEST(Bounds, UnderflowOfEachTerm) {
  const Setting s("tp=2 dtype=f16 acc=f16 fill=normal");
  EXPECT_NEAR(s.bound(0, gauge(0, 5, 1)) / 0x1p-25, 5 + 1, 1e-6);
  EXPECT_NEAR(s.bound(0, gauge(0, 5, 2)) / 0x1p-25, 2 * 5 + 3, 1e-6);
}

// Of a result that stays in parts each part is stored: on two ranks two halves of the smallest f16.
TEST(Bounds, UnderflowOfEachPartThatIsStored) {
  for (const char* fill : {"normal", "cancelling"}) {
    const Setting s("tp=2 dtype=f16 fill=" + std::string(fill), P());
    EXPECT_NEAR(s.bound(0, gauge(0, 1, 1)) / 0x1p-25, 2, 1e-6) << fill;
  }
}

// Two microbatches, each within 63 u as above, and two additions to what is there, which is 6 at
// most: 2 (u_acc + u_out) 6.
TEST(Bounds, SumsOverMicrobatchesAreThoseOfEachAndOfTheAdditions) {
  const Setting s("tp=2 dtype=f32 fill=normal", I());
  const Gauge g = gauge(10, 4, 2);
  const Whole want{{1}, {3}};
  const Feed& feed = s.e.shots[0].feeds[0];
  // The gradient of what is P on tp is R: whole on every rank.
  expect_first_order(s.bound(3, g, /*gradient=*/true), 63 * 0x1p-24);
  expect_first_order(bound_of_sum(s.e, s.e.operands[0], {{feed, &want, &g}, {feed, &want, &g}})(0),
                     (2 * 63 + 2 * 2 * 6) * 0x1p-24);
}

// ---- Sums that are really taken ----

struct Terms {
  std::vector<double> a, b;
  double value = 0, magnitude = 0;
};

// K products of f32 normals; the value in long double, whose error is 2^-11 of an f64 ulp a term.
Terms terms(int64_t k, uint64_t seed) {
  const Stream123 as(seed, "a"), bs(seed, "b");
  Terms t;
  long double value = 0;
  for (int64_t i = 0; i < k; ++i) {
    t.a.push_back(float(as.normal(uint64_t(i))));
    t.b.push_back(float(bs.normal(uint64_t(i))));
    value += (long double)t.a.back() * t.b.back();
    t.magnitude += std::abs(t.a.back() * t.b.back());
  }
  t.value = double(value);
  return t;
}

float dot(const Terms& t, int64_t begin, int64_t end, int64_t step) {
  float s = 0;
  for (int64_t i = step > 0 ? begin : end - 1; i >= begin && i < end; i += step)
    s += float(t.a[size_t(i)]) * float(t.b[size_t(i)]);
  return s;
}

TEST(Measured, DotProductsInFloatStayInside) {
  const Setting s("tp=2 dtype=f32 fill=normal");
  for (int64_t k : {4, 64, 1024, 4096}) {
    double worst = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      const Terms t = terms(k, seed);
      const double bound = s.bound(t.value, gauge(t.magnitude, k, 1));
      for (const double got :
           {dot(t, 0, k, 1), dot(t, 0, k, -1), dot(t, 0, k / 2, 1) + dot(t, k / 2, k, 1)})
        worst = std::max(worst, std::abs(got - t.value) / bound);
    }
    EXPECT_LT(worst, 1) << k;
    EXPECT_GT(worst, 1e-4) << "a bound this wide sees nothing, K = " << k;
  }
}

// Row-parallel in bf16: parts accumulated in f32, rounded to bf16 on send, rounded again at each
// hop.
TEST(Measured, Bf16RingStaysInside) {
  for (int p : {2, 4, 8}) {
    const Setting s("tp=" + std::to_string(p) + " dtype=bf16 fill=normal");
    const int64_t k = 64 * p;
    double worst = 0;
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      const Terms t = terms(k, seed);
      double ring = 0;
      for (int r = 0; r < p; ++r)
        ring = round_to(ring + round_to(dot(t, 64 * r, 64 * (r + 1), 1), DType::bf16), DType::bf16);
      worst =
          std::max(worst, std::abs(ring - t.value) / s.bound(t.value, gauge(t.magnitude, 64, p)));
    }
    EXPECT_LT(worst, 1) << p;
    EXPECT_GT(worst, 0.005) << p;
  }
}

TEST(Measured, AMissingPartIsFarOutside) {
  const Setting s("tp=8 dtype=f64 fill=normal");
  const Terms t = terms(4096, 3), part = terms(512, 3);  // the first 512 are the same numbers
  const double bound = s.bound(t.value, gauge(t.magnitude, 512, 8));
  EXPECT_GT(std::abs(part.value) / bound, 1e6);
}

}  // namespace bounds_test
}  // namespace
}  // namespace shardproof
