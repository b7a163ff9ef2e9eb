// The items of a list with a separator between them. As fmt::join, which every file that uses it
// compiles anew: half a second each.
#pragma once
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof {

std::string joined(std::span<const std::string>, std::string_view separator = ", ");
std::string joined(std::span<const std::string_view>, std::string_view separator = ", ");
std::string joined(std::span<const int>, std::string_view separator = ", ");
std::string joined(std::span<const int64_t>, std::string_view separator = ", ");
std::string joined(const std::set<std::string>&, std::string_view separator = ", ");
std::string joined(const std::set<int>&, std::string_view separator = ", ");

std::string number_of(int64_t n, const std::string& what);  // "1 check", "2 checks"

}  // namespace shardproof
