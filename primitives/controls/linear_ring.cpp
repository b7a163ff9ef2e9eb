// Broken twins of the linears with overlap=ring. Each replaces a walk of the ring or what is done
// with a block that passes; the comment above a twin names the mistake.
#include "oracle/registry.hpp"
#include "primitives/controls/linear_parts.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/gemm.hpp"
#include "primitives/linear.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- Walks

// The block at step s is taken for that of rank me + s, as if the ring turned the other way.
class OwnerOnOtherSide final : public TokenRing {
  void gather(Parallel& p, const View& own, const Block& multiply) const override {
    TokenRing::gather(p, own, mirrored(p, multiply));
  }
  void reduce(Parallel& p, const Block& product, const View& sum) const override {
    TokenRing::reduce(p, mirrored(p, product), sum);
  }
  static Block mirrored(const Parallel& p, const Block& block) {
    return
        [&](int owner, const View& v) { block(modulo(2 * p.tp.rank() - owner, p.tp.size()), v); };
  }
};

// The place of a block is counted from the rank that it goes to next.
struct OwnerIsNeighbour final : TokenRing {
  void gather(Parallel& p, const View& own, const Block& multiply) const override {
    TokenRing::gather(p, own, [&](int owner, const View& block) {
      multiply(modulo(owner + 1, p.tp.size()), block);
    });
  }
};

// Products are counted as the hops are: what the last one brings is not multiplied.
struct LastBlockLeftOut final : TokenRing {
  void gather(Parallel& p, const View& own, const Block& multiply) const override {
    int products = 0;
    TokenRing::gather(p, own, [&](int owner, const View& block) {
      if (++products < p.tp.size()) multiply(owner, block);
    });
  }
};

// One buffer: the next block has been written over the one that is to be multiplied.
struct MultipliedAfterRefill final : TokenRing {
  void gather(Parallel& p, const View& own, const Block& multiply) const override {
    const int ranks = p.tp.size(), me = p.tp.rank();
    Turning x(p.rank, own.dtype, own.shape);
    convert(own, x.here);
    for (int step = 0; step < ranks; ++step) {
      if (step + 1 < ranks) arrive(p, p.tp.shift(x.here, x.next, 1), x, false);
      multiply(modulo(me - step, ranks), x.here);
    }
  }
};

// Nothing waits for the last message: what was in the buffer before it is read.
struct LastArrivalUnawaited final : TokenRing {
  void arrive(Parallel& p, Ticket hop, Turning& turning, bool last) const override {
    p.tp.wait(hop);
    if (!last) turning.turn();
  }
};

// The sum that comes home is taken for whole: the own part is missing.
struct OwnPartLeftOut final : TokenRing {
  void reduce(Parallel& p, const Block& product, const View& sum) const override {
    const auto others = [&](int owner, const View& part) {
      owner == p.tp.rank() ? set_zero(part) : product(owner, part);
    };
    TokenRing::reduce(p, others, sum);
  }
};

// The own part is added where the sum starts and again where it ends.
struct OwnPartTwice final : TokenRing {
  void reduce(Parallel& p, const Block& product, const View& sum) const override {
    const auto again = [&](int owner, const View& part) {
      product(owner, part);
      if (owner != p.tp.rank()) return;
      const View once = p.workspace(part.dtype, part.shape);
      convert(part, once);
      add_into(once, part);
    };
    TokenRing::reduce(p, again, sum);
  }
};

// The sum travels in the storage type, rounded to it at every hop.
using SumInStorageType = controls::SumInStorageType<TokenRing, TokenRing::Block>;

// ---- Products

// dW is made before the ring turns: of the own tokens alone.
template <class Part>
class WeightGradientOfOwnBlock final : public Part {
  void add_passing(Parallel& p, const View& a, const View& b, const View& sum) override {
    if (passed_++ % p.tp.size() == 0) Part::add_passing(p, a, b, sum);
  }
  int passed_ = 0;
};

// Each rank's product has the bias in it, which the sum then holds p times.
class BiasOnEveryRank final : public RowParallel {
  void sum_blocks(Parallel& p, const View& x, const View& w, const View& b,
                  const View& y) override {
    bias_ = b;
    RowParallel::sum_blocks(p, x, w, View{}, y);
  }
  void partial_product(Parallel& p, const View& x, const View& w, const View& z) override {
    gemm(plain(x), turned(w), z, p.accumulate, &bias_);
  }
  View bias_;
};

// The blocks that passed are kept for dW in a buffer of the layer, and the ring does not turn
// again: the next forward's are in it by then.
class PassedKeptInLayer final : public ColumnParallel {
  void multiply_passing(Parallel& p, const View& x, const View& w, const View& b,
                        const View& y) override {
    passed_ = Kept(x.dtype, with_extent(x.shape, 0, x.shape[0] * p.tp.size()));
    calls().gather(p, x, [&](int64_t first, const View& block) {
      convert(block, passed_.view().narrow(0, first, block.shape[0]));
    });
    gemm(plain(passed_.view()), turned(w), y, p.accumulate, &b);
  }
  void weight_gradient(Parallel& p, const View&, const View& g, const View& dw) override {
    gemm(turned(g), plain(passed_.view()), dw, p.accumulate);
  }
  Kept passed_;
};

// ---- What catches them

