// All that the author of a kernel includes: Subject, Kernel, Rank, View, Communicator,
// all_families() and shardproof::main.
#pragma once
#include "oracle/registry.hpp"
#include "oracle/subject.hpp"
