// Text of a report as Markdown that renders in a pull request, whatever a subject put into it.
#pragma once
#include <string>
#include <vector>

namespace shardproof::markdown {

// A cell must not end its column or row, nor start markup of its own.
std::string cell(const std::string&);
std::string table_row(const std::vector<std::string>& cells);
// Names and the rule below them; columns of numbers are set to the right.
std::string table_head(const std::vector<std::string>& names, bool (*is_number)(size_t));
// A block of code, its fence longer than any run of backticks inside.
std::string fenced(const std::string&);

}  // namespace shardproof::markdown
