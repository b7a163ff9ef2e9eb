// One rank of a training run. Everything but the kernel is the judge's own and deterministic, so
// that the parent can compute it again from what the rank recorded.
#include "oracle/drift_ranks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <sstream>

#include "fixtures/fills.hpp"
#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/checks/draws.hpp"
#include "oracle/digest/bytes_hash.hpp"
#include "oracle/digest/digest.hpp"
#include "oracle/drawn.hpp"
#include "oracle/float_environment.hpp"
#include "oracle/rank_of_case.hpp"

namespace shardproof::drift {
namespace {

constexpr std::string_view mark = "steps of a training run\n";
constexpr int64_t batches = 4;  // data repeat after so many steps, so that a loss can fall

// value(numbers of the stream, i) for i = first, first + 1, ..
template <class Value>
Whole from_stream(const Case& line, const Operand& o, const Mesh& mesh, const std::string& stream,
                  uint64_t seed, uint64_t first, Value value) {
  Whole w{whole_shape(o.shape, o.layout, mesh), {}};
  const Stream123 numbers(line.seed() + seed, stream);
  w.value.resize(size_t(product(w.shape)));
  for (size_t i = 0; i < w.value.size(); ++i) w.value[i] = value(numbers, first + i);
  return w;
}

struct LineAndLedger {
  Case stepped;
  LedgerDoor ledger;
};

// The rank of a step: the line differs from step to step, the ledger is taken at each step's end.
class TrainingRank final : LineAndLedger, public RankOfCase {
 public:
  TrainingRank(const Case& line, const Contract& contract, RankHost& host)
      : LineAndLedger{line, {*host.state, *host.door}},
        RankOfCase(stepped, contract, *host.state, ledger, nullptr),
        state_(*host.state) {
    state_.rank = host.rank, state_.size = host.size, state_.trace = host.trace;
    accumulating = microbatches(line) > 1;
  }
  void begin(const Case& line, Phase phase) {
    stepped = line;
    accumulating = microbatches(line) > 1;
    state_.mesh = &mesh();
    state_.phase = phase;
  }
  std::vector<LedgerEntry> end_step() {
    workspaces().clear();
    state_.phase = Phase::harness;
    return ledger.take();
  }

 private:
  RankState& state_;  // a host is made anew for every job; what it points to stays
};

struct Tensor {
  Operand operand;
  int number = 0;  // in the contract's order
  std::vector<int64_t> local, indices;
};

class Trainer {
 public:
  Trainer(RankHost& host, const Work& work, const Registry& registry)
      : line_(parse(work.line, registry)),
        contract_(registry.contract(line_.contract)),
        mesh_(line_.mesh()),
        rank_(line_, contract_, host),
        me_(host.rank),
        healthy_(registry.subject(line_.contract, line_.text("subject")).make()),
        optimizer_(work.optimizer, work.rate),
        looks_(looks_at_draws(contract_, line_)) {
    const bool named = !work.control.empty();
    const auto known = [&](const Control& c) {
      return c.contract == line_.contract && c.name == work.control;
    };
    for (const Control& c : registry.controls())
      if (named && known(c) && c.make) broken_ = c.make();
    int number = 0;
    for (const Operand& o : contract_.operands(line_)) {
      Tensor t{o, number++, local_shape(o.shape, o.layout, mesh_, me_),
               whole_indices(o.shape, o.layout, mesh_, me_)};
      (o.role == Operand::output ? outputs_ : inputs_).push_back(std::move(t));
    }
    for (const Tensor& t : inputs_) {
      if (t.operand.role != Operand::parameter) continue;
      const Whole w = initial(line_, t.operand, mesh_);
      std::vector<double>& own = parameters_[t.number];
      for (int64_t i : t.indices) own.push_back(w.value[size_t(i)]);
    }
  }

