// Reading safetensors: the header as a stream of JSON events, so that nothing grows faster than the
// header itself, then every rule of the format on the ranges.
#include <fmt/format.h>

#include <algorithm>

#include "oracle/case.hpp"
#include "oracle/json.hpp"
#include "oracle/tensors/extent.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::tensors {
namespace {

struct Format {
  const char* name;
  size_t width;
  std::optional<DType> dtype;
};

constexpr Format formats[] = {
    {"F64", 8, DType::f64}, {"F32", 4, DType::f32}, {"BF16", 2, DType::bf16},
    {"F16", 2, DType::f16}, {"I64", 8, DType::i64}, {"I32", 4, DType::i32},
    {"U64", 8, {}},         {"U32", 4, {}},         {"U16", 2, {}},
    {"I16", 2, {}},         {"U8", 1, {}},          {"I8", 1, {}},
    {"BOOL", 1, {}},        {"F8_E4M3", 1, {}},     {"F8_E5M2", 1, {}},
    {"F8_E8M0", 1, {}},     {"C64", 8, {}},
};

const Format* format_named(const std::string& name) {
  for (const Format& f : formats)
    if (name == f.name) return &f;
  return nullptr;
}

constexpr const char* metadata_name = "__metadata__";
constexpr size_t prefix = 8;  // bytes of the header's length

struct Entry {
  FileTensor tensor;
  std::vector<int64_t> offsets;
};

// Takes the header apart:  {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0,8]}, ...}
class Header final : public JsonEvents {
 public:
  explicit Header(const std::string& source) : source_(source) {}
  std::vector<Entry> entries;
  Metadata metadata;

  void key(std::string name) override {
    if (depth_ == 1)
      tensor_ = std::move(name);
    else
      field_ = std::move(name);
  }
  void open(JsonValue::Kind kind) override {
    const bool list = kind == JsonValue::array;
    if (depth_ == 0 && list) refuse("an object of tensors", "a list");
    if (depth_ == 1 && list) refuse("an object of dtype, shape and data_offsets", "a list");
    if (depth_ == 2 && !(list && !in_metadata() && is_numbers(field_)))
      unexpected(list ? "a list" : "an object");
    if (depth_ == 3) refuse("whole numbers in " + field_, "something nested");
    if (depth_ == 1 && !in_metadata()) {
      entries.push_back({});
      entries.back().tensor.name = tensor_;
      seen_shape_ = seen_offsets_ = false;
    }
    if (depth_ == 2) (field_ == "shape" ? seen_shape_ : seen_offsets_) = true;
    ++depth_;
  }
  void close() override {
    --depth_;
    if (depth_ == 1 && !in_metadata()) complete();
  }
  void value(JsonValue v) override {
    if (depth_ == 0) refuse("an object of tensors", shown(v));
    if (depth_ == 1) refuse("an object of dtype, shape and data_offsets", shown(v));
    if (depth_ == 2 && in_metadata()) {
      if (v.kind != JsonValue::text) refuse("a text under '" + field_ + "'", shown(v));
      metadata.emplace(field_, std::move(v.words));
    } else if (depth_ == 2) {
      if (field_ != "dtype" || v.kind != JsonValue::text) unexpected(shown(v));
      entries.back().tensor.dtype_name = std::move(v.words);
    } else {
      if (v.kind != JsonValue::integer || v.whole < 0)
        refuse("whole numbers from 0 on in " + field_, shown(v));
      Entry& e = entries.back();
      std::vector<int64_t>& list = field_ == "shape" ? e.tensor.shape : e.offsets;
      if (list.size() == most_dims)
        refuse(fmt::format("at most {} numbers in {}", most_dims, field_), "more");
      list.push_back(v.whole);
    }
  }

 private:
  static bool is_numbers(const std::string& field) {
    return field == "shape" || field == "data_offsets";
  }
  bool in_metadata() const { return tensor_ == metadata_name; }
  [[noreturn]] void refuse(const std::string& expected, const std::string& met) const {
    throw BadInput(fmt::format("{}: tensor {}: expected {}, met {}", source_, in_quotes(tensor_),
                               expected, met));
  }
  [[noreturn]] void unexpected(const std::string& met) const {
    if (in_metadata()) refuse("a text under " + in_quotes(field_), met);
    if (field_ == "dtype") refuse("a text as dtype", met);
    if (is_numbers(field_)) refuse("a list of whole numbers as " + field_, met);
    refuse("dtype, shape and data_offsets", in_quotes(field_));
  }
  void complete() const {
    const Entry& e = entries.back();
    for (const auto& [there, name] :
         {std::pair{!e.tensor.dtype_name.empty(), "dtype"}, std::pair{seen_shape_, "shape"},
          std::pair{seen_offsets_, "data_offsets"}})
      if (!there) refuse(name, "none");
    if (e.offsets.size() != 2)
      refuse("a first and a last byte as data_offsets",
             fmt::format("{} numbers", e.offsets.size()));
  }

