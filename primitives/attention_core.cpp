#include "primitives/attention_core.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace shardproof::primitives {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class A>
A dot(const double* a, const double* b, int64_t n) {
  A sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += A(a[i]) * A(b[i]);
  return sum;
}

// x += t, the sum rounded to A.
template <class A>
void accumulate(double& x, A t) {
  x = double(A(A(x) + t));
}

std::vector<size_t> seen(std::span<const double> bias, size_t i, size_t keys) {
  std::vector<size_t> list;
  for (size_t j = 0; j < keys; ++j)
    if (bias[i * keys + j] > -infinity) list.push_back(j);
  return list;
}

}  // namespace

Softmax::Softmax(int64_t rows, int64_t value_dim)
    : m(size_t(rows), -infinity), l(size_t(rows)), a(size_t(rows * value_dim)) {}

// ---- The steps

std::vector<Label> AttentionCore::queries(const ContextLine& c, int rank) const {
  if (c.documents.empty())
    return local_labels(c, labels_of_sequence(c.rows, c.key_rows - c.rows), rank);
  // The last query of a document stands at its last key.
  std::vector<Label> all = labels_of_documents(c);
  for (Label& label : all)
    if (label.sequence >= 0)
      label.position +=
          c.key_documents[size_t(label.sequence)] - c.documents[size_t(label.sequence)];
  return local_labels(c, all, rank);
}

std::vector<Label> AttentionCore::keys(const ContextLine& c, int rank) const {
  const ContextLine k = of_keys(c);
  return local_labels(
      k, k.documents.empty() ? labels_of_sequence(k.rows, 0) : labels_of_documents(k), rank);
}

double AttentionCore::scale(const Case& line, const HeadShape& s) const {
  return number_of(line, "scale", 1 / std::sqrt(double(s.key_dim)));
}

int64_t AttentionCore::kv_head(const HeadShape& s, int64_t head) const {
  return head / (s.heads / s.kv_heads);
}

bool AttentionCore::sees(const MaskRule& rule, const KeyBlock&, const Label& query,
                         const Label& key) const {
  if (query.sequence < 0 || query.sequence != key.sequence) return false;
  const int64_t ahead = key.position - query.position;
  const Window& w = rule.window;
  return (ahead <= 0 || !rule.causal) && (w.left < 0 || -ahead <= w.left) &&
         (w.right < 0 || ahead <= w.right);
}

void AttentionCore::mask(const MaskRule& rule, const KeyBlock& b, Values& bias) const {
  for (size_t i = 0; i < b.queries.size(); ++i)
    for (size_t j = 0; j < b.keys.size(); ++j)
      bias[i * b.keys.size() + j] = sees(rule, b, b.queries[i], b.keys[j]) ? 0 : -infinity;
}

void AttentionCore::merge(Softmax& sum, const Softmax& block, size_t at, size_t value_dim,
                          const KeyBlock&) const {
  const double m = std::max(sum.m[at], block.m[at]);
  if (m == -infinity) return;
  const double kept = std::exp(sum.m[at] - m), added = std::exp(block.m[at] - m);
  sum.m[at] = m;
  sum.l[at] = kept * sum.l[at] + added * block.l[at];
  for (size_t c = at * value_dim; c < (at + 1) * value_dim; ++c)
    sum.a[c] = kept * sum.a[c] + added * block.a[c];
}

Statistics AttentionCore::statistics(const AttentionPass&, const KeyBlock&,
                                     const Statistics& merged, std::span<const double>,
                                     std::span<const double>, std::span<const double>) const {
  return merged;
}

// ---- A pass

AttentionPass::AttentionPass(const Case& line_, const AttentionCore& core_, const HeadShape& s,
                             bool single_, Values q_, std::vector<Label> queries_)
    : line(line_),
      core(core_),
      shape(s),
      single(single_),
      scale(core_.scale(line_, s)),
      softcap(number_of(line_, "softcap", 0)),
      rule{line_.text("mask") == "causal", window_of(line_)},
      q(std::move(q_)),
      queries(std::move(queries_)) {}

KeyBlock AttentionPass::block(std::span<const Label> keys, int rank, int owner, int ranks,
                              int step) const {
  return {queries, keys, rank, owner, ranks, step};
}

bool AttentionPass::biases(const KeyBlock& b, Values& bias) const {
  bias.assign(b.queries.size() * b.keys.size(), 0);
  core.mask(rule, b, bias);
  return std::any_of(bias.begin(), bias.end(), [](double x) { return x > -infinity; });
}

template <class A>
void AttentionPass::attend_in(const KeyBlock& b, std::span<const double> bias,
                              std::span<const double> k, std::span<const double> v,
                              Softmax& out) const {
  const int64_t dk = shape.key_dim, dv = shape.value_dim;
  std::vector<A> score, o;  // of a row
  for (size_t i = 0; i < b.queries.size(); ++i) {
    const auto keys = seen(bias, i, b.keys.size());
    pairs += int64_t(keys.size());
    if (keys.empty()) continue;
    for (int64_t h = 0; h < shape.heads; ++h) {
      const size_t at = i * size_t(shape.heads) + size_t(h);
      const int64_t group = core.kv_head(shape, h);
      score.clear();
      A greatest = -std::numeric_limits<A>::infinity(), sum = 0;
      for (size_t j : keys) {
        A s = A(scale) * dot<A>(&q[at * size_t(dk)],
                                &k[(j * size_t(shape.kv_heads) + size_t(group)) * size_t(dk)], dk);
        if (softcap > 0) s = A(softcap) * std::tanh(s / A(softcap));
        score.push_back(s + A(bias[i * b.keys.size() + j]));
        greatest = std::max(greatest, score.back());
      }
      o.assign(static_cast<size_t>(dv), 0);
      for (size_t n = 0; n < keys.size(); ++n) {
        const A p = std::exp(score[n] - greatest);
        sum += p;
        const double* value = &v[(keys[n] * size_t(shape.kv_heads) + size_t(group)) * size_t(dv)];
        for (int64_t c = 0; c < dv; ++c) o[size_t(c)] += p * A(value[c]);
      }
      out.m[at] = double(greatest), out.l[at] = double(sum);
      for (int64_t c = 0; c < dv; ++c) out.a[at * size_t(dv) + size_t(c)] = double(o[size_t(c)]);
    }
  }
}

