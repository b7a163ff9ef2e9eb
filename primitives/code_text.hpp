// What an executor's runtime says of a code of the calls in launch.hpp.
#pragma once

namespace shardproof::primitives::executor {

const char* text(int code);

}  // namespace shardproof::primitives::executor
