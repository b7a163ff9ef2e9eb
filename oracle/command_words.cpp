// Words of the command line -> options. The only file that includes CLI11, which only splits the
// words. Every value is read here, so that each wrong one is refused in the same form: one line
// that names the option, what was expected, what was met, what is close.
#include "oracle/command_words.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <thread>

#include "oracle/check.hpp"
#include "oracle/comm/crowd.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/joined.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/words.hpp"

namespace shardproof::commands {
namespace {

const OptionName checks_option = {"--check", "NAME", "only these checks", true};
const OptionName report_option = {"--report", "DIR",
                                  "write report.json, junit.xml, summary.md, index.html"};
const OptionName dump_option = {"--dump", "DIR",
                                "write the tensors of cases that do not pass (safetensors)"};
const OptionName canonical_option = {"--canonical", "", "print lines with every key"};
const OptionName in_process_option = {"--in-process", "",
                                      "threads: in this process, for a debugger"};
const OptionName scale_option = {"--deadline-scale", "X", "multiplies every deadline"};
const OptionName seed_option = {"--seed", "N", "the seed of every line"};
const OptionName skip_option = {"--skip-code", "N",
                                "exit code in place of 3 where all was skipped (ctest)"};
const OptionName mpiexec_option = {"--mpiexec", "COMMAND", "launcher of MPI ranks and its options"};

const std::vector<OptionName>& gate_options() {
  static const std::vector<OptionName> options = {
      {"--tier", "NAME", "smoke, ci (default; smoke with --model) or nightly"},
      {"--model", "FILE", "lines of a model's structure, from its config.json"},
      {"--tp", "N", "with --model: tensor-parallel ranks (2, 4 and 8 where legal)", true},
      {"--cp", "N", "with --model: context-parallel ranks (1)"},
      {"--dp", "N", "with --model: data-parallel ranks (1)"},
      {"--ranks", "N", "only lines of these world sizes", true},
      {"--transport", "NAME", "processes, threads, mpi, nccl, staged", true},
      {"--device", "NAME", "host or cuda", true},
      {"--dtype", "NAME", "only lines of these storage types", true},
      {"--subject", "NAME", "only these implementations (ours: the default ones)", true},
      checks_option,
      {"--require", "LANE", "exit 3 unless this lane is proven", true},
      report_option,
      dump_option,
      {"--github", "", "the ten worst findings as annotations of a GitHub workflow"},
      {"--failed", "DIR", "only what did not pass in the report there"},
      {"--fail-fast", "", "stop at the first case that does not pass"},
      {"--dry-run", "", "print what is due; run nothing"},
      {"--seed", "N", "the seed of every case; controls keep that of their witness"},
      {"--seeds", "N", "as many seeds for each case"},
      {"--jobs", "N", "worlds side by side (one more than cores, at most 5)"},
      scale_option,
      canonical_option,
      in_process_option,
      mpiexec_option,
      skip_option,
  };
  return options;
}

const std::vector<OptionName>& run_options() {
  static const std::vector<OptionName> options = {checks_option,    report_option,     dump_option,
                                                  canonical_option, in_process_option, scale_option,
                                                  seed_option,      mpiexec_option};
  return options;
}

const std::vector<OptionName>& shrink_options() {
  static const std::vector<OptionName> options = {checks_option,     canonical_option,
                                                  in_process_option, scale_option,
                                                  seed_option,       mpiexec_option};
  return options;
}

const std::vector<OptionName>& list_options() {
  static const std::vector<OptionName> options = {
      {"--table", "", "Markdown: primitives x checks, with the rank counts of tier ci"}};
  return options;
}

const std::vector<OptionName>& prepare_options() {
  static const std::vector<OptionName> options = {
      {"--tier", "NAME", "in place of a line: a folder for each case of PATTERN in this tier"},
      {"--ranks", "N", "with --tier: only lines of these world sizes", true},
      {"--dtype", "NAME", "with --tier: only lines of these storage types", true},
      {"--with", "KEY=VALUE",
       "with --tier: what the program computes in (acc=f64, probs=bf16, ...), on every line", true},
      {"--without", "KEY",
       "with --tier: leave out lines that set KEY (KEY=VALUE: to that), which the program lacks",
       true},
      checks_option,
      seed_option};
  return options;
}

const std::vector<OptionName>& judge_options() {
  static const std::vector<OptionName> options = {
      checks_option,
      report_option,
      {"--verbose", "", "say what memory was taken, and what of it by the reference"}};
  return options;
}

const std::vector<OptionName>& diff_options() {
  static const std::vector<OptionName> options = {
      {"--markdown", "", "tables for a pull request in place of text"}};
  return options;
}

const char* const line_help =
    "a contract, then key=value in any order; list CONTRACT shows the keys, and what is left out";

const std::vector<CommandName>& all_commands() {
  static const std::vector<OptionName> none;
  static const std::vector<CommandName> all = {
      {"gate", "PATTERN", "judge every subject, and prove that the judge would have noticed",
       "contracts, families, and behind each key=value words that its lines hold; none: all of "
       "them (list names what there is)",
       gate_options()},
      {"run", "LINE", "judge one case line, quoted or not", line_help, run_options()},
      {"list", "PATTERN", "everything that can be named",
       "parts of names, of values, of plans and of what is said of them, all of which hold: fp8, "
       "zbv, zero "
       "bubble; families, controls, checks, operators, lanes: all of these; none: everything",
       list_options()},
      {"explain", "LINE", "what a line would do, without running it",
       "a contract, then key=value in any order (list CONTRACT shows the keys), and nodes=N: its "
       "ranks on N nodes, which groups cross them and the bytes that these move",
       none},
      {"shrink", "LINE", "the smallest line that fails as this one does", line_help,
       shrink_options()},
      {"prepare", "LINE DIR", "write what a foreign program must be fed",
       "a contract, key=value in any order, and the folder to write; with --tier: patterns as of "
       "gate, or none, and the folder",
       prepare_options()},
      {"judge", "DIR", "judge what a foreign program left in a prepared folder",
       "a folder that prepare wrote and a program answered into", judge_options()},
      {"drift", "LINE", "train it, and name the first step that goes wrong",
       "as of run; control=NAME@STEP: its twin from that step on", drift_options()},
      {"diff", "OLD NEW", "what changed from one report to another",
       "two reports: folders that --report wrote, or their report.json", diff_options()},
  };
  return all;
}

std::string met(const std::string& what) { return fmt::format("met '{}'", what); }

std::vector<std::string> command_names() {
  std::vector<std::string> names;
  for (const CommandName& c : all_commands()) names.push_back(c.name);
  return names;
}

// "; it is one of gate, prepare": commands that take an option of this name; "" where none does.
std::string of_other_commands(const std::string& option) {
  std::vector<std::string> names;
  for (const CommandName& c : all_commands())
    if (std::any_of(c.options.begin(), c.options.end(),
                    [&](const OptionName& o) { return o.name == option; }))
      names.push_back(c.name);
  return names.empty() ? "" : "; it is one of " + joined(names);
}

// An option that the command does not take; `run` is told that the line says where it runs.
void check_option(const std::string& argument, const CommandName& command) {
  if (argument.size() < 2 || argument[0] != '-' || argument == "--help" || argument == "-h") return;
  if (std::isdigit(static_cast<unsigned char>(argument[1]))) return;  // a value
  std::string name = argument.substr(0, argument.find('='));
  std::vector<std::string> known = {"--help"};
  for (const OptionName& o : command.options) known.push_back(o.name);
  if (std::find(known.begin(), known.end(), name) != known.end()) return;
  std::string key = name.substr(std::min<size_t>(2, name.size()));
  bool of_the_line = std::string(command.words) == "LINE" &&
                     (key == "transport" || key == "device" || key == "dtype" || key == "subject");
  std::string close =
      of_the_line ? fmt::format("; write {}=... in the line", key) : of_other_commands(name);
  const bool of_another = !of_the_line && !close.empty();
  if (close.empty()) close = did_you_mean(name, known);
  const bool unknown = close.empty();
  if (unknown) close = fmt::format("; it takes {}", joined(known, " "));
  if ((unknown || of_another) && std::string(command.words).starts_with("LINE"))
    close += "; keys of the line have no dashes: tp=4";
  throw BadInput(fmt::format("option {}: expected an option of {}, met one that it does not take{}",
                             name, command.name, close));
}

// "forward," and "forward,,gradient": an item that was forgotten is not one that was never meant.
void check_list(const std::string& argument, const std::string* next, const CommandName& command) {
  const size_t equals = argument.find('=');
  for (const OptionName& o : command.options) {
    if (!o.list || argument.substr(0, equals) != o.name) continue;
    const std::string value = equals != std::string::npos ? argument.substr(equals + 1)
                              : next                      ? *next
                                                          : "";
    if (value.starts_with(',') || value.ends_with(',') || value.find(",,") != std::string::npos)
      throw BadInput(
          fmt::format("{}: expected names with a comma between them, {}; leave the empty one out",
                      o.name, met(value)));
  }
}

void add_options(CLI::App& app, const std::vector<OptionName>& options, Words& words) {
  for (const OptionName& o : options) {
    if (*o.value == 0) {
      app.add_flag_callback(
          o.name, [&words, &o] { words.flags.insert(o.name); }, o.help);
      continue;
    }
    CLI::Option* option = app.add_option(o.name, words.values[o.name], o.help);
    option->type_name(o.value)->allow_extra_args(false);
    if (o.list) option->delimiter(',');
  }
}

// The words of a line may be quoted or not; a gate takes any number of patterns.
bool takes_several(const CommandName& c) {
  return std::string(c.words).starts_with("LINE") || c.name == std::string("gate");
}

// CLI11 writes "..." behind all words and values, also of what is given once.
std::string help_of(const CLI::App& app, const CommandName& command) {
  std::string text = app.help();
  const auto without_dots = [&](const std::string& words, const std::string& dots, size_t blanks) {
    if (const size_t at = text.find(words + dots); at != std::string::npos)
      text.replace(at + words.size(), dots.size(), std::string(blanks, ' '));
  };
  for (const OptionName& o : command.options)
    if (*o.value && !o.list) without_dots(fmt::format("  {} {}", o.name, o.value), " ...", 4);
  if (!takes_several(command))
    for (const std::string dots : {"...", " ..."}) without_dots(command.words, dots, 0);
  return text;
}

std::optional<uint64_t> seed_of(const Words& words) {
  const std::string* value = single(words, "--seed");
  if (!value) return std::nullopt;
  uint64_t seed = 0;
  auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), seed);
  if (error != std::errc{} || end != value->data() + value->size())
    refuse("--seed", "an integer from 0 to 18446744073709551615", *value);
  return seed;
}

