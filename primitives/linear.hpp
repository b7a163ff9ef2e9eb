// Tensor-parallel linears Y = X W^T + b on the ranks of the tp axis, W [out,in].
//
//   column   W, b cut by rows of W: Y_r = X W_r^T + b_r, [T,o/p]
//            sp=off  X on every rank        dX: all-reduce of the partial G_r W_r
//            sp=on   X_s, [T/p,i] a rank    X gathered over tokens, again in backward (only X_s is
//                                           kept); dX: reduce-scatter over tokens
//   row      W cut by columns, b on every rank: Y = sum_r X_r W_r^T + b, X_r [T,i/p]
//            sp=off  all-reduce             dY is whole on every rank
//            sp=on   reduce-scatter over tokens, b added to the own tokens; dY gathered;
//                    db summed over tp, since each rank has seen its own tokens only
//
// With overlap=ring every gather and every reduce-scatter over tokens is p-1 shifts, each under way
// while a block is multiplied (token_ring.hpp); with overlap=chunks these and the all-reduces are
// cut into `chunks` calls, each under way while another chunk is multiplied (token_chunks.hpp).
//
// Products are accumulated in f32 (f64 where storage or acc= says so), stored once; sums between
// ranks travel in the wire type. Over dp and cp nothing is summed: parameter gradients stay
// partial. Where a step has several microbatches, each adds its parameter gradients, rounded to the
// accumulation type, into running sums of the gradient's type. The steps are virtual so that a
// variant replaces one of them.
#pragma once
#include <memory>
#include <vector>

#include "oracle/subject.hpp"
#include "primitives/calls.hpp"
#include "primitives/token_chunks.hpp"
#include "primitives/token_ring.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {

// A rank's place in a tensor-parallel layer and the numbers that it computes with.
struct Parallel {
  Rank& rank;
  Communicator& tp;
  bool sp, ring;  // ring, chunks: over several ranks, as overlap= says
  int chunks;     // 1: whole
  DType storage, accumulate, wire;

  explicit Parallel(Rank&);
  bool taken_apart() const { return ring || chunks > 1; }
  // Type of a sum that is still partial: with one rank nothing travels and nothing is rounded.
  DType partial() const { return tp.size() == 1 ? accumulate : wire; }
  View workspace(DType dtype, std::vector<int64_t> shape) {
    return rank.workspace(dtype, std::move(shape));
  }
};

inline int last(const View& v) { return int(v.shape.size()) - 1; }
// Where a parameter's gradient is computed: its own place, or, where running sums are kept, a
// workspace that is added into the sum afterwards.
View fresh_gradient(Parallel&, const View& gradient);
// A rank's block of a dim that is cut over tp.
View block_of(const Parallel&, const View& whole, int dim, int owner);
// Own block of a dim that all ranks of tp hold whole.
View own_block(const Parallel&, const View& whole, int dim);
std::vector<int64_t> with_extent(std::vector<int64_t> shape, int dim, int64_t extent);

// The calls over tokens, taken apart as overlap= says.
class TokenCalls {
 public:
  explicit TokenCalls(std::unique_ptr<TokenRing> ring = std::make_unique<TokenRing>(),
                      std::unique_ptr<TokenChunks> chunks = std::make_unique<TokenChunks>())
      : ring_(std::move(ring)), chunks_(std::move(chunks)) {}
  void gather(Parallel&, const View& own, const TokenChunks::Rows& multiply) const;
  void reduce(Parallel&, const TokenChunks::Rows& product, const View& sum) const;

 private:
  std::unique_ptr<TokenRing> ring_;
  std::unique_ptr<TokenChunks> chunks_;
};

class ColumnParallel {
 public:
  explicit ColumnParallel(TokenCalls calls = TokenCalls()) : calls_(std::move(calls)) {}
  virtual ~ColumnParallel() = default;
  // x [..,i], [T/p] of its tokens under sp; w [o/p,i]; b [o/p] or no data; y [T,o/p].
  void forward(Parallel&, const View& x, const View& w, const View& b, const View& y);
  // g is the cotangent of y. Gradients without data are not due.
  void backward(Parallel&, const View& x, const View& w, const View& g, const View& dx,
                const View& dw, const View& db);

