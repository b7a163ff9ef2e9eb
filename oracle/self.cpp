// The self suite of a gate: faults planted in the judge, and the transports' own test.
#include "oracle/self.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "oracle/comm/transport_self_test.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/run.hpp"

namespace shardproof {

namespace {

// Most planted faults wait: for ranks to start and to end, for one that hangs, for a deadline. Side
// by side they wait together, and beside cases they cost next to nothing.
constexpr int planted_side_by_side = 6;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Verdicts final : ResultSink {
  explicit Verdicts(SelfResult& r) : result(r) {}
  using ResultSink::put;
  void put(const SelfVerdict& v) override {
    result.planted += v.planted;
    result.named += v.planted && v.failure.empty();
    if (!v.failure.empty()) result.failures.push_back(v.name + ": " + v.failure);
    result.seconds = std::max(result.seconds, seconds_since(begin));
  }
  SelfResult& result;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
};

std::string failure_of(const Planted& fault, double deadline_scale) try {
  return fault.plant(deadline_scale);
} catch (const std::exception& e) {
  return std::string("expected a verdict, met an exception: ") + e.what();
}

void plant(const std::vector<Planted>& planted, double deadline_scale, Turns& turns,
           ResultSink& sink) {
  for (size_t i; (i = turns.next()) < planted.size();) {
    if (interrupted()) break;
    std::string failure = failure_of(planted[i], deadline_scale);
    if (interrupted() && !failure.empty()) break;  // what it has found is the interruption
    sink.put(SelfVerdict{planted[i].name, true, std::move(failure)});
  }
}

using Lanes = std::set<std::pair<std::string, int>>;  // transport, ranks

bool is_forked(const std::string& transport) {
  return transport == "processes" || transport == "threads";
}

void test_transports(const Options& options, const Lanes& lanes, Worlds& worlds, ResultSink& sink) {
  for (const auto& [transport, ranks] : lanes) {
    if (interrupted()) break;
    if (!reason_unavailable(transport, "host", ranks).empty()) continue;
    const std::string name = fmt::format("transport {}.np{}", transport, ranks);
    const double deadline = transport == "nccl" ? device_deadline_seconds : case_deadline_seconds;
    try {
      const SelfTestResult t =
          transport_self_test(worlds.get(transport, ranks), options.tier == "nightly", deadline);
      if (t.failures.empty()) sink.put(SelfVerdict{name, false, ""});
      for (const std::string& failure : t.failures) sink.put(SelfVerdict{name, false, failure});
    } catch (const std::exception& e) {
      sink.put(SelfVerdict{name, false, e.what()});
    }
  }
}

// Each transport and world size that is due.
Lanes lanes_of(const std::vector<Due>& due, bool forked) {
  Lanes lanes;
  for (const Due& d : due)
    if (is_forked(d.line.text("transport")) == forked)
      lanes.emplace(d.line.text("transport"), d.line.world());
  return lanes;
}

}  // namespace

void run_self(const Options& options, const Registry& registry, const std::vector<Due>& due,
              Worlds& worlds, SelfResult& result) {
  Verdicts verdicts(result);
  Turns turns;
  plant(registry.planted(), options.deadline_scale, turns, verdicts);
  for (const bool forked : {true, false})
    test_transports(options, lanes_of(due, forked), worlds, verdicts);
}

std::vector<Part> self_parts(const Options& options, const Registry& registry,
                             const std::vector<Due>& due, Worlds& worlds, SelfResult& result) {
  const auto verdicts = std::make_shared<Verdicts>(result);
  test_transports(options, lanes_of(due, false), worlds, *verdicts);
  std::vector<Part> parts;
  const auto turns = std::make_shared<Turns>();
  for (int i = 0; i < planted_side_by_side && !registry.planted().empty(); ++i)
    parts.push_back({[&options, &registry, turns](ResultSink& sink) {
                       plant(registry.planted(), options.deadline_scale, *turns, sink);
                     },
                     verdicts});
  const Lanes lanes = lanes_of(due, true);
  if (!lanes.empty())
    parts.push_back({[&options, &registry, lanes](ResultSink& sink) {
                       Worlds own(options, registry);
                       test_transports(options, lanes, own, sink);
                     },
                     verdicts});
  return parts;
}

std::map<std::string, std::string> versions() {
  std::map<std::string, std::string> v;
  v["shardproof"] = SHARDPROOF_VERSION;
  v["compiler"] = __VERSION__;
  v["eigen"] = SHARDPROOF_EIGEN_VERSION;
  v["fmt"] =
      fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
  return v;
}

}  // namespace shardproof
