// The main job: cases, named controls and operators that are due, run and compared with the
// manifest of what was due.
#include "oracle/gate.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <list>
#include <map>
#include <set>

#include "oracle/abilities.hpp"
#include "oracle/clock.hpp"
#include "oracle/comm/faults.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/device.hpp"
#include "oracle/due.hpp"
#include "oracle/dump.hpp"
#include "oracle/gate_controls.hpp"
#include "oracle/gate_jobs.hpp"
#include "oracle/gate_plan.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/overflow.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/run.hpp"
#include "oracle/self.hpp"
#include "oracle/too_small.hpp"
#include "oracle/words.hpp"

namespace shardproof {
namespace {

using namespace gating;

class Gate {
 public:
  Gate(const Options& o, const Registry& r, Progress& p)
      : options_(o), registry_(r), progress_(p), runner_(o, r) {
    if (!o.dump.empty()) dumps_ = std::make_shared<Dumps>(o.dump);
    runner_.worlds().meanwhile = [this] { progress_.tick(); };
  }

  Report run(const std::vector<Due>& due) {
    const double begin = now();
    report_.command = options_.command;
    report_.program = options_.program;
    report_.required = options_.require;
    alone_ = due.size() == 1;
    report_.versions = versions();
    expect(due);
    progress_.begin(count(due, Due::healthy), count(due, Due::named_control));
    std::vector<Due> local, mpi;
    for (const Due& d : due) (runs_alone(d.line.text("transport")) ? mpi : local).push_back(d);
    if (options_.in_process) {
      if (options_.self) run_self(options_, registry_, due, runner_.worlds(), report_.self);
      judge(local);
    } else {
      judge_side_by_side(due, local);
    }
    // A fault that was cut short was not missed.
    if (interrupted() &&
        (size_t(report_.self.named) < registry_.planted().size() || !report_.self.failures.empty()))
      report_.self = {};
    judge(mpi);  // alone: beside a busy process its polls starve
    if (!interrupted()) require_whole_worlds();
    if (options_.controls && options_.failed.empty() && !ends_early()) operators_without_catch(due);
    if (!interrupted()) rerun_failures();
    leave_open_what_shares_wrong_code();
    close_lanes(due);
    if (!ends_early()) compare_with_manifest(due);
    report_.wall_seconds = now() - begin;
    report_.complete = !ends_early() && lost_job_.empty();
    report_.missing = lost_job_;
    if (dumps_) report_.dumped = dumps_->told(), report_.dump_error = dumps_->error();
    return std::move(report_);
  }

 private:
  using Asked = std::tuple<std::string, Place, std::string>;  // contract, place, subject
  using Checks = std::vector<std::string>;

  // What one process judges by itself: lines, then operators on contracts.
  struct Share {
    std::vector<Due> due;
    std::vector<Asked> operators;
    size_t weight = 0;
  };

  // A control is made of the code of its family. Where some of that fails by itself, one that
  // another check catches than the due one, that does nothing, or that stands little above its
  // healthy twin, may have met the same wrong line: that failure is what is due.
  void leave_open_what_shares_wrong_code() {
    for (ControlResult& control : report_.controls) {
      if (control.outcome != ControlResult::wrong_check && !control.did_nothing && !weak(control))
        continue;
      const auto fails =
          std::find_if(report_.cases.begin(), report_.cases.end(), [&](const CaseResult& c) {
            return c.family == control.family && !firing(c).empty() && !left_open(c);
          });
      if (fails == report_.cases.end()) continue;
      const std::string why =
          weak(control) ? "margin " + telling::ratio(control.margin) : control.reason;
      control.outcome = ControlResult::unjudged;
      control.reason =
          fmt::format("{} fails by itself, and may share code with it ({})", fails->line, why);
    }
  }

  void judge(const std::vector<Due>& due) {
    note_witnesses(due);
    judge(Share{due, subjects_of(due)});
  }

  void judge(const Share& share) {
    for (const Due& d : share.due) {
      if (ends_early()) return;
      if (d.what == Due::healthy)
        healthy(d);
      else
        control(d);
      progress_.tick();
    }
    if (options_.controls && options_.failed.empty()) operators(share.operators);
  }

  // The controls and operators of a contract stay with the lines that they are compared with, since
  // they share twins and truths; every other line may go anywhere. Those that take longest go
  // first.
  std::vector<Share> shares_of(const std::vector<Due>& due) const {
    std::map<std::string, Share> of_contract;
    std::vector<Share> shares;
    for (const Due& d : due) {
      const Contract& c = registry_.contract(d.line.contract);
      const bool alone = options_.controls && d.what == Due::healthy &&
                         !witnesses_.contains(print_canonical(d.line));
      Share& share = alone ? shares.emplace_back() : of_contract[c.name];
      share.due.push_back(d);
      share.weight += weight_of(c);
    }
    for (const Asked& a : subjects_of(due)) of_contract[std::get<0>(a)].operators.push_back(a);
    for (auto& [name, share] : of_contract) shares.push_back(std::move(share));
    std::stable_sort(shares.begin(), shares.end(),
                     [](const Share& a, const Share& b) { return a.weight > b.weight; });
    return shares;
  }

