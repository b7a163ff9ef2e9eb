// The self suite of a gate: faults planted in the judge, and the transports' own test.
#include "oracle/self.hpp"

#include <fmt/format.h>

#include <Eigen/Core>
#include <chrono>
#include <set>

#include "oracle/comm/transport_self_test.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/gate_jobs.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/run.hpp"

namespace shardproof {

namespace {

// Most planted faults wait: for a rank that hangs, for a deadline. Side by side they wait together.
constexpr int planted_side_by_side = 6;

// A planted fault's name and what was wrong with its verdict, "" where nothing was.
struct Verdicts final : ResultSink {
  explicit Verdicts(SelfResult& r) : result(r) {}
  void put(const CaseResult&) override {}
  void put(const ControlResult& planted) override {
    ++result.planted;
    if (planted.reason.empty())
      ++result.named;
    else
      result.failures.push_back(planted.name + ": " + planted.reason);
  }
  SelfResult& result;
};

void plant_all(const std::vector<Planted>& planted, int parts, SelfResult& result) {
  Verdicts verdicts(result);
  const auto plant = [&](int part, ResultSink& sink) {
    for (size_t i = size_t(part); i < planted.size(); i += size_t(parts)) {
      if (interrupted()) break;  // what it would find then is the interruption
      ControlResult verdict;
      verdict.name = planted[i].name;
      verdict.reason = planted[i].plant();
      sink.put(verdict);
    }
  };
  if (parts == 1)
    plant(0, verdicts);
  else
    run_parts(parts, plant, verdicts);
}

}  // namespace

SelfResult run_self(const Options& options, const Registry& registry, const std::vector<Due>& due,
                    Worlds& worlds) {
  const auto begin = std::chrono::steady_clock::now();
  SelfResult result;
  plant_all(registry.planted(), options.in_process ? 1 : planted_side_by_side, result);
  // Each transport and world size that is due, before anything is blamed on a primitive.
  std::set<std::pair<std::string, int>> lanes;
  for (const Due& d : due) lanes.emplace(d.line.text("transport"), d.line.world());
  for (const auto& [transport, ranks] : lanes) {
    if (interrupted()) break;
    if (!reason_unavailable(transport, "host", ranks).empty()) continue;
    const double deadline = transport == "nccl" ? device_deadline_seconds : case_deadline_seconds;
    const SelfTestResult t =
        transport_self_test(worlds.get(transport, ranks), options.tier == "nightly", deadline);
    for (const std::string& f : t.failures)
      result.failures.push_back(fmt::format("transport {}.np{}: {}", transport, ranks, f));
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

std::map<std::string, std::string> versions() {
  std::map<std::string, std::string> v;
  v["shardproof"] = SHARDPROOF_VERSION;
  v["compiler"] = __VERSION__;
  v["eigen"] =
      fmt::format("{}.{}.{}", EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION);
  v["fmt"] =
      fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
  return v;
}

}  // namespace shardproof
