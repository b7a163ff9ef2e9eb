// Judging what a foreign program left: the records of ranks come from files in place of ranks.
#pragma once
#include <string>

#include "oracle/gate.hpp"

namespace shardproof::prepared {

// The case or the battery of a folder. Every file is looked at before anything is judged. Throws
// BadInput: a file or a folder that is missing, cut short, made for another case, edited; a tensor
// of another name, shape or dtype.
Report judge_folder(const std::string& folder, const Options&, const Registry&, Progress&);

}  // namespace shardproof::prepared
