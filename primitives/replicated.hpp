// Parameters of which every rank of an axis holds a copy, and what their gradients owe.
//
// A copy that meets a rank's own tokens, or its own heads, has a gradient that is one part of a
// sum: somebody has to all-reduce it, once. One that meets the same values on all ranks has its
// gradient whole already, and summing it would multiply it by the number of ranks.
//
//   class      gradient of a rank                  the call
//   summed     partial: own tokens, own heads      all-reduce sum
//   averaged   whole, computed on every rank       all-reduce mean, or nothing
//
// Many small gradients travel in one coalesced call, packed one behind the other.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "primitives/linear.hpp"

namespace shardproof::primitives {

// Gradients that travel together: where each rank's part is, and where the result goes.
struct Part {
  View partial, result;
};
using Parts = std::vector<Part>;

// One all-reduce of all parts in the wire type; without ranks to ask a conversion each.
void coalesced_all_reduce(Parallel&, const Parts&, Communicator&, Reduce = Reduce::sum);
// The same over a set of axes (empty: nothing is asked).
void coalesced_all_reduce(Parallel&, const Parts&, const std::vector<Axis>&, Reduce = Reduce::sum);
// A workspace for a part of `result`'s shape, in the accumulation type.
View partial_like(Parallel&, const View& result);

// Axes with ranks over which a layer that cuts its tokens sums the gradients of its replicated
// parameters: tp where sp=on, and with reduce=all also cp and dp.
std::vector<Axis> axes_of_tokens(const Case&);
std::string label_of(const std::vector<Axis>&);  // "tp,cp"

// ---- What the contracts of this family ask of a line

std::optional<Rejected> refused_own_tokens(const Case&);  // axes, and tokens cut evenly
std::optional<Rejected> refused_gradients(const Case&);
std::optional<Rejected> refused_router(const Case&);
std::optional<Rejected> refused_qk_norm(const Case&);
std::optional<Rejected> refused_qkv(const Case&);
std::optional<Rejected> refused_clip(const Case&);
std::optional<Rejected> refused_step(const Case&);

}  // namespace shardproof::primitives
