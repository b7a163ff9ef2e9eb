#include <cstdio>
#include <cstdlib>

#include "oracle/cuda/divide.hpp"
#include "primitives/bodies.hpp"
#include "primitives/cuda/twin_bodies.hpp"
#include "suites/self/cuda_on_host/block.hpp"
#include "suites/self/device_double/work.hpp"

namespace shardproof {

namespace primitives::kernels_executor {
template <class Body>
int launch(const Body&, void* stream);
}

namespace device_double {
namespace {

// Each launch has its threads in another order: what depends on it differs between two calls.
void in_another_order() {
  static uint64_t launches = 0;
  cuda_on_host::set_schedule({cuda_on_host::Order::shuffled, ++launches});
}

// A kernel that does not end on a device, or ends it, ends the process.
void done(int code) {
  if (code == 0) return;
  std::fprintf(stderr, "code %d: %s\n", code, cuda_on_host::complaint().c_str());
  std::abort();
}

}  // namespace

template <class Body>
void do_body(const Body& body) {
  in_another_order();
  done(primitives::kernels_executor::launch(body, nullptr));
}
using namespace primitives;
#define SHARDPROOF_DONE(Body) template void do_body(const Body&);
SHARDPROOF_BODIES(SHARDPROOF_DONE)
SHARDPROOF_TWIN_BODIES(SHARDPROOF_DONE)
SHARDPROOF_DONE(NormWithoutBarrier)
#undef SHARDPROOF_DONE

void do_digest(const void* memory, uint64_t elements, const shardproof_hash& hash, uint64_t first,
               DigestParts parts, shardproof_digest* sum) {
  in_another_order();
  done(digest_on_device(memory, elements, hash, first, parts, sum, nullptr));
}
void do_divide(void* memory, int64_t elements, int dtype, int ranks) {
  in_another_order();
  done(divide(memory, elements, dtype, ranks, nullptr));
}

}  // namespace device_double
}  // namespace shardproof
