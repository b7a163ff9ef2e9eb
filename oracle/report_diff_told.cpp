// A comparison as it reads in a terminal and in a pull request: what was lost first, then what is
// worse, then what is only different.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "oracle/joined.hpp"
#include "oracle/markdown.hpp"
#include "oracle/report_diff.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

namespace {

constexpr size_t most_changes = 20;        // of a group
constexpr size_t most_characters = 60000;  // a comment may have 65,536

struct Section {
  const char *label, *title;
  const std::vector<Change>& changes;
};

std::vector<Section> groups(const ReportDiff& d) {
  return {{"LOST", "Lost", d.lost},
          {"worse", "Worse, and within its bound", d.worse},
          {"changed", "Changed", d.changed},
          {"gained", "Gained", d.gained}};
}

// A report may hold anything; a row of a table stays one that can be read.
std::string brief(const std::string& text) {
  constexpr size_t most = 400;
  return text.size() <= most ? text : text.substr(0, most) + "...";
}

std::string step(const Change& c) { return c.before + " -> " + c.after; }

std::string more(const Section& g, const char* tail) {
  return fmt::format("{} more {}", g.changes.size() - most_changes, tail);
}

std::string told(const Section& g) {
  std::string text;
  const size_t shown = std::min(g.changes.size(), most_changes);
  for (size_t i = 0; i < shown; i++) {
    const Change& c = g.changes[i];
    text += telling::row(g.label, fmt::format("{:<8} {}   {}", c.what, c.on, step(c)));
    const bool again = i + 1 < shown && g.changes[i + 1].replay == c.replay;
    if (std::string_view(g.label) == "LOST" && !c.replay.empty() && !again)
      text += telling::row("replay", c.replay);
  }
  if (g.changes.size() > most_changes) text += telling::row(g.label, more(g, "of these"));
  return text;
}

std::string alone_text(const Alone& a) {
  std::vector<std::string> parts;
  if (a.checks > 0)
    parts.push_back(fmt::format("{} on {} (the first: {})", number_of(a.checks, "check"),
                                number_of(a.lines, "line"), a.first_line));
  if (a.not_passed > 0)
    parts.push_back(
        fmt::format("{} of these did not pass (the first: {})", a.not_passed, a.first_not_passed));
  if (a.controls > 0) parts.push_back(number_of(a.controls, "control"));
  if (!a.lanes.empty()) parts.push_back("lanes " + joined(a.lanes));
  return joined(parts);
}

std::string sentence(const ReportDiff& d) {
  std::string text = fmt::format("{} and {} in both", number_of(d.checks, "check"),
                                 number_of(d.controls, "control"));
  if (d.checks + d.controls == 0) text += ": the two have nothing in common";
  for (const Section& g : groups(d))
    if (!g.changes.empty()) text += fmt::format(", {} {}", g.changes.size(), g.label);
  if (d.lost.empty()) text += ", nothing lost";
  return text;
}

std::string side(const std::string& path, const std::string& verdict, bool complete) {
  return path + "   " + verdict + (complete ? "" : ", and it did not run to its end");
}

bool is_number(size_t) { return false; }

std::string table(const Section& g, size_t room) {
  if (g.changes.empty()) return "";
  std::string text = fmt::format("### {}\n\n", g.title);
  text += markdown::table_head({"what", "where", "before", "after"}, is_number);
  size_t shown = 0;
  for (; shown < std::min(g.changes.size(), most_changes) && text.size() < room; shown++) {
    const Change& c = g.changes[shown];
    text += markdown::table_row({c.what, brief(c.on), brief(c.before), brief(c.after)});
  }
  if (shown < g.changes.size()) text += fmt::format("\n{} more.\n", g.changes.size() - shown);
  return text + "\n";
}

std::string replays(const ReportDiff& d) {
  std::string lines;
  std::set<std::string> told;
  for (size_t i = 0; i < std::min(d.lost.size(), most_changes); i++)
    if (const std::string& call = d.lost[i].replay; !call.empty() && told.insert(call).second)
      lines += telling::printable(brief(call)) + "\n";
  return lines.empty() ? "" : markdown::fenced(lines);
}

}  // namespace

std::string diff_text(const ReportDiff& d) {
  std::string text = telling::row("OLD", side(d.old_path, d.old_verdict, d.old_complete)) +
                     telling::row("NEW", side(d.new_path, d.new_verdict, d.new_complete));
  for (const Section& g : groups(d)) text += told(g);
  if (d.only_old.any()) text += telling::row("only OLD", alone_text(d.only_old));
  if (d.only_new.any()) text += telling::row("only NEW", alone_text(d.only_new));
  return text + telling::row(d.lost.empty() ? "KEPT" : "LOST", sentence(d));
}

std::string diff_markdown(const ReportDiff& d) {
  std::string text = fmt::format("## Shardproof: {}\n\n{}.\n\n",
                                 d.lost.empty() ? "nothing lost" : "LOST", sentence(d));
  for (const Section& g : groups(d)) {
    text += table(g, most_characters / 5);
    if (&g.changes == &d.lost) text += replays(d);
  }
  for (const auto& [name, only] : {std::pair("OLD", &d.only_old), {"NEW", &d.only_new}})
    if (only->any())
      text += fmt::format("Only in {}: {}.\n\n", name, markdown::cell(brief(alone_text(*only))));
  return text + fmt::format("OLD: {}. NEW: {}.\n",
                            markdown::cell(side(d.old_path, d.old_verdict, d.old_complete)),
                            markdown::cell(side(d.new_path, d.new_verdict, d.new_complete)));
}

}  // namespace shardproof
