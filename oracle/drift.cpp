// The parent of a training run: evaluates the reference at the ranks' own parameters, step by step,
// and once the run has gone wrong follows it beside one that has not.
#include "oracle/drift.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include "fixtures/sharding.hpp"
#include "oracle/checks/draws.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/patterns.hpp"
#include "oracle/clock.hpp"
#include "oracle/comm/crowd.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/command.hpp"
#include "oracle/cost.hpp"
#include "oracle/device.hpp"
#include "oracle/digest/digest.hpp"
#include "oracle/drift_ranks.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/overflow.hpp"
#include "oracle/run.hpp"

namespace shardproof {
namespace {

using namespace drift;
using digest::BytesHash;
using digest::Digest;

constexpr const char* gradient_check = "gradient against the reference";
constexpr const char* forward_check = "forward against the reference";
constexpr const char* draws_check = "replica check of what is drawn";
constexpr const char* hash_check = "hash of replicas";
constexpr const char* sum_check = "sums of the training step, recomputed";
constexpr const char* update_check = "update of the optimizer, recomputed";

bool is_gradient(int tag) { return tag == after_backward || tag == before_step; }
const char* phase_name(int tag) {
  return tag == after_backward ? "after backward"
         : tag == before_step  ? "before the step"
         : tag == at_start     ? "at initialisation"
                               : "after the step";
}
const char* of_what(int tag) {
  return is_gradient(tag)       ? "gradient of "
         : tag == first_moment  ? "first moment of "
         : tag == second_moment ? "second moment of "
                                : "";
}

// Gradients after the step's own sums: what was partial is there on every rank.
Layout summed(Layout gradient) {
  for (auto& [axis, placement] : gradient)
    if (placement.kind == Placement::partial) placement = I();
  return gradient;
}
Layout layout_at(const Operand& o, int tag) {
  if (!is_gradient(tag)) return o.layout;
  return tag == before_step ? summed(dual(o.layout)) : dual(o.layout);
}

double sum_of_squares(const std::vector<double>& v) {
  double s = 0;
  for (double x : v) s += x * x;
  return s;
}

class Watch {
 public:
  Watch(const DriftLine& line, const DriftOptions& options, const Registry& registry,
        DriftReport& report, double deadline_scale)
      : line_(line.line),
        contract_(registry.contract(line.line.contract)),
        report_(report),
        deadline_scale_(deadline_scale),
        replayed_(options.optimizer, options.rate),
        adam_(options.optimizer == "adam") {
    e_.line = &line_;
    e_.contract = &contract_;
    e_.declared = declared_of(line_, registry);
    e_.mesh = line_.mesh();
    e_.operands = contract_.operands(line_);
    looks_ = looks_at_draws(contract_, line_);
    report_.not_judged = draws_not_judged(looks_);
    for (const Operand& o : e_.operands) e_.inputs += o.role != Operand::output;
    Shot shot;
    shot.feeds[0].fill = Fill::cancelling;  // no statement about random data: deterministic bounds
    e_.shots.assign(1, shot);
    for (int k = 0; k < e_.inputs; ++k)
      before_.push_back(trained(k) ? initial(line_, e_.operands[size_t(k)], e_.mesh) : Whole{});
    moments_.resize(size_t(e_.inputs));
    for (int r = 0; r < e_.mesh.world(); ++r) {
      ranks_.emplace_back(options.optimizer, options.rate);
      for (int k = 0; k < e_.inputs; ++k)
        ranks_.back().parameters.push_back(trained(k) ? local(before_[size_t(k)], k, r)
                                                      : std::vector<double>());
    }
    if (!options.log.empty()) log_ = std::fopen(options.log.c_str(), "w");
    if (!options.log.empty() && !log_)
      throw BadInput(fmt::format("--log: expected a file that can be written, met '{}' ({})",
                                 options.log, std::strerror(errno)));
  }
  ~Watch() { close_log(); }
  Watch(const Watch&) = delete;

  // A disk that is full may say so here only.
  void close_log() {
    if (!log_) return;
    if (std::fclose(log_) != 0) note_log_fault();
    log_ = nullptr;
  }

  // The records of one step, one a rank. False: the run has ended.
  bool see(int64_t step, std::vector<ShotRecord> records) {
    if (ended(step, records) || written_over(step, records)) return false;
    e_.ranks.assign(records.size(), RankRecord{});
    for (size_t r = 0; r < records.size(); ++r) {
      e_.ranks[r].rank = int(r);
      e_.ranks[r].shots.push_back(std::move(records[r]));
    }
    report_.steps = step + 1;
    const bool had_drifted = report_.drifted();
    see_start(step);
    if (!report_.drifted()) {
      judge_forward_and_gradients(step);
      if (!report_.diverged.empty()) return false;
      judge_draws(step);
      judge_hashes(step, after_backward);
      if (report_.seen.empty()) judge_sums(step);
      judge_hashes(step, before_step);
    }
    // The optimizer's state is followed even where the verdict is known.
    judge_update(step, had_drifted);
    for (int tag : {int(after_step), int(first_moment), int(second_moment)})
      if (!had_drifted) judge_hashes(step, tag);
    write_log(step);
    if (report_.drifted()) follow(step);
    const double loss = loss_of_ranks(step);
    if (step == 0) report_.first_loss = loss;
    report_.last_loss = loss;
    remember();
    return true;
  }

