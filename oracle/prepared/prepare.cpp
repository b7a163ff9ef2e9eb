#include "oracle/prepared/prepare.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <set>

#include "oracle/due.hpp"
#include "oracle/joined.hpp"
#include "oracle/overflow.hpp"
#include "oracle/prepared/answer.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::prepared {
namespace {

namespace fs = std::filesystem;

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  std::string met = error ? error.message() : "";
  if (met.empty() && !fs::is_directory(folder, error)) met = "a file of that name";
  if (met.empty() && access(folder.c_str(), W_OK | X_OK) != 0)
    met = std::error_code(errno, std::generic_category()).message();
  if (!met.empty())
    throw BadInput(fmt::format(
        "DIR: expected a folder that can be written, met {} ({}); name another", folder, met));
}

// A folder holds one case or one battery.
void holds_no(const char* name, const std::string& folder) {
  std::error_code error;
  if (fs::exists(fs::path(folder) / name, error))
    throw BadInput(fmt::format(
        "DIR: expected a folder without a {}, met one in {}; name another, or remove what is there",
        name, folder));
}

// What an interrupted write leaves: case.json.part4711.
bool is_part(const std::string& name) {
  const size_t at = name.rfind(".part");
  return at != std::string::npos && at + 5 < name.size() &&
         name.find_first_not_of("0123456789", at + 5) == std::string::npos &&
         (name.starts_with("rank") || name.starts_with("case.json"));
}

// The input of a rank that the case has not: that of a larger case, which lay here before.
bool is_input_beyond(const std::string& name, int ranks) {
  const size_t end = name.starts_with("rank") ? name.find_first_not_of("0123456789", 4) : 4;
  if (end == 4 || end == name.npos || name.substr(end) != ".in.safetensors") return false;
  for (int r = 0; r < ranks; ++r)
    if (name == in_file(r)) return false;
  return true;
}

// A case may be prepared again with the same digest: an answer from before would pass for a new
// one. case.json goes first and comes last, so that what is interrupted in between is no case.
void remove_old(const std::string& folder, int ranks) {
  std::vector<fs::path> old{fs::path(folder) / case_name};
  for (const auto& entry : fs::directory_iterator(folder))
    if (const std::string name = entry.path().filename();
        is_answer(name) || is_part(name) || is_input_beyond(name, ranks))
      old.push_back(entry.path());
  for (const fs::path& path : old) {
    std::error_code error;
    if (fs::remove(path, error); error)
      throw BadInput(
          fmt::format("{}: expected a file that can be removed before the case is prepared again, "
                      "met {}; remove it",
                      path.string(), error.message()));
  }
}

void write_inputs(const Plan& plan, int rank, const std::string& path, const std::string& digest) {
  std::vector<tensors::TensorToWrite> tensors;
  for (const Pass& pass : plan.passes)
    for (const Step& step : pass.steps)
      for (const Named& n : step.takes)
        tensors.push_back(
            {n.name, plan.dtype_of(n), plan.local_shape_of(n, rank),
             [&plan, &pass, &step, &n, rank] { return fed(plan, pass, step, n, rank); }});
  tensors::write_safetensors(path, std::move(tensors),
                             {{"case", digest}, {"rank", std::to_string(rank)}});
}

Member write_case(const Plan& plan, const std::string& folder) {
  const int ranks = plan.evidence.mesh.world();
  remove_old(folder, ranks);
  const std::string digest = case_digest(plan);
  std::vector<std::string> files;
  for (int r = 0; r < ranks; ++r) {
    const std::string path = fs::path(folder) / in_file(r);
    write_inputs(plan, r, path, digest);
    files.push_back(digest_of(tensors::MappedFile(path)));
  }
  tensors::write_text(fs::path(folder) / case_name, case_text(plan, files));
  return {fs::path(folder).filename(), digest, print(*plan.line)};
}

// Sums in a type that is narrower than what is added up: said of lines in half precision.
bool narrows_sums(const Case& line, const std::string& key, const std::string& type) {
  return (key == "acc" || key == "local_grad") &&
         significand_bits(*dtype_from(type)) < significand_bits(line.dtype());
}

