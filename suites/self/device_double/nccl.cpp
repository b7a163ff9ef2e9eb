// NCCL among processes of one machine, in host memory, as strict as NCCL may be:
//
//   communicators   in progress until every rank has come; then every call leaves them in progress
//                   once more, and puts its work on the stream only when it was asked how it
//                   stands. A call to one that is in progress is an invalid usage
//   calls           that differ between ranks never complete; sends and receives outside of a group
//                   are an invalid usage
//   reductions      along a ring, in the type of the tensor: half types are rounded at every hop
//   abort           ends the own part only: peers wait on
//
// SHARDPROOF_DOUBLE_NCCL=WHAT@RANK plants, on one rank of each communicator:
//   create_hangs    creating it never ends          call_hangs   work of calls is never done
//   call_fails      calls return an internal error  dies         the first call ends the process
//   async_error     a remote error under way        fails_once   the first call of the process
//   fails
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "suites/self/device_double/device.hpp"

namespace shardproof::device_double {
namespace {

constexpr int internal_error = 3, invalid_argument = 4, invalid_usage = 5;
constexpr int most_ranks = 8;
constexpr uint64_t slots = 4;  // of a rank: calls that somebody has not read yet
constexpr int64_t slot_bytes = 16 << 20;

enum class What : int { exchange, all_reduce, all_gather, reduce_scatter, broadcast };

// What all ranks of a call must agree on.
struct Form {
  What what = What::exchange;
  DType dtype = DType::f64;
  Reduce reduce = Reduce::none;
  int root = 0;
  int64_t count = 0;
  bool operator==(const Form&) const = default;
};

struct Shared {
  std::atomic<uint32_t> joined;
  struct Counts {
    std::atomic<uint64_t> posted, read;
  };
  struct Member : Counts {  // collectives
    Form form[slots];
  } members[most_ranks];
  struct Pair : Counts {  // sends of one member to one other
    int64_t bytes[slots];
  } pairs[most_ranks][most_ranks];
};
constexpr int64_t head_bytes = (sizeof(Shared) + 4095) / 4096 * 4096;
constexpr int64_t whole_bytes =
    head_bytes + most_ranks * (1 + most_ranks) * int64_t(slots) * slot_bytes;

struct Part {
  std::byte* memory = nullptr;
  int64_t bytes = 0;
};
// All that goes to one peer, or comes from one, in a group.
struct Leg {
  bool sends = false, done = false;
  int peer = 0;
  uint64_t number = 0;
  std::vector<Part> parts;
};
struct Call {
  Form form;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::vector<Leg> legs;  // of a group
  Stream stream = nullptr;
  uint64_t number = 0;
  bool posted = false;
};

struct Comm {
  Shared* shared = nullptr;
  int ranks = 1, me = 0;
  bool aborted = false;
  int busy = 0;  // times that it will say to be in progress
  uint64_t calls = 0, collectives = 0, sent[most_ranks] = {}, taken[most_ranks] = {};
  std::vector<Call> begun;  // not on the stream yet
  std::string planted;

