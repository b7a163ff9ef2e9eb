// Words of a line or an option, taken apart.
#pragma once
#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace shardproof {

// False: the text is more, or less, than one integer that the type holds.
template <class Integer>
bool whole_number(std::string_view text, Integer& value) {
  const auto [last, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && last == text.data() + text.size();
}

// As many parts as there are separators, and one more.
inline std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t from = 0; from <= text.size();) {
    const size_t to = std::min(text.find(separator, from), text.size());
    parts.emplace_back(text.substr(from, to - from));
    from = to + 1;
  }
  return parts;
}

inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

template <class T>
bool contains(const std::vector<T>& list, const std::type_identity_t<T>& one) {
  return std::find(list.begin(), list.end(), one) != list.end();
}

}  // namespace shardproof
