#include "oracle/gate_jobs.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <utility>

#include "oracle/clock.hpp"
#include "oracle/comm/door.hpp"
#include "oracle/comm/rank_loop.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/fields.hpp"
#include "oracle/interrupt.hpp"

namespace shardproof {
template <class Both>
static void fields(Both& both, Finding& f) {
  both(f.check, f.tensor, f.message, f.means, f.where, f.index, f.rank, f.ranks, f.numeric, f.got,
       f.want, f.error, f.bound, f.ratio, f.wrong, f.compared, f.pattern, f.holders);
}
template <class Both>
static void fields(Both& both, CheckResult& c) {
  both(c.check, c.verdict, c.ratio, c.exact, c.compared, c.note, c.findings, c.rank, c.index,
       c.where, c.bound);
}
template <class Both>
static void fields(Both& both, CaseResult& c) {
  both(c.line, c.canonical, c.replay, c.family, c.contract, c.lane, c.checks, c.state, c.seconds,
       c.steady_known, c.steady, c.calls, c.bytes);
}
template <class Both>
static void fields(Both& both, Catch& c) {
  both(c.check, c.ratio, c.margin, c.exact);
}
template <class Both>
static void fields(Both& both, ControlResult& c) {
  both(c.name, c.family, c.contract, c.lane, c.kind, c.imitates, c.expected_check, c.caught_by,
       c.witness, c.canonical, c.replay, c.outcome, c.reason, c.did_nothing, c.ratio, c.margin,
       c.exact, c.bound, c.rank, c.where, c.index, c.seconds, c.catches);
}
template <class Both>
static void fields(Both& both, SelfVerdict& v) {
  both(v.name, v.planted, v.failure);
}
template <class Both>
static void fields(Both& both, Tried& t) {
  both(t.pace.what, t.pace.contract, t.pace.alone, t.seconds);
}
template <class Both>
static void fields(Both& both, Begun& b) {
  both(b.process, b.line);
}

namespace {

enum Kind : uint32_t {
  a_case,
  a_control,
  a_verdict,
  a_witness,
  a_begin,
  finished,
  stopped,
  failed
};
struct Head {
  Kind kind;
  uint64_t bytes;
};

void write_all(int fd, const void* p, size_t n) {
  const char* c = static_cast<const char*>(p);
  while (n > 0) {
    const ssize_t w = ::write(fd, c, n);
    if (w < 0 && errno == EINTR) continue;
    if (w <= 0) ::_exit(3);  // the parent is gone
    c += w;
    n -= size_t(w);
  }
}

struct Running {
  size_t part = 0;
  pid_t pid = -1;
  int fd = -1;
  ResultSink* results = nullptr;
  bool cut_short = false;
  std::string line = {};  // that it has begun
  double looked_at = now(), stopped_for = 0;
  std::string at() const { return line.empty() ? "" : " in " + line; }
};

// Throws where somebody stopped the part and nobody continues it. Ctrl-Z stops this process as
// well: only time in which it looks counts. Of a debugger's stop a parent is told nothing.
void require_running(Running& part) {
  constexpr double patience = 5, longest_look = 0.2;
  siginfo_t how{};
  ::waitid(P_PID, id_t(part.pid), &how, WSTOPPED | WNOHANG | WNOWAIT);
  const double looked_at = std::exchange(part.looked_at, now());
  part.stopped_for =
      how.si_pid ? part.stopped_for + std::min(part.looked_at - looked_at, longest_look) : 0;
  if (part.stopped_for < patience) return;
  throw Infrastructure(fmt::format(
      "a job of the gate (process {}) was stopped by {}{} and nobody continued it for {:g} s; run "
      "it again",
      part.pid, signal_name(how.si_status), part.at(), patience));
}

// A part may be stopped in the middle of what it sends.
bool read_all(Running& part, void* p, size_t n) {
  char* c = static_cast<char*>(p);
  while (n > 0) {
    require_running(part);
    pollfd more{part.fd, POLLIN, 0};
    if (::poll(&more, 1, 100) <= 0) continue;
    const ssize_t r = ::read(part.fd, c, n);
    if (r < 0 && errno == EINTR) continue;
    if (r <= 0) return false;
    c += r;
    n -= size_t(r);
  }
  return true;
}

void send(int fd, Kind kind, std::span<const std::byte> bytes) {
  const Head head{kind, bytes.size()};
  write_all(fd, &head, sizeof head);
  write_all(fd, bytes.data(), bytes.size());
}

class PipeSink final : public ResultSink {
 public:
  explicit PipeSink(int fd) : fd_(fd) {}
  void put(const CaseResult& r) override { write(a_case, r); }
  void put(const ControlResult& r) override { write(a_control, r); }
  void put(const SelfVerdict& v) override { write(a_verdict, v); }
  void put(const Tried& t) override { write(a_witness, t); }
  void put(const Begun& b) override { write(a_begin, b); }

