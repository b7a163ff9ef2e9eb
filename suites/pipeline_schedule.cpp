// The step of a pipeline whose forwards and backwards take turns. What is judged is whether each
// microbatch's gradients are made of its own activations and cotangents, whichever of them are in
// flight, whether all of them and nothing else are in the sums before these are reduced, and
// whether what travels goes in the order of the schedule.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "fixtures/fills.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "oracle/words.hpp"
#include "primitives/pipeline_schedule.hpp"
#include "reference/microbatches.hpp"
#include "suites/ours.hpp"
#include "suites/pipeline.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using namespace linears;
using namespace pipelines;

// ---- Operands x, w0, b0, w1, b1, .., dy; y, dx, dw0, db0, ..

bool takes_mean(const Case& c) { return c.text("loss") == "mean"; }
double divisor(const Case& c) { return takes_mean(c) ? double(Shape(c).microbatches) : 1; }

std::vector<Operand> operands(const Case& c) {
  const Shape s(c);
  const std::vector<int64_t> tokens{c.at("tokens"), s.hidden};
  const Layout first = on_stage(0, S(0)), last = on_stage(s.stage_of_chunk(s.chunks - 1), S(0));
  std::vector<Operand> list{{"x", Operand::input, tokens, first, true, 1}};
  add_layers(s, list);
  const std::vector<Operand> parameters(list.begin() + 1, list.end());
  list.push_back({"dy", Operand::input, tokens, last, true, 0});
  list.push_back({"y", Operand::output, tokens, last, true, 0});
  list.push_back({"dx", Operand::output, tokens, first, true, 0});
  for (Operand gradient : parameters) {
    gradient.dtype_override = stored_type(c, gradient, /*gradient=*/true);
    gradient.name = "d" + gradient.name, gradient.role = Operand::output;
    gradient.fixed_dtype = true;
    list.push_back(gradient);
  }
  return list;
}

// ---- Reference and bounds

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const auto stack = stack_of(c, in.first(in.size() - 1));
  const auto& dy = in.back().value;
  auto step = reference::stack_step(stack, dy, c.ranks(Axis::dp), Shape(c).size, divisor(c));
  std::vector<Whole> out = listed(whole(in[0].shape, std::move(step.y)));
  for (auto& value : in_order(step.d, step.d.x))
    out.push_back(whole(in[out.size() - 1].shape, std::move(value)));
  if (!gauges) return out;
  const Precision p = precision_of(c, Declared{});
  const auto rounding = rounding_of(c, p);
  *gauges = {replicated::gauge_of(reference::stack_loss(stack, rounding), p)};
  for (Gauge& gauge :
       gauges_of_gradients(c, stack, reference::divided_cotangent(dy, divisor(c), rounding)))
    gauges->push_back(std::move(gauge));
  return out;
}

// Dividing by a power of two costs no digit; by another number nothing is exact.
std::optional<Contract::Inexact> inexact(const Case& c) {
  const int64_t m = int64_t(divisor(c));
  if ((m & (m - 1)) == 0) return std::nullopt;
  return Contract::Inexact{fmt::format("a mean over {} microbatches, which are no power of two", m),
                           "fill=normal, loss=sum or another micro_batch_size"};
}

std::optional<int64_t> integer_range(const Case& c) {
  return inexact(c) ? std::nullopt : range_of_stack(c, c.at("tokens"));
}

// ---- Who works on what, and when

// F, B or W of a microbatch on a chunk.
struct Item {
  char what;
  int64_t microbatch, chunk;
};
using Items = std::vector<Item>;

int64_t rounds_of(const Case& c) {
  return std::max<int64_t>(1, Shape(c).microbatches / Shape(c).stages);
}

// As many microbatches in each round pass a stage's chunks one after another.
Items in_rounds(const Case& c, char what, int64_t stage) {
  const Shape s(c);
  const int64_t v = s.chunks / s.stages, rounds = v == 1 ? 1 : rounds_of(c),
                each = s.microbatches / rounds;
  Items list;
  for (int64_t round = 0; round < rounds; ++round)
    for (int64_t turn = 0; turn < v; ++turn)
      for (int64_t m = round * each; m < (round + 1) * each; ++m)
        list.push_back({what, m, (what == 'F' ? turn : v - 1 - turn) * s.stages + stage});
  return list;
}

