#include "primitives/mixer_alltoall.hpp"

#include <array>

#include "primitives/calls.hpp"
#include "primitives/rows.hpp"

namespace shardproof::primitives {
namespace {

using List = std::vector<int64_t>;

int things_dim(const View& v) { return int(v.shape.size()) - 2; }

// [.., heads] as [.., heads, 1].
View with_feature(View v) {
  v.shape.push_back(1), v.strides.push_back(1);
  return v;
}
// [.., n, ..] as [.., n / inner, inner, ..].
View unfolded(View v, int dim, int64_t inner) {
  const size_t at = size_t(dim);
  v.shape[at] /= inner;
  v.shape.insert(v.shape.begin() + dim + 1, inner);
  v.strides.insert(v.strides.begin() + dim, v.strides[at] * inner);
  return v;
}
// The same element `times` times along a new dim.
View repeated(View v, int dim, int64_t times) {
  v.shape.insert(v.shape.begin() + dim, times);
  v.strides.insert(v.strides.begin() + dim, 0);
  return v;
}
// [tokens, heads, dim] as [tokens, dim, heads], whatever dims tokens have.
View turned(View v) {
  const size_t heads = v.shape.size() - 2;
  std::swap(v.shape[heads], v.shape[heads + 1]);
  std::swap(v.strides[heads], v.strides[heads + 1]);
  return v;
}

// A filter's slice of its parameters, and what it is made of and makes: rows that are not there
// before the first, then all rows.
struct Filter {
  View w, b;
  Kept all, out;
  View rows() const {
    const int64_t n = out.view().shape[0];
    return all.view().narrow(0, all.view().shape[0] - n, n);
  }
};

struct MixerSaved : Saved {
  std::array<Filter, 3> filters;  // of x, b, c
  View d;
  Kept a, factors, filtered, remembered, states;
};

// What bodies of a filter are told beside their tensors.
struct Extents {
  int64_t channels, width, batch;
};
Extents extents(const Filter& f, const MixerShape& m) {
  const View& out = f.out.view();
  return {out.elements() / out.shape[0] / m.batch, m.width, m.batch};
}

void put_in_order(const List& places, const View& from, const View& to) {
  each_run(places, [&](int64_t row, int64_t at, int64_t n) {
    convert(from.narrow(0, at, n), to.narrow(0, row, n));
  });
}
View taken_in_order(Rank& rank, const List& places, const View& from, DType type) {
  const View to = rank.workspace(type, from.shape);
  each_run(places, [&](int64_t row, int64_t at, int64_t n) {
    convert(from.narrow(0, row, n), to.narrow(0, at, n));
  });
  return to;
}

Chunk chunk(const MixerShape& m, const View& a, const View& reach) {
  return {tensor(a), tensor(reach), m.batch, m.own_heads(), m.state_dim, m.head_dim};
}
// Groups as the own heads read them: the same one for the heads of a group.
View by_head(const MixerShape& m, const View& groups) {
  return repeated(groups, last(groups), m.own_heads() / m.own_groups());
}
View summed_by_group(Parallel& p, const MixerShape& m, const View& by_head) {
  const int64_t shared = m.own_heads() / m.own_groups();
  if (shared == 1) return by_head;
  const int dim = things_dim(by_head);
  const View sum = p.workspace(p.accumulate, with_extent(by_head.shape, dim, m.own_groups())),
             heads = unfolded(by_head, dim, shared);
  set_zero(sum);
  for (int64_t i = 0; i < shared; ++i) add_into(heads.narrow(dim + 1, i, 1), sum);
  return sum;
}

List along_all_rows(const ContextLine& c) {
  List list;
  for (const Label& label :
       c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c))
    list.insert(list.end(), size_t(c.batch), label.sequence < 0 ? -1 : label.position);
  return list;
}

}  // namespace

MixerShape::MixerShape(const Case& line, const Communicator& cp)
    : ranks(cp.size()),
      rank(cp.rank()),
      heads(line.at("heads") / line.ranks(Axis::tp)),
      groups(line.at("groups") / line.ranks(Axis::tp)),
      head_dim(line.at("head_dim")),
      state_dim(line.at("state_dim")),
      width(line.at("width")),
      batch(ContextLine(line).batch) {}