  // The judge's own tests, and beside them the cases, in processes that each take the next share.
  // This process judges by itself where nothing is to run beside it, and what one device alone is
  // asked for.
  void judge_side_by_side(const std::vector<Due>& due, const std::vector<Due>& local) {
    struct Keeper final : ResultSink {
      explicit Keeper(Gate& g) : gate(g) {}
      using ResultSink::put;
      // A job says nothing of what was under way when it was interrupted, so what it sends holds;
      // but ranks that a signal to all processes ended look like a crash until the job has the
      // signal, too.
      void put(const CaseResult& r) override {
        if (!interrupted() || !lost_ranks(r)) gate.take(r);
      }
      void put(const ControlResult& r) override { gate.take(r); }
      void put(const Tried& t) override { gate.take(t); }
      void put(const Begun& b) override { gate.progress_.begun(b.process, b.line); }
      Gate& gate;
    };
    std::vector<Part> parts;
    if (options_.self) parts = self_parts(options_, registry_, due, runner_.worlds(), report_.self);
    const size_t of_self = parts.size();
    note_witnesses(local);
    const auto shares = shares_of(local);
    const size_t workers = std::min(shares.size(), size_t(std::max(1, options_.jobs)));
    const auto keeper = std::make_shared<Keeper>(*this);
    Turns turns;
    turns_ = &turns;
    const auto work = [&](ResultSink& sink) {
      Progress silent;
      Gate gate(options_, registry_, silent);
      gate.sink_ = &sink;
      gate.turns_ = &turns;
      gate.dumps_ = dumps_;
      gate.witnesses_ = witnesses_;
      gate.shown_on_ = shown_on_;
      gate.start_worlds(local);
      for (size_t i; (i = turns.next()) < shares.size() && !gate.ends_early();)
        gate.judge(shares[i]);
      gate.runner_.worlds().require_whole();
    };
    const bool apart =
        workers > 1 ||
        (!parts.empty() &&
         std::none_of(local.begin(), local.end(), [](const Due& d) { return on_device(d.line); }));
    for (size_t i = 0; apart && i < workers; ++i) parts.push_back({work, keeper});
    const auto lost = run_parts(parts, [this] { progress_.tick(); });
    for (size_t i = 0; i < lost.size(); ++i) {
      if (lost[i].empty()) continue;
      if (i < of_self)
        report_.self.failures.push_back(lost[i]);
      else
        lost_job_ = lost[i];
    }
    if (!apart) judge(local);
    turns_ = nullptr;
    sort_results(local);
  }

  void require_whole_worlds() {
    try {
      runner_.worlds().require_whole();
    } catch (const Infrastructure& e) {
      lost_job_ = e.what();
    }
  }

  // Ranks are forked while this process is small: of every page that it shares with them, what
  // either writes to first is a copy.
  void start_worlds(const std::vector<Due>& due) {
    for (const Due& d : due)
      if (!on_device(d.line) && unavailable(d.line).empty()) try {
          runner_.worlds().start(d.line.text("transport"), d.line.world());
        } catch (const Infrastructure&) {  // the case that needs it says so
        }
  }

  // Shares end in any order; a report has that of what was due, by contract, operators last.
  void sort_results(const std::vector<Due>& due) {
    std::map<std::string, size_t> lines, contracts;
    for (size_t i = 0; i < due.size(); ++i) {
      lines.emplace(print_canonical(due[i].line), i);
      contracts.emplace(due[i].line.contract, i);
    }
    const auto sort = [&](auto& results) {
      const auto place = [&](const auto& r) {
        const auto line = lines.find(r.canonical);
        return std::pair(contracts.at(r.contract), line == lines.end() ? due.size() : line->second);
      };
      std::stable_sort(results.begin(), results.end(),
                       [&](const auto& a, const auto& b) { return place(a) < place(b); });
    };
    sort(report_.cases);
    sort(report_.controls);
  }

  bool ends_early() const {
    return interrupted() || (options_.fail_fast && (stop_ || (turns_ && turns_->stopped())));
  }
  void stop() {
    stop_ = true;
    if (turns_) turns_->stop();
  }

  static bool runs_alone(const std::string& transport) { return transport == "mpi"; }

  static int64_t count(const std::vector<Due>& due, Due::What what) {
    return std::count_if(due.begin(), due.end(), [&](const Due& d) { return d.what == what; });
  }

  // What was under way when the run was interrupted ended by that: nobody is blamed, and nothing
  // said.
  void keep(CaseResult result) {
    if (interrupted() && !firing(result).empty()) return;
    take(std::move(result));
  }
  void take(CaseResult result) {
    if (!firing(result).empty()) {
      stop();
      failed_.insert(result.canonical);
    }
    if (sink_) return sink_->put(result);
    progress_.done(result);
    report_.cases.push_back(std::move(result));
  }
  void keep(ControlResult result) {
    if (!interrupted()) take(std::move(result));
  }
  void take(ControlResult result) {
    if (result.outcome == ControlResult::escaped || result.outcome == ControlResult::wrong_check)
      stop();
    if (sink_) return sink_->put(result);
    progress_.done(result);
    report_.controls.push_back(std::move(result));
  }

  void take(const Tried& t) {
    if (sink_) return sink_->put(t);
    progress_.tried(t.pace, t.seconds);
  }

  // Differences of a curved reference take their time, and most where every pair of tokens counts.
  static size_t weight_of(const Contract& c) { return c.visible ? 8 : c.linear ? 1 : 4; }