double scale_of(const Words& words) {
  const std::string* value = single(words, "--deadline-scale");
  if (!value) return 1;
  double scale = 0;
  auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), scale);
  bool whole = error == std::errc{} && end == value->data() + value->size();
  if (!(whole && scale >= 1e-3 && scale <= most_deadline_scale))
    refuse("--deadline-scale", "a number from 0.001 to 1000", *value);
  return scale;
}

std::string command_text(int argc, char** argv) {
  std::vector<std::string> words;
  for (int i = 0; i < argc; ++i) words.push_back(telling::shell_word(argv[i]));
  return joined(words, " ");
}

void check_dtypes(const std::vector<std::string>& names) {
  const std::vector<std::string> known = {"f64", "f32", "bf16", "f16"};
  for (const std::string& d : names) {
    if (std::find(known.begin(), known.end(), d) != known.end()) continue;
    bool reserved = d == "e4m3" || d == "e5m2";
    throw BadInput(
        fmt::format("--dtype: expected one of {}, {}{}", joined(known, " "), met(d),
                    reserved ? ", which is reserved and not there yet" : did_you_mean(d, known)));
  }
}

// Cases that are judged at a time where nobody says: a case of forked ranks leaves a core idle.
// One more than cores: ranks wait for each other, and a world that waits leaves its core idle.
int usual_jobs() { return 1 + int(std::clamp(std::thread::hardware_concurrency(), 1u, 4u)); }

