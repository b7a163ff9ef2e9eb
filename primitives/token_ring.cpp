#include "primitives/token_ring.hpp"

#include "primitives/linear.hpp"

namespace shardproof::primitives {

void TokenRing::gather(Parallel& p, const View& own, const Block& multiply) const {
  const int ranks = p.tp.size(), me = p.tp.rank();
  Turning x(p.rank, own.dtype, own.shape);
  convert(own, x.here);
  for (int step = 0; step < ranks; ++step) {
    const bool goes_on = step + 1 < ranks;
    const Ticket hop = goes_on ? p.tp.shift(x.here, x.next, 1) : Ticket{};
    multiply(modulo(me - step, ranks), x.here);
    if (goes_on) arrive(p, hop, x, step + 2 == ranks);
  }
}

void TokenRing::reduce(Parallel& p, const Block& product, const View& sum) const {
  const int ranks = p.tp.size(), me = p.tp.rank();
  Turning sums(p.rank, sum.dtype, sum.shape);
  const View part = p.workspace(sum.dtype, sum.shape);
  Ticket hop{};
  for (int step = 0; step < ranks; ++step) {
    product(modulo(me - 1 - step, ranks), step > 0 ? part : sums.here);
    if (step > 0) {
      arrive(p, hop, sums, step + 1 == ranks);
      add_into(part, sums.here);
    }
    if (step + 1 < ranks) hop = p.tp.shift(sums.here, sums.next, 1);
  }
  convert(sums.here, sum);
}

void TokenRing::arrive(Parallel& p, Ticket hop, Turning& turning, bool) const {
  p.tp.wait(hop);
  turning.turn();
}

}  // namespace shardproof::primitives
