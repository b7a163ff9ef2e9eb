// The executor of the host: bodies in a serial loop, at once.
#include "primitives/launch.hpp"

#include <cstdlib>
#include <cstring>

#include "primitives/bodies.hpp"
#include "primitives/code_text.hpp"
#include "primitives/serial.hpp"

namespace shardproof::primitives::executor {

template <class Body>
int launch(const Body& body, void*) {
  run(body);
  return 0;
}

#define SHARDPROOF_RUN(Body) template int launch<Body>(const Body&, void*);
SHARDPROOF_BODIES(SHARDPROOF_RUN)
#undef SHARDPROOF_RUN

const char* text(int) { return "no memory"; }
bool on_device() { return false; }

int allocate(void** memory, size_t bytes, void*) {
  *memory = std::malloc(bytes ? bytes : 1);
  if (!*memory) return out_of_memory;
  std::memset(*memory, 0xFF, bytes);
  return 0;
}
int release(void* memory, void*) {
  std::free(memory);
  return 0;
}
int upload(void* to, const void* from, size_t bytes, void*) {
  std::memcpy(to, from, bytes);
  return 0;
}
int download(void* to, const void* from, size_t bytes, void*) {
  std::memcpy(to, from, bytes);
  return 0;
}

int order(void*, void*) { return 0; }
int pause(void*, int64_t) { return 0; }

}  // namespace shardproof::primitives::executor
