// What a rank does with a job: draw its shards, call the subject between poisoned and guarded
// buffers, record what came out. It judges nothing.
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "fixtures/fills.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/comm/copies.hpp"
#include "oracle/comm/faults.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/cuda/placed.hpp"
#include "oracle/cuda/staged_door.hpp"
#include "oracle/drawn.hpp"
#include "oracle/float_environment.hpp"
#include "oracle/job.hpp"
#include "oracle/rank_of_case.hpp"
#include "oracle/registry.hpp"
#include "oracle/too_small.hpp"

namespace shardproof {
namespace {

// What a subject says may be of any length, and is told again with every check that it stopped.
std::string begin_of(std::string_view said) {
  constexpr size_t most = 4000;
  if (said.size() <= most) return std::string(said);
  return fmt::format("{}... ({} bytes)", said.substr(0, most), said.size());
}

struct Slot {
  Operand operand;
  Layout layout;  // of the value, or its dual for cotangents and gradients
  DType dtype;
  std::vector<int64_t> local, whole;
  std::vector<int64_t> indices;  // local element -> whole element
  bool cotangent = false;
  std::string name() const { return stream_of(operand, cotangent); }
};

// One forward in flight: everything that the subject may still read in its backward.
struct Flight {
  std::vector<Placed> inputs, outputs;
  std::vector<std::vector<std::byte>> snapshots;
  std::unique_ptr<Saved> saved;
};

// A word of a shot's program.
struct Word {
  bool backward = false;
  int feed = 0;
  bool last = false;   // backward of its feed
  bool other = false;  // X
};

std::vector<Word> words_of(const std::string& program) {
  std::vector<Word> words;
  for (size_t at = 0; at < program.size();) {
    const size_t end = std::min(program.find(' ', at), program.size());
    const bool other = program[at] == 'X', backward = program[at] == 'B';
    const int feed = other ? -1 : std::stoi(program.substr(at + 1, end - at - 1));
    words.push_back({backward, feed, backward, other});
    for (size_t before = 0; words.back().last && before + 1 < words.size(); ++before)
      if (words[before].feed == words.back().feed) words[before].last = false;
    at = end + 1;
  }
  return words;
}

// What is under test on the line: a named control, a user's subject, or ours; and the fault on it.
struct UnderTest {
  std::function<std::unique_ptr<Kernel>()> make;
  Declared declared;
  std::string fault;
};

UnderTest under_test(const Case& line, const Registry& registry) {
  UnderTest u;
  u.fault = line.text("fault");
  const std::string& control = line.text("control");
  const Subject& healthy = subject_under_test(line, registry);
  u.make = healthy.make;
  u.declared = healthy.declared;
  if (!control.empty()) {
    const Control& c = registry.control(line.contract, control);
    if (c.make) {
      u.make = c.make;
      u.declared = c.declared;
    }
    if (!c.fault.empty()) u.fault = c.fault;
  }
  return u;
}

std::string no_memory(int rank, const std::string& line) {
  return "expected memory for what rank " + std::to_string(rank) + " keeps of " + line +
         ", met none that is left; give it smaller extents, fewer ranks or a larger machine";
}

// Leaves the job with the rank: no record, so that the case is crashed.
struct DeviceLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Makes one stream of the rank late, before each call to other ranks and before its result is
// there.
class HoldDoor : public Door {
 public:
  HoldDoor(const DeviceContext& device, Door& next) : device_(device), next_(next) {}
  void hold(int stream) { held_ = stream; }  // -1: none
  void hold_now() const {
    if (Stream s = held_ < 0 ? nullptr : device_.numbered(held_)) device_.hold(s);
  }
  Ticket start(const Call& call, const View& in, const View& out, Stream stream) override {
    hold_now();
    return next_.start(call, in, out, stream);
  }
  void wait(Ticket ticket, Stream stream) override {
    hold_now();
    next_.wait(ticket, stream);
  }

