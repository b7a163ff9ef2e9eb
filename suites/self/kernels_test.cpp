// Every kernel of primitives/cuda as it stands, on the host (cuda_on_host/), against the serial
// loop over the same body: all bytes of all tensors and of what lies around them, under every
// schedule. Numbers are such that no sum rounds (small integers and halves, exponentials of 0 and
// of what is far below), so that the order of a sum is none.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <vector>

#include "primitives/bodies.hpp"
#include "primitives/cuda/twin_bodies.hpp"
#include "primitives/launch.hpp"
#include "suites/self/cuda_on_host/block.hpp"

namespace shardproof::primitives {

namespace kernels_executor {
template <class Body>
int launch(const Body&, void* stream);
}

namespace {

using cuda_on_host::can_watch, cuda_on_host::complaint, cuda_on_host::Order, cuda_on_host::Schedule,
    cuda_on_host::set_schedule;

// Tensors with guards around them, all filled before anything is written.
class Pool {
 public:
  template <class Value>
  Tensor tensor(Number number, std::vector<int64_t> shape, Value value) {
    Tensor t = unwritten(number, shape);
    for (int64_t i = 0; i < t.elements; ++i) t.store(i, double(value(i)));
    return t;
  }
  Tensor unwritten(Number number, std::vector<int64_t> shape) {
    Tensor t{nullptr, number, int(shape.size()), {}, {}, 1};
    for (int d = t.dims - 1; d >= 0; --d)
      t.shape[d] = shape[size_t(d)], t.strides[d] = t.elements, t.elements *= t.shape[d];
    const size_t bytes = size_t(t.elements) * size_t(bytes_of(number));
    memory_.emplace_back(bytes + 2 * guard, std::byte{0xEE});
    t.data = memory_.back().data() + guard;
    return t;
  }
  bool operator==(const Pool&) const = default;

 private:
  static constexpr size_t guard = 64;
  std::deque<std::vector<std::byte>> memory_;
};

struct Variant {
  int64_t rows = 1, columns = 1;
  bool wide = false;
  Number number() const { return wide ? Number::f64 : Number::f32; }
};

// Small integers that look like none of the others of another `seed`.
auto integers(int seed) {
  return [seed](int64_t i) { return (i * 7 + i / 5 + seed * 3) % 5 - 2; };
}
auto halves(int seed) {
  return [seed](int64_t i) { return double((i * 3 + i / 7 + seed) % 7 - 3) / 2; };
}
auto all(double value) {
  return [value](int64_t) { return value; };
}
// 0 and what has no exponential, at least one 0 in a row.
auto scores(int64_t columns) {
  return [columns](int64_t i) { return i % columns == 0 || i % 3 == 0 ? 0 : -2000; };
}
// Rows whose mean is 0.
auto balanced(int64_t columns) {
  return [columns](int64_t i) {
    const int64_t j = i % columns;
    if (columns % 2 && j == columns - 1) return int64_t(0);
    return (j % 2 ? -1 : 1) * (j / 2 % 3 + 1);
  };
}

// ---- An example of each body, by size and type of its sums

void example(Pool& p, const Variant& v, Convert& b) {
  b = {p.tensor(Number::f32, {v.rows, v.columns}, halves(1)),
       p.unwritten(v.wide ? Number::f32 : Number::bf16, {v.rows * v.columns})};
}
void example(Pool& p, const Variant& v, Fill& b) {
  b = {p.unwritten(v.number(), {v.rows, v.columns}), 2.5};
}
void example(Pool& p, const Variant& v, Scale& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.unwritten(Number::f16, {v.rows, v.columns}), 3, 7};
}
void example(Pool& p, const Variant& v, Combine& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(Number::bf16, {v.rows, v.columns}, integers(2)),
       p.unwritten(v.number(), {v.rows, v.columns}), 0.3};
}
void example(Pool& p, const Variant& v, AddRow& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(v.number(), {v.columns}, integers(2)), p.unwritten(v.number(), {v.rows, v.columns}),
       v.columns, v.wide};
}
void example(Pool& p, const Variant& v, Dropout& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(v.number(), {v.rows, v.columns}, integers(2)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       0.75,
       7,
       1000,
       3,
       1,
       v.wide};
}
void example(Pool& p, const Variant& v, InitialValues& b) {
  b = {p.unwritten(v.number(), {v.rows, v.columns}), 7, 2};
}
void example(Pool& p, const Variant& v, ColumnSums& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, integers(1)), p.unwritten(v.number(), {v.columns}),
       v.wide};
}

