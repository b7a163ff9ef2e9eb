#include "primitives/token_chunks.hpp"

#include <algorithm>

#include "primitives/linear.hpp"

namespace shardproof::primitives {

void TokenChunks::gather(Parallel& p, const View& own, const Rows& multiply) const {
  const int64_t n = own.shape[0];
  const View packed = p.workspace(own.dtype, own.shape);
  convert(own, packed);
  Turning come = rooms(p, own);
  Ticket under_way = start_gather(p, packed, run(p, n, 0), come.here);
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    p.tp.wait(under_way);
    if (chunk + 1 < p.chunks) under_way = start_gather(p, packed, run(p, n, chunk + 1), come.next);
    each_owner(p, n, run(p, n, chunk), come.here, multiply);
    come.turn();
  }
}

void TokenChunks::reduce(Parallel& p, const Rows& product, const View& sum) const {
  const int64_t n = sum.shape[0];
  Turning parts = rooms(p, sum);
  Ticket under_way{};
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    each_owner(p, n, run(p, n, chunk), parts.here, product);
    if (chunk > 0) p.tp.wait(under_way);
    under_way = start_reduce(p, parts.here, run(p, n, chunk), sum);
    parts.turn();
  }
  p.tp.wait(under_way);
}

TokenChunks::Run TokenChunks::run(const Parallel& p, int64_t n, int chunk) const {
  const int64_t least = n / p.chunks, longer = n % p.chunks;
  return {least * chunk + std::min<int64_t>(chunk, longer), least + (chunk < longer)};
}

int64_t TokenChunks::place(const Parallel&, int64_t n, const Run& at, int owner) const {
  return owner * n + at.first;
}

int TokenChunks::owners(const Parallel& p) const { return p.sp ? p.tp.size() : 1; }

View TokenChunks::filled(const Parallel& p, const View& room, const Run& at) const {
  return room.narrow(0, 0, owners(p) * at.rows);
}

void TokenChunks::each_owner(const Parallel& p, int64_t n, const Run& at, const View& room,
                             const Rows& rows) const {
  for (int owner = 0; owner < owners(p); ++owner)
    rows(place(p, n, at, owner), room.narrow(0, owner * at.rows, at.rows));
}

Turning TokenChunks::rooms(Parallel& p, const View& rows) const {
  const int64_t longest = run(p, rows.shape[0], 0).rows;
  return {p.rank, rows.dtype, with_extent(rows.shape, 0, owners(p) * longest)};
}

Ticket TokenChunks::start_gather(Parallel& p, const View& own, const Run& at,
                                 const View& room) const {
  return p.tp.start_all_gather(own.narrow(0, at.first, at.rows), filled(p, room, at));
}

Ticket TokenChunks::start_reduce(Parallel& p, const View& room, const Run& at,
                                 const View& sum) const {
  const View part = filled(p, room, at), to = sum.narrow(0, at.first, at.rows);
  return p.sp ? p.tp.start_reduce_scatter(part, to) : p.tp.start_all_reduce(part, to);
}

}  // namespace shardproof::primitives
