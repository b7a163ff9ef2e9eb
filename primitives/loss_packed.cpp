#include "primitives/loss_packed.hpp"

#include <algorithm>
#include <cmath>

namespace shardproof::primitives {
namespace {

constexpr int64_t none = -100;

bool in_single(const Case& line) {
  return line.dtype() != DType::f64 && dtype_from(line.text("acc")) != DType::f64;
}

// log sum exp of a row, in A.
template <class A>
A lse_of(const double* z, int64_t classes) {
  A greatest = A(z[0]), sum = 0;
  for (int64_t j = 1; j < classes; ++j) greatest = std::max(greatest, A(z[j]));
  for (int64_t j = 0; j < classes; ++j) sum += std::exp(A(z[j]) - greatest);
  return greatest + std::log(sum);
}

template <class A>
double weighted_sum(const std::vector<double>& z, const Targets& t, int64_t classes) {
  A sum = 0;
  for (size_t i = 0; i < t.labels.size(); ++i) {
    if (t.labels[i] == none || t.weights[i] == 0) continue;
    const double* row = &z[i * size_t(classes)];
    sum += A(t.weights[i]) * (lse_of<A>(row, classes) - A(row[t.labels[i]]));
  }
  return double(sum);
}

template <class A>
std::vector<double> gradient(const std::vector<double>& z, const Targets& t, int64_t classes,
                             double factor) {
  std::vector<double> d(z.size());
  for (size_t i = 0; i < t.labels.size(); ++i) {
    if (t.labels[i] == none || t.weights[i] == 0) continue;
    const double* row = &z[i * size_t(classes)];
    const A lse = lse_of<A>(row, classes), scale = A(factor) * A(t.weights[i]);
    for (int64_t j = 0; j < classes; ++j)
      d[i * size_t(classes) + size_t(j)] =
          double(scale * (std::exp(A(row[j]) - lse) - A(j == t.labels[i])));
  }
  return d;
}

struct LossSaved : Saved {
  View logits;
  Targets targets;
  double factor = 0;
};

std::vector<int64_t> integers(const View& v) {
  std::vector<int64_t> list;
  for (double x : to_doubles(v)) list.push_back(int64_t(x));
  return list;
}

// Sums of numbers over a group; they travel in the accumulation type.
std::vector<double> summed(Rank& rank, Communicator& group, std::vector<double> values,
                           Reduce reduce = Reduce::sum) {
  const DType dtype = in_single(rank.line()) ? DType::f32 : DType::f64;
  const View own = rank.workspace(dtype, {int64_t(values.size())}),
             sum = rank.workspace(dtype, {int64_t(values.size())});
  fill_from(own, values);
  group.all_reduce(own, sum, reduce);
  return to_doubles(sum);
}

}  // namespace

std::optional<Rejected> refused_loss(const Case& line) {
  if (auto refused = refused_context(line)) return refused;
  if (line.ranks(Axis::tp) > 1)
    return Rejected("tp=1", "tp=" + line.text("tp"), "the classes are not cut here");
  return {};
}

Targets LossPacked::targets(const Case& line, const ContextLine& c, const std::vector<int64_t>& ids,
                            int r, int64_t first_sequence) const {
  const auto by_row = c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c);
  const int64_t batch = c.batch, prompt = line.at("prompt");
  Targets t;
  for (int64_t row : owned_rows(c, c.rows, r))
    for (int64_t b = 0; b < batch; ++b) {
      const Label& own = by_row[size_t(row)];
      const bool last =
          row + 1 == c.rows || by_row[size_t(row + 1)].sequence != own.sequence || own.sequence < 0;
      const int64_t document = own.sequence + first_sequence + b;
      t.labels.push_back(last ? none : ids[size_t((row + 1) * batch + b)]);
      t.weights.push_back(own.position < prompt * (1 + document % 3) ? 0 : 1);
    }
  return t;
}

LossPacked::Normalised LossPacked::normalise(Rank& rank, const Sums& own) const {
  if (rank.line().text("normalise") == "tokens") {
    const auto s =
        summed(rank, rank.along(std::vector<Axis>{Axis::cp, Axis::dp}), {own.loss, own.count});
    const double count = std::max(1.0, s[1]);
    return {s[0] / count, count, 1};
  }
  const auto s = summed(rank, rank.along(Axis::cp), {own.loss, own.count});
  const double count = std::max(1.0, s[1]), groups = rank.along(Axis::dp).size();
  return {summed(rank, rank.along(Axis::dp), {s[0] / count})[0] / groups, count, groups};
}

// inputs logits, ids; output loss.
std::unique_ptr<Saved> LossPacked::forward(Rank& rank, std::span<const View> inputs,
                                           std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_loss(line)) throw *refused;
  auto saved = std::make_unique<LossSaved>();
  saved->logits = inputs[0];
  const ContextLine c(line);
  saved->targets = targets(line, c, integers(inputs[1]), rank.coordinate(Axis::cp),
                           c.batch * rank.coordinate(Axis::dp));
  const int64_t classes = line.at("vocab");
  const auto z = to_doubles(inputs[0]);
  Sums own;
  own.loss = in_single(line) ? weighted_sum<float>(z, saved->targets, classes)
                             : weighted_sum<double>(z, saved->targets, classes);
  for (size_t i = 0; i < saved->targets.labels.size(); ++i)
    if (saved->targets.labels[i] != none) own.count += saved->targets.weights[i];
  const Normalised n = normalise(rank, own);
  saved->factor = 1 / (n.count * n.groups);
  fill_from(outputs[0], std::vector<double>{n.loss});
  return saved;
}

void LossPacked::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                          std::span<const View> gradients) {
  const auto& saved = static_cast<const LossSaved&>(state);
  const int64_t classes = rank.line().at("vocab");
  const auto z = to_doubles(saved.logits);
  const double factor = to_doubles(cotangents[0])[0] * saved.factor;
  fill_from(gradients[0], in_single(rank.line())
                              ? gradient<float>(z, saved.targets, classes, factor)
                              : gradient<double>(z, saved.targets, classes, factor));
}

}  // namespace shardproof::primitives
