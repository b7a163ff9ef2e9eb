#include "oracle/prepared/answer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "oracle/case.hpp"
#include "oracle/json.hpp"
#include "oracle/prepared/plan.hpp"

namespace shardproof::prepared {
namespace {

namespace fs = std::filesystem;
using tensors::FileTensor;

constexpr std::string_view npy_tail = ".npy";

[[noreturn]] void refuse(const std::string& path, const std::string& expected,
                         const std::string& met) {
  throw BadInput(fmt::format("{}: expected {}, met {}", path, expected, met));
}

// What stands between rankR. and .npy, as the name of a tensor: "shot3.0.grad.x" is of shot3.0/.
// No operand begins with a digit.
std::string tensor_name(std::string_view text) {
  std::string name(text);
  if (!name.starts_with("shot")) return name;
  size_t at = 4;
  const auto digits = [&] {
    const size_t from = at;
    while (at < name.size() && name[at] >= '0' && name[at] <= '9') ++at;
    return at > from;
  };
  if (!digits() || at >= name.size() || name[at] != '.') return name;
  const size_t end = at++;
  if (!(digits() && at < name.size() && name[at] == '.')) at = end;
  name[at] = '/';
  return name;
}

std::string head_of(int rank) { return fmt::format("rank{}.", rank); }

std::vector<std::string> files_of(const std::string& folder, int rank) {
  std::vector<std::string> names = answer_files(folder);
  std::erase_if(names,
                [head = head_of(rank)](const auto& name) { return !name.starts_with(head); });
  return names;
}

FileTensor as_tensor(const tensors::NpyFile& file, const std::string& name) {
  const std::string& path = file.file().path();
  const auto long_dims =
      std::count_if(file->shape.begin(), file->shape.end(), [](int64_t n) { return n > 1; });
  if (file->fortran_order && long_dims > 1)
    refuse(path, fmt::format("tensor '{}' in row-major order", name),
           "fortran_order True; save numpy.ascontiguousarray of it");
  const bool bits = file->descr == "<u2";
  return {name, bits ? "<u2, bits of BF16" : file->descr, bits ? DType::bf16 : file->dtype,
          file->shape, file->bytes};
}

}  // namespace

std::string npy_file(int rank, const std::string& tensor) {
  std::string name = tensor;
  std::replace(name.begin(), name.end(), '/', '.');
  return fmt::format("rank{}.{}{}", rank, name, npy_tail);
}
std::string card_file(int rank) { return fmt::format("rank{}.out.json", rank); }

bool is_answer(std::string_view file) {
  if (!file.starts_with("rank")) return false;
  const size_t end = file.find_first_not_of("0123456789", 4);
  if (end == 4 || end == file.npos || file[end] != '.') return false;
  const std::string_view rest = file.substr(end);
  return rest == ".out.safetensors" || rest == ".out.json" ||
         (rest.size() > npy_tail.size() + 1 && rest.ends_with(npy_tail));
}

std::vector<std::string> answer_files(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const std::string name = entry.path().filename(); is_answer(name)) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

bool Answer::is_there(const std::string& folder, int rank) {
  return !files_of(folder, rank).empty();
}

Answer::Answer(const std::string& folder, int rank) : folder_(folder), rank_(rank) {
  const std::vector<std::string> names = files_of(folder, rank);
  const std::string head = head_of(rank), whole = out_file(rank);
  if (std::find(names.begin(), names.end(), whole) != names.end()) {
    file_ = std::make_unique<tensors::SafetensorsFile>(fs::path(folder) / whole);
    cards_.push_back({file_->file().path(), (*file_)->metadata()});
  }
  for (const std::string& name : names) {
    const std::string path = fs::path(folder) / name;
    if (name == card_file(rank))
      read_card(path);
    else if (name != whole)
      read_array(path, tensor_name(std::string_view(name).substr(
                           head.size(), name.size() - head.size() - npy_tail.size())));
  }
  if (cards_.empty())
    refuse(fs::path(folder) / card_file(rank), "{\"case\": digest} beside arrays of numpy",
           "nothing there; the digest stands in case.json");
}

Answer::Numpy::Numpy(const std::string& path, const std::string& name)
    : file(path), tensor(as_tensor(file, name)) {}

void Answer::read_array(const std::string& path, const std::string& name) {
  if (file_ && (*file_)->find(name))
    refuse(path, fmt::format("tensor '{}' in one file", name),
           "it in " + out_file(rank_) + " as well; leave one of them out");
  arrays_.emplace(name, std::make_unique<Numpy>(path, name));
}

void Answer::read_card(const std::string& path) {
  const JsonValue v = read_json(path);
  if (v.kind != JsonValue::object) refuse(path, "an object of texts", shown(v));
  Card card{path, {}};
  for (const auto& [name, value] : v.members) {
    if (value.kind != JsonValue::text)
      refuse(path, fmt::format("a text under {}", in_quotes(name)), shown(value));
    card.metadata.emplace(name, value.words);
  }
  cards_.push_back(std::move(card));
}

std::vector<const FileTensor*> Answer::tensors() const {
  std::vector<const FileTensor*> all;
  if (file_)
    for (const FileTensor& t : (*file_)->tensors()) all.push_back(&t);
  for (const auto& [name, array] : arrays_) all.push_back(&array->tensor);
  return all;
}

const FileTensor* Answer::find(const std::string& name) const {
  if (const auto array = arrays_.find(name); array != arrays_.end()) return &array->second->tensor;
  return file_ ? (*file_)->find(name) : nullptr;
}

std::string Answer::path_of(const std::string& name) const {
  return file_ && !arrays_.contains(name) ? file_->file().path()
                                          : std::string(fs::path(folder_) / npy_file(rank_, name));
}

void Answer::require_whole() const {
  if (file_) file_->file().require_whole();
  for (const auto& [name, array] : arrays_) array->file.file().require_whole();
}

}  // namespace shardproof::prepared
