// Ranks that do not make the same calls, and calls that are not the due ones. A library would hang
// here or return garbage; each has to be named with its rank and its call.
#include "suites/self/planted.hpp"

namespace shardproof::planted {
namespace {

// The sum, written as reduce-scatter and all-gather of [n/p] blocks: two calls.
void in_two_calls(Rank& rank, const View& in, const View& out) {
  const View block = rank.workspace(in.dtype, {in.elements() / group(rank).size()});
  group(rank).reduce_scatter(view_of(in.data, in.dtype, {in.elements()}), block, 0);
  group(rank).all_gather(block, view_of(out.data, out.dtype, {out.elements()}), 0);
}

void leaves_after_the_first(Rank& rank, const View& in, const View& out) {
  const View block = rank.workspace(in.dtype, {in.elements() / group(rank).size()});
  group(rank).reduce_scatter(view_of(in.data, in.dtype, {in.elements()}), block, 0);
  copy(in, out);
}

void gathers(Rank& rank, const View& in, const View& out) {
  std::vector<int64_t> shape = in.shape;
  shape[0] *= group(rank).size();
  group(rank).all_gather(in, rank.workspace(in.dtype, shape), 0);
  copy(in, out);
}

void averages(Rank& rank, const View& in, const View& out) {
  group(rank).all_reduce(in, out, Reduce::avg);
}

// The same bytes, as integers of the same size.
void as_integers(Rank& rank, const View& in, const View& out) {
  const View words = view_of(in.data, DType::i64, in.shape);
  group(rank).all_reduce(words, rank.workspace(DType::i64, in.shape));
  copy(in, out);
}

void one_element_less(Rank& rank, const View& in, const View& out) {
  const int64_t n = in.elements() - 1;
  group(rank).all_reduce(view_of(in.data, in.dtype, {n}), view_of(out.data, out.dtype, {n}));
}

// The right sum in two halves: other counts, and one call too many.
void in_halves(Rank& rank, const View& in, const View& out) {
  const int64_t n = in.elements(), half = n / 2;
  const View from = view_of(in.data, in.dtype, {n}), to = view_of(out.data, out.dtype, {n});
  group(rank).all_reduce(from.narrow(0, 0, half), to.narrow(0, 0, half));
  group(rank).all_reduce(from.narrow(0, half, n - half), to.narrow(0, half, n - half));
}

void without_a_call(Rank&, const View& in, const View& out) { copy(in, out); }

void and_a_barrier(Rank& rank, const View& in, const View& out) {
  reduced(rank, in, out);
  group(rank).barrier();
}

void over_the_world(Rank& rank, const View& in, const View& out) {
  rank.world().all_reduce(in, out);
}

// From the last rank's point of view the root is another one.
Map broadcast_from(int root) {
  return [=](Rank& rank, const View& in, const View& out) {
    copy(in, out);
    group(rank).broadcast(out, root);
  };
}

}  // namespace

std::vector<Plant> calls() {
  const std::string small = "mapping_reduce tp=4 tokens=3 hidden=5";
  const std::string even = "mapping_reduce tp=4 tokens=4 hidden=5";  // blocks of 5
  return {
      {"different_collectives",
       small,
       forward(on_rank(2, gathers, reduced)),
       {{"lockstep",
         Verdict::failed,
         2,
         "",
         {"rank 2 differs from the other members in operation", "all_gather, 15 x f64",
          "all_reduce sum, 15 x f64", "planted_calls.cpp:"}},
        {"forward", Verdict::failed}}},
      {"reduction_of_one_rank",
       small,
       forward(on_rank(1, averages, reduced)),
       {{"lockstep",
         Verdict::failed,
         1,
         "",
         {"rank 1 differs from the other members in reduction", "all_reduce avg"}}}},
      {"reduction_of_all_ranks",
       small,
       forward(averages),
       {{"ledger", Verdict::failed, 3, "", {"another reduction", "all_reduce avg"}},
        {"forward", Verdict::failed, 0, "", {"0.25"}},
        {"lockstep", Verdict::passed}}},
      {"dtype_of_one_rank",
       small,
       forward(on_rank(3, as_integers, reduced)),
       {{"lockstep",
         Verdict::failed,
         3,
         "",
         {"rank 3 differs from the other members in dtype", "15 x i64", "15 x f64"}}}},
      {"count_of_one_rank",
       small,
       forward(on_rank(0, one_element_less, reduced)),
       {{"lockstep",
         Verdict::failed,
         0,
         "",
         {"rank 0 differs from the other members in count", "14 x f64", "15 x f64"}}}},
      {"count_of_all_ranks",
       small,
       forward(in_halves),
       {{"ledger", Verdict::failed, 0, "", {"another count", "2 of 1 calls"}},
        {"forward", Verdict::passed},
        {"lockstep", Verdict::passed}}},
      {"root_of_one_rank",
       small,
       forward(on_rank(3, broadcast_from(1), broadcast_from(0))),
       {{"lockstep",
         Verdict::failed,
         3,
         "",
         {"rank 3 differs from the other members in root", "broadcast from member 1"}}}},
      {"missing_call",
       small,
       forward(on_rank(1, without_a_call, reduced)),
       {{"lockstep",
         Verdict::failed,
         -1,
         "",
         {"rank 1 left", "ranks 0, 2, 3 wait in call 1 of forward: all_reduce sum, 15 x f64"}}}},
      {"early_leaver",
       even,
       forward(on_rank(3, leaves_after_the_first, in_two_calls)),
       {{"lockstep",
         Verdict::failed,
         -1,
         "",
         {"rank 3 left forward after call 1; last: reduce_scatter sum, 20 x f64",
          "ranks 0, 1, 2 wait in call 2 of forward: all_gather, 5 x f64"}}}},
      {"extra_call",
       small,
       forward(and_a_barrier),
       {{"ledger", Verdict::failed, 0, "", {"met call 2 of forward", "barrier"}},
        {"forward", Verdict::passed}}},
      {"extra_call_of_one_rank",
       small,
       forward(on_rank(2, and_a_barrier, reduced)),
       {{"lockstep", Verdict::failed, 2, "", {"rank 2 waits in call 2 of forward: barrier"}}}},
      {"world_for_axis",
       "mapping_reduce tp=2 cp=2 axis=tp tokens=3 hidden=5",
       forward(over_the_world),
       {{"ledger", Verdict::failed, 0, "", {"another group", "world"}},
        {"forward", Verdict::failed}}},
      {"world_for_axis_on_one_rank",
       "mapping_reduce tp=2 cp=2 axis=tp tokens=3 hidden=5",
       forward(on_rank(3, over_the_world, reduced)),
       {{"lockstep",
         Verdict::failed,
         3,
         "",
         {"rank 3 waits in call 1 of forward: all_reduce sum, 15 x f64, world{0-3}"}}}},
  };
}

}  // namespace shardproof::planted
