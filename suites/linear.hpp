// What the contracts over [tokens, features] with weights share: keys, extents, layouts, gauges.
//
//   X, Y    [tokens, features], or [seq, batch, features] where seq is given; S(0) on dp and cp
//   weights R on dp and cp: their gradients stay partial there, since a layer sums over tp only
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "oracle/contract.hpp"
#include "reference/linear.hpp"

namespace shardproof::linears {

Key extent(const char* name, const char* fallback, int64_t low, const char* help,
           int64_t high = 1 << 24);
Key choice(const char* name, const char* fallback, std::vector<std::string> choices,
           const char* help);
Key toggle(const char* name, const char* fallback, const char* help);
// One of these words, the first where none is given.
Key choice(const char* name, std::vector<std::string> choices, const char* help);
Key share(const char* name, const char* fallback, const char* help);  // in [0, 1)
Key positive(const char* name, const char* fallback, const char* help);
std::vector<Key> token_keys();  // tokens seq batch
Key microbatches_key();
std::vector<int64_t> token_shape(const Case&, int64_t features);

Layout tokens_on(const Placement& tp);     // activations
Layout parameter_on(const Placement& tp);  // weights, biases
int last(const std::vector<int64_t>& shape);

// Extents on one rank: tokens of the dp x cp share, and how many tp ranks there are.
struct Local {
  int64_t p, tokens;  // T over dp and cp, before sp
  bool sp;
  explicit Local(const Case&);
};
DType wire_of(const Case&);
DType accumulation_of(const Case&);
DType loss_type(const Case&);  // of losses: f64 under f64, else f32
// Integers whose sums of `terms` products of so many factors stay exact in every type that a result
// passes: storage, accumulation, wire and gradients.
std::optional<int64_t> range_of_products(const Case&, int64_t terms, int factors = 2);

Traffic call(Op, bool backward, int64_t count, DType);

Whole whole(std::vector<int64_t> shape, reference::Values);
// Sums of |terms| and of squared terms: so many terms on a rank, so many ranks on the wire.
Gauge gauge(reference::Values magnitude, reference::Values squares, int64_t terms, int64_t reduced,
            bool independent = true);
// A list of what may be large. Braces would copy it.
template <class T, class... More>
std::vector<T> listed(T first, More... more) {
  std::vector<T> list;
  list.reserve(1 + sizeof...(more));
  list.push_back(std::move(first));
  (list.push_back(std::move(more)), ...);
  return list;
}
// A cotangent that is stacked over axes where it is partial: the sum that it denotes.
reference::Values sum_of_stack(const Whole&, int64_t elements);

// Accumulation length on a rank, and the ranks that a collective sums over.
struct Sums {
  int64_t terms, reduced;
};
// Y = X W^T + b and how its results come about. Parameters are inputs 1 and, where there is a bias,
// 2.
struct LinearSums {
  reference::LinearShape shape;
  Sums y, x, w, b;
};
// By ranks that have all of W and b: `own` tokens on a rank, and parameter gradients summed over
// `ranks`.
LinearSums on_own_tokens(const reference::LinearShape&, int64_t own, int64_t ranks);
std::vector<Whole> linear_forward(const LinearSums&, std::vector<int64_t> y,
                                  std::span<const Whole> in, std::vector<Gauge>*);
std::vector<Whole> linear_backward(const LinearSums&, std::span<const Whole> in,
                                   std::span<const Whole> cotangents, std::vector<Gauge>*);

// What one term of a sum can be off by, relatively, rounding by rounding: for sums whose parts pass
// several types.
class Relative {
 public:
  explicit Relative(const Case&);
  Relative sum(int64_t terms) const;  // of products or values, in the accumulation
  Relative rounded(DType) const;
  Relative stored() const;                            // in the storage type
  Relative reduced(int64_t ranks) const;              // parts on the wire
  Relative reduced(int64_t ranks, DType wire) const;  // nothing is rounded where one rank is
  // Of an element, in unit roundoffs of the accumulation.
  double of(double magnitude) const { return error_ * magnitude / p_.u_acc; }

 private:
  Relative with(double more) const;
  Relative on_wire(int64_t ranks, double u) const;
  Precision p_;
  double error_ = 0;
};
Gauge gauge_of(const Relative&, reference::Values magnitude);

// Calls over tp of a linear, and its products, where x and y lie as its contract says. Sums travel
// in `sums`, that of the row bias in `bias`.
std::vector<Traffic> column_calls(const Case&, DType sums);
std::vector<Traffic> row_calls(const Case&, DType sums, DType bias);
std::vector<Gemm> column_gemms(const Case&);
std::vector<Gemm> row_gemms(const Case&);

// Lines: every word list of `with` after every one of `heads`.
std::vector<std::string> crossed(const std::vector<std::string>& heads,
                                 const std::vector<std::string>& with);
std::vector<std::string> together(std::vector<std::vector<std::string>>);

}  // namespace shardproof::linears
