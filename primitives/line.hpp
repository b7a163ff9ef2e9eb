// What primitives read from any case line, and the pieces that refusals of one are made of. All of
// it follows from the line alone, which is equal on all ranks: ranks refuse alike and before the
// first call.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

// The type that a key says; `fallback` where it says none or the contract does not take it.
DType type_of_key(const Case&, const char* key, DType fallback);
// In which sums are made: f64 under f64 and acc=f64, else f32.
DType accumulation_of(const Case&);
bool in_single(const Case&);  // in f32

// A decimal, or a fraction of two ("1/8"), with a point whatever the locale of the process; the
// fallback where the line leaves it empty or the contract has no such key.
double number_of(const Case&, const char* key, double fallback = 0);

std::string said(const Case&, const char* key);  // "tp=4"; "tp=" where the contract has no such key

// Of these axes, in this order, those that have ranks.
std::vector<Axis> with_ranks(const Case&, std::initializer_list<Axis>);

using Refusal = std::optional<Rejected>;

Refusal when(bool met, std::string expected, std::string what, std::string advice);
// Unless the divisor, which is called `by`, divides the extent of a key.
Refusal undivided(const Case&, const char* key, int64_t divisor, const std::string& by);
// One call moves at most as many elements as MPI's int counts: a product of keys, or of the extents
// of `what`.
Refusal countable(const Case&, std::initializer_list<const char*> extents);
Refusal countable(const std::string& what, std::initializer_list<int64_t> extents);
Refusal other_axes(const Case&);  // than tp, cp and dp
// Where tokens, and seq and batch, contradict each other, or dp, cp and (under sp) tp do not cut
// them: tokens, or seq, dim 0 of [seq, batch, ..].
Refusal uncut_tokens(const Case&);

// The first refusal that is met.
template <class... Refusals>
Refusal first_refusal(Refusals... all) {
  Refusal found;
  ((found || !all ? void() : void(found.emplace(*all))), ...);
  return found;
}

}  // namespace shardproof::primitives
