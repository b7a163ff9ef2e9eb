// A transport for tests of what lies above it: ranks are threads that meet under one lock, and each
// member computes its result from the definition of the operation, with plain loops.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "oracle/comm/communicator.hpp"
#include "oracle/comm/ledger.hpp"

namespace shardproof::on_threads {

using Bytes = std::vector<std::byte>;

struct Meeting {
  struct Post {
    Call call;
    Bytes in;
  };
  struct Slot {
    std::map<int, Post> posts;  // by member
    int readers = 0;
  };
  std::mutex lock;
  std::condition_variable change;
  std::map<std::pair<uint64_t, int>, Slot> slots;  // by group and sequence
  std::set<int> left;                              // world ranks that make no more calls
  int64_t calls = 0;

  void leave(int rank) {
    std::lock_guard hold(lock);
    left.insert(rank);
    change.notify_all();
  }
  bool hopeless(const Slot& slot, const Group& g) const {
    for (int m = 0; m < g.size(); ++m)
      if (!slot.posts.contains(m) && left.contains(g.members[size_t(m)])) return true;
    return false;
  }
};

class ThreadDoor : public Door {
 public:
  explicit ThreadDoor(Meeting& m) : meeting_(m) {}

  Ticket start(const Call& c, const View& in, const View& out, Stream) override {
    std::lock_guard hold(meeting_.lock);
    const std::pair key{c.group->id, sequence_[c.group->id]++};
    Meeting::Post post{c, Bytes(size_t(in.bytes()))};
    if (!post.in.empty()) std::memcpy(post.in.data(), in.data, post.in.size());
    meeting_.slots[key].posts.emplace(c.group->me, std::move(post));
    ++meeting_.calls;
    meeting_.change.notify_all();
    flights_.emplace(++last_, Flight{key, c, out});
    return last_;
  }

  void wait(Ticket t, Stream) override {
    const Flight f = flights_.at(t);
    flights_.erase(t);
    std::unique_lock hold(meeting_.lock);
    Meeting::Slot& slot = meeting_.slots[f.key];
    const Call& mine = f.call;
    const auto complete = [&] { return int(slot.posts.size()) == mine.group->size(); };
    meeting_.change.wait_for(hold, std::chrono::seconds(20),
                             [&] { return complete() || meeting_.hopeless(slot, *mine.group); });
    if (!complete()) throw Released(Released::deadlock, "a member never made the call");
    for (const auto& [member, post] : slot.posts)
      if (post.call.op != mine.op || post.call.reduce != mine.reduce ||
          post.call.dtype != mine.dtype)
        throw Released(Released::mismatch, "members made different calls");
    deliver(slot, mine, f.out);
    if (++slot.readers == mine.group->size()) meeting_.slots.erase(f.key);
  }

 private:
  struct Flight {
    std::pair<uint64_t, int> key;
    Call call;
    View out;
  };
  static const std::byte* element(const Meeting::Post& p, int64_t i) {
    return p.in.data() + size_t(i) * size_of(p.call.dtype);
  }
  static double reduced(const Meeting::Slot& slot, const Call& c, int64_t i) {
    double all = 0;
    bool first = true;
    for (const auto& [member, post] : slot.posts) {
      const double x = load(element(post, i), c.dtype);
      if (first)
        all = x;
      else if (c.reduce == Reduce::max)
        all = std::max(all, x);
      else
        all = c.dtype == DType::f64 ? all + x : double(float(all) + float(x));
      first = false;
    }
    return c.reduce == Reduce::avg ? all / c.group->size() : all;
  }
  static void deliver(const Meeting::Slot& slot, const Call& c, const View& out) {
    const int p = c.group->size(), me = c.group->me;
    const int64_t size = int64_t(size_of(c.dtype)), n = out.elements();
    std::byte* to = out.data;
    const auto put = [&](const Meeting::Post& from, int64_t first, int64_t count) {
      if (count == 0) return;
      std::memcpy(to, element(from, first), size_t(count * size));
      to += count * size;
    };
    switch (c.op) {
      case Op::all_reduce:
      case Op::reduce_scatter:
        for (int64_t i = 0; i < n; ++i)
          store(out.data + i * size, c.dtype,
                reduced(slot, c, c.op == Op::all_reduce ? i : me * n + i));
        return;
      case Op::all_gather:
        for (const auto& [member, post] : slot.posts) put(post, 0, post.call.count);
        return;
      case Op::all_to_all:
        for (const auto& [member, post] : slot.posts) {
          int64_t first = 0;
          for (int i = 0; i < me; ++i) first += post.call.send[size_t(i)];
          put(post, first, post.call.send[size_t(me)]);
        }
        return;
      case Op::shift: {
        const auto& from = slot.posts.at((((me - c.root_or_hop) % p) + p) % p);
        return put(from, 0, std::min(n, from.call.count));
      }
      case Op::broadcast:
        return put(slot.posts.at(c.root_or_hop), 0, n);
      case Op::barrier:
        return;
    }
  }

  Meeting& meeting_;
  std::map<uint64_t, int> sequence_;
  std::map<Ticket, Flight> flights_;
  Ticket last_ = 0;
};

// One rank of a test: where it stands, its transport, and communicators on top of any door.
struct TestRank {
  const Mesh& mesh;
  RankState state;
  ThreadDoor transport;

  TestRank(const Mesh& m, int rank, Meeting& meeting) : mesh(m), transport(meeting) {
    state.rank = rank;
    state.size = m.world();
    state.mesh = &mesh;
    state.phase = Phase::forward;
  }
  Group group(Axis axis) const {
    Group g;
    g.members = mesh.group({axis}, state.rank);
    g.me = mesh.coordinate(state.rank, axis);
    g.label = name(axis);
    g.id = group_id(g.members);
    return g;
  }
};

// Runs the body on every rank of the mesh and returns what each of them threw, "" for nothing.
// Returns the number of calls that reached the transport in *calls.
inline std::vector<std::string> run_ranks(const Mesh& mesh,
                                          const std::function<void(TestRank&)>& body,
                                          int64_t* calls = nullptr) {
  Meeting meeting;
  std::vector<std::string> thrown(static_cast<size_t>(mesh.world()));
  std::vector<std::thread> threads;
  for (int r = 0; r < mesh.world(); ++r)
    threads.emplace_back([&, r] {
      TestRank rank(mesh, r, meeting);
      try {
        body(rank);
      } catch (const std::exception& e) {
        thrown[size_t(r)] = e.what();
      }
      meeting.leave(r);
    });
  for (std::thread& t : threads) t.join();
  if (calls) *calls = meeting.calls;
  return thrown;
}

}  // namespace shardproof::on_threads
