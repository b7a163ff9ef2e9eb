// The main job: cases, named controls and operators that are due, run and compared with the
// manifest of what was due.
#include "oracle/gate.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <limits>
#include <list>
#include <set>
#include <sstream>

#include "oracle/abilities.hpp"
#include "oracle/clock.hpp"
#include "oracle/comm/faults.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/cost.hpp"
#include "oracle/device.hpp"
#include "oracle/due.hpp"
#include "oracle/dump.hpp"
#include "oracle/gate_jobs.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/run.hpp"
#include "oracle/self.hpp"
#include "oracle/too_small.hpp"
#include "oracle/words.hpp"

namespace shardproof {
namespace {

std::vector<std::string> trimmed_words(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) {
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

// A selection: a contract or family (empty: all), and key=value words that a line must hold.
struct Pattern {
  std::string name;
  std::vector<std::pair<std::string, std::string>> words;

  bool names(const Contract& c) const { return name.empty() || name == c.name || name == c.family; }
  bool holds(const Case& line) const {
    return std::all_of(words.begin(), words.end(), [&](const auto& w) { return line.has(w.first) && line.text(w.first) == w.second; });
  }
};

std::vector<Pattern> parse_patterns(const Options& options, const Registry& registry) {
  std::vector<Pattern> patterns;
  std::vector<std::string> known = registry.families();
  for (const Contract& c : registry.contracts()) known.push_back(c.name);
  std::set<std::string> keys;
  for (const Contract& c : registry.contracts())
    for (const Key& k : keys_of(c)) keys.insert(k.name);
  for (const std::string& argument : options.patterns) {
    const auto words = trimmed_words(argument, ' ');
    if (words.empty())
      throw BadInput(fmt::format("PATTERN: expected a contract, a family or key=value, met '{}'; leave it out to judge everything", argument));
    for (const std::string& word : words) {
      const size_t eq = word.find('=');
      if (eq == std::string::npos) {
        if (!contains(known, word))
          throw BadInput(fmt::format("PATTERN: expected a contract, a family or key=value, as `shardproof list` names them, met '{}'{}", word,
                                     did_you_mean(word, known)));
        patterns.push_back({word, {}});
        continue;
      }
      const std::string key = word.substr(0, eq);
      if (!keys.contains(key))
        throw BadInput(fmt::format("{}: no contract takes this key{}", key, did_you_mean(key, {keys.begin(), keys.end()})));
      if (patterns.empty()) patterns.push_back({});
      const std::string value = word.substr(eq + 1);
      patterns.back().words.emplace_back(key, key == "subject" && value == "ours" ? "" : value);
    }
  }
  if (patterns.empty()) patterns.push_back({});
  return patterns;
}

bool selected(const std::vector<Pattern>& patterns, const Contract& c) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const Pattern& p) { return p.names(c); });
}
bool selected(const std::vector<Pattern>& patterns, const Contract& c, const Case& line) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const Pattern& p) { return p.names(c) && p.holds(line); });
}

std::vector<std::string> transports_due(const Options& options) {
  if (!options.transports.empty()) return options.transports;
  if (options.tier == "smoke") return {"processes"};
  std::vector<std::string> list{"processes"};
  if (reason_unavailable("mpi", "host").empty()) list.push_back("mpi");
  return list;
}

// A transport and where the tensors live.
using Place = std::pair<std::string, std::string>;

// `staged` is device=cuda over processes; NCCL moves device memory only.
Place place_named(const std::string& transport, const std::string& device) {
  if (transport == "staged") return {"processes", "cuda"};
  return {transport, transport == "nccl" ? "cuda" : device};
}

std::vector<Place> places_due(const Options& options) {
  std::vector<Place> places;
  const auto devices = options.devices.empty() ? std::vector<std::string>{"host"} : options.devices;
  for (const std::string& transport : transports_due(options))
    for (const std::string& device : devices)
      if (const Place place = place_named(transport, device); std::find(places.begin(), places.end(), place) == places.end())
        places.push_back(place);
  return places;
}

bool within(const Options& o, const Case& line) {
  return (o.ranks.empty() || std::find(o.ranks.begin(), o.ranks.end(), line.world()) != o.ranks.end()) &&
         (o.dtypes.empty() || contains(o.dtypes, line.text("dtype")));
}

void check_names(const Options& options) {
  const std::vector<std::string> tiers{"smoke", "ci", "nightly"};
  if (!contains(tiers, options.tier))
    throw BadInput(fmt::format("--tier: expected smoke, ci or nightly, met '{}'{}", options.tier, did_you_mean(options.tier, tiers)));
  std::vector<std::string> names;
  for (const std::string& lane : lane_names()) names.push_back(lane);
  for (const std::string& t : options.transports)
    if (!contains(names, t))
      throw BadInput(fmt::format("--transport: expected one of {}, met '{}'{}", joined(names, " "), t, did_you_mean(t, names)));
  for (const std::string& d : options.devices)
    if (d != "host" && d != "cuda") throw BadInput(fmt::format("--device: expected host or cuda, met '{}'", d));
  for (const std::string& c : options.checks) check_named(c);
  for (const std::string& d : options.dtypes)
    if (!dtype_from(d)) throw BadInput(fmt::format("--dtype: expected one of f64 f32 bf16 f16, met '{}'", d));
  for (const std::string& lane : options.require) {
    const std::string transport = lane.substr(0, lane.find('.'));
    const std::string rest = lane.find('.') == std::string::npos ? "" : lane.substr(lane.find('.') + 1);
    const bool number = rest.size() > 2 && rest.starts_with("np") && rest[2] != '0' && rest.find_first_not_of("0123456789", 2) == std::string::npos;
    const bool known = contains(names, transport);
    if (!known || (lane != transport && !number))
      throw BadInput(fmt::format("--require: expected a lane such as processes.np4 or mpi, met '{}'{}", lane, known ? "" : did_you_mean(transport, names)));
  }
}

bool illegal(const Contract& c, const Case& line) { return c.precondition && c.precondition(line).has_value(); }

class Planner {
 public:
  Planner(const Options& o, const Registry& r, std::vector<std::string>& not_due)
      : options_(o), registry_(r), patterns_(parse_patterns(o, r)), not_due_(not_due) {}

  std::vector<Due> plan() {
    check_names(options_);
    check_subjects(options_, registry_);
    check_seed();
    if (options_.failed.empty())
      select();
    else
      select_failed();
    if (due_.empty())
      throw BadInput(not_due_.empty() ? "the selection is empty: no case " + emptied_by() + hint_at_ours()
                                      : fmt::format("the selection is empty: what matches is not due ({}, the first: {})", number_of(int64_t(not_due_.size()), "line"),
                                                    not_due_[0]));
    check_required();
    tell_unasked();
    // Worlds live across cases of one size: fewer starts. Families stay together.
    return sorted();
  }

