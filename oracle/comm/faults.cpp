// Fault specs as text, and the decorator that applies one at its site. The operators themselves are
// in fault_operators.cpp; fault_steps.hpp says how they are built.
#include "oracle/comm/faults.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "oracle/case.hpp"
#include "oracle/comm/fault_steps.hpp"
#include "oracle/words.hpp"

namespace shardproof {
namespace {

const FaultRow& row_of(const std::string& name) {
  for (const FaultRow& r : fault_rows())
    if (r.op.name == name) return r;
  std::vector<std::string> names;
  for (const FaultRow& r : fault_rows()) names.push_back(r.op.name);
  const std::string close = nearest(name, names);
  throw BadInput(fmt::format(
      "key 'fault': expected a fault operator, met '{}'{}; `shardproof list` shows all of them",
      name, close.empty() ? "" : ", the nearest is '" + close + "'"));
}

}  // namespace

const std::vector<FaultOperator>& fault_operators() {
  static const std::vector<FaultOperator> operators = [] {
    std::vector<FaultOperator> list;
    for (const FaultRow& r : fault_rows()) list.push_back(r.op);
    return list;
  }();
  return operators;
}
const FaultOperator& fault_operator(const std::string& name) { return row_of(name).op; }

// ---- the text

namespace {

[[noreturn]] void refuse(const std::string& expected, std::string_view met) {
  throw BadInput(
      fmt::format("key 'fault': expected {}, met '{}'; write OPERATOR@PHASE.AXIS.NUMBER[@rankR], "
                  "such as skip@backward.tp.1 or scale_p@forward.cp.*@rank2",
                  expected, met));
}
Phase parse_phase(std::string_view text) {
  for (Phase p : {Phase::init, Phase::forward, Phase::backward, Phase::finish})
    if (text == name(p)) return p;
  refuse("a phase: init, forward, backward or finish", text);
}
int parse_number(std::string_view text) {
  if (text == "*") return 0;
  int n = 0;
  if (!whole_number(text, n) || n < 1)
    refuse("the number of a call, from 1, or * for every one", text);
  return n;
}
int parse_rank(std::string_view text) {
  int n = -1;
  if (!text.starts_with("rank") || !whole_number(text.substr(4), n) || n < 0)
    refuse("one rank as rankR with R from 0", text);
  return n;
}

}  // namespace

FaultSpec parse_fault(const std::string& text) {
  const std::string_view all = text;
  const size_t at = all.find('@');
  if (at == std::string_view::npos) refuse("an operator and a site, with @ between them", all);
  FaultSpec spec;
  spec.op = fault_operator(text.substr(0, at)).name;
  std::string_view site = all.substr(at + 1);
  if (const size_t rank = site.find('@'); rank != std::string_view::npos) {
    spec.rank = parse_rank(site.substr(rank + 1));
    site = site.substr(0, rank);
  }
  const size_t first = site.find('.'), last = site.rfind('.');
  if (first == last) refuse("a site of three parts, PHASE.AXIS.NUMBER", site);
  spec.phase = parse_phase(site.substr(0, first));
  spec.axis = std::string(site.substr(first + 1, last - first - 1));
  if (spec.axis.empty() || spec.axis.find_first_of(". ") != std::string::npos)
    refuse("the label of a group, such as tp, tp,cp or world", spec.axis);
  spec.number = parse_number(site.substr(last + 1));
  return spec;
}

std::string print(const FaultSpec& s) {
  return fmt::format("{}@{}.{}.{}{}", s.op, name(s.phase), s.axis,
                     s.number == 0 ? "*" : std::to_string(s.number),
                     s.rank < 0 ? "" : "@rank" + std::to_string(s.rank));
}

// ---- the decorator

namespace {

bool applies(const FaultOperator& op, const Call& c) {
  const auto holds = [](const auto& list, auto x) {
    return std::find(list.begin(), list.end(), x) != list.end();
  };
  return holds(op.ops, c.op) && (op.any_reduce || holds(op.reduces, c.reduce)) &&
         c.group->size() >= op.smallest_p;
}

std::vector<std::byte> bytes_of(const View& v) { return {v.data, v.data + v.bytes()}; }
bool same_bytes(const View& v, const std::vector<std::byte>& b) {
  return b.empty() || std::memcmp(v.data, b.data(), b.size()) == 0;
}

}  // namespace

struct FaultDoor::Impl {
  // Its own tickets carry this bit; others are the next door's and pass through.
  static constexpr Ticket own_ticket = Ticket(1) << 62;