Softmax AttentionPass::attend(const KeyBlock& b, std::span<const double> k,
                              std::span<const double> v) const {
  Softmax out = nothing();
  Values bias;
  if (!biases(b, bias)) return out;
  if (single)
    attend_in<float>(b, bias, k, v, out);
  else
    attend_in<double>(b, bias, k, v, out);
  return out;
}

void AttentionPass::add(Softmax& sum, const KeyBlock& b, std::span<const double> k,
                        std::span<const double> v) const {
  const Softmax block = attend(b, k, v);
  for (size_t at = 0; at < size_t(rows()); ++at)
    core.merge(sum, block, at, size_t(shape.value_dim), b);
  for (double& x : sum.l) x = kept(x);
  for (double& x : sum.a) x = kept(x);
}

Values AttentionPass::output(const Softmax& s) const {
  Values o(s.a.size());
  const size_t dv = size_t(shape.value_dim);
  for (size_t i = 0; i < o.size(); ++i) o[i] = s.l[i / dv] == 0 ? 0 : kept(s.a[i] / s.l[i / dv]);
  return o;
}

Values AttentionPass::lse(const Softmax& s) const {
  Values lse(s.m.size());
  for (size_t i = 0; i < lse.size(); ++i)
    lse[i] = s.l[i] == 0 ? -infinity : kept(s.m[i] + std::log(s.l[i]));
  return lse;
}

Statistics AttentionPass::statistics(std::span<const double> o, std::span<const double> lse,
                                     std::span<const double> g,
                                     std::span<const double> g_lse) const {
  Statistics s{Values(lse.begin(), lse.end()), Values(lse.size())};
  const int64_t dv = shape.value_dim;
  for (size_t at = 0; at < lse.size(); ++at) {
    const double *own = &o[at * size_t(dv)], *cotangent = &g[at * size_t(dv)];
    const double delta =
        single ? double(dot<float>(own, cotangent, dv)) : dot<double>(own, cotangent, dv);
    s.delta[at] = g_lse.empty() ? delta : kept(delta - g_lse[at]);
  }
  return s;
}

template <class A>
void AttentionPass::add_gradients_in(const KeyBlock& b, std::span<const double> bias,
                                     const Statistics& row, std::span<const double> k,
                                     std::span<const double> v, std::span<const double> g,
                                     Values& dq, Values& dk, Values& dv) const {
  const int64_t nk = shape.key_dim, nv = shape.value_dim;
  for (size_t i = 0; i < b.queries.size(); ++i) {
    const auto keys = seen(bias, i, b.keys.size());
    for (int64_t h = 0; h < shape.heads; ++h) {
      const size_t at = i * size_t(shape.heads) + size_t(h);
      const double *qi = &q[at * size_t(nk)], *gi = &g[at * size_t(nv)];
      for (size_t j : keys) {
        const size_t key = j * size_t(shape.kv_heads) + size_t(core.kv_head(shape, h));
        const double *kj = &k[key * size_t(nk)], *vj = &v[key * size_t(nv)];
        A s = A(scale) * dot<A>(qi, kj, nk), slope = 1;
        if (softcap > 0) {
          const A t = std::tanh(s / A(softcap));
          s = A(softcap) * t, slope = 1 - t * t;
        }
        const A p = std::exp(s + A(bias[i * b.keys.size() + j]) - A(row.lse[at]));
        const A ds = A(scale) * (p * (dot<A>(gi, vj, nv) - A(row.delta[at])) * slope);
        for (int64_t c = 0; c < nv; ++c)
          accumulate<A>(dv[key * size_t(nv) + size_t(c)], p * A(gi[c]));
        for (int64_t c = 0; c < nk; ++c) {
          accumulate<A>(dq[at * size_t(nk) + size_t(c)], ds * A(kj[c]));
          accumulate<A>(dk[key * size_t(nk) + size_t(c)], ds * A(qi[c]));
        }
      }
    }
  }
}

void AttentionPass::add_gradients(const KeyBlock& b, const Statistics& merged,
                                  std::span<const double> k, std::span<const double> v,
                                  std::span<const double> g, Values& dq, Values& dk,
                                  Values& dv) const {
  Values bias;
  if (!biases(b, bias)) return;
  const Statistics row = core.statistics(*this, b, merged, k, v, g);
  if (single)
    add_gradients_in<float>(b, bias, row, k, v, g, dq, dk, dv);
  else
    add_gradients_in<double>(b, bias, row, k, v, g, dq, dk, dv);
}

}  // namespace shardproof::primitives