  // What takes time, for whoever says how much of it is left.
  void expect(const std::vector<Due>& due) {
    const auto expect = [&](Pace::What what, const std::string& contract,
                            const std::string& transport, size_t count) {
      progress_.expect({what, contract, runs_alone(transport)}, int64_t(count),
                       double(weight_of(registry_.contract(contract))));
    };
    for (const Due& d : due)
      if (d.what == Due::healthy || !d.control.empty())
        expect(d.what == Due::healthy ? Pace::a_case : Pace::a_control, d.line.contract,
               d.line.text("transport"), 1);
    if (!options_.controls || !options_.failed.empty()) return;
    for (const auto& [contract, place, subject] : subjects_of(due)) {
      const Contract& c = registry_.contract(contract);
      if (registry_.subject(c.name, subject).declared.own_communication) continue;
      expect(witness_of(place), contract, place.first,
             drawn_witnesses(c, place, subject).size() + f32_witnesses(c, place, subject).size());
    }
  }

  std::string unavailable(const Case& line) const {
    return reason_unavailable(line.text("transport"), line.text("device"), line.world());
  }

  // A case that has one verdict, and the reason for it, in all of its checks.
  CaseResult unasked(const Case& line, const std::vector<std::string>& checks,
                     const std::string& lane, Verdict verdict, const std::string& reason) const {
    CaseResult result;
    result.line = print(line);
    result.canonical = print_canonical(line);
    result.replay = "run " + result.line;
    result.contract = line.contract;
    result.family = registry_.contract(line.contract).family;
    result.lane = lane;
    for (const std::string& name : checks) {
      CheckResult c;
      c.check = name;
      c.verdict = verdict;
      c.note = reason;
      result.checks.push_back(std::move(c));
    }
    return result;
  }

  // Whether an exception of a case ends the run: ranks of an outside launcher may be in the middle
  // of a job and cannot be started anew, and of a single line that cannot be judged nothing else is
  // to be said.
  bool ends_the_run(const std::exception& e) const {
    return !options_.isolated || (alone_ && dynamic_cast<const BadInput*>(&e));
  }

  // Whoever waits for it is told which one it is.
  Judged run(const Case& line, const Checks& checks, const std::string& lane) {
    if (sink_)
      sink_->put(Begun{::getpid(), print(line)});
    else
      progress_.begun(0, print(line));
    return runner_.run(line, checks, lane);
  }

  // What nobody can be blamed for leaves the checks of its case untested, and costs no other case
  // its verdict.
  Judged judged(const Case& line, const std::vector<std::string>& checks, const std::string& lane) {
    const std::string why = contradiction(registry_.contract(line.contract), line,
                                          checks == std::vector<std::string>{"rejection"});
    if (!why.empty()) return unjudged(line, checks, lane, Verdict::untested, why);
    try {
      return run(line, checks, lane);
    } catch (const BeyondRange& e) {
      if (alone_) throw;
      return unjudged(line, checks, lane, Verdict::skipped, e.what());
    } catch (const std::exception& e) {
      if (ends_the_run(e)) throw;
      runner_.worlds().drop(line.text("transport"));  // they may be in the middle of the job
      return unjudged(line, checks, lane, Verdict::untested, e.what());
    }
  }

  Judged unjudged(const Case& line, const std::vector<std::string>& checks, const std::string& lane,
                  Verdict verdict, const std::string& why) const {
    Judged j;
    j.result = unasked(line, checks, lane, verdict, why);
    return j;
  }

  // The same for a broken run.
  void leave_open(ControlResult& out, const Case& line, const std::exception& e) {
    if (ends_the_run(e)) throw;
    runner_.worlds().drop(line.text("transport"));
    out.outcome = ControlResult::unjudged;
    out.reason = e.what();
  }

  void healthy(const Due& d) {
    if (const std::string reason = unavailable(d.line); !reason.empty())
      return keep(unasked(d.line, d.checks, d.lane, Verdict::skipped, reason));
    Judged j = judged(d.line, d.checks, d.lane);
    const std::string& fault = d.line.text("fault");
    if (!fault.empty() && j.completed && !any_active(j))
      j.result.state.push_back(
          fmt::format("note       fault={} changed nothing: expected a call at its site whose "
                      "result it alters, met none; "
                      "`explain` shows the calls that are due",
                      fault));
    if (!d.illegal) dump(j);
    keep(j.result);
    if (firing(j.result).empty() && witnesses_.contains(j.result.canonical))
      keep_twin(d.line, std::move(j));
  }

  // Of what is told: not of what was under way when the run was interrupted.
  void dump(const Judged& j) {
    if (dumps_ && !interrupted() && !firing(j.result).empty() && !left_open(j.result))
      dumps_->add(j, runner_.truth(j.evidence), options_.program);
  }

  // What controls are compared with: the verdicts, and what left the ranks in the base shot.
  const Judged& keep_twin(const Case& line, Judged j) {
    j.evidence.shots.resize(1);
    for (RankRecord& r : j.evidence.ranks) r.shots.resize(1);
    j.evidence.line = &twin_lines_.emplace_back(line);
    return twins_[print_canonical(line)].emplace_back(std::move(j));
  }