  ShotRecord step(int64_t number, const Work& work) {
    const bool broken = !work.control.empty() && number >= work.from;
    digests_ = work.digests;
    fault_ = broken && !broken_ ? work.control : "";
    Kernel& kernel = broken && broken_ ? *broken_ : *healthy_;
    ShotRecord record;
    record.status = ShotRecord::ok;
    try {
      if (number == 0) make_parameters(kernel, record);
      if (number > 0 && number == work.from && broken_) make_anew(record);
      train(kernel, number, record);
      record.ledger = rank_.end_step();
      draw(kernel, number, record);
    } catch (const Released& e) {
      record.cause = e.cause;
      stop(record, ShotRecord::released, number, e.what());
    } catch (const Rejected& e) {
      stop(record, ShotRecord::rejected, number, e.what());
    } catch (const Infrastructure& e) {
      stop(record, ShotRecord::infrastructure, number, e.what());
    } catch (const std::exception& e) {
      stop(record, ShotRecord::threw, number, e.what());
    }
    std::vector<LedgerEntry> last = rank_.end_step();
    if (record.ledger.empty()) record.ledger = std::move(last);  // of a step that stopped half-way
    return record;
  }

 private:
  static void stop(ShotRecord& r, ShotRecord::Status status, int64_t step, const char* text) {
    r.status = status, r.step = int(step), r.text = text;
  }

  // What a kernel's own initialisation makes of the parameters; empty where it has none.
  std::vector<std::vector<double>> made_by(Kernel& kernel) {
    std::vector<Buffer> buffers;
    for (const Tensor& t : inputs_)
      if (t.operand.role == Operand::parameter)
        buffers.emplace_back(stored_type(line_, t.operand), t.local);
    rank_.begin(line_, Phase::init);
    const bool own = kernel.init(rank_, views(buffers));
    rank_.begin(line_, Phase::harness);
    std::vector<std::vector<double>> made;
    for (const Buffer& b : buffers)
      if (own) made.push_back(to_doubles(b.view()));
    return made;
  }

  void make_parameters(Kernel& kernel, ShotRecord& record) {
    const auto made = made_by(kernel);
    size_t next = 0;
    for (auto& [number, values] : parameters_)
      if (!made.empty()) values = made[next++];
    keep_start(record);
  }

  // A broken initialisation from a later step on: what it makes otherwise than the healthy one
  // does.
  void make_anew(ShotRecord& record) {
    const auto due = made_by(*healthy_), made = made_by(*broken_);
    if (made.empty()) return;
    size_t next = 0;
    for (auto& [number, values] : parameters_) {
      if (due.empty() || made[next] != due[next]) values = made[next];
      ++next;
    }
    keep_start(record);
  }

  void keep_start(ShotRecord& record) const {
    for (const Tensor* t : trained())
      keep(*t, at_start, false, filled(*t, parameters_.at(t->number)), record);
  }

  void train(Kernel& kernel, int64_t number, ShotRecord& record) {
    auto gradients = gradient_buffers();
    for (int64_t m = 0; m < microbatches(line_); ++m)
      run_microbatch(kernel, number, m, gradients, record);
    for (const Tensor* t : trained())
      keep(*t, after_backward, true, gradients[size_t(t->number)], record);
    if (fault_ == "gradient_reduced_after_step") {
      update(gradients, record);
      sum_owed(gradients);
    } else {
      sum_owed(gradients);
      for (const Tensor* t : trained())
        keep(*t, before_step, true, gradients[size_t(t->number)], record);
      update(gradients, record);
      return;
    }
    for (const Tensor* t : trained())
      keep(*t, before_step, true, gradients[size_t(t->number)], record);
  }

  // What the kernel draws in this step, on inputs that show it. The calls are none of the step's.
  void draw(Kernel& kernel, int64_t number, ShotRecord& record) {
    const Case first = line_of(line_, number, 0);
    int tag = drawn;
    for (const Look& look : looks_)
      for (int k = 0; k < look.times; ++k) {
        Case line = first;
        for (const auto& [key, value] : draw_keys(contract_, first, k)) line.set(key, value);
        std::vector<Buffer> inputs, outputs;
        for (const Tensor& t : inputs_) inputs.push_back(input_of_look(look, t, number));
        for (const Tensor& t : outputs_)
          outputs.emplace_back(stored_type(line_, t.operand), t.local);
        rank_.begin(line, Phase::forward);
        kernel.forward(rank_, views(inputs), views(outputs));
        rank_.begin(line_, Phase::harness);
        rank_.end_step();
        for (size_t i = 0; i < outputs_.size(); ++i)
          if (outputs_[i].number == look.operand) keep(outputs_[i], tag, false, outputs[i], record);
        ++tag;
      }
  }