 private:
  struct OfRank {
    OfRank(const std::string& optimizer, double rate) : replay(optimizer, rate) {}
    std::vector<std::vector<double>> parameters;  // local, by operand
    Optimizer replay;
  };

  bool trained(int k) const {
    const Operand& o = e_.operands[size_t(k)];
    return o.role == Operand::parameter && o.gradient;
  }
  std::vector<double> local(const Whole& w, int k, int rank) const {
    const Operand& o = e_.operands[size_t(k)];
    std::vector<double> values;
    for (int64_t i : whole_indices(o.shape, o.layout, e_.mesh, rank))
      values.push_back(w.value[size_t(i)]);
    return values;
  }
  std::vector<double> values(int rank, int tag, int operand, bool gradient) const {
    std::vector<double> v;
    if (const ResultTensor* t = e_.result(rank, 0, tag, operand, gradient)) judging::read(*t, v);
    return v;
  }
  // What the ranks hold, as a whole; of copies the first rank's.
  Whole gathered(int tag, int operand, bool gradient, const Layout& layout) const {
    const Operand& o = e_.operands[size_t(operand)];
    Whole w{whole_shape(o.shape, layout, e_.mesh), {}};
    w.value.resize(size_t(product(w.shape)));
    for (int r = e_.mesh.world(); r-- > 0;) {
      const auto at = whole_indices(o.shape, layout, e_.mesh, r);
      const auto v = values(r, tag, operand, gradient);
      for (size_t i = 0; i < at.size() && i < v.size(); ++i) w.value[size_t(at[i])] = v[i];
    }
    return w;
  }
  std::vector<Whole> inputs_of(int64_t step, int64_t m,
                               const std::vector<Whole>& parameters) const {
    std::vector<Whole> in;
    for (int k = 0; k < e_.inputs; ++k)
      in.push_back(trained(k) ? parameters[size_t(k)] : input_or_parameter(step, m, k));
    return in;
  }
  Whole input_or_parameter(int64_t step, int64_t m, int k) const {
    const Operand& o = e_.operands[size_t(k)];
    return o.role == Operand::parameter ? initial(line_, o, e_.mesh)
                                        : input_of(line_, o, e_.mesh, step, m);
  }

  // Throws where the harness failed: nobody is to blame for that.
  bool ended(int64_t step, const std::vector<ShotRecord>& records) {
    for (const ShotRecord& r : records)
      if (r.status == ShotRecord::infrastructure || r.status == ShotRecord::too_small)
        throw Infrastructure(r.text);
    int blamed = -1;
    for (size_t r = 0; r < records.size(); ++r) {
      if (records[r].status == ShotRecord::ok) continue;
      if (blamed < 0 || records[size_t(blamed)].status == ShotRecord::released) blamed = int(r);
    }
    if (blamed < 0) return false;
    report_.ended = fmt::format("rank {} {}", blamed, how_it_ended(records[size_t(blamed)]));
    report_.ended_at = step;
    return true;
  }

  // A call waits for its peers up to a deadline of its own: they may only be slow.
  std::string how_it_ended(const ShotRecord& r) const {
    std::string text = judging::what_ended(r);
    const size_t line = std::min(text.find('\n'), text.size());
    if (r.status == ShotRecord::released && r.cause == Released::deadline &&
        text.find("--deadline-scale") == std::string::npos)
      text.insert(line, hung_or_slow_text(crowding(), deadline_scale_));
    return text;
  }

  // Ranks share their memory with the kernel: of a record that no rank can make nothing is read.
  bool written_over(int64_t step, const std::vector<ShotRecord>& records) {
    for (size_t r = 0; r < records.size(); ++r)
      if (!fits(records[r], int(r))) {
        report_.ended = fmt::format(
            "rank {} handed in a record that does not fit the step: its memory was overwritten", r);
        report_.ended_at = step;
        return true;
      }
    return false;
  }
  // Every tensor is as long as the rank's part of it, and what each step gives is there.
  bool fits(const ShotRecord& record, int rank) const {
    std::set<std::pair<int, int>> there;  // tag and operand
    for (const ResultTensor& t : record.results) {
      if (t.operand < 0 || size_t(t.operand) >= e_.operands.size() || t.dtype > DType::i32)
        return false;
      if (t.step >= hash_of && t.step < microbatch) continue;  // words of a size that is looked at
      const Operand& o = e_.operands[size_t(t.operand)];
      const Layout layout = t.step >= microbatch && t.gradient ? dual(o.layout)
                            : t.step >= 0 && t.step < hash_of  ? layout_at(o, t.step)
                                                               : o.layout;
      const size_t elements = size_t(product(local_shape(o.shape, layout, e_.mesh, rank)));
      if (t.bytes.size() != elements * size_of(t.dtype)) return false;
      if (t.gradient == is_gradient(t.step)) there.emplace(t.step, t.operand);
    }
    for (int k = 0; k < e_.inputs; ++k)
      for (int tag : {int(after_backward), int(before_step), int(after_step)})
        if (trained(k) && !there.contains({tag, k})) return false;
    return true;
  }

  void add(const char* check, int64_t step, const char* phase, Finding f, const Operand& o,
           const char* of) {
    f.tensor = o.name;
    report_.seen.push_back({check, step, phase, std::move(f), of});
  }