Gate gate(Pool& p, const Variant& v, Activation act) {
  return {p.tensor(v.number(), {v.rows, 2 * v.columns}, halves(1)), act, true, v.columns};
}
void example(Pool& p, const Variant& v, Activated& b) {
  b = {gate(p, v, Activation::silu), p.tensor(v.number(), {v.rows}, halves(2)),
       p.tensor(v.number(), {v.columns}, integers(3)), p.unwritten(v.number(), {v.rows, v.columns}),
       v.wide};
}
void example(Pool& p, const Variant& v, ActivatedSquares& b) {
  b = {gate(p, v, Activation::identity), p.unwritten(v.number(), {v.rows}), v.wide};
}
void example(Pool& p, const Variant& v, InverseRoot& b) {
  b = {p.tensor(v.number(), {v.rows}, [](int64_t i) { return i + 1; }),
       p.unwritten(v.number(), {v.rows}), 1e-5, v.wide};
}
void example(Pool& p, const Variant& v, AlongValue& b) {
  b = {gate(p, v, Activation::identity),
       p.tensor(v.number(), {v.rows, v.columns}, integers(2)),
       p.tensor(v.number(), {v.columns}, integers(3)),
       p.tensor(v.number(), {v.rows}, halves(4)),
       p.unwritten(v.number(), {v.rows}),
       v.wide};
}
void example(Pool& p, const Variant& v, GammaOfGate& b) {
  b = {gate(p, v, Activation::identity), p.tensor(v.number(), {v.rows, v.columns}, integers(2)),
       p.tensor(v.number(), {v.rows}, halves(3)), p.unwritten(v.number(), {v.columns}), v.wide};
}
void example(Pool& p, const Variant& v, ActivatedBackward& b) {
  b = {gate(p, v, Activation::gelu),
       p.tensor(v.number(), {v.rows, v.columns}, integers(2)),
       p.tensor(v.number(), {v.columns}, integers(3)),
       p.tensor(v.number(), {v.rows}, halves(4)),
       p.tensor(v.number(), {v.rows}, halves(5)),
       p.unwritten(v.number(), {v.rows, 2 * v.columns}),
       v.wide};
}

void example(Pool& p, const Variant& v, NormForward& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, balanced(v.columns)),
       p.tensor(v.number(), {v.columns}, integers(2)),
       p.tensor(v.number(), {v.columns}, halves(3)),
       p.unwritten(Number::bf16, {v.rows, v.columns}),
       p.unwritten(v.number(), {v.rows, 2}),
       v.columns,
       1e-5,
       true,
       v.wide};
}
Tensor statistics(Pool& p, const Variant& v) {
  return p.tensor(v.number(), {v.rows, 2}, [](int64_t i) { return i % 2 ? 0.5 : 1.0; });
}
void example(Pool& p, const Variant& v, NormBackward& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, integers(1)),
       p.tensor(v.number(), {v.columns}, integers(2)),
       statistics(p, v),
       p.tensor(v.number(), {v.rows, v.columns}, integers(3)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       v.columns,
       true,
       v.wide};
}
void example(Pool& p, const Variant& v, NormParameter& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, integers(1)),
       statistics(p, v),
       p.tensor(v.number(), {v.rows, v.columns}, integers(2)),
       p.unwritten(v.number(), {v.columns}),
       v.rows / 3,
       v.wide};
}

void example(Pool& p, const Variant& v, SumOfSquares& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(Number::bf16, {v.columns}, integers(2)), p.unwritten(Number::f64, {})};
}
void example(Pool& p, const Variant& v, SquareRoot& b) {
  b = {p.tensor(Number::f64, {v.rows}, [](int64_t i) { return i; }),
       p.unwritten(v.number(), {v.rows})};
}
void example(Pool& p, const Variant& v, Clipped& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)), p.tensor(Number::f64, {}, all(9)),
       p.unwritten(v.number(), {v.rows, v.columns}), 0.7};
}

primitives::StepNumbers step_numbers() {
  primitives::StepNumbers n;
  n.lr = 0.125, n.decay = 0.25, n.momentum = 0.5, n.beta1 = 0.9, n.beta2 = 0.95, n.eps = 0.001;
  n.correction1 = 0.271, n.correction2 = 0.142625;
  return n;
}
void example(Pool& p, const Variant& v, AdamStep& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, integers(1)),
       p.tensor(v.number(), {v.rows, v.columns}, halves(2)),
       p.tensor(v.number(), {v.rows, v.columns}, [](int64_t i) { return 1 + i % 5; }),
       p.tensor(v.number(), {v.rows, v.columns}, integers(3)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       p.unwritten(v.number(), {v.rows, v.columns}),
       p.unwritten(v.number(), {v.rows, v.columns}),
       step_numbers(),
       v.wide};
}
void example(Pool& p, const Variant& v, NotFinite& b) {
  const int64_t last = v.rows * v.columns - 1;
  b = {p.tensor(
           v.number(), {v.rows, v.columns},
           [last](int64_t i) { return i == last ? std::numeric_limits<double>::infinity() : i; }),
       p.unwritten(v.number(), {})};
}
void example(Pool& p, const Variant& v, MomentumStep& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, integers(1)),
       p.tensor(v.number(), {v.rows, v.columns}, halves(2)),
       p.tensor(v.number(), {v.rows, v.columns}, integers(3)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       p.unwritten(v.number(), {v.rows, v.columns}),
       step_numbers(),
       v.wide};
}
void example(Pool& p, const Variant& v, Normalised& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)), p.tensor(Number::f64, {}, all(9)),
       p.unwritten(v.number(), {v.rows, v.columns}), 4};
}

