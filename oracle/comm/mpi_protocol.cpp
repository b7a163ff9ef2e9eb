#include "oracle/comm/mpi_protocol.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace shardproof {
namespace {

bool send_exactly(int fd, const void* from, size_t bytes) {
  const char* p = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t n = ::send(fd, p, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    p += n;
    bytes -= size_t(n);
  }
  return true;
}

int connect_unix(const std::string& path) {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  if (path.size() >= sizeof a.sun_path) {
    errno = ENAMETOOLONG;
    return -1;
  }
  std::strcpy(a.sun_path, path.c_str());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0 && ::connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0) return fd;
  if (fd >= 0) ::close(fd);
  return -1;
}

int connect_tcp(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
    errno = EHOSTUNREACH;
    return -1;
  }
  int fd = -1;
  for (addrinfo* a = found; a && fd < 0; a = a->ai_next) {
    fd = ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd >= 0 && ::connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
      ::close(fd);
      fd = -1;
    }
  }
  ::freeaddrinfo(found);
  const int on = 1;
  if (fd >= 0) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

std::string& named_folder() {
  static std::string folder;
  return folder;
}

}  // namespace

bool send_frame(int fd, Frame frame, std::span<const std::byte> bytes) {
  frame.bytes = bytes.size();
  return send_exactly(fd, &frame, sizeof frame) && send_exactly(fd, bytes.data(), bytes.size());
}

bool receive_exactly(int fd, void* to, size_t bytes) {
  char* p = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::recv(fd, p, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    p += n;
    bytes -= size_t(n);
  }
  return true;
}

int connect_to(const std::string& address) {
  if (address.starts_with("unix:")) return connect_unix(address.substr(5));
  const size_t colon = address.rfind(':');
  return connect_tcp(address.substr(4, colon - 4), address.substr(colon + 1));
}

void look_for_modules_in(const std::string& folder) { named_folder() = folder; }

std::string find_module(const std::string& file, std::string* tried) {
  namespace fs = std::filesystem;
  std::vector<fs::path> places;
  if (const char* named = std::getenv("SHARDPROOF_MODULES")) places.emplace_back(named);
  std::error_code e;
  if (const fs::path self = fs::read_symlink("/proc/self/exe", e); !e) {
    places.push_back(self.parent_path());
    places.push_back(self.parent_path().parent_path() / "lib" / "shardproof");
  }
  if (!named_folder().empty()) places.emplace_back(named_folder());
  for (const fs::path& place : places) {
    if (fs::exists(place / file, e)) return (place / file).string();
    if (tried) *tried += (tried->empty() ? "" : ", ") + place.string();
  }
  return "";
}

}  // namespace shardproof