 private:
  void select() {
    for (const Contract& c : registry_.contracts())
      if (selected(patterns_, c)) add_contract(c);
    for (const Regression& r : registry_.regressions()) add_regression(parse(r.line, registry_));
  }

  void check_seed() const {
    for (const Pattern& p : patterns_)
      for (const auto& [key, value] : p.words)
        if (key == "seed" && options_.seed && value != std::to_string(*options_.seed)) refuse_two_seeds(*options_.seed, value);
  }

  void select_failed() {
    if (options_.seed || options_.seeds > 1)
      throw BadInput(fmt::format("--seed, --seeds: expected none beside --failed {}, whose lines have their own seeds; leave them out", options_.failed));
    bool complete = true;
    const auto lines = failed_lines(options_.failed, &complete);
    if (lines.empty() && !complete)
      throw BadInput(fmt::format("--failed: expected the report of a run in which something did not pass, met {}, which did not reach "
                                 "its end and in which nothing had failed until then; run that gate again",
                                 options_.failed));
    if (lines.empty())
      throw BadInput(fmt::format("--failed: expected the report of a run in which something did not pass, met {}, where nothing failed; "
                                 "there is nothing to run again",
                                 options_.failed));
    const bool anywhere = options_.transports.empty() && options_.devices.empty();
    for (const FailedLine& failed : lines) {
      Case line = parse(failed.line, registry_);
      if (!within(options_, line) || !selected(patterns_, registry_.contract(line.contract), line)) continue;
      if (anywhere || is_due_at_its_place(line)) add_line(std::move(line), failed.control);
    }
    if (due_.empty() && not_due_.empty())
      throw BadInput(
          fmt::format("--failed: expected patterns and options that leave a line of what failed in "
                      "{}, met some that leave none of {}; the first is {}",
                      options_.failed, lines.size(), lines[0].line));
    if (!complete) not_due_.push_back(fmt::format("--failed {}: what that run left unjudged, as it did not reach its end", options_.failed));
  }

  // Checks that were named, that no line is asked, and of which nothing has been said.
  void tell_unasked() {
    for (const std::string& check : options_.checks)
      if (std::none_of(due_.begin(), due_.end(), [&](const Due& d) { return contains(d.checks, check); }) &&
          std::none_of(not_due_.begin(), not_due_.end(), [&](const std::string& why) { return why.find(check) != std::string::npos; }))
        not_due_.push_back(fmt::format("{}: nothing on these lines for it to ask ({})", check, check_named(check).asks));
  }

  // The word that leaves nothing, when they are taken one after the other as they were given.
  std::string emptied_by() const {
    Options some = options_;
    some.patterns.clear(), some.ranks.clear(), some.dtypes.clear(), some.subjects.clear();
    some.checks.clear(), some.transports.clear(), some.devices.clear();
    std::string before;
    const auto empties = [&](const std::string& word) {
      std::vector<std::string> nowhere;
      Planner planner(some, registry_, nowhere);
      planner.select();
      if (planner.due_.empty()) return true;
      before += " " + word;
      return false;
    };
    const auto told = [&](const std::string& word) {
      return fmt::format("is left by {}{}; `gate --dry-run{}` shows what there is", word, before.empty() ? "" : " beside" + before, before);
    };
    for (const std::string& argument : options_.patterns) {
      some.patterns.emplace_back();
      for (const std::string& word : trimmed_words(argument, ' ')) {
        some.patterns.back() += " " + word;
        if (empties(word)) return told(word);
      }
    }
    for (const auto& [name, list] : {std::pair("--ranks", joined(options_.ranks, ",")),
                                     {"--dtype", joined(options_.dtypes, ",")},
                                     {"--subject", joined(options_.subjects, ",")},
                                     {"--check", joined(options_.checks, ",")},
                                     {"--transport", joined(options_.transports, ",")},
                                     {"--device", joined(options_.devices, ",")}}) {
      if (list.empty()) continue;
      const std::string option = name;
      if (option == "--ranks") some.ranks = options_.ranks;
      if (option == "--dtype") some.dtypes = options_.dtypes;
      if (option == "--subject") some.subjects = options_.subjects;
      if (option == "--check") some.checks = options_.checks;
      if (option == "--transport") some.transports = options_.transports;
      if (option == "--device") some.devices = options_.devices;
      if (empties(option + " " + list)) return told(option + " " + list);
    }
    return "matches the patterns and options together; `gate --dry-run` with fewer of them shows what there is";
  }

  // A lane that this machine could prove and that nothing selected runs on.
  void check_required() const {
    std::vector<std::string> lanes;
    for (const Due& d : due_)
      if (!contains(lanes, d.lane)) lanes.push_back(d.lane);
    for (const std::string& required : options_.require) {
      const std::string transport = required.substr(0, required.find('.'));
      if (transport == "staged" || !reason_unavailable(transport, transport == "nccl" ? "cuda" : "host").empty()) continue;
      if (std::none_of(lanes.begin(), lanes.end(), [&](const auto& l) { return l == required || l.starts_with(required + "."); }))
        throw BadInput(fmt::format("--require: expected a lane of the selection ({}), met {}; select lines that run on it", joined(lanes, " "), required));
    }
  }

  std::string hint_at_ours() const {
    const bool users_alone = options_.subjects.empty() && registry_.ours() > 0 && registry_.subjects().size() > registry_.ours();
    return users_alone ? "; subjects that came with the package are judged with --subject ours" : "";
  }

  // By family, transport, kind and world size. Keys are computed once: a mesh is dear to build.
  std::vector<Due> sorted() {
    const auto families = registry_.families();
    std::vector<std::pair<std::tuple<int, std::string, int, int>, size_t>> order;
    for (const Due& d : due_) {
      const auto at = std::find(families.begin(), families.end(), registry_.contract(d.line.contract).family);
      order.push_back({{int(at - families.begin()), d.line.text("transport"), d.what, d.line.world()}, order.size()});
    }
    std::sort(order.begin(), order.end());
    std::vector<Due> list;
    for (const auto& [key, place] : order) list.push_back(std::move(due_[place]));
    return list;
  }


  void add_contract(const Contract& c) {
    for (const Place& place : places_due(options_))
      for (const std::string& subject : subjects_due(options_, registry_, c)) {
        for (const std::string& text : c.cases(options_.tier)) add_seeds(c, text, place, subject, false);
        for (const std::string& text : c.illegal) add_seeds(c, text, place, subject, true);
      }
    if (options_.controls && !subjects_due(options_, registry_, c).empty()) add_controls(c);
  }

