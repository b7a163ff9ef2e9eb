// A step of Muon: the iteration against what it does to singular values, by hand and as PyTorch
// takes it, bounds against perturbations and other arrangements in f32, cuts, calls and refusals
// that can be followed by hand, and what its kernel and its twins do on ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "fixtures/index_maps.hpp"
#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/muon_step.hpp"
#include "reference/muon.hpp"
#include "suites/self/goldens.hpp"
#include "suites/self/on_threads.hpp"

namespace shardproof {

void family_muon_step(Registry&);
void controls_muon(Registry&);

namespace {
namespace muon_step_test {

using Doubles = std::vector<double>;
using primitives::CutMatrix;
using reference::certain;
using reference::MatrixExtents;
using reference::MuonRule;
using reference::Quintic;
using reference::Uncertain;

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_muon_step(r);
    controls_muon(r);
    return r;
  }();
  return registry;
}

const Contract& contract() { return family().contract("muon_step"); }
Case line_of(const std::string& words) { return parse("muon_step " + words, family()); }

std::string refusal(const std::string& words) {
  const auto refused = contract().precondition(line_of(words));
  return refused ? refused->what() : "";
}

constexpr double u64 = 0x1p-53;

MuonRule rule(int64_t iterations = 5) {
  MuonRule r;
  r.momentum = 0.5, r.lr = 0.125, r.decay = 0.25, r.eps = 1e-7, r.iterations = iterations;
  return r;
}

Uncertain orthogonalised(int64_t rows, int64_t columns, const Uncertain& u,
                         const MuonRule& by = rule(), double roundoff = u64) {
  return reference::orthogonalised({rows, columns}, u, by, 1, roundoff);
}

void expect_near(const Doubles& got, const Doubles& want, double off = 1e-13) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], off) << i;
}

// 3.4445 s - 4.775 s^3 + 2.0315 s^5, five times.
double moved(double s, int times = 5) {
  for (int i = 0; i < times; ++i) s = 3.4445 * s - 4.775 * std::pow(s, 3) + 2.0315 * std::pow(s, 5);
  return s;
}

// ---- The polynomial

TEST(Quintic, ByHand) {
  EXPECT_NEAR(Quintic{}.at(1), 0.701, 1e-15);
  EXPECT_NEAR(Quintic{}.at(0.5), 1.72225 - 0.596875 + 0.063484375, 1e-15);
  EXPECT_EQ(Quintic{}.at(-1), -Quintic{}.at(1));
}

// p'(s) = 3.4445 - 14.325 s^2 + 10.1575 s^4 is steepest at 0 up to s = sqrt(14.325 / 10.1575), and
// at the end of the interval from there on.
TEST(Quintic, IsSteepestAtZeroOrAtTheEnd) {
  EXPECT_EQ(Quintic{}.steepest(0, 0), 3.4445);
  EXPECT_EQ(Quintic{}.steepest(0, 1.187), 3.4445);
  EXPECT_NEAR(Quintic{}.steepest(0, 1.3), 3.4445 - 14.325 * 1.69 + 10.1575 * 1.69 * 1.69, 1e-12);
}

// Away from 0, p(s) / s = 3.4445 - 4.775 s^2 + 2.0315 s^4 at the beginning, or p' where p'' is 0:
// a - 9 b^2 / (20 c).
TEST(Quintic, IsLessSteepAwayFromZero) {
  EXPECT_NEAR(Quintic{}.steepest(0.3, 0.4), 3.4445 - 4.775 * 0.09 + 2.0315 * 0.0081, 1e-15);
  EXPECT_NEAR(Quintic{}.steepest(0.7, 1.1), 9 * 4.775 * 4.775 / (20 * 2.0315) - 3.4445, 1e-14);
}

// x^5 / 10 - x^3 has the slope x^2 (x^2 / 2 - 3): -4.5 where x^2 = 3.
TEST(Quintic, IsSteepestWhereItBends) {
  const Quintic p{0, -1, 0.1};
  EXPECT_NEAR(p.steepest(0, 2), 4.5, 1e-14);
  EXPECT_NEAR(p.steepest(0, 1), 2.5, 1e-14);
  EXPECT_NEAR(p.steepest(0, 3), 9 * 1.5, 1e-14);
}

// Of s^5 / 4 - s^3 - s, p' = -1 - 3 s^2 + 5/4 s^4 is -2.8 where s^2 = 6/5, and p / s = -1 - s^2 +
// s^4 / 4 is the steeper one behind s^2 = 2.
TEST(Quintic, CountsBothQuotients) {
  const Quintic p{-1, -1, 0.25};
  EXPECT_NEAR(p.steepest(1, 1.3), 2.8, 1e-14);
  EXPECT_NEAR(p.steepest(1.5, 1.5), 1 + 2.25 - 5.0625 / 4, 1e-14);
}

