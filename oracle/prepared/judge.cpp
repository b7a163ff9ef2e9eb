#include "oracle/prepared/judge.hpp"

#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "oracle/checks/patterns.hpp"
#include "oracle/checks/pieces.hpp"
#include "oracle/clock.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/json.hpp"
#include "oracle/memory_watch.hpp"
#include "oracle/overflow.hpp"
#include "oracle/prepared/answer.hpp"
#include "oracle/prepared/case_file.hpp"
#include "oracle/printable.hpp"
#include "oracle/run.hpp"
#include "oracle/self.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::prepared {
namespace {

namespace fs = std::filesystem;
using tensors::FileTensor;
using tensors::MappedFile;
using tensors::SafetensorsFile;

// A rank's answer is not there.
struct Unanswered : BadInput {
  using BadInput::BadInput;
};

[[noreturn]] void refuse(const std::string& path, const std::string& expected,
                         const std::string& met) {
  throw BadInput(fmt::format("{}: expected {}, met {}", path, expected, met));
}

void same_case(const Answer::Card& card, const std::string& digest, int rank) {
  const auto& [path, metadata] = card;
  const auto met = [](const std::string& word) {
    return word.size() > 40 ? in_quotes(word) : word;
  };
  const auto found = metadata.find("case");
  if (found == metadata.end())
    refuse(path,
           fmt::format("the case's digest {} under 'case'{}", digest,
                       path.ends_with(".json") ? "" : " in __metadata__"),
           "none; save it with the tensors");
  if (found->second != digest)
    refuse(
        path, fmt::format("a file of the case {}", digest),
        fmt::format(
            "one of {}; files of different cases are mixed, run the program on this folder again",
            met(found->second)));
  // A program may say which rank it was.
  if (const auto said = metadata.find("rank");
      said != metadata.end() && said->second != std::to_string(rank))
    refuse(path, fmt::format("the file of rank {}", rank),
           fmt::format("that of rank {}", met(said->second)));
}

// A program may say which run it was, in the same words in every file of every rank. One that says
// nothing beside one that does is of another run, too.
void same_run(const std::vector<std::unique_ptr<Answer>>& answers) {
  std::vector<const Answer::Card*> cards;
  for (const auto& answer : answers)
    for (const Answer::Card& card : answer->cards()) cards.push_back(&card);
  const auto first = std::find_if(cards.begin(), cards.end(),
                                  [](auto* card) { return card->metadata.contains("run"); });
  if (first == cards.end()) return;
  const std::string& due = (*first)->metadata.at("run");
  for (const Answer::Card* card : cards) {
    const auto run = card->metadata.find("run");
    const bool said = run != card->metadata.end();
    if (said && run->second == due) continue;
    refuse(card->path,
           fmt::format("the run {} of {}", in_quotes(due),
                       fs::path((*first)->path).filename().string()),
           fmt::format("{}: answers of two runs are mixed, run the program again",
                       said ? in_quotes(run->second) : "none under 'run'"));
  }
}

// A foreign program's buffers are its own: of a NaN no more is known than that it came back.
void say_what_files_know(CheckResult& result) {
  for (Finding& f : result.findings)
    if (f.means == means_of_nan) f.means = "NaN was returned";
}

void same_kind(const std::string& path, const FileTensor& t, DType dtype,
               const std::vector<int64_t>& shape) {
  if (t.dtype == dtype && t.shape == shape) return;
  refuse(
      path,
      fmt::format("tensor '{}' as {} {}", t.name, tensors::format_name(dtype), shape_text(shape)),
      fmt::format("{} {}", t.dtype_name, shape_text(t.shape)));
}

// Everything that a plan names, in the order of the passes.
template <class Visit>
void each_named(const Plan& plan, bool given, Visit visit) {
  for (size_t p = 0; p < plan.passes.size(); ++p)
    for (size_t s = 0; s < plan.passes[p].steps.size(); ++s)
      for (const Named& n : given ? plan.passes[p].steps[s].gives : plan.passes[p].steps[s].takes)
        visit(p, s, n);
}

CheckResult skipped(const std::string& check, const std::string& why) {
  CheckResult result;
  result.check = check;
  result.verdict = Verdict::skipped;
  result.note = why;
  return result;
}

// Names of checks, each once, by what they have in common; in the order in which they came.
struct ByReason {
  std::vector<std::pair<std::string, std::vector<std::string>>> entries;

