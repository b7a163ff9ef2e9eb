// The self-test of a transport. Small integers are exact in every dtype, so a sum has one right
// value; where an average rounds, IEEE division says to what.
#include "oracle/comm/transport_self_test.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>

#include "oracle/comm/standing.hpp"

namespace shardproof {
namespace {

constexpr std::string_view job_magic = "shardproof transport self-test";
constexpr size_t most_failures = 10;  // of a rank
constexpr std::byte untouched{0x7b};  // in any dtype a value that no test expects
constexpr int64_t guard_bytes = 64;
constexpr int64_t period = 31, periods = 32;  // of the values, in the index

struct Kind {
  Op op;
  Reduce reduce;
};
constexpr Kind kinds[] = {{Op::all_reduce, Reduce::sum},     {Op::all_reduce, Reduce::avg},
                          {Op::all_reduce, Reduce::max},     {Op::reduce_scatter, Reduce::sum},
                          {Op::reduce_scatter, Reduce::avg}, {Op::reduce_scatter, Reduce::max},
                          {Op::all_gather, Reduce::none},    {Op::all_to_all, Reduce::none},
                          {Op::shift, Reduce::none},         {Op::broadcast, Reduce::none},
                          {Op::barrier, Reduce::none}};
constexpr DType dtypes[] = {DType::f64, DType::f32, DType::bf16,
                            DType::f16, DType::i64, DType::i32};
constexpr int64_t sizes[] = {0, 1, 7, 511, 512, 513, 65535, 65536, 65537};

// The members of every group of one way to cut the world.
using Cut = std::vector<std::vector<int>>;

// The world; it backwards; for each divisor d, runs of d ranks and d ranks at equal distance.
std::vector<Cut> cuts(int world) {
  std::vector<int> all, backwards;
  for (int r = 0; r < world; ++r) all.push_back(r);
  backwards.assign(all.rbegin(), all.rend());
  std::vector<Cut> found{{all}};
  if (world > 1) found.push_back({backwards});
  for (int d = 2; d < world; ++d) {
    if (world % d != 0) continue;
    Cut runs, strided;
    for (int g = 0; g < world / d; ++g) {
      std::vector<int> run, stride;
      for (int i = 0; i < d; ++i) {
        run.push_back(g * d + i);
        stride.push_back(g + i * (world / d));
      }
      runs.push_back(run);
      strided.push_back(stride);
    }
    found.push_back(runs);
    found.push_back(strided);
  }
  return found;
}

// One point: an index into the values of each parameter.
enum Parameter { kind, dtype, size, cut, root, place, flight, parameters };
using Trial = std::array<int, parameters>;
using Extents = std::array<int, parameters>;

Extents extents(int world) {
  return {int(std::size(kinds)),
          int(std::size(dtypes)),
          int(std::size(sizes)),
          int(cuts(world).size()),
          world,
          2,
          2};
}

// Parameters that an operation does not read have one value only.
bool says_something(const Trial& t) {
  const Op op = kinds[t[kind]].op;
  const bool rooted = op == Op::broadcast || op == Op::shift;
  const bool places = op == Op::broadcast || op == Op::all_reduce;
  const bool large = sizes[t[size]] > 513;
  if (op == Op::barrier && (t[dtype] || t[size])) return false;
  return (rooted || t[root] == 0) && (places || t[place] == 0) &&
         (!large || (t[cut] < 3 && t[flight] == 0));
}

std::vector<Trial> product(const Extents& n) {
  std::vector<Trial> trials;
  Trial t{};
  for (;;) {
    if (says_something(t)) trials.push_back(t);
    int p = 0;
    while (p < parameters && ++t[size_t(p)] == n[size_t(p)]) t[size_t(p++)] = 0;
    if (p == parameters) return trials;
  }
}

// Pairs of values that no trial has covered yet.
class Pairs {
 public:
  explicit Pairs(const Extents& n) : n_(n) {
    for (int p = 0; p < parameters; ++p) first_[size_t(p) + 1] = first_[size_t(p)] + n[size_t(p)];
    open_.assign(size_t(first_[parameters]) * size_t(first_[parameters]), true);
  }
  bool open(int p, int v, int q, int w) const { return open_[at(p, v, q, w)]; }
  void close(const Trial& t) {
    for (int p = 0; p < parameters; ++p) {
      for (int q = 0; q < parameters; ++q) open_[at(p, t[size_t(p)], q, t[size_t(q)])] = false;
    }
  }
  // A trial that holds one open pair and nothing else (-1); false when all are closed.
  bool seed(Trial& t) const {
    for (int p = 0; p < parameters; ++p) {
      for (int q = p + 1; q < parameters; ++q) {
        for (int v = 0; v < n_[size_t(p)]; ++v) {
          for (int w = 0; w < n_[size_t(q)]; ++w) {
            if (!open(p, v, q, w)) continue;
            t.fill(-1);
            t[size_t(p)] = v;
            t[size_t(q)] = w;
            return true;
          }
        }
      }
    }
    return false;
  }

