// Faults of the parent's own business: records that are not what they say, a comparison that asks
// nothing, a selection of nothing, a bound that is too wide.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oracle/checks/judging.hpp"
#include "oracle/report.hpp"
#include "suites/self/planted.hpp"

namespace shardproof::planted {
namespace {

const std::string small = "mapping_reduce tp=4 tokens=3 hidden=5";

std::string missing(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    if (text.find(word) == std::string::npos)
      return fmt::format("expected '{}', met: {}", word, text);
  return "";
}

// --- records

using Alter = std::function<std::vector<std::byte>(RankHost&, std::vector<std::byte>)>;

// A run whose records are altered on their way is no judgement, and blames the harness.
std::string refused(const Alter& alter, const std::vector<std::string>& words) {
  const RankMain honest = rank_main(registry());
  const RankMain main = [=](RankHost& host, std::span<const std::byte> job) {
    return alter(host, honest(host, job));
  };
  const Children children;
  try {
    const Judged j = judge(line_of(small, ""), {"forward"}, main);
    return fmt::format("expected no judgement, met forward {}",
                       name(j.result.checks.at(0).verdict));
  } catch (const Infrastructure& e) {
    if (std::string wrong = missing(e.what(), words); !wrong.empty()) return wrong;
  }
  const std::string left = children.left();
  return left.empty() ? "" : "processes are left behind: " + left;
}

std::vector<std::byte> signed_by(std::vector<std::byte> record, int rank, uint32_t case_offset) {
  RankRecord r = parse_record(record).value();
  r.rank = rank;
  r.number += case_offset;
  return serialize(r);
}

std::string truncated_record() {
  return refused(
      [](RankHost& host, std::vector<std::byte> record) {
        if (host.rank == 2) record.resize(record.size() - 1);
        return record;
      },
      {"rank 2", "not whole"});
}

std::string empty_record() {
  return refused(
      [](RankHost& host, std::vector<std::byte> record) {
        if (host.rank == 3) record.clear();
        return record;
      },
      {"rank 3", "not whole", "0 bytes"});
}

std::string record_with_more_behind_it() {
  return refused(
      [](RankHost& host, std::vector<std::byte> record) {
        if (host.rank == 0) record.push_back({});
        return record;
      },
      {"rank 0", "not whole"});
}

// Results of a sum are equal on all ranks: nothing but the signature tells the records apart.
std::string record_of_another_rank() {
  return refused(
      [](RankHost& host, std::vector<std::byte> record) {
        return host.rank == 1 ? signed_by(std::move(record), 2, 0) : record;
      },
      {"expected the record of rank 1", "met that of rank 2"});
}

std::string record_of_another_case() {
  return refused(
      [](RankHost& host, std::vector<std::byte> record) {
        return host.rank == 3 ? signed_by(std::move(record), 3, 1) : record;
      },
      {"expected the record of rank 3 for case 1", "met that of rank 3 for case 2"});
}

std::string records_that_are_whole() {
  const Judged j = judge(line_of(small, ""), {"forward"}, rank_main(registry()));
  return differs(j, {"forward", Verdict::passed});
}

// --- comparisons

// A repeat check whose second run is, by mistake, the first one.
std::string buffer_with_itself() {
  const Case line = line_of(small, "");
  const Judged j = judge(line, {"repeat"});
  const auto verdict = [&](const char* shot) {
    const int at = j.evidence.find_shot(shot);
    const auto a = judging::same_results(j.evidence, {at, 0, 0, 0});
    return judging::conclude("repeat", a.compared, a.findings).verdict;
  };
  if (verdict("base") != Verdict::vacuous)
    return fmt::format("expected vacuous, met {}", name(verdict("base")));
  if (verdict("repeat") != Verdict::passed)
    return fmt::format("two runs: expected passed, met {}", name(verdict("repeat")));
  return "";
}

// Right in the first forward of a step and wrong in the second: the base shot never sees it.
std::string wrong_from_the_second_forward_on() {
  const Case line = line_of("mapping_reduce tp=2 tokens=4 hidden=6 fault=skip@forward.tp.2", "");
  const Judged j = judge(line, {"forward", "ledger", "accumulate"});
  for (const char* passes : {"forward", "ledger"})
    if (const std::string wrong = differs(j, {passes, Verdict::passed}); !wrong.empty())
      return wrong;
  return differs(j, {"accumulate", Verdict::failed, -1, "", {"F1", "wrong the second"}});
}

// --- selections

std::string empty_selection() {
  Options nothing;
  nothing.patterns = {"mapping_copy tp=5"};
  try {
    return fmt::format("expected a refusal, met {} cases", plan_gate(nothing, registry()).size());
  } catch (const BadInput& e) {
    if (std::string wrong = missing(e.what(), {"selection is empty"}); !wrong.empty()) return wrong;
  }
  Report report;
  report.complete = true;
  const int code = exit_code(report);
  return code == 3 ? ""
                   : fmt::format("expected exit 3 of a run in which nothing ran, met {}", code);
}

// --- bounds

// f32 sums of two: the allowed error is 3u of the magnitude and u of the sum, so at most 4u of a
// sum without cancellation. The control is off by 24u there, six times as much; a healthy sum is
// rounded once and off by u.
void scaled_by_24u(Rank& rank, const View& in, const View& out) {
  reduced(rank, in, out);
  for (int64_t i = 0; i < out.elements(); ++i)
    store(out.flat(i), out.dtype, load(out.flat(i), out.dtype) * (1 + 24 * 0x1p-24));
}

// The sum with `times` the size of terms that a bound is computed from, and the control: a bound of
// (3 times + 1) u in place of 4u.
void add_with_bound(Registry& r, const std::string& contract, double times,
                    const Map& subject = reduced) {
  Contract c = registry().contract("mapping_reduce");
  c.name = contract;
  c.family = "planted";
  c.cases = [](const std::string&) { return std::vector<std::string>{}; };
  c.illegal.clear();
  c.forward = [compute = c.forward, times](const Case& line, std::span<const Whole> x,
                                           std::vector<Gauge>* gauges) {
    auto y = compute(line, x, gauges);
    if (gauges) {
      for (double& m : gauges->at(0).magnitude) m *= times;
      for (double& s : gauges->at(0).squares) s *= times * times;
    }
    return y;
  };
  r.add(std::move(c));
  r.add(Subject{"", contract, forward(subject), forward_only()});
  Control off;
  off.name = "off_by_24u";
  off.contract = contract;
  off.make = forward(scaled_by_24u);
  off.declared = forward_only();
  off.check = "forward";
  off.imitates = "an error of six bounds";
  off.witness = contract + " tp=2 dtype=f32 fill=normal";
  r.add(std::move(off));
}

// The control of a right bound is caught; under a bound of 10 times as much it must escape, which
// the table of the controls says and the exit code follows.
std::string bound_ten_times_too_wide() {
  Registry r;
  add_with_bound(r, "right", 1);
  add_with_bound(r, "wide", 13);
  Report report = gate_of(r);
  if (report.controls.size() != 2)
    return fmt::format("expected two controls, met {}", report.controls.size());
  const std::string table = controls_table(report);
  if (report.controls[0].outcome != ControlResult::caught || weak(report.controls[0]))
    return "right bound: expected caught with a margin, met\n" + table;
  if (report.controls[1].outcome != ControlResult::escaped || exit_code(report) != 3)
    return "wide bound: expected escaped and exit 3, met\n" + table;
  if (std::string wrong = missing(table, {"ESCAPED", "wide tp=2"}); !wrong.empty()) return wrong;
  if (std::string wrong = missing(closing(report), {"forward of planted does not see off_by_24u"});
      !wrong.empty())
    return wrong;
  report.controls.pop_back();
  const int code = exit_code(report);
  return code == 0 ? "" : fmt::format("right bound alone: expected exit 0, met {}", code);
}

// A subject that is wrong on a control's witness, which no case holds: its control is not judged,
// and the run fails for what failed.
std::string failing_twin() {
  Registry r;
  add_with_bound(r, "right", 1, scaled_by_24u);
  const Report report = gate_of(r);
  if (report.controls.size() != 1 || report.controls[0].outcome != ControlResult::unjudged)
    return "expected one control that is not judged, met\n" + controls_table(report);
  if (report.cases.size() != 1 || report.cases[0].line != "right tp=2 dtype=f32 fill=normal")
    return fmt::format("expected the failing twin among the cases once, met {} cases",
                       report.cases.size());
  const int code = exit_code(report);
  return code == 1 ? "" : fmt::format("expected exit 1, met {}: {}", code, closing(report));
}

// An error of one and a half bounds is seen, one of half a bound is not. The bound in closed form:
// two f32 values are added, with at most 3u of |x0| + |x1|, and stored, with u of the sum.
Map off_by_bounds(double bounds, bool everywhere) {
  return [=](Rank& rank, const View& in, const View& out) {
    const View both = rank.workspace(in.dtype, {2, in.elements()});
    group(rank).all_gather(view_of(in.data, in.dtype, {1, in.elements()}), both, 0);
    const std::vector<double> x = to_doubles(both);
    const size_t n = x.size() / 2;
    for (size_t i = 0; i < n; ++i) {
      const double sum = x[i] + x[n + i],
                   bound = 0x1p-24 * (3 * (std::abs(x[i]) + std::abs(x[n + i])) + std::abs(sum));
      store(out.flat(int64_t(i)), out.dtype, sum + (everywhere || i == 7 ? bounds * bound : 0));
    }
  };
}

std::string bound_twice_as_wide() {
  const std::string line = " tp=2 tokens=3 hidden=5 dtype=f32 fill=normal";
  Registry r;
  add_with_bound(r, "over", 1, off_by_bounds(1.5, false));
  add_with_bound(r, "under", 1, off_by_bounds(0.5, true));
  const auto verdict = [&](const std::string& contract) {
    Options options;
    Runner runner(options, r);
    const Case c = parse(contract + line, r);
    return runner.run(c, {"forward"}, lane_of(c));
  };
  if (std::string wrong =
          differs(verdict("over"), {"forward", Verdict::failed, -1, "y[1,2]", {"one element"}});
      !wrong.empty())
    return "1.5 bounds: " + wrong;
  if (std::string wrong = differs(verdict("under"), {"forward", Verdict::passed}); !wrong.empty())
    return "0.5 bounds: " + wrong;
  return "";
}

}  // namespace

Report gate_of(const Registry& r) {
  Options options;
  options.transports = {"processes"};
  options.self = false;  // the gate around this one asks the transport
  Progress silent;
  return run_gate(options, r, silent);
}

Planted without_subject(std::string name, std::string (*plant)()) {
  return {std::move(name), [plant](double) { return plant(); }};
}

std::vector<Planted> of_the_parent() {
  return {
      without_subject("records_that_are_whole", records_that_are_whole),
      without_subject("truncated_record", truncated_record),
      without_subject("empty_record", empty_record),
      without_subject("record_with_more_behind_it", record_with_more_behind_it),
      without_subject("record_of_another_rank", record_of_another_rank),
      without_subject("record_of_another_case", record_of_another_case),
      without_subject("buffer_with_itself", buffer_with_itself),
      without_subject("wrong_from_the_second_forward_on", wrong_from_the_second_forward_on),
      without_subject("empty_selection", empty_selection),
      without_subject("bound_ten_times_too_wide", bound_ten_times_too_wide),
      without_subject("bound_twice_as_wide", bound_twice_as_wide),
      without_subject("failing_twin", failing_twin),
  };
}

}  // namespace shardproof::planted