  void add(const std::string& why, const std::string& check) {
    auto known =
        std::find_if(entries.begin(), entries.end(), [&](auto& e) { return e.first == why; });
    if (known == entries.end()) known = entries.insert(known, {why, {}});
    auto& checks = known->second;
    if (std::find(checks.begin(), checks.end(), check) == checks.end()) checks.push_back(check);
  }
};

// Truths that are kept while a case is judged.
class KeptTruths {
 public:
  KeptTruths() = default;
  KeptTruths(const KeptTruths&) = delete;
  KeptTruths& operator=(const KeptTruths&) = delete;
  ~KeptTruths() { reference_keeps(-bytes_); }
  const Truth& counted(const Truth& truth) {
    if (!known_.insert(&truth).second) return truth;
    size_t values = 0;
    for (const auto* list : {&truth.inputs, &truth.outputs, &truth.cotangents, &truth.gradients})
      for (const Whole& w : *list) values += w.value.size();
    for (const auto* list : {&truth.output_gauges, &truth.gradient_gauges})
      for (const Gauge& g : *list) values += g.magnitude.size() + g.squares.size() + g.bound.size();
    const auto bytes = int64_t(values * sizeof(double));
    reference_keeps(bytes);
    bytes_ += bytes;
    return truth;
  }

 private:
  std::set<const Truth*> known_;
  int64_t bytes_ = 0;
};

// The files of a case, looked at and not yet judged.
class Opened {
 public:
  Opened(const std::string& folder, const Registry& registry)
      : folder_(folder), case_(read_case(folder, registry, /*given_in_files=*/true)) {
    for (int r = 0; r < ranks(); ++r) look_at_input(r, registry);
    refuse_more_ranks();
    for (int r = 0; r < ranks(); ++r) look_at_output(r);
    same_run(out_);
    find_returned();
  }

  const std::string& contract() const { return plan().line->contract; }

  // `only`: of the checks that are due, these; empty: all.
  CaseResult judge(const Registry& registry, const std::vector<std::string>& only) {
    const double begin = now();
    CaseResult result;
    const Case& line = *plan().line;
    result.line = print(line);
    result.canonical = print_canonical(line);
    result.replay = "judge " + telling::shell_path(folder_);
    result.contract = line.contract;
    result.family = registry.contract(line.contract).family;
    result.lane = fmt::format("files.np{}", ranks());
    Evidence e = evidence();
    KeptTruths kept;  // is told after they are freed
    Truths truths(registry);
    e.truth = [&](const Feed& feed) -> const Truth& {
      const Truth& truth = kept.counted(truths.get(line, e, feed));
      require_in_range(e, feed, truth);
      return truth;
    };
    const auto is_asked = [&](const std::string& check) {
      return only.empty() || std::find(only.begin(), only.end(), check) != only.end();
    };
    try {
      for (const std::string& check : plan().checks)
        if (is_asked(check)) result.checks.push_back(judged(check, e));
    } catch (const BeyondRange& beyond) {
      result.checks.clear();
      for (const std::string& check : plan().checks)
        if (is_asked(check)) result.checks.push_back(skipped(check, beyond.what()));
    } catch (...) {
      require_whole();
      throw;
    }
    require_whole();
    result.seconds = now() - begin;
    return result;
  }

  // "ledger, lockstep of files (they hold results and no calls)", a text for each reason.
  std::vector<std::string> unasked() const {
    ByReason by_reason;
    for (const Unasked& u : plan().unasked) by_reason.add(u.why, u.check);
    std::vector<std::string> texts;
    for (const auto& [why, checks] : by_reason.entries)
      texts.push_back(fmt::format("{} of files: {}", joined(checks, ", "), why));
    return texts;
  }
  // Why a check that was judged saw less than it asks; "" where none did.
  const std::string& partial() const { return partial_; }
  const std::string& digest() const { return case_.digest; }
  std::string line() const { return print(*plan().line); }
  bool owes_one_of(const std::vector<std::string>& checks) const {
    return std::find_first_of(checks.begin(), checks.end(), plan().checks.begin(),
                              plan().checks.end()) != checks.end();
  }

 private:
  const Plan& plan() const { return case_.plan; }
  int ranks() const { return plan().evidence.mesh.world(); }

