#include "suites/bench/timed_kernel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/device.hpp"
#include "oracle/rank_of_case.hpp"
#include "oracle/run.hpp"

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::byte> time_on_rank(RankHost& host, std::span<const std::byte> job,
                                    const Registry& registry) {
  const std::string text(reinterpret_cast<const char*>(job.data()), job.size());
  const Case line = parse(text, registry);
  const Contract& contract = registry.contract(line.contract);
  const auto operands = contract.operands(line);
  host.state->rank = host.rank, host.state->size = host.size, host.state->trace = host.trace;
  LedgerDoor ledger(*host.state, *host.door);
  RankOfCase rank(line, contract, *host.state, ledger, nullptr);
  std::vector<Buffer> inputs, outputs, cotangents, gradients;
  for (const Operand& o : operands) {
    const auto shape = local_shape(o.shape, o.layout, rank.mesh(), host.rank);
    const DType dtype = stored_type(line, o);
    const bool output = o.role == Operand::output;
    auto& values = output ? cotangents : inputs;
    values.emplace_back(dtype, shape);
    (output ? outputs : gradients).emplace_back(dtype, shape);
    const Stream123 stream(line.seed(), o.name);
    std::vector<double> drawn(size_t(product(shape)));
    for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = stream.normal(i);
    fill_from(values.back().view(), drawn);
  }
  auto views = [](const std::vector<Buffer>& buffers) {
    std::vector<View> list;
    for (const Buffer& b : buffers) list.push_back(b.view());
    return list;
  };
  const auto kernel = subject_under_test(line, registry).make();
  rank.world().barrier();
  const auto begin = Clock::now();
  host.state->phase = Phase::forward;
  const auto saved = kernel->forward(rank, views(inputs), views(outputs));
  host.state->phase = Phase::backward;
  kernel->backward(rank, *saved, views(cotangents), views(gradients));
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  host.state->phase = Phase::idle;
  std::vector<std::byte> record(sizeof seconds);
  std::memcpy(record.data(), &seconds, sizeof seconds);
  return record;
}

double slowest(World& world, const std::string& line, uint32_t number) {
  const auto outcomes = world.run(std::as_bytes(std::span(line)), number, case_deadline_seconds);
  double most = 0;
  for (const RankOutcome& o : outcomes) {
    if (o.end != RankOutcome::finished || o.record.size() != sizeof(double))
      throw Infrastructure(fmt::format("{} did not finish while it was timed: {}", line, o.text));
    double seconds;
    std::memcpy(&seconds, o.record.data(), sizeof seconds);
    most = std::max(most, seconds);
  }
  return most;
}

}  // namespace

RankMain timed_kernel(const Registry& registry) {
  return [&registry](RankHost& host, std::span<const std::byte> job) {
    return time_on_rank(host, job, registry);
  };
}

double seconds_over(const std::string& line, const std::string& against, const Registry& registry) {
  auto world_of = [&](const std::string& text) {
    WorldSpec spec;
    spec.ranks = parse(text, registry).world();
    return start_world(spec, timed_kernel(registry));
  };
  const auto own = world_of(line), other = world_of(against);
  constexpr uint32_t pairs = 7;
  std::vector<double> ratios;
  for (uint32_t i = 0; i <= pairs; ++i) {
    const double ratio = slowest(*own, line, i + 1) / slowest(*other, against, i + 1);
    if (i > 0) ratios.push_back(ratio);  // the first pair warms up
  }
  std::nth_element(ratios.begin(), ratios.begin() + pairs / 2, ratios.end());
  return ratios[pairs / 2];
}

}  // namespace shardproof
