// Transport `processes`: every rank is a forked process. A crash costs one rank, and statics behave
// as in production.
#include "oracle/comm/arena_world.hpp"
#include "oracle/comm/rank_loop.hpp"
#include "oracle/comm/transports.hpp"

namespace shardproof {
namespace {

class ProcessWorld : public ArenaWorld {
 public:
  ProcessWorld(const WorldSpec& spec, const RankMain& main)
      : ArenaWorld(spec, std::make_shared<Arena>(spec.ranks, spec.deadline_scale, spec.lockstep)) {
    processes_.reserve(size_t(spec.ranks));
    for (int rank = 0; rank < spec.ranks; ++rank) {
      processes_.push_back(fork_ranks(rank, 1, [&] {
        report_crashes(*arena_, rank);
        serve(*arena_, rank, /*threads=*/false, main);
      }));
    }
  }
};

}  // namespace

std::unique_ptr<World> start_processes(const WorldSpec& spec, const RankMain& main) {
  return std::make_unique<ProcessWorld>(spec, main);
}

}  // namespace shardproof