// Subnormals, ties and what is beyond the greatest number, of every sign.
auto of_all_sizes() {
  return [](int64_t i) { return std::ldexp(i * 37 % 31 - 15, int(i * 11 % 23) - 12); };
}
void example(Pool& p, const Variant& v, AbsoluteMaximum& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, of_all_sizes()), p.unwritten(v.number(), {v.rows}),
       v.columns, v.wide};
}
void example(Pool& p, const Variant& v, Scales& b) {
  b = {p.tensor(v.number(), {v.rows}, [](int64_t i) { return i % 5 * 0.75; }),
       p.unwritten(v.number(), {v.rows}), 448, v.columns % 2 == 0, v.wide};
}
void example(Pool& p, const Variant& v, Quantise& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, of_all_sizes()),
       p.tensor(v.number(), {v.rows}, [](int64_t i) { return 3 + i % 4; }),
       p.unwritten(Number::i32, {words_of(v.rows * v.columns)}),
       v.rows % 2 ? e4m3 : e5m2,
       v.columns,
       v.wide};
}
void example(Pool& p, const Variant& v, Dequantise& b) {
  const int64_t own = (v.rows + 1) / 2 * v.columns, blocks = 2;
  b = {p.tensor(Number::i32, {blocks * words_of(own)},
                [](int64_t i) { return double(int32_t(uint32_t(i * 2654435761))); }),
       p.tensor(v.number(), {v.rows}, [](int64_t i) { return 3 + i % 4; }),
       p.unwritten(Number::bf16, {v.rows, v.columns}),
       e5m2,
       own,
       v.columns,
       v.wide};
}

void example(Pool& p, const Variant& v, RotaryPairs& b) {
  const int64_t dim = 2 * v.columns, heads = 3;
  b = {p.tensor(v.number(), {v.rows, heads, dim}, halves(1)),
       p.tensor(Number::i64, {v.rows}, [](int64_t i) { return 5 * i; }),
       p.unwritten(v.number(), {v.rows, heads, dim}),
       heads,
       dim,
       10000,
       -1,
       v.wide};
}

// A row of two sequences: of one the third token begins a document, of the other the fourth is
// padding.
Tensor reach(Pool& p, const Variant& v) {
  return p.tensor(Number::i64, {2 * v.rows}, [](int64_t t) {
    const int64_t row = t / 2;
    if (t % 2) return row == 3 ? int64_t(-1) : row > 3 ? row - 4 : row;
    return row < 2 ? row + 5 : row - 2;
  });
}
constexpr int64_t conv_width = 3;
void example(Pool& p, const Variant& v, ConvForward& b) {
  b = {p.tensor(v.number(), {v.rows + conv_width - 1, 2, v.columns}, halves(1)),
       p.tensor(v.number(), {v.columns, conv_width}, integers(2)),
       p.tensor(v.number(), {v.columns}, integers(3)),
       reach(p, v),
       p.unwritten(v.number(), {v.rows, 2, v.columns}),
       v.columns,
       conv_width,
       2,
       v.wide};
}
void example(Pool& p, const Variant& v, ConvInput& b) {
  b = {p.tensor(v.number(), {v.rows, 2, v.columns}, halves(1)),
       p.tensor(v.number(), {v.columns, conv_width}, integers(2)),
       reach(p, v),
       p.unwritten(v.number(), {v.rows + conv_width - 1, 2, v.columns}),
       v.columns,
       conv_width,
       2,
       v.wide};
}
void example(Pool& p, const Variant& v, ConvParameter& b) {
  b = {p.tensor(v.number(), {v.rows + conv_width - 1, 2, v.columns}, halves(1)),
       p.tensor(v.number(), {v.rows, 2, v.columns}, integers(2)),
       reach(p, v),
       p.unwritten(v.number(), {v.columns, conv_width}),
       v.columns,
       conv_width,
       2,
       v.wide};
}