 private:
  const DeviceContext& device_;
  Door& next_;
  int held_ = -1;
};

class Execution {
 public:
  Execution(RankHost& host, const Job& job, const Registry& registry)
      : host_(host),
        job_(job),
        registry_(registry),
        line_(parse(job.line, registry)),
        asked_(line_),
        contract_(registry.contract(line_.contract)),
        test_(under_test(line_, registry)),
        state_(*host.state),
        device_(on_device(line_) ? &device_of_rank(host) : nullptr),
        delays_(line_.seed(), state_, *host.door) {
    if (device_) device_->release_kept();  // of the case before
    state_.rank = host.rank;
    state_.size = host.size;
    state_.case_number = job.number;
    state_.trace = host.trace;
    Door* next = &delays_;
    const bool faulted = !test_.fault.empty();
    const bool call_fault = faulted && fault_operator(parse_fault(test_.fault).op).call;
    if (faulted && !call_fault) {
      fault_ = std::make_unique<FaultDoor>(parse_fault(test_.fault), state_, *next);
      next = fault_.get();
    }
    // NCCL takes device memory itself; operators edit host memory.
    const bool direct = line_.text("transport") == "nccl" && !faulted;
    if (device_ && !call_fault && !direct) next = stage(*next);
    ledger_ = std::make_unique<LedgerDoor>(state_, *next);
    next = ledger_.get();
    if (call_fault) {
      fault_ = std::make_unique<FaultDoor>(parse_fault(test_.fault), state_, *next);
      next = fault_.get();
      if (device_) next = stage(*next);
    }
    if (device_) {
      holds_ = std::make_unique<HoldDoor>(*device_, *next);
      next = holds_.get();
    }
    rank_ = std::make_unique<RankOfCase>(line_, contract_, state_, *next, device_);
  }

  RankRecord run() {
    RankRecord record;
    record.shots.resize(job_.shots.size());
    if (host_.size != line_.world()) {
      record.shots[0].status = ShotRecord::infrastructure;
      record.shots[0].text = "expected a world of " + std::to_string(line_.world()) +
                             " ranks, met one of " + std::to_string(host_.size) +
                             "; the launcher started the wrong number of ranks";
      return record;
    }
    first_ = &record.shots[0];
    describe_operands();
    make_kernel();
    if (fault_ && parse_fault(test_.fault).op == "stale" && !prime(record.shots[0])) return record;
    for (size_t i = 0; i < job_.shots.size(); ++i) {
      state_.shot = uint32_t(i);
      run_shot(job_.shots[i], record.shots[i]);
      if (record.shots[i].status != ShotRecord::ok) break;  // the ranks are no longer in step
    }
    // What is left of this process computes nothing any more: as if the kernel had ended it.
    if (device_lost_)
      for (const ShotRecord& s : record.shots)
        if (s.status == ShotRecord::threw) throw DeviceLost(s.text);
    note_start(record.shots[0]);
    enter(Phase::idle);
    return record;
  }

 private:
  void make_kernel() {
    state_.phase = Phase::init;  // what it asks memory for is the subject's
    kernel_ = test_.make();
    initialised_ = false;
    require_no_copy(state_.trace);
    state_.phase = Phase::idle;
    if (!kernel_)
      throw std::logic_error(
          "expected a kernel of Subject::make, met null; return an object for each call");
  }

  Door* stage(Door& next) {
    staged_ = std::make_unique<StagedDoor>(*device_, next);
    return staged_.get();
  }

  // What the program was linked with has changed the floating point of the whole process before its
  // main began: laid to the user's subject, which is what was added to the program.
  void note_start(ShotRecord& record) const {
    if (!line_.text("control").empty() ||
        !registry_.is_users(registry_.subject(line_.contract, line_.text("subject"))))
      return;
    const std::string difference =
        FloatEnvironment::at_start().difference(FloatEnvironment::judged());
    if (!difference.empty())
      record.memory.push_back(
          {"environment", "", 1, -1,
           difference + " before the program's main; it was linked with -Ofast or -ffast-math"});
  }

