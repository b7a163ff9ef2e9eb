#include "reference/delta.hpp"

#include "reference/sequences.hpp"

namespace shardproof::reference {
namespace {

// One head of one sequence, and what its tokens add to the state.
class Head {
 public:
  Head(const Delta& shape, const std::vector<size_t>& places, size_t head, In k, In v, In a, In b)
      : shape_(shape), places_(places), head_(head), k_(k), v_(v), a_(a), b_(b) {
    errors_.resize(length() * values());
    for (size_t t = 0; t < length(); ++t) {
      for (size_t j = 0; j < values(); ++j) error(t, j) = v_[value(t) + j];
      each_before(t, [&](size_t s, In decays) {
        if (s < t) add(minus() * score(k_, t, decays, s) * step(s), &error(s, 0), &error(t, 0));
      });
    }
  }

  size_t length() const { return places_.size(); }
  size_t keys() const { return size_t(shape_.key_dim); }
  size_t values() const { return size_t(shape_.value_dim); }
  size_t row(size_t t) const { return places_[t] * size_t(shape_.heads) + head_; }
  size_t key(size_t t) const { return row(t) * keys(); }
  size_t value(size_t t) const { return row(t) * values(); }
  double step(size_t t) const { return b_[row(t)]; }
  double minus() const { return shape_.magnitudes ? 1 : -1; }
  // u_t = b_t times this.
  double& error(size_t t, size_t j) { return errors_[t * values() + j]; }
  double added(size_t t, size_t j) const { return step(t) * errors_[t * values() + j]; }

  // sum_i x_ti D_i k_si
  double score(In x, size_t t, In decays, size_t s) const {
    double sum = 0;
    for (size_t i = 0; i < keys(); ++i) sum += x[key(t) + i] * decays[i] * k_[key(s) + i];
    return sum;
  }
  void add(double factor, const double* x, double* sum) const {
    for (size_t j = 0; j < values(); ++j) sum[j] += factor * x[j];
  }
  double decay(size_t t, size_t i) const { return shape_.gates == 1 ? a_[row(t)] : a_[key(t) + i]; }

  // visit(s, D(t, s)) for s = t, t-1, ..., 0.
  template <class Visit>
  void each_before(size_t t, const Visit& visit) const {
    Values decays(keys(), 1);
    for (size_t s = t + 1; s-- > 0;) {
      visit(s, decays);
      for (size_t i = 0; i < keys(); ++i) decays[i] *= decay(s, i);
    }
  }
  // visit(t, D(t, s)) for t = s, s+1, ...
  template <class Visit>
  void each_behind(size_t s, const Visit& visit) const {
    Values decays(keys(), 1);
    for (size_t t = s; t < length(); ++t) {
      for (size_t i = 0; t > s && i < keys(); ++i) decays[i] *= decay(t, i);
      visit(t, decays);
    }
  }

  void results(In q, Values& o) const {
    for (size_t t = 0; t < length(); ++t)
      each_before(t, [&](size_t s, In decays) {
        const double r = score(q, t, decays, s);
        for (size_t j = 0; j < values(); ++j) o[value(t) + j] += r * added(s, j);
      });
  }

  void gradients(In q, In g, DeltaGradients& out) const {
    const Values l = cotangents(q, g);
    const auto l_of = [&](size_t t) { return &l[t * values()]; };
    for (size_t t = 0; t < length(); ++t) {
      add(step(t), l_of(t), &out.v[value(t)]);
      for (size_t j = 0; j < values(); ++j) out.b[row(t)] += l_of(t)[j] * errors_[t * values() + j];
      each_before(t, [&](size_t s, In decays) {
        const double read = dot_added(&g[value(t)], s),
                     corrected = s < t ? minus() * step(t) * dot_added(l_of(t), s) : 0;
        for (size_t i = 0; i < keys(); ++i) {
          out.q[key(t) + i] += read * decays[i] * k_[key(s) + i];
          out.k[key(t) + i] += corrected * decays[i] * k_[key(s) + i];
          out.k[key(s) + i] += decays[i] * (read * q[key(t) + i] + corrected * k_[key(t) + i]);
        }
      });
      if (t > 0) decay_gradients(t, q, g, l, out.a);
    }
  }

 private:
  double dot_added(const double* x, size_t s) const {
    double sum = 0;
    for (size_t j = 0; j < values(); ++j) sum += x[j] * added(s, j);
    return sum;
  }

  // l, from the last token to the first.
  Values cotangents(In q, In g) const {
    Values l(length() * values());
    for (size_t s = length(); s-- > 0;)
      each_behind(s, [&](size_t t, In decays) {
        add(score(q, t, decays, s), &g[value(t)], &l[s * values()]);
        if (t > s)
          add(minus() * score(k_, t, decays, s) * step(t), &l[t * values()], &l[s * values()]);
      });
    return l;
  }

  void decay_gradients(size_t r, In q, In g, In l, Values& da) const {
    Values before(keys() * values()), behind(before.size());
    each_before(r - 1, [&](size_t s, In decays) {
      for (size_t i = 0; i < keys(); ++i)
        for (size_t j = 0; j < values(); ++j)
          before[i * values() + j] += decays[i] * k_[key(s) + i] * added(s, j);
    });
    each_behind(r, [&](size_t t, In decays) {
      for (size_t i = 0; i < keys(); ++i)
        for (size_t j = 0; j < values(); ++j)
          behind[i * values() + j] +=
              decays[i] * (q[key(t) + i] * g[value(t) + j] +
                           minus() * step(t) * k_[key(t) + i] * l[t * values() + j]);
    });
    for (size_t i = 0; i < keys(); ++i)
      for (size_t j = 0; j < values(); ++j)
        da[shape_.gates == 1 ? row(r) : key(r) + i] +=
            before[i * values() + j] * behind[i * values() + j];
  }

  const Delta& shape_;
  const std::vector<size_t>& places_;
  size_t head_;
  In k_, v_, a_, b_;
  Values errors_;
};

template <class Visit>
void each_head(const Delta& d, std::span<const int64_t> sequences, In k, In v, In a, In b,
               const Visit& visit) {
  for (const auto& places : places_by_sequence(sequences))
    for (size_t h = 0; h < size_t(d.heads); ++h) visit(Head(d, places, h, k, v, a, b));
}

}  // namespace

Values delta(const Delta& shape, std::span<const int64_t> sequences, In q, In k, In v, In a, In b) {
  Values o(v.size());
  each_head(shape, sequences, k, v, a, b, [&](const Head& h) { h.results(q, o); });
  return o;
}

DeltaGradients delta_backward(const Delta& shape, std::span<const int64_t> sequences, In q, In k,
                              In v, In a, In b, In g) {
  DeltaGradients out{Values(q.size()), Values(k.size()), Values(v.size()), Values(a.size()),
                     Values(b.size())};
  each_head(shape, sequences, k, v, a, b, [&](const Head& h) { h.gradients(q, g, out); });
  return out;
}

DeltaRoundings delta_roundings(const Delta& d, int64_t length, int64_t ranks) {
  const int64_t k = d.key_dim, v = d.value_dim, state = (length + 2 * ranks) * (k + 6);
  return {state + k + 1,
          state + v + 1,
          state + k + v + 4,
          state + k + 2,
          state + k + 4 + (d.gates == 1 ? k * v : v),
          state + 2 * k + v + 3};
}

}  // namespace shardproof::reference