  // Lines on which controls and operators will be compared with the healthy subject.
  void note_witnesses(const std::vector<Due>& due) {
    if (!options_.controls) return;
    for (const Due& d : due) {
      if (d.what != Due::named_control) continue;
      const std::string canonical = print_canonical(healthy_line(d));
      witnesses_.insert(canonical);
      if (narrowly() && !d.control.empty())
        for (std::string& c : shown(d, true)) shown_on_[canonical].insert(std::move(c));
    }
    if (!options_.failed.empty()) return;
    for (const auto& [contract, place, subject] : subjects_of(due)) {
      const Contract& c = registry_.contract(contract);
      for (const auto& [line, rounding] : drawn_witnesses(c, place, subject))
        witnesses_.insert(print_canonical(line));
      for (const Case& line : f32_witnesses(c, place, subject))
        witnesses_.insert(print_canonical(line));
    }
  }

  static Case healthy_line(const Due& d) {
    Case line = d.line;
    line.set("control", "");
    line.set("fault", "");
    return line;
  }

  // Checks that a control is shown to: those that must fire, and all that is due on its line;
  // narrowly, those that must fire or be silent.
  Checks shown(const Due& d, bool narrow) const {
    const Expectation expected = named(d);
    std::vector<std::string> checks = due_or(d, d.line, expected.checks);
    if (narrow && !d.illegal && !expected.alone)
      std::erase_if(checks, [&](const std::string& c) {
        return !contains(expected.checks, c) && !contains(expected.silent, c);
      });
    return checks;
  }

  // Checks that are due on a line, and `expected`.
  std::vector<std::string> due_or(const Due& d, const Case& line,
                                  const std::vector<std::string>& expected) const {
    if (d.illegal) return {"rejection"};
    const Contract& contract = registry_.contract(line.contract);
    const Declared declared = declared_of(line, registry_);
    std::vector<std::string> checks;
    for (const Check& check : all_checks())
      if (check.due(contract, line, declared) || contains(expected, check.name))
        checks.push_back(check.name);
    return checks;
  }

  Expectation named(const Due& d) const {
    const Control& control = registry_.control(d.line.contract, d.control);
    return {trimmed_words(control.check, ','), trimmed_words(control.silent, ','), control.alone};
  }

  // A control and its twin share a witness; twins are run once. One that passed more than is asked
  // for now is the twin, and so is a case that is due on the same line; one that did not is where
  // just that was asked.
  const Judged& twin(const Case& line, const std::vector<std::string>& checks,
                     const std::string& lane) {
    for (const Judged& j : twins_[print_canonical(line)]) {
      const bool asked = std::all_of(checks.begin(), checks.end(),
                                     [&](const std::string& c) { return result_of(j.result, c); });
      if (asked && (firing(j.result).empty() || j.result.checks.size() == checks.size())) return j;
    }
    return keep_twin(line, judged(line, checks, lane));
  }

  void control(const Due& d) {
    if (!unavailable(d.line).empty()) return;
    if (d.control.empty()) return operator_again(registry_.contract(d.line.contract), d);
    const Case line = healthy_line(d);
    keep(told([&](bool narrow) {
      Checks checks = due_or(d, line, {});
      if (narrow) checks = kept(std::move(checks), shown_on_[print_canonical(line)]);
      return control_run(d, twin_told(line, checks, d.lane), narrow);
    }));
  }

  // Tier smoke shows a broken run, and its twin, to few checks. One that is not caught so is shown
  // to all, to be told as elsewhere: a second chance it is not.
  bool narrowly() const { return options_.tier == "smoke"; }
  ControlResult told(const std::function<ControlResult(bool narrow)>& run) const {
    const auto passes = [](const ControlResult& c) {
      return c.outcome == ControlResult::caught || c.outcome == ControlResult::equivalent;
    };
    if (!narrowly()) return run(false);
    ControlResult narrowly = run(true);
    if (passes(narrowly)) return narrowly;
    ControlResult widely = run(false);
    return passes(widely) ? narrowly : widely;
  }

  ControlResult control_run(const Due& d, const Judged& healthy, bool narrow) {
    const Contract& c = registry_.contract(d.line.contract);
    const Control& control = registry_.control(c.name, d.control);
    ControlResult out;
    out.name = control.name;
    out.imitates = control.imitates;
    describe(out, d.line, c, d.lane);
    if (!firing(healthy.result).empty()) {  // then the control says nothing, however long it takes
      conclude(out, Judged{}, healthy, named(d));
      return out;
    }
    try {
      const Judged broken = run(d.line, shown(d, narrow), d.lane);
      out.seconds = broken.result.seconds;
      conclude(out, broken, healthy, named(d));
      out.did_nothing = out.outcome == ControlResult::escaped && broken.completed &&
                        same_results(broken, healthy, false) &&
                        same_results(broken, healthy, true) && same_traces(broken, healthy);
      if (out.did_nothing) out.reason += "; it gave and called what its healthy twin does";
    } catch (const MachineTooSmall& e) {
      out.outcome = ControlResult::unproven;
      out.expected_check = control.check;
      out.reason = e.what();
    } catch (const std::exception& e) {
      leave_open(out, d.line, e);
      out.expected_check = control.check;
    }
    return out;
  }

