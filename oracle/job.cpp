// Jobs and records as bytes: fixed-width little-endian fields, every list after its length. The
// reader is bounded: a truncated or foreign record is no record.
#include "oracle/job.hpp"

#include <cstring>
#include <type_traits>

#include "oracle/tensors/mapped_file.hpp"

namespace shardproof {
namespace {

constexpr uint64_t job_magic = 0x53504a4f42303031, record_magic = 0x5350524543303031;

struct Truncated {};

class Writer {
 public:
  template <class T>
    requires std::is_trivially_copyable_v<T>
  void put(const T& value) {
    const auto* p = reinterpret_cast<const std::byte*>(&value);
    out.insert(out.end(), p, p + sizeof(T));
  }
  void put(const std::string& s) { put_list(std::span(s.data(), s.size())); }
  template <class T>
  void put_list(std::span<const T> list) {
    put(uint64_t(list.size()));
    const auto* p = reinterpret_cast<const std::byte*>(list.data());
    out.insert(out.end(), p, p + list.size_bytes());
  }
  template <class T>
  void put_list(const std::vector<T>& list) {
    put_list(std::span<const T>(list));
  }
  std::vector<std::byte> out;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}
  template <class T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  std::string text() {
    const uint64_t n = length(1);
    return std::string(reinterpret_cast<const char*>(take(n)), n);
  }
  template <class T>
  std::vector<T> list() {
    const uint64_t n = length(sizeof(T));
    std::vector<T> values(n);
    if (n > 0) std::memcpy(values.data(), take(n * sizeof(T)), n * sizeof(T));
    return values;
  }
  // A length that the rest can hold, so that nothing is allocated beyond the input.
  uint64_t length(uint64_t least_bytes_each) {
    const uint64_t n = get<uint64_t>();
    if (n > in_.size() / least_bytes_each) throw Truncated{};
    return n;
  }
  bool at_end() const { return in_.empty(); }