  void describe_operands() {
    const Mesh mesh = line_.mesh();
    for (const Operand& o : contract_.operands(line_)) {
      const bool output = o.role == Operand::output;
      (output ? outputs_ : inputs_).push_back(slot(o, o.layout, mesh, false));
      // P of an input's gradient is not stacked anywhere on a rank: only its local shape matters.
      (output ? cotangents_ : gradients_).push_back(slot(o, dual(o.layout), mesh, output));
      if (!output) gradients_.back().dtype = stored_type(line_, o, /*gradient=*/true);
    }
  }

  Slot slot(const Operand& o, const Layout& layout, const Mesh& mesh, bool cotangent) const {
    Slot s;
    s.operand = o;
    s.layout = layout;
    s.dtype = stored_type(line_, o);
    s.local = local_shape(o.shape, layout, mesh, host_.rank);
    s.whole = whole_shape(o.shape, layout, mesh);
    s.indices = whole_indices(o.shape, layout, mesh, host_.rank);
    s.cotangent = cotangent;
    return s;
  }

  // `stale` hands out what the same site returned in a run on other data.
  bool prime(ShotRecord& failed) {
    Shot shot = job_.shots[0];
    for (Feed& f : shot.feeds) f.seed ^= 0x5eed5eed;
    shot.keep_results = false;
    shot.fault = false;
    ShotRecord record;
    run_shot(shot, record);
    if (record.status != ShotRecord::ok) failed = record;
    return record.status == ShotRecord::ok;
  }

  void run_shot(const Shot& shot, ShotRecord& record) {
    delays_.enable(shot.delays);
    if (holds_) holds_->hold(shot.held_stream);
    if (fault_) {
      fault_->new_shot();
      fault_->priming(!shot.fault);
    }
    const FloatEnvironment before = FloatEnvironment::now();
    record.status = ShotRecord::ok;
    try {
      if (device_) device_->recycle();
      const std::vector<Word> program = words_of(shot.program);
      if (shot.fresh) make_kernel();
      start_sums(shot, program);
      for (int step = 0; step < int(program.size()); ++step) {
        record.step = step;
        const auto [backwards, feed, last, other] = program[size_t(step)];
        if (other)
          on_other_extents(shot);
        else if (backwards)
          backward(shot, feed, step, record, last);
        else
          forward(shot, feed, step, record);
      }
    } catch (const Rejected& e) {
      stop(record, ShotRecord::rejected, begin_of(e.what()));
    } catch (const Released& e) {
      record.cause = e.cause;
      stop(record, ShotRecord::released, e.what());
    } catch (const MachineTooSmall& e) {
      stop(record, ShotRecord::too_small, e.what());
    } catch (const Infrastructure& e) {
      stop(record, ShotRecord::infrastructure, e.what());
    } catch (const std::bad_alloc&) {
      // What the harness asks for is not the subject's to answer for.
      if (state_.phase == Phase::harness || state_.phase == Phase::idle)
        stop(record, ShotRecord::infrastructure, no_memory(host_.rank, job_.line));
      else
        stop(record, ShotRecord::threw, "std::bad_alloc");
    } catch (const std::exception& e) {
      stop(record, ShotRecord::threw, begin_of(e.what()));
    } catch (...) {
      stop(record, ShotRecord::threw, "something that is no std::exception");
    }
    end_a_copy(state_.trace);
    settle(record);
    const FloatEnvironment after = FloatEnvironment::now();
    if (std::string difference = after.difference(before); !difference.empty()) {
      record.memory.push_back({"environment", "", 1, -1, difference});
      before.restore();
    }
    record.ledger = ledger_->take();
    record.active = fault_ && fault_->active();
    for (auto& [feed, flight] : flights_) land(flight);
    flights_.clear();
    enter(Phase::harness);
  }

  // A case that stopped half-way still has work on the stream, which must not outlive its buffers.
  void settle(ShotRecord& record) {
    if (!device_ || record.status == ShotRecord::ok) return;
    try {
      device_->settle();
    } catch (const DeviceError& e) {
      device_lost_ = true;
      record.text += std::string("; ") + e.what();
    }
  }