 private:
  template <class T>
  void write(Kind kind, const T& result) {
    ByteWriter w;
    w(result);
    send(fd_, kind, w.out);
  }
  int fd_;
};

[[noreturn]] void run_part(const Part& part, int fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  keep_freed_memory();
  const auto stop = [&] {
    const int signal = interrupting_signal();
    send(fd, stopped, std::as_bytes(std::span(&signal, 1)));
  };
  try {
    PipeSink sink(fd);
    part.work(sink);
    if (interrupted())
      stop();
    else
      send(fd, finished, {});
  } catch (const Interrupted&) {
    stop();
  } catch (const std::exception& e) {
    send(fd, failed, std::as_bytes(std::span(e.what(), std::strlen(e.what()))));
  }
  ::_exit(0);
}

template <class T>
T hand_on(std::span<const std::byte> bytes, ResultSink& results) try {
  T result;
  ByteReader r(bytes);
  r(result);
  results.put(result);
  return result;
} catch (const Truncated&) {
  throw Infrastructure("a job of the gate sent a result that is not whole");
}

// A signal that came to this part and to nobody else: what it had not judged is missing.
Infrastructure stopped_alone(const Running& part, std::span<const std::byte> bytes) {
  int signal = 0;
  std::memcpy(&signal, bytes.data(), std::min(bytes.size(), sizeof signal));
  return Infrastructure(fmt::format(
      "a job of the gate (process {}) was sent {} by somebody else, and ended before it was "
      "through; run it again",
      part.pid, signal_name(signal)));
}

// False: the part is through. Throws Infrastructure where it ended before it was.
bool receive(Running& part) {
  const auto lost = [&] {
    siginfo_t how{};
    ::waitid(P_PID, id_t(part.pid), &how, WEXITED | WNOWAIT);
    return Infrastructure(fmt::format(
        "a job of the gate (process {}) ended before it was through, {} {}{}", part.pid,
        how.si_code == CLD_EXITED ? "with status" : "by signal", how.si_status, part.at()));
  };
  Head head;
  if (!read_all(part, &head, sizeof head)) throw lost();
  std::vector<std::byte> bytes(head.bytes);
  if (!read_all(part, bytes.data(), bytes.size())) throw lost();
  if (head.kind == a_case) {
    hand_on<CaseResult>(bytes, *part.results);
  } else if (head.kind == a_control) {
    hand_on<ControlResult>(bytes, *part.results);
  } else if (head.kind == a_verdict) {
    hand_on<SelfVerdict>(bytes, *part.results);
  } else if (head.kind == a_witness) {
    hand_on<Tried>(bytes, *part.results);
  } else if (head.kind == a_begin) {
    part.line = hand_on<Begun>(bytes, *part.results).line;
  } else if (head.kind == failed) {
    throw Infrastructure(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  if (head.kind == stopped && !interrupted()) throw stopped_alone(part, bytes);
  return head.kind != finished && head.kind != stopped;
}

// Parts that are interrupted say what they have judged by then. One that is still at work a second
// later computes what would not be kept: it is ended, and its ranks with it.
class Interruption {
 public:
  explicit Interruption(bool known) : handed_on_(known), end_(known ? now() + grace : never) {}

  void reach(std::vector<Running>& open) {
    if (interrupted() && !handed_on_) {
      for (const Running& p : open) ::kill(p.pid, SIGTERM);
      handed_on_ = true;
      end_ = now() + grace;
    }
    if (now() < end_) return;
    for (Running& p : open) ::kill(p.pid, SIGKILL), p.cut_short = true;
    end_ = never;
  }

 private:
  static constexpr double grace = 1, never = std::numeric_limits<double>::infinity();
  bool handed_on_;
  double end_;
};

}  // namespace

std::vector<std::string> run_parts(const std::vector<Part>& parts,
                                   const std::function<void()>& tick) {
  std::vector<Running> open;
  std::vector<std::string> lost(parts.size());
  std::fflush(nullptr);
  const auto end = [](Running& p, bool kill) {
    if (kill) ::kill(p.pid, SIGKILL);
    ::close(p.fd);
    ::waitpid(p.pid, nullptr, 0);
  };
  const bool at_fork = interrupted();  // parts know by themselves what their parent knew
  const InterruptsHeld held;           // between a fork and the part's own handler
  try {
    for (const Part& part : parts) {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0)
        throw Infrastructure(
            fmt::format("pipe of a job failed ({}): raise `ulimit -n`", std::strerror(errno)));
      Running p{open.size(), ::fork(), ends[0], part.results.get()};
      if (p.pid == 0) {
        ::close(ends[0]);
        only_note_interrupts();
        held.release();
        run_part(part, ends[1]);
      }
      const int error = errno;
      ::close(ends[1]);
      if (p.pid < 0) {
        ::close(ends[0]);
        throw Infrastructure(
            fmt::format("fork of a job failed ({}): raise `ulimit -u`, or give it a smaller --jobs",
                        std::strerror(error)));
      }
      open.push_back(p);
    }
    held.release();
    Interruption interruption(at_fork);
    while (!open.empty()) {
      interruption.reach(open);
      std::vector<pollfd> polls;
      for (const Running& p : open) polls.push_back({p.fd, POLLIN, 0});
      ::poll(polls.data(), polls.size(), 100);
      for (size_t i = open.size(); i-- > 0;) {
        std::string why;
        try {
          require_running(open[i]);
          if (!polls[i].revents || receive(open[i])) continue;
        } catch (const Infrastructure& e) {
          why = e.what();
        }
        end(open[i], !why.empty());
        open[i].results->put(Begun{open[i].pid, ""});
        if (!open[i].cut_short) lost[open[i].part] = std::move(why);
        open.erase(open.begin() + long(i));
      }
      tick();
    }
  } catch (...) {
    for (Running& p : open) end(p, true);
    throw;
  }
  return lost;
}

Turns::Turns() {
  void* memory =
      ::mmap(nullptr, sizeof(*shared_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Infrastructure(fmt::format("mmap: {}", std::strerror(errno)));
  shared_ = new (memory) Shared;
}
Turns::~Turns() { ::munmap(shared_, sizeof(*shared_)); }

}  // namespace shardproof
