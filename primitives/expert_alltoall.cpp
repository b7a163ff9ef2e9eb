#include "primitives/expert_alltoall.hpp"

#include "primitives/gemm.hpp"

namespace shardproof::primitives {

DType ExpertAlltoall::result_type(Parallel& p) const { return p.storage; }

void ExpertAlltoall::run_experts(Parallel& p, ExpertSaved& saved, const View& z) {
  each_expert(saved.dispatch, [&](int64_t e, int64_t first, int64_t n) {
    if (n > 0)
      gemm(plain(saved.rows.view().narrow(0, first, n)), turned(saved.w[0].narrow(0, e, 1)),
           z.narrow(0, first, n), p.accumulate);
  });
}

void ExpertAlltoall::run_backward(Parallel& p, const ExpertSaved& saved, const View& g,
                                  const View& dx, std::span<const View> dw) {
  each_expert(saved.dispatch, [&](int64_t e, int64_t first, int64_t n) {
    const View own = dw[0].narrow(0, e, 1), of_own = g.narrow(0, first, n);
    if (n == 0) return idle_expert(own);
    gemm(turned(of_own), plain(saved.rows.view().narrow(0, first, n)), own, p.accumulate);
    gemm(plain(of_own), plain(saved.w[0].narrow(0, e, 1)), dx.narrow(0, first, n), p.accumulate);
  });
}

}  // namespace shardproof::primitives
