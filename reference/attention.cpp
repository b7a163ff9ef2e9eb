// Row by row: the scores of one query and one head on the keys that it sees, then sums over them.
#include "reference/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardproof::reference {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

void require(size_t met, int64_t expected, const char* name) {
  if (int64_t(met) != expected)
    throw std::invalid_argument(std::string("reference attention: expected ") + name + " of " +
                                std::to_string(expected) + " elements, met " + std::to_string(met));
}

void require_shapes(const Attention& a, In q, In k, In v) {
  if (a.kv_heads < 1 || a.heads % a.kv_heads != 0)
    throw std::invalid_argument("reference attention: expected heads divisible by kv_heads, met " +
                                std::to_string(a.heads) + " and " + std::to_string(a.kv_heads));
  const auto queries = int64_t(a.queries.size()), keys = int64_t(a.keys.size());
  require(q.size(), queries * a.heads * a.key_dim, "q");
  require(k.size(), keys * a.kv_heads * a.key_dim, "k");
  require(v.size(), keys * a.kv_heads * a.value_dim, "v");
}

double dot(In a, In b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Where the vectors of a token and head lie; of keys and values, of the group that heads share.
struct Rows {
  const Attention& a;
  size_t group(int64_t head) const { return size_t(head / (a.heads / a.kv_heads)); }
  size_t query(size_t i, int64_t head) const { return i * size_t(a.heads) + size_t(head); }
  size_t key(size_t j, size_t group) const { return j * size_t(a.kv_heads) + group; }
  size_t dk() const { return size_t(a.key_dim); }
  size_t dv() const { return size_t(a.value_dim); }
  In q(In all, size_t i, int64_t h) const { return all.subspan(query(i, h) * dk(), dk()); }
  In k(In all, size_t j, size_t group) const { return all.subspan(key(j, group) * dk(), dk()); }
  In v(In all, size_t j, size_t group) const { return all.subspan(key(j, group) * dv(), dv()); }
  In o(In all, size_t i, int64_t h) const { return all.subspan(query(i, h) * dv(), dv()); }
};

// One row of the softmax: the keys that a query sees, in order, with scores and probabilities.
struct Row {
  std::span<const size_t> keys;
  Values raw, score, p;  // scale q k, the same after the cap, exp(score - lse)
  double lse = -infinity, greatest = -infinity;
};

std::vector<std::vector<size_t>> seen_keys(const Attention& a) {
  std::vector<std::vector<size_t>> seen(a.queries.size());
  for (size_t i = 0; i < seen.size(); ++i)
    for (size_t j = 0; j < a.keys.size(); ++j)
      if (visible(a.mask, a.queries[i], a.keys[j])) seen[i].push_back(j);
  return seen;
}

void softmax(const Attention& a, In q, In k, size_t i, int64_t h, Row& r) {
  const Rows rows{a};
  const In query = rows.q(q, i, h);
  const size_t group = rows.group(h);
  r.raw.clear(), r.score.clear(), r.p.clear();
  r.lse = r.greatest = -infinity;
  for (size_t j : r.keys) {
    r.raw.push_back(a.scale * dot(query, rows.k(k, j, group)));
    r.score.push_back(a.softcap > 0 ? a.softcap * std::tanh(r.raw.back() / a.softcap)
                                    : r.raw.back());
    r.greatest = std::max(r.greatest, r.score.back());
  }
  if (r.keys.empty()) return;
  double sum = 0;
  for (double s : r.score) r.p.push_back(std::exp(s - r.greatest));
  for (double p : r.p) sum += p;
  r.lse = r.greatest + std::log(sum);
  for (double& p : r.p) p /= sum;
}

void weighted(const Rows& rows, const Row& r, In v, int64_t h, double* o) {
  const size_t group = rows.group(h);
  for (size_t n = 0; n < r.keys.size(); ++n) {
    const In value = rows.v(v, r.keys[n], group);
    for (size_t d = 0; d < value.size(); ++d) o[d] += r.p[n] * value[d];
  }
}

// Calls visit(i, h, row) for every query and head.
template <class Visit>
void each_row(const Attention& a, In q, In k, const Visit& visit) {
  const auto seen = seen_keys(a);
  Row row;
  for (size_t i = 0; i < seen.size(); ++i) {
    row.keys = seen[i];
    for (int64_t h = 0; h < a.heads; ++h) {
      softmax(a, q, k, i, h, row);
      visit(i, h, std::as_const(row));
    }
  }
}

}  // namespace

