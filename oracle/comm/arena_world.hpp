// The parent's side of a world whose ranks share an arena: posts a job, watches the processes,
// gives up on what is lost or hung, and says what became of each rank.
#pragma once
#include <sys/types.h>

#include <memory>
#include <vector>

#include "oracle/comm/arena.hpp"
#include "oracle/comm/world.hpp"

namespace shardproof {

// A forked process and the ranks that live in it.
struct RankProcess {
  pid_t pid = 0;
  int handle = -1;  // pidfd, -1 where the kernel has none
  int first_rank = 0, ranks = 1;
  bool reaped = false;
  bool ended_by_us = false;
  int status = 0;      // of waitpid
  int stopped_by = 0;  // a signal, when it was given up
  bool holds(int rank) const { return rank >= first_rank && rank < first_rank + ranks; }
};

// Forks; the child runs `body` and never returns. Throws Infrastructure where the system refuses.
RankProcess fork_ranks(int first_rank, int ranks, const std::function<void()>& body);

class ArenaWorld : public World {
 public:
  ArenaWorld(const WorldSpec&, std::shared_ptr<Arena>);
  ~ArenaWorld() override;
  std::vector<RankOutcome> run(std::span<const std::byte> job, uint32_t case_number,
                               double deadline) override;
  bool alive() const override;
  std::string lost() override;
  std::string description() const override;

 protected:
  // Before the job's outcomes are read, nothing of the world may run on: ranks that are left end.
  void end_processes();
  void look_for_stopped();

  const WorldSpec spec_;
  std::shared_ptr<Arena> arena_;
  mutable std::vector<RankProcess> processes_;
  bool dead_ = false;

 private:
  // deaf: all that is due is of ranks that waited, were told that it is over, and did not end.
  enum class End { all_done, peer_lost, overdue, deaf, interrupted };
  End watch(double deadline);
  void poll_until(int64_t wake_ns) const;
  void reap() const;
  bool everyone_settled(uint32_t number) const;
  bool is_due(int rank, uint32_t number) const;  // its record is, or its end
  enum class Stood { waiting, running };
  bool is_due(Stood, uint32_t number) const;
  int lost_rank(uint32_t number) const;
  void give_up(int rank);
  std::string how_it_ended(int rank) const;
  int signal_that_ended(int rank) const;  // 0: it left by itself
  const RankProcess* process_of(int rank) const;
  RankOutcome outcome(int rank, uint32_t number, End) const;
  void tell_death(int rank, const RankProcess&, uint32_t number, RankOutcome&) const;
  void read_record(int rank, RankOutcome&) const;
};

}  // namespace shardproof
