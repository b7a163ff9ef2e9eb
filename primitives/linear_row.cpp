#include "primitives/gemm.hpp"
#include "primitives/linear.hpp"
#include "primitives/linear_line.hpp"

namespace shardproof::primitives {

void RowParallel::forward(Parallel& p, const View& x, const View& w, const View& b, const View& y) {
  if (p.taken_apart()) return sum_blocks(p, x, w, b, y);
  const View z = p.workspace(p.partial(), with_extent(x.shape, last(x), w.shape[0]));
  partial_product(p, x, w, z);
  reduce_and_add_bias(p, z, b, y);
}

void RowParallel::partial_product(Parallel& p, const View& x, const View& w, const View& z) {
  gemm(plain(x), turned(w), z, p.accumulate);
}

void RowParallel::reduce_and_add_bias(Parallel& p, const View& z, const View& b, const View& y) {
  const View sum = p.workspace(z.dtype, y.shape);
  if (p.sp)
    reduce_scatter(p.rank, p.tp, z, sum, 0);
  else
    all_reduce(p.rank, p.tp, z, sum);
  add_row(sum, b, y, p.accumulate);
}

void RowParallel::sum_blocks(Parallel& p, const View& x, const View& w, const View& b,
                             const View& y) {
  const auto product = [&](int64_t first, const View& part) {
    partial_product(p, x.narrow(0, first, part.shape[0]), w, part);
  };
  const View sum = p.workspace(p.wire, y.shape);
  calls_.reduce(p, product, sum);
  add_row(sum, b, y, p.accumulate);
}

void RowParallel::backward(Parallel& p, const View& x, const View& w, const View& g, const View& dx,
                           const View& dw, const View& db) {
  if (p.sp && p.taken_apart()) {
    if (dx.data || dw.data) differentiate_blocks(p, x, w, g, dx, dw);
    if (db.data) bias_gradient(p, g, g, db);
    return;
  }
  View whole = g;
  if (p.sp && p.tp.size() > 1 && (dx.data || dw.data)) {
    whole = p.workspace(g.dtype, with_extent(g.shape, 0, g.shape[0] * p.tp.size()));
    all_gather(p.rank, p.tp, g, whole, 0);
  }
  if (dx.data) input_gradient(p, g, whole, w, dx);
  if (dw.data) gemm(turned(whole), plain(x), dw, p.accumulate);
  if (db.data) bias_gradient(p, g, whole, db);
}

void RowParallel::differentiate_blocks(Parallel& p, const View& x, const View& w, const View& g,
                                       const View& dx, const View& dw) {
  const View sum = dw.data ? p.workspace(p.accumulate, dw.shape) : View{};
  if (sum.data) set_zero(sum);
  calls_.gather(p, g, [&](int64_t first, const View& block) {
    const int64_t rows = block.shape[0];
    if (dx.data) input_gradient(p, g, block, w, dx.narrow(0, first, rows));
    if (sum.data) add_passing(p, block, x.narrow(0, first, rows), sum);
  });
  if (sum.data) convert(sum, dw);
}

void RowParallel::add_passing(Parallel& p, const View& g, const View& x, const View& sum) {
  gemm(turned(g), plain(x), sum, p.accumulate, nullptr, /*add=*/true);
}

void RowParallel::input_gradient(Parallel& p, const View&, const View& whole, const View& w,
                                 const View& dx) {
  gemm(plain(whole), plain(w), dx, p.accumulate);
}

// Without sp every rank sees all tokens and the sum is whole; with sp it is a sum of its own
// tokens.
void RowParallel::bias_gradient(Parallel& p, const View& g, const View&, const View& db) {
  if (p.sp)
    reduce_bias_gradient(p, g, p.tp, db);
  else
    column_sums(g, db, p.accumulate);
}

void RowParallel::reduce_bias_gradient(Parallel& p, const View& local, Communicator& group,
                                       const View& db) {
  const View partial = p.workspace(p.partial(), db.shape), sum = p.workspace(p.partial(), db.shape);
  column_sums(local, partial, p.accumulate);
  all_reduce(p.rank, group, partial, sum);
  convert(sum, db);
}

namespace {

struct RowSaved : Saved {
  View x, w;  // x as this rank multiplied it
};

View optional(std::span<const View> views, size_t i) {
  return i < views.size() ? views[i] : View{};
}

// The bias that is left to the caller is added to the own tokens there: under sp its gradient is
// partial over tp.
void skipped_bias_gradient(Parallel& p, const View& g, const View& db) {
  if (!p.sp || p.tp.size() == 1) return convert(g, db);
  const View partial = p.workspace(p.wire, db.shape), sum = p.workspace(p.wire, db.shape);
  convert(g, partial);
  all_reduce(p.rank, p.tp, partial, sum);
  convert(sum, db);
}

}  // namespace

LinearRow::LinearRow(std::unique_ptr<RowParallel> part) : part_(std::move(part)) {}

std::unique_ptr<Saved> LinearRow::forward(Rank& rank, std::span<const View> inputs,
                                          std::span<const View> outputs) {
  if (auto refused = refused_row(rank.line())) throw *refused;
  Parallel p(rank);
  const bool skip = rank.line().on("skip_bias_add");
  auto saved = std::make_unique<RowSaved>();
  const View& x = inputs[0];
  saved->x = rank.line().on("input_is_parallel") ? x : own_block(p, x, last(x));
  saved->w = inputs[1];
  const View b = optional(inputs, 2);
  part_->forward(p, saved->x, saved->w, skip ? View{} : b, outputs[0]);
  if (skip) convert(b, outputs[1]);
  return saved;
}

void LinearRow::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                         std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](auto own) { gradients_of(p, state, cotangents, own); }, add_into);
}

void LinearRow::gradients_of(Parallel& p, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  const auto& saved = static_cast<const RowSaved&>(state);
  const bool skip = p.rank.line().on("skip_bias_add");
  const bool scattered = !p.rank.line().on("input_is_parallel");
  const View db = optional(gradients, 2);
  View dx = gradients[0];
  if (scattered && dx.data) dx = p.workspace(dx.dtype, saved.x.shape);
  part_->backward(p, saved.x, saved.w, cotangents[0], dx, gradients[1], skip ? View{} : db);
  if (skip && db.data) skipped_bias_gradient(p, cotangents[1], db);
  if (scattered && dx.data) all_gather(p.rank, p.tp, dx, gradients[0], last(dx));
}

}  // namespace shardproof::primitives
