#include "primitives/expert_mlp.hpp"

#include "primitives/gemm.hpp"

namespace shardproof::primitives {
namespace {

Gate gate_of(Parallel& p, const ExpertMlpSaved& saved) {
  const std::string& word = p.rank.line().text("activation");
  return {tensor(saved.first.view()), pointwise(word), word == "swiglu", saved.w[1].shape.back()};
}

bool wide(const Parallel& p) { return p.accumulate == DType::f64; }

}  // namespace

DType ExpertMlp::result_type(Parallel& p) const { return p.tp.size() == 1 ? p.storage : p.wire; }
bool ExpertMlp::gathers(const ExpertLine& line) const { return line.shares > 1; }
View ExpertMlp::first_weight(Parallel&, const ExpertSaved& saved) const { return saved.w[0]; }

View ExpertMlp::gathered(Parallel& p, const ExpertSaved& saved, const View& arrived) const {
  const Dispatch& d = saved.dispatch;
  if (d.shares == 1) return arrived;
  const View own = rows_like(p.rank, d.block, arrived),
             all = rows_like(p.rank, d.shares * d.block, arrived);
  convert(arrived, own.narrow(0, 0, d.arriving()));
  set_zero(own.narrow(0, d.arriving(), d.block - d.arriving()));
  all_gather(p.rank, p.tp, own, all, 0);
  return all;
}

View ExpertMlp::reduced(Parallel& p, const ExpertSaved& saved, const View& results,
                        Phase phase) const {
  if (p.tp.size() == 1) return results;
  const Dispatch& d = saved.dispatch;
  const View sum = rows_like(p.rank, d.block, results),
             own = p.workspace(p.storage, {d.arriving(), results.shape.back()});
  sum_parts(p, d, results, sum, phase);
  convert(sum.narrow(0, 0, d.arriving()), own);
  return own;
}

void ExpertMlp::sum_parts(Parallel& p, const Dispatch& d, const View& results, const View& to,
                          Phase) const {
  if (d.shares > 1)
    reduce_scatter(p.rank, p.tp, results, to, 0);
  else
    all_reduce(p.rank, p.tp, results, to);
}

View ExpertMlp::activated(Parallel& p, const ExpertMlpSaved& saved) const {
  const View a = p.workspace(p.storage, {saved.dispatch.rows(), saved.w[1].shape.back()});
  perform(Activated{gate_of(p, saved), {}, {}, tensor(a), wide(p)}, "an activation");
  return a;
}

void ExpertMlp::run_experts(Parallel& p, ExpertSaved& state, const View& z) {
  auto& saved = static_cast<ExpertMlpSaved&>(state);
  const View w1 = first_weight(p, saved), x = saved.rows.view();
  saved.first = Kept(p.storage, {saved.dispatch.rows(), w1.shape[1]});
  each_expert(saved.dispatch, [&](int64_t e, int64_t first, int64_t n) {
    if (n > 0)
      gemm(plain(x.narrow(0, first, n)), turned(w1.narrow(0, e, 1)),
           saved.first.view().narrow(0, first, n), p.accumulate);
  });
  const View a = activated(p, saved);
  each_expert(saved.dispatch, [&](int64_t e, int64_t first, int64_t n) {
    if (n > 0)
      gemm(plain(a.narrow(0, first, n)), turned(saved.w[1].narrow(0, e, 1)), z.narrow(0, first, n),
           p.accumulate);
  });
}

void ExpertMlp::run_backward(Parallel& p, const ExpertSaved& state, const View& g, const View& dx,
                             std::span<const View> dw) {
  const auto& saved = static_cast<const ExpertMlpSaved&>(state);
  const View w1 = first_weight(p, saved), x = saved.rows.view(), a = activated(p, saved),
             da = p.workspace(p.storage, a.shape),
             dz = p.workspace(p.storage, saved.first.view().shape);
  each_expert(saved.dispatch, [&](int64_t e, int64_t first, int64_t n) {
    const View own = dw[1].narrow(0, e, 1), of_own = g.narrow(0, first, n);
    if (n == 0) return idle_expert(own);
    gemm(turned(of_own), plain(a.narrow(0, first, n)), own, p.accumulate);
    gemm(plain(of_own), plain(saved.w[1].narrow(0, e, 1)), da.narrow(0, first, n), p.accumulate);
  });
  perform(ActivatedBackward{gate_of(p, saved), tensor(da), {}, {}, {}, tensor(dz), wide(p)},
          "the gradient of an activation");
  each_expert(saved.dispatch, [&](int64_t e, int64_t first, int64_t n) {
    const View own = dw[0].narrow(0, e, 1), of_own = dz.narrow(0, first, n);
    if (n == 0) return idle_expert(own);
    gemm(turned(of_own), plain(x.narrow(0, first, n)), own, p.accumulate);
    gemm(plain(of_own), plain(w1.narrow(0, e, 1)), dx.narrow(0, first, n), p.accumulate);
  });
}

}  // namespace shardproof::primitives
