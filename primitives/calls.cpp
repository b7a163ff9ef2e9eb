#include "primitives/calls.hpp"

#include <vector>

#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

using Extents = std::vector<int64_t>;

bool on_device(const View& v) { return v.space == Space::device; }

// A tensor that is cut along a dim into one block a member.
struct Cut {
  const View& view;
  int dim;
  Extents extents;

  bool laid_out_for_a_call() const {
    if (!view.contiguous()) return false;
    for (int d = 0; d < dim; ++d)
      if (view.shape[size_t(d)] != 1) return view.elements() == 0;
    return true;
  }
  Extents elements() const {
    Extents list;
    for (size_t i = 0; i < extents.size(); ++i) list.push_back(block(i).elements());
    return list;
  }
  View block(size_t i) const {
    int64_t start = 0;
    for (size_t b = 0; b < i; ++b) start += extents[b];
    return view.narrow(dim, start, extents[i]);
  }
};

Cut equal(const View& v, int dim, int p) {
  return {v, dim, Extents(size_t(p), v.shape[size_t(dim)] / p)};
}
Cut whole(const View& v) { return equal(v, 0, 1); }
Cut given(const View& v, int dim, int p, std::span<const int64_t> extents) {
  return extents.empty() ? equal(v, dim, p) : Cut{v, dim, {extents.begin(), extents.end()}};
}

View flat(const View& v) { return view_of(v.data, v.dtype, {v.elements()}, v.space); }

template <class Each>
void each_block(const Cut& cut, const View& row, Each each) {
  int64_t at = 0;
  for (size_t i = 0; i < cut.extents.size(); ++i) {
    const View block = cut.block(i);
    each(block, row.narrow(0, at, block.elements()));
    at += block.elements();
  }
}

// Blocks one after another: where they lie already, or in workspace.
View room(Rank& rank, const Cut& cut) {
  if (cut.laid_out_for_a_call()) return flat(cut.view);
  return rank.workspace(cut.view.dtype, {cut.view.elements()});
}
View packed(Rank& rank, const Cut& cut) {
  const View row = room(rank, cut);
  if (row.data != cut.view.data)
    each_block(cut, row, [](const View& block, const View& at) { convert(block, at); });
  return row;
}
void deliver(const View& row, const Cut& cut) {
  if (row.data != cut.view.data)
    each_block(cut, row, [](const View& block, const View& at) { convert(at, block); });
}

}  // namespace

void all_reduce(Rank& rank, Communicator& group, const View& in, const View& out, Reduce reduce,
                Site site) {
  if (!on_device(in) || (in.contiguous() && out.contiguous()))
    return group.all_reduce(in, out, reduce, site);
  const Cut from = whole(in), to = whole(out);
  const View sum = rank.workspace(in.dtype, {in.elements()});
  group.all_reduce(packed(rank, from), sum, reduce, site);
  deliver(sum, to);
}

void all_gather(Rank& rank, Communicator& group, const View& in, const View& out, int dim,
                Site site) {
  if (!on_device(in)) return group.all_gather(in, out, dim, site);
  const Cut to = equal(out, dim, group.size());
  const View all = room(rank, to);
  group.all_gather(packed(rank, whole(in)), all, 0, site);
  deliver(all, to);
}

void reduce_scatter(Rank& rank, Communicator& group, const View& in, const View& out, int dim,
                    Reduce reduce, Site site) {
  if (!on_device(in)) return group.reduce_scatter(in, out, dim, reduce, site);
  const Cut to = whole(out);
  const View own = room(rank, to);
  group.reduce_scatter(packed(rank, equal(in, dim, group.size())), own, 0, reduce, site);
  deliver(own, to);
}

void all_to_all(Rank& rank, Communicator& group, const View& in, const View& out, int split_dim,
                int concat_dim, std::span<const int64_t> split, std::span<const int64_t> concat,
                Site site) {
  if (!on_device(in)) return group.all_to_all(in, out, split_dim, concat_dim, split, concat, site);
  const Cut from = given(in, split_dim, group.size(), split),
            to = given(out, concat_dim, group.size(), concat);
  const View received = room(rank, to);
  group.all_to_all(packed(rank, from), received, 0, 0, from.elements(), to.elements(), site);
  deliver(received, to);
}

}  // namespace shardproof::primitives