// A launcher from outside has made the one world there is.
void stay_in_outside_world(Options& o, const OutsideLaunch& outside) {
  for (const std::string& t : o.transports)
    if (!carries(outside, t))
      throw BadInput(fmt::format(
          "--transport: expected {}, since {} started this program as one of {} ranks, met {}; "
          "start it without a launcher for other transports",
          joined(transports_of(outside), " or "), outside.launcher, outside.size, t));
  for (int ranks : o.ranks)
    if (ranks != outside.size)
      throw BadInput(fmt::format(
          "--ranks: expected {}, as many as {} started, met {}; start another number of them",
          outside.size, outside.launcher, ranks));
  if (o.transports.empty()) o.transports = {transports_of(outside)[0]};
  o.ranks = {outside.size};
  o.jobs = 1;
  o.isolated = false;
}

// What a program computes in, on lines that do not say it themselves.
std::vector<std::pair<std::string, std::string>> arithmetic_of(const Words& words) {
  std::vector<std::pair<std::string, std::string>> with;
  for (const std::string& word : several(words, "--with")) {
    const size_t eq = std::min(word.find('='), word.size());
    const std::string key = word.substr(0, eq), value = word.substr(std::min(eq + 1, word.size()));
    const std::vector<std::string> known{"acc", "wire", "grad", "local_grad", "probs"};
    if (!contains(known, key) || !dtype_from(value))
      refuse("--with", "acc=, wire=, grad=, local_grad= or probs= with f64, f32, bf16 or f16",
             word);
    with.emplace_back(key, value);
  }
  return with;
}

}  // namespace