  // A twin that fails shows nothing about its controls, and is itself what has to be told, once a
  // line: it may be due as a case with fewer checks, or as no case at all.
  const Judged& twin_told(const Case& line, const std::vector<std::string>& checks,
                          const std::string& lane) {
    const Judged& j = twin(line, checks, lane);
    if (!firing(j.result).empty() && !failed_.contains(j.result.canonical)) {
      const std::optional<Judged> all = asked_in_full(line, j.result, lane);
      const Judged& told = all ? *all : j;
      dump(told);
      keep(told.result);
    }
    return j;
  }

  // What failed a few checks is asked the others before it is told: a call too many may be the
  // least of what is wrong. One that all of them let pass is told as it was.
  std::optional<Judged> asked_in_full(const Case& line, const CaseResult& few,
                                      const std::string& lane) {
    if (lost_ranks(few) || left_open(few)) return std::nullopt;
    std::vector<std::string> asked = options_.checks;
    if (!asked.empty())
      for (const CheckResult& c : few.checks) asked.push_back(c.check);
    const auto checks =
        due_checks(registry_.contract(line.contract), line, declared_of(line, registry_), asked);
    if (checks.size() <= few.checks.size()) return std::nullopt;
    Judged all = judged(line, checks, lane);
    if (firing(all.result).empty() || left_open(all.result)) return std::nullopt;
    return all;
  }

  static Checks kept(Checks checks, const std::set<std::string>& asked) {
    std::erase_if(checks, [&](const std::string& c) { return !asked.contains(c); });
    return checks;
  }

  void describe(ControlResult& out, const Case& line, const Contract& c,
                const std::string& lane) const {
    out.family = c.family;
    out.contract = c.name;
    out.lane = lane;
    out.witness = print(line);
    out.canonical = print_canonical(line);
    out.replay = "run " + out.witness;
  }

  static Place place_of(const Case& line) { return {line.text("transport"), line.text("device")}; }

  static std::vector<Asked> subjects_of(const std::vector<Due>& due) {
    std::vector<Asked> contracts;
    for (const Due& d : due) {
      if (d.what != Due::healthy || d.illegal) continue;
      Asked t(d.line.contract, place_of(d.line), d.line.text("subject"));
      if (std::find(contracts.begin(), contracts.end(), t) == contracts.end())
        contracts.push_back(t);
    }
    return contracts;
  }

  void operators(const std::vector<Asked>& subjects) {
    for (const auto& [contract, place, subject] : subjects) {
      if (ends_early()) return;
      const Contract& c = registry_.contract(contract);
      if (registry_.subject(c.name, subject).declared.own_communication)
        continue;  // its calls do not pass the door
      const bool widely = every_site(place);
      operators(c, place, subject, Sites(widely ? Sites::every : Sites::kind));
      Sites f32(options_.tier == "nightly" ? Sites::every : Sites::call);
      for (const Case& line : f32_witnesses(c, place, subject))
        on_witness(c, line, /*rounding=*/true, f32);
    }
  }

  bool every_site(const Place& place) const {
    return options_.tier != "smoke" && place == Place("processes", "host");
  }

  Pace::What witness_of(const Place& place) const {
    return every_site(place) ? Pace::a_witness : Pace::a_sampled_witness;
  }

  // Each witness on exact data, where there are such, and on data that round.
  std::vector<std::pair<Case, bool>> drawn_witnesses(const Contract& c, const Place& place,
                                                     const std::string& subject) const {
    std::vector<std::pair<Case, bool>> lines;  // and whether its data round
    for (Case line : witnesses_due(c, registry_, place.first, subject)) {
      line.set("device", place.second);
      if (!within(options_, line) || !unavailable(line).empty() ||
          !not_due(line, registry_).empty())
        continue;
      if (fill_of(line) == Fill::integers) lines.emplace_back(line, false);
      line.set("fill", "normal");
      lines.emplace_back(std::move(line), true);
    }
    return lines;
  }

  void operators(const Contract& c, const Place& place, const std::string& subject, Sites sites) {
    for (const auto& [line, rounding] : drawn_witnesses(c, place, subject))
      on_witness(c, line, rounding, sites);
  }

  // Where there is rounding, what a bound of f64 sees is not yet what one of f32 sees.
  std::vector<Case> f32_witnesses(const Contract& c, const Place& place,
                                  const std::string& subject) const {
    std::vector<Case> lines;
    if (c.has_exact_data() || !every_site(place)) return lines;
    for (Case line : witnesses_due(c, registry_, place.first, subject)) {
      if (line.dtype() == DType::f32) continue;  // the subject has no wider type: that was its turn
      line.set("dtype", "f32");
      line.set("fill", "normal");
      if (within(options_, line) && not_due(line, registry_).empty())
        lines.push_back(std::move(line));
    }
    return lines;
  }

  // Checks that an operator is shown to.
  std::vector<std::string> shown_to_operators(const Contract& c, const Case& line) const {
    return due_checks(
        c, line, declared_of(line, registry_),
        {"forward", "gradient", "adjoint", "replica", "ledger", "lockstep", "memory", "repeat"});
  }

