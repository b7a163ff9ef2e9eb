// What both linears share: numbers of the line, blocks and rows.
#include "primitives/linear.hpp"

#include "primitives/line.hpp"
#include "primitives/linear_line.hpp"
#include "primitives/rows.hpp"

namespace shardproof::primitives {
namespace {

bool overlaps(const Communicator& tp, const Case& line, const char* how) {
  return tp.size() > 1 && line.has("overlap") && line.text("overlap") == how;
}
int chunks_over(const Communicator& tp, const Case& line) {
  return overlaps(tp, line, "chunks") ? int(line.at("chunks")) : 1;
}

}  // namespace

Parallel::Parallel(Rank& r)
    : rank(r),
      tp(r.along(Axis::tp)),
      sp(r.line().has("sp") && r.line().on("sp")),
      ring(overlaps(tp, r.line(), "ring")),
      chunks(chunks_over(tp, r.line())),
      storage(r.line().dtype()),
      accumulate(accumulation_of(r.line())),
      wire(type_of_key(r.line(), "wire", storage)) {}

void TokenCalls::gather(Parallel& p, const View& own, const TokenChunks::Rows& multiply) const {
  if (!p.ring) return chunks_->gather(p, own, multiply);
  ring_->gather(p, own,
                [&](int owner, const View& block) { multiply(owner * block.shape[0], block); });
}

void TokenCalls::reduce(Parallel& p, const TokenChunks::Rows& product, const View& sum) const {
  if (!p.ring) return chunks_->reduce(p, product, sum);
  ring_->reduce(
      p, [&](int owner, const View& part) { product(owner * part.shape[0], part); }, sum);
}

View fresh_gradient(Parallel& p, const View& gradient) {
  return gradient.data ? p.workspace(p.accumulate, gradient.shape) : gradient;
}

View block_of(const Parallel& p, const View& whole, int dim, int owner) {
  const int64_t extent = whole.shape[size_t(dim)], block = extent / p.tp.size();
  if (extent % p.tp.size())
    throw Rejected("an extent that tp=" + std::to_string(p.tp.size()) + " divides",
                   std::to_string(extent), "choose a multiple");
  return whole.narrow(dim, block * owner, block);
}

View own_block(const Parallel& p, const View& whole, int dim) {
  return block_of(p, whole, dim, p.tp.rank());
}

std::vector<int64_t> with_extent(std::vector<int64_t> shape, int dim, int64_t extent) {
  shape[size_t(dim)] = extent;
  return shape;
}

std::vector<int64_t> rows_of_parts(const std::vector<int64_t>& parts, int p, int r) {
  std::vector<int64_t> rows;
  int64_t first = 0;
  for (int64_t part : parts) {
    const int64_t block = part / p;
    for (int64_t i = 0; i < block; ++i) rows.push_back(first + r * block + i);
    first += part;
  }
  return rows;
}

std::vector<int64_t> rows_of_line(const Case& line, int64_t rows, int p, int r) {
  return rows_of_parts(parts_of_line(line, rows), p, r);
}

View take_rows(Parallel& p, const View& whole, const std::vector<int64_t>& rows) {
  const View own = p.workspace(whole.dtype, with_extent(whole.shape, 0, int64_t(rows.size())));
  each_run(rows, [&](int64_t from, int64_t to, int64_t n) {
    convert(whole.narrow(0, from, n), own.narrow(0, to, n));
  });
  return own;
}

void put_rows(const View& own, const std::vector<int64_t>& rows, const View& whole) {
  set_zero(whole);
  each_run(rows, [&](int64_t to, int64_t from, int64_t n) {
    convert(own.narrow(0, from, n), whole.narrow(0, to, n));
  });
}

}  // namespace shardproof::primitives