 private:
  const std::byte* take(uint64_t n) {
    if (n > in_.size()) throw Truncated{};
    const std::byte* p = in_.data();
    in_ = in_.subspan(n);
    return p;
  }
  std::span<const std::byte> in_;
};

void put(Writer& w, const Feed& f) {
  w.put(f.fill);
  w.put(f.seed);
  w.put(f.range);
  w.put_list(f.basis);
  w.put(uint64_t(f.given.size()));
  for (const auto& g : f.given) {
    w.put(g.operand);
    w.put_list(g.value);
  }
  w.put(uint64_t(f.keys.size()));
  for (const auto& [key, value] : f.keys) w.put(key), w.put(value);
}

Feed get_feed(Reader& r) {
  Feed f;
  f.fill = r.get<Fill>();
  f.seed = r.get<uint64_t>();
  f.range = r.get<int64_t>();
  f.basis = r.list<Feed::Basis>();
  f.given.resize(r.length(12));
  for (auto& g : f.given) {
    g.operand = r.get<int>();
    g.value = r.list<double>();
  }
  f.keys.resize(r.length(16));
  for (auto& [key, value] : f.keys) key = r.text(), value = r.text();
  return f;
}

void put(Writer& w, const Shot& s) {
  w.put(s.name);
  w.put(s.program);
  w.put(uint64_t(s.feeds.size()));
  for (const Feed& f : s.feeds) put(w, f);
  w.put(s.delays);
  w.put(s.held_stream);
  w.put(s.accumulate);
  w.put(s.fault);
  w.put(s.keep_results);
}

Shot get_shot(Reader& r) {
  Shot s;
  s.name = r.text();
  s.program = r.text();
  s.feeds.clear();
  for (uint64_t n = r.length(17); n > 0; --n) s.feeds.push_back(get_feed(r));
  s.delays = r.get<bool>();
  s.held_stream = r.get<int>();
  s.accumulate = r.get<bool>();
  s.fault = r.get<bool>();
  s.keep_results = r.get<bool>();
  return s;
}

void put(Writer& w, const LedgerEntry& e) {
  w.put(e.op);
  w.put(e.reduce);
  w.put(e.dtype);
  w.put(e.count);
  w.put(e.hop);
  w.put(e.label);
  w.put_list(e.members);
  w.put(e.to);
  w.put(e.from);
  w.put_list(e.send);
  w.put_list(e.recv);
  w.put(e.phase);
  w.put(e.number);
  w.put(e.site);
}

LedgerEntry get_entry(Reader& r) {
  LedgerEntry e;
  e.op = r.get<Op>();
  e.reduce = r.get<Reduce>();
  e.dtype = r.get<DType>();
  e.count = r.get<int64_t>();
  e.hop = r.get<int>();
  e.label = r.text();
  e.members = r.list<int>();
  e.to = r.get<int>();
  e.from = r.get<int>();
  e.send = r.list<int64_t>();
  e.recv = r.list<int64_t>();
  e.phase = r.get<Phase>();
  e.number = r.get<int>();
  e.site = r.text();
  return e;
}

void put(Writer& w, const ResultTensor& t) {
  w.put(t.step);
  w.put(t.operand);
  w.put(t.gradient);
  w.put(t.dtype);
  w.put_list(t.shape);
  w.put_list(std::span<const std::byte>(t.bytes));
  w.put(t.on_device);
  for (uint64_t lane : t.lanes) w.put(lane);
}

ResultTensor get_result(Reader& r) {
  ResultTensor t;
  t.step = r.get<int>();
  t.operand = r.get<int>();
  t.gradient = r.get<bool>();
  t.dtype = r.get<DType>();
  t.shape = r.list<int64_t>();
  t.bytes = r.list<std::byte>();
  t.on_device = r.get<bool>();
  for (uint64_t& lane : t.lanes) lane = r.get<uint64_t>();
  return t;
}

void put(Writer& w, const ShotRecord& s) {
  w.put(s.status);
  w.put(s.cause);
  w.put(s.step);
  w.put(s.text);
  w.put(s.active);
  w.put(uint64_t(s.results.size()));
  for (const auto& t : s.results) put(w, t);
  w.put(uint64_t(s.ledger.size()));
  for (const auto& e : s.ledger) put(w, e);
  w.put(uint64_t(s.memory.size()));
  for (const auto& m : s.memory) {
    w.put(m.what);
    w.put(m.tensor);
    w.put(m.count);
    w.put(m.first);
    w.put(m.text);
  }
}

ShotRecord get_shot_record(Reader& r) {
  ShotRecord s;
  s.status = r.get<ShotRecord::Status>();
  s.cause = r.get<uint8_t>();
  s.step = r.get<int>();
  s.text = r.text();
  s.active = r.get<bool>();
  s.results.resize(r.length(18));
  for (auto& t : s.results) t = get_result(r);
  s.ledger.resize(r.length(32));
  for (auto& e : s.ledger) e = get_entry(r);
  s.memory.resize(r.length(24));
  for (auto& m : s.memory) {
    m.what = r.text();
    m.tensor = r.text();
    m.count = r.get<int64_t>();
    m.first = r.get<int64_t>();
    m.text = r.text();
  }
  return s;
}

}  // namespace

void Bytes::release() const {
  constexpr size_t worth_a_call = size_t(1) << 20;
  if (file_.size() >= worth_a_call) tensors::give_pages_back(file_);
}

std::vector<std::byte> serialize(const Job& job) {
  Writer w;
  w.put(job_magic);
  w.put(job.number);
  w.put(job.line);
  w.put(uint64_t(job.shots.size()));
  for (const Shot& s : job.shots) put(w, s);
  return std::move(w.out);
}

Job parse_job(std::span<const std::byte> bytes) try {
  Reader r(bytes);
  if (r.get<uint64_t>() != job_magic) throw Truncated{};
  Job job;
  job.number = r.get<uint32_t>();
  job.line = r.text();
  for (uint64_t n = r.length(8); n > 0; --n) job.shots.push_back(get_shot(r));
  return job;
} catch (const Truncated&) {
  throw Infrastructure("a job that reached a rank is not whole: expected " + std::to_string(bytes.size()) +
                       " bytes of a job, met a truncated one; the channel from the parent is broken");
}

std::vector<std::byte> serialize(const RankRecord& record) {
  Writer w;
  w.put(record_magic);
  w.put(record.rank);
  w.put(record.number);
  w.put(uint64_t(record.shots.size()));
  for (const ShotRecord& s : record.shots) put(w, s);
  return std::move(w.out);
}

std::optional<RankRecord> parse_record(std::span<const std::byte> bytes) try {
  Reader r(bytes);
  if (r.get<uint64_t>() != record_magic) return std::nullopt;
  RankRecord record;
  record.rank = r.get<int>();
  record.number = r.get<uint32_t>();
  record.shots.resize(r.length(16));
  for (auto& s : record.shots) s = get_shot_record(r);
  if (!r.at_end()) return std::nullopt;
  return record;
} catch (const Truncated&) {
  return std::nullopt;
}

}  // namespace shardproof