  // Parameters are made in the first step, and again where a broken initialisation begins to act.
  void see_start(int64_t step) {
    bool made = false;
    for (int k = 0; k < e_.inputs; ++k) {
      if (!trained(k) || !e_.result(0, 0, at_start, k, false)) continue;
      made = true;
      before_[size_t(k)] = gathered(at_start, k, false, e_.operands[size_t(k)].layout);
      for (int r = 0; r < e_.mesh.world(); ++r)
        ranks_[size_t(r)].parameters[size_t(k)] = values(r, at_start, k, false);
    }
    if (made && !report_.drifted()) judge_hashes(step, at_start);
  }

  // ---- The reference at the ranks' own parameters

  void judge_forward_and_gradients(int64_t step) {
    std::vector<std::vector<Whole>> kept;
    std::vector<std::vector<Gauge>> gauges(static_cast<size_t>(microbatches(line_)));
    for (int64_t m = 0; m < microbatches(line_); ++m) {
      const Case line = line_of(line_, step, m);
      const auto in = inputs_of(step, m, before_);
      std::vector<Gauge> output_gauges;
      const auto out = contract_.forward(line, in, &output_gauges);
      std::vector<Whole> cotangents;
      for (size_t k = 0; k < out.size(); ++k) {
        const int operand = e_.inputs + int(k);
        const Operand& o = e_.operands[size_t(operand)];
        if (diverges(step, o, out[k], false)) return;
        if (!report_.drifted())
          judge_output(step, m, operand, out[k], judging::gauge_of(output_gauges, k));
        cotangents.push_back(gathered(microbatch + int(m), operand, true, dual(o.layout)));
      }
      kept.push_back(contract_.backward(line, in, cotangents, &gauges[size_t(m)]));
      for (int k = 0; k < e_.inputs; ++k)
        if (e_.operands[size_t(k)].gradient &&
            diverges(step, e_.operands[size_t(k)], kept.back()[size_t(k)], true))
          return;
      if (!report_.drifted()) judge_input_gradients(step, m, kept.back(), gauges[size_t(m)]);
    }
    if (!report_.seen.empty() && report_.seen[0].phase == "forward") return;
    for (int k = 0; k < e_.inputs; ++k) {
      if (!trained(k)) continue;
      Whole want = kept[0][size_t(k)];
      std::vector<Addend> parts;
      for (size_t m = 0; m < kept.size(); ++m) {
        const Whole& g = kept[m][size_t(k)];
        for (size_t i = 0; m > 0 && i < g.value.size(); ++i) want.value[i] += g.value[i];
        parts.push_back({e_.shots[0].feeds[0], &g, &judging::gauge_of(gauges[m], size_t(k))});
      }
      const Operand& o = e_.operands[size_t(k)];
      const auto bound = parts.size() == 1 ? bound_of(e_, o, true, want, *parts[0].gauge)
                                           : bound_of_sum(e_, o, parts);
      judge_against(step, after_backward, k, true, want, bound, gradient_check, "after backward");
    }
  }

  // Whether the truth is so large that a right kernel has infinities on its way to it: nobody is to
  // blame for them. What was wrong before is told all the same.
  bool diverges(int64_t step, const Operand& o, const Whole& want, bool gradient) {
    if (report_.drifted() || !is_float(e_.dtype_of(o))) return false;
    const DType type = least_range(types_of_result(e_, o, gradient));
    const double most = std::max(std::sqrt(largest_of(type)), 4096.0);
    const auto beyond = std::find_if(want.value.begin(), want.value.end(),
                                     [&](double v) { return !(std::abs(v) <= most); });
    if (beyond == want.value.end()) return false;
    report_.steps = step;
    report_.diverged = fmt::format(
        "the training diverges: in step {} the {} of the reference is {}, more than a kernel in {} "
        "can be held to; use {}smaller extents",
        step, judging::tensor_name(o, gradient), judging::number(*beyond), name(type),
        adam_ ? "" : "--optimizer adam or ");
    return true;
  }

  void judge_input_gradients(int64_t step, int64_t m, const std::vector<Whole>& want,
                             const std::vector<Gauge>& gauges) {
    for (int k = 0; k < e_.inputs; ++k) {
      const Operand& o = e_.operands[size_t(k)];
      if (o.role != Operand::input || !o.gradient) continue;
      judge_against(step, microbatch + int(m), k, true, want[size_t(k)],
                    bound_of(e_, o, true, want[size_t(k)], judging::gauge_of(gauges, size_t(k))),
                    gradient_check, "after backward");
    }
  }

  void judge_output(int64_t step, int64_t m, int operand, const Whole& want, const Gauge& gauge) {
    judge_against(step, microbatch + int(m), operand, false, want,
                  bound_of(e_, e_.operands[size_t(operand)], false, want, gauge), forward_check,
                  "forward");
  }

  void judge_against(int64_t step, int tag, int operand, bool gradient, const Whole& want,
                     const std::function<double(int64_t)>& bound, const char* check,
                     const char* phase) {
    const Operand& o = e_.operands[size_t(operand)];
    Compared c = compare(e_, 0, tag, operand, gradient, want, bound);
    report_.gradients += gradient;
    if (!c.finding) report_.worst_ratio = std::max(report_.worst_ratio, c.worst_ratio);
    if (!c.finding && c.unbounded > 0 && report_.without_bound.empty())
      report_.without_bound = judging::without_bound(judging::tensor_name(o, gradient));
    if (c.finding)
      add(check, step, phase, std::move(*c.finding), o, gradient ? "gradient of " : "");
  }

  // ---- What the kernel draws: equal on copies, different on shards