bool visible(const AttentionMask& mask, const Label& query, const Label& key) {
  if (query.sequence < 0 || query.sequence != key.sequence) return false;
  const int64_t ahead = key.position - query.position;
  if (mask.causal && ahead > 0) return false;
  return (mask.left < 0 || -ahead <= mask.left) && (mask.right < 0 || ahead <= mask.right);
}

AttentionResult attention(const Attention& a, In q, In k, In v) {
  require_shapes(a, q, k, v);
  const Rows rows{a};
  const size_t count = a.queries.size() * size_t(a.heads);
  AttentionResult result{Values(count * rows.dv()), Values(count)};
  each_row(a, q, k, [&](size_t i, int64_t h, const Row& r) {
    result.lse[rows.query(i, h)] = r.lse;
    weighted(rows, r, v, h, &result.o[rows.query(i, h) * rows.dv()]);
  });
  return result;
}

AttentionGradients attention_backward(const Attention& a, In q, In k, In v, In g, In g_lse) {
  require_shapes(a, q, k, v);
  const Rows rows{a};
  AttentionGradients d{Values(q.size()), Values(k.size()), Values(v.size())};
  each_row(a, q, k, [&](size_t i, int64_t h, const Row& r) {
    Values o(rows.dv());
    weighted(rows, r, v, h, o.data());
    const In go = rows.o(g, i, h), qi = rows.q(q, i, h);
    const size_t group = rows.group(h);
    const double delta = dot(go, o) - (g_lse.empty() ? 0 : g_lse[rows.query(i, h)]);
    for (size_t n = 0; n < r.keys.size(); ++n) {
      const size_t key = rows.key(r.keys[n], group);
      const In kj = rows.k(k, r.keys[n], group), vj = rows.v(v, r.keys[n], group);
      const double cap = a.softcap > 0 ? r.score[n] / a.softcap : 0;
      const double ds = a.scale * r.p[n] * (dot(go, vj) - delta) * (1 - cap * cap);
      for (size_t c = 0; c < rows.dv(); ++c) d.v[key * rows.dv() + c] += r.p[n] * go[c];
      for (size_t c = 0; c < rows.dk(); ++c) {
        d.q[rows.query(i, h) * rows.dk() + c] += ds * kj[c];
        d.k[key * rows.dk() + c] += ds * qi[c];
      }
    }
  });
  return d;
}

