// Attention of the queries of a rank over blocks of keys that arrive one after another.
//
// For each query and head a running maximum m, sum l and accumulator a are kept; merging a block
//
//   m' = max(m, m_b)    l' = e^(m-m') l + e^(m_b-m') l_b    a' = e^(m-m') a + e^(m_b-m') a_b
//
// is associative with the identity (-inf, 0, 0), so that any order of blocks gives O = a/l and
// lse = m + log l. Two empty sides stay empty: m' = -inf is never subtracted from itself. The
// backward of a block takes the merged lse and delta = <dO, O> - dlse, never the block's own.
//
// Masks follow from labels (sequence, position), so that one formula serves every layout; a block
// that no query sees is not computed. Sums are made in f32 or f64; the steps are virtual so that a
// variant replaces one of them.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "primitives/attention_line.hpp"

namespace shardproof::primitives {

using Values = std::vector<double>;  // numbers of the accumulation type

// The keys of one owner (or of all ranks, owner -1) against the queries of this rank.
struct KeyBlock {
  std::span<const Label> queries, keys;
  int rank = 0, owner = -1, ranks = 1, step = 0;
};

struct HeadShape {
  int64_t heads = 1, kv_heads = 1, key_dim = 1, value_dim = 1;
};

// State of the rows (query, head).
struct Softmax {
  Values m, l, a;  // [rows], [rows], [rows, value_dim]
  Softmax(int64_t rows, int64_t value_dim);
};

// What the backward of a row needs.
struct Statistics {
  Values lse, delta;  // [rows]
};

struct MaskRule {
  bool causal = false;
  Window window;
};

class AttentionPass;

class AttentionCore {
 public:
  virtual ~AttentionCore() = default;
  virtual std::vector<Label> queries(const ContextLine&, int rank) const;
  virtual std::vector<Label> keys(const ContextLine&, int rank) const;
  virtual double scale(const Case&, const HeadShape&) const;
  virtual int64_t kv_head(const HeadShape&, int64_t head) const;
  // bias[i * keys + j]: added to the score of the pair; -inf: the query does not see the key.
  virtual void mask(const MaskRule&, const KeyBlock&, Values& bias) const;
  virtual bool sees(const MaskRule&, const KeyBlock&, const Label& query, const Label& key) const;
  // Row `at` of a block into the same row of the sum.
  virtual void merge(Softmax& sum, const Softmax& block, size_t at, size_t value_dim,
                     const KeyBlock&) const;
  virtual Statistics statistics(const AttentionPass&, const KeyBlock&, const Statistics& merged,
                                std::span<const double> k, std::span<const double> v,
                                std::span<const double> g) const;
};

// One forward or backward on a rank: shapes, numbers of the line, and the queries.
class AttentionPass {
 public:
  AttentionPass(const Case&, const AttentionCore&, const HeadShape&, bool single, Values q,
                std::vector<Label> queries);

  // Keys [keys, kv_heads, key_dim] and values of one block, by themselves or into the sum.
  Softmax attend(const KeyBlock&, std::span<const double> k, std::span<const double> v) const;
  void add(Softmax& sum, const KeyBlock&, std::span<const double> k,
           std::span<const double> v) const;
  void add_gradients(const KeyBlock&, const Statistics&, std::span<const double> k,
                     std::span<const double> v, std::span<const double> g, Values& dq, Values& dk,
                     Values& dv) const;

  KeyBlock block(std::span<const Label> keys, int rank, int owner, int ranks, int step) const;
  Softmax nothing() const { return Softmax(rows(), shape.value_dim); }
  Values output(const Softmax&) const;
  Values lse(const Softmax&) const;
  Statistics statistics(std::span<const double> o, std::span<const double> lse,
                        std::span<const double> g, std::span<const double> g_lse) const;
  int64_t rows() const { return int64_t(queries.size()) * shape.heads; }
  double kept(double x) const { return single ? double(float(x)) : x; }  // in the accumulation type

  const Case& line;
  const AttentionCore& core;
  HeadShape shape;
  bool single;  // accumulation in f32
  double scale, softcap;
  MaskRule rule;
  Values q;  // [queries, heads, key_dim]
  std::vector<Label> queries;
  mutable int64_t pairs = 0;  // (query, key) pairs whose scores were computed by attend

 private:
  template <class A>
  void attend_in(const KeyBlock&, std::span<const double> bias, std::span<const double> k,
                 std::span<const double> v, Softmax&) const;
  template <class A>
  void add_gradients_in(const KeyBlock&, std::span<const double> bias, const Statistics&,
                        std::span<const double> k, std::span<const double> v,
                        std::span<const double> g, Values& dq, Values& dk, Values& dv) const;
  bool biases(const KeyBlock&, Values& bias) const;  // false: nothing is seen
};

}  // namespace shardproof::primitives
