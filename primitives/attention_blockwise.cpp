#include "primitives/attention_blockwise.hpp"

#include <functional>
#include <limits>

#include "primitives/attention_block.hpp"
#include "primitives/attention_tiles.hpp"
#include "primitives/calls.hpp"
#include "primitives/pointwise.hpp"
#include "primitives/rows.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

int64_t heads_of(const View& v) { return extent_from_end(v, 2); }

using Labels = std::vector<Label>;

Kept table_of(const Labels& labels) {
  std::vector<int64_t> numbers;
  for (const Label& l : labels) numbers.push_back(l.sequence), numbers.push_back(l.position);
  return uploaded(numbers);
}

// ---- A rank's place

struct Place : ContextRank {
  Strategy strategy;
  AttentionCore core;
  Place(Rank& r, Strategy s, ContextLine c) : ContextRank(r, std::move(c)), strategy(s) {}

  bool wide() const { return !single(); }
  // Halves where the line says that P and dS are rounded to the type of the tensors.
  Number factors() const {
    if (wide()) return Number::f64;
    const bool halves = storage == DType::bf16 || storage == DType::f16;
    if (!halves || line.text("probs") != name(storage)) return Number::f32;
    return storage == DType::bf16 ? Number::bf16 : Number::f16;
  }
  int inner() const { return int(line.at("inner")); }
  bool exchanges() const {
    return strategy == Strategy::alltoall || strategy == Strategy::hierarchical;
  }
  // Dealt to the ranks that exchange heads.
  int64_t key_heads() const { return dealt_key_heads(line); }
  // Of those that exchange heads, and of those among whom keys travel.
  Communicator& exchange() const { return strategy == Strategy::alltoall ? cp : cp.inner(inner()); }
  Communicator& travel() const {
    return strategy == Strategy::hierarchical ? cp.across(inner()) : cp;
  }
  View workspace(DType dtype, std::vector<int64_t> shape) const {
    return rank.workspace(dtype, std::move(shape));
  }
  View zeros(DType dtype, std::vector<int64_t> shape) const {
    const View v = workspace(dtype, std::move(shape));
    set_zero(v);
    return v;
  }
  Labels of_ranks(int first, int count, bool keys) const {
    return labels_of_ranks(context, core, first, count, keys);
  }
  Labels own_queries() const {
    if (strategy == Strategy::alltoall) return of_ranks(0, cp.size(), false);
    if (strategy == Strategy::hierarchical)
      return of_ranks(cp.rank() / inner() * inner(), inner(), false);
    return of_ranks(cp.rank(), 1, false);
  }
  // Keys that `owner` of the travelling ranks has; of all ranks where they do not turn.
  Labels keys_of(int owner) const {
    if (strategy == Strategy::hierarchical) return of_ranks(owner * inner(), inner(), true);
    return strategy == Strategy::ring ? of_ranks(owner, 1, true) : of_ranks(0, cp.size(), true);
  }
};

// Operands as this rank multiplies them, and the results in the accumulation type.
struct BlockwiseSaved : Saved {
  explicit BlockwiseSaved(ContextLine c) : context(std::move(c)) {}
  ContextLine context;
  Kept exchanged[3];
  View q, k, v;
  Kept queries, o, lse;
};

AttentionPairs pairs(const Place& c, const BlockwiseSaved& s, const View& k, const View& v,
                     const Kept& keys) {
  const HeadShape shape{heads_of(s.q), heads_of(k), s.q.shape.back(), v.shape.back()};
  const Window window = window_of(c.line);
  return {tensor(s.q),
          tensor(k),
          tensor(v),
          tensor(s.queries.view()),
          tensor(keys.view()),
          shape.heads,
          shape.kv_heads,
          shape.key_dim,
          shape.value_dim,
          c.core.scale(c.line, shape),
          number_of(c.line, "softcap", 0),
          {window.left, window.right, c.line.text("mask") == "causal"},
          c.factors()};
}

// ---- Tokens for heads

