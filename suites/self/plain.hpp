// The healthy subjects of the judge's own tests, as plain as they can be written. Nothing here, and
// no planted fault, uses a kernel of primitives/: a line that is wrong there is a subject's failure
// and never one of the judge.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oracle/registry.hpp"
#include "oracle/subject.hpp"

namespace shardproof::planted {

using Map = std::function<void(Rank&, const View& in, const View& out)>;
using Make = std::function<std::unique_ptr<Kernel>()>;

Communicator& group(Rank&);  // the ranks of the line's axis

// On x [tokens,hidden], along the line's dim where one is cut; equal blocks.
void identity(Rank&, const View& in, const View& out);
void own_block(Rank&, const View& in, const View& out);
void reduced(Rank&, const View& in, const View& out);   // sum over the axis, whole everywhere
void gathered(Rank&, const View& in, const View& out);  // blocks of the axis, whole everywhere

std::unique_ptr<Kernel> pair(Map forward, Map backward);

// Y = X W^T + b with W [out/p,in] and b [out/p] cut by rows over tp and X [T,in] on every rank, in
// double; dX is summed over tp, running sums of parameters are added to.
class PlainColumn : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;
};

// The contracts that faults are planted under, of the families, with the subjects above; linear_row
// has none, since only forwards of their own are judged by it.
void add_plain(Registry&);

}  // namespace shardproof::planted