  const std::string& source_;
  int depth_ = 0;
  std::string tensor_, field_;
  bool seen_shape_ = false, seen_offsets_ = false;
};

void settle(Entry& e, std::span<const std::byte> data, const std::string& source) {
  const auto refuse = [&](const std::string& expected, const std::string& met) {
    throw BadInput(fmt::format("{}: tensor {}: expected {}, met {}", source,
                               in_quotes(e.tensor.name), expected, met));
  };
  const Format* format = format_named(e.tensor.dtype_name);
  if (!format)
    refuse("a dtype of the format (F64 F32 BF16 F16 I64 I32 ...)", in_quotes(e.tensor.dtype_name));
  const int64_t begin = e.offsets[0], end = e.offsets[1];
  if (begin > end || uint64_t(end) > data.size())
    refuse(fmt::format("data_offsets within the {} bytes of the file's data", data.size()),
           fmt::format("[{},{}]; the file is cut short, or its header is wrong", begin, end));
  const auto due = bytes_due(e.tensor.shape, format->width);
  if (!due || *due != end - begin)
    refuse(fmt::format("{} bytes for {} of {}", due ? std::to_string(*due) : "more than 2^63",
                       shape_text(e.tensor.shape), format->name),
           fmt::format("{}, data_offsets [{},{}]", end - begin, begin, end));
  e.tensor.dtype = format->dtype;
  e.tensor.bytes = data.subspan(size_t(begin), size_t(end - begin));
}

void no_gaps(const std::vector<Entry>& sorted, size_t data, const std::string& source) {
  int64_t at = 0;
  for (const Entry& e : sorted) {
    if (e.offsets[0] != at)
      throw BadInput(fmt::format(
          "{}: tensor {}: expected its first byte at {}, where the tensor before it ends, met {}; "
          "tensors lie side by side without {}",
          source, in_quotes(e.tensor.name), at, e.offsets[0],
          e.offsets[0] > at ? "gaps" : "overlaps"));
    at = e.offsets[1];
  }
  if (uint64_t(at) != data)
    throw BadInput(
        fmt::format("{}: expected {} bytes of data, as its tensors say, met {}", source, at, data));
}

std::string_view header_text(std::span<const std::byte> file, const std::string& source) {
  if (file.size() < prefix)
    throw BadInput(
        fmt::format("{}: expected a safetensors file, which has at least {} bytes, met {}", source,
                    prefix, file.size()));
  uint64_t length = 0;
  for (size_t i = 0; i < prefix; ++i) length |= uint64_t(file[i]) << 8 * i;
  const uint64_t most = std::min<uint64_t>(longest_header, file.size() - prefix);
  if (length > most)
    throw BadInput(fmt::format(
        "{}: expected a header of at most {} bytes ({}), met one of {}; the file is cut short or "
        "no "
        "safetensors file",
        source, most, most == longest_header ? "the format's cap" : "what the file holds", length));
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + prefix, size_t(length));
  if (text.empty() || text[0] != '{')
    throw BadInput(
        fmt::format("{}: expected a header that begins with '{{', met {}; it is no "
                    "safetensors file",
                    source, text.empty() ? "an empty one" : in_quotes(std::string(1, text[0]))));
  return text;
}

}  // namespace

std::string format_name(DType dtype) {
  for (const Format& f : formats)
    if (f.dtype == dtype) return f.name;
  return "";
}

Contents::Contents(std::span<const std::byte> file, const std::string& source) {
  const std::string_view text = header_text(file, source);
  Header header(source);
  scan_json(text, source, {.bytes = longest_header, .depth = 3}, header);
  const auto data = file.subspan(prefix + text.size());
  for (Entry& e : header.entries) settle(e, data, source);
  std::sort(header.entries.begin(), header.entries.end(),
            [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  no_gaps(header.entries, data.size(), source);
  for (Entry& e : header.entries) {
    by_name_.emplace(e.tensor.name, tensors_.size());
    tensors_.push_back(std::move(e.tensor));
  }
  metadata_ = std::move(header.metadata);
}

const FileTensor* Contents::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

}  // namespace shardproof::tensors