 private:
  size_t at(int p, int v, int q, int w) const {
    return size_t(first_[size_t(p)] + v) * size_t(first_[parameters]) +
           size_t(first_[size_t(q)] + w);
  }
  Extents n_;
  std::array<int, parameters + 1> first_{};
  std::vector<bool> open_;
};

// Greedy: an open pair, then for each other parameter the value that closes most pairs with it.
std::vector<Trial> pairwise(const Extents& n) {
  Pairs pairs(n);
  std::vector<Trial> trials;
  for (Trial t; pairs.seed(t);) {
    for (int p = 0; p < parameters; ++p) {
      if (t[size_t(p)] >= 0) continue;
      int best = 0, most = -1;
      for (int i = 0; i < n[size_t(p)]; ++i) {
        const int v = (i + int(trials.size())) % n[size_t(p)];
        int closes = 0;
        for (int q = 0; q < parameters; ++q) {
          closes += q != p && t[size_t(q)] >= 0 && pairs.open(p, v, q, t[size_t(q)]);
        }
        if (closes > most) most = closes, best = v;
      }
      t[size_t(p)] = best;
    }
    pairs.close(t);
    trials.push_back(t);
  }
  return trials;
}

// Never 0, within -15..16, different on any 31 consecutive ranks.
int64_t value(int rank, int64_t index, int salt) {
  const int64_t v = (rank * 7 + index * 13 + salt * 5) % period - 15;
  return v == 0 ? 16 : v;
}

// Extents of block `to` that member `from` sends in an all_to_all: unequal, some empty.
int64_t block(int64_t n, int from, int to) {
  return n == 0 ? (from + to) % 2 : n + (from + 2 * to) % 3 - 1;
}
int64_t shifted(int64_t n, int member) { return n + member % 2; }

// What the mathematics says that a reduction of these contributions stores.
double reduced(Reduce reduce, DType dtype, std::span<const int64_t> contributions) {
  int64_t sum = 0, most = contributions[0];
  for (int64_t c : contributions) {
    sum += c;
    most = std::max(most, c);
  }
  const auto p = int64_t(contributions.size());
  if (reduce == Reduce::max) return double(most);
  if (reduce == Reduce::sum) return round_to(double(sum), dtype);
  if (!is_float(dtype)) return double(sum / p);
  if (dtype == DType::f64) return double(sum) / double(p);
  return round_to(double(float(sum) / float(p)), dtype);
}

// One call of one member: its buffers, and what must be in `out` afterwards.
class Attempt {
 public:
  Attempt(const Trial& t, const Group& group, int salt) : group_(group), salt_(salt) {
    const Kind k = kinds[t[kind]];
    n_ = k.op == Op::barrier ? 0 : sizes[t[size]];
    call_.op = k.op;
    call_.reduce = k.reduce;
    call_.dtype = dtypes[t[dtype]];
    call_.group = &group_;
    call_.file = "transport_self_test.cpp";
    call_.line = __LINE__;
    if (k.op == Op::broadcast) call_.root_or_hop = t[root] % p();
    if (k.op == Op::shift) call_.root_or_hop = (t[root] % 2 ? -1 : 1) * (1 + t[root] / 2);
    for (int m = 0; m < p() && k.op == Op::all_to_all; ++m) {
      call_.send.push_back(block(n_, me(), m));
      call_.recv.push_back(block(n_, m, me()));
    }
    in_place_ = t[place] == 1 && (k.op == Op::all_reduce || k.op == Op::broadcast);
    call_.count = in_elements(me());
    out_ = storage(out_elements());
    if (!in_place_) in_ = storage(call_.count);
    each_piece(given(), [&](int64_t at, const std::byte* from, int64_t count) {
      std::memcpy((in_place_ ? out_ : in_).data() + at * element(), from,
                  size_t(count * element()));
    });
  }
  Attempt(const Attempt&) = delete;  // the call points to the group
  Attempt& operator=(const Attempt&) = delete;

