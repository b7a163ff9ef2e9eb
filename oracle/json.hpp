// JSON that comes from outside: read whole, with limits, or refused in one line. Nothing of the
// library that reads it shows here.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardproof {

struct JsonValue {
  // integer: a number without fraction or exponent that 64 bits hold; real: any other number.
  enum Kind : uint8_t { null, boolean, integer, real, text, array, object } kind = null;
  bool truth = false;
  int64_t whole = 0;
  double number = 0;  // of integer and real
  std::string words;
  std::vector<JsonValue> items;
  std::vector<std::pair<std::string, JsonValue>> members;  // each name once, in the file's order

  const JsonValue* find(const std::string& name) const;  // null where there is no such member

  // Where a list of pairs with JsonValue is a complete type.
  JsonValue();
  ~JsonValue();
  JsonValue(const JsonValue&);
  JsonValue(JsonValue&&) noexcept;
  JsonValue& operator=(const JsonValue&);
  JsonValue& operator=(JsonValue&&) noexcept;
};
// "the text \"4096\"", "the number 4096.5", "null", "a list": what a message says was met.
std::string shown(const JsonValue&);

struct JsonLimits {
  size_t bytes = size_t(16) << 20;
  int depth = 64;
};

// A word of a file in a message: printable and short.
std::string in_quotes(const std::string& word);
// A text as JSON has it, in its quotes. What is no UTF-8 is replaced.
std::string json_text(const std::string& words);

// The same as it is read, piece by piece, for a reader that keeps what it needs and no tree.
struct JsonEvents {
  virtual ~JsonEvents() = default;
  virtual void value(JsonValue) = 0;  // null, boolean, integer, real or text
  virtual void key(std::string name) = 0;
  virtual void open(JsonValue::Kind) = 0;  // object or array
  virtual void close() = 0;
};
// Throws as parse_json does.
void scan_json(std::string_view text, const std::string& source, const JsonLimits&, JsonEvents&);

// Throws BadInput with `source` in front: not JSON (line and column), a name twice in one object
// (the name), deeper or longer than the limits.
JsonValue parse_json(const std::string& text, const std::string& source, const JsonLimits& = {});
// The file at `path`; BadInput also where it cannot be read or is not a regular file.
JsonValue read_json(const std::string& path, const JsonLimits& = {});

}  // namespace shardproof
