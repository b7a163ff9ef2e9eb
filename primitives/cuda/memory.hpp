// Memory that is allocated and released in order of a stream.
#pragma once

namespace shardproof::primitives::cuda {

// Of what is released so much stays with the process; else every wait of the host gives all of it
// back to the device, and the next call or case asks for it again. Returns the runtime's code.
int keep_memory(int device);

}  // namespace shardproof::primitives::cuda