namespace {

// Ulps of one exp, log or tanh with the operations around it: glibc documents at most 2 for each.
constexpr double function_ulps = 4;

double gamma_of(double n, double u) { return n * u < 1 ? n * u / (1 - n * u) : infinity; }

// An input, and how far an implementation's may be from it.
struct Given {
  In value, errors;  // errors empty: none
  Values most;       // |value| + error
  Given(In v, In e) : value(v), errors(e), most(v.size()) {
    for (size_t i = 0; i < most.size(); ++i) most[i] = std::abs(v[i]) + (e.empty() ? 0 : e[i]);
  }
};

// A vector of it.
struct Vector {
  In value, errors, most;
  double error(size_t c) const { return errors.empty() ? 0 : errors[c]; }
};
Vector vector_of(const Given& all, size_t row, size_t width) {
  const size_t first = row * width;
  return {all.value.subspan(first, width),
          all.errors.empty() ? all.errors : all.errors.subspan(first, width),
          In(all.most).subspan(first, width)};
}

// What <x, y> may be off by: its own rounding, and the errors of both sides.
double dot_error(const Vector& x, const Vector& y, double gamma) {
  double error = 0;
  if (x.errors.empty() && y.errors.empty()) {
    for (size_t c = 0; c < x.most.size(); ++c) error += gamma * x.most[c] * y.most[c];
    return error;
  }
  for (size_t c = 0; c < x.value.size(); ++c)
    error +=
        std::abs(x.value[c]) * y.error(c) + x.error(c) * y.most[c] + gamma * x.most[c] * y.most[c];
  return error;
}

// The errors of one row of the softmax.
struct RowBounds {
  Values score;  // e_ij, after the cap
  Values o;      // of O_i as a backward reads it
  double lse = 0;
};

Values score_errors(const Attention& a, const Row& r, const Vector& qi, const Given& k, int64_t h,
                    double u) {
  const Rows rows{a};
  const double gamma = gamma_of(double(a.key_dim) + 2, u);
  const size_t group = rows.group(h);
  Values e;
  e.reserve(r.keys.size());
  for (size_t n = 0; n < r.keys.size(); ++n) {
    const Vector kj = vector_of(k, rows.key(r.keys[n], group), rows.dk());
    double error = std::abs(a.scale) * dot_error(qi, kj, gamma);
    if (a.softcap > 0) {
      // |tanh'| is at most 1, and 1 - tanh^2 within the error of its argument.
      const double cap = r.score[n] / a.softcap, slope = 1 - cap * cap;
      error = error * std::min(1.0, slope + 2 * error / a.softcap) +
              function_ulps * u * std::abs(r.score[n]);
    }
    e.push_back(error);
  }
  return e;
}

// exp(e) - 1 of an error e of an exponent: what it makes of the exponential, relatively. At most
// e + e^2 for e < 1. From e = 4 on a probability may be anything: so much that no value reaches it,
// and still a number, as a probability of zero has no error.
double growth_of(double e) {
  if (!(e < 4)) return 1e100;
  return e < 1e-6 ? e + e * e : std::expm1(e);
}

// A score that is off by at most e_ij moves P_ij by a factor of at most exp(e_ij + log sum_k P_ik
// exp(e_ik)), either way, and lse by the logarithm.
RowBounds row_bounds(const Attention& a, const AttentionRounding& rounding, const Row& r,
                     const Given& v, Values scores, int64_t h) {
  const Rows rows{a};
  const double u = rounding.accumulate,
               n = double(r.keys.size()) + function_ulps * double(rounding.ranks);
  RowBounds b;
  b.o.assign(rows.dv(), 0);
  const size_t group = rows.group(h);
  double sum = 0;
  Values error;
  error.reserve(r.keys.size());
  for (size_t j = 0; j < r.keys.size(); ++j) {
    error.push_back(scores[j] + u * (std::abs(r.score[j] - r.greatest) + function_ulps));
    sum += r.p[j] * growth_of(error.back());
  }
  const double shift = std::log1p(sum);
  Values lost(rows.dv());
  for (size_t j = 0; j < r.keys.size(); ++j) {
    const Vector value = vector_of(v, rows.key(r.keys[j], group), rows.dv());
    const double grown = growth_of(error[j] + shift) + 2 * n * u,
                 rounded = rounding.factors * (1 + grown);
    for (size_t d = 0; d < rows.dv(); ++d) {
      b.o[d] += r.p[j] * ((grown + rounded) * value.most[d] + value.error(d));
      lost[d] += value.most[d] + 1;
    }
  }
  for (size_t d = 0; d < rows.dv(); ++d) b.o[d] += rounding.tiny * lost[d];
  b.lse = r.keys.empty() ? 0 : shift + n * u + u * (std::abs(r.lse) + function_ulps);
  b.score = std::move(scores);
  return b;
}

// Sums that the bounds of the gradients are made of. What is lost below the normal range is counted
// in units of `tiny`: a product with a subnormal costs a hundred times as much as any other.
struct Sums {
  Values error, magnitude, lost;
  explicit Sums(size_t n) : error(n), magnitude(n), lost(n) {}
  void add(size_t at, double e, double m, double l) {
    error[at] += e, magnitude[at] += m, lost[at] += l;
  }
};

// error + gamma_n magnitude, and the roundings of the parts that ranks send to each other.
Values bound_of(const Sums& s, double terms, const AttentionRounding& r) {
  const double growth = gamma_of(terms, r.accumulate) + (r.ranks > 1 ? r.ranks * r.wire : 0);
  Values b(s.error.size());
  for (size_t i = 0; i < b.size(); ++i) {
    const double error = s.error[i] + r.tiny * s.lost[i];
    b[i] = error + growth * (s.magnitude[i] + error) + (r.ranks > 1 ? r.ranks * r.wire_tiny : 0);
  }
  return b;
}

}  // namespace

