#include "primitives/gemm.hpp"
#include "primitives/linear.hpp"
#include "primitives/linear_line.hpp"

namespace shardproof::primitives {

View ColumnParallel::whole_input(Parallel& p, const View& x) {
  if (!p.sp || p.tp.size() == 1) return x;
  const View whole = p.workspace(x.dtype, with_extent(x.shape, 0, x.shape[0] * p.tp.size()));
  all_gather(p.rank, p.tp, x, whole, 0);
  return whole;
}

void ColumnParallel::forward(Parallel& p, const View& x, const View& w, const View& b,
                             const View& y) {
  if (p.sp && p.taken_apart()) return multiply_passing(p, x, w, b, y);
  gemm(plain(whole_input(p, x)), turned(w), y, p.accumulate, &b);
}

void ColumnParallel::multiply_passing(Parallel& p, const View& x, const View& w, const View& b,
                                      const View& y) {
  calls_.gather(p, x, [&](int64_t first, const View& block) {
    gemm(plain(block), turned(w), y.narrow(0, first, block.shape[0]), p.accumulate, &b);
  });
}

void ColumnParallel::backward(Parallel& p, const View& x, const View& w, const View& g,
                              const View& dx, const View& dw, const View& db) {
  if (dw.data) weight_gradient(p, x, g, dw);
  if (db.data) column_sums(g, db, p.accumulate);
  if (!dx.data) return;
  if (p.taken_apart()) {
    const auto product = [&](int64_t first, const View& part) {
      gemm(plain(g.narrow(0, first, part.shape[0])), plain(w), part, p.accumulate);
    };
    const View sum = p.workspace(p.wire, dx.shape);
    calls_.reduce(p, product, sum);
    return convert(sum, dx);
  }
  const View partial = p.workspace(p.partial(), with_extent(g.shape, last(g), w.shape[1]));
  gemm(plain(g), plain(w), partial, p.accumulate);
  reduce_input_gradient(p, partial, dx);
}

void ColumnParallel::weight_gradient(Parallel& p, const View& x, const View& g, const View& dw) {
  if (!p.sp || !p.taken_apart()) return gemm(turned(g), plain(whole_input(p, x)), dw, p.accumulate);
  const View sum = p.workspace(p.accumulate, dw.shape);
  set_zero(sum);
  calls_.gather(p, x, [&](int64_t first, const View& block) {
    add_passing(p, block, g.narrow(0, first, block.shape[0]), sum);
  });
  convert(sum, dw);
}

void ColumnParallel::add_passing(Parallel& p, const View& x, const View& g, const View& sum) {
  gemm(turned(g), plain(x), sum, p.accumulate, nullptr, /*add=*/true);
}

void ColumnParallel::reduce_input_gradient(Parallel& p, const View& partial, const View& dx) {
  const View sum = p.workspace(partial.dtype, dx.shape);
  if (p.sp)
    reduce_scatter(p.rank, p.tp, partial, sum, 0);
  else
    all_reduce(p.rank, p.tp, partial, sum);
  convert(sum, dx);
}

namespace {

struct ColumnSaved : Saved {
  View x, w;  // the judge keeps arguments alive until the backward that reads them
};

View optional(std::span<const View> views, size_t i) {
  return i < views.size() ? views[i] : View{};
}

}  // namespace

LinearColumn::LinearColumn(std::unique_ptr<ColumnParallel> part) : part_(std::move(part)) {}

std::vector<int64_t> LinearColumn::own_rows(const Case& line, int64_t rows, int p, int r) const {
  return rows_of_line(line, rows, p, r);
}
std::vector<int64_t> LinearColumn::own_bias_rows(const Case& line, int64_t rows, int p,
                                                 int r) const {
  return own_rows(line, rows, p, r);
}

// A weight that is handed whole is cut here; its gradient is the own rows and zeros elsewhere.
View LinearColumn::own_part(Parallel& p, const View& whole, bool bias) {
  const Case& line = p.rank.line();
  if (!line.on("whole_weight") || !whole.data) return whole;
  const int64_t rows = whole.shape[0];
  return take_rows(p, whole,
                   bias ? own_bias_rows(line, rows, p.tp.size(), p.tp.rank())
                        : own_rows(line, rows, p.tp.size(), p.tp.rank()));
}

void LinearColumn::return_part(Parallel& p, const View& own, const View& whole, bool bias) {
  const Case& line = p.rank.line();
  if (!line.on("whole_weight") || !whole.data) return;
  const int64_t rows = whole.shape[0];
  put_rows(own,
           bias ? own_bias_rows(line, rows, p.tp.size(), p.tp.rank())
                : own_rows(line, rows, p.tp.size(), p.tp.rank()),
           whole);
}

void LinearColumn::split_output_gradient(Parallel& p, const View& whole, const View& own) {
  convert(own_block(p, whole, last(whole)), own);
}

// inputs x, w, [b]; outputs y, [b] when the bias is left to the caller.
std::unique_ptr<Saved> LinearColumn::forward(Rank& rank, std::span<const View> inputs,
                                             std::span<const View> outputs) {
  if (auto refused = refused_column(rank.line())) throw *refused;
  Parallel p(rank);
  const Case& line = rank.line();
  auto saved = std::make_unique<ColumnSaved>();
  saved->x = inputs[0];
  saved->w = inputs[1];
  const View w = own_part(p, inputs[1], false), b = own_part(p, optional(inputs, 2), true);
  const bool skip = line.on("skip_bias_add");
  const View& y = outputs[0];
  if (line.on("gather_output")) {
    const View own = p.workspace(y.dtype, with_extent(y.shape, last(y), w.shape[0]));
    part_->forward(p, inputs[0], w, skip ? View{} : b, own);
    all_gather(p.rank, p.tp, own, y, last(y));
  } else {
    part_->forward(p, inputs[0], w, skip ? View{} : b, y);
  }
  if (skip) convert(b, outputs[1]);
  return saved;
}

void LinearColumn::add_gradient(const View& own, const View& sum) { add_into(own, sum); }

void LinearColumn::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                            std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](auto own) { gradients_of(p, state, cotangents, own); },
      [&](const View& own, const View& sum) { add_gradient(own, sum); });
}

void LinearColumn::gradients_of(Parallel& p, Saved& state, std::span<const View> cotangents,
                                std::span<const View> gradients) {
  const Case& line = p.rank.line();
  const auto& saved = static_cast<const ColumnSaved&>(state);
  const View w = own_part(p, saved.w, false);
  View g = cotangents[0];
  if (line.on("gather_output")) {
    g = p.workspace(g.dtype, with_extent(g.shape, last(g), w.shape[0]));
    split_output_gradient(p, cotangents[0], g);
  }
  const bool whole = line.on("whole_weight"), skip = line.on("skip_bias_add");
  View dw = gradients[1], db = optional(gradients, 2);
  if (whole && dw.data) dw = p.workspace(dw.dtype, w.shape);
  if (whole && db.data) db = p.workspace(db.dtype, {w.shape[0]});
  part_->backward(p, saved.x, w, g, gradients[0], dw, skip ? View{} : db);
  if (skip && db.data) convert(cotangents[1], db);
  return_part(p, dw, gradients[1], false);
  return_part(p, db, optional(gradients, 2), true);
}

}  // namespace shardproof::primitives