  void add_seeds(const Contract& c, const std::string& text, const Place& place, const std::string& subject, bool refused) {
    Case line = parse(text, registry_);
    line.set("transport", place.first);
    line.set("device", place.second);
    if (!subject.empty()) line.set("subject", subject);
    if (line.world() > most_ranks(place.first)) return;
    const int seeds = refused ? 1 : options_.seeds;
    for (int i = 0; i < seeds; ++i) {
      if (options_.seed || seeds > 1) line.set("seed", std::to_string(options_.seed.value_or(1) + uint64_t(i)));
      add(c, line, refused);
    }
  }

  void add(const Contract& c, const Case& line, bool refused) {
    if (!within(options_, line) || !selected(patterns_, c, line)) return;
    if (!seen_.insert(print_canonical(line)).second) return;
    if (std::string why = not_due(line, registry_); !why.empty()) return not_due_.push_back(std::move(why));
    if (std::string why = checks_not_due(line, registry_, options_.checks); !refused && !why.empty()) not_due_.push_back(std::move(why));
    if (!refused)
      for (std::string& why : checks_left_out(line, registry_, options_.checks)) not_due_.push_back(std::move(why));
    if (!refused && declared_of(line, registry_).traffic && own_traffic_.insert(called(line)).second)
      not_due_.push_back(fmt::format("{}: the contract's traffic; the subject's own is due in its place", called(line)));
    if (!refused) refuse_too_big(line, {}, registry_);
    if (!refused && fill_of(line) == Fill::large) refuse_infeasible(line, {}, registry_);
    Due d;
    d.line = line;
    d.lane = lane_of(line);
    d.illegal = refused;
    const Declared declared = declared_of(line, registry_);
    if (refused) {
      if (options_.checks.empty() || contains(options_.checks, "rejection")) d.checks = {"rejection"};
    } else {
      d.checks = due_checks(c, line, declared, options_.checks);
    }
    if (!d.checks.empty()) due_.push_back(std::move(d));
  }

  // A line that once failed stays in every tier.
  void add_regression(const Case& line) {
    const Contract& c = registry_.contract(line.contract);
    if (!is_due_at_its_place(line)) return;
    // It failed on the subject that it names, or on ours: others have their own.
    if (!contains(subjects_due(options_, registry_, c), line.text("subject"))) return;
    const size_t before = due_.size();
    add(c, line, illegal(c, line));
    if (due_.size() > before) due_.back().stored = true;
  }

  bool is_due_at_its_place(const Case& line) const {
    const auto places = places_due(options_);
    return std::find(places.begin(), places.end(), Place(line.text("transport"), line.text("device"))) != places.end();
  }

  void add_controls(const Contract& c) {
    for (const auto& [transport, device] : places_due(options_))
      for (const Control& control : registry_.controls()) {
        // A twin is a kernel of the host or of a device.
        if (control.contract != c.name || (device == "cuda") != on_device(control, registry_)) continue;
        const auto expected = trimmed_words(control.check, ',');
        if (!options_.checks.empty() && std::none_of(expected.begin(), expected.end(), [&](const auto& e) { return contains(options_.checks, e); })) continue;
        Case line = parse(control.witness, registry_);
        line.set("transport", transport);
        line.set("device", device);
        line.set("control", control.name);
        if (!within(options_, line) || !selected(patterns_, c, line)) continue;
        Due d;
        d.what = Due::named_control;
        d.line = line;
        d.control = control.name;
        d.lane = lane_of(line);
        d.checks = expected;
        d.illegal = illegal(c, line);
        due_.push_back(std::move(d));
      }
  }

  // A line of an earlier report: whatever it was there, it is here again.
  void add_line(Case line, bool of_control) {
    const Contract& c = registry_.contract(line.contract);
    if (of_control) {
      Due d;
      d.what = Due::named_control;
      d.control = line.text("control");
      if (!d.control.empty())
        d.checks = trimmed_words(registry_.control(c.name, d.control).check, ',');
      d.lane = lane_of(line);
      d.illegal = illegal(c, line);
      d.line = std::move(line);
      due_.push_back(std::move(d));
      return;
    }
    add(c, line, illegal(c, line));
  }

  const Options& options_;
  const Registry& registry_;
  std::vector<Pattern> patterns_;
  std::vector<Due> due_;
  std::set<std::string> seen_;
  std::set<std::string> own_traffic_;  // contracts and subjects
  std::vector<std::string>& not_due_;
};

// ---- controls ------------------------------------------------------------------------------------

// Everything that left a rank in the base shot, byte for byte.
bool same_results(const Judged& a, const Judged& b, bool gradient) {
  for (size_t r = 0; r < a.evidence.ranks.size(); ++r) {
    const auto &x = a.evidence.ranks[r].shots[0], &y = b.evidence.ranks[r].shots[0];
    if (x.status != y.status || x.results.size() != y.results.size()) return false;
    for (size_t i = 0; i < x.results.size(); ++i)
      if (x.results[i].gradient == gradient && x.results[i].bytes != y.results[i].bytes) return false;
  }
  return true;
}

bool same_traces(const Judged& a, const Judged& b) {
  for (size_t r = 0; r < a.evidence.ranks.size(); ++r) {
    const auto &x = a.evidence.ranks[r].shots[0], &y = b.evidence.ranks[r].shots[0];
    if (!(x.ledger == y.ledger) || x.memory.size() != y.memory.size()) return false;
  }
  return true;
}

// What a call overwrites is the subject's business where it is a buffer of its own: no argument was
// written to, as the ranks compared them byte for byte.
bool argument_written(const Judged& j) {
  for (const RankRecord& r : j.evidence.ranks)
    for (const ShotRecord& s : r.shots)
      for (const MemoryFinding& m : s.memory)
        if (m.what == "argument") return true;
  return false;
}

bool any_active(const Judged& j) {
  for (const RankRecord& r : j.evidence.ranks)
    for (const ShotRecord& s : r.shots)
      if (s.active) return true;
  return false;
}

const CheckResult* find(const CaseResult& result, const std::string& check) {
  for (const CheckResult& c : result.checks)
    if (c.check == check) return &c;
  return nullptr;
}

bool fires(const CheckResult& c) { return c.verdict == Verdict::failed || c.verdict == Verdict::vacuous; }

std::string firing(const CaseResult& result) {
  std::string list;
  for (const CheckResult& c : result.checks)
    if (c.verdict != Verdict::passed && c.verdict != Verdict::skipped) list += (list.empty() ? "" : ",") + c.check;
  return list;
}

bool lost_ranks(const CaseResult& result) {
  return std::any_of(result.checks.begin(), result.checks.end(),
                     [](const CheckResult& c) { return c.verdict == Verdict::hung || c.verdict == Verdict::crashed; });
}

