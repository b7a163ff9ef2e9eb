// What the checks share.
#include "oracle/checks/judging.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "fixtures/sharding.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/checks/patterns.hpp"
#include "oracle/checks/pieces.hpp"
#include "oracle/checks/wide.hpp"
#include "oracle/drawn.hpp"
#include "oracle/words.hpp"

namespace shardproof::judging {

Layout result_layout(const Operand& o, bool gradient) {
  return gradient ? dual(o.layout) : o.layout;
}

DType result_dtype(const Evidence& e, const Operand& o, bool gradient) {
  return stored_type(*e.line, o, gradient);
}

std::string tensor_name(const Operand& o, bool gradient) {
  return gradient ? "gradient of " + o.name : o.name;
}

std::string ranks_text(std::span<const int> ranks, int world) {
  if (int(ranks.size()) == world && world > 1) return "every rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i + 1) text += "-" + std::to_string(ranks[last]), i = last;
  }
  return text;
}

std::vector<int64_t> coordinates(int64_t index, std::span<const int64_t> shape) {
  std::vector<int64_t> c(shape.size());
  for (size_t d = shape.size(); d-- > 0; index /= shape[d]) c[d] = index % shape[d];
  return c;
}

std::string number(double v, int digits) {
  return fmt::format("{:.{}g}", std::isnan(v) ? std::abs(v) : v, digits);
}

bool has_gradients(const Contract& contract, const Case& line, const Declared& declared) {
  if (!declared.backward) return false;
  const auto operands = contract.operands(line);
  return std::any_of(operands.begin(), operands.end(), [](const Operand& o) {
    return o.role != Operand::output && o.role != Operand::index && o.gradient;
  });
}

void read(const ResultTensor& t, std::vector<double>& values) {
  read(t, 0, t.bytes.size() / size_of(t.dtype), values);
}

void read(const ResultTensor& t, size_t first, size_t n, std::vector<double>& values) {
  values.resize(n);
  read(t, first, n, values.data());
}

void read(const ResultTensor& t, size_t first, size_t n, double* values) {
  wide::load(t.bytes.data() + first * size_of(t.dtype), t.dtype, n, values);
  looked_at(t, first, n);
}

void looked_at(const ResultTensor& t, size_t first, size_t n) {
  const size_t width = size_of(t.dtype), begin = first * width, end = begin + n * width;
  if (begin / block != end / block || end == t.bytes.size()) t.bytes.release();
}

int step_of(const Shot& shot, std::string_view word) {
  int step = 0;
  for (size_t at = 0; at < shot.program.size(); ++step) {
    const size_t end = std::min(shot.program.find(' ', at), shot.program.size());
    if (std::string_view(shot.program).substr(at, end - at) == word) return step;
    at = end + 1;
  }
  return -1;
}

// Behind the first line of a job's deadline is where every rank stood: the case says that once.
std::string why_released(const ShotRecord& r) {
  return r.cause == Released::overdue ? first_line(r.text) : r.text;
}

std::string what_ended(const ShotRecord& r) {
  switch (r.status) {
    case ShotRecord::ok:
      return "completed";
    case ShotRecord::rejected:
      return "rejected the line: " + r.text;
    case ShotRecord::released:
      return "was released: " + why_released(r);
    case ShotRecord::threw:
      return "threw: " + r.text;
    case ShotRecord::infrastructure:
    case ShotRecord::too_small:
      return "the harness failed: " + r.text;
    case ShotRecord::not_run:
      return "was not reached, since an earlier shot ended early";
  }
  return "";
}

std::optional<Finding> incomplete(const Evidence& e, const std::string& shot) {
  const int at = e.find_shot(shot);
  if (at >= 0) return incomplete(e, at);
  Finding f;
  f.ratio = std::numeric_limits<double>::infinity();
  f.message =
      "expected the shot '" + shot + "' in the plan, met none; the plan of this check was not run";
  return f;
}

namespace {

// Before or in this shot the time of the job was up.
bool was_overdue(const RankRecord& r, int shot) {
  return std::any_of(r.shots.begin(), r.shots.begin() + shot + 1, [](const ShotRecord& s) {
    return s.status == ShotRecord::released && s.cause == Released::overdue;
  });
}

}  // namespace

