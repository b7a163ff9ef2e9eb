// Ranks that live across cases, and what became of each of them. A world runs bytes to bytes: it
// knows nothing of cases. The parent that owns a world has no threads, MPI or CUDA in it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "oracle/comm/ledger.hpp"

namespace shardproof {

struct RankHost {
  int rank = 0, size = 1;
  Door* door = nullptr;  // the transport; lockstep is part of it (see lockstep.hpp)
  Trace* trace = nullptr;
  bool threads = false;  // ranks share the process
  // The transport reads phase, shot and case from here; the executor writes.
  RankState* state = nullptr;
  int local_rank = -1;  // among the ranks of this machine; -1: its launcher says
};
// Runs one job on one rank and returns its record. Must not exit or throw (what it throws all the
// same becomes RankOutcome::threw). Called again for every job in the same process.
using RankMain = std::function<std::vector<std::byte>(RankHost&, std::span<const std::byte> job)>;

struct WorldSpec {
  std::string transport = "processes";  // processes | threads | mpi
  int ranks = 1;
  double deadline_scale = 1;
  bool in_process = false;  // threads only: no isolation
  bool lockstep = true;
  std::string program;                      // mpi: argv[0], re-entered with --worker
  std::string mpiexec;                      // mpi: launcher and its options
  std::string run_directory;                // mpi: traces and records
  std::function<void()> meanwhile = [] {};  // called again and again while a job is waited for
};

struct RankOutcome {
  enum End : uint8_t {
    finished,   // record is whole
    threw,      // text
    exited,     // left by itself: `code`, 0 included
    signalled,  // `code` is the signal: killed, crashed
    hung,       // no progress until the deadline; killed by the parent; `code` is the signal that
                // had stopped it, or 0
    ended,      // healthy, killed because another rank failed
  } end = ended;
  int code = 0;
  std::string text;  // threw: what; signalled: "SIGSEGV at address 0x0"
  std::vector<std::byte> record;
  Trace trace;  // where it stood last
};

class World {
 public:
  virtual ~World() = default;
  // One job on all ranks. When any outcome is not `finished` or `threw`, the world is dead: the
  // caller starts another for the next job. deadline: seconds for the job, unscaled.
  virtual std::vector<RankOutcome> run(std::span<const std::byte> job, uint32_t case_number,
                                       double deadline) = 0;
  virtual bool alive() const = 0;
  // Which rank's process ended by itself after its last job, and how; "" for none. Nobody's job
  // could tell it.
  virtual std::string lost() { return ""; }
  virtual std::string description() const = 0;  // "processes, 4 ranks"
};
// Throws BadInput for more ranks than the transport can give, Infrastructure when it cannot start.
std::unique_ptr<World> start_world(const WorldSpec&, RankMain);
int most_ranks(const std::string& transport);

inline constexpr double call_deadline_seconds = 10, case_deadline_seconds = 30,
                        kill_after_seconds = 31;

}  // namespace shardproof