int64_t lead(const Case& c, int64_t stage) {
  const Shape s(c);
  const std::string schedule = c.text("schedule");
  const int64_t n = s.microbatches * s.chunks / s.stages, behind = s.stages - stage - 1;
  if (schedule == "gpipe") return n;
  const int64_t filled = (s.chunks / s.stages - 1) * (s.microbatches / rounds_of(c));
  return std::min(n, filled + (schedule == "interleaved" ? 2 * behind : behind));
}

// By places: F are ahead by `lead`, then each of them has a B behind it, and W follow the B that is
// as many behind as the stage is far from the first.
Items one_by_one(const Case& c, int64_t stage) {
  const Items f = in_rounds(c, 'F', stage), b = in_rounds(c, 'B', stage);
  const bool splits = c.text("schedule") == "zero_bubble";
  const int64_t n = int64_t(f.size()), ahead = lead(c, stage);
  std::vector<std::pair<int64_t, Item>> at;
  for (int64_t i = 0; i < n; ++i) {
    at.emplace_back(3 * (i - ahead), f[size_t(i)]);
    at.emplace_back(3 * i + 1, b[size_t(i)]);
    if (splits)
      at.emplace_back(3 * (i + stage) + 2, Item{'W', b[size_t(i)].microbatch, b[size_t(i)].chunk});
  }
  std::stable_sort(at.begin(), at.end(),
                   [](const auto& x, const auto& y) { return x.first < y.first; });
  Items order;
  for (const auto& [place, item] : at) order.push_back(item);
  return order;
}

// Phases as words, each said so many times; 0 is the chunk on the way there, 1 on the way back. Who
// counts further than there are microbatches has nothing to do.
Items there_and_back(const Case& c, int64_t stage) {
  const Shape s(c);
  const int64_t counted = std::max(s.microbatches, 2 * s.stages - 1), behind = s.stages - stage,
                steady = counted - (2 * behind - 1) - stage;
  const std::pair<int64_t, std::string> phases[] = {{2 * behind - 1, "F0"},
                                                    {stage, "F1F0"},
                                                    {behind, "F1B1W1"},
                                                    {steady, "F0B0W0F1B1W1"},
                                                    {behind - 1, "B0W0F1B1W1"},
                                                    {stage, "B0B1"},
                                                    {behind, "B0W0"},
                                                    {stage, "W1"},
                                                    {stage, "W0"}};
  std::map<std::string, int64_t> count;
  Items order;
  for (const auto& [times, words] : phases)
    for (int64_t n = 0; n < times; ++n)
      for (size_t i = 0; i < words.size(); i += 2) {
        const int64_t m = count[words.substr(i, 2)]++;
        const int64_t chunk = words[i + 1] == '0' ? stage : s.chunks - 1 - stage;
        if (m < s.microbatches) order.push_back({words[i], m, chunk});
      }
  return order;
}

Items order_of(const Case& c, int64_t stage) {
  return c.text("schedule") == "zbv" ? there_and_back(c, stage) : one_by_one(c, stage);
}

// The tick of each item: the first one behind that of the item before it on its stage and those of
// the items that it is made of. Found by going over all of them until nothing moves.
class Times {
 public:
  explicit Times(const Case& c) : shape_(c) {
    for (int64_t stage = 0; stage < shape_.stages; ++stage) orders_.push_back(order_of(c, stage));
    while (moved()) continue;
  }

  int64_t last() const {
    int64_t tick = 0;
    for (const auto& [item, at] : at_) tick = std::max(tick, at);
    return tick;
  }

  // "F0" of a stage, by tick; with the chunk, "F0.2", where a stage has several.
  std::vector<std::string> work_of(int64_t stage) const {
    std::vector<std::string> work(size_t(last() + 1));
    for (const Item& item : orders_[size_t(stage)]) {
      std::string text = item.what + std::to_string(item.microbatch);
      if (shape_.chunks > shape_.stages) text += "." + std::to_string(item.chunk);
      work[size_t(at_.at(key(item)))] = std::move(text);
    }
    return work;
  }

  // Elements that a stage sends behind each tick: by hop, and 0 where only others send.
  std::map<std::pair<int64_t, int>, int64_t> sent_by(int64_t stage) const {
    std::map<std::pair<int64_t, int>, int64_t> sent;
    for (const Items& order : orders_)
      for (const Item& item : order)
        if (const int hop = hop_of(item)) {
          int64_t& elements = sent[{at_.at(key(item)), -hop}];  // +1 before -1
          if (shape_.stage_of_chunk(item.chunk) == stage)
            elements = shape_.elements_of(item.microbatch);
        }
    return sent;
  }