List MixerAlltoall::order(const ContextLine& c, Way) const {
  List rows;
  for (int r = 0; r < c.ranks; ++r)
    for (const int64_t row : owned_rows(c, c.rows, r)) rows.push_back(row);
  return rows;
}
List MixerAlltoall::filtered(const ContextLine& c) const { return along_all_rows(c); }
List MixerAlltoall::remembered(const ContextLine& c) const { return along_all_rows(c); }

void MixerAlltoall::tokens_for_heads(Rank& rank, const View& by_tokens, const View& by_heads) {
  all_to_all(rank, rank.along(Axis::cp), by_tokens, by_heads, things_dim(by_tokens), 0);
}
void MixerAlltoall::heads_for_tokens(Rank& rank, const View& by_heads, const View& by_tokens) {
  all_to_all(rank, rank.along(Axis::cp), by_heads, by_tokens, 0, things_dim(by_tokens));
}

std::vector<View> MixerAlltoall::exchanged(Rank& rank, const std::vector<View>& by_tokens) {
  const int64_t p = rank.along(Axis::cp).size();
  if (p == 1) return by_tokens;
  std::vector<View> list;
  for (const View& v : by_tokens) {
    auto shape = with_extent(v.shape, 0, v.shape[0] * p);
    shape[size_t(things_dim(v))] /= p;
    list.push_back(rank.workspace(v.dtype, std::move(shape)));
    tokens_for_heads(rank, v, list.back());
  }
  return list;
}
std::vector<View> MixerAlltoall::returned(Rank& rank, const std::vector<View>& by_heads) {
  const int64_t p = rank.along(Axis::cp).size();
  if (p == 1) return by_heads;
  std::vector<View> list;
  for (const View& v : by_heads) {
    auto shape = with_extent(v.shape, 0, v.shape[0] / p);
    shape[size_t(things_dim(v))] *= p;
    list.push_back(rank.workspace(v.dtype, std::move(shape)));
    heads_for_tokens(rank, v, list.back());
  }
  return list;
}

int64_t MixerAlltoall::place_of_copy(const MixerShape& m, int64_t group, int64_t copy) const {
  return group * m.copies() + copy;
}

View MixerAlltoall::copied(Rank& rank, const MixerShape& m, const View& groups) const {
  if (m.copies() == 1) return groups;
  const int dim = things_dim(groups);
  const View wide =
      rank.workspace(groups.dtype, with_extent(groups.shape, dim, m.groups * m.copies()));
  for (int64_t g = 0; g < m.groups; ++g)
    for (int64_t i = 0; i < m.copies(); ++i)
      convert(groups.narrow(dim, g, 1), wide.narrow(dim, place_of_copy(m, g, i), 1));
  return wide;
}

void MixerAlltoall::sum_copies(Rank& rank, const MixerShape& m, const View& copies,
                               const View& gradient) {
  const int dim = things_dim(gradient);
  const View sum = rank.workspace(accumulation_of(rank.line()), gradient.shape);
  set_zero(sum);
  for (int64_t g = 0; g < m.groups; ++g)
    for (int64_t i = 0; i < m.copies(); ++i)
      add_into(copies.narrow(dim, place_of_copy(m, g, i), 1), sum.narrow(dim, g, 1));
  convert(sum, gradient);
}

DType MixerAlltoall::type_of_copies(const Case& line) const {
  return type_of_key(line, "wire", line.dtype());
}

int64_t MixerAlltoall::first(Slice slice, const MixerShape& m) const {
  return slice == Slice::filter_of_groups ? m.rank / m.copies() * m.own_groups()
                                          : m.rank * m.own_heads();
}

void MixerAlltoall::skip_gradient(Rank& rank, const View& x, const View& g, const View& reach,
                                  const View& sum) {
  const int64_t heads = sum.elements(), dim = x.shape.back();
  perform(ConvParameter{tensor(turned(x)), tensor(turned(g)), tensor(repeated(reach, 1, dim)),
                        tensor(sum), heads, 1, 1, !in_single(rank.line())},
          "the gradient of a skip");
}