  // The trace says at once where the rank is, not only from its next call on.
  void enter(Phase phase) {
    state_.phase = phase;
    Trace* t = state_.trace;
    // `finish` shows only in a call that it makes: most subjects have none.
    if (!t || phase == Phase::harness || phase == Phase::idle || phase == Phase::finish) return;
    if (t->phase == phase && t->shot == state_.shot && t->case_number == state_.case_number) return;
    t->phase = phase;
    t->shot = state_.shot;
    t->case_number = state_.case_number;
    t->calls_in_phase = 0;
  }

  void leave_kernel() {
    require_no_copy(state_.trace);
    enter(Phase::harness);
  }

  // Running sums of parameter gradients, one set a shot, zero at its start.
  void start_sums(const Shot& shot, const std::vector<Word>& program) {
    sums_.clear();
    last_step_ = -1;
    rank_->accumulating = shot.accumulate;
    if (!shot.accumulate) return;
    sums_.resize(gradients_.size());
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const Slot& s = gradients_[i];
      if (s.operand.role != Operand::parameter || !s.operand.gradient) continue;
      sums_[i] = unsent(s);
      fill_from(sums_[i].host().view(), std::vector<double>(s.indices.size(), 0.0));
      sums_[i].send();
    }
    for (size_t step = 0; step < program.size(); ++step)
      if (program[step].backward) last_step_ = int(step);
  }
  bool is_sum(size_t gradient) const {
    return gradient < sums_.size() && sums_[gradient].host().view().data;
  }

  static void stop(ShotRecord& record, ShotRecord::Status status, std::string text) {
    record.status = status;
    record.text = std::move(text);
  }

  // A forward and a backward of the shot's other line, with which everything that hangs on the line
  // changes places. Where one throws, the case has ended.
  void on_other_extents(const Shot& shot) {
    Case other = parse(shot.other, registry_);
    std::map<int, Flight> flights;
    decltype(drawn_) drawn;
    std::vector<Slot> inputs, outputs, gradients, cotangents;
    const auto change_places = [&] {
      std::swap(line_, other), flights_.swap(flights), drawn_.swap(drawn);
      inputs_.swap(inputs), outputs_.swap(outputs);
      gradients_.swap(gradients), cotangents_.swap(cotangents);
    };
    change_places();
    describe_operands();
    Shot alone;
    alone.feeds = {shot.feeds.at(0)}, alone.keep_results = false;
    ShotRecord let_go;
    forward(alone, 0, 0, let_go);
    if (test_.declared.backward) backward(alone, 0, 1, let_go, true);
    change_places();
  }

  static constexpr int init_step = -1;

  // Most feeds leave the line as it is.
  void show_line(const Feed& feed) {
    if (feed.keys.empty() && !line_changed_) return;
    line_ = asked_;
    for (const auto& [key, value] : feed.keys) line_.set(key, value);
    line_changed_ = !feed.keys.empty();
  }

  void forward(const Shot& shot, int feed, int step, ShotRecord& record) {
    show_line(shot.feeds.at(size_t(feed)));
    Flight& f = flights_[feed];
    f = Flight{};
    for (size_t i = 0; i < inputs_.size(); ++i)
      f.inputs.push_back(filled(inputs_[i], int(i), shot.feeds[size_t(feed)]));
    for (const Slot& s : outputs_) f.outputs.push_back(fresh(s));
    if (!initialised_) initialise();
    for (const Placed& b : f.inputs) f.snapshots.push_back(b.host().snapshot());
    const auto in = views(f.inputs), out = views(f.outputs);
    hold(shot, f.inputs);
    rank_->ending = true;
    enter(Phase::forward);
    f.saved = kernel_->forward(*rank_, in, out);
    leave_kernel();
    for (Placed& b : f.outputs) b.take_digest();
    fetch({&f.inputs, &f.outputs});
    for (size_t i = 0; i < inputs_.size(); ++i)
      check_argument(f.inputs[i], f.snapshots[i], inputs_[i].operand.name, record);
    for (size_t i = 0; i < outputs_.size(); ++i)
      check_result(f.outputs[i], outputs_[i].operand.name, record);
    check_workspaces(record);
    for (size_t i = 0; i < outputs_.size(); ++i)
      keep(shot, step, int(inputs_.size() + i), false, f.outputs[i], record);
  }

