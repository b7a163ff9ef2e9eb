#include "primitives/line.hpp"

#include <charconv>
#include <limits>
#include <string_view>
#include <utility>

namespace shardproof::primitives {

DType type_of_key(const Case& line, const char* key, DType fallback) {
  return line.has(key) ? dtype_from(line.text(key)).value_or(fallback) : fallback;
}

DType accumulation_of(const Case& line) {
  const bool wide =
      line.dtype() == DType::f64 || type_of_key(line, "acc", DType::f32) == DType::f64;
  return wide ? DType::f64 : DType::f32;
}

bool in_single(const Case& line) { return accumulation_of(line) != DType::f64; }

namespace {

double decimal(std::string_view text) {
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace

double number_of(const Case& line, const char* key, double fallback) {
  const std::string_view text = line.has(key) ? line.text(key) : std::string_view();
  if (text.empty()) return fallback;
  const size_t slash = text.find('/');
  if (slash == std::string_view::npos) return decimal(text);
  return decimal(text.substr(0, slash)) / decimal(text.substr(slash + 1));
}

std::string said(const Case& line, const char* key) {
  return std::string(key) + "=" + (line.has(key) ? line.text(key) : "");
}

Refusal when(bool met, std::string expected, std::string what, std::string advice) {
  if (!met) return {};
  return Rejected(std::move(expected), std::move(what), std::move(advice));
}

std::vector<Axis> with_ranks(const Case& line, std::initializer_list<Axis> axes) {
  std::vector<Axis> found;
  for (Axis a : axes)
    if (line.ranks(a) > 1) found.push_back(a);
  return found;
}

Refusal undivided(const Case& line, const char* key, int64_t divisor, const std::string& by) {
  return when(line.at(key) % divisor != 0,
              std::string(key) + " divisible by " + by + " = " + std::to_string(divisor),
              said(line, key), "choose a multiple of " + std::to_string(divisor));
}

namespace {

constexpr int64_t beyond = std::numeric_limits<int64_t>::max();
int64_t saturating(int64_t a, int64_t b) { return __builtin_mul_overflow(a, b, &a) ? beyond : a; }

}  // namespace

Refusal countable(const Case& line, std::initializer_list<const char*> extents) {
  std::string what;
  int64_t n = 1;
  for (const char* key : extents) {
    what += (what.empty() ? "" : " ") + said(line, key);
    n = saturating(n, line.at(key));
  }
  return countable(what, {n});
}

Refusal countable(const std::string& what, std::initializer_list<int64_t> extents) {
  int64_t n = 1;
  for (const int64_t extent : extents) n = saturating(n, extent);
  const std::string met = n == beyond ? "2^63 or more" : std::to_string(n);
  return when(n > std::numeric_limits<int32_t>::max(),
              "element counts up to 2147483647, the range of MPI's int",
              what + ", " + met + " elements", "choose smaller extents");
}

Refusal other_axes(const Case& line) {
  return when(line.ranks(Axis::ep) > 1 || line.ranks(Axis::pp) > 1, "the axes tp, cp and dp only",
              said(line, "ep") + " " + said(line, "pp"),
              "there is no expert and no pipeline axis here: leave ep and pp at 1");
}

Refusal uncut_tokens(const Case& line) {
  const bool sp = line.has("sp") && line.on("sp");
  const int64_t ranks =
      int64_t(line.ranks(Axis::dp)) * line.ranks(Axis::cp) * (sp ? line.ranks(Axis::tp) : 1);
  const int64_t seq = line.at("seq"), batch = line.at("batch");
  return first_refusal(
      when(seq == 0 && batch != 1, "seq wherever batch is given", said(line, "batch"),
           "write seq= and batch=, or tokens="),
      when(seq > 0 && line.at("tokens") != seq * batch, "tokens = seq*batch", said(line, "tokens"),
           "leave tokens out, or seq and batch"),
      undivided(line, seq > 0 ? "seq" : "tokens", ranks, sp ? "dp*cp*tp" : "dp*cp"));
}

}  // namespace shardproof::primitives