using controls::column_by;
using controls::column_with;
using controls::Row;
using controls::row_by;
using controls::row_with;
using controls::WeightGradientOverwritten;

const Row rows[] = {
    {"linear_column", "ring_owner_on_other_side", column_by<OwnerOnOtherSide>, "forward,gradient",
     "adjoint,ledger", "neighbour of ring_owner_is_neighbour", "tp=3 sp=on overlap=ring",
     "p >= 3: on two ranks both ways are one"},
    {"linear_row", "ring_owner_on_other_side", row_by<OwnerOnOtherSide>, "forward,gradient",
     "adjoint,ledger", "neighbour of ring_owner_is_neighbour", "tp=4 sp=on overlap=ring",
     "p >= 3: on two ranks both ways are one"},
    {"linear_column", "ring_owner_is_neighbour", column_by<OwnerIsNeighbour>,
     "forward,gradient,adjoint", "ledger", "hw-native-sys/pypto 2332", "tp=2 sp=on overlap=ring",
     "p >= 2"},
    {"linear_row", "ring_owner_is_neighbour", row_by<OwnerIsNeighbour>, "gradient,adjoint",
     "forward,ledger", "hw-native-sys/pypto 2332", "tp=2 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_last_block_left_out", column_by<LastBlockLeftOut>, "forward", "ledger",
     "as many products as hops", "tp=2 sp=on overlap=ring", "p >= 2"},
    {"linear_row", "ring_last_block_left_out", row_by<LastBlockLeftOut>, "gradient",
     "forward,ledger", "as many products as hops", "tp=4 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_multiplied_after_refill", column_by<MultipliedAfterRefill>,
     "forward,gradient", "ledger", "uccl-project/mKernel 18", "tp=2 sp=on overlap=ring", "p >= 2"},
    {"linear_row", "ring_multiplied_after_refill", row_by<MultipliedAfterRefill>, "gradient",
     "forward,ledger", "uccl-project/mKernel 18", "tp=4 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_last_arrival_unawaited", column_by<LastArrivalUnawaited>,
     "forward,gradient", "ledger", "NVIDIA/TransformerEngine 1067", "tp=2 sp=on overlap=ring",
     "p >= 2"},
    {"linear_row", "ring_last_arrival_unawaited", row_by<LastArrivalUnawaited>, "forward,gradient",
     "ledger", "NVIDIA/TransformerEngine 1067", "tp=4 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_own_part_left_out", column_by<OwnPartLeftOut>, "gradient,adjoint",
     "forward,ledger", "p - 1 additions of p parts", "tp=4 sp=on overlap=ring", "p >= 2"},
    {"linear_row", "ring_own_part_left_out", row_by<OwnPartLeftOut>, "forward,adjoint",
     "gradient,ledger", "p - 1 additions of p parts", "tp=4 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_own_part_twice", column_by<OwnPartTwice>, "gradient,adjoint",
     "forward,ledger", "p + 1 additions of p parts", "tp=2 sp=on overlap=ring", "p >= 2"},
    {"linear_row", "ring_own_part_twice", row_by<OwnPartTwice>, "forward,adjoint",
     "gradient,ledger", "p + 1 additions of p parts", "tp=2 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_sum_in_storage_type", column_by<SumInStorageType>, "gradient,ledger",
     "forward", "NVIDIA/Megatron-LM 6199",
     "tp=4 tokens=96 in=64 sp=on overlap=ring dtype=bf16 wire=f32 fill=normal",
     "a wire wider than the storage"},
    {"linear_row", "ring_sum_in_storage_type", row_by<SumInStorageType>, "forward,ledger",
     "gradient", "NVIDIA/Megatron-LM 6199",
     "tp=4 sp=on overlap=ring dtype=bf16 wire=f32 fill=normal", "a wire wider than the storage"},
    {"linear_row", "ring_bias_on_every_rank", row_with<BiasOnEveryRank>, "forward",
     "gradient,ledger", "huggingface/text-generation-inference 1036", "tp=4 sp=on overlap=ring",
     "bias as large as the output"},
    {"linear_column", "ring_weight_gradient_overwritten",
     column_with<WeightGradientOverwritten<ColumnParallel>>, "gradient", "forward,ledger",
     "neighbour of wgrad_overwrites", "tp=2 sp=on overlap=ring", "p >= 2"},
    {"linear_row", "ring_weight_gradient_overwritten",
     row_with<WeightGradientOverwritten<RowParallel>>, "gradient", "forward,ledger",
     "neighbour of wgrad_overwrites", "tp=3 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_weight_gradient_of_own_block",
     column_with<WeightGradientOfOwnBlock<ColumnParallel>>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 178", "tp=2 sp=on overlap=ring", "p >= 2"},
    {"linear_row", "ring_weight_gradient_of_own_block",
     row_with<WeightGradientOfOwnBlock<RowParallel>>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 178", "tp=4 sp=on overlap=ring", "p >= 2"},
    {"linear_column", "ring_passed_kept_in_layer", column_with<PassedKeptInLayer>,
     "accumulate,ledger", "forward,gradient,adjoint,repeat", "neighbour of input_kept_in_layer",
     "tp=2 sp=on overlap=ring", "two forwards in flight"},
};

}  // namespace

void controls_linear_ring(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
