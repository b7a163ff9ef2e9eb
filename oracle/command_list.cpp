// `shardproof list [PATTERN] [--table]`: everything that can be named, from the registry alone.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "oracle/abilities.hpp"
#include "oracle/check.hpp"
#include "oracle/comm/faults.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/command.hpp"
#include "oracle/drift.hpp"
#include "oracle/gate.hpp"
#include "oracle/joined.hpp"
#include "oracle/printable.hpp"
#include "oracle/run.hpp"
#include "oracle/words.hpp"

namespace shardproof {

namespace {

bool same_letter(char a, char b) {
  return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
}

// Whatever the case: FP8 and fp8 are one word.
bool holds(const std::string& name, const std::string& word) {
  return std::search(name.begin(), name.end(), word.begin(), word.end(), same_letter) != name.end();
}

// What begins a word of a sentence: `ring` is no part of `during`.
bool says(const std::string& sentence, const std::string& word) {
  auto at = sentence.begin();
  while (true) {
    at = std::search(at, sentence.end(), word.begin(), word.end(), same_letter);
    if (at == sentence.end()) return false;
    if (at == sentence.begin() || !std::isalnum(static_cast<unsigned char>(*(at - 1)))) return true;
    ++at;
  }
}

// "layout=zigzag": the key and the value that it may hold.
bool takes(const Key& key, const std::string& word) {
  const size_t eq = word.find('=');
  if (eq == std::string::npos || word.substr(0, eq) != key.name) return false;
  const std::string value = word.substr(eq + 1);
  if (value.empty()) return true;
  if (!key.choices.empty()) return contains(key.choices, value);
  if (!key.integer()) return !key.valid || key.valid(value).empty();
  try {
    parse_integer(key.name, value, key.low, key.high);
    return true;
  } catch (const BadInput&) {
    return false;
  }
}

// What can be named, as a pattern is looked for in it: parts of names, words of what they say, and
// words of a line that it takes.
struct Listed {
  std::vector<std::string> names, sentences;
  std::vector<std::function<bool(const std::string&)>> lines = {};
  bool has(const std::string& word) const {
    const auto named = [&](const std::string& name) { return holds(name, word); };
    const auto said = [&](const std::string& sentence) { return says(sentence, word); };
    return std::any_of(names.begin(), names.end(), named) ||
           std::any_of(sentences.begin(), sentences.end(), said) ||
           std::any_of(lines.begin(), lines.end(), [&](const auto& take) { return take(word); });
  }
  void add(const Listed& other) {
    names.insert(names.end(), other.names.begin(), other.names.end());
    sentences.insert(sentences.end(), other.sentences.begin(), other.sentences.end());
    lines.insert(lines.end(), other.lines.begin(), other.lines.end());
  }
};

// The words of a pattern, each of which an entry has to have.
class Asked {
 public:
  explicit Asked(const std::string& text) : text_(text) {
    std::istringstream all(text);
    for (std::string word; all >> word;) words_.push_back(word);
  }
  bool is(const char* text) const { return text_ == text; }
  bool empty() const { return words_.empty(); }
  bool selects(const Listed& e) const {
    return std::all_of(words_.begin(), words_.end(), [&](auto& word) { return e.has(word); });
  }
  // One of several words: of the parts of an entry that is selected.
  bool touches(const Listed& e) const {
    return std::any_of(words_.begin(), words_.end(), [&](auto& word) { return e.has(word); });
  }
  const std::string& text() const { return text_; }
  const std::vector<std::string>& words() const { return words_; }

