// How a drift run is told: a block in the terminal, an object for programs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oracle/checks/judging.hpp"
#include "oracle/drift.hpp"
#include "oracle/joined.hpp"
#include "oracle/json.hpp"
#include "oracle/printable.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {
namespace {

using telling::row;

std::string subject_of(const Sighting& s) { return s.of + s.finding.tensor; }

std::string at_text(const Sighting& s) {
  const Finding& f = s.finding;
  const std::vector<int> one{f.rank}, &all = f.ranks.empty() ? one : f.ranks,
                                      &here = f.holders.empty() ? all : f.holders;
  std::string text =
      fmt::format("{}, {}", f.where.empty() ? f.tensor : f.where, judging::ranks_text(here, 0));
  std::string got = judging::number(f.got), want = judging::number(f.want);
  if (got == want) got = fmt::format("{:.17g}", f.got), want = fmt::format("{:.17g}", f.want);
  if (f.numeric)
    text += fmt::format("   got {}   want {}{}   {} of {} elements{}{}", got, want,
                        f.bound > 0 ? fmt::format("   bound {:.2e}", f.bound) : "", f.wrong,
                        f.compared, here == all ? "" : " on " + judging::ranks_text(all, 0),
                        f.pattern.empty() ? "" : ", " + f.pattern);
  if (!f.message.empty()) text += "   (" + f.message + ")";
  return text;
}

// The tensors beside the first one that the same check saw at the same place.
std::string others(const DriftReport& r) {
  std::vector<std::string> names;
  for (const Sighting& s : r.seen)
    if (s.finding.tensor != r.seen[0].finding.tensor &&
        std::find(names.begin(), names.end(), s.finding.tensor) == names.end())
      names.push_back(s.finding.tensor);
  return joined(names, ", ");
}

// Checks by the moment at which they saw it; of the first moment all, in the order of the phases.
std::string who_saw(const DriftReport& r) {
  std::vector<std::string> words, known;
  for (const Sighting& s : r.seen) {
    if (std::find(known.begin(), known.end(), s.check) != known.end()) continue;
    known.push_back(s.check);
    words.push_back(fmt::format("{} ({})", s.check, s.phase));
  }
  std::string text = joined(words, ", ");
  if (r.seen[0].phase != std::string("forward") &&  // hashes are of parameters and their gradients
      std::find(known.begin(), known.end(), "hash of replicas") == known.end())
    text += "; the hashes of replicas agree, so comparing these alone would not have told";
  return text;
}

std::string growth(const DriftReport& r) {
  if (r.distance.empty()) return "";
  const auto& [first, start] = r.distance.front();
  const auto& [last, end] = r.distance.back();
  std::string text = fmt::format("{:.1e} from a run without the fault after step {}", start, first);
  const auto& middle = r.distance[r.distance.size() / 2];
  if (r.distance.size() > 2) text += fmt::format(", {:.1e} after {}", middle.second, middle.first);
  if (last > first) text += fmt::format(", {:.1e} after {}", end, last);
  if (r.replicas_apart > 0) text += fmt::format("; copies lie {:.1e} apart", r.replicas_apart);
  return text + " (rms of all parameters, relative)";
}

std::string loss_text(const DriftReport& r) {
  if (r.loss_told)
    return fmt::format("would have told at step {}, {} late", *r.loss_told,
                       number_of(*r.loss_told - r.seen[0].step, "step"));
  // One step says nothing of how far losses lie apart in a right run.
  const std::string& phase = r.seen[0].phase;
  if (r.distance.size() == 1 && phase != "forward" && phase != "at initialisation")
    return fmt::format(
        "cannot tell yet: that of step {} was taken before the wrong update; more --steps show it",
        r.steps - 1);
  const std::string off = fmt::format("at step {} it is {:.2g} % off a run without the fault",
                                      r.steps - 1, 100 * r.loss_off);
  if (r.distance.size() == 1)
    return fmt::format("{}; more --steps show whether that would have told", off);
  return fmt::format("would not have told: {}, whose own steps lie {:.2g} % apart", off,
                     100 * r.loss_usual);
}

std::string command_of(const DriftLine& line, const DriftOptions& o, int64_t steps,
                       const std::string& program) {
  std::string text = fmt::format("{} drift {} --steps {}", program, line.text(), steps);
  if (o.optimizer != "sgd") text += " --optimizer " + o.optimizer;
  return text;
}

std::string compared(const DriftReport& r) {
  const std::string draws = r.draws == 0 ? "" : fmt::format(" and {} drawn elements", r.draws);
  return fmt::format("{} gradients{} {} hashes{} compared", r.gradients,
                     draws.empty() ? " and" : ",", r.hashes, draws);
}

std::string number(double v) { return std::isfinite(v) ? fmt::format("{}", v) : "null"; }
std::string known(bool yes, const std::string& value) { return yes ? value : "null"; }

}  // namespace

