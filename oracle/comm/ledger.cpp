// Records what a rank asks of others, and counts what that costs.
//
// Wire bytes are a model, the ring that nccl-tests' bus bandwidth factors describe: a rank passes
// blocks to its successor. They are no claim about what a transport does; what is asserted is the
// logical payload and totals, which are integers for every extent.
#include "oracle/comm/ledger.hpp"

#include "oracle/comm/copies.hpp"
#include "oracle/joined.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace shardproof {

std::string members_text(const std::vector<int>& members) {
  bool run = members.size() > 2;
  for (size_t i = 1; i < members.size(); ++i) run = run && members[i] == members[i - 1] + 1;
  if (run) return fmt::format("{{{}-{}}}", members.front(), members.back());
  return fmt::format("{{{}}}", joined(members, ","));
}

std::string site_text(const char* file, int line) {
  return std::string(file_of(file)) + ':' + std::to_string(line);
}

namespace {

std::string what(const LedgerEntry& e) {
  const std::string payload = fmt::format("{} x {}", e.count, name(e.dtype));
  switch (e.op) {
    case Op::all_reduce:
    case Op::reduce_scatter:
      return fmt::format("{} {}, {}", name(e.op), name(e.reduce), payload);
    case Op::shift:
      return fmt::format("shift {:+} (-> {}, <- {}), {}", e.hop, e.to, e.from, payload);
    case Op::broadcast:
      return fmt::format("broadcast from member {}, {}", e.hop, payload);
    case Op::all_to_all:  // what is due says no more than the sum of the blocks
      if (e.send.empty()) break;
      return fmt::format("all_to_all, {} (sends {}, receives {})", payload, joined(e.send, ","),
                         joined(e.recv, ","));
    case Op::barrier:
      return "barrier";
    case Op::all_gather:
      break;
  }
  return fmt::format("{}, {}", name(e.op), payload);
}

// Blocks of a buffer of n elements over p ranks: ceil or floor, the larger first.
int64_t block(int64_t n, int p, int i) { return n / p + ((i % p) < n % p); }

}  // namespace

std::string text(const LedgerEntry& e) {
  return fmt::format("call {} of {} on {}{}: {}, at {}", e.number, name(e.phase), e.label,
                     members_text(e.members), what(e), e.site);
}

int64_t logical_bytes(const LedgerEntry& e) {
  const int64_t in = e.count * int64_t(size_of(e.dtype));
  return e.op == Op::all_gather ? in * int64_t(e.members.size()) : in;
}

int64_t ring_bytes_total(Op op, int64_t payload, int p) {
  if (p < 2) return 0;
  switch (op) {
    case Op::all_reduce:
      return 2 * (p - 1) * payload;
    case Op::reduce_scatter:
    case Op::all_gather:
    case Op::all_to_all:
    case Op::broadcast:
      return (p - 1) * payload;
    case Op::shift:
      return p * payload;
    case Op::barrier:
      break;
  }
  return 0;
}

// In the reduce-scatter of a ring, rank r first passes on block r and last holds block r+1 whole:
// it sends every block but r+1. The all-gather then starts from block r+1 and ends by receiving
// block r+2, the one that it never sends.
int64_t ring_bytes_of_rank(Op op, int64_t n, int64_t element_bytes, int p, int r) {
  if (p < 2) return 0;
  const int64_t scattered = n - block(n, p, r + 1), gathered = n - block(n, p, r + 2);
  switch (op) {
    case Op::all_reduce:
      return (scattered + gathered) * element_bytes;
    case Op::reduce_scatter:
      return scattered * element_bytes;
    case Op::all_gather:
      return gathered * element_bytes;
    case Op::all_to_all:
      return (n - block(n, p, r)) * element_bytes;
    case Op::shift:
      return n * element_bytes;
    case Op::broadcast:  // a chain from member 0; the last one only receives
      return r == p - 1 ? 0 : n * element_bytes;
    case Op::barrier:
      break;
  }
  return 0;
}

int64_t row_bytes(const LedgerEntry& e, int world_rank) {
  int64_t elements = 0;
  for (size_t i = 0; i < e.send.size(); ++i)
    if (e.members[i] != world_rank) elements += e.send[i];
  return elements * int64_t(size_of(e.dtype));
}

// ---- the decorator

namespace {

int peer(const Group& g, int64_t distance) {
  const int64_t p = g.size();
  return g.members[size_t(((g.me + distance) % p + p) % p)];
}

LedgerEntry entry_of(const Call& c, Phase phase) {
  LedgerEntry e;
  e.op = c.op;
  e.reduce = c.reduce;
  e.dtype = c.dtype;
  e.count = c.count;
  e.hop = c.root_or_hop;
  e.label = c.group->label;
  e.members = c.group->members;
  if (c.op == Op::shift) {
    e.to = peer(*c.group, c.root_or_hop);
    e.from = peer(*c.group, -int64_t(c.root_or_hop));
  }
  e.send = c.send;
  e.recv = c.recv;
  e.phase = phase;
  e.site = site_text(c.file, c.line);
  return e;
}

int next_number(const std::vector<LedgerEntry>& entries, Phase phase, const std::string& label) {
  for (auto e = entries.rbegin(); e != entries.rend(); ++e)
    if (e->phase == phase && e->label == label) return e->number + 1;
  return 1;
}

// Cut where it does not fit.
template <size_t n>
void write_text(char (&to)[n], const std::string& text) {
  to[text.copy(to, n - 1)] = 0;
}

void write_trace(Trace& t, const LedgerEntry& e, const Call& c, const RankState& state) {
  const bool same_phase =
      t.phase == state.phase && t.shot == state.shot && t.case_number == state.case_number;
  t.calls_in_phase = same_phase ? t.calls_in_phase + 1 : 1;
  t.phase = state.phase;
  t.shot = state.shot;
  t.case_number = state.case_number;
  t.op = c.op;
  t.reduce = c.reduce;
  t.dtype = c.dtype;
  t.hop = c.root_or_hop;
  t.count = c.count;
  t.returned = false;
  t.group = c.group->id;
  write_text(t.label, e.label);
  const size_t shown = std::min(e.members.size(), sizeof t.members / sizeof t.members[0]);
  std::copy_n(e.members.begin(), shown, t.members);
  t.group_size = int16_t(shown);
  write_text(t.site, e.site);
}

}  // namespace

Ticket LedgerDoor::start(const Call& call, const View& in, const View& out, Stream stream) {
  require_no_copy(state_.trace);
  if (call.group->size() == 1) return next_.start(call, in, out, stream);  // a copy on a device
  LedgerEntry e = entry_of(call, state_.phase);
  e.number = next_number(entries_, e.phase, e.label);
  if (state_.trace) write_trace(*state_.trace, e, call, state_);
  entries_.push_back(std::move(e));
  return last_ = next_.start(call, in, out, stream);
}

void LedgerDoor::wait(Ticket ticket, Stream stream) {
  next_.wait(ticket, stream);
  if (state_.trace && ticket == last_) state_.trace->returned = true;
}

std::vector<LedgerEntry> LedgerDoor::take() { return std::exchange(entries_, {}); }

}  // namespace shardproof