  void start(Door& door) {
    View out = view(out_, out_elements());
    ticket_ = door.start(call_, in_place_ ? out : view(in_, call_.count), out, nullptr);
  }
  void wait(Door& door) { door.wait(ticket_, nullptr); }

  // Empty when everything is as it must be.
  std::string judge() const {
    if (const auto wrong = first_wrong(out_, expected())) {
      return fmt::format("{}: element {} on rank {}: expected {}, got {}", text(), wrong->at,
                         group_.members[size_t(me())], wrong->want, wrong->got);
    }
    if (!is_guarded(out_)) {
      return fmt::format("{}: bytes behind `out` were written on rank {}", text(),
                         group_.members[size_t(me())]);
    }
    if (in_place_ || (!first_wrong(in_, given()) && is_guarded(in_))) return "";
    return text() + ": `in` was changed";
  }

 private:
  int p() const { return group_.size(); }
  int me() const { return group_.me; }
  int64_t element() const { return int64_t(size_of(call_.dtype)); }

  int64_t in_elements(int member) const {
    if (call_.op == Op::reduce_scatter) return n_ * p();
    if (call_.op == Op::shift) return shifted(n_, member);
    if (call_.op != Op::all_to_all) return n_;
    int64_t total = 0;
    for (int to = 0; to < p(); ++to) total += block(n_, member, to);
    return total;
  }
  int64_t out_elements() const {
    if (call_.op == Op::all_gather) return n_ * p();
    if (call_.op == Op::shift) return shifted(n_, source());
    int64_t total = 0;
    for (int64_t r : call_.recv) total += r;
    return call_.op == Op::all_to_all ? total : n_;
  }
  int source() const {  // of a shift
    return ((me() - call_.root_or_hop) % p() + p()) % p();
  }

  std::vector<std::byte> storage(int64_t elements) const {
    return std::vector<std::byte>(size_t(elements * element() + guard_bytes), untouched);
  }
  static bool is_guarded(const std::vector<std::byte>& bytes) {
    return std::all_of(bytes.end() - guard_bytes, bytes.end(),
                       [](std::byte b) { return b == untouched; });
  }
  View view(std::vector<std::byte>& bytes, int64_t elements) const {
    return view_of(bytes.data(), call_.dtype, {elements});
  }

  // Values have a period in the index: a table of a few periods, as stored elements.
  template <class Value>
  std::vector<std::byte> table(const Value& at) const {
    std::vector<std::byte> t(size_t(period * periods * element()));
    for (int64_t i = 0; i < period; ++i) store(t.data() + i * element(), call_.dtype, at(i));
    for (int64_t k = 1; k < periods; ++k) {
      std::memcpy(t.data() + k * period * element(), t.data(), size_t(period * element()));
    }
    return t;
  }
  std::vector<std::byte> of_member(int member) const {
    return table(
        [&](int64_t i) { return double(value(group_.members[size_t(member)], i, salt_)); });
  }
  std::vector<std::byte> of_all() const {
    return table([&](int64_t i) {
      std::vector<int64_t> contributions;
      for (int rank : group_.members) contributions.push_back(value(rank, i, salt_));
      return reduced(call_.reduce, call_.dtype, contributions);
    });
  }
  // Elements first, first + 1, ... of a table. A buffer is one run after the other: nothing as
  // large is built to compare it with.
  struct Run {
    std::vector<std::byte> table;
    int64_t first, count;
  };

