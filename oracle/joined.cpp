#include "oracle/joined.hpp"

#include <fmt/format.h>

namespace shardproof {
namespace {
template <class List>
std::string text(const List& list, std::string_view separator) {
  return fmt::format("{}", fmt::join(list, separator));
}
}  // namespace

std::string joined(std::span<const std::string> list, std::string_view separator) {
  return text(list, separator);
}
std::string joined(std::span<const std::string_view> list, std::string_view separator) {
  return text(list, separator);
}
std::string joined(std::span<const int> list, std::string_view separator) {
  return text(list, separator);
}
std::string joined(std::span<const int64_t> list, std::string_view separator) {
  return text(list, separator);
}
std::string joined(const std::set<std::string>& list, std::string_view separator) {
  return text(list, separator);
}
std::string joined(const std::set<int>& list, std::string_view separator) {
  return text(list, separator);
}

std::string number_of(int64_t n, const std::string& what) {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

}  // namespace shardproof