// The comment of reference/muon.hpp: five iterations carry an error 860 times at most.
TEST(Quintic, CarriesAnErrorByWhatIsSaid) {
  double greatest = 0;
  for (int i = 0; i <= 1000; ++i) greatest = std::max(greatest, Quintic{}.at(i / 1000.0));
  EXPECT_NEAR(greatest, 1.2024, 1e-4);
  EXPECT_LE(Quintic{}.steepest(0, 1) * std::pow(Quintic{}.steepest(0, greatest), 4), 860);
}

// ---- What is orthogonalised

TEST(Orthogonalised, MovesSingularValuesByTheQuintic) {
  const Uncertain o = orthogonalised(2, 2, certain(Doubles{3, 0, 0, -4}));
  expect_near(o.value, {moved(0.6), 0, 0, -moved(0.8)});
  EXPECT_NEAR(moved(0.6, 1), 2.0667 - 1.0314 + 0.15796944, 1e-15);
}

// U diag(3, 4) V^T with U a turn by an angle whose sine is 3/5, V by one of 5/13.
TEST(Orthogonalised, KeepsSingularVectors) {
  const auto turned = [](double s, double t) {
    const double cu = 0.8, su = 0.6, cv = 12.0 / 13, sv = 5.0 / 13;
    return Doubles{cu * s * cv + su * t * sv, cu * s * sv - su * t * cv, su * s * cv - cu * t * sv,
                   su * s * sv + cu * t * cv};
  };
  expect_near(orthogonalised(2, 2, certain(turned(3, 4))).value, turned(moved(0.6), moved(0.8)));
}

// Rows of a permutation matrix, scaled: every singular value is 1 / sqrt(2).
TEST(Orthogonalised, ScalesAnOrthogonalMatrix) {
  const double s = moved(std::sqrt(0.5));
  expect_near(orthogonalised(2, 3, certain(Doubles{0, 5, 0, 0, 0, -5})).value, {0, s, 0, 0, 0, -s});
  expect_near(orthogonalised(3, 2, certain(Doubles{0, 0, 5, 0, 0, -5})).value, {0, 0, s, 0, 0, -s});
}

// One row: u / |u| times the singular value that 1 is moved to.
TEST(Orthogonalised, AMatrixOfRankOne) {
  const double s = moved(1);
  expect_near(orthogonalised(1, 2, certain(Doubles{3, -4})).value, {0.6 * s, -0.8 * s});
  expect_near(orthogonalised(2, 2, certain(Doubles{3, -4, 0, 0})).value, {0.6 * s, -0.8 * s, 0, 0});
}

TEST(Orthogonalised, NothingOfNothing) {
  const Uncertain o = orthogonalised(2, 3, certain(Doubles(6)));
  EXPECT_EQ(o.value, Doubles(6));
  EXPECT_EQ(o.error, Doubles(6));
}

TEST(Orthogonalised, DividesByEpsBelowIt) {
  MuonRule by = rule(1);
  by.eps = 10;
  expect_near(orthogonalised(2, 2, certain(Doubles{3, 0, 0, 4}), by).value,
              {moved(0.3, 1), 0, 0, moved(0.4, 1)});
}

TEST(MuonScale, ByHand) {
  EXPECT_EQ(reference::muon_scale({16, 4}, false), 2);
  EXPECT_EQ(reference::muon_scale({4, 16}, false), 1);
  EXPECT_NEAR(reference::muon_scale({16, 4}, true), 0.8, 1e-16);
  EXPECT_NEAR(reference::muon_scale({4, 16}, true), 0.8, 1e-16);
}

// [3] and [4] in one row: m' = m / 2 + g, u = g + m' / 2 or m'.
TEST(MuonStep, ByHand) {
  const Doubles x{8, 16}, m{2, -4}, g{1, 2};
  MuonRule by = rule();
  const auto plain =
      reference::muon_step((by.nesterov = false, by), {1, 2}, x, m, certain(g), 1, u64);
  const double s = moved(1);
  expect_near(plain.m.value, {2, 0});
  expect_near(plain.x.value, {8 * (1 - 1.0 / 32) - s / 8, 16 * (1 - 1.0 / 32)});
  const auto ahead =
      reference::muon_step((by.nesterov = true, by), {1, 2}, x, m, certain(g), 1, u64);
  const double norm = std::sqrt(8);  // of [2, 2]
  expect_near(ahead.x.value, {7.75 - s / 8 * 2 / norm, 15.5 - s / 8 * 2 / norm});
  by.average = true;  // m' = [3/2, -1], u = [5/4, 1/2]
  const auto average = reference::muon_step(by, {1, 2}, x, m, certain(g), 1, u64);
  expect_near(average.m.value, {1.5, -1});
  const double length = std::hypot(1.25, 0.5);
  expect_near(average.x.value, {7.75 - s / 8 * 1.25 / length, 15.5 - s / 8 * 0.5 / length});
}

