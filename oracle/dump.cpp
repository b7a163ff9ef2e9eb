// What a case was fed, what came out and what is true, global and per rank.
#include "oracle/dump.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <new>
#include <string_view>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/comm/door.hpp"
#include "oracle/joined.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof {

namespace {

namespace fs = std::filesystem;
using tensors::TensorToWrite;

TensorToWrite values(std::string name, DType dtype, std::vector<int64_t> shape,
                     std::vector<double> value) {
  return {std::move(name), dtype, std::move(shape), [dtype, value = std::move(value)] {
            std::vector<std::byte> bytes(value.size() * size_of(dtype));
            for (size_t i = 0; i < value.size(); ++i)
              store(bytes.data() + i * size_of(dtype), dtype, value[i]);
            return bytes;
          }};
}

std::vector<std::byte> raw(const ResultTensor& t) { return {t.bytes.begin(), t.bytes.end()}; }

std::vector<double> picked(const std::vector<double>& whole, const std::vector<int64_t>& indices) {
  std::vector<double> part;
  part.reserve(indices.size());
  for (const int64_t i : indices) part.push_back(whole.at(size_t(i)));
  return part;
}

// A tensor of the case: what the ranks are given of it, or what they return.
struct Given {
  std::string name;
  const Operand* what;
  Layout layout;
  const Whole* value;
};
struct Returned {
  std::string name;
  const Operand* what;
  Layout layout;
  const Whole* want;
  int step, operand;
  bool gradient;
};

class CaseDump {
 public:
  CaseDump(const Evidence& e, const Truth& truth) : e_(e) {
    const int n = e.inputs, all = int(e.operands.size());
    const int forward = judging::step_of(e.shots[0], "F0"),
              backward = judging::step_of(e.shots[0], "B0");
    for (int i = 0; i < n; ++i)
      given_.push_back({at(i).name, &at(i), at(i).layout, &truth.inputs[size_t(i)]});
    for (int i = n; i < all; ++i)
      returned_.push_back(
          {at(i).name, &at(i), at(i).layout, &truth.outputs[size_t(i - n)], forward, i, false});
    if (!e.declared.backward) return;
    for (int i = n; i < all; ++i)
      given_.push_back(
          {"grad." + at(i).name, &at(i), dual(at(i).layout), &truth.cotangents[size_t(i - n)]});
    for (int i = 0; i < n; ++i)
      if (!truth.gradients[size_t(i)].value.empty())
        returned_.push_back({"grad." + at(i).name, &at(i), judging::result_layout(at(i), true),
                             &truth.gradients[size_t(i)], backward, i, true});
  }

  // Upper bound of what is written.
  int64_t bytes() const {
    int64_t n = 0;
    for (const Given& g : given_) n += 8 * int64_t(g.value->value.size()) * (1 + e_.mesh.world());
    for (const Returned& r : returned_)
      n += 16 * int64_t(r.want->value.size()) * (1 + e_.mesh.world());
    return n;
  }

  std::vector<TensorToWrite> global() const {
    std::vector<TensorToWrite> list;
    for (const Given& g : given_)
      list.push_back(values(g.name, e_.dtype_of(*g.what), g.value->shape, g.value->value));
    for (const Returned& r : returned_) {
      list.push_back(values("want." + r.name, DType::f64, r.want->shape, r.want->value));
      if (!e_.ranks.empty())
        list.push_back(values("got." + r.name, DType::f64, r.want->shape, denoted(r)));
    }
    return list;
  }

  std::vector<TensorToWrite> of_rank(int rank) const {
    std::vector<TensorToWrite> list;
    for (const Given& g : given_)
      list.push_back(
          values(g.name, e_.dtype_of(*g.what), local_shape(g.what->shape, g.layout, e_.mesh, rank),
                 picked(g.value->value, whole_indices(g.what->shape, g.layout, e_.mesh, rank))));
    for (const Returned& r : returned_) {
      const auto shape = local_shape(r.what->shape, r.layout, e_.mesh, rank);
      if (!partial(r.layout))
        list.push_back(
            values("want." + r.name, DType::f64, shape,
                   picked(r.want->value, denoted_indices(r.what->shape, r.layout, e_.mesh, rank))));
      if (const ResultTensor* got = e_.result(rank, 0, r.step, r.operand, r.gradient))
        list.push_back({"got." + r.name, got->dtype, got->shape, [got] { return raw(*got); }});
    }
    return list;
  }