 private:
  std::string text_;
  std::vector<std::string> words_;
};

// A section is its title and its entries; without an entry it is not printed.
std::string section(const char* title, const std::string& entries) {
  return entries.empty() ? "" : fmt::format("{}\n{}\n", title, entries);
}

std::string key_text(const Key& key, const std::string& fallback) {
  if (key.integer()) return fmt::format("{}={} ({}..{})", key.name, fallback, key.low, key.high);
  if (key.choices.empty()) return fmt::format("{}={}", key.name, fallback);
  return fmt::format("{}={} ({})", key.name, fallback, joined(key.choices, "|"));
}

std::string key_row(const Key& key, const std::string& fallback) {
  return fmt::format("    {:<44} {}\n", key_text(key, fallback), key.help);
}

Listed listed_as(const Key& key) {
  Listed e{{key.name}, {key.help}, {[key](const std::string& word) { return takes(key, word); }}};
  e.names.insert(e.names.end(), key.choices.begin(), key.choices.end());
  return e;
}

// The plans of a contract, as a subject takes one.
Listed plans_of(const Contract& c) {
  return c.plans.empty() ? Listed{} : Listed{c.plans, {"traffic plans"}};
}

Listed listed_as(const Control& c) { return {{c.name}, {c.imitates}}; }

// Defaults as the bare line has them: some follow from its other keys.
template <class Shown>
std::string own_keys(const Contract& c, const Registry& registry, Shown shown) {
  Case bare = parse(c.name, registry);
  std::string text;
  for (const Key& key : c.keys)
    if (shown(listed_as(key))) text += key_row(key, bare.text(key.name));
  return text;
}

std::string subjects_text(const Registry& registry, const std::string& contract) {
  std::vector<std::string> names;
  for (const Subject& s : registry.subjects())
    if (s.contract == contract) names.push_back(s.name.empty() ? "ours" : s.name);
  return names.empty() ? "none" : joined(names, " ");
}

template <class Shown>
std::string controls_text(const Registry& registry, const std::string& contract, Shown shown) {
  std::string text;
  for (const Control& c : registry.controls())
    if (c.contract == contract && shown(listed_as(c)))
      text += fmt::format("    control={:<36} {}: {}\n", c.name, c.check, c.imitates);
  return text;
}

bool any_listed(const Listed&) { return true; }

// `list controls`: all of them, without the keys of their contracts.
std::string all_controls(const Registry& registry, const Asked& pattern) {
  std::string text;
  if (!pattern.is("controls")) return text;
  for (const Contract& c : registry.contracts())
    if (const std::string own = controls_text(registry, c.name, any_listed); !own.empty())
      text += fmt::format("  {}\n{}", c.name, own);
  return text;
}

std::string faults_of_training(const Asked& pattern) {
  const bool all = pattern.is("controls") || pattern.is("drift");
  std::string text;
  for (const auto& [name, does] : drift_faults())
    if (all || pattern.selects({{name}, {does}})) text += fmt::format("  {:<28} {}\n", name, does);
  return text;
}

// By its own name and words and by those of its kernels and twins.
Listed listed_as(const Registry& registry, const Contract& c) {
  Listed e{{c.name, c.family}, {c.summary}};
  const auto add = [&](const auto& all) {
    for (const auto& one : all)
      if (one.contract == c.name && !one.name.empty()) e.names.push_back(one.name);
  };
  add(registry.subjects());
  add(registry.controls());
  return e;
}

// "cp=4", which every contract reads and not every one takes: on its bare line, or in a case.
bool takes_common(const Registry& registry, const Contract& c, const std::string& word) {
  const std::vector<Key> common = keys_of(Contract());
  if (std::none_of(common.begin(), common.end(), [&](const Key& k) { return takes(k, word); }))
    return false;
  if (word.back() == '=') return true;
  const size_t eq = word.find('=');
  const std::string key = word.substr(0, eq), value = word.substr(eq + 1);
  const auto holds_it = [&](const std::string& text) {
    const Case line = parse(text, registry);
    return line.text(key) == value && !illegal(c, line);
  };
  try {
    if (holds_it(c.name + " " + word)) return true;
  } catch (const BadInput&) {  // it has another key of that name
  }
  const auto cases = c.cases("ci");
  return std::any_of(cases.begin(), cases.end(), holds_it);
}

// And by its plans, its keys, their values, and what is said of keys and twins.
Listed parts_of(const Registry& registry, const Contract& c) {
  Listed e;
  e.lines.push_back([&](const std::string& word) { return takes_common(registry, c, word); });
  e.add(plans_of(c));
  for (const Key& key : c.keys) e.add(listed_as(key));
  for (const Control& control : registry.controls())
    if (control.contract == c.name) e.add(listed_as(control));
  return e;
}

std::string families(const Registry& registry, const Asked& pattern) {
  std::string text;
  for (const std::string& family : registry.families()) {
    if (!pattern.selects({{family}, {}})) continue;
    const auto& all = registry.contracts();
    auto count =
        std::count_if(all.begin(), all.end(), [&](const auto& c) { return c.family == family; });
    text += fmt::format("  {:<18} {}\n", family, number_of(count, "contract"));
  }
  return text;
}

// Whole where its names have what is asked, else those of its keys and twins that do.
std::string contracts(const Registry& registry, const Asked& pattern) {
  std::string text;
  for (const Contract& c : registry.contracts()) {
    Listed entry = listed_as(registry, c);
    const bool whole = pattern.selects(entry);
    entry.add(parts_of(registry, c));
    if (!pattern.selects(entry)) continue;
    text += fmt::format("  {}\n    {}{}{}\n", c.name, c.summary, c.linear ? " (linear)" : "",
                        c.backward ? "" : " (no backward)");
    text += fmt::format("    subjects: {}\n", subjects_text(registry, c.name));
    const auto shown = [&](const Listed& part) { return whole || pattern.touches(part); };
    if (!c.plans.empty() && shown(plans_of(c)))
      text += fmt::format("    traffic plans beside the default (Declared::plan): {}\n",
                          joined(c.plans, " "));
    text += own_keys(c, registry, shown) + controls_text(registry, c.name, shown);
    if (!whole) text += fmt::format("    (more: list {})\n", c.name);
  }
  return text;
}

// The keys that every contract takes, as one with exact data has them (fill=integers; else normal).
std::string common_keys(const Asked& pattern) {
  Contract none;
  none.linear = true;
  std::string text;
  for (const Key& key : keys_of(none))
    if (pattern.selects(listed_as(key))) text += key_row(key, key.fallback);
  return text;
}

std::string checks(const Asked& pattern) {
  std::string text;
  for (const Check& c : all_checks())
    if (pattern.selects({{c.name}, {c.asks}}))
      text += fmt::format("  {} {:<16} {}\n", c.letter, c.name, c.asks);
  return text;
}

std::string operators(const Asked& pattern) {
  std::string text;
  for (const FaultOperator& o : fault_operators()) {
    if (!pattern.selects({{o.name}, {o.does}})) continue;
    text += fmt::format("  {:<22} {:<8} {}\n", o.name, o.call ? "call" : "payload", o.does);
  }
  return text;
}

std::string lanes(const Asked& pattern) {
  std::string text;
  const bool devices = pattern.selects({{"staged"}, {}}) || pattern.selects({{"nccl"}, {}});
  for (const Ability& a : devices ? abilities() : abilities_unasked())
    if (pattern.selects({{a.name}, {}}))
      text += fmt::format("  {:<18} {}\n", a.name,
                          a.available ? "can run here" : "cannot run here: " + a.reason);
  return text;
}

std::vector<std::string> all_names(const Registry& registry) {
  std::vector<std::string> names = registry.families();
  for (const auto& c : registry.contracts()) {
    names.push_back(c.name);
    names.insert(names.end(), c.plans.begin(), c.plans.end());
    for (const Key& key : c.keys) {
      names.push_back(key.name);
      names.insert(names.end(), key.choices.begin(), key.choices.end());
    }
  }
  for (const auto& s : registry.subjects()) names.push_back(s.name);
  for (const auto& c : registry.controls()) names.push_back(c.name);
  for (const auto& c : all_checks()) names.push_back(c.name);
  for (const auto& o : fault_operators()) names.push_back(o.name);
  for (const auto& fault : drift_faults()) names.push_back(fault.first);
  for (const std::string& lane : lane_names()) names.push_back(lane);
  return names;
}

[[noreturn]] void nothing_named(const Registry& registry, const Asked& pattern) {
  throw BadInput(fmt::format(
      "pattern {}: expected {} of the name of one thing that `list` shows, or of what it says of "
      "itself, its keys or their values, met {}{}",
      telling::in_quotes(pattern.text()), pattern.words().size() > 1 ? "words each" : "a part",
      pattern.words().size() > 1 ? "words that nothing has together" : "one that selects nothing",
      did_you_mean(pattern.text(), all_names(registry))));
}

// The rank counts of a row's cases, beside which a cell says only what differs. The lines that
// `rejection` feeds are no cases.
std::set<int> all_of(const std::map<std::string, std::set<int>>& ranks) {
  std::set<int> all;
  for (const auto& [check, counts] : ranks)
    if (check != "rejection") all.insert(counts.begin(), counts.end());
  return all;
}

std::string counts_in_words(const std::set<int>& counts, std::set<int> all) {
  if (counts == all) return "all";
  all.erase(1);
  return counts == all ? ">1" : joined(counts, " ");
}

// check -> rank counts on which a case of tier ci asks it of the default subject.
std::map<std::string, std::set<int>> asked_on(const Registry& registry, const Contract& c) {
  std::map<std::string, std::set<int>> ranks;
  for (const std::string& words : c.illegal)
    ranks["rejection"].insert(parse(words, registry).world());
  for (const std::string& words : c.cases("ci")) {
    Case line = parse(words, registry);
    for (const std::string& check : due_checks(c, line, declared_of(line, registry), {}))
      ranks[check].insert(line.world());
  }
  return ranks;
}

// By their names, where some have what is asked, else by all that `list` looks at.
std::vector<Contract> shown_in_table(const Registry& registry, const Asked& pattern) {
  std::vector<Contract> named, said;
  for (const Contract& c : registry.contracts())
    if (pattern.selects({{c.name, c.family}, {}})) named.push_back(c);
  if (!named.empty()) return named;
  for (const Contract& c : registry.contracts()) {
    Listed entry = listed_as(registry, c);
    entry.add(parts_of(registry, c));
    if (pattern.selects(entry)) said.push_back(c);
  }
  return said;
}

}  // namespace

std::string list_text(const Registry& registry, const std::string& words) {
  const Asked pattern(words), everything("");
  // The name of a section asks for all of it.
  const auto in = [&](const char* name) { return pattern.is(name) ? everything : pattern; };
  std::string text =
      section("families", families(registry, in("families"))) +
      section("contracts", contracts(registry, pattern)) +
      section("keys of every line", common_keys(pattern)) +
      section("checks", checks(in("checks"))) +
      section("fault operators (fault=OPERATOR@PHASE.AXIS.NUMBER)", operators(in("operators"))) +
      section("controls", all_controls(registry, pattern)) +
      section("faults of the training step (drift only: control=NAME@STEP)",
              faults_of_training(pattern)) +
      section("lanes (NAME.npRANKS)", lanes(in("lanes")));
  if (text.empty()) nothing_named(registry, pattern);
  text.pop_back();  // the blank line after the last section
  return text;
}

std::string list_table(const Registry& registry, const std::string& words) {
  const Asked pattern(words);
  // Contracts of a family that are asked the same on the same ranks share a row.
  struct Row {
    std::string family, names;
    std::map<std::string, std::set<int>> ranks;
  };
  std::vector<Row> rows;
  std::set<std::string> asked;  // a check that no row is asked has no column
  for (const Contract& c : shown_in_table(registry, pattern)) {
    auto ranks = asked_on(registry, c);
    for (const auto& [check, counts] : ranks) asked.insert(check);
    const auto alike = std::find_if(rows.begin(), rows.end(), [&](const Row& row) {
      return row.family == c.family && row.ranks == ranks;
    });
    if (alike != rows.end())
      alike->names += fmt::format(" `{}`", c.name);
    else
      rows.push_back({c.family, fmt::format("`{}`", c.name), std::move(ranks)});
  }
  if (rows.empty()) nothing_named(registry, pattern);
  std::vector<std::string> columns;
  for (const Check& check : all_checks())
    if (asked.contains(check.name)) columns.push_back(check.name);
  std::string text = "| primitive | ranks |";
  for (const std::string& check : columns) text += " " + check + " |";
  text += "\n|---|---|";
  for (size_t i = 0; i < columns.size(); ++i) text += "---|";
  for (Row& row : rows) {
    const std::set<int> all = all_of(row.ranks);
    text += fmt::format("\n| {} | {} |", row.names, joined(all, " "));
    for (const std::string& check : columns) {
      const std::string counts = counts_in_words(row.ranks[check], all);
      text += counts.empty() ? " |" : fmt::format(" {} |", counts);
    }
  }
  return text + "\n";
}

}  // namespace shardproof