TEST(MuonStep, IsThatOfPyTorch) {
  const auto golden = goldens::golden("muon");
  const auto& a = golden.at("attributes");
  for (const std::string name : {"tall", "wide", "square"}) {
    const auto of = [&](const char* part, const char* tensor) {
      return goldens::values(golden, part, (name + tensor).c_str());
    };
    MuonRule by;
    by.lr = a.at("lr"), by.decay = a.at("decay"), by.iterations = a.at("ns_steps");
    by.momentum = a.at(name + "_momentum"), by.eps = a.at(name + "_eps");
    by.nesterov = a.at(name + "_nesterov"), by.average = true;
    by.match_rms = a.at(name + "_scale") == "match_rms_adamw";
    const auto tensor = name + "_w";
    const MatrixExtents extents{goldens::extent(golden, tensor.c_str(), 0),
                                goldens::extent(golden, tensor.c_str(), 1)};
    const auto step = reference::muon_step(by, extents, of("inputs", "_w"), of("inputs", "_m"),
                                           certain(of("inputs", "_g")), 1, u64);
    expect_near(step.x.value, of("outputs", "_w"));
    expect_near(step.m.value, of("outputs", "_m"), 1e-15);
  }
}

// ---- Bounds

Doubles normals(size_t n, const char* name) {
  Doubles v(n);
  for (size_t i = 0; i < n; ++i) v[i] = float(Stream123(3, name).normal(i));
  return v;
}

double distance(const Doubles& a, const Doubles& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(squares);
}

// In exact arithmetic: a direction that is off by e moves O by no more than is said, whatever the
// direction of the error and however large it is.
TEST(MuonBounds, CoverPerturbations) {
  for (const double size : {1e-6, 1e-3, 0.01, 0.1})
    for (const auto& [rows, columns] : {std::pair(4, 6), {5, 3}}) {
      const auto n = size_t(rows * columns);
      const Doubles u = normals(n, "u"), e = normals(n, "e");
      Doubles off(n), errors(n);
      for (size_t i = 0; i < n; ++i) off[i] = u[i] + size * e[i], errors[i] = size * std::abs(e[i]);
      for (int iterations : {1, 2, 5}) {
        const Uncertain o = orthogonalised(rows, columns, {u, errors}, rule(iterations), 0);
        const Doubles moved =
            orthogonalised(rows, columns, certain(off), rule(iterations), 0).value;
        EXPECT_LE(distance(moved, o.value), o.error[0]) << size << " " << iterations;
      }
    }
}

// Where u has a singular value of 0, an error grows by p'(0) an iteration: 3.4445^5 = 484.9 times.
TEST(MuonBounds, AreReachedWhereASingularValueIsZero) {
  const double e = 1e-9;
  const Uncertain o = orthogonalised(2, 2, {{1, 0, 0, 0}, {0, 0, 0, e}}, rule(), 0);
  const double moved = orthogonalised(2, 2, certain(Doubles{1, 0, 0, e}), rule(), 0).value[3];
  EXPECT_NEAR(moved / e, 484.9, 0.1);
  EXPECT_GE(o.error[0], moved);
  EXPECT_LE(o.error[0], 3 * moved);  // the norm may move as well: by e, and X0 by 2 e
}

// One number, 5, of p parts, to first order: its norm is off by (p + 2) / 2 + 2 roundings, X0 = 1
// by 3 more, of which |p'(1)| = 0.723 are carried. A is off by 1 + p, A^2 by twice that and 1, b A
// + c A^2 by 4.775 and 2.0315 times these and 4 times the sum of both, and X' by that, 3 |b + c|
// and 3 a.
TEST(MuonBounds, ByHand) {
  const double u = 1e-12, b = 4.775, c = 2.0315;
  for (const double p : {1.0, 3.0}) {
    const double start = (p + 2) / 2 + 2 + 3, gram = 1 + p, square = 2 * gram + 1;
    const double made = b * gram + c * square + 4 * (b + c) + 3 * (b - c) + 3 * 3.4445;
    const Uncertain o = reference::orthogonalised({1, 1}, certain(Doubles{5}), rule(1), p, u);
    EXPECT_NEAR(o.error[0] / u, 0.723 * start + made, 1e-6) << p;
  }
}