// Of a tensor of `heads`, each of the ranks that exchange.
std::vector<int64_t> shares(const Place& c, int64_t heads) {
  return heads_by_rank(heads, c.key_heads(), c.exchange().size());
}
std::vector<int64_t> own_shape(const Place& c, const View& by_tokens) {
  Communicator& group = c.exchange();
  return shape_by_heads(by_tokens, group.size(),
                        shares(c, heads_of(by_tokens))[size_t(group.rank())]);
}
void tokens_for_heads(const Place& c, const View& by_tokens, const View& by_heads) {
  const auto heads = shares(c, heads_of(by_tokens));
  all_to_all(c.rank, c.exchange(), by_tokens, by_heads, heads_dim(by_tokens), 0, heads);
}
void heads_for_tokens(const Place& c, const View& by_heads, const View& by_tokens) {
  const auto heads = shares(c, heads_of(by_tokens));
  all_to_all(c.rank, c.exchange(), by_heads, by_tokens, 0, heads_dim(by_tokens), {}, heads);
}

View exchanged(const Place& c, const View& by_tokens) {
  const View by_heads = c.workspace(by_tokens.dtype, own_shape(c, by_tokens));
  tokens_for_heads(c, by_tokens, by_heads);
  return by_heads;
}

// Between rows in the order of the sequence and rows in the order of ranks.
template <class Each>
void each_run_in_rank_order(const Place& c, Each each) {
  std::vector<int64_t> rows;
  for (int r = 0; r < c.cp.size(); ++r)
    for (int64_t row : owned_rows(c.context, c.context.rows, r)) rows.push_back(row);
  each_run(rows, each);
}

// ---- Keys to the queries

using Visit = std::function<void(const View& k, const View& v, int owner)>;

View gathered(const Place& c, const View& own) {
  std::vector<int64_t> shape = own.shape;
  shape[0] *= c.cp.size();
  const View whole = c.workspace(own.dtype, shape);
  all_gather(c.rank, c.cp, own, whole, 0);
  return whole;
}

// Keys, then values, of one rank in one message.
struct TurningKeys : Turning {
  std::vector<int64_t> key_shape, value_shape;
  TurningKeys(const Place& c, const BlockwiseSaved& s, DType dtype)
      : Turning(c.rank, dtype, {s.k.elements() + s.v.elements()}),
        key_shape(s.k.shape),
        value_shape(s.v.shape) {}
  View part(const View& message, int64_t first, const std::vector<int64_t>& shape) const {
    const int64_t n = product(shape);
    return view_of(message.narrow(0, first, n).data, message.dtype, shape, message.space);
  }
  View k(const View& message) const { return part(message, 0, key_shape); }
  View v(const View& message) const { return part(message, product(key_shape), value_shape); }
};

// At step s rank r holds the keys of rank r - s and sends them on while it computes.
void turn_forward(const Place& c, const BlockwiseSaved& s, const Visit& visit) {
  Communicator& ring = c.travel();
  const int p = ring.size(), me = ring.rank();
  TurningKeys kv(c, s, c.storage);
  convert(s.k, kv.k(kv.here));
  convert(s.v, kv.v(kv.here));
  for (int step = 0; step < p; ++step) {
    const bool goes_on = step + 1 < p;
    const Ticket hop = goes_on ? ring.shift(kv.here, kv.next, 1) : Ticket{};
    visit(kv.k(kv.here), kv.v(kv.here), modulo(me - step, p));
    if (!goes_on) break;
    ring.wait(hop);
    kv.turn();
  }
}

void attend(const Place& c, const BlockwiseSaved& s, const Visit& visit) {
  switch (c.strategy) {
    case Strategy::allgather: {
      const View k = gathered(c, s.k), v = gathered(c, s.v);
      return visit(k, v, -1);
    }
    case Strategy::alltoall:
      return visit(s.k, s.v, -1);
    default:
      return turn_forward(c, s, visit);
  }
}

// Gradients of one block of keys: those of the queries are added up, dk and dv are its own.
using Pull =
    std::function<void(const View& k, const View& v, int owner, const View& dk, const View& dv)>;

