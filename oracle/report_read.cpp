// Entries are checked as they are read: a report of a whole gate is never held as a tree.
#include "oracle/report_read.hpp"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "oracle/case.hpp"
#include "oracle/json.hpp"
#include "oracle/verdict.hpp"

namespace shardproof {

bool EarlierControl::weak() const {
  return outcome == "caught" && !exact && margin && !(*margin >= least_margin);
}

namespace {

constexpr JsonLimits limits = {.bytes = size_t(512) << 20, .depth = 8};

// A member of an entry, or a refusal that says which entry.
class Entry {
 public:
  Entry(const JsonValue& value, std::string where) : value_(value), where_(std::move(where)) {
    if (value.kind != JsonValue::object) refuse("an object", shown(value));
  }

  std::string text(const char* name) const {
    const JsonValue& v = member(name);
    if (v.kind != JsonValue::text) refuse_member(name, "a text", v);
    return v.words;
  }
  bool truth(const char* name) const {
    const JsonValue& v = member(name);
    if (v.kind != JsonValue::boolean) refuse_member(name, "true or false", v);
    return v.truth;
  }
  // Numbers that JSON cannot hold are words; null: there is none.
  std::optional<double> number(const char* name) const {
    const JsonValue& v = member(name);
    if (v.kind == JsonValue::null) return std::nullopt;
    if (v.kind == JsonValue::integer || v.kind == JsonValue::real) return v.number;
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (v.kind == JsonValue::text && v.words == "inf") return infinity;
    if (v.kind == JsonValue::text && v.words == "-inf") return -infinity;
    if (v.kind == JsonValue::text && v.words == "nan") return std::nan("");
    refuse_member(name, "a number, \"inf\", \"-inf\", \"nan\" or null", v);
  }
  // Reports of a version that did not count have no such member.
  std::optional<int64_t> count_if_any(const char* name) const {
    const JsonValue* v = value_.find(name);
    if (!v || v->kind == JsonValue::null) return std::nullopt;
    if (v->kind != JsonValue::integer || v->whole < 0) refuse_member(name, "a count or null", *v);
    return v->whole;
  }
  std::string text_if_any(const char* name) const {
    const JsonValue* v = value_.find(name);
    return v && v->kind == JsonValue::text ? v->words : "";
  }

 private:
  const JsonValue& member(const char* name) const {
    if (const JsonValue* v = value_.find(name)) return *v;
    refuse(fmt::format("a member '{}'", name), "none");
  }
  [[noreturn]] void refuse_member(const char* name, const char* expected,
                                  const JsonValue& met) const {
    refuse(fmt::format("'{}' to be {}", name, expected), shown(met));
  }
  [[noreturn]] void refuse(const std::string& expected, const std::string& met) const {
    throw BadInput(fmt::format("{}: expected {}, met {}; write the report again with --report",
                               where_, expected, met));
  }

  const JsonValue& value_;
  std::string where_;
};

// The line without its defaults, where the report has it.
std::string shown_line(const Entry& e) {
  const std::string line = e.text_if_any("short");
  return line.empty() ? e.text("line") : line;
}

EarlierCheck check_of(const Entry& e) {
  return {e.text("line"),   shown_line(e),     e.text("check"),         e.text("verdict"),
          e.text("replay"), e.number("ratio"), e.count_if_any("calls"), e.count_if_any("bytes")};
}

EarlierControl control_of(const Entry& e) {
  return {e.text("line"),   shown_line(e),      e.text("control"), e.text("outcome"),
          e.text("replay"), e.number("margin"), e.truth("exact")};
}

EarlierLane lane_of(const Entry& e) {
  return {e.text("name"), e.text_if_any("reason"), e.truth("proven")};
}

// Hands an item of a list right below the root over as soon as it is read, and keeps the rest.
class Items final : public JsonEvents {
 public:
  using Take = std::function<void(const JsonValue& root, const std::string& list, JsonValue)>;
  explicit Items(Take take) : take_(std::move(take)) {}

