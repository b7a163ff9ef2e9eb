// Jobs and records as bytes.
#include "oracle/job.hpp"

#include "oracle/fields.hpp"
#include "oracle/tensors/mapped_file.hpp"

namespace shardproof {

// Found by the types of what they list, which are no types of this file.
template <class Both>
static void fields(Both& both, Feed::Given& g) {
  both(g.operand, g.value);
}
template <class Both>
static void fields(Both& both, Feed& f) {
  both(f.fill, f.seed, f.range, f.basis, f.given, f.silent_half, f.keys);
}
template <class Both>
static void fields(Both& both, Shot& s) {
  both(s.name, s.program, s.feeds, s.delays, s.held_stream, s.accumulate, s.fault, s.keep_results,
       s.other, s.fresh);
}
template <class Both>
static void fields(Both& both, Job& j) {
  both(j.number, j.line, j.shots);
}
template <class Both>
static void fields(Both& both, LedgerEntry& e) {
  both(e.op, e.reduce, e.dtype, e.count, e.hop, e.label, e.members, e.to, e.from, e.send, e.recv,
       e.phase, e.number, e.site);
}
template <class Both>
static void fields(Both& both, Bytes& b) {
  if constexpr (std::is_same_v<Both, ByteWriter>) {
    both.list(std::span<const std::byte>(b));
  } else {
    std::vector<std::byte> own;
    both(own);
    b = std::move(own);
  }
}
template <class Both>
static void fields(Both& both, ResultTensor& t) {
  both(t.step, t.operand, t.gradient, t.dtype, t.shape, t.bytes, t.on_device, t.lanes);
}
template <class Both>
static void fields(Both& both, MemoryFinding& m) {
  both(m.what, m.tensor, m.count, m.first, m.text);
}
template <class Both>
static void fields(Both& both, ShotRecord& s) {
  both(s.status, s.cause, s.step, s.text, s.active, s.results, s.ledger, s.memory);
}
template <class Both>
static void fields(Both& both, RankRecord& r) {
  both(r.rank, r.number, r.shots);
}

namespace {

constexpr uint64_t job_magic = 0x53504a4f42303031, record_magic = 0x5350524543303031;

template <class T>
std::vector<std::byte> signed_bytes(uint64_t magic, const T& value) {
  ByteWriter w;
  w(magic, value);
  return std::move(w.out);
}
template <class T>
T read_signed(ByteReader& r, uint64_t magic) {
  uint64_t met = 0;
  r(met);
  if (met != magic) throw Truncated{};
  T value;
  r(value);
  return value;
}

}  // namespace

void Bytes::release() const {
  constexpr size_t worth_a_call = size_t(1) << 20;
  if (file_.size() >= worth_a_call) tensors::give_pages_back(file_);
}

std::vector<std::byte> serialize(const Job& job) { return signed_bytes(job_magic, job); }

Job parse_job(std::span<const std::byte> bytes) try {
  ByteReader r(bytes);
  return read_signed<Job>(r, job_magic);
} catch (const Truncated&) {
  throw Infrastructure(
      "a job that reached a rank is not whole: expected " + std::to_string(bytes.size()) +
      " bytes of a job, met a truncated one; the channel from the parent is broken");
}

std::vector<std::byte> serialize(const RankRecord& record) {
  return signed_bytes(record_magic, record);
}

std::optional<RankRecord> parse_record(std::span<const std::byte> bytes) try {
  ByteReader r(bytes);
  auto record = read_signed<RankRecord>(r, record_magic);
  if (!r.at_end()) return std::nullopt;
  return record;
} catch (const Truncated&) {
  return std::nullopt;
}

}  // namespace shardproof