// dK, dV travel with their keys and are home after p hops.
TurningKeys turn_backward(const Place& c, const BlockwiseSaved& s, const Pull& pull) {
  Communicator& ring = c.travel();
  const int p = ring.size(), me = ring.rank();
  TurningKeys kv(c, s, c.storage), sums(c, s, c.wire);
  convert(s.k, kv.k(kv.here));
  convert(s.v, kv.v(kv.here));
  Ticket arriving{};
  for (int step = 0; step < p; ++step) {
    const bool goes_on = step + 1 < p;
    const Ticket hop = goes_on ? ring.shift(kv.here, kv.next, 1) : Ticket{};
    const View own = c.zeros(c.accumulate, kv.here.shape);
    pull(kv.k(kv.here), kv.v(kv.here), modulo(me - step, p), kv.k(own), kv.v(own));
    if (step > 0) {
      ring.wait(arriving);
      sums.turn();
      add_into(own, sums.here);
    } else {
      convert(own, sums.here);
    }
    arriving = ring.shift(sums.here, sums.next, 1);
    if (goes_on) {
      ring.wait(hop);
      kv.turn();
    } else {
      ring.wait(arriving);
      sums.turn();
    }
  }
  return sums;
}

View own_sum(const Place& c, const View& partial, const View& like) {
  const View whole = c.workspace(c.wire, partial.shape), sum = c.workspace(c.wire, like.shape);
  convert(partial, whole);
  reduce_scatter(c.rank, c.cp, whole, sum, 0);
  return sum;
}

// dK and dV of the keys that this rank holds.
std::pair<View, View> differentiate(const Place& c, const BlockwiseSaved& s, const Pull& pull) {
  if (c.strategy == Strategy::ring || c.strategy == Strategy::hierarchical) {
    const TurningKeys sums = turn_backward(c, s, pull);
    return {sums.k(sums.here), sums.v(sums.here)};
  }
  const bool apart = c.strategy == Strategy::allgather;
  const View k = apart ? gathered(c, s.k) : s.k, v = apart ? gathered(c, s.v) : s.v,
             dk = c.zeros(c.accumulate, k.shape), dv = c.zeros(c.accumulate, v.shape);
  pull(k, v, -1, dk, dv);
  if (!apart) return {dk, dv};
  return {own_sum(c, dk, s.k), own_sum(c, dv, s.v)};
}

std::optional<Rejected> refused(Strategy strategy, const Case& line) {
  if (strategy == Strategy::alltoall) return refused_attention_alltoall(line);
  if (strategy == Strategy::hierarchical) return refused_attention_hierarchical(line);
  return refused_attention(line);
}

void take_operands(const Place& c, std::span<const View> inputs, BlockwiseSaved& s) {
  View* const operands[] = {&s.q, &s.k, &s.v};
  for (size_t i = 0; i < 3; ++i) {
    *operands[i] = inputs[i];
    if (!c.exchanges()) continue;
    const View by_tokens = i == 0 ? inputs[i] : copied_heads(c, inputs[i], c.key_heads());
    s.exchanged[i] = Kept(by_tokens.dtype, own_shape(c, by_tokens));
    *operands[i] = s.exchanged[i].view();
    tokens_for_heads(c, by_tokens, *operands[i]);
  }
}

// The statistics of the own heads to where the contract wants them.
void put_statistics(const Place& c, const View& lse, const View& to) {
  if (c.strategy == Strategy::hierarchical) return heads_for_tokens(c, with_dim(lse), with_dim(to));
  each_run_in_rank_order(c, [&](int64_t row, int64_t at, int64_t n) {
    convert(lse.narrow(0, at, n), to.narrow(0, row, n));
  });
}
View take_statistics(const Place& c, const View& g_lse) {
  if (!c.exchanges()) return g_lse;
  if (c.strategy == Strategy::hierarchical)
    return c.line.on("lse_grad") ? exchanged(c, with_dim(g_lse)) : View{};
  const View by_ranks = c.workspace(g_lse.dtype, g_lse.shape);
  each_run_in_rank_order(c, [&](int64_t row, int64_t at, int64_t n) {
    convert(g_lse.narrow(0, row, n), by_ranks.narrow(0, at, n));
  });
  return by_ranks;
}

// A gradient of exchanged operands, `heads` of them, to that of the operand.
void return_gradient(const Place& c, const View& by_heads, const View& gradient, int64_t heads) {
  if (!c.exchanges()) return convert(by_heads, gradient);
  std::vector<int64_t> shape = gradient.shape;
  shape[shape.size() - 2] = heads;
  const DType travels = heads != heads_of(gradient) ? c.wire : c.storage;
  const View narrowed = c.workspace(travels, by_heads.shape), home = c.workspace(travels, shape);
  convert(by_heads, narrowed);
  heads_for_tokens(c, narrowed, home);
  sum_copies(c, home, gradient);
}