 private:
  using Key = std::tuple<char, int64_t, int64_t>;
  static Key key(const Item& i) { return {i.what, i.microbatch, i.chunk}; }

  // One more than the latest of what it is made of.
  int64_t earliest(const Item& i) const {
    int64_t tick = 0;
    const auto behind = [&](char what, int64_t chunk) {
      const auto found = at_.find({what, i.microbatch, chunk});
      tick = std::max(tick, found == at_.end() ? 1 : found->second + 1);
    };
    if (i.what == 'F' && i.chunk > 0) behind('F', i.chunk - 1);
    if (i.what == 'B') behind('F', i.chunk);
    if (i.what == 'B' && i.chunk + 1 < shape_.chunks) behind('B', i.chunk + 1);
    if (i.what == 'W') behind('B', i.chunk);
    return tick;
  }

  bool moved() {
    bool any = false;
    for (const Items& order : orders_) {
      int64_t tick = 0;
      for (const Item& item : order) {
        tick = std::max(tick, earliest(item));
        const auto [place, fresh] = at_.try_emplace(key(item), tick);
        any = any || fresh || place->second != tick;
        place->second = tick++;
      }
    }
    return any;
  }

  // The way of a result: F to the next chunk, B to the one before.
  int hop_of(const Item& i) const {
    const int64_t next = i.chunk + (i.what == 'F' ? 1 : -1);
    if (i.what == 'W' || next < 0 || next == shape_.chunks || shape_.stages == 1) return 0;
    if (shape_.turns) return int(shape_.stage_of_chunk(next) - shape_.stage_of_chunk(i.chunk));
    return i.what == 'F' ? 1 : -1;
  }

  Shape shape_;
  std::vector<Items> orders_;
  std::map<Key, int64_t> at_;
};

std::vector<Traffic> traffic(const Case& c, const std::string&, int rank) {
  std::vector<Traffic> due;
  for (const auto& [when, elements] : Times(c).sent_by(stage_of_rank(c, rank)))
    add_call(due, call(Op::shift, false, elements, c.dtype()), "pp", -when.second);
  if (const int64_t own = elements_of_layers(c, rank); c.ranks(Axis::dp) > 1 && own > 0)
    add_call(due, call(Op::all_reduce, false, own, wire_of(c)), "dp");
  return due;
}

Schedule timetable(const Case& c) {
  const Times times(c);
  const bool several = c.at("virtual") > 1,
             puts_off = c.text("schedule") == "zero_bubble" || c.text("schedule") == "zbv";
  Schedule t{Axis::pp,
             several
                 ? "F0.1: forward of microbatch 0 on chunk 1, both counted from 0, B its backward"
                 : "F0: forward of microbatch 0, the first, B its backward",
             {}};
  if (puts_off) t.legend += " but for weight gradients, W these";
  for (int64_t stage = 0; stage < c.ranks(Axis::pp); ++stage)
    t.work.push_back(times.work_of(stage));
  return t;
}

// The stage before has sent at most what its order has F ahead of B, of which it sends nothing on
// where the next chunk is none. In whichever ticks: a B waits for what answers it. Where chunks go
// there and back, a shift of one direction carries both.
std::optional<Unanswered> unanswered(const Case& c, int rank) {
  const Shape s(c);
  if (s.turns || s.stages == 1) return {};
  const int64_t before = (stage_of_rank(c, rank) - 1 + s.stages) % s.stages;
  int64_t ahead = 0, most = 0;
  for (const Item& item : order_of(c, before)) {
    if (item.what == 'W' || item.chunk + 1 == s.chunks) continue;
    ahead += (item.what == 'F' ? 1 : -1) * s.elements_of(item.microbatch);
    most = std::max(most, ahead);
  }
  return Unanswered{"pp", +1, most,
                    "more microbatches are in flight than schedule=" + c.text("schedule") +
                        " has: memory of a schedule that runs further ahead"};
}

// ---- What a failure means

bool any_starts_with(const std::vector<std::string>& names, const char* head) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.starts_with(head); });
}