  // Told before what the reference saw in the same step: it is the cause.
  void judge_draws(int64_t step) {
    judging::Agreement draws = judging::same_draws(e_, looks_, 0, drawn);
    report_.draws += draws.compared;
    std::vector<Sighting> seen;
    for (Finding& f : draws.findings)
      seen.push_back({draws_check, step, "forward", std::move(f), ""});
    report_.seen.insert(report_.seen.begin(), seen.begin(), seen.end());
  }

  // ---- Hashes of what has to be equal

  void judge_hashes(int64_t step, int tag) {
    if (!report_.seen.empty() && report_.seen[0].phase != phase_name(tag)) return;
    for (int k = 0; k < e_.inputs; ++k) {
      if (!trained(k)) continue;
      const Operand& o = e_.operands[size_t(k)];
      if (!e_.result(0, 0, tag, k, is_gradient(tag))) continue;  // an optimizer without moments
      const Layout layout = layout_at(o, tag);
      std::vector<BytesHash> hashes;
      for (int r = 0; r < e_.mesh.world(); ++r)
        hashes.push_back(words<BytesHash>(r, hash_of + tag, k, is_gradient(tag)));
      ++report_.hashes;
      const auto apart = digest::parted(e_.mesh, layout, hashes);
      if (apart.empty()) continue;
      add(hash_check, step, phase_name(tag), parting(tag, k, layout, apart, hashes), o,
          of_what(tag));
    }
  }

  // A hash or digest as a rank recorded it.
  template <class Words>
  Words words(int rank, int tag, int k, bool gradient) const {
    Words w{};
    const ResultTensor* t = e_.result(rank, 0, tag, k, gradient);
    if (t && t->bytes.size() == sizeof w) std::memcpy(&w, t->bytes.data(), sizeof w);
    return w;
  }

  // The first parted rank beside one that holds a copy of the same elements.
  Finding parting(int tag, int k, const Layout& layout, const std::vector<int>& apart,
                  const std::vector<BytesHash>& hashes) const {
    const bool gradient = is_gradient(tag);
    const ResultTensor* got = e_.result(apart[0], 0, tag, k, gradient);
    const auto held_by = [&](int r) {
      return whole_indices(e_.operands[size_t(k)].shape, layout, e_.mesh, r);
    };
    const auto own = held_by(apart[0]);
    Finding f;
    for (int r = 0; r < e_.mesh.world(); ++r) {
      if (hashes[size_t(r)] == hashes[size_t(apart[0])] || held_by(r) != own) continue;
      const ResultTensor* want = e_.result(r, 0, tag, k, gradient);
      if (got && want) f = judging::difference(e_, {got, apart[0]}, {want, r});
      f.message = judging::parting_text(apart, apart[0], r, f.message);
      break;
    }
    f.rank = apart[0];
    f.ranks = apart;
    f.holders.clear();
    for (int r : apart)
      if (held_by(r) == own) f.holders.push_back(r);
    f.means = gradient ? "copies of a parameter are about to be updated with different gradients: "
                         "a sum over their ranks is missing, or each made its own"
              : tag == at_start ? "copies of a parameter were made from streams of their own: they "
                                  "start apart, and equal gradients keep them apart"
              : tag == after_step ? "copies of a parameter are no longer equal"
                                  : "the optimizer's state is no longer equal on the ranks that "
                                    "hold this parameter: their next updates part";
    return f;
  }

  // ---- What the training step itself does, computed again

  void judge_sums(int64_t step) {
    for (int k = 0; k < e_.inputs; ++k) {
      if (!trained(k)) continue;
      const Operand& o = e_.operands[size_t(k)];
      const auto axes = owed(o, e_.mesh);
      for (int r = 0; r < e_.mesh.world(); ++r) {
        std::vector<double> due = values(r, after_backward, k, true);
        if (!axes.empty()) {
          std::fill(due.begin(), due.end(), 0.0);
          bool first = true;
          for (int member : e_.mesh.group(axes, r)) {
            const auto part = values(member, after_backward, k, true);
            for (size_t i = 0; i < due.size(); ++i) due[i] = first ? part[i] : due[i] + part[i];
            first = false;
          }
          const DType type = e_.result(r, 0, after_backward, k, true)->dtype;
          for (double& v : due) v = round_to(v, type);
        }
        if (recomputed(step, before_step, k, r, due, sum_check,
                       "the gradient that the step is about to spend is not the sum of the ranks' "
                       "gradients"))
          break;
      }
    }
  }

  void judge_update(int64_t step, bool quiet) {
    for (int k = 0; k < e_.inputs; ++k) {
      if (!trained(k)) continue;
      bool told =
          quiet || (!report_.seen.empty() && report_.seen[0].phase != phase_name(after_step));
      for (int r = 0; r < e_.mesh.world(); ++r) {
        std::vector<double> due = ranks_[size_t(r)].parameters[size_t(k)];
        ranks_[size_t(r)].replay.step(k, due, values(r, before_step, k, true),
                                      e_.dtype_of(e_.operands[size_t(k)]));
        if (!told)
          told = recomputed(step, after_step, k, r, due, update_check,
                            "the parameter is not what the optimizer makes of the summed gradient: "
                            "it was updated before the sum, or written to since");
        for (int number : {0, 1})
          if (!told && e_.result(r, 0, first_moment + number, k, false))
            told = recomputed(step, first_moment + number, k, r,
                              ranks_[size_t(r)].replay.moment(k, number), update_check,
                              "the optimizer's state is not what the gradients make of it: it was "
                              "written to since");
        ranks_[size_t(r)].parameters[size_t(k)] = values(r, after_step, k, false);
      }
    }
  }

