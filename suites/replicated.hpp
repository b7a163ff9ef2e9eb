// What the contracts with replicated parameters share: where these live, what their gradients'
// sums round, and the call that sums them.
#pragma once
#include <string>
#include <vector>

#include "oracle/check.hpp"
#include "reference/running_error.hpp"
#include "suites/linear.hpp"

namespace shardproof::replicated {

// Axes that are reduced over: those with ranks where it is left out.
Key over_key();
// kv_replicas: ranks of tp that hold the same key heads.
Key copies_key();
Key norm_key();
// The mean square of a row is 2^t times its variance, so that the variance has to come from centred
// values; elsewhere a norm may take it as mean x^2 - mean^2.
bool offset_data(const Case&);
Key sp_key();
// reduce=all|tp: whether the layer sums over cp and dp, too, or leaves that to the training step.
Key reduce_key();

// A parameter that meets the own tokens: one logical copy where the layer sums its gradient, used
// by each rank alone where the training step does.
Layout parameter_of_tokens(const Case&);
Placement tokens_on_tp(const Case&);  // S(0) under sp
int64_t ranks_of(const Case&, const std::vector<Axis>&);

// The parts of a partial tensor added up: what it denotes.
Whole denoted(const Operand&, const Layout&, const Mesh&, const Whole& stacked);
Whole absolute(const Whole&);
Whole squared(const Whole&);

// Unit roundoffs of an implementation on this line, the reference's own included; `ranks` parts of
// a sum travel.
reference::Rounding rounding_of(const Case&, const Precision&, int64_t ranks);
// A family's bound is counted in unit roundoffs of the accumulation.
Gauge gauge_of(const reference::Loss&, const Precision&);
Gauge gauge_of(const reference::Uncertain&, const Precision&);

// The coalesced sum of `count` gradients over axes; nothing where there are none.
std::vector<Traffic> coalesced(const Case&, const std::vector<Axis>&, int64_t count,
                               bool backward = true, Reduce = Reduce::sum);

}  // namespace shardproof::replicated
