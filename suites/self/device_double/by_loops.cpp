#include <cstring>

#include "fixtures/dtype.hpp"
#include "oracle/digest/units.hpp"
#include "primitives/bodies.hpp"
#include "primitives/cuda/twin_bodies.hpp"
#include "primitives/serial.hpp"
#include "suites/self/device_double/work.hpp"

namespace shardproof::device_double {

using namespace primitives;

template <class Body>
void do_body(const Body& body) {
  run(body);
}
template <>
void do_body(const NormWithoutBarrier& body) {
  body.wide ? rows_without_barrier<double>(body) : rows_without_barrier<float>(body);
}
#define SHARDPROOF_DONE(Body) template void do_body(const Body&);
SHARDPROOF_BODIES(SHARDPROOF_DONE)
SHARDPROOF_TWIN_BODIES(SHARDPROOF_DONE)
#undef SHARDPROOF_DONE

// By a few threads one after the other, as a device's kernel shares the units among its own.
void do_digest(const void* memory, uint64_t elements, const shardproof_hash& hash, uint64_t first,
               DigestParts parts, shardproof_digest* sum) {
  constexpr uint64_t threads = 7;
  digest::Units u;
  digest::Units::of(hash, memory, elements, first, u);
  shardproof_digest own{}, there;
  uint64_t one[1] = {}, two[2] = {};
  for (uint64_t t = 0; t < threads; ++t) {
    if (parts == DigestParts::all) u.add(t, threads, own);
    if (parts == DigestParts::one_lane) u.add_lanes(t, threads, one);
    if (parts == DigestParts::two_lanes) u.add_lanes(t, threads, two);
  }
  own.lane[0] += one[0] + two[0], own.lane[1] += two[1];
  std::memcpy(&there, sum, sizeof there);
  shardproof_digest_add(&there, &own);
  std::memcpy(sum, &there, sizeof there);
}

void do_divide(void* memory, int64_t elements, int number, int ranks) {
  const DType dtype = DType(number);
  auto* x = static_cast<std::byte*>(memory);
  for (int64_t i = 0; i < elements; ++i, x += size_of(dtype)) {
    const double value = load(x, dtype);
    store(x, dtype, is_float(dtype) ? value / ranks : double(int64_t(value) / ranks));
  }
}

}  // namespace shardproof::device_double
