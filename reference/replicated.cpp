#include "reference/replicated.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace shardproof::reference {

double global_norm(const std::vector<In>& gradients) {
  double squares = 0;
  for (In g : gradients)
    for (double x : g) squares += x * x;
  return std::sqrt(squares);
}

double clip_factor(double norm, double limit) { return std::min(1.0, limit / (norm + 1e-6)); }

std::vector<int64_t> grouped_rows(const Heads& h) {
  if (h.kv_heads < 1 || h.heads % h.kv_heads != 0)
    throw std::invalid_argument("reference heads: expected heads divisible by kv_heads");
  const int64_t shared = h.heads / h.kv_heads, keys = h.query_rows(), values = keys + h.key_rows();
  std::vector<int64_t> order;
  auto head = [&](int64_t first) {
    for (int64_t i = 0; i < h.dim; ++i) order.push_back(first + i);
  };
  for (int64_t group = 0; group < h.kv_heads; ++group) {
    for (int64_t j = 0; j < shared; ++j) head((group * shared + j) * h.dim);
    head(keys + group * h.dim);
    head(values + group * h.dim);
  }
  return order;
}

}  // namespace shardproof::reference
