// What the contracts of the pipeline family share: layers on stages, microbatches, calls.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "reference/stack.hpp"
#include "suites/linear.hpp"

namespace shardproof::pipelines {

struct Shape {
  int64_t stages, chunks, layers, hidden, tokens, size, microbatches;  // tokens: own ones
  bool turns;  // the second half of the chunks goes back from the last stage to the first

  explicit Shape(const Case&);
  int64_t stage_of_chunk(int64_t chunk) const;
  // Chunks of equal length but for the first ones, which have one layer more.
  int64_t chunk_of(int64_t layer) const;
  int64_t stage_of(int64_t layer) const { return stage_of_chunk(chunk_of(layer)); }
  int64_t layers_of(int64_t stage) const;
  int64_t elements_of(int64_t microbatch) const;
};

int stage_of_rank(const Case&, int rank);

std::string numbered(const char* name, int64_t i);
Layout on_stage(int64_t stage, const Placement& dp);
// w0, b0, w1, ..: parameters as the operands have them.
void add_layers(const Shape&, std::vector<Operand>&);
// From the operands x, w0, b0, ..
reference::StackInputs stack_of(const Case&, std::span<const Whole> inputs);

// What `first` is of, then weight and bias of every layer.
template <class All, class Part>
std::vector<Part> in_order(All& all, Part& first) {
  std::vector<Part> list{std::move(first)};
  for (size_t l = 0; l < all.w.size(); ++l) {
    list.push_back(std::move(all.w[l]));
    list.push_back(std::move(all.b[l]));
  }
  return list;
}

// Integers of which so many sums of products, through so many layers, are exact.
std::optional<int64_t> range_of_layers(const Case&, int64_t terms, int64_t layers, int factors);
// The same of a stack whose gradients sum over so many tokens.
std::optional<int64_t> range_of_stack(const Case&, int64_t tokens);
// Gradients of x and of every layer, from a cotangent.
std::vector<Gauge> gauges_of_gradients(const Case&, const reference::StackInputs&,
                                       const reference::Uncertain& cotangent);
reference::Rounding rounding_of(const Case&, const Precision&);

void add_call(std::vector<Traffic>& due, Traffic call, const char* label, int hop = 0);
int64_t elements_of_layers(const Case&, int rank);  // of parameters of a rank's stage
// Products of a stage, those of gradients as a backward or within the step.
std::vector<Gemm> gemms_of_stage(const Case&, int rank, bool backward);

Key local_grad_key();
// tokens, hidden, layers, micro_batch_size, virtual
std::vector<Key> keys_of_layers(const char* layers_by_default);

}  // namespace shardproof::pipelines
