// Transport `threads`: the rendezvous of `processes` with ranks as threads of one process, for the
// thread sanitizer and debuggers. One forked process holds them: a crash there ends all ranks, not
// the parent. With in_process they live in the calling process, without isolation.
#include <thread>

#include "oracle/comm/arena_world.hpp"
#include "oracle/comm/copies.hpp"
#include "oracle/comm/rank_loop.hpp"
#include "oracle/comm/transports.hpp"

namespace shardproof {
namespace {

class ThreadWorld : public ArenaWorld {
 public:
  ThreadWorld(const WorldSpec& spec, const RankMain& main)
      : ArenaWorld(spec, std::make_shared<Arena>(spec.ranks, spec.deadline_scale, spec.lockstep)) {
    processes_.push_back(fork_ranks(0, spec.ranks, [&] {
      std::vector<std::jthread> ranks;
      for (int rank = 0; rank < spec.ranks; ++rank) {
        ranks.emplace_back([&, rank] {
          report_crashes(*arena_, rank);
          serve(*arena_, rank, /*threads=*/true, main);
        });
      }
    }));
  }
};

class InProcessWorld : public ArenaWorld {
 public:
  InProcessWorld(const WorldSpec& spec, const RankMain& main)
      : ArenaWorld(spec, std::make_shared<Arena>(spec.ranks, spec.deadline_scale, spec.lockstep)) {
    watch_for_copies();
    for (int rank = 0; rank < spec.ranks; ++rank) {
      threads_.emplace_back(
          [arena = arena_, main, rank] { serve(*arena, rank, /*threads=*/true, main); });
    }
  }
  // A thread cannot be ended from outside: one that hangs is left to itself with its share of the
  // arena.
  ~InProcessWorld() override {
    arena_->quit();
    const uint32_t last_job = arena_->head().job.load() - 1;
    for (int rank = 0; rank < spec_.ranks; ++rank) {
      const bool idle = last_job == 0 || arena_->page(rank).finished.load() == last_job;
      if (idle) {
        threads_[size_t(rank)].join();
      } else {
        threads_[size_t(rank)].detach();
      }
    }
  }
  std::string description() const override { return ArenaWorld::description() + ", in process"; }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<World> start_threads(const WorldSpec& spec, const RankMain& main) {
  if (spec.in_process) return std::make_unique<InProcessWorld>(spec, main);
  return std::make_unique<ThreadWorld>(spec, main);
}

}  // namespace shardproof
