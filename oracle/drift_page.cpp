// index.html of a drift run: how far the run went from one without the fault, step by step.
#include <fmt/format.h>

#include <algorithm>

#include "oracle/drift.hpp"
#include "oracle/joined.hpp"
#include "oracle/json.hpp"
#include "oracle/json_write.hpp"
#include "oracle/report_page.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

namespace {

using Points = std::vector<std::pair<int64_t, double>>;

constexpr size_t most_points = 2000;  // more than a screen is wide

// Of each stretch of steps the greatest distance; the first and the last step stay.
Points thinned(const Points& points) {
  if (points.size() <= most_points) return points;
  const size_t stretch = (points.size() + most_points - 1) / most_points;
  Points few = {points.front()};
  for (size_t at = 0; at < points.size(); at += stretch) {
    const auto end = points.begin() + std::ptrdiff_t(std::min(at + stretch, points.size()));
    const auto greatest =
        std::max_element(points.begin() + std::ptrdiff_t(at), end,
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    if (greatest->first > few.back().first) few.push_back(*greatest);
  }
  if (few.back().first < points.back().first) few.push_back(points.back());
  return few;
}

std::string sentence(const DriftReport& r) {
  if (r.seen.empty() && !r.ended.empty())
    return fmt::format("The run ended at step {}.", r.ended_at);
  if (r.seen.empty() && r.interrupted)
    return fmt::format("Interrupted after {} of {}; the rest was not judged.", r.steps,
                       number_of(r.asked, "step"));
  if (r.open()) return fmt::format("{}; {}.", number_of(r.steps, "step"), r.why_open());
  if (r.seen.empty())
    return fmt::format("{}; every gradient within its bound, every copy equal.",
                       number_of(r.steps, "step"));
  return fmt::format("Step {}, {}: {} goes wrong first.", r.seen[0].step, r.seen[0].phase,
                     r.seen[0].finding.tensor);
}

std::string facts(const DriftReport& r, const DriftOptions& o) {
  std::vector<std::string> rows;
  const auto add = [&](const char* name, const std::string& told) {
    rows.push_back(json_write::texts({name, told}));
  };
  add("line", r.line);
  add("steps", std::to_string(r.steps));
  add("optimizer", o.optimizer);
  add("compared", fmt::format("{} gradients, {} hashes", r.gradients, r.hashes));
  add("worst ratio", telling::ratio(r.worst_ratio));
  add("loss", fmt::format("{:.4g} -> {:.4g}", r.first_loss, r.last_loss));
  if (!r.distance.empty())
    add("by the loss", r.loss_told ? fmt::format("seen at step {}", *r.loss_told) : "not seen");
  if (r.replicas_apart > 0) add("copies", fmt::format("{:.1e} apart", r.replicas_apart));
  add("time", telling::seconds(r.seconds));
  return json_write::list(rows);
}

}  // namespace

std::string drift_html(const DriftReport& r, const DriftLine& line, const DriftOptions& o,
                       const std::string& program, const std::string& command) {
  const std::string told = drift_text(r, line, o, program);
  const size_t replay = told.rfind("\nreplay");
  std::string call =
      replay == std::string::npos ? command : told.substr(told.find(program, replay));
  while (call.ends_with('\n')) call.pop_back();
  std::vector<std::string> points;
  for (const auto& [step, distance] : thinned(r.distance))
    points.push_back(json_write::list({std::to_string(step), json_write::number(distance)}));
  const std::string word = !r.seen.empty() ? "DRIFT"
                           : r.drifted()   ? "FAILED"
                           : r.interrupted ? "INTERRUPTED"
                           : r.open()      ? "NO JUDGEMENT"
                                           : "NO DRIFT";
  return page_around(json_write::object({{"kind", json_text("drift")},
                                         {"word", json_text(word)},
                                         {"complete", r.interrupted ? "false" : "true"},
                                         {"sentence", json_text(sentence(r))},
                                         {"command", json_text(command)},
                                         {"block", json_text(told)},
                                         {"replay", json_text(call)},
                                         {"distance", json_write::list(points)},
                                         {"facts", facts(r, o)}}));
}

}  // namespace shardproof