// Lines that a gate judges, as a foreign program sees them: each once, whatever ours would run on.
// `narrowed`: how many of them a word of --with did not go into.
std::vector<Case> lines_of(Options options, const Registry& registry,
                           std::map<std::string, int64_t>& narrowed) {
  options.twins_alone = true;  // their witnesses are cases like others
  std::vector<Case> lines;
  std::set<std::string> seen;
  const auto add = [&](Case line) {
    for (const char* key : {"control", "subject", "fault"}) line.set(key, "");
    line.set("transport", "processes");
    line.set("device", "host");
    line.set("strides", "contiguous");
    std::vector<std::string> left;
    for (const auto& [key, value] : options.with) {
      if (!line.has(key) || !line.text(key).empty()) continue;
      if (narrows_sums(line, key, value))
        left.push_back(key + "=" + value);
      else
        line.set(key, value);
    }
    if (!seen.insert(print_canonical(line)).second) return;
    lines.push_back(std::move(line));
    for (const std::string& word : left) ++narrowed[word];
  };
  std::set<std::string> contracts;
  for (const Due& d : plan_gate(options, registry)) {
    if (d.illegal || d.stored) continue;  // what once failed on our subjects is theirs to be asked
    contracts.insert(d.line.contract);
    add(d.line);
  }
  const auto within = [&](const Case& line) {
    return options.ranks.empty() || std::find(options.ranks.begin(), options.ranks.end(),
                                              line.world()) != options.ranks.end();
  };
  for (const std::string& contract : contracts)
    for (Case& line : witnesses_due(registry.contract(contract), registry, "processes", ""))
      if (within(line) &&
          (options.dtypes.empty() || std::find(options.dtypes.begin(), options.dtypes.end(),
                                               line.text("dtype")) != options.dtypes.end()))
        add(std::move(line));
  return lines;
}

struct Lacking {
  std::string word, key, value;  // no value: any but the default
  bool is_asked_by(const Case& line) const {
    for (size_t i = 0; i < line.keys.size(); ++i) {
      const auto& [name, met] = line.keys[i];
      if (name == key) return value.empty() ? met != line.defaults[i] : met == value;
    }
    return false;
  }
};

std::vector<Lacking> lacking(const Options& options, const std::vector<Case>& lines) {
  std::vector<Lacking> all;
  for (const std::string& word : options.without) {
    const size_t eq = std::min(word.find('='), word.size());
    const Lacking l{word, word.substr(0, eq), word.substr(std::min(eq + 1, word.size()))};
    if (std::none_of(lines.begin(), lines.end(), [&](auto& line) { return line.has(l.key); }))
      throw BadInput(
          fmt::format("--without: expected a key of the lines that are selected, met '{}'; "
                      "`shardproof list CONTRACT` shows them",
                      word));
    all.push_back(l);
  }
  return all;
}

}  // namespace

Member prepare_case(const Case& line, const std::vector<std::string>& only,
                    const std::string& folder, const Registry& registry) {
  const Plan plan = plan_of(line, only, registry);
  refuse_overflow(plan.evidence, registry);
  holds_no(battery_name, folder);
  make_folder(folder);
  return write_case(plan, folder);
}

Battery prepare_battery(const Options& options, const std::string& folder,
                        const Registry& registry) {
  Battery b;
  std::map<std::string, int64_t> narrowed;
  const std::vector<Case> lines = lines_of(options, registry, narrowed);
  for (const auto& [word, times] : narrowed)
    b.as_they_are.push_back(fmt::format("{} in a wider dtype: --with {} goes into the others",
                                        number_of(times, "line"), word));
  const std::vector<Lacking> without = lacking(options, lines);
  holds_no(case_name, folder);
  holds_no(battery_name, folder);
  make_folder(folder);
  for (const Case& line : lines) {
    const auto lacks = std::find_if(without.begin(), without.end(),
                                    [&](const Lacking& l) { return l.is_asked_by(line); });
    if (lacks != without.end()) {
      b.left_out.push_back(fmt::format("{}: --without {}", print(line), lacks->word));
      continue;
    }
    std::optional<Plan> plan;
    try {
      plan = plan_of(line, options.checks, registry);
      refuse_overflow(plan->evidence, registry);
    } catch (const std::runtime_error& e) {
      b.left_out.push_back(fmt::format("{}: {}", print(line), e.what()));
      continue;
    }
    const fs::path member =
        fs::path(folder) / fmt::format("{:03}.{}", b.members.size(), line.contract);
    make_folder(member);
    b.members.push_back(write_case(*plan, member));
  }
  if (b.members.empty())
    throw BadInput(
        "the selection is empty: no line of it can be asked of files; `gate --dry-run` shows what "
        "there is");
  tensors::write_text(fs::path(folder) / battery_name, battery_text(b.members));
  return b;
}

}  // namespace shardproof::prepared
