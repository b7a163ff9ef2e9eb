// Broken twins of layers whose state crosses ranks. The comment above a twin names the mistake.
#include <algorithm>

#include "oracle/registry.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/conv_context.hpp"
#include "primitives/scan_context.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// Nobody fetches rows: every rank begins with zeros.
struct HaloZeros final : ConvContext {
  void fetch(Rank&, const Halo& halo, const View& all) override {
    set_zero(all.narrow(0, 0, halo.reach));
  }
};

const char* const conv = "conv_context";

const Row rows[] = {
    {conv, "halo_missing", twin<HaloZeros>, "forward,ledger", "",
     "state-spaces/mamba 597: what a rank needs of the one before it", "cp=4 tokens=24", "cp >= 2"},
};

}  // namespace

void controls_recurrent(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
