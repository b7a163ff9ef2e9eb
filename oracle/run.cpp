// The flow of a case, written once:
//
//   case line -> case -> global tensors from (seed, tensor name, global index)
//                          |-> reference: double, one process        -> truth, gauges
//                          |-> shards by layout -> subject on p ranks -> local results, traffic
//                                                        truth + results -> checks -> verdict
#include "oracle/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <optional>
#include <sstream>

#include "fixtures/sharding.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/checks/wide.hpp"
#include "oracle/clock.hpp"
#include "oracle/comm/crowd.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/comm/transport_self_test.hpp"
#include "oracle/cost.hpp"
#include "oracle/device.hpp"
#include "oracle/drawn.hpp"
#include "oracle/drift_ranks.hpp"
#include "oracle/fit.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/memory_watch.hpp"
#include "oracle/overflow.hpp"
#include "oracle/too_small.hpp"

namespace shardproof {
namespace {

// The line without what the reference cannot see.
std::string seen_by_reference(const Case& line) {
  std::string key = line.contract;
  for (const auto& [k, v] : line.keys)
    if (k != "transport" && k != "device" && k != "subject" && k != "control" && k != "fault" &&
        (k != "strides" || expands(line)))
      key += ' ' + k + '=' + v;
  return key;
}

// `backward`: gradients are part of it.
std::string truth_key(const Case& line, const Feed& feed, bool backward) {
  std::string key =
      seen_by_reference(line) + fmt::format("|{} {} {} {} {}", int(feed.fill), feed.seed,
                                            feed.range, feed.silent_half, backward);
  for (const auto& b : feed.basis) key += fmt::format(" e{}:{}", b.operand, b.index);
  for (const auto& g : feed.given) {
    uint64_t hash = 0xcbf29ce484222325;
    for (double v : g.value) {
      uint64_t bits;
      std::memcpy(&bits, &v, sizeof bits);
      hash = (hash ^ bits) * 0x100000001b3;
    }
    key += fmt::format(" g{}:{:x}:{}", g.operand, hash, g.value.size());
  }
  return key;
}

bool any_of_values(const std::vector<Whole>& list, bool (*holds)(double)) {
  return std::any_of(list.begin(), list.end(), [&](const Whole& w) {
    return std::any_of(w.value.begin(), w.value.end(), holds);
  });
}

// No subject can be held against NaN. Infinities may be the truth: log-sum-exp over no key is -inf.
void require_a_reference(const Case& line, const Evidence& e, const Truth& truth) {
  const auto has_nan = [](const Whole& w) {
    return !wide::equal(w.value.data(), w.value.data(), w.value.size());
  };
  if (std::none_of(truth.outputs.begin(), truth.outputs.end(), has_nan) &&
      std::none_of(truth.gradients.begin(), truth.gradients.end(), has_nan))
    return;
  const auto not_finite = [](double x) { return !std::isfinite(x); };
  if (any_of_values(truth.inputs, not_finite) || any_of_values(truth.cotangents, not_finite))
    return;
  const auto require = [&](const std::vector<Whole>& list, int first, const char* of) {
    for (size_t i = 0; i < list.size(); ++i)
      if (has_nan(list[i]))
        throw Infrastructure(
            fmt::format("the reference is not finite: expected numbers in {}{} from finite inputs, "
                        "met NaN on {}; "
                        "mend the reference, or choose values that it has a result for",
                        of, e.operands[size_t(first) + i].name, print(line)));
  };
  require(truth.outputs, e.inputs, "");
  require(truth.gradients, 0, "the gradient of ");
}

std::string outcome_text(const RankOutcome& o) {
  switch (o.end) {
    case RankOutcome::signalled:
      return o.text.empty() ? fmt::format("killed by signal {}", o.code) : o.text;
    case RankOutcome::exited:
      return fmt::format("left the process with exit code {}", o.code);
    case RankOutcome::hung:
      return hung_text(o.code);
    case RankOutcome::threw:
      return "threw: " + o.text;
    case RankOutcome::ended:
      return "ended by the parent because another rank failed";
    case RankOutcome::finished:
      return "finished";
  }
  return "";
}

bool threw(const Evidence& e) {
  for (const RankRecord& r : e.ranks)
    for (const ShotRecord& s : r.shots)
      if (s.status == ShotRecord::threw) return true;
  return false;
}

bool died(const RankOutcome& o) {
  return o.end == RankOutcome::signalled || o.end == RankOutcome::exited ||
         o.end == RankOutcome::hung;
}

// Throws what the harness of a rank could not do.
void require_harness(const RankRecord& record) {
  for (const ShotRecord& s : record.shots)
    if (s.status == ShotRecord::infrastructure)
      throw Infrastructure(s.text);
    else if (s.status == ShotRecord::too_small)
      throw MachineTooSmall(s.text);
}

// It keeps others waiting, or is told to them late: then they do not hang by themselves. A death is
// a rank's own, and NCCL tells it to those that it leaves behind.
void require_harness_of_late_ranks(const std::vector<RankOutcome>& outcomes) {
  for (const RankOutcome& o : outcomes)
    if (o.end != RankOutcome::finished && o.end != RankOutcome::hung && o.end != RankOutcome::ended)
      return;
  for (const RankOutcome& o : outcomes)
    if (o.end == RankOutcome::finished)
      if (const auto record = parse_record(o.record)) require_harness(*record);
}

// What one forward and backward asked of other ranks: calls, and bytes of their payloads.
void count_traffic(CaseResult& result, const Evidence& e) {
  result.calls = result.bytes = 0;
  for (const RankRecord& r : e.ranks)
    for (const LedgerEntry& call : r.shots[0].ledger) {
      ++result.calls;
      result.bytes += logical_bytes(call);
    }
}

bool any_hung(const std::vector<RankOutcome>& ranks) {
  return std::any_of(ranks.begin(), ranks.end(),
                     [](const auto& o) { return o.end == RankOutcome::hung; });
}

// Of ranks that were let go when the time of the case was up: the lines below the first.
void tell_where_ranks_stood(Judged& j) {
  for (const RankRecord& r : j.evidence.ranks)
    for (const ShotRecord& s : r.shots) {
      if (s.status != ShotRecord::released || s.cause != Released::overdue) continue;
      std::istringstream lines(s.text);
      std::string line;
      for (std::getline(lines, line); std::getline(lines, line);) j.result.state.push_back(line);
      return;
    }
}

// Every check of a case whose world did not survive it gets the same verdict and one line a rank.
void mark_lost(CaseResult& result, const std::vector<std::string>& checks,
               const std::vector<RankOutcome>& ranks, double deadline_scale) {
  const bool hung = any_hung(ranks);
  for (size_t r = 0; r < ranks.size(); ++r)
    result.state.push_back(fmt::format(
        "rank {:<5} {}{}", r,
        died(ranks[r]) || ranks[r].end == RankOutcome::threw ? outcome_text(ranks[r]) + "; " : "",
        stands(ranks[r].trace)));
  for (const std::string& name : checks) {
    CheckResult c;
    c.check = name;
    c.verdict = hung ? Verdict::hung : Verdict::crashed;
    Finding f;
    f.check = name;
    const bool any_died = std::any_of(ranks.begin(), ranks.end(), died);
    for (size_t r = 0; r < ranks.size(); ++r)
      if (died(ranks[r]) || (!any_died && ranks[r].end == RankOutcome::threw)) {
        if (f.rank < 0) {
          f.rank = int(r);
          const bool hangs = ranks[r].end == RankOutcome::hung && ranks[r].code == 0;
          f.message = fmt::format("rank {} {}{}; it {}", r, outcome_text(ranks[r]),
                                  hangs ? hung_or_slow_text(crowding(), deadline_scale) : "",
                                  stands(ranks[r].trace));
        }
        f.ranks.push_back(int(r));
      }
    c.findings.push_back(std::move(f));
    result.checks.push_back(std::move(c));
  }
}

}  // namespace

std::string lane_of(const Case& line) {
  return (on_device(line) && line.text("transport") != "nccl" ? "staged" : line.text("transport")) +
         ".np" + std::to_string(line.world());
}

std::string stands(const Trace& t) {
  const char* verb = t.state == Trace::waiting ? "waits in"
                     : t.state == Trace::left  ? "left"
                                               : "was in";
  if (t.calls_in_phase == 0)
    return fmt::format("{} {}, before its first call", verb, name(t.phase));
  std::string group;
  const int size = std::clamp<int>(t.group_size, 0, int(std::size(t.members)));
  for (int i = 0; i < size; ++i) group += (i ? "," : "") + std::to_string(t.members[i]);
  return fmt::format("{} {}, {}call {}: {}{}{}, {} x {}, {}{{{}}}, at {}", verb, name(t.phase),
                     t.returned ? "after " : "", t.calls_in_phase, name(t.op),
                     t.reduce == Reduce::none ? "" : std::string(" ") + name(t.reduce),
                     t.op == Op::shift ? fmt::format(" {:+}", t.hop) : "", t.count, name(t.dtype),
                     t.label, group, t.site);
}

Declared declared_of(const Case& line, const Registry& registry) {
  const std::string& control = line.text("control");
  if (!control.empty()) {
    const Control& c = registry.control(line.contract, control);
    if (c.make) return c.declared;
  }
  return subject_under_test(line, registry).declared;
}

std::optional<Contract::Inexact> inexact(const Contract& contract, const Case& line) {
  return contract.inexact ? contract.inexact(line) : std::nullopt;
}

std::string shorter_sums(const Case& line, const Registry& registry) {
  const Contract& contract = registry.contract(line.contract);
  if (const auto other = inexact(contract, line)) return other->use;
  // One that has no range at its default extents either has none at all: its values are no
  // integers.
  Case plain = line;
  plain.set("dtype", "f64");
  for (const Key& key : contract.keys)
    if (key.integer() && !key.fallback.empty()) plain.set(key.name, key.fallback);
  if (!exact_range(contract, plain, {})) return "fill=normal";
  return std::string("fill=normal") + (line.dtype() == DType::f64
                                           ? " or smaller extents"
                                           : ", smaller extents or a wider dtype");
}

std::vector<std::string> due_checks(const Contract& contract, const Case& line,
                                    const Declared& declared,
                                    const std::vector<std::string>& only) {
  std::vector<std::string> due;
  for (const Check& c : all_checks())
    if (c.due(contract, line, declared) &&
        (only.empty() || std::find(only.begin(), only.end(), c.name) != only.end()))
      due.push_back(c.name);
  return due;
}

RankMain rank_main(const Registry& registry) {
  return with_self_test([&registry, train = drift::rank_main(registry)](
                            RankHost& host, std::span<const std::byte> job) {
    return drift::is_work(job) ? train(host, job) : execute(host, job, registry);
  });
}

Worlds::Worlds(const Options& options, const Registry& registry, RankMain main)
    : options_(options), main_(main ? std::move(main) : rank_main(registry)) {}
Worlds::~Worlds() = default;

void Worlds::start(const std::string& transport, int ranks) {
  if (!worlds_.contains({transport, ranks})) get(transport, ranks);
}

World& Worlds::get(const std::string& transport, int ranks, const std::string& line) {
  Kept& kept = worlds_[{transport, ranks}];
  require_whole(kept);
  kept.last = line;
  std::unique_ptr<World>& world = kept.world;
  if (!world || !world->alive()) {
    world.reset();
    WorldSpec spec;
    spec.transport = transport;
    spec.ranks = ranks;
    spec.deadline_scale = options_.deadline_scale;
    spec.in_process = options_.in_process && transport == "threads";
    spec.program = options_.program;
    spec.mpiexec = options_.mpiexec;
    spec.meanwhile = [this] { meanwhile(); };
    world = start_world(spec, main_);
  }
  return *world;
}

void Worlds::require_whole() {
  for (auto& [place, kept] : worlds_) require_whole(kept);
}

void Worlds::require_whole(Kept& kept) {
  const std::string lost = kept.world ? kept.world->lost() : "";
  if (lost.empty()) return;
  const std::string told = fmt::format(
      "{}: {} {}; a thread or a timer that its kernel left behind did it, or somebody else: run it "
      "again",
      kept.world->description(), lost,
      kept.last.empty() ? "between two jobs" : "after its record of " + kept.last + " was in");
  kept.world.reset();
  throw Infrastructure(told);
}

void Worlds::drop(const std::string& transport) {
  std::erase_if(worlds_, [&](const auto& world) { return world.first.first == transport; });
}

void Truths::trim() {
  if (elements_ < int64_t(1) << 23 && kept_.size() < 2048 && of_checks_.size() < 256) return;
  kept_.clear();
  of_checks_.clear();
  elements_ = 0;
}

std::shared_ptr<Kept> Truths::of_checks(const Case& line, const Declared& declared) {
  std::shared_ptr<Kept>& kept =
      of_checks_[seen_by_reference(line) +
                 fmt::format("|{} {} {} {}", declared.truncates, declared.accumulates_in_storage,
                             declared.accumulates_in_f64, declared.multiplies_in_tf32)];
  if (!kept) kept = std::make_shared<Kept>();
  return kept;
}

const Truth& Truths::get(const Case& asked, const Evidence& e, const Feed& feed) {
  const auto declared = type_left_open(asked, e.declared);
  std::optional<Case> as_read;  // where it differs on this feed: copies cost as much as a look
  if (declared || !feed.keys.empty()) as_read = asked;
  if (declared) as_read->set("acc", name(*declared));
  for (const auto& [key, value] : feed.keys) as_read->set(key, value);
  const Case& line = as_read ? *as_read : asked;
  std::string key = truth_key(line, feed, e.declared.backward);
  // Inputs are drawn as the line that was asked says: its sums may be of another type.
  if (line.has("acc") && line.text("acc") != asked.text("acc")) key += "|as declared";
  if (auto found = kept_.find(key); found != kept_.end()) return *found->second;
  const ReferenceWork work;
  auto truth = std::make_unique<Truth>();
  const bool gauges = !exact_data(e, feed);
  truth->inputs = drawn_inputs(e, feed);
  truth->outputs =
      e.contract->forward(line, truth->inputs, gauges ? &truth->output_gauges : nullptr);
  if (e.declared.backward) {
    truth->cotangents = drawn_cotangents(e, feed);
    truth->gradients = e.contract->backward(line, truth->inputs, truth->cotangents,
                                            gauges ? &truth->gradient_gauges : nullptr);
  }
  require_a_reference(line, e, *truth);
  if (e.fed) truth->inputs.clear(), truth->cotangents.clear();  // files hold them
  for (const auto* list : {&truth->inputs, &truth->outputs, &truth->cotangents, &truth->gradients})
    for (const Whole& w : *list) elements_ += int64_t(w.value.size());
  return *(kept_[key] = std::move(truth));
}

Runner::Runner(const Options& options, const Registry& registry, RankMain main)
    : registry_(registry), worlds_(options, registry, std::move(main)), truths_(registry) {}

namespace {

Evidence planned(const Case& line, const Declared& declared, const std::vector<std::string>& checks,
                 const Registry& registry, bool any_size, Evidence e = {}) {
  e.line = &line;
  e.contract = &registry.contract(line.contract);
  e.declared = declared;
  e.mesh = line.mesh();
  e.operands = e.contract->operands(line);
  e.inputs = int(std::count_if(e.operands.begin(), e.operands.end(),
                               [](const Operand& o) { return o.role != Operand::output; }));
  Shot base;
  base.name = "base";
  base.program = e.declared.backward ? "F0 B0" : "F0";
  base.feeds[0].fill = fill_of(line);
  base.feeds[0].seed = line.seed();
  if (base.feeds[0].fill == Fill::integers) {
    const auto range = exact_range(*e.contract, line, declared);
    const std::string advice = range ? "" : shorter_sums(line, registry);
    const auto other = inexact(*e.contract, line);
    if (!range)
      throw BadInput(fmt::format(
          "fill: expected a case whose intermediates are exact integers in {}, met {}, {}; use {}",
          name(line.dtype()), print(line),
          other                     ? "which has " + other->has
          : advice == "fill=normal" ? "which has none"
                                    : "whose sums are too long for it",
          advice));
    base.feeds[0].range = *range;
  }
  e.shots.push_back(std::move(base));
  any_size ? refuse_beyond_memory(e, checks)
           : refuse_too_big(e, checks);  // a plan may hold whole tensors
  for (const std::string& name : checks)
    if (const Check& c = check_named(name); c.plan) c.plan(e, e.shots);
  if (!any_size) refuse_too_big(e);
  return e;
}

}  // namespace

Evidence plan_case(const Case& line, const Declared& declared,
                   const std::vector<std::string>& checks, const Registry& registry,
                   std::shared_ptr<Kept> kept) {
  Evidence e;
  if (kept) e.kept = std::move(kept);
  return planned(line, declared, checks, registry, /*any_size=*/false, std::move(e));
}
Evidence plan_case_of_any_size(const Case& line, const Declared& declared,
                               const std::vector<std::string>& checks, const Registry& registry,
                               bool given_in_files) {
  Evidence e;
  e.given_in_files = given_in_files;
  return planned(line, declared, checks, registry, /*any_size=*/true, std::move(e));
}

Judged Runner::run(const Case& line, const std::vector<std::string>& checks,
                   const std::string& lane) {
  Judged j;
  const double begin = now();
  truths_.trim();
  j.result.line = print(line);
  j.result.canonical = print_canonical(line);
  j.result.replay = "run " + j.result.line + (worlds_.options().in_process ? " --in-process" : "");
  j.result.contract = line.contract;
  j.result.family = registry_.contract(line.contract).family;
  j.result.lane = lane;
  const Declared declared = declared_of(line, registry_);
  j.evidence = plan_case(line, declared, checks, registry_, truths_.of_checks(line, declared));

  Job job;
  job.number = ++number_;
  job.line = j.result.canonical;
  job.shots = j.evidence.shots;
  World& world = worlds_.get(line.text("transport"), line.world(), j.result.line);
  int& hung = hung_[joined(
      std::vector{line.contract, line.text("subject"), line.text("control"), line.text("fault")},
      " ")];
  const bool hasty = hung >= hangs_waited_for;
  const double deadline =
      std::max(deadline_of(j.evidence), on_device(line) ? device_deadline_seconds : 0) *
      (hasty ? haste : 1);
  auto outcomes = world.run(serialize(job), job.number, deadline);

  const auto finished = [](const RankOutcome& o) { return o.end == RankOutcome::finished; };
  if (std::all_of(outcomes.begin(), outcomes.end(), finished)) {
    for (size_t r = 0; r < outcomes.size(); ++r) {
      auto record = parse_record(outcomes[r].record);
      if (!record)
        throw Infrastructure(
            fmt::format("rank {} handed in a record that is not whole ({} bytes) on {}", r,
                        outcomes[r].record.size(), j.result.line));
      if (record->rank != int(r) || record->number != job.number)
        throw Infrastructure(fmt::format(
            "expected the record of rank {} for case {}, met that of rank {} for case {} on {}; "
            "the channel from the ranks mixes records up",
            r, job.number, record->rank, record->number, j.result.line));
      require_harness(*record);
      // Only a write where it had no business leaves such a record: the rank counts as crashed.
      if (const std::string why = misfit(*record, j.evidence); !why.empty()) {
        outcomes[r].end = RankOutcome::signalled;
        outcomes[r].text = fmt::format(
            "handed in a record that does not fit the case: {}; its memory was overwritten", why);
      }
      j.evidence.ranks.push_back(std::move(*record));
    }
  } else {
    require_harness_of_late_ranks(outcomes);
  }
  if (std::all_of(outcomes.begin(), outcomes.end(), finished)) {
    j.completed = true;
    count_traffic(j.result, j.evidence);
    judge(j, checks);
    // What a kernel did to its device may outlive the call that failed: the next case gets other
    // processes.
    if (on_device(line) && threw(j.evidence)) worlds_.drop(line.text("transport"));
  } else {
    // Ranks whose memory was written over judge no further case.
    if (!j.evidence.ranks.empty()) worlds_.drop(line.text("transport"));
    j.evidence.ranks.clear();
    mark_lost(j.result, checks, outcomes, worlds_.options().deadline_scale);
    const bool hangs = any_hung(outcomes);
    hung += hangs;
    if (hangs && hasty)
      j.result.state.push_back(
          fmt::format("note       {} cases of it hung before: this one was given a tenth of the "
                      "deadline; its replay line gives it all",
                      hangs_waited_for));
    if (on_device(line)) worlds_.drop(line.text("transport"));
  }
  j.result.seconds = now() - begin;
  return j;
}

void Runner::judge(Judged& j, const std::vector<std::string>& checks) {
  Evidence& e = j.evidence;
  const Case& line = *e.line;
  e.truth = [this, &line, &e](const Feed& feed) -> const Truth& {
    const Truth& truth = truths_.get(line, e, feed);
    require_in_range(e, feed, truth);
    return truth;
  };
  for (const std::string& name : checks) {
    // Of a case that is not through nothing is told. An outside launcher's ranks are left in order.
    if (interrupted() && worlds_.options().isolated) throw Interrupted();
    worlds_.meanwhile();
    j.result.checks.push_back(check_named(name).judge(e));
  }
  e.truth = nullptr;  // refers to this frame
  tell_where_ranks_stood(j);
}

}  // namespace shardproof
