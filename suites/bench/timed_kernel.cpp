#include "suites/bench/timed_kernel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/device.hpp"
#include "oracle/run.hpp"

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;

class TimedRank final : public Rank {
 public:
  TimedRank(const Case& line, RankHost& host)
      : line_(line), mesh_(line.mesh()), host_(host), ledger_(*host.state, *host.door) {
    host.state->rank = host.rank, host.state->size = host.size;
    host.state->mesh = &mesh_;
    host.state->trace = host.trace;
  }
  const Case& line() const override { return line_; }
  int world_rank() const override { return host_.rank; }
  int world_size() const override { return host_.size; }
  const Mesh& mesh() const override { return mesh_; }
  Stream stream() const override { return nullptr; }
  Communicator& along(Axis a) override { return along(std::vector<Axis>{a}); }
  Communicator& along(const std::vector<Axis>& axes) override {
    return group(mesh_.group(axes, host_.rank));
  }
  Communicator& world() override { return group(mesh_.group(mesh_.order(), host_.rank)); }
  View workspace(DType dtype, std::vector<int64_t> shape) override {
    workspaces_.push_back(std::make_unique<Buffer>(dtype, std::move(shape)));
    return workspaces_.back()->view();
  }
  void enter(Phase phase) {
    host_.state->phase = phase;
    workspaces_.clear();
  }

 private:
  Communicator& group(std::vector<int> members) {
    auto& c = groups_[members];
    if (!c) {
      Group g;
      g.me = int(std::find(members.begin(), members.end(), host_.rank) - members.begin());
      g.id = group_id(members);
      g.members = members;
      c = std::make_unique<Communicator>(std::move(g), ledger_);
    }
    return *c;
  }
  const Case& line_;
  Mesh mesh_;
  RankHost& host_;
  LedgerDoor ledger_;
  std::map<std::vector<int>, std::unique_ptr<Communicator>> groups_;
  std::vector<std::unique_ptr<Buffer>> workspaces_;
};

std::vector<std::byte> time_on_rank(RankHost& host, std::span<const std::byte> job,
                                    const Registry& registry) {
  const std::string text(reinterpret_cast<const char*>(job.data()), job.size());
  const Case line = parse(text, registry);
  const auto operands = registry.contract(line.contract).operands(line);
  TimedRank rank(line, host);
  std::vector<Buffer> inputs, outputs, cotangents, gradients;
  for (const Operand& o : operands) {
    const auto shape = local_shape(o.shape, o.layout, rank.mesh(), host.rank);
    const DType dtype = o.fixed_dtype ? o.dtype_override : line.dtype();
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
  rank.enter(Phase::forward);
  const auto saved = kernel->forward(rank, views(inputs), views(outputs));
  host.state->phase = Phase::backward;
  kernel->backward(rank, *saved, views(cotangents), views(gradients));
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  rank.enter(Phase::idle);
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