// Which results are off tells which of the three ways it went: activations, cotangents, sums.
std::string meaning(const Case& c, const Off& off) {
  const bool weights = any_starts_with(off.names, "dw"), biases = any_starts_with(off.names, "db"),
             parameters = weights || biases;
  if (contains(off.names, "y"))
    return "an activation of another microbatch or chunk, of other weights, or one that was "
           "written over before it was used";
  if (contains(off.names, "dx"))
    return "y is right: a cotangent of another microbatch or chunk, weights that have changed "
           "since the forward, or another scale of the loss";
  if (!parameters) return "";
  const bool narrower = unit_roundoff(c.dtype()) > precision_of(c, Declared{}).u_acc;
  if (narrower && c.text("local_grad").empty() && off.pass_with("local_grad", c.text("dtype")))
    return "off by no more than sums over microbatches in " + c.text("dtype") +
           " are: a stage adds gradients up in the storage type, as autograd does; a line with "
           "local_grad=" +
           c.text("dtype") + " asks for that";
  const std::string late =
      c.ranks(Axis::dp) > 1 ? ", or is added behind the reduction over dp" : "";
  if (!biases)
    return "y, dx and the gradients of biases are right, so are activations and cotangents: a "
           "weight gradient multiplies the cotangent by another microbatch's input, or by one that "
           "was made again otherwise, or a term of its sum is left out or written over" +
           late;
  return "y and dx are right: of the sum over microbatches a term is left out, counted again, "
         "written over, or made of another microbatch's cotangent" +
         late;
}

// ---- Keys and cases