// Two sequences, one head, d_k = 2.
constexpr int64_t keys_of_state = 2;
Chunk chunk(Pool& p, const Variant& v) {
  return {p.tensor(v.number(), {2 * v.rows, 1}, [](int64_t i) { return i % 3 ? 1 : -1; }),
          reach(p, v),
          2,
          1,
          keys_of_state,
          v.columns};
}
Tensor of_tokens(Pool& p, const Variant& v, int64_t features, int seed) {
  return p.tensor(v.number(), {2 * v.rows, 1, features}, integers(seed));
}
Tensor of_states(Pool& p, const Variant& v, int64_t states, int seed) {
  return p.tensor(v.number(), {states, keys_of_state, v.columns}, integers(seed));
}
Tensor unwritten_states(Pool& p, const Variant& v, int64_t states) {
  return p.unwritten(v.number(), {states, keys_of_state, v.columns});
}
template <class Recurrence>
Recurrence recurrence(Pool& p, const Variant& v) {
  return {chunk(p, v),
          of_tokens(p, v, keys_of_state, 1),
          of_tokens(p, v, v.columns, 2),
          of_states(p, v, 2, 3),
          unwritten_states(p, v, 2 * v.rows),
          unwritten_states(p, v, 2),
          v.wide};
}
void example(Pool& p, const Variant& v, States& b) { b = recurrence<States>(p, v); }
void example(Pool& p, const Variant& v, Adjoints& b) { b = recurrence<Adjoints>(p, v); }
// Exponentials of 0 and of what is far below, or products.
void example(Pool& p, const Variant& v, DecayOfLogarithm& b) {
  const bool product = v.rows % 2;
  b = {p.tensor(v.number(), {2 * v.rows, v.columns},
                [product](int64_t i) { return product ? i % 5 - 2
                                              : i % 3 ? 0
                                                      : -2000; }),
       product ? p.tensor(v.number(), {2 * v.rows, v.columns}, halves(2)) : Tensor{},
       p.unwritten(v.number(), {2 * v.rows, v.columns}), v.wide};
}
void example(Pool& p, const Variant& v, ChunkDecay& b) {
  b = {chunk(p, v), p.unwritten(v.number(), {2}), v.wide};
}
void example(Pool& p, const Variant& v, FoldStates& b) {
  b = {p.tensor(v.number(), {4, 3 * v.columns}, integers(1)),
       p.tensor(v.number(), {4, 3}, integers(2)),
       p.tensor(Number::i64, {4}, [](int64_t c) { return c != 2; }),
       p.tensor(Number::i64, {4}, [](int64_t i) { return 3 - i; }),
       p.unwritten(v.number(), {3 * v.columns}),
       v.columns,
       v.wide};
}
void example(Pool& p, const Variant& v, StateProduct& b) {
  const bool turned = v.rows % 2;
  b = {of_states(p, v, 2 * v.rows, 1),
       of_tokens(p, v, turned ? keys_of_state : v.columns, 2),
       reach(p, v),
       p.unwritten(Number::bf16, {2 * v.rows, 1, turned ? v.columns : keys_of_state}),
       1,
       keys_of_state,
       v.columns,
       turned,
       v.wide};
}
void example(Pool& p, const Variant& v, DecayGradient& b) {
  b = {chunk(p, v),
       of_states(p, v, 2 * v.rows, 1),
       of_states(p, v, 2 * v.rows, 2),
       of_states(p, v, 2, 3),
       p.unwritten(v.number(), {2 * v.rows, 1}),
       v.wide};
}
DeltaRule delta_rule(Pool& p, const Variant& v) {
  const bool by_channel = v.rows % 2;
  DeltaRule rule{chunk(p, v), of_tokens(p, v, keys_of_state, 4), of_tokens(p, v, 1, 5),
                 by_channel ? keys_of_state : 1};
  if (by_channel)
    rule.chunk.a = p.tensor(v.number(), {2 * v.rows, 1, keys_of_state},
                            [](int64_t i) { return i % 3 ? 1 : -1; });
  // Keys of one feature at a time, and steps of 0 and 2: a state is mirrored, and does not grow.
  rule.k = p.tensor(v.number(), {2 * v.rows, 1, keys_of_state},
                    [](int64_t i) { return (i + i / 6) % 2; });
  rule.b = p.tensor(v.number(), {2 * v.rows, 1}, [](int64_t i) { return i % 5 ? 2 : 0; });
  return rule;
}
void example(Pool& p, const Variant& v, DeltaStates& b) {
  const bool of_matrix = v.columns == keys_of_state;
  b = {delta_rule(p, v),
       of_matrix ? Tensor{} : of_tokens(p, v, v.columns, 1),
       of_matrix ? Tensor{} : of_states(p, v, 2, 2),
       unwritten_states(p, v, 2 * v.rows),
       unwritten_states(p, v, 2),
       v.columns,
       v.wide};
}
void example(Pool& p, const Variant& v, DeltaAdjoints& b) {
  b = {delta_rule(p, v),
       of_tokens(p, v, keys_of_state, 1),
       of_tokens(p, v, v.columns, 2),
       of_states(p, v, 2, 3),
       unwritten_states(p, v, 2 * v.rows),
       unwritten_states(p, v, 2),
       v.wide};
}
void example(Pool& p, const Variant& v, TakeThrough& b) {
  b = {p.tensor(v.number(), {v.rows, keys_of_state, keys_of_state}, integers(1)),
       of_states(p, v, v.rows, 2),
       of_states(p, v, v.rows, 3),
       unwritten_states(p, v, v.rows),
       keys_of_state,
       v.columns,
       v.rows % 2 == 0,
       v.wide};
}
void example(Pool& p, const Variant& v, DeltaErrors& b) {
  b = {delta_rule(p, v),
       of_tokens(p, v, v.columns, 1),
       of_states(p, v, 2, 2),
       of_states(p, v, 2 * v.rows, 3),
       of_states(p, v, 2 * v.rows, 4),
       p.unwritten(v.number(), {2 * v.rows, 1, v.columns}),
       p.unwritten(v.number(), {2 * v.rows, 1, v.columns}),
       p.unwritten(Number::bf16, {2 * v.rows, 1, v.columns}),
       v.wide};
}
void example(Pool& p, const Variant& v, DeltaKeys& b) {
  b = {delta_rule(p, v),
       of_states(p, v, 2, 1),
       of_states(p, v, 2 * v.rows, 2),
       of_states(p, v, 2 * v.rows, 3),
       of_tokens(p, v, v.columns, 6),
       of_tokens(p, v, v.columns, 7),
       p.unwritten(v.number(), {2 * v.rows, 1, keys_of_state}),
       p.unwritten(v.number(), {2 * v.rows, 1, keys_of_state}),
       v.wide};
}
void example(Pool& p, const Variant& v, DeltaSteps& b) {
  b = {of_tokens(p, v, v.columns, 1),
       of_tokens(p, v, v.columns, 2),
       of_tokens(p, v, keys_of_state, 3),
       p.unwritten(v.number(), {2 * v.rows, 1}),
       v.rows % 2 ? Tensor{} : p.unwritten(v.number(), {2 * v.rows, 1}),
       keys_of_state,
       v.columns,
       v.wide};
}

