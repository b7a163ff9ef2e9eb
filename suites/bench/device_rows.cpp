#include "suites/bench/device_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <sstream>
#include <utility>

#include "fixtures/sharding.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/cuda/staged_door.hpp"
#include "oracle/device.hpp"
#include "oracle/digest/digest.hpp"
#include "oracle/rank_of_case.hpp"
#include "oracle/run.hpp"

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;

// Halves of random sign and fraction, small numbers in every floating type: a product of equal ones
// takes less power, and where that is the limit less time.
const std::vector<uint16_t>& filling() {
  static const std::vector<uint16_t> halves = [] {
    std::vector<uint16_t> drawn(size_t(1) << 17);
    std::mt19937 random(7);
    for (uint16_t& h : drawn) h = uint16_t(0x3C00 | (random() & 0x83FF));
    return drawn;
  }();
  return halves;
}

class Memory {
 public:
  Memory(const DeviceContext& device, size_t bytes)
      : device_(device), data_(device.allocate(std::max<size_t>(bytes, 8))) {
    const auto first = std::as_bytes(std::span(filling()));
    size_t filled = std::min(bytes, first.size());
    device.copy_in(data_, first.data(), filled, device.stream());
    for (; filled < bytes; filled += std::min(filled, bytes - filled))
      device.copy_within(data_ + filled, data_, std::min(filled, bytes - filled), device.stream());
  }
  ~Memory() {
    if (data_) device_.release(data_);
  }
  Memory(Memory&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&&) = delete;
  std::byte* data() const { return data_; }

 private:
  const DeviceContext& device_;
  std::byte* data_;
};

template <class Work>
double seconds_once(const DeviceContext& device, const Work& work) {
  device.synchronise(device.stream());
  const auto begin = Clock::now();
  work();
  device.synchronise(device.stream());
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The best of a few runs, after some that do not count: a device that had nothing to do is slow at
// first, whatever it is asked for.
template <class Work>
double seconds_of(const DeviceContext& device, int runs, const Work& work) {
  constexpr double warm_up = 0.2;
  for (double spent = 0; spent < warm_up;) spent += seconds_once(device, work);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < runs; ++i) best = std::min(best, seconds_once(device, work));
  return best;
}

// Workspace of a run is that of the run before, in the order in which it is asked for, and neither
// poisoned nor guarded: what a training loop would hand out.
class BenchRank : public RankOfCase {
 public:
  BenchRank(const Case& line, const Contract& contract, RankState& state, Door& door,
            const DeviceContext& device)
      : RankOfCase(line, contract, state, door, &device), device_(device) {}
  void again() { next_ = 0; }
  View workspace(DType dtype, std::vector<int64_t> shape) override {
    const size_t bytes = size_t(product(shape)) * size_of(dtype);
    if (next_ == pool_.size()) pool_.push_back({bytes, Memory(device_, bytes)});
    if (pool_[next_].bytes != bytes)
      throw Infrastructure("a kernel that is timed asks for other workspace in each run");
    return view_of(pool_[next_++].memory.data(), dtype, std::move(shape), Space::device);
  }

 private:
  struct Piece {
    size_t bytes;
    Memory memory;
  };
  const DeviceContext& device_;
  std::vector<Piece> pool_;
  size_t next_ = 0;
};

// Forward and backward of ours on one rank.
double seconds_of_line(const Case& line, RankHost& host, const Registry& registry,
                       const DeviceContext& device, int runs) {
  const Contract& contract = registry.contract(line.contract);
  host.state->rank = host.rank, host.state->size = host.size, host.state->trace = host.trace;
  StagedDoor staged(device, *host.door);  // a group of one is a copy on the device
  LedgerDoor ledger(*host.state, staged);
  BenchRank rank(line, contract, *host.state, ledger, device);
  std::vector<Memory> memory;
  std::vector<View> inputs, outputs, cotangents, gradients;
  const auto placed = [&](const Operand& o) {
    const auto shape = local_shape(o.shape, o.layout, rank.mesh(), host.rank);
    const DType dtype = stored_type(line, o);
    memory.emplace_back(device, size_t(product(shape)) * size_of(dtype));
    return view_of(memory.back().data(), dtype, shape, Space::device);
  };
  for (const Operand& o : contract.operands(line)) {
    const bool output = o.role == Operand::output;
    (output ? outputs : inputs).push_back(placed(o));
    (output ? cotangents : gradients).push_back(placed(o));
  }
  const auto kernel = subject_under_test(line, registry).make();
  return seconds_of(device, runs, [&] {
    rank.again();
    host.state->phase = Phase::forward;
    const auto saved = kernel->forward(rank, inputs, outputs);
    host.state->phase = Phase::backward;
    kernel->backward(rank, *saved, cotangents, gradients);
    host.state->phase = Phase::idle;
  });
}