  void look_at_input(int rank, const Registry& registry) {
    const std::string path = fs::path(folder_) / in_file(rank);
    if (std::error_code error; !fs::exists(fs::symlink_status(path, error)))
      refuse(path, fmt::format("what rank {} is fed", rank),
             "nothing there: the folder was moved or copied in part; bring the file along, or "
             "prepare the folder again");
    in_.push_back(std::make_unique<MappedFile>(path));
    const MappedFile& file = *in_.back();
    const bool as_prepared = digest_of(file) == case_.files[size_t(rank)];
    file.require_whole();
    if (as_prepared) return;
    const SafetensorsFile parsed(path);
    same_case({path, parsed->metadata()}, case_.digest, rank);
    const Plan whole = plan_of(*plan().line, plan().only, registry);
    each_named(whole, false, [&](size_t pass, size_t step, const Named& n) {
      const FileTensor* t = parsed->find(n.name);
      if (!t)
        refuse(path, fmt::format("tensor '{}'", n.name),
               "none of that name; the prepared file was edited");
      same_kind(path, *t, plan().dtype_of(n), plan().local_shape_of(n, rank));
      const auto due = fed(whole, whole.passes[pass], whole.passes[pass].steps[step], n, rank);
      if (!std::equal(due.begin(), due.end(), t->bytes.begin(), t->bytes.end()))
        refuse(path, fmt::format("tensor '{}' as it was prepared", n.name),
               "other elements; the prepared file was edited");
    });
    refuse(path, "the file as it was prepared", "another one; it was edited");
  }

  // An answer of a rank that the case has not: the program ran on another world.
  void refuse_more_ranks() const {
    std::set<std::string> known;
    for (int r = 0; r < ranks(); ++r) known.insert(std::to_string(r));
    for (const std::string& name : answer_files(folder_)) {
      const std::string rank = name.substr(4, name.find('.') - 4);
      if (known.contains(rank)) continue;
      refuse(fs::path(folder_) / name, fmt::format("answers of ranks 0 to {}", ranks() - 1),
             fmt::format("one of rank {}; run the program on {} ranks, or remove the file", rank,
                         ranks()));
    }
  }

  void look_at_output(int rank) {
    if (!Answer::is_there(folder_, rank))
      throw Unanswered(
          fmt::format("{}: expected the answer of rank {}, met nothing there; run the program on "
                      "this folder",
                      (fs::path(folder_) / out_file(rank)).string(), rank));
    auto answer = std::make_unique<Answer>(folder_, rank);
    for (const Answer::Card& card : answer->cards()) same_case(card, case_.digest, rank);
    std::set<std::string> known;
    for (const bool given : {true, false})
      each_named(plan(), given, [&](size_t, size_t, const Named& n) {
        known.insert(n.name);
        if (const FileTensor* t = answer->find(n.name))
          same_kind(answer->path_of(n.name), *t, plan().dtype_of(n),
                    plan().local_shape_of(n, rank));
      });
    for (const FileTensor* t : answer->tensors()) {
      if (known.contains(t->name) || is_running_sum(t->name)) continue;
      refuse(answer->path_of(t->name), "the names that case.json gives",
             fmt::format("tensor {}{}", in_quotes(t->name),
                         is_of_an_operand(t->name)
                             ? ", which no step of this line gives; leave it out"
                             : did_you_mean(t->name, {known.begin(), known.end()})));
    }
    out_.push_back(std::move(answer));
  }

  // "shot3/grad.w" of a line with w: a frozen weight, or a shot without its backward.
  bool is_of_an_operand(const std::string& name) const {
    std::string_view of = std::string_view(name).substr(name.rfind('/') + 1);
    if (of.starts_with("grad.")) of.remove_prefix(5);
    const auto& operands = plan().evidence.operands;
    return std::any_of(operands.begin(), operands.end(),
                       [&](const Operand& o) { return o.name == of; });
  }

  // A running sum that is handed in before it is whole says nothing, and does no harm.
  bool is_running_sum(const std::string& name) const {
    for (const Pass& p : plan().passes)
      for (const Step& s : p.steps)
        for (const Operand& o : plan().evidence.operands)
          if (p.accumulate && s.backward && o.role == Operand::parameter &&
              name == s.prefix + "grad." + o.name)
            return true;
    return false;
  }