// The same of five numbers in a row or in a column: norms and Gram matrices are sums of five terms.
TEST(MuonBounds, OfTheLongerExtentByHand) {
  const double u = 1e-12, p = 3, b = 4.775, c = 2.0315;
  const double start = (p + 6) / 2 + 2 + 3, gram = 5 + p, square = 2 * gram + 5;
  const double made = b * gram + c * square + 4 * (b + c) + 7 * (b - c) + 3 * 3.4445;
  for (const MatrixExtents m : {MatrixExtents{1, 5}, MatrixExtents{5, 1}}) {
    const Uncertain o =
        reference::orthogonalised(m, certain(Doubles{3, 4, 0, 0, 0}), rule(1), p, u);
    EXPECT_NEAR(o.error[0] / u, 0.723 * start + made, 1e-6) << m.rows;
  }
}

// 1 over an eps of 10: X0 = 0.1 is off by the rounding of eps and 3 more, of which p(0.1) / 0.1 are
// carried.
TEST(MuonBounds, OfADirectionBelowEpsByHand) {
  MuonRule by = rule(1);
  by.eps = 10;
  const double u = 1e-12, b = 4.775, c = 2.0315, carried = 3.4445 - b * 0.01 + c * 0.0001;
  const double gram = 2 * 0.01, square = 0.02 * gram + 0.0001;
  const double factor = b * gram + c * square + 4 * (b * 0.01 + c * 0.0001);
  const double made = 0.1 * (factor + 3 * (b * 0.01 - c * 0.0001) + 3 * 3.4445);
  const Uncertain o = reference::orthogonalised({1, 1}, certain(Doubles{1}), by, 1, u);
  EXPECT_NEAR(o.error[0] / u, carried * 0.4 + made, 1e-6);
}

// X0 = 1/2 is off by 3/10: what rounds in the iteration is 8/10 at most, A 0.64 and A^2 0.4096. B
// is off by |b| 0.39 + |c| 0.3471 before anything rounds. The start is off by (0.8 + 3 0.8) u more.
TEST(MuonBounds, OfAnIterationThatBeginsFarOffByHand) {
  MuonRule by = rule(1);
  by.eps = 1;
  const double u = 1e-9, p = 3, b = 4.775, c = 2.0315, start = 0.3 + 3.2 * u;
  const double gram = (1 + p) * 0.64, square = 2 * 0.64 * gram + 0.4096;
  const double size_of_factor = b * 0.25 - c * 0.0625 + b * 0.39 + c * 0.3471;
  const double factor = b * gram + c * square + 4 * (b * 0.64 + c * 0.4096);
  const double made = 0.8 * (factor + 3 * size_of_factor + 3 * 3.4445);
  const Uncertain o = reference::orthogonalised({1, 1}, {{0.5}, {0.3}}, by, p, u);
  const double carried = Quintic().steepest(0.5 - start, 0.5 + start) * start;
  EXPECT_NEAR((o.error[0] - carried) / u, made, 1e-3);  // to first order in u
}

// A norm of 1, off by 0.002, may be above an eps of 1.001 or below it: what it divides by is off by
// as much.
TEST(MuonBounds, OfANormThatMayBeAboveEpsByHand) {
  MuonRule by = rule(1);
  by.eps = 1.001;
  const double x = 1 / 1.001, off = 0.002 * (1 + x) / (1.001 - 0.002);
  const Uncertain o = reference::orthogonalised({1, 1}, {{1}, {0.002}}, by, 1, 0);
  EXPECT_NEAR(o.error[0], Quintic().steepest(x - off, x + off) * off, 1e-12);
}

// u = g + m' / 2 moves by 3/2 of what the gradient is off by, half of it through the momentum.
TEST(MuonBounds, CarryAGradientThroughTheMomentumToo) {
  MuonRule by = rule(1);
  by.eps = 1000;
  const Doubles x{1}, m{2};
  const auto step = [&](const Uncertain& g) {
    return reference::muon_step(by, {1, 1}, x, m, g, 1, 0);
  };
  const auto got = step({{4}, {0.5}});
  EXPECT_EQ(got.m.error, Doubles{0.5});
  const double off = std::abs(step(certain(Doubles{4.5})).x.value[0] - got.x.value[0]);
  EXPECT_NEAR(off, 0.125 * 3.4445 * 0.75 / 1000, 1e-7);
  EXPECT_GE(got.x.error[0], off);
  EXPECT_LE(got.x.error[0], 1.01 * off);
}