  Bench bench;
  const FaultRow& row;
  const bool remembers;  // `stale` looks at every call of its axis
  Ticket last = 0;
  std::map<Ticket, std::unique_ptr<Flight>> flights = {};

  bool on_axis(const Call& c) const {
    return bench.state.phase == bench.spec.phase && c.group->label == bench.spec.axis;
  }
  bool names(int number) const { return bench.spec.number == 0 || bench.spec.number == number; }
  bool here() const {
    if (bench.spec.rank >= 0) return bench.state.rank == bench.spec.rank;
    return !row.op.one_rank || bench.state.rank == 0;
  }
  void require_host(const Call& c, const View& in, const View& out) const {
    const bool edits = row.steps.before || row.steps.after || row.steps.edit;
    if (edits && (in.space == Space::device || out.space == Space::device))
      throw Infrastructure(
          fmt::format("fault {}: expected host buffers to edit, met device memory "
                      "in {} at {}; choose a transport that stages on the host",
                      print(bench.spec), name(c.op), site_text(c.file, c.line)));
  }
  static void run(Step step, Bench& b, Flight& f) {
    if (step) step(b, f);
  }
};

FaultDoor::FaultDoor(FaultSpec spec, RankState& state, Door& next) {
  const FaultRow& row = row_of(spec.op);
  impl_.reset(new Impl{Bench{std::move(spec), state, next}, row, row.op.kind == "stale"});
}
FaultDoor::~FaultDoor() = default;

Ticket FaultDoor::start(const Call& call, const View& in, const View& out, Stream stream) {
  Impl& m = *impl_;
  Bench& b = m.bench;
  if (!m.on_axis(call)) return b.next.start(call, in, out, stream);
  const int number = ++b.sites;
  const bool faulted = !b.priming && m.names(number);
  if (!applies(m.row.op, call) || !(faulted || m.remembers))
    return b.next.start(call, in, out, stream);
  m.require_host(call, in, out);

  auto f = std::make_unique<Flight>();
  f->call = f->made = call;
  f->in = f->sent = in;
  f->out = f->received = out;
  f->stream = stream;
  f->number = number;
  f->faulted = faulted;
  f->acts = faulted && m.here();
  if (faulted) m.run(m.row.steps.before, b, *f);
  if (f->acts) m.run(m.row.steps.issue, b, *f);
  if (f->issued) f->ticket = b.next.start(f->made, f->sent, f->received, stream);
  const Ticket t = Impl::own_ticket | ++m.last;
  m.flights.emplace(t, std::move(f));
  return t;
}

void FaultDoor::wait(Ticket ticket, Stream stream) {
  Impl& m = *impl_;
  Bench& b = m.bench;
  auto node = m.flights.extract(ticket);
  if (node.empty()) return b.next.wait(ticket, stream);
  Flight& f = *node.mapped();
  if (f.issued) b.next.wait(f.ticket, stream);
  if (f.faulted) m.run(m.row.steps.after, b, f);
  if (!m.row.steps.edit || !(f.acts || m.remembers)) return;
  const auto healthy = bytes_of(f.out);
  m.run(m.row.steps.edit, b, f);
  b.active = b.active || !same_bytes(f.out, healthy);
}

void FaultDoor::priming(bool on) { impl_->bench.priming = on; }
bool FaultDoor::active() const { return impl_->bench.active; }
void FaultDoor::new_shot() {
  Bench& b = impl_->bench;
  b.sites = 0;
  ++b.shots;
  b.shifted.clear();
}

}  // namespace shardproof
