// What the contracts of layers share whose tokens depend on the tokens before them.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "suites/attention.hpp"
#include "suites/linear.hpp"

namespace shardproof::recurrences {

std::vector<int64_t> sequences(const Case&);  // of each token, -1: padding
int64_t longest(const Case&);                 // tokens of a sequence
Layout on_tokens(const Case&);                // heads, or channels, over tp
int64_t own_rows(const Case&);
int64_t own_batch(const Case&);
Traffic over_cp(Op, bool backward, int64_t count, DType, int hop = 0);
Key decay_key();  // decay=factor|log

// ---- Decays, or their logarithms

// a [tokens, heads], or of each of `gates` features.
Operand decays(const Case&, int64_t gates = 0);
bool in_logarithms(const Case&);
std::optional<Contract::Inexact> logarithms_are_inexact(const Case&);
reference::Values factors(const Case&, const Whole& a);

// Of decays that are differences of running sums G of logarithms, exponentiated: the two sums are
// off by a rounding of |G| a token, and telescope over the decays of a term; each difference and
// exponential is off by itself, |x| and 4 roundings.
int64_t roundings_of_logarithms(const Case&, const Whole& a);
// Gradients of logarithms: a da, or sums over the tokens behind of q dq - k dk, whose terms cancel.
// `own`: magnitudes of da; q, k and theirs of dq and dk.
reference::Values of_logarithms(const Case&, reference::Values own, const Whole& a,
                                const reference::Values& q, const reference::Values& k,
                                const reference::Values& dq, const reference::Values& dk);
// So many of a term, a product with a of those of da; or one with q, and the sums over features and
// tokens, of those of dq.
int64_t roundings_of_gradient(const Case&, int64_t of_decays, int64_t of_keys, int64_t features);

void times(reference::Values& x, const reference::Values& y);

}  // namespace shardproof::recurrences
