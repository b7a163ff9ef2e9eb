// Faults planted in the judge. Each must earn exactly the verdict that it deserves.
#include "suites/self/planted.hpp"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <stdexcept>

#include "oracle/interrupt.hpp"

namespace shardproof {

namespace planted {
namespace {

const CheckResult* find(const CaseResult& result, const std::string& check) {
  for (const CheckResult& c : result.checks)
    if (c.check == check) return &c;
  return nullptr;
}

// Everything that is printed about a check, and where the ranks stand.
std::string said(const CaseResult& result, const CheckResult& c) {
  std::string text = c.note;
  for (const Finding& f : c.findings)
    text += fmt::format("\n{} {} {} {} {}", f.tensor, f.message, f.means, f.where, f.pattern);
  for (const std::string& line : result.state) text += "\n" + line;
  return text;
}

bool names_rank(const CheckResult& c, int rank) {
  return std::any_of(c.findings.begin(), c.findings.end(), [&](const Finding& f) {
    return f.rank == rank || std::find(f.ranks.begin(), f.ranks.end(), rank) != f.ranks.end();
  });
}

std::string verdicts(const CaseResult& result) {
  std::string list;
  for (const CheckResult& c : result.checks)
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", c.check, name(c.verdict));
  return list;
}

std::string all_pass(const Judged& j, const std::vector<Deserved>& except) {
  for (const CheckResult& c : j.result.checks) {
    const bool deserved = std::any_of(except.begin(), except.end(),
                                      [&](const Deserved& d) { return d.check == c.check; });
    if (!deserved && c.verdict != Verdict::passed)
      return fmt::format("expected {} to pass, met {}: {}", c.check, name(c.verdict),
                         said(j.result, c));
  }
  return j.result.checks.empty() ? "expected checks that are due, met none" : "";
}

std::vector<std::string> checks_of(const Plant& p, const Case& line) {
  if (p.all_checks)
    return due_checks(registry().contract(line.contract), line, declared_of(line, registry()), {});
  std::vector<std::string> names;
  for (const Deserved& d : p.deserved) names.push_back(d.check);
  return names;
}

std::string judged_as_deserved(const Plant& p, const Judged& j) {
  for (const Deserved& d : p.deserved)
    if (std::string wrong = differs(j, d); !wrong.empty()) return wrong;
  if (p.all_checks)
    if (std::string wrong = all_pass(j, p.deserved); !wrong.empty()) return wrong;
  return p.also ? p.also(j) : "";
}

// The parent of a process; 0 where it has gone.
int parent_of(int pid) {
  std::ifstream in(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(in, text);
  const size_t name_ends = text.rfind(')');  // a name may hold blanks and parentheses
  int parent = 0;
  char state = 0;
  if (name_ends == std::string::npos ||
      std::sscanf(text.c_str() + name_ends + 1, " %c %d", &state, &parent) != 2)
    return 0;
  return parent;
}

std::vector<int> children() {
  siginfo_t info = {};
  if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 && errno == ECHILD) return {};
  std::vector<int> found;
  DIR* processes = opendir("/proc");
  for (const dirent* d = processes ? readdir(processes) : nullptr; d; d = readdir(processes))
    if (const int pid = std::atoi(d->d_name); pid > 0 && parent_of(pid) == getpid())
      found.push_back(pid);
  if (processes) closedir(processes);
  return found;
}

void add(Registry& r, const Plant& p) {
  const std::string contract = p.line.substr(0, p.line.find(' '));
  r.add(Subject{p.name, contract, p.make ? p.make : r.subject(contract, "").make, p.declared});
}

std::vector<Plant> all_plants() {
  std::vector<Plant> all;
  for (auto* list : {values, calls, ranks, odd_but_right, vacuous, gradients, draws})
    for (Plant& p : list()) all.push_back(std::move(p));
  return all;
}

}  // namespace

Children::Children() : before_(children()) {}

std::string Children::left() const {
  std::string pids;
  for (int pid : children())
    if (std::find(before_.begin(), before_.end(), pid) == before_.end())
      pids += fmt::format("{}{}", pids.empty() ? "" : " ", pid);
  return pids;
}

const Registry& registry() {
  static const Registry all = [] {
    Registry r;
    add_plain(r);
    add_private_contracts(r);
    add_norm_contracts(r);
    add_masked_rows(r);
    for (const Plant& p : all_plants()) add(r, p);
    return r;
  }();
  return all;
}

Case line_of(const std::string& line, const std::string& subject) {
  return parse(subject.empty() ? line : line + " subject=" + subject, registry());
}

std::string differs(const Judged& j, const Deserved& d) {
  const CheckResult* c = find(j.result, d.check);
  if (!c) return fmt::format("expected a verdict of {}, met none", d.check);
  const std::string text = said(j.result, *c);
  if (c->verdict != d.verdict)
    return fmt::format("expected {} {}, met {}: {}", d.check, name(d.verdict), verdicts(j.result),
                       text);
  if (d.rank >= 0 && !names_rank(*c, d.rank))
    return fmt::format("expected {} to name rank {}, met: {}", d.check, d.rank, text);
  if (!d.where.empty() && std::none_of(c->findings.begin(), c->findings.end(),
                                       [&](const Finding& f) { return f.where == d.where; }))
    return fmt::format("expected {} to name {}, met: {}", d.check, d.where, text);
  for (const std::string& word : d.words)
    if (text.find(word) == std::string::npos)
      return fmt::format("expected {} to say '{}', met: {}", d.check, word, text);
  return "";
}

Judged judge(const Case& line, const std::vector<std::string>& checks, RankMain main,
             double deadline_scale) {
  Options options;
  options.deadline_scale = deadline_scale;
  Runner runner(options, registry(), std::move(main));
  Judged j = runner.run(line, checks, lane_of(line));
  if (interrupted()) throw std::runtime_error("interrupted");  // its evidence may be empty
  return j;
}

std::string run_within(double deadline_scale, const Plant& p) try {
  const Children children;
  {
    Options options;
    options.deadline_scale = deadline_scale;
    Runner runner(options, registry());
    const Case line = line_of(p.line, p.name),
               healthy = line_of(p.afterwards.empty() ? p.line : p.afterwards, "");
    const auto checks = checks_of(p, line);
    std::string wrong = judged_as_deserved(p, runner.run(line, checks, lane_of(line)));
    if (wrong.empty())
      if (wrong = all_pass(runner.run(healthy, checks, lane_of(healthy)), {}); !wrong.empty())
        wrong = "the healthy subject after it: " + wrong;
    if (!wrong.empty()) return wrong;
  }
  const std::string left = children.left();
  return left.empty() ? "" : "processes are left behind: " + left;
} catch (const std::exception& e) {
  return fmt::format("expected a verdict, met an exception: {}", e.what());
}

// A short deadline saves time. Where it passes before ranks get to their fault, or to its report
// (sanitizers take their time), that of the gate's cases decides, or the usual one.
std::string run(const Plant& p, double deadline_scale) {
  const double most = std::max(deadline_scale, 1.0);
  const std::string wrong = run_within(p.deadline_scale, p);
  return wrong.empty() || p.deadline_scale >= most ? wrong : run_within(most, p);
}

Make forward(Map map) {
  return [map] { return pair(map, identity); };
}

Map on_rank(int rank, Map odd, Map others) {
  return [=](Rank& r, const View& in, const View& out) {
    r.world_rank() == rank ? odd(r, in, out) : others(r, in, out);
  };
}

Map spoilt(Map right, int rank, std::function<void(const View& out)> how) {
  return [=](Rank& r, const View& in, const View& out) {
    right(r, in, out);
    if (r.world_rank() == rank) how(out);
  };
}

View like(Rank& rank, const View& view) { return rank.workspace(view.dtype, view.shape); }

}  // namespace planted

const std::vector<Planted>& planted_faults() {
  static const std::vector<Planted> all = [] {
    std::vector<Planted> list;
    for (planted::Plant& p : planted::all_plants())
      list.push_back(
          {p.name, [p](double deadline_scale) { return planted::run(p, deadline_scale); }});
    for (auto* more : {planted::of_the_parent, planted::of_the_draws})
      for (Planted& p : more()) list.push_back(std::move(p));
    return list;
  }();
  return all;
}

}  // namespace shardproof