  // The one that a line of an earlier report names.
  void operator_again(const Contract& c, const Due& d) {
    const FaultSpec spec = parse_fault(d.line.text("fault"));
    Case line = d.line;
    line.set("fault", "");
    const auto checks = shown_to_operators(c, line);
    const Judged& healthy = twin_told(line, checks, d.lane);
    if (!firing(healthy.result).empty()) return;
    for (const Site& site : sites_of(healthy))
      if (site.key() == std::tuple(int(spec.phase), spec.axis, spec.number))
        keep(operator_run(c, line, {&fault_operator(spec.op), site, spec.rank >= 0}, healthy,
                          checks, d.lane));
  }

  // An operator at a call of a witness, on all ranks or on one.
  struct Attempt {
    const FaultOperator* op;
    Site site;
    bool one_rank;
  };

  // Exact data show everything but rounding; on rounding data only what needs it is run again,
  // unless the family has no exact data.
  std::vector<Attempt> attempts(const Contract& c, const Case& line, bool rounding,
                                const Judged& healthy) const {
    std::vector<Attempt> list;
    for (const FaultOperator& op : fault_operators())
      for (const Site& site : sites_of(healthy)) {
        if (!applies(op, site, rounding, line.world()) ||
            (rounding && c.has_exact_data() && !op.needs_rounding))
          continue;
        list.push_back({&op, site, false});
        // Without isolation a call that never meets its peers would cost its whole deadline.
        if (op.call && site.p >= 2 && options_.isolated) list.push_back({&op, site, true});
      }
    return list;
  }

  void on_witness(const Contract& c, const Case& line, bool rounding, Sites& sites) {
    const double begin = now();
    try_operators(c, line, rounding, sites);
    take(Tried{{witness_of(place_of(line)), c.name, runs_alone(line.text("transport"))},
               now() - begin});
  }

  void try_operators(const Contract& c, const Case& line, bool rounding, Sites& sites) {
    const std::string lane = lane_of(line);
    const auto checks = shown_to_operators(c, line);
    // Which calls there are is said by any run.
    const bool look_first = narrowly() && contains(checks, "ledger");
    const Judged& first = twin_told(line, look_first ? Checks{"ledger"} : checks, lane);
    if (!firing(first.result).empty()) return;
    sites.begin_line();
    const std::vector<Attempt> list = attempts(c, line, rounding, first);
    const Checks few = narrowly() ? narrowed(checks, due_now(list, sites), c.linear) : checks;
    if (few.empty()) return;
    const Judged& healthy = twin_told(line, few, lane);
    if (!firing(healthy.result).empty()) return;
    for (const Attempt& a : list) {
      if (ends_early()) return;
      if (!sites.due(*a.op, a.site, a.one_rank)) continue;
      // That nothing differs is asked of every check.
      const bool cancels =
          stays_equal(*a.op) && due_at(a.site, line, healthy).value_or(Traffic{}).cancels;
      const ControlResult out = told([&](bool narrow) {
        if (narrow && !cancels)
          return operator_run(c, line, a, healthy, narrowed(checks, {a}, c.linear), lane);
        return operator_run(c, line, a, twin_told(line, checks, lane), checks, lane);
      });
      if (out.outcome == ControlResult::caught) sites.caught(*a.op, a.site, a.one_rank);
      if (out.outcome == ControlResult::equivalent) sites.harmless(*a.op, a.site);
      keep(out);
      progress_.tick();
    }
  }

  static std::vector<Attempt> due_now(std::vector<Attempt> list, const Sites& sites) {
    std::erase_if(list, [&](const Attempt& a) { return !sites.due(*a.op, a.site, a.one_rank); });
    return list;
  }

  // What may be expected of an operator at a site, wherever its results turn out to differ.
  static Checks narrowed(const Checks& checks, const std::vector<Attempt>& list, bool linear) {
    std::set<std::string> asked;
    for (const auto& [op, site, one_rank] : list) {
      const Expectation most = expectation(*op, site, one_rank, /*outputs_differ=*/true,
                                           /*gradients_differ=*/true, linear);
      asked.insert({"forward", "gradient"});
      asked.insert(most.checks.begin(), most.checks.end());
    }
    return kept(checks, asked);
  }

  ControlResult operator_run(const Contract& c, const Case& line, const Attempt& attempt,
                             const Judged& healthy, const Checks& checks, const std::string& lane) {
    const auto& [what, site, one_rank] = attempt;
    const FaultOperator& op = *what;
    FaultSpec spec{op.name, site.phase, site.axis, site.number,
                   one_rank ? site.call.members.back() : -1};
    Case faulted = line;
    faulted.set("fault", print(spec));
    ControlResult out;
    out.name = op.name;
    out.kind = op.kind;
    out.imitates = op.does;
    describe(out, faulted, c, lane);
    Judged broken;
    if (!firing(healthy.result).empty()) {
      conclude(out, broken, healthy, {});
      return out;
    }
    try {
      broken = run(faulted, checks, lane);
    } catch (const std::exception& e) {
      leave_open(out, faulted, e);
      return out;
    }
    out.seconds = broken.result.seconds;
    const bool outputs = broken.completed && !same_results(broken, healthy, false);
    const bool gradients = broken.completed && !same_results(broken, healthy, true);
    const bool paired = gradients && c.linear && !same_paired_gradients(broken, healthy) &&
                        check_named("adjoint").due(c, line, declared_of(line, registry_));
    Expectation expected = expectation(op, site, one_rank, outputs, gradients, paired);
    const bool cancels = due_at(site, line, healthy).value_or(Traffic{}).cancels;
    if (cancels && op.call && !one_rank)
      expected.checks = {"ledger"};  // whether values show it is open
    if (broken.completed && !any_active(broken)) {
      out.outcome = ControlResult::equivalent;
      out.reason = "inactive";
    } else if (broken.completed && !outputs && !gradients && same_traces(broken, healthy) &&
               op.name != "arrival_order") {
      out.outcome = ControlResult::equivalent;
      out.reason = "masked";
    } else if (broken.completed && op.kind == "in_place" && !argument_written(broken)) {
      out.outcome = ControlResult::equivalent;
      out.reason = "own buffer";
    } else if (broken.completed && cancels && stays_equal(op) && firing(broken.result).empty()) {
      out.outcome = ControlResult::equivalent;
      out.reason = "cancels";
    } else if (broken.completed && op.name == "own_order" && firing(broken.result).empty() &&
               !check_named("replica").due(c, line, declared_of(line, registry_))) {
      out.outcome = ControlResult::equivalent;  // any order is within a bound; copies alone part
      out.reason = "no copies";
    } else {
      conclude(out, broken, healthy, expected);
    }
    out.expected_check = joined(expected.checks, ",");
    return out;
  }