  // Whether what the rank holds differs from what is due; then it is told.
  bool recomputed(int64_t step, int tag, int k, int rank, const std::vector<double>& due,
                  const char* check, const char* means) {
    const Operand& o = e_.operands[size_t(k)];
    const auto got = values(rank, tag, k, is_gradient(tag));
    int64_t wrong = 0, worst = -1;
    double off = -1;
    for (size_t i = 0; i < due.size(); ++i) {
      if (got[i] == due[i] || (std::isnan(got[i]) && std::isnan(due[i]))) continue;
      ++wrong;
      const double apart = std::isfinite(got[i] - due[i]) ? std::abs(got[i] - due[i]) : INFINITY;
      if (apart > off) off = apart, worst = int64_t(i);
    }
    if (wrong == 0) return false;
    const Layout layout = layout_at(o, tag);
    const int64_t at = whole_indices(o.shape, layout, e_.mesh, rank)[size_t(worst)];
    Finding f;
    f.numeric = true;
    f.got = got[size_t(worst)], f.want = due[size_t(worst)], f.error = off, f.ratio = INFINITY;
    f.rank = rank, f.ranks = {rank};
    f.wrong = wrong, f.compared = int64_t(due.size());
    f.where = index_text(o.name, at, o.shape, layout, e_.mesh, false);
    f.index = judging::coordinates(at, whole_shape(o.shape, layout, e_.mesh));
    f.means = means;
    add(check, step, phase_name(tag), std::move(f), o, of_what(tag));
    return true;
  }

  // ---- Beside a run that has not drifted

  double loss_of_ranks(int64_t step) const {
    double loss = 0;
    for (int64_t m = 0; m < microbatches(line_); ++m)
      for (size_t k = size_t(e_.inputs); k < e_.operands.size(); ++k)
        loss += loss_of(step, m, e_.operands[k],
                        gathered(microbatch + int(m), int(k), false, e_.operands[k].layout));
    return loss;
  }
  double loss_of(int64_t step, int64_t m, const Operand& o, const Whole& y) const {
    const Whole t = target_of(line_, o, e_.mesh, step, m);
    double sum = 0;
    for (size_t i = 0; i < y.value.size(); ++i)
      sum += (y.value[i] - t.value[i]) * (y.value[i] - t.value[i]);
    return sum / (2 * elements_of_loss(line_, e_.operands));
  }

  // One step of one process; the loss before it.
  double advance(int64_t step) {
    double loss = 0;
    std::vector<Whole> sum(static_cast<size_t>(e_.inputs));
    for (int64_t m = 0; m < microbatches(line_); ++m) {
      const Case line = line_of(line_, step, m);
      const auto in = inputs_of(step, m, twin_);
      const auto out = contract_.forward(line, in, nullptr);
      std::vector<Whole> cotangents;
      for (size_t k = 0; k < out.size(); ++k) {
        const Operand& o = e_.operands[size_t(e_.inputs) + k];
        loss += loss_of(step, m, o, out[k]);
        cotangents.push_back(cotangent(step, m, o, out[k]));
      }
      const auto gradients = contract_.backward(line, in, cotangents, nullptr);
      for (size_t k = 0; k < sum.size(); ++k) {
        if (sum[k].value.empty())
          sum[k] = gradients[k];
        else
          for (size_t i = 0; i < sum[k].value.size(); ++i) sum[k].value[i] += gradients[k].value[i];
      }
    }
    for (int k = 0; k < e_.inputs; ++k)
      if (trained(k)) replayed_.step(k, twin_[size_t(k)].value, sum[size_t(k)].value, DType::f64);
    return loss;
  }

  // The whole (stacked) cotangent: of copies that ranks use alone only the first counts.
  Whole cotangent(int64_t step, int64_t m, const Operand& o, const Whole& y) const {
    const Layout layout = dual(o.layout);
    Whole g{whole_shape(o.shape, layout, e_.mesh), {}};
    g.value.resize(size_t(product(g.shape)));
    const Whole t = target_of(line_, o, e_.mesh, step, m);
    const double n = elements_of_loss(line_, e_.operands);
    for (int r = 0; r < e_.mesh.world(); ++r) {
      if (!seeds_loss(o, e_.mesh, r)) continue;
      const auto to = whole_indices(o.shape, layout, e_.mesh, r),
                 from = denoted_indices(o.shape, o.layout, e_.mesh, r);
      for (size_t i = 0; i < to.size(); ++i)
        g.value[size_t(to[i])] = (y.value[size_t(from[i])] - t.value[size_t(from[i])]) / n;
    }
    return g;
  }

  // From the parameters and the optimizer's state with which the ranks began this step.
  void begin_twin(int64_t step) {
    twin_ = before_;
    for (int k = 0; k < e_.inputs; ++k)
      if (const auto& [mean, square] = moments_[size_t(k)]; !mean.empty())
        replayed_.resume(k, step, mean, square);
  }