  // at(element of the buffer, bytes in a table, elements)
  template <class At>
  void each_piece(const std::vector<Run>& runs, const At& at) const {
    int64_t place = 0;
    for (const Run& r : runs) {
      for (int64_t done = 0, n; done < r.count; done += n, place += n) {
        const int64_t from = (r.first + done) % period;
        n = std::min(r.count - done, period * periods - from);
        at(place, r.table.data() + from * element(), n);
      }
    }
  }

  struct Wrong {
    int64_t at;
    double got, want;
  };
  std::optional<Wrong> first_wrong(const std::vector<std::byte>& bytes,
                                   const std::vector<Run>& runs) const {
    std::optional<Wrong> wrong;
    each_piece(runs, [&](int64_t at, const std::byte* right, int64_t count) {
      const std::byte* there = bytes.data() + at * element();
      if (wrong || std::memcmp(there, right, size_t(count * element())) == 0) return;
      for (int64_t i = 0; i < count && !wrong; ++i) {
        const double got = load(there + i * element(), call_.dtype);
        const double want = load(right + i * element(), call_.dtype);
        if (!(got == want)) wrong = {at + i, got, want};
      }
    });
    return wrong;
  }

  // What this member contributes. One that is not the root of a broadcast in place has nothing to
  // say.
  std::vector<Run> given() const {
    if (in_place_ && call_.op == Op::broadcast && me() != call_.root_or_hop) return {};
    return {{of_member(me()), 0, call_.count}};
  }

  // What must be in `out`.
  std::vector<Run> expected() const {
    std::vector<Run> runs;
    switch (call_.op) {
      case Op::all_reduce:
        return {{of_all(), 0, n_}};
      case Op::reduce_scatter:
        return {{of_all(), n_ * me(), n_}};
      case Op::shift:
        return {{of_member(source()), 0, out_elements()}};
      case Op::broadcast:
        return {{of_member(call_.root_or_hop), 0, n_}};
      case Op::all_gather:
        for (int m = 0; m < p(); ++m) runs.push_back({of_member(m), 0, n_});
        break;
      case Op::all_to_all:  // of each sender the block behind those that it cut for members before
                            // me
        for (int m = 0; m < p(); ++m) {
          int64_t before = 0;
          for (int other = 0; other < me(); ++other) before += block(n_, m, other);
          runs.push_back({of_member(m), before, call_.recv[size_t(m)]});
        }
        break;
      case Op::barrier:
        break;
    }
    return runs;
  }

  std::string text() const {
    std::string t = name(call_.op);
    if (call_.reduce != Reduce::none) t += fmt::format(" {}", name(call_.reduce));
    if (call_.op == Op::broadcast) t += fmt::format(" from member {}", call_.root_or_hop);
    if (call_.op == Op::shift) t += fmt::format(" hop {:+}", call_.root_or_hop);
    return fmt::format("{}, {} x {}{}, group {}", t, n_, name(call_.dtype),
                       in_place_ ? ", in place" : "", member_text(group_.members));
  }