const std::vector<OptionName>& drift_options() {
  static const std::vector<OptionName> options = {
      {"--steps", "N", "training steps (100)"},
      {"--optimizer", "NAME", "sgd (default) or adam"},
      {"--json", "FILE", "write what was found as an object"},
      {"--report", "DIR", "write index.html, with the distance by step"},
      {"--log", "FILE", "write a digest log of the run"},
      {"--logs", "A [B]", "in place of a line: digest logs of one run, or of two"},
      {"--exact", "", "with --logs A B: all sums are exact, so that layouts owe equal bits"},
      mpiexec_option,
      in_process_option,
      scale_option,
      seed_option};
  return options;
}

const CommandName& command_of(const std::vector<std::string>& arguments) {
  std::string all = joined(command_names(), ", ");
  if (arguments.empty())
    throw BadInput(fmt::format("command: expected one of {}, met none; --help shows them", all));
  for (const CommandName& c : all_commands())
    if (arguments[0] == c.name) return c;
  throw BadInput(fmt::format("command: expected one of {}, {}{}", all, met(arguments[0]),
                             did_you_mean(arguments[0], command_names())));
}

std::string usage() {
  std::string text = "usage: shardproof COMMAND ...\n\n";
  for (const CommandName& c : all_commands())
    text += fmt::format("  {:<8} {:<14} {}\n", c.name,
                        fmt::format("[{}{}]", c.words, takes_several(c) ? " ..." : ""), c.help);
  return text +
         "\n  shardproof COMMAND --help shows the options of a command\n"
         "  shardproof --version  says what it is built with\n"
         "\nexit  0 passed   1 a subject failed   2 wrong call   3 no judgement   130 "
         "interrupted\n";
}

bool asks_for_help(const std::string& word) {
  return word == "--help" || word == "-h" || word == "help";
}

std::optional<std::string> read_words(const CommandName& command,
                                      std::vector<std::string> arguments, Words& words) {
  const auto plain_from = std::find(arguments.begin(), arguments.end(), "--");
  for (auto a = arguments.begin(); a != plain_from; ++a) {
    check_option(*a, command);
    const bool value = a != arguments.begin() && (a - 1)->starts_with("--");
    if (!value && a->find_first_not_of(' ') == std::string::npos &&
        command.words == std::string("PATTERN"))
      throw BadInput(
          fmt::format("PATTERN: expected part of a name or key=value, met '{}'; leave it out to "
                      "mean everything",
                      *a));
    check_list(*a, a + 1 != plain_from ? &*(a + 1) : nullptr, command);
  }
  CLI::App app(command.help, fmt::format("shardproof {}", command.name));
  app.add_option(command.words, words.plain, command.of_words)->type_name("");
  add_options(app, command.options, words);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    return help_of(app, command);
  } catch (const CLI::ParseError& e) {
    throw BadInput(fmt::format("{}: {}; `shardproof {} --help` shows the options", command.name,
                               e.what(), command.name));
  }
  return std::nullopt;
}

