// Judging what a foreign program left: the records of ranks come from files in place of ranks.
#pragma once
#include <string>
#include <vector>

#include "oracle/gate.hpp"

namespace shardproof::prepared {

// Cases of a battery that were not judged, a text each.
struct Unjudged {
  std::vector<std::string> unanswered;  // by a rank
  std::vector<std::string> folders;     // of these, beside the battery's file
  std::vector<std::string> refused;     // files that are not what was asked for
  size_t size() const { return unanswered.size() + refused.size(); }
};

// The case or the battery of a folder. Every file is looked at before anything is judged. Throws
// BadInput: a file or a folder that is missing, cut short, made for another case, edited; a tensor
// of another name, shape or dtype.
//
// `others`: where it is given, cases of a battery that a rank has not answered, or whose files are
// refused, get a line there, the rest is judged, and the report is not complete. A battery of which
// nothing can be judged is refused.
//
// An interruption (interrupt.hpp) leaves the case that is judged alone, at once: the report holds
// what was judged before and is not complete. The registry has to last until the process ends then.
Report judge_folder(const std::string& folder, const Options&, const Registry&, Progress&,
                    Unjudged* others = nullptr);

// What to run for which folders of a battery, in one line; "" where all were answered.
std::string unanswered_text(const std::string& folder, const Unjudged&);

// "adjoint, accumulate (the program did not return shot1/...)": skipped checks, a text a reason.
std::vector<std::string> not_judged(const Report&);

}  // namespace shardproof::prepared
