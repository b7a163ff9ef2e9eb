// Twins of any layer of vocabulary-parallel logits and labels: `Layer` has maximum,
// labels_of_forward and labels_of_gradients. The comment above a twin names the mistake.
#pragma once
#include <vector>

#include "primitives/linear.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof::controls {

using namespace primitives;

// Ids in workspace, one by one as `read` has them.
template <class Read>
View rewritten(Parallel& p, const View& ids, Read read) {
  const View own = p.workspace(ids.dtype, ids.shape);
  std::vector<double> list = to_doubles(ids);
  for (double& id : list) id = double(read(int64_t(id)));
  fill_from(own, list);
  return own;
}

// An id of another rank is taken for the first own row.
inline View clamped(Parallel& p, const View& ids, int64_t first, int64_t own) {
  return rewritten(p, ids, [=](int64_t id) {
    return id == ignored_label || (id >= first && id < first + own) ? id : first;
  });
}

// -100 is out of every range, so that it is the label of no class.
inline View not_ignored(Parallel& p, const View& labels) {
  return rewritten(p, labels, [](int64_t id) { return id == ignored_label ? -1 : id; });
}

// Each rank subtracts the maximum of its own classes.
template <class Layer>
struct LocalMaximum final : Layer {
  void maximum(Parallel&, const View& own, const View& all) const override { convert(own, all); }
};

// A label of another rank is taken for the first own class: its logit is added, and 1 is taken from
// its gradient.
template <class Layer>
struct TargetNotMasked final : Layer {
  View labels_of_forward(Parallel& p, const View& labels, int64_t first,
                         int64_t own) const override {
    return clamped(p, labels, first, own);
  }
  View labels_of_gradients(Parallel& p, const View& labels, int64_t first,
                           int64_t own) const override {
    return clamped(p, labels, first, own);
  }
};

// The label's logit comes from its rank by a sum that gradients do not pass: a token whose label is
// elsewhere has none.
template <class Layer>
struct GradientOfOwnLabelsAlone final : Layer {
  View labels_of_gradients(Parallel& p, const View& labels, int64_t first,
                           int64_t own) const override {
    return rewritten(p, labels, [=](int64_t id) {
      return id >= first && id < first + own ? id : ignored_label;
    });
  }
};

// Nothing is taken from the gradient of an ignored label; the rest of it stays.
template <class Layer>
struct IgnoredGradientLeft final : Layer {
  View labels_of_gradients(Parallel& p, const View& labels, int64_t, int64_t) const override {
    return not_ignored(p, labels);
  }
};
// It has the result of a label of no class.
template <class Layer>
struct IgnoredResultLeft final : Layer {
  View labels_of_forward(Parallel& p, const View& labels, int64_t, int64_t) const override {
    return not_ignored(p, labels);
  }
};

}  // namespace shardproof::controls