  void value(JsonValue v) override { put(std::move(v)); }
  void key(std::string name) override { names_.back() = std::move(name); }
  void open(JsonValue::Kind kind) override {
    open_.emplace_back().kind = kind;
    names_.emplace_back();
  }
  void close() override {
    JsonValue whole = std::move(open_.back());
    open_.pop_back();
    names_.pop_back();
    put(std::move(whole));
  }
  const JsonValue& root() const { return root_; }

 private:
  void put(JsonValue v) {
    if (open_.empty()) {
      root_ = std::move(v);
      return;
    }
    JsonValue& in = open_.back();
    if (in.kind == JsonValue::object)
      in.members.emplace_back(std::move(names_.back()), std::move(v));
    else if (open_.size() == 2 && open_[0].kind == JsonValue::object)
      take_(open_[0], names_[0], std::move(v));
    else
      in.items.push_back(std::move(v));
  }

  Take take_;
  JsonValue root_;
  std::vector<JsonValue> open_;
  std::vector<std::string> names_;  // of the member that each open container is at
};

// Before anything else of the file is believed.
void check_schema(const JsonValue& root, const std::string& source) {
  const JsonValue* v = root.find("schema");
  if (!v)
    throw BadInput(
        fmt::format("{}: expected a report of Shardproof, which opens with its schema, "
                    "met something else; write one with `gate --report DIR`",
                    source));
  if (v->kind != JsonValue::integer || v->whole != report_schema)
    throw BadInput(
        fmt::format("{}: expected schema {}, met {}; write the report again with this "
                    "version",
                    source, report_schema, shown(*v)));
}

void check_list(const JsonValue& root, const char* name, const std::string& source) {
  const JsonValue* v = root.find(name);
  if (!v || v->kind != JsonValue::array)
    throw BadInput(
        fmt::format("{}: expected a list '{}', met {}; write the report again with "
                    "--report",
                    source, name, v ? shown(*v) : "none"));
}

std::string file_of(const std::string& place) {
  std::error_code error;
  if (!std::filesystem::is_directory(place, error)) return place;
  return (std::filesystem::path(place) / "report.json").string();
}

// A file longer than any report is refused before a byte of it is held.
std::string text_of_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw BadInput(
        fmt::format("{}: expected a report.json or the folder of one, met {}", path,
                    std::filesystem::exists(path, error) ? "something else" : "nothing there"));
  const auto bytes = std::filesystem::file_size(path, error);
  if (!error && bytes > limits.bytes)
    throw BadInput(fmt::format("{}: expected at most {} bytes, met {}", path, limits.bytes, bytes));
  std::ifstream in(path, std::ios::binary);
  std::string text(error ? 0 : size_t(bytes), '\0');
  if (error || !in.read(text.data(), std::streamsize(text.size())))
    throw BadInput(fmt::format("{}: expected a file that can be read, met an error", path));
  return text;
}

}  // namespace

EarlierReport read_report(const std::string& place, const std::string& source) {
  EarlierReport report;
  report.path = file_of(place);
  const std::string where = source + ": " + report.path;
  Items items([&](const JsonValue& root, const std::string& list, JsonValue item) {
    check_schema(root, where);
    const auto entry = [&](size_t number) {
      return Entry(item, fmt::format("{}: {}[{}]", where, list, number));
    };
    if (list == "cases")
      report.checks.push_back(check_of(entry(report.checks.size())));
    else if (list == "controls")
      report.controls.push_back(control_of(entry(report.controls.size())));
    else if (list == "lanes")
      report.lanes.push_back(lane_of(entry(report.lanes.size())));
    else if (list == "reasons" && item.kind == JsonValue::text)
      report.reasons.push_back(item.words);
  });
  try {
    scan_json(text_of_file(report.path), report.path, limits, items);
    const JsonValue& root = items.root();
    check_schema(root, where);
    for (const char* list : {"lanes", "cases", "controls"}) check_list(root, list, where);
    const Entry head(root, where);
    report.complete = head.truth("complete");
    report.verdict = head.text("verdict");
    report.program = head.text_if_any("program");
  } catch (const BadInput& e) {
    const std::string what = e.what();
    throw BadInput(what.starts_with(source + ": ") ? what : source + ": " + what);
  }
  return report;
}

}  // namespace shardproof