std::optional<Finding> incomplete(const Evidence& e, int at) {
  Finding f;
  f.ratio = std::numeric_limits<double>::infinity();
  // The rank that ended for a reason of its own speaks before those that it released.
  int blamed = -1;
  for (int r = 0; r < e.mesh.world(); ++r) {
    const bool there = size_t(r) < e.ranks.size() && size_t(at) < e.ranks[size_t(r)].shots.size();
    if (there && e.record(r, at).status == ShotRecord::ok) continue;
    f.ranks.push_back(r);
    const auto own = [&](int rank) {
      return there && e.record(rank, at).status == ShotRecord::threw;
    };
    if (blamed < 0 || (own(r) && !own(blamed))) blamed = r;
  }
  if (f.ranks.empty()) return std::nullopt;
  f.rank = blamed;
  const bool there =
      size_t(blamed) < e.ranks.size() && size_t(at) < e.ranks[size_t(blamed)].shots.size();
  f.message = fmt::format("did not complete '{}': rank {} {}", e.shots[size_t(at)].name, blamed,
                          there ? what_ended(e.record(blamed, at)) : "handed in no record");
  f.overdue = there && was_overdue(e.ranks[size_t(blamed)], at);
  return f;
}

bool same_bytes(const ResultTensor& a, const ResultTensor& b) {
  if (a.dtype != b.dtype || a.bytes.size() != b.bytes.size()) return false;
  bool same = true;
  each_piece(
      a.bytes.size(),
      [&](size_t at, size_t n) {
        same = same && std::memcmp(a.bytes.data() + at, b.bytes.data() + at, n) == 0;
        a.bytes.release();
        b.bytes.release();
      },
      block);
  return same;
}

namespace {

// Elements whose bytes differ; the first and the one that is furthest off.
struct Differing {
  int64_t count = 0, first = -1, worst = -1;
  double spread = 0;         // of the worst; infinite where one side is no number
  double got = 0, want = 0;  // of the first
};

Differing differing(const ResultTensor& got, const ResultTensor& want) {
  Differing d;
  const size_t width = size_of(got.dtype);
  std::vector<double> g, w;
  each_piece(got.bytes.size() / width, [&](size_t first, size_t n) {
    read(got, first, n, g);
    read(want, first, n, w);
    const std::byte *a = got.bytes.data() + first * width, *b = want.bytes.data() + first * width;
    for (size_t i = 0; i < n; ++i) {
      if (std::memcmp(a + i * width, b + i * width, width) == 0) continue;
      const double off = g[i] == w[i] ? 0 : std::abs(g[i] - w[i]);
      const double apart = std::isfinite(off) ? off : std::numeric_limits<double>::infinity();
      if (d.count++ == 0) d.first = int64_t(first + i), d.got = g[i], d.want = w[i];
      if (d.worst >= 0 && !(apart > d.spread)) continue;
      d.worst = int64_t(first + i), d.spread = apart;
    }
    got.bytes.release();
    want.bytes.release();
  });
  return d;
}

}  // namespace

Finding difference(const Evidence& e, const ByteResult& got, const ByteResult& want) {
  const Operand& o = e.operands[size_t(got.tensor->operand)];
  const Layout layout = result_layout(o, got.tensor->gradient);
  Finding f;
  f.tensor = tensor_name(o, got.tensor->gradient);
  f.rank = got.rank;
  f.ranks = {got.rank};
  f.ratio = std::numeric_limits<double>::infinity();
  if (got.tensor->dtype != want.tensor->dtype ||
      got.tensor->bytes.size() != want.tensor->bytes.size()) {
    f.message =
        fmt::format("expected {} bytes of {}, met {} of {}", want.tensor->bytes.size(),
                    name(want.tensor->dtype), got.tensor->bytes.size(), name(got.tensor->dtype));
    return f;
  }
  const Differing d = differing(*got.tensor, *want.tensor);
  const Places places(Places::Of::whole, o.shape, layout, e.mesh, got.rank);
  if (d.first < 0 || size_t(d.first) >= places.size()) return f;
  std::vector<int64_t> first;
  places.read(size_t(d.first), 1, first);
  f.numeric = true;
  f.got = d.got;
  f.want = d.want;
  f.error = d.spread;
  f.wrong = d.count;
  f.compared = int64_t(got.tensor->bytes.size() / size_of(got.tensor->dtype));
  f.where = index_text(o.name, first[0], o.shape, layout, e.mesh, /*denoted=*/false);
  f.index = coordinates(first[0], whole_shape(o.shape, layout, e.mesh));
  if (d.first != d.worst)
    f.message = fmt::format("the first that differs, others by up to {:.3g}", d.spread);
  return f;
}

