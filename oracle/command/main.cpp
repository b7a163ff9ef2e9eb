// The command with the families of this build. A program of your own adds its subjects:
//
//   auto registry = shardproof::all_families();
//   registry.add(shardproof::Subject{"mine", "linear_row", make_mine, {}});
//   return shardproof::main(argc, argv, std::move(registry));
#include "oracle/registry.hpp"

int main(int argc, char** argv) { return shardproof::main(argc, argv, shardproof::all_families()); }