  // The first pass is due. A further one is there on every rank in full, or on none at all.
  void find_returned() {
    returned_.assign(plan().passes.size(), false);
    each_named(plan(), true, [&](size_t pass, size_t, const Named& n) {
      for (const auto& answer : out_)
        if (answer->find(n.name)) returned_[pass] = true;
    });
    returned_[0] = true;
    each_named(plan(), true, [&](size_t pass, size_t, const Named& n) {
      for (const auto& answer : out_)
        if (returned_[pass] && !answer->find(n.name))
          refuse(answer->path_of(n.name), fmt::format("tensor '{}'", n.name),
                 pass == 0 && n.gradient
                     ? "none of that name; `prepare --check forward` asks for no gradients"
                     : "none of that name");
    });
  }

  // Passes that were not returned are no part of it.
  Evidence evidence() {
    std::vector<Shot> shots = std::move(case_.plan.evidence.shots);  // may hold whole tensors
    case_.plan.evidence.shots.clear();
    Evidence e = plan().evidence;
    for (size_t p = 0; p < plan().passes.size(); ++p)
      if (returned_[p]) e.shots.push_back(std::move(shots[p]));
    fed_.clear();
    for (int r = 0; r < ranks(); ++r) {
      const MappedFile& file = *in_[size_t(r)];
      const auto in = file.read([&] { return tensors::Contents(file.bytes(), file.path()); });
      file.require_whole();
      RankRecord record, fed;
      record.rank = fed.rank = r;
      for (size_t p = 0; p < plan().passes.size(); ++p) {
        if (!returned_[p]) continue;
        record.shots.push_back(shot_record(plan().passes[p], r, in));
        fed.shots.push_back(fed_record(plan().passes[p], in));
      }
      e.ranks.push_back(std::move(record));
      fed_.push_back(std::move(fed));
    }
    e.fed = [this](int rank, int shot, int feed, int operand) -> const ResultTensor* {
      for (const ResultTensor& t : fed_[size_t(rank)].shots[size_t(shot)].results)
        if (t.step == feed && t.operand == operand) return &t;
      return nullptr;
    };
    return e;
  }

  void require_whole() const {
    for (const auto& answer : out_) answer->require_whole();
    for (const auto& file : in_) file->require_whole();
  }

  // What a pass takes, the number of the feed as its step.
  static ShotRecord fed_record(const Pass& pass, const tensors::Contents& in) {
    ShotRecord record;
    for (const Step& step : pass.steps)
      for (const Named& n : step.takes) {
        const FileTensor& t = *in.find(n.name);
        record.results.push_back(
            {step.feed, n.operand, n.gradient, *t.dtype, t.shape, Bytes::of_file(t.bytes)});
      }
    return record;
  }

  ShotRecord shot_record(const Pass& pass, int rank, const tensors::Contents& in) {
    ShotRecord record;
    record.status = ShotRecord::ok;
    const Answer& out = *out_[size_t(rank)];
    for (size_t s = 0; s < pass.steps.size(); ++s) {
      for (const Named& n : pass.steps[s].gives) {
        const FileTensor& t = *out.find(n.name);
        record.results.push_back(
            {int(s), n.operand, n.gradient, *t.dtype, t.shape, Bytes::of_file(t.bytes)});
      }
      for (const Named& n : pass.steps[s].takes)
        if (const FileTensor* after = out.find(n.name))
          look_at_argument(*after, *in.find(n.name), n, record);
    }
    return record;
  }

  void look_at_argument(const FileTensor& after, const FileTensor& before, const Named& n,
                        ShotRecord& record) {
    ++arguments_;
    std::optional<size_t> other;  // the first byte that is another
    judging::each_piece(
        before.bytes.size(),
        [&](size_t first, size_t n) {
          if (other) return;
          const auto is = before.bytes.subspan(first, n), was = after.bytes.subspan(first, n);
          if (std::memcmp(is.data(), was.data(), n) != 0)
            other =
                first + size_t(std::mismatch(is.begin(), is.end(), was.begin()).first - is.begin());
          tensors::give_pages_back(is);
          tensors::give_pages_back(was);
        },
        judging::block);
    if (!other) return;
    const std::string& name = plan().evidence.operands[size_t(n.operand)].name;
    record.memory.push_back({"argument", n.gradient ? "cotangent of " + name : name, 1,
                             int64_t(*other / size_of(*after.dtype)),
                             "an argument was written to"});
  }