class BlockwiseAttention final : public Kernel {
 public:
  explicit BlockwiseAttention(Strategy strategy) : strategy_(strategy) {}
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 private:
  Strategy strategy_;
};

// inputs q, k, v, [cu_seqlens, [cu_seqlens_k]]; outputs o, lse.
std::unique_ptr<Saved> BlockwiseAttention::forward(Rank& rank, std::span<const View> inputs,
                                                   std::span<const View> outputs) {
  auto saved = std::make_unique<BlockwiseSaved>(context_of(rank.line(), inputs.subspan(3)));
  if (auto no = refused(strategy_, rank.line())) throw *no;
  const Place c(rank, strategy_, saved->context);
  BlockwiseSaved& s = *saved;
  take_operands(c, inputs, s);
  s.queries = table_of(c.own_queries());
  std::vector<int64_t> rows(s.q.shape.begin(), s.q.shape.end() - 1), of_o = rows;
  of_o.push_back(s.v.shape.back());
  const View m = c.workspace(c.accumulate, rows), l = c.zeros(c.accumulate, rows),
             a = c.zeros(c.accumulate, of_o);
  perform(Fill{tensor(m), -std::numeric_limits<double>::infinity()}, "empty maxima");
  attend(c, s, [&](const View& k, const View& v, int owner) {
    const Kept keys = table_of(c.keys_of(owner));
    perform(AttendBlock{pairs(c, s, k, v, keys), tensor(m), tensor(l), tensor(a)},
            "a block of attention");
  });

  s.o = Kept(c.accumulate, of_o);
  s.lse = Kept(c.accumulate, rows);
  const View o = c.exchanges() ? c.workspace(c.storage, of_o) : outputs[0],
             lse = c.exchanges() ? c.workspace(outputs[1].dtype, rows) : outputs[1];
  perform(AttentionOutput{tensor(m), tensor(l), tensor(a), tensor(o), tensor(lse),
                          tensor(s.o.view()), tensor(s.lse.view()), s.v.shape.back(), c.wide()},
          "the output of attention");
  if (!c.exchanges()) return saved;
  heads_for_tokens(c, o, outputs[0]);
  put_statistics(c, lse, outputs[1]);
  return saved;
}

void BlockwiseAttention::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                                  std::span<const View> gradients) {
  const auto& s = static_cast<const BlockwiseSaved&>(state);
  const Place c(rank, strategy_, s.context);
  const View g = c.exchanges() ? exchanged(c, cotangents[0]) : cotangents[0],
             g_lse = take_statistics(c, cotangents[1]),
             delta = c.workspace(c.accumulate, s.lse.view().shape),
             dq = c.zeros(c.accumulate, s.q.shape);
  perform(AttentionDelta{tensor(s.o.view()), tensor(g), tensor(g_lse), tensor(delta),
                         s.v.shape.back(), c.wide()},
          "the statistics of a backward");
  const auto [dk, dv] = differentiate(
      c, s, [&](const View& k, const View& v, int owner, const View& own_dk, const View& own_dv) {
        const Kept keys = table_of(c.keys_of(owner));
        const AttentionPull pull{pairs(c, s, k, v, keys), tensor(g), tensor(s.lse.view()),
                                 tensor(delta)};
        perform(QueryGradient{pull, tensor(dq)}, "the gradient of queries");
        perform(KeyGradient{pull, tensor(own_dk)}, "the gradient of keys");
        perform(ValueGradient{pull, tensor(own_dv)}, "the gradient of values");
      });
  const int64_t key_heads = c.exchanges() ? c.key_heads() : heads_of(gradients[1]);
  return_gradient(c, dq, gradients[0], heads_of(gradients[0]));
  return_gradient(c, dk, gradients[1], key_heads);
  return_gradient(c, dv, gradients[2], key_heads);
}

class BlockwiseAttentionBlock final : public AttentionBlock {
  std::unique_ptr<Kernel> core_of(const Case& line) const override {
    return blockwise_attention(line.text("core") == "ring" ? Strategy::ring : Strategy::allgather);
  }
};

}  // namespace

std::unique_ptr<Kernel> blockwise_attention(Strategy strategy) {
  return std::make_unique<BlockwiseAttention>(strategy);
}
std::unique_ptr<Kernel> blockwise_attention_block() {
  return std::make_unique<BlockwiseAttentionBlock>();
}

}  // namespace shardproof::primitives
