// What a gate is due: lines of the tiers, stored lines, named controls, or the lines of an earlier
// report that failed there.
#include "oracle/gate_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "oracle/abilities.hpp"
#include "oracle/cost.hpp"
#include "oracle/device.hpp"
#include "oracle/due.hpp"
#include "oracle/joined.hpp"
#include "oracle/overflow.hpp"
#include "oracle/report.hpp"
#include "oracle/run.hpp"
#include "oracle/too_small.hpp"
#include "oracle/words.hpp"

namespace shardproof {

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

std::string contradiction(const Contract& c, const Case& line, bool due_to_refuse) {
  if (!c.precondition || illegal(c, line) == due_to_refuse) return "";
  if (due_to_refuse)
    return c.name +
           " lists the line under `illegal`, and its precondition takes it; mend the contract";
  return fmt::format("{} refuses a line of its own, {}; mend its lines or its precondition", c.name,
                     c.precondition(line)->what());
}

bool within(const Options& o, const Case& line) {
  return (o.ranks.empty() ||
          std::find(o.ranks.begin(), o.ranks.end(), line.world()) != o.ranks.end()) &&
         (o.dtypes.empty() || contains(o.dtypes, line.text("dtype")));
}

namespace {

// A selection: a contract or family (empty: all), and key=value words that a line must hold.
struct Pattern {
  std::string name;
  std::vector<std::pair<std::string, std::string>> words;

  bool names(const Contract& c) const { return name.empty() || name == c.name || name == c.family; }
  bool holds(const Case& line) const {
    return std::all_of(words.begin(), words.end(), [&](const auto& w) {
      return line.has(w.first) && line.text(w.first) == w.second;
    });
  }
};

std::string help_on(const std::string& word, const std::vector<std::string>& known) {
  if (word.find_first_not_of("0123456789") == std::string::npos)
    return "; lists of an option have commas, --ranks 2,3, or the option again";
  return word.find(',') == std::string::npos ? did_you_mean(word, known)
                                             : "; patterns have blanks between them";
}

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
      throw BadInput(
          fmt::format("PATTERN: expected a contract, a family or key=value, met '{}'; leave it out "
                      "to judge everything",
                      argument));
    for (const std::string& word : words) {
      const size_t eq = word.find('=');
      if (eq == std::string::npos) {
        if (!contains(known, word))
          throw BadInput(
              fmt::format("PATTERN: expected a contract, a family or key=value, as `shardproof "
                          "list` names them, met '{}'{}",
                          word, help_on(word, known)));
        patterns.push_back({word, {}});
        continue;
      }
      const std::string key = word.substr(0, eq);
      if (!keys.contains(key))
        throw BadInput(fmt::format("{}: no contract takes this key{}", key,
                                   did_you_mean(key, {keys.begin(), keys.end()})));
      if (patterns.empty()) patterns.push_back({});
      const std::string value = word.substr(eq + 1);
      patterns.back().words.emplace_back(key, key == "subject" && value == "ours" ? "" : value);
    }
  }
  if (patterns.empty()) patterns.push_back({});
  return patterns;
}

bool selected(const std::vector<Pattern>& patterns, const Contract& c) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const Pattern& p) { return p.names(c); });
}
bool selected(const std::vector<Pattern>& patterns, const Contract& c, const Case& line) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const Pattern& p) { return p.names(c) && p.holds(line); });
}

std::vector<std::string> transports_due(const Options& options) {
  if (!options.transports.empty()) return options.transports;
  if (options.tier == "smoke") return {"processes"};
  std::vector<std::string> list{"processes"};
  if (reason_unavailable("mpi", "host").empty()) list.push_back("mpi");
  return list;
}

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
      if (const Place place = place_named(transport, device);
          std::find(places.begin(), places.end(), place) == places.end())
        places.push_back(place);
  return places;
}

void check_names(const Options& options) {
  const std::vector<std::string> tiers{"smoke", "ci", "nightly"};
  if (!contains(tiers, options.tier))
    throw BadInput(fmt::format("--tier: expected smoke, ci or nightly, met '{}'{}", options.tier,
                               did_you_mean(options.tier, tiers)));
  std::vector<std::string> names;
  for (const std::string& lane : lane_names()) names.push_back(lane);
  for (const std::string& t : options.transports)
    if (!contains(names, t))
      throw BadInput(fmt::format("--transport: expected one of {}, met '{}'{}", joined(names, " "),
                                 t, did_you_mean(t, names)));
  for (const std::string& d : options.devices)
    if (d != "host" && d != "cuda")
      throw BadInput(fmt::format("--device: expected host or cuda, met '{}'", d));
  for (const std::string& c : options.checks) check_named(c);
  for (const std::string& d : options.dtypes)
    if (!dtype_from(d))
      throw BadInput(fmt::format("--dtype: expected one of f64 f32 bf16 f16, met '{}'", d));
  for (const std::string& lane : options.require) {
    const std::string transport = lane.substr(0, lane.find('.'));
    const std::string rest =
        lane.find('.') == std::string::npos ? "" : lane.substr(lane.find('.') + 1);
    const bool number = rest.size() > 2 && rest.starts_with("np") && rest[2] != '0' &&
                        rest.find_first_not_of("0123456789", 2) == std::string::npos;
    const bool known = contains(names, transport);
    if (!known || (lane != transport && !number))
      throw BadInput(
          fmt::format("--require: expected a lane such as processes.np4 or mpi, met '{}'{}", lane,
                      known ? "" : did_you_mean(transport, names)));
  }
}

