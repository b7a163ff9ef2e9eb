#include "oracle/comm/tcp_session.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <thread>

#include "oracle/comm/arena.hpp"
#include "oracle/comm/message_door.hpp"

namespace shardproof {
namespace {

constexpr int64_t set_up_ns = 120'000'000'000, patience_ns = 2'000'000'000;
constexpr int ports_tried = 16;
constexpr uint64_t magic = 0x7368617264707266;

// The first word on a connection, and its answer.
struct Greeting {
  uint64_t word = magic, run = 0;
  int32_t rank = 0, size = 0, port = 0, unused = 0;
};
struct Place {  // where a rank listens
  uint32_t address = 0;
  int32_t port = 0;
};
struct Head {
  int32_t tag = 0, unused = 0;
  uint64_t bytes = 0;
};

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}
int number(const char* name) { return std::atoi(variable(name).c_str()); }

[[noreturn]] void fail(const std::string& why) {
  throw Infrastructure(fmt::format("rank {} of {} started by torchrun: {}", number("RANK"),
                                   number("WORLD_SIZE"), why));
}

// Equal on the ranks of one run, so that those of another are no company.
uint64_t run_number() {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"})
    for (char c : variable(name) + "|") hash = (hash ^ uint8_t(c)) * 0x100000001b3;
  return hash;
}

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() { reset(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

int milliseconds_until(int64_t moment_ns) {
  return int(std::max<int64_t>((moment_ns - monotonic_ns()) / 1'000'000, 0));
}
int64_t a_while() { return monotonic_ns() + patience_ns; }

// Whole or not at all, within some time.
bool say(const Socket& s, const void* bytes, size_t n) {
  return ::send(s.fd(), bytes, n, MSG_NOSIGNAL) == ssize_t(n);
}
bool hear(const Socket& s, void* bytes, size_t n, int64_t until = a_while()) {
  auto* to = static_cast<char*>(bytes);
  while (n > 0) {
    pollfd p{s.fd(), POLLIN, 0};
    if (::poll(&p, 1, milliseconds_until(until)) <= 0) return false;
    const ssize_t got = ::recv(s.fd(), to, n, 0);
    if (got <= 0) return false;
    to += got;
    n -= size_t(got);
  }
  return true;
}

// Port 0: any that is free. Empty where it is taken.
Socket listen_at(int port) {
  Socket s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_ANY);
  a.sin_port = htons(uint16_t(port));
  const int on = 1;
  ::setsockopt(s.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(s.fd(), reinterpret_cast<sockaddr*>(&a), sizeof a) != 0 || ::listen(s.fd(), 128) != 0)
    s.reset();
  return s;
}
int port_of(const Socket& s) {
  sockaddr_in a{};
  socklen_t n = sizeof a;
  return ::getsockname(s.fd(), reinterpret_cast<sockaddr*>(&a), &n) == 0 ? ntohs(a.sin_port) : 0;
}
uint32_t address_of(const Socket& s) {
  sockaddr_in a{};
  socklen_t n = sizeof a;
  return ::getpeername(s.fd(), reinterpret_cast<sockaddr*>(&a), &n) == 0 ? a.sin_addr.s_addr : 0;
}
Socket connect_to_place(const Place& place) {
  Socket s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = place.address;
  a.sin_port = htons(uint16_t(place.port));
  if (::connect(s.fd(), reinterpret_cast<sockaddr*>(&a), sizeof a) != 0) s.reset();
  return s;
}
Socket accept_from(const Socket& listener, int64_t until) {
  pollfd p{listener.fd(), POLLIN, 0};
  if (::poll(&p, 1, milliseconds_until(until)) <= 0) return Socket();
  return Socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
}

uint32_t master_address() {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  const std::string name = variable("MASTER_ADDR");
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0 || !found)
    fail(fmt::format("expected the address of rank 0 in MASTER_ADDR, met '{}'", name));
  const uint32_t address = reinterpret_cast<sockaddr_in*>(found->ai_addr)->sin_addr.s_addr;
  ::freeaddrinfo(found);
  return address;
}

// ---- finding each other

class Company {
 public:
  Company() : me_(number("RANK")), size_(number("WORLD_SIZE")), until_(monotonic_ns() + set_up_ns) {
    links.resize(size_t(size_));
    listener_ = listen_at(0);
    if (!listener_) fail(fmt::format("no port to listen at: {}", std::strerror(errno)));
    me_ == 0 ? receive_all() : introduce();
  }
  std::vector<Socket> links;  // by rank

