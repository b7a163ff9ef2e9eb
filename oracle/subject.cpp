// What a kernel that supplies no backward answers. The judge asks for one only where the subject
// declares it, so arriving here means that the declaration and the kernel disagree.
#include "oracle/subject.hpp"

namespace shardproof {

void Kernel::backward(Rank& rank, Saved&, std::span<const View>, std::span<const View>) {
  throw std::logic_error("the kernel of " + rank.line().contract +
                         " declares no backward: expected an override of Kernel::backward, met "
                         "none; supply it or set Declared::backward = false");
}

}  // namespace shardproof
