// What the operators of faults.hpp are made of: four steps around the healthy call; a missing step
// does nothing.
//
//   before   on every member: keep the input, fetch what the fault needs from others
//   issue    on the faulty rank: make another call, or none; elsewhere the call as it is
//   after    on every member, once the call is complete: fetch from others
//   edit     on the faulty rank: change the result
//
// Calls that a payload fault makes by itself are in `before` and `after`, which every member
// passes whether or not it is the faulty one: the sequence of calls stays equal on all ranks.
// "Faulty" is every rank, or the one that the text names, or world rank 0 for an operator that
// acts on one rank by nature.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oracle/comm/faults.hpp"

namespace shardproof {

// A faulted call between start and wait. Views at the door are contiguous.
struct Flight {
  Call call;     // as it came in
  View in, out;  // the caller's
  Stream stream = nullptr;
  int number = 0;        // of the site
  bool faulted = false;  // the site is one that the spec names
  bool acts = false;     // and this rank is a faulty one
  Call made;             // as it is passed on
  View sent, received;   // the buffers that travel
  bool issued = true;
  Ticket ticket = 0;           // of the next door
  std::vector<std::byte> own;  // `in` as it was at start
  std::vector<std::byte> sent_bytes, received_bytes;
  std::vector<std::byte> foreign;  // what `before` or `after` fetched
  bool fetched = false;

  int p() const { return call.group->size(); }
  int me() const { return call.group->me; }
};

// What the steps work with on one rank.
class Bench {
 public:
  Bench(FaultSpec s, RankState& r, Door& d) : spec(std::move(s)), state(r), next(d) {}

  FaultSpec spec;
  RankState& state;
  Door& next;
  bool priming = false;
  bool active = false;
  int shots = 0, sites = 0;
  std::map<int, std::vector<std::byte>> primed;  // results of the priming shot by site
  std::map<std::pair<std::string, int>, std::vector<std::byte>>
      shifted;  // last received at (call site, hop)

  void call(const Call&, const View& in, const View& out, Stream);  // start and wait
  const Group* whole_world();
  // Whether the group is one of the mesh: then every rank of the world is in one that makes the
  // call.
  bool cuts_the_world(const Group&) const;
  // The group of another set of axes of the mesh, of the same size; null where there is none. The
  // fewest axes first, in the order of the mesh, so that every rank chooses the same set.
  const Group* same_sized_other(const Group&);

 private:
  std::unique_ptr<Group> find_other(const Group&) const;
  Group group_of(std::vector<int> members, std::string label) const;
  std::map<std::vector<int>, std::unique_ptr<Group>> others_;
  std::unique_ptr<Group> world_;
};

using Step = void (*)(Bench&, Flight&);
struct Steps {
  Step before = nullptr, issue = nullptr, after = nullptr, edit = nullptr;
};
struct FaultRow {
  FaultOperator op;
  Steps steps;
};
const std::vector<FaultRow>& fault_rows();

}  // namespace shardproof