  CheckResult judged(const std::string& check, const Evidence& e) {
    std::string missing, unseen;
    bool rounding_unseen = false;
    for (size_t p = 0; p < plan().passes.size(); ++p) {
      const std::string& shot = plan().passes[p].name;
      const bool due =
          shot.starts_with(check + ":") || (check == "coverage" && shot.starts_with("mask:"));
      if (!due || returned_[p]) continue;
      const std::string& prefix = plan().passes[p].steps[0].prefix;
      // Without its further passes replicas are still compared on the first.
      std::string& of = check == "replica" ? unseen : missing;
      if (of.empty()) of = fmt::format("the program did not return {}...", prefix);
      rounding_unseen = rounding_unseen || shot == "replica:normal";
    }
    std::string why;
    if (!missing.empty()) why = missing;
    if (check == "memory" && arguments_ == 0)
      why =
          "the program returned none of its arguments; saved under their own names, they are "
          "compared";
    if (!why.empty()) return skipped(check, why);
    CheckResult result = check_named(check).judge(e);
    say_what_files_know(result);
    if (partial_.empty()) partial_ = unseen;
    if (rounding_unseen)
      result.note += fmt::format(
          "{}{}, so replicas were not compared on data that round: sums that each rank takes in "
          "an order of its own are not seen",
          result.note.empty() ? "" : "; ", unseen);
    return result;
  }

  std::string folder_;
  CaseFile case_;
  std::vector<std::unique_ptr<MappedFile>> in_;  // by rank, as they were prepared
  std::vector<RankRecord> fed_;                  // by rank and shot: what they hold
  std::vector<std::unique_ptr<Answer>> out_;
  std::vector<bool> returned_;  // by pass
  int64_t arguments_ = 0;       // that were returned
  std::string partial_;
};

// "000.linear_row, 001.linear_row ... 017.linear_row": all of a few, else both ends.
std::string listed(const std::vector<std::string>& folders) {
  constexpr size_t few = 6;
  if (folders.size() <= few) return joined(folders, ", ");
  return fmt::format("{}, {} ... {}", folders[0], folders[1], folders.back());
}

// What lies in a folder.
struct Looked {
  std::vector<std::shared_ptr<Opened>> cases;
  Unjudged others;
};

void require_there(const std::string& path, const Member& m) {
  if (std::error_code error; !fs::exists(path, error))
    refuse(path, fmt::format("the folder of a case of the battery ({})", m.line),
           "nothing there; it was moved away, or left out of a copy: put it back, or prepare the "
           "battery again");
}

std::string other_case(const std::string& digest, const std::vector<Member>& members) {
  for (const Member& m : members)
    if (m.digest == digest)
      return fmt::format("that of {}; folders were moved: put each back under its name", m.folder);
  return fmt::format("{}; folders of two batteries are mixed", digest);
}

// `whole`: a case that is not answered is refused.
Looked open_all(const std::string& folder, const Registry& registry, bool whole) {
  Looked all;
  if (!is_battery(folder)) {
    all.cases.push_back(std::make_shared<Opened>(folder, registry));
    return all;
  }
  const std::vector<Member> members = read_battery(folder);
  for (const Member& m : members) {
    const std::string path = fs::path(folder) / m.folder;
    try {
      require_there(path, m);
      all.cases.push_back(std::make_shared<Opened>(path, registry));
    } catch (const Unanswered& e) {
      if (whole) throw;
      all.others.unanswered.push_back(e.what());
      all.others.folders.push_back(m.folder);
      continue;
    } catch (const BadInput& e) {
      if (whole) throw;
      all.others.refused.push_back(e.what());
      continue;
    }
    if (const std::string& digest = all.cases.back()->digest(); digest != m.digest)
      refuse(fs::path(path) / case_name,
             fmt::format("the case {} of the battery ({})", m.digest, m.line),
             other_case(digest, members));
  }
  const std::vector<std::string>& refused = all.others.refused;
  if (!all.cases.empty() || all.others.size() == 0) return all;
  if (!refused.empty())
    throw BadInput(refused.front() +
                   (all.others.size() == 1
                        ? ""
                        : fmt::format("; of the other {} cases of the battery none can be judged",
                                      all.others.size() - 1)));
  throw BadInput(unanswered_text(folder, all.others));
}

// "2 of 5 cases not answered (001.linear_row, 004.linear_row), 1 refused".
std::string missing_text(const Unjudged& others, size_t judged) {
  if (others.size() == 0) return "";
  std::string text = fmt::format("of {} ", number_of(int64_t(others.size() + judged), "case"));
  if (!others.unanswered.empty())
    text += fmt::format("{} not answered ({})", others.unanswered.size(), listed(others.folders));
  if (!others.refused.empty())
    text +=
        fmt::format("{}{} refused", others.unanswered.empty() ? "" : ", ", others.refused.size());
  return text;
}

// A lane is proven by an answer to all of its cases, in full. Of the cases that were
// answered, an interruption leaves some out.
// `partial`: by lane why a check there saw less than it asks.
void close_lanes(Report& report, const Unjudged& others, size_t answered,
                 const std::map<std::string, std::string>& partial) {
  std::map<std::string, std::string> reasons;
  for (const CaseResult& c : report.cases) {
    std::string& reason = reasons[c.lane];
    if (report.cases.size() < answered)
      reason = fmt::format("interrupted after {} of {} cases", report.cases.size(), answered);
    else if (const size_t all = others.size() + answered; !others.refused.empty())
      reason = fmt::format("answers of {} of {} cases refused", others.refused.size(), all);
    else if (others.size() > 0)
      reason = fmt::format("{} of {} cases not answered", others.size(), all);
    for (const CheckResult& check : c.checks)
      if (check.verdict == Verdict::skipped && reason.empty()) reason = check.note;
  }
  for (const auto& [lane, why] : partial)
    if (std::string& reason = reasons[lane]; reason.empty()) reason = why;
  for (const auto& [lane, reason] : reasons) report.lanes.push_back({lane, reason.empty(), reason});
}

}  // namespace

