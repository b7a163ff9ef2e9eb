// Writing safetensors: one tensor in memory at a time.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <set>
#include <stdexcept>

#include "oracle/comm/door.hpp"
#include "oracle/joined.hpp"
#include "oracle/json.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::tensors {
namespace {

// A file under a temporary name until it is whole.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(path), temporary_(fmt::format("{}.part{}", path, getpid())) {
    file_ = std::fopen(temporary_.c_str(), "wb");
    if (!file_) give_up();
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() {
    if (file_) std::fclose(file_);
    if (!whole_) unlink(temporary_.c_str());
  }
  void put(const void* bytes, size_t n) {
    if (n > 0 && std::fwrite(bytes, 1, n, file_) != n) give_up();
  }
  void finish() {
    const bool closed = std::fclose(file_) == 0;
    file_ = nullptr;
    if (!closed || std::rename(temporary_.c_str(), path_.c_str()) != 0) give_up();
    whole_ = true;
  }

 private:
  [[noreturn]] void give_up() const {
    const int error = errno;
    unlink(temporary_.c_str());  // a constructor that throws has no destructor
    throw Infrastructure(fmt::format("{}: expected a file that can be written, met {}", path_,
                                     std::strerror(error)));
  }
  std::string path_, temporary_;
  std::FILE* file_ = nullptr;
  bool whole_ = false;
};

int64_t bytes_of(const TensorToWrite& t) { return product(t.shape) * int64_t(size_of(t.dtype)); }

std::string header_of(const std::vector<TensorToWrite>& tensors, const Metadata& metadata) {
  std::string members;
  if (!metadata.empty()) {
    std::string words;
    for (const auto& [key, value] : metadata)
      words += fmt::format("{}{}:{}", words.empty() ? "" : ",", json_text(key), json_text(value));
    members = "\"__metadata__\":{" + words + "}";
  }
  int64_t at = 0;
  for (const TensorToWrite& t : tensors) {
    members += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                           members.empty() ? "" : ",", json_text(t.name), format_name(t.dtype),
                           joined(t.shape, ","), at, at + bytes_of(t));
    at += bytes_of(t);
  }
  std::string header = "{" + members + "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

}  // namespace

TensorToWrite to_write(std::string name, const View& view) {
  return {std::move(name), view.dtype, view.shape, [view] {
            std::vector<std::byte> bytes(static_cast<size_t>(view.bytes()));
            pack(view, bytes.data());
            return bytes;
          }};
}

void write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors,
                       const Metadata& metadata) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](auto& a, auto& b) { return size_of(a.dtype) > size_of(b.dtype); });
  std::set<std::string> names{"__metadata__"};
  for (const TensorToWrite& t : tensors)
    if (!names.insert(t.name).second)
      throw std::invalid_argument(
          fmt::format("{}: expected names that differ, met '{}' twice", path, t.name));
  const std::string header = header_of(tensors, metadata);
  NewFile file(path);
  std::byte length[8];
  for (int i = 0; i < 8; ++i) length[i] = std::byte(header.size() >> 8 * i & 0xff);
  file.put(length, sizeof length);
  file.put(header.data(), header.size());
  for (const TensorToWrite& t : tensors) {
    const std::vector<std::byte> bytes = t.bytes();
    if (int64_t(bytes.size()) != bytes_of(t))
      throw std::invalid_argument(fmt::format("{}: expected {} bytes of '{}', met {}", path,
                                              bytes_of(t), t.name, bytes.size()));
    file.put(bytes.data(), bytes.size());
  }
  file.finish();
}

void write_text(const std::string& path, const std::string& text) {
  NewFile file(path);
  file.put(text.data(), text.size());
  file.finish();
}

}  // namespace shardproof::tensors
