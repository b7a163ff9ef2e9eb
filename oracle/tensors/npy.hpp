// One array in numpy's format, versions 1 to 3.
//
//   \x93NUMPY, version, length of the header (2 bytes in version 1, 4 later), then a Python dict:
//   {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
//
// The header's dict is read by its own small grammar, nothing is evaluated.
#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "oracle/tensors/safetensors.hpp"

namespace shardproof::tensors {

struct Array {
  std::string descr;           // "<f4"
  std::optional<DType> dtype;  // empty: one that nothing here computes in; numpy has no bf16
  bool fortran_order = false;  // the first dim varies fastest
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // of the file, as it has them
};

// Throws BadInput with `source` in front. Refused: object arrays and records, big-endian data, more
// or fewer bytes than shape and descr ask for.
Array npy_array(std::span<const std::byte> file, const std::string& source);

class NpyFile {
 public:
  explicit NpyFile(const std::string& path)
      : file_(path), array_(file_.read([&] { return npy_array(file_.bytes(), file_.path()); })) {}
  const MappedFile& file() const { return file_; }
  const Array* operator->() const { return &array_; }

 private:
  MappedFile file_;
  Array array_;
};

}  // namespace shardproof::tensors