  Group group_;
  Call call_;
  int salt_ = 0;
  int64_t n_ = 0;
  bool in_place_ = false;
  std::vector<std::byte> in_, out_;
  Ticket ticket_ = 0;
};

Group group_of(const Cut& cut, int rank) {
  Group g;
  for (const auto& members : cut) {
    const auto own = std::find(members.begin(), members.end(), rank);
    if (own == members.end()) continue;
    g.members = members;
    g.me = int(own - members.begin());
  }
  g.label = "self-test";
  g.id = group_id(g.members);
  return g;
}

// One trial: one call, or two that are waited for in reverse.
void attempt(const Trial& t, const Group& group, Door& door, std::vector<std::string>& failures) {
  std::deque<Attempt> attempts;
  for (int salt = 0; salt <= t[flight]; ++salt) attempts.emplace_back(t, group, salt);
  for (Attempt& a : attempts) a.start(door);
  std::for_each(attempts.rbegin(), attempts.rend(), [&](Attempt& a) { a.wait(door); });
  for (const Attempt& a : attempts) {
    std::string wrong = a.judge();
    if (!wrong.empty() && failures.size() < most_failures) failures.push_back(std::move(wrong));
  }
}

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

// The record: the number of calls, then a failure a line.
std::string record_text(int64_t calls, const std::vector<std::string>& failures) {
  std::string text = fmt::format("{}", calls);
  for (std::string f : failures) {
    std::replace(f.begin(), f.end(), '\n', ' ');
    text += "\n" + f;
  }
  return text;
}

void read_record(std::span<const std::byte> record, SelfTestResult& result) {
  const std::string text(reinterpret_cast<const char*>(record.data()), record.size());
  size_t line = text.find('\n');
  result.calls += std::atoll(text.substr(0, line).c_str());
  while (line != std::string::npos) {
    const size_t next = text.find('\n', line + 1);
    result.failures.push_back(
        text.substr(line + 1, next == std::string::npos ? next : next - line - 1));
    line = next;
  }
}

}  // namespace

std::vector<std::byte> transport_self_test_rank(RankHost& host, bool all, int part, int parts) {
  const std::vector<Cut> ways = cuts(host.size);
  const std::vector<Trial> trials =
      all ? product(extents(host.size)) : pairwise(extents(host.size));
  std::vector<std::string> failures;
  int64_t calls = 0;
  if (host.state) host.state->phase = Phase::harness;
  try {
    for (size_t i = size_t(part); i < trials.size(); i += size_t(parts)) {
      const Trial& t = trials[i];
      attempt(t, group_of(ways[size_t(t[cut])], host.rank), *host.door, failures);
      calls += 1 + t[flight];
    }
  } catch (const std::exception& e) {
    failures.push_back(fmt::format("rank {} after {} calls: {}", host.rank, calls, e.what()));
  }
  return bytes_of(record_text(calls, failures));
}

RankMain with_self_test(RankMain main) {
  return [main = std::move(main)](RankHost& host, std::span<const std::byte> job) {
    const std::string_view text(reinterpret_cast<const char*>(job.data()), job.size());
    if (!text.starts_with(job_magic)) return main(host, job);
    int all = 0, part = 0, parts = 1;
    std::sscanf(std::string(text.substr(job_magic.size())).c_str(), "%d %d %d", &all, &part,
                &parts);
    return transport_self_test_rank(host, all != 0, part, parts);
  };
}

SelfTestResult transport_self_test(World& world, bool all, double deadline) {
  const auto begin = std::chrono::steady_clock::now();
  SelfTestResult result;
  const int parts = all ? 8 : 1;  // each within the deadline of a job
  for (int part = 0; part < parts && world.alive(); ++part) {
    const std::string job = fmt::format("{} {} {} {}", job_magic, int(all), part, parts);
    const std::vector<RankOutcome> outcomes = world.run(bytes_of(job), 0, deadline);
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      const RankOutcome& o = outcomes[rank];
      if (o.end == RankOutcome::finished) {
        read_record(o.record, result);
      } else {
        result.failures.push_back(
            fmt::format("rank {} did not finish the self-test: {}", rank, o.text));
      }
    }
  }
  std::sort(result.failures.begin(), result.failures.end());
  result.failures.erase(std::unique(result.failures.begin(), result.failures.end()),
                        result.failures.end());
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

}  // namespace shardproof
