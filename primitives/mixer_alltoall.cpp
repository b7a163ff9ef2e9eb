#include "primitives/mixer_alltoall.hpp"

#include <array>

#include "primitives/calls.hpp"
#include "primitives/rows.hpp"

namespace shardproof::primitives {
namespace {

using List = std::vector<int64_t>;

int things_dim(const View& v) { return int(v.shape.size()) - 2; }
int64_t things(const View& v) { return v.shape[size_t(things_dim(v))]; }

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

  Filter() = default;
  Filter(const View& rows, const View& w, const View& b)
      : w(w),
        b(b),
        all(rows.dtype, with_extent(rows.shape, 0, rows.shape[0] + w.shape.back() - 1)),
        out(rows.dtype, rows.shape) {}
  View own_rows(const View& of_all) const {
    const int64_t n = out.view().shape[0];
    return of_all.narrow(0, of_all.shape[0] - n, n);
  }
  int64_t channels() const { return b.elements(); }
  int64_t width() const { return w.shape.back(); }
};

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

// For as many rows and things of what is like v otherwise.
View room(Rank& rank, const View& v, int64_t rows, int64_t things) {
  return rank.workspace(v.dtype, with_extent(with_extent(v.shape, 0, rows), things_dim(v), things));
}

View summed_by_group(Parallel& p, const MixerShape& m, const View& by_head, bool in_runs) {
  const int64_t shared = m.own_heads() / m.own_groups();
  if (shared == 1) return by_head;
  const int dim = things_dim(by_head);
  const View sum = p.workspace(p.accumulate, with_extent(by_head.shape, dim, m.own_groups())),
             heads = unfolded(by_head, dim, in_runs ? shared : m.own_groups());
  set_zero(sum);
  for (int64_t i = 0; i < shared; ++i) add_into(heads.narrow(dim + in_runs, i, 1), sum);
  return sum;
}

View stored(Parallel& p, const View& sum) {
  const View to = p.workspace(p.storage, sum.shape);
  convert(sum, to);
  return to;
}

List along_all_rows(const ContextLine& c) {
  List list;
  for (const Label& label :
       c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c))
    list.insert(list.end(), size_t(c.batch), label.sequence < 0 ? -1 : label.position);
  return list;
}

// x', b' or c'.
void run(const Filter& f, const View& reach, int64_t batch, bool wide) {
  perform(ConvForward{tensor(f.all.view()), tensor(f.w), tensor(f.b), tensor(reach),
                      tensor(f.out.view()), f.channels(), f.width(), batch, wide},
          "a filter");
}

}  // namespace

struct MixerSaved : Saved {
  std::array<Filter, 3> filters;  // of x, b, c
  View d;
  Kept a, factors, filtered, remembered, states;

  View x() const { return filters[0].out.view(); }
  const View& decays() const { return factors.view().data ? factors.view() : a.view(); }
};

namespace {

// What a rank's heads do over all rows.
struct Heads {
  const MixerShape& m;
  const MixerSaved& saved;
  bool in_runs, wide;

  Chunk chunk() const {
    return {tensor(saved.decays()), tensor(reach()), m.batch,
            m.own_heads(),          m.state_dim,     m.head_dim};
  }
  const View& reach() const { return saved.remembered.view(); }
  // b' or c' as heads read them: the same one for the heads of a group.
  Tensor of_group(size_t filter) const {
    const View groups = saved.filters[filter].out.view();
    const int by_shared = in_runs ? last(groups) : things_dim(groups);
    return tensor(repeated(groups, by_shared, m.own_heads() / m.own_groups()));
  }
  Tensor written() const { return of_group(1); }
  Tensor read() const { return of_group(2); }