std::vector<Key> keys() {
  std::vector<Key> list = keys_of_layers("5");
  list.push_back(choice("schedule", "1f1b", {"gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"},
                        "in which order a stage works on microbatches; zero_bubble and zbv put "
                        "weight gradients off"));
  list.push_back(choice("loss", "sum", {"sum", "mean"},
                        "dy is the cotangent of the sum of all microbatches' losses, or of their "
                        "mean: divided by their number"));
  list.push_back(toggle("recompute", "off",
                        "inputs of a chunk's further layers are made again before its backward"));
  list.push_back(local_grad_key());
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke = crossed(
      {"pipeline_schedule"},
      {"pp=2 tokens=7 micro_batch_size=2 layers=3", "pp=4 tokens=5 micro_batch_size=2 layers=5",
       "pp=2 schedule=interleaved virtual=2 tokens=7 micro_batch_size=2 loss=mean",
       "pp=2 dp=2 schedule=zero_bubble tokens=12 micro_batch_size=2 layers=3 recompute=on",
       "pp=2 schedule=zbv virtual=2 tokens=7 micro_batch_size=2 dtype=bf16 fill=normal layers=4"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> schedules{"schedule=gpipe",
                                           "schedule=1f1b",
                                           "schedule=zero_bubble",
                                           "schedule=interleaved virtual=2",
                                           "schedule=interleaved virtual=3 layers=9",
                                           "schedule=zero_bubble virtual=2",
                                           "schedule=zbv virtual=2"};
  const auto on = [&](const std::string& head) { return crossed({head}, schedules); };
  const auto all =
      together({on("pipeline_schedule"), on("pipeline_schedule pp=2"), on("pipeline_schedule pp=3"),
                on("pipeline_schedule pp=4"), on("pipeline_schedule pp=8")});
  const std::string half = "layers=2 hidden=2 tokens=8 micro_batch_size=2";
  const std::vector<std::string> some{
      "pipeline_schedule pp=3", "pipeline_schedule pp=2 schedule=interleaved virtual=2",
      "pipeline_schedule pp=2 dp=2 schedule=zero_bubble micro_batch_size=5",
      "pipeline_schedule pp=4 schedule=zbv virtual=2"};
  const auto ci = together(
      {smoke,
       crossed(all, {"", "dtype=f32 micro_batch_size=3"}),
       crossed({"pipeline_schedule pp=2", "pipeline_schedule pp=4 schedule=zero_bubble"},
               {"dtype=bf16 " + half, "dtype=f16 " + half}),
       crossed({"pipeline_schedule dp=2", "pipeline_schedule pp=2 dp=2 micro_batch_size=5",
                "pipeline_schedule pp=2 dp=2 order=pp,dp micro_batch_size=3",
                "pipeline_schedule pp=4 dp=2 micro_batch_size=3",
                "pipeline_schedule pp=2 dp=4 micro_batch_size=4", "pipeline_schedule dp=3"},
               {"", "schedule=zero_bubble", "schedule=zbv virtual=2"}),
       crossed(some,
               {"fill=normal", "dtype=f32 fill=normal", "dtype=bf16 fill=normal",
                "dtype=f16 fill=normal", "dtype=bf16 grad=f32 wire=f32 fill=normal",
                "dtype=f32 acc=f64 fill=normal", "dtype=f32 fill=cancelling", "strides=transposed",
                "recompute=on", "loss=mean fill=normal", "loss=mean dtype=f32 fill=normal",
                "recompute=on layers=11", "layers=3", "layers=1"}),
       // Fewer microbatches than stages, one, one row each, one that is not full.
       crossed({"pipeline_schedule pp=4", "pipeline_schedule pp=4 schedule=zero_bubble",
                "pipeline_schedule pp=8 schedule=interleaved virtual=2",
                "pipeline_schedule pp=3 schedule=zbv virtual=2"},
               {"micro_batch_size=24", "micro_batch_size=12", "tokens=1",
                "micro_batch_size=1 tokens=8", "tokens=25 micro_batch_size=8"}),
       // Fewer microbatches than a stage of zbv counts to, and more than stages.
       {"pipeline_schedule pp=4 schedule=zbv virtual=2 tokens=12 micro_batch_size=2",
        "pipeline_schedule pp=3 loss=mean", "pipeline_schedule pp=2 dp=2 loss=mean",
        "pipeline_schedule pp=2 schedule=interleaved virtual=3 layers=13 recompute=on",
        "pipeline_schedule pp=3 schedule=zero_bubble virtual=2 layers=6 micro_batch_size=4",
        "pipeline_schedule pp=2 local_grad=f32",
        "pipeline_schedule pp=2 dp=2 layers=2 tokens=64 micro_batch_size=4 dtype=bf16 "
        "local_grad=bf16 fill=normal",
        "pipeline_schedule pp=2 dtype=f32 fill=large layers=2", "pipeline_schedule pp=2 hidden=1",
        "pipeline_schedule pp=2 dp=2 layers=2 tokens=96 micro_batch_size=8 dtype=bf16 "
        "fill=cancelling schedule=zero_bubble"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed({"pipeline_schedule pp=5 layers=11", "pipeline_schedule pp=6 layers=13",
                            "pipeline_schedule pp=8 layers=17 tokens=40"},
                           {"", "schedule=zero_bubble", "schedule=zbv virtual=2 recompute=on"}),
                   {"micro_batch_size=2", "micro_batch_size=2 seed=2",
                    "micro_batch_size=4 loss=mean dtype=f32 fill=normal hidden=9",
                    "micro_batch_size=3 dtype=bf16 local_grad=bf16 fill=normal"})});
}

Contract pipeline_schedule() {
  Contract c;
  c.name = "pipeline_schedule";
  c.family = "pipeline";
  c.summary =
      "a training step whose forwards and backwards take turns: 1F1B, interleaved, zero bubble";
  c.linear = true;
  c.keys = keys();
  c.precondition = primitives::refused_pipeline_schedule;
  c.operands = operands;
  c.forward = forward;
  c.traffic = traffic;
  c.timetable = timetable;
  c.unanswered = unanswered;
  c.meaning = meaning;
  c.integer_range = integer_range;
  c.inexact = inexact;
  c.cases = cases;
  c.gemms = [](const Case& line, int rank) { return gemms_of_stage(line, rank, false); };
  c.illegal = {"pipeline_schedule pp=2 tp=2",
               "pipeline_schedule pp=2 ep=2",
               "pipeline_schedule pp=2 dp=2 tokens=9",
               "pipeline_schedule pp=2 virtual=2",
               "pipeline_schedule pp=2 schedule=interleaved",
               "pipeline_schedule pp=2 schedule=zbv",
               "pipeline_schedule pp=2 schedule=interleaved virtual=2 tokens=5 micro_batch_size=1",
               "pipeline_schedule pp=4 schedule=zbv virtual=3"};
  c.witnesses = {"pipeline_schedule pp=2 tokens=5 micro_batch_size=2 layers=3",
                 "pipeline_schedule pp=3 tokens=5 micro_batch_size=3 layers=4 schedule=zero_bubble",
                 "pipeline_schedule pp=4 tokens=4 micro_batch_size=2",
                 "pipeline_schedule pp=2 dp=2 schedule=interleaved virtual=2 tokens=8 "
                 "micro_batch_size=2 layers=4"};
  return c;
}

}  // namespace

void family_pipeline_schedule(Registry& r) {
  r.add(pipeline_schedule());
  add_ours<primitives::PipelineSchedule>(r, "pipeline_schedule");
}

}  // namespace shardproof
