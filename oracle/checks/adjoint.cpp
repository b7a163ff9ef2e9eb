// A: is the backward the transpose of the forward, under the pairing of the types?
//
// Two forms. Exhaustive, where the typed spaces are small: shot i runs F0 on basis vector e_i and
// B0 on basis vector f_i, so that max(n_in, n_out) shots give every entry of A and of B, and B =
// A^T is asked entry by entry. Else probes: <A x, y> = <x, B y> on integers as large as the case
// keeps exact, three of them drawn alone and one with y along A x, where nothing cancels. Unit
// vectors and integers hide what rounds a payload, so a probe of the case's own fill joins the
// first form always and the second where that fill is another. With several inputs each is probed
// by itself, A_k x = F(.., x, ..) - F(.., 0, ..). The pairing alone says nothing of copies that
// part: results of type I and R have to be equal bits as well.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/checks/patterns.hpp"
#include "oracle/checks/pieces.hpp"
#include "oracle/memory_watch.hpp"

namespace shardproof {
namespace {

constexpr int64_t largest_exhaustive = 64;  // elements of a typed space
constexpr double infinity = std::numeric_limits<double>::infinity();

bool is_paired(const Operand& o) {
  return o.role != Operand::output && o.role != Operand::index && o.gradient && o.linear;
}

std::vector<int> paired_inputs(const Evidence& e) {
  std::vector<int> inputs;
  for (int k = 0; k < e.inputs; ++k)
    if (is_paired(e.operands[size_t(k)])) inputs.push_back(k);
  return inputs;
}

int64_t space_of(const Evidence& e, int operand, bool cotangent) {
  const Operand& o = e.operands[size_t(operand)];
  return product(whole_shape(o.shape, cotangent ? dual(o.layout) : o.layout, e.mesh));
}

int64_t cotangent_space(const Evidence& e) {
  int64_t n = 0;
  for (int o = e.inputs; o < int(e.operands.size()); ++o) n += space_of(e, o, true);
  return n;
}

std::optional<int64_t> range_of(const Evidence& e) {
  return exact_range(*e.contract, *e.line, e.declared);
}

bool on_one_host(const Case& line) {
  return !line.has("transport") || line.text("transport") == "processes" ||
         line.text("transport") == "threads";
}

bool exhaustive(const Evidence& e) {
  return e.inputs == 1 && paired_inputs(e).size() == 1 && range_of(e) && on_one_host(*e.line) &&
         space_of(e, 0, false) <= largest_exhaustive && cotangent_space(e) <= largest_exhaustive;
}

// ---- plan

std::string basis_name(int64_t i) { return fmt::format("adjoint:basis:{}", i); }
const char* const probe_names[] = {"adjoint:aligned", "adjoint:probe:0", "adjoint:probe:1",
                                   "adjoint:probe:2", "adjoint:own"};
std::string without_name(const Evidence& e, const std::string& probe, int input) {
  return probe + ":without " + e.operands[size_t(input)].name;
}

Feed integer_feed(const Evidence& e, const Feed& base) {
  Feed f = base;
  if (const auto range = range_of(e)) {
    f.fill = Fill::integers;
    f.range = *range;
  }
  return f;
}

void plan_basis(const Evidence& e, std::vector<Shot>& shots) {
  Shot s;
  s.program = "F0 B0";
  const int64_t n_in = space_of(e, 0, false), n_out = cotangent_space(e);
  for (int64_t i = 0; i < std::max(n_in, n_out); ++i) {
    Feed f = integer_feed(e, shots.at(0).feeds.at(0));
    f.basis = {{0, i < n_in ? i : -1}};
    int64_t at = i;
    for (int o = e.inputs; o < int(e.operands.size()); ++o) {
      const int64_t n = space_of(e, o, true);
      f.basis.push_back({o, at >= 0 && at < n ? at : -1});
      at -= n;
    }
    s.name = basis_name(i);
    s.feeds = {f};
    shots.push_back(s);
  }
}

// A x laid out as a cotangent: each rank is given the values that its own result denotes.
std::vector<double> as_cotangent(const Evidence& e, const Operand& o, const Whole& y) {
  std::vector<double> c(size_t(product(whole_shape(o.shape, dual(o.layout), e.mesh))));
  std::vector<int64_t> to, from;
  for (int r = 0; r < e.mesh.world(); ++r) {
    const Places cotangent(Places::Of::whole, o.shape, dual(o.layout), e.mesh, r),
        value(Places::Of::denoted, o.shape, o.layout, e.mesh, r);
    judging::each_piece(value.size(), [&](size_t first, size_t n) {
      cotangent.read(first, n, to);
      value.read(first, n, from);
      for (size_t i = 0; i < n; ++i) c[size_t(to[i])] = y.value[size_t(from[i])];
    });
  }
  return c;
}

double largest_of(const std::vector<double>& values) {
  double largest = 0;
  for (double v : values) largest = std::max(largest, std::abs(v));
  return largest;
}

// By a power of two, to the size of other cotangents: B A x may be beyond a type that A x is
// within.
void halve_down(std::vector<double>& values, DType dtype) {
  constexpr int orders_of_normals = 3;
  int orders = 0;
  std::frexp(largest_of(values), &orders);
  const int by = std::max(0, orders - orders_of_normals);
  for (double& v : values) v = round_to(std::ldexp(v, -by), dtype);
}

// Shrunk to integers of [-range, range], no sign lost: still along A x, and still exact.
void shrink_to(int64_t range, std::vector<double>& values) {
  const double largest = largest_of(values);
  const double by = largest > double(range) ? double(range) / largest : 1;
  for (double& v : values)
    if (v != 0) v = std::copysign(std::max(1.0, std::nearbyint(std::abs(v) * by)), v);
}

void align(const Evidence& e, Feed& f) {
  if (e.given_in_files) {
    for (int o = e.inputs; o < int(e.operands.size()); ++o) f.given.push_back({o, {}});
    return;
  }
  const ReferenceWork work;
  std::vector<Whole> inputs;
  for (int k = 0; k < e.inputs; ++k) inputs.push_back(drawn(e, f, k, false));
  const auto outputs = e.contract->forward(*e.line, inputs, nullptr);
  for (int o = e.inputs; o < int(e.operands.size()); ++o) {
    const Operand& what = e.operands[size_t(o)];
    std::vector<double> y = as_cotangent(e, what, outputs.at(size_t(o - e.inputs)));
    if (f.fill == Fill::integers)
      shrink_to(f.range, y);
    else
      halve_down(y, e.dtype_of(what));
    f.given.push_back({o, std::move(y)});
  }
}

// What a feed gives are cotangents; a forward alone takes none, and they are large.
void plan_probe(const Evidence& e, const std::string& name, Feed feed, std::vector<Shot>& shots) {
  auto cotangents = std::move(feed.given);
  feed.given.clear();
  Shot s;
  s.program = "F0 B0";
  s.name = name;
  s.feeds[0] = feed;
  s.feeds[0].given = std::move(cotangents);
  shots.push_back(std::move(s));
  if (e.inputs == 1) return;  // linear in its only input: F(0) = 0
  for (int k : paired_inputs(e)) {
    Shot without;
    without.program = "F0";
    without.name = without_name(e, name, k);
    without.feeds[0] = feed;
    without.feeds[0].basis = {{k, -1}};
    shots.push_back(std::move(without));
  }
}

Feed reseeded(Feed f, int n) {
  f.seed += uint64_t(n + 1) * 0x51ed2701;
  return f;
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  const Feed own = shots.at(0).feeds.at(0), integers = integer_feed(e, own);
  const bool every_entry = exhaustive(e);
  if (every_entry) {
    plan_basis(e, shots);
  } else {
    Feed aligned = reseeded(integers, 3);
    align(e, aligned);
    plan_probe(e, probe_names[0], std::move(aligned), shots);
    for (int n : {0, 1, 2}) plan_probe(e, probe_names[n + 1], reseeded(integers, n), shots);
  }
  if (every_entry || own.fill != integers.fill)
    plan_probe(e, probe_names[4], reseeded(own, 4), shots);
}

// ---- judge

struct Tally {
  int64_t compared = 0;
  bool exact = true, said_something = false;
  double worst = 0;
  std::vector<Finding> findings;
  std::string note, vacuous;
};

std::string ratio_text(double ratio, const Mesh& mesh) {
  const std::string is = factor_name(ratio, mesh);
  return "rhs/lhs = " + factor_text(ratio) + (is.empty() ? "" : " = " + is);
}

std::string meaning(double ratio, const Mesh& mesh) {
  const std::string known = factor_means(ratio, mesh);
  return known.empty() ? "the backward is not the transpose of the forward: data lost, permuted or "
                         "taken from elsewhere"
                       : known;
}

bool replicas_hold(const Evidence& e, int shot, Tally& t) {
  judging::Agreement a = judging::same_replicas(e, shot);
  if (a.findings.empty()) return true;
  std::move(a.findings.begin(), a.findings.end(), std::back_inserter(t.findings));
  return false;
}

// Every entry of A and B, both scaled: row i input element, column j cotangent
// element.
struct Entries {
  int64_t rows = 0, columns = 0;
  std::vector<double> a, b;
};

void add_entries(const Evidence& e, int shot, int operand, bool gradient, int64_t stride,
                 double* first) {
  const Operand& o = e.operands[size_t(operand)];
  const Layout layout = judging::result_layout(o, gradient);
  const double weight = double(scaled_weight(e, layout));
  const int step = gradient ? 1 : 0;
  static thread_local std::vector<double> local;
  for (int r = 0; r < e.mesh.world(); ++r) {
    const ResultTensor* t = e.result(r, shot, step, operand, gradient);
    const auto at = whole_indices(o.shape, dual(layout), e.mesh, r);
    if (t) judging::read(*t, local);
    for (size_t i = 0; i < at.size(); ++i)
      first[at[i] * stride] +=
          t && i < local.size() ? weight * local[i] : std::numeric_limits<double>::quiet_NaN();
  }
}

Entries entries_of(const Evidence& e) {
  Entries m{space_of(e, 0, false), cotangent_space(e), {}, {}};
  m.a.assign(size_t(m.rows * m.columns), 0);
  m.b = m.a;
  const int first = e.find_shot(basis_name(0));
  for (int64_t i = 0; i < m.rows; ++i) {
    int64_t column = 0;
    for (int o = e.inputs; o < int(e.operands.size()); column += space_of(e, o, true), ++o)
      add_entries(e, first + int(i), o, false, 1, m.a.data() + i * m.columns + column);
  }
  for (int64_t j = 0; j < m.columns; ++j)
    add_entries(e, first + int(j), 0, true, m.columns, m.b.data() + j);
  return m;
}

// b/a where it is one number over all entries that are not zero on both sides, else NaN.
double common_ratio(const Entries& m) {
  double ratio = std::numeric_limits<double>::quiet_NaN();
  bool known = false;
  for (size_t i = 0; i < m.a.size(); ++i) {
    if (m.a[i] == 0 && m.b[i] == 0) continue;
    const double r = m.a[i] == 0 ? infinity : m.b[i] / m.a[i];
    if (known && r != ratio) return std::numeric_limits<double>::quiet_NaN();
    ratio = r;
    known = true;
  }
  return ratio;
}

std::string entry_text(const Evidence& e, int64_t i, int64_t j) {
  const Operand& x = e.operands[0];
  int o = e.inputs;
  for (; j >= space_of(e, o, true); ++o) j -= space_of(e, o, true);
  const Operand& y = e.operands[size_t(o)];
  return index_text(x.name, i, x.shape, x.layout, e.mesh, false) + " with " +
         index_text(y.name, j, y.shape, dual(y.layout), e.mesh, false);
}

Finding entry_finding(const Evidence& e, const Entries& m, int64_t worst, int64_t wrong,
                      double ratio) {
  const Operand& x = e.operands[0];
  Finding f;
  const double scale = double(pairing_scale(e));
  f.tensor = judging::tensor_name(x, true);
  f.where = entry_text(e, worst / m.columns, worst % m.columns);
  f.index = judging::coordinates(worst / m.columns, whole_shape(x.shape, x.layout, e.mesh));
  f.numeric = true;
  f.got = m.b[size_t(worst)] / scale;
  f.want = m.a[size_t(worst)] / scale;
  f.error = std::isfinite(f.got - f.want) ? std::abs(f.got - f.want) : infinity;
  f.ratio = infinity;
  f.wrong = wrong;
  f.compared = int64_t(m.a.size());
  f.message = "entry of the backward against the forward's";
  f.pattern = std::isnan(ratio) ? "" : "all " + ratio_text(ratio, e.mesh);
  f.means = meaning(ratio, e.mesh);
  return f;
}

void judge_entries(const Evidence& e, Tally& t) {
  const Entries m = entries_of(e);
  int64_t wrong = 0, worst = -1;
  double largest = -1;
  for (size_t i = 0; i < m.a.size(); ++i) {
    t.said_something = t.said_something || m.a[i] != 0 || m.b[i] != 0;
    if (m.a[i] == m.b[i]) continue;
    ++wrong;
    const double off = std::abs(m.a[i] - m.b[i]), error = std::isfinite(off) ? off : infinity;
    if (error > largest) largest = error, worst = int64_t(i);
  }
  t.compared += int64_t(m.a.size());
  t.note = fmt::format("all {} x {} entries of B = A^T", m.rows, m.columns);
  if (wrong == 0) return;
  const double ratio = common_ratio(m);
  t.note = std::isnan(ratio)
               ? fmt::format("{} of {} entries of B differ from A^T", wrong, m.a.size())
               : ratio_text(ratio, e.mesh);
  t.findings.push_back(entry_finding(e, m, worst, wrong, ratio));
}

Finding pairing_finding(const Evidence& e, const Pairing& p, const std::string& probe, int input) {
  const long double scale = pairing_scale(e);
  Finding f;
  f.tensor = judging::tensor_name(e.operands[size_t(input)], true);
  f.numeric = true;
  f.got = double(p.rhs.value() / scale);
  f.want = double(p.lhs.value() / scale);
  f.error = std::isfinite(f.got - f.want) ? std::abs(f.got - f.want) : infinity;
  f.bound = double(p.tolerance() / scale);
  f.ratio = f.bound > 0 && std::isfinite(f.error) ? f.error / f.bound : infinity;
  f.message =
      p.complete
          ? fmt::format("<x, By> against <Ax, y> on '{}', {}", probe, ratio_text(p.ratio(), e.mesh))
          : fmt::format("expected results of every rank on '{}', met none of some", probe);
  f.means = meaning(p.ratio(), e.mesh);
  return f;
}

// The probe with the largest ratio of error to bound speaks for an input; of equals the first, the
// aligned one.
void judge_probes(const Evidence& e, Tally& t) {
  const std::vector<int> inputs = paired_inputs(e);
  std::vector<std::optional<Finding>> worst(inputs.size());
  std::vector<std::string> notes(inputs.size());
  for (const char* name : probe_names) {
    const int shot = e.find_shot(name);
    if (shot < 0) continue;
    std::vector<Paired> paired;
    for (int k : inputs)
      paired.push_back({k, e.inputs == 1 ? -1 : e.find_shot(without_name(e, name, k))});
    const auto pairings = pairings_of(e, shot, paired);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Pairing& p = pairings[i];
      const double tolerance = double(p.tolerance()), error = double(p.error());
      if (p.complete && std::isinf(tolerance) && std::isfinite(error)) {
        t.vacuous =
            judging::without_bound(judging::tensor_name(e.operands[size_t(inputs[i])], true));
        continue;
      }
      ++t.compared;
      t.exact = t.exact && tolerance == 0;
      t.said_something = t.said_something || p.lhs.value() != 0 || p.rhs.value() != 0;
      if (tolerance > 0) t.worst = std::max(t.worst, error / tolerance);
      if (p.equal()) continue;
      Finding f = pairing_finding(e, p, name, inputs[i]);
      if (!worst[i]) notes[i] = ratio_text(p.ratio(), e.mesh);
      if (!worst[i] || f.ratio > worst[i]->ratio) worst[i] = std::move(f);
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!worst[i]) continue;
    t.note = notes[i];
    t.findings.push_back(std::move(*worst[i]));
  }
}

// Every shot of this check in the plan, in order.
std::vector<int> own_shots(const Evidence& e) {
  std::vector<int> own;
  for (size_t s = 0; s < e.shots.size(); ++s)
    if (e.shots[s].name.starts_with("adjoint:")) own.push_back(int(s));
  return own;
}

CheckResult judge(const Evidence& e) {
  const std::vector<int> own = own_shots(e);
  if (own.empty())
    if (auto f = judging::incomplete(e, probe_names[0]))
      return judging::conclude("adjoint", 0, {*f});
  Tally t;
  for (int s : own)
    if (auto f = judging::incomplete(e, s)) return judging::conclude("adjoint", 0, {*f});
  // On rounding data copies that part by an order of summation are the replica check's to name.
  for (int s : own)
    if (exact_data(e, e.shots[size_t(s)].feeds[0]) && !replicas_hold(e, s, t)) break;
  const size_t parted = t.findings.size();
  if (e.find_shot(basis_name(0)) >= 0) judge_entries(e, t);
  if (t.findings.size() == parted)  // an entry that is wrong says more than a probe
    judge_probes(e, t);
  if (t.findings.empty() && !t.vacuous.empty())
    return judging::conclude("adjoint", 0, {}, std::move(t.vacuous));
  if (t.findings.empty() && !t.said_something)
    return judging::conclude(
        "adjoint", 0, {},
        fmt::format("both sides of every pairing are zero, so nothing was asked; {}",
                    judging::values_that_can_be_wrong(*e.line)));
  CheckResult result =
      judging::conclude("adjoint", t.compared, std::move(t.findings), std::move(t.note));
  result.exact = t.exact;
  if (!t.exact) result.ratio = std::max(result.ratio, t.worst);
  return result;
}

bool due(const Contract& contract, const Case& line, const Declared& declared) {
  return contract.linear && judging::has_gradients(contract, line, declared);
}

}  // namespace

Check adjoint_check() {
  return {.name = "adjoint",
          .letter = 'A',
          .asks = "is the backward the transpose of the forward, under the pairing of the types",
          .due = due,
          .plan = plan,
          .judge = judge};
}

}  // namespace shardproof
