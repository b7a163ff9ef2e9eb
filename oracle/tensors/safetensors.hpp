// Files of named tensors in the public safetensors format.
//
//   8 bytes      length n of the header, little-endian
//   n bytes      JSON: {"name": {"dtype": "F32", "shape": [2,3], "data_offsets": [0,24]}, ...,
//                "__metadata__": {"text": "text"}}, padded with spaces
//   the rest     the elements, row-major, little-endian, each tensor at its offsets
//
// Read with every rule of the format: the header is no longer than its cap, every name stands once,
// shape times dtype is the range, the ranges cover the rest without a gap or an overlap. A tensor
// without elements is legal. Nothing is allocated by what a length in the file says.
#pragma once
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fixtures/tensor.hpp"
#include "oracle/tensors/mapped_file.hpp"

namespace shardproof::tensors {

using Metadata = std::map<std::string, std::string>;

struct FileTensor {
  std::string name;
  std::string dtype_name;      // as the file has it: "F32"
  std::optional<DType> dtype;  // empty: one of the format that nothing here computes in ("U8")
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // of the file
};

// What the bytes of a file hold; they outlive it.
class Contents {
 public:
  // `source` names the file in messages. Throws BadInput: the file, the tensor, expected and met.
  Contents(std::span<const std::byte> file, const std::string& source);
  const std::vector<FileTensor>& tensors() const { return tensors_; }  // by offset
  const Metadata& metadata() const { return metadata_; }
  const FileTensor* find(const std::string& name) const;  // null where there is none

 private:
  std::vector<FileTensor> tensors_;
  Metadata metadata_;
  std::map<std::string, size_t> by_name_;
};

// A file on disk.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path)
      : file_(path), contents_(file_.read([&] { return Contents(file_.bytes(), file_.path()); })) {}
  const MappedFile& file() const { return file_; }
  const Contents* operator->() const { return &contents_; }

 private:
  MappedFile file_;
  Contents contents_;
};

inline constexpr size_t longest_header = 100'000'000;  // bytes, the cap of the public format

// "F32" of f32, and back.
std::string format_name(DType);

struct TensorToWrite {
  std::string name;
  DType dtype = DType::f64;
  std::vector<int64_t> shape;
  std::function<std::vector<std::byte>()> bytes;  // row-major; asked for when its turn comes
};
TensorToWrite to_write(std::string name, const View&);  // the view outlives the writing

// Writes to a temporary name, then renames. Tensors with wide elements come first, so that each
// lies at a multiple of its width; else in the order given. Throws Infrastructure where it cannot,
// and std::invalid_argument for a name that is given twice.
void write_safetensors(const std::string& path, std::vector<TensorToWrite>, const Metadata& = {});

// A text file, under a temporary name until it is whole.
void write_text(const std::string& path, const std::string& text);

}  // namespace shardproof::tensors