  void keep_states() const {
    perform(States{chunk(), written(), tensor(saved.x()), Tensor{}, tensor(saved.states.view()),
                   Tensor{}, wide},
            "states");
  }
  void adjoints(const View& g, const View& to) const {
    perform(Adjoints{chunk(), read(), tensor(g), Tensor{}, tensor(to), Tensor{}, wide},
            "cotangents of states");
  }
  void product(const View& states, const Tensor& v, bool turned, const View& to) const {
    perform(StateProduct{tensor(states), v, tensor(reach()), tensor(to), m.own_heads(), m.state_dim,
                         m.head_dim, turned, wide},
            "what is read from states");
  }
  void decay_gradient(const View& adjoints, const View& to) const {
    perform(DecayGradient{chunk(), tensor(saved.states.view()), tensor(adjoints), Tensor{},
                          tensor(to), wide},
            "the gradient of decays");
  }
  // A filter of one tap is a product with its own token.
  Tensor skip() const { return tensor(repeated(saved.d, 1, m.head_dim)); }
  void add_skipped(const View& x, const View& room, const View& sum) const {
    perform(ConvForward{tensor(x), skip(), Tensor{}, tensor(reach()), tensor(room),
                        m.own_heads() * m.head_dim, 1, m.batch, wide},
            "what skips the states");
    add_into(room, sum);
  }
};

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
  std::vector<View> by_heads;
  for (const View& v : by_tokens) {
    by_heads.push_back(room(rank, v, v.shape[0] * p, things(v) / p));
    tokens_for_heads(rank, v, by_heads.back());
  }
  return by_heads;
}
std::vector<View> MixerAlltoall::returned(Rank& rank, const std::vector<View>& by_heads) {
  const int64_t p = rank.along(Axis::cp).size();
  if (p == 1) return by_heads;
  std::vector<View> by_tokens;
  for (const View& v : by_heads) {
    by_tokens.push_back(room(rank, v, v.shape[0] / p, things(v) * p));
    heads_for_tokens(rank, v, by_tokens.back());
  }
  return by_tokens;
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
  if (m.copies() == 1) return convert(copies, gradient);
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

// The operands by head, in the order of the row, and the own slices of parameters.
void MixerAlltoall::take(Rank& rank, const MixerShape& m, std::span<const View> inputs,
                         MixerSaved& saved) {
  const ContextLine c(rank.line());
  const auto by_heads = exchanged(rank, {inputs[0], copied(rank, m, inputs[1]),
                                         copied(rank, m, inputs[2]), with_feature(inputs[3])});
  const List places = order(c, Way::inputs);
  for (size_t i = 0; i < 3; ++i) {
    const View& rows = by_heads[i];
    const int64_t n = things(rows);
    saved.filters[i] = Filter(rows, own(inputs[4 + i], m, i, n), own(inputs[7 + i], m, i, n));
    put_in_order(places, rows, saved.filters[i].own_rows(saved.filters[i].all.view()));
  }
  saved.a = Kept(inputs[3].dtype, by_heads[3].shape);
  put_in_order(places, by_heads[3], saved.a.view());
  factors(rank, saved.a.view(), saved.factors);
  saved.d = inputs[10].narrow(0, first(Slice::skip, m), m.own_heads());
  saved.filtered = uploaded(filtered(c)), saved.remembered = uploaded(remembered(c));
}

View MixerAlltoall::own(const View& parameter, const MixerShape& m, size_t operand,
                        int64_t n) const {
  return parameter.narrow(0, first(operand ? Slice::filter_of_groups : Slice::filter_of_heads, m),
                          n);
}

// inputs x, b, c, a, wx, wb, wc, bx, bb, bc, d; output y.
std::unique_ptr<Saved> MixerAlltoall::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_mixer(line)) throw *refused;
  const MixerShape m(line, rank.along(Axis::cp));
  const bool wide = !in_single(line);
  auto saved = std::make_unique<MixerSaved>();
  take(rank, m, inputs, *saved);
  for (const Filter& f : saved->filters) run(f, saved->filtered.view(), m.batch, wide);

  const DType type = accumulation_of(line);
  const Heads heads{m, *saved, heads_in_runs(), wide};
  const View x = saved->x(), y = rank.workspace(type, x.shape);
  saved->states = Kept(type, {heads.reach().elements(), m.own_heads(), m.state_dim, m.head_dim});
  heads.keep_states();
  heads.product(saved->states.view(), heads.read(), true, y);
  heads.add_skipped(x, rank.workspace(type, x.shape), y);
  const List places = order(ContextLine(line), Way::result);
  convert(returned(rank, {taken_in_order(rank, places, y, outputs[0].dtype)})[0], outputs[0]);
  return saved;
}

void MixerAlltoall::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients.subspan(3),  // of a, then of parameters
      [&](std::span<const View> own) {
        gradients_of(p, static_cast<MixerSaved&>(state), cotangents[0], gradients.first(3), own);
      },
      add_into);
}