namespace {

std::string told(const DriftReport& r, const DriftLine& line, const DriftOptions& o,
                 const std::string& program) {
  const std::string note = r.not_judged.empty() ? "" : row("note", r.not_judged);
  if (!r.drifted() && r.interrupted)
    return fmt::format(
               "INTERRUPTED   {}   after {} of {}, {}: none of these drifts, the rest was "
               "not judged   {:.1f} s\n",
               r.line, r.steps, number_of(r.asked, "step"), compared(r), r.seconds) +
           note;
  if (r.open())
    return fmt::format("NO JUDGEMENT {}   {}, {}   {:.1f} s\n", r.line, number_of(r.steps, "step"),
                       compared(r), r.seconds) +
           row("at", r.why_open()) + note;
  if (!r.drifted())
    return fmt::format(
               "NO DRIFT   {}   {}, {}, worst ratio {:.2g}, loss {:.4g} -> {:.4g}   {:.1f} "
               "s\n",
               r.line, number_of(r.steps, "step"), compared(r), r.worst_ratio, r.first_loss,
               r.last_loss, r.seconds) +
           note;
  if (r.seen.empty())
    return fmt::format("FAILED     {}    the run ended at step {}\n", r.line, r.ended_at) +
           row("at", r.ended) + row("replay", command_of(line, o, r.ended_at + 1, program));
  const Sighting& first = r.seen[0];
  std::string text = fmt::format("DRIFT      {}    step {}, {}: {}\n", r.line, first.step,
                                 first.phase, subject_of(first));
  text += row("at", at_text(first));
  if (!first.finding.means.empty()) text += row("means", first.finding.means);
  if (const std::string more = others(r); !more.empty()) text += row("also", more);
  text += row("seen by", who_saw(r));
  if (const std::string g = growth(r); !g.empty()) text += row("grows", g);
  if (!r.distance.empty()) text += row("loss", loss_text(r));
  if (r.interrupted)
    text += row("ended",
                fmt::format("interrupted after {} of {}", r.steps, number_of(r.asked, "step")));
  if (!r.ended.empty()) text += row("ended", fmt::format("at step {}: {}", r.ended_at, r.ended));
  return text + row("replay", command_of(line, o, first.step + 1, program));
}

}  // namespace

std::string drift_text(const DriftReport& r, const DriftLine& line, const DriftOptions& o,
                       const std::string& program) {
  return telling::printable(told(r, line, o, program));
}

std::string drift_json(const DriftReport& r, const DriftLine& line, const DriftOptions& o,
                       const std::string& program) {
  const Sighting* s = r.seen.empty() ? nullptr : &r.seen[0];
  const Finding none;
  const Finding& f = s ? s->finding : none;
  std::vector<std::string> checks, points;
  for (const Sighting& seen : r.seen)
    if (std::find(checks.begin(), checks.end(), json_text(seen.check)) == checks.end())
      checks.push_back(json_text(seen.check));
  for (const auto& [step, distance] : r.distance)
    points.push_back(fmt::format("[{}, {}]", step, number(distance)));
  const int64_t steps = s ? s->step + 1 : std::max<int64_t>(r.ended_at + 1, r.steps);
  std::vector<std::string> members = {
      "\"schema\": 1",
      "\"line\": " + json_text(r.line),
      fmt::format("\"steps\": {}", r.steps),
      fmt::format("\"complete\": {}", !r.interrupted),
      "\"drift\": " +
          known(r.drifted() || (!r.interrupted && !r.open()), r.drifted() ? "true" : "false"),
      "\"first_step\": " + known(s || r.ended_at >= 0, std::to_string(s ? s->step : r.ended_at)),
      "\"phase\": " + known(s, s ? json_text(s->phase) : ""),
      "\"parameter\": " + known(s, json_text(f.tensor)),
      "\"rank\": " + known(s && f.rank >= 0, std::to_string(f.rank)),
      fmt::format("\"index\": [{}]", joined(f.index, ", ")),
      "\"got\": " + known(f.numeric, number(f.got)),
      "\"want\": " + known(f.numeric, number(f.want)),
      "\"bound\": " + known(f.numeric, number(f.bound)),
      "\"means\": " + known(s, json_text(f.means)),
      "\"not_judged\": " + known(!r.not_judged.empty(), json_text(r.not_judged)),
      fmt::format("\"seen_by\": [{}]", joined(checks, ", ")),
      fmt::format("\"distance\": [{}]", joined(points, ", ")),
      "\"replicas_apart\": " + number(r.replicas_apart),
      "\"loss_told_at\": " +
          known(r.loss_told.has_value(), std::to_string(r.loss_told.value_or(0))),
      "\"first_loss\": " + number(r.first_loss),
      "\"last_loss\": " + number(r.last_loss),
      "\"worst_ratio\": " + number(r.worst_ratio),
      "\"ended\": " + known(!r.ended.empty(), json_text(r.ended)),
      "\"replay\": " + json_text(command_of(line, o, steps, program)),
      "\"seconds\": " + number(r.seconds)};
  return fmt::format("{{\n  {}\n}}\n", joined(members, ",\n  "));
}

}  // namespace shardproof
