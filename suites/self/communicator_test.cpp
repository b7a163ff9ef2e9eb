// The typed calls against their definitions, their refusals, and the ledger against the closed
// forms of ring algorithms. Ranks are threads; no transport of the product takes part.
#include "oracle/comm/communicator.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "oracle/comm/faults.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/comm/reduce.hpp"
#include "suites/self/thread_door.hpp"

namespace shardproof {
namespace {
namespace communicator_test {

using on_threads::Meeting;
using on_threads::run_ranks;
using on_threads::TestRank;
using Shape = std::vector<int64_t>;
using Values = std::vector<double>;

Mesh line_of(int p) { return Mesh({{Axis::tp, p}}); }

void run_quietly(const Mesh& mesh, const std::function<void(TestRank&)>& body,
                 int64_t* calls = nullptr) {
  const auto thrown = run_ranks(mesh, body, calls);
  for (size_t r = 0; r < thrown.size(); ++r) EXPECT_EQ(thrown[r], "") << "rank " << r;
}

struct Tensor {
  Buffer buffer;
  Tensor(Shape shape, Strides strides = Strides::contiguous, DType dtype = DType::f64)
      : buffer(dtype, std::move(shape), strides) {}
  const View& view() const { return buffer.view(); }
  Values values() const { return to_doubles(view()); }
  // value(index) for each element in row-major order.
  Tensor& fill(const std::function<double(const Shape&)>& value) {
    Shape index(view().shape.size(), 0);
    Values all;
    for (int64_t i = 0, n = view().elements(); i < n; ++i) {
      int64_t rest = i;
      for (size_t d = index.size(); d-- > 0;) {
        index[d] = rest % view().shape[d];
        rest /= view().shape[d];
      }
      all.push_back(value(index));
    }
    fill_from(view(), all);
    return *this;
  }
};

// A number that no other element of any rank has.
double code(int rank, const Shape& index) {
  double x = rank + 1;
  for (int64_t i : index) x = 16 * x + double(i);
  return x;
}

const auto both_strides = {Strides::contiguous, Strides::transposed};

TEST(Communicator, reductions_are_what_they_say) {
  for (int p : {2, 3, 4})
    for (Strides strides : both_strides)
      for (DType dtype : {DType::f64, DType::f32, DType::bf16})
        run_quietly(line_of(p), [&](TestRank& r) {
          Communicator tp(r.group(Axis::tp), r.transport);
          const int me = tp.rank();
          Tensor in({2, 3}, strides, dtype), out({2, 3}, strides, dtype);
          in.fill([&](const Shape& i) { return (me + 1) * double(1 + i[0] * 3 + i[1]); });
          const auto expect_all = [&](double factor) {
            for (int k = 0; k < 6; ++k) EXPECT_EQ(out.values()[size_t(k)], factor * (k + 1));
          };
          tp.all_reduce(in.view(), out.view());
          expect_all(p * (p + 1) / 2);  // 1 + 2 + .. + p
          tp.all_reduce(in.view(), out.view(), Reduce::avg);
          expect_all((p + 1) / 2.0);
          tp.all_reduce(in.view(), out.view(), Reduce::max);
          expect_all(p);
          copy(in.view(), out.view());
          tp.all_reduce(out.view(), out.view());  // in place
          expect_all(p * (p + 1) / 2);
          EXPECT_FALSE(out.buffer.trespass());
        });
}

TEST(Communicator, gather_concatenates_along_any_dim) {
  for (int p : {2, 3, 4})
    for (Strides strides : both_strides)
      for (int dim : {0, 1, 2})
        run_quietly(line_of(p), [&](TestRank& r) {
          Communicator tp(r.group(Axis::tp), r.transport);
          Shape whole = {2, 3, 2};
          whole[size_t(dim)] *= p;
          Tensor in({2, 3, 2}, strides), out(whole, strides), want(whole);
          const int64_t block = in.view().shape[size_t(dim)];
          in.fill([&](const Shape& i) { return code(tp.rank(), i); });
          want.fill([&](Shape i) {
            const int owner = int(i[size_t(dim)] / block);
            i[size_t(dim)] %= block;
            return code(owner, i);
          });
          tp.all_gather(in.view(), out.view(), dim);
          EXPECT_EQ(out.values(), want.values());
          EXPECT_FALSE(out.buffer.trespass());
        });
}

TEST(Communicator, reduce_scatter_is_own_block_of_the_all_reduce) {
  for (int p : {2, 3, 4})
    for (Strides strides : both_strides)
      for (int dim : {0, 1})
        run_quietly(line_of(p), [&](TestRank& r) {
          Communicator tp(r.group(Axis::tp), r.transport);
          Tensor in({2 * p, 3 * p}, strides), sum({2 * p, 3 * p}, strides);
          Shape local = in.view().shape;
          local[size_t(dim)] /= p;
          Tensor out(local, strides);
          in.fill([&](const Shape& i) { return code(tp.rank(), i); });
          tp.all_reduce(in.view(), sum.view());
          tp.reduce_scatter(in.view(), out.view(), dim);
          const int64_t n = local[size_t(dim)];
          EXPECT_EQ(out.values(), to_doubles(sum.view().narrow(dim, tp.rank() * n, n)));
        });
}

// Rows of a [2p,3p] matrix become columns: the block (rows of i, columns of r) travels from i to r.
TEST(Communicator, all_to_all_moves_a_shard_to_another_dim_and_back) {
  for (int p : {2, 3, 4})
    for (Strides strides : both_strides)
      run_quietly(line_of(p), [&](TestRank& r) {
        Communicator tp(r.group(Axis::tp), r.transport);
        const int me = tp.rank();
        Tensor rows({2, 3 * p}, strides), columns({2 * p, 3}, strides), back({2, 3 * p}, strides);
        rows.fill([&](const Shape& i) { return code(0, {2 * me + i[0], i[1]}); });
        tp.all_to_all(rows.view(), columns.view(), 1, 0);
        Tensor want({2 * p, 3});
        want.fill([&](const Shape& i) { return code(0, {i[0], 3 * me + i[1]}); });
        EXPECT_EQ(columns.values(), want.values());
        tp.all_to_all(columns.view(), back.view(), 0, 1);
        EXPECT_EQ(back.values(), rows.values());
      });
}

// Rows cut 3, 0, 2 and columns cut 1, 4, 0: some blocks are empty, one rank sends nothing at all.
TEST(Communicator, all_to_all_takes_uneven_and_empty_blocks) {
  const Shape row_cut = {3, 0, 2}, column_cut = {1, 4, 0};
  const Shape row_start = {0, 3, 3}, column_start = {0, 1, 5};
  for (Strides strides : both_strides)
    run_quietly(line_of(3), [&](TestRank& r) {
      Communicator tp(r.group(Axis::tp), r.transport);
      const size_t me = size_t(tp.rank());
      Tensor rows({row_cut[me], 5}, strides), columns({5, column_cut[me]}, strides);
      Tensor back({row_cut[me], 5}, strides), want({5, column_cut[me]});
      rows.fill([&](const Shape& i) { return code(0, {row_start[me] + i[0], i[1]}); });
      want.fill([&](const Shape& i) { return code(0, {i[0], column_start[me] + i[1]}); });
      tp.all_to_all(rows.view(), columns.view(), 1, 0, column_cut, row_cut);
      EXPECT_EQ(columns.values(), want.values());
      tp.all_to_all(columns.view(), back.view(), 0, 1, row_cut, column_cut);
      EXPECT_EQ(back.values(), rows.values());
    });
}

TEST(Communicator, shift_goes_round_the_ring) {
  for (int p : {2, 3, 4})
    for (Strides strides : both_strides)
      for (int hop : {1, -1, 2, p, -p - 1})
        run_quietly(line_of(p), [&](TestRank& r) {
          Communicator tp(r.group(Axis::tp), r.transport);
          Tensor in({2, 3}, strides), out({2, 3}, strides), want({2, 3});
          const int from = (((tp.rank() - hop) % p) + p) % p;
          in.fill([&](const Shape& i) { return code(tp.rank(), i); });
          want.fill([&](const Shape& i) { return code(from, i); });
          tp.wait(tp.shift(in.view(), out.view(), hop));
          EXPECT_EQ(out.values(), want.values());
        });
}

TEST(Communicator, calls_in_flight_may_be_waited_for_in_any_order) {
  run_quietly(line_of(3), [&](TestRank& r) {
    Communicator tp(r.group(Axis::tp), r.transport);
    const int me = tp.rank();
    Tensor mine({2}), next({2}), previous({2}), sum({2}), all({6}), own({2});
    mine.fill([&](const Shape& i) { return code(me, i); });
    all.fill([&](const Shape& i) { return 10 * me + double(i[0]); });
    Tensor gathered({6});
    const Ticket a = tp.shift(mine.view(), next.view(), 1);
    const Ticket b = tp.shift(mine.view(), previous.view(), -1);
    const Ticket c = tp.start_all_reduce(mine.view(), sum.view());
    const Ticket d = tp.start_all_gather(mine.view(), gathered.view());
    const Ticket e = tp.start_reduce_scatter(all.view(), own.view());
    for (Ticket t : {e, b, d, a, c}) tp.wait(t);
    EXPECT_EQ(next.values(), (Values{code((me + 2) % 3, {0}), code((me + 2) % 3, {1})}));
    EXPECT_EQ(previous.values(), (Values{code((me + 1) % 3, {0}), code((me + 1) % 3, {1})}));
    EXPECT_EQ(sum.values(), (Values{16 + 32 + 48, 17 + 33 + 49}));
    EXPECT_EQ(gathered.values(), (Values{16, 17, 32, 33, 48, 49}));
    EXPECT_EQ(own.values(), (Values{30 + 3 * 2.0 * me, 30 + 3 * (2.0 * me + 1)}));
  });
}

// A transport may read `in` until wait, and write `out` from the start on.
TEST(Communicator, buffers_in_flight_are_not_the_callers) {
  run_quietly(line_of(2), [&](TestRank& r) {
    Communicator tp(r.group(Axis::tp), r.transport);
    Tensor mine({2}), next({2});
    for (Tensor* touched : {&mine, &next}) {
      mine.fill([&](const Shape& i) { return code(tp.rank(), i); });
      const Ticket t = tp.shift(mine.view(), next.view(), 1);
      fill_from(touched->view().narrow(0, 1, 1), Values{99});
      try {
        tp.wait(t);
        ADD_FAILURE() << "nobody saw it";
      } catch (const std::invalid_argument& e) {
        const std::string what = e.what(), name = touched == &mine ? "in" : "out";
        EXPECT_NE(what.find("expected " + name + " untouched from its start to its wait"),
                  std::string::npos)
            << what;
      }
    }
    // The last bytes of 12, which fill no word of 8.
    Tensor odd({3}, Strides::contiguous, DType::f32), taken({3}, Strides::contiguous, DType::f32);
    odd.fill([](const Shape& i) { return double(i[0]); });
    const Ticket last = tp.shift(odd.view(), taken.view(), 1);
    fill_from(odd.view().narrow(0, 2, 1), Values{99});
    EXPECT_THROW(tp.wait(last), std::invalid_argument);
    // Read, and written over once it has arrived.
    const Ticket t = tp.shift(mine.view(), next.view(), 1);
    const Values kept = mine.values();
    tp.wait(t);
    fill_from(mine.view(), kept);
    EXPECT_EQ(next.values(), (Values{code(1 - tp.rank(), {0}), code(1 - tp.rank(), {1})}));
  });
}

// A ring that shifts a buffer onto itself, and a gather out of the gathered buffer.
TEST(Communicator, overlapping_buffers_are_told_apart) {
  run_quietly(line_of(3), [&](TestRank& r) {
    Communicator tp(r.group(Axis::tp), r.transport);
    Tensor block({2}), gathered({6});
    block.fill([&](const Shape& i) { return code(tp.rank(), i); });
    tp.wait(tp.shift(block.view(), block.view(), 1));
    const int from = (tp.rank() + 2) % 3;
    EXPECT_EQ(block.values(), (Values{code(from, {0}), code(from, {1})}));
    const View own = gathered.view().narrow(0, 2 * tp.rank(), 2);
    fill_from(own, Values{code(tp.rank(), {0}), code(tp.rank(), {1})});
    tp.all_gather(own, gathered.view(), 0);
    EXPECT_EQ(gathered.values(), (Values{16, 17, 32, 33, 48, 49}));
  });
}

TEST(Communicator, broadcast_hands_out_the_members_block) {
  for (Strides strides : both_strides)
    for (int root : {0, 1, 2})
      run_quietly(line_of(3), [&](TestRank& r) {
        Communicator tp(r.group(Axis::tp), r.transport);
        Tensor x({2, 2}, strides), want({2, 2});
        x.fill([&](const Shape& i) { return code(tp.rank(), i); });
        want.fill([&](const Shape& i) { return code(root, i); });
        tp.broadcast(x.view(), root);
        EXPECT_EQ(x.values(), want.values());
        tp.barrier();
      });
}

TEST(Communicator, empty_blocks_are_calls_like_others) {
  int64_t calls = 0;
  run_quietly(
      line_of(2),
      [&](TestRank& r) {
        Communicator tp(r.group(Axis::tp), r.transport);
        Tensor none({0, 3}), out({0, 3});
        tp.all_reduce(none.view(), out.view());
        tp.all_gather(none.view(), out.view(), 0);
        tp.reduce_scatter(none.view(), out.view(), 0);
        tp.all_to_all(none.view(), out.view(), 0, 0);
        tp.wait(tp.shift(none.view(), out.view(), 1));
        tp.broadcast(none.view(), 1);
      },
      &calls);
  EXPECT_EQ(calls, 2 * 6);
}

TEST(Communicator, a_group_of_one_copies_and_calls_nobody) {
  int64_t calls = 0;
  run_quietly(
      Mesh({{Axis::cp, 2}}),
      [&](TestRank& r) {
        Communicator tp(r.group(Axis::tp), r.transport);
        Tensor in({2, 3}, Strides::transposed);
        in.fill([&](const Shape& i) { return code(r.state.rank, i); });
        const auto expect_copy = [&](const std::function<void(const View&)>& op) {
          Tensor out({2, 3});
          op(out.view());
          EXPECT_EQ(out.values(), in.values());
        };
        const View& x = in.view();
        expect_copy([&](const View& y) { tp.all_reduce(x, y); });
        expect_copy([&](const View& y) { tp.all_reduce(x, y, Reduce::avg); });
        expect_copy([&](const View& y) { tp.all_gather(x, y, 1); });
        expect_copy([&](const View& y) { tp.reduce_scatter(x, y, 0); });
        expect_copy([&](const View& y) { tp.all_to_all(x, y, 0, 1); });
        expect_copy([&](const View& y) { tp.wait(tp.shift(x, y, 1)); });
        Tensor packed({2, 3});
        copy(x, packed.view());
        expect_copy([&](const View& y) { tp.wait(tp.start_all_reduce(packed.view(), y)); });
        expect_copy([&](const View& y) { tp.wait(tp.start_all_gather(packed.view(), y)); });
        expect_copy([&](const View& y) { tp.wait(tp.start_reduce_scatter(packed.view(), y)); });
        tp.broadcast(x, 0);
        tp.barrier();
      },
      &calls);
  EXPECT_EQ(calls, 0);
}

TEST(Communicator, parts_of_a_group_are_cut_and_kept) {
  run_quietly(Mesh({{Axis::tp, 2}, {Axis::cp, 4}}), [&](TestRank& r) {
    Communicator cp(r.group(Axis::cp), r.transport);
    const int t = r.state.rank % 2, c = r.state.rank / 2;
    Communicator& inner = cp.inner(2);
    Communicator& across = cp.across(2);
    const int run = c / 2 * 2, place = c % 2;
    EXPECT_EQ(inner.group().members, (std::vector{2 * run + t, 2 * (run + 1) + t}));
    EXPECT_EQ(across.group().members, (std::vector{2 * place + t, 2 * (place + 2) + t}));
    EXPECT_EQ(inner.group().label, "cp/2");
    EXPECT_EQ(across.group().label, "cp%2");
    EXPECT_EQ(inner.group().id, group_id(inner.group().members));
    EXPECT_EQ(inner.rank(), c % 2);
    EXPECT_EQ(across.rank(), c / 2);
    EXPECT_EQ(&cp.inner(2), &inner);
    EXPECT_EQ(&cp.across(2), &across);
    EXPECT_EQ(&cp.inner(4), &cp);
    EXPECT_EQ(&cp.across(1), &cp);
    EXPECT_EQ(cp.inner(1).size(), 1);
    EXPECT_THROW(cp.inner(3), std::invalid_argument);
    EXPECT_THROW(cp.subgroup({(c + 1) % 4}, "not_me"), std::invalid_argument);
    EXPECT_THROW(cp.subgroup({c, c}, "twice"), std::invalid_argument);
    EXPECT_THROW(cp.subgroup({c, 4}, "outside"), std::invalid_argument);
    EXPECT_THROW(cp.subgroup({-1, c}, "before"), std::invalid_argument);
    EXPECT_THROW(cp.inner(0), std::invalid_argument);
    EXPECT_THROW(cp.inner(-2), std::invalid_argument);
    // A label is no identity.
    EXPECT_EQ(cp.subgroup({c}, "part").size(), 1);
    EXPECT_EQ(cp.subgroup({c, (c + 1) % 4}, "part").size(), 2);
    if (c != 1) {
      Communicator& part = cp.subgroup({3, 0, 2}, "odd");
      EXPECT_EQ(part.group().members, (std::vector{6 + t, t, 4 + t}));
      Tensor x({1}), sum({1}), all({3});
      x.fill([&](const Shape&) { return c + 1; });
      part.all_reduce(x.view(), sum.view());
      EXPECT_EQ(sum.values(), Values{1 + 3 + 4});
      part.all_gather(x.view(), all.view(), 0);
      EXPECT_EQ(all.values(), (Values{4, 1, 3}));
    }
    Tensor x({1}), sum({1});
    x.fill([&](const Shape&) { return 1 << c; });
    inner.all_reduce(x.view(), sum.view());
    EXPECT_EQ(sum.values(), Values{c < 2 ? 3.0 : 12.0});
    across.all_reduce(x.view(), sum.view());
    EXPECT_EQ(sum.values(), Values{c % 2 ? 10.0 : 5.0});
  });
}

// <A x, y> = <x, B y> with sums over ranks, exactly, for pairs of typed maps: gather (S -> R) with
// reduce-scatter, all-reduce (P -> R) with itself, all-to-all with its inverse, shift with the
// shift back. Cotangents differ between ranks, as their types allow.
TEST(Communicator, calls_are_adjoint_in_pairs) {
  for (int p : {2, 3, 4})
    run_quietly(line_of(p), [&](TestRank& r) {
      Communicator tp(r.group(Axis::tp), r.transport);
      const int me = tp.rank();
      const auto number = [&](int salt, const Shape& i) {
        return double((7 * me + 5 * i[0] + 3 * i[1] + salt * (1 + i[0] * i[1] + me)) % 11) - 5;
      };
      const auto dot = [](const Tensor& a, const Tensor& b) {
        const Values x = a.values(), y = b.values();
        return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
      };
      const auto expect_equal_sums = [&](double left, double right) {
        Tensor both({2}), sums({2});
        fill_from(both.view(), Values{left, right});
        tp.all_reduce(both.view(), sums.view());
        EXPECT_EQ(sums.values()[0], sums.values()[1]);
        EXPECT_NE(sums.values()[0], 0);
      };
      const auto pair = [&](Shape domain, Shape range, auto forward, auto backward) {
        Tensor x(domain), y(range), ax(range), by(domain);
        x.fill([&](const Shape& i) { return number(1, i); });
        y.fill([&](const Shape& i) { return number(2, i); });
        forward(x.view(), ax.view());
        backward(y.view(), by.view());
        expect_equal_sums(dot(ax, y), dot(x, by));
      };
      pair(
          {2, 3}, {2 * p, 3}, [&](auto& a, auto& b) { tp.all_gather(a, b, 0); },
          [&](auto& a, auto& b) { tp.reduce_scatter(a, b, 0); });
      pair(
          {2, 3}, {2, 3}, [&](auto& a, auto& b) { tp.all_reduce(a, b); },
          [&](auto& a, auto& b) { tp.all_reduce(a, b); });
      pair(
          {2, 3 * p}, {2 * p, 3}, [&](auto& a, auto& b) { tp.all_to_all(a, b, 1, 0); },
          [&](auto& a, auto& b) { tp.all_to_all(a, b, 0, 1); });
      pair(
          {2, 3}, {2, 3}, [&](auto& a, auto& b) { tp.wait(tp.shift(a, b, 1)); },
          [&](auto& a, auto& b) { tp.wait(tp.shift(a, b, -1)); });
    });
}

// ---- refusals

struct NoDoor : Door {
  Ticket start(const Call&, const View&, const View&, Stream) override {
    ADD_FAILURE() << "a call that must be refused was sent";
    return 1;
  }
  void wait(Ticket, Stream) override {}
};

TEST(Communicator, wrong_calls_are_refused_before_anything_is_sent) {
  NoDoor door;
  Group g;
  g.members = {0, 1};
  g.label = "tp";
  g.id = group_id(g.members);
  Communicator tp(g, door);
  const auto refused = [&](const std::string& part, const std::function<void()>& wrong) {
    try {
      wrong();
      ADD_FAILURE() << "not refused: " << part;
    } catch (const std::invalid_argument& e) {
      const std::string text = e.what();
      EXPECT_NE(text.find(part), std::string::npos) << text;
      EXPECT_NE(text.find("expected"), std::string::npos) << text;
      EXPECT_NE(text.find("met"), std::string::npos) << text;
    }
  };
  Tensor x({2, 3}), y({2, 3}), tall({4, 3}), odd({3, 3}),
      f({2, 3}, Strides::contiguous, DType::f32);
  Tensor strided({2, 3}, Strides::transposed), n({2}, Strides::contiguous, DType::i64);
  Tensor m({2}, Strides::contiguous, DType::i64), narrow({4, 2});
  View far = y.view();
  far.space = Space::device;
  const View &a = x.view(), &b = y.view();
  refused("dtype f64", [&] { tp.all_reduce(a, f.view()); });
  refused("[2,3]", [&] { tp.all_reduce(a, tall.view()); });
  refused("a reduction", [&] { tp.all_reduce(a, b, Reduce::none); });
  refused("floating dtype for avg", [&] { tp.all_reduce(n.view(), m.view(), Reduce::avg); });
  refused("device", [&] { tp.all_reduce(a, far); });
  refused("a reduction", [&] { (void)tp.start_all_reduce(a, b, Reduce::none); });
  refused("a reduction", [&] { tp.reduce_scatter(tall.view(), b, 0, Reduce::none); });
  refused("[4,3]", [&] { tp.all_gather(a, b, 0); });
  refused("[4,3]", [&] { tp.all_gather(a, narrow.view(), 0); });
  refused("[2,2]", [&] { tp.reduce_scatter(narrow.view(), a, 0); });
  refused("[2,6]", [&] { tp.all_gather(a, tall.view(), 1); });
  refused("dim from 0 to 1", [&] { tp.all_gather(a, tall.view(), 2); });
  refused("dim from 0 to 1", [&] { tp.all_gather(a, tall.view(), -1); });
  refused("divisible by 2", [&] { tp.reduce_scatter(odd.view(), a, 0); });
  refused("[2,3]", [&] { tp.reduce_scatter(tall.view(), odd.view(), 0); });
  refused("divisible by 2", [&] { tp.all_to_all(a, b, 1, 0); });
  refused("concat_dim from 0 to 1", [&] { tp.all_to_all(a, b, 0, 2); });
  refused("the block of out from myself", [&] { tp.all_to_all(tall.view(), b, 0, 0); });
  const Shape short_list = {2}, wrong_sum = {1, 2}, negative = {3, -1};
  refused("add up to 2", [&] { tp.all_to_all(a, b, 0, 0, short_list, {}); });
  refused("add up to 2", [&] { tp.all_to_all(a, b, 0, 0, wrong_sum, {}); });
  refused("add up to 2", [&] { tp.all_to_all(a, b, 0, 0, {}, negative); });
  refused("dtype f64", [&] { (void)tp.shift(a, f.view(), 1); });
  refused("6 elements", [&] { (void)tp.shift(a, tall.view(), 2); });
  refused("a root from 0 to 1", [&] { tp.broadcast(a, 2); });
  refused("a root from 0 to 1", [&] { tp.broadcast(a, -1); });
  refused("contiguous views", [&] { (void)tp.start_all_reduce(strided.view(), b); });
  refused("contiguous views", [&] { (void)tp.start_all_reduce(a, strided.view()); });
  refused("contiguous views", [&] { (void)tp.start_all_gather(strided.view(), tall.view()); });
  refused("contiguous views", [&] { (void)tp.start_reduce_scatter(tall.view(), strided.view()); });
  const int here = __LINE__ + 1;
  refused("communicator_test.cpp:" + std::to_string(here), [&] { tp.all_reduce(a, f.view()); });
  refused("a ticket in flight", [&] { tp.wait(17); });
}

TEST(Communicator, a_ticket_is_waited_for_once) {
  run_quietly(line_of(2), [&](TestRank& r) {
    Communicator tp(r.group(Axis::tp), r.transport);
    Tensor x({2}), y({2});
    x.fill([](const Shape&) { return 1; });
    const Ticket t = tp.shift(x.view(), y.view(), 1);
    tp.wait(t);
    EXPECT_THROW(tp.wait(t), std::invalid_argument);
  });
}

// A transport that writes nothing: strided results, which travel as temporaries, show it too.
TEST(Communicator, what_the_door_leaves_unwritten_stays_unwritten) {
  struct SilentDoor : Door {
    Ticket start(const Call&, const View&, const View&, Stream) override { return 1; }
    void wait(Ticket, Stream) override {}
  } door;
  Group g;
  g.members = {0, 1};
  Communicator tp(g, door);
  for (Strides strides : both_strides) {
    Tensor x({2, 3}, strides), y({2, 6}, strides);
    x.fill([](const Shape&) { return 1; });
    tp.all_gather(x.view(), y.view(), 1);
    EXPECT_EQ(y.buffer.unwritten().count, 12);
  }
}

// What a transport may do with the memory that it is given: write `out` before it has read `in`.
bool apart(const View& in, const View& out) {
  return in.data + in.bytes() <= out.data || out.data + out.bytes() <= in.data;
}
struct KeepsViews : Door {
  std::vector<std::pair<View, View>> given;
  Ticket start(const Call&, const View& in, const View& out, Stream) override {
    given.emplace_back(in, out);
    return given.size();
  }
  void wait(Ticket, Stream) override {}
};

Group pair_of_ranks() {
  Group g;
  g.members = {0, 1};
  g.label = "tp";
  g.id = group_id(g.members);
  return g;
}

TEST(Communicator, the_door_is_given_no_overlapping_buffers) {
  KeepsViews door;
  Communicator tp(pair_of_ranks(), door);
  Tensor all({6});
  all.fill([](const Shape&) { return 1; });
  const View low = all.view().narrow(0, 0, 4), high = all.view().narrow(0, 2, 4);
  tp.all_reduce(low, high);
  tp.all_reduce(high, low);
  for (const auto& [in, out] : door.given) EXPECT_TRUE(apart(in, out));
  tp.all_reduce(all.view().narrow(0, 0, 3), all.view().narrow(0, 3, 3));  // side by side: no copy
  EXPECT_EQ(door.given.at(2).first.data, all.view().data);
}

// Nothing on the host may copy what lies on a device: in place, and alone in a group, it travels.
TEST(Communicator, views_of_a_device_go_to_the_door_as_they_are) {
  KeepsViews door;
  Group one;
  one.members = {0};
  one.label = "cp";
  Communicator tp(pair_of_ranks(), door), cp(one, door);
  Tensor x({2}), y({2});
  View a = x.view(), b = y.view();
  a.space = b.space = Space::device;
  tp.broadcast(a, 1);
  tp.all_reduce(a, a);
  cp.all_reduce(a, b);
  ASSERT_EQ(door.given.size(), 3u);
  for (const auto& [in, out] : door.given) EXPECT_EQ(in.data, a.data);
  EXPECT_EQ(door.given[0].second.data, a.data);
  EXPECT_EQ(door.given[1].second.data, a.data);
  EXPECT_EQ(door.given[2].second.data, b.data);
}

TEST(Communicator, results_that_come_early_arrive_at_wait) {
  struct AtOnce : Door {
    Ticket start(const Call&, const View& in, const View& out, Stream) override {
      copy(in, out);
      return 1;
    }
    void wait(Ticket, Stream) override {}
  } door;
  Communicator tp(pair_of_ranks(), door);
  Tensor in({2}), out({2});
  in.fill([](const Shape&) { return 5; });
  out.fill([](const Shape&) { return 3; });
  const Ticket t = tp.shift(in.view(), out.view(), 1);
  EXPECT_EQ(out.values(), (Values{3, 3}));
  tp.wait(t);
  EXPECT_EQ(out.values(), (Values{5, 5}));
}

// ---- reductions

Values reduced(Reduce reduce, DType dtype, const std::vector<Values>& members) {
  std::vector<Tensor> in;
  std::vector<const std::byte*> from;
  const auto n = int64_t(members[0].size());
  for (const Values& values : members) {
    fill_from(in.emplace_back(Shape{n}, Strides::contiguous, dtype).view(), values);
    from.push_back(in.back().view().data);
  }
  Tensor out({n}, Strides::contiguous, dtype);
  reduce_members(reduce, dtype, from, n, out.view().data);
  return out.values();
}

// f32 holds 2^24 + 1 no more, and 2^24 + 2 it does: what the small ones give depends on the order.
TEST(Reductions, are_taken_in_member_order) {
  const double big = 0x1p24;
  EXPECT_EQ(reduced(Reduce::sum, DType::f32, {{big}, {1}, {1}}), Values{big});
  EXPECT_EQ(reduced(Reduce::sum, DType::f32, {{1}, {1}, {big}}), Values{big + 2});
  EXPECT_EQ(reduced(Reduce::sum, DType::f32, {{1}, {big}, {1}}), Values{big});
  EXPECT_EQ(reduced(Reduce::sum, DType::f32, {{1}, {big}, {-big}}), Values{0});
  EXPECT_EQ(reduced(Reduce::sum, DType::f32, {{1}, {-big}, {-big}, {big}, {big}}), Values{0});
  EXPECT_EQ(reduced(Reduce::sum, DType::f32, {{-big}, {1}, {big}}), Values{1});
}

TEST(Reductions, let_nan_through_a_maximum_whoever_has_it) {
  for (size_t who : {0, 1, 2}) {
    std::vector<Values> members{{1}, {2}, {3}};
    members[who] = {std::nan("")};
    EXPECT_TRUE(std::isnan(reduced(Reduce::max, DType::f64, members)[0])) << "member " << who;
  }
  EXPECT_EQ(reduced(Reduce::max, DType::f64, {{-3, 7}, {-2, 5}}), (Values{-2, 7}));
}

TEST(Reductions, go_through_every_element) {
  for (int64_t n : {1, 511, 512, 513, 1500}) {
    Values a, b, sum;
    for (int64_t i = 0; i < n; ++i) {
      a.push_back(double(i));
      b.push_back(double(1000 * i));
      sum.push_back(double(1001 * i));
    }
    EXPECT_EQ(reduced(Reduce::sum, DType::f64, {a, b}), sum) << n;
  }
}

// (1 + 2^-6 + 2^-9) / 3 = 173.67 * 2^-9, and bf16 has steps of 2^-9 there. Rounded to bf16 before
// it is divided the sum is 1 + 2^-6, and its third 173.33 * 2^-9.
TEST(Reductions, of_halves_are_divided_before_they_are_rounded) {
  EXPECT_EQ(reduced(Reduce::avg, DType::bf16, {{1}, {0x1p-6}, {0x1p-9}}), Values{174 * 0x1p-9});
}

TEST(Reductions, of_integers_have_64_bits_and_truncate) {
  const double most = 2147483647;
  EXPECT_EQ(reduced(Reduce::avg, DType::i32, {{most, -7, 7}, {most, 0, 0}}), (Values{most, -3, 3}));
  EXPECT_EQ(reduced(Reduce::sum, DType::i32, {{most}, {1}}), Values{-most - 1});
}

// ---- the ledger

TEST(Ledger, ring_bytes_of_ranks_are_the_closed_forms) {
  const auto all_reduce = [](int64_t n, int p) {
    std::vector<int64_t> elements;
    for (int r = 0; r < p; ++r) elements.push_back(ring_bytes_of_rank(Op::all_reduce, n, 1, p, r));
    return elements;
  };
  EXPECT_EQ(all_reduce(7, 4), (std::vector<int64_t>{10, 11, 11, 10}));
  const auto uneven = all_reduce(13, 8);
  EXPECT_EQ(*std::min_element(uneven.begin(), uneven.end()), 22);
  EXPECT_EQ(*std::max_element(uneven.begin(), uneven.end()), 24);
  // nccl-tests' factor 2(p-1)/p: N, 1.5 N, 1.75 N at p = 2, 4, 8.
  EXPECT_EQ(all_reduce(8, 2), (std::vector<int64_t>(2, 8)));
  EXPECT_EQ(all_reduce(8, 4), (std::vector<int64_t>(4, 12)));
  EXPECT_EQ(all_reduce(8, 8), (std::vector<int64_t>(8, 14)));
}

TEST(Ledger, ranks_add_up_to_the_total_and_an_all_reduce_to_its_two_halves) {
  for (int p : {2, 3, 4, 8})
    for (int64_t n : {0, 1, 7, 8, 13, 24})
      for (int64_t e : {2, 8}) {
        const auto sum = [&](Op op) {
          int64_t bytes = 0;
          for (int r = 0; r < p; ++r) bytes += ring_bytes_of_rank(op, n, e, p, r);
          return bytes;
        };
        EXPECT_EQ(sum(Op::all_reduce), 2 * (p - 1) * n * e);
        for (Op op : {Op::reduce_scatter, Op::all_gather, Op::all_to_all, Op::broadcast})
          EXPECT_EQ(sum(op), (p - 1) * n * e);
        EXPECT_EQ(sum(Op::shift), p * n * e);
        for (Op op : {Op::all_reduce, Op::reduce_scatter, Op::all_gather, Op::all_to_all,
                      Op::broadcast, Op::shift, Op::barrier})
          EXPECT_EQ(sum(op), ring_bytes_total(op, n * e, p)) << name(op) << " p=" << p;
        for (int r = 0; r < p; ++r)
          EXPECT_EQ(ring_bytes_of_rank(Op::all_reduce, n, e, p, r),
                    ring_bytes_of_rank(Op::reduce_scatter, n, e, p, r) +
                        ring_bytes_of_rank(Op::all_gather, n, e, p, r));
      }
  EXPECT_EQ(ring_bytes_total(Op::all_reduce, 80, 1), 0);
  EXPECT_EQ(ring_bytes_of_rank(Op::shift, 10, 8, 1, 0), 0);
}

TEST(Ledger, entries_say_what_was_asked) {
  std::vector<std::vector<LedgerEntry>> entries(4);
  std::vector<Trace> traces(4);
  run_quietly(Mesh({{Axis::tp, 2}, {Axis::cp, 2}}), [&](TestRank& r) {
    const size_t rank = size_t(r.state.rank);
    r.state.trace = &traces[rank];
    r.state.case_number = 7;
    LedgerDoor ledger(r.state, r.transport);
    Communicator tp(r.group(Axis::tp), ledger), cp(r.group(Axis::cp), ledger);
    Tensor x({2, 3}, Strides::contiguous, DType::f32), y({2, 3}, Strides::contiguous, DType::f32);
    Tensor tall({4, 3}, Strides::contiguous, DType::f32);
    x.fill([](const Shape&) { return 1; });
    tp.all_reduce(x.view(), y.view(), Reduce::max);
    cp.all_gather(x.view(), tall.view(), 0);
    tp.reduce_scatter(tall.view(), y.view(), 0);
    r.state.phase = Phase::backward;
    const Ticket turn = tp.shift(x.view(), y.view(), 1);
    EXPECT_FALSE(traces[rank].returned);
    tp.wait(turn);
    EXPECT_TRUE(traces[rank].returned);
    const Shape cut = {0, 2};
    if (r.state.rank < 2) {  // uneven: member 0 keeps nothing, member 1 gets all
      Tensor mine({tp.rank() ? 4 : 0, 3}, Strides::contiguous, DType::f32);
      const Shape received = tp.rank() ? Shape{2, 2} : Shape{0, 0};
      tp.all_to_all(x.view(), mine.view(), 0, 0, cut, received);
    }
    entries[rank] = ledger.take();
    EXPECT_TRUE(ledger.take().empty());
    cp.barrier();
    ASSERT_EQ(ledger.take().at(0).number, 1);  // counts begin anew
  });
  const auto& e = entries[0];
  ASSERT_EQ(e.size(), 5u);
  EXPECT_EQ(e[0].op, Op::all_reduce);
  EXPECT_EQ(e[0].reduce, Reduce::max);
  EXPECT_EQ(e[0].dtype, DType::f32);
  EXPECT_EQ(e[0].count, 6);
  EXPECT_EQ(e[0].label, "tp");
  EXPECT_EQ(e[0].members, (std::vector{0, 1}));
  EXPECT_EQ(e[0].phase, Phase::forward);
  EXPECT_EQ(e[0].site.find("communicator_test.cpp:"), 0u);
  EXPECT_EQ(e[1].members, (std::vector{0, 2}));
  // tp counts 1, 2 and cp 1 in forward; backward counts from 1 again.
  EXPECT_EQ(e[0].number, 1);
  EXPECT_EQ(e[1].number, 1);
  EXPECT_EQ(e[2].number, 2);
  EXPECT_EQ(e[3].number, 1);
  EXPECT_EQ(e[4].number, 2);
  // Payload: AR 6 x 4, AG the output 12 x 4, RS the input 12 x 4, shift and all-to-all 6 x 4 bytes.
  EXPECT_EQ(logical_bytes(e[0]), 24);
  EXPECT_EQ(logical_bytes(e[1]), 48);
  EXPECT_EQ(logical_bytes(e[2]), 48);
  EXPECT_EQ(logical_bytes(e[3]), 24);
  EXPECT_EQ(logical_bytes(e[4]), 24);
  EXPECT_EQ(e[3].to, 1);
  EXPECT_EQ(e[3].from, 1);
  EXPECT_EQ(entries[3][3].to, 2);
  EXPECT_EQ(e[4].send, (Shape{0, 6}));
  EXPECT_EQ(e[4].recv, (Shape{0, 0}));
  EXPECT_EQ(row_bytes(e[4], 0), 24);          // all of it leaves
  EXPECT_EQ(row_bytes(entries[1][4], 1), 0);  // all of it stays
  EXPECT_EQ(traces[3].phase, Phase::backward);
  EXPECT_EQ(traces[3].case_number, 7u);
  EXPECT_EQ(traces[3].op, Op::barrier);
  EXPECT_EQ(traces[3].calls_in_phase, 2u);
  EXPECT_EQ(std::string(traces[3].label), "cp");
  EXPECT_EQ(traces[3].members[1], 3);
}

TEST(Ledger, a_shift_has_the_peers_of_its_hop_and_calls_count_anew_in_each_shot) {
  run_quietly(line_of(3), [&](TestRank& r) {
    Trace trace;
    r.state.trace = &trace;
    LedgerDoor ledger(r.state, r.transport);
    Communicator tp(r.group(Axis::tp), ledger);
    Tensor x({2}), y({2});
    x.fill([](const Shape&) { return 1; });
    for (const int hop : {1, -1, 2}) {
      ++r.state.shot;
      tp.wait(tp.shift(x.view(), y.view(), hop));
      EXPECT_EQ(trace.calls_in_phase, 1u) << hop;
      const LedgerEntry e = ledger.take().at(0);
      EXPECT_EQ(e.to, (tp.rank() + hop + 3) % 3) << hop;
      EXPECT_EQ(e.from, (tp.rank() - hop + 3) % 3) << hop;
    }
    r.state.trace = nullptr;
  });
}

TEST(Ledger, text_reads_as_a_sentence) {
  LedgerEntry e;
  e.op = Op::all_reduce;
  e.reduce = Reduce::sum;
  e.dtype = DType::f32;
  e.count = 12;
  e.label = "tp";
  e.members = {0, 1, 2, 3};
  e.phase = Phase::backward;
  e.number = 2;
  e.site = "linear_row.cpp:41";
  EXPECT_EQ(text(e),
            "call 2 of backward on tp{0-3}: all_reduce sum, 12 x f32, at linear_row.cpp:41");
  e.op = Op::shift;
  e.hop = -1;
  e.to = 4;
  e.from = 2;
  e.label = "cp";
  e.members = {0, 2, 4, 6};
  EXPECT_EQ(
      text(e),
      "call 2 of backward on cp{0,2,4,6}: shift -1 (-> 4, <- 2), 12 x f32, at linear_row.cpp:41");
  EXPECT_EQ(members_text({0, 1}), "{0,1}");
  EXPECT_EQ(members_text({4, 5, 6}), "{4-6}");
  EXPECT_EQ(members_text({2, 1, 0}), "{2,1,0}");
  EXPECT_EQ(site_text("/a/b/ring.cpp", 7), "ring.cpp:7");
}

TEST(DelayDoor, pauses_and_changes_nothing) {
  run_quietly(line_of(3), [&](TestRank& r) {
    DelayDoor delays(5, r.state, r.transport);
    Communicator tp(r.group(Axis::tp), delays);
    Tensor x({2}), y({2});
    x.fill([&](const Shape& i) { return code(tp.rank(), i); });
    const auto seconds_of = [&](int calls) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < calls; ++i) {
        tp.all_reduce(x.view(), y.view());
        EXPECT_EQ(y.values(), (Values{96, 99}));
      }
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    seconds_of(1);
    delays.enable(true);
    // 100 pauses of 0 to 200 us: their mean is 100 us, and half of it is 8 standard deviations off.
    EXPECT_GT(seconds_of(50), 100 * 50e-6);
  });
}

}  // namespace communicator_test
}  // namespace
}  // namespace shardproof