namespace {

// Of the ranks on which a tensor differs those that hold the element that is shown, and differ
// there.
std::vector<int> holders_of(const Evidence& e, const Steps& s, const Finding& f, int operand,
                            bool gradient) {
  if (!f.numeric) return {};
  const Operand& o = e.operands[size_t(operand)];
  const Layout layout = result_layout(o, gradient);
  const auto shape = whole_shape(o.shape, layout, e.mesh);
  int64_t at = 0;
  for (size_t d = 0; d < shape.size(); ++d) at = at * shape[d] + f.index[d];
  std::vector<int> holders;
  for (const int r : f.ranks) {
    const ResultTensor* got = e.result(r, s.shot_got, s.step_got, operand, gradient);
    const ResultTensor* want = e.result(r, s.shot_want, s.step_want, operand, gradient);
    const auto own = whole_indices(o.shape, layout, e.mesh, r);
    const auto place = std::find(own.begin(), own.end(), at);
    if (!got || !want || place == own.end()) continue;
    const size_t size = size_of(want->dtype), byte = size_t(place - own.begin()) * size;
    if (std::memcmp(got->bytes.data() + byte, want->bytes.data() + byte, size) != 0)
      holders.push_back(r);
  }
  return holders;
}

}  // namespace

Agreement same_results(const Evidence& e, const Steps& s) {
  Agreement a;
  std::vector<std::pair<int, bool>> of;  // operand and whether its gradient, by finding
  for (int r = 0; r < e.mesh.world(); ++r)
    for (const ResultTensor& want : e.record(r, s.shot_want).results) {
      if (want.step != s.step_want) continue;
      const ResultTensor* got = e.result(r, s.shot_got, s.step_got, want.operand, want.gradient);
      if (got == &want) continue;  // a buffer says nothing about itself
      a.compared += int64_t(want.bytes.size() / size_of(want.dtype));
      if (got && same_bytes(*got, want)) continue;
      Finding f;
      if (got) {
        f = difference(e, {got, r}, {&want, r});
        a.spread =
            std::max(a.spread, f.numeric ? f.error : std::numeric_limits<double>::infinity());
      } else {
        f.tensor = tensor_name(e.operands[size_t(want.operand)], want.gradient);
        f.message = fmt::format("expected a result of rank {}, met none", r);
        f.rank = r, f.ranks = {r};
      }
      auto known = std::find_if(a.findings.begin(), a.findings.end(),
                                [&](const Finding& k) { return k.tensor == f.tensor; });
      if (known == a.findings.end()) {
        a.findings.push_back(std::move(f));
        of.emplace_back(want.operand, want.gradient);
        continue;
      }
      f.ranks.insert(f.ranks.begin(), known->ranks.begin(), known->ranks.end());
      f.wrong += known->wrong, f.compared += known->compared;
      if (f.error > known->error)
        *known = std::move(f);
      else
        known->ranks = f.ranks, known->wrong = f.wrong, known->compared = f.compared;
    }
  for (size_t i = 0; i < of.size(); ++i)
    a.findings[i].holders = holders_of(e, s, a.findings[i], of[i].first, of[i].second);
  return a;
}

CheckResult conclude(const std::string& check, int64_t compared, std::vector<Finding> findings,
                     std::string note) {
  CheckResult result;
  result.check = check;
  result.compared = compared;
  result.note = std::move(note);
  result.findings = std::move(findings);
  for (Finding& f : result.findings) {
    f.check = check;
    result.ratio = std::max(result.ratio, f.ratio);
  }
  std::stable_sort(result.findings.begin(), result.findings.end(),
                   [](const Finding& a, const Finding& b) { return a.ratio > b.ratio; });
  if (!result.findings.empty()) {
    const bool slow = std::all_of(result.findings.begin(), result.findings.end(),
                                  [](const Finding& f) { return f.overdue; });
    result.verdict = slow ? Verdict::hung : Verdict::failed;
  } else if (compared == 0) {
    result.verdict = Verdict::vacuous;
    if (result.note.empty())
      result.note = "nothing was compared; larger extents give elements that are";
  } else {
    result.verdict = Verdict::passed;
  }
  return result;
}

