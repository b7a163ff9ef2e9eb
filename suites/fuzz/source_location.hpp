// std::source_location for a clang that has none (before 16): calls are not made here, only
// declared.
#pragma once
#include <cstdint>
#include <source_location>

#ifndef __cpp_lib_source_location
namespace std {
struct source_location {
  static constexpr source_location current() { return {}; }
  constexpr uint32_t line() const { return 0; }
  constexpr uint32_t column() const { return 0; }
  constexpr const char* file_name() const { return ""; }
  constexpr const char* function_name() const { return ""; }
};
}  // namespace std
#endif