  // An operator that found sites in a family and was caught at none of them is one that nobody
  // would notice there. Asked of whole families only: a narrowed selection may hold its equivalent
  // sites. A family whose calls all read buffers of its own has none that in_place could do harm
  // at. Where not every site is tried (every_site) that is a narrowed selection, too.
  void operators_without_catch(const std::vector<Due>& due) {
    const auto widely = [&](const Asked& a) { return every_site(std::get<Place>(a)); };
    const std::vector<Asked> subjects = subjects_of(due);
    if (std::none_of(subjects.begin(), subjects.end(), widely) || !options_.ranks.empty() ||
        !options_.dtypes.empty() || !options_.checks.empty())
      return;
    for (const std::string& p : options_.patterns)
      if (!contains(registry_.families(), p)) return;
    std::map<std::pair<std::string, std::string>, const ControlResult*>
        uncaught;  // family, operator
    for (const ControlResult& c : report_.controls)
      if (!c.kind.empty() && !(c.kind == "in_place" && c.outcome == ControlResult::equivalent))
        uncaught.try_emplace({c.family, c.name}, &c);
    for (const ControlResult& c : report_.controls)
      if (!c.kind.empty() && c.outcome != ControlResult::equivalent)
        uncaught.erase({c.family, c.name});
    std::vector<ControlResult> unseen;
    for (const auto& [key, example] : uncaught) {
      unseen.push_back(*example);
      unseen.back().outcome = ControlResult::escaped;
      unseen.back().reason = "caught at no site of the family " + key.first;
    }
    for (ControlResult& c : unseen) keep(std::move(c));
  }

  // The first ten failing cases, hung ones excepted, again in a fresh world, only to call them
  // steady.
  void rerun_failures() {
    int left = 10;
    const double until = now() + 5;
    for (CaseResult& result : report_.cases) {
      const std::string first = firing(result);
      if (first.empty() || left_open(result) || left == 0 || now() > until) continue;
      if (std::any_of(result.checks.begin(), result.checks.end(),
                      [](const auto& c) { return c.verdict == Verdict::hung; }))
        continue;
      --left;
      const Case line = parse(result.canonical, registry_);
      std::vector<std::string> checks;
      for (const CheckResult& c : result.checks) checks.push_back(c.check);
      runner_.worlds().drop(line.text("transport"));
      result.steady_known = true;
      result.steady = true;
      for (int i = 0; i < 20 && result.steady && now() < until; ++i) {
        const CaseResult again = judged(line, checks, result.lane).result;
        if (left_open(again)) {  // says nothing of the subject
          result.steady_known = result.steady = false;
          break;
        }
        result.steady = firing(again) == first;
      }
    }
  }

  void close_lanes(const std::vector<Due>& due) {
    std::vector<std::string> names;
    for (const Due& d : due)
      if (d.what == Due::healthy && !d.illegal && !contains(names, d.lane)) names.push_back(d.lane);
    for (const std::string& lane : names) {
      Lane l{lane, false, "no case of it ran"};
      for (const CaseResult& r : report_.cases) {
        if (r.lane != lane) continue;
        if (l.reason == "no case of it ran") l = {lane, true, ""};
        for (const CheckResult& c : r.checks)
          if (c.verdict == Verdict::skipped || c.verdict == Verdict::untested)
            l = {lane, false, c.note};
      }
      report_.lanes.push_back(l);
    }
    for (Lane& l : unproven(options_, registry_, due)) report_.lanes.push_back(std::move(l));
    std::set<std::string> too_small_for;
    for (const ControlResult& c : report_.controls)
      if (c.outcome == ControlResult::unproven && too_small_for.insert(c.name).second)
        report_.lanes.push_back({"control " + c.name, false, c.reason});
    const bool asked =
        std::any_of(due.begin(), due.end(), [](const Due& d) { return on_device(d.line); });
    if (asked) say_devices(due);
    for (const Ability& a : asked ? abilities() : abilities_unasked())
      if (!a.available && std::none_of(names.begin(), names.end(),
                                       [&](const auto& n) { return n.starts_with(a.name + "."); }))
        report_.lanes.push_back({a.name, false, a.reason});
  }

