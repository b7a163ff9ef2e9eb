// What a subject asked of other ranks, call by call, and the closed forms that it is held against.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "oracle/comm/door.hpp"

namespace shardproof {

struct LedgerEntry {
  Op op = Op::barrier;
  Reduce reduce = Reduce::none;
  DType dtype = DType::f64;
  int64_t count = 0;         // elements of `in`
  int hop = 0;               // shift: hop; broadcast: root
  std::string label;         // "tp"
  std::vector<int> members;  // world ranks
  int to = -1, from = -1;    // shift: peers as world ranks
  std::vector<int64_t> send, recv;
  Phase phase = Phase::idle;
  int number = 0;    // from 1 within (phase, label): the site of a fault
  std::string site;  // "linear_row.cpp:41"
  bool operator==(const LedgerEntry&) const = default;
};
std::string text(const LedgerEntry&);  // "call 2 of backward on tp{0-3}: all_reduce sum, 12 x f32,
                                       // at linear_row.cpp:41"

// Logical payload of one call in bytes: AR, RS the input buffer; AG the output buffer; all-to-all
// the local send buffer; shift the message. One rank.
int64_t logical_bytes(const LedgerEntry&);
// Bytes that a ring (pairwise for all-to-all and shift) sends in total over the ranks of the group:
// AR 2(p-1)N, RS and AG (p-1)N, all-to-all of equal blocks (p-1)N, shift pN, broadcast (p-1)N, with
// N the logical payload of one rank. Exact integers, whether or not p divides N. Uneven all-to-all:
// the sum over the ranks of row_bytes.
int64_t ring_bytes_total(Op, int64_t payload_bytes, int ranks);
// Bytes that rank r sends in that ring when p need not divide N elements: blocks of ceil or floor,
// the larger first. They add up to ring_bytes_total, and AR = RS + AG on every rank.
int64_t ring_bytes_of_rank(Op, int64_t elements, int64_t element_bytes, int ranks, int r);
// all-to-all(v): bytes that the rank sends to the others, its row of the sum off the diagonal.
int64_t row_bytes(const LedgerEntry&, int world_rank);

std::string members_text(const std::vector<int>&);  // "{0-3}", "{0,2,4,6}"
std::string site_text(const char* file, int line);  // "linear_row.cpp:41"

// Where a rank stands within a case; shared by the decorators, the transport and the executor.
struct RankState {
  int rank = 0;
  int size = 1;
  const Mesh* mesh = nullptr;
  Phase phase = Phase::idle;
  uint32_t shot = 0;
  uint32_t case_number = 0;
  Trace* trace = nullptr;  // may be null
};

// Decorator: records every call before it is passed on, and keeps the trace page up to date.
class LedgerDoor : public Door {
 public:
  LedgerDoor(RankState& state, Door& next) : state_(state), next_(next) {}
  Ticket start(const Call&, const View& in, const View& out, Stream) override;
  void wait(Ticket, Stream) override;
  std::vector<LedgerEntry> take();  // entries since the last take, in order

 private:
  RankState& state_;
  Door& next_;
  std::vector<LedgerEntry> entries_;
  Ticket last_ = 0;  // of the call that the trace tells of
};

}  // namespace shardproof