AttentionBounds attention_bounds(const Attention& a, const AttentionRounding& rounding, In q, In k,
                                 In v, In g, In g_lse, const AttentionErrors& errors) {
  require_shapes(a, q, k, v);
  const Rows rows{a};
  const double u = rounding.accumulate, twice_tiny = 2 * rounding.tiny;
  const size_t count = a.queries.size() * size_t(a.heads);
  AttentionBounds b;
  b.o.resize(count * rows.dv()), b.lse.resize(count);
  Sums dq(q.size()), dk(k.size()), dv(v.size());
  const Given queries(q, errors.q), keys(k, errors.k), values(v, errors.v), cotangents(g, errors.g);
  each_row(a, q, k, [&](size_t i, int64_t h, const Row& r) {
    const size_t at = rows.query(i, h), group = rows.group(h);
    const Vector qi = vector_of(queries, at, rows.dk());
    const RowBounds row = row_bounds(a, rounding, r, values, score_errors(a, r, qi, keys, h, u), h);
    std::copy(row.o.begin(), row.o.end(), b.o.begin() + int64_t(at * rows.dv()));
    b.lse[at] = row.lse;
    if (g.empty()) return;

    Values o(rows.dv());
    weighted(rows, r, v, h, o.data());
    const Vector go = vector_of(cotangents, at, rows.dv());
    const double cotangent = g_lse.empty() ? 0 : g_lse[at],
                 gamma_d = gamma_of(double(rows.dv()) + 1, u);
    const double lse_error = row.lse + rounding.statistics * (std::abs(r.lse) + row.lse);
    Values o_error = row.o;
    for (size_t c = 0; c < rows.dv(); ++c)
      o_error[c] += rounding.output * (std::abs(o[c]) + row.o[c]);
    const Given own(o, o_error);
    const double delta = dot(go.value, o),
                 delta_error = dot_error(go, {own.value, own.errors, own.most}, gamma_d);
    for (size_t n = 0; n < r.keys.size(); ++n) {
      const size_t key = rows.key(r.keys[n], group);
      const Vector kj = vector_of(keys, key, rows.dk()), vj = vector_of(values, key, rows.dv());
      // exp(S - lse): relative error of P, to first order and beyond it.
      const double argument = row.score[n] + u * std::abs(r.score[n] - r.lse) +
                              u * std::abs(r.lse) + lse_error + function_ulps * u;
      const double p_error = growth_of(argument);
      const double dp = dot(go.value, vj.value), dp_error = dot_error(go, vj, gamma_d);
      const double inner = dp - delta + cotangent;
      const double inner_error =
          dp_error + delta_error +
          3 * u * (std::abs(dp) + dp_error + std::abs(delta) + delta_error + std::abs(cotangent));
      const double capped = a.softcap > 0 ? r.score[n] / a.softcap : 0, slope = 1 - capped * capped;
      const double slope_error =
          a.softcap > 0 ? 2 * row.score[n] / a.softcap + (function_ulps + 2) * u : 0;
      const double ds = r.p[n] * std::abs(inner) * slope;
      const double ds_error =
          r.p[n] * (1 + p_error) * (std::abs(inner) + inner_error) * (slope + slope_error) - ds +
          (3 * u * r.p[n] + rounding.tiny) * (std::abs(inner) + inner_error) + twice_tiny;
      const double scale = std::abs(a.scale), p_factor = rounding.factors * (1 + p_error),
                   ds_factor = ds_error + rounding.factors * (ds + ds_error);
      for (size_t c = 0; c < rows.dv(); ++c)
        dv.add(key * rows.dv() + c, r.p[n] * ((p_error + p_factor) * go.most[c] + go.error(c)),
               r.p[n] * std::abs(go.value[c]), go.most[c] + 1);
      for (size_t c = 0; c < rows.dk(); ++c) {
        dq.add(at * rows.dk() + c, scale * (ds_factor * kj.most[c] + ds * kj.error(c)),
               scale * ds * std::abs(kj.value[c]), 1);
        dk.add(key * rows.dk() + c, scale * (ds_factor * qi.most[c] + ds * qi.error(c)),
               scale * ds * std::abs(qi.value[c]), 1);
      }
    }
  });
  if (g.empty()) return b;
  const double per_group = double(a.heads / a.kv_heads);
  AttentionRounding local = rounding;
  local.ranks = 1;
  b.q = bound_of(dq, double(a.keys.size()) + rounding.ranks + 2, local);
  b.k = bound_of(dk, double(a.queries.size()) * per_group + 2, rounding);
  b.v = bound_of(dv, double(a.queries.size()) * per_group + 1, rounding);
  b.k_size = std::move(dk.magnitude), b.v_size = std::move(dv.magnitude);
  return b;
}

}  // namespace shardproof::reference