  // Which rank has which device, and what is set on them. Forked ranks are all on this machine;
  // where a launcher put the others is not known here.
  void say_devices(const std::vector<Due>& due) {
    if (!device_description().empty()) report_.versions["device"] = device_description();
    for (const auto& [name, value] : device_settings()) report_.versions[name] = value;
    int ranks = 0;
    for (const Due& d : due)
      if (on_device(d.line) && d.line.text("transport") != "mpi" && unavailable(d.line).empty())
        ranks = std::max(ranks, d.line.world());
    if (devices_probed() == 0 || outside_launch()) return;
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    for (int r = 0; r < ranks; ++r)
      report_.placement.emplace_back(std::to_string(r),
                                     fmt::format("{}:cuda{}", host, r % devices_probed()));
  }

  // What was due and left no trace is untested, never passed.
  void compare_with_manifest(const std::vector<Due>& due) {
    std::set<std::string> ran, broken;
    for (const CaseResult& r : report_.cases) ran.insert(r.canonical);
    for (const ControlResult& r : report_.controls) broken.insert(r.canonical);
    const std::string why = "due, and left no record" + (lost_job_.empty() ? "" : ": " + lost_job_);
    for (const Due& d : due) {
      if (d.what == Due::healthy && !ran.contains(print_canonical(d.line)))
        report_.cases.push_back(unasked(d.line, d.checks, d.lane, Verdict::untested, why));
      // A job that was lost may have taken controls with it; others are left out on purpose.
      if (lost_job_.empty() || d.what != Due::named_control || d.control.empty() ||
          broken.contains(print_canonical(d.line)) || !unavailable(d.line).empty())
        continue;
      ControlResult out;
      out.name = d.control;
      const Control& control = registry_.control(d.line.contract, d.control);
      out.imitates = control.imitates;
      out.expected_check = control.check;
      describe(out, d.line, registry_.contract(d.line.contract), d.lane);
      out.outcome = ControlResult::unjudged;
      out.reason = why;
      report_.controls.push_back(std::move(out));
    }
  }

  const Options& options_;
  const Registry& registry_;
  Progress& progress_;
  Runner runner_;
  Report report_;
  std::map<std::string, std::list<Judged>> twins_;  // by canonical line
  std::set<std::string> witnesses_;                 // canonical lines of twins
  // By such a line, the checks that its named controls are shown to in tier smoke.
  std::map<std::string, std::set<std::string>> shown_on_;
  std::list<Case> twin_lines_;
  std::shared_ptr<Dumps> dumps_;  // --dump; null without
  ResultSink* sink_ = nullptr;    // of a part: results go to the parent
  std::set<std::string> failed_;  // canonical lines of kept cases that did not pass
  std::string lost_job_;          // why a process that judged ended before it was through
  Turns* turns_ = nullptr;        // of this gate and those beside it; null: it is by itself
  bool stop_ = false;
  bool alone_ = false;  // one line is due
};

}  // namespace

Planned planned_gate(const Options& options, const Registry& registry) {
  Planned planned;
  planned.due = plan_gate(options, registry, &planned.not_due, &planned.left_out);
  return planned;
}

Report run_gate(Planned planned, const Options& options, const Registry& registry,
                Progress& progress) {
  Report report = Gate(options, registry, progress).run(planned.due);
  report.left_out = std::move(planned.left_out);
  report.not_due.insert(report.not_due.begin(), planned.not_due.begin(), planned.not_due.end());
  return report;
}

Report run_gate(const Options& options, const Registry& registry, Progress& progress) {
  return run_gate(planned_gate(options, registry), options, registry, progress);
}

Report run_line(const Case& line, const Options& options, const Registry& registry,
                Progress& progress) {
  check_subjects(options, registry);
  const Contract& c = registry.contract(line.contract);
  if (const std::string why = not_due(line, registry); !why.empty() && line.text("control").empty())
    throw BadInput(fmt::format(
        "{}: expected a line that the subject does, met one that it declares not to do ({})",
        print(line), why));
  if (!line.text("control").empty())
    if (const Control& twin = registry.control(c.name, line.text("control"));
        twin.make && on_device(twin, registry) != on_device(line))
      throw BadInput(fmt::format(
          "keys 'control' and 'device': expected device={}, where the broken twin runs, met {}",
          on_device(line) ? "host" : "cuda", print(line)));
  Due d;
  d.line = line;
  d.lane = lane_of(line);
  d.illegal = illegal(c, line);
  if (d.illegal && line.text("control").empty()) {
    const Rejected r = *c.precondition(line);
    throw BadInput(fmt::format("{}: {}", print(line), r.what()));
  }
  d.checks = d.illegal ? std::vector<std::string>{"rejection"}
                       : due_checks(c, line, declared_of(line, registry), options.checks);
  if (d.checks.empty())
    throw BadInput(
        fmt::format("--check: none of {} is due on {}; `shardproof explain` shows which are",
                    joined(options.checks, " "), print(line)));
  Options plain = options;
  plain.controls = false;
  plain.self = false;
  Report report = Gate(plain, registry, progress).run({d});
  if (!d.illegal) report.not_due = checks_unasked(line, registry, options.checks);
  return report;
}

}  // namespace shardproof