  // A subject that makes its own parameters does so once, before its first forward. They are kept
  // as results of step -1, for the replicas to be compared; everything else is judged on values
  // that are drawn, so that the truth is known.
  void initialise() {
    initialised_ = true;
    ShotRecord& record = *first_;
    std::vector<Placed> made;
    std::vector<int> which;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (inputs_[i].operand.role != Operand::parameter) continue;
      made.push_back(fresh(inputs_[i]));
      which.push_back(int(i));
    }
    enter(Phase::init);
    const bool own = kernel_->init(*rank_, views(made));
    leave_kernel();
    fetch({&made});
    const bool kept = std::exchange(init_kept_, true);  // an object made later makes the same
    for (size_t k = 0; own && !kept && k < made.size(); ++k) {
      check_result(made[k], inputs_[size_t(which[k])].operand.name + " at its initialisation",
                   record);
      keep(job_.shots[0], init_step, which[k], false, made[k], record);
    }
    check_workspaces(record);
  }

  void backward(const Shot& shot, int feed, int step, ShotRecord& record, bool last) {
    auto found = flights_.find(feed);
    if (found == flights_.end() || !found->second.saved)
      throw std::logic_error(
          "forward returned no saved state, but the subject declares a backward; return a Saved "
          "object "
          "(an empty one will do) or declare backward = false");
    Flight& f = found->second;
    show_line(shot.feeds.at(size_t(feed)));
    std::vector<Placed> cotangents;
    std::vector<std::vector<std::byte>> snapshots;
    for (size_t i = 0; i < cotangents_.size(); ++i) {
      cotangents.push_back(
          filled(cotangents_[i], int(inputs_.size() + i), shot.feeds[size_t(feed)]));
      snapshots.push_back(cotangents.back().host().snapshot());
    }
    std::vector<Placed> gradients(gradients_.size());
    std::vector<View> out(gradients_.size());
    for (size_t i = 0; i < gradients_.size(); ++i) {
      if (!gradients_[i].operand.gradient) continue;
      if (!is_sum(i)) gradients[i] = fresh(gradients_[i]);
      out[i] = is_sum(i) ? sums_[i].view() : gradients[i].view();
    }
    const auto in = views(cotangents);
    hold(shot, cotangents);
    rank_->ending = !shot.accumulate || step == last_step_;
    enter(Phase::backward);
    kernel_->backward(*rank_, *f.saved, in, out);
    if (last) {
      enter(Phase::finish);
      kernel_->finish(*rank_, *f.saved, out);
    }
    leave_kernel();
    for (Placed& b : gradients) b.take_digest();
    fetch({&f.inputs, &cotangents, &gradients, &sums_});
    for (size_t i = 0; i < inputs_.size(); ++i)
      check_argument(f.inputs[i], f.snapshots[i], inputs_[i].operand.name, record);
    for (size_t i = 0; i < cotangents_.size(); ++i)
      check_argument(cotangents[i], snapshots[i], cotangents_[i].name(), record);
    for (size_t i = 0; i < gradients_.size(); ++i) {
      if (!gradients_[i].operand.gradient) continue;
      const Placed& result = is_sum(i) ? sums_[i] : gradients[i];
      check_result(result, "gradient of " + gradients_[i].operand.name, record);
      if (!is_sum(i) || step == last_step_) keep(shot, step, int(i), true, result, record);
    }
    check_workspaces(record);
    if (!last) return;
    land(f);
    flights_.erase(found);
  }

  Strides strides() const {
    return line_.text("strides") == "transposed" ? Strides::transposed : Strides::contiguous;
  }

  Placed unsent(const Slot& s) const { return {Buffer(s.dtype, s.local, strides()), device_}; }
  Placed fresh(const Slot& s) const {  // poisoned where the subject will write
    Placed b = unsent(s);
    if (device_ && has_copies(s)) b.reserve_digest();
    b.send();
    return b;
  }

