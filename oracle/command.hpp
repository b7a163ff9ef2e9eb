// What the commands that run nothing print. The command line itself is oracle/command_line.cpp.
#pragma once
#include <string>
#include <vector>

#include "oracle/registry.hpp"

namespace shardproof {

// Everything that can be named: families, contracts with keys, subjects and controls, checks, fault
// operators, lanes. A pattern keeps the entries whose name holds it; none: BadInput.
std::string list_text(const Registry&, const std::string& pattern);
// Markdown: primitives x checks, each cell the rank counts on which tier ci asks that check.
std::string list_table(const Registry&, const std::string& pattern);

// What a line would do: groups by axis, operands with local shapes, calls and bytes due, sums that
// parameters still owe, checks due with the tier of their bounds. nodes > 0: which groups cross
// them.
std::string explain_text(const Case&, int nodes, const Registry&);

const char* role_name(Operand::Role);  // "input", "parameter", "index", "output"

// Throws BadInput where the contract refuses the line, or fill=integers leaves no exact range.
void check_legal(const Case&, const Registry&);

}  // namespace shardproof
