// Do all members make the same call? Compared before any payload is combined.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "oracle/comm/ledger.hpp"

namespace shardproof {

// What a member says of the call that it is about to make. Fixed size, plain data: it travels.
struct Fingerprint {
  uint64_t group = 0;
  uint32_t sequence = 0;  // calls made on this group so far in the case
  int32_t world_rank = 0;
  Op op = Op::barrier;
  Reduce reduce = Reduce::none;
  DType dtype = DType::f64;
  Phase phase = Phase::idle;
  int32_t root_or_hop = 0;
  int64_t count = 0;   // elements of `in`
  int64_t recv = 0;    // shift: elements expected
  char site[80] = {};  // "linear_row.cpp:41"; may differ in right code
};
Fingerprint fingerprint(const Call&, const RankState&, uint32_t sequence, int64_t recv);

// Compares op, reduction, dtype, root or hop, sequence and group of all members, and counts where
// the op demands equal ones (all but all_to_all and shift, whose counts agree pairwise: see
// pairwise_mismatch). Members in group order. Empty: they agree. Else both sides with their call
// sites, the same text on every member: the member that differs from the majority is named.
std::optional<std::string> mismatch(std::span<const Fingerprint> members);
// send_count of the sender against recv_count of the receiver.
std::optional<std::string> pairwise_mismatch(const Fingerprint& sender, int64_t sends,
                                             const Fingerprint& receiver, int64_t expects);

}  // namespace shardproof