 private:
  Greeting greeting() const { return {magic, run_number(), me_, size_, port_of(listener_), 0}; }
  // Who greets on the connection; empty where it is none of this run.
  std::optional<Greeting> greeted(const Socket& s) const {
    Greeting g;
    if (!hear(s, &g, sizeof g) || g.word != magic || g.run != run_number()) return std::nullopt;
    if (g.size != size_ || g.rank < 0 || g.rank >= size_) return std::nullopt;
    return g;
  }

  // Answers a caller. One that heard nothing for a while has left this connection and calls again;
  // one that heard the answer says so, and stays with it.
  bool agree(const Socket& s) const {
    const Greeting answer = greeting();
    uint64_t word = 0;
    return say(s, &answer, sizeof answer) && hear(s, &word, sizeof word, until_) && word == magic;
  }

  // Rank 0: hears where each of the others listens, then tells all of them.
  void receive_all() {
    Socket door;
    for (int i = 0; i < ports_tried && !door; ++i) door = listen_at(number("MASTER_PORT") + i);
    if (!door) fail("expected a free port at MASTER_PORT or behind it, met none");
    std::vector<Place> places(static_cast<size_t>(size_));
    for (int missing = size_ - 1; missing > 0;) {
      Socket s = accept_from(door, until_);
      if (!s) fail(fmt::format("expected {} more ranks within 120 s, met none", missing));
      const auto g = greeted(s);
      if (!g || g->rank == 0 || links[size_t(g->rank)]) continue;
      if (!agree(s)) continue;
      places[size_t(g->rank)] = {address_of(s), g->port};
      links[size_t(g->rank)] = std::move(s);
      --missing;
    }
    for (int r = 1; r < size_; ++r)
      if (!say(links[size_t(r)], places.data(), places.size() * sizeof(Place)))
        fail(fmt::format("rank {} went away", r));
  }