// At 0.95 the slope is -1.21, and steeper on the way to 0.9: first order alone is less than p
// moves.
TEST(MuonBounds, CoverWhatTheSlopeAloneDoesNot) {
  MuonRule by = rule(1);
  by.eps = 1;
  const double e = 0.049, slope = 14.325 * 0.9025 - 3.4445 - 10.1575 * 0.81450625;
  const Uncertain o = orthogonalised(1, 1, {{0.95}, {e}}, by, 0);
  EXPECT_GT(moved(0.95 - e, 1) - moved(0.95, 1), slope * e);
  EXPECT_GE(o.error[0], moved(0.95 - e, 1) - moved(0.95, 1));
  EXPECT_LE(o.error[0], 1.7 * e);  // 1.6061, the steepest of all
}

TEST(MuonBounds, SayNothingWhereAStepInAnyDirectionWouldPass) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const Doubles u{3, 0, 0, 4};
  const auto error = [&](double e, double roundoff) {
    return orthogonalised(2, 2, {u, Doubles(4, e)}, rule(), roundoff).error[0];
  };
  EXPECT_TRUE(std::isfinite(error(1e-4, 0)));
  EXPECT_EQ(error(0.1, 0), infinity);
  EXPECT_EQ(error(10, 0), infinity);
  EXPECT_TRUE(std::isfinite(error(0, 0x1p-24)));
  EXPECT_EQ(error(0, 0x1p-8), infinity);  // iterations in bf16
  EXPECT_EQ(error(0, 1), infinity);
}

using Floats = std::vector<float>;

// The iteration in f32: A on the side that is asked for, its sums over `parts` blocks one by one.
Floats in_single(Floats x, int rows, int columns, bool turned, int parts) {
  const auto at = [&](const Floats& v, int i, int j) { return v[size_t(i * columns + j)]; };
  float squares = 0;
  for (float v : x) squares += v * v;
  for (float& v : x) v /= std::sqrt(squares);
  const int side = turned ? columns : rows, other = turned ? rows : columns;
  const auto item = [&](const Floats& v, int s, int o) {
    return turned ? at(v, o, s) : at(v, s, o);
  };
  for (int step = 0; step < 5; ++step) {
    Floats gram(size_t(side * side)), factor(size_t(side * side)), next(x.size());
    for (int i = 0; i < side; ++i)
      for (int j = 0; j < side; ++j)
        for (int part = 0; part < parts; ++part) {
          float sum = 0;
          for (int k = part; k < other; k += parts) sum += item(x, i, k) * item(x, j, k);
          gram[size_t(i * side + j)] += sum;
        }
    for (int i = 0; i < side; ++i)
      for (int j = 0; j < side; ++j) {
        float sum = 0;
        for (int k = 0; k < side; ++k)
          sum += gram[size_t(i * side + k)] * gram[size_t(k * side + j)];
        factor[size_t(i * side + j)] = -4.775f * gram[size_t(i * side + j)] + 2.0315f * sum;
      }
    for (int i = 0; i < side; ++i)
      for (int o = 0; o < other; ++o) {
        float sum = 0;
        for (int k = 0; k < side; ++k) sum += factor[size_t(i * side + k)] * item(x, k, o);
        next[size_t(turned ? o * columns + i : i * columns + o)] = 3.4445f * item(x, i, o) + sum;
      }
    x = next;
  }
  return x;
}

TEST(MuonBounds, HoldForBothSidesAndAreUsed) {
  for (const auto& [rows, columns] : {std::pair(7, 4), {5, 7}, {2, 8}})
    for (const bool turned : {false, true})
      for (const int parts : {1, 3}) {
        const Doubles u = normals(size_t(rows * columns), "f32");
        const Floats got = in_single({u.begin(), u.end()}, rows, columns, turned, parts);
        const Uncertain o =
            reference::orthogonalised({rows, columns}, certain(u), rule(), parts, 0x1p-24 + u64);
        const double off = distance({got.begin(), got.end()}, o.value);
        EXPECT_LE(off, o.error[0]) << rows << " " << columns << " " << turned;
        EXPECT_GE(off, 1e-3 * o.error[0]) << rows << " " << columns << " " << turned;
      }
}

// A wire, or a direction that is rounded to half precision, leaves no bound: such lines are
// refused.
TEST(MuonBounds, HaveRoomInSinglePrecisionOnTheLines) {
  for (const int64_t extent : {4, 7, 10}) {
    const Doubles u = normals(size_t(extent * 7), "room");
    const Uncertain o = orthogonalised(7, extent, certain(u), rule(), 0x1p-24 + u64);
    const double typical = distance(o.value, Doubles(u.size())) / std::sqrt(double(u.size()));
    EXPECT_LE(o.error[0], typical / 10) << extent;
  }
}

// ---- Cuts