// ---- Values of options

void refuse(const std::string& option, const std::string& expected, const std::string& value) {
  throw BadInput(fmt::format("{}: expected {}, {}", option, expected, met(value)));
}

const std::string* single(const Words& words, const std::string& option) {
  auto found = words.values.find(option);
  if (found == words.values.end() || found->second.empty()) return nullptr;
  if (found->second.size() > 1)
    throw BadInput(fmt::format("{}: expected once, met {} times ({}); leave one", option,
                               found->second.size(), joined(found->second, ", ")));
  if (found->second[0].empty()) refuse(option, "a value", "");
  return &found->second[0];
}

std::vector<std::string> several(const Words& words, const std::string& option) {
  auto found = words.values.find(option);
  if (found == words.values.end()) return {};
  for (const std::string& value : found->second)
    if (value.empty()) refuse(option, "names with a comma between them", "an empty one");
  return found->second;
}

int64_t integer(const std::string& option, const std::string& value, int64_t low, int64_t high) {
  int64_t number = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || number < low || number > high)
    refuse(option, fmt::format("an integer from {} to {}", low, high), value);
  return number;
}

int single_integer(const Words& words, const std::string& option, int fallback, int high) {
  const std::string* value = single(words, option);
  return value ? int(integer(option, *value, 1, high)) : fallback;
}

std::string text_of(const Words& words, const std::string& option) {
  const std::string* value = single(words, option);
  return value ? *value : "";
}

std::vector<std::string> transports_of(const OutsideLaunch& outside) {
  if (outside.launcher == torchrun) return {"nccl"};
  return {"mpi", "nccl"};
}
bool carries(const OutsideLaunch& outside, const std::string& transport) {
  const auto all = transports_of(outside);
  return std::find(all.begin(), all.end(), transport) != all.end();
}

Options options_of(const Words& words, int argc, char** argv) {
  Options o;
  if (const std::string* tier = single(words, "--tier")) o.tier = *tier;
  for (const std::string& ranks : several(words, "--ranks"))
    o.ranks.push_back(int(integer("--ranks", ranks, 1, 1 << 20)));
  o.transports = several(words, "--transport");
  o.devices = several(words, "--device");
  o.dtypes = several(words, "--dtype");
  o.subjects = several(words, "--subject");
  o.checks = several(words, "--check");
  o.require = several(words, "--require");
  o.report = text_of(words, "--report");
  o.dump = text_of(words, "--dump");
  o.failed = text_of(words, "--failed");
  o.fail_fast = words.flags.contains("--fail-fast");
  o.dry_run = words.flags.contains("--dry-run");
  o.canonical = words.flags.contains("--canonical");
  o.in_process = words.flags.contains("--in-process");
  o.seed = seed_of(words);
  o.seeds = single_integer(words, "--seeds", 1, 1'000'000);
  o.with = arithmetic_of(words);
  o.without = several(words, "--without");
  if (o.seed && *o.seed > std::numeric_limits<uint64_t>::max() - uint64_t(o.seeds - 1))
    refuse("--seeds",
           fmt::format("seeds up to {} from --seed {} on", std::numeric_limits<uint64_t>::max(),
                       *o.seed),
           std::to_string(o.seeds));
  o.jobs = single_integer(words, "--jobs", usual_jobs(), 1024);
  o.deadline_scale = scale_of(words);
  o.mpiexec = text_of(words, "--mpiexec");
  o.program = telling::shell_word(argv[0]);  // stands in lines that are pasted into a shell
  o.command = command_text(argc, argv);
  check_dtypes(o.dtypes);
  for (const std::string& check : o.checks) check_named(check);
  if (const auto outside = outside_launch()) stay_in_outside_world(o, *outside);
  return o;
}

}  // namespace shardproof::commands
