#include "reference/scan.hpp"

#include "reference/sequences.hpp"

namespace shardproof::reference {
namespace {

// One head of one sequence: rows of tensors by their place in it.
struct Head {
  const Scan& shape;
  const std::vector<size_t>& places;
  size_t head;

  size_t length() const { return places.size(); }
  size_t row(size_t t) const { return places[t] * size_t(shape.heads) + head; }
  size_t key(size_t t) const { return row(t) * size_t(shape.key_dim); }
  size_t value(size_t t) const { return row(t) * size_t(shape.value_dim); }
  double keys(In x, size_t t, In y, size_t s) const {
    return dot(x.subspan(key(t)), y.subspan(key(s)), shape.key_dim);
  }
  double values(In x, size_t t, In y, size_t s) const {
    return dot(x.subspan(value(t)), y.subspan(value(s)), shape.value_dim);
  }
  static double dot(In x, In y, int64_t n) {
    double sum = 0;
    for (size_t i = 0; i < size_t(n); ++i) sum += x[i] * y[i];
    return sum;
  }
};

template <class Visit>
void each_head(const Scan& s, std::span<const int64_t> sequences, const Visit& visit) {
  for (const auto& places : places_by_sequence(sequences))
    for (size_t h = 0; h < size_t(s.heads); ++h) visit(Head{s, places, h});
}

void add(double factor, In x, size_t from, Values& sum, size_t to, int64_t n) {
  for (size_t i = 0; i < size_t(n); ++i) sum[to + i] += factor * x[from + i];
}

// Calls visit(s, D(t, s)) for s = t, t-1, ..., 0.
template <class Visit>
void each_before(const Head& h, In a, size_t t, const Visit& visit) {
  double decay = 1;
  for (size_t s = t + 1; s-- > 0; decay *= a[h.row(s)]) visit(s, decay);
}

// sum += factor x y^T, [d_k, d_v].
void add_outer(const Head& h, double factor, In x, size_t t, In y, Values& sum) {
  const size_t keys = size_t(h.shape.key_dim), n = size_t(h.shape.value_dim);
  const double *column = &x[h.key(t)], *row = &y[h.value(t)];
  for (size_t i = 0; i < keys; ++i)
    for (size_t j = 0; j < n; ++j) sum[i * n + j] += factor * column[i] * row[j];
}

// sum over s < i of D(i-1,s) k_s v_s^T, with that over t >= i of D(t,i) q_t g_t^T.
double decay_gradient(const Head& h, In q, In k, In v, In a, In g, size_t i) {
  Values before(size_t(h.shape.key_dim * h.shape.value_dim)), behind(before.size());
  each_before(h, a, i - 1, [&](size_t s, double d) { add_outer(h, d, k, s, v, before); });
  double decay = 1;
  for (size_t t = i; t < h.length(); ++t) {
    if (t > i) decay *= a[h.row(t)];
    add_outer(h, decay, q, t, g, behind);
  }
  return Head::dot(before, behind, int64_t(before.size()));
}

}  // namespace

Values scan(const Scan& shape, std::span<const int64_t> sequences, In q, In k, In v, In a) {
  Values o(v.size());
  each_head(shape, sequences, [&](const Head& h) {
    for (size_t t = 0; t < h.length(); ++t)
      each_before(h, a, t, [&](size_t s, double d) {
        add(d * h.keys(q, t, k, s), v, h.value(s), o, h.value(t), shape.value_dim);
      });
  });
  return o;
}

ScanGradients scan_backward(const Scan& shape, std::span<const int64_t> sequences, In q, In k, In v,
                            In a, In g) {
  ScanGradients out{Values(q.size()), Values(k.size()), Values(v.size()), Values(a.size())};
  each_head(shape, sequences, [&](const Head& h) {
    for (size_t t = 0; t < h.length(); ++t) {
      each_before(h, a, t, [&](size_t s, double d) {
        const double scores = d * h.keys(q, t, k, s), weights = d * h.values(g, t, v, s);
        add(weights, k, h.key(s), out.q, h.key(t), shape.key_dim);
        add(weights, q, h.key(t), out.k, h.key(s), shape.key_dim);
        add(scores, g, h.value(t), out.v, h.value(s), shape.value_dim);
      });
      if (t > 0) out.a[h.row(t)] = decay_gradient(h, q, k, v, a, g, t);
    }
  });
  return out;
}

ScanRoundings scan_roundings(const Scan& s, int64_t length, int64_t ranks) {
  const int64_t state = 2 * (length + ranks) + 1;
  return {state + s.key_dim + 1, state + s.value_dim + 1, state + s.value_dim + 1,
          state + s.key_dim + 1, state + 2 * ranks + 2 + s.key_dim * s.value_dim};
}

}  // namespace shardproof::reference
