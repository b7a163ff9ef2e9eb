// What the parent asks of the ranks and what each of them hands back. The parent judges; ranks only
// execute shots and record what came out.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fixtures/fills.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/contract.hpp"

namespace shardproof {

// One set of numbers for inputs, parameters and cotangents.
struct Feed {
  Fill fill = Fill::integers;
  uint64_t seed = 1;
  int64_t range = 3;  // integers
  struct Basis {
    int operand;
    int64_t index;
  };
  std::vector<Basis> basis;  // whole of the operand is 0 but for a 1 there (index -1: all 0)
  struct Given {
    int operand;
    std::vector<double> value;
  };
  std::vector<Given> given;  // whole (stacked) values of the operand
  bool silent_half = false;  // cotangents are 0 in the first half of dim 0: tokens without a loss
  // Keys of the line that the subject reads otherwise on this feed: such as change no shape.
  std::vector<std::pair<std::string, std::string>> keys;
};

// One execution. The kernel object is one a case: shots run in order on it.
//   program: words F0 B0 F1 B1 ...: forward and backward of feed 0, 1, ...; finish follows each
//   backward that was the last use of a feed's saved state. X: both on the line `other`, of other
//   extents, on data of its own; what comes out is let go.
struct Shot {
  std::string name;  // "base", "repeat", "adjoint:17" ...
  std::string program = "F0 B0";
  std::vector<Feed> feeds = {Feed{}};
  bool delays = false;
  int held_stream = -1;     // of the rank's device, made late (DeviceContext::numbered); -1: none
  bool accumulate = false;  // parameter gradients are added into across backwards
  bool fault = true;        // false: the case's fault is held back (priming, healthy)
  bool keep_results = true;
  std::string other;   // canonical
  bool fresh = false;  // on a kernel object made for it, which later shots go on with
};

struct Job {
  uint32_t number = 0;  // case number in the run
  std::string line;     // canonical
  std::vector<Shot> shots;
};

// The bytes of a result: its own, or a part of a mapped file, which outlives it. What is written to
// becomes its own first.
class Bytes {
 public:
  Bytes() = default;
  Bytes(std::vector<std::byte> own) : own_(std::move(own)) {}
  static Bytes of_file(std::span<const std::byte> part) {
    Bytes b;
    b.file_ = part;
    return b;
  }
  size_t size() const { return file_.empty() ? own_.size() : file_.size(); }
  bool empty() const { return size() == 0; }
  const std::byte* data() const { return file_.empty() ? own_.data() : file_.data(); }
  std::byte* data() { return make_own().data(); }
  const std::byte* begin() const { return data(); }
  const std::byte* end() const { return data() + size(); }
  void resize(size_t n) { make_own().resize(n); }
  operator std::span<const std::byte>() const { return {data(), size()}; }
  // A part of a file has been looked at: its pages are given back, and come again when it is read
  // again.
  void release() const;
  bool operator==(const Bytes& b) const { return equal_bytes(*this, b); }

 private:
  std::vector<std::byte>& make_own() {
    if (!file_.empty()) own_.assign(file_.begin(), file_.end()), file_ = {};
    return own_;
  }
  std::vector<std::byte> own_;
  std::span<const std::byte> file_;
};

struct ResultTensor {
  int step = 0;           // number of the word in the program
  int operand = 0;        // index into the contract's operands
  bool gradient = false;  // of that operand; else its value
  DType dtype = DType::f64;
  std::vector<int64_t> shape;  // local
  Bytes bytes;                 // row-major
  // Lanes of its digest as its device computed it, before it was fetched; of replicated tensors
  // there.
  bool on_device = false;
  uint64_t lanes[2] = {0, 0};
};

struct MemoryFinding {
  std::string what;               // "unwritten" "guard" "argument" "environment" "workspace"
  std::string tensor;             // "y", "gradient of x"
  int64_t count = 0, first = -1;  // elements, local row-major
  std::string text;
};

struct ShotRecord {
  enum Status : uint8_t {
    ok,
    rejected,
    released,
    threw,
    infrastructure,
    too_small,
    not_run
  } status = not_run;
  uint8_t cause = 0;  // Released::Cause
  int step = -1;      // where it stopped
  std::string text;
  bool active = false;  // the fault changed a call or a byte
  std::vector<ResultTensor> results;
  std::vector<LedgerEntry> ledger;
  std::vector<MemoryFinding> memory;
};

// Signed by the rank that made it, for the job that it answers: a record of another rank or of an
// earlier case is no record.
struct RankRecord {
  int rank = -1;
  uint32_t number = 0;
  std::vector<ShotRecord> shots;
};

std::vector<std::byte> serialize(const Job&);
Job parse_job(std::span<const std::byte>);
std::vector<std::byte> serialize(const RankRecord&);
std::optional<RankRecord> parse_record(
    std::span<const std::byte>);  // empty: truncated or not a record

// On a rank: executes the job. Used by every transport.
struct RankHost;
class Registry;
std::vector<std::byte> execute(RankHost&, std::span<const std::byte> job, const Registry&);

}  // namespace shardproof
