// Broken twins of a step of Muon. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/muon_step.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- What of the whole a rank's shard knows

// Each rank orthogonalises its own shard.
struct ShardsOrthogonalised final : MuonStep {
  Views directions_made_orthogonal(Parallel& p, const std::vector<CutMatrix>& list,
                                   const Views& u) override {
    return orthogonalised(p, list, u, /*summed=*/false);
  }
};

using controls::Row;
using controls::twin;

// There is no backward.
Row of(const char* name, std::unique_ptr<Kernel> (*make)(), const char* check, const char* silent,
       const char* imitates, const char* words, const char* makes_visible) {
  return {"muon_step",       name, make, check, silent, imitates, words, makes_visible,
          /*alone=*/false,
          /*backward=*/false};
}

const Row rows[] = {
    of("muon_shards_orthogonalised", twin<ShardsOrthogonalised>, "forward,ledger", "replica",
       "deepspeedai/DeepSpeed 8437", "tp=2", "p >= 2"),
};

}  // namespace

void controls_muon(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
