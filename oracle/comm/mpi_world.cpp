// Ranks as MPI processes, seen from the parent: starts the launcher, hands out jobs, believes only
// whole records and wait statuses. No MPI in here.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "oracle/case.hpp"
#include "oracle/comm/crowd.hpp"
#include "oracle/comm/leaks.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/comm/run_folder.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

// Options with which a launcher reaches other machines; then ranks call back over TCP.
bool leaves_this_machine(const std::vector<std::string>& launcher) {
  for (const std::string& w : launcher)
    if (w == "-f" || w == "-hosts" || w == "-host" || w == "--hostfile" || w == "-hostfile" ||
        w == "--host" || w.ends_with("srun"))
      return true;
  return false;
}

// A file that may grow while it is read: the launcher's own words.
// ": " and the end of what the launcher said; "" where it said nothing.
std::string told_in(const std::string& path) {
  std::ifstream in(path);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.empty()) return "";
  return text.size() > 600 ? ": ..." + text.substr(text.size() - 600) : ": " + text;
}

// Neither ended nor about to be taken leave of.
bool runs(int pid) {
  std::ifstream in(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(in, text);
  const size_t name_ends = text.rfind(") ");  // a name may hold blanks and parentheses
  return name_ends != text.npos && name_ends + 2 < text.size() && text[name_ends + 2] != 'Z';
}

struct RankLink {
  int fd = -1;
  Hello hello;
  MpiPage* page = nullptr;
  bool reported = false;  // record or text of this job is in
  bool harness = false;   // the text is of what the rank's harness threw
  RankOutcome outcome;
};

class MpiWorld final : public World {
 public:
  explicit MpiWorld(const WorldSpec& spec) : spec_(spec), links_(size_t(spec.ranks)) {
    launcher_ = words_of(spec.mpiexec.empty() ? "mpiexec" : spec.mpiexec);
    local_ = !leaves_this_machine(launcher_);
    try {
      make_folder();
      listen();
      launch();
      gather_ranks();
    } catch (...) {
      end();
      throw;
    }
  }
  ~MpiWorld() override { end(); }

  bool alive() const override { return alive_; }
  std::string lost() override {
    if (!alive_) return "";
    lost_at_.reset();
    note_closed();
    if (closed_.empty()) return "";
    if (launcher_was_killed())
      return fmt::format("the launcher '{}' was killed by {}, and {} ended with it",
                         joined(launcher_, " "), signal_text(launcher_signal_), rank_list(closed_));
    for (RankLink& l : links_)
      if (l.page && std::ranges::count(closed_, l.hello.rank) && supervisor_has_told(l)) {
        RankOutcome how;
        describe_end(*l.page, how);
        return fmt::format(
            "rank {} (process {}) {}", l.hello.rank, l.hello.pid,
            how.text.empty() ? fmt::format("left with exit code {}", how.code) : how.text);
      }
    return fmt::format("{}{}, or the process above it, was killed",
                       closed_.size() > 1 ? "one of " : "", rank_list(closed_));
  }
  std::string description() const override {
    return fmt::format("mpi, {} rank{}, {}", spec_.ranks, spec_.ranks == 1 ? "" : "s",
                       links_[0].hello.library);
  }

  std::vector<RankOutcome> run(std::span<const std::byte> job, uint32_t case_number,
                               double deadline) override {
    begun_ = Clock::now();
    released_ = false;
    lost_at_.reset();
    given_up_at_.reset();
    hung_.clear();
    for (RankLink& l : links_) {
      l.reported = l.harness = false;
      l.outcome = {};
    }
    note_closed();
    for (RankLink& l : links_) {
      if (!send_frame(l.fd, {Frame::job, case_number, 0}, job)) lose(l);
    }
    while (!all_reported()) {
      receive(0.005);
      if (interrupted()) break;
      spec_.meanwhile();
      if (lost_at_ && seconds_since(*lost_at_) > grace_seconds) break;
      if (local_ && !released_) watch_for_deadlock();
      const double limit = deadline * spec_.deadline_scale;
      if (!given_up_at_ && seconds_since(begun_) > limit) give_up(limit);
      if (given_up_at_ && ranks_had_their_time()) break;
    }
    const bool without_launcher = !alive_ && launcher_was_killed();
    auto all = outcomes();
    // Nobody is blamed for ranks that ended with their launcher.
    if (without_launcher)
      throw Infrastructure(
          fmt::format("the launcher '{}' was killed by {} in the middle of a case, and its ranks "
                      "ended with it; run it again",
                      joined(launcher_, " "), signal_text(launcher_signal_)));
    // Nor for what the harness of a rank could not do.
    for (size_t r = 0; r < all.size(); ++r)
      if (links_[r].harness && all[r].end == RankOutcome::threw)
        throw Infrastructure(fmt::format("rank {}: {}", r, all[r].text));
    return all;
  }

 private:
  // That survivors have to hand in their records: less than until the launcher ends them.
  static constexpr double grace_seconds = 1.5;

  void make_folder() {
    folder_.emplace(spec_.run_directory.empty() ? parent_of_run_folders() : spec_.run_directory);
    if (::getrandom(&token_, sizeof token_, 0) != sizeof token_)
      token_ = uint64_t(Clock::now().time_since_epoch().count());
  }

  void listen() {
    if (local_) {
      sockaddr_un a{};
      a.sun_family = AF_UNIX;
      const std::string path = folder_->socket_path();
      std::strcpy(a.sun_path, path.c_str());
      listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (listener_ < 0 || ::bind(listener_, reinterpret_cast<sockaddr*>(&a), sizeof a) != 0 ||
          ::listen(listener_, 64) != 0)
        throw Infrastructure(fmt::format("cannot listen on {}: {}", path, std::strerror(errno)));
      address_ = "unix:" + path;
      return;
    }
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_ANY);
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t length = sizeof a;
    if (listener_ < 0 || ::bind(listener_, reinterpret_cast<sockaddr*>(&a), sizeof a) != 0 ||
        ::listen(listener_, 64) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&a), &length) != 0)
      throw Infrastructure(
          fmt::format("cannot listen for ranks on other machines: {}", std::strerror(errno)));
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    address_ = fmt::format("tcp:{}:{}", host, ntohs(a.sin_port));
  }

  void launch() {
    std::vector<std::string> words = launcher_;
    words.insert(words.end(),
                 {"-n", std::to_string(spec_.ranks), program(), "--worker", address_,
                  fmt::format("{:x}", token_), folder_->path(), std::to_string(spec_.ranks),
                  fmt::format("{}", spec_.deadline_scale), spec_.lockstep ? "on" : "off"});
    int report[2];
    if (::pipe2(report, O_CLOEXEC) != 0)
      throw Infrastructure(fmt::format("pipe: {}", std::strerror(errno)));
    std::fflush(nullptr);
    launcher_pid_ = ::fork();
    if (launcher_pid_ < 0)
      throw Infrastructure(
          fmt::format("fork of the launcher failed ({}): raise `ulimit -u`", std::strerror(errno)));
    if (launcher_pid_ == 0) {
      exec_launcher(words, report[1]);
    }
    ::close(report[1]);
    int failure = 0;
    const bool failed = ::read(report[0], &failure, sizeof failure) == sizeof failure;
    ::close(report[0]);
    if (failed)
      throw Infrastructure(
          fmt::format("--mpiexec: expected a launcher that can be started, met '{}': {}; install "
                      "MPICH (scripts/setup) or name it with --mpiexec",
                      launcher_[0], std::strerror(failure)));
  }

  [[noreturn]] void exec_launcher(const std::vector<std::string>& words, int report) const {
    ::setpgid(0, 0);  // a Ctrl-C at the terminal is the parent's to handle
    const int null = ::open("/dev/null", O_RDONLY),
              log = ::open(log_file().c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(null, 0);
    if (log >= 0) {
      ::dup2(log, 1);
      ::dup2(log, 2);
    }
    ::setenv("UCX_MEM_EVENTS", "n", 0);  // its hooks break the sanitizers
    if (local_) {
      ::setenv("UCX_NET_DEVICES", "lo", 0);  // over tcp it hangs where no device is named
      ::setenv("FI_PROVIDER", "tcp", 0);
    }
    std::vector<char*> argv;
    for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    const int failure = errno;
    (void)!::write(report, &failure, sizeof failure);
    ::_exit(127);
  }

  std::string log_file() const { return folder_->path() + "/launcher.log"; }

  std::string program() const {
    std::error_code e;
    const auto self = std::filesystem::read_symlink("/proc/self/exe", e);
    return e ? spec_.program : self.string();
  }

  // Every rank calls back and says who it is. A launcher of another MPI starts p worlds of one.
  void gather_ranks() {
    const double limit = 120 * std::max(1.0, spec_.deadline_scale);
    const auto begin = Clock::now();
    Callers callers;
    std::optional<Clock::time_point> first_ended;
    int looks = 0;
    for (int present = 0; present < spec_.ranks;) {
      if (interrupted()) throw Infrastructure("interrupted while the ranks of MPI started");
      if (launcher_gone())
        throw Infrastructure(fmt::format(
            "the launcher '{}' ended before its {} had called back{}; try it by hand, "
            "or name another with --mpiexec",
            joined(launcher_, " "), number_of(spec_.ranks, "rank"), told_in(log_file())));
      if (seconds_since(begin) > limit)
        throw Infrastructure(
            fmt::format("{} of {} ranks called back within {:.0f} s of '{}'{}; check that every "
                        "host can be reached and has enough slots",
                        present, spec_.ranks, limit, joined(launcher_, " "), told_in(log_file())));
      if (looks++ % 20 == 0) refuse_start_without(first_ended);
      const int fd = callers.next(listener_);
      Hello hello;
      if (fd < 0) continue;
      if (!says_hello(fd, hello) || hello.token != token_) {
        ::close(fd);  // not one of ours
        continue;
      }
      if (hello.size != spec_.ranks) {
        ::close(fd);
        throw Infrastructure(
            fmt::format("expected a world of {} ranks, met one of {}: '{}' belongs to another MPI "
                        "than the library of the ranks ({}); name the right one with --mpiexec",
                        spec_.ranks, hello.size, joined(launcher_, " "), hello.library));
      }
      RankLink& l = links_[size_t(hello.rank)];
      l.fd = fd;
      l.hello = hello;
      if (local_) l.page = map_page(hello.supervisor);
      ++present;
    }
  }

  // A launcher may wait for ever where a rank ended before MPI had begun; one that does not has
  // the word for as long as it takes to end.
  void refuse_start_without(std::optional<Clock::time_point>& first_ended) const {
    constexpr double seconds_of_the_launcher = 1;
    const std::string how = local_ ? a_rank_that_ended() : "";
    if (how.empty()) return;
    if (!first_ended) first_ended = Clock::now();
    if (seconds_since(*first_ended) < seconds_of_the_launcher) return;
    throw Infrastructure(fmt::format("a rank of '{}' {} while its ranks started{}; run it again",
                                     joined(launcher_, " "), how, told_in(log_file())));
  }

  // "was killed by signal 9 (SIGKILL)"; "" where every rank that came so far lives.
  std::string a_rank_that_ended() const {
    std::error_code e;
    for (const auto& entry : std::filesystem::directory_iterator(folder_->path(), e)) {
      if (!entry.path().filename().string().starts_with("page.")) continue;
      // Read, not mapped: one that is being made is shorter.
      alignas(MpiPage) char bytes[sizeof(MpiPage)];
      std::ifstream in(entry.path(), std::ios::binary);
      if (!in.read(bytes, sizeof bytes)) continue;
      const auto& page = *reinterpret_cast<const MpiPage*>(bytes);
      if (!page.ended.load()) continue;
      return WIFSIGNALED(page.status)
                 ? fmt::format("was killed by {}", signal_text(WTERMSIG(page.status)))
                 : fmt::format("ended with exit code {}", WEXITSTATUS(page.status));
    }
    return "";
  }

  // Connections that have said nothing so far: a stranger that never does keeps no rank waiting.
  struct Callers {
    ~Callers() {
      for (const int fd : silent) ::close(fd);
    }
    // One that has begun to speak; -1: none within a moment.
    int next(int listener) {
      std::vector<pollfd> polls{{listener, POLLIN, 0}};
      for (const int fd : silent) polls.push_back({fd, POLLIN, 0});
      if (::poll(polls.data(), polls.size(), 5) <= 0) return -1;
      for (size_t i = 1; i < polls.size(); ++i)
        if (polls[i].revents) {
          silent.erase(silent.begin() + ptrdiff_t(i - 1));
          return polls[i].fd;
        }
      if (const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC); fd >= 0)
        silent.push_back(fd);
      return -1;
    }
    std::vector<int> silent;
  };

  // A rank says all of it at once.
  static bool says_hello(int fd, Hello& hello) {
    const auto wait_at_most = [&](int seconds) {
      const timeval patience{seconds, 0};  // 0: for ever
      ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    };
    Frame frame;
    wait_at_most(5);
    const bool said = receive_exactly(fd, &frame, sizeof frame) && frame.kind == Frame::hello &&
                      frame.bytes == sizeof hello && receive_exactly(fd, &hello, sizeof hello);
    wait_at_most(0);
    return said;
  }

  MpiPage* map_page(int supervisor) const {
    const int fd =
        ::open(fmt::format("{}/page.{}", folder_->path(), supervisor).c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return nullptr;
    void* at = ::mmap(nullptr, sizeof(MpiPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    return at == MAP_FAILED ? nullptr : static_cast<MpiPage*>(at);
  }

  bool launcher_gone() {
    if (launcher_pid_ <= 0) return true;
    int status;
    if (::waitpid(launcher_pid_, &status, WNOHANG) != launcher_pid_) return false;
    launcher_pid_ = -1;
    launcher_signal_ = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    return true;
  }

  bool launcher_gone_within(double seconds) {
    const auto begin = Clock::now();
    while (!launcher_gone() && seconds_since(begin) < seconds) ::usleep(500);
    return launcher_gone();
  }

  // Of ranks that are missed: they end with it a moment before it can be waited for.
  bool launcher_was_killed() { return launcher_gone_within(0.2) && launcher_signal_ != 0; }

  bool all_reported() const {
    return std::all_of(links_.begin(), links_.end(), [](const RankLink& l) { return l.reported; });
  }

  void receive(double seconds) {
    std::vector<pollfd> polls;
    std::vector<RankLink*> who;
    for (RankLink& l : links_)
      if (l.fd >= 0 && !l.reported) {
        polls.push_back({l.fd, POLLIN, 0});
        who.push_back(&l);
      }
    if (polls.empty() || ::poll(polls.data(), polls.size(), int(seconds * 1000)) <= 0) return;
    note_closed(polls, who);
    for (size_t i = 0; i < polls.size(); ++i)
      if (polls[i].revents) receive_from(*who[i]);
  }

  // A launcher ends all ranks when it misses one, so the first connection that closes is that of
  // the one. Where several are closed when they are looked at, it is one of these.
  void note_closed(const std::vector<pollfd>& polls, const std::vector<RankLink*>& who) {
    if (lost_at_) return;
    closed_.clear();
    for (size_t i = 0; i < polls.size(); ++i)
      if (polls[i].revents & (POLLHUP | POLLERR)) closed_.push_back(who[i]->hello.rank);
  }
  void note_closed() {
    std::vector<pollfd> polls;
    std::vector<RankLink*> who;
    for (RankLink& l : links_)
      if (l.fd >= 0) polls.push_back({l.fd, POLLIN, 0}), who.push_back(&l);
    ::poll(polls.data(), polls.size(), 0);
    note_closed(polls, who);
  }

  void receive_from(RankLink& l) {
    Frame frame;
    if (!receive_exactly(l.fd, &frame, sizeof frame) || frame.bytes > longest_frame) return lose(l);
    std::vector<std::byte> bytes(frame.bytes);
    if (!receive_exactly(l.fd, bytes.data(), bytes.size())) return lose(l);
    l.reported = true;
    if (l.page) l.outcome.trace = snapshot(l.page->trace);
    if (frame.kind == Frame::record) {
      l.outcome.end = RankOutcome::finished;
      l.outcome.record = std::move(bytes);
      if (frame.number) alive_ = false;  // sends are left over: this world has had its day
    } else {
      l.outcome.end = RankOutcome::threw;
      l.harness = frame.number != 0;
      l.outcome.text.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      alive_ = false;
    }
  }

  // The socket of a rank closed before its record: it died. Its supervisor knows how.
  void lose(RankLink& l) {
    alive_ = false;
    l.reported = true;
    RankOutcome& o = l.outcome;
    o.end = lost_at_ ? RankOutcome::ended : RankOutcome::signalled;
    o.text = lost_at_ ? "was ended by the launcher, which missed another rank"
             : closed_.size() > 1
                 ? fmt::format("or another of {} died, and the launcher ended the others",
                               rank_list(closed_))
                 : "died on its machine: its connection closed before its record was whole";
    if (l.page) {
      o.trace = snapshot(l.page->trace);
      if (supervisor_has_told(l)) describe_end(*l.page, o);
    }
    if (::close(l.fd); true) l.fd = -1;
    if (!lost_at_) lost_at_ = Clock::now();
    const std::string how = o.end == RankOutcome::exited
                                ? fmt::format("left the process with exit code {}", o.code)
                                : o.text;
    release(Released::peer_lost, fmt::format("rank {} {} {}", l.hello.rank, how, place(o.trace)));
  }

  // It does so as soon as it is given a core, unless the launcher has ended it.
  bool supervisor_has_told(const RankLink& l) const {
    const int most_ms = lost_at_ ? 200 : 5000;
    for (int ms = 0; ms < most_ms && !l.page->ended.load(); ++ms) {
      if (ms >= 200 && !runs(l.hello.supervisor)) break;
      ::usleep(1000);
    }
    return l.page->ended.load();
  }

  static void describe_end(const MpiPage& page, RankOutcome& o) {
    const int status = page.status;
    if (WIFEXITED(status)) {
      o.end = RankOutcome::exited;
      o.code = WEXITSTATUS(status);
      o.text.clear();
    } else {
      o.end = RankOutcome::signalled;
      o.code = WTERMSIG(status);
      const int caught = page.signal.load();
      o.text = fmt::format("was killed by {}", signal_text(o.code));
      if (caught == SIGSEGV || caught == SIGBUS)
        o.text += fmt::format(" at address 0x{:x}", page.address);
    }
  }

  void release(Released::Cause cause, const std::string& why) {
    if (released_) return;
    released_ = true;
    for (RankLink& l : links_)
      if (l.fd >= 0 && !l.reported)
        send_frame(l.fd, {Frame::release, uint32_t(cause), 0},
                   std::as_bytes(std::span(why.data(), why.size())));
  }

  // All live ranks wait and none of them gets on although each has looked again and again: nobody
  // is left who could end a wait. Ranks that handed in their record do not count.
  void watch_for_deadlock() {
    uint64_t progress = 0, least_polls = UINT64_MAX;
    for (const RankLink& l : links_) {
      if (!l.page) return;
      progress += l.page->progress.load();
      if (l.reported) continue;
      if (l.page->trace.state != Trace::waiting) {
        watched_.reset();
        return;
      }
      least_polls = std::min(least_polls, l.page->polls.load());
    }
    if (least_polls == UINT64_MAX) return;
    if (!watched_ || watched_->progress != progress || watched_->begun != begun_) {
      watched_ = Watch{progress, {}, Clock::now(), begun_};
      for (const RankLink& l : links_) watched_->polls.push_back(l.page->polls.load());
      return;
    }
    for (size_t r = 0; r < links_.size(); ++r)
      if (!links_[r].reported && links_[r].page->polls.load() < watched_->polls[r] + 500) return;
    if (seconds_since(watched_->since) < 0.03) return;
    release(Released::deadlock, "deadlock: every rank that is left waits" + standings_below());
  }

  // Of ranks on other machines nothing is known but what they say.
  std::string standings_below() const {
    std::vector<Trace> traces;
    for (const RankLink& l : links_) {
      if (!l.page) return "";
      traces.push_back(snapshot(l.page->trace));
    }
    return "\n" + standings(traces);
  }

  // Past the deadline: ranks that wait are let go, those that do not are what hangs.
  void give_up(double limit) {
    given_up_at_ = Clock::now();
    hung_ = unreported(
        [](const RankLink& l) { return !l.page || l.page->trace.state != Trace::waiting; });
    release(Released::overdue, fmt::format("the job's deadline of {:g} s has passed{}\n{}{}", limit,
                                           hung_or_slow_text(crowding(), spec_.deadline_scale),
                                           hung_.empty() ? "every rank that is left waits"
                                                         : rank_list(hung_) + " made no call",
                                           standings_below()));
  }

  template <class Holds>
  std::vector<int> unreported(const Holds& holds) const {
    std::vector<int> ranks;
    for (const RankLink& l : links_)
      if (!l.reported && holds(l)) ranks.push_back(l.hello.rank);
    return ranks;
  }

  // One that computes had time to come to a call, one that waited to be given a core and to hear
  // that its call is over. Where only such are left, they do not end by themselves either.
  bool ranks_had_their_time() {
    const double since = seconds_since(*given_up_at_),
                 grace = kill_after_seconds - case_deadline_seconds;
    if (since <= grace) return false;
    const auto left = unreported([](const RankLink&) { return true; });
    if (std::includes(hung_.begin(), hung_.end(), left.begin(), left.end())) return true;
    if (since <= graces_of_one_that_waited * grace) return false;
    if (hung_.empty()) hung_ = left;
    return true;
  }

  std::vector<RankOutcome> outcomes() {
    std::vector<RankOutcome> out;
    for (RankLink& l : links_) {
      if (!l.reported) {
        alive_ = false;
        l.outcome.end = std::find(hung_.begin(), hung_.end(), l.hello.rank) != hung_.end()
                            ? RankOutcome::hung
                            : RankOutcome::ended;
        if (l.page) l.outcome.trace = snapshot(l.page->trace);
      }
      out.push_back(std::move(l.outcome));
    }
    if (!alive_) end();
    return out;
  }

  // The last words of ranks that end in good health; one that says nothing is not clean.
  void hear_of_leaks() {
    for (RankLink& l : links_) {
      pollfd p{l.fd, POLLIN, 0};
      Frame frame;
      std::string words;
      bool heard = ::poll(&p, 1, int(20'000 * std::max(1.0, spec_.deadline_scale))) > 0 &&
                   receive_exactly(l.fd, &frame, sizeof frame) && frame.kind == Frame::leaks &&
                   frame.bytes <= longest_frame;
      if (heard) {
        words.resize(frame.bytes);
        heard = receive_exactly(l.fd, words.data(), words.size());
      }
      if (!heard) words = "it left without a word on its memory";
      if (!words.empty())
        note_leak(fmt::format("rank {} of {} MPI ranks", l.hello.rank, spec_.ranks), words);
    }
  }

  // Nothing of the world is left behind.
  void end() {
    const bool healthy = std::exchange(alive_, false);
    bool all_connected = true;
    for (RankLink& l : links_) {
      all_connected = all_connected && l.fd >= 0;
      if (l.fd >= 0) send_frame(l.fd, {Frame::stop, 0, 0}, {});
    }
    if (healthy && all_connected && leaks_are_looked_for()) hear_of_leaks();
    // Ranks that did not report by their deadline do not leave by themselves either.
    const double patience = !all_connected ? 0 : healthy ? 3 : 0.5;
    if (!launcher_gone_within(patience)) {
      ::kill(launcher_pid_, SIGTERM);
      if (!launcher_gone_within(0.2)) {
        ::kill(launcher_pid_, SIGKILL);
        ::waitpid(launcher_pid_, nullptr, 0);
        launcher_pid_ = -1;
      }
    }
    for (RankLink& l : links_) {
      if (l.page) {
        if (const int pid = l.page->rank_pid.load(); pid > 0 && !l.page->ended.load())
          ::kill(pid, SIGKILL);
        ::munmap(l.page, sizeof(MpiPage));
        l.page = nullptr;
      }
      if (l.fd >= 0) ::close(l.fd);
      l.fd = -1;
    }
    if (listener_ >= 0) ::close(listener_);
    listener_ = -1;
    folder_.reset();
  }

  struct Watch {
    uint64_t progress;
    std::vector<uint64_t> polls;
    Clock::time_point since, begun;
  };
  WorldSpec spec_;
  std::vector<RankLink> links_;
  std::vector<std::string> launcher_;
  bool local_ = true, alive_ = true, released_ = false;
  std::optional<RunFolder> folder_;
  std::string address_;
  uint64_t token_ = 0;
  int listener_ = -1;
  pid_t launcher_pid_ = -1;
  int launcher_signal_ = 0;  // that ended it
  Clock::time_point begun_;
  std::optional<Clock::time_point> lost_at_, given_up_at_;
  std::optional<Watch> watched_;
  std::vector<int> hung_;
  std::vector<int> closed_;  // ranks whose connections were closed when one was first found to be
};

}  // namespace

std::string mpi_missing() {
  std::string tried;
  if (!find_module(mpi_module_name, &tried).empty()) return "";
  return fmt::format("built without MPI ({} is in none of {})", mpi_module_name, tried);
}

std::unique_ptr<World> start_mpi_world(const WorldSpec& spec, RankMain main) {
  if (const std::string missing = mpi_missing(); !missing.empty())
    throw BadInput("transport: expected a build with MPI, met one that was " + missing +
                   "; install MPICH and configure again");
  if (outside_launch()) return start_outside_world(spec, std::move(main));
  return std::make_unique<MpiWorld>(spec);
}

}  // namespace shardproof