// Something in it could not be judged, and nothing in it is to blame.
bool left_open(const CaseResult& result) {
  return std::any_of(result.checks.begin(), result.checks.end(), [](const CheckResult& c) { return c.verdict == Verdict::untested; });
}

// The weakest of the expected findings decides the margin.
void fill_numbers(ControlResult& out, const CaseResult& broken, const CaseResult& healthy, const std::vector<std::string>& expected) {
  out.exact = true;
  out.margin = std::numeric_limits<double>::infinity();
  for (const std::string& name : expected) {
    const CheckResult* c = find(broken, name);
    if (!c || c->findings.empty()) continue;
    const Finding& f = c->findings.front();
    if (out.rank < 0) {
      out.rank = f.rank;
      out.where = f.where;
      out.index = f.index;
      out.bound = f.bound;
      out.ratio = f.ratio;
    }
    const bool bounded = f.numeric && f.bound != 0;
    const CheckResult* h = find(healthy, name);
    const double base = h ? h->ratio : 0;
    const double margin = bounded && base > 0 ? f.ratio / base : std::numeric_limits<double>::infinity();
    out.catches.push_back({name, f.ratio, margin, !bounded});
    if (!bounded) continue;
    if (margin < out.margin) {
      out.margin = margin;
      out.ratio = f.ratio;
      out.bound = f.bound;
    }
    out.exact = false;
  }
}

struct Expectation {
  std::vector<std::string> checks, silent;
  bool alone = false;
};

void conclude(ControlResult& out, const Judged& broken, const Judged& healthy, const Expectation& expected) {
  out.expected_check = joined(expected.checks, ",");
  out.caught_by = firing(broken.result);
  const std::string twin = firing(healthy.result);
  if (!twin.empty()) {
    out.outcome = ControlResult::unjudged;
    out.reason = left_open(healthy.result) ? "the healthy twin could not be judged: " + healthy.result.checks.front().note
                                           : "the healthy twin does not pass " + twin + " on the same case";
    return;
  }
  for (const CheckResult& c : broken.result.checks)
    if (c.verdict == Verdict::crashed || c.verdict == Verdict::hung) {
      out.outcome = ControlResult::wrong_check;
      out.reason = fmt::format("{}: a crash or a hang is not a catch", name(c.verdict));
      return;
    }
  std::vector<std::string> quiet;
  for (const std::string& c : expected.checks) {
    const CheckResult* r = find(broken.result, c);
    if (!r || !fires(*r)) quiet.push_back(c);
  }
  if (!quiet.empty()) {
    out.outcome = out.caught_by.empty() ? ControlResult::escaped : ControlResult::wrong_check;
    out.reason = fmt::format("{} did not see it", joined(quiet, ", "));
    return;
  }
  for (const CheckResult& c : broken.result.checks)
    if (fires(c) && (contains(expected.silent, c.check) || (expected.alone && !contains(expected.checks, c.check)))) {
      out.outcome = ControlResult::wrong_check;
      out.reason = c.check + " fires and must be silent";
      return;
    }
  out.outcome = ControlResult::caught;
  fill_numbers(out, broken.result, healthy.result, expected.checks);
}

// ---- operators -----------------------------------------------------------------------------------

struct Site {
  Phase phase;
  std::string axis;
  int number;
  LedgerEntry call;  // of the first rank that makes it
  int p;
  auto key() const { return std::tuple(int(phase), axis, number); }
};

std::vector<Site> sites_of(const Judged& healthy) {
  std::vector<Site> sites;
  std::set<std::tuple<int, std::string, int>> seen;
  for (const RankRecord& r : healthy.evidence.ranks)
    for (const LedgerEntry& e : r.shots[0].ledger) {
      Site s{e.phase, e.label, e.number, e, int(e.members.size())};
      if (seen.insert(s.key()).second) sites.push_back(std::move(s));
    }
  return sites;
}

// The call at a site as it is due; null where none is.
std::optional<Traffic> due_at(const Site& site, const Case& line, const Judged& healthy) {
  const Evidence& e = healthy.evidence;
  const int rank = site.call.members.front();
  const bool backward = site.phase == Phase::backward || site.phase == Phase::finish;
  const auto in_phase = [&](const LedgerEntry& c) { return backward == (c.phase == Phase::backward || c.phase == Phase::finish); };
  size_t before = 0;  // calls on the group in this phase
  for (const LedgerEntry& c : e.record(rank, 0).ledger) {
    if (c.label != site.axis || !in_phase(c)) continue;
    if (c.phase == site.phase && c.number == site.number) break;
    ++before;
  }
  if (!e.contract->traffic && !e.declared.traffic) return std::nullopt;
  for (const Traffic& t : traffic_due(*e.contract, e.declared, line, rank))
    if (t.backward == backward && t.label == site.axis && (t.rank < 0 || t.rank == rank) && before-- == 0) return t;
  return std::nullopt;
}

// Another group of the size of the call's, or the world in its place: only a mesh of two axes has one.
bool needs_grid(const FaultOperator& op) { return op.kind == "wrong_group" || op.kind == "world_group"; }

bool applies(const FaultOperator& op, const Site& s, bool rounding, int world) {
  if (needs_grid(op) && s.p == world) return false;
  if (std::find(op.ops.begin(), op.ops.end(), s.call.op) == op.ops.end()) return false;
  if (!op.any_reduce && std::find(op.reduces.begin(), op.reduces.end(), s.call.reduce) == op.reduces.end()) return false;
  if (s.p < op.smallest_p) return false;
  if (op.needs_rounding && !rounding) return false;
  // On rounding data a flip of a low mantissa bit is within every bound: out of scope.
  return !(rounding && op.name == "bit_weight1");
}

// It leaves the calls alone and changes a result on all ranks: what cancels out of every result when it is
// equal on the members of a group may stay so.
bool stays_equal(const FaultOperator& op) { return !op.call && !op.one_rank; }

// The named check of an operator at a site, from where the result differs. The adjoint's basis vectors
// survive bf16 on the wire, and a single flipped bit may hide from its dots: there it is not asked.
Expectation expectation(const FaultOperator& op, const Site& site, bool one_rank, bool outputs_differ, bool gradients_differ, bool linear) {
  Expectation e;
  if (op.name == "own_order") return {{"replica"}, {}, false};
  if (op.name == "arrival_order") return {{"repeat"}, {}, false};
  if (op.kind == "in_place") return {{"memory"}, {}, false};
  if (op.call && one_rank) return {{"lockstep"}, {}, false};
  if (op.call) e.checks.push_back("ledger");
  if (outputs_differ) e.checks.push_back("forward");
  const bool backward = site.phase == Phase::backward || site.phase == Phase::finish;
  if (gradients_differ && (backward || !outputs_differ)) e.checks.push_back("gradient");
  if (backward && gradients_differ && linear && op.kind != "bit" && op.kind != "bf16_wire" && !op.call) e.checks.push_back("adjoint");
  return e;
}

