// The door of ranks that share an arena: members meet in a slot, each reads what the others left.
//
// start copies `in` into the own payload area and posts a fingerprint; it never waits for a peer
// (but for a free slot, when slots_of_group calls of one group are in flight). wait sleeps until
// all members have posted (shift: the two peers), compares fingerprints, then computes the own
// result from the posts; from there on nothing can interrupt it, and what it reads outlives its
// writer. Several calls may be in flight and may be waited for in any order.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "oracle/comm/arena.hpp"
#include "oracle/comm/meeting.hpp"

namespace shardproof {

class ArenaDoor : public Door, public Meeting {
 public:
  ArenaDoor(const Arena& arena, RankState& state);
  Ticket start(const Call&, const View& in, const View& out, Stream) override;
  void wait(Ticket, Stream) override;
  void meet(const Call&, int64_t receives) override;
  void look() override;
  void release(Released::Cause, const std::string& why) override;
  void new_job();  // sequences and tickets begin anew

 private:
  struct Pending {
    Ticket ticket = 0;
    int group = 0, slot = 0, me = 0;
    Op op = Op::barrier;
    Reduce reduce = Reduce::none;
    DType dtype = DType::f64;
    int64_t count = 0;
    int root_or_hop = 0;
    View out;
    std::vector<int64_t> recv;
  };
  struct Block {  // of the own payload area, until the slot's generation has changed
    int64_t offset = 0, bytes = 0;
    const Slot* slot = nullptr;
    uint32_t generation = 0;
  };

  void note(const Call&);
  Pending begin(const Call&, const View& in, const View& out, int64_t bytes, int64_t receives);
  void arrive(const Pending&);
  Pending pending(const Call&, const View& out);
  int group_of(const Group&);
  int64_t allocate(int64_t bytes);
  int64_t stage(const Call&, const View& in, int64_t bytes);
  int slot_for(int group, uint32_t sequence);
  void post(const Pending&, const Fingerprint&, int64_t offset, int64_t bytes);
  bool met(const Pending&) const;
  bool met_at(int group, int slot, int member) const;
  void await(const Pending&);
  void begin_waiting(std::atomic<uint32_t>& bell);
  void sleep_until_called(std::atomic<uint32_t>& bell, const GroupPage&);
  void release_overdue(const GroupPage&, int64_t begun);
  void compare(const Pending&);
  std::optional<std::string> difference(const Pending&) const;
  void compute(const Pending&);
  void give_up_on_the_dead() const;
  void all_reduce(const Pending&);
  void all_gather(const Pending&);
  void reduce_scatter(const Pending&);
  void all_to_all(const Pending&);
  void take(const std::byte* from, int64_t available, int64_t bytes, std::byte* to) const;
  const std::byte* payload_of(const Pending&, int member) const;
  const int64_t* counts_of(const Pending&,
                           int member) const;  // all_to_all: sends, then expectations
  int64_t least_posted(const Pending&) const;
  std::vector<const std::byte*> payloads(const Pending&, int64_t skip) const;
  void finish(const Pending&);

  const Arena& arena_;
  RankState& state_;
  RankPage& page_;
  std::vector<Pending> pending_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> sequences_;
  std::map<std::vector<int>, int> groups_;  // members -> index in the arena
  Ticket last_ticket_ = 0;
  int64_t high_water_ = 0;
  Trace last_note_;
};

}  // namespace shardproof
