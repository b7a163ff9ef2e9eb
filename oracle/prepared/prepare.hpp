// Folders that a foreign program is fed from: rankN.in.safetensors for each rank, and case.json.
#pragma once
#include <string>
#include <vector>

#include "oracle/gate.hpp"
#include "oracle/prepared/case_file.hpp"

namespace shardproof::prepared {

// Everything that can be refused is refused before anything is written; answers that lie in the
// folder are removed, and inputs of ranks that the case has not; case.json comes last.
// Throws BadInput, and Infrastructure where a file cannot be written.
Member prepare_case(const Case&, const std::vector<std::string>& only, const std::string& folder,
                    const Registry&);

// One folder a case of what a gate with these options judges, the witnesses of its controls
// included, and battery.json. Lines that cannot be prepared are left out with their reason.
struct Battery {
  std::vector<Member> members;
  std::vector<std::string> left_out;
  std::vector<std::string>
      as_they_are;  // lines that a word of --with did not go into, a text a word
};
Battery prepare_battery(const Options&, const std::string& folder, const Registry&);

}  // namespace shardproof::prepared