constexpr size_t most_values_told = 8;

class Planner {
 public:
  Planner(const Options& o, const Registry& r, std::vector<std::string>& not_due,
          std::vector<std::string>& left_out)
      : options_(o),
        registry_(r),
        patterns_(parse_patterns(o, r)),
        not_due_(not_due),
        left_out_(left_out) {}

  std::vector<Due> plan() {
    check_names(options_);
    check_subjects(options_, registry_);
    check_seed();
    if (options_.failed.empty())
      select();
    else
      select_failed();
    if (asks_nothing())
      throw BadInput(
          not_due_.empty()
              ? "the selection is empty: no case " + emptied_by() + hint_at_ours()
              : fmt::format("the selection is empty: what matches is not due ({}, the first: {})",
                            number_of(int64_t(not_due_.size()), "line"), not_due_[0]));
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
        if (key == "seed" && options_.seed && value != std::to_string(*options_.seed))
          refuse_two_seeds(*options_.seed, value);
  }

  // A report may be older than this program, or edited.
  Case parse_of_report(const std::string& line) const try {
    return parse(line, registry_);
  } catch (const BadInput& e) {
    throw BadInput(fmt::format("--failed: {}: the line '{}' is none of this program: {}",
                               options_.failed, line, e.what()));
  }

  void select_failed() {
    if (options_.seed || options_.seeds > 1)
      throw BadInput(
          fmt::format("--seed, --seeds: expected none beside --failed {}, whose lines have their "
                      "own seeds; leave them out",
                      options_.failed));
    bool complete = true;
    const auto lines = failed_lines(options_.failed, &complete);
    if (lines.empty() && !complete)
      throw BadInput(
          fmt::format("--failed: expected the report of a run in which something did not pass, met "
                      "{}, which did not reach "
                      "its end and in which nothing had failed until then; run that gate again",
                      options_.failed));
    if (lines.empty())
      throw BadInput(
          fmt::format("--failed: expected the report of a run in which something did not pass, met "
                      "{}, where nothing failed; "
                      "there is nothing to run again",
                      options_.failed));
    const bool anywhere = options_.transports.empty() && options_.devices.empty();
    for (const FailedLine& failed : lines) {
      Case line = parse_of_report(failed.line);
      const Contract& c = registry_.contract(line.contract);
      if (!within(options_, line) || !selected(patterns_, c, line)) continue;
      // A control stands in the place of ours, whoever else is judged.
      if (!failed.control && !options_.subjects.empty() &&
          !contains(subjects_due(options_, registry_, c), line.text("subject")))
        continue;
      if (anywhere || is_due_at_its_place(line)) add_line(std::move(line), failed.control);
    }
    if (due_.empty() && not_due_.empty())
      throw BadInput(
          fmt::format("--failed: expected patterns and options that leave a line of what failed in "
                      "{}, met some that leave none of {}; the first is {}",
                      options_.failed, lines.size(), lines[0].line));
    if (!complete)
      not_due_.push_back(
          fmt::format("--failed {}: what that run left unjudged, as it did not reach its end",
                      options_.failed));
  }

  // Checks that were named, that no line is asked, and of which nothing has been said.
  void tell_unasked() {
    for (const std::string& check : options_.checks)
      if (std::none_of(due_.begin(), due_.end(),
                       [&](const Due& d) { return contains(d.checks, check); }) &&
          std::none_of(not_due_.begin(), not_due_.end(), [&](const std::string& why) {
            return why.find(check) != std::string::npos;
          }))
        not_due_.push_back(fmt::format("{}: nothing on these lines for it to ask ({})", check,
                                       check_named(check).asks));
  }

