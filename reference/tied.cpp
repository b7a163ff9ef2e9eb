#include "reference/tied.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "reference/embedding.hpp"

namespace shardproof::reference {
namespace {

StackInputs stack_of(const TiedInputs& in, In x) {
  return {int64_t(in.ids.size()), in.hidden, x, in.w, in.b};
}
LinearShape head(const TiedInputs& in) { return {int64_t(in.ids.size()), in.hidden, in.vocab}; }

int64_t most_of_one_id(const std::vector<int64_t>& ids) {
  std::map<int64_t, int64_t> count;
  int64_t most = 1;
  for (int64_t id : ids) most = std::max(most, ++count[id]);
  return most;
}

Uncertain stored(Values value, Values error, const Rounding& r) {
  Uncertain x{std::move(value), std::move(error)};
  store(x, r);
  return x;
}

}  // namespace

Values tied(const TiedInputs& in) {
  const Values x = embedding(in.table, in.ids, in.hidden);
  return linear(head(in), stack(stack_of(in, x)), in.table, {});
}

TiedGradients tied_backward(const TiedInputs& in, In g) {
  const Values x = embedding(in.table, in.ids, in.hidden);
  const StackInputs s = stack_of(in, x);
  LinearGradients logits = linear_backward(head(in), stack(s), in.table, g);
  StackGradients layers = stack_backward(s, logits.x);
  const Values rows = embedding_backward(in.ids, in.vocab, in.hidden, layers.x);
  for (size_t i = 0; i < rows.size(); ++i) logits.w[i] += rows[i];
  return {std::move(logits.w), std::move(layers.w), std::move(layers.b)};
}

Loss tied_loss(const TiedInputs& in, const Rounding& r) {
  const Values x = embedding(in.table, in.ids, in.hidden);
  const StackInputs s = stack_of(in, x);
  return linear_loss(head(in), stored(stack(s), stack_loss(s, r).error, r), in.table, {}, r);
}

TiedLosses tied_backward_loss(const TiedInputs& in, In g, const Rounding& r, int parts) {
  const Values x = embedding(in.table, in.ids, in.hidden);
  const StackInputs s = stack_of(in, x);
  const Uncertain last = stored(stack(s), stack_loss(s, r).error, r);
  LinearLosses logits = linear_backward_loss(head(in), last, in.table, certain(g), r);
  const Values dx = linear_backward(head(in), last.value, in.table, g).x;
  StackLosses layers = stack_backward_loss(s, stored(dx, std::move(logits.x.error), r), r);
  const Uncertain rows = stored(stack_backward(s, dx).x, std::move(layers.x.error), r);

  // Rows of one id are added up, and the two sums are added.
  const auto added = [&](const Values& v) {
    return embedding_backward(in.ids, in.vocab, in.hidden, v);
  };
  const double gamma = gamma_of(double(most_of_one_id(in.ids)) + 1, r.accumulate);
  const Values errors = added(factor_error(rows, gamma)), sizes = added(most(rows));
  Loss table = std::move(logits.w);
  for (size_t i = 0; i < table.error.size(); ++i) {
    table.magnitude[i] += sizes[i];
    table.error[i] += errors[i] + r.accumulate * (table.magnitude[i] + table.error[i] + errors[i]);
  }
  Rounding travels = r;
  travels.ranks = parts;
  return {reduced(std::move(table), travels), std::move(layers.w), std::move(layers.b)};
}

}  // namespace shardproof::reference
