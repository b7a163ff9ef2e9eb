// What the parent and the MPI ranks say to each other: frames on one stream socket a rank, and a
// page that they map both where they share a machine. Neither side needs MPI for it; the program
// itself never links MPI, ranks load it as a module after the start.
//
//   parent:  starts `mpiexec -n p self --worker ...`, listens, sends jobs and releases
//   worker:  a supervisor (waits, notes how the rank ended) and its child, the MPI rank
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "oracle/comm/door.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/comm/world.hpp"

namespace shardproof {

// Shared by supervisor, rank and, on one machine, the parent: file page.<pid of the supervisor>.
struct MpiPage {
  std::atomic<uint32_t> ended;  // 1: status holds what waitpid gave the supervisor
  int32_t status = 0;
  std::atomic<int32_t> signal;  // of a fault of its own that the crash handler caught; 0: none
  uint64_t address = 0;
  std::atomic<int32_t> rank_pid;
  std::atomic<uint64_t> polls;     // looks at unfinished messages
  std::atomic<uint64_t> progress;  // calls begun and ended
  std::atomic<uint32_t> working;   // between the receipt of a job and its record
  Trace trace;
};

struct Frame {
  enum Kind : uint32_t { hello, job, record, threw, release, stop, leaks } kind = hello;
  uint32_t number = 0;  // job number; release: cause; record: 1 where the door was released;
                        // threw: 1 where the rank's harness threw
  uint64_t bytes = 0;   // that follow; leaks: LeakSanitizer's words, after a stop
};

struct Hello {
  uint64_t token = 0;
  int32_t rank = 0, size = 0, supervisor = 0, pid = 0;
  char host[64] = {};
  char library[192] = {};
};

// Blocking, whole, restarted after signals. False: the other side is gone.
bool send_frame(int fd, Frame, std::span<const std::byte>);
bool receive_exactly(int fd, void* to, size_t bytes);
// Frames longer than this are no frames of ours.
inline constexpr uint64_t longest_frame = uint64_t(1) << 36;

// "unix:/run/dir/parent" or "tcp:host:port". Return -1 with errno.
int connect_to(const std::string& address);

// Module interface: loaded by the rank, linked with MPI.
struct MpiSession {
  virtual ~MpiSession() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string library() const = 0;  // version text of the MPI library
  struct Context {
    RankState* state = nullptr;
    MpiPage* page = nullptr;
    double deadline_scale = 1;
    const double* patience = nullptr;  // of the job: its calls wait so many times as long
    bool lockstep = true;
    // Looked at while waiting: a release that the parent sent.
    std::optional<std::pair<Released::Cause, std::string>> (*released)(void*) = nullptr;
    void* self = nullptr;
  };
  virtual std::unique_ptr<Door> door(const Context&) = 0;
  // Bytes from rank to rank outside of any job, on a communicator of their own; polled.
  virtual void send(int to, std::span<const std::byte>) = 0;
  virtual std::vector<std::byte> receive(int from) = 0;
  // Ends of a job: sequence numbers start anew; false where messages are left over.
  virtual bool end_job() = 0;
  virtual void finalize() = 0;
};
using OpenMpiSession = MpiSession* (*)(int* argc, char*** argv);
inline constexpr const char* open_mpi_session_name = "shardproof_open_mpi_session";
inline constexpr const char* mpi_module_name = "shardproof_mpi.so";

// Loads the module and starts MPI in this process. Throws Infrastructure.
MpiSession* open_mpi_session(int* argc, char*** argv);

// Notes a crash in a page that outlives the process; on a stack of its own.
void watch_for_crashes(MpiPage*);

// The world of a program that was started under a launcher; rank 0 only.
std::unique_ptr<World> start_outside_world(const WorldSpec&, RankMain);

// Where a module lies: in SHARDPROOF_MODULES, beside the program, in ../lib/shardproof, or in the
// folder that was named. Empty: not there; `tried` gets the places.
std::string find_module(const std::string& file, std::string* tried = nullptr);
void look_for_modules_in(const std::string& folder);  // "": nowhere else

}  // namespace shardproof