void check(int code, const char* what) {
  if (code != 0)
    throw DeviceError(code, fmt::format("{}: expected success, met {}: {}", what, code,
                                        device_module().api.text(code)));
}

struct Product {
  int64_t m, n, k;
  bool a_turned, b_turned;
};

// Products one after the other, on memory of their sizes.
double seconds_of_products(const DeviceContext& device, DType dtype, int runs,
                           std::initializer_list<Product> products) {
  int64_t largest = 0;
  for (const Product& p : products) largest = std::max({largest, p.m * p.k, p.k * p.n, p.m * p.n});
  const size_t bytes = size_t(largest) * size_of(dtype);
  const Memory a(device, bytes), b(device, bytes), c(device, bytes);
  return seconds_of(device, runs, [&] {
    for (const Product& p : products)
      check(device_module().bench.gemm(dtype, p.m, p.n, p.k, a.data(), p.a_turned, b.data(),
                                       p.b_turned, c.data(), device.stream()),
            "a bare product");
  });
}

std::string reach(const char* how, double limit, bool reached) {
  return fmt::format("{} {}: {}", how, limit, reached ? "reached" : "NOT REACHED");
}

class Measured {
 public:
  Measured(RankHost& host, const Registry& registry, int64_t scale)
      : host_(host), registry_(registry), scale_(scale), device_(device_of_rank(host)) {}

  static constexpr size_t parts = 5;
  std::vector<Row> part(size_t number) {
    switch (number) {
      case 0:
        digests();
        break;
      case 1:
      case 2:
        linear(number == 1 ? "f32" : "bf16");
        break;
      case 3:
        attention("f32", 3);
        break;
      case 4:
        attention("bf16", 10);
        break;
    }
    return std::move(rows_);
  }

 private:
  void add(const std::string& name, double value, const char* unit, std::string against) {
    rows_.push_back({name, "none", 1, value, unit, std::move(against)});
  }

  void digests() {
    const uint64_t bytes =
        std::max<uint64_t>((uint64_t(4) << 30) / uint64_t(scale_ * scale_), 4096);
    const Memory memory(device_, bytes), sum(device_, sizeof(shardproof_digest));
    const double read = seconds_of(device_, 5, [&] {
      check(
          device_module().bench.sum_of_words(
              memory.data(), bytes / 8, reinterpret_cast<uint64_t*>(sum.data()), device_.stream()),
          "a sum of words");
    });
    add("device_read_bandwidth", double(bytes) / read / 1e9, "GB/s",
        fmt::format("sum of {} KiB of words, best of 5", bytes >> 10));
    shardproof_hash words = digest::hash_of("x", DType::f32), elements = words;
    words.unit = SHARDPROOF_WORD;
    const auto row = [&](const char* name, const shardproof_hash& hash, DigestParts parts,
                         const char* what, double least) {
      const double seconds = seconds_of(device_, 5, [&] {
        device_.digest(memory.data(), bytes / 4, hash, parts,
                       reinterpret_cast<shardproof_digest*>(sum.data()), device_.stream());
      });
      const double ratio = read / seconds;
      add(name, ratio, "ratio",
          fmt::format("{} / device_read_bandwidth{}", what,
                      least > 0 ? "; " + reach("at least", least, ratio >= least) : ""));
    };
    row("device_digest_words", words, DigestParts::one_lane, "one lane of f32 in words", 0.4);
    row("device_digest_two_lanes", words, DigestParts::two_lanes, "two lanes of f32 in words", 0);
    row("device_digest_whole", words, DigestParts::all,
        "two lanes, coverage and counts of f32 in words", 0);
    row("device_digest_elements", elements, DigestParts::all,
        "two lanes, coverage and counts of f32 by element", 0);
  }