std::vector<Axis> MixerAlltoall::summed_over(const Case& line) const {
  return with_ranks(line, {Axis::cp, Axis::dp});
}
void MixerAlltoall::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

// inputs x, b, c, a, wx, wb, wc, bx, bb, bc, d; output y.
std::unique_ptr<Saved> MixerAlltoall::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_mixer(line)) throw *refused;
  const ContextLine c(line);
  const MixerShape m(line, rank.along(Axis::cp));
  const bool wide = !in_single(line);
  auto saved = std::make_unique<MixerSaved>();
  const auto by_heads = exchanged(rank, {inputs[0], copied(rank, m, inputs[1]),
                                         copied(rank, m, inputs[2]), with_feature(inputs[3])});
  const List places = order(c, Way::inputs);
  saved->filtered = uploaded(filtered(c)), saved->remembered = uploaded(remembered(c));
  for (size_t i = 0; i < 3; ++i) {
    Filter& f = saved->filters[i];
    const View& rows = by_heads[i];
    const int64_t from = first(i ? Slice::filter_of_groups : Slice::filter_of_heads, m),
                  n = rows.shape[size_t(things_dim(rows))];
    f.w = inputs[4 + i].narrow(0, from, n), f.b = inputs[7 + i].narrow(0, from, n);
    f.out = Kept(rows.dtype, rows.shape);
    f.all = Kept(rows.dtype, with_extent(rows.shape, 0, rows.shape[0] + m.width - 1));
    put_in_order(places, rows, f.rows());
    const Extents e = extents(f, m);
    perform(
        ConvForward{tensor(f.all.view()), tensor(f.w), tensor(f.b), tensor(saved->filtered.view()),
                    tensor(f.out.view()), e.channels, e.width, e.batch, wide},
        "a filter");
  }
  saved->a = Kept(inputs[3].dtype, by_heads[3].shape);
  put_in_order(places, by_heads[3], saved->a.view());
  saved->d = inputs[10].narrow(0, first(Slice::skip, m), m.own_heads());
  const View x = saved->filters[0].out.view(), reach = saved->remembered.view(),
             a = factors(rank, saved->a.view(), saved->factors),
             y = rank.workspace(accumulation_of(line), x.shape),
             skipped = rank.workspace(y.dtype, x.shape);
  saved->states = Kept(y.dtype, {reach.elements(), m.own_heads(), m.state_dim, m.head_dim});
  const Tensor states = tensor(saved->states.view());
  perform(States{chunk(m, a, reach), tensor(by_head(m, saved->filters[1].out.view())), tensor(x),
                 Tensor{}, states, Tensor{}, wide},
          "states");
  perform(StateProduct{states, tensor(by_head(m, saved->filters[2].out.view())), tensor(reach),
                       tensor(y), m.own_heads(), m.state_dim, m.head_dim, true, wide},
          "what is read from states");
  perform(ConvForward{tensor(x), tensor(repeated(saved->d, 1, m.head_dim)), Tensor{}, tensor(reach),
                      tensor(skipped), m.own_heads() * m.head_dim, 1, m.batch, wide},
          "what skips the states");
  add_into(skipped, y);
  convert(returned(rank, {taken_in_order(rank, order(c, Way::result), y, outputs[0].dtype)})[0],
          outputs[0]);
  return saved;
}

void MixerAlltoall::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients.subspan(3),  // of a, then of parameters
      [&](std::span<const View> own) {
        gradients_of(p, state, cotangents[0], gradients.first(3), own);
      },
      add_into);
}