  Buffer input_of_look(const Look& look, const Tensor& t, int64_t number) const {
    if (const double* v = given_value(look, t.operand.name))
      return filled(t, std::vector<double>(t.indices.size(), *v));
    if (t.operand.role == Operand::parameter) return filled(t, parameters_.at(t.number));
    return filled(t, own(t, input_of(line_, t.operand, mesh_, number, 0)));
  }

  std::vector<Buffer> gradient_buffers() const {
    std::vector<Buffer> buffers(inputs_.size());
    for (const Tensor& t : inputs_) {
      if (t.operand.role == Operand::index || !t.operand.gradient) continue;
      buffers[size_t(t.number)] = Buffer(stored_type(line_, t.operand, /*gradient=*/true), t.local);
      if (t.operand.role == Operand::parameter && rank_.accumulates())
        fill_from(buffers[size_t(t.number)].view(), std::vector<double>(t.indices.size()));
    }
    return buffers;
  }

  Buffer filled(const Tensor& t, std::span<const double> values) const {
    Buffer b(stored_type(line_, t.operand), t.local);
    fill_from(b.view(), values);
    return b;
  }
  std::vector<double> own(const Tensor& t, const Whole& w) const {
    std::vector<double> values;
    for (int64_t i : t.indices) values.push_back(w.value[size_t(i)]);
    return values;
  }
  static std::vector<View> views(const std::vector<Buffer>& buffers) {
    std::vector<View> v;
    for (const Buffer& b : buffers) v.push_back(b.view());
    return v;
  }

  void run_microbatch(Kernel& kernel, int64_t number, int64_t m, std::vector<Buffer>& gradients,
                      ShotRecord& record) {
    const Case line = line_of(line_, number, m);
    std::vector<Buffer> inputs, outputs, cotangents;
    for (const Tensor& t : inputs_)
      inputs.push_back(t.operand.role == Operand::parameter
                           ? filled(t, parameters_[t.number])
                           : filled(t, own(t, input_of(line_, t.operand, mesh_, number, m))));
    for (const Tensor& t : outputs_) outputs.emplace_back(stored_type(line_, t.operand), t.local);
    rank_.ending = true;
    rank_.begin(line, Phase::forward);
    const auto saved = kernel.forward(rank_, views(inputs), views(outputs));
    for (size_t k = 0; k < outputs_.size(); ++k) {
      cotangents.push_back(cotangent(outputs_[k], outputs[k], number, m));
      keep(outputs_[k], microbatch + int(m), false, outputs[k], record);
      keep(outputs_[k], microbatch + int(m), true, cotangents[k], record);
    }
    rank_.begin(line, Phase::backward);
    rank_.ending = m + 1 == microbatches(line_);
    const auto into = views(gradients);
    kernel.backward(rank_, *saved, views(cotangents), into);
    rank_.begin(line, Phase::finish);
    kernel.finish(rank_, *saved, into);
    rank_.begin(line, Phase::harness);
    for (const Tensor& t : inputs_)
      if (t.operand.role == Operand::input && t.operand.gradient)
        keep(t, microbatch + int(m), true, gradients[size_t(t.number)], record);
  }

  Buffer cotangent(const Tensor& t, const Buffer& output, int64_t number, int64_t m) const {
    const std::vector<double> target = own(t, target_of(line_, t.operand, mesh_, number, m));
    std::vector<double> g = to_doubles(output.view());
    const double n = elements_of_loss(line_, contract_.operands(line_));
    const bool counts = seeds_loss(t.operand, mesh_, me_);
    for (size_t i = 0; i < g.size(); ++i) g[i] = counts ? (g[i] - target[i]) / n : 0;
    return filled(t, g);
  }

