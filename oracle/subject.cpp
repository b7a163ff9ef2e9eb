// Preconditions that do not hold, and what a kernel that supplies no backward answers. The judge
// asks for one only where the subject declares it, so arriving here means that the declaration and
// the kernel disagree.
#include "oracle/subject.hpp"

namespace shardproof {

Rejected::Rejected(std::string expected_, std::string met_, std::string advice_)
    : std::runtime_error("expected " + expected_ + ", met " + met_ + "; " + advice_),
      expected(std::move(expected_)),
      met(std::move(met_)),
      advice(std::move(advice_)) {}

void Kernel::backward(Rank& rank, Saved&, std::span<const View>, std::span<const View>) {
  throw std::logic_error("the kernel of " + rank.line().contract +
                         " declares no backward: expected an override of Kernel::backward, met "
                         "none; supply it or set Declared::backward = false");
}

}  // namespace shardproof
