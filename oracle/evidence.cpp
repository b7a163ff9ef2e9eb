// Look-ups in the evidence of a case.
#include <algorithm>

#include "oracle/check.hpp"

namespace shardproof {

int Evidence::find_shot(const std::string& name) const {
  for (size_t i = 0; i < shots.size(); ++i)
    if (shots[i].name == name) return int(i);
  return -1;
}

const ResultTensor* Evidence::result(int rank, int shot, int step, int operand,
                                     bool gradient) const {
  if (rank < 0 || shot < 0 || size_t(rank) >= ranks.size()) return nullptr;
  if (size_t(shot) >= ranks[size_t(rank)].shots.size()) return nullptr;
  for (const ResultTensor& t : record(rank, shot).results)
    if (t.step == step && t.operand == operand && t.gradient == gradient) return &t;
  return nullptr;
}

DType Evidence::dtype_of(const Operand& o) const { return stored_type(*line, o); }

DType stored_type(const Case& line, const Operand& o, bool gradient) {
  if (o.fixed_dtype) return o.dtype_override;
  if (gradient && o.role == Operand::parameter && line.has("grad"))
    return dtype_from(line.text("grad")).value_or(line.dtype());
  return line.dtype();
}

}  // namespace shardproof
