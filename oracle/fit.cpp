#include "oracle/fit.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

// Of each word of a program whether it is a backward.
std::vector<bool> backwards_of(const std::string& program) {
  std::vector<bool> words;
  for (size_t at = 0; at < program.size(); at = std::min(program.find(' ', at), program.size()) + 1)
    words.push_back(program[at] == 'B');
  return words;
}

// A forward leaves values of outputs, a backward gradients of what has one; before the first step
// (-1) stand parameters that the subject made.
bool due_at(const Operand& o, bool gradient, int step, const std::vector<bool>& backwards) {
  if (step == -1) return o.role == Operand::parameter && !gradient;
  if (step < 0 || size_t(step) >= backwards.size() || backwards[size_t(step)] != gradient)
    return false;
  return gradient ? o.role != Operand::output && o.gradient : o.role == Operand::output;
}

std::string misfit(const ResultTensor& t, const Evidence& e, int rank,
                   const std::vector<bool>& backwards) {
  if (t.operand < 0 || size_t(t.operand) >= e.operands.size())
    return fmt::format("expected a result of one of {} operands, met operand {}", e.operands.size(),
                       t.operand);
  const Operand& o = e.operands[size_t(t.operand)];
  const std::string tensor = judging::tensor_name(o, t.gradient);
  if (!due_at(o, t.gradient, t.step, backwards))
    return fmt::format("expected {} from a step that gives it, met it from step {}", tensor,
                       t.step);
  const DType dtype = judging::result_dtype(e, o, t.gradient);
  if (t.dtype != dtype)
    return fmt::format("expected {} as {}, met another dtype ({})", tensor, name(dtype),
                       int(t.dtype));
  const auto shape = local_shape(o.shape, judging::result_layout(o, t.gradient), e.mesh, rank);
  if (t.shape != shape)
    return fmt::format("expected {} as {}, met {}", tensor, shape_text(shape), shape_text(t.shape));
  const size_t bytes = size_t(product(shape)) * size_of(dtype);
  if (t.bytes.size() != bytes)
    return fmt::format("expected {} B of {}, met {}", bytes, tensor, t.bytes.size());
  return "";
}

std::string misfit(const LedgerEntry& c, int world) {
  if (c.op > Op::barrier || c.reduce > Reduce::max || c.phase > Phase::harness ||
      c.dtype > DType::i32)
    return fmt::format("expected a call, met operation {}, reduction {}, dtype {} in phase {}",
                       int(c.op), int(c.reduce), int(c.dtype), int(c.phase));
  for (const int member : c.members)
    if (member < 0 || member >= world)
      return fmt::format("expected a call among ranks 0 to {}, met rank {}", world - 1, member);
  for (const int peer : {c.to, c.from})  // -1: no shift
    if (peer < -1 || peer >= world)
      return fmt::format("expected a call among ranks 0 to {}, met rank {}", world - 1, peer);
  const size_t parts = std::max(c.send.size(), c.recv.size());
  if (parts > c.members.size())
    return fmt::format("expected a call with a part for each of {} members, met {}",
                       c.members.size(), parts);
  return "";
}

}  // namespace

std::string misfit(const RankRecord& record, const Evidence& e) {
  if (record.shots.size() != e.shots.size())
    return fmt::format("expected {} shots, met {}", e.shots.size(), record.shots.size());
  for (size_t s = 0; s < record.shots.size(); ++s) {
    const ShotRecord& shot = record.shots[s];
    const std::string in = fmt::format(" in '{}'", e.shots[s].name);
    if (shot.status > ShotRecord::not_run)
      return fmt::format("expected the status of a shot, met {}", int(shot.status)) + in;
    const auto backwards = backwards_of(e.shots[s].program);
    for (const ResultTensor& t : shot.results)
      if (std::string why = misfit(t, e, record.rank, backwards); !why.empty()) return why + in;
    for (const LedgerEntry& c : shot.ledger)
      if (std::string why = misfit(c, e.mesh.world()); !why.empty()) return why + in;
  }
  return "";
}

}  // namespace shardproof