void MixerAlltoall::gradients_of(Parallel& p, MixerSaved& saved, const View& g_by_tokens,
                                 std::span<const View> inputs, std::span<const View> rest) {
  const Case& line = p.rank.line();
  const MixerShape m(line, p.rank.along(Axis::cp));
  const View g = p.workspace(g_by_tokens.dtype, saved.x().shape),
             of_a = p.workspace(p.storage, saved.a.view().shape);
  put_in_order(order(ContextLine(line), Way::cotangent), exchanged(p.rank, {g_by_tokens})[0], g);
  const auto of_filtered = back_through_states(p, m, saved, g, of_a);

  Parts parts;
  for (const View& result : rest.subspan(1)) {
    parts.push_back({partial_like(p, result), result});
    set_zero(parts.back().partial);
  }
  std::vector<View> leaving;
  for (size_t i = 0; i < 3; ++i)
    leaving.push_back(back_through_filter(p, m, saved, i, of_filtered[i], parts));
  leaving.push_back(of_a);
  skip_gradient(p.rank, saved.x(), g, saved.remembered.view(),
                parts[6].partial.narrow(0, first(Slice::skip, m), m.own_heads()));
  give_back(p, m, std::move(leaving), inputs, rest[0]);
  sum_gradients(p, parts, summed_over(line));
}

// Gradients of x', b' and c', as they are stored; that of a is put where it is told.
std::array<View, 3> MixerAlltoall::back_through_states(Parallel& p, const MixerShape& m,
                                                       const MixerSaved& saved, const View& g,
                                                       const View& of_a) {
  const Heads heads{m, saved, heads_in_runs(), p.accumulate == DType::f64};
  const View states = saved.states.view(), adjoints = p.workspace(p.accumulate, states.shape),
             x = saved.x();
  heads.adjoints(g, adjoints);
  const auto product = [&](const View& by, const Tensor& v, bool turned, int64_t features) {
    const View to = p.workspace(p.accumulate, with_extent(x.shape, last(x), features));
    heads.product(by, v, turned, to);
    return to;
  };
  const View of_x = product(adjoints, heads.written(), true, m.head_dim);
  heads.add_skipped(g, p.workspace(p.accumulate, x.shape), of_x);
  const View of_b = product(adjoints, tensor(x), false, m.state_dim),
             of_c = product(states, tensor(g), false, m.state_dim),
             of_decays = decay_gradient(p.rank, of_a);
  heads.decay_gradient(adjoints, of_decays);
  hand_out(p.rank, of_decays, saved.decays(), of_a);
  return {stored(p, of_x), stored(p, summed_by_group(p, m, of_b, heads_in_runs())),
          stored(p, summed_by_group(p, m, of_c, heads_in_runs()))};
}

// The gradient of what a filter was fed with, in the order of the row; those of the filter and its
// bias go to their parts.
View MixerAlltoall::back_through_filter(Parallel& p, const MixerShape& m, const MixerSaved& saved,
                                        size_t operand, const View& g, const Parts& parts) {
  const Filter& f = saved.filters[operand];
  const bool wide = p.accumulate == DType::f64;
  const View reach = saved.filtered.view(), all = p.workspace(p.accumulate, f.all.view().shape);
  const auto part = [&](size_t number) {
    return tensor(own(parts[number].partial, m, operand, f.w.shape[0]));
  };
  perform(ConvInput{tensor(g), tensor(f.w), tensor(reach), tensor(all), f.channels(), f.width(),
                    m.batch, wide},
          "the gradient of what is filtered");
  perform(ConvParameter{tensor(f.all.view()), tensor(g), tensor(reach), part(operand), f.channels(),
                        f.width(), m.batch, wide},
          "the gradient of a filter");
  perform(ConvParameter{Tensor{}, tensor(g), tensor(reach), part(3 + operand), f.channels(), 1,
                        m.batch, wide},
          "the gradient of a bias");
  return f.own_rows(all);
}

// Gradients by head, in the order of the row, to the tokens.
void MixerAlltoall::give_back(Parallel& p, const MixerShape& m, std::vector<View> by_heads,
                              std::span<const View> inputs, const View& of_a) {
  const Case& line = p.rank.line();
  const List places = order(ContextLine(line), Way::gradients);
  for (size_t i = 0; i < by_heads.size(); ++i) {
    const bool part = m.copies() > 1 && (i == 1 || i == 2);
    by_heads[i] =
        taken_in_order(p.rank, places, by_heads[i], part ? type_of_copies(line) : p.storage);
  }
  const auto home = returned(p.rank, by_heads);
  convert(home[0], inputs[0]);
  for (size_t i = 1; i < 3; ++i) sum_copies(p.rank, m, home[i], inputs[i]);
  convert(home[3], with_feature(of_a));
}

}  // namespace shardproof::primitives
