// Typed collectives on one group of ranks, as a subject calls them. Views may be strided: they are
// packed before and unpacked after the door. A group of size 1 copies and issues no call.
// Preconditions (dtypes equal, shapes fit, host or pinned or device space alike) are checked before
// anything is sent and throw std::invalid_argument with what was expected and met.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "oracle/comm/door.hpp"

namespace shardproof {

class Communicator {
 public:
  using Site = std::source_location;

  Communicator(Group group, Door& door, Stream stream = nullptr);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int size() const { return group_.size(); }
  int rank() const { return group_.me; }
  const Group& group() const { return group_; }

  // out = sum (max, avg) over the members of in; in may be out. Shapes equal.
  void all_reduce(const View& in, const View& out, Reduce = Reduce::sum, Site = Site::current());
  // out = concatenation of the members' in along dim. Wire: p-1 blocks received.
  void all_gather(const View& in, const View& out, int dim, Site = Site::current());
  // out = own block along dim (equal blocks, members in order) of the sum of in.
  void reduce_scatter(const View& in, const View& out, int dim, Reduce = Reduce::sum,
                      Site = Site::current());
  // in is cut along split_dim, block i goes to member i; out is the concatenation along concat_dim
  // of the blocks received. split/concat give block extents by member; empty: equal blocks.
  void all_to_all(const View& in, const View& out, int split_dim, int concat_dim,
                  std::span<const int64_t> split = {}, std::span<const int64_t> concat = {},
                  Site = Site::current());
  // in goes to member (rank + hop) mod p, out comes from (rank - hop) mod p. Asynchronous.
  [[nodiscard]] Ticket shift(const View& in, const View& out, int hop, Site = Site::current());
  void broadcast(const View& inout, int root, Site = Site::current());
  void barrier(Site = Site::current());

  // Asynchronous forms of the reductions and the gather (contiguous views along dim 0 only).
  [[nodiscard]] Ticket start_all_reduce(const View& in, const View& out, Reduce = Reduce::sum,
                                        Site = Site::current());
  [[nodiscard]] Ticket start_all_gather(const View& in, const View& out, Site = Site::current());
  [[nodiscard]] Ticket start_reduce_scatter(const View& in, const View& out, Reduce = Reduce::sum,
                                            Site = Site::current());
  void wait(Ticket);

  // The members cut into consecutive runs of `inner`: my run (label "cp/2" on "cp"), or, with
  // `across`, the members at my place in every run ("cp%2"). Where nothing is cut off, this
  // communicator itself. Kept and handed out again on the next call.
  Communicator& inner(int inner);
  Communicator& across(int inner);
  // Any subset that holds me, equal on all its members.
  Communicator& subgroup(std::vector<int> members_by_group_rank, const std::string& label);

 private:
  struct Side;
  struct Packed;
  struct Pending;
  Call call(Op, Reduce, const View&, int root_or_hop, const Site&) const;
  void run(const Call&, const Side& in, const Side& out);
  Ticket begin(const Call&, const View& in, const View& out);
  Ticket completed();
  int runs_of(int inner) const;

  Group group_;
  Door& door_;
  Stream stream_;
  std::unique_ptr<Packed> scratch_;  // of blocking calls
  Ticket completed_ = 0;
  std::map<Ticket, std::unique_ptr<Pending>> pending_;
  std::map<std::pair<std::string, std::vector<int>>, std::unique_ptr<Communicator>> parts_;
};

}  // namespace shardproof