namespace {

// A sum of at least four non-zero terms has (sum |t|)^2 > 3 sum t^2 (Cauchy), and is then rounded
// more than once.
bool must_round(const Gauge& g, size_t i) {
  return g.magnitude[i] * g.magnitude[i] > 3 * g.squares[i];
}

// A result that is kept coarser than its sums are made holds the correctly rounded truth by right,
// and so may one of a kernel that accumulates better than acc= says.
bool rounds_at_random(const Evidence& e, const Feed& feed, const Operand& o, bool gradient,
                      const Gauge& g) {
  const Precision p = precision_of_result(e, o, gradient);
  return !expands(*e.line) && (feed.fill == Fill::normal || feed.fill == Fill::large) &&
         e.line->text("acc").empty() && p.u_acc > 0x1p-53 && p.u_out <= p.u_acc &&
         !g.magnitude.empty() && g.squares.size() == g.magnitude.size();
}

// True where more than 64 elements that are rounded several times all hold the correctly rounded
// truth: no accumulation in the declared precision does that, a call of the reference does.
bool is_the_reference(const Evidence& e, const Feed& feed, int shot, int step, int operand,
                      bool gradient, const Whole& want, const Gauge& g) {
  const Operand& o = e.operands[size_t(operand)];
  if (!rounds_at_random(e, feed, o, gradient, g)) return false;
  const Layout layout = result_layout(o, gradient);
  for (const auto& [axis, placement] : layout)
    if (placement.kind == Placement::partial && e.mesh.size(axis) > 1) return false;
  int64_t coincide = 0;
  std::vector<double> got;
  std::vector<int64_t> indices;
  for (int r = 0; r < e.mesh.world(); ++r) {
    const ResultTensor* t = e.result(r, shot, step, operand, gradient);
    if (!t) return false;
    const Places places(Places::Of::denoted, o.shape, layout, e.mesh, r);
    for (size_t first = 0; first < places.size(); first += piece) {
      const size_t n = std::min(piece, places.size() - first);
      read(*t, first, n, got);
      places.read(first, n, indices);
      for (size_t i = 0; i < n; ++i) {
        const size_t at = size_t(indices[i]);
        if (!must_round(g, at)) continue;
        if (got[i] != round_to(want.value[at], t->dtype)) return false;
        ++coincide;
      }
    }
  }
  return coincide > 64;
}

void add(const Evidence& e, int operand, bool gradient, Compared c, Judgement& j) {
  const Operand& o = e.operands[size_t(operand)];
  const Layout layout = result_layout(o, gradient);
  j.exact = j.exact && c.exact;
  j.compared += c.compared;
  if (c.worst_at >= 0 && (j.where.empty() || c.worst_ratio > j.ratio)) {
    j.rank = c.worst_rank;
    j.bound = c.worst_bound;
    j.index = coordinates(c.worst_at, denoted_shape(o.shape, layout, e.mesh));
    j.where =
        index_text(tensor_name(o, gradient), c.worst_at, o.shape, layout, e.mesh, /*denoted=*/true);
  }
  j.ratio = std::max(j.ratio, c.worst_ratio);
  if (c.finding)
    j.findings.push_back(std::move(*c.finding));
  else if (c.unbounded > 0)
    j.vacuous = without_bound(tensor_name(o, gradient));
  else if (c.zeros && c.compared > 0)
    j.vacuous = tensor_name(o, gradient) +
                fmt::format(": truth and result are zero everywhere, so nothing was asked; {}",
                            values_that_can_be_wrong(*e.line));
}

void add(std::optional<WholeTensor> w, Judgement& j) {
  if (!w) return;
  if (w->ratio() > j.ratio && !w->finding) {
    j.rank = -1;
    j.index.clear();
    j.bound = w->limit;
    j.where = "rms of errors in their scales";
  }
  j.ratio = std::max(j.ratio, w->ratio());
  if (w->finding) j.findings.push_back(std::move(*w->finding));
}

}  // namespace

const Gauge& gauge_of(const std::vector<Gauge>& gauges, size_t i) {
  static const Gauge none;
  return i < gauges.size() ? gauges[i] : none;
}

std::string without_bound(const std::string& tensor) {
  return tensor +
         ": no error is too large here, since the sums are longer than 1/u of the format, or "
         "errors of a format this coarse grow beyond any value; a wider dtype= or acc=, smaller "
         "extents or fewer steps in a row give a bound";
}

