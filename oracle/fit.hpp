// Whether a record can be what a rank recorded of a case. Ranks share their memory with what they
// judge: a subject that writes where it has no business may have written over the record, too, and
// the parent must not follow an index from there.
#pragma once
#include <string>

#include "oracle/check.hpp"

namespace shardproof {

// What of the record does not fit the case as it was planned; "" where all does. Of the evidence
// the ranks are not looked at.
std::string misfit(const RankRecord&, const Evidence&);

}  // namespace shardproof