 protected:
  virtual void weight_gradient(Parallel&, const View& x, const View& g, const View& dw);
  virtual void reduce_input_gradient(Parallel&, const View& partial, const View& dx);
  View whole_input(Parallel&, const View& x);  // gathered over tokens under sp
  // Taken apart: Y's rows of each block that comes; dW = sum of G_b^T X_b, one block b after
  // another.
  virtual void multiply_passing(Parallel&, const View& x, const View& w, const View& b,
                                const View& y);
  virtual void add_passing(Parallel&, const View& x, const View& g, const View& sum);
  const TokenCalls& calls() const { return calls_; }

 private:
  TokenCalls calls_;
};

class RowParallel {
 public:
  explicit RowParallel(TokenCalls calls = TokenCalls()) : calls_(std::move(calls)) {}
  virtual ~RowParallel() = default;
  // x [T,i/p]; w [o,i/p]; b [o] or no data; y [T,o], [T/p,o] under sp.
  void forward(Parallel&, const View& x, const View& w, const View& b, const View& y);
  void backward(Parallel&, const View& x, const View& w, const View& g, const View& dx,
                const View& dw, const View& db);

 protected:
  virtual void partial_product(Parallel&, const View& x, const View& w, const View& z);
  virtual void reduce_and_add_bias(Parallel&, const View& z, const View& b, const View& y);
  // g as it came; whole: over all tokens.
  virtual void input_gradient(Parallel&, const View& g, const View& whole, const View& w,
                              const View& dx);
  virtual void bias_gradient(Parallel&, const View& g, const View& whole, const View& db);
  void reduce_bias_gradient(Parallel&, const View& local, Communicator&, const View& db);
  // Taken apart: Z's rows are made block by block; dX's rows and dW of each block that comes.
  virtual void sum_blocks(Parallel&, const View& x, const View& w, const View& b, const View& y);
  virtual void add_passing(Parallel&, const View& g, const View& x, const View& sum);

 private:
  void differentiate_blocks(Parallel&, const View& x, const View& w, const View& g, const View& dx,
                            const View& dw);
  TokenCalls calls_;
};

// Runs `backward` on gradients of one microbatch: those of inputs 1, 2, ... (parameters) are fresh
// where running sums are kept, and are added into them by `add`.
template <class Backward, class Add>
void into_running_sums(Parallel& p, std::span<const View> gradients, Backward backward, Add add) {
  if (!p.rank.accumulates()) return backward(gradients);
  std::vector<View> own(gradients.begin(), gradients.end());
  for (size_t i = 1; i < own.size(); ++i) own[i] = fresh_gradient(p, gradients[i]);
  backward(std::span<const View>(own));
  for (size_t i = 1; i < own.size(); ++i)
    if (own[i].data) add(own[i], gradients[i]);
}

// Rows of a weight [parts stacked] that this rank owns: block r of each part.
std::vector<int64_t> rows_of_parts(const std::vector<int64_t>& parts, int p, int r);
// Rows that a line's attributes (heads, kv_heads, head_dim, swiglu) give to rank r of p.
std::vector<int64_t> rows_of_line(const Case&, int64_t rows, int p, int r);
View take_rows(Parallel&, const View& whole, const std::vector<int64_t>& rows);
// The gradient of a weight that was handed whole: own rows, zeros elsewhere.
void put_rows(const View& own, const std::vector<int64_t>& rows, const View& whole);

// Linears as subjects of the contracts linear_column and linear_row.
class LinearColumn : public Kernel {
 public:
  explicit LinearColumn(std::unique_ptr<ColumnParallel> part = std::make_unique<ColumnParallel>());
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual std::vector<int64_t> own_rows(const Case&, int64_t rows, int p, int r) const;
  virtual std::vector<int64_t> own_bias_rows(const Case&, int64_t rows, int p, int r) const;
  virtual void split_output_gradient(Parallel&, const View& whole, const View& own);
  virtual void add_gradient(const View& own, const View& sum);  // of a microbatch to the step's

 private:
  void gradients_of(Parallel&, Saved&, std::span<const View> cotangents,
                    std::span<const View> gradients);
  View own_part(Parallel&, const View& whole, bool bias);
  void return_part(Parallel&, const View& own, const View& whole, bool bias);
  std::unique_ptr<ColumnParallel> part_;
};

class LinearRow : public Kernel {
 public:
  explicit LinearRow(std::unique_ptr<RowParallel> part = std::make_unique<RowParallel>());
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 private:
  void gradients_of(Parallel&, Saved&, std::span<const View> cotangents,
                    std::span<const View> gradients);
  std::unique_ptr<RowParallel> part_;
};

}  // namespace shardproof::primitives