  // The others: each calls the ranks below it, and is called by those above.
  void introduce() {
    const uint32_t master = master_address();
    while (!links[0]) {
      for (int i = 0; i < ports_tried && !links[0]; ++i)
        links[0] = call(connect_to_place({master, number("MASTER_PORT") + i}), 0);
      if (!links[0] && monotonic_ns() > until_)
        fail(fmt::format("expected rank 0 at {}:{} or the ports behind it, met nobody within 120 s",
                         variable("MASTER_ADDR"), variable("MASTER_PORT")));
      if (!links[0]) ::usleep(20'000);
    }
    std::vector<Place> places(static_cast<size_t>(size_));
    hear_places(places);
    for (int r = 1; r < me_; ++r)
      while (!links[size_t(r)]) {
        Socket s = connect_to_place(places[size_t(r)]);
        if (!s || monotonic_ns() > until_) fail(fmt::format("cannot reach rank {}", r));
        links[size_t(r)] = call(std::move(s), r);
      }
    for (int missing = size_ - 1 - me_; missing > 0;) {
      Socket s = accept_from(listener_, until_);
      if (!s) fail(fmt::format("expected {} more ranks within 120 s, met none", missing));
      const auto g = greeted(s);
      if (!g || g->rank <= me_ || links[size_t(g->rank)]) continue;
      if (!agree(s)) continue;
      links[size_t(g->rank)] = std::move(s);
      --missing;
    }
  }

  // Until rank 0 has heard from all.
  void hear_places(std::vector<Place>& places) const {
    if (!hear(links[0], places.data(), places.size() * sizeof(Place), until_))
      fail("rank 0 did not say where the others are");
  }

  Socket call(Socket s, int rank) const {
    const Greeting mine = greeting();
    if (!s || !say(s, &mine, sizeof mine)) return Socket();
    const auto g = greeted(s);
    return g && g->rank == rank && say(s, &magic, sizeof magic) ? std::move(s) : Socket();
  }

  const int me_, size_;
  const int64_t until_;
  Socket listener_;
};

// ---- messages

class TcpWire final : public Wire {
 public:
  explicit TcpWire(std::vector<Socket> links) : peers_(links.size()) {
    for (size_t r = 0; r < links.size(); ++r) {
      peers_[r].link = std::move(links[r]);
      const int on = 1;
      ::setsockopt(peers_[r].link.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
  }

  void send(int to, int tag, Message message) override {
    Peer& p = peers_[size_t(to)];
    const Head head{tag, 0, message.size()};
    const auto* first = reinterpret_cast<const std::byte*>(&head);
    p.out.emplace_back(first, first + sizeof head);
    p.out.push_back(std::move(message));
    push(p);
  }

  bool flush() override {
    bool all = true;
    for (Peer& p : peers_) all = push(p) && all;
    return all;
  }

  std::optional<Message> take(int from, int tag) override {
    Peer& p = peers_[size_t(from)];
    auto& waiting = p.whole[tag];
    if (waiting.empty()) pull(p);
    if (waiting.empty()) {
      if (p.link) return std::nullopt;
      throw Released(Released::peer_lost,
                     fmt::format("rank {} is gone: its connection closed", from));
    }
    Message first = std::move(waiting.front());
    waiting.pop_front();
    return first;
  }

 private:
  struct Peer {
    Socket link;
    std::deque<Message> out;
    size_t sent = 0;  // of the first
    Message in;
    std::map<int, std::deque<Message>> whole;  // by tag
  };

  // True where nothing is left.
  static bool push(Peer& p) {
    while (!p.out.empty() && p.link) {
      const Message& m = p.out.front();
      const ssize_t n =
          ::send(p.link.fd(), m.data() + p.sent, m.size() - p.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
      if (n < 0) break;
      p.sent += size_t(n);
      if (p.sent < m.size()) continue;
      p.out.pop_front();
      p.sent = 0;
    }
    if (!p.out.empty()) p.out.clear();  // nobody is there to read it
    return true;
  }

  static void pull(Peer& p) {
    static thread_local std::vector<std::byte> part(1 << 20);
    while (p.link) {
      const ssize_t n = ::recv(p.link.fd(), part.data(), part.size(), MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (n <= 0) {
        p.link.reset();
        break;
      }
      p.in.insert(p.in.end(), part.begin(), part.begin() + n);
    }
    size_t at = 0;
    for (Head head; p.in.size() - at >= sizeof head; at += sizeof head + head.bytes) {
      std::memcpy(&head, p.in.data() + at, sizeof head);
      if (p.in.size() - at - sizeof head < head.bytes) break;
      const auto first = p.in.begin() + ptrdiff_t(at + sizeof head);
      p.whole[head.tag].emplace_back(first, first + ptrdiff_t(head.bytes));
    }
    p.in.erase(p.in.begin(), p.in.begin() + ptrdiff_t(at));
  }

  std::vector<Peer> peers_;
};

class TcpSession final : public MpiSession {
 public:
  TcpSession() : wire_(std::move(Company().links)) {}
  int rank() const override { return number("RANK"); }
  int size() const override { return number("WORLD_SIZE"); }
  std::string library() const override { return "sockets"; }
  std::unique_ptr<Door> door(const Context& c) override {
    const int here = variable("LOCAL_WORLD_SIZE").empty() ? size() : number("LOCAL_WORLD_SIZE");
    auto door = message_door(wire_, c, here <= int(std::thread::hardware_concurrency()));
    door_ = door.get();
    return door;
  }
  void send(int to, std::span<const std::byte> bytes) override {
    wire_.send(to, outside_jobs, {bytes.begin(), bytes.end()});
    while (!wire_.flush()) ::usleep(20);
  }
  std::vector<std::byte> receive(int from) override {
    for (;; ::usleep(50))
      if (auto message = wire_.take(from, outside_jobs)) return std::move(*message);
  }
  bool end_job() override { return door_->end_job(); }
  void finalize() override {
    for (int tries = 0; tries < 1000 && !wire_.flush(); ++tries) ::usleep(1000);
  }

 private:
  static constexpr int outside_jobs = -1;  // no group's tag
  TcpWire wire_;
  MessageDoor* door_ = nullptr;
};

}  // namespace

MpiSession* open_tcp_session() { return new TcpSession; }

}  // namespace shardproof