std::string values_that_can_be_wrong(const Case& line) {
  const bool packed = line.has("docs") && !(line.text("docs") + line.text("cu_seqlens")).empty();
  return fmt::format(
      "{}larger extents, another fill= or another seed= give values that can be wrong",
      packed ? "longer documents, " : "");
}

Judgement against_truth(const Evidence& e, int shot, std::string_view word, bool gradient) {
  Judgement j;
  const Shot& s = e.shots[size_t(shot)];
  const Feed& feed = s.feeds.at(size_t(std::stoi(std::string(word.substr(1)))));
  const Truth& truth = e.truth(feed);
  const int step = step_of(s, word), begin = gradient ? 0 : e.inputs,
            end = gradient ? e.inputs : int(e.operands.size());
  for (int i = begin; i < end; ++i) {
    const Operand& o = e.operands[size_t(i)];
    if (gradient && (!o.gradient || o.role == Operand::index)) continue;
    const size_t k = size_t(i - begin);
    const Whole& want = (gradient ? truth.gradients : truth.outputs).at(k);
    const Gauge& gauge = gauge_of(gradient ? truth.gradient_gauges : truth.output_gauges, k);
    Compared c =
        compare(e, shot, step, i, gradient, want, bound_of(e, feed, o, gradient, want, gauge));
    const bool clean = !c.finding;
    add(e, i, gradient, std::move(c), j);
    if (clean)
      add(whole_tensor(e, shot, step, i, gradient, want,
                       scale_of(e, feed, o, gradient, want, gauge)),
          j);
    if (clean && is_the_reference(e, feed, shot, step, i, gradient, want, gauge))
      j.vacuous = tensor_name(o, gradient) +
                  ": every element is the correctly rounded truth; a subject that calls the "
                  "reference proves nothing, nor does one whose sums are in f64 where the line "
                  "asks for f32: accumulate as acc= says, declare accumulates_in_f64, or judge "
                  "lines with acc=f64";
  }
  return j;
}

namespace {

// Judged again as if the line had another value of a key, which the ranks have not seen.
bool passes_with(const Evidence& e, std::string_view word, bool gradient, const std::string& key,
                 const std::string& value) {
  Case line = *e.line;
  line.set(key, value);
  Evidence other = e;
  other.line = &line;
  std::optional<Truth> truth;
  other.truth = [&](const Feed& feed) -> const Truth& {
    if (truth) return *truth;
    truth.emplace();
    truth->inputs = drawn_inputs(e, feed);
    truth->outputs = e.contract->forward(line, truth->inputs, &truth->output_gauges);
    if (!gradient) return *truth;
    truth->cotangents = drawn_cotangents(e, feed);
    truth->gradients =
        e.contract->backward(line, truth->inputs, truth->cotangents, &truth->gradient_gauges);
    return *truth;
  };
  return against_truth(other, 0, word, gradient).findings.empty();
}

}  // namespace

Judgement base_against_truth(const Evidence& e, std::string_view word, bool gradient) {
  Judgement j = against_truth(e, 0, word, gradient);
  const auto speaks = [](const Finding& f) { return !f.means.empty() && f.means != means_of_near; };
  if (!e.contract->meaning || j.findings.empty() ||
      std::any_of(j.findings.begin(), j.findings.end(), speaks))
    return j;
  Off off;
  for (const Finding& f : j.findings) off.names.push_back(f.tensor);
  off.pass_with = [&](const std::string& key, const std::string& value) {
    return !exact_data(e, e.shots[0].feeds.at(0)) && passes_with(e, word, gradient, key, value);
  };
  // It is said of all that is off and all that is not, whichever of them is told first.
  if (const std::string means = e.contract->meaning(*e.line, off); !means.empty())
    for (Finding& f : j.findings) f.means = means;
  return j;
}

CheckResult conclude(const std::string& check, Judgement j, std::string note) {
  CheckResult result = conclude(check, j.compared, std::move(j.findings), std::move(note));
  result.exact = j.exact && j.compared > 0;
  result.ratio = std::max(result.ratio, j.ratio);
  if (result.verdict != Verdict::passed) {
    return result;
  }
  if (!j.vacuous.empty()) {
    result.verdict = Verdict::vacuous;
    result.note = j.vacuous;
  }
  result.bound = j.bound;
  result.rank = j.rank;
  result.index = std::move(j.index);
  result.where = std::move(j.where);
  return result;
}

}  // namespace shardproof::judging