void MixerAlltoall::gradients_of(Parallel& p, Saved& state, const View& g_by_tokens,
                                 std::span<const View> inputs, std::span<const View> rest) {
  auto& saved = static_cast<MixerSaved&>(state);
  const Case& line = p.rank.line();
  const ContextLine c(line);
  const MixerShape m(line, p.rank.along(Axis::cp));
  const bool wide = p.accumulate == DType::f64;
  const View x = saved.filters[0].out.view(), reach = saved.remembered.view(),
             a = saved.factors.view().data ? saved.factors.view() : saved.a.view(),
             g = p.workspace(g_by_tokens.dtype, x.shape);
  put_in_order(order(c, Way::cotangent), exchanged(p.rank, {g_by_tokens})[0], g);

  const View written = by_head(m, saved.filters[1].out.view()),
             read = by_head(m, saved.filters[2].out.view());
  const View adjoints = p.workspace(p.accumulate, saved.states.view().shape);
  const Tensor S = tensor(saved.states.view()), G = tensor(adjoints);
  perform(Adjoints{chunk(m, a, reach), tensor(read), tensor(g), Tensor{}, G, Tensor{}, wide},
          "cotangents of states");
  const auto product = [&](const Tensor& states, const View& v, bool turned, const View& to) {
    perform(StateProduct{states, tensor(v), tensor(reach), tensor(to), m.own_heads(), m.state_dim,
                         m.head_dim, turned, wide},
            "a gradient of a recurrence");
    return to;
  };
  const auto by_heads = [&](int64_t features) {
    return p.workspace(p.accumulate, with_extent(x.shape, last(x), features));
  };
  const View of_x = product(G, written, true, by_heads(m.head_dim)), skipped = by_heads(m.head_dim);
  perform(ConvInput{tensor(g), tensor(repeated(saved.d, 1, m.head_dim)), tensor(reach),
                    tensor(skipped), m.own_heads() * m.head_dim, 1, m.batch, wide},
          "the gradient of what skips the states");
  add_into(skipped, of_x);
  const std::array<View, 3> of_filters{
      of_x, summed_by_group(p, m, product(G, x, false, by_heads(m.state_dim))),
      summed_by_group(p, m, product(S, g, false, by_heads(m.state_dim)))};

  Parts parts;
  for (size_t i = 1; i < rest.size(); ++i) {
    parts.push_back({partial_like(p, rest[i]), rest[i]});
    set_zero(parts.back().partial);
  }
  const List back = order(c, Way::gradients);
  std::vector<View> leaving;
  for (size_t i = 0; i < 3; ++i) {
    const Filter& f = saved.filters[i];
    const int64_t from = first(i ? Slice::filter_of_groups : Slice::filter_of_heads, m);
    const View stored = p.workspace(p.storage, of_filters[i].shape),
               all = p.workspace(p.accumulate, f.all.view().shape), filter = saved.filtered.view();
    convert(of_filters[i], stored);
    const Extents e = extents(f, m);
    perform(ConvInput{tensor(stored), tensor(f.w), tensor(filter), tensor(all), e.channels, e.width,
                      e.batch, wide},
            "the gradient of what is filtered");
    perform(ConvParameter{tensor(f.all.view()), tensor(stored), tensor(filter),
                          tensor(parts[i].partial.narrow(0, from, f.w.shape[0])), e.channels,
                          e.width, e.batch, wide},
            "the gradient of a filter");
    perform(ConvParameter{Tensor{}, tensor(stored), tensor(filter),
                          tensor(parts[3 + i].partial.narrow(0, from, f.b.shape[0])), e.channels, 1,
                          e.batch, wide},
            "the gradient of a bias");
    leaving.push_back(taken_in_order(p.rank, back, all.narrow(0, m.width - 1, x.shape[0]),
                                     i && m.copies() > 1 ? type_of_copies(line) : p.storage));
  }
  skip_gradient(p.rank, x, g, reach,
                parts[6].partial.narrow(0, first(Slice::skip, m), m.own_heads()));

  const View of_a = p.workspace(p.storage, saved.a.view().shape),
             of_decays = decay_gradient(p.rank, of_a);
  perform(DecayGradient{chunk(m, a, reach), S, G, Tensor{}, tensor(of_decays), wide},
          "the gradient of decays");
  hand_out(p.rank, of_decays, a, of_a);
  leaving.push_back(taken_in_order(p.rank, back, of_a, p.storage));

  const auto home = returned(p.rank, leaving);
  convert(home[0], inputs[0]);
  for (size_t i = 1; i < 3; ++i) sum_copies(p.rank, m, home[i], inputs[i]);
  convert(home[3], with_feature(rest[0]));
  sum_gradients(p, parts, summed_over(line));
}

}  // namespace shardproof::primitives