  // A twin's witness may hold a word that no case of a subject does: twins alone are a selection
  // where they were asked for, or where the contracts have nothing else.
  bool asks_nothing() const {
    const auto healthy = [](const Due& d) { return d.what == Due::healthy; };
    return due_.empty() ||
           (std::none_of(due_.begin(), due_.end(), healthy) && !twins_asked_for() && has_cases());
  }
  bool twins_asked_for() const {
    const auto names_one = [](const auto& word) { return word.first == "control"; };
    return options_.twins_alone || !options_.failed.empty() ||
           std::any_of(patterns_.begin(), patterns_.end(), [&](const Pattern& p) {
             return std::any_of(p.words.begin(), p.words.end(), names_one);
           });
  }
  bool has_cases() const {
    const auto& all = registry_.contracts();
    return std::any_of(all.begin(), all.end(), [&](const Contract& c) {
      return selected(patterns_, c) && !c.cases(options_.tier).empty();
    });
  }

  // What the cases of a selection have of a key, as "dtype f32, f64"; "" where none has it.
  static std::string values_of(const std::string& key, const std::vector<Due>& dues) {
    const auto of = [&](const Case& line) {
      return key == "ranks" ? std::to_string(line.world()) : line.text(key);
    };
    std::set<std::pair<size_t, std::string>> met;  // 8 before 16
    for (const Due& d : dues)
      if (d.what == Due::healthy && (key == "ranks" || d.line.has(key)) && !of(d.line).empty())
        met.emplace(of(d.line).size(), of(d.line));
    if (met.empty() || met.size() > most_values_told) return "";
    std::vector<std::string> values;
    for (const auto& [size, value] : met) values.push_back(value);
    return fmt::format(" (there: {} {})", key, joined(values));
  }

  // The word that leaves nothing, when they are taken one after the other as they were given.
  std::string emptied_by() const {
    Options some = options_;
    some.patterns.clear(), some.ranks.clear(), some.dtypes.clear(), some.subjects.clear();
    some.checks.clear(), some.transports.clear(), some.devices.clear();
    std::string before;
    std::vector<Due> there;
    const auto leaves = [&] {
      std::vector<std::string> nowhere;
      Planner planner(some, registry_, nowhere, nowhere);
      planner.select();
      const bool nothing = planner.asks_nothing();
      if (!nothing) there = std::move(planner.due_);
      return !nothing;
    };
    const auto empties = [&](const std::string& word) {
      if (!leaves()) return true;
      before += " " + word;
      return false;
    };
    const auto told = [&](const std::string& word) {
      const size_t from = word.starts_with("--") ? 2 : 0;
      return fmt::format("is left by {}{}{}; `gate --dry-run{}` shows what there is", word,
                         before.empty() ? "" : " beside" + before,
                         values_of(word.substr(from, word.find_first_of("= ") - from), there),
                         before);
    };
    if (options_.patterns.empty()) leaves();
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
    return "matches the patterns and options together; `gate --dry-run` with fewer of them shows "
           "what there is";
  }

  // A lane that this machine could prove and that nothing selected runs on.
  void check_required() const {
    std::vector<std::string> lanes;
    for (const Due& d : due_)
      if (!contains(lanes, d.lane)) lanes.push_back(d.lane);
    for (const std::string& required : options_.require) {
      const std::string transport = required.substr(0, required.find('.'));
      if (transport == "staged" ||
          !reason_unavailable(transport, transport == "nccl" ? "cuda" : "host").empty())
        continue;
      if (std::none_of(lanes.begin(), lanes.end(), [&](const auto& l) {
            return l == required || l.starts_with(required + ".");
          }))
        throw BadInput(fmt::format(
            "--require: expected a lane of the selection ({}), met {}; select lines that run on it "
            "(--transport, --ranks, --tier ci)",
            joined(lanes, " "), required));
    }
  }

  std::string hint_at_ours() const {
    const bool users_alone = options_.subjects.empty() && registry_.ours() > 0 &&
                             registry_.subjects().size() > registry_.ours();
    return users_alone ? "; subjects that came with the package are judged with --subject ours"
                       : "";
  }

  // By family, transport, kind and world size. Keys are computed once: a mesh is dear to build.
  std::vector<Due> sorted() {
    const auto families = registry_.families();
    std::vector<std::pair<std::tuple<int, std::string, int, int>, size_t>> order;
    for (const Due& d : due_) {
      const auto at =
          std::find(families.begin(), families.end(), registry_.contract(d.line.contract).family);
      order.push_back(
          {{int(at - families.begin()), d.line.text("transport"), d.what, d.line.world()},
           order.size()});
    }
    std::sort(order.begin(), order.end());
    std::vector<Due> list;
    for (const auto& [key, place] : order) list.push_back(std::move(due_[place]));
    return list;
  }

