#include "suites/self/plain.hpp"

#include <utility>

namespace shardproof {

void family_mapping(Registry&);
void family_linear(Registry&);

namespace planted {
namespace {

int dim_of(Rank& rank) { return int(rank.line().at("dim")); }

class Pair final : public Kernel {
 public:
  Pair(Map forward, Map backward) : forward_(std::move(forward)), backward_(std::move(backward)) {}

  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    forward_(rank, inputs[0], outputs[0]);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    backward_(rank, cotangents[0], gradients[0]);
  }

 private:
  Map forward_, backward_;
};

void add_to(const View& sums, const std::vector<double>& more) {
  std::vector<double> sum = to_doubles(sums);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
  fill_from(sums, sum);
}

struct Arguments : Saved {
  View x, w;  // the judge keeps them alive until the backward that reads them
};

}  // namespace

Communicator& group(Rank& rank) { return rank.along(axis_from(rank.line().text("axis")).value()); }

void identity(Rank&, const View& in, const View& out) { copy(in, out); }

void own_block(Rank& rank, const View& in, const View& out) {
  const int dim = dim_of(rank);
  const int64_t extent = out.shape[size_t(dim)];
  copy(in.narrow(dim, group(rank).rank() * extent, extent), out);
}

void reduced(Rank& rank, const View& in, const View& out) { group(rank).all_reduce(in, out); }

void gathered(Rank& rank, const View& in, const View& out) {
  group(rank).all_gather(in, out, dim_of(rank));
}

std::unique_ptr<Kernel> pair(Map forward, Map backward) {
  return std::make_unique<Pair>(std::move(forward), std::move(backward));
}

std::unique_ptr<Saved> PlainColumn::forward(Rank&, std::span<const View> inputs,
                                            std::span<const View> outputs) {
  const std::vector<double> x = to_doubles(inputs[0]), w = to_doubles(inputs[1]),
                            b = to_doubles(inputs[2]);
  const size_t o = b.size(), n = w.size() / o, T = x.size() / n;
  std::vector<double> y(T * o);
  for (size_t t = 0; t < T; ++t)
    for (size_t j = 0; j < o; ++j) {
      y[t * o + j] = b[j];
      for (size_t k = 0; k < n; ++k) y[t * o + j] += x[t * n + k] * w[j * n + k];
    }
  fill_from(outputs[0], y);
  auto saved = std::make_unique<Arguments>();
  saved->x = inputs[0], saved->w = inputs[1];
  return saved;
}

void PlainColumn::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                           std::span<const View> gradients) {
  const auto& saved = static_cast<const Arguments&>(state);
  const std::vector<double> x = to_doubles(saved.x), w = to_doubles(saved.w),
                            g = to_doubles(cotangents[0]);
  const size_t o = size_t(saved.w.shape[0]), n = w.size() / o, T = x.size() / n;
  std::vector<double> dx(x.size()), dw(w.size()), db(o);
  for (size_t t = 0; t < T; ++t)
    for (size_t j = 0; j < o; ++j) {
      db[j] += g[t * o + j];
      for (size_t k = 0; k < n; ++k) {
        dx[t * n + k] += g[t * o + j] * w[j * n + k];
        dw[j * n + k] += g[t * o + j] * x[t * n + k];
      }
    }
  const View partial = rank.workspace(gradients[0].dtype, gradients[0].shape);
  fill_from(partial, dx);
  rank.along(Axis::tp).all_reduce(partial, gradients[0]);
  if (rank.accumulates()) return add_to(gradients[1], dw), add_to(gradients[2], db);
  fill_from(gradients[1], dw);
  fill_from(gradients[2], db);
}

void add_plain(Registry& r) {
  Registry families;
  family_mapping(families);
  family_linear(families);
  for (const char* name : {"mapping_copy", "mapping_reduce", "mapping_scatter", "mapping_gather",
                           "linear_column", "linear_row"})
    r.add(families.contract(name));
  const auto add = [&](const char* contract, const Map& forward, const Map& backward) {
    r.add(Subject{"", contract, [=] { return pair(forward, backward); }, {}});
  };
  add("mapping_copy", identity, reduced);
  add("mapping_reduce", reduced, identity);
  add("mapping_scatter", own_block, gathered);
  add("mapping_gather", gathered, own_block);
  r.add(Subject{"", "linear_column", [] { return std::make_unique<PlainColumn>(); }, {}});
}

}  // namespace planted
}  // namespace shardproof
