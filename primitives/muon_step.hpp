// One step of Muon on matrices that tensor parallelism cuts (torch.optim.Muon; Megatron's
// TensorParallelMuon and LayerWiseDistributedOptimizer; Moonshot's distributed Muon).
//
//   matrices  number k is [rows, hidden + k] where k is even, [hidden + k, rows] where it is odd
//   cut       rows or columns of each of them over tp, blocks of ceil(extent / p) as torch.chunk
//             cuts: the last ranks own fewer, or none. cut=none: every rank of tp has all of them
//   data      the ranks of dp and cp together, cp the faster: each has a part of every gradient
//
//   muon_step
//     gradients, in the wire type: owner=all  one all-reduce over the data ranks
//                                  owner=one  matrix k belongs to data rank k mod p, which alone
//                                             has its momentum: one reduce-scatter of a flat
//                                             buffer that is laid out by owner, each rank's part
//                                             filled up with zeros
//     direction   m' = mu m + w g, u = w g + mu m' (nesterov) or m', in the accumulation type, as
//                 all that follows
//     form=gather one all-gather of u over tp; every rank orthogonalises the whole and keeps its
//                 shard. A is X X^T on the shorter side
//     form=gram   squares of the own shards, one all-reduce over tp; then one of the Gram matrices
//                 in each iteration, on the side that tp does not cut: X X^T = sum X_r X_r^T of a
//                 matrix that is cut by columns. Nothing is gathered
//     update      w (1 - lr decay) - lr scale O, rounded to the storage type; the scale is that of
//                 the whole matrix
//     owner=one   one all-gather of the updated matrices over the data ranks
//
// All matrices of a rank travel in one call. A group of one issues no call, and neither do ranks of
// tp that own no matrix. There is no backward.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "primitives/sharded_step.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_muon_step(const Case&);

// A matrix, and how tp cuts it.
struct CutMatrix {
  int64_t rows = 0, columns = 0;  // of the whole
  int cut = -1;                   // dim; -1: none
  int ranks = 1, own = 0;

  std::vector<int64_t> whole() const { return {rows, columns}; }
  int64_t block() const;  // of the dim that is cut, padding and all
  int64_t first(int rank) const;
  int64_t count(int rank) const { return first(rank + 1) - first(rank); }
  std::vector<int64_t> shape(int rank) const;  // of a rank's shard
  int64_t padded() const;                      // elements of a shard with its padding
};

// Operands by name, each a view for every matrix.
struct MuonTensors {
  Views w, g, m, next_w, next_m;

  MuonTensors(std::span<const View> inputs, std::span<const View> outputs);
};

struct MuonNumbers {
  double momentum = 0, weight = 1;  // mu, w
  double lr = 0, decay = 0, eps = 0;
  bool nesterov = true;
  int64_t iterations = 5;
  double a = 3.4445, b = -4.7750, c = 2.0315;
};

class MuonStep : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;

 protected:
  using Indices = std::vector<size_t>;  // of matrices

  virtual MuonNumbers numbers(const Case&) const;
  virtual std::vector<CutMatrix> matrices(Parallel&) const;
  virtual int owner_of(size_t matrix, int ranks) const { return int(matrix) % ranks; }
  Indices owned(Parallel&, size_t matrices, int rank) const;
  // One owner of all where every data rank has them all.
  std::vector<Indices> by_owner(Parallel&, size_t matrices) const;

  // Gradients of all data ranks to the sum of the own matrices'; of a flat buffer.
  virtual void reduce(Parallel&, Communicator&, const View& in, const View& out);
  Views reduced_gradients(Parallel&, const MuonTensors&);

  Views directions(Parallel&, const MuonTensors&, const Indices& own);
  // m', and u.
  virtual void direction(Parallel&, const View& g, const View& m, const View& next_m,
                         const View& u);
  // u of the whole matrices.
  virtual void gather(Parallel&, const View& shard, const View& all);
  virtual void unpack_shard(const CutMatrix&, int rank, const View& flat, const View& whole);
  Views gathered(Parallel&, const std::vector<CutMatrix>&, const Views& shards);
  virtual View own_part(Parallel&, const CutMatrix&, const View& whole);

  virtual void sum_squares(Parallel&, const View& own, const View& total);
  virtual void sum_grams(Parallel&, const View& own, const View& total);
  // A is X^T X.
  virtual bool turned(Parallel&, const CutMatrix&, const View& x) const;
  virtual void normalise(Parallel&, const View& u, const View& square, double eps, const View& x);
  virtual void iterate(Parallel&, const View& gram, bool turned, const View& x, const View& next);
  Views normalised(Parallel&, const Views& u, bool summed);
  Views iterated(Parallel&, const std::vector<CutMatrix>&, const Views& x, bool summed);
  // Of matrices that are whole, or, `summed`, of shards whose squares and products tp adds up.
  Views orthogonalised(Parallel&, const std::vector<CutMatrix>&, const Views& u, bool summed);
  virtual Views directions_made_orthogonal(Parallel&, const std::vector<CutMatrix>&,
                                           const Views& u);

  virtual double scale_of(Parallel&, const CutMatrix&, const View& shard) const;
  virtual void update(Parallel&, const View& w, const View& o, double scale, const View& next);
  virtual void publish(Parallel&, const View& own, const View& all);
  void hand_out(Parallel&, const Views& own, const MuonTensors&);

  bool by_gram(const Case& line) const { return line.text("form") == "gram"; }
};

// The ranks that have parts of every gradient.
std::vector<Axis> data_axes(const Case&);
Communicator& group_of_data(Parallel&);
// Where shards of matrices lie in a flat buffer with a part of one length for each owner.
struct OwnedBuffer {
  std::vector<int64_t> places;  // of each matrix
  int64_t block = 0;            // elements of an owner's part
};
OwnedBuffer laid_out(const Views& shards, const std::vector<std::vector<size_t>>& by_owner);
// A dense view under another shape.
View shaped(View, std::vector<int64_t> shape);

}  // namespace shardproof::primitives
