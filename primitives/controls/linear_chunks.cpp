// Broken twins of the linears with overlap=chunks. Each replaces a walk over the chunks, a cut, or
// what is done with a block; the comment above a twin names the mistake.
#include "oracle/registry.hpp"
#include "primitives/controls/linear_parts.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/linear.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- Cuts

// All tokens are cut into chunks, and each chunk over the ranks: right for a tensor that nobody has
// cut before, but a rank's own tokens are one run and not one of every chunk.
class CutBeforeOwners final : public TokenChunks {
  int64_t place(const Parallel& p, int64_t, const Run& at, int owner) const override {
    return owners(p) * at.first + owner * at.rows;
  }
};

// Chunks of floor(n / chunks) rows: what is left over is in none.
class RemainderLeftOut final : public TokenChunks {
  Run run(const Parallel& p, int64_t n, int chunk) const override {
    const int64_t rows = n / p.chunks;
    return {rows * chunk, rows};
  }
};

// ---- Walks

// One buffer: the call of a chunk finds the products of the next one in it, and what is gathered is
// written over before it is multiplied.
class RefilledUnderWay final : public TokenChunks {
  void gather(Parallel& p, const View& own, const Rows& multiply) const override {
    const int64_t n = own.shape[0];
    const View packed = p.workspace(own.dtype, own.shape), room = rooms(p, own).here;
    convert(own, packed);
    p.tp.wait(start_gather(p, packed, run(p, n, 0), room));
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      if (chunk + 1 < p.chunks) p.tp.wait(start_gather(p, packed, run(p, n, chunk + 1), room));
      each_owner(p, n, run(p, n, chunk), room, multiply);
    }
  }
  void reduce(Parallel& p, const Rows& product, const View& sum) const override {
    const int64_t n = sum.shape[0];
    const View room = rooms(p, sum).here;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      each_owner(p, n, run(p, n, chunk), room, product);
      if (chunk + 1 < p.chunks) each_owner(p, n, run(p, n, chunk + 1), room, product);
      p.tp.wait(start_reduce(p, room, run(p, n, chunk), sum));
    }
  }
};

// Each call is waited for where the next one starts, and nothing waits for the last one: what was
// in its rows before is read.
class LastUnawaited final : public TokenChunks {
  void gather(Parallel& p, const View& own, const Rows& multiply) const override {
    int met = 0;
    const int last = (p.chunks - 1) * owners(p);
    TokenChunks::gather(p, own, [&](int64_t first, const View& rows) {
      multiply(first, met++ < last ? rows : p.workspace(rows.dtype, rows.shape));
    });
  }
  void reduce(Parallel& p, const Rows& product, const View& sum) const override {
    const View all = p.workspace(sum.dtype, sum.shape);
    TokenChunks::reduce(p, product, all);
    const int64_t come = run(p, sum.shape[0], p.chunks - 1).first;
    convert(all.narrow(0, 0, come), sum.narrow(0, 0, come));
  }
};

// Chunks are summed as their products are made, and once more where a whole sum always was.
class SummedAgainWhole final : public TokenChunks {
  void reduce(Parallel& p, const Rows& product, const View& sum) const override {
    TokenChunks::reduce(p, product, sum);
    all_reduce(p.rank, p.tp, sum, sum);
  }
};

using SumInStorageType = controls::SumInStorageType<TokenChunks, TokenChunks::Rows>;

// ---- What catches them

using controls::column_by;
using controls::column_with;
using controls::Row;
using controls::row_by;
using controls::row_with;
using controls::WeightGradientOverwritten;

const Row rows[] = {
    {"linear_column", "chunks_cut_before_owners", column_by<CutBeforeOwners>, "forward,gradient",
     "adjoint,ledger", "neighbour of ring_owner_is_neighbour", "tp=2 sp=on overlap=chunks",
     "p >= 2"},
    {"linear_row", "chunks_cut_before_owners", row_by<CutBeforeOwners>, "forward,gradient",
     "adjoint,ledger", "neighbour of ring_owner_is_neighbour", "tp=4 sp=on overlap=chunks",
     "p >= 2"},
    {"linear_column", "chunk_remainder_left_out", column_by<RemainderLeftOut>, "gradient,ledger",
     "forward", "chunks by integer division", "tp=2 overlap=chunks chunks=5",
     "rows that chunks do not divide"},
    {"linear_row", "chunk_remainder_left_out", row_by<RemainderLeftOut>, "forward,ledger",
     "gradient", "chunks by integer division", "tp=4 overlap=chunks chunks=5",
     "rows that chunks do not divide"},
    {"linear_column", "chunk_refilled_under_way", column_by<RefilledUnderWay>, "forward,gradient",
     "ledger", "uccl-project/mKernel 18", "tp=2 sp=on overlap=chunks", "two chunks or more"},
    {"linear_row", "chunk_refilled_under_way", row_by<RefilledUnderWay>, "forward,gradient",
     "ledger", "uccl-project/mKernel 18", "tp=4 sp=on overlap=chunks chunks=3",
     "two chunks or more"},
    {"linear_column", "chunk_last_unawaited", column_by<LastUnawaited>, "forward,gradient",
     "ledger", "NVIDIA/TransformerEngine 1067", "tp=4 sp=on overlap=chunks chunks=4", "p >= 2"},
    {"linear_row", "chunk_last_unawaited", row_by<LastUnawaited>, "forward", "gradient,ledger",
     "NVIDIA/TransformerEngine 1067", "tp=2 overlap=chunks", "p >= 2"},
    {"linear_column", "chunks_summed_again_whole", column_by<SummedAgainWhole>,
     "gradient,adjoint,ledger", "forward", "neighbour of input_gradient_reduced_twice",
     "tp=2 overlap=chunks", "p >= 2"},
    {"linear_row", "chunks_summed_again_whole", row_by<SummedAgainWhole>, "forward,adjoint,ledger",
     "gradient", "neighbour of input_gradient_reduced_twice", "tp=4 overlap=chunks chunks=3",
     "p >= 2"},
    {"linear_column", "chunk_sum_in_storage_type", column_by<SumInStorageType>, "gradient,ledger",
     "forward", "NVIDIA/Megatron-LM 6199",
     "tp=4 tokens=96 in=64 overlap=chunks dtype=bf16 wire=f32 fill=normal",
     "a wire wider than the storage"},
    {"linear_row", "chunk_sum_in_storage_type", row_by<SumInStorageType>, "forward,ledger",
     "gradient", "NVIDIA/Megatron-LM 6199",
     "tp=4 sp=on overlap=chunks dtype=bf16 wire=f32 fill=normal", "a wire wider than the storage"},
    {"linear_column", "chunk_weight_gradient_overwritten",
     column_with<WeightGradientOverwritten<ColumnParallel>>, "gradient", "forward,ledger",
     "neighbour of wgrad_overwrites", "tp=2 sp=on overlap=chunks", "p >= 2"},
    {"linear_row", "chunk_weight_gradient_overwritten",
     row_with<WeightGradientOverwritten<RowParallel>>, "gradient", "forward,ledger",
     "neighbour of wgrad_overwrites", "tp=3 sp=on overlap=chunks chunks=3", "p >= 2"},
};

}  // namespace

void controls_linear_chunks(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