Report judge_folder(const std::string& folder, const Options& options, const Registry& registry,
                    Progress& progress, Unjudged* others) {
  const double begin = now();
  mallopt(M_MMAP_THRESHOLD,
          1 << 20);  // what a tensor took goes back to the system when it is freed
  Report report;
  report.command = options.command;
  report.program = options.program;
  report.versions = versions();
  auto looked = unless_interrupted(
      [folder, &registry, whole = !others] { return open_all(folder, registry, whole); });
  if (!looked) {
    report.complete = false;
    return report;
  }
  auto& cases = looked->cases;
  if (others) *others = looked->others;
  // A case of a battery that owes none of the checks asked for has nothing to say.
  if (!options.checks.empty())
    std::erase_if(cases, [&](const auto& c) { return !c->owes_one_of(options.checks); });
  if (cases.empty())
    throw BadInput(
        fmt::format("--check: expected a check that was prepared, met {}; case.json lists them",
                    joined(options.checks, ", ")));
  for (const std::string& check : options.checks)
    if (std::none_of(cases.begin(), cases.end(), [&](auto& c) { return c->owes_one_of({check}); }))
      report.not_due.push_back(check + ": not prepared in any case here");
  std::map<std::string, std::string> partial;
  for (const auto& c : cases) progress.expect({Pace::a_case, c->contract()}, 1, 1);
  progress.begin(int64_t(cases.size()), 0);
  for (auto& opened : cases) {
    progress.begun(0, opened->line());
    auto result = unless_interrupted(
        [opened, &registry, checks = options.checks] { return opened->judge(registry, checks); },
        [&] { progress.tick(); });
    if (!result) break;
    progress.done(*result);
    for (std::string& text : opened->unasked()) report.not_due.push_back(std::move(text));
    if (!opened->partial().empty()) partial.try_emplace(result->lane, opened->partial());
    report.cases.push_back(std::move(*result));
    progress.tick();
    opened.reset();  // its files are closed
  }
  close_lanes(report, looked->others, cases.size(), partial);
  report.wall_seconds = now() - begin;
  report.complete = !interrupted() && looked->others.size() == 0;
  if (!interrupted()) report.missing = missing_text(looked->others, cases.size());
  return report;
}

std::string unanswered_text(const std::string& folder, const Unjudged& others) {
  if (others.unanswered.size() < 2) return others.unanswered.empty() ? "" : others.unanswered[0];
  return fmt::format(
      "{}: expected the program's answers to all cases of the battery, met none to {} of them; run "
      "the program on each of these folders ({}), then judge {} again",
      folder, others.unanswered.size(), listed(others.folders), telling::shell_path(folder));
}

std::vector<std::string> not_judged(const Report& report) {
  ByReason skipped;
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks)
      if (check.verdict == Verdict::skipped) skipped.add(check.note, check.check);
  std::vector<std::string> texts;
  for (const auto& [why, checks] : skipped.entries)
    texts.push_back(fmt::format("{} ({})", joined(checks, ", "), why));
  return texts;
}

}  // namespace shardproof::prepared
