#include "oracle/markdown.hpp"

#include <algorithm>
#include <string_view>

#include "oracle/report_parts.hpp"

namespace shardproof::markdown {

std::string cell(const std::string& text) {
  std::string safe;
  for (char c : telling::printable(text)) {
    if (c == '\n') {
      safe += "<br>";
      continue;
    }
    if (c == '<' || c == '>' || c == '&') {
      safe += c == '<' ? "&lt;" : c == '>' ? "&gt;" : "&amp;";
      continue;
    }
    if (std::string_view("|\\`*_[]").find(c) != std::string_view::npos) safe += '\\';
    safe += c;
  }
  return safe;
}

std::string table_row(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (const std::string& c : cells) line += " " + cell(c) + " |";
  return line + "\n";
}

std::string table_head(const std::vector<std::string>& names, bool (*is_number)(size_t)) {
  std::string line = table_row(names) + "|";
  for (size_t i = 0; i < names.size(); i++) line += is_number(i) ? "---:|" : "---|";
  return line + "\n";
}

std::string fenced(const std::string& text) {
  size_t longest = 2, run = 0;
  for (char c : text) {
    run = c == '`' ? run + 1 : 0;
    longest = std::max(longest, run);
  }
  const std::string fence(longest + 1, '`');
  return fence + "text\n" + text + (text.ends_with('\n') ? "" : "\n") + fence + "\n\n";
}

}  // namespace shardproof::markdown