// At which sites an operator is tried: at every one, or only until it was caught once among those that
// are alike: of one kind of operator, or of one operator, phase and call.
class Sites {
 public:
  enum Alike : uint8_t { every, kind, call };
  explicit Sites(Alike alike) : alike_(alike) {}

  bool due(const FaultOperator& op, const Site& site, bool one_rank) const {
    return alike_ == every || !caught_.contains(key(op, site, one_rank));
  }
  void caught(const FaultOperator& op, const Site& site, bool one_rank) { caught_.insert(key(op, site, one_rank)); }

 private:
  std::string key(const FaultOperator& op, const Site& site, bool one_rank) const {
    const std::string what = alike_ == kind ? op.kind : fmt::format("{} {} {} {}", op.name, name(site.phase), name(site.call.op), name(site.call.reduce));
    return what + (one_rank ? " @rank" : "");
  }
  Alike alike_;
  std::set<std::string> caught_;
};

class Gate {
 public:
  Gate(const Options& o, const Registry& r, Progress& p) : options_(o), registry_(r), progress_(p), runner_(o, r) {
    if (!o.dump.empty()) dumps_ = std::make_shared<Dumps>(o.dump);
  }

  Report run(const std::vector<Due>& due) {
    const double begin = now();
    report_.command = options_.command;
    report_.program = options_.program;
    report_.required = options_.require;
    alone_ = due.size() == 1;
    report_.versions = versions();
    progress_.begin(count(due, Due::healthy), count(due, Due::named_control));
    std::vector<Due> local, mpi;
    for (const Due& d : due) (d.line.text("transport") == "mpi" ? mpi : local).push_back(d);
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
    judge(mpi);                            // alone: beside a busy process its polls starve
    if (options_.controls && options_.failed.empty() && !ends_early()) operators_without_catch();
    if (!interrupted()) rerun_failures();
    leave_open_what_shares_wrong_code();
    close_lanes(due);
    if (!ends_early()) compare_with_manifest(due);
    report_.wall_seconds = now() - begin;
    report_.complete = !ends_early() && lost_job_.empty();
    if (dumps_) report_.dumped = dumps_->told(), report_.dump_error = dumps_->error();
    return std::move(report_);
  }

 private:
  using Asked = std::tuple<std::string, Place, std::string>;  // contract, place, subject

  // What one process judges by itself: lines, then operators on contracts.
  struct Share {
    std::vector<Due> due;
    std::vector<Asked> operators;
    size_t weight = 0;
  };

