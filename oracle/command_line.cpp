// The program: words of the command line -> Options and a case -> gate, run, list, explain or
// shrink -> exit code. Nothing is written before everything that can be refused has been looked at.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <sstream>

#include "oracle/abilities.hpp"
#include "oracle/check.hpp"
#include "oracle/comm/leaks.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/comm/run_folder.hpp"
#include "oracle/command.hpp"
#include "oracle/command_words.hpp"
#include "oracle/cost.hpp"
#include "oracle/digest/log.hpp"
#include "oracle/drift.hpp"
#include "oracle/due.hpp"
#include "oracle/float_environment.hpp"
#include "oracle/gate.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/memory_watch.hpp"
#include "oracle/model.hpp"
#include "oracle/overflow.hpp"
#include "oracle/prepared/judge.hpp"
#include "oracle/prepared/prepare.hpp"
#include "oracle/report.hpp"
#include "oracle/report_diff.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/run.hpp"
#include "oracle/self.hpp"
#include "oracle/shrink.hpp"
#include "oracle/words.hpp"
#include "oracle/worker.hpp"

namespace shardproof {
namespace {

using namespace commands;

enum Exit {
  exit_passed = 0,
  exit_failed = 1,
  exit_wrong_call = 2,
  exit_no_judgement = 3,
  exit_interrupted = 130
};

// ---- speaking

// A reader that left (`| head`) is no error; a full disk is.
int lost_output = 0;  // errno

void say(const std::string& text) {
  bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if ((std::fflush(stdout) != 0 || !written) && errno != EPIPE && lost_output == 0)
    lost_output = errno;
}

void complain(const std::string& text) {
  std::string line = telling::printable(telling::with_long_words_cut(text));
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::fprintf(stderr, "shardproof: %s\n", line.c_str());
}

// A closed descriptor 0, 1 or 2 would be handed to the first file that is opened, and what is said
// would be written into it.
void open_standard_streams() {
  for (int fd : {0, 1, 2})
    if (fcntl(fd, F_GETFD) == -1 && open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) != fd)
      _exit(exit_no_judgement);
}

// "shardproof 0.1.0   compiler 12.2.0   eigen 3.4.0 ...   runs processes, threads, mpi"
std::string version_line() {
  auto all = versions();
  std::string text = fmt::format("shardproof {}", all.extract("shardproof").mapped());
  for (const auto& [name, version] : all) text += fmt::format("   {} {}", name, version);
  std::vector<std::string> lanes;
  for (const Ability& a : abilities_unasked())
    if (a.available) lanes.push_back(a.name);
  return text + fmt::format("   runs {}\n", joined(lanes));
}

// ---- gate and run

std::string coloured(const std::string& text) {
  return wants_colour(isatty(STDOUT_FILENO)) ? paint(text) : text;
}

std::string ended_with_newline(std::string text) {
  if (!text.empty() && text.back() != '\n') text += '\n';
  return text;
}

// `self`: the judge's own tests are part of it.
void say_interrupted(const Report& report, bool self) {
  if (!interrupted()) return;
  const Counts n = counts(report);
  say(fmt::format(
      "INTERRUPTED after {} with {} and {}: what is said above "
      "holds for these, the rest was not judged{}\n",
      number_of(n.cases, "case"), number_of(n.checks, "check"), number_of(n.controls, "control"),
      self && report.self.planted == 0
          ? "; the judge's own tests did not end, so that it is not proven"
          : ""));
}

void say_closing(Report& report, bool self) {
  if (interrupted()) report.complete = false;
  say(coloured(ended_with_newline(closing(report))));
  say_interrupted(report, self);
}

// What is asked for is written whatever the verdict is; what cannot be leaves no judgement.
int concluded(Report report, const Options& options) {
  if (interrupted()) report.complete = false;
  int code = interrupted() ? int(exit_interrupted) : exit_code(report);
  if (!report.dump_error.empty()) complain(fmt::format("--dump: {}", report.dump_error));
  if (options.report.empty()) return code;
  try {
    write_report(report, options.report);
  } catch (const Infrastructure& e) {
    complain(e.what());
    if (code != exit_interrupted) code = exit_no_judgement;
  }
  return code;
}

int dry_run(const Options& options, const Registry& registry) {
  int64_t cases = 0, checks = 0, controls = 0;
  std::string text;
  Report planned;
  for (const Due& d : plan_gate(options, registry, &planned.not_due, &planned.left_out)) {
    bool healthy = d.what == Due::healthy;
    (healthy ? cases : controls) += 1;
    if (healthy) checks += int64_t(d.checks.size());
    text += fmt::format("{:<8} {}   {} {}\n", healthy ? "case" : "control",
                        options.canonical ? print_canonical(d.line) : print(d.line),
                        healthy ? "asks" : "must be caught by",
                        d.checks.empty() ? "what its operator says" : joined(d.checks, ", "));
  }
  for (const std::string& why : telling::not_due(planned))
    text += fmt::format("{:<8} {}\n", "not due", why);
  if (const std::string lines = telling::left_out(planned); !lines.empty())
    text += fmt::format("{:<8} {}\n", "left out", lines);
  say(text + fmt::format("due      {} with {}, {}; nothing was run\n", number_of(cases, "case"),
                         number_of(checks, "check"), number_of(controls, "named control")));
  return exit_passed;
}

// Why nothing ran, where a sound judge skipped every check: "mpi.np4: built without MPI".
std::string reason_of_skips(const Report& report) {
  const Counts n = counts(report);
  if (n.checks == 0 || n.skipped < n.checks || n.controls > 0 || !report.self.failures.empty())
    return "";
  return fmt::format("{}: {}", report.cases[0].lane, report.cases[0].checks[0].note);
}

// The registry narrowed to the structure of --model; empty where that is not given.
std::optional<ModelGate> model_of(const Words& words, Options& options, const Registry& registry) {
  const std::string* path = single(words, "--model");
  if (!path) {
    for (const char* option : {"--tp", "--cp", "--dp"})
      if (!several(words, option).empty())
        throw BadInput(fmt::format("{}: expected together with --model FILE, met without", option));
    return {};
  }
  if (!options.failed.empty())
    throw BadInput("--model and --failed: expected one of them, met both; leave one out");
  std::vector<int> tp;
  for (const std::string& ranks : several(words, "--tp"))
    tp.push_back(int(integer("--tp", ranks, 1, most_ranks_of_an_axis)));
  const int cp = single_integer(words, "--cp", 1, most_ranks_of_an_axis),
            dp = single_integer(words, "--dp", 1, most_ranks_of_an_axis);
  if (!single(words, "--tier")) options.tier = "smoke";
  return model_gate(read_model(*path), tp, cp, dp, registry,
                    [&](const Case& line) { return selects(options, registry, line); });
}

// All that a run writes into: where its MPI ranks meet is looked at before the others are made.
void make_folders(const Options& options, bool over_mpi) {
  if (over_mpi && mpi_missing().empty() && !outside_launch()) check_run_folders();
  if (!options.report.empty()) check_report_folder(options.report);
  if (!options.dump.empty()) check_report_folder(options.dump, "--dump");
}

// Judges what is due by a registry.
int gate_of(const Words& words, Options options, const Registry& registry) {
  const int skip_code = single_integer(words, "--skip-code", 0, 255);
  if (options.dry_run) return dry_run(options, registry);
  refuse_unwritable(options.report);
  refuse_unwritable(options.dump, "--dump");
  Planned planned = planned_gate(options, registry);
  const bool over_mpi = std::any_of(planned.due.begin(), planned.due.end(),
                                    [](const Due& d) { return d.line.text("transport") == "mpi"; });
  make_folders(options, over_mpi);  // what is refused leaves none behind
  catch_interrupts();
  auto progress = terminal_progress(stdout, options.program, isatty(STDOUT_FILENO));
  Report report = run_gate(std::move(planned), options, registry, *progress);
  progress.reset();
  say_closing(report, options.self && !registry.planted().empty());
  if (words.flags.contains("--github")) say(github_annotations(report, options.report));
  const std::string skips = reason_of_skips(report);
  const int code = concluded(std::move(report), options);
  if (skip_code == 0 || skips.empty() || code != exit_no_judgement) return code;
  say(fmt::format("SKIPPED    {}\n", skips));
  return skip_code;
}

std::vector<std::string> contracts_of(const Registry& registry) {
  std::vector<std::string> names;
  for (const Contract& c : registry.contracts()) names.push_back(c.name);
  return names;
}

// A contract or family that there is, and that the model has no lines of.
void refuse_beside_the_model(const std::vector<std::string>& patterns, const Registry& registry,
                             const Registry& model) {
  const auto known = [](const Registry& r, const std::string& word) {
    return contains(contracts_of(r), word) || contains(r.families(), word);
  };
  for (const std::string& pattern : patterns) {
    std::istringstream words(pattern);
    for (std::string word; words >> word;)
      if (known(registry, word) && !known(model, word))
        throw BadInput(
            fmt::format("PATTERN: expected what the model has lines of, met '{}', of which it has "
                        "none; with these ranks it has lines of {}",
                        word, joined(contracts_of(model), ", ")));
  }
}

int gate(const Words& words, const Registry& registry, int argc, char** argv) {
  Options options = options_of(words, argc, argv);
  if (options.in_process && options.transports != std::vector<std::string>{"threads"})
    throw BadInput(
        fmt::format("--in-process: expected together with --transport threads, met {}",
                    options.transports.empty()
                        ? "without"
                        : fmt::format("--transport {}", joined(options.transports, ","))));
  options.patterns = words.plain;
  const auto model = model_of(words, options, registry);
  if (!model) return gate_of(words, options, registry);
  refuse_beside_the_model(options.patterns, registry, model->registry);
  plan_gate(options, model->registry);  // nothing is said of what is refused
  say(model->text);
  return gate_of(words, options, model->registry);
}

// A canonical line says all three, empty ones too. In any other an empty one is a variable of a
// script that was not set, and the healthy kernel must not be judged in its place unsaid.
void check_names(const std::vector<std::string>& line) {
  std::vector<std::string> empty;
  int said = 0;
  for (const std::string& word : line)
    for (const char* key : {"subject", "control", "fault"}) {
      if (!word.starts_with(fmt::format("{}=", key))) continue;
      ++said;
      if (word.ends_with("=")) empty.push_back(key);
    }
  if (said < 3 && !empty.empty())
    throw BadInput(
        fmt::format("key '{}': expected a name behind '=', met ''; `list {}` shows what there is, "
                    "leave the key out for the healthy kernel of the program",
                    empty[0], line[0]));
}

std::vector<std::string> words_of_line(const Words& words) {
  std::istringstream all(joined(words.plain, " "));
  std::vector<std::string> line{std::istream_iterator<std::string>(all), {}};
  check_names(line);
  return line;
}

// The seed of the option, where the line does not say another one.
void take_seed(Case& line, const Words& words, const Options& options) {
  if (!options.seed || *options.seed == line.seed()) return;
  for (const std::string& word : words_of_line(words))
    if (word.starts_with("seed="))
      refuse_two_seeds(*options.seed, std::string_view(word).substr(5));
  line.set("seed", std::to_string(*options.seed));
}

// Of a line that its contract refuses, a twin is asked where it is about refusals, and no other.
void check_about_refusals(const Case& line, const Registry& registry) {
  const Control& twin = registry.control(line.contract, line.text("control"));
  if (twin.check.find("rejection") != std::string::npos) return;
  try {
    check_legal(line, registry);
  } catch (const BadInput& refused) {
    throw BadInput(fmt::format("{}; control {} was not asked", refused.what(), twin.name));
  }
}

// Everything that a run of the line would refuse.
void check_runnable(const Case& line, const Options& options, const Registry& registry) {
  check_world(line);
  const Contract& contract = registry.contract(line.contract);
  if (const auto outside = outside_launch();
      outside && (line.world() != outside->size || !carries(*outside, line.text("transport"))))
    throw BadInput(
        fmt::format("expected a line of {} ranks with transport={}, since {} started this program "
                    "as one of {} ranks, met {}",
                    outside->size, joined(transports_of(*outside), " or "), outside->launcher,
                    outside->size, print(line)));
  if (options.in_process && line.text("transport") != "threads")
    throw BadInput(
        fmt::format("--in-process: expected transport=threads in the line, met transport={}",
                    line.text("transport")));
  const bool legal = !illegal(contract, line);
  if (!line.text("control").empty() && !legal) return check_about_refusals(line, registry);
  // First, where sequences are a list of all tokens: it is made again and again below.
  if (legal && contract.sequences) refuse_too_many_elements(line, registry);
  check_legal(line, registry);
  const auto due = due_checks(contract, line, declared_of(line, registry), options.checks);
  refuse_infeasible(line, due, registry);
  if (!line.text("control").empty()) return;
  if (due.empty()) {
    const auto why = checks_left_out(line, registry, options.checks);
    throw BadInput(fmt::format(
        "--check: expected a check that is due on the line, met {}; `explain` shows which are",
        joined(why.empty() ? options.checks : why, ", ")));
  }
}

bool lets_pass(const CaseResult& c) {
  return std::all_of(c.checks.begin(), c.checks.end(),
                     [](const CheckResult& check) { return telling::lets_pass(check.verdict); });
}

// A twin that passes: on this line it is no other than the healthy subject, or nothing looked at
// where it is.
std::string note_of_uncaught(const Case& line, const std::string& name, const Options& options,
                             const Registry& registry) {
  const Control& control = registry.control(line.contract, name);
  const Case witness = parse(control.witness, registry);
  std::string note = fmt::format("control {} was not caught on this line", control.name);
  if (options.checks.empty())
    note += line.world() == 1 ? ": one rank makes no call, so most controls change nothing there"
                              : ", on which it may change nothing";
  else
    note += fmt::format(" by {}; it is there for {}", joined(options.checks, ", "), control.check);
  return fmt::format("{}\nthe gate judges it on {} control={}", note, print(witness), control.name);
}

int run(const Words& words, const Registry& registry, int argc, char** argv) {
  Options options = options_of(words, argc, argv);
  Case line = parse_words(words_of_line(words), registry);
  take_seed(line, words, options);
  check_runnable(line, options, registry);
  make_folders(options, line.text("transport") == "mpi");
  if (options.canonical) say(print_canonical(line) + "\n");
  catch_interrupts();
  auto progress = terminal_progress(stdout, options.program, isatty(STDOUT_FILENO));
  Report report = run_line(line, options, registry, *progress);
  progress.reset();
  for (const CaseResult& c : report.cases)
    if (lets_pass(c)) {
      say(coloured(ended_with_newline(passed_line(c))));
      for (const std::string& note : c.state) say(note + "\n");
      if (!line.text("control").empty())
        say(telling::row("note", note_of_uncaught(line, line.text("control"), options, registry)));
    }
  for (const std::string& why : report.not_due) say(telling::row("not due", why));
  if (!report.dumped.empty()) say(telling::row("dumped", report.dumped));
  for (const std::string& reason : no_judgement(report))
    say(coloured(fmt::format("NO JUDGEMENT {}\n", reason)));
  say_interrupted(report, /*self=*/false);
  return concluded(std::move(report), options);
}

// ---- shrink

int shrink(const Words& words, const Registry& registry, int argc, char** argv) {
  const Options options = options_of(words, argc, argv);
  if (const auto outside = outside_launch())
    throw BadInput(
        fmt::format("shrink: expected to start ranks by itself, met {} with {} ranks; "
                    "start it without a launcher",
                    outside->launcher, outside->size));
  Case line = parse_words(words_of_line(words), registry);
  take_seed(line, words, options);
  check_runnable(line, options, registry);
  catch_interrupts();
  const ShrinkOutcome outcome = shrink_line(line, options, registry);
  say(coloured(ended_with_newline(outcome.text)));
  if (interrupted()) {
    say("INTERRUPTED: a simpler line may fail as well\n");
    return exit_interrupted;
  }
  return outcome.failed ? exit_failed : exit_passed;
}

// ---- list and explain

int list(const Words& words, const Registry& registry) {
  const std::string pattern = joined(words.plain, " ");
  say(words.flags.contains("--table") ? list_table(registry, pattern)
                                      : list_text(registry, pattern));
  return exit_passed;
}

// nodes=N is no key of a case: where ranks are placed changes no value. It is taken out here.
int take_nodes(std::vector<std::string>& line) {
  int nodes = 0;
  std::vector<std::string> rest;
  for (const std::string& word : line) {
    if (!word.starts_with("nodes=")) {
      rest.push_back(word);
      continue;
    }
    if (nodes > 0) throw BadInput("key 'nodes': expected once, met twice; leave one out");
    nodes = int(parse_integer("nodes", word.substr(6), 1, 4096));
  }
  line = rest;
  return nodes;
}

int explain(const Words& words, const Registry& registry) {
  std::vector<std::string> line = words_of_line(words);
  int nodes = take_nodes(line);
  say(explain_text(parse_words(line, registry), nodes, registry));
  return exit_passed;
}

// ---- prepare and judge

// "tp=2" or "linear" in the place of a folder: the folder was forgotten.
bool is_word_of_a_line(const std::string& word, const Registry& registry) {
  const size_t eq = word.find('=');
  if (word.find('/') != std::string::npos) return false;
  for (const Contract& c : registry.contracts()) {
    if (word == c.name || word == c.family) return true;
    for (const Key& k : keys_of(c))
      if (eq != std::string::npos && k.name == word.substr(0, eq)) return true;
  }
  return false;
}

int prepare(Words words, const Registry& registry, int argc, char** argv) {
  const bool battery = single(words, "--tier") != nullptr;  // PATTERN may be left out
  if (words.plain.size() < (battery ? 1 : 2))
    throw BadInput(
        fmt::format("prepare: expected LINE DIR, or --tier NAME [PATTERN ...] DIR, met {}",
                    words.plain.empty() ? "nothing" : "one word; the last one is the folder"));
  const std::string folder = words.plain.back();
  words.plain.pop_back();
  if (folder.empty()) refuse("DIR", "a folder", folder);
  if (is_word_of_a_line(folder, registry))
    refuse("DIR", "a folder as the last word (./ in front of one that is named so)", folder);
  Options options = options_of(words, argc, argv);
  if (battery) {
    options.patterns = words.plain;
    options.transports = {"processes"};
    const prepared::Battery b = prepared::prepare_battery(options, folder, registry);
    for (const std::string& why : b.left_out) say(fmt::format("left out   {}\n", why));
    for (const std::string& what : b.as_they_are) say(fmt::format("as it is   {}\n", what));
    say(
        fmt::format("prepared   {} in {}   next: run your program in each of its folders, "
                    "then {} judge {}\n",
                    number_of(int64_t(b.members.size()), "case"), telling::one_line(folder),
                    options.program, telling::shell_path(folder)));
    return exit_passed;
  }
  for (const char* option : {"--ranks", "--dtype", "--with", "--without"})
    if (!several(words, option).empty())
      throw BadInput(fmt::format(
          "{}: expected together with --tier, met without; write it in the line", option));
  Case line = parse_words(words_of_line(words), registry);
  take_seed(line, words, options);
  check_world(line);
  const prepared::Member m = prepared::prepare_case(line, options.checks, folder, registry);
  say(fmt::format("prepared   {} for {} in {}   next: run your program there, then {} judge {}\n",
                  m.line, number_of(line.world(), "rank"), telling::one_line(folder),
                  options.program, telling::shell_path(folder)));
  if (!options.checks.empty())
    for (const std::string& why : checks_unasked(line, registry, options.checks))
      say(telling::row("not due", why));
  return exit_passed;
}

std::string memory_line() {
  const MemoryTold m = memory_told();
  const auto mib = [](int64_t bytes) { return double(bytes) / (1 << 20); };
  return fmt::format(
      "memory     {:.0f} MiB at most   reference {:.0f} MiB in {:.2f} s   beyond it {:.0f} MiB\n",
      mib(m.peak), mib(m.reference), m.reference_seconds, mib(m.beyond));
}

int judge(const Words& words, const Registry& registry, int argc, char** argv) {
  if (words.plain.size() != 1)
    throw BadInput(fmt::format("judge: expected one DIR, met {}; `shardproof prepare` makes one",
                               words.plain.size()));
  if (words.plain[0].empty())
    throw BadInput("judge: expected a DIR, met ''; `shardproof prepare` makes one");
  const Options options = options_of(words, argc, argv);
  const bool verbose = words.flags.contains("--verbose");
  catch_interrupts();
  if (verbose) watch_memory();
  auto progress = terminal_progress(stdout, options.program, isatty(STDOUT_FILENO));
  prepared::Unjudged others;
  Report report = prepared::judge_folder(words.plain[0], options, registry, *progress, &others);
  progress.reset();
  if (!options.report.empty()) check_report_folder(options.report);
  say_closing(report, /*self=*/false);
  for (const std::string& text : prepared::not_judged(report))
    say(fmt::format("not judged {}\n", text));
  if (verbose && !work_goes_on()) say(memory_line());
  if (const auto text = prepared::unanswered_text(words.plain[0], others); !text.empty())
    complain(text);
  for (const std::string& text : others.refused) complain(text);
  const int code = concluded(std::move(report), options);
  return code == exit_no_judgement && !others.refused.empty() ? int(exit_wrong_call) : code;
}

// ---- drift

void write_json(const Words& words, const std::string& json) {
  const std::string* path = single(words, "--json");
  if (!path) return;
  std::FILE* file = std::fopen(path->c_str(), "w");
  const bool written = file && std::fwrite(json.data(), 1, json.size(), file) == json.size();
  if (!(file && std::fclose(file) == 0 && written))
    throw Infrastructure(fmt::format("--json: expected a file that can be written, met '{}' ({})",
                                     *path, std::strerror(errno)));
}

// Before anything runs; leaves what is there, and where nothing is, nothing.
void require_writable_json(const Words& words) {
  const std::string* path = single(words, "--json");
  if (!path) return;
  if (*path == "-")
    throw BadInput(
        "--json: expected the name of a file, met '-'; standard output takes what is said, give a "
        "file of its own");
  std::error_code ignored;
  const bool there = std::filesystem::exists(*path, ignored);
  std::FILE* file = std::fopen(path->c_str(), "a");
  if (file) std::fclose(file);
  if (file && !there) std::filesystem::remove(*path, ignored);
  if (!file)
    throw BadInput(fmt::format("--json: expected a file that can be written, met '{}' ({})", *path,
                               std::strerror(errno)));
}

// `--logs A B`: the second file stands among the plain words.
int drift_of_logs(const Words& words) {
  std::vector<std::string> files = words.values.at("--logs");
  files.insert(files.end(), words.plain.begin(), words.plain.end());
  if (files.size() > 2 || files[0].empty())
    throw BadInput(fmt::format(
        "--logs: expected one digest log or two, met {}; the files of all ranks of a run "
        "are put behind one another (cat rank*.log > run.log)",
        joined(files, " ")));
  for (const OptionName& o : drift_options()) {
    const std::string name = o.name;
    if (name == "--logs" || name == "--exact" || name == "--json") continue;
    if (words.flags.contains(name) || single(words, name.c_str()))
      throw BadInput(
          fmt::format("{}: expected together with a line, met with --logs{}", name,
                      name == "--report" ? "; --json FILE writes what the logs show" : ""));
  }
  if (words.flags.contains("--exact") && files.size() == 1)
    throw BadInput("--exact: expected with two logs, met with one");
  std::vector<digest::Log> logs;
  for (const std::string& file : files) logs.push_back(digest::read_log(file));
  const digest::LogReport report =
      logs.size() == 1 ? digest::judge_log(logs[0])
                       : digest::compare_logs(logs[0], logs[1], words.flags.contains("--exact"));
  if (report.findings.empty() && !report.refused.empty()) throw BadInput(report.refused);
  require_writable_json(words);
  say(coloured(digest::log_text(report, logs)));
  write_json(words, digest::log_json(report, logs));
  if (!report.findings.empty()) return exit_failed;
  return report.cut || report.one_rank ? exit_no_judgement : exit_passed;
}

// A control of a run that has not drifted.
std::string note_of_unseen(const DriftLine& line, const Options& options,
                           const Registry& registry) {
  const auto of_the_step = [&](const auto& fault) { return fault.first == line.control; };
  if (std::none_of(drift_faults().begin(), drift_faults().end(), of_the_step))
    return note_of_uncaught(line.line, line.control, options, registry);
  return fmt::format("control {} was not caught on this line, on which it may change nothing",
                     line.control);
}

// A log in the place of a line, or nothing: the option that reads logs is named.
void expect_a_line_to_train(const Words& words) {
  std::error_code error;
  const bool none = words.plain.empty();
  if (!none && !std::filesystem::is_regular_file(words.plain[0], error)) return;
  throw BadInput(fmt::format(
      "drift: expected a LINE to train, such as block tp=2, or --logs A [B] to compare digest "
      "logs, met {}",
      none ? "neither" : fmt::format("the file '{}'", telling::one_line(words.plain[0]))));
}

int drift_command(const Words& words, const Registry& registry, int argc, char** argv) {
  if (const auto logs = words.values.find("--logs");
      logs != words.values.end() && !logs->second.empty())
    return drift_of_logs(words);
  expect_a_line_to_train(words);
  DriftOptions o;
  o.steps = single_integer(words, "--steps", 100, 10'000'000);
  if (const std::string* name = single(words, "--optimizer")) {
    if (*name != "sgd" && *name != "adam") refuse("--optimizer", "sgd or adam", *name);
    o.optimizer = *name;
  }
  o.log = text_of(words, "--log");
  const Options common = options_of(words, argc, argv);
  DriftLine line = parse_drift(words_of_line(words), registry);
  if (!line.control.empty() && line.from >= o.steps)
    throw BadInput(
        fmt::format("key 'control': expected a step of the run, 0 to {}, met {}@{}, which would "
                    "never act; use more --steps",
                    o.steps - 1, line.control, line.from));
  take_seed(line.line, words, common);
  if (!common.report.empty()) check_report_folder(common.report);
  catch_interrupts();
  require_writable_json(words);
  const DriftReport report = run_drift(line, o, common, registry);
  say(coloured(drift_text(report, line, o, common.program)));
  if (!report.drifted() && !line.control.empty() && report.steps > line.from)
    say(telling::row("note", note_of_unseen(line, common, registry)));
  write_json(words, drift_json(report, line, o, common.program));
  if (!common.report.empty())
    write_whole(common.report, "index.html",
                drift_html(report, line, o, common.program, common.command));
  if (!report.log_fault.empty())
    complain(fmt::format("--log: the log '{}' is not whole ({})", o.log, report.log_fault));
  if (interrupted()) return exit_interrupted;
  if (!report.log_fault.empty()) return exit_no_judgement;
  if (report.drifted()) return exit_failed;
  return report.open() ? exit_no_judgement : exit_passed;
}

// ---- diff

int diff(const Words& words) {
  if (words.plain.size() != 2)
    throw BadInput(fmt::format(
        "diff: expected two reports, OLD and NEW (folders or report.json files), met {}{}",
        words.plain.size(),
        words.plain.empty() ? "" : fmt::format(" ({})", joined(words.plain, " "))));
  const ReportDiff changes =
      diff_reports(read_report(words.plain[0], "OLD"), read_report(words.plain[1], "NEW"));
  say(words.flags.contains("--markdown") ? diff_markdown(changes) : coloured(diff_text(changes)));
  return changes.lost.empty() ? exit_passed : exit_failed;
}

int obey(int argc, char** argv, const Registry& registry) {
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (!arguments.empty() && arguments[0] == "--worker") return worker_main(argc, argv, registry);
  if (!arguments.empty() && asks_for_help(arguments[0])) {
    if (arguments.size() == 1 || asks_for_help(arguments[1])) {
      say(usage());
      return exit_passed;
    }
    arguments = {arguments[1], "--help"};  // `help gate`
  }
  if (!arguments.empty() && arguments[0] == "--version") {
    if (arguments.size() > 1) refuse("--version", "nothing behind it", arguments[1]);
    say(version_line());
    return exit_passed;
  }
  const CommandName& command = command_of(arguments);
  arguments.erase(arguments.begin());
  Words words;
  if (const auto help = read_words(command, arguments, words)) {
    say(*help);
    return exit_passed;
  }
  std::string name = command.name;
  if (name == "gate") return gate(words, registry, argc, argv);
  if (name == "run") return run(words, registry, argc, argv);
  if (name == "list") return list(words, registry);
  if (name == "explain") return explain(words, registry);
  if (name == "prepare") return prepare(words, registry, argc, argv);
  if (name == "judge") return judge(words, registry, argc, argv);
  if (name == "diff") return diff(words);
  if (name == "drift") return drift_command(words, registry, argc, argv);
  return shrink(words, registry, argc, argv);
}

// Obeys, and turns what went wrong into one line and an exit code.
int concluding(int argc, char** argv, const Registry& registry) {
  int code = exit_no_judgement;
  try {
    code = obey(argc, argv, registry);
  } catch (const BadInput& e) {
    complain(e.what());
    return exit_wrong_call;
  } catch (const Rejected& e) {
    complain(e.what());
    return exit_wrong_call;
  } catch (const Interrupted&) {
    complain("INTERRUPTED before its end: nothing was judged");
    return exit_interrupted;
  } catch (const std::exception& e) {
    complain(fmt::format("no judgement: {}", e.what()));
    return interrupted() ? exit_interrupted : exit_no_judgement;
  }
  if (lost_output) {
    complain(
        fmt::format("standard output: expected to write what is said, met '{}'; it is not whole",
                    std::strerror(lost_output)));
    if (code != exit_interrupted) code = exit_no_judgement;
  }
  return code;
}

}  // namespace

int main(int argc, char** argv, Registry registry, const char* modules) {
  FloatEnvironment::start_judging();
  look_for_modules_in(modules);
  open_standard_streams();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // `ulimit -f` is met as a write that fails
  const bool worker = argc > 1 && !std::strcmp(argv[1], "--worker");
  const auto outside = worker ? std::nullopt : outside_launch();
  if (!worker && !outside) speak_when_interrupted();
  int code = exit_no_judgement;
  try {
    if (outside && outside->rank > 0) return serve_outside(rank_main(registry));
    code = concluding(argc, argv, registry);
    if (work_goes_on()) _exit(code);
    if (outside) release_outside(code);
  } catch (const std::exception& e) {  // of the launcher's world: it could not be had, or it broke
    complain(fmt::format("no judgement: {}", e.what()));
    return exit_no_judgement;
  }
  return leaks_noted() > 0 ? exit_no_judgement : code;
}

}  // namespace shardproof