  void linear(const std::string& dtype) {
    const int64_t n = 8192 / scale_;
    const Case line = parse(
        fmt::format("linear_column tokens={0} in={0} out={0} dtype={1} device=cuda", n, dtype),
        registry_);
    const auto products = [&] {
      return seconds_of_products(device_, line.dtype(), 5,
                                 {{n, n, n, false, true},    // y = x w^T
                                  {n, n, n, false, false},   // dx = g w
                                  {n, n, n, true, false}});  // dw = g^T x
    };
    // Before and behind: a clock that falls while the device grows warm is no loss of ours.
    const double before = products(), ours = seconds_of_line(line, host_, registry_, device_, 5),
                 ratio = std::min(before, products()) / ours;
    add("device_linear_" + dtype, ratio, "ratio",
        fmt::format("bare products / forward and backward of linear_column at hidden {}; {}", n,
                    reach("at least", 0.95, ratio >= 0.95)));
  }

  // Under a causal mask half of the scores are due: q k, p v; and in the backward q k, g v, ds k,
  // ds q, p g.
  void attention(const std::string& dtype, double most) {
    const int64_t tokens = 8192 / scale_, heads = 16, head_dim = 128, n = 8192 / scale_;
    // Halves are due on the tensor cores: there P and dS are halves too.
    const std::string probs = dtype == "f32" ? "" : " probs=" + dtype;
    const Case line = parse(
        fmt::format("attention_allgather tokens={} heads={} kv_heads=4 head_dim={} mask=causal "
                    "dtype={}{} device=cuda",
                    tokens, heads, head_dim, dtype, probs),
        registry_);
    const double ours = seconds_of_line(line, host_, registry_, device_, 3),
                 square = seconds_of_products(device_, line.dtype(), 5, {{n, n, n, false, true}});
    const double multiplies = 7 * 0.5 * double(tokens * tokens) * double(heads * head_dim),
                 gemms = square * multiplies / (double(n) * double(n) * double(n)),
                 ratio = ours / gemms;
    add("device_attention_" + dtype, ratio, "ratio",
        fmt::format(
            "forward and backward of attention_allgather, seq {}, {} heads, 4 kv heads, "
            "head_dim {}, causal{} / its multiplies at the rate of a product of {} squared; {}",
            tokens, heads, head_dim, probs.empty() ? "" : "," + probs, n,
            reach("at most", most, ratio <= most)));
  }

  RankHost& host_;
  const Registry& registry_;
  const int64_t scale_;
  const DeviceContext& device_;
  std::vector<Row> rows_;
};

// Rows of a rank as lines for the parent, which holds no device.
std::string text_of(const std::vector<Row>& rows) {
  std::string text;
  for (const Row& r : rows)
    text += fmt::format("{}\t{}\t{}\t{}\n", r.name, r.value, r.unit, r.against);
  return text;
}
std::vector<Row> rows_of(const std::string& text) {
  std::vector<Row> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream parts(line);
    std::string name, value, unit, against;
    std::getline(parts, name, '\t'), std::getline(parts, value, '\t');
    std::getline(parts, unit, '\t'), std::getline(parts, against);
    rows.push_back({name, "none", 1, std::stod(value), unit, against});
  }
  return rows;
}

}  // namespace

void device_rows(const Registry& registry, int64_t scale,
                 const std::function<void(const Row&)>& put) {
  if (const std::string missing = device_missing(); !missing.empty())
    throw Infrastructure("expected a device to measure, met none: " + missing);
  WorldSpec spec;
  spec.ranks = 1;
  const auto world = start_world(spec, [&](RankHost& host, std::span<const std::byte> job) {
    const std::string text = text_of(Measured(host, registry, scale).part(size_t(job[0])));
    const auto bytes = std::as_bytes(std::span(text));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
  for (size_t part = 0; part < Measured::parts; ++part) {
    const std::byte job{uint8_t(part)};
    const auto outcomes = world->run(std::span(&job, 1), uint32_t(part), 600);
    if (outcomes[0].end != RankOutcome::finished)
      throw Infrastructure("the rows of devices were not measured: " + outcomes[0].text);
    const auto& record = outcomes[0].record;
    for (const Row& row :
         rows_of(std::string(reinterpret_cast<const char*>(record.data()), record.size())))
      put(row);
  }
}

}  // namespace shardproof