TEST(CutMatrix, CutsAsTorchChunkDoes) {
  const CutMatrix rows{7, 4, 0, 4, 3}, columns{5, 7, 1, 3, 0}, whole{5, 7, -1, 4, 0};
  const auto counts = [](const CutMatrix& m) {
    Doubles list;
    for (int r = 0; r < m.ranks; ++r) list.push_back(double(m.count(r)));
    return list;
  };
  EXPECT_EQ(counts(rows), (Doubles{2, 2, 2, 1}));
  EXPECT_EQ(counts(columns), (Doubles{3, 3, 1}));
  EXPECT_EQ(counts({5, 2, 0, 8, 0}), (Doubles{1, 1, 1, 1, 1, 0, 0, 0}));
  EXPECT_EQ(rows.shape(3), (std::vector<int64_t>{1, 4}));
  EXPECT_EQ(columns.shape(2), (std::vector<int64_t>{5, 1}));
  EXPECT_EQ(whole.shape(2), (std::vector<int64_t>{5, 7}));
  EXPECT_EQ(rows.padded(), 8);
  EXPECT_EQ(columns.padded(), 15);
  EXPECT_EQ(whole.padded(), 35);
}

TEST(MuonOperands, OfTinyMatricesAreGradientsAndMomenta) {
  for (const Operand& o : contract().operands(line_of("tiny=2"))) {
    const bool tiny = o.name == "g0" || o.name == "g1" || o.name == "m0" || o.name == "m1";
    EXPECT_EQ(o.factor != nullptr, tiny) << o.name;
    EXPECT_EQ(o.factor ? o.factor(0) : 1, tiny ? 0x1p-100 : 1) << o.name;
  }
}

// The judge's cuts and the subject's are written apart: they must name the same elements.
TEST(CutMatrix, OfJudgeAndSubjectAreTheSame) {
  for (const std::string cut : {"rows", "columns"})
    for (const int p : {2, 3, 4, 8})
      for (const int rows : {1, 5, 7}) {
        const Case line =
            line_of("cut=" + cut + " tp=" + std::to_string(p) + " rows=" + std::to_string(rows));
        const auto operands = contract().operands(line);
        for (size_t k = 0; k < 3; ++k)
          for (int r = 0; r < p; ++r) {
            const CutMatrix m{operands[k].shape[0], operands[k].shape[1], cut == "rows" ? 0 : 1, p,
                              r};
            EXPECT_EQ(local_shape(operands[k].shape, operands[k].layout, line.mesh(), r),
                      m.shape(r))
                << print(line) << " matrix " << k << " rank " << r;
          }
      }
}

// Matrices 0 and 2 of 6 and 4 elements belong to the first of two owners, 1 of 5 to the second.
TEST(OwnedBuffer, HasAPartOfOneLengthForEachOwner) {
  std::vector<View> shards;
  for (int64_t n : {6, 5, 4}) shards.push_back(view_of(nullptr, DType::f64, {n}));
  const auto b = primitives::laid_out(shards, {{0, 2}, {1}});
  EXPECT_EQ(b.block, 10);
  EXPECT_EQ(b.places, (std::vector<int64_t>{0, 10, 6}));
}

TEST(MuonOperands, HaveStateOnTheOwnerAlone) {
  const Case line = line_of("tp=2 cp=2 dp=2 owner=one");
  const auto operands = contract().operands(line);
  for (int rank = 0; rank < line.world(); ++rank) {
    const Mesh mesh = line.mesh();
    const int data = 2 * mesh.coordinate(rank, Axis::dp) + mesh.coordinate(rank, Axis::cp);
    for (int k = 0; k < 3; ++k) {
      const Operand& m = operands[size_t(6 + k)];
      ASSERT_EQ(m.name, "m" + std::to_string(k));
      const auto shape = local_shape(m.shape, m.layout, mesh, rank);
      EXPECT_EQ(shape[0] > 0, data == k) << rank << " " << k;
    }
  }
}

// ---- Calls

std::vector<std::string> calls(const std::string& words, int rank = 0) {
  const Case line = line_of(words);
  std::vector<std::string> list;
  for (const Traffic& t : contract().traffic(line, "", rank))
    list.push_back(std::string(t.backward ? "B " : "") + name(t.op) + " " + name(t.reduce) + " " +
                   t.label + " " + std::to_string(t.count) + " " + name(t.dtype));
  return list;
}

