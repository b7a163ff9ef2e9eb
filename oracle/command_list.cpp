// `shardproof list [PATTERN] [--table]`: everything that can be named, from the registry alone.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <set>

#include "oracle/abilities.hpp"
#include "oracle/check.hpp"
#include "oracle/comm/faults.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/command.hpp"
#include "oracle/drift.hpp"
#include "oracle/gate.hpp"
#include "oracle/joined.hpp"
#include "oracle/run.hpp"

namespace shardproof {

namespace {

// Whatever the case: FP8 and fp8 are one word.
bool holds(const std::string& name, const std::string& pattern) {
  const auto alike = [](unsigned char a, unsigned char b) {
    return std::tolower(a) == std::tolower(b);
  };
  return std::search(name.begin(), name.end(), pattern.begin(), pattern.end(), alike) !=
             name.end() ||
         pattern.empty();
}

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

// Defaults as the bare line has them: some follow from its other keys.
std::string own_keys(const Contract& c, const Registry& registry) {
  Case bare = parse(c.name, registry);
  std::string text;
  for (const Key& key : c.keys) text += key_row(key, bare.text(key.name));
  return text;
}

std::string subjects_text(const Registry& registry, const std::string& contract) {
  std::vector<std::string> names;
  for (const Subject& s : registry.subjects())
    if (s.contract == contract) names.push_back(s.name.empty() ? "ours" : s.name);
  return names.empty() ? "none" : joined(names, " ");
}

std::string controls_text(const Registry& registry, const std::string& contract) {
  std::string text;
  for (const Control& c : registry.controls())
    if (c.contract == contract)
      text += fmt::format("    control={:<36} {}: {}\n", c.name, c.check, c.imitates);
  return text;
}

// `list controls`: all of them, without the keys of their contracts.
std::string all_controls(const Registry& registry, const std::string& pattern) {
  std::string text;
  for (const Contract& c : registry.contracts())
    if (const std::string own = controls_text(registry, c.name);
        pattern == "controls" && !own.empty())
      text += fmt::format("  {}\n{}", c.name, own);
  return text;
}

std::string faults_of_training(const std::string& pattern) {
  const bool all = pattern.empty() || pattern == "controls" || pattern == "drift";
  std::string text;
  for (const auto& [name, does] : drift_faults())
    if (all || holds(name, pattern)) text += fmt::format("  {:<28} {}\n", name, does);
  return text;
}

bool named(const Registry& registry, const Contract& c, const std::string& pattern) {
  auto of_contract = [&](const auto& all) {
    return std::any_of(all.begin(), all.end(), [&](const auto& one) {
      return one.contract == c.name && !one.name.empty() && holds(one.name, pattern);
    });
  };
  return holds(c.name, pattern) || holds(c.family, pattern) || holds(c.summary, pattern) ||
         of_contract(registry.subjects()) || of_contract(registry.controls());
}

std::string families(const Registry& registry, const std::string& pattern) {
  std::string text;
  for (const std::string& family : registry.families()) {
    if (!holds(family, pattern)) continue;
    const auto& all = registry.contracts();
    auto count =
        std::count_if(all.begin(), all.end(), [&](const auto& c) { return c.family == family; });
    text += fmt::format("  {:<18} {}\n", family, number_of(count, "contract"));
  }
  return text;
}

std::string contracts(const Registry& registry, const std::string& pattern) {
  std::string text;
  for (const Contract& c : registry.contracts()) {
    if (!named(registry, c, pattern)) continue;
    text += fmt::format("  {}\n    {}{}\n", c.name, c.summary, c.linear ? " (linear)" : "");
    text += fmt::format("    subjects: {}\n", subjects_text(registry, c.name));
    text += own_keys(c, registry) + controls_text(registry, c.name);
  }
  return text;
}

// The keys that every contract takes, as a linear one has them (fill=integers; else normal).
std::string common_keys(const std::string& pattern) {
  Contract none;
  none.linear = true;
  std::string text;
  for (const Key& key : keys_of(none))
    if (holds(key.name, pattern)) text += key_row(key, key.fallback);
  return text;
}

std::string checks(const std::string& pattern) {
  std::string text;
  for (const Check& c : all_checks())
    if (holds(c.name, pattern)) text += fmt::format("  {} {:<16} {}\n", c.letter, c.name, c.asks);
  return text;
}

std::string operators(const std::string& pattern) {
  std::string text;
  for (const FaultOperator& o : fault_operators()) {
    if (!holds(o.name, pattern)) continue;
    text += fmt::format("  {:<22} {:<8} {}\n", o.name, o.call ? "call" : "payload", o.does);
  }
  return text;
}

std::string lanes(const std::string& pattern) {
  std::string text;
  const bool devices = holds("staged", pattern) || holds("nccl", pattern);
  for (const Ability& a : devices ? abilities() : abilities_unasked())
    if (holds(a.name, pattern))
      text += fmt::format("  {:<18} {}\n", a.name,
                          a.available ? "can run here" : "cannot run here: " + a.reason);
  return text;
}

std::vector<std::string> all_names(const Registry& registry) {
  std::vector<std::string> names = registry.families();
  for (const auto& c : registry.contracts()) names.push_back(c.name);
  for (const auto& s : registry.subjects()) names.push_back(s.name);
  for (const auto& c : registry.controls()) names.push_back(c.name);
  for (const auto& c : all_checks()) names.push_back(c.name);
  for (const auto& o : fault_operators()) names.push_back(o.name);
  for (const auto& fault : drift_faults()) names.push_back(fault.first);
  for (const std::string& lane : lane_names()) names.push_back(lane);
  return names;
}

[[noreturn]] void nothing_named(const Registry& registry, const std::string& pattern) {
  throw BadInput(
      fmt::format("pattern '{}': expected part of a name that `list` shows, or of what a "
                  "contract says of itself, met one that selects nothing{}",
                  pattern, did_you_mean(pattern, all_names(registry))));
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

}  // namespace

std::string list_text(const Registry& registry, const std::string& pattern) {
  std::string text =
      section("families", families(registry, pattern)) +
      section("contracts", contracts(registry, pattern)) +
      section("keys of every line", common_keys(pattern)) + section("checks", checks(pattern)) +
      section("fault operators (fault=OPERATOR@PHASE.AXIS.NUMBER)", operators(pattern)) +
      section("controls", all_controls(registry, pattern)) +
      section("faults of the training step (drift only: control=NAME@STEP)",
              faults_of_training(pattern)) +
      section("lanes (NAME.npRANKS)", lanes(pattern));
  if (text.empty()) nothing_named(registry, pattern);
  text.pop_back();  // the blank line after the last section
  return text;
}

std::string list_table(const Registry& registry, const std::string& pattern) {
  // Contracts of a family that are asked the same on the same ranks share a row.
  struct Row {
    std::string family, names;
    std::map<std::string, std::set<int>> ranks;
  };
  std::vector<Row> rows;
  std::set<std::string> asked;  // a check that no row is asked has no column
  for (const Contract& c : registry.contracts()) {
    if (!holds(c.name, pattern) && !holds(c.family, pattern)) continue;
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
  if (rows.empty()) {
    std::vector<std::string> names = registry.families();
    for (const Contract& c : registry.contracts()) names.push_back(c.name);
    throw BadInput(
        fmt::format("pattern '{}': expected part of the name of a family or a contract, whose rows "
                    "--table shows, met one that selects none{}",
                    pattern, did_you_mean(pattern, names)));
  }
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