  // A control is made of the code of its family. Where some of that fails by itself, one that another check
  // catches than the due one, that does nothing, or that stands little above its healthy twin, may have met the
  // same wrong line: that failure is what is due.
  void leave_open_what_shares_wrong_code() {
    for (ControlResult& control : report_.controls) {
      if (control.outcome != ControlResult::wrong_check && !control.did_nothing && !weak(control)) continue;
      const auto fails = std::find_if(report_.cases.begin(), report_.cases.end(), [&](const CaseResult& c) {
        return c.family == control.family && !firing(c).empty() && !left_open(c);
      });
      if (fails == report_.cases.end()) continue;
      const std::string why = weak(control) ? "margin " + telling::ratio(control.margin) : control.reason;
      control.outcome = ControlResult::unjudged;
      control.reason = fmt::format("{} fails by itself, and may share code with it ({})", fails->line, why);
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

  // The controls and operators of a contract stay with the lines that they are compared with, since they
  // share twins and truths; every other line may go anywhere. Those that take longest go first.
  std::vector<Share> shares_of(const std::vector<Due>& due) const {
    std::map<std::string, Share> of_contract;
    std::vector<Share> shares;
    for (const Due& d : due) {
      // Differences of a curved reference take their time, and most where every pair of tokens counts.
      const Contract& c = registry_.contract(d.line.contract);
      const size_t weight = c.visible ? 8 : c.linear ? 1 : 4;
      const bool alone = options_.controls && d.what == Due::healthy && !witnesses_.contains(print_canonical(d.line));
      Share& share = alone ? shares.emplace_back() : of_contract[c.name];
      share.due.push_back(d);
      share.weight += weight;
    }
    for (const Asked& a : subjects_of(due)) of_contract[std::get<0>(a)].operators.push_back(a);
    for (auto& [name, share] : of_contract) shares.push_back(std::move(share));
    std::stable_sort(shares.begin(), shares.end(), [](const Share& a, const Share& b) { return a.weight > b.weight; });
    return shares;
  }

  // The judge's own tests, and beside them the cases, in processes that each take the next share. This
  // process judges by itself where nothing is to run beside it, and what one device alone is asked for.
  void judge_side_by_side(const std::vector<Due>& due, const std::vector<Due>& local) {
    struct Keeper final : ResultSink {
      explicit Keeper(Gate& g) : gate(g) {}
      using ResultSink::put;
      // A job says nothing of what was under way when it was interrupted, so what it sends holds; but ranks
      // that a signal to all processes ended look like a crash until the job has the signal, too.
      void put(const CaseResult& r) override {
        if (!interrupted() || !lost_ranks(r)) gate.take(r);
      }
      void put(const ControlResult& r) override { gate.take(r); }
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
      gate.start_worlds(local);
      for (size_t i; (i = turns.next()) < shares.size() && !gate.ends_early();)
        gate.judge(shares[i]);
    };
    const bool apart = workers > 1 || (!parts.empty() && std::none_of(local.begin(), local.end(), [](const Due& d) { return on_device(d.line); }));
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

  // Ranks are forked while this process is small: of every page that it shares with them, what either
  // writes to first is a copy.
  void start_worlds(const std::vector<Due>& due) {
    for (const Due& d : due)
      if (!on_device(d.line) && unavailable(d.line).empty()) try {
          runner_.worlds().get(d.line.text("transport"), d.line.world());
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
      std::stable_sort(results.begin(), results.end(), [&](const auto& a, const auto& b) { return place(a) < place(b); });
    };
    sort(report_.cases);
    sort(report_.controls);
  }

  bool ends_early() const { return interrupted() || (options_.fail_fast && (stop_ || (turns_ && turns_->stopped()))); }
  void stop() {
    stop_ = true;
    if (turns_) turns_->stop();
  }

  static int64_t count(const std::vector<Due>& due, Due::What what) {
    return std::count_if(due.begin(), due.end(), [&](const Due& d) { return d.what == what; });
  }

  // What was under way when the run was interrupted ended by that: nobody is blamed, and nothing said.
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
    if (result.outcome == ControlResult::escaped || result.outcome == ControlResult::wrong_check) stop();
    if (sink_) return sink_->put(result);
    progress_.done(result);
    report_.controls.push_back(std::move(result));
  }

  std::string unavailable(const Case& line) const { return reason_unavailable(line.text("transport"), line.text("device"), line.world()); }

  // A case that has one verdict, and the reason for it, in all of its checks.
  CaseResult unasked(const Case& line, const std::vector<std::string>& checks, const std::string& lane, Verdict verdict,
                     const std::string& reason) const {
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

  // Whether an exception of a case ends the run: ranks of an outside launcher may be in the middle of a job
  // and cannot be started anew, and of a single line that cannot be judged nothing else is to be said.
  bool ends_the_run(const std::exception& e) const { return !options_.isolated || (alone_ && dynamic_cast<const BadInput*>(&e)); }

  // What nobody can be blamed for leaves the checks of its case untested, and costs no other case its verdict.
  Judged judged(const Case& line, const std::vector<std::string>& checks, const std::string& lane) {
    try {
      return runner_.run(line, checks, lane);
    } catch (const std::exception& e) {
      if (ends_the_run(e)) throw;
      runner_.worlds().drop(line.text("transport"));  // they may be in the middle of the job
      Judged j;
      j.result = unasked(line, checks, lane, Verdict::untested, e.what());
      return j;
    }
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
      j.result.state.push_back(fmt::format("note       fault={} changed nothing: expected a call at its site whose result it alters, met none; "
                                           "`explain` shows the calls that are due",
                                           fault));
    if (dumps_ && !d.illegal && !firing(j.result).empty() && !left_open(j.result)) dumps_->add(j, runner_.truth(j.evidence), options_.program);
    keep(j.result);
    if (firing(j.result).empty() && witnesses_.contains(j.result.canonical))
      passed_.emplace(j.result.canonical, base_of(std::move(j)));
  }

  // What controls are compared with: the verdicts, and what left the ranks in the base shot.
  static Judged base_of(Judged j) {
    j.evidence.shots.resize(1);
    for (RankRecord& r : j.evidence.ranks) r.shots.resize(1);
    return j;
  }

  // Lines on which controls and operators will be compared with the healthy subject.
  void note_witnesses(const std::vector<Due>& due) {
    if (!options_.controls) return;
    for (const Due& d : due)
      if (d.what == Due::named_control) witnesses_.insert(print_canonical(healthy_line(d)));
    if (!options_.failed.empty()) return;
    for (const auto& [contract, place, subject] : subjects_of(due)) {
      const Contract& c = registry_.contract(contract);
      for (const auto& [line, rounding] : drawn_witnesses(c, place, subject))
        witnesses_.insert(print_canonical(line));
      for (const Case& line : f32_witnesses(c, place, subject)) witnesses_.insert(print_canonical(line));
    }
  }

  static Case healthy_line(const Due& d) {
    Case line = d.line;
    line.set("control", "");
    line.set("fault", "");
    return line;
  }

  // Checks that a control is shown to: those that must fire, and all that is due on its line; narrowly,
  // those that must fire or be silent.
  std::vector<std::string> shown(const Due& d, bool narrow) const {
    const Expectation expected = named(d);
    std::vector<std::string> checks = due_or(d, d.line, expected.checks);
    if (narrow && !d.illegal && !expected.alone)
      std::erase_if(checks, [&](const std::string& c) { return !contains(expected.checks, c) && !contains(expected.silent, c); });
    return checks;
  }

  // Checks that are due on a line, and `expected`.
  std::vector<std::string> due_or(const Due& d, const Case& line, const std::vector<std::string>& expected) const {
    if (d.illegal) return {"rejection"};
    const Contract& contract = registry_.contract(line.contract);
    const Declared declared = declared_of(line, registry_);
    std::vector<std::string> checks;
    for (const Check& check : all_checks())
      if (check.due(contract, line, declared) || contains(expected, check.name)) checks.push_back(check.name);
    return checks;
  }

  Expectation named(const Due& d) const {
    const Control& control = registry_.control(d.line.contract, d.control);
    return {trimmed_words(control.check, ','), trimmed_words(control.silent, ','), control.alone};
  }

  // A control and its twin share a witness; twins are run once. A case that is due on the same line, and
  // passed all that the twin would be asked, is the twin.
  const Judged& twin(const Case& line, const std::vector<std::string>& checks, const std::string& lane) {
    const std::string canonical = print_canonical(line);
    if (const auto found = passed_.find(canonical); found != passed_.end())
      if (std::all_of(checks.begin(), checks.end(), [&](const std::string& c) { return find(found->second.result, c); })) return found->second;
    std::string key = canonical + "|" + joined(checks, ",");
    auto found = twins_.find(key);
    if (found != twins_.end()) return found->second;
    twin_lines_.push_back(line);
    return twins_.emplace(key, base_of(judged(twin_lines_.back(), checks, lane))).first->second;
  }

  void control(const Due& d) {
    if (!unavailable(d.line).empty()) return;
    if (d.control.empty()) return operator_again(registry_.contract(d.line.contract), d);
    const Case line = healthy_line(d);
    const Judged& healthy = twin(line, due_or(d, line, {}), d.lane);
    keep_failing_twin(healthy.result);
    keep(told([&](bool narrow) { return control_run(d, healthy, narrow); }));
  }

  // Tier smoke shows a broken run to few checks. One that is not caught so is shown to all, to be told as
  // elsewhere: a second chance it is not.
  ControlResult told(const std::function<ControlResult(bool narrow)>& run) const {
    const auto passes = [](const ControlResult& c) { return c.outcome == ControlResult::caught || c.outcome == ControlResult::equivalent; };
    if (options_.tier != "smoke") return run(false);
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
      const Judged broken = runner_.run(d.line, shown(d, narrow), d.lane);
      out.seconds = broken.result.seconds;
      conclude(out, broken, healthy, named(d));
      out.did_nothing = out.outcome == ControlResult::escaped && broken.completed && same_results(broken, healthy, false) &&
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

  // A twin that fails shows nothing about its controls, and is itself what has to be told, once a line:
  // it may be due as a case with fewer checks, or as no case at all.
  void keep_failing_twin(const CaseResult& twin) {
    if (!firing(twin).empty() && !failed_.contains(twin.canonical)) keep(twin);
  }

  void describe(ControlResult& out, const Case& line, const Contract& c, const std::string& lane) const {
    out.family = c.family;
    out.contract = c.name;
    out.lane = lane;
    out.witness = print(line);
    out.canonical = print_canonical(line);
    out.replay = "run " + out.witness;
  }

  static std::vector<Asked> subjects_of(const std::vector<Due>& due) {
    std::vector<Asked> contracts;
    for (const Due& d : due) {
      if (d.what != Due::healthy || d.illegal) continue;
      Asked t(d.line.contract, Place(d.line.text("transport"), d.line.text("device")), d.line.text("subject"));
      if (std::find(contracts.begin(), contracts.end(), t) == contracts.end()) contracts.push_back(t);
    }
    return contracts;
  }

  void operators(const std::vector<Asked>& subjects) {
    for (const auto& [contract, place, subject] : subjects) {
      if (ends_early()) return;
      const Contract& c = registry_.contract(contract);
      if (registry_.subject(c.name, subject).declared.own_communication) continue;  // its calls do not pass the door
      const bool widely = every_site(place);
      operators(c, place, subject, Sites(widely ? Sites::every : Sites::kind));
      Sites f32(options_.tier == "nightly" ? Sites::every : Sites::call);
      for (const Case& line : f32_witnesses(c, place, subject)) on_witness(c, line, /*rounding=*/true, f32);
    }
  }

  bool every_site(const Place& place) const { return options_.tier != "smoke" && place == Place("processes", "host"); }

  // Each witness on exact data, where there are such, and on data that round.
  std::vector<std::pair<Case, bool>> drawn_witnesses(const Contract& c, const Place& place,
                                                     const std::string& subject) const {
    std::vector<std::pair<Case, bool>> lines;  // and whether its data round
    for (Case line : witnesses_due(c, registry_, place.first, subject)) {
      line.set("device", place.second);
      if (!within(options_, line) || !unavailable(line).empty() || !not_due(line, registry_).empty()) continue;
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
  std::vector<Case> f32_witnesses(const Contract& c, const Place& place, const std::string& subject) const {
    std::vector<Case> lines;
    if (c.linear || !every_site(place)) return lines;
    for (Case line : witnesses_due(c, registry_, place.first, subject)) {
      if (line.dtype() == DType::f32) continue;  // the subject has no wider type: that was its turn
      line.set("dtype", "f32");
      line.set("fill", "normal");
      if (within(options_, line) && not_due(line, registry_).empty()) lines.push_back(std::move(line));
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
    const Judged& healthy = twin(line, checks, d.lane);
    keep_failing_twin(healthy.result);
    if (!firing(healthy.result).empty()) return;
    for (const Site& site : sites_of(healthy))
      if (site.key() == std::tuple(int(spec.phase), spec.axis, spec.number))
        keep(operator_run(c, line, fault_operator(spec.op), site, spec.rank >= 0, healthy, checks,
                          d.lane));
  }

  void on_witness(const Contract& c, const Case& line, bool rounding, Sites& sites) {
    const std::string lane = lane_of(line);
    const auto checks = shown_to_operators(c, line);
    const Judged& healthy = twin(line, checks, lane);
    keep_failing_twin(healthy.result);
    if (!firing(healthy.result).empty()) return;
    for (const FaultOperator& op : fault_operators())
      for (const Site& site : sites_of(healthy)) {
        // Exact data show everything but rounding; on rounding data only what needs it is run again,
        // unless the family has no exact data.
        if (!applies(op, site, rounding, line.world()) || (rounding && c.linear && !op.needs_rounding)) continue;
        for (const bool one_rank : {false, true}) {
          // Without isolation a call that never meets its peers would cost its whole deadline.
          if (one_rank && (!op.call || site.p < 2 || !options_.isolated)) continue;
          if (ends_early()) return;
          if (!sites.due(op, site, one_rank)) continue;
          const auto cancels = [&] { return stays_equal(op) && due_at(site, line, healthy).value_or(Traffic{}).cancels; };
          const ControlResult out = told([&](bool narrow) {
            narrow = narrow && !cancels();  // that nothing differs is asked of every check
            return operator_run(c, line, op, site, one_rank, healthy, narrow ? narrowed(checks, op, site, one_rank, c.linear) : checks, lane);
          });
          if (out.outcome == ControlResult::caught) sites.caught(op, site, one_rank);
          keep(out);
          progress_.tick();
        }
      }
  }

  // What may be expected of an operator at a site, wherever its results turn out to differ.
  static std::vector<std::string> narrowed(std::vector<std::string> checks, const FaultOperator& op, const Site& site, bool one_rank, bool linear) {
    const Expectation most = expectation(op, site, one_rank, /*outputs_differ=*/true, /*gradients_differ=*/true, linear);
    std::erase_if(checks, [&](const std::string& c) { return c != "forward" && c != "gradient" && !contains(most.checks, c); });
    return checks;
  }

  ControlResult operator_run(const Contract& c, const Case& line, const FaultOperator& op, const Site& site, bool one_rank,
                             const Judged& healthy, const std::vector<std::string>& checks, const std::string& lane) {
    FaultSpec spec{op.name, site.phase, site.axis, site.number, one_rank ? site.call.members.back() : -1};
    Case faulted = line;
    faulted.set("fault", print(spec));
    ControlResult out;
    out.name = op.name;
    out.kind = op.kind;
    out.imitates = op.does;
    describe(out, faulted, c, lane);
    Judged broken;
    try {
      broken = runner_.run(faulted, checks, lane);
    } catch (const std::exception& e) {
      leave_open(out, faulted, e);
      return out;
    }
    out.seconds = broken.result.seconds;
    const bool outputs = broken.completed && !same_results(broken, healthy, false);
    const bool gradients = broken.completed && !same_results(broken, healthy, true);
    Expectation expected = expectation(op, site, one_rank, outputs, gradients, c.linear && check_named("adjoint").due(c, line, declared_of(line, registry_)));
    const bool cancels = due_at(site, line, healthy).value_or(Traffic{}).cancels;
    if (cancels && op.call && !one_rank) expected.checks = {"ledger"};  // whether values show it is open
    if (broken.completed && !any_active(broken)) {
      out.outcome = ControlResult::equivalent;
      out.reason = "inactive";
    } else if (broken.completed && !outputs && !gradients && same_traces(broken, healthy) && op.name != "arrival_order") {
      out.outcome = ControlResult::equivalent;
      out.reason = "masked";
    } else if (broken.completed && op.kind == "in_place" && !argument_written(broken)) {
      out.outcome = ControlResult::equivalent;
      out.reason = "own buffer";
    } else if (broken.completed && cancels && stays_equal(op) && firing(broken.result).empty()) {
      out.outcome = ControlResult::equivalent;
      out.reason = "cancels";
    } else {
      conclude(out, broken, healthy, expected);
    }
    out.expected_check = joined(expected.checks, ",");
    return out;
  }

  // An operator that found sites in a family and was caught at none of them is one that nobody would
  // notice there. Asked of whole families only: a narrowed selection may hold its equivalent sites.
  // A family whose calls all read buffers of its own has none that in_place could do harm at.
  // MPI runs one site of each kind, so by itself it is a narrowed selection, too.
  void operators_without_catch() {
    const auto& lanes = options_.transports;
    if (!lanes.empty() && std::all_of(lanes.begin(), lanes.end(), [](auto& t) { return t == "mpi"; })) return;
    if (options_.tier == "smoke" || !options_.ranks.empty() || !options_.dtypes.empty() || !options_.checks.empty()) return;
    for (const std::string& p : options_.patterns)
      if (!contains(registry_.families(), p)) return;
    std::map<std::pair<std::string, std::string>, const ControlResult*> uncaught;  // family, operator
    for (const ControlResult& c : report_.controls)
      if (!c.kind.empty() && !(c.kind == "in_place" && c.outcome == ControlResult::equivalent))
        uncaught.try_emplace({c.family, c.name}, &c);
    for (const ControlResult& c : report_.controls)
      if (!c.kind.empty() && c.outcome != ControlResult::equivalent) uncaught.erase({c.family, c.name});
    std::vector<ControlResult> unseen;
    for (const auto& [key, example] : uncaught) {
      unseen.push_back(*example);
      unseen.back().outcome = ControlResult::escaped;
      unseen.back().reason = "caught at no site of the family " + key.first;
    }
    for (ControlResult& c : unseen) keep(std::move(c));
  }

  // The first ten failing cases, hung ones excepted, again in a fresh world, only to call them steady.
  void rerun_failures() {
    int left = 10;
    const double until = now() + 5;
    for (CaseResult& result : report_.cases) {
      const std::string first = firing(result);
      if (first.empty() || left_open(result) || left == 0 || now() > until) continue;
      if (std::any_of(result.checks.begin(), result.checks.end(), [](const auto& c) { return c.verdict == Verdict::hung; })) continue;
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
          if (c.verdict == Verdict::skipped || c.verdict == Verdict::untested) l = {lane, false, c.note};
      }
      report_.lanes.push_back(l);
    }
    for (Lane& l : unproven(options_, registry_, due)) report_.lanes.push_back(std::move(l));
    std::set<std::string> too_small_for;
    for (const ControlResult& c : report_.controls)
      if (c.outcome == ControlResult::unproven && too_small_for.insert(c.name).second)
        report_.lanes.push_back({"control " + c.name, false, c.reason});
    const bool asked = std::any_of(due.begin(), due.end(), [](const Due& d) { return on_device(d.line); });
    if (asked) say_devices(due);
    for (const Ability& a : asked ? abilities() : abilities_unasked())
      if (!a.available && std::none_of(names.begin(), names.end(), [&](const auto& n) { return n.starts_with(a.name + "."); }))
        report_.lanes.push_back({a.name, false, a.reason});
  }

  // Which rank has which device, and what is set on them. Forked ranks are all on this machine; where
  // a launcher put the others is not known here.
  void say_devices(const std::vector<Due>& due) {
    if (!device_description().empty()) report_.versions["device"] = device_description();
    for (const auto& [name, value] : device_settings()) report_.versions[name] = value;
    int ranks = 0;
    for (const Due& d : due)
      if (on_device(d.line) && d.line.text("transport") != "mpi" && unavailable(d.line).empty()) ranks = std::max(ranks, d.line.world());
    if (devices_probed() == 0 || outside_launch()) return;
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    for (int r = 0; r < ranks; ++r)
      report_.placement.emplace_back(std::to_string(r), fmt::format("{}:cuda{}", host, r % devices_probed()));
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
      if (lost_job_.empty() || d.what != Due::named_control || d.control.empty() || broken.contains(print_canonical(d.line)) ||
          !unavailable(d.line).empty())
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
  std::map<std::string, Judged> twins_;
  std::map<std::string, Judged> passed_;  // due cases that are twins, by canonical line
  std::set<std::string> witnesses_;       // canonical lines of twins
  std::list<Case> twin_lines_;
  std::shared_ptr<Dumps> dumps_;  // --dump; null without
  ResultSink* sink_ = nullptr;  // of a part: results go to the parent
  std::set<std::string> failed_;  // canonical lines of kept cases that did not pass
  std::string lost_job_;          // why a process that judged ended before it was through
  Turns* turns_ = nullptr;        // of this gate and those beside it; null: it is by itself
  bool stop_ = false;
  bool alone_ = false;            // one line is due
};

}  // namespace

void refuse_two_seeds(uint64_t of_option, std::string_view of_line) {
  throw BadInput(fmt::format("--seed: expected the seed once, met --seed {} beside seed={}; leave one out", of_option, of_line));
}

bool selects(const Options& options, const Registry& registry, const Case& line) {
  return selected(parse_patterns(options, registry), registry.contract(line.contract), line);
}

std::vector<Due> plan_gate(const Options& options, const Registry& registry, std::vector<std::string>* not_due) {
  std::vector<std::string> nowhere;
  return Planner(options, registry, not_due ? *not_due : nowhere).plan();
}

Report run_gate(const Options& options, const Registry& registry, Progress& progress) {
  std::vector<std::string> not_due;
  const auto due = plan_gate(options, registry, &not_due);
  Report report = Gate(options, registry, progress).run(due);
  report.not_due.insert(report.not_due.begin(), not_due.begin(), not_due.end());
  return report;
}

Report run_line(const Case& line, const Options& options, const Registry& registry, Progress& progress) {
  check_subjects(options, registry);
  const Contract& c = registry.contract(line.contract);
  if (const std::string why = not_due(line, registry); !why.empty() && line.text("control").empty())
    throw BadInput(fmt::format("{}: expected a line that the subject does, met one that it declares not to do ({})", print(line), why));
  if (!line.text("control").empty())
    if (const Control& twin = registry.control(c.name, line.text("control")); twin.make && on_device(twin, registry) != on_device(line))
      throw BadInput(fmt::format("keys 'control' and 'device': expected device={}, where the broken twin runs, met {}",
                                 on_device(line) ? "host" : "cuda", print(line)));
  Due d;
  d.line = line;
  d.lane = lane_of(line);
  d.illegal = illegal(c, line);
  if (d.illegal && line.text("control").empty()) {
    const Rejected r = *c.precondition(line);
    throw BadInput(fmt::format("{}: {}", print(line), r.what()));
  }
  d.checks = d.illegal ? std::vector<std::string>{"rejection"} : due_checks(c, line, declared_of(line, registry), options.checks);
  if (d.checks.empty())
    throw BadInput(fmt::format("--check: none of {} is due on {}; `shardproof explain` shows which are", joined(options.checks, " "), print(line)));
  Options plain = options;
  plain.controls = false;
  plain.self = false;
  Report report = Gate(plain, registry, progress).run({d});
  if (!d.illegal) report.not_due = checks_unasked(line, registry, options.checks);
  return report;
}

}  // namespace shardproof
