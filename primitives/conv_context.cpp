#include "primitives/conv_context.hpp"

#include <algorithm>

#include "primitives/calls.hpp"
#include "primitives/recurrences.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

struct ConvSaved : Saved {
  View w;
  Kept all, reach;  // of each block halo and own rows; tokens before each own one
};

int64_t width_of(const View& w) { return w.shape.back(); }

Halo halo_of(Rank& rank, const View& block, int64_t width) {
  Communicator& cp = rank.along(Axis::cp);
  return {block.shape[0], width - 1, cp.rank(), cp.size()};
}

int64_t batch_of(const View& x) { return x.elements() / x.shape[0] / x.shape.back(); }

}  // namespace

View last_rows(const Halo& halo, const View& all, int64_t n) {
  return all.narrow(0, halo.reach + halo.own - n, n);
}

int Halo::hops() const { return int(std::min<int64_t>(ranks - 1, (reach + own - 1) / own)); }
int64_t Halo::rows(int hop) const { return std::min(own, reach - (hop - 1) * own); }
int64_t Halo::first(int hop) const { return reach - (hop - 1) * own - rows(hop); }

std::vector<int64_t> ConvContext::reach(const ContextLine& c, int r) const {
  return tokens_before(c, r);
}
std::vector<Axis> ConvContext::summed_over(const Case& line) const {
  return with_ranks(line, {Axis::cp, Axis::dp});
}
void ConvContext::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}
View ConvContext::seen(Rank&, const Halo&, const View& all) const { return all; }

View ConvContext::exchanged(Rank& rank, const Halo& halo, const View& rows, int hop) {
  Communicator& cp = rank.along(Axis::cp);
  const View got = rank.workspace(rows.dtype, rows.shape);
  const auto where = [&](const View& v, int other) {
    return halo.sends(other) ? v : v.narrow(0, 0, 0);
  };
  const View arriving = where(got, -hop);
  cp.wait(cp.shift(where(rows, hop), arriving, hop));
  return arriving;
}

void ConvContext::fetch(Rank& rank, const Halo& halo, const View& all) {
  for (int hop = 1; hop <= halo.hops(); ++hop) {
    const int64_t n = halo.rows(hop);
    const View last = last_rows(halo, all, n), leaving = rank.workspace(all.dtype, last.shape);
    convert(last, leaving);
    const View arrived = exchanged(rank, halo, leaving, hop);
    if (arrived.elements() > 0) convert(arrived, all.narrow(0, halo.first(hop), n));
  }
}

void ConvContext::give_back(Rank& rank, const Halo& halo, const View& all) {
  const DType wire = type_of_key(rank.line(), "wire", rank.line().dtype());
  for (int hop = 1; hop <= halo.hops(); ++hop) {
    const View before = all.narrow(0, halo.first(hop), halo.rows(hop)),
               leaving = rank.workspace(wire, before.shape);
    convert(before, leaving);
    const View arrived = exchanged(rank, halo, leaving, -hop);
    if (arrived.elements() > 0) add_back(halo, arrived, all);
  }
}

void ConvContext::fetch_both(Rank& rank, const Halo& halo, const View& first, const View& second) {
  if (halo.reach == 0) return;
  const auto fetch_from = [&](const View& all, int hop) {
    const View last = last_rows(halo, all, halo.reach),
               leaving = rank.workspace(all.dtype, last.shape);
    convert(last, leaving);
    const View arrived = exchanged(rank, halo, leaving, hop);
    if (arrived.elements() > 0) convert(arrived, all.narrow(0, 0, halo.reach));
  };
  fetch_from(first, 1);
  fetch_from(second, -1);
  if (halo.rank + 1 == halo.ranks)
    convert(last_rows(halo, first, halo.reach), second.narrow(0, 0, halo.reach));
}

void ConvContext::give_both_back(Rank& rank, const Halo& halo, const View& first,
                                 const View& second) {
  if (halo.reach == 0) return;
  const DType wire = type_of_key(rank.line(), "wire", rank.line().dtype());
  const auto give = [&](const View& all, int hop) {
    const View before = all.narrow(0, 0, halo.reach), leaving = rank.workspace(wire, before.shape);
    convert(before, leaving);
    const View arrived = exchanged(rank, halo, leaving, hop);
    if (arrived.elements() > 0) add_back(halo, arrived, all);
  };
  give(first, -1);
  give(second, 1);
  if (halo.rank + 1 == halo.ranks) add_back(halo, second.narrow(0, 0, halo.reach), first);
}