 private:
  const Operand& at(int i) const { return e_.operands[size_t(i)]; }

  bool partial(const Layout& layout) const {
    for (const auto& [axis, placement] : layout)
      if (placement.kind == Placement::partial && e_.mesh.size(axis) > 1) return true;
    return false;
  }

  // The ranks' results as one tensor: of each place in the stack of P and V the first copy, summed
  // over P. NaN where no rank returned anything.
  std::vector<double> denoted(const Returned& r) const {
    std::vector<double> sum(r.want->value.size());
    std::vector<bool> known(size_t(product(whole_shape(r.what->shape, r.layout, e_.mesh)))),
        met(sum.size());
    std::vector<double> got;
    for (int rank = 0; rank < e_.mesh.world(); ++rank) {
      const ResultTensor* result = e_.result(rank, 0, r.step, r.operand, r.gradient);
      const auto places = whole_indices(r.what->shape, r.layout, e_.mesh, rank);
      const auto indices = denoted_indices(r.what->shape, r.layout, e_.mesh, rank);
      if (!result || result->bytes.size() != places.size() * size_of(result->dtype)) continue;
      judging::read(*result, got);
      for (size_t i = 0; i < places.size(); ++i) {
        if (known[size_t(places[i])]) continue;
        known[size_t(places[i])] = met[size_t(indices[i])] = true;
        sum[size_t(indices[i])] += got[i];
      }
    }
    for (size_t i = 0; i < sum.size(); ++i)
      if (!met[i]) sum[i] = std::nan("");
    return sum;
  }

  const Evidence& e_;
  std::vector<Given> given_;
  std::vector<Returned> returned_;
};

uint64_t hash_of(const std::string& text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ uint8_t(c)) * 0x100000001b3;
  return hash;
}

// A folder that is locked while the object is there. The system lets go of the lock when its owner
// ends, however it ends; of a folder that another one holds `held` says false.
class Locked {
 public:
  explicit Locked(const fs::path& folder)
      : fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) {
    held_ = fd_ >= 0 && ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
  }
  ~Locked() {
    if (fd_ >= 0) ::close(fd_);
  }
  Locked(const Locked&) = delete;
  bool held() const { return held_; }

 private:
  int fd_;
  bool held_ = false;
};

constexpr std::string_view part_word = ".part";
constexpr size_t hash_digits = 16;

bool made_of(std::string_view text, const char* letters) {
  return !text.empty() && text.find_first_not_of(letters) == text.npos;
}

// Of the name of an unfinished folder, .NAME-HASH-WRITER.partOWNER, its owner; 0: it is no such
// name.
pid_t owner_of_part(std::string_view name) {
  const size_t part = name.rfind(part_word), writer = name.rfind('-', part),
               hash = writer == 0 || writer == name.npos ? writer : name.rfind('-', writer - 1);
  if (!name.starts_with('.') || part == name.npos || hash == name.npos ||
      writer - hash - 1 != hash_digits)
    return 0;
  const std::string_view digits = name.substr(part + part_word.size());
  pid_t owner = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), owner);
  const bool whole = error == std::errc{} && end == digits.data() + digits.size() && owner > 0;
  return whole && made_of(name.substr(hash + 1, hash_digits), "0123456789abcdef") &&
                 made_of(name.substr(writer + 1, part - writer - 1), "0123456789")
             ? owner
             : 0;
}

// Its owner may live elsewhere, where the folder is one of several machines or containers: the lock
// of the writer says so.
bool is_left(const fs::path& folder) {
  const pid_t owner = owner_of_part(folder.filename().string());
  struct stat s {};
  return owner > 0 && ::kill(owner, 0) != 0 && errno == ESRCH && ::lstat(folder.c_str(), &s) == 0 &&
         S_ISDIR(s.st_mode) && s.st_uid == ::geteuid() && Locked(folder).held();
}