TEST(MuonTraffic, ByHand) {
  using Calls = std::vector<std::string>;
  // [7,4], [5,7] and [7,6] cut by rows over 2: blocks of 4, 3 and 4 rows.
  EXPECT_EQ(calls("tp=2"), (Calls{"all_gather none tp 61 f64"}));
  EXPECT_EQ(calls("tp=2 dtype=bf16 cut=columns"), (Calls{"all_gather none tp 55 f32"}));
  // Gram matrices of the sides that are not cut: 4, 7 and 6 columns.
  EXPECT_EQ(
      calls("tp=2 form=gram ns_steps=2"),
      (Calls{"all_reduce sum tp 3 f64", "all_reduce sum tp 101 f64", "all_reduce sum tp 101 f64"}));
  EXPECT_EQ(calls("tp=2 form=gram ns_steps=1 cut=columns"),
            (Calls{"all_reduce sum tp 3 f64", "all_reduce sum tp 123 f64"}));
  EXPECT_EQ(calls("tp=2 cut=none"), Calls{});
  // 28, 35 and 42 elements: rank 0 of 2 owns the first and the last.
  EXPECT_EQ(calls("dp=2 dtype=bf16 wire=f32"), (Calls{"all_reduce sum dp 105 f32"}));
  EXPECT_EQ(calls("dp=2 dtype=bf16 wire=f32 owner=one", 1),
            (Calls{"reduce_scatter sum dp 140 f32", "all_gather none dp 70 bf16"}));
  EXPECT_EQ(calls("dp=2 cp=2 owner=one"),
            (Calls{"reduce_scatter sum cp,dp 168 f64", "all_gather none cp,dp 42 f64"}));
  // Ranks 0, 1 are tp of the first owner, 2, 3 of the second; the second has 3 and 2 rows of 7.
  EXPECT_EQ(calls("tp=2 dp=2 owner=one", 3),
            (Calls{"reduce_scatter sum dp 60 f64", "all_gather none tp 21 f64",
                   "all_gather none dp 30 f64"}));
  // The second owner has no matrix and nothing to do over tp.
  EXPECT_EQ(calls("tp=2 dp=2 owner=one matrices=1", 2),
            (Calls{"reduce_scatter sum dp 32 f64", "all_gather none dp 16 f64"}));
}

// Of a matrix [7, 4]: A on the side of 4, gathered or of the 4 and 3 rows of a rank of 2; on that
// of 7 where columns are cut.
TEST(MuonProducts, ByHand) {
  const auto products = [](const std::string& words, int rank) {
    std::vector<std::vector<int64_t>> list;
    for (const Gemm& g : contract().gemms(line_of("matrices=1 ns_steps=1 " + words), rank))
      list.push_back({g.m, g.n, g.k});
    return list;
  };
  using Products = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(products("tp=2", 1), (Products{{4, 4, 7}, {4, 4, 4}, {4, 7, 4}}));
  EXPECT_EQ(products("tp=2 form=gram", 1), (Products{{4, 4, 3}, {4, 4, 4}, {4, 3, 4}}));
  EXPECT_EQ(products("tp=2 form=gram cut=columns", 1), (Products{{7, 7, 2}, {7, 7, 7}, {7, 2, 7}}));
  EXPECT_EQ(products("dp=2 owner=one", 1), Products{});
  EXPECT_EQ(contract().gemms(line_of("ns_steps=4"), 0).size(), 36u);
}

// ---- Refusals

TEST(MuonRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const std::string& text : contract().illegal)
    EXPECT_TRUE(contract().precondition(parse(text, family()))) << text;
  for (const char* tier : {"smoke", "ci", "nightly"})
    for (const std::string& text : contract().cases(tier))
      EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
  for (const std::string& text : contract().witnesses)
    EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
}

TEST(MuonRefusals, SayWhatIsWrong) {
  EXPECT_NE(refusal("dp=2 dtype=bf16").find("wire=f32"), std::string::npos);
  EXPECT_NE(refusal("cp=2 dtype=f32 wire=f16").find("wire=f32"), std::string::npos);
  EXPECT_EQ(refusal("tp=2 dtype=bf16"), "");  // no gradient travels
  EXPECT_NE(refusal("dtype=bf16 acc=bf16").find("half precision"), std::string::npos);
  EXPECT_NE(refusal("tp=8 rows=20000 hidden=20000").find("elements"), std::string::npos);
  for (const char* words : {"eps=0", "ns_steps=0", "ns_steps=17", "matrices=0"})
    EXPECT_THROW(line_of(words), BadInput) << words;
}

// What a step takes of a number that it does not take, and why.
TEST(MuonRefusals, SayWhyNumbersAreFew) {
  for (const auto& [words, told] : std::map<std::string, std::string>{
           {"mu=0.9", "expected one of 0.95 1/2 (the usual one, and one whose products do not"},
           {"lr=0.1", "expected one of 1 1/2 1/4 1/8 1/64 (a power of two rounds nothing"},
           {"decay=0.1", "expected one of 0 1/4 1/2 (a power of two rounds nothing"}})
    try {
      line_of(words);
      ADD_FAILURE() << words << " is taken";
    } catch (const BadInput& e) {
      EXPECT_NE(std::string(e.what()).find(told), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("asks nothing more of a subject"), std::string::npos);
    }
}

