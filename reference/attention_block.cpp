#include "reference/attention_block.hpp"

namespace shardproof::reference {
namespace {

// Columns [first, first + width) of rows of `all` columns, and back.
Values columns(In z, int64_t all, int64_t first, int64_t width) {
  Values part;
  for (size_t row = 0; row < z.size(); row += size_t(all))
    part.insert(part.end(), z.begin() + int64_t(row) + first,
                z.begin() + int64_t(row) + first + width);
  return part;
}

template <class T>
struct Heads {
  T q, k, v;
};

Heads<Values> split(const AttentionBlockShape& s, In z) {
  const int64_t q = s.queries(), k = s.keys(), all = q + 2 * k;
  return {columns(z, all, 0, q), columns(z, all, q, k), columns(z, all, q + k, k)};
}

Values join(const AttentionBlockShape& s, const Heads<Values>& h) {
  const int64_t q = s.queries(), k = s.keys();
  Values z;
  for (int64_t t = 0; t < s.tokens(); ++t) {
    z.insert(z.end(), h.q.begin() + t * q, h.q.begin() + (t + 1) * q);
    z.insert(z.end(), h.k.begin() + t * k, h.k.begin() + (t + 1) * k);
    z.insert(z.end(), h.v.begin() + t * k, h.v.begin() + (t + 1) * k);
  }
  return z;
}

Rotary rotary_of(const AttentionBlockShape& s, int64_t heads) {
  return {heads, s.core.key_dim, s.base};
}
std::vector<int64_t> positions_of(const AttentionBlockShape& s) {
  std::vector<int64_t> positions;
  for (const Label& label : s.core.queries) positions.push_back(label.position);
  return positions;
}

struct Forward {
  Heads<Values> turned;
  Values o;
};

Forward until_output(const AttentionBlockShape& s, const AttentionBlockInputs& in) {
  const auto positions = positions_of(s);
  Forward f;
  f.turned = split(s, linear(s.first(), in.x, in.w_qkv, in.b_qkv));
  f.turned.q = rotary(rotary_of(s, s.core.heads), positions, f.turned.q);
  f.turned.k = rotary(rotary_of(s, s.core.kv_heads), positions, f.turned.k);
  f.o = attention(s.core, f.turned.q, f.turned.k, f.turned.v).o;
  return f;
}

Uncertain stored(Uncertain x, const Rounding& r) {
  store(x, r);
  return x;
}

Loss reduced_over(Loss loss, int ranks, Rounding r) {
  r.ranks = ranks;
  return reduced(std::move(loss), r);
}

// Turned, or turned back, and stored.
Uncertain turned(const Rotary& r, const std::vector<int64_t>& positions, const Uncertain& x,
                 bool back, const Rounding& rounding) {
  Uncertain y{back ? rotary_backward(r, positions, x.value) : rotary(r, positions, x.value),
              rotary_errors(r, positions, x.error)};
  const Values own = rotary_bounds(r, positions, most(x), rounding.accumulate);
  for (size_t i = 0; i < y.size(); ++i) y.error[i] += own[i];
  return stored(std::move(y), rounding);
}

// ---- Sums whose parts lie on ranks that share key heads. `value` is the sum of the magnitudes of
// the parts in place of the value of the sum: bounds below ask for magnitudes alone.

Uncertain stored_parts(Values sizes, Values error, const AttentionBlockRounding& r) {
  Rounding each = r.linear;
  each.tiny *= r.copies;
  return stored({std::move(sizes), std::move(error)}, each);
}

Uncertain turned_parts(const Rotary& of, const std::vector<int64_t>& positions, const Uncertain& x,
                       const AttentionBlockRounding& r) {
  Values error = rotary_errors(of, positions, x.error);
  const Values own = rotary_bounds(of, positions, most(x), r.linear.accumulate);
  for (size_t i = 0; i < error.size(); ++i) error[i] += own[i];
  return stored_parts(rotary_errors(of, positions, x.value), std::move(error), r);
}

// The ranks' parts are rounded to the wire and added there.
void send_parts(Uncertain& x, int parts, const Rounding& r) {
  for (size_t i = 0; i < x.size(); ++i) x.error[i] += gamma_of(parts, r.wire) * x.most(i);
}

// Gradients of w_qkv or b_qkv: of key and value rows there are `copies` times as many parts, but
// where these were added up before.
Loss of_rows(const AttentionBlockShape& s, Loss loss, const AttentionBlockRounding& r) {
  const Loss keys = reduced_over(loss, r.weights * (r.gathered ? 1 : r.copies), r.linear);
  loss = reduced_over(std::move(loss), r.weights, r.linear);
  const size_t width = loss.error.size() / size_t(s.queries() + 2 * s.keys());
  for (size_t i = size_t(s.queries()) * width; i < loss.error.size(); ++i)
    loss.error[i] = keys.error[i];
  return loss;
}

struct UncertainForward {
  Heads<Uncertain> turned;
  Uncertain o;
};

UncertainForward until_output(const AttentionBlockShape& s, const AttentionBlockInputs& in,
                              const AttentionBlockRounding& r) {
  const auto positions = positions_of(s);
  const Uncertain z =
      stored({linear(s.first(), in.x, in.w_qkv, in.b_qkv),
              linear_loss(s.first(), certain(in.x), in.w_qkv, in.b_qkv, r.linear).error},
             r.linear);
  Heads<Values> value = split(s, z.value), error = split(s, z.error);
  UncertainForward f;
  f.turned.q = turned(rotary_of(s, s.core.heads), positions,
                      {std::move(value.q), std::move(error.q)}, false, r.linear);
  f.turned.k = turned(rotary_of(s, s.core.kv_heads), positions,
                      {std::move(value.k), std::move(error.k)}, false, r.linear);
  f.turned.v = {std::move(value.v), std::move(error.v)};
  const auto& [q, k, v] = f.turned;
  f.o = stored({attention(s.core, q.value, k.value, v.value).o,
                attention_bounds(s.core, r.core, q.value, k.value, v.value, {}, {},
                                 {q.error, k.error, v.error, {}})
                    .o},
               r.linear);
  return f;
}

}  // namespace

Values attention_block(const AttentionBlockShape& s, const AttentionBlockInputs& in) {
  return linear(s.second(), until_output(s, in).o, in.w_out, in.b_out);
}

AttentionBlockParts<Values> attention_block_backward(const AttentionBlockShape& s,
                                                     const AttentionBlockInputs& in, In g) {
  const auto positions = positions_of(s);
  const Forward f = until_output(s, in);
  LinearGradients down = linear_backward(s.second(), f.o, in.w_out, g);
  AttentionGradients core =
      attention_backward(s.core, f.turned.q, f.turned.k, f.turned.v, down.x, {});
  const Values dz =
      join(s, {rotary_backward(rotary_of(s, s.core.heads), positions, core.q),
               rotary_backward(rotary_of(s, s.core.kv_heads), positions, core.k), core.v});
  LinearGradients up = linear_backward(s.first(), in.x, in.w_qkv, dz);
  return {std::move(up.x), std::move(up.w), std::move(up.b), std::move(down.w), std::move(down.b)};
}

Loss attention_block_loss(const AttentionBlockShape& s, const AttentionBlockInputs& in,
                          const AttentionBlockRounding& r) {
  return reduced(linear_loss(s.second(), until_output(s, in, r).o, in.w_out, in.b_out, r.linear),
                 r.linear);
}

AttentionBlockParts<Loss> attention_block_backward_loss(const AttentionBlockShape& s,
                                                        const AttentionBlockInputs& in, In g,
                                                        const AttentionBlockRounding& r) {
  const auto positions = positions_of(s);
  const UncertainForward f = until_output(s, in, r);
  const Uncertain cotangent = certain(g);
  LinearLosses down = linear_backward_loss(s.second(), f.o, in.w_out, cotangent, r.linear);
  const Uncertain go = stored(
      {linear_backward(s.second(), f.o.value, in.w_out, g).x, std::move(down.x.error)}, r.linear);

  const auto& [q, k, v] = f.turned;
  AttentionGradients d = attention_backward(s.core, q.value, k.value, v.value, go.value, {});
  AttentionBounds e = attention_bounds(s.core, r.core, q.value, k.value, v.value, go.value, {},
                                       {q.error, k.error, v.error, go.error});
  Uncertain dq = turned(rotary_of(s, s.core.heads), positions,
                        stored({std::move(d.q), std::move(e.q)}, r.linear), true, r.linear),
            dk{std::move(d.k), std::move(e.k)}, dv{std::move(d.v), std::move(e.v)};
  if (r.copies == 1) {
    dk = turned(rotary_of(s, s.core.kv_heads), positions, stored(std::move(dk), r.linear), true,
                r.linear);
    store(dv, r.linear);
  } else {
    dk = turned_parts(rotary_of(s, s.core.kv_heads), positions,
                      stored_parts(std::move(e.k_size), std::move(dk.error), r), r);
    dv = stored_parts(std::move(e.v_size), std::move(dv.error), r);
  }
  if (r.gathered) {
    send_parts(dq, 1, r.linear);
    send_parts(dk, r.copies, r.linear);
    send_parts(dv, r.copies, r.linear);
  }
  const Uncertain dz{join(s, {dq.value, dk.value, dv.value}),
                     join(s, {dq.error, dk.error, dv.error})};

  LinearLosses up = linear_backward_loss(s.first(), certain(in.x), in.w_qkv, dz, r.linear);
  return {reduced(std::move(up.x), r.linear), of_rows(s, std::move(up.w), r),
          of_rows(s, std::move(up.b), r), reduced_over(std::move(down.w), r.weights, r.linear),
          reduced_over(std::move(down.b), r.bias, r.linear)};
}

}  // namespace shardproof::reference
