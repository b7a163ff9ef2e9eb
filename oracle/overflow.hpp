// Results that a type cannot hold. A healthy kernel has an infinity there, or what comes of one, so
// that the line is refused and nobody blamed. A result passes the type that it is stored in, that
// of accumulation and that of the wire, each with a largest number of its own.
//
// Of a true value v with an allowed error b, roundings may carry v beyond the largest number M of
// such a type where  |v| + min(b, |v|) > M:  an error that may be larger than the value itself says
// nothing of where it goes, and up to M/2 no value is taken for one that overflows. An infinity in
// place of such a value is a finding. Whether intermediates fit is not asked, but of fill=large and
// fill=offset in f16, where the sums of |terms| are.
#pragma once
#include <functional>

#include "oracle/check.hpp"
#include "oracle/registry.hpp"

namespace shardproof {

struct BeyondRange : BadInput {
  using BadInput::BadInput;
};

// The greatest number of a floating-point type; which of several types has the least.
double largest_of(DType);
DType least_range(const std::vector<DType>&);

// Throws BeyondRange: of the truth of one feed, whatever it was drawn from; of one result, where it
// is no feed's (a sum over microbatches).
void require_in_range(const Evidence&, const Feed&, const Truth&);
void require_in_range(const Evidence&, const Operand&, bool gradient, const Whole& want,
                      const std::function<double(int64_t)>& bound);

// The same of a plan, as far as it can be said before ranks run without doing the judge's work
// twice: by the values of the base feed alone, in f16 of any case and in wider types of a small
// one. Of fill=large and fill=offset every feed is looked at, in f16 by the sums of |terms| that
// bounds are computed from.
void refuse_overflow(const Evidence&, const Registry&);
// Everything that a run of these checks would refuse before ranks run.
void refuse_infeasible(const Case&, const std::vector<std::string>& checks, const Registry&);

}  // namespace shardproof