// ---- On ranks

Judged run(const std::string& words, const std::vector<std::string>& checks) {
  static Options options;
  static Runner runner(options, family());
  static std::vector<std::unique_ptr<Case>> lines;  // evidence points at its line
  lines.push_back(std::make_unique<Case>(line_of(words)));
  return runner.run(*lines.back(), checks, lane_of(*lines.back()));
}

// Outputs of the kernel by operand, whole, where every input but the parameters is zero.
std::vector<Doubles> without_gradients(const Case& line) {
  const auto operands = contract().operands(line);
  const size_t inputs = operands.size() * 3 / 5;
  std::vector<Doubles> whole;
  for (size_t i = inputs; i < operands.size(); ++i)
    whole.emplace_back(size_t(product(operands[i].shape)), NAN);
  std::mutex lock;
  const Mesh mesh = line.mesh();
  const auto thrown = on_threads::run_ranks(mesh, [&](on_threads::TestRank& place) {
    const int r = place.state.rank;
    on_threads::ThreadedRank rank(line, place);
    std::vector<Buffer> buffers;
    buffers.reserve(operands.size());
    std::vector<View> in, out;
    for (size_t i = 0; i < operands.size(); ++i) {
      const Operand& o = operands[i];
      buffers.emplace_back(stored_type(line, o), local_shape(o.shape, o.layout, mesh, r));
      (i < inputs ? in : out).push_back(buffers.back().view());
      if (i < inputs)
        fill_from(in.back(), Doubles(size_t(in.back().elements()), o.name[0] == 'w' ? 32.0 : 0.0));
    }
    primitives::MuonStep().forward(rank, in, out);
    const std::lock_guard hold(lock);
    for (size_t i = 0; i < out.size(); ++i) {
      const Operand& o = operands[inputs + i];
      const auto at = whole_indices(o.shape, o.layout, mesh, r);
      const Doubles local = to_doubles(out[i]);
      for (size_t j = 0; j < at.size(); ++j) whole[i][size_t(at[j])] = local[j];
    }
  });
  for (const std::string& what : thrown) EXPECT_EQ(what, "");
  return whole;
}

// Nothing but the decay: 32 (1 - 1/8 1/4).
TEST(MuonOnRanks, NoGradientAndNoMomentumIsNoDirection) {
  for (const char* words : {"", "tp=2", "tp=2 form=gram", "tp=8 rows=5 form=gram cut=columns",
                            "tp=8 rows=5 dtype=f32"}) {
    const Case line = line_of(words);
    const auto whole = without_gradients(line);
    ASSERT_EQ(whole.size(), 6u);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(whole[k], Doubles(whole[k].size(), 31.0)) << words;
      EXPECT_EQ(whole[3 + k], Doubles(whole[k].size(), 0.0)) << words;
    }
  }
}

// What is small in a step stands far above what is allowed, in f32 as well.
TEST(MuonOnRanks, SmallMistakesStandFarAboveTheBound) {
  for (const char* name : {"muon_update_decays", "muon_scale_of_padded", "muon_gram_left_local",
                           "muon_nesterov_left_out", "muon_converging_coefficients"}) {
    const Judged j = run(std::string("tp=2 dp=2 dtype=f32 form=gram control=") + name, {"forward"});
    EXPECT_EQ(j.result.checks.at(0).verdict, Verdict::failed) << name;
    EXPECT_GE(j.result.checks.at(0).ratio, 30) << name;
  }
}

// An optimizer that keeps the momentum of its first step is right in that step.
TEST(MuonOnRanks, AMomentumOfAnEarlierStepIsSeenByASecondStepOnOtherData) {
  const Judged j = run("dp=2 control=muon_momentum_of_first_step", {"forward", "repeat"});
  EXPECT_EQ(j.result.checks.at(0).verdict, Verdict::passed);
  EXPECT_EQ(j.result.checks.at(1).verdict, Verdict::failed);
}

// A bound that says nothing is no proof: 40 x 40 in f32 after five iterations.
TEST(MuonOnRanks, ABoundThatSaysNothingIsVacuous) {
  const Judged j = run("tp=2 dtype=f32 rows=60 hidden=60 matrices=1", {"forward"});
  EXPECT_EQ(j.result.checks.at(0).verdict, Verdict::vacuous);
  EXPECT_EQ(run("tp=2 rows=60 hidden=60 matrices=1", {"forward"}).result.checks.at(0).verdict,
            Verdict::passed);
}

}  // namespace muon_step_test
}  // namespace
}  // namespace shardproof
