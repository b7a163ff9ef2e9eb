// Lockstep: members of a group must make the same call. MPI accepts a mismatched reduction, root or
// dtype of equal size and returns garbage; here the difference is named before data are combined.
#include "oracle/comm/lockstep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "oracle/comm/standing.hpp"
#include "oracle/joined.hpp"

namespace shardproof {
namespace {

bool counts_pairwise(Op op) { return op == Op::all_to_all || op == Op::shift; }

// Fields in which two members may not differ.
struct Differences {
  bool op, reduce, dtype, root, count, sequence, group;
  bool any() const { return op || reduce || dtype || root || count || sequence || group; }
};

Differences differences(const Fingerprint& a, const Fingerprint& b) {
  return {a.op != b.op,
          a.reduce != b.reduce,
          a.dtype != b.dtype,
          a.root_or_hop != b.root_or_hop,
          a.count != b.count && !(a.op == b.op && counts_pairwise(a.op)),
          a.sequence != b.sequence,
          a.group != b.group};
}

Differences merged(const Differences& a, const Differences& b) {
  return {a.op || b.op,       a.reduce || b.reduce,     a.dtype || b.dtype, a.root || b.root,
          a.count || b.count, a.sequence || b.sequence, a.group || b.group};
}

std::string text(const Differences& d, Op op) {
  std::vector<std::string> fields;
  if (d.op) fields.push_back("operation");
  if (d.reduce) fields.push_back("reduction");
  if (d.dtype) fields.push_back("dtype");
  if (d.root) fields.push_back(op == Op::shift ? "hop" : "root");
  if (d.count) fields.push_back("count");
  if (d.sequence) fields.push_back("sequence");
  if (d.group) fields.push_back("group");
  return joined(fields, ", ");
}

// "call 5 of its group, in backward: all_gather, 12 x f32, at linear_row.cpp:44"
std::string text(const Fingerprint& f) {
  std::string call = name(f.op);
  if (f.reduce != Reduce::none) call += fmt::format(" {}", name(f.reduce));
  if (f.op == Op::broadcast) call += fmt::format(" from member {}", f.root_or_hop);
  if (f.op == Op::shift) call += fmt::format(" hop {:+}", f.root_or_hop);
  if (f.op != Op::barrier) call += fmt::format(", {} x {}", f.count, name(f.dtype));
  if (f.op == Op::shift) call += fmt::format(", expects {}", f.recv);
  if (f.site[0]) call += fmt::format(", at {}", f.site);
  return fmt::format("{}, call {} on its group: {}", name(f.phase), f.sequence + 1, call);
}

// Members that make the same call, as indices; in order of their first member.
std::vector<std::vector<size_t>> classes(std::span<const Fingerprint> members) {
  std::vector<std::vector<size_t>> found;
  for (size_t i = 0; i < members.size(); ++i) {
    const auto same = std::find_if(found.begin(), found.end(), [&](const auto& c) {
      return !differences(members[c.front()], members[i]).any();
    });
    if (same == found.end()) {
      found.push_back({i});
    } else {
      same->push_back(i);
    }
  }
  return found;
}

std::vector<int> world_ranks(std::span<const Fingerprint> members,
                             const std::vector<size_t>& some) {
  std::vector<int> ranks;
  for (size_t i : some) ranks.push_back(members[i].world_rank);
  return ranks;
}

// The largest class is taken for right; each of the others is said to differ from it. On a tie
// nobody is accused: both sides are named alike.
std::string explain(std::span<const Fingerprint> members) {
  auto sides = classes(members);
  std::stable_sort(sides.begin(), sides.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  const bool majority = sides[0].size() > sides[1].size();
  Differences all{};
  std::vector<int> odd;
  for (size_t s = 1; s < sides.size(); ++s) {
    all = merged(all, differences(members[sides[0][0]], members[sides[s][0]]));
    for (int rank : world_ranks(members, sides[s])) odd.push_back(rank);
  }
  std::sort(odd.begin(), odd.end());
  const Op op = members[sides[0][0]].op;
  std::string lines = majority ? fmt::format("{} {} from the other members in {}", rank_list(odd),
                                             odd.size() == 1 ? "differs" : "differ", text(all, op))
                               : fmt::format("members of a group differ in {}", text(all, op));
  for (const auto& side : sides) {
    lines += fmt::format("\n{}: {}", rank_list(world_ranks(members, side)), text(members[side[0]]));
  }
  return lines;
}

}  // namespace

Fingerprint fingerprint(const Call& call, const RankState& state, uint32_t sequence, int64_t recv) {
  Fingerprint f;
  f.group = call.group ? call.group->id : 0;
  f.sequence = sequence;
  f.world_rank = state.rank;
  f.op = call.op;
  f.reduce = call.reduce;
  f.dtype = call.dtype;
  f.phase = state.phase;
  f.root_or_hop = call.root_or_hop;
  f.count = call.count;
  f.recv = recv;
  const char* file = file_of(call.file);
  if (!*file) return f;
  const auto end = fmt::format_to_n(f.site, sizeof(f.site) - 1, "{}:{}", file, call.line);
  *end.out = 0;
  return f;
}

std::optional<std::string> mismatch(std::span<const Fingerprint> members) {
  for (size_t i = 1; i < members.size(); ++i) {
    if (differences(members[0], members[i]).any()) return explain(members);
  }
  return std::nullopt;
}

std::optional<std::string> pairwise_mismatch(const Fingerprint& sender, int64_t sends,
                                             const Fingerprint& receiver, int64_t expects) {
  const Differences d = differences(sender, receiver);
  if (!d.any() && sends == expects) return std::nullopt;
  const int s = sender.world_rank, r = receiver.world_rank;
  if (d.any()) {
    const auto& [low, high] = s <= r ? std::tie(sender, receiver) : std::tie(receiver, sender);
    return fmt::format("ranks {} and {} differ in {}\nrank {}: {}\nrank {}: {}", low.world_rank,
                       high.world_rank, text(d, sender.op), low.world_rank, text(low),
                       high.world_rank, text(high));
  }
  return fmt::format(
      "rank {} sends {} elements to rank {}, which expects {}\nrank {}: {}\nrank {}: {}", s, sends,
      r, expects, s, text(sender), r, text(receiver));
}

}  // namespace shardproof
