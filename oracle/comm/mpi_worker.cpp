// The program started again by mpiexec. Its process only watches: it forks the MPI rank and notes
// how that ended, which mpiexec would not tell (a rank that calls _exit(0) leaves mpiexec at 0).
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "oracle/comm/copies.hpp"
#include "oracle/comm/leaks.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/comm/rank_loop.hpp"

namespace shardproof {
namespace {

MpiPage* crash_page = nullptr;

void on_crash(int signal, siginfo_t* info, void*) {
  int32_t none = 0;
  const bool fault = info->si_code > 0;  // one that a process sends holds no address
  if (fault && crash_page && crash_page->signal.compare_exchange_strong(none, signal))
    crash_page->address = uint64_t(info->si_addr);
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

MpiPage* make_page(const std::string& folder) {
  const std::string path = fmt::format("{}/page.{}", folder, ::getpid());
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* at = MAP_FAILED;
  if (fd >= 0 && ::ftruncate(fd, sizeof(MpiPage)) == 0 &&
      ::posix_fallocate(fd, 0, sizeof(MpiPage)) == 0)
    at = ::mmap(nullptr, sizeof(MpiPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) ::close(fd);
  if (at == MAP_FAILED) {  // another machine, or a full disk: the parent then does without it
    if (fd >= 0) ::unlink(path.c_str());
    at =
        ::mmap(nullptr, sizeof(MpiPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  }
  return at == MAP_FAILED ? nullptr : new (at) MpiPage;
}

// A launcher may leave standard input open, and a rank that reads it would block.
void read_nothing() {
  const int null = ::open("/dev/null", O_RDONLY);
  if (null < 0) return;
  ::dup2(null, STDIN_FILENO);
  if (null != STDIN_FILENO) ::close(null);
}

[[noreturn]] void leave(const std::string& why) {
  std::fprintf(stderr, "shardproof --worker: %s\n", why.c_str());
  std::fflush(stderr);
  ::_exit(3);
}

struct Arguments {
  std::string address, folder;
  uint64_t token = 0;
  int ranks = 0;
  double scale = 1;
  bool lockstep = true;
};

Arguments read_arguments(int argc, char** argv) {
  if (argc < 8)
    leave(
        "expected `--worker ADDRESS TOKEN FOLDER RANKS SCALE LOCKSTEP`, as `shardproof --transport "
        "mpi` starts it, met fewer words; "
        "start the gate instead");
  double scale = 1;  // with a point, whatever the locale
  std::from_chars(argv[6], argv[6] + std::strlen(argv[6]), scale);
  return {argv[2],
          argv[4],
          std::strtoull(argv[3], nullptr, 16),
          std::atoi(argv[5]),
          scale,
          std::string(argv[7]) == "on"};
}

class MpiRank {
 public:
  MpiRank(const Arguments& a, MpiPage* page, int* argc, char*** argv) : page_(page) {
    state_.trace = &page->trace;
    try {
      session_ = open_mpi_session(argc, argv);
    } catch (const Infrastructure& e) {
      leave(e.what());
    }
    state_.rank = session_->rank();
    state_.size = session_->size();
    connect(a);
    MpiSession::Context context;
    context.state = &state_;
    context.page = page;
    context.deadline_scale = a.scale;
    context.lockstep = a.lockstep;
    context.released = [](void* self) { return static_cast<MpiRank*>(self)->look_for_release(); };
    context.self = this;
    door_ = session_->door(context);
  }

  void serve(const RankMain& run) {
    watch_for_copies();
    for (;;) {
      Frame frame;
      if (!receive_exactly(parent_, &frame, sizeof frame)) ::_exit(0);  // the parent is gone
      std::vector<std::byte> bytes(frame.bytes);
      if (!receive_exactly(parent_, bytes.data(), bytes.size())) ::_exit(0);
      if (frame.kind == Frame::stop) return;
      if (frame.kind == Frame::job) work(run, frame.number, bytes);
    }
  }

  void finalize() {
    if (leaks_are_looked_for()) {
      const std::string words = leaks_of_this_process();
      send_frame(parent_, {Frame::leaks, 0, 0},
                 std::as_bytes(std::span(words.data(), words.size())));
    }
    session_->finalize();
  }

 private:
  void connect(const Arguments& a) {
    parent_ = connect_to(a.address);
    if (parent_ < 0)
      leave(fmt::format("cannot reach the parent at {}: {}; is that name known on this machine?",
                        a.address, std::strerror(errno)));
    Hello h;
    h.token = a.token;
    h.rank = session_->rank();
    h.size = session_->size();
    h.supervisor = ::getppid();
    h.pid = ::getpid();
    ::gethostname(h.host, sizeof h.host - 1);
    std::strncpy(h.library, session_->library().c_str(), sizeof h.library - 1);
    send_frame(parent_, {Frame::hello, 0, 0}, std::as_bytes(std::span(&h, 1)));
    if (h.size != a.ranks) ::_exit(3);  // a world of the wrong size is refused before anything else
  }

  void work(const RankMain& run, uint32_t number, std::span<const std::byte> job) {
    release_.reset();
    page_->trace = Trace{};
    page_->trace.case_number = number;
    state_.phase = Phase::idle;
    state_.shot = 0;
    state_.case_number = number;
    state_.mesh = nullptr;
    page_->working = 1;
    RankHost host{session_->rank(), session_->size(), door_.get(), &page_->trace, false, &state_};
    std::vector<std::byte> record;
    std::string text;
    uint32_t threw = 0;
    say_what_is_thrown([&] { record = run(host, job); },
                       [&](const char* what, uint32_t who) { text = what, threw = who; });
    end_a_copy(&page_->trace);
    page_->trace.state = Trace::left;
    page_->working = 0;
    const bool clean = session_->end_job();
    if (threw)
      send_frame(parent_, {Frame::threw, uint32_t(threw == harness_threw), 0},
                 std::as_bytes(std::span(text.data(), text.size())));
    else
      send_frame(parent_, {Frame::record, uint32_t(!clean), 0}, record);
  }

  std::optional<std::pair<Released::Cause, std::string>> look_for_release() {
    if (release_) return release_;
    Frame frame;
    const ssize_t n = ::recv(parent_, &frame, sizeof frame, MSG_PEEK | MSG_DONTWAIT);
    if (n == 0) ::_exit(0);  // the parent is gone
    if (n != ssize_t(sizeof frame) || frame.kind != Frame::release) return std::nullopt;
    receive_exactly(parent_, &frame, sizeof frame);
    std::string why(frame.bytes, '\0');
    if (!receive_exactly(parent_, why.data(), why.size())) ::_exit(0);
    return release_ = std::pair(Released::Cause(frame.number), why);
  }

  MpiPage* page_;
  RankState state_;
  MpiSession* session_ = nullptr;
  int parent_ = -1;
  std::unique_ptr<Door> door_;
  std::optional<std::pair<Released::Cause, std::string>> release_;
};

}  // namespace

// On a stack of its own, so that an overflow of the ordinary one is reported too.
void watch_for_crashes(MpiPage* page) {
  crash_page = page;
  static std::byte stack[64 << 10];
  stack_t alternate{};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  ::sigaltstack(&alternate, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
  for (int s : crash_signals) ::sigaction(s, &action, nullptr);
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
}

MpiSession* open_mpi_session(int* argc, char*** argv) {
  std::string tried;
  const std::string file = find_module(mpi_module_name, &tried);
  if (file.empty())
    throw Infrastructure(
        fmt::format("expected the module {} in one of {}; build with MPI", mpi_module_name, tried));
  void* module = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!module) throw Infrastructure(fmt::format("cannot load {}: {}", file, ::dlerror()));
  const auto open = reinterpret_cast<OpenMpiSession>(::dlsym(module, open_mpi_session_name));
  if (!open)
    throw Infrastructure(
        fmt::format("{} lacks {}: it belongs to another version", file, open_mpi_session_name));
  return open(argc, argv);
}

int mpi_worker(int argc, char** argv, const RankMain& run) {
  const Arguments a = read_arguments(argc, argv);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  read_nothing();
  MpiPage* page = make_page(a.folder);
  if (!page) leave("cannot map a page of memory");
  const pid_t child = ::fork();
  if (child < 0) leave(fmt::format("fork: {}", std::strerror(errno)));
  if (child > 0) {
    page->rank_pid = child;
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    page->status = status;
    page->ended = 1;
    // The launcher ends all ranks as soon as one is gone. In the middle of a job the others first
    // say what they saw; the parent ends this process earlier when it has heard them.
    if (page->working) ::sleep(2);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  watch_for_crashes(page);
  MpiRank rank(a, page, &argc, &argv);
  watch_for_crashes(page);  // UCX takes a fault and raises it anew, without its address
  rank.serve(run);
  rank.finalize();
  ::_exit(0);
}

}  // namespace shardproof