  // In double and rounded once; one call for all parameters that owe the same sum.
  void sum_owed(std::vector<Buffer>& gradients) {
    std::map<std::vector<Axis>, std::vector<const Tensor*>> by_axes;
    for (const Tensor* t : trained())
      if (const auto axes = owed(t->operand, mesh_); !axes.empty()) by_axes[axes].push_back(t);
    for (const auto& [axes, tensors] : by_axes) {
      std::vector<double> flat;
      for (const Tensor* t : tensors)
        for (double v : to_doubles(gradients[size_t(t->number)].view())) flat.push_back(v);
      const View own = rank_.workspace(DType::f64, {int64_t(flat.size())});
      fill_from(own, flat);
      rank_.along(axes).all_reduce(own, own);
      flat = to_doubles(own);
      size_t at = 0;
      for (const Tensor* t : tensors) {
        fill_from(gradients[size_t(t->number)].view(),
                  std::span(flat).subspan(at, t->indices.size()));
        at += t->indices.size();
      }
    }
  }

  void update(const std::vector<Buffer>& gradients, ShotRecord& record) {
    bool flip = fault_ == "replica_bit_flip" && me_ == mesh_.world() - 1;
    for (const Tensor* t : trained()) {
      std::vector<double>& p = parameters_[t->number];
      const DType storage = stored_type(line_, t->operand);
      optimizer_.step(t->number, p, to_doubles(gradients[size_t(t->number)].view()), storage);
      Buffer b = filled(*t, p);
      if (flip && !p.empty()) {  // the lowest bit of one element, as a memory fault leaves it
        b.view().data[0] ^= std::byte(1);
        p = to_doubles(b.view());
        flip = false;
      }
      keep(*t, after_step, false, b, record);
      keep_moments(*t, record);
    }
  }

  void keep_moments(const Tensor& t, ShotRecord& record) {
    for (int number : {0, 1}) {
      std::vector<double>& moment = optimizer_.moment(t.number, number);
      if (moment.empty()) continue;
      Buffer b(DType::f64, t.local);
      fill_from(b.view(), moment);
      if (number == 0 && fault_ == "optimizer_state_bit_flip" && me_ == mesh_.world() - 1 &&
          &t == trained()[0]) {
        b.view().data[0] ^= std::byte(1);
        moment = to_doubles(b.view());
      }
      keep(t, first_moment + number, false, b, record);
    }
  }

  std::vector<const Tensor*> trained() const {
    std::vector<const Tensor*> list;
    for (const Tensor& t : inputs_)
      if (t.operand.role == Operand::parameter && t.operand.gradient) list.push_back(&t);
    return list;
  }

  // The tensor, and of parameters its hash.
  void keep(const Tensor& t, int tag, bool gradient, const Buffer& b, ShotRecord& record) const {
    record.results.push_back({tag, t.number, gradient, b.view().dtype, b.view().shape, b.bytes()});
    if (tag >= hash_of || tag < 0) return;
    const std::vector<std::byte> bytes = b.bytes();
    keep_words(t, hash_of + tag, gradient, digest::hash_of_bytes(bytes), record);
    if (!digests_) return;
    const auto hash = digest::hash_of(t.operand.name, b.view().dtype);
    keep_words(t, digest_of + tag, gradient, digest::digest_of(hash, bytes.data(), t.indices),
               record);
  }
  template <class Words>
  static void keep_words(const Tensor& t, int tag, bool gradient, const Words& words,
                         ShotRecord& record) {
    ResultTensor of{tag, t.number, gradient, DType::i64, {int64_t(sizeof words / 8)}, {}};
    of.bytes.resize(sizeof words);
    std::memcpy(of.bytes.data(), &words, sizeof words);
    record.results.push_back(std::move(of));
  }