// A folder of its name, whole; over what an earlier dump of the line left there.
void publish(const fs::path& whole, const fs::path& place) {
  std::error_code taken;
  fs::rename(whole, place, taken);
  if (!taken) return;
  fs::create_directories(place);
  for (const auto& file : fs::directory_iterator(whole))
    fs::rename(file.path(), place / file.path().filename());
  fs::remove_all(whole);
}

void write_case(const Judged& j, const CaseDump& dump, const fs::path& folder,
                const std::string& program) {
  fs::create_directories(folder);
  const Locked being_filled(folder);
  const tensors::Metadata about = {{"line", j.result.canonical}};
  tensors::write_safetensors((folder / "global.safetensors").string(), dump.global(), about);
  for (int rank = 0; rank < j.evidence.mesh.world(); ++rank)
    tensors::write_safetensors((folder / fmt::format("rank{}.safetensors", rank)).string(),
                               dump.of_rank(rank), about);
  tensors::write_text((folder / "finding.txt").string(), block(j.result, program));
}

}  // namespace

std::string folder_name(const std::string& line, const std::string& canonical) {
  constexpr size_t most = 80;
  std::string name;
  for (const char c : line.substr(0, most)) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::strchr("-_=,+", c);
    name += plain && c != 0 ? c : c == '.' && !name.empty() ? '.' : '_';
  }
  return fmt::format("{}-{:0{}x}", name, hash_of(canonical), hash_digits);
}

struct Dumps::Shared {
  std::atomic<int> failed = 0, taken = 0, written = 0, refused = 0, large = 0;
  std::atomic<bool> has_error = false;
  char error[512] = {};
};

Dumps::Dumps(std::string folder) : folder_(std::move(folder)), owner_(getpid()) {
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Infrastructure(fmt::format("mmap: {}", std::strerror(errno)));
  shared_ = new (memory) Shared;
  remove_parts(is_left);
}

// Processes of the owner have ended by then.
Dumps::~Dumps() {
  if (getpid() == owner_)
    remove_parts([&](const fs::path& p) { return p.extension() == part_of_owner(); });
  ::munmap(shared_, sizeof(Shared));
}

std::string Dumps::part_of_owner() const { return fmt::format("{}{}", part_word, owner_); }

void Dumps::remove_parts(const std::function<bool(const fs::path&)>& of) const {
  std::error_code none;
  for (fs::directory_iterator at(folder_, none), end; !none && at != end; at.increment(none))
    if (std::error_code kept; of(at->path())) fs::remove_all(at->path(), kept);
}

void Dumps::add(const Judged& j, const Truth& truth, const std::string& program) {
  ++shared_->failed;
  const CaseDump dump(j.evidence, truth);
  if (dump.bytes() > most_bytes) {
    ++shared_->large;
    return;
  }
  if (shared_->taken++ >= most_cases) return;
  const std::string name = folder_name(j.result.line, j.result.canonical);
  const fs::path begun =
      fs::path(folder_) / fmt::format(".{}-{}{}", name, getpid(), part_of_owner());
  try {
    write_case(j, dump, begun, program);
    publish(begun, fs::path(folder_) / name);
    ++shared_->written;
  } catch (const std::exception& e) {
    ++shared_->refused;
    if (!shared_->has_error.exchange(true))
      std::snprintf(shared_->error, sizeof shared_->error, "%s", e.what());
  }
}

std::string Dumps::told() const {
  const int failed = shared_->failed, written = shared_->written, large = shared_->large;
  if (failed == 0) return "";
  std::string text =
      fmt::format("{} of {} that did not pass, in {}", written, number_of(failed, "case"), folder_);
  if (failed - large > most_cases) text += fmt::format("; at most {} are written", most_cases);
  const int cut = std::min<int>(shared_->taken, most_cases) - written - shared_->refused;
  if (cut > 0) text += fmt::format("; {} left out, cut short as the run ended", cut);
  if (large > 0) text += fmt::format("; {} left out, larger than {} MiB", large, most_bytes >> 20);
  return text;
}

std::string Dumps::error() const { return shared_->has_error ? shared_->error : ""; }

}  // namespace shardproof