void ConvContext::add_back(const Halo& halo, const View& arrived, const View& all) const {
  add_into(arrived, last_rows(halo, all, arrived.shape[0]));
}

// inputs x, w, b; output y.
std::unique_ptr<Saved> ConvContext::forward(Rank& rank, std::span<const View> inputs,
                                            std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_conv(line)) throw *refused;
  const View &x = inputs[0], &w = inputs[1];
  const ContextLine c(line);
  const Blocks blocks(c);
  const Halo halo = halo_of(rank, blocks.of(x, 0), width_of(w));
  auto saved = std::make_unique<ConvSaved>();
  saved->w = w;
  saved->reach = uploaded(reach(c, halo.rank));
  saved->all = Kept(x.dtype, with_extent(x.shape, 0, blocks.each * (halo.reach + halo.own)));
  const View &all = saved->all.view(), &reach = saved->reach.view();
  for (int i = 0; i < blocks.each; ++i)
    convert(blocks.of(x, i), blocks.of(all, i).narrow(0, halo.reach, halo.own));
  blocks.each == 2 ? fetch_both(rank, halo, blocks.of(all, 0), blocks.of(all, 1))
                   : fetch(rank, halo, all);
  for (int i = 0; i < blocks.each; ++i)
    perform(ConvForward{tensor(blocks.of(all, i)), tensor(w), tensor(inputs[2]),
                        tensor(blocks.of(reach, i)), tensor(blocks.of(outputs[0], i)),
                        x.shape.back(), width_of(w), batch_of(x), !in_single(line)},
            "a convolution");
  return saved;
}

void ConvContext::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                           std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](std::span<const View> own) { gradients_of(p, state, cotangents[0], own); },
      add_into);
}

void ConvContext::gradients_of(Parallel& p, Saved& state, const View& g,
                               std::span<const View> gradients) {
  const auto& saved = static_cast<const ConvSaved&>(state);
  const Blocks blocks{ContextLine(p.rank.line())};
  const Halo halo = halo_of(p.rank, blocks.of(g, 0), width_of(saved.w));
  const bool wide = p.accumulate == DType::f64;
  const int64_t channels = g.shape.back(), width = width_of(saved.w), batch = batch_of(g);
  const View reach = saved.reach.view(), kept = saved.all.view(),
             all = p.workspace(p.accumulate, kept.shape), dw = partial_like(p, gradients[1]),
             db = partial_like(p, gradients[2]);
  for (int i = 0; i < blocks.each; ++i)
    perform(ConvInput{tensor(blocks.of(g, i)), tensor(saved.w), tensor(blocks.of(reach, i)),
                      tensor(blocks.of(all, i)), channels, width, batch, wide},
            "the gradient of a convolution");
  blocks.each == 2 ? give_both_back(p.rank, halo, blocks.of(all, 0), blocks.of(all, 1))
                   : give_back(p.rank, halo, all);
  for (int i = 0; i < blocks.each; ++i) {
    convert(blocks.of(all, i).narrow(0, halo.reach, halo.own), blocks.of(gradients[0], i));
    const View of_block = i ? p.workspace(dw.dtype, dw.shape) : dw;
    perform(
        ConvParameter{tensor(seen(p.rank, halo, blocks.of(kept, i))), tensor(blocks.of(g, i)),
                      tensor(blocks.of(reach, i)), tensor(of_block), channels, width, batch, wide},
        "the gradient of a filter");
    if (i) add_into(of_block, dw);
  }
  perform(ConvParameter{Tensor{}, tensor(g), tensor(reach), tensor(db), channels, 1, batch, wide},
          "the gradient of a bias");
  sum_gradients(p, {{dw, gradients[1]}, {db, gradients[2]}}, summed_over(p.rank.line()));
}

}  // namespace shardproof::primitives