  // Arguments come late too: copies from the host's memory may have been waited for by the runtime.
  void hold(const Shot& shot, std::vector<Placed>& arguments) const {
    if (!holds_ || shot.held_stream < 0) return;
    for (Placed& b : arguments) b.withdraw();
    holds_->hold_now();
    for (const Placed& b : arguments) b.bring_again();
  }

  // Other ranks hold the same: copies are compared where they lie, too.
  bool has_copies(const Slot& s) const {
    return std::any_of(s.layout.begin(), s.layout.end(), [&](const auto& axis) {
      return line_.ranks(axis.first) > 1 && equal_bits(axis.second);
    });
  }

  // What the subject left, on the host, to be looked at: behind everything on the rank's stream.
  void fetch(std::initializer_list<std::vector<Placed>*> lists) {
    if (!device_) return;
    std::vector<DeviceContext::ToHost> copies;
    for (auto* list : lists)
      for (Placed& b : *list) b.fetch(copies);
    for (auto& w : rank_->workspaces()) w->fetch(copies);
    device_->bring(copies, device_->stream());
  }

  // Parameters lie where they lay in the flight before, as a training step leaves them: what an
  // object keeps by their addresses meets other values there.
  void land(Flight& f) {
    for (size_t i = 0; i < std::min(f.inputs.size(), inputs_.size()); ++i) {
      const auto& strides = f.inputs[i].host().view().strides;
      const bool expanded = std::find(strides.begin(), strides.end(), 0) != strides.end();
      if (inputs_[i].operand.role == Operand::parameter && !expanded && !device_)
        landed_.insert_or_assign(int(i), std::move(f.inputs[i]));
    }
  }
  Placed unsent(const Slot& s, int operand) {
    auto found = landed_.extract(operand);
    if (found.empty()) return unsent(s);
    const View& lay = found.mapped().host().view();
    if (lay.dtype != s.dtype || lay.shape != s.local) return unsent(s);
    found.mapped().host().poison();
    return std::move(found.mapped());
  }

  Placed filled(const Slot& s, int operand, const Feed& feed) {
    // What a check gives is no value that is repeated.
    const auto dims =
        is_drawn(feed, operand) ? expanded_dims(line_, s.operand, s.cotangent) : std::vector<int>{};
    Placed b = dims.empty() ? unsent(s, operand) : Placed(Buffer(s.dtype, s.local, dims), device_);
    std::vector<double> own;
    fill_from(b.host().view(), values_of(s, operand, feed, own));
    b.send();
    return b;
  }

  // The shard of an operand or cotangent that a feed gives: in `own`, or drawn, which is kept,
  // since shots repeat feeds.
  std::span<const double> values_of(const Slot& s, int operand, const Feed& feed,
                                    std::vector<double>& own) {
    own.reserve(s.indices.size());
    for (const auto& e : feed.basis) {
      if (e.operand != operand) continue;
      for (int64_t at : s.indices) own.push_back(double(at == e.index));
      return own;
    }
    for (const auto& g : feed.given) {
      if (g.operand != operand) continue;
      for (int64_t at : s.indices) own.push_back(g.value.at(size_t(at)));
      return own;
    }
    std::vector<double>& drawn =
        drawn_[{operand, feed.fill, feed.seed, feed.range, feed.silent_half}];
    if (drawn.empty())
      drawn = drawn_at({line_, s.operand, s.cotangent, feed, s.dtype, s.whole}, s.indices);
    return drawn;
  }

  static std::vector<View> views(const std::vector<Placed>& buffers) {
    std::vector<View> v;
    for (const Placed& b : buffers) v.push_back(b.view());
    return v;
  }

