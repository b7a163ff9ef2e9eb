// MPI as a wire. Blocking calls of MPICH never yield, so nothing here blocks: messages are probed
// for. Linked with MPI, loaded by the rank: the parent never holds it.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <thread>

#include <fmt/format.h>

#include "oracle/comm/message_door.hpp"

namespace shardproof {
namespace {

void require(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Infrastructure(fmt::format("{} failed: {}", call, std::string(text, size_t(length))));
}

class MpiWire final : public Wire {
 public:
  explicit MpiWire(MPI_Comm comm) : comm_(comm) {}

  void send(int to, int tag, Message message) override {
    if (message.size() > size_t(INT32_MAX))
      throw Infrastructure(
          fmt::format("a message of {} bytes is beyond the int range of MPI; use smaller extents",
                      message.size()));
    Outgoing& out = outgoing_.emplace_back();
    out.bytes = std::move(message);
    require(
        MPI_Isend(out.bytes.data(), int(out.bytes.size()), MPI_BYTE, to, tag, comm_, &out.request),
        "MPI_Isend");
  }

  bool flush() override {
    outgoing_.remove_if([](Outgoing& o) {
      int done = 0;
      require(MPI_Test(&o.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      return done != 0;
    });
    return outgoing_.empty();
  }

  std::optional<Message> take(int from, int tag) override {
    int there = 0, bytes = 0;
    MPI_Message handle;
    MPI_Status status;
    require(MPI_Improbe(from, tag, comm_, &there, &handle, &status), "MPI_Improbe");
    if (!there) return std::nullopt;
    require(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    Message message(static_cast<size_t>(bytes));
    require(MPI_Mrecv(message.data(), bytes, MPI_BYTE, &handle, &status), "MPI_Mrecv");
    return message;
  }

  bool sending() const { return !outgoing_.empty(); }

 private:
  struct Outgoing {
    MPI_Request request = MPI_REQUEST_NULL;
    Message bytes;
  };
  MPI_Comm comm_;
  std::list<Outgoing> outgoing_;
};

class Session final : public MpiSession {
 public:
  Session(int* argc, char*** argv) {
    require(MPI_Init(argc, argv), "MPI_Init");
    require(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
    require(MPI_Comm_dup(MPI_COMM_WORLD, &plain_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(plain_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string library() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);
    std::string first(text, size_t(length));
    std::replace(first.begin(), first.end(), '\t', ' ');
    first = first.substr(0, first.find('\n'));
    if (first.starts_with("MPICH Version:"))
      first = "MPICH " + first.substr(first.find_last_of(' ') + 1);
    return first;
  }
  std::unique_ptr<Door> door(const Context& c) override {
    MPI_Comm node;
    int on_node = size_;
    if (MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node) ==
        MPI_SUCCESS) {
      MPI_Comm_size(node, &on_node);
      MPI_Comm_free(&node);
    }
    wire_ = std::make_unique<MpiWire>(comm_);
    auto door = message_door(*wire_, c, on_node <= int(std::thread::hardware_concurrency()));
    door_ = door.get();
    return door;
  }
  void send(int to, std::span<const std::byte> bytes) override {
    if (bytes.size() > size_t(INT32_MAX))
      throw Infrastructure(
          fmt::format("a record of {} bytes is beyond the int range of MPI; use smaller extents",
                      bytes.size()));
    MPI_Request request;
    require(MPI_Isend(bytes.data(), int(bytes.size()), MPI_BYTE, to, 0, plain_, &request),
            "MPI_Isend");
    for (int done = 0; require(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test"), !done;)
      ::usleep(20);
  }
  std::vector<std::byte> receive(int from) override {
    MPI_Message handle;
    MPI_Status status;
    for (int there = 0;
         require(MPI_Improbe(from, 0, plain_, &there, &handle, &status), "MPI_Improbe"), !there;)
      ::usleep(50);
    int bytes = 0;
    require(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    std::vector<std::byte> message(static_cast<size_t>(bytes));
    require(MPI_Mrecv(message.data(), bytes, MPI_BYTE, &handle, &status), "MPI_Mrecv");
    return message;
  }
  bool end_job() override { return door_->end_job(); }
  void finalize() override {
    if (wire_ && wire_->sending()) return;  // MPI_Finalize would wait for receivers that never come
    MPI_Comm_free(&plain_);
    MPI_Comm_free(&comm_);
    MPI_Finalize();
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL, plain_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 0;
  std::unique_ptr<MpiWire> wire_;
  MessageDoor* door_ = nullptr;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) MpiSession* shardproof_open_mpi_session(
    int* argc, char*** argv) {
  return new Session(argc, argv);
}

}  // namespace shardproof