  Case line_;
  const Contract& contract_;
  Mesh mesh_;
  TrainingRank rank_;
  int me_;
  std::unique_ptr<Kernel> healthy_, broken_;
  Optimizer optimizer_;
  std::vector<Look> looks_;
  std::vector<Tensor> inputs_, outputs_;
  std::map<int, std::vector<double>> parameters_;
  std::string fault_;  // of the training step itself
  bool digests_ = false;
};

}  // namespace

int64_t microbatches(const Case& line) {
  return line.has("microbatches") ? line.at("microbatches") : 1;
}

Case line_of(const Case& line, int64_t step, int64_t m) {
  Case of = line;
  if (of.has("draw")) of.set("draw", std::to_string(step * microbatches(line) + m));
  return of;
}

// Matrices scaled by their last extent, so that a layer keeps the size of what it is given.
Whole initial(const Case& line, const Operand& o, const Mesh& mesh) {
  const double scale = o.shape.size() > 1 ? 1 / std::sqrt(double(o.shape.back())) : 1;
  const DType storage = stored_type(line, o);
  return from_stream(line, o, mesh, o.name, 0, 0, [=](const Stream123& numbers, uint64_t i) {
    return round_to(scale * numbers.normal(i), storage);
  });
}

// The microbatches of a step follow one another in one stream: how a step's rows are cut over dp
// and microbatches does not change them.
namespace {
template <class Value>
Whole of_step(const Case& line, const Operand& o, const Mesh& mesh, int64_t step, int64_t m,
              const std::string& stream, Value value) {
  const uint64_t batch = uint64_t(step % batches),
                 rows = uint64_t(product(whole_shape(o.shape, o.layout, mesh)));
  return from_stream(line, o, mesh, stream, (batch + 1) * 0x9e3779b9, uint64_t(m) * rows, value);
}
}  // namespace

Whole input_of(const Case& line, const Operand& o, const Mesh& mesh, int64_t step, int64_t m) {
  if (o.made) {  // as a feed of its own would have it
    Feed feed;
    feed.seed = line.seed() + uint64_t(step % batches * microbatches(line) + m);
    const auto shape = whole_shape(o.shape, o.layout, mesh);
    return {shape, drawn_whole({line, o, /*cotangent=*/false, feed, stored_type(line, o), shape})};
  }
  if (!o.stated.empty()) return {o.shape, o.stated};
  const DType storage = stored_type(line, o);
  return of_step(line, o, mesh, step, m, o.name, [&](const Stream123& numbers, uint64_t i) {
    if (o.below > 0) return double(numbers.below(i, uint64_t(o.below)));
    const double v = round_to(numbers.normal(i), storage);
    const double drawn = o.magnitude ? std::abs(v) : v;
    return o.through ? round_to(o.through(drawn, /*integer=*/false), storage) : drawn;
  });
}

Whole target_of(const Case& line, const Operand& o, const Mesh& mesh, int64_t step, int64_t m) {
  return of_step(line, o, mesh, step, m, "target of " + o.name,
                 [](const Stream123& numbers, uint64_t i) { return numbers.normal(i); });
}

double elements_of_loss(const Case& line, const std::vector<Operand>& operands) {
  int64_t n = 0;
  for (const Operand& o : operands)
    if (o.role == Operand::output) n += product(denoted_shape(o.shape, o.layout, line.mesh()));
  return double(n * microbatches(line));
}

bool seeds_loss(const Operand& o, const Mesh& mesh, int rank) {
  for (const auto& [axis, placement] : o.layout)
    if (placement.kind == Placement::replicate && mesh.coordinate(rank, axis) > 0) return false;
  return true;
}

std::vector<Axis> owed(const Operand& o, const Mesh& mesh) {
  std::vector<Axis> axes;
  for (const auto& [axis, placement] : o.layout)
    if (placement.kind == Placement::replicate && mesh.size(axis) > 1) axes.push_back(axis);
  return axes;
}

// Adam: Kingma and Ba, "Adam: a method for stochastic optimization", algorithm 1.
void Optimizer::step(int which, std::vector<double>& parameter, std::span<const double> gradient,
                     DType storage) {
  State& s = state(which);
  ++s.steps;
  if (name_ == "sgd") {
    for (size_t i = 0; i < parameter.size(); ++i)
      parameter[i] = round_to(parameter[i] - rate_ * gradient[i], storage);
    return;
  }
  constexpr double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  auto& [mean, square] = s.moments;
  mean.resize(parameter.size()), square.resize(parameter.size());
  const double first = 1 - std::pow(beta1, double(s.steps)),
               second = 1 - std::pow(beta2, double(s.steps));
  for (size_t i = 0; i < parameter.size(); ++i) {
    mean[i] = beta1 * mean[i] + (1 - beta1) * gradient[i];
    square[i] = beta2 * square[i] + (1 - beta2) * gradient[i] * gradient[i];
    const double update = rate_ * (mean[i] / first) / (std::sqrt(square[i] / second) + eps);
    parameter[i] = round_to(parameter[i] - update, storage);
  }
}

Optimizer::State& Optimizer::state(int which) {
  if (states_.size() <= size_t(which)) states_.resize(size_t(which) + 1);
  return states_[size_t(which)];
}

std::vector<double>& Optimizer::moment(int which, int number) {
  return state(which).moments[number];
}

void Optimizer::resume(int which, int64_t steps, std::vector<double> mean,
                       std::vector<double> square) {
  state(which) = {steps, {std::move(mean), std::move(square)}};
}

int64_t steps_of_job(const Case& line, const Contract& contract) {
  const auto operands = contract.operands(line);
  int64_t bytes = 4096 + 4096 * microbatches(line);  // results, and the calls of a step
  for (const Operand& o : operands)
    for (int64_t times = o.role == Operand::parameter ? 6 : 2 * microbatches(line); times > 0;
         --times)
      bytes += 256 + 8 * product(o.shape);
  for (const Look& look : looks_at_draws(contract, line))
    bytes += look.times * (256 + 8 * product(operands[size_t(look.operand)].shape));
  return std::clamp<int64_t>((int64_t(1) << 20) / bytes, 1, 50);
}

std::vector<std::byte> serialize(const Work& w) {
  std::ostringstream text;
  text.precision(17);
  text << mark << w.first << ' ' << w.count << ' ' << w.from << ' ' << w.optimizer << ' ' << w.rate
       << ' ' << w.digests << '\n'
       << w.control << '\n'
       << w.line << '\n';
  const std::string s = text.str();
  const auto* p = reinterpret_cast<const std::byte*>(s.data());
  return {p, p + s.size()};
}

bool is_work(std::span<const std::byte> bytes) {
  return bytes.size() >= mark.size() && std::memcmp(bytes.data(), mark.data(), mark.size()) == 0;
}

Work parse_work(std::span<const std::byte> bytes) {
  bytes = bytes.subspan(mark.size());
  std::istringstream text(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  Work w;
  text >> w.first >> w.count >> w.from >> w.optimizer >> w.rate >> w.digests;
  std::string rest;
  std::getline(text, rest);
  std::getline(text, w.control);
  std::getline(text, w.line);
  return w;
}

// A rank's trainer lives as long as its world: the closure is copied into every rank's process, and
// ranks that share one have a place each.
RankMain rank_main(const Registry& registry) {
  auto trainers = std::make_shared<std::vector<std::unique_ptr<Trainer>>>(256);
  return [&registry, trainers](RankHost& host, std::span<const std::byte> job) {
    FloatEnvironment::judged().restore();
    const Work work = parse_work(job);
    RankRecord record;
    record.rank = host.rank;
    record.number = host.state->case_number;
    auto& trainer = trainers->at(size_t(host.rank));
    if (work.first == 0) trainer = std::make_unique<Trainer>(host, work, registry);
    for (int64_t s = 0; s < work.count; ++s) {
      host.state->shot = uint32_t(work.first + s);
      record.shots.push_back(trainer->step(work.first + s, work));
      if (record.shots.back().status != ShotRecord::ok) break;
    }
    return shardproof::serialize(record);
  };
}

}  // namespace shardproof::drift
