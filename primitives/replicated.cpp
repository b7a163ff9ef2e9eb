#include "primitives/replicated.hpp"

#include "primitives/line.hpp"

namespace shardproof::primitives {
namespace {

// Every part at its place of one flat buffer.
template <class Each>
void each_part(const View& flat, const Parts& parts, Each each) {
  int64_t at = 0;
  for (const Part& part : parts) {
    const int64_t n = part.result.elements();
    each(part, flat.narrow(0, at, n));
    at += n;
  }
}

int64_t elements_of(const Parts& parts) {
  int64_t n = 0;
  for (const Part& part : parts) n += part.result.elements();
  return n;
}

}  // namespace

View partial_like(Parallel& p, const View& result) {
  return p.workspace(p.accumulate, result.shape);
}

void coalesced_all_reduce(Parallel& p, const Parts& parts, Communicator& group, Reduce reduce) {
  if (parts.empty()) return;
  if (group.size() == 1) {
    for (const Part& part : parts) convert(part.partial, part.result);
    return;
  }
  const int64_t n = elements_of(parts);
  const View flat = p.workspace(p.wire, {n});
  each_part(flat, parts, [](const Part& part, const View& at) { convert(part.partial, at); });
  all_reduce(p.rank, group, flat, flat, reduce);
  each_part(flat, parts, [](const Part& part, const View& at) { convert(at, part.result); });
}

void coalesced_all_reduce(Parallel& p, const Parts& parts, const std::vector<Axis>& axes,
                          Reduce reduce) {
  if (!axes.empty()) return coalesced_all_reduce(p, parts, p.rank.along(axes), reduce);
  for (const Part& part : parts) convert(part.partial, part.result);
}

std::vector<Axis> axes_of_tokens(const Case& line) {
  const bool all = !line.has("reduce") || line.text("reduce") != "tp";
  if (line.on("sp"))
    return all ? with_ranks(line, {Axis::tp, Axis::cp, Axis::dp}) : with_ranks(line, {Axis::tp});
  return all ? with_ranks(line, {Axis::cp, Axis::dp}) : std::vector<Axis>{};
}

std::string label_of(const std::vector<Axis>& axes) {
  std::string label;
  for (Axis a : axes) label += (label.empty() ? "" : ",") + std::string(name(a));
  return label;
}

}  // namespace shardproof::primitives