  void add_contract(const Contract& c) {
    for (const Place& place : places_due(options_))
      for (const std::string& subject : subjects_due(options_, registry_, c)) {
        for (const std::string& text : c.cases(options_.tier))
          add_seeds(c, text, place, subject, false);
        for (const std::string& text : c.illegal) add_seeds(c, text, place, subject, true);
      }
    if (options_.controls && !subjects_due(options_, registry_, c).empty()) add_controls(c);
  }

  void add_seeds(const Contract& c, const std::string& text, const Place& place,
                 const std::string& subject, bool refused) {
    Case line = parse(text, registry_);
    line.set("transport", place.first);
    line.set("device", place.second);
    if (!subject.empty()) line.set("subject", subject);
    if (line.world() > most_ranks(place.first)) return;
    const int seeds = refused ? 1 : options_.seeds;
    for (int i = 0; i < seeds; ++i) {
      if (options_.seed || seeds > 1)
        line.set("seed", std::to_string(options_.seed.value_or(1) + uint64_t(i)));
      add(c, line, refused);
    }
  }

  void add(const Contract& c, const Case& line, bool refused) {
    if (!within(options_, line) || !selected(patterns_, c, line)) return;
    if (!seen_.insert(print_canonical(line)).second) return;
    if (std::string why = not_due(line, registry_); !why.empty())
      return not_due_.push_back(std::move(why)), left_out_.push_back(print(line));
    if (!contradiction(c, line, refused).empty()) {  // nothing more is asked of it: left untested
      Due d;
      d.line = line;
      d.lane = lane_of(line);
      d.illegal = refused;
      d.checks = {refused ? "rejection" : "forward"};
      return due_.push_back(std::move(d));
    }
    if (std::string why = checks_not_due(line, registry_, options_.checks);
        !refused && !why.empty())
      not_due_.push_back(std::move(why));
    if (!refused)
      for (std::string& why : checks_left_out(line, registry_, options_.checks))
        not_due_.push_back(std::move(why));
    if (!refused && declared_of(line, registry_).traffic &&
        own_traffic_.insert(called(line)).second)
      not_due_.push_back(fmt::format(
          "{}: the contract's traffic; the subject's own is due in its place", called(line)));
    if (!refused) refuse_too_big(line, {}, registry_);
    if (const Fill fill = fill_of(line); !refused && (fill == Fill::large || fill == Fill::offset))
      refuse_infeasible(line, {}, registry_);
    Due d;
    d.line = line;
    d.lane = lane_of(line);
    d.illegal = refused;
    const Declared declared = declared_of(line, registry_);
    if (refused) {
      if (options_.checks.empty() || contains(options_.checks, "rejection"))
        d.checks = {"rejection"};
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
    return std::find(places.begin(), places.end(),
                     Place(line.text("transport"), line.text("device"))) != places.end();
  }

  // A bug that is caught where no subject is asked says nothing of what is asked.
  bool asked_of_any_subject(const Contract& c, const Case& line) const {
    const auto subjects = subjects_due(options_, registry_, c);
    return std::any_of(subjects.begin(), subjects.end(), [&](const std::string& subject) {
      return words_without(line, registry_.subject(c.name, subject).declared).empty();
    });
  }

  void add_controls(const Contract& c) {
    for (const auto& [transport, device] : places_due(options_))
      for (const Control& control : registry_.controls()) {
        // A twin is a kernel of the host or of a device.
        if (control.contract != c.name || (device == "cuda") != on_device(control, registry_))
          continue;
        const auto expected = trimmed_words(control.check, ',');
        if (!options_.checks.empty() &&
            std::none_of(expected.begin(), expected.end(),
                         [&](const auto& e) { return contains(options_.checks, e); }))
          continue;
        Case line = parse(control.witness, registry_);
        line.set("transport", transport);
        line.set("device", device);
        line.set("control", control.name);
        if (!within(options_, line) || !selected(patterns_, c, line)) continue;
        if (!asked_of_any_subject(c, line)) {
          left_out_.push_back(print(line));
          continue;
        }
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
  std::vector<std::string>&not_due_, &left_out_;
};

}  // namespace

void refuse_two_seeds(uint64_t of_option, std::string_view of_line) {
  throw BadInput(
      fmt::format("--seed: expected the seed once, met --seed {} beside seed={}; leave one out",
                  of_option, of_line));
}

bool selects(const Options& options, const Registry& registry, const Case& line) {
  return selected(parse_patterns(options, registry), registry.contract(line.contract), line);
}

std::vector<Due> plan_gate(const Options& options, const Registry& registry,
                           std::vector<std::string>* not_due, std::vector<std::string>* left_out) {
  std::vector<std::string> nowhere;
  return Planner(options, registry, not_due ? *not_due : nowhere, left_out ? *left_out : nowhere)
      .plan();
}

}  // namespace shardproof
