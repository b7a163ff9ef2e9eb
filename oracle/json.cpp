// Events and a tree from nlohmann-json's reader. Its own tree keeps the last of two equal names
// and recurses as deep as a file asks it to; here both are refused while reading.
#include "oracle/json.hpp"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "oracle/case.hpp"
#include "oracle/printable.hpp"

namespace shardproof {

namespace {

using nlohmann::json;

// Line and column of a byte, both from 1.
std::string place(std::string_view text, size_t byte) {
  byte = std::min(byte, text.size());
  const auto line = 1 + std::count(text.begin(), text.begin() + std::ptrdiff_t(byte), '\n');
  const size_t newline = byte == 0 ? std::string_view::npos : text.rfind('\n', byte - 1);
  return fmt::format("line {}, column {}", line,
                     byte - (newline == std::string_view::npos ? 0 : newline + 1) + 1);
}

// From the library's events to ours, with the limits.
class Reader {
 public:
  Reader(std::string_view text, const std::string& source, const JsonLimits& limits,
         JsonEvents& events)
      : text_(text), source_(source), limits_(limits), events_(events) {}

  bool null() { return put({}); }
  bool boolean(bool b) {
    JsonValue v;
    v.kind = JsonValue::boolean, v.truth = b;
    return put(std::move(v));
  }
  bool number_integer(int64_t n) {
    JsonValue v;
    v.kind = JsonValue::integer, v.whole = n, v.number = double(n);
    return put(std::move(v));
  }
  bool number_unsigned(uint64_t n) {
    return n <= uint64_t(INT64_MAX) ? number_integer(int64_t(n)) : number_float(double(n), "");
  }
  bool number_float(double x, const std::string&) {
    JsonValue v;
    v.kind = JsonValue::real, v.number = x;
    return put(std::move(v));
  }
  bool string(std::string& s) {
    JsonValue v;
    v.kind = JsonValue::text, v.words = std::move(s);
    return put(std::move(v));
  }
  bool binary(json::binary_t&) { return false; }  // JSON text has none

  bool start_object(size_t) { return open(JsonValue::object); }
  bool start_array(size_t) { return open(JsonValue::array); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    if (!names_.back().insert(name).second)
      throw BadInput(
          fmt::format("{}: expected each key once, met {} twice in one object; leave one "
                      "out",
                      source_, in_quotes(name)));
    events_.key(std::move(name));
    return true;
  }

  bool parse_error(size_t byte, const std::string& last, const json::exception&) {
    const std::string where = place(text_, byte == 0 ? 0 : byte - 1);
    if (byte > text_.size())
      throw BadInput(
          fmt::format("{}: expected more JSON, met the end of the file at {}; it is cut "
                      "short",
                      source_, where));
    throw BadInput(fmt::format("{}: expected JSON, met {} at {}", source_, in_quotes(last), where));
  }

 private:
  bool put(JsonValue v) {
    events_.value(std::move(v));
    return true;
  }
  bool open(JsonValue::Kind kind) {
    if (int(names_.size()) >= limits_.depth)
      throw BadInput(
          fmt::format("{}: expected at most {} objects and lists in each other, met more", source_,
                      limits_.depth));
    names_.emplace_back();
    events_.open(kind);
    return true;
  }
  bool close() {
    names_.pop_back();
    events_.close();
    return true;
  }

  std::string_view text_;
  const std::string& source_;
  const JsonLimits& limits_;
  JsonEvents& events_;
  std::vector<std::set<std::string>> names_;  // of the open containers
};

class Builder final : public JsonEvents {
 public:
  void value(JsonValue v) override { append(std::move(v)); }
  void key(std::string name) override { name_ = std::move(name); }
  void open(JsonValue::Kind kind) override {
    JsonValue v;
    v.kind = kind;
    open_.push_back(append(std::move(v)));
  }
  void close() override { open_.pop_back(); }
  JsonValue take() { return std::move(root_); }

 private:
  // Pointers into the tree stay right: a container grows only while it is the innermost open one.
  JsonValue* append(JsonValue v) {
    if (open_.empty()) return &(root_ = std::move(v));
    JsonValue& in = *open_.back();
    if (in.kind == JsonValue::array) return &in.items.emplace_back(std::move(v));
    return &in.members.emplace_back(std::move(name_), std::move(v)).second;
  }

  JsonValue root_;
  std::vector<JsonValue*> open_;
  std::string name_;
};

}  // namespace

std::string in_quotes(const std::string& word) { return telling::in_quotes(word, 40); }

std::string json_text(const std::string& words) {
  return json(words).dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
}

JsonValue::JsonValue() = default;
JsonValue::~JsonValue() = default;
JsonValue::JsonValue(const JsonValue&) = default;
JsonValue::JsonValue(JsonValue&&) noexcept = default;
JsonValue& JsonValue::operator=(const JsonValue&) = default;
JsonValue& JsonValue::operator=(JsonValue&&) noexcept = default;

const JsonValue* JsonValue::find(const std::string& name) const {
  for (const auto& [key, value] : members)
    if (key == name) return &value;
  return nullptr;
}

std::string shown(const JsonValue& v) {
  switch (v.kind) {
    case JsonValue::null:
      return "null";
    case JsonValue::boolean:
      return v.truth ? "true" : "false";
    case JsonValue::integer:
      return fmt::format("{}", v.whole);
    case JsonValue::real:
      return fmt::format("the number {}", v.number);
    case JsonValue::text:
      return "the text " + in_quotes(v.words);
    case JsonValue::array:
      return "a list";
    case JsonValue::object:
      return "an object";
  }
  return "";
}

void scan_json(std::string_view text, const std::string& source, const JsonLimits& limits,
               JsonEvents& events) {
  if (text.size() > limits.bytes)
    throw BadInput(
        fmt::format("{}: expected at most {} bytes, met {}", source, limits.bytes, text.size()));
  Reader reader(text, source, limits, events);
  json::sax_parse(text, &reader);
}

JsonValue parse_json(const std::string& text, const std::string& source, const JsonLimits& limits) {
  Builder builder;
  scan_json(text, source, limits, builder);
  return builder.take();
}

JsonValue read_json(const std::string& path, const JsonLimits& limits) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw BadInput(fmt::format(
        "{}: expected a JSON file, met {}", path,
        std::filesystem::exists(path, error) ? "something that is no file" : "nothing there"));
  const auto bytes = std::filesystem::file_size(path, error);
  if (!error && bytes > limits.bytes)
    throw BadInput(fmt::format("{}: expected at most {} bytes, met {}", path, limits.bytes, bytes));
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) throw BadInput(fmt::format("{}: expected a file that can be read, met an error", path));
  return parse_json(text.str(), path, limits);
}

}  // namespace shardproof
