// case.json and battery.json: what was prepared, in words that a foreign program reads.
//
// The text follows from the line, the checks asked for and the version alone, but for the digests
// of the rank files. So the judge writes it again and compares: whatever was edited by hand shows.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "oracle/prepared/plan.hpp"
#include "oracle/tensors/mapped_file.hpp"

namespace shardproof::prepared {

inline constexpr int case_version = 2;

// 32 hex digits, XXH3 of 128 bits.
std::string digest_of(std::span<const std::byte>);
std::string digest_of(const std::string&);
// Of a whole file; its pages are given back on the way.
std::string digest_of(const tensors::MappedFile&);

// Of the case: equal for the same line, checks and version. Every file of the case carries it.
std::string case_digest(const Plan&);

// `files`: the digest of each rank's input file.
std::string case_text(const Plan&, const std::vector<std::string>& files);

struct CaseFile {
  Plan plan;
  std::string digest;
  std::vector<std::string> files;
};
// Throws BadInput: not there, no case of this version, edited by hand.
CaseFile read_case(const std::string& folder, const Registry&, bool given_in_files = false);

struct Member {
  std::string folder, digest, line;  // the line in its short form
};
std::string battery_text(const std::vector<Member>&);
std::vector<Member> read_battery(const std::string& folder);
bool is_battery(const std::string& folder);

inline constexpr const char* case_name = "case.json";
inline constexpr const char* battery_name = "battery.json";

}  // namespace shardproof::prepared