// Every third token predicts nothing.
Predictions predictions(Pool& p, const Variant& v) {
  const int64_t rows = v.rows, columns = v.columns;
  return {
      p.tensor(v.number(), {rows, columns}, scores(columns)),
      p.tensor(Number::i64, {rows}, [=](int64_t t) { return t * 5 % columns; }),
      p.tensor(Number::i64, {rows}, [=](int64_t t) { return t % 3 == 2 ? -1 : (t + 1) % rows; }),
      p.tensor(v.number(), {rows}, [](int64_t t) { return 1 + t % 2; }), columns};
}
void example(Pool& p, const Variant& v, TokenLoss& b) {
  b = {predictions(p, v), p.unwritten(v.number(), {v.rows}), v.wide};
}
void example(Pool& p, const Variant& v, LossSums& b) {
  const Predictions of = predictions(p, v);
  b = {p.tensor(v.number(), {v.rows}, integers(1)), of.next, of.weights,
       p.unwritten(v.number(), {2}), v.wide};
}
void example(Pool& p, const Variant& v, LossMean& b) {
  b = {p.tensor(v.number(), {2}, all(3)), p.unwritten(v.number(), {})};
}
void example(Pool& p, const Variant& v, LossGradient& b) {
  b = {predictions(p, v),
       p.tensor(v.number(), {}, all(2)),
       p.tensor(v.number(), {2}, all(3)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       2,
       v.wide};
}

// Half of the ids are of another rank, some are ignored.
OwnIds ids(Pool& p, const Variant& v, int64_t own) {
  return {p.tensor(Number::i32, {v.rows},
                   [own](int64_t t) { return t % 7 == 6 ? ignored_label : t * 3 % (2 * own); }),
          own / 2, own};
}
void example(Pool& p, const Variant& v, LookUp& b) {
  const int64_t own = 9;
  b = {ids(p, v, own), p.tensor(Number::bf16, {own, v.columns}, halves(1)),
       p.unwritten(Number::bf16, {v.rows, v.columns}), v.columns};
}
void example(Pool& p, const Variant& v, ScatterAdd& b) {
  const int64_t own = 9;
  b = {ids(p, v, own), p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.unwritten(v.number(), {own, v.columns}), v.columns, v.wide};
}
void example(Pool& p, const Variant& v, ShardMaximum& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, [](int64_t i) { return i * 37 % 101; }),
       p.unwritten(v.number(), {v.rows}), v.columns, v.wide};
}
void example(Pool& p, const Variant& v, ShardSums& b) {
  b = {ids(p, v, v.columns),
       p.tensor(v.number(), {v.rows, v.columns}, scores(v.columns)),
       p.tensor(v.number(), {v.rows}, all(0)),
       p.unwritten(v.number(), {v.rows}),
       p.unwritten(v.number(), {v.rows}),
       p.unwritten(v.number(), {v.rows}),
       v.wide};
}
void example(Pool& p, const Variant& v, ShardExps& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, scores(v.columns)),
       p.tensor(v.number(), {v.rows}, all(0)), p.unwritten(v.number(), {v.rows}), v.columns,
       v.wide};
}
void example(Pool& p, const Variant& v, LogProbabilities& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(v.number(), {v.rows}, all(2)),
       p.tensor(v.number(), {v.rows}, all(4)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       v.columns,
       v.wide};
}
void example(Pool& p, const Variant& v, CotangentSum& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(2)), p.unwritten(v.number(), {v.rows}),
       v.columns, v.wide};
}
void example(Pool& p, const Variant& v, LogSoftmaxGradient& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(v.number(), {v.rows, v.columns}, halves(2)),
       p.tensor(v.number(), {v.rows}, all(2)),
       p.tensor(v.number(), {v.rows}, all(4)),
       p.tensor(v.number(), {v.rows}, halves(3)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       v.columns,
       v.wide};
}
void example(Pool& p, const Variant& v, LossOfShards& b) {
  b = {ids(p, v, 9),
       p.tensor(v.number(), {v.rows}, [](int64_t t) { return t + 1; }),
       p.tensor(v.number(), {v.rows}, halves(1)),
       p.tensor(v.number(), {v.rows}, halves(2)),
       p.unwritten(v.number(), {v.rows}),
       0.1,
       9,
       v.wide};
}
void example(Pool& p, const Variant& v, ShardGradient& b) {
  b = {ids(p, v, v.columns),
       p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(v.number(), {v.rows}, halves(2)),
       p.tensor(v.number(), {v.rows}, all(1.5)),
       p.tensor(v.number(), {v.rows}, all(7)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       0.1,
       double(v.columns),
       v.wide};
}

void example(Pool& p, const Variant& v, ShardScores& b) {
  b = {ids(p, v, v.columns),
       p.tensor(v.number(), {v.rows, v.columns}, scores(v.columns)),
       p.tensor(v.number(), {v.rows}, all(0)),
       p.unwritten(v.number(), {v.rows}),
       p.unwritten(v.number(), {v.rows}),
       p.unwritten(v.number(), {v.rows}),
       0.75,
       v.wide};
}
void example(Pool& p, const Variant& v, TokenLogProbs& b) {
  b = {ids(p, v, 9),
       p.tensor(v.number(), {v.rows}, [](int64_t t) { return t + 1; }),
       p.tensor(v.number(), {v.rows}, halves(1)),
       p.tensor(v.number(), {v.rows}, halves(2)),
       p.unwritten(v.number(), {v.rows}),
       p.unwritten(v.number(), {v.rows}),
       v.wide};
}
void example(Pool& p, const Variant& v, LogProbGradient& b) {
  b = {ids(p, v, v.columns),
       p.tensor(v.number(), {v.rows, v.columns}, halves(1)),
       p.tensor(v.number(), {v.rows}, halves(2)),
       p.tensor(v.number(), {v.rows}, halves(3)),
       p.tensor(v.number(), {v.rows}, all(2)),
       p.tensor(v.number(), {v.rows}, all(4)),
       p.tensor(v.number(), {v.rows}, all(-3)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       0.75,
       0.5,
       v.wide};
}

// Every fifth index is none.
auto some_of(int64_t count) {
  return [count](int64_t i) { return i % 5 == 4 ? -1 : i * 3 % count; };
}
void example(Pool& p, const Variant& v, TakeRows& b) {
  b = {p.tensor(Number::bf16, {11, v.columns}, halves(1)),
       p.tensor(Number::i64, {v.rows}, some_of(11)), p.unwritten(Number::bf16, {v.rows, v.columns}),
       v.columns};
}
void example(Pool& p, const Variant& v, WeighedRows& b) {
  b = {p.tensor(v.number(), {11, v.columns}, halves(1)),
       p.tensor(v.number(), {22}, halves(2)),
       p.tensor(Number::i64, {v.rows}, some_of(22)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       v.columns,
       2,
       v.wide};
}
void example(Pool& p, const Variant& v, RowsOfToken& b) {
  b = {p.tensor(v.number(), {11, v.columns}, halves(1)),
       p.tensor(Number::i64, {2 * v.rows}, some_of(11)),
       p.tensor(v.number(), {2 * v.rows}, halves(2)),
       p.unwritten(v.number(), {v.rows, v.columns}),
       v.columns,
       2,
       v.wide};
}
void example(Pool& p, const Variant& v, ProbGradient& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, integers(1)),
       p.tensor(v.number(), {11, v.columns}, integers(2)),
       p.tensor(Number::i64, {2 * v.rows}, some_of(11)),
       p.unwritten(v.number(), {2 * v.rows}),
       v.columns,
       2,
       v.wide};
}

// Two heads on one key head; two documents, the second row of either end without any.
AttentionPairs pairs(Pool& p, const Variant& v, int64_t queries, int64_t keys) {
  const auto label = [](int64_t i) { return i % 2 ? i / 2 : i / 2 == 1 ? -1 : i / 2 % 5 == 4; };
  AttentionPairs of;
  of.heads = 2, of.key_dim = 3, of.value_dim = v.columns;
  of.q = p.tensor(v.number(), {queries, of.heads, of.key_dim}, all(1));
  of.k = p.tensor(v.number(), {keys, 1, of.key_dim},
                  [](int64_t i) { return i / 3 % 4 == 3 ? -1000 : 0; });
  of.v = p.tensor(v.number(), {keys, 1, of.value_dim}, integers(1));
  of.queries = p.tensor(Number::i64, {queries, 2}, label);
  of.keys = p.tensor(Number::i64, {keys, 2}, label);
  of.mask.causal = true, of.factors = v.number();
  return of;
}
void example(Pool& p, const Variant& v, AttendBlock& b) {
  const int64_t rows = 2 * v.rows;
  b = {pairs(p, v, v.rows, 70), p.tensor(v.number(), {rows}, all(0)),
       p.tensor(v.number(), {rows}, all(2)), p.tensor(v.number(), {rows, v.columns}, integers(2))};
}
void example(Pool& p, const Variant& v, AttentionOutput& b) {
  b = {p.tensor(v.number(), {v.rows}, halves(1)),
       p.tensor(v.number(), {v.rows}, [](int64_t i) { return i % 3; }),
       p.tensor(v.number(), {v.rows, v.columns}, integers(2)),
       p.unwritten(Number::bf16, {v.rows, v.columns}),
       p.unwritten(v.number(), {v.rows}),
       p.unwritten(v.number(), {v.rows, v.columns}),
       p.unwritten(v.number(), {v.rows}),
       v.columns,
       v.wide};
}
void example(Pool& p, const Variant& v, AttentionDelta& b) {
  b = {p.tensor(v.number(), {v.rows, v.columns}, integers(1)),
       p.tensor(v.number(), {v.rows, v.columns}, integers(2)),
       p.tensor(v.number(), {v.rows}, halves(3)),
       p.unwritten(v.number(), {v.rows}),
       v.columns,
       v.wide};
}
AttentionPull pull(Pool& p, const Variant& v, int64_t queries, int64_t keys) {
  return {pairs(p, v, queries, keys), p.tensor(v.number(), {queries, 2, v.columns}, integers(2)),
          p.tensor(v.number(), {2 * queries}, all(0)),
          p.tensor(v.number(), {2 * queries}, integers(3))};
}
void example(Pool& p, const Variant& v, QueryGradient& b) {
  b = {pull(p, v, v.rows, 70), p.tensor(v.number(), {v.rows, 2, 3}, integers(4))};
}
void example(Pool& p, const Variant& v, KeyGradient& b) {
  b = {pull(p, v, 35, v.rows), p.tensor(v.number(), {v.rows, 1, 3}, integers(4))};
}
void example(Pool& p, const Variant& v, ValueGradient& b) {
  b = {pull(p, v, 35, v.rows), p.tensor(v.number(), {v.rows, 1, v.columns}, integers(5))};
}

// ---- Kernels against loops

std::vector<Schedule> schedules() {
  return {{Order::ascending, 0, true}, {Order::descending, 0}, {Order::shuffled, 1},
          {Order::shuffled, 2},        {Order::torn, 3},       {Order::torn, 4, true}};
}

template <class Body>
Body made(Pool& p, const Variant& v) {
  Body body;
  example(p, v, body);
  return body;
}

template <class Body>
void agrees_with_its_loop(const Variant& v) {
  Pool due;
  ASSERT_EQ(executor::launch(made<Body>(due, v), nullptr), 0);
  for (const Schedule& s : schedules()) {
    set_schedule(s);
    Pool met;
    ASSERT_EQ(kernels_executor::launch(made<Body>(met, v), nullptr), 0) << complaint();
    EXPECT_TRUE(met == due) << v.rows << " x " << v.columns << (v.wide ? ", wide" : "")
                            << ", schedule " << int(s.order) << " " << s.seed;
  }
}

// One thread, a tail of a block and of a warp, more than a block, more than two tiles of columns.
#define SHARDPROOF_AGREES(Body)                                                           \
  TEST(Kernels, Body##AgreesWithItsLoop) {                                                \
    for (bool wide : {false, true})                                                       \
      for (auto [rows, columns] : {std::pair(1, 1), {3, 300}, {37, 9}, {2, 70}, {9, 32}}) \
        agrees_with_its_loop<Body>({rows, columns, wide});                                \
  }
SHARDPROOF_BODIES(SHARDPROOF_AGREES)
#undef SHARDPROOF_AGREES

TEST(Kernels, NothingIsNoLaunch) {
  EXPECT_EQ(kernels_executor::launch(Fill{}, nullptr), 0);
  EXPECT_EQ(kernels_executor::launch(ShardMaximum{}, nullptr), 0);
  EXPECT_EQ(kernels_executor::launch(ColumnSums{}, nullptr), 0);
}

// As many blocks as a launch takes and some more: each block has a first part, and some a second,
// which differs from it. In descending order the threads that read what the others have left come
// last.
constexpr int64_t most = KERNELS_MOST_BLOCKS;
double by_place(int64_t i) { return double(i % 61); }
void is_by_place(const Tensor& t, double factor) {
  for (int64_t i = 0; i < t.elements; ++i) ASSERT_EQ(t.load(i), factor * by_place(i)) << i;
}

TEST(Strides, OfElements) {
  set_schedule({Order::descending, 0});
  Pool p;
  const int64_t elements = most * 256 + 300;
  const Tensor from = p.tensor(Number::bf16, {elements}, by_place),
               to = p.unwritten(Number::bf16, {elements});
  ASSERT_EQ(kernels_executor::launch(Convert{from, to}, nullptr), 0);
  is_by_place(to, 1);
}
TEST(Strides, OfColumns) {
  set_schedule({Order::descending, 0});
  Pool p;
  const int64_t columns = most * 32 + 40;
  const Tensor g = p.tensor(Number::bf16, {3, columns},
                            [=](int64_t i) { return by_place(i % columns); }),
               sums = p.unwritten(Number::bf16, {columns});
  ASSERT_EQ(kernels_executor::launch(ColumnSums{g, sums, false}, nullptr), 0) << complaint();
  is_by_place(sums, 3);
}
TEST(Strides, OfRows) {
  set_schedule({Order::descending, 0});
  Pool p;
  const int64_t rows = most + 2;
  const Tensor z = p.tensor(Number::bf16, {rows}, by_place),
               greatest = p.unwritten(Number::bf16, {rows});
  ASSERT_EQ(kernels_executor::launch(ShardMaximum{z, greatest, 1, false}, nullptr), 0);
  is_by_place(greatest, 1);
}

// ---- Broken kernels are wrong here, too

TEST(Twins, AGridOfWholeWarpsLeavesTheTail) {
  Pool p;
  const Tensor from = p.tensor(Number::f32, {100}, all(1)),
               to = p.tensor(Number::f32, {100}, all(7));
  ASSERT_EQ(kernels_executor::launch(CopyWithoutTail{{from, to}}, nullptr), 0);
  EXPECT_EQ(to.load(95), 1);
  for (int64_t i = 96; i < 100; ++i) EXPECT_EQ(to.load(i), 7) << i;
}

TEST(Twins, ADenseReadOfAStridedViewTakesTheGaps) {
  Pool p;
  Tensor from = p.tensor(Number::f32, {8}, [](int64_t i) { return i; });
  from.shape[0] = from.elements = 4, from.strides[0] = 2;  // 0, 2, 4, 6
  const Tensor to = p.unwritten(Number::f32, {4});
  ASSERT_EQ(kernels_executor::launch(CopyDense{{from, to}}, nullptr), 0);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(to.load(i), i);
  ASSERT_EQ(kernels_executor::launch(Convert{from, to}, nullptr), 0);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(to.load(i), 2 * i);
}

// Two rows 4 GiB apart, of which two pages exist.
TEST(Twins, OffsetsIn32BitsWrap) {
  constexpr int64_t apart = int64_t(1) << 29;  // elements of 8 bytes
  const size_t bytes = size_t(apart) * 8 + 4096;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 4 GiB of addresses";
  Pool p;
  const Tensor from = p.tensor(Number::f64, {4}, [](int64_t i) { return i + 1; }),
               to{memory, Number::f64, 2, {2, 2}, {apart, 1}, 4};
  set_schedule({Order::ascending, 0});
  ASSERT_EQ(kernels_executor::launch(CopyNarrowOffset{{from, to}}, nullptr), 0);
  EXPECT_EQ((std::vector{to.load(0), to.load(1), to.load(2), to.load(3)}),
            (std::vector<double>{3, 4, 0, 0}));
  ASSERT_EQ(kernels_executor::launch(Convert{from, to}, nullptr), 0);
  EXPECT_EQ((std::vector{to.load(0), to.load(1), to.load(2), to.load(3)}),
            (std::vector<double>{1, 2, 3, 4}));
  ::munmap(memory, bytes);
}

// The healthy norm of the same rows is right under every schedule, this one under none; where it is
// watched it is stopped.
TEST(Twins, ASumWithoutABarrierIsWrongUnderEverySchedule) {
  constexpr int launch_failure = 719;
  for (bool wide : {false, true}) {
    const Variant v{5, 300, wide};
    Pool due;
    ASSERT_EQ(executor::launch(made<NormForward>(due, v), nullptr), 0);
    for (const Schedule& s : schedules()) {
      set_schedule(s);
      Pool met;
      const int code =
          kernels_executor::launch(NormWithoutBarrier{made<NormForward>(met, v)}, nullptr);
      EXPECT_EQ(code, s.watched && can_watch() ? launch_failure : 0) << complaint();
      EXPECT_FALSE(met == due) << "schedule " << int(s.order) << " " << s.seed;
    }
  }
}

}  // namespace
}  // namespace shardproof::primitives