  static void check_argument(const Placed& b, const std::vector<std::byte>& snapshot,
                             const std::string& tensor, ShotRecord& record) {
    if (auto at = b.host().changed_since(snapshot))
      record.memory.push_back({"argument", tensor, 1, *at, "an argument was written to"});
  }
  static void check_result(const Placed& b, const std::string& tensor, ShotRecord& record) {
    if (auto hole = b.host().unwritten(); hole.count > 0)
      record.memory.push_back({"unwritten", tensor, hole.count, hole.first, "never written"});
    if (auto t = b.host().trespass())
      record.memory.push_back({"guard", tensor, 1, t->byte,
                               "the guard zone " + t->where + " the tensor was written to"});
  }
  void check_workspaces(ShotRecord& record) {
    for (auto& w : rank_->workspaces())
      if (auto t = w->host().trespass())
        record.memory.push_back({"workspace", "workspace", 1, t->byte,
                                 "the guard zone " + t->where + " a workspace was written to"});
    rank_->workspaces().clear();
  }

  static void keep(const Shot& shot, int step, int operand, bool gradient, const Placed& b,
                   ShotRecord& record) {
    if (!shot.keep_results) return;
    ResultTensor t{
        step, operand, gradient, b.host().view().dtype, b.host().view().shape, b.host().bytes()};
    if (const shardproof_digest* d = b.digest()) {
      t.on_device = true;
      std::copy(std::begin(d->lane), std::end(d->lane), std::begin(t.lanes));
    }
    record.results.push_back(std::move(t));
  }

  RankHost& host_;
  const Job& job_;
  const Registry& registry_;
  Case line_;  // as the kernel reads it
  const Case asked_;
  const Contract& contract_;
  UnderTest test_;
  RankState& state_;
  const DeviceContext* device_;  // null: on the host
  DelayDoor delays_;
  std::unique_ptr<FaultDoor> fault_;
  std::unique_ptr<StagedDoor> staged_;
  std::unique_ptr<LedgerDoor> ledger_;
  std::unique_ptr<HoldDoor> holds_;  // null: on the host
  std::unique_ptr<RankOfCase> rank_;
  std::unique_ptr<Kernel> kernel_;
  std::vector<Slot> inputs_, outputs_, gradients_, cotangents_;
  std::map<int, Flight> flights_;
  std::map<int, Placed> landed_;  // by input
  std::map<std::tuple<int, Fill, uint64_t, int64_t, bool>, std::vector<double>>
      drawn_;                 // by operand and feed
  std::vector<Placed> sums_;  // of an accumulating shot; empty where none is kept
  int last_step_ = -1;        // its last backward: the sums are whole then
  bool initialised_ = false, init_kept_ = false, line_changed_ = false;
  bool device_lost_ = false;
  ShotRecord* first_ = nullptr;
};

// Before the first shot: the line, the operands, the device or the subject's constructor.
void stopped_early(RankRecord& record, ShotRecord::Status status, const char* text) {
  if (record.shots.empty()) record.shots.resize(1);
  record.shots[0].status = status;
  record.shots[0].text = text;
}

}  // namespace

std::vector<std::byte> execute(RankHost& host, std::span<const std::byte> bytes,
                               const Registry& registry) {
  FloatEnvironment::judged().restore();
  RankRecord record;
  uint32_t number = 0;
  try {
    const Job job = parse_job(bytes);
    number = job.number;
    record.shots.resize(job.shots.size());
    record = Execution(host, job, registry).run();
  } catch (const DeviceLost&) {
    throw;
  } catch (const Infrastructure& e) {
    stopped_early(record, ShotRecord::infrastructure, e.what());
  } catch (const std::bad_alloc&) {
    const bool of_the_subject = host.state->phase == Phase::init;
    stopped_early(record, of_the_subject ? ShotRecord::threw : ShotRecord::infrastructure,
                  of_the_subject ? "std::bad_alloc" : no_memory(host.rank, "the case").c_str());
  } catch (const std::exception& e) {
    stopped_early(record, ShotRecord::threw, begin_of(e.what()).c_str());
  }
  record.rank = host.rank;
  record.number = number;
  try {
    return serialize(record);
  } catch (const std::bad_alloc&) {
    throw Infrastructure(no_memory(host.rank, "a record"));
  }
}

}  // namespace shardproof