  ~Comm() {
    if (shared) ::munmap(shared, size_t(whole_bytes));
  }
  std::byte* slot(int rank, uint64_t number) const {
    return reinterpret_cast<std::byte*>(shared) + head_bytes +
           (rank * int64_t(slots) + int64_t(number % slots)) * slot_bytes;
  }
  std::byte* pair_slot(int from, int to, uint64_t number) const {
    return slot(most_ranks + from * most_ranks + to, number);
  }
  Form& form(int rank, uint64_t number) const { return shared->members[rank].form[number % slots]; }
};
using Handle = std::shared_ptr<Comm>;
Comm& comm_of(NcclComm c) { return **static_cast<Handle*>(c); }

std::string error_text;
int failed(int code, const std::string& why) {
  error_text = "the double: " + why;
  return code;
}

std::string planted_on(int rank) {
  const char* text = std::getenv("SHARDPROOF_DOUBLE_NCCL");
  const std::string plan = text ? text : "";
  const size_t at = plan.find('@');
  return at != std::string::npos && plan.substr(at + 1) == std::to_string(rank) ? plan.substr(0, at)
                                                                                : "";
}

// ---- the work of a call

int64_t bytes_of(const Form& f, int64_t count) { return count * int64_t(size_of(f.dtype)); }

int64_t bytes_of(const Leg& leg) {
  int64_t bytes = 0;
  for (const Part& p : leg.parts) bytes += p.bytes;
  return bytes;
}

// Sends and receives of a pair meet in their order, whatever others do. A receive of another size
// than its send never ends.
bool step(const Comm& c, Leg& leg) {
  const int from = leg.sends ? c.me : leg.peer, to = leg.sends ? leg.peer : c.me;
  Shared::Pair& pair = c.shared->pairs[from][to];
  int64_t& bytes = pair.bytes[leg.number % slots];
  if (leg.sends && pair.read.load() + slots <= leg.number) return false;
  if (!leg.sends && (pair.posted.load() <= leg.number || bytes != bytes_of(leg))) return false;
  std::byte* at = c.pair_slot(from, to, leg.number);
  for (const Part& p : leg.parts) {
    std::byte* mine = reach(p.memory, size_t(p.bytes));
    std::memcpy(leg.sends ? at : mine, leg.sends ? mine : at, size_t(p.bytes));
    at += p.bytes;
  }
  if (leg.sends) bytes = bytes_of(leg);
  (leg.sends ? pair.posted : pair.read).store(leg.number + 1);
  return true;
}

// Element by element along a ring that begins behind the owner of the element's share: what is
// passed on is in the type of the tensor, so that half types are rounded at every hop. An average
// is a sum of contributions times 1/p.
template <class A>
void reduce_along_ring(const Comm& c, const Call& call, int64_t i, std::byte* out) {
  const DType d = call.form.dtype;
  const int64_t e = int64_t(size_of(d));
  const int64_t shares = call.form.what == What::reduce_scatter ? 1 : c.ranks;
  const int64_t share = std::max<int64_t>(1, (call.form.count + shares - 1) / shares);
  const A factor = call.form.reduce == Reduce::avg ? A(1) / A(c.ranks) : A(1);
  const auto part = [&](int hop) {
    const int rank = int((i / share + 1 + hop) % c.ranks);
    const std::byte* at = c.slot(rank, call.number) + i * e;
    if (d != DType::i64) return A(A(load(at, d)) * factor);
    int64_t value;
    std::memcpy(&value, at, sizeof value);
    return A(value);
  };
  const auto pass_on = [&](A value) {
    if (d != DType::i64) return store(out, d, double(value));
    const int64_t whole = int64_t(value);
    std::memcpy(out, &whole, sizeof whole);
  };
  A sum = part(0);
  for (int hop = 1; hop < c.ranks; ++hop) {
    pass_on(sum);
    if (d != DType::i64) sum = A(load(out, d));
    const A more = part(hop);
    sum = call.form.reduce == Reduce::max ? (more > sum ? more : sum) : A(sum + more);
  }
  pass_on(sum);
}

void reduce_into(const Comm& c, const Call& call, int64_t first, int64_t count, std::byte* out) {
  const DType d = call.form.dtype;
  for (int64_t i = 0; i < count; ++i) {
    std::byte* to = out + i * int64_t(size_of(d));
    if (d == DType::i64)
      reduce_along_ring<int64_t>(c, call, first + i, to);
    else if (d == DType::f64 || d == DType::i32)
      reduce_along_ring<double>(c, call, first + i, to);
    else
      reduce_along_ring<float>(c, call, first + i, to);
  }
}

bool post(const Comm& c, Call& call) {
  Shared::Member& mine = c.shared->members[c.me];
  for (int m = 0; m < c.ranks && call.number >= slots; ++m)
    if (c.shared->members[m].read.load() + slots <= call.number) return false;
  const Form& f = call.form;
  c.form(c.me, call.number) = f;
  if (f.what != What::broadcast || f.root == c.me) {
    const int64_t whole = bytes_of(f, f.what == What::reduce_scatter ? f.count * c.ranks : f.count);
    std::memcpy(c.slot(c.me, call.number), reach(call.in, size_t(whole)), size_t(whole));
  }
  mine.posted.store(call.number + 1);
  return true;
}

bool take(const Comm& c, const Call& call) {
  const Form& f = call.form;
  for (int m = 0; m < c.ranks; ++m) {
    if (c.shared->members[m].posted.load() <= call.number) return false;
    if (!(c.form(m, call.number) == f)) return false;
  }
  const int64_t bytes = bytes_of(f, f.count);
  const bool gathers = f.what == What::all_gather;
  std::byte* out = reach(call.out, size_t(gathers ? bytes * c.ranks : bytes));
  if (f.what == What::broadcast) std::memcpy(out, c.slot(f.root, call.number), size_t(bytes));
  for (int m = 0; m < c.ranks && gathers; ++m)
    std::memcpy(out + m * bytes, c.slot(m, call.number), size_t(bytes));
  if (f.what == What::all_reduce) reduce_into(c, call, 0, f.count, out);
  if (f.what == What::reduce_scatter) reduce_into(c, call, f.count * c.me, f.count, out);
  return true;
}

bool step(const Comm& c, Call& call) {
  if (c.aborted) return true;
  if (c.planted == "call_hangs") return false;
  if (call.form.what == What::exchange) {
    bool done = true;
    for (Leg& leg : call.legs) done = (leg.done = leg.done || step(c, leg)) && done;
    return done;
  }
  if (!call.posted) call.posted = post(c, call);
  if (!call.posted || !take(c, call)) return false;
  c.shared->members[c.me].read.store(call.number + 1);
  return true;
}

// ---- the calls

thread_local int depth = 0;  // of groups
thread_local Handle* grouped = nullptr;
thread_local Call group;

int begin(Handle& handle, Call call) {
  Comm& c = *handle;
  if (c.busy > 0) return failed(invalid_usage, "a call to a communicator that is in progress");
  if (c.planted == "dies") ::_exit(7);
  if (c.planted == "call_fails") return failed(internal_error, "planted");
  if (static bool first = true; std::exchange(first, false) && c.planted == "fails_once")
    return failed(internal_error, "planted once");
  c.busy = 2;
  ++c.calls;
  if (call.form.what != What::exchange) call.number = c.collectives++;
  for (Leg& leg : call.legs) leg.number = (leg.sends ? c.sent : c.taken)[leg.peer]++;
  c.begun.push_back(std::move(call));
  return nccl_in_progress;
}

int collective(What what, const void* in, void* out, size_t n, DType d, Reduce r, int root,
               NcclComm comm, Stream s) {
  Handle& handle = *static_cast<Handle*>(comm);
  if (depth > 0) return failed(invalid_usage, "a collective in a group of sends and receives");
  if (r == Reduce::avg && !is_float(d)) return failed(invalid_argument, "an average of integers");
  const int64_t shares = what == What::reduce_scatter ? handle->ranks : 1;
  if (int64_t(n * size_of(d)) * shares > slot_bytes)
    return failed(invalid_argument, "more than a slot holds");
  Call call;
  call.form = {what, d, r, root, int64_t(n)};
  call.in = static_cast<const std::byte*>(in);
  call.out = static_cast<std::byte*>(out);
  call.stream = s;
  return begin(handle, std::move(call));
}

int transfer(bool sends, void* memory, size_t n, DType d, int peer, NcclComm comm, Stream s) {
  auto* handle = static_cast<Handle*>(comm);
  if (depth == 0) return failed(invalid_usage, "a send or receive outside of a group");
  if (grouped && grouped != handle) return failed(invalid_usage, "two communicators in a group");
  if (peer < 0 || peer >= (*handle)->ranks) return failed(invalid_argument, "no such peer");
  grouped = handle;
  group.stream = s;
  const auto same = [&](const Leg& leg) { return leg.sends == sends && leg.peer == peer; };
  auto leg = std::find_if(group.legs.begin(), group.legs.end(), same);
  if (leg == group.legs.end()) leg = group.legs.insert(leg, Leg{sends, false, peer, 0, {}});
  leg->parts.push_back({static_cast<std::byte*>(memory), int64_t(n * size_of(d))});
  return bytes_of(*leg) > slot_bytes ? failed(invalid_argument, "more than a slot holds")
                                     : nccl_success;
}

int end_group() {
  if (depth == 0) return failed(invalid_usage, "the end of no group");
  if (--depth > 0 || !grouped) return nccl_success;
  Call call = std::exchange(group, {});
  return begin(*std::exchange(grouped, nullptr), std::move(call));
}

int unique_id(void* bytes, size_t capacity) {
  if (capacity < nccl_id_bytes) return failed(invalid_argument, "too little room for an id");
  const int file = ::memfd_create("shardproof-double", 0);
  if (file < 0 || ::ftruncate(file, whole_bytes) != 0) return failed(internal_error, "no memory");
  std::memset(bytes, 0, capacity);
  std::snprintf(static_cast<char*>(bytes), capacity, "/proc/%d/fd/%d", ::getpid(), file);
  return nccl_success;
}

int create(NcclComm* out, int ranks, const void* id, int rank) {
  if (ranks > most_ranks) return failed(invalid_argument, "more ranks than the double has");
  FILE* file = std::fopen(static_cast<const char*>(id), "r+");
  if (!file) return failed(internal_error, "no such id");
  void* memory = ::mmap(nullptr, size_t(whole_bytes), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE, ::fileno(file), 0);
  std::fclose(file);
  if (memory == MAP_FAILED) return failed(internal_error, "no address space");
  auto comm = std::make_shared<Comm>();
  comm->shared = static_cast<Shared*>(memory);
  comm->ranks = ranks;
  comm->me = rank;
  comm->planted = planted_on(rank);
  if (comm->planted != "create_hangs") comm->shared->joined.fetch_add(1);
  *out = new Handle(std::move(comm));
  return nccl_in_progress;
}

int async_error(NcclComm handle, int* code) {
  Comm& c = comm_of(handle);
  *code = nccl_success;
  if (int(c.shared->joined.load()) < c.ranks || (c.busy > 0 && --c.busy > 0))
    *code = nccl_in_progress;
  if (c.calls > 0 && c.planted == "async_error") {
    *code = nccl_remote_error;
    error_text = "the double: planted";
  }
  if (*code != nccl_success) return nccl_success;
  for (Call& call : std::exchange(c.begun, {})) {
    const Stream stream = call.stream;
    enqueue_when(stream,
                 [comm = *static_cast<Handle*>(handle),
                  work = std::make_shared<Call>(std::move(call))] { return step(*comm, *work); });
  }
  return nccl_success;
}

int abort(NcclComm handle) {
  comm_of(handle).aborted = true;
  delete static_cast<Handle*>(handle);
  return nccl_success;
}

const char* text(int code) {
  thread_local std::string text;
  text = "NCCL code " + std::to_string(code) + " of the double";
  return text.c_str();
}

}  // namespace

const NcclApi& nccl() {
  static const NcclApi api = {
      .version =
          [](int* v) {
            *v = 0;
            return nccl_success;
          },
      .unique_id = unique_id,
      .text = text,
      .last_error = [] { return error_text.c_str(); },
      .create = create,
      .async_error = async_error,
      .abort = abort,
      .group_start =
          [] {
            ++depth;
            return nccl_success;
          },
      .group_end = end_group,
      .all_reduce =
          [](const void* in, void* out, size_t n, DType d, Reduce r, NcclComm c, Stream s) {
            return collective(What::all_reduce, in, out, n, d, r, 0, c, s);
          },
      .all_gather =
          [](const void* in, void* out, size_t n, DType d, NcclComm c, Stream s) {
            return collective(What::all_gather, in, out, n, d, Reduce::none, 0, c, s);
          },
      .reduce_scatter =
          [](const void* in, void* out, size_t n, DType d, Reduce r, NcclComm c, Stream s) {
            return collective(What::reduce_scatter, in, out, n, d, r, 0, c, s);
          },
      .broadcast =
          [](const void* in, void* out, size_t n, DType d, int root, NcclComm c, Stream s) {
            return collective(What::broadcast, in, out, n, d, Reduce::none, root, c, s);
          },
      .send = [](const void* in, size_t n, DType d, int to, NcclComm c,
                 Stream s) { return transfer(true, const_cast<void*>(in), n, d, to, c, s); },
      .receive = [](void* out, size_t n, DType d, int from, NcclComm c,
                    Stream s) { return transfer(false, out, n, d, from, c, s); },
      .most_elements = 1 << 18,
  };
  return api;
}

}  // namespace shardproof::device_double
