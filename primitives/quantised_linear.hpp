// Y = X W^T + b with factors in 8-bit floating point, forward and backward, on the ranks of tp.
// q is the rounding to E4M3 (of X and W) or to grad_format (of G, the cotangent of Y) and back.
//
//   forward   Y = q(X) q(W)^T + b
//   backward  dX = q(G) q(W), dW = q(G)^T q(X), straight through the roundings; db = sum of G as it
//             came. wgrad=high: dW = G^T X
//   column    W, b cut by rows; sp=on: X cut by tokens, gathered in codes, again in backward (dW);
//             dX all-reduced, or reduce-scattered to tokens
//   row       W, X cut by columns; Y all-reduced, or reduce-scattered; sp=on: G cut by tokens,
//             gathered in codes; db summed over tp
//   scales    greatest / amax of the whole tensor: amax is reduced (max) over tp where tp cuts it,
//             and over cp and dp where over=all. amax=shard: of the own shard, unless it is
//             gathered
//   history=h scales are greatest / the greatest of h amaxes of earlier steps, which are handed in
//             for X, W and G; the own step's, reduced as above, becomes the newest of the next
//             history, a result of X's and W's, the gradient of G's
//   block=B   B elements that a product sums share a scale; nothing is reduced, scales are
//             gathered. A product that sums over the other dim reads other codes, those of the
//             transpose.
//             weight_block=square: B x B elements of W share one, and both products read one copy
//
// Codes are dequantised to the accumulation type and multiplied there; sums between ranks travel in
// the wire type. The steps are virtual so that a variant replaces one of them.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "primitives/gemm.hpp"
#include "primitives/linear.hpp"
#include "primitives/recipe.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_quantised_linear(const Case&);

class QuantisedLinear : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  enum class Of : uint8_t { x, w, g };
  // The own part of a tensor in codes, in the order of the tensor or of its transpose.
  struct Codes {
    Kept words, scales;
    std::vector<int64_t> shape;  // of the tensor
    bool turned = false;
  };
  // What a product reads that sums over the last dim, and one that sums over the others.
  struct Copies {
    Codes along, across;  // without blocks there is one copy
    const Codes& over_first() const { return across.shape.empty() ? along : across; }
  };
  // Of amaxes, and where that of the next step goes.
  struct History {
    View given, next;
  };
  struct State : Saved {
    View given;      // X, for wgrad=high
    View g_history;  // of the cotangent that is to come
    Copies x, w;
  };

  virtual Recipe recipe(const Case&, Of) const;
  // Whether ranks of tp have parts of it by tokens, which they gather in codes.
  virtual bool gathered(const Case&, Of) const;
  virtual View in_order(const Case&, Of, const View& x, bool turned) const;
  virtual std::vector<Axis> reduced_over(const Case&, Of) const;
  virtual void own_amax(const Recipe&, Of, const View& x, const View& amax);
  virtual void reduce_amax(Rank&, Of, const std::vector<Axis>&, const View& own, const View& all);
  virtual View amax_of_history(Rank&, const Recipe&, Of, const View& history);
  virtual void roll(Of, const View& history, const View& amax, const View& next);
  virtual void scales_of(const Recipe&, Of, const View& amax, const View& scales);
  virtual void quantise(Rank&, const Recipe&, Of, const View& x, const View& scales,
                        const View& words);
  virtual void dequantise(Rank&, const Recipe&, Of, const View& words, const View& scales,
                          const View& y);
  virtual void gather_codes(Rank&, Of, const View& own, const View& all);
  virtual void gather_scales(Rank&, Of, const View& own, const View& all);
  virtual Copies copies(Rank&, Of, const View& x);
  // Values of the own part, or of what is gathered.
  virtual View values(Parallel&, Of, const Codes&);
  virtual void multiply(Parallel&, const Factor& a, const Factor& b, const View& c,
                        const View& bias = {});
  virtual void output(Parallel&, const View& x, const View& w, const View& b, const View& y);
  virtual void reduce_output(Parallel&, const View& z, const View& b, const View& y);
  virtual void input_gradient(Parallel&, const View& g, const View& w, const View& dx);
  virtual void reduce_input_gradient(Parallel&, const View& partial, const View& dx);
  virtual void weight_gradient(Parallel&, State&, const View& g, const View& dw);
  virtual View weight_gradient_input(Parallel&, State&);  // q(X), or X; of all own tokens
  virtual void bias_gradient(Parallel&, const View& g, const View& db);

  Codes codes(Rank&, Of, const View& x, bool turned);

 private:
  History histories_[3];  // of the forward or backward that runs
  View amax_of(Rank&, const Recipe&, Of, const View& x);
  void gradients_of(Parallel&, State&, const View& g, std::span<const View> gradients);
};

}  // namespace shardproof::primitives