  void follow(int64_t step) {
    if (twin_.empty()) begin_twin(step);
    const double loss = loss_of_ranks(step), usual = advance(step);
    twin_losses_.push_back(usual);
    double squares = 0, size = 0, apart = 0;
    for (int k = 0; k < e_.inputs; ++k) {
      if (!trained(k)) continue;
      const Operand& o = e_.operands[size_t(k)];
      size += sum_of_squares(twin_[size_t(k)].value);
      // Of each element the copy that is furthest off.
      std::vector<double> furthest(twin_[size_t(k)].value.size()), low(furthest.size(), INFINITY),
          high(furthest.size(), -INFINITY);
      for (int r = 0; r < e_.mesh.world(); ++r) {
        const auto at = whole_indices(o.shape, o.layout, e_.mesh, r);
        const auto& own = ranks_[size_t(r)].parameters[size_t(k)];
        for (size_t i = 0; i < at.size(); ++i) {
          const size_t j = size_t(at[i]);
          furthest[j] = std::max(furthest[j], std::abs(own[i] - twin_[size_t(k)].value[j]));
          low[j] = std::min(low[j], own[i]), high[j] = std::max(high[j], own[i]);
        }
      }
      for (size_t j = 0; j < low.size(); ++j) apart = std::max(apart, high[j] - low[j]);
      squares += sum_of_squares(furthest);
    }
    report_.distance.emplace_back(step, std::sqrt(squares / std::max(size, 1e-300)));
    report_.replicas_apart = apart;

    // What is usual: how far the losses of the last 8 steps of the other run lie apart.
    const size_t last = std::min<size_t>(twin_losses_.size(), 8);
    const auto [least, most] =
        std::minmax_element(twin_losses_.end() - int64_t(last), twin_losses_.end());
    spread_ = std::max(spread_, *most - *least);
    report_.loss_off = std::abs(loss - usual) / std::abs(usual);
    report_.loss_usual = spread_ / std::abs(usual);
    if (!report_.loss_told && !(std::abs(loss - usual) <= spread_) && twin_losses_.size() > 1)
      report_.loss_told = step;
  }

  void remember() {
    for (int k = 0; k < e_.inputs; ++k) {
      if (!trained(k)) continue;
      const Layout& layout = e_.operands[size_t(k)].layout;
      before_[size_t(k)] = gathered(after_step, k, false, layout);
      for (int number : {0, 1})
        if (e_.result(0, 0, first_moment + number, k, false))
          moments_[size_t(k)][size_t(number)] =
              gathered(first_moment + number, k, false, layout).value;
    }
  }

  void note_log_fault() {
    if (report_.log_fault.empty()) report_.log_fault = std::strerror(errno);
  }

  void write_log(int64_t step) {
    if (!log_) return;
    static const char* const phases[] = {"backward", "gradient", "step", "init"};
    for (int tag : {int(at_start), int(after_backward), int(before_step), int(after_step)})
      for (int k = 0; k < e_.inputs; ++k) {
        if (!trained(k)) continue;
        const Operand& o = e_.operands[size_t(k)];
        std::string axes;
        bool partial = false;
        for (const auto& [axis, placement] : layout_at(o, tag)) {
          if (e_.mesh.size(axis) == 1) continue;
          partial = partial || placement.kind == Placement::partial;
          axes += fmt::format("{}{}:{}{}", axes.empty() ? "" : ",", name(axis),
                              placement.kind == Placement::shard ? 'S' : 'I',
                              copies(placement, e_.mesh.size(axis)));
        }
        if (partial) continue;  // has no digest before it is reduced
        for (int r = 0; r < e_.mesh.world(); ++r) {
          std::string place;
          bool held = true;
          for (const auto& [axis, placement] : layout_at(o, tag)) {
            if (e_.mesh.size(axis) == 1) continue;
            const int at =
                place_of_copy(placement, e_.mesh.size(axis), e_.mesh.coordinate(r, axis));
            held = held && at >= 0;
            place += fmt::format("{}{}", place.empty() ? "" : ",", at);
          }
          if (!held) continue;
          const ResultTensor* t = e_.result(r, 0, tag, k, is_gradient(tag));
          if (!t) continue;
          const auto hash = digest::hash_of(o.name, t->dtype);
          const Digest d = words<Digest>(r, digest_of + tag, k, is_gradient(tag));
          if (shardproof_digest_write(log_, step, phases[tag], o.name.c_str(),
                                      axes.empty() ? "none:I1" : axes.c_str(),
                                      place.empty() ? "0" : place.c_str(), &hash, &d) != 0)
            note_log_fault();
        }
      }
  }

  const Case line_;
  const Contract& contract_;
  DriftReport& report_;
  double deadline_scale_;
  Evidence e_;
  std::vector<Look> looks_;
  std::vector<Whole> before_, twin_;
  std::vector<std::array<std::vector<double>, 2>> moments_;  // before the step, by operand
  std::vector<OfRank> ranks_;
  Optimizer replayed_;
  const bool adam_;
  std::vector<double> twin_losses_;
  double spread_ = 0;
  std::FILE* log_ = nullptr;
};

// What a step costs: a forward and a backward of each microbatch.
Evidence of_a_microbatch(const Case& line, const Registry& registry) {
  Evidence e;
  e.line = &line;
  e.contract = &registry.contract(line.contract);
  e.declared = declared_of(line, registry);
  e.mesh = line.mesh();
  e.operands = e.contract->operands(line);
  Shot shot;
  shot.program = "F0 B0";
  e.shots.assign(1, shot);
  return e;
}

// Steps that ranks make between two looks of the parent, who has to see them all within one
// deadline: as many as take a small part of it, and never many more than were timed.
class StepsOfAJob {
 public:
  StepsOfAJob(const Case& line, const Registry& registry, double deadline_scale)
      : most_(steps_of_job(line, registry.contract(line.contract))),
        of_a_step_((deadline_of(of_a_microbatch(line, registry)) - case_deadline_seconds) *
                   double(microbatches(line))),
        scale_(deadline_scale) {}
  int64_t steps() const { return steps_; }
  double deadline(int64_t steps) const {
    return case_deadline_seconds + double(steps) * of_a_step_;
  }
  void took(int64_t steps, double seconds) {
    constexpr double part = 0.15;
    const double fit = part * case_deadline_seconds * scale_ * double(steps) / seconds;
    steps_ =
        std::clamp<int64_t>(int64_t(std::min(fit, double(most_))), 1, std::min(2 * steps_, most_));
  }

