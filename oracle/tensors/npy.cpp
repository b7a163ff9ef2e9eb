#include "oracle/tensors/npy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>

#include "oracle/case.hpp"
#include "oracle/json.hpp"
#include "oracle/tensors/extent.hpp"

namespace shardproof::tensors {
namespace {

// The dict of a header:  { 'descr': TEXT, 'fortran_order': True|False, 'shape': (N, ...), }
class Dict {
 public:
  Dict(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  void read_into(Array& a) {
    expect('{');
    bool descr = false, order = false, shape = false;
    while (!accept('}')) {
      const std::string key = quoted();
      bool* seen = key == "descr"           ? &descr
                   : key == "fortran_order" ? &order
                   : key == "shape"         ? &shape
                                            : nullptr;
      if (!seen || *seen) refuse("descr, fortran_order and shape once each", in_quotes(key));
      *seen = true;
      expect(':');
      if (seen == &descr) a.descr = type();
      if (seen == &order) a.fortran_order = truth();
      if (seen == &shape) a.shape = tuple();
      if (!accept(',') && !at('}')) refuse("',' or '}'", here());
    }
    skip_space();
    if (at_ != text_.size()) refuse("the header's end", here());
    if (!descr || !order || !shape) refuse("descr, fortran_order and shape", "fewer");
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]) && text_[at_] != 0) ++at_;
  }
  bool at(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool accept(char c) {
    if (!at(c)) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) refuse(fmt::format("'{}'", c), here());
  }
  std::string here() {
    skip_space();
    return at_ < text_.size() ? in_quotes(std::string(text_.substr(at_, 1))) : "the end";
  }
  [[noreturn]] void refuse(const std::string& expected, const std::string& met) const {
    throw BadInput(fmt::format("{}: expected {} in the header, met {} at byte {} of it", source_,
                               expected, met, at_));
  }
  std::string quoted() {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"') refuse("a text in quotes", here());
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) refuse("a closing quote", "the end");
    std::string word(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return word;
  }
  std::string type() {
    if (at('[')) refuse("one type of number as descr", "a record of several");
    return quoted();
  }
  bool truth() {
    skip_space();
    for (const auto& [word, value] : {std::pair{"True", true}, std::pair{"False", false}})
      if (text_.substr(at_).starts_with(word)) {
        at_ += std::strlen(word);
        return value;
      }
    refuse("True or False", here());
  }
  std::vector<int64_t> tuple() {
    std::vector<int64_t> extents;
    expect('(');
    while (!accept(')')) {
      skip_space();
      int64_t n = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), n);
      if (error != std::errc{} || n < 0) refuse("an extent from 0 to 2^63 - 1", here());
      if (extents.size() == most_dims) refuse(fmt::format("at most {} extents", most_dims), "more");
      at_ = size_t(end - text_.data());
      accept('L');  // what Python 2 wrote after a long one
      extents.push_back(n);
      if (!accept(',') && !at(')')) refuse("',' or ')'", here());
    }
    return extents;
  }

  std::string_view text_;
  const std::string& source_;
  size_t at_ = 0;
};

struct Descr {
  const char* kind;  // kind and width
  size_t width;
  std::optional<DType> dtype;
};
constexpr Descr descrs[] = {{"f8", 8, DType::f64}, {"f4", 4, DType::f32}, {"f2", 2, DType::f16},
                            {"i8", 8, DType::i64}, {"i4", 4, DType::i32}, {"i2", 2, {}},
                            {"i1", 1, {}},         {"u8", 8, {}},         {"u4", 4, {}},
                            {"u2", 2, {}},         {"u1", 1, {}},         {"b1", 1, {}},
                            {"c8", 8, {}},         {"c16", 16, {}}};

const Descr& descr_of(const Array& a, const std::string& source) {
  const auto refuse = [&](const char* advice) {
    throw BadInput(
        fmt::format("{}: expected numbers in little-endian order ('<f4'), met descr {}; {}", source,
                    in_quotes(a.descr), advice));
  };
  const std::string kind = a.descr.empty() ? "" : a.descr.substr(1);
  for (const Descr& d : descrs) {
    if (kind != d.kind) continue;
    if (a.descr[0] == '<' || (d.width == 1 && a.descr[0] == '|')) return d;
    refuse("save it with .astype of a '<' type");
  }
  refuse("objects, texts and records are no tensors");
  return descrs[0];
}

constexpr char magic[] = {'\x93', 'N', 'U', 'M', 'P', 'Y'};

}  // namespace

Array npy_array(std::span<const std::byte> file, const std::string& source) {
  if (file.size() < 10 || std::memcmp(file.data(), magic, sizeof magic) != 0)
    throw BadInput(fmt::format("{}: expected a file of numpy, which begins with \\x93NUMPY, met {}",
                               source, file.size() < 10 ? "fewer than 10 bytes" : "other bytes"));
  const int version = int(file[6]);
  if (version < 1 || version > 3)
    throw BadInput(
        fmt::format("{}: expected version 1, 2 or 3 of the format, met {}", source, version));
  const size_t prefix = version == 1 ? 10 : 12;
  uint64_t length = 0;
  for (size_t i = 8; i < std::min(prefix, file.size()); ++i)
    length |= uint64_t(file[i]) << 8 * (i - 8);
  if (file.size() < prefix || length > file.size() - prefix)
    throw BadInput(
        fmt::format("{}: expected a header within the file's {} bytes, met one of {}; the "
                    "file is cut short",
                    source, file.size(), length));
  Array a;
  Dict({reinterpret_cast<const char*>(file.data()) + prefix, size_t(length)}, source).read_into(a);
  const Descr& d = descr_of(a, source);
  a.dtype = d.dtype;
  a.bytes = file.subspan(prefix + size_t(length));
  const auto due = bytes_due(a.shape, d.width);
  if (!due || uint64_t(*due) != a.bytes.size())
    throw BadInput(fmt::format("{}: expected {} bytes for {} of {}, met {}", source,
                               due ? std::to_string(*due) : "more than 2^63", shape_text(a.shape),
                               a.descr, a.bytes.size()));
  return a;
}

}  // namespace shardproof::tensors
