// Broken twins of a linear with factors in 8 bits. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>
#include <utility>

#include "primitives/controls/table.hpp"
#include "primitives/gemm.hpp"
#include "primitives/quantised_linear.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;
using Doubles = std::vector<double>;

// Of X, W or G, that `of` names.
struct Linear8 : QuantisedLinear {
  using QuantisedLinear::Of;
};
constexpr auto X = Linear8::Of::x, W = Linear8::Of::w, G = Linear8::Of::g;

// ---- amax and scales

// The call is made and its result left aside: each rank scales its part by its own amax.
template <auto of>
struct AmaxLocal final : Linear8 {
  std::vector<Axis> reduced_over(const Case& line, Of o) const override {
    return o == of ? std::vector<Axis>{} : QuantisedLinear::reduced_over(line, o);
  }
};

constexpr const char* contract = "quantised_linear";
const controls::Row rows[] = {
    {contract, "input_amax_local", twin<AmaxLocal<X>>, "forward,ledger", "replica",
     "NVIDIA/TransformerEngine 74", "tp=2 sp=on", "amaxes of ranks that differ"},
};

}  // namespace

void controls_quantised_linear(Registry& registry) { add(registry, rows); }

}  // namespace shardproof