 private:
  int64_t most_, steps_ = 1;
  double of_a_step_, scale_;
};

bool has_parameters(const Contract& contract, const Case& line) {
  const auto operands = contract.operands(line);
  return std::any_of(operands.begin(), operands.end(),
                     [](const Operand& o) { return o.role == Operand::parameter && o.gradient; });
}

// A step whose gradients are results is trained by the contracts beside it.
[[noreturn]] void refuse_untrainable(const Contract& contract, const Registry& registry) {
  std::vector<std::string> others;
  for (const Contract& c : registry.contracts())
    if (c.family == contract.family && c.backward && has_parameters(c, parse(c.name, registry)))
      others.push_back("`" + c.name + "`");
  if (others.empty()) others.push_back("`block`");
  throw BadInput(fmt::format(
      "drift: expected a contract with parameters to train and a backward, met {}{}; {} {}",
      contract.name, contract.backward ? "" : ", whose results are those of one forward",
      joined(others, ", "), others.size() == 1 ? "is one" : "are such"));
}

void require_trainable(const DriftLine& d, const Registry& registry) {
  const Contract& contract = registry.contract(d.line.contract);
  check_legal(d.line, registry);
  check_world(d.line);
  const auto operands = contract.operands(d.line);
  if (!has_parameters(contract, d.line) || !declared_of(d.line, registry).backward)
    refuse_untrainable(contract, registry);
  refuse_too_big(of_a_microbatch(d.line, registry));
  for (const Operand& o : operands)
    for (const auto& [axis, placement] : o.layout)
      if (o.role == Operand::output && placement.kind == Placement::partial)
        throw BadInput(
            fmt::format("drift: expected outputs that a loss can be taken of, met {} of "
                        "{}, which is a partial sum on {}",
                        o.name, d.line.contract, name(axis)));
  for (const Operand& o : operands)
    if (const auto fault = digest::cover_fault(o.name, o.shape, o.layout, d.line.mesh());
        !fault.empty())
      throw BadInput(
          fmt::format("drift: expected layouts of {} that give every element to one rank, "
                      "met {} ({})",
                      d.line.contract, fault, text(o.layout)));
  const std::string& transport = d.line.text("transport");
  if (transport == "nccl")
    throw BadInput("key 'transport': expected processes, threads or mpi in a drift run, met nccl");
  if (!d.line.text("fault").empty())
    throw BadInput("key 'fault': expected control=NAME@STEP in a drift run, met a fault operator");
}

bool is_drift_fault(const std::string& name) {
  return std::any_of(drift_faults().begin(), drift_faults().end(),
                     [&](const auto& f) { return f.first == name; });
}

// A broken kernel of the contract, or a fault of the training step that can show on the line.
void require_control(const DriftLine& d, const Registry& registry) {
  if (is_drift_fault(d.control)) {
    const Mesh mesh = d.line.mesh();
    const auto operands = registry.contract(d.line.contract).operands(d.line);
    const bool owes = std::any_of(operands.begin(), operands.end(), [&](const Operand& o) {
      return o.role == Operand::parameter && !owed(o, mesh).empty();
    });
    if (d.control == "gradient_reduced_after_step" && !owes)
      throw BadInput(
          "key 'control': expected a line whose training step owes a sum (dp or cp above 1) with "
          "gradient_reduced_after_step, met one that owes none");
    return;
  }
  const auto& all = registry.controls();
  const auto known = std::find_if(all.begin(), all.end(), [&](const Control& c) {
    return c.contract == d.line.contract && c.name == d.control;
  });
  std::string faults;
  for (const auto& fault : drift_faults()) faults += (faults.empty() ? "" : " ") + fault.first;
  if (known == all.end()) try {
      registry.control(d.line.contract, d.control);
    } catch (const BadInput& e) {
      throw BadInput(fmt::format("{}; a drift run also takes faults of the training step: {}",
                                 e.what(), faults));
    }
  if (on_device(*known, registry))
    throw BadInput(
        fmt::format("key 'control': expected a broken kernel of the host, met '{}', which runs "
                    "on a device; a training run is on the host",
                    d.control));
  if (!known->make)
    throw BadInput(
        fmt::format("key 'control': expected a broken kernel or a fault of the training "
                    "step ({}), met '{}', which is a fault of collectives",
                    faults, d.control));
}

std::string how_it_ended(const RankOutcome& o, double deadline_scale) {
  if (o.end == RankOutcome::hung)
    return hung_text(o.code) + (o.code ? "" : hung_or_slow_text(crowding(), deadline_scale));
  if (o.end == RankOutcome::exited) return "left the process";
  if (o.text.empty()) return "died";
  return o.text.starts_with("SIG") ? "was killed by " + o.text : o.text;
}

std::string where_it_stood(const RankOutcome& o) {
  if (o.trace.calls_in_phase > 0 ||
      (o.trace.phase != Phase::idle && o.trace.phase != Phase::harness))
    return "; it " + stands(o.trace);
  return o.end == RankOutcome::hung ? " while it made the data of a step"
                                    : " while it waited for its next steps";
}

std::string lost(const std::vector<RankOutcome>& outcomes, double deadline_scale) {
  for (const RankOutcome::End end :
       {RankOutcome::signalled, RankOutcome::exited, RankOutcome::hung, RankOutcome::threw})
    for (size_t r = 0; r < outcomes.size(); ++r)
      if (outcomes[r].end == end)
        return fmt::format("rank {} {}{}", r, how_it_ended(outcomes[r], deadline_scale),
                           where_it_stood(outcomes[r]));
  return "the ranks ended without a record";
}

}  // namespace

const std::vector<std::pair<std::string, std::string>>& drift_faults() {
  static const std::vector<std::pair<std::string, std::string>> faults = {
      {"gradient_reduced_after_step",
       "the optimizer spends the rank's own gradient, and the sum over dp and cp is made after it"},
      {"replica_bit_flip",
       "after an update the lowest bit of one parameter of the last rank flips"},
      {"optimizer_state_bit_flip",
       "after an update the lowest bit of one first moment of the last rank flips (adam)"}};
  return faults;
}

std::string DriftLine::text() const {
  std::string words = print(line);
  if (!control.empty()) words += fmt::format(" control={}@{}", control, from);
  return words;
}

DriftLine parse_drift(std::vector<std::string> words, const Registry& registry) {
  DriftLine d;
  for (auto word = words.begin(); word != words.end(); ++word) {
    if (!word->starts_with("control=")) continue;
    d.control = word->substr(8);
    if (const size_t at = d.control.find('@'); at != std::string::npos) {
      d.from = parse_integer("control", d.control.substr(at + 1), 0, 1'000'000'000);
      d.control.resize(at);
    }
    if (d.control.empty())
      throw BadInput(
          fmt::format("control: expected control=NAME@STEP, met '{}'; `list block` names "
                      "the controls",
                      *word));
    const std::string first = *word;
    const auto rest = words.erase(word);
    if (const auto second =
            std::find_if(rest, words.end(), [](auto& w) { return w.starts_with("control="); });
        second != words.end())
      throw BadInput(
          fmt::format("control: expected it once, since a run is broken in one way at a time, met "
                      "'{}' and '{}'; leave one out",
                      first, *second));
    break;
  }
  d.line = parse_words(words, registry);
  require_trainable(d, registry);
  if (!d.control.empty()) require_control(d, registry);
  return d;
}

DriftReport run_drift(const DriftLine& line, const DriftOptions& options, const Options& common,
                      const Registry& registry, RankMain main) {
  const auto begin = std::chrono::steady_clock::now();
  DriftReport report;
  report.line = line.text();
  report.asked = options.steps;
  DriftOptions given = options;
  if (line.control == "optimizer_state_bit_flip" && given.optimizer != "adam")
    throw BadInput(
        "key 'control': expected an optimizer that has a state with optimizer_state_bit_flip, met "
        "sgd; use --optimizer adam");
  if (given.rate == 0) given.rate = given.optimizer == "adam" ? 0.003 : 0.1;
  Watch watch(line, given, registry, report, common.deadline_scale);
  WorldSpec spec;
  spec.transport = line.line.text("transport");
  spec.ranks = line.line.world();
  spec.deadline_scale = common.deadline_scale;
  spec.in_process = common.in_process && spec.transport == "threads";
  spec.program = common.program;
  spec.mpiexec = common.mpiexec;
  auto world = start_world(spec, main ? std::move(main) : shardproof::rank_main(registry));

  Work work{0,
            0,
            print_canonical(line.line),
            line.control,
            line.from,
            given.optimizer,
            given.rate,
            !given.log.empty()};
  StepsOfAJob pace(line.line, registry, common.deadline_scale);
  uint32_t number = 0;
  for (bool on = true; on && work.first < options.steps && !interrupted();
       work.first += work.count) {
    work.count = std::min(pace.steps(), options.steps - work.first);
    const double begun = now();
    const auto outcomes = world->run(drift::serialize(work), ++number, pace.deadline(work.count));
    pace.took(work.count, now() - begun);
    std::vector<RankRecord> records;
    for (const RankOutcome& o : outcomes)
      if (auto r = o.end == RankOutcome::finished ? parse_record(o.record) : std::nullopt)
        records.push_back(std::move(*r));
    if (records.size() != outcomes.size()) {
      report.ended = lost(outcomes, common.deadline_scale);
      report.ended_at = work.first;
      break;
    }
    for (int64_t s = 0; on && s < work.count; ++s) {
      std::vector<ShotRecord> step;
      for (RankRecord& r : records)
        step.push_back(size_t(s) < r.shots.size() ? std::move(r.shots[size_t(s)]) : ShotRecord{});
      on = watch.see(work.first + s, std::move(step));
    }
  }
  watch.close_log();
  if (interrupted() && report.steps < options.steps) {
    report.interrupted = true;
    report.ended.clear();  // the ranks were told to stop
    report.ended_at = -1;
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace shardproof
