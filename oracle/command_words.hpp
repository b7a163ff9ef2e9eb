// The words of a command line: commands, their options, and what was given to them.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "oracle/comm/mpi.hpp"
#include "oracle/gate.hpp"

namespace shardproof::commands {

// What was given to each option and the words beside them, as text.
struct Words {
  std::map<std::string, std::vector<std::string>> values;
  std::set<std::string> flags;
  std::vector<std::string> plain;
};

struct OptionName {
  const char *name, *value, *help;  // value "": a flag
  bool list = false;
};
const std::vector<OptionName>& drift_options();

struct CommandName {
  const char *name, *words, *help;
  const char* of_words;  // what the words are, in its own help
  const std::vector<OptionName>& options;
};

// Which command, or a refusal with the nearest one.
const CommandName& command_of(const std::vector<std::string>& arguments);
bool asks_for_help(const std::string& word);
std::string usage();
// The words of a command; a text where its help was asked for.
std::optional<std::string> read_words(const CommandName&, std::vector<std::string> arguments,
                                      Words&);

// ---- Values of options; all throw BadInput

[[noreturn]] void refuse(const std::string& option, const std::string& expected,
                         const std::string& value);
// The one value of an option; null where it was not given.
const std::string* single(const Words&, const std::string& option);
std::string text_of(const Words&, const std::string& option);  // "" where it was not given
std::vector<std::string> several(const Words&, const std::string& option);
int64_t integer(const std::string& option, const std::string& value, int64_t low, int64_t high);
int single_integer(const Words&, const std::string& option, int fallback, int high);
// What the ranks of a launcher can be judged on, the usual one first.
std::vector<std::string> transports_of(const OutsideLaunch&);
bool carries(const OutsideLaunch&, const std::string& transport);
// What commands share.
Options options_of(const Words&, int argc, char** argv);

}  // namespace shardproof::commands
